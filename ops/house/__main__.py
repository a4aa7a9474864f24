"""`python -m ops.house`: measure the code base, look for forbidden words, and fail where either got worse.

--list             print the places that each measure counts
--json             print the measures as JSON
--paths            measure the paths instead, with running services (half a minute)
--lower            lower the ceilings in limits.toml to what was measured
--write-not-done   list the files with forbidden words in not_done.txt anew
"""

from __future__ import annotations

import argparse
import ast
import json
import os
import sys
from collections.abc import Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor

from ops.house import limits, words
from ops.house.limits import Measure
from ops.house.sources import PACKAGE, PYTHON, ROOT, collector_paused, project_files, texts_of
from ops.house.static import Facts, facts_of, measures_of


def read_file(path: str, vocabulary: words.Vocabulary) -> tuple[Facts | None, list[words.Finding]]:
    """Return the facts of a file, if it is a Python file of the package, and its forbidden words."""
    source = (ROOT / path).read_text(encoding="utf-8")
    with collector_paused():
        tree = ast.parse(source, path) if path.endswith(PYTHON) else None
        texts = texts_of(path, source, tree)
        measured = tree is not None and path.startswith(PACKAGE) and path.endswith(".py")
        facts = facts_of(path, source, tree, texts) if tree is not None and measured else None
        return facts, vocabulary.findings(path, texts)


def read_files() -> tuple[list[Facts], dict[str, list[words.Finding]]]:
    """Read all files of the project, on all processors."""
    paths, vocabulary = project_files(), words.Vocabulary.load()
    with ProcessPoolExecutor(os.cpu_count()) as pool:
        found = list(pool.map(read_file, paths, [vocabulary] * len(paths), chunksize=40))
    facts = [one for one, _ in found if one is not None]
    return facts, dict(zip(paths, (findings for _, findings in found), strict=True))


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
    """Return the exit status: 1 if a measure got worse or a file that is done has a forbidden word."""
    parser = argparse.ArgumentParser("python -m ops.house", description=__doc__, add_help=True)
    for flag in ("list", "json", "paths", "lower", "write-not-done"):
        parser.add_argument(f"--{flag}", action="store_true")
    options = parser.parse_args(arguments)
    bounds = limits.read_limits()
    if options.paths:
        from ops.house.paths import measure_paths

        failures = report(measure_paths(), bounds, options)
    else:
        facts, findings = read_files()
        failures = report(measures_of(facts), bounds, options)
        if options.write_not_done:
            words.write_not_done(findings)
        failures += words.complaints(findings, words.read_not_done())
    print(*failures, sep="\n", end="\n" if failures else "", file=sys.stderr)
    return 1 if failures else 0


if __name__ == "__main__":
    sys.exit(main())
