"""Memory bounds of rows on this machine, as `freshet check` and `freshet up` report them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from typing import Any

from freshet.config.settings import Settings
from freshet.config.spec.model import Spec
from freshet.errors import ConfigError
from freshet.process.memory import machine_memory_bytes

TRAINER = "FRESHET_TRAINER_MEMORY_BYTES"
SHARD_EVICTS = "FRESHET_PARAMSERVER_EVICT_BYTES"
SHARD_FULL = "FRESHET_PARAMSERVER_MEMORY_BYTES"

DEFAULT_SHARE = 4
"""By default the rows of a trainer may take 1/DEFAULT_SHARE of the machine's memory."""


@dataclass(frozen=True, slots=True)
class RowsMemory:
    """The memory bound of the rows of one process."""

    setting: str  # the variable that sets the bound
    bytes: int  # 0: no bound
    evicts: bool  # True: rows are evicted beyond it; False: a shard is full, and training waits
    by_default: bool  # whether the variable is unset
    machine_bytes: int  # the machine's memory, or the cgroup's limit if that is less
    max_rows: Mapping[str, int]  # table -> rows beyond which it evicts; empty without tables

    def as_dict(self) -> dict[str, Any]:
        """Return the object for `--json`."""
        return asdict(self)

    def text(self) -> str:
        """Return one or two sentences for the terminal."""
        whole = f"{self.machine_bytes / 1e9:.1f} GB of memory"
        if not self.bytes:
            return (
                f"rows may take all of a shard's {whole}: {SHARD_EVICTS} sets a bound beyond which the least "
                f"recently used are evicted, {SHARD_FULL} one at which a shard is full and training waits"
            )
        if not self.evicts:
            return (
                f"rows of a shard may take {self.bytes:,} bytes, as {self.setting} says: a shard that has so "
                f"many is full, and training waits. {SHARD_EVICTS} sets a bound beyond which the least "
                "recently used are evicted instead"
            )
        how = (
            f"a quarter of the {whole} here; {self.setting} sets another bound"
            if self.by_default
            else f"as {self.setting} says, of {whole} here"
        )
        each = "" if self.setting == TRAINER else " of a shard"
        said = f"rows{each} may take {self.bytes:,} bytes, {how}"
        if not self.max_rows:
            return said
        tables = ", ".join(f"{rows:,} rows of {table}" for table, rows in self.max_rows.items())
        return f"{said}. Above {tables} the least recently used are evicted; inference holds the same rows"


def shard_evict_bytes(settings: Settings) -> int:
    """Return the bytes of rows beyond which a shard evicts; 0: no bound.

    Raises ConfigError if the shard would be full before: a full shard refuses rows instead of evicting.
    """
    evict, full = settings.paramserver.evict_bytes, settings.paramserver.memory_bytes
    if full and evict > full * 8 // 10:
        raise ConfigError(
            "environment",
            SHARD_EVICTS,
            evict,
            f"at most {full * 8 // 10}, 8/10 of {SHARD_FULL}",
            "a shard that is full before it evicts refuses rows, and training waits",
        )
    return evict


def trainer_rows_bytes(settings: Settings) -> int:
    """Return the bytes that rows may take in a trainer with its own rows."""
    return settings.trainer.memory_bytes or machine_memory_bytes() // DEFAULT_SHARE


def rows_memory(settings: Settings) -> RowsMemory:
    """Return the bound of the trainer, or of a shard if shards hold the rows, without `max_rows`."""
    machine = machine_memory_bytes()
    if settings.trainer.batches == "own":
        given = settings.trainer.memory_bytes
        return RowsMemory(TRAINER, trainer_rows_bytes(settings), True, not given, machine, {})
    if evict := shard_evict_bytes(settings):
        return RowsMemory(SHARD_EVICTS, evict, True, False, machine, {})
    full = settings.paramserver.memory_bytes
    return RowsMemory(SHARD_FULL, full, False, not full, machine, {})


def rows_memory_by_table(spec: Spec, settings: Settings) -> RowsMemory:
    """Return `rows_memory` with the maximum rows of each table."""
    from freshet.config.spec.layout import layout_of
    from freshet.tables.store import Store

    memory = rows_memory(settings)
    if not memory.evicts:
        return memory
    store = Store.of(spec, layout_of(spec), owned=False, most_bytes=memory.bytes)
    bounded = {t.name: store.max_rows[t.id] for t in spec.tables if t.id in store.max_rows}
    return replace(memory, max_rows={name: rows for name, rows in bounded.items() if rows is not None})
