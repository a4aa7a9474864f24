"""What kind of value each part of an expression has; mistakes are found here, with their place, before any
data is seen.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Literal as OneOf

from freshet.config.expression.tokens import Ill
from freshet.config.expression.tree import Aggregate, Binary, Call, Field, In, IsNull, Literal, Node, Unary
from freshet.config.options import nearest_hint

__all__ = ["Kind", "Kinds"]

Kind = OneOf["number", "text", "boolean", "any"]
"""`any`: a field of which nothing is known yet; its column tells."""

ARITHMETIC = ("+", "-", "*", "/", "%")
ORDER = ("<", "<=", ">", ">=")


class Kinds:
    """Checks a tree and collects what its fields must be.

    `fields` says for each path what the expression needs it to be; `given` what is known of it from a schema.
    """

    def __init__(self, given: Mapping[str, Kind] | None = None) -> None:
        self.given = given
        self.fields: dict[str, Kind] = {}

    def need(self, node: Node, kind: Kind, why: str) -> None:
        """Check that a node has this kind. Raises Ill."""
        found = self.of(node)
        if found == "any" and isinstance(node, Field):
            self.fields[node.path] = kind
        elif found not in (kind, "any"):
            raise Ill(node.at, f"a {kind} here: {why}", f"this is a {found}")

    def of(self, node: Node) -> Kind:  # noqa: PLR0911 - a case each
        """The kind of a node, after checking everything in it. Raises Ill."""
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
            what = "calculates with" if node.op in ARITHMETIC else "compares the order of"
            for side in (node.left, node.right):
                self.need(side, "number", f"{node.op} {what} numbers")
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
