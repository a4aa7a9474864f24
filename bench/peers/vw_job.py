"""Vowpal Wabbit's file driver on the same ids and numbers as text: logistic regression, not the model.

For its samples/s alone. The wheel has no `vw` program; its Python API runs the same driver (parser thread and
learner thread in C++) on a file given with `-d`. `samples_per_s` is from text; `cached_samples_per_s` from
the binary cache that it makes of that file, whose making is not counted. `--batch` and `--precision` mean
nothing to it. The comparison of quality is `bench.versus_vw`.
"""

from __future__ import annotations

import string
import tempfile
import time
from pathlib import Path

from vowpalwabbit import Workspace

from bench.peers.job import Options, batches_of, parsed, serve

FLAGS = "--quiet --loss_function logistic -b 24 --adaptive --normalized --invariant"
THREADS = 2
"""A reader and a learner; it has no more."""


def write_text(options: Options, file: Path) -> int:
    """Write a namespace a field, and one for the numbers; returns the number of rows."""
    written = 0
    letters = string.ascii_lowercase
    with file.open("w") as lines:
        for batch in batches_of(options):
            labels = batch.labels.tolist()
            for ids, numbers, label in zip(batch.ids.tolist(), batch.dense.tolist(), labels, strict=True):
                fields = " ".join([f"|{letter} {id_}" for letter, id_ in zip(letters, ids, strict=True)])
                values = " ".join([f"{i}:{number:.6g}" for i, number in enumerate(numbers)])
                lines.write(f"{1 if label else -1} {fields} |N {values}\n")
            written += len(labels)
    return written


def driven(words: str) -> float:
    """Run a new learner over a file; returns its progressive mean logloss."""
    workspace = Workspace(f"{FLAGS} {words}")
    loss = workspace.get_sum_loss() / workspace.get_weighted_examples()
    workspace.finish()
    return float(loss)


def timed(words: str, seconds: float) -> tuple[int, float, float, float]:
    """Run passes for `seconds`; returns their number, seconds, CPU seconds and logloss."""
    passes = 0
    began, cpu_began = time.perf_counter(), time.process_time()
    while time.perf_counter() - began < seconds:
        loss = driven(words)
        passes += 1
    return passes, time.perf_counter() - began, time.process_time() - cpu_began, loss


def main() -> None:
    """Write the text and its cache, then measure each for half of the time."""
    options = parsed()
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "rows"
        rows = write_text(options, file)
        cache = f"-d {file} --cache_file {file}.cache"
        driven(f"{cache} -k")

        def measure() -> dict[str, float]:
            passes, took, cpu, loss = timed(f"-d {file}", options.seconds / 2)
            from_cache, cache_took, _, _ = timed(cache, options.seconds / 2)
            return {
                "samples_per_s": passes * rows / took,
                "samples_per_cpu_s": passes * rows / cpu,
                "cached_samples_per_s": from_cache * rows / cache_took,
                "logloss": loss,
                "batches": passes * rows,
                "threads": THREADS,
            }

        serve(measure, options.wait)


if __name__ == "__main__":
    main()
