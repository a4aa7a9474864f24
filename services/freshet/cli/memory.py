"""How much memory rows may take on this machine, as `freshet check` and `freshet up` report it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from typing import Any

from freshet.runtime.process_metrics import machine_memory_bytes
from freshet.settings import Settings
from freshet.spec.model import Spec

__all__ = ["RowsMemory", "rows_memory", "rows_memory_by_table", "trainer_rows_bytes"]

DEFAULT_SHARE = 4
"""By default the rows of a trainer take one part in so many of the machine's memory."""


@dataclass(frozen=True, slots=True)
class RowsMemory:
    """The bound of the rows that one process holds."""

    setting: str  # the variable that sets the bound
    bytes: int  # 0: no bound
    by_default: bool  # whether the variable is unset
    machine_bytes: int  # the machine's memory, or the cgroup's limit if that is less
    max_rows: Mapping[str, int]  # by table: above so many rows it evicts; empty where not asked for

    def as_dict(self) -> dict[str, Any]:
        """For `--json`."""
        return asdict(self)

    def text(self) -> str:
        """One sentence or two, for people."""
        whole = f"{self.machine_bytes / 1e9:.1f} GB of memory"
        if not self.bytes:
            return f"rows may take all of a shard's {whole}: {self.setting} sets a bound"
        how = (
            f"a quarter of the {whole} here; {self.setting} sets another bound"
            if self.by_default
            else f"as {self.setting} says, of {whole} here"
        )
        said = f"rows may take {self.bytes:,} bytes, {how}"
        if not self.max_rows:
            return said
        tables = ", ".join(f"{rows:,} rows of {table}" for table, rows in self.max_rows.items())
        return f"{said}. Above {tables} the least recently used are evicted; inference holds the same rows"


def trainer_rows_bytes(settings: Settings) -> int:
    """Bytes that the rows of a trainer that holds them itself may take."""
    return settings.trainer.memory_bytes or machine_memory_bytes() // DEFAULT_SHARE


def rows_memory(settings: Settings) -> RowsMemory:
    """The bound by these settings, without tables: the trainer's, or a shard's where shards hold the rows."""
    own = settings.trainer.batches == "own"
    given = settings.trainer.memory_bytes if own else settings.paramserver.memory_bytes
    return RowsMemory(
        "FRESHET_TRAINER_MEMORY_BYTES" if own else "FRESHET_PARAMSERVER_MEMORY_BYTES",
        trainer_rows_bytes(settings) if own else given,
        not given,
        machine_memory_bytes(),
        {},
    )


def rows_memory_by_table(spec: Spec, settings: Settings) -> RowsMemory:
    """As `rows_memory`, with the rows that each table may have."""
    from freshet.spec.layout import layout_of
    from freshet.tables.store import Store

    memory = rows_memory(settings)
    if settings.trainer.batches != "own":
        return memory
    store = Store.of(spec, layout_of(spec), held=False, most_bytes=memory.bytes)
    bounded = {t.name: store.max_rows[t.id] for t in spec.tables if t.id in store.max_rows}
    return replace(memory, max_rows={name: rows for name, rows in bounded.items() if rows is not None})
