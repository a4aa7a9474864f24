"""Bodies of requests read in plain Python by the rules of docs/reference/http.md: what is an event, and which
are refused. Slow and simple; it shares nothing with the native parser that it judges."""

from __future__ import annotations

import json
import re
import struct
from collections.abc import Iterator
from dataclasses import dataclass
from random import Random
from typing import Any

MOST_LEVELS = 64
SPACE = b" \n\r\t"
STRING = re.compile(rb'"(?:[^"\\\x00-\x1f]|\\["\\/bfnrt]|\\u[0-9a-fA-F]{4})*"')
NUMBER = re.compile(rb"-?(?:0(?![0-9])|[1-9][0-9]*)(?:\.[0-9]+)?(?:[eE][+-]?[0-9]+)?")
TOKEN = re.compile(
    rb'(?P<space>[ \n\r\t]+)|(?P<text>"(?:[^"\\]|\\[\x00-\xff])*")|(?P<open>[{\[])|(?P<close>[}\]])'
    rb"|(?P<mark>[,:])|(?P<bare>[A-Za-z0-9+\-._]+)"
)


class NotJson(Exception):
    """No value of RFC 8259 begins here."""


class Number(str):
    """A number as its digits."""


@dataclass(frozen=True)
class Event:
    """One event of a body."""

    text: bytes
    taken: bool


def parse_value(text: bytes, i: int, levels: int = 0) -> tuple[Any, int]:
    """The value at byte i, and the byte after it. An object is a tuple of pairs, a number a `Number`."""
    if levels > MOST_LEVELS or i >= len(text):
        raise NotJson
    if text[i : i + 1] in (b"{", b"["):
        return _container(text, i, levels + 1)
    if found := STRING.match(text, i):
        try:
            value = json.loads(found[0].decode())
            value.encode()  # half of a surrogate pair cannot be encoded
        except ValueError:
            raise NotJson from None
        return value, found.end()
    for word, value in ((b"null", None), (b"true", True), (b"false", False)):
        if text.startswith(word, i):
            return value, i + len(word)
    if found := NUMBER.match(text, i):
        return Number(found[0].decode()), found.end()
    raise NotJson


def _container(text: bytes, i: int, levels: int) -> tuple[Any, int]:
    if levels > MOST_LEVELS:
        raise NotJson
    is_object, closing = text[i : i + 1] == b"{", b"}" if text[i : i + 1] == b"{" else b"]"
    values: list[Any] = []
    i = _skip(text, i + 1)
    if text[i : i + 1] == closing:
        return (tuple(values) if is_object else values), i + 1
    while True:
        name: Any = None
        if is_object:
            if text[i : i + 1] != b'"':
                raise NotJson
            name, i = parse_value(text, i, levels)
            i = _skip(text, i)
            if text[i : i + 1] != b":":
                raise NotJson
            i = _skip(text, i + 1)
        value, i = parse_value(text, i, levels)
        values.append((name, value) if is_object else value)
        i = _skip(text, i)
        if text[i : i + 1] == closing:
            return (tuple(values) if is_object else values), i + 1
        if text[i : i + 1] != b",":
            raise NotJson
        i = _skip(text, i + 1)


def _skip(text: bytes, i: int, space: bytes = SPACE) -> int:
    while i < len(text) and text[i] in space:
        i += 1
    return i


def _end_of_broken(text: bytes, i: int, *, element: bool) -> int | None:  # noqa: PLR0911 - one a rule
    """Where a value that is no JSON ends by its quotes and brackets, if they are unambiguous."""
    closers: list[bytes] = []
    before = "space"  # kind of the token before
    valued = False  # a value or name has ended, and no comma or colon came since
    while found := TOKEN.match(text, i):
        kind, token = str(found.lastgroup), found[0]
        if kind in ("text", "bare") and valued and before != "space":
            return None
        if kind == "open":
            if valued:
                return None
            closers.append(b"}" if token == b"{" else b"]")
        elif kind == "close":
            if not closers:
                return i if element and token == b"]" else None
            if closers.pop() != token:
                return None
            if not closers and not element:
                return found.end()
        elif token == b"," and not closers:
            return i if element else None
        valued = kind in ("text", "bare", "close") or (valued and kind == "space")
        before, i = kind, found.end()
    return None


def _pieces(body: bytes) -> Iterator[tuple[int, int, Any]]:
    """(begin, end, value) of each event; NotJson in place of the value of one that is refused unread."""
    i = 3 if body.startswith(b"\xef\xbb\xbf") else 0
    broken = False
    while (i := _skip(body, i)) < len(body):
        if body[i] == ord("["):
            rest, elements = _elements(body, i, broken)
            yield from elements
            if rest >= 0:
                i = rest
                continue
            i, broken = -rest, True
            end = _object_line(body, i)
            yield i, _trim(body, i, end), NotJson
            i = end
            continue
        if body[i] != ord("{"):
            end = _line(body, i)
            yield i, _trim(body, i, end), NotJson
            i = end
            continue
        piece = body[: _object_line(body, i)]
        try:
            value, end = parse_value(piece if broken else body, i)
        except NotJson:
            broken = True
            cut = _end_of_broken(piece, i, element=False)
            if cut is None or not _may_follow(body, cut):
                cut = len(piece)
            yield i, _trim(body, i, cut), NotJson
            i = cut
            continue
        if not _may_follow(body, end):
            end = _line(body, _skip(body, end, b" \t\r"))
            yield i, _trim(body, i, end), NotJson
        else:
            yield i, end, value
        i = end


def _elements(body: bytes, i: int, broken: bool) -> tuple[int, list[tuple[int, int, Any]]]:
    """Elements of the array at byte i, and the byte after it; negative: that of what cannot be split.

    `broken`: an earlier object broke off, so no element reaches beyond the next line with a brace."""
    found: list[tuple[int, int, Any]] = []
    comma = i
    i = _skip(body, i + 1)
    if body[i : i + 1] == b"]":
        return i + 1, found
    while True:
        if i == len(body) or body[i] in b",]":
            found.append((comma, comma + 1, NotJson))
        else:
            begin, value = i, NotJson
            piece = body[: _object_line(body, i)] if broken else body
            try:
                value, end = parse_value(piece, i)
                i = _skip(body, end)
                if i == len(body) or body[i] not in b",]":
                    raise NotJson
            except NotJson:
                cut = _end_of_broken(piece, begin, element=True)
                if cut is None:
                    return -begin, found
                value, i, end = NotJson, cut, _trim(body, begin, cut)
            found.append((begin, end, value))
        if i == len(body):
            return i, found
        if body[i] == ord("]"):
            return i + 1, found
        comma = i
        i = _skip(body, i + 1)


def _may_follow(body: bytes, i: int) -> bool:
    """Whether an object may end here: nothing else on its line, or another value."""
    return body[_skip(body, i, b" \t\r") :][:1] in (b"", b"\n", b"{", b"[")


def _line(body: bytes, i: int) -> int:
    end = body.find(b"\n", i)
    return len(body) if end < 0 else end


def _object_line(body: bytes, i: int) -> int:
    end = body.find(b"\n{", i)
    return len(body) if end < 0 else end + 1


def _trim(body: bytes, begin: int, end: int) -> int:
    return begin + max(1, len(body[begin:end].rstrip(SPACE)))


YEAR_1_MS = -62_135_596_800_000
YEAR_2000_S = 946_684_800
"""An event time is within the years 1 to 9999."""

FIELDS = {"request": "string", "item": "long", "ts": "long", "score": "double?", "note": "string?"}
"""The action of tests/unit/features/test_intake.py, and a number."""


def fits(value: Any, latest_ms: int, *, others: bool = False) -> bool:
    """Whether a value is an event of FIELDS that is dated up to `latest_ms`.

    `others`: it may have other fields, too."""
    if not isinstance(value, tuple):
        return False
    names = [name for name, _ in value]
    found = dict(value)
    if len(names) != len(found) or not (others or found.keys() <= FIELDS.keys()):
        return False
    if not all(_names_once(found[name]) for name in found.keys() - FIELDS.keys()):
        return False
    if not all(_is(found.get(name), type_) for name, type_ in FIELDS.items()):
        return False
    ts = _whole(found["ts"])
    assert ts is not None, "checked above"
    in_larger_unit = YEAR_2000_S <= ts <= latest_ms // 1000  # seconds read as milliseconds
    return YEAR_1_MS <= ts <= latest_ms and not in_larger_unit


def _whole(number: str) -> int | None:
    """The whole number that a number's digits are, below 2^53 where they have a fraction or an exponent."""
    if re.fullmatch("-?[0-9]+", number):
        return int(number) if len(number) < 100 and -(1 << 63) <= int(number) < 1 << 63 else None
    value = float(number)
    if value == 0 and re.search("[1-9]", re.split("[eE]", number)[0]):
        return None  # too near to 0 for a double
    return int(value) if abs(value) < 1 << 53 and value == int(value) else None


def _names_once(value: Any) -> bool:
    """Whether no object within a value has a name twice."""
    if isinstance(value, tuple):
        names = [name for name, _ in value]
        return len(set(names)) == len(names) and all(_names_once(inner) for _, inner in value)
    return not isinstance(value, list) or all(map(_names_once, value))


def _is(value: Any, type_: str) -> bool:
    if type_.endswith("?") and value is None:
        return True
    match type_.rstrip("?"):
        case "string":
            return isinstance(value, str) and not isinstance(value, Number)
        case "long":
            return isinstance(value, Number) and _whole(value) is not None
        case _:
            return isinstance(value, Number) and float(value) not in (float("inf"), -float("inf"))


def events_of(body: bytes, latest_ms: int, *, others: bool = False) -> list[Event]:
    """The events of a body, and whether each is taken; as `fits`."""
    return [
        Event(body[begin:end], value is not NotJson and fits(value, latest_ms, others=others))
        for begin, end, value in _pieces(body)
    ]


SCRAPS = (
    b",", b"]", b"[", b"{", b"}", b'"', b"\\", b"\n", b"\r\n", b"\n{", b" ", b"\t", b"\x00", b"\x0b", b"'",
    b"/*", b"null", b"NaN", b"-Infinity", b"True", b"[]", b"{}", b"-0", b"0.0", b"00", b"1.", b".5", b"1e400",
    b"1e-400", b"-1E+99999999999999999999", b"9007199254740993", b"9223372036854775808",
    b"18446744073709551615", b"\\ud83d", b"\\ud83d\\ude00", b"\xed\xa0\xbd", b"\xff", b"\xc0\x80",
    b"\xef\xbb\xbf", b"\xf0\x9f\x98\x80", b'"item":1,', b',"note":"x"', b"\\u0069tem", b"[" * 70,
    b'{"a":' * 70,
)  # fmt: skip
"""What mutants get put in: the usual and the unusual ways in which bodies are wrong."""


def random_body(random: Random) -> bytes:
    """A body of good events, in one of the forms that bodies have."""
    texts = [_event(random) for _ in range(random.choice((1, 1, 2, 3, 5)))]
    match random.randrange(6):
        case 0:
            return b"\n".join(texts) + random.choice((b"", b"\n", b"\r\n"))
        case 1:
            return b"\r\n".join(texts)
        case 2:
            return b"[" + b",".join(texts) + b"]"
        case 3:
            return b"[\n  " + b",\n  ".join(texts) + b"\n]\n"
        case 4:
            return b"".join(texts)
        case _:
            return b"[" + b" , ".join(texts) + b"]\n" + texts[0]


def _event(random: Random) -> bytes:
    event: dict[str, Any] = {
        "request": f"r{random.randrange(5)}",
        "item": random.choice((1, -1, 1 << 53, (1 << 53) + 1, (1 << 63) - 1, -(1 << 63))),
        "ts": random.randrange(1, 900),
    }
    if random.random() < 0.5:
        event["score"] = random.choice((0, -0.0, 1.5, 1e308, struct.unpack("d", random.randbytes(8))[0]))
        if event["score"] != event["score"] or abs(event["score"]) == float("inf"):
            event["score"] = None
    if random.random() < 0.5:
        event["note"] = random.choice(("", "x,y", "{", "]}", 'say "hi"', "\u00e4\U0001f600", None, "a\nb"))
    indent = 1 if random.random() < 0.2 else None
    return json.dumps(event, ensure_ascii=random.random() < 0.5, indent=indent).encode()


def mutated(random: Random, body: bytes, other: bytes) -> bytes:
    """A body with some bytes changed, cut out, put in or put twice."""
    made = bytearray(body)
    for _ in range(random.choice((0, 1, 1, 1, 2, 3))):
        at = random.randrange(len(made) + 1)
        match random.randrange(7):
            case 0 if at < len(made):
                made[at] ^= 1 << random.randrange(8)
            case 1:
                del made[at : at + random.randrange(1, 9)]
            case 2:
                del made[at:]
            case 3:
                begin = random.randrange(len(other) + 1)
                made[at:at] = other[begin : begin + random.randrange(1, 60)]
            case 4:
                made[at:at] = made[at : at + random.randrange(1, 40)]
            case _:
                made[at:at] = random.choice(SCRAPS)
    return bytes(made)
