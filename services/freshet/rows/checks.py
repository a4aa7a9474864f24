"""What every row store checks before it writes: a flush's columns, and that the store is the model's."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, fields

import numpy as np
import orjson

from freshet.config.spec.identity import explain_defaults
from freshet.errors import Corrupt, Mismatch
from freshet.rows.store import StoreIdentity
from freshet.tables.runs import check_runs
from freshet.types import I64, U32, Applied, Flush

__all__ = [
    "A_STORE_OF_ITS_OWN",
    "check_flush",
    "check_identity",
    "identity_text",
    "offsets_text",
    "offsets_texts",
    "parse_identity",
    "parse_offsets",
]

# --- Identity and offsets as row stores keep them: JSON.


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


def check_flush(flush: Flush, buckets_of_model: int, widths: U32) -> None:
    """Raise ValueError if columns do not fit each other or the store; rows are not looked into."""
    buckets, count, directory = flush.buckets, len(flush), flush.runs.directory
    columns = (
        buckets,
        flush.fences,
        flush.seqs,
        flush.rows,
        flush.applied,
        flush.rows_offsets,
        flush.clocks_ms,
    )
    if any(len(column) != count for column in columns):
        raise ValueError(f"columns of a flush of {count} buckets have {[len(c) for c in columns]} values")
    if count and not (buckets[0] >= 0 and buckets[-1] < buckets_of_model and (np.diff(buckets) > 0).all()):
        raise ValueError(f"buckets of a flush must rise, from 0 to {buckets_of_model - 1}, found {buckets}")
    if not np.array_equal(flush.runs.widths, widths):
        raise ValueError("records of the flush have other lengths than those of the store")
    check_runs(flush.runs)
    ends = np.cumsum(flush.runs.sizes())
    starts = directory["at"].astype(np.int64) - flush.runs.start
    if len(ends) and (starts[0] or (starts[1:] != ends[:-1]).any() or ends[-1] != len(flush.runs.body)):
        raise ValueError("runs of a flush must lie end to end")
    if not np.isin(directory["bucket"], buckets).all():
        raise ValueError("a flush holds rows of buckets that it does not name")


A_STORE_OF_ITS_OWN = (
    "  a model has stores of its own: go on with the former spec and log, or give the new one another run\n"
    "  folder; in a Redis of yours another name at the end of the URL, which its user may write to; with\n"
    '  docker compose empty volumes (docs/compose.md, "Another model")'
)
"""What to do where rows are those of another model."""


def check_identity(where: object, expected: StoreIdentity, found: StoreIdentity) -> None:
    """Raise Mismatch, naming all that differs, if the store belongs to another model.

    Where the store is of the same spec in another generation of defaults, the error says how to go on.
    """
    lines = []
    for field in fields(StoreIdentity):
        wanted, stored = getattr(expected, field.name), getattr(found, field.name)
        if isinstance(wanted, Mapping):
            for key in sorted({*wanted, *stored}, key=str):
                if wanted.get(key) != stored.get(key):
                    lines.append(
                        f"  {field.name}.{key}: expected {wanted.get(key)!r}, found {stored.get(key)!r}"
                    )
        elif wanted != stored:
            lines.append(f"  {field.name}: expected {wanted!r}, found {stored!r}")
    if lines:
        raise Mismatch(
            "\n".join(
                [
                    f"{where}: the row store belongs to another model, spec or log:",
                    *lines,
                    explain_defaults(expected.spec_hash, found.spec_hash) or A_STORE_OF_ITS_OWN,
                ]
            )
        )
