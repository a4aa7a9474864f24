"""One direction of a wire of rows or gradients: the rows' layout, what it cost and saved.

`wires_status` and WIRE_METRICS show this for all wires of a process.
"""

from __future__ import annotations

import secrets
import threading
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from typing import Any

import numpy as np
from numpy.typing import NDArray

from freshet.config.spec.layout import Layout
from freshet.config.spec.model import Spec
from freshet.observability.metrics import Metric
from freshet.types import F32
from freshet.wires.codecs import RowCodec, RowFormat, Seeds, format_for, pack_rows, unpack_rows

CHECK_EVERY = 64
"""One of so many encoded arrays is decoded again, for the error."""

SMOOTHING = 0.1
"""Weight of the newest error in its running mean."""

WiresStatus = Mapping[str, Mapping[str, Mapping[str, Mapping[str, Any]]]]
"""Wire -> tables of a store group -> codec -> figures of `RowCounts`."""


@dataclass(slots=True)
class RowCounts:
    """What one end has encoded or decoded in one codec, of one store group."""

    rows: int = 0
    bytes_raw: int = 0  # as float32
    bytes_wire: int = 0  # as encoded
    encode_s: float = 0.0
    decode_s: float = 0.0
    relative_error: float | None = None  # |x' - x| / |x| over an array, a running mean; None: not measured


class RowWire:
    """Encodes and decodes the rows of one direction of one wire. Thread-safe."""

    def __init__(self, scalars: Sequence[int] = (), seed: int | None = None) -> None:
        """Begin with no counts.

        Args:
            scalars: of each store group the floats of a row before its vector (`Group.scalars`).
            seed: start of the seeds of stochastic rounding; None: round to nearest.
        """
        self._scalars = tuple(scalars)
        self._seeds = None if seed is None else Seeds(seed)
        self._lock = threading.Lock()
        self._counts: dict[tuple[int, RowCodec], RowCounts] = {}
        self._packed = 0

    def form(self, codec: RowCodec, group: int, width: int) -> RowFormat:
        """Return the format of a group's rows of `width` floats in a frame of `codec`."""
        return format_for(codec, width, self._scalars[group] if group < len(self._scalars) else 0)

    def pack(self, group: int, values: F32, codec: RowCodec) -> NDArray[Any]:
        """Encode (N, S) float32 rows of a group in a frame of `codec`."""
        form = self.form(codec, group, values.shape[1])
        began = time.perf_counter()
        packed = pack_rows(values, form, self._seeds.next() if self._seeds is not None else 0)
        took = time.perf_counter() - began
        error = None
        if form.codec is not RowCodec.FP32 and self._is_checked() and len(values):
            error = relative_error(values, packed, form)
        with self._lock:
            counts = self._count(group, form, packed)
            counts.encode_s += took
            if error is not None:
                before = counts.relative_error
                counts.relative_error = error if before is None else before + SMOOTHING * (error - before)
        return packed

    def unpack(self, codec: RowCodec, group: int, packed: NDArray[Any], out: F32) -> None:
        """Decode a group's rows into `out`, (N, S) float32. Raises ValueError if shapes do not agree."""
        form = self.form(codec, group, out.shape[1])
        began = time.perf_counter()
        unpack_rows(packed, form, out)
        took = time.perf_counter() - began
        with self._lock:
            self._count(group, form, packed).decode_s += took

    def counts(self) -> dict[tuple[int, str], RowCounts]:
        """Return a copy of the counts, by store group and name of the codec in which its rows travelled."""
        with self._lock:
            return {
                (group, codec.name.lower()): RowCounts(
                    c.rows, c.bytes_raw, c.bytes_wire, c.encode_s, c.decode_s, c.relative_error
                )
                for (group, codec), c in self._counts.items()
            }

    def _count(self, group: int, form: RowFormat, packed: NDArray[Any]) -> RowCounts:
        counts = self._counts.setdefault((group, form.codec), RowCounts())
        counts.rows += len(packed)
        counts.bytes_raw += 4 * form.width * len(packed)
        counts.bytes_wire += packed.nbytes
        return counts

    def _is_checked(self) -> bool:
        self._packed += 1  # a lost count between threads moves a sample, no more
        return self._packed % CHECK_EVERY == 1


@dataclass(frozen=True, slots=True)
class RowWires:
    """The two directions of a wire: rows to where they are used, gradients back."""

    rows: RowWire
    gradients: RowWire

    @classmethod
    def of(cls, scalars: Sequence[int] = ()) -> RowWires:
        """Return wires of which the gradients are rounded stochastically. `scalars`: see `RowWire`."""
        return cls(RowWire(scalars), RowWire(scalars, seed=secrets.randbits(64)))


def relative_error(values: F32, packed: NDArray[Any], form: RowFormat) -> float | None:
    """Return |x' - x| / |x| of encoded (N, S) rows; None if a row is not finite, or all are zeros."""
    decoded = np.empty(values.shape, np.float32)
    unpack_rows(packed, form, decoded)
    size = float(np.linalg.norm(values.astype(np.float64)))
    error = float(np.linalg.norm(decoded.astype(np.float64) - values))
    return error / size if 0 < size < np.inf and np.isfinite(error) else None


def tables_of_groups(spec: Spec, layout: Layout) -> tuple[str, ...]:
    """Return for each store group the names of its tables, with commas between."""
    names = {table.id: table.name for table in spec.tables}
    return tuple(",".join(names[table] for table in group.tables) for group in layout.groups)


def wires_status(wires: Mapping[str, RowWire], tables: Sequence[str]) -> WiresStatus:
    """Return what each wire carried.

    Args:
        wires: by name: `lookup` and `push` between shard and its client, `batch` and `gradients` between
            embedder and trainer, `publish` to serving.
        tables: names of the tables of each store group (`tables_of_groups`).
    """
    found: dict[str, dict[str, dict[str, Any]]] = {}
    for name, wire in wires.items():
        groups: dict[str, dict[str, Any]] = {}
        for (group, codec), counts in sorted(wire.counts().items()):
            groups.setdefault(tables[group], {})[codec] = asdict(counts)
        found[name] = groups
    return found


def _figure(name: str, status: WiresStatus) -> dict[str, dict[str, dict[str, float]]]:
    """Return one figure, by wire, tables and codec; without those that were not measured."""
    return {
        wire: {
            tables: {codec: figures[name] for codec, figures in codecs.items() if figures[name] is not None}
            for tables, codecs in groups.items()
        }
        for wire, groups in status.items()
    }


_LABELS = ("wire", "tables", "codec")

WIRE_METRICS = (
    Metric(
        "freshet_wire_rows",
        "counter",
        "rows",
        "Rows and gradients of rows that this process encoded or decoded, by wire (lookup and push between "
        "shard and its client, batch and gradients between embedder and trainer, publish to serving), tables "
        "of a store group, and the codec in which they travelled. Wire dense, tables weights: the gradients "
        "of dense weights that this rank summed with others, one a step, and in mode async dense states, one "
        "an averaging.",
        _LABELS,
        at=partial(_figure, "rows"),
    ),
    Metric(
        "freshet_wire_raw_bytes",
        "counter",
        "bytes",
        "Bytes of these rows as float32.",
        _LABELS,
        at=partial(_figure, "bytes_raw"),
    ),
    Metric(
        "freshet_wire_bytes",
        "counter",
        "bytes",
        "Bytes of these rows as encoded.",
        _LABELS,
        at=partial(_figure, "bytes_wire"),
    ),
    Metric(
        "freshet_wire_encode_seconds",
        "counter",
        "seconds",
        "Time spent to encode them, and for dense gradients to decode them.",
        _LABELS,
        at=partial(_figure, "encode_s"),
    ),
    Metric(
        "freshet_wire_decode_seconds",
        "counter",
        "seconds",
        "Time spent to decode them.",
        _LABELS,
        at=partial(_figure, "decode_s"),
    ),
    Metric(
        "freshet_wire_relative_error",
        "gauge",
        "ratio",
        "Error of the decoded values, |x' - x| / |x|, a running mean over one of 64 encoded arrays.",
        _LABELS,
        at=partial(_figure, "relative_error"),
    ),
)
