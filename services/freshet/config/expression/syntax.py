"""Syntax of expressions: the tree, the tokens, and the parser by operator precedence (Pratt 1973).

Loosest first: or; and; not; comparisons, in, is; + and -; * / %; unary -. Comparisons do not chain. The nodes
are frozen; each has the place in the text at which it starts.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass, fields, is_dataclass
from typing import Any
from typing import Literal as OneOf

from freshet.config.options import nearest_hint

FUNCTIONS = {
    "abs": (1, 1),
    "exp": (1, 1),
    "log": (1, 1),
    "log1p": (1, 1),
    "max": (2, 16),
    "min": (2, 16),
    "sqrt": (1, 1),
}
"""Functions of a row's numbers: least and greatest number of arguments."""

AGGREGATES = {"sum": (1, 1), "count": (0, 1), "max": (1, 1), "min": (1, 1), "last": (1, 1)}
"""Functions over all matching actions of an impression: least and greatest number of arguments."""


@dataclass(frozen=True, slots=True)
class Literal:
    """A number, text or truth value; text with its hash, if the parser was given a hash function."""

    at: int
    value: float | int | str | bool
    hashed: int | None = None


@dataclass(frozen=True, slots=True)
class Field:
    """A column by its path, `type` for `action.type`."""

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
    """An operator with two operands; `at` is the place of the operator."""

    at: int
    op: str
    left: Node
    right: Node


@dataclass(frozen=True, slots=True)
class In:
    """Whether a value is in a list of literals."""

    at: int
    operand: Node
    items: tuple[Literal, ...]
    negated: bool


@dataclass(frozen=True, slots=True)
class IsNull:
    """Whether a value is null; every other comparison with null is false."""

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
    """A function over the matching actions of an impression; only count() may have no argument."""

    at: int
    name: str
    argument: Node | None
    index: int  # position among the aggregates of the expression


Node = Literal | Field | Unary | Binary | In | IsNull | Call | Aggregate


WORDS = ("and", "or", "not", "in", "is", "null", "true", "false")

RESERVED = frozenset(WORDS) | frozenset(FUNCTIONS) | frozenset(AGGREGATES) | {"action"}
"""Names with a meaning in the language, which no label may have."""

LONGEST = 2_000
"""Characters of an expression. Specs are written by hand."""

TOKEN = re.compile(
    r"""\s*(?:
      (?P<number>(?:\d+\.\d*|\.\d+|\d+)(?:[eE][+-]?\d+)?)
    | (?P<name>[A-Za-z_]\w*(?:\.[A-Za-z_]\w*)*)
    | (?P<text>'(?:[^'\\]|\\.)*'|"(?:[^"\\]|\\.)*")
    | (?P<sign>==|!=|<=|>=|[-+*/%<>()\[\],])
    )""",
    re.VERBOSE | re.ASCII,
)
INSTEAD = {
    "=": "write == to compare",
    "&": "write and",
    "|": "write or",
    "!": "write not",
    "'": "close the quote",
    '"': "close the quote",
}


class Ill(Exception):
    """The expression is wrong at `at`, where `expected` should stand."""

    def __init__(self, at: int, expected: str, hint: str = "") -> None:
        super().__init__(expected)
        self.at, self.expected, self.hint = at, expected, hint


@dataclass(frozen=True, slots=True)
class Token:
    """One word, sign or literal, as it is written."""

    kind: OneOf["number", "name", "text", "sign", "word", "end"]
    text: str
    at: int


def tokens(text: str) -> list[Token]:
    """Split a text into tokens; the last one has the kind `end`. Raises Ill."""
    if len(text) > LONGEST:
        raise Ill(LONGEST, f"an expression of at most {LONGEST} characters")
    found: list[Token] = []
    at = 0
    while text[at:].strip():
        match = TOKEN.match(text, at)
        if match is None:
            at = len(text) - len(text[at:].lstrip())
            raise Ill(at, "a number, a name, 'text' or an operator", INSTEAD.get(text[at], ""))
        kind = str(match.lastgroup)
        word = match[kind]
        found.append(Token("word" if word in WORDS else kind, word, match.start(kind)))  # type: ignore[arg-type]
        at = match.end()
    return [*found, Token("end", "", len(text.rstrip()))]


DEEPEST = 32
"""Limit on the nesting of brackets, signs and calls: more than a readable score has, and less than Python's
stack allows."""
TALLEST = 128
"""Limit on the levels of the tree: each term of a sum adds one, and readers of the tree recurse into it."""

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
NOT, MINUS = 3, 7  # precedence of the prefixes


HashText = Callable[[str], int]
"""The unsalted 64-bit hash of text in columns."""


def parse(text: str, *, prefix: str, aggregates: bool, hash_text: HashText | None = None) -> Node:
    """Parse an expression.

    Args:
        prefix:     of fields in the text, "action." or ""; their paths are without it.
        aggregates: whether functions over actions, such as sum(), are allowed.
        hash_text:  hash of text, which evaluation needs.

    Raises:
        Ill: the text is no expression; names the place.
    """
    parser = _Parser(tokens(text), prefix, aggregates, hash_text)
    node = parser.expression(0)
    parser.expect("")
    level, levels = [node], 0
    while level:
        levels += 1
        level = [child for inner in level for child in children(inner)]
    if levels > TALLEST:
        hint = "each term of a sum, and each or, is a level: put brackets around parts, or write x in [...]"
        raise Ill(node.at, f"an expression of at most {TALLEST} levels, found {levels}", hint)
    return node


def children(node: Node) -> list[Node]:
    """Return the nodes directly below a node."""
    found: list[Node] = []
    for f in fields(node):
        value: Any = getattr(node, f.name)
        found += [v for v in (value if isinstance(value, tuple) else (value,)) if is_dataclass(v)]  # type: ignore[misc]
    return found


@dataclass(slots=True)
class _Parser:
    items: list[Token]
    prefix: str
    aggregates: bool
    hash_text: HashText | None
    position: int = 0
    depth: int = 0
    count: int = 0  # aggregates so far

    @property
    def current(self) -> Token:
        return self.items[self.position]

    def advance(self) -> Token:
        token = self.current
        self.position += token.kind != "end"
        return token

    def expect(self, text: str) -> Token:
        if self.current.text != text or self.current.kind == "text":
            raise Ill(self.current.at, f'"{text}"' if text else "an operator or the end of the expression")
        return self.advance()

    def expression(self, binds: int) -> Node:
        self.depth += 1
        if self.depth > DEEPEST:
            raise Ill(self.current.at, f"an expression nested at most {DEEPEST} deep")
        left = self.prefixed()
        compared = False
        while self.current.kind in ("sign", "word") and BINDS.get(self.current.text, 0) > binds:
            token = self.advance()
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
        token = self.advance()
        if token.kind == "number":
            value = float(token.text)
            if value == float("inf"):
                raise Ill(token.at, "a number that a double can hold")
            exact = token.text.isdigit() and int(token.text) < 2**63
            return Literal(token.at, int(token.text) if exact else value)
        if token.kind == "text":
            text = re.sub(r"(?s)\\(.)", r"\1", token.text[1:-1])
            return Literal(token.at, text, None if self.hash_text is None else self.hash_text(text))
        if token.text in ("true", "false"):
            return Literal(token.at, token.text == "true")
        if token.text in ("not", "-") and token.kind != "name":
            return _unary(token, self.expression(NOT if token.text == "not" else MINUS))
        if token.text == "(" and token.kind == "sign":
            inner = self.expression(0)
            self.expect(")")
            return inner
        if token.kind == "name":
            called = self.current.text == "(" and self.current.kind == "sign"
            return self.call(token) if called else self.field(token)
        hint = "null stands only after is: x is null" if token.text == "null" else ""
        raise Ill(token.at, "a value", hint)

    def infixed(self, left: Node, token: Token) -> Node:
        if token.text == "is":
            negated = self.current.text == "not" and bool(self.advance())
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
            at = self.current.at
            item = self.prefixed()
            if not isinstance(item, Literal) or isinstance(item.value, bool):
                raise Ill(at, "a number or 'text'", "a list holds constants only")
            items.append(item)
            if self.current.text != ",":
                self.expect("]")
                return tuple(items)
            self.advance()

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
        while self.current.text != ")" or self.current.kind != "sign":
            if arguments:
                self.expect(",")
            arguments.append(self.expression(0))
        self.advance()
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


def _unary(token: Token, operand: Node) -> Node:
    """Return `not` or `-` of an operand; a negative number is a literal, so that an integer stays exact."""
    number = operand.value if isinstance(operand, Literal) else ""
    if token.text == "-" and isinstance(number, int | float) and not isinstance(number, bool):
        return Literal(token.at, -number)
    return Unary(token.at, token.text, operand)
