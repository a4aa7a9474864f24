"""Names across borders: helpers that tests import, private names of dependencies; and long names of tests."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import PurePosixPath

from ops.house.limits import Measure
from ops.house.sources import ROOT

LONGEST_TEST_NAME = 60
SHARED_HELPERS = ("tests/fixtures", "tests/servers")
OWN_PACKAGES = {"freshet", "tests", "bench", "ops", "examples"}

DOCUMENTED = re.compile(r"os\._exit|_thread(\..*)?|confluent_kafka\.KafkaError\._[A-Z_]+")
"""Names with an underscore that their documentation lists as public."""

IDENTIFIER = re.compile(r"\w+")


@dataclass(slots=True)
class Names:
    """The places of one file that count."""

    borrowed: list[str] = field(default_factory=list)  # "path:line module"
    private: list[str] = field(default_factory=list)  # "path:line name"
    long: list[str] = field(default_factory=list)  # "path:line name (characters)"


def names_of(path: str, nodes: Sequence[ast.AST]) -> Names:
    """Collect the places of a Python file; `nodes` are those of its syntax tree."""
    found = Names()
    bound: dict[str, str] = {}  # names in the file -> what they are of dependencies
    for node in nodes:
        match node:
            case ast.Import() | ast.ImportFrom():
                imports = list(imported(path, node))
                borrowed = [what for _, _, what in imports if is_borrowed(path, what)]
                found.borrowed += [f"{path}:{node.lineno} {what}" for what in borrowed[:1]]
                for name, bound_to, what in imports:
                    if what.partition(".")[0] not in OWN_PACKAGES:
                        bound[name] = bound_to
                        if is_private(what):
                            found.private.append(f"{path}:{node.lineno} {what}")
            case ast.FunctionDef(name=name) if name.startswith("test_") and len(name) > LONGEST_TEST_NAME:
                if is_test(path):
                    found.long.append(f"{path}:{node.lineno} {name} ({len(name)})")
            case _:
                pass
    for node in nodes:
        for whole in private_uses(node, bound):
            found.private.append(f"{path}:{getattr(node, 'lineno', 0)} {whole}")
    return found


def imported(path: str, node: ast.Import | ast.ImportFrom) -> Iterator[tuple[str, str, str]]:
    """Yield (name in the file, what the name is bound to, what is imported) of a statement."""
    for one in node.names:
        if isinstance(node, ast.Import):
            first = one.name.partition(".")[0]
            yield one.asname or first, one.name if one.asname else first, one.name
        else:
            package = PurePosixPath(path).parts[: -node.level] if node.level else ()
            whole = ".".join(filter(None, [*package, node.module, one.name]))
            yield one.asname or one.name, whole, whole


def is_borrowed(path: str, what: str) -> bool:
    """Whether a file imports a test module or conftest, or a helper of tests in another directory.

    Directories of which one holds the other may share; `SHARED_HELPERS` serve all.
    """
    parts = what.split(".")
    if parts[0] != "tests":
        return False
    if any(part == "conftest" or part.startswith("test_") for part in parts):
        return True
    if not is_module(parts):
        parts.pop()
    folder, here = PurePosixPath(*parts[:-1]), PurePosixPath(path).parent
    related = here.is_relative_to(folder) or (folder.is_relative_to(here) and here.parts != ("tests",))
    return not related and str(folder) not in SHARED_HELPERS


def is_module(parts: Sequence[str]) -> bool:
    """Whether a dotted name of the project is a module or a package."""
    place = ROOT.joinpath(*parts)
    return place.is_dir() or place.with_suffix(".py").is_file()


def is_test(path: str) -> bool:
    """Whether pytest collects a file."""
    return path.startswith("tests/") and PurePosixPath(path).name.startswith("test_")


def private_uses(node: ast.AST, bound: dict[str, str]) -> Iterator[str]:
    """Yield the private name of a dependency that an expression reads, sets or patches."""
    match node:
        case ast.Attribute(value=value, attr=name):
            pairs = [(value, name)]
        case ast.Call(func=ast.Name(id="getattr" | "setattr") | ast.Attribute(attr="setattr"), args=args):
            pairs = [
                (target, name.value)
                for target, name in pairwise(args)
                if isinstance(name, ast.Constant) and isinstance(name.value, str)
            ]
        case _:
            pairs = []
    for target, name in pairs:
        if name.startswith("_") and (first := IDENTIFIER.match(ast.unparse(target))) and first[0] in bound:
            whole = f"{bound[first[0]]}{first.string[first.end() :]}.{name}"
            if is_private(whole):
                yield whole


def is_private(what: str) -> bool:
    """Whether a dotted name has a part that begins with one underscore, and is not documented as public."""
    return bool(re.search(r"(^|\.)_(?!_)", what)) and not DOCUMENTED.fullmatch(what)


def measures_of(names: Sequence[Names]) -> list[Measure]:
    """Sum the places of all files."""
    borrowed = [place for one in names for place in one.borrowed]
    private = [place for one in names for place in one.private]
    long = [place for one in names for place in one.long]
    return [
        Measure("imports of test modules, or of helpers of another directory", len(borrowed), borrowed),
        Measure("private names of dependencies", len(private), private),
        Measure(f"test names of more than {LONGEST_TEST_NAME} characters", len(long), long),
    ]
