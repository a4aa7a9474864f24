"""One process: its lifecycle, its supervisor, its memory and its run folder."""
