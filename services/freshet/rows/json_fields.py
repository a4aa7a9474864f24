"""Identity and offsets as row stores keep them: JSON."""

from __future__ import annotations

from dataclasses import asdict

import orjson

from freshet.errors import Corrupt
from freshet.rows.store import StoreIdentity
from freshet.types import I64, Applied

__all__ = ["identity_text", "offsets_text", "offsets_texts", "parse_identity", "parse_offsets"]


def offsets_text(applied: Applied) -> str:
    """{partition: offset} as a meta keeps it."""
    return orjson.dumps({str(p): int(o) for p, o in applied.items()}).decode()


def offsets_texts(applied: I64) -> list[str]:
    """Offsets (K, P) as each meta keeps them; buckets mostly agree with their neighbours."""
    if not len(applied):
        return []
    new = (applied[1:] != applied[:-1]).any(1)
    texts = [offsets_text(dict(enumerate(row))) for row in [applied[0].tolist(), *applied[1:][new].tolist()]]
    return [texts[0], *(texts[i] for i in new.cumsum().tolist())]


def parse_offsets(text: str | bytes, where: object) -> dict[int, int]:
    """Offsets of a meta. Raises Corrupt."""
    try:
        return {int(partition): int(offset) for partition, offset in orjson.loads(text).items()}
    except (orjson.JSONDecodeError, AttributeError, ValueError, TypeError) as error:
        raise Corrupt(f"{where}: expected offsets in JSON, found {text!r}") from error


def identity_text(identity: StoreIdentity) -> str:
    """What a store is tied to."""
    return orjson.dumps(asdict(identity), option=orjson.OPT_NON_STR_KEYS).decode()


def parse_identity(text: str | bytes, where: object) -> StoreIdentity:
    """What a store is tied to. Raises Corrupt."""
    try:
        record = orjson.loads(text)
        record["record_bytes"] = {int(table): size for table, size in record["record_bytes"].items()}
        return StoreIdentity(**record)
    except (orjson.JSONDecodeError, KeyError, TypeError, ValueError, AttributeError) as error:
        raise Corrupt(f"{where}: expected the store's identity in JSON, found {text!r}") from error
