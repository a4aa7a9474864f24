"""Run seeds by hand: `python -m tests.model --seeds 500 [--off RULE]`, or replay `--seed N --trace`."""

from __future__ import annotations

import argparse
import sys
import time
from collections import Counter

from .faults import FAULTS_OF, plan
from .rules import RULE_NAMES, Rules
from .world import run_seed


def main() -> int:
    """Returns 1 if any seed failed."""
    parser = argparse.ArgumentParser(prog="python -m tests.model", description=__doc__)
    parser.add_argument("--seeds", type=int, default=500, help="how many seeds to run")
    parser.add_argument("--first", type=int, default=0, help="the first of them")
    parser.add_argument("--seed", type=int, help="run this one only")
    parser.add_argument("--off", choices=RULE_NAMES, help="run with this rule broken")
    parser.add_argument("--trace", action="store_true", help="print the schedule")
    parser.add_argument(
        "--table", action="store_true", help="break every rule in turn; print when each is caught"
    )
    chosen = parser.parse_args()
    if chosen.table:
        return _table(chosen.first, chosen.seeds)
    rules = Rules().without(chosen.off) if chosen.off else Rules()
    seeds = [chosen.seed] if chosen.seed is not None else range(chosen.first, chosen.first + chosen.seeds)
    began, kinds = time.perf_counter(), Counter[str]()
    for seed in seeds:
        failure = run_seed(seed, rules, print if chosen.trace else None, FAULTS_OF.get(chosen.off, plan))
        if failure is not None:
            kinds[failure.kind] += 1
            print(failure)
    print(f"{len(seeds)} seeds, {kinds.total()} failed {dict(kinds)}, {time.perf_counter() - began:.1f} s")
    return 1 if kinds else 0


def _table(first: int, seeds: int) -> int:
    """Markdown: each switch, the first seed that catches it, how it shows."""
    for rule in RULE_NAMES:
        for tried, seed in enumerate(range(first, first + seeds), 1):
            failure = run_seed(seed, Rules().without(rule), faults=FAULTS_OF.get(rule, plan))
            if failure is not None:
                print(f"| `{rule}` | {tried} | {failure.kind} |", flush=True)
                break
        else:
            print(f"| `{rule}` | not in {seeds} | |", flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
