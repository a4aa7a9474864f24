"""FBGEMM's CPU kernels alone: lookups, and backward with update, in unique rows a second.

    python -m bench.peers.fbgemm_kernels_job [--resident 20000000] [--unique 46000] [--tables 1]
        [--index int64] [--batches 20] [--threads 2] [--wait]

Prints one line of JSON (with `--wait`, one for each line on standard input):
{"lookups_per_s": ..., "updates_per_s": ...}. `resident` and `unique` rows are over all tables. Ids of a batch
are unique, drawn uniformly and in no order, like the keys of a table by key.
"""

from __future__ import annotations

import argparse
import time

import numpy as np
import torch

from bench.peers.fbgemm_tables import tables
from bench.peers.job import serve

DIM = 16


class Kernels:
    """Batches over tables of `resident` rows in all."""

    def __init__(self, resident: int, unique: int, count: int, batches: int, index: torch.dtype) -> None:
        self.rows = tables(count, resident // count, DIM, index)
        rng = np.random.default_rng(0)
        each = unique // count
        self.ids = []
        for _ in range(batches):
            drawn = [_distinct(rng, resident // count, each) for _ in range(count)]
            self.ids.append(torch.from_numpy(np.concatenate(drawn)).to(index))
        self.ends = torch.arange(each * count + 1, dtype=index)
        self.gradients = torch.full((each, DIM * count), 1e-3)

    def measured(self) -> dict[str, float]:
        """Look all batches up without gradients; then look up and step each, of which the step is timed."""
        rows = len(self.ids) * (len(self.ends) - 1)
        began = time.perf_counter()
        with torch.no_grad():
            for ids in self.ids:
                self.rows(ids, self.ends)
        lookups = time.perf_counter() - began
        updates = 0.0
        for ids in self.ids:
            out = self.rows(ids, self.ends)
            began = time.perf_counter()
            out.backward(self.gradients)
            updates += time.perf_counter() - began
        return {"lookups_per_s": rows / lookups, "updates_per_s": rows / updates}


def _distinct(rng: np.random.Generator, below: int, count: int) -> np.ndarray[tuple[int], np.dtype[np.int64]]:
    """Draw `count` different numbers, in random order."""
    found = np.unique(rng.integers(0, below, count + count // 4 + 16))
    if len(found) < count:
        raise SystemExit(f"{count} unique ids of {below}: pass more resident rows")
    return rng.permutation(found)[:count]


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--resident", type=int, default=20_000_000)
    parser.add_argument("--unique", type=int, default=46_000)
    parser.add_argument("--tables", type=int, default=1)
    parser.add_argument("--index", choices=("int32", "int64"), default="int64")
    parser.add_argument("--batches", type=int, default=20)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--wait", action="store_true")
    options = parser.parse_args()
    torch.manual_seed(0)
    torch.set_num_threads(options.threads)
    index = torch.int64 if options.index == "int64" else torch.int32
    kernels = Kernels(options.resident, options.unique, options.tables, options.batches, index)
    kernels.measured()
    serve(kernels.measured, options.wait)


if __name__ == "__main__":
    main()
