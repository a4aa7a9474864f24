"""Random records and mutants, read by freshet and by fastavro: `python -m tests.fuzz --records 1000000`.

`ops/fuzz-avro` runs it with the native core under the address and undefined-behaviour sanitizers.
"""

from __future__ import annotations

import argparse
import importlib.util
import sys
import time
from collections import Counter
from pathlib import Path

RECORDS_PER_SCHEMA = 250
RECORDS_PER_PAIR = 12


def use_native(path: Path) -> None:
    """Have freshet use another build of its native core; before anything imports it."""
    spec = importlib.util.spec_from_file_location("freshet._native", path)
    if spec is None or spec.loader is None:
        raise SystemExit(f"{path} is no extension module")
    module = importlib.util.module_from_spec(spec)
    sys.modules["freshet._native"] = module
    spec.loader.exec_module(module)


def fuzz_pairs(pairs: int, seed: int, first: int) -> None:
    """Compare schema resolution with fastavro's, and say what was seen."""
    from tests.fuzz.compare import Disagreement  # noqa: PLC0415 - uses the native core
    from tests.fuzz.pairs import compare_pair  # noqa: PLC0415

    start, counts = time.monotonic(), Counter[str]()
    for pair in range(first, first + pairs):
        try:
            counts += compare_pair(f"{seed}:{pair}", RECORDS_PER_PAIR)
        except Disagreement as e:
            raise SystemExit(f"seed {seed}, pair {pair}\n{e}") from None
    print(f"{pairs} pairs of schemas from {first} on, seed {seed}; records:")
    for what, n in counts.most_common():
        print(f"  {n:9} {what}")
    print(f"no disagreement but those listed in tests/fuzz/pairs.py, in {time.monotonic() - start:.0f} s")


def main() -> None:
    """Fuzz, and say what was seen."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--records", type=int, default=100_000)
    parser.add_argument(
        "--pairs", type=int, help="instead: pairs of a writer's and a reader's schema, some records of each"
    )
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument(
        "--first", type=int, default=0, help="number of the first schema: to go on, or to see one again"
    )
    parser.add_argument("--native", type=Path, help="a build of the native core other than the package's")
    options = parser.parse_args()
    if options.native:
        use_native(options.native)
    if options.pairs:
        fuzz_pairs(options.pairs, options.seed, options.first)
        return
    from tests.fuzz.compare import Disagreement, compare_schema  # noqa: PLC0415 - uses the native core

    start, counts, schema = time.monotonic(), Counter[str](), options.first
    while counts.total() < options.records:
        try:
            counts += compare_schema(f"{options.seed}:{schema}", RECORDS_PER_SCHEMA)
        except Disagreement as e:
            raise SystemExit(f"seed {options.seed}, schema {schema}\n{e}") from None
        schema += 1
    last = schema - 1
    print(f"{counts.total()} records of schemas {options.first} to {last}, seed {options.seed}")
    for what, n in counts.most_common():
        print(f"  {n:9} {what}")
    print(f"no disagreement, in {time.monotonic() - start:.0f} s")


if __name__ == "__main__":
    main()
