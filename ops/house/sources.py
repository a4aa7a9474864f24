"""The files of the project, and the prose in each of them."""

from __future__ import annotations

import ast
import gc
import os
import re
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[2]
PACKAGE = "services/freshet/"
LEFT_OUT = {"build", "dist", "freshet-run", "freshet-demo", "__pycache__"}
"""Folders of build outputs and runs, as in .gitignore. Folders that begin with a dot are left out, too."""

PYTHON, CPP, MARKDOWN = (".py", ".pyi"), (".cpp", ".hpp", ".h"), (".md",)

LOG_METHODS = {"debug", "info", "warning", "error", "exception", "critical"}
LOGGER = re.compile(r"_*log(ger)?", re.IGNORECASE)
DESCRIPTORS = {"Metric", "option"}
"""Callables that take help texts: the help of a metric, the meaning of an option."""


@dataclass(frozen=True, slots=True)
class Text:
    """A piece of prose of a file."""

    kind: str  # "docstring", "comment", "log message", "error text", "help", "test name" or "page"
    line: int  # of its first character, from 1
    text: str
    spans_lines: bool = True  # a line break in `text` is one in the file

    def line_of(self, offset: int) -> int:
        """Return the line of a character of the text."""
        return self.line + (self.text.count("\n", 0, offset) if self.spans_lines else 0)


def project_files(root: Path = ROOT) -> list[str]:
    """Return the paths of the Python, C++ and Markdown files below `root`, relative to it, sorted."""
    paths = []
    for folder, folders, files in os.walk(root):
        folders[:] = [name for name in folders if name not in LEFT_OUT and not name.startswith(".")]
        relative = Path(folder).relative_to(root)
        paths += [(relative / file).as_posix() for file in files if file.endswith(PYTHON + CPP + MARKDOWN)]
    return sorted(paths)


@contextmanager
def collector_paused() -> Iterator[None]:
    """Pause garbage collection, which scans each growing syntax tree: parsing is four times as fast."""
    gc.disable()
    try:
        yield
    finally:
        gc.enable()


def texts_of(path: str, source: str, tree: ast.Module | None = None) -> list[Text]:
    """Return the prose of a file; `tree` is its syntax tree if it is Python and already parsed."""
    if path.endswith(MARKDOWN):
        return [Text("page", 1, without_code(source))]
    if path.endswith(CPP):
        return list(cpp_comments(source))
    nodes = list(ast.walk(tree or ast.parse(source)))
    return [*comments(source, nodes), *strings(nodes, is_test=path.startswith("tests/"))]


def without_code(markdown: str) -> str:
    """Blank the fenced blocks and the targets of links. Lines stay where they are."""
    fenced = re.compile(r"^( *)(```+|~~~+).*?(^ *\2|\Z)", re.MULTILINE | re.DOTALL)
    text = fenced.sub(lambda found: "\n" * found[0].count("\n"), markdown)
    return re.sub(r"\]\([^)\s]*\)", "]", text)


def cpp_comments(source: str) -> Iterator[Text]:
    """Yield the comments of a C++ file. Comments on consecutive lines are one text."""
    tokens = re.compile(r'"(?:\\.|[^"\\\n])*"|//[^\n]*(?:\n[ \t]*//[^\n]*)*|/\*.*?\*/', re.DOTALL)
    for found in tokens.finditer(source):
        if not found[0].startswith('"'):
            text = re.sub(r"^[ \t]*(//+|/\*+|\*+/?)", "", found[0], flags=re.MULTILINE)
            yield Text("comment", source.count("\n", 0, found.start()) + 1, text)


def comments(source: str, nodes: list[ast.AST]) -> Iterator[Text]:
    """Yield the comments of a Python file. Comments that stand alone on consecutive lines are one text.

    A `#` is a comment if no string literal covers it, and the syntax tree finds that faster than a tokenizer.
    """
    lines = source.splitlines()
    marked = {number for number, line in enumerate(lines, 1) if "#" in line}
    covered: dict[int, list[tuple[int, int]]] = {}
    for node in nodes:
        if isinstance(node, ast.JoinedStr) or (
            isinstance(node, ast.Constant) and isinstance(node.value, str | bytes)
        ):
            end_line, end_column = node.end_lineno or node.lineno, node.end_col_offset or 0
            for number in marked.intersection(range(node.lineno, end_line + 1)):
                start = node.col_offset if number == node.lineno else 0
                covered.setdefault(number, []).append((start, end_column if number == end_line else 10**9))
    block: list[str] = []
    first = 0
    for number in sorted(marked):
        line = lines[number - 1].encode()
        at = line.find(b"#")
        while any(start <= at < end for start, end in covered.get(number, [])):
            at = line.find(b"#", at + 1)
        if at < 0:
            continue
        alone = not line[:at].strip()
        if block and not (alone and number == first + len(block)):
            yield Text("comment", first, "\n".join(block))
            block = []
        if not block:
            first = number
        block.append(line[at:].decode().lstrip("#! "))
        if not alone:
            yield Text("comment", first, block.pop())
    if block:
        yield Text("comment", first, "\n".join(block))


def strings(nodes: list[ast.AST], *, is_test: bool) -> Iterator[Text]:
    """Yield docstrings, log messages, texts of raised errors, help texts, and in tests the names of tests."""
    for node in nodes:
        match node:
            case ast.Module() | ast.ClassDef() | ast.FunctionDef() | ast.AsyncFunctionDef():
                yield from docstrings(node)
                if is_test and isinstance(node, ast.FunctionDef) and node.name.startswith("test_"):
                    yield Text("test name", node.lineno, node.name.removeprefix("test_").replace("_", " "))
            case ast.Call(func=ast.Attribute(attr=method, value=target), args=[message, *_]):
                if method in LOG_METHODS and LOGGER.fullmatch(name_of(target)):
                    yield from literals("log message", message)
            case ast.Call(func=function) if name_of(function) in DESCRIPTORS:
                described = [text for part in [*node.args, *node.keywords] for text in literals("help", part)]
                yield from (text for text in described if " " in text.text)
            case ast.Raise(exc=ast.expr() as error):
                yield from literals("error text", error)
            case _:
                pass


def docstrings(owner: ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef) -> Iterator[Text]:
    """Yield the strings that are statements: the docstring of the owner and those of its constants."""
    for statement in owner.body:
        match statement:
            case ast.Expr(value=ast.Constant(value=str() as text)):
                yield Text("docstring", statement.lineno, text)
            case _:
                pass


def literals(kind: str, root: ast.AST) -> Iterator[Text]:
    """Yield the string literals below a node. The values of an f-string are shown as …."""
    match root:
        case ast.JoinedStr():
            parts = [part.value if isinstance(part, ast.Constant) else "…" for part in root.values]
            yield Text(kind, root.lineno, "".join(map(str, parts)), spans_lines=False)
        case ast.Constant(value=str() as text):
            yield Text(kind, root.lineno, text, spans_lines=False)
        case _:
            for child in ast.iter_child_nodes(root):
                yield from literals(kind, child)


def name_of(node: ast.AST) -> str:
    """Return the last part of a dotted name, or an empty string for another expression."""
    match node:
        case ast.Name(id=name) | ast.Attribute(attr=name):
            return name
        case _:
            return ""
