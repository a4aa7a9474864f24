"""Compiler of expressions: conditions on actions, values of labels, and scores.

It checks the kinds of all parts, so mistakes are found, with their place, before any data is read.
Shape letters: N rows or actions, G impressions.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal as OneOf

import numpy as np

from freshet.config.expression.columns import Column, evaluate
from freshet.config.expression.syntax import (
    Aggregate,
    Binary,
    Call,
    Field,
    HashText,
    Ill,
    In,
    IsNull,
    Literal,
    Node,
    Unary,
    children,
    parse,
)
from freshet.config.options import nearest_hint
from freshet.errors import ConfigError
from freshet.types import F64, Bool

Kind = OneOf["number", "text", "boolean", "any"]
"""`any`: a field of unknown kind; the evaluation checks its column."""

ARITHMETIC = ("+", "-", "*", "/", "%")
ORDER = ("<", "<=", ">", ">=")


class Kinds:
    """Checks a tree, and collects the kinds that it requires of its fields.

    `fields` has the required kind of each path; `given` has the kinds that a schema states.
    """

    def __init__(self, given: Mapping[str, Kind] | None = None) -> None:
        self.given = given
        self.fields: dict[str, Kind] = {}

    def need(self, node: Node, kind: Kind, why: str) -> None:
        """Check that a node has a kind. Raises Ill."""
        found = self.of(node)
        if found == "any" and isinstance(node, Field):
            self.fields[node.path] = kind
        elif found not in (kind, "any"):
            raise Ill(node.at, f"a {kind} here: {why}", f"this is a {found}")

    def of(self, node: Node) -> Kind:  # noqa: PLR0911 - a case each
        """Check a node with all its parts, and return its kind. Raises Ill."""
        match node:
            case Literal(value=value):
                return (
                    "text" if isinstance(value, str) else "boolean" if isinstance(value, bool) else "number"
                )
            case Field():
                return self._field(node)
            case Unary(op="not", operand=operand):
                self.need(operand, "boolean", "not turns true into false")
                return "boolean"
            case Unary(operand=operand):
                self.need(operand, "number", "- changes a number's sign")
                return "number"
            case IsNull(operand=operand):
                self.of(operand)
                return "boolean"
            case In():
                return self._in(node)
            case Binary():
                return self._binary(node)
            case Call(name=name, arguments=arguments):
                for argument in arguments:
                    self.need(argument, "number", f"{name}() is a function of numbers")
                return "number"
            case Aggregate(name=name, argument=argument):
                if argument is not None and name == "count":
                    self.of(argument)
                elif argument is not None:
                    self.need(argument, "number", f"{name}() is over numbers")
                return "number"

    def _field(self, node: Field) -> Kind:
        if self.given is not None and node.path not in self.given:
            known = list(self.given)
            raise Ill(node.at, f"a field that exists: {', '.join(known)}", nearest_hint(node.path, known))
        if self.given is not None and self.given[node.path] != "any":
            return self.given[node.path]
        return self.fields.setdefault(node.path, "any")

    def _in(self, node: In) -> Kind:
        texts = {isinstance(item.value, str) for item in node.items}
        if len(texts) > 1:
            raise Ill(node.at, "numbers only, or text only, in a list")
        self.need(node.operand, "text" if texts.pop() else "number", "it is compared with the list")
        return "boolean"

    def _binary(self, node: Binary) -> Kind:
        if node.op in ("and", "or"):
            for side in (node.left, node.right):
                self.need(side, "boolean", f"{node.op} joins conditions")
            return "boolean"
        if node.op in ARITHMETIC or node.op in ORDER:
            verb = "calculates with" if node.op in ARITHMETIC else "compares the order of"
            for side in (node.left, node.right):
                self.need(side, "number", f"{node.op} {verb} numbers")
            return "number" if node.op in ARITHMETIC else "boolean"
        left, right = self.of(node.left), self.of(node.right)
        if left == "any" or right == "any":
            known = right if left == "any" else left
            if known != "any":
                self.need(
                    node.left if left == "any" else node.right, known, f"{node.op} compares equal kinds"
                )
        elif left != right:
            raise Ill(
                node.at, f"equal kinds on both sides of {node.op}", f"left is a {left}, right is a {right}"
            )
        return "boolean"


@dataclass(frozen=True, slots=True)
class Expression:
    """A checked expression over columns."""

    text: str
    node: Node
    kinds: Mapping[str, Kind]  # field -> its required kind, in order of appearance

    def fields(self) -> tuple[str, ...]:
        """Return the paths of the columns it reads: `type` for `action.type`, names of labels in a score."""
        return tuple(self.kinds)

    def evaluate(self, columns: Mapping[str, Column], size: int | None = None) -> Column:
        """Evaluate it for each row; `size` is needed only if it reads no column.

        Raises BadInput for a column of another kind, KeyError for a missing one.
        """
        if size is None:
            size = len(columns[next(iter(self.kinds))])
        return evaluate(self.node, columns, size)

    def numbers(self, columns: Mapping[str, F64], size: int) -> F64:
        """Evaluate a score over columns (N,) of numbers, with N = `size`.

        Returns (N,) float64; NaN stands for null and for results that are not finite. Raises as `evaluate`.
        """
        out = self.evaluate({name: Column(values) for name, values in columns.items()}, size).filled(np.nan)
        out[~np.isfinite(out)] = np.nan
        return out

    def true(self, columns: Mapping[str, Column], size: int | None = None) -> Bool:
        """Return the (N,) mask of rows for which a condition is true; null is false. Raises as `evaluate`."""
        column = self.evaluate(columns, size)
        truth: Bool = column.values.astype(bool)
        return truth if column.nulls is None else truth & ~column.nulls


@dataclass(frozen=True, slots=True)
class LabelValue:
    """The number that a label takes from the actions that made it true.

    The joiner reduces `argument_columns` to one number an aggregate and impression as actions come, and calls
    `finish` when the label is decided.
    """

    text: str
    aggregates: tuple[Aggregate, ...]
    arguments: tuple[Expression | None, ...]  # of the aggregates; None: count()
    outer: Node

    def fields(self) -> tuple[str, ...]:
        """Return the paths of the action's fields that it reads."""
        return tuple(dict.fromkeys(f for a in self.arguments if a is not None for f in a.fields()))

    def argument_columns(self, columns: Mapping[str, Column], size: int) -> list[Column]:
        """Return for each aggregate the (N,) numbers of N = `size` actions; ones for count()."""
        ones = Column(np.ones(size))
        return [ones if a is None else a.evaluate(columns, size) for a in self.arguments]

    def finish(self, reduced: Sequence[Column]) -> Column:
        """Return the (G,) values of G impressions from the (G,) results of each aggregate."""
        return evaluate(self.outer, {}, len(reduced[0]), reduced)


def compile_condition(
    text: str,
    *,
    hash_text: HashText | None = None,
    kinds: Mapping[str, Kind] | None = None,
    where: str = "expression",
    key: str = "on",
) -> Expression:
    """Compile a condition on an action (`action.type == 'click'`).

    Args:
        hash_text: required to evaluate comparisons with text.
        kinds:     kinds of all fields of the action, to check the condition against a schema.
        where, key: place for errors.

    Raises:
        ConfigError: the condition is invalid; names the place in the text.
    """
    return _compile(text, "action.", "boolean", hash_text=hash_text, kinds=kinds, where=where, key=key)


def compile_score(text: str, *, where: str = "expression", key: str = "score") -> Expression:
    """Compile a score over the labels' predictions. Raises ConfigError."""
    return _compile(text, "", "number", hash_text=None, kinds=None, where=where, key=key)


def compile_value(
    text: str,
    *,
    hash_text: HashText | None = None,
    kinds: Mapping[str, Kind] | None = None,
    where: str = "expression",
    key: str = "value",
) -> LabelValue:
    """Compile the value of a label (`sum(action.seconds)`).

    Without an aggregate it is the value of the last matching action. Arguments as for `compile_condition`.

    Raises ConfigError.
    """
    try:
        node = parse(text, prefix="action.", aggregates=True, hash_text=hash_text)
        checker = Kinds(kinds)
        checker.need(node, "number", "the value of a label is a number")
        found = tuple(n for n in walk(node) if isinstance(n, Aggregate))
        if not found:
            node = Aggregate(0, "last", node, 0)
            found = (node,)
        _check_aggregates(node)
        arguments = tuple(None if a.argument is None else _part(text, a.argument, kinds) for a in found)
        return LabelValue(text, found, arguments, node)
    except Ill as ill:
        raise _error(text, ill, where, key) from None


def _part(text: str, node: Node, kinds: Mapping[str, Kind] | None) -> Expression:
    checker = Kinds(kinds)
    checker.of(node)
    return Expression(text, node, _field_kinds(node, checker))


def _check_aggregates(node: Node) -> None:
    def check(inner: Node, within: Aggregate | None) -> None:
        if isinstance(inner, Aggregate):
            if within is not None:
                raise Ill(
                    inner.at, "no function over actions inside another", f"it stands inside {within.name}()"
                )
            within = inner
        elif isinstance(inner, Field) and within is None:
            raise Ill(
                inner.at, "a function over actions around this field", f"for example sum(action.{inner.path})"
            )
        for child in children(inner):
            check(child, within)

    check(node, None)


def _compile(
    text: str,
    prefix: str,
    kind: Kind,
    *,
    hash_text: HashText | None,
    kinds: Mapping[str, Kind] | None,
    where: str,
    key: str,
) -> Expression:
    try:
        node = parse(text, prefix=prefix, aggregates=False, hash_text=hash_text)
        checker = Kinds(kinds)
        checker.need(
            node, kind, "a condition is true or false" if kind == "boolean" else "a score is a number"
        )
        if not prefix:
            for name in walk(node):
                if isinstance(name, Field):
                    checker.need(name, "number", "a prediction is a number")
        return Expression(text, node, _field_kinds(node, checker))
    except Ill as ill:
        raise _error(text, ill, where, key) from None


def _field_kinds(node: Node, checker: Kinds) -> dict[str, Kind]:
    paths = dict.fromkeys(n.path for n in sorted(walk(node), key=lambda n: n.at) if isinstance(n, Field))
    given = checker.given or {}
    return {p: checker.fields.get(p, given.get(p, "any")) for p in paths}


def _error(text: str, ill: Ill, where: str, key: str) -> ConfigError:
    line_start = text.rfind("\n", 0, ill.at) + 1
    line = text[line_start:].split("\n", 1)[0]
    caret = f"{line}\n  {' ' * (ill.at - line_start)}^"
    return ConfigError(where, key, text, ill.expected, f"{caret} {ill.hint}".rstrip())


def walk(node: Node) -> Iterator[Node]:
    """Yield a node and all nodes below it."""
    yield node
    for child in children(node):
        yield from walk(child)


Step = tuple[str, float | str]
"""`("number", 2.0)`, `("label", "click")`, or `("+", 0.0)`; also - and *, and `negate` of one operand."""


def postfix_of(node: Node) -> list[Step] | None:
    """Convert a score to steps on a stack of numbers, operands first.

    Returns None if it has more than + - * over numbers and labels.
    """
    match node:
        case Literal(value=int() | float() as value) if not isinstance(value, bool):
            return [("number", float(value))]
        case Field(path=path):
            return [("label", path)]
        case Unary(op="-", operand=operand):
            below = postfix_of(operand)
            return None if below is None else [*below, ("negate", 0.0)]
        case Binary(op="+" | "-" | "*" as op, left=left, right=right):
            first, second = postfix_of(left), postfix_of(right)
            return None if first is None or second is None else [*first, *second, (op, 0.0)]
        case _:
            return None


Value = float | int | str | bool


def compared_in(condition: str) -> dict[str, tuple[Value, ...]]:
    """Return the values with which a spec's condition compares fields by `==` or `in`, in order.

    `action.type == 'click' and not action.bot` gives {"type": ("click",)}.
    """
    found: dict[str, dict[Value, None]] = {}
    for path, value, equal in comparisons(parse(condition, prefix="action.", aggregates=False)):
        if equal:
            found.setdefault(path, {})[value] = None
    return {path: tuple(values) for path, values in found.items()}


def comparisons(node: Node) -> Iterator[tuple[str, Value, bool]]:
    """Yield (path, constant, whether equality is true) of all comparisons of a field with a constant."""
    for inner in walk(node):
        match inner:
            case Binary(_, "==" | "!=" as op, Field(_, path), Literal(_, value)) | Binary(
                _, "==" | "!=" as op, Literal(_, value), Field(_, path)
            ):
                yield path, value, op == "=="
            case In(_, Field(_, path), items, negated):
                yield from ((path, item.value, not negated) for item in items)
