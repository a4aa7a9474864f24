"""Random Avro schemas, values of them, and their bytes in any form that a writer may choose.

fastavro writes one form only: arrays and maps as one block without its size. Others cut them into blocks, and
write sizes (a negative count) so that readers may skip; those are the forms that hide attacks.
"""

from __future__ import annotations

import struct
from collections.abc import Callable
from random import Random
from typing import Any

MAX_DEPTH = 3
LEAVES = ("null", "boolean", "int", "long", "float", "double", "bytes", "string")
MAP_KEY = "k"  # a key that features may ask for
LETTERS = "abcdefghijklmnopqrstuvwxyzäößλ語🙂 \0"


class SchemaMaker:
    """Makes one random record schema, as JSON; names are counted, as a name may be defined once."""

    def __init__(self, random: Random) -> None:
        self.random = random
        self.names = 0

    def record(self, depth: int = 0) -> dict[str, Any]:
        fields = self.random.randint(0 if depth else 1, 9 if depth == 0 else 4)
        return {
            "type": "record",
            "name": self.name("R"),
            "fields": [{"name": f"f{i}", "type": self.type(depth)} for i in range(fields)],
        }

    def type(self, depth: int, *, in_union: bool = False) -> Any:  # noqa: PLR0911 - one for each kind
        kinds = ["leaf"] * 8 + ["enum", "fixed"]
        if depth < MAX_DEPTH:
            kinds += ["array", "array", "map", "record"] + ([] if in_union else ["nullable"] * 5 + ["union"])
        match self.random.choice(kinds):
            case "enum":
                symbols = [f"S{i}" for i in range(self.random.choice((1, 2, 5, 70)))]
                return {"type": "enum", "name": self.name("E"), "symbols": symbols}
            case "fixed":
                return {
                    "type": "fixed",
                    "name": self.name("F"),
                    "size": self.random.choice((0, 1, 4, 16, 20)),
                }
            case "array":
                return {"type": "array", "items": self.type(depth + 1)}
            case "map":
                return {"type": "map", "values": self.type(depth + 1)}
            case "record":
                return self.record(depth + 1)
            case "nullable":
                return self.shuffled(["null", self.other_than_null(depth)])
            case "union":
                return self.union(depth)
            case _:
                return self.random.choice(LEAVES)

    def union(self, depth: int) -> list[Any]:
        kinds: dict[str, Any] = {}
        for _ in range(self.random.randint(1, 4)):
            made = self.type(depth + 1, in_union=True)
            kinds[made if isinstance(made, str) else made.get("name", made["type"])] = made
        return self.shuffled(list(kinds.values()))

    def other_than_null(self, depth: int) -> Any:
        while (made := self.type(depth + 1, in_union=True)) == "null":
            pass
        return made

    def shuffled(self, of: list[Any]) -> list[Any]:
        self.random.shuffle(of)
        return of

    def name(self, kind: str) -> str:
        self.names += 1
        return f"{kind}{self.names}"


def varint(value: int) -> bytes:
    """A number as Avro writes ints and longs."""
    raw = (value << 1) ^ (value >> 63)
    raw &= (1 << 64) - 1
    out = bytearray()
    while raw > 0x7F:
        out.append(raw & 0x7F | 0x80)
        raw >>= 7
    return bytes([*out, raw])


class Writer:
    """Writes random values of a schema."""

    def __init__(self, random: Random) -> None:
        self.random = random

    def write(self, type_: Any) -> bytes:  # noqa: PLR0911 - one for each kind
        if isinstance(type_, list):
            branch = self.random.randrange(len(type_))
            return varint(branch) + self.write(type_[branch])
        if isinstance(type_, str):
            return self.leaf(type_)
        match type_["type"]:
            case "record":
                return b"".join(self.write(f["type"]) for f in type_["fields"])
            case "enum":
                return varint(self.random.randrange(len(type_["symbols"])))
            case "fixed":
                return self.random.randbytes(type_["size"])
            case "array":
                return self.blocks(lambda: self.write(type_["items"]))
            case _:
                key = self.string if self.random.random() < 0.5 else lambda: varint(1) + MAP_KEY.encode()
                return self.blocks(
                    lambda: key() + self.write(type_["values"]), most=5 if key == self.string else 1
                )

    def leaf(self, name: str) -> bytes:  # noqa: PLR0911 - one for each kind
        random = self.random
        match name:
            case "null":
                return b""
            case "boolean":
                return bytes([random.getrandbits(1)])
            case "int" | "long":
                bits = random.randint(0, 31 if name == "int" else 63)
                return varint(random.choice((1, -1)) * random.getrandbits(bits) - random.getrandbits(1))
            case "float":
                usual = struct.pack("<f", random.uniform(-1e3, 1e3))
                return usual if random.random() < 0.8 else random.randbytes(4)
            case "double":
                usual = struct.pack("<d", random.uniform(-1e3, 1e3))
                return usual if random.random() < 0.8 else random.randbytes(8)
            case "bytes":
                raw = random.randbytes(random.choice((0, 1, 3, 4, 8, 9, 16, 17, 70)))
                return varint(len(raw)) + raw
            case _:
                return self.string()

    def string(self) -> bytes:
        size = self.random.choice((0, 1, 2, 3, 4, 5, 7, 8, 9, 12, 16, 17, 33, 130))
        raw = "".join(self.random.choices(LETTERS, k=self.random.randint(size // 2, size))).encode()
        return varint(len(raw)) + raw

    def blocks(self, item: Callable[[], bytes], most: int = 5) -> bytes:
        """Up to `most` items a block, in up to 3 blocks, some with their size."""
        out = b""
        for _ in range(self.random.choice((0, 1, 1, 1, 2, 3)[: most + 3])):
            items = [item() for _ in range(self.random.randint(1, most))]
            body = b"".join(items)
            if self.random.random() < 0.3:
                out += varint(-len(items)) + varint(len(body)) + body
            else:
                out += varint(len(items)) + body
        return out + b"\0"


NASTY = (
    b"\0", b"\1", b"\2", b"\3", b"\x7f", b"\x80", b"\x81", b"\xfe", b"\xff", b"\xc3", b"\xed\xa0\x80",
    b"\x80\0", b"\xff" * 9 + b"\1", b"\xff" * 9 + b"\2", b"\xff" * 10, b"\x80" * 9 + b"\0",
    b"\x80" * 10 + b"\0",
    b"\xfe\xff\xff\xff\x0f", b"\xff\xff\xff\xff\x0f", b"\x80\x80\x80\x80\x10", b"\x81\x80\x80\x80\x10",
)  # fmt: skip
"""Small counts, sign and continuation bits, the ends of 32 and 64 bits, broken UTF-8."""


def mutated(record: bytes, random: Random) -> bytes:
    """A record with 1 to 3 faults: bits, bytes, pieces gone, repeated or put in, cut off or longer."""
    out = bytearray(record)
    for _ in range(random.choice((1, 1, 1, 2, 3))):
        at = random.randrange(len(out) + 1)
        piece = random.choice(NASTY)
        match random.randrange(8):
            case 0 if at < len(out):
                out[at] ^= 1 << random.randrange(8)
            case 1 if at < len(out):
                out[at : at + 1] = piece
            case 2:
                out[at : at + len(piece)] = piece
            case 3:
                out[at:at] = piece
            case 4:
                del out[at : at + random.randint(1, 8)]
            case 5:
                del out[at:]
            case 6:
                out[at:at] = out[at : at + random.randint(1, 20)]
            case _:
                out += piece
    return bytes(out)
