"""The Python API: public names with their signatures and docstrings, read from the source."""

from __future__ import annotations

import ast
import inspect
import re
import textwrap
from collections.abc import Iterator
from dataclasses import dataclass, is_dataclass
from importlib import import_module
from types import FunctionType
from typing import Any

import freshet
from freshet.adapters import BUILT_IN
from ops.reference.markdown import code, escaped, first_paragraph, grid, header

__all__ = ["page"]

INTRO = """\
What is not on this page is not public and may change. Names of `freshet` are imported when they are first
used, so that `import freshet` loads neither torch nor numpy. Errors are in [errors.md](errors.md).
"""


@dataclass(frozen=True, slots=True)
class Part:
    """A section of the page: the names of some modules."""

    title: str
    about: str
    modules: tuple[str, ...]


PARTS = (
    Part("Around these", "What the names above take and give.", ("freshet.client", "freshet.apps.local")),
    Part(
        "Models of your own",
        '`kind = "package.module:Class"` in the spec names a subclass of `freshet.Model`.',
        ("freshet.model.custom",),
    ),
    Part(
        "Protocols",
        "freshet meets the outside in five protocols. Those that store are found by the scheme of a URL, "
        "through entry points; [extending](../extending.md#a-storage-adapter) says how to write one.",
        (
            "freshet.log",
            "freshet.rows.store",
            "freshet.versions",
            "freshet.rows.service",
            "freshet.batches.stream",
        ),
    ),
    Part(
        "What adapters take",
        "Columns of records, packed rows, and what all version stores share.",
        ("freshet.types", "freshet.tables.runs", "freshet.versions.weights"),
    ),
    Part(
        "Testing",
        "Contract suites that an adapter passes by subclassing in a test file of its own, and what scripts "
        "time and faults.",
        (
            "freshet.testing.contracts.eventlog",
            "freshet.testing.contracts.rowstore",
            "freshet.testing.contracts.versions",
            "freshet.testing.contracts.rowservice",
            "freshet.testing.contracts.batches",
            "freshet.testing.clock",
            "freshet.testing.faults",
        ),
    ),
)

GROUPS = {
    "freshet.eventlog": "scheme of a log's URL -> `open_url(url) -> EventLog`",
    "freshet.rowstore": "scheme of a row store's URL -> `open_url(url) -> RowStore`",
    "freshet.versions": "scheme of a version store's URL -> `open_url(url) -> VersionStore`",
    "freshet.transforms": "name of a transform -> a function of a column, or a `freshet.Transform`",
}


def page() -> str:
    """The whole page."""
    return re.sub(r"\n{3,}", "\n\n", "\n".join(_page())) + "\n"


def _page() -> Iterator[str]:
    yield header("Python API", "the docstrings") + "\n" + INTRO + "\n## freshet\n"
    names = {name: getattr(freshet, name) for name in freshet.__all__}
    yield from grid([(f"[`{n}`](#{n.lower()})", escaped(first_paragraph(v))) for n, v in names.items()], HEAD)
    for name, value in names.items():
        yield from _described(name, value)
    told = set(map(id, names.values()))
    for part in PARTS:
        yield f"\n## {part.title}\n\n{part.about}\n"
        for module_name in part.modules:
            module = import_module(module_name)
            new = [n for n in module.__all__ if id(getattr(module, n)) not in told]
            if new:
                yield f"\nFrom `{module_name}`:\n"
            for name in new:
                told.add(id(getattr(module, name)))
                yield from _described(name, getattr(module, name))
    yield "\n## Entry points\n\nAn installed distribution adds to freshet by these groups.\n"
    rows = [(code(g), escaped(what), ", ".join(map(code, BUILT_IN.get(g, {})))) for g, what in GROUPS.items()]
    yield from grid(rows, ("group", "what", "ours"))


HEAD = ("name", "what")


def _described(name: str, value: Any) -> Iterator[str]:
    yield f"\n### {name}\n"
    if isinstance(value, FunctionType):
        yield f"```python\n{_signature(value)}\n```\n"
        yield from _doc(value)
    elif inspect.isclass(value):
        yield from _class(name, value)
    else:
        yield f"```text\n{name} = {value!r}\n```"


def _class(name: str, cls: type) -> Iterator[str]:
    fields = list(_fields(cls))
    bases = [
        b.__name__
        for b in cls.__bases__
        if b is not object and b.__name__ not in ("Generic", "Protocol") and not b.__name__.startswith("_")
    ]
    kind = "protocol" if getattr(cls, "_is_protocol", False) else "class"
    private = [base for base in cls.__bases__ if base.__name__.startswith("_")]
    made = next((c.__dict__["__init__"] for c in (cls, *private) if "__init__" in c.__dict__), None)
    takes = ""
    if isinstance(made, FunctionType) and not is_dataclass(cls) and kind == "class":
        takes = _signature(made).removeprefix("def __init__").rpartition(" -> ")[0]
    above = f"({', '.join(bases)})" if bases else ""
    yield f"```python\n{kind} {name}{takes or above}\n```\n"
    yield from _doc(cls)
    if fields:
        yield from grid(fields, ("field", "type", "what"))
        yield ""
    if isinstance(made, FunctionType) and takes:
        yield from _doc(made)
    for method_name, method in vars(cls).items():
        if method_name.startswith("_") or method_name.startswith("test_"):
            continue
        yield from _method(method_name, method)


def _method(name: str, method: Any) -> Iterator[str]:
    function = method if isinstance(method, staticmethod | classmethod) else inspect.unwrap(method)
    if isinstance(method, property):
        returns = ast.unparse(_definition(method.fget).returns or ast.Constant(None))
        yield f"**`.{name}: {returns}`**\n"
        yield from _doc(method)
    elif isinstance(function, staticmethod | classmethod):
        yield f"**`{_signature(function.__func__).removeprefix('def ')}`**\n"
        yield from _doc(function.__func__)
    elif isinstance(function, FunctionType):
        before, _, rest = _signature(function).partition("def ")
        yield f"**`{'await ' if before else ''}.{rest}`**\n"
        yield from _doc(function)


def _definition(function: Any) -> ast.FunctionDef | ast.AsyncFunctionDef:
    tree = ast.parse(textwrap.dedent(inspect.getsource(inspect.unwrap(function)))).body[0]
    assert isinstance(tree, ast.FunctionDef | ast.AsyncFunctionDef)
    return tree


def _signature(function: Any) -> str:
    """As it stands in the source, without self."""
    tree = _definition(function)
    arguments = tree.args
    if arguments.args and arguments.args[0].arg in ("self", "cls"):
        arguments.args = arguments.args[1:]
    prefix = "async def" if isinstance(tree, ast.AsyncFunctionDef) else "def"
    returns = f" -> {ast.unparse(tree.returns)}" if tree.returns is not None else ""
    return f"{prefix} {tree.name}({ast.unparse(arguments)}){returns}"


def _fields(cls: type) -> Iterator[tuple[str, ...]]:
    """(field, type, comment) of a dataclass; what a contract suite lets subclasses change."""
    lines = inspect.getsource(cls).splitlines()
    tree = ast.parse(textwrap.dedent("\n".join(lines))).body[0]
    assert isinstance(tree, ast.ClassDef)
    for i, node in enumerate(tree.body):
        if not isinstance(node, ast.Assign | ast.AnnAssign):
            continue
        target = node.targets[0] if isinstance(node, ast.Assign) else node.target
        if not isinstance(target, ast.Name) or target.id.startswith("_"):
            continue
        comment = lines[(node.end_lineno or node.lineno) - 1].partition("  # ")[2]
        after = tree.body[i + 1] if i + 1 < len(tree.body) else None
        if isinstance(after, ast.Expr) and isinstance(after.value, ast.Constant):
            comment = comment or str(after.value.value)
        value = node.value
        if isinstance(value, ast.Call) and ast.unparse(value.func) == "option":  # of the spec: has its doc
            comment = comment or str(ast.literal_eval(value.args[1]))
            value = next((k.value for k in value.keywords if k.arg == "default"), None)
        default = f" = {ast.unparse(value)}" if value is not None else ""
        default = "" if "field(" in default else default
        kind = ast.unparse(node.annotation) if isinstance(node, ast.AnnAssign) else ""
        yield (code(target.id + default), code(kind), escaped(comment))


def _doc(subject: Any) -> Iterator[str]:
    """A docstring as Markdown: sections of arguments and indented examples stand as they are written."""
    text = inspect.cleandoc(getattr(subject, "__doc__", None) or "")
    if text.startswith("Initialize self") or re.match(r"\w+\(.*\)$", text.partition("\n")[0]):
        return
    for paragraph in re.split(r"\n\s*\n", text):
        if not paragraph.strip():
            continue
        head, _, rest = paragraph.partition("\n")
        if head.strip() in ("Args:", "Returns:", "Raises:", "Yields:"):
            yield f"{head.strip()}\n\n```text\n{textwrap.dedent(rest)}\n```\n"
        elif paragraph.startswith("    "):
            yield f"```text\n{textwrap.dedent(paragraph)}\n```\n"
        else:
            yield " ".join(paragraph.split()).replace("<", "&lt;") + "\n"
