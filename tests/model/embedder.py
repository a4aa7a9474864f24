"""An embedding worker: samples in, batches to a trainer rank, gradients to the shards (rules 2, 6, 7)."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING

from .control import Member
from .rules import Rules
from .shard import Push, Shard
from .simulation import Process, Steps, Unavailable
from .store import Row
from .trainer import Answer, Trainer

if TYPE_CHECKING:
    from .world import World

CREDITS = 4  # batches in flight
RESEND = 40  # ticks without an answer before a message is repeated
RECORDS = 5  # most samples that a batch takes from one partition


@dataclass(slots=True, eq=False)
class Batch:
    """A set of offset ranges, at most one per partition, and what their samples teach."""

    ranges: dict[int, tuple[int, int]]
    dense: dict[int, Row]  # partition -> its share of the dense gradient
    rows: dict[int, dict[int, Row]]  # bucket -> key -> gradient
    sent_at: int = 0
    pushed: bool = False
    waiting: set[str] = field(default_factory=set)  # shards that have not acknowledged


def next_stop(position: int, cuts: Sequence[int], end: int, rules: Rules) -> int:
    """Rule 7: no range crosses an offset that a store reported."""
    if not rules.cut_points:
        return end
    return min([cut for cut in cuts if cut > position] + [end])


def start_over(told: Iterable[int], own: int, rules: Rules) -> tuple[int, list[int]]:
    """Rule 7: rewind to the smallest reported offset; no range crosses the distinct ones above it."""
    offsets = sorted(set(told))
    position = offsets[0] if rules.rewind_to_smallest else max(offsets[-1], own)
    return position, [offset for offset in offsets if offset > position]


class Embedder(Member):
    """Holds no state that matters: it may be killed at any moment."""

    def __init__(self, world: World, name: str, rank: int) -> None:
        super().__init__(world, name, tuple(f"partition/{number}" for number in range(world.partitions)))
        self.rank = rank  # a partition feeds one rank at a time (rule 14)
        self._map: object = None
        self._mine: set[int] = set()
        self._session = 0  # counts rewinds; answers to older ones are ignored
        self._asking = True
        self._positions: dict[int, int] = {}
        self._cuts: dict[int, list[int]] = {}
        self._flight: list[Batch] = []
        self._stream: dict[str, int] = {}  # shard -> when the last push on its stream arrives
        self.spawn(self._work())

    def on_control(self) -> None:
        """Rule 7: on every change of the ownership map, start over."""
        owned = dict(self.owned())
        resources = [f"bucket/{number}" for number in range(self.world.buckets)] + ["seat"]
        new_map = ({name: self.view.owner(name) for name in resources}, owned)
        if new_map == self._map:
            return
        mine = {int(name.split("/")[1]) for name in owned}
        carry_on = not self.rules.rewind_on_new_owner and mine == self._mine and not self._asking
        self._map, self._mine = new_map, mine
        if carry_on:
            for batch in self._flight:
                batch.waiting &= {shard.name for shard in self._shards()}
        else:
            self.rewind()

    def rewind(self) -> None:
        """Rule 6: drop batches in flight and request the offsets of all stores."""
        self._session += 1
        self._asking = True
        self._flight.clear()

    def release_partition(self, number: int) -> Steps[None]:
        """Release a partition for the next claim."""
        if number in self._mine:
            yield from self.release(f"partition/{number}")

    def _shards(self) -> dict[Shard, dict[int, int]]:
        """The owners of buckets by the map, and what they own, under which claim."""
        owners: dict[Shard, dict[int, int]] = {}
        for number in range(self.world.buckets):
            claim = self.view.owner(f"bucket/{number}")
            if claim.owner:
                owners.setdefault(self.world.shards[claim.owner], {})[number] = claim.fence
        return owners

    def _trainer(self) -> Trainer | None:
        return self.world.trainers.get(self.view.owner("seat").owner)

    # Asking ---

    def _work(self) -> Steps[None]:
        while True:
            if self._asking:
                yield from self._ask()
            else:
                while len(self._flight) < CREDITS and self._send_next():
                    pass
                self._repeat()
            yield 3

    def _ask(self) -> Steps[None]:
        """Wait until all buckets are owned, ask all for `applied`, rewind (rule 7)."""
        session = self._session
        trainer, seat = self._trainer(), self.view.owner("seat").fence
        shards = self._shards()
        if trainer is None or sum(map(len, shards.values())) < self.world.buckets or not self._mine:
            return
        vectors: list[list[int]] = []
        try:
            for shard, claims in shards.items():
                vectors += yield from self._question(
                    shard, partial(map, shard.applied, claims, claims.values())
                )
            vectors += yield from self._question(trainer, lambda: [trainer.applied(seat)])
        except Unavailable:
            return
        if session != self._session:
            return
        for partition in self._mine:
            told = [vector[partition] for vector in vectors]
            own = self._positions.get(partition, 0)
            self._positions[partition], self._cuts[partition] = start_over(told, own, self.rules)
        self._asking = False

    def _question(
        self, asked: Process, vectors: Callable[[], Iterable[list[int] | None]]
    ) -> Steps[list[list[int]]]:
        """Request the offsets of a store.

        Raises:
            Unavailable: the process is gone or asleep, or has not loaded all of it yet.
        """
        known = yield from self.call(lambda: list(vectors()) if asked.awake() else [None])
        if None in known:
            raise Unavailable
        return [vector for vector in known if vector is not None]

    # Batches ---

    def _send_next(self) -> bool:
        """Form a batch and hand it to the rank; False if there is nothing to read."""
        ranges: dict[int, tuple[int, int]] = {}
        samples: dict[int, list[int]] = {}
        for partition in sorted(self._mine, key=lambda _: self.sim.rng.random()):
            position = self._positions[partition]
            ahead = any(cut > position for cut in self._cuts[partition])
            if ahead and ranges and self.rules.single_range_before_cuts:
                continue  # while such offsets lie ahead, a batch holds that single range (rule 2)
            stop = next_stop(
                position, self._cuts[partition], len(self.world.samples[partition].records), self.rules
            )
            records, at = self.world.samples[partition].read(position, stop, self.sim.rng.randint(1, RECORDS))
            start = position
            if not self.rules.range_starts_at_previous_stop:
                start = records[0][0] if records else at
            if at > start:
                ranges[partition] = (start, at)
                samples[partition] = [sample for _, sample in records]
            self._positions[partition] = at
            if ahead and ranges and self.rules.single_range_before_cuts:
                break
        if not ranges:
            return False
        batch = Batch(ranges, {}, {})
        for partition, ids in samples.items():
            batch.dense[partition] = self.world.ledger.dense_gradient(ids)
            self.world.ledger.add_gradients(ids, batch.rows)
        self._flight.append(batch)
        self._send(batch)
        return True

    def _send(self, batch: Batch) -> None:
        """Hand a batch to the trainer's rank."""
        trainer = self._trainer()
        batch.sent_at = self.sim.now
        if trainer is None:
            return

        def answered(answer: Answer) -> None:
            arrives = max(self.sim.now + self.sim.hop(), self._stream.get("gradients", 0))
            self._stream["gradients"] = arrives
            self.sim.after(arrives - self.sim.now, lambda: self._gradients(batch, answer), self)

        self._deliver(
            trainer.name, lambda: trainer.take(self.rank, batch.ranges, batch.dense, answered), trainer
        )

    def _gradients(self, batch: Batch, answer: Answer) -> None:
        if batch not in self._flight or batch.pushed:
            return
        if answer is Answer.REFUSED:
            self.rewind()
            return
        if answer is Answer.NO_ROWS:
            batch.rows = {}
        batch.pushed = True
        shards = self._shards()
        batch.waiting = {shard.name for shard in shards}
        for shard in shards:
            self._push(batch, shard)

    def _push(self, batch: Batch, shard: Shard) -> None:
        batch.sent_at = self.sim.now
        numbers = self._shards().get(shard, {})
        rows = {number: batch.rows[number] for number in numbers if number in batch.rows}
        push = Push(batch.ranges, rows, numbers)

        def arrived() -> None:
            applied = shard.push(push)
            if self.sim.rng.random() >= self.sim.lost_answers:
                self.sim.after(self.sim.hop(), lambda: self._pushed(batch, shard.name, applied), self)

        self._deliver(shard.name, arrived, shard)

    def _deliver(self, stream: str, what: Callable[[], None], receiver: Shard | Trainer) -> None:
        """Send on a stream: in order, but for what a broken connection repeats or holds back."""
        rng = self.sim.rng
        arrives = max(self.sim.now + self.sim.hop(), self._stream.get(stream, 0))
        chance = rng.random()
        if chance < self.world.disorder:
            self.sim.after(rng.randrange(4, 160), what, receiver)  # held back, overtaken
        elif chance < 2 * self.world.disorder:
            self.sim.after(rng.randrange(4, 160), what, receiver)  # repeated
            self.sim.after(arrives - self.sim.now, what, receiver)
        else:
            self._stream[stream] = arrives
            self.sim.after(arrives - self.sim.now, what, receiver)

    def _pushed(self, batch: Batch, shard: str, applied: bool) -> None:
        if batch not in self._flight:
            return
        if not applied:
            self.rewind()
            return
        batch.waiting.discard(shard)
        if not batch.waiting:
            self._flight.remove(batch)

    def _repeat(self) -> None:
        """Send unanswered batches again."""
        for batch in list(self._flight):
            if self.sim.now - batch.sent_at < RESEND:
                continue
            if not batch.pushed:
                self._send(batch)
            for shard in self._shards():
                if shard.name in batch.waiting:
                    self._push(batch, shard)
