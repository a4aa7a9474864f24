"""The nodes of an expression, and the whitelist of functions. Frozen; each knows where in the text it
starts.
"""

from __future__ import annotations

from dataclasses import dataclass

__all__ = [
    "AGGREGATES",
    "FUNCTIONS",
    "Aggregate",
    "Binary",
    "Call",
    "Field",
    "In",
    "IsNull",
    "Literal",
    "Node",
    "Unary",
]

FUNCTIONS = {
    "abs": (1, 1),
    "exp": (1, 1),
    "log": (1, 1),
    "log1p": (1, 1),
    "max": (2, 16),
    "min": (2, 16),
    "sqrt": (1, 1),
}
"""Functions of a row's numbers: fewest and most arguments."""

AGGREGATES = {"sum": (1, 1), "count": (0, 1), "max": (1, 1), "min": (1, 1), "last": (1, 1)}
"""Functions over all matching actions of one impression: fewest and most arguments."""


@dataclass(frozen=True, slots=True)
class Literal:
    """A number, text, or truth value. Text carries its hash once it has been bound."""

    at: int
    value: float | int | str | bool
    hashed: int | None = None


@dataclass(frozen=True, slots=True)
class Field:
    """A column, by its path (`type` for `action.type`)."""

    at: int
    path: str


@dataclass(frozen=True, slots=True)
class Unary:
    """`not` or `-`."""

    at: int
    op: str
    operand: Node


@dataclass(frozen=True, slots=True)
class Binary:
    """An operator between two operands; `at` is the operator's place."""

    at: int
    op: str
    left: Node
    right: Node


@dataclass(frozen=True, slots=True)
class In:
    """Membership of a list of literals."""

    at: int
    operand: Node
    items: tuple[Literal, ...]
    negated: bool


@dataclass(frozen=True, slots=True)
class IsNull:
    """Whether there is no value; the only question about null with an answer."""

    at: int
    operand: Node
    negated: bool


@dataclass(frozen=True, slots=True)
class Call:
    """A function of a row's numbers."""

    at: int
    name: str
    arguments: tuple[Node, ...]


@dataclass(frozen=True, slots=True)
class Aggregate:
    """A function over the matching actions of an impression; no argument only for count()."""

    at: int
    name: str
    argument: Node | None
    index: int  # position among the aggregates of the expression


Node = Literal | Field | Unary | Binary | In | IsNull | Call | Aggregate
