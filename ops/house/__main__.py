"""`python -m ops.house`: measure the code base, look for forbidden words, and fail where either got worse.

--list    print the places that each measure counts
--json    print the measures as JSON
--paths   measure the paths instead, with running services (half a minute)
--lower   lower the ceilings in limits.toml to what was measured
"""

from __future__ import annotations

import argparse
import ast
import json
import os
import sys
from collections.abc import Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass

from ops.house import limits, names, static, words
from ops.house.limits import Measure
from ops.house.names import Names, names_of
from ops.house.sources import PACKAGE, PYTHON, ROOT, collector_paused, project_files, texts_of
from ops.house.static import Facts, facts_of


@dataclass(frozen=True, slots=True)
class Contents:
    """A file as the measures see it."""

    facts: Facts | None  # of a Python file of the package
    names: Names | None  # of a Python file
    findings: list[words.Finding]


def read_file(path: str, vocabulary: words.Vocabulary) -> Contents:
    """Return the facts, names and forbidden words of a file."""
    source = (ROOT / path).read_text(encoding="utf-8")
    with collector_paused():
        tree = ast.parse(source, path) if path.endswith(PYTHON) else None
        texts = texts_of(path, source, tree)
        measured = tree is not None and path.startswith(PACKAGE) and path.endswith(".py")
        facts = facts_of(path, source, tree, texts) if tree is not None and measured else None
        used = names_of(path, list(ast.walk(tree))) if tree is not None else None
        return Contents(facts, used, vocabulary.findings(path, texts))


def read_files() -> tuple[list[Measure], dict[str, list[words.Finding]]]:
    """Return the measures and forbidden words of all files of the project, read on all processors."""
    paths, vocabulary = project_files(), words.Vocabulary.load()
    with ProcessPoolExecutor(os.cpu_count()) as pool:
        found = list(pool.map(read_file, paths, [vocabulary] * len(paths), chunksize=40))
    measures = [
        *static.measures_of([one.facts for one in found if one.facts is not None]),
        *names.measures_of([one.names for one in found if one.names is not None]),
    ]
    return measures, dict(zip(paths, (one.findings for one in found), strict=True))


def report(
    measures: Sequence[Measure], bounds: Mapping[str, limits.Limit], options: argparse.Namespace
) -> list[str]:
    """Print the measures, with `--lower` lower their ceilings; returns a line for each that got worse."""
    failures = limits.worse(bounds, measures)
    if options.lower:
        bounds = limits.lowered(bounds, measures)
        limits.write_limits(bounds)
    if options.json:
        print(
            json.dumps({one.name: figures(one, bounds[one.name], options.list) for one in measures}, indent=2)
        )
        return failures
    print(limits.table(bounds, measures))
    if options.list:
        for one in measures:
            print(f"\n{one.name}", *one.items, sep="\n  ")
    return failures


def figures(measure: Measure, bound: limits.Limit, with_items: bool) -> dict[str, object]:
    """Return a measure for JSON."""
    listed = {"items": list(measure.items)} if with_items else {}
    return {"now": measure.now, "ceiling": bound.ceiling, "limit": bound.limit, **listed}


def main(arguments: Sequence[str] | None = None) -> int:
    """Return the exit status: 1 if a measure got worse or a file has a forbidden word."""
    parser = argparse.ArgumentParser("python -m ops.house", description=__doc__, add_help=True)
    for flag in ("list", "json", "paths", "lower"):
        parser.add_argument(f"--{flag}", action="store_true")
    options = parser.parse_args(arguments)
    bounds = limits.read_limits()
    if options.paths:
        from ops.house.paths import measure_paths

        failures = report(measure_paths(), bounds, options)
    else:
        measures, findings = read_files()
        failures = report(measures, bounds, options)
        failures += [str(one) for _, found in sorted(findings.items()) for one in found]
    print(*failures, sep="\n", end="\n" if failures else "", file=sys.stderr)
    return 1 if failures else 0


if __name__ == "__main__":
    sys.exit(main())
