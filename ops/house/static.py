"""Measures of the package that its source shows: sizes, names, signatures and docstrings."""

from __future__ import annotations

import ast
import re
import statistics
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import PurePosixPath

from ops.house.limits import Measure
from ops.house.sources import Text, name_of

MOST_PARAMETERS = 8

ARRAYS = {"NDArray", "ndarray", "ArrayLike", "I64", "U64", "U32", "I32", "U8", "F32", "F64", "Bool"}
"""Names of array types: numpy's, and the aliases of `freshet.types` (a test holds them to that module)."""

SHAPE = re.compile(r"\(\s*[A-Z0-9]\w*\s*,[^()]*\)|\([A-Z]\)|\bshapes?\b", re.ASCII)
"""A shape in a docstring, as (U, D) or (U,), or the word."""

RAISES = re.compile(r"\braises?\b", re.IGNORECASE)

FIELD_TERM = re.compile(
    r"batching|distributed|embed|embedding|encoding|feed|hashing|learning|logging|monitoring|padding|parsing"
    r"|pipelining|pooling|ranking|routing|sampling|scheduling|scoring|seed|serving|sharding|shared|speed|string"
    r"|streaming|testing|timing|tracing|training"
)
"""Nouns of the field that end as a participle does."""

PARTICIPLE = re.compile(
    r"\w{3,}ing|\w{3,}ed|begun|drawn|found|given|held|kept|known|left|lost|made|said|seen|sent|shown|taken|told"
)

QUESTION = re.compile(r"""[^.!?]*\?(?=\s|\Z|[)"'])""")
WHAT = re.compile(r"\bwhat(ever)?\b", re.IGNORECASE)
WHO = re.compile(r"\b(who|whoever|whom|whose|nobody|somebody)\b", re.IGNORECASE)
WORD = re.compile(r"[A-Za-z][A-Za-z'’-]*")


@dataclass(slots=True)
class Facts:
    """The measures of one file of the package."""

    path: str
    lines: int = 0
    long_signatures: list[str] = field(default_factory=list)  # "path:line name (parameters)"
    with_arrays: int = 0  # public functions
    without_shape: list[str] = field(default_factory=list)
    that_raise: int = 0  # public functions
    without_raises: list[str] = field(default_factory=list)
    words: int = 0  # of docstrings and comments
    whats: list[str] = field(default_factory=list)
    whos: list[str] = field(default_factory=list)


def facts_of(path: str, source: str, tree: ast.Module, texts: Sequence[Text]) -> Facts:
    """Collect the facts of a file; `texts` is its prose."""
    facts = Facts(path, source.count("\n"))
    for name, function in functions(tree.body):
        where = f"{path}:{function.lineno} {name}"
        count = len(parameters(function))
        if count > MOST_PARAMETERS:
            facts.long_signatures.append(f"{where} ({count})")
        if any(part.startswith("_") for part in name.split(".")) or "<locals>" in name:
            continue
        doc = ast.get_docstring(function) or ""
        if any(is_array(one.annotation) for one in parameters(function)):
            facts.with_arrays += 1
            if not SHAPE.search(doc):
                facts.without_shape.append(where)
        if not is_verb(function) and any(raises(statement) for statement in function.body):
            facts.that_raise += 1
            if not RAISES.search(doc):
                facts.without_raises.append(where)
    for text in texts:
        if text.kind in ("docstring", "comment"):
            facts.words += len(WORD.findall(text.text))
            prose = QUESTION.sub(lambda found: " " * len(found[0]), text.text)
            facts.whats += places(path, text, WHAT, prose)
            facts.whos += places(path, text, WHO, text.text)
    return facts


def places(path: str, text: Text, pattern: re.Pattern[str], prose: str) -> list[str]:
    """Return the places of a pattern in a text, with the words that follow."""
    return [
        f"{path}:{text.line_of(found.start())} {' '.join(prose[found.start() : found.start() + 40].split())}"
        for found in pattern.finditer(prose)
    ]


Function = ast.FunctionDef | ast.AsyncFunctionDef


def functions(body: Sequence[ast.stmt], prefix: str = "") -> Iterator[tuple[str, Function]]:
    """Yield each function below some statements with its qualified name."""
    for node in body:
        match node:
            case ast.FunctionDef() | ast.AsyncFunctionDef():
                yield prefix + node.name, node
                yield from functions(node.body, f"{prefix}{node.name}.<locals>.")
            case ast.ClassDef():
                yield from functions(node.body, f"{prefix}{node.name}.")
            case ast.If() | ast.With() | ast.Try() | ast.For() | ast.While():
                yield from functions(
                    [one for one in ast.iter_child_nodes(node) if isinstance(one, ast.stmt)], prefix
                )
            case _:
                pass


def parameters(function: Function) -> list[ast.arg]:
    """Return the parameters of a function without `self` and `cls`."""
    given = function.args
    every = [*given.posonlyargs, *given.args, *filter(None, [given.vararg]), *given.kwonlyargs]
    every += [given.kwarg] if given.kwarg else []
    return every[1:] if every and every[0].arg in ("self", "cls") else every


def is_verb(function: Function) -> bool:
    """Whether a function is a verb of the command line, whose docstring is its help."""
    return any(name_of(getattr(one, "func", one)) in ("command", "group") for one in function.decorator_list)


def is_array(annotation: ast.expr | None) -> bool:
    """Whether an annotation is an array or holds arrays."""
    return annotation is not None and any(name_of(node) in ARRAYS for node in ast.walk(annotation))


def raises(node: ast.AST) -> bool:
    """Whether a statement raises a new error itself, rather than in a function that it defines."""
    match node:
        case ast.Raise(exc=error):
            return error is not None and name_of(getattr(error, "func", error)) != "NotImplementedError"
        case ast.FunctionDef() | ast.AsyncFunctionDef() | ast.ClassDef() | ast.Lambda():
            return False
        case _:
            return any(raises(child) for child in ast.iter_child_nodes(node))


def is_participle(path: str) -> bool:
    """Whether a module is named by a gerund or participle that is no term of the field: `cli/kept.py`."""
    stem = PurePosixPath(path).stem
    last = stem.rpartition("_")[2]
    return bool(PARTICIPLE.fullmatch(last)) and not FIELD_TERM.fullmatch(last)


def measures_of(facts: Sequence[Facts]) -> list[Measure]:
    """Sum the facts of all files."""
    lengths = sorted(one.lines for one in facts)
    by_length = [f"{one.path} {one.lines}" for one in sorted(facts, key=lambda one: -one.lines)]
    participles = [one.path for one in facts if is_participle(one.path)]
    long = [place for one in facts for place in one.long_signatures]
    without_shape = [place for one in facts for place in one.without_shape]
    without_raises = [place for one in facts for place in one.without_raises]
    words = sum(one.words for one in facts)
    whats = [place for one in facts for place in one.whats]
    whos = [place for one in facts for place in one.whos]
    return [
        Measure("Python files", len(facts)),
        Measure("Python lines", sum(lengths)),
        Measure(f"callables with more than {MOST_PARAMETERS} parameters", len(long), long),
        Measure("modules named by a participle", len(participles), participles),
        Measure(
            "% of public functions with array arguments without a shape in the docstring",
            share(len(without_shape), sum(one.with_arrays for one in facts)),
            without_shape,
        ),
        Measure(
            "% of public functions that raise without saying so in the docstring",
            share(len(without_raises), sum(one.that_raise for one in facts)),
            without_raises,
        ),
        Measure(
            "noun-what per 10,000 words of docstring and comment", share(len(whats), words, 10_000), whats
        ),
        Measure("who-words per 10,000 words of docstring and comment", share(len(whos), words, 10_000), whos),
        Measure("lines of a file, median", statistics.median_low(lengths) if lengths else 0),
        Measure(
            "lines of a file, p90",
            lengths[len(lengths) * 9 // 10] if lengths else 0,
            by_length[: len(facts) // 10],
        ),
        Measure("lines of a file, longest", max(lengths, default=0), by_length[:5]),
    ]


def share(part: int, whole: int, scale: int = 100) -> float:
    """Return part / whole x scale to one decimal; 0 of nothing."""
    return round(part / whole * scale, 1) if whole else 0.0
