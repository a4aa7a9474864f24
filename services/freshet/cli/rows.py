"""`freshet rows`: find damaged rows of the row store, and repair it without them."""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from contextlib import closing
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import click

from freshet.cli.options import PATH, examples, folder_option, json_option
from freshet.errors import ConfigError, Corrupt, Unavailable
from freshet.process.run_state import existing_folder
from freshet.terminal import emit, table

if TYPE_CHECKING:
    from freshet.rows.store import RowStore
    from freshet.types import Bucket, BucketMeta, RowRuns


@dataclass(frozen=True, slots=True)
class Found:
    """A damaged bucket."""

    bucket: int
    rows: int | None  # number of rows by its meta; None: the meta cannot be read
    lost: int | None  # number of those that cannot be read
    damage: Sequence[str]  # place and finding


@click.group()
def command() -> None:
    """Find damaged rows in the row store, and repair it without them."""


_spec_option = click.option(
    "--spec",
    "spec_file",
    type=PATH,
    help="Spec of the model, by which values and optimiser state are checked; by default the one that the "
    "run folder keeps (state/spec.toml). Without either, only lengths and checksums are.",
)


@command.command("check", epilog=examples("freshet rows check", "freshet rows check --spec freshet.toml"))
@folder_option
@_spec_option
@json_option
def check(folder: Path, spec_file: Path | None, as_json: bool) -> None:
    """Read every row and list the damaged buckets; the exit status is 1 if any is damaged.

    The command changes nothing, and may run while services run. FRESHET_COMMON_ROWS_URL names a store outside
    the folder.
    """
    with closing(_store(folder)) as store:
        checked = _Checked(store, folder, spec_file)
        found = list(checked.damaged())
    checked.print_found(found, as_json, "`freshet rows mend` rewrites them without the lost rows")
    if found:
        click.get_current_context().exit(1)


@command.command("mend", epilog=examples("freshet rows mend", "freshet rows mend --give-up-rows"))
@folder_option
@_spec_option
@click.option(
    "--give-up-rows",
    is_flag=True,
    help="Rewrite damaged buckets without the rows that cannot be read, which are then lost.",
)
@json_option
def mend(folder: Path, spec_file: Path | None, give_up_rows: bool, as_json: bool) -> None:
    """Rewrite damaged buckets with the rows that can be read, so that training can start.

    Lost rows restart with initial weights; offsets stay, so no sample is learned twice. A running owner would
    overwrite the repair with its own rows. If you have a copy of the store, restore it instead.
    """
    with closing(_store(folder)) as store:
        checked = _Checked(store, folder, spec_file)
        found = list(checked.damaged())
        if found and give_up_rows:
            for one in found:
                checked.mend(one)
            checked.print_found(found, as_json, "these buckets were rewritten without the lost rows")
            return
    then = "nothing was changed; --give-up-rows rewrites them without the lost rows"
    checked.print_found(found, as_json, then)
    if found:
        click.get_current_context().exit(1)


def _store(folder: Path) -> RowStore:
    from freshet.adapters import open_rowstore
    from freshet.config.settings import load_settings

    common = load_settings(run_folder=folder).common
    if common.rows_url == common.run.rows_url:
        existing_folder(folder)
    return open_rowstore(common.rows_url)


class _Checked:
    """A row store, with records checked as a shard checks them before it takes them."""

    def __init__(self, store: RowStore, folder: Path, spec_file: Path | None) -> None:
        """Find the model's spec. Raises ConfigError if the store was never written, or fits no such spec."""
        from freshet.apps.recorded_spec import KEPT, load_kept
        from freshet.config.spec import load_spec
        from freshet.config.spec.layout import layout_of
        from freshet.tables import Store

        identity = store.identity()
        if identity is None:
            raise ConfigError("rows", "", "the row store was never written", "a model that has been trained")
        self._store, self.buckets = store, identity.buckets
        self._records: Store | None = None  # empty: it only checks records
        kept = folder.joinpath(*KEPT)
        if spec_file is None and not kept.is_file():
            return
        spec = load_spec(spec_file) if spec_file is not None else load_kept(kept)
        self._records = Store.of(spec, layout_of(spec), changes=False, owned=False)
        found = spec.buckets, {table: self._records.record_bytes(table) for table in self._records.tables}
        if found != (identity.buckets, identity.record_bytes):
            raise ConfigError(
                str(spec_file or kept),
                "",
                f"(buckets, bytes of each table's record) are {found}",
                f"{(identity.buckets, identity.record_bytes)}, as in the row store",
                f"pass the spec of {identity.model} by --spec",
            )

    def damaged(self) -> Iterator[Found]:
        """Read every bucket; yield the damaged ones."""
        from freshet.types import Bucket

        for bucket in map(Bucket, range(self.buckets)):
            named: int | None = None
            try:
                named = self._meta(bucket).rows
                rows, damage = 0, list[str]()
                for runs in self._store.scan([bucket]):
                    sound, reasons = self._sound(runs)
                    rows += sound.rows
                    damage += reasons
                if not damage and rows != named:
                    damage = [f"bucket {bucket}: its meta names {named} rows, found {rows}"]
                if damage:
                    yield Found(bucket, named, max(named - rows, 0), damage)
            except Corrupt as error:
                yield self._found(bucket, named, error)

    def _found(self, bucket: Bucket, named: int | None, error: Corrupt) -> Found:
        from freshet.rows.store import TellsDamage

        if named is None or not isinstance(self._store, TellsDamage):
            return Found(bucket, named, named, [str(error)])
        try:
            sound = self._store.scan_sound(bucket)
        except Corrupt as again:
            return Found(bucket, named, named, [str(again)])
        runs, reasons = self._sound(sound.runs)
        return Found(bucket, named, max(named - runs.rows, 0), [*sound.damage, *reasons] or [str(error)])

    def mend(self, found: Found) -> None:
        """Replace a whole bucket (PROTOCOL 11), with a sequence number that no owner has sent.

        Raises ConfigError if the store cannot leave out damaged pages, Unavailable if the bucket has another
        owner.
        """
        import numpy as np

        from freshet.rows.store import FlushOutcome, TellsDamage
        from freshet.types import Bucket, Flush

        bucket = Bucket(found.bucket)
        if not isinstance(self._store, TellsDamage):
            lacks = "this row store cannot leave out damaged pages"
            raise ConfigError("rows mend", "", lacks, "a copy of the store, restored")
        meta = self._meta(bucket)
        runs, _ = self._sound(self._store.scan_sound(bucket).runs)
        flush = Flush(
            buckets=np.array([bucket]),
            fences=np.array([meta.fence]),
            seqs=np.array([meta.seq + random.randrange(1 << 20, 1 << 40)]),  # nosec B311  # no secret
            rows=np.array([runs.rows]),
            applied=np.array([[meta.applied[p] for p in sorted(meta.applied)]]),
            rows_offsets=np.array([meta.rows_offset]),
            clocks_ms=np.array([meta.clock_ms]),
            runs=runs,
            whole=True,
        )
        if self._store.flush(flush)[0] != FlushOutcome.DONE:
            raise Unavailable(f"bucket {bucket} has another owner by now; run `freshet rows check` again")

    def print_found(self, found: Sequence[Found], as_json: bool, then: str) -> None:
        """Print the damaged buckets, and what was not checked."""
        rows = [[one.bucket, one.rows, one.lost, "; ".join(one.damage).split("\n")[0][:300]] for one in found]
        text = f"all {self.buckets} buckets can be read"
        if found:
            listed = table(["bucket", "rows", "lost", "damage"], rows)
            text = f"{listed}\n{len(found)} of {self.buckets} buckets are damaged; {then}"
        if self._records is None:
            text += "\nvalues and optimiser state were not checked: the folder keeps no spec, pass --spec"
        figures = {"buckets": self.buckets, "records_checked": self._records is not None}
        emit({**figures, "damaged": [asdict(one) for one in found]}, as_json=as_json, text=text)

    def _meta(self, bucket: Bucket) -> BucketMeta:
        return self._store.metas([bucket])[bucket]

    def _sound(self, runs: RowRuns) -> tuple[RowRuns, list[str]]:
        """Return the runs without the rows that a shard refuses, and why it does."""
        from freshet.tables.runs import sound_runs

        return sound_runs(runs, self._records.unpack_runs) if self._records else (runs, [])
