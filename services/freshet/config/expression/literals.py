"""The values with which a condition compares fields: what these hold where it is true."""

from __future__ import annotations

from collections.abc import Iterator

from freshet.config.expression.parser import parse
from freshet.config.expression.tree import Aggregate, Binary, Call, Field, In, IsNull, Literal, Node, Unary

__all__ = ["Value", "compared_in"]

Value = float | int | str | bool


def compared_in(condition: str) -> dict[str, tuple[Value, ...]]:
    """Of a condition on actions, one that a spec holds: field -> values with which it is compared by `==` or
    `in`, in the order of the text. `action.type == 'click' and not action.bot` gives {"type": ("click",)}.
    """
    found: dict[str, dict[Value, None]] = {}
    for path, value in _pairs(parse(condition, prefix="action.", aggregates=False)):
        found.setdefault(path, {})[value] = None
    return {path: tuple(values) for path, values in found.items()}


def _pairs(node: Node) -> Iterator[tuple[str, Value]]:
    match node:
        case Binary(_, "==", Field(_, path), Literal(_, value)) | Binary(
            _, "==", Literal(_, value), Field(_, path)
        ):
            yield path, value
        case In(_, Field(_, path), items, False):
            yield from ((path, item.value) for item in items)
        case Binary(_, _, left, right):
            yield from _pairs(left)
            yield from _pairs(right)
        case Unary(_, _, operand) | IsNull(_, operand, _) | In(_, operand, _, _):
            yield from _pairs(operand)
        case Call(_, _, arguments):
            for argument in arguments:
                yield from _pairs(argument)
        case Aggregate() | Literal() | Field():
            pass
