"""The three uses of expressions: conditions on actions, values of labels, scores. Text in, something to
evaluate out.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields, is_dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from freshet.config.expression.arithmetic import Straight, straight_of
from freshet.config.expression.columns import Column, evaluate, reduce_groups
from freshet.config.expression.kinds import Kind, Kinds
from freshet.config.expression.parser import parse
from freshet.config.expression.tokens import Ill
from freshet.config.expression.tree import Aggregate, Field, Literal, Node
from freshet.errors import ConfigError

__all__ = [
    "Expression",
    "HashText",
    "LabelValue",
    "compile_condition",
    "compile_score",
    "compile_value",
    "walk",
]

HashText = Callable[[str], int]
"""The unsalted 64-bit hash by which text columns arrive."""


@dataclass(frozen=True, slots=True)
class Expression:
    """A checked expression over columns."""

    text: str
    node: Node
    kinds: Mapping[str, Kind]  # field -> what the expression needs it to be
    straight: Straight | None = field(default=None, compare=False, repr=False)

    def fields(self) -> tuple[str, ...]:
        """Paths of the columns it reads, in order of appearance (`type` for `action.type`; names of labels
        in a score).
        """
        return tuple(self.kinds)

    def evaluate(self, columns: Mapping[str, Column], size: int | None = None) -> Column:
        """Its value for each row. `size` is needed only where it reads no column.

        Raises BadInput for a column of the wrong kind, KeyError for a missing one.
        """
        if size is None:
            size = len(columns[next(iter(self.kinds))])
        return evaluate(self.node, columns, size)

    def numbers(self, columns: Mapping[str, NDArray[np.float64]], size: int) -> NDArray[np.float64]:
        """(N,) a score over columns of N numbers; NaN stands for null, and is all that is not finite.

        Raises as `evaluate`.
        """
        with np.errstate(all="ignore"):
            if self.straight is None:
                made = {name: Column(values) for name, values in columns.items()}
                out = self.evaluate(made, size).filled(np.nan)
            else:
                out = np.array(self.straight(columns), np.float64)
                out = out if out.ndim else np.full(size, out)
            out[~np.isfinite(out)] = np.nan
        return out

    def true(self, columns: Mapping[str, Column], size: int | None = None) -> NDArray[np.bool_]:
        """(N,) where a condition holds; null counts as false."""
        column = self.evaluate(columns, size)
        truth = column.values.astype(bool)
        return truth if column.nulls is None else truth & ~column.nulls


@dataclass(frozen=True, slots=True)
class LabelValue:
    """The number that a label takes from the actions that made it true.

    Either evaluate it over all actions of a batch of impressions, or keep one number per aggregate and
    impression (`arguments` as actions come, `finish` when the label is decided).
    """

    text: str
    aggregates: tuple[Aggregate, ...]
    arguments: tuple[Expression | None, ...]  # of the aggregates; None: count()
    outer: Node

    def fields(self) -> tuple[str, ...]:
        """Paths of the action's fields that it reads."""
        return tuple(dict.fromkeys(f for a in self.arguments if a is not None for f in a.fields()))

    def argument_columns(self, columns: Mapping[str, Column], size: int) -> list[Column]:
        """(N,) for each aggregate, what each of N actions brings to it; count() counts ones."""
        ones = Column(np.ones(size))
        return [ones if a is None else a.evaluate(columns, size) for a in self.arguments]

    def finish(self, reduced: Sequence[Column]) -> Column:
        """(G,) label values of G impressions from what each aggregate came to."""
        return evaluate(self.outer, {}, len(reduced[0]), reduced)

    def evaluate(self, columns: Mapping[str, Column], groups: NDArray[np.int64], size: int) -> Column:
        """(size,) label values; action i, in event order, belongs to impression `groups[i]`."""
        parts = self.argument_columns(columns, len(groups))
        names = [a.name for a in self.aggregates]
        return self.finish([reduce_groups(n, c, groups, size) for n, c in zip(names, parts, strict=True)])


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
        hash_text: needed to evaluate comparisons with text.
        kinds:     every field of the action and its kind, if the schema is known: checked then.

    Raises:
        ConfigError: with the place in the text.
    """
    return _compile(text, "action.", "boolean", hash_text=hash_text, kinds=kinds, where=where, key=key)


def compile_score(text: str, *, where: str = "expression", key: str = "score") -> Expression:
    """Compile a score over labels' predictions, by label name. Raises ConfigError."""
    return _compile(text, "", "number", hash_text=None, kinds=None, where=where, key=key)


def compile_value(
    text: str,
    *,
    hash_text: HashText | None = None,
    kinds: Mapping[str, Kind] | None = None,
    where: str = "expression",
    key: str = "value",
) -> LabelValue:
    """Compile the value of a label (`sum(action.seconds)`); without an aggregate it is of the last matching
    action.

    Raises ConfigError.
    """
    try:
        node = _bind(parse(text, prefix="action.", aggregates=True), hash_text)
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
        for child in _children(inner):
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
        node = _bind(parse(text, prefix=prefix, aggregates=False), hash_text)
        checker = Kinds(kinds)
        checker.need(
            node, kind, "a condition is true or false" if kind == "boolean" else "a score is a number"
        )
        if not prefix:
            for name in walk(node):
                if isinstance(name, Field):
                    checker.need(name, "number", "a prediction is a number")
        return Expression(text, node, _field_kinds(node, checker), straight_of(node))
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


def _children(node: Node) -> list[Node]:
    found: list[Node] = []
    for f in fields(node):
        value: Any = getattr(node, f.name)
        found += [v for v in (value if isinstance(value, tuple) else (value,)) if is_dataclass(v)]  # type: ignore[misc]
    return found


def walk(node: Node) -> Iterator[Node]:
    """The node and everything below it."""
    yield node
    for child in _children(node):
        yield from walk(child)


def _bind(node: Node, hash_text: HashText | None) -> Node:
    """The tree with the hash of every text literal filled in."""
    if hash_text is None:
        return node
    if isinstance(node, Literal):
        return replace(node, hashed=hash_text(node.value)) if isinstance(node.value, str) else node
    changes: dict[str, Any] = {}
    for f in fields(node):
        value: Any = getattr(node, f.name)
        if isinstance(value, tuple):
            changes[f.name] = tuple(_bind(v, hash_text) for v in value)
        elif is_dataclass(value):
            changes[f.name] = _bind(value, hash_text)  # type: ignore[arg-type]
    return replace(node, **changes)
