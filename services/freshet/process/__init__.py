"""One process: lifecycle, supervision, memory, run folder, tracing."""
