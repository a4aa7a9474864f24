"""Text of an expression to tokens, each with where it starts."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Literal

__all__ = ["WORDS", "Ill", "Token", "tokens"]

WORDS = ("and", "or", "not", "in", "is", "null", "true", "false")
LONGEST = 2_000  # characters; a spec is written by hand, and a tree's depth is bounded by its text

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
    """The expression is wrong at `at`: what was expected there, and a hint."""

    def __init__(self, at: int, expected: str, hint: str = "") -> None:
        super().__init__(expected)
        self.at, self.expected, self.hint = at, expected, hint


@dataclass(frozen=True, slots=True)
class Token:
    """One word, sign or literal; `text` is as written."""

    kind: Literal["number", "name", "text", "sign", "word", "end"]
    text: str
    at: int


def tokens(text: str) -> list[Token]:
    """All tokens, the last of kind `end`. Raises Ill."""
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


def unquote(text: str) -> str:
    """The text between the quotes; a backslash takes the next character as it is."""
    return re.sub(r"(?s)\\(.)", r"\1", text[1:-1])
