"""The audit of a ledger's run: what the log says, beside what was acknowledged, stored, served and summed up.

Samples are read with fastavro, and counted with dictionaries: nothing of the training path is believed.
"""

from __future__ import annotations

import io
from collections import Counter, defaultdict
from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import fastavro
import httpx
import numpy as np

from freshet.adapters import open_eventlog, open_rowstore, open_versions
from freshet.config.settings import Common, load_settings
from freshet.config.spec import Spec
from freshet.config.spec.layout import layout_of
from freshet.config.spec.topics import Topics
from freshet.errors import Corrupt
from freshet.features import key_of, read_blocks, table_salt
from freshet.log import EventLog
from freshet.tables import Store
from freshet.testing.ledger import hash_of
from freshet.types import Bucket, BytesColumn, TopicPartition
from freshet.versions import Manifest
from tests.system.traffic import Impression

SAMPLE = fastavro.parse_schema(
    {
        "type": "record",
        "name": "Sample",
        "fields": [
            {"name": "request_id", "type": "string"},
            {"name": "ts", "type": "long"},
            {"name": "user", "type": "string"},
            {"name": "item", "type": "long"},
            {"name": "seq", "type": "double"},
        ],
    }
)
"""The impressions' schema with the array replaced by its element, as schemas/README.md says."""

Sums = tuple[int, int]
"""(samples, sum of their hashes)"""


@dataclass(frozen=True, slots=True)
class Sample:
    """One sample as it stands in the log."""

    request_id: str
    item: int
    user: str
    seq: int
    label: int
    value: float

    @property
    def hash(self) -> int:
        """What the ledger model adds up."""
        return int(hash_of(np.array([self.seq]), np.array([self.label]))[0])


@dataclass
class Books:
    """What the samples of a log must have led to."""

    samples: list[Sample]
    late: list[Sample]
    users: dict[str, Sums] = field(default_factory=dict)
    items: dict[int, Sums] = field(default_factory=dict)
    dense: Sums = (0, 0)

    def __post_init__(self) -> None:
        users: dict[str, list[int]] = defaultdict(list)
        items: dict[int, list[int]] = defaultdict(list)
        for sample in self.samples:
            users[sample.user].append(sample.hash)
            items[sample.item].append(sample.hash)
        self.users = {name: (len(h), sum(h)) for name, h in users.items()}
        self.items = {name: (len(h), sum(h)) for name, h in items.items()}
        self.dense = (len(self.samples), sum(s.hash for s in self.samples))


def read_books(log: EventLog, topics: Topics, poison: Collection[tuple[int, int]] = frozenset()) -> Books:
    """Everything in `samples` and `samples.late`, but for the records of `samples` at these (partition,
    offset)."""
    return Books(list(_samples(log, topics.samples, poison)), list(_samples(log, topics.late)))


def ends_of(log: EventLog, topic: str) -> dict[int, int]:
    """{partition: end offset}."""
    count = log.topics()[topic].partitions
    return {p: log.bounds(TopicPartition(topic, p)).end for p in range(count)}


def _samples(
    log: EventLog, topic: str, poison: Collection[tuple[int, int]] = frozenset()
) -> Iterator[Sample]:
    ends = ends_of(log, topic)
    reader = log.reader()
    at = {TopicPartition(topic, p): log.bounds(TopicPartition(topic, p)).start for p in ends}
    assert not any(at.values()), f"{topic}: the log has forgotten samples, nothing can be audited"
    reader.assign(at)
    try:
        while any(at[TopicPartition(topic, p)] < end for p, end in ends.items()):
            for partition, records in reader.poll(1_000, 1.0):
                at[partition] = records.next_offset
                good = [
                    i
                    for i, offset in enumerate(records.offsets.tolist())
                    if (partition.partition, offset) not in poison
                ]
                yield from samples_in(records.where(good).values if poison else records.values)
    finally:
        reader.close()


def samples_in(values: BytesColumn) -> Iterator[Sample]:
    """The samples of some records of the topics `samples` and `samples.late`."""
    blocks = read_blocks(values)
    for i in range(len(blocks)):
        made: Any = fastavro.schemaless_reader(io.BytesIO(blocks.payloads[i]), SAMPLE, None)
        yield Sample(
            made["request_id"],
            made["item"],
            made["user"],
            int(made["seq"]),
            int(blocks.labels[i]),
            float(blocks.values[i]),
        )


# --- the comparisons: each yields what differs, in words


def against_acknowledged(
    books: Books,
    impressions: Mapping[tuple[str, int], Impression],
    actions: Mapping[tuple[str, int], set[str]],
    labels: tuple[str, ...],
    *,
    excused: int,
) -> Iterator[str]:
    """Every acknowledged impression is exactly once in the log for each label, and true if it was acted on.

    `excused`: actions that the joiner says came too late; so many labels may be false.
    """
    found = Counter((s.request_id, s.item, s.label) for s in (*books.samples, *books.late))
    wanted = {(*key, label) for key in impressions for label in range(len(labels))}
    yield from (f"acknowledged, but no sample: {key}" for key in _some(wanted - found.keys()))
    yield from (f"a sample of an event that nobody sent: {key}" for key in _some(found.keys() - wanted))
    yield from _doubles(found)
    wrong = []
    for s in books.samples:
        sent = impressions.get((s.request_id, s.item))
        if sent is not None and (sent.seq, sent.user) != (s.seq, s.user):
            yield f"a sample says seq {s.seq}, user {s.user}; sent was {sent}"
        acted = labels[s.label] in actions.get((s.request_id, s.item), ())
        if (s.value == 1.0) != acted:
            wrong.append(f"{labels[s.label]} of {s.request_id}/{s.item} is {s.value}, acted on: {acted}")
    if len(wrong) > excused:
        yield f"{len(wrong)} labels are wrong, {excused} may be; the first: {wrong[0]}"


def against_joiner(books: Books, ledger: Mapping[str, Any], impressions: int) -> Iterator[str]:
    """The joiner's own ledger explains every impression, and agrees with the log."""
    events = ledger["events"]
    seen = events["impressions"] + events["impressions_late"]
    if events["impressions"] != impressions:
        yield f"the joiner counts {events['impressions']} impressions, {impressions} were acknowledged"
    for i, (name, counts) in enumerate(ledger["labels"].items()):
        if sum(counts.values()) != seen:
            yield f"{name}: {counts} do not add up to {seen} impressions"
        trained = Counter(s.value for s in books.samples if s.label == i)
        counted = (counts["trained_negative"], counts["trained_positive"])
        if counted != (trained[0.0], trained[1.0]):
            yield f"{name}: the joiner counts {counted} samples false and true, the log holds {trained}"
    if ledger["refused"]:
        yield f"{ledger['refused']} events were refused"


def against_rows(books: Books, folder: Path, spec: Spec, untouched: int = 0) -> Iterator[str]:
    """Rows in the row store are what the samples add up to, and there are no others, but for so many of the
    first table that were there before."""
    rows = open_rowstore(_stores(folder).rows_url)
    store = Store.of(spec, layout_of(spec))
    try:
        for runs in rows.scan([Bucket(bucket) for bucket in range(spec.buckets)]):
            store.import_runs(runs)
    finally:
        rows.close()
    for table, sums in (("user", books.users), ("item", books.items)):
        wanted = {key_of(value, table_salt(table)): (value, s) for value, s in sums.items()}
        held = store.memory().rows[spec.table(table).id]
        others = untouched if table == spec.tables[0].name else 0
        if held != len(wanted) + others:
            yield f"table {table}: {held} rows are stored, {len(wanted)} values were trained on, {others} not"
        found = _looked_up(store, spec, table, list(wanted))
        for key, (value, s) in wanted.items():
            if found[key] != s:
                yield f"row of {table} {value!r}: stored (count, hash) {found[key]}, the log says {s}"


def against_offsets(ends: Mapping[int, int], folder: Path, spec: Spec) -> Iterator[str]:
    """Every bucket says that it has applied the log to its end."""
    rows = open_rowstore(_stores(folder).rows_url)
    try:
        metas = rows.metas([Bucket(b) for b in range(spec.buckets)])
    finally:
        rows.close()
    behind = [b for b, meta in metas.items() if dict(meta.applied) != dict(ends)]
    if behind:
        yield f"{len(behind)} buckets are not at {dict(ends)}; bucket {behind[0]}: {metas[behind[0]].applied}"


def against_dense(books: Books, folder: Path) -> Iterator[str]:
    """The newest version's sums are those of the log."""
    store = open_versions(_stores(folder).versions_url)
    version = store.get(store.numbers()[-1])
    found = (int(version.tensors["weights/count"][0]), int(version.tensors["weights/hash"][0]))
    if found != books.dense:
        yield f"dense (count, hash) of version {version.manifest.number}: {found}, the log says {books.dense}"


def against_serving(books: Books, inference: str) -> Iterator[str]:
    """What serving answers for each row, and for the dense sums, is what the log says."""
    with httpx.Client(timeout=10) as client:
        for user, sums in books.users.items():
            found = _asked(client, inference, user, [{"item": 0, "seq": -2}])[0]
            if found != sums:
                yield f"user {user}: served (count, hash) {found}, the log says {sums}"
        items = list(books.items)
        asked = _asked(client, inference, "nobody", [{"item": item, "seq": -3} for item in items])
        for item, found in zip(items, asked, strict=True):
            if found != books.items[item]:
                yield f"item {item}: served (count, hash) {found}, the log says {books.items[item]}"
        dense = _asked(client, inference, "nobody", [{"item": 0, "seq": -1}])[0]
        if dense != books.dense:
            yield f"dense (count, hash): served {dense}, the log says {books.dense}"


def _asked(client: httpx.Client, inference: str, user: str, candidates: list[dict[str, int]]) -> list[Sums]:
    answer = client.post(f"{inference}/v1/rank", json={"context": {"user": user}, "candidates": candidates})
    answer.raise_for_status()
    items = sorted(answer.json()["items"], key=lambda one: int(one["index"]))
    return [(round(i["predictions"]["click"]), round(i["predictions"]["buy"])) for i in items]


def _looked_up(store: Store, spec: Spec, table: str, keys: list[int]) -> dict[int, Sums]:
    if not keys:
        return {}
    rising = np.sort(np.array(keys, np.uint64))
    id_ = spec.table(table).id
    group = next(g for g in layout_of(spec).groups if id_ in g.tables)
    edges = np.arange(spec.buckets + 1, dtype=object) * (2**64 // spec.buckets)
    starts = np.array([np.searchsorted(rising, np.uint64(e)) if e < 2**64 else len(rising) for e in edges])
    out = np.zeros((len(rising), group.width), np.float32)
    tables = np.full(len(rising), id_, np.uint8)
    store.lookup(group.index, rising, tables, starts.astype(np.uint32), out, create=False)
    slot = group.slot("vector")
    assert slot is not None
    return {
        int(k): (round(r[slot.start]), round(r[slot.start + 1])) for k, r in zip(rising, out, strict=True)
    }


def _doubles(found: Mapping[tuple[str, int, int], int]) -> Iterator[str]:
    doubles = [key for key, n in found.items() if n > 1]
    if doubles:
        yield f"{len(doubles)} samples stand more than once in the log; the first: {doubles[0]}"


def _some(found: Iterable[Any], most: int = 5) -> list[Any]:
    return [one for one, _ in zip(found, range(most), strict=False)]


def open_log(folder: Path) -> EventLog:
    """The event log of a run folder."""
    return open_eventlog(_stores(folder).log_url)


def newest_version(folder: Path) -> Manifest:
    """Of the dense versions of a run folder."""
    store = open_versions(_stores(folder).versions_url)
    return store.manifest(store.numbers()[-1])


def applied_by_newest_version(folder: Path) -> dict[int, int]:
    """{partition: offset} that the newest dense version has come to; empty if it was deleted between two
    looks, as many newer ones came."""
    try:
        return {int(p): n for p, n in newest_version(folder).applied.items()}
    except (KeyError, Corrupt):
        return {}


def stored_offsets(folder: Path) -> int:
    """Sum of the offsets that the first bucket in the row store has applied."""
    rows = open_rowstore(_stores(folder).rows_url)
    try:
        return sum(rows.metas([Bucket(0)])[Bucket(0)].applied.values())
    finally:
        rows.close()


def _stores(folder: Path) -> Common:
    return load_settings(run_folder=folder).common
