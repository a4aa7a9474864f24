"""Tokens to a tree, by operator precedence (Pratt 1973).

Loosest first: or; and; not; comparisons, in, is; + and -; * / %; unary -. Comparisons do not chain.
"""

from __future__ import annotations

from dataclasses import dataclass

from freshet.config.expression.tokens import Ill, Token, tokens, unquote
from freshet.config.expression.tree import (
    AGGREGATES,
    FUNCTIONS,
    Aggregate,
    Binary,
    Call,
    Field,
    In,
    IsNull,
    Literal,
    Node,
    Unary,
)
from freshet.config.options import nearest_hint

__all__ = ["parse"]

DEEPEST = 32
"""How deep brackets, signs and calls may nest: far beyond a readable score, far below Python's stack."""

COMPARISONS = ("==", "!=", "<", "<=", ">", ">=")
BINDS = {
    "or": 1,
    "and": 2,
    "in": 4,
    "is": 4,
    "not": 4,
    "+": 5,
    "-": 5,
    "*": 6,
    "/": 6,
    "%": 6,
} | dict.fromkeys(COMPARISONS, 4)
NOT, MINUS = 3, 7  # how tightly the prefixes bind


def parse(text: str, *, prefix: str, aggregates: bool) -> Node:
    """Parse an expression.

    Args:
        prefix:     what fields are written with ("action." or ""); their paths are without it.
        aggregates: whether sum() and the like are allowed.

    Raises:
        Ill: with the place.
    """
    parser = _Parser(tokens(text), prefix, aggregates)
    node = parser.expression(0)
    parser.expect("")
    return node


@dataclass(slots=True)
class _Parser:
    items: list[Token]
    prefix: str
    aggregates: bool
    position: int = 0
    depth: int = 0
    count: int = 0  # aggregates so far

    @property
    def next(self) -> Token:
        return self.items[self.position]

    def take(self) -> Token:
        token = self.next
        self.position += token.kind != "end"
        return token

    def expect(self, text: str) -> Token:
        if self.next.text != text or self.next.kind == "text":
            raise Ill(self.next.at, f'"{text}"' if text else "an operator or the end of the expression")
        return self.take()

    def expression(self, binds: int) -> Node:
        self.depth += 1
        if self.depth > DEEPEST:
            raise Ill(self.next.at, f"an expression nested at most {DEEPEST} deep")
        left = self.prefixed()
        compared = False
        while self.next.kind in ("sign", "word") and BINDS.get(self.next.text, 0) > binds:
            token = self.take()
            if BINDS[token.text] == 4:
                if compared:
                    raise Ill(
                        token.at,
                        "no second comparison here",
                        "comparisons do not chain: write a < b and b < c",
                    )
                compared = True
            left = self.infixed(left, token)
        self.depth -= 1
        return left

    def prefixed(self) -> Node:
        token = self.take()
        if token.kind == "number":
            value = float(token.text)
            if value == float("inf"):
                raise Ill(token.at, "a number that a double can hold")
            return Literal(token.at, int(token.text) if token.text.isdigit() and value < 2**63 else value)
        if token.kind == "text":
            return Literal(token.at, unquote(token.text))
        if token.text in ("true", "false"):
            return Literal(token.at, token.text == "true")
        if token.text in ("not", "-") and token.kind != "name":
            return Unary(token.at, token.text, self.expression(NOT if token.text == "not" else MINUS))
        if token.text == "(" and token.kind == "sign":
            inner = self.expression(0)
            self.expect(")")
            return inner
        if token.kind == "name":
            return (
                self.call(token) if self.next.text == "(" and self.next.kind == "sign" else self.field(token)
            )
        hint = "null stands only after is: x is null" if token.text == "null" else ""
        raise Ill(token.at, "a value", hint)

    def infixed(self, left: Node, token: Token) -> Node:
        if token.text == "is":
            negated = self.next.text == "not" and bool(self.take())
            self.expect("null")
            return IsNull(token.at, left, negated)
        if token.text in ("in", "not"):
            if token.text == "not":
                self.expect("in")
            return In(token.at, left, self.items_of_list(), token.text == "not")
        return Binary(token.at, token.text, left, self.expression(BINDS[token.text]))

    def items_of_list(self) -> tuple[Literal, ...]:
        self.expect("[")
        items = []
        while True:
            at = self.next.at
            item = self.prefixed()
            if isinstance(item, Unary) and item.op == "-" and isinstance(item.operand, Literal):
                number = item.operand.value
                if isinstance(number, int | float) and not isinstance(number, bool):
                    item = Literal(at, -number)
            if not isinstance(item, Literal) or isinstance(item.value, bool):
                raise Ill(at, "a number or 'text'", "a list holds constants only")
            items.append(item)
            if self.next.text != ",":
                self.expect("]")
                return tuple(items)
            self.take()

    def field(self, token: Token) -> Field:
        if not token.text.startswith(self.prefix) or (not self.prefix and "." in token.text):
            hint = (
                f"a condition or value sees the action: {self.prefix}{token.text}"
                if self.prefix
                else "a score combines labels by name"
            )
            raise Ill(token.at, f"a field, {self.prefix}…" if self.prefix else "the name of a label", hint)
        return Field(token.at, token.text.removeprefix(self.prefix))

    def call(self, name: Token) -> Node:
        known = [*FUNCTIONS, *AGGREGATES] if self.aggregates else list(FUNCTIONS)
        if name.text not in known:
            raise Ill(
                name.at,
                f"one of the functions {', '.join(sorted(set(known)))}",
                nearest_hint(name.text, known),
            )
        self.expect("(")
        aggregate = self.aggregates and name.text in AGGREGATES
        arguments: list[Node] = []
        while self.next.text != ")" or self.next.kind != "sign":
            if arguments:
                self.expect(",")
            arguments.append(self.expression(0))
        self.take()
        if aggregate and (name.text not in FUNCTIONS or len(arguments) == 1):
            return self.aggregate(name, arguments)
        return self.function(name, arguments)

    def function(self, name: Token, arguments: list[Node]) -> Call:
        low, high = FUNCTIONS[name.text]
        if not low <= len(arguments) <= high:
            raise Ill(name.at, f"{name.text}() with {low if low == high else f'{low} to {high}'} arguments")
        return Call(name.at, name.text, tuple(arguments))

    def aggregate(self, name: Token, arguments: list[Node]) -> Aggregate:
        low, high = AGGREGATES[name.text]
        if not low <= len(arguments) <= high:
            raise Ill(name.at, f"{name.text}() with {low if low == high else f'{low} or {high}'} arguments")
        self.count += 1
        return Aggregate(name.at, name.text, arguments[0] if arguments else None, self.count - 1)
