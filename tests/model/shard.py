"""A shard: buckets in memory, pushes in, flushes and published rows out (rules 4, 10, 11, 17)."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from enum import Enum, auto
from typing import TYPE_CHECKING

from .control import Member
from .rules import Rules
from .simulation import Steps, Unavailable
from .store import Cut, Meta, Outcome, Row, Stamp

if TYPE_CHECKING:
    from .world import World

FLUSH = 25  # ticks between rounds
PUBLISH = 9

Ranges = Mapping[int, tuple[int, int]]  # partition -> [start, stop)


@dataclass(frozen=True, slots=True)
class Push:
    """The gradients of one batch for one shard. It goes to every shard, if need be without rows (rule 4)."""

    ranges: Ranges
    rows: Mapping[int, Mapping[int, Row]]  # bucket -> key -> gradient
    buckets: Mapping[
        int, int
    ]  # those that the sender believes to be this shard's -> the fence of their claim


@dataclass(frozen=True, slots=True)
class Delta:
    """A record of `rows`: whole rows of a bucket, with the fence of their owner."""

    bucket: int
    fence: int
    rows: Mapping[int, Row]


class Verdict(Enum):
    """What a push is to a bucket."""

    APPLY = auto()
    SKIP = auto()
    REFUSE = auto()


def judge_push(ranges: Ranges, applied: list[int], rules: Rules) -> Verdict:
    """Rules 2 and 4: a batch applies if all its ranges are next, skips if all are past."""
    following = [start == applied[partition] for partition, (start, _) in ranges.items()]
    past = [stop <= applied[partition] for partition, (_, stop) in ranges.items()]
    if all(following):
        return Verdict.APPLY
    if all(past):
        return Verdict.SKIP
    if all(new or old for new, old in zip(following, past, strict=True)):
        if not rules.batch_applies_as_one:
            return Verdict.APPLY
        if not rules.mixture_is_refused:
            return Verdict.SKIP
    return Verdict.REFUSE


@dataclass(slots=True)
class Bucket:
    """A bucket that this process owns. `applied` and `rows` change under one hold."""

    number: int
    fence: int
    claim: int  # the fence in the log: the same, unless rule 9 is broken
    stamp: Stamp  # what the store acknowledged last
    applied: list[int]
    rows: dict[int, Row]
    published_to: int  # all that is not in a copy taken now is in `rows` from here on
    unflushed: set[int] = field(default_factory=set)
    unpublished: set[int] = field(default_factory=set)
    retrying: Cut | None = None
    replace: bool = False
    stored: Callable[[int], Row | None] | None = None  # while it is loaded: the row that the store has
    disk: dict[int, Row] = field(default_factory=dict)  # rows that are not in memory

    def add(self, gradients: Mapping[int, Row], rules: Rules) -> None:
        """Step rows; one that is absent is created (rule 8)."""
        for key, (count, checksum) in gradients.items():
            on_disk = self.disk.pop(key, None)
            old = on_disk if rules.row_on_disk_is_read and on_disk is not None else self.rows.get(key)
            if old is None and self.stored is not None:
                old = self.stored(key)
            old = old or (0, 0)
            self.rows[key] = (old[0] + count, old[1] + checksum)
        self.unflushed.update(gradients)
        self.unpublished.update(gradients)

    def advance(self, ranges: Ranges) -> None:
        """Note that ranges were applied; those that were before change nothing."""
        for partition, (_, stop) in ranges.items():
            self.applied[partition] = max(self.applied[partition], stop)

    def to_disk(self, keys: Iterable[int]) -> None:
        """Move rows out of memory that readers have been sent, changed since the last flush or not."""
        for key in keys:
            if key in self.rows and key not in self.unpublished:
                self.disk[key] = self.rows.pop(key)

    def copy_rows(self, rules: Rules) -> Cut:
        """Everything that the next flush writes. A cut is retried as it is, so a stamp names one content."""
        whole, self.replace = self.replace, False
        every = {**self.disk, **self.rows}
        there = every if rules.flush_takes_rows_on_disk else self.rows
        rows = dict(there) if whole else {key: there[key] for key in self.unflushed if key in there}
        self.unflushed.clear()
        applied = tuple(self.applied)
        meta = Meta(self.fence, self.stamp[1] + 1, len(every), applied, self.published_to, self.fence)
        return Cut(self.number, self.stamp, meta, rows, whole)


class Shard(Member):
    """Memory only until flushed: what it acknowledged is lost with it, and replayed from the log."""

    def __init__(self, world: World, name: str) -> None:
        super().__init__(world, name, tuple(f"bucket/{number}" for number in range(world.buckets)))
        self.buckets: dict[int, Bucket] = {}
        self._loading: dict[int, int] = {}
        self._leaving: set[int] = set()
        self._publishing = False
        self.spawn(self._publish_rounds(), delay=PUBLISH)
        self.spawn(self._flush_rounds(), delay=self.sim.rng.randrange(FLUSH))
        self.spawn(self._disk_rounds())

    # Ownership ---

    def on_control(self) -> None:
        """Load what was won, drop what was lost."""
        mine = {int(resource.split("/")[1]): fence for resource, fence in self.owned()}
        for number in list(self.buckets):
            if number not in mine:
                del self.buckets[number]
        self._leaving &= set(mine)
        for number in list(self._loading):
            if self._loading[number] != mine.get(number):
                del self._loading[number]
        for number, fence in mine.items():
            held = self.buckets.get(number)
            if self._loading.get(number) == fence or number in self._leaving:
                continue
            if held is None or (held.fence != fence and self.rules.fence_is_log_offset):
                self.buckets.pop(number, None)
                self._loading[number] = fence
                self.spawn(self._load(number, fence))

    def applied(self, number: int, claim: int) -> list[int] | None:
        """The offsets of a bucket, or None if it is not (yet) here under that claim.

        Found by this model: an owner that has not read of its own new claim still holds what it had under the
        old one, and is about to replace it by what is stored. Its answer would be ahead of what it will have.
        """
        bucket = self._held(number, claim)
        return None if bucket is None else list(bucket.applied)

    def _held(self, number: int, claim: int) -> Bucket | None:
        bucket = self.buckets.get(number)
        if bucket is None or (bucket.claim != claim and self.rules.requests_name_the_claim):
            return None
        return bucket

    def _load(self, number: int, claim: int) -> Steps[None]:
        """Rule 10: write the fence, read `meta` and serve, scan, read `meta` again; drop it if it changed."""
        fence, previous = claim, self.view.owner(f"bucket/{number}").previous
        bucket: Bucket | None = None
        while self._loading.get(number) == claim:
            try:
                if not self.rules.fence_is_log_offset and fence == claim:
                    fence = (yield from self._meta(number)).fence + 1
                if self.rules.claim_writes_fence and not (yield from self._write_fence(number, fence)):
                    self._loading.pop(number, None)  # a later claim exists; the log will show it
                    return
                if bucket is None:
                    generation = self.world.store.node(number).generation
                    before = yield from self._meta(number)
                    if self._loading.get(number) != claim:
                        return
                    bucket = self._serve(number, fence, claim, before)
                rows = yield from self._scan(number)
                if self.rules.claim_rereads_meta:
                    after = yield from self._meta(number)
                    unchanged = after.stamp == before.stamp and after.count == len(rows)
                    if not unchanged or (self.rules.claim_writes_fence and before.fence != fence):
                        if self.buckets.get(number) is bucket:
                            del self.buckets[number]
                        bucket = None
                        while self.rules.doubt_changes_owner and self._loading.get(number) == claim:
                            yield from self.claim(f"bucket/{number}")
                            yield 20
                        continue
            except Unavailable:
                continue
            if self._loading.get(number) == claim and self.buckets.get(number) is bucket:
                del self._loading[number]
                self.world.ledger.check_loaded(number, before.applied, rows)
                self.world.ledger.claimed[number] = fence, generation
                bucket.rows = (
                    {**rows, **bucket.rows}
                    if self.rules.scan_leaves_what_is_here
                    else {**bucket.rows, **rows}
                )
                bucket.stored = None
                if before.writer != previous and self.rules.claim_publishes_whole:
                    # Found by this model: a failover hid what the owner before had published, so readers may
                    # hold its rows, older than these but of a higher fence. They are published anew.
                    bucket.unpublished.update(rows)

    def _serve(self, number: int, fence: int, claim: int, meta: Meta) -> Bucket:
        """Answer from now on, rows by key from the store."""
        bucket = Bucket(number, fence, claim, meta.stamp, list(meta.applied), {}, meta.follow)
        bucket.stored = lambda _: None
        if self.rules.absence_is_asked_for:
            source = self.world.store.source(number, replica=self._from_replica(), bound=False)

            def read(key: int) -> Row | None:
                return source.data().rows[number].get(key)  # of the master at that moment

            bucket.stored = read
        self.buckets[number] = bucket
        return bucket

    def _write_fence(self, number: int, fence: int) -> Steps[bool]:
        return (yield from self.call(lambda: self.world.store.write_fence(number, fence)))

    def _from_replica(self) -> bool:
        return not self.rules.claim_reads_masters and self.sim.rng.random() < 0.5

    def _meta(self, number: int) -> Steps[Meta]:
        source = self.world.store.source(number, replica=self._from_replica(), bound=False)
        return (yield from self.call(lambda: source.data().metas[number]))

    def _scan(self, number: int) -> Steps[dict[int, Row]]:
        # Not bound to a connection: the second read of `meta` is what protects a claim from a failover.
        rows: dict[int, Row] = {}
        after = -1
        while True:
            source = self.world.store.source(number, replica=self._from_replica(), bound=False)
            cursor = after
            chunk = yield from self.call(lambda: source.chunk(number, cursor))  # noqa: B023 (called before it moves)
            if not chunk:
                return rows
            rows.update(chunk)
            after = chunk[-1][0]

    # Pushes ---

    def push(self, push: Push) -> bool:
        """Rule 4: True if every bucket concerned has the batch now; False if it was refused whole."""
        concerned = dict(push.buckets)
        if not self.rules.push_names_its_buckets:
            concerned = {b.number: b.claim for b in self.buckets.values()}
            concerned |= {number: push.buckets[number] for number in push.rows}
        held = [self._held(number, concerned[number]) for number in sorted(concerned)]
        here = [bucket for bucket in held if bucket is not None]
        verdicts = {bucket.number: judge_push(push.ranges, bucket.applied, self.rules) for bucket in here}
        fits = len(here) == len(concerned) and Verdict.REFUSE not in verdicts.values()
        if not self.rules.push_checked_before_touched:
            return self._touch_while_checking(push, here, verdicts, fits)
        if not fits and self.rules.push_refused_whole:
            return False
        taken = [bucket for bucket in here if verdicts[bucket.number] is not Verdict.REFUSE]
        for bucket in taken:
            if verdicts[bucket.number] is Verdict.APPLY:
                bucket.add(push.rows.get(bucket.number, {}), self.rules)
        if self.rules.rows_and_applied_one_hold:
            self._advance(push, taken)
        else:
            self.sim.after(2, lambda: self._advance(push, taken), self)
        return True

    def _advance(self, push: Push, buckets: Iterable[Bucket]) -> None:
        for bucket in buckets:
            bucket.advance(push.ranges)

    def _touch_while_checking(
        self, push: Push, buckets: list[Bucket], verdicts: Mapping[int, Verdict], fits: bool
    ) -> bool:
        for bucket in buckets:
            if verdicts[bucket.number] is Verdict.REFUSE:
                return False
            if verdicts[bucket.number] is Verdict.APPLY:
                bucket.add(push.rows.get(bucket.number, {}), self.rules)
        if fits:
            self._advance(push, buckets)
        return fits

    # Rows on disk, publishing and flushing ---

    def _disk_rounds(self) -> Steps[None]:
        draws = random.Random(
            self.name
        )  # its own, so that seeds give other processes the schedules they gave
        while True:
            yield draws.randrange(1, FLUSH)
            for bucket in self.buckets.values():
                if bucket.stored is None:  # not while it is loaded
                    bucket.to_disk([key for key in sorted(bucket.rows) if draws.random() < 0.5])

    def _publish_rounds(self) -> Steps[None]:
        while True:
            yield from self._publish({})
            yield PUBLISH

    def _publish(self, cuts: Mapping[int, Cut]) -> Steps[bool]:
        """Write changed rows, and those of the cuts, to `rows`; one writer at a time: the last one wins.

        What is written is the newest value, which may be ahead of the cut's.
        """
        while self._publishing:
            yield 1
        self._publishing = True
        deltas: list[Delta] = []
        for number, bucket in self.buckets.items():
            cut = cuts.get(number)
            keys = set(bucket.unpublished)
            if (
                cut is not None
                and cut is bucket.retrying
                and cut.whole
                and self.rules.replace_publishes_whole
            ):
                keys.update(cut.rows)
            if keys:
                every = {**bucket.disk, **bucket.rows}
                deltas.append(Delta(number, bucket.fence, {key: every[key] for key in sorted(keys)}))
                bucket.unpublished = set()
        ends: dict[int, int] = {}
        acknowledged = True
        try:
            if deltas:
                ends = yield from self.call(lambda: self._append(deltas))
        except Unavailable:
            acknowledged = False
            for delta in deltas:  # perhaps not written: again, with the newest values
                if delta.bucket in self.buckets:
                    self.buckets[delta.bucket].unpublished.update(delta.rows)
        for number, end in ends.items():
            bucket_now = self.buckets.get(number)
            if bucket_now is not None:
                bucket_now.published_to = max(bucket_now.published_to, end)
        self._publishing = False
        return acknowledged

    def _append(self, deltas: list[Delta]) -> dict[int, int]:
        return {delta.bucket: self.world.publish(delta) + 1 for delta in deltas}

    def _flush_rounds(self) -> Steps[None]:
        while True:
            yield from self._flush([bucket for bucket in self.buckets.values() if self._may_flush(bucket)])
            yield FLUSH

    def _may_flush(self, bucket: Bucket) -> bool:
        return bucket.stored is None or not self.rules.loading_is_not_flushed

    def _flush(self, buckets: list[Bucket]) -> Steps[None]:
        """Every bucket, dirty or not (rule 12): copy, publish, await the log, then compare-and-set."""
        for bucket in buckets:
            if bucket.retrying is None:
                bucket.retrying = bucket.copy_rows(self.rules)
                if not self.rules.flush_copies_one_hold:
                    yield 2
                    bucket.retrying = bucket.retrying.altered(applied=tuple(bucket.applied))
        cuts = {bucket.number: bucket.retrying for bucket in buckets if bucket.retrying is not None}
        while self.rules.flush_publishes_first and not (yield from self._publish(cuts)):
            pass
        # A bucket lost meanwhile may not have been published: what readers cannot follow is not written.
        held = [bucket for bucket in buckets if self.buckets.get(bucket.number) is bucket]
        if not self.rules.rows_offset_of_the_copy:
            cuts = {number: cut.altered(follow=self.world.rows_end(number)) for number, cut in cuts.items()}
        yield self.sim.hop()
        answers: list[tuple[Bucket, Outcome, Stamp]] = []
        for bucket in held:
            cut = cuts[bucket.number]
            if not self.rules.flush_atomic and self.world.store.flush_rows_only(cut) is Outcome.WRITE:
                yield self.sim.hop()
            outcome, stored = self.world.store.flush(cut)
            if self.sim.rng.random() >= self.sim.lost_answers:  # else the same cut is retried
                answers.append((bucket, outcome, stored))
        yield self.sim.hop()
        for bucket, outcome, stored in answers:
            if self.buckets.get(bucket.number) is bucket:
                self._flushed(bucket, cuts[bucket.number], outcome, stored)

    def _flushed(self, bucket: Bucket, cut: Cut, outcome: Outcome, stored: Stamp) -> None:
        if outcome is Outcome.DONE:
            bucket.stamp = cut.meta.stamp
            bucket.retrying = None
        elif outcome is Outcome.FENCED:
            del self.buckets[bucket.number]  # another owner has claimed it
        elif self.rules.mismatch_replaces:
            bucket.stamp = cut.meta.stamp  # never used again: a stamp names one content
            bucket.replace = True
            bucket.retrying = None
        else:
            bucket.retrying = Cut(cut.bucket, stored, cut.meta, cut.rows, whole=False)

    def reclaim(self, number: int) -> Steps[None]:
        """Claim a bucket that this process has, and load it anew."""
        if self.view.owner(f"bucket/{number}").owner == self.name:
            yield from self.claim(f"bucket/{number}")

    def migrate(self, number: int) -> Steps[None]:
        """Hand a bucket over: flush it, drop it, release it; another shard claims it (rule 10)."""
        bucket = self.buckets.get(number)
        if bucket is None:
            return
        self._leaving.add(number)
        while self.buckets.get(number) is bucket and bucket.retrying is not None:
            yield 3
        if self.buckets.get(number) is bucket:
            if self._may_flush(bucket):
                yield from self._flush([bucket])
            self.buckets.pop(number, None)
        while self.view.owner(f"bucket/{number}").owner == self.name:
            yield from self.release(f"bucket/{number}")
            yield 20
