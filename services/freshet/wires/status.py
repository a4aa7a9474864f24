"""What the wires of a process carried: the figures of `freshet status` and metrics."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict
from functools import partial
from typing import Any

from freshet.config.spec.layout import Layout
from freshet.config.spec.model import Spec
from freshet.observability.metrics import Metric
from freshet.wires.row_wire import RowWire

WiresStatus = Mapping[str, Mapping[str, Mapping[str, Mapping[str, Any]]]]
"""Wire -> tables of a store group -> codec -> figures of `RowCounts`."""


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
