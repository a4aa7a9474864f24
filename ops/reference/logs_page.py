"""What services log: the keys, and every message with those it brings, read from the code."""

from __future__ import annotations

import ast
from collections import defaultdict
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from freshet.observability.log_keys import ALWAYS, KEYS, SOMETIMES
from ops.reference.markdown import code, escaped, grid, header

SOURCE = Path(__file__).parents[2] / "services" / "freshet"

LEVELS = ("error", "warning", "info", "debug")
LOGGERS = ("log", "_log", "logger")

INTRO = """\
A service writes to standard error, a JSON object a line or text for people
([how to read them](../operations.md#logs)). The same thing has the same key in every service.
"""

ALWAYS_HEAD = "\n## In every line\n"
SOMETIMES_HEAD = "\n## Where they apply\n"
KEYS_HEAD = "\n## What a line is about, and what happened\n"
MESSAGES_HEAD = """
## Messages

Every message of freshet, the most severe first. Libraries log messages of their own, under their names in
`logger`.
"""

KEYS_OF = {"exc_info": "exception"}


@dataclass(frozen=True, slots=True)
class Call:
    """One call that logs."""

    where: str  # file, relative to the package
    line: int
    level: str
    message: str  # empty where it is no literal
    keys: tuple[str, ...]
    unknown: bool = False  # whether keys come from a mapping that is not written there

    @property
    def part(self) -> str:
        """The package that says it."""
        parts = self.where.split("/")
        return f"{parts[0]}.{parts[1]}" if parts[0] in {"seams", "testing"} else parts[0]


@cache
def calls(source: Path = SOURCE) -> tuple[Call, ...]:
    """Every call that logs, in the order of files and lines."""
    found: list[Call] = []
    for path in sorted(source.rglob("*.py")):
        where = path.relative_to(source).as_posix()
        found += _calls(ast.parse(path.read_text(encoding="utf-8")), where)
    return tuple(found)


def _calls(tree: ast.Module, where: str) -> Iterator[Call]:
    mappings = _mappings(tree)
    for node in ast.walk(tree):
        if not (isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute)):
            continue
        if node.func.attr not in {*LEVELS, "exception", "critical", "warn", "msg", "fatal", "log"}:
            continue
        if not _is_logger(node.func.value):
            continue
        first = node.args[0] if node.args else None
        message = first.value if isinstance(first, ast.Constant) and isinstance(first.value, str) else ""
        keys: list[str] = []
        unknown = False
        for keyword in node.keywords:
            if keyword.arg is not None:
                keys.append(keyword.arg)
                continue
            of = _keys_of(keyword.value, mappings)
            unknown |= of is None
            keys += of or []
        yield Call(where, node.lineno, node.func.attr, message, tuple(keys), unknown)


def _is_logger(node: ast.expr) -> bool:
    if isinstance(node, ast.Name):
        return node.id in LOGGERS
    return isinstance(node, ast.Call) and ast.unparse(node.func) == "structlog.get_logger"


def _mappings(tree: ast.Module) -> dict[str, list[str]]:
    """Names that stand for a mapping which is written out."""
    found = {}
    for node in ast.walk(tree):
        if isinstance(node, ast.Assign) and isinstance(node.value, ast.Dict):
            keys = _keys_of(node.value, {})
            for target in node.targets:
                if isinstance(target, ast.Name) and keys is not None:
                    found[target.id] = keys
    return found


def _keys_of(node: ast.expr, mappings: Mapping[str, list[str]]) -> list[str] | None:
    if isinstance(node, ast.Name):
        return mappings.get(node.id)
    if isinstance(node, ast.IfExp):
        parts = [_keys_of(node.body, mappings), _keys_of(node.orelse, mappings)]
        return None if None in parts else [key for part in parts for key in part or []]
    if isinstance(node, ast.Dict) and all(isinstance(key, ast.Constant) for key in node.keys):
        return [str(key.value) for key in node.keys if isinstance(key, ast.Constant)]
    return None


def page() -> str:
    """The whole page."""
    said: dict[str, list[Call]] = defaultdict(list)
    for call in calls():
        said[call.part].append(call)
    lines = [header("Logs", "services/freshet/observability/log_keys.py, or the call that logs"), INTRO]
    for head, keys in ((ALWAYS_HEAD, ALWAYS), (SOMETIMES_HEAD, SOMETIMES), (KEYS_HEAD, KEYS)):
        rows = [(code(key), escaped(meaning)) for key, meaning in keys.items() if key not in KEYS_OF]
        lines += [head, *grid(rows, ("key", "meaning"))]
    lines.append(MESSAGES_HEAD)
    for part in sorted(said):
        one = sorted({(LEVELS.index(c.level), c.message, c.keys) for c in said[part] if c.message})
        told = [(LEVELS[level], escaped(text), _names(keys)) for level, text, keys in one]
        lines += [f"### {part}\n", *grid(told, ("level", "message", "keys")), ""]
    return "\n".join(lines).rstrip() + "\n"


def _names(keys: tuple[str, ...]) -> str:
    return ", ".join(code(KEYS_OF.get(key, key)) for key in dict.fromkeys(keys))
