"""Sums, differences and products of numbers, as one numpy function: most scores are nothing else.

In such a tree no step can hide what another made: a null (NaN) and a result that is not finite stay not
finite to the end, so one look at the end replaces one at every step. Division, functions and comparisons can
(1 / infinity is 0, and so no longer null); trees that hold one are left to `columns.evaluate`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from freshet.config.expression.tree import Binary, Field, Literal, Node, Unary

__all__ = ["Step", "Straight", "postfix_of", "straight_of"]

Straight = Callable[[Mapping[str, NDArray[np.float64]]], Any]
"""Columns by name, NaN for null, to the tree's value: (N,), or a scalar; not finite for null."""

Step = tuple[str, float | str]
"""`("number", 2.0)`, `("label", "click")`, or `("+", 0.0)`; also - and *, and `negate` of one operand."""

OPERATIONS = {"+": np.add, "-": np.subtract, "*": np.multiply}


def straight_of(node: Node) -> Straight | None:
    """The tree as a function of float64 columns; None if it holds more than + - * over numbers and fields."""
    match node:
        case Literal(value=int() | float() as value) if not isinstance(value, bool):
            number = np.float64(value)
            return lambda columns: number
        case Field(path=path):
            return lambda columns: columns[path]
        case Unary(op="-", operand=operand):
            return _of(np.negative, operand)
        case Binary(op="+" | "-" | "*" as op, left=left, right=right):
            return _of(OPERATIONS[op], left, right)
        case _:
            return None


def postfix_of(node: Node) -> list[Step] | None:
    """The same trees as steps on a stack of numbers: operands before what takes them."""
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


def _of(operation: Callable[..., Any], *operands: Node) -> Straight | None:
    inner = [f for f in map(straight_of, operands) if f is not None]
    if len(inner) < len(operands):
        return None
    return lambda columns: operation(*(f(columns) for f in inner))
