"""The features by the book, slowly: fastavro reads the records, Python and xxhash make the keys."""

from __future__ import annotations

import io
import json
import math
import struct
from collections.abc import Iterable, Sequence
from datetime import UTC, datetime
from typing import Any

import fastavro
import numpy as np
import xxhash

from freshet.config.avro.schema import Record, to_json
from freshet.config.spec.layout import Layout
from freshet.config.spec.model import Feature, Spec
from freshet.types import BytesColumn

MASK = (1 << 64) - 1


def write(schema: Record, values: Iterable[Any], prefix: bytes = b"") -> BytesColumn:
    """Records as fastavro writes them."""
    parsed = fastavro.parse_schema(json.loads(json.dumps(to_json(schema))))
    out = []
    for value in values:
        stream = io.BytesIO()
        fastavro.schemaless_writer(stream, parsed, value)
        out.append(prefix + stream.getvalue())
    return BytesColumn.of(out)


def read(schema: Record, record: bytes) -> Any:
    """A record as fastavro reads it; demands that all bytes are used."""
    stream = io.BytesIO(record)
    value = fastavro.schemaless_reader(stream, fastavro.parse_schema(to_json(schema)), None)
    if stream.read(1):
        raise ValueError("trailing bytes")
    return value


def mix64(x: int) -> int:
    x &= MASK
    x ^= x >> 27
    x = x * 0x3C79AC492BA7B653 & MASK
    x ^= x >> 33
    x = x * 0x1C69B3F74AC4AE35 & MASK
    return x ^ (x >> 27)


def salt_of(spec: Spec, f: Feature) -> int:
    salt = xxhash.xxh3_64_intdigest(f"freshet.table:{f.table or ''}".encode(), 0)
    others = [g for g in spec.features if g.table == f.table and g.name != f.name]
    if f.kind == "cross" or not others or spec.table(f.table or "").shared:
        return salt
    return xxhash.xxh3_64_intdigest(f"freshet.feature:{f.name}".encode(), salt)


def key(value: Any, salt: int) -> int:
    if value is None or (isinstance(value, float) and math.isnan(value)):
        return 0
    if isinstance(value, (str, bytes)):
        raw = value.encode("utf-8", "surrogateescape") if isinstance(value, str) else value
        return xxhash.xxh3_64_intdigest(raw, salt) or 1
    if isinstance(value, float):
        value = struct.unpack("<Q", struct.pack("<d", value or 0.0))[0]
    return mix64((int(value) & MASK) ^ salt) or 1


def at(value: Any, path: str) -> Any:
    """The value at a path; lists are mapped over, what is missing is None."""
    for i, part in enumerate(path.split(".")):
        if isinstance(value, list):
            return [at(v, ".".join(path.split(".")[i:])) for v in value]
        if value is None:
            return None
        value = value.get(part)
    return value


def flat(value: Any) -> list[Any]:
    if isinstance(value, list):
        return [leaf for v in value for leaf in flat(v)]
    return [] if value is None or (isinstance(value, float) and math.isnan(value)) else [value]


def time_part(time_ms: int, part: str) -> int:
    t = datetime.fromtimestamp(time_ms // 1000, UTC)
    return {"hour": t.hour, "weekday": t.weekday(), "hour_of_week": t.weekday() * 24 + t.hour}[part]


def feature_key(spec: Spec, f: Feature, sample: Any, time_ms: int, serving: bool, salt: int) -> int:
    value = at(sample, f.field) if f.field else None
    if serving and f.serve_as is not None:
        value = f.serve_as
    match f.kind:
        case "id":
            return key(value, salt)
        case "bucket":
            number = None if value is None or math.isnan(value) else sum(e <= value for e in f.buckets)
            return key(number, salt)
        case "time":
            return key(time_part(time_ms, f.time or "hour"), salt)
        case "cross":
            keys = []
            for name in f.parts:
                part = spec.feature(name)
                keys.append(feature_key(spec, part, sample, time_ms, serving, salt_of(spec, part)))
            seed = xxhash.xxh3_64_intdigest(b"freshet.cross:" + "\x1f".join(f.parts).encode(), salt)
            packed = struct.pack(f"<{len(keys)}Q", *keys)
            return 0 if 0 in keys else xxhash.xxh3_64_intdigest(packed, seed) or 1
    raise AssertionError(f.kind)


def dense_value(f: Feature, sample: Any, serving: bool) -> float:
    value = at(sample, f.field or "")
    if serving and f.serve_as is not None:
        value = f.serve_as
    if value is None:
        return math.nan
    with np.errstate(over="ignore"):
        x = float(np.float32(value))
    if not math.isfinite(x):
        return math.nan
    return math.copysign(math.log1p(abs(x)), x) if "log1p" in f.dense else x


def group_keys(
    spec: Spec, layout: Layout, samples: Sequence[Any], times: Sequence[int], serving: bool = False
) -> list[list[list[list[int]]]]:
    """Keys by [group][feature][sample]: one, or as many as its list holds."""
    out: list[list[list[list[int]]]] = []
    for group in layout.groups:
        out.append([])
        for index in group.features:
            f = spec.features[index]
            salt = salt_of(spec, f)
            rows = []
            for sample, t in zip(samples, times, strict=True):
                if f.kind == "list":
                    rows.append([key(v, salt) for v in flat(at(sample, f.field or ""))][: f.max or 50])
                else:
                    rows.append([feature_key(spec, f, sample, t, serving, salt)])
            out[-1].append(rows)
    return out


def decoded_keys(decoded: Any) -> list[list[list[list[int]]]]:
    """The same shape, from `Decoded`."""
    out: list[list[list[list[int]]]] = []
    for group in decoded.groups:
        out.append([])
        for i, ends in enumerate(group.list_ends):
            keys = group.keys[group.feature_starts[i] : group.feature_starts[i + 1]].tolist()
            cuts = range(1, decoded.size + 1) if ends is None else ends.tolist()
            out[-1].append([keys[a:b] for a, b in zip([0, *cuts], cuts, strict=False)])
    return out
