"""Must this record be refused, and why? By the Avro specification and by what freshet refuses beyond it.

fastavro decides nothing about hostile bytes: it takes what it can make sense of, and trusts counts. Where
freshet is stricter, the judge says by which rule; fastavro judges everything else. The rules, and why:

TRUNCATED   the record ends inside a value. fastavro raises, too.
TRAILING    bytes after the last field: a record of another schema. fastavro stops before them.
UNION, ENUM an index that does not exist. fastavro raises for one above, and takes -1 for the last one.
VARINT      more than 10 bytes or 64 bits: there are no such numbers; fastavro shifts away what does not fit.
INT_RANGE   an int beyond 32 bits; fastavro reads a long.
BOOL        neither 0 nor 1; fastavro takes any byte.
LENGTH      a negative length; fastavro reads to the end of the input.
BLOCK       a count that the bytes left cannot hold: fastavro runs into the end, too. Freshet alone: more
            than 2^16 items that take no bytes (ten bytes could ask for 2^62 of them, and fastavro would make
            them all), and a block that is not as long as it says (fastavro ignores sizes).
UTF8        a string that is none: refused by the check at the way in. The decoder takes strings for bytes.

Not refused: numbers in more bytes than they need. The specification allows them; fastavro reads them.

Two kinds of good records may mean different things to different readers, and `check` finds them: those
with a block that the decoder skips by its size, if something else is in it; and maps that have a key twice.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from freshet.features.program import WHY
from tests.fuzz.schemas import MAP_KEY

TRUNCATED, VARINT, INT_RANGE, BOOL, LENGTH, UNION, ENUM, BLOCK, TRAILING, UTF8 = WHY[1:11]
MAX_EMPTY_ITEMS = 1 << 16
LIMITS = {"int": 1 << 31, "long": 1 << 63}


class Refused(Exception):
    """A record that must be refused: the rule, and whether fastavro has it too."""

    def __init__(self, rule: str, *, shared: bool) -> None:
        super().__init__(rule)
        self.rule = rule
        self.shared = shared


class Judge:
    """Walks records of one schema without making values."""

    def __init__(self, schema: dict[str, Any], *, wanted: Callable[[str], bool], strict: bool) -> None:
        """Args:
        schema: as JSON.
        wanted: does a feature lie at or below this path? Blocks of others are skipped by their size, unread.
            Items of an array have its path; a map's values have its path and their key, or "*" for all that
            no feature can name.
        strict: nothing is skipped, and strings are UTF-8.
        """
        self.schema = schema
        self.wanted = wanted
        self.strict = strict
        self.record = b""
        self.at = 0
        self.empty_items = 0
        self.ambiguous = False

    def check(self, record: bytes) -> bool:
        """Whether the record means the same to every reader.

        Raises:
            Refused: it must be refused.
        """
        self.record, self.at, self.empty_items, self.ambiguous = record, 0, 0, False
        self.value(self.schema, "")
        if self.at != len(record):
            raise Refused(TRAILING, shared=True)
        return not self.ambiguous

    def number(self) -> int:
        raw = 0
        for i in range(10):
            if self.at + i >= len(self.record):
                raise Refused(TRUNCATED, shared=True)
            byte = self.record[self.at + i]
            raw |= (byte & 0x7F) << (7 * i)
            if byte < 0x80:
                if i == 9 and byte > 1:
                    break
                self.at += i + 1
                return (raw >> 1) ^ -(raw & 1)
        raise Refused(VARINT, shared=False)

    def take(self, n: int) -> bytes:
        if n > len(self.record) - self.at:
            raise Refused(TRUNCATED, shared=True)
        self.at += n
        return self.record[self.at - n : self.at]

    def sized(self) -> bytes:
        n = self.number()
        if n < 0:
            raise Refused(LENGTH, shared=False)
        return self.take(n)

    def string(self) -> bytes:
        raw = self.sized()
        if self.strict:
            try:
                raw.decode()
            except UnicodeDecodeError:
                raise Refused(UTF8, shared=True) from None
        return raw

    def value(self, type_: Any, path: str) -> None:
        if isinstance(type_, list):
            branch = self.number()
            if not 0 <= branch < len(type_):
                raise Refused(UNION, shared=branch >= len(type_))
            self.value(type_[branch], path)
        elif isinstance(type_, str):
            self.leaf(type_)
        else:
            self.composite(type_, path)

    def leaf(self, name: str) -> None:
        match name:
            case "boolean":
                if self.take(1) not in (b"\0", b"\1"):
                    raise Refused(BOOL, shared=False)
            case "int" | "long":
                if not -LIMITS[name] <= self.number() < LIMITS[name]:
                    raise Refused(INT_RANGE, shared=False)
            case "float":
                self.take(4)
            case "double":
                self.take(8)
            case "bytes":
                self.sized()
            case "string":
                self.string()

    def composite(self, type_: dict[str, Any], path: str) -> None:
        match type_["type"]:
            case "record":
                for f in type_["fields"]:
                    self.value(f["type"], f"{path}.{f['name']}" if path else f["name"])
            case "enum":
                symbol, symbols = self.number(), len(type_["symbols"])
                if not 0 <= symbol < symbols:
                    raise Refused(ENUM, shared=symbol >= symbols)
            case "fixed":
                self.take(type_["size"])
            case "array":
                self.blocks(type_["items"], path, lambda: self.value(type_["items"], path))
            case _:
                self.map(type_["values"], path)

    def map(self, values: Any, path: str) -> None:
        keys: list[bytes] = []

        def entry() -> None:
            keys.append(self.string())
            self.value(values, f"{path}.{MAP_KEY if keys[-1] == MAP_KEY.encode() else '*'}")

        self.blocks(values, path, entry, key_bytes=1)
        self.ambiguous |= len(set(keys)) < len(keys)

    def blocks(self, type_: Any, path: str, item: Callable[[], object], key_bytes: int = 0) -> None:
        least_bytes = key_bytes or least(type_)
        while count := self.number():
            end = None
            if count < 0:
                if count == -(1 << 63):
                    raise Refused(BLOCK, shared=False)
                count = -count
                size = self.number()
                if size < 0:
                    raise Refused(LENGTH, shared=False)
                end = self.at + size
                if end > len(self.record):
                    raise Refused(TRUNCATED, shared=False)  # fastavro may find fewer bytes, all there
            if least_bytes:
                if count > (len(self.record) - self.at) // least_bytes:
                    raise Refused(
                        BLOCK, shared=isinstance(type_, str)
                    )  # else fastavro might find nulls inside
            elif count > MAX_EMPTY_ITEMS - self.empty_items:
                raise Refused(BLOCK, shared=False)
            else:
                self.empty_items += count
            if end is not None and not self.strict and not self.wanted(path):
                self.at, self.ambiguous = end, True
                continue
            for _ in range(count):
                item()
            if end is not None and self.at != end:
                raise Refused(BLOCK, shared=False)


def least(type_: Any) -> int:
    """Fewest bytes of a value."""
    if isinstance(type_, str):
        return {"null": 0, "float": 4, "double": 8}.get(type_, 1)
    if isinstance(type_, dict) and type_["type"] == "record":
        return sum(least(f["type"]) for f in type_["fields"])
    if isinstance(type_, dict) and type_["type"] == "fixed":
        return int(type_["size"])
    return 1
