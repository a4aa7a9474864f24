"""Memory bounds of rows on this machine, as `freshet check` and `freshet up` report them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from freshet.config.settings import Settings
from freshet.config.spec.model import Spec
from freshet.errors import ConfigError
from freshet.process.memory import machine_memory_bytes

if TYPE_CHECKING:
    from freshet.tables import RowsBound

TRAINER = "FRESHET_TRAINER_MEMORY_BYTES"
SHARD_EVICTS = "FRESHET_PARAMSERVER_EVICT_BYTES"
SHARD_FULL = "FRESHET_PARAMSERVER_MEMORY_BYTES"

DEFAULT_SHARE = 4
"""By default the rows of a trainer may take 1/DEFAULT_SHARE of the machine's memory."""


@dataclass(frozen=True, slots=True)
class RowsMemory:
    """The memory bound of the rows of one process, and of an inference server."""

    setting: str  # the variable that sets the bound
    bytes: int  # 0: no bound
    evicts: bool  # True: rows leave memory beyond it; False: a shard is full, and training waits
    ssd_folder: str  # rows beyond it go here; empty: they are evicted
    by_default: bool  # whether the variable is unset
    machine_bytes: int  # the machine's memory, or the cgroup's limit if that is less
    max_rows: Mapping[str, int]  # table -> rows beyond which it evicts; empty without tables
    inference_bytes: int  # memory for rows of an inference server; 0: no bound
    inference_ssd_folder: str  # its rows beyond that go here

    def text(self) -> str:
        """Return some sentences for the terminal."""
        if self.inference_ssd_folder:
            return (
                f"{self._trained()}. An inference server's rows may take {self.inference_bytes:,} bytes; "
                f"beyond that they are in files in {self.inference_ssd_folder}"
            )
        return self._trained()

    def _trained(self) -> str:
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
        if self.ssd_folder:
            return f"{said}. Beyond that the least used are in files in {self.ssd_folder}"
        if not self.max_rows:
            return said
        tables = ", ".join(f"{rows:,} rows of {table}" for table, rows in self.max_rows.items())
        same = "" if self.inference_ssd_folder else "; inference holds the same rows"
        return f"{said}. Above {tables} the least recently used are evicted{same}"


def shard_rows_bound(settings: Settings) -> RowsBound:
    """Return the memory of a shard's rows, and what happens beyond it.

    Raises ConfigError if the shard would be full before, since a full shard refuses rows, or if there is a
    folder for rows beyond the bound and no bound.
    """
    from freshet.tables import RowsBound

    evict, full = settings.paramserver.evict_bytes, settings.paramserver.memory_bytes
    if full and evict > full * 8 // 10:
        raise ConfigError(
            "environment",
            SHARD_EVICTS,
            evict,
            f"at most {full * 8 // 10}, 8/10 of {SHARD_FULL}",
            "a shard that is full before it evicts refuses rows, and training waits",
        )
    folder = settings.paramserver.ssd_folder
    if folder and not evict:
        raise ConfigError(
            "environment", SHARD_EVICTS, evict, "bytes of memory beyond which rows go to a disk"
        )
    return RowsBound(evict, folder, settings.paramserver.ssd_bytes)


def trainer_rows_bound(settings: Settings) -> RowsBound:
    """Return the memory of the rows of a trainer that holds them itself, and what happens beyond it."""
    from freshet.tables import RowsBound

    most = settings.trainer.memory_bytes or machine_memory_bytes() // DEFAULT_SHARE
    return RowsBound(most, settings.trainer.ssd_folder, settings.trainer.ssd_bytes)


def rows_memory(settings: Settings) -> RowsMemory:
    """Return the bound of the trainer, or of a shard if shards hold the rows, without `max_rows`."""
    from freshet.inference.rows import rows_bound

    machine, served = machine_memory_bytes(), rows_bound(settings.inference)
    last: tuple[dict[str, int], int, str] = ({}, served.bytes, served.ssd_folder)
    if settings.trainer.batches == "own":
        bound = trainer_rows_bound(settings)
        by_default = not settings.trainer.memory_bytes
        return RowsMemory(TRAINER, bound.bytes, True, bound.ssd_folder, by_default, machine, *last)
    if (bound := shard_rows_bound(settings)).bytes:
        return RowsMemory(SHARD_EVICTS, bound.bytes, True, bound.ssd_folder, False, machine, *last)
    full = settings.paramserver.memory_bytes
    return RowsMemory(SHARD_FULL, full, False, "", not full, machine, *last)


def rows_memory_by_table(spec: Spec, settings: Settings) -> RowsMemory:
    """Return `rows_memory` with the maximum rows of each table."""
    from freshet.config.spec.layout import layout_of
    from freshet.tables import RowsBound, Store

    memory = rows_memory(settings)
    if not memory.evicts or memory.ssd_folder:
        return memory
    store = Store.of(spec, layout_of(spec), owned=False, bound=RowsBound(memory.bytes))
    bounded = {t.name: store.max_rows[t.id] for t in spec.tables if t.id in store.max_rows}
    return replace(memory, max_rows={name: rows for name, rows in bounded.items() if rows is not None})
