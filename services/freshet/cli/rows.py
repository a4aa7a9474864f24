"""`freshet rows`: find damaged rows of the row store, and repair it without them."""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from contextlib import closing
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import click

from freshet.cli.options import examples, folder_option, json_option
from freshet.errors import ConfigError, Corrupt, Unavailable
from freshet.process.run_state import existing_folder
from freshet.terminal import emit, table

if TYPE_CHECKING:
    from freshet.rows.store import RowStore
    from freshet.types import Bucket, BucketMeta


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


@command.command("check", epilog=examples("freshet rows check", "freshet rows check --json"))
@folder_option
@json_option
def check(folder: Path, as_json: bool) -> None:
    """Read every row and list the damaged buckets; the exit status is 1 if any is damaged.

    The command changes nothing, and may run while services run. FRESHET_COMMON_ROWS_URL names a store outside
    the folder.
    """
    with closing(_store(folder)) as store:
        buckets = _buckets(store)
        found = list(_damaged(store, buckets))
    _print_found(found, buckets, as_json, "`freshet rows mend` rewrites them without the lost rows")
    if found:
        click.get_current_context().exit(1)


@command.command("mend", epilog=examples("freshet rows mend", "freshet rows mend --give-up-rows"))
@folder_option
@click.option(
    "--give-up-rows",
    is_flag=True,
    help="Rewrite damaged buckets without the rows that cannot be read, which are then lost.",
)
@json_option
def mend(folder: Path, give_up_rows: bool, as_json: bool) -> None:
    """Rewrite damaged buckets with the rows that can be read, so that training can start.

    Lost rows restart with initial weights; offsets stay, so no sample is learned twice. A running owner would
    overwrite the repair with its own rows. If you have a copy of the store, restore it instead.
    """
    with closing(_store(folder)) as store:
        buckets = _buckets(store)
        found = list(_damaged(store, buckets))
        if found and give_up_rows:
            for one in found:
                _mend(store, one)
            _print_found(found, buckets, as_json, "these buckets were rewritten without the lost rows")
            return
    then = "nothing was changed; --give-up-rows rewrites them without the lost rows"
    _print_found(found, buckets, as_json, then)
    if found:
        click.get_current_context().exit(1)


def _store(folder: Path) -> RowStore:
    from freshet.adapters import open_rowstore
    from freshet.config.settings import load_settings

    common = load_settings(run_folder=folder).common
    if common.rows_url == common.run.rows_url:
        existing_folder(folder)
    return open_rowstore(common.rows_url)


def _buckets(store: RowStore) -> int:
    identity = store.identity()
    if identity is None:
        raise ConfigError("rows", "", "the row store was never written", "a model that has been trained", "")
    return identity.buckets


def _damaged(store: RowStore, buckets: int) -> Iterator[Found]:
    from freshet.rows.store import TellsDamage
    from freshet.types import Bucket

    for bucket in map(Bucket, range(buckets)):
        try:
            meta = _meta(store, bucket)
            rows = sum(runs.rows for runs in store.scan([bucket]))
            if rows != meta.rows:
                damage = f"bucket {bucket}: its meta names {meta.rows} rows, found {rows}"
                yield Found(bucket, meta.rows, max(meta.rows - rows, 0), [damage])
        except Corrupt as error:
            damage_: Sequence[str] = [str(error)]
            named: int | None = None
            lost: int | None = None
            try:
                named = lost = _meta(store, bucket).rows
                if isinstance(store, TellsDamage):
                    sound = store.scan_sound(bucket)
                    lost, damage_ = max(named - sound.runs.rows, 0), [*sound.damage] or damage_
            except Corrupt as again:
                damage_ = [str(again)]
            yield Found(bucket, named, lost, damage_)


def _meta(store: RowStore, bucket: Bucket) -> BucketMeta:
    return store.metas([bucket])[bucket]


def _mend(store: RowStore, found: Found) -> None:
    """Replace a whole bucket (PROTOCOL 11), with a sequence number that no owner has sent.

    Raises ConfigError if the store cannot leave out damaged pages, Unavailable if the bucket has another
    owner.
    """
    import numpy as np

    from freshet.rows.store import FlushOutcome, TellsDamage
    from freshet.types import Bucket, Flush

    bucket = Bucket(found.bucket)
    if not isinstance(store, TellsDamage):
        raise ConfigError(
            "rows mend", "", "this row store cannot leave out damaged pages", "a copy of the store, restored"
        )
    meta, sound = _meta(store, bucket), store.scan_sound(bucket)
    flush = Flush(
        buckets=np.array([bucket]),
        fences=np.array([meta.fence]),
        seqs=np.array([meta.seq + random.randrange(1 << 20, 1 << 40)]),  # nosec B311  # no secret
        rows=np.array([sound.runs.rows]),
        applied=np.array([[meta.applied[p] for p in sorted(meta.applied)]]),
        rows_offsets=np.array([meta.rows_offset]),
        clocks_ms=np.array([meta.clock_ms]),
        runs=sound.runs,
        whole=True,
    )
    if store.flush(flush)[0] != FlushOutcome.DONE:
        raise Unavailable(f"bucket {bucket} has another owner by now; run `freshet rows check` again")


def _print_found(found: Sequence[Found], buckets: int, as_json: bool, then: str) -> None:
    rows = [[one.bucket, one.rows, one.lost, "; ".join(one.damage).split("\n")[0][:300]] for one in found]
    text = f"all {buckets} buckets can be read"
    if found:
        listed = table(["bucket", "rows", "lost", "damage"], rows)
        text = f"{listed}\n{len(found)} of {buckets} buckets are damaged; {then}"
    emit({"buckets": buckets, "damaged": [asdict(one) for one in found]}, as_json=as_json, text=text)
