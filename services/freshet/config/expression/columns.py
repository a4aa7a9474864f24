"""Evaluation of expressions over whole columns with numpy. Shape letter: N rows."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from freshet.config.expression.syntax import Aggregate, Binary, Call, Field, In, IsNull, Literal, Node, Unary
from freshet.errors import BadInput
from freshet.types import F64, Bool


@dataclass(frozen=True, slots=True, eq=False)
class Column:
    """N values, with a mask of the nulls.

    A column of uint64 is text, by its unsalted 64-bit hash. Other dtypes are numbers, and truths as bool or
    as 0 and 1. Signed integers are compared exactly with integers of 64 bits; arithmetic, and
    a comparison with a fraction, converts them to float64.
    """

    values: NDArray[Any]  # (N,)
    nulls: Bool | None = None  # (N,) true where a value is null; None: no null

    def __len__(self) -> int:
        return len(self.values)

    def filled(self, value: float) -> F64:
        """Return (N,) float64 with `value` in place of nulls."""
        out = self.values.astype(np.float64)
        if self.nulls is not None:
            out[self.nulls] = value
        return out


Pair = tuple[Any, Any]
"""(values, nulls): arrays of N or scalars, which numpy broadcasts."""

COMPARE = {
    "==": np.equal,
    "!=": np.not_equal,
    "<": np.less,
    "<=": np.less_equal,
    ">": np.greater,
    ">=": np.greater_equal,
}
CALCULATE = {
    "+": np.add,
    "-": np.subtract,
    "*": np.multiply,
    "/": np.divide,
    "%": np.mod,  # the sign of the divisor, as in Python
    "abs": np.abs,
    "exp": np.exp,
    "log": np.log,
    "log1p": np.log1p,
    "max": np.maximum,
    "min": np.minimum,
    "sqrt": np.sqrt,
}


def evaluate(
    node: Node, columns: Mapping[str, Column], size: int, aggregates: Sequence[Column] = ()
) -> Column:
    """Evaluate a tree for each of `size` rows.

    Args:
        columns:    field path -> column of `size` rows.
        aggregates: results of the tree's Aggregates, by their index.

    Raises:
        BadInput: a column has another kind than the expression needs.
        KeyError: a column is missing.
    """
    with np.errstate(all="ignore"):
        values, nulls = _of(node, columns, aggregates)
    out = np.broadcast_to(values, (size,))
    mask = np.broadcast_to(nulls, (size,))
    return Column(np.ascontiguousarray(out), np.ascontiguousarray(mask) if mask.any() else None)


def _of(node: Node, columns: Mapping[str, Column], aggregates: Sequence[Column]) -> Pair:  # noqa: PLR0911 - a case each
    def of(inner: Node) -> Pair:
        return _of(inner, columns, aggregates)

    match node:
        case Literal(value=value, hashed=hashed):
            if isinstance(value, str):
                return np.uint64(_hash_of(value, hashed)), False
            return np.asarray(value)[()], False
        case Field(path=path):
            return _pair(columns[path])
        case Aggregate(index=index):
            return _pair(aggregates[index])
        case Unary(op="not", operand=operand):
            return ~_truth(of(operand), node), False
        case Unary(operand=operand):
            pair = of(operand)  # once, as signs may be nested
            return _finite(-_number(pair, node), pair[1])
        case IsNull(operand=operand, negated=negated):
            nulls = np.asarray(of(operand)[1], bool)
            return (~nulls if negated else nulls), False
        case In(operand=operand, items=items, negated=negated):
            return _in(of(operand), items, negated)
        case Binary(op="and" | "or" as op, left=left, right=right):
            both = np.logical_and if op == "and" else np.logical_or
            return both(_truth(of(left), node), _truth(of(right), node)), False
        case Binary(op=op, left=left, right=right) if op in COMPARE:
            return _compare(op, of(left), of(right))
        case Binary(op=op, left=left, right=right):
            return _calculate(op, [of(left), of(right)], node)
        case Call(name=name, arguments=arguments):
            return _calculate(name, [of(a) for a in arguments], node)


def _pair(column: Column) -> Pair:
    values = column.values
    if values.dtype.kind == "f" and values.dtype != np.float64:
        values = values.astype(np.float64)
    nan = np.isnan(values) if values.dtype.kind == "f" else False
    return values, nan if column.nulls is None else column.nulls | nan


def _hash_of(text: str, hashed: int | None) -> int:
    if hashed is None:
        raise ValueError(f"the text {text!r} was compiled without a hash function")
    return hashed


def _truth(pair: Pair, node: Node) -> Any:
    """Return truths as a mask; null is false."""
    values, nulls = pair
    if _is_text(values):
        raise BadInput(f"expected true or false, found a column of text in {node}")
    return (np.asarray(values) != 0) & ~np.asarray(nulls, bool)


def _number(pair: Pair, node: Node) -> Any:
    if _is_text(pair[0]):
        raise BadInput(f"expected a number, found a column of text in {node}")
    return np.asarray(pair[0]).astype(np.float64)


def _finite(values: Any, nulls: Any) -> Pair:
    return values, np.asarray(nulls, bool) | ~np.isfinite(values)


def _calculate(op: str, pairs: Sequence[Pair], node: Node) -> Pair:
    numbers = [_number(p, node) for p in pairs]
    values = CALCULATE[op](*numbers[:2])
    for number in numbers[2:]:
        values = CALCULATE[op](values, number)
    nulls: Any = False
    for pair in pairs:
        nulls = np.asarray(nulls, bool) | np.asarray(pair[1], bool)
    return _finite(values, nulls)


def _same_kind(*values: Any) -> None:
    if len({_is_text(v) for v in values}) > 1:
        raise BadInput("expected columns of one kind to compare, found text and numbers")


def _is_text(values: Any) -> bool:
    return np.asarray(values).dtype.kind == "u"


def _compare(op: str, left: Pair, right: Pair) -> Pair:
    _same_kind(left[0], right[0])
    known = ~(np.asarray(left[1], bool) | np.asarray(right[1], bool))
    return COMPARE[op](left[0], right[0]) & known, False


def _in(pair: Pair, items: Sequence[Literal], negated: bool) -> Pair:
    values, nulls = pair
    if isinstance(items[0].value, str):
        wanted: NDArray[Any] = np.array([_hash_of(str(i.value), i.hashed) for i in items], np.uint64)
    else:
        wanted = np.array([i.value for i in items])
        if len({type(i.value) for i in items}) > 1:  # one array of integers and fractions is not exact
            _same_kind(values, wanted)
            found = np.logical_or.reduce([np.equal(values, i.value) for i in items])
            return (found != negated) & ~np.asarray(nulls, bool), False
    _same_kind(values, wanted)
    return np.isin(values, wanted, invert=negated) & ~np.asarray(nulls, bool), False
