"""The faults of a seed: kills, zombies, lossy failovers, outages, migrations, alone and in company."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from .control import LEASE, Member
from .embedder import Embedder
from .joiner import Joiner
from .shard import Shard
from .trainer import RANKS, Trainer

if TYPE_CHECKING:
    from .world import World

Strike = tuple[str, Callable[[], None]]


class Faults:
    """What can go wrong. Each strikes the simulated system, with a restart where there would be one."""

    def __init__(self, world: World) -> None:
        self._world = world
        self._rng = world.sim.rng

    def kill(self, slot: str, away: int) -> None:
        """End a process; a new one starts a while later."""
        self._world.slots[slot].kill()
        self._world.sim.after(away, lambda: self._again(slot))

    def pause(self, slot: str, ticks: int) -> None:
        """Stop a process that will come back, past its lease perhaps."""
        self._world.slots[slot].pause(ticks)

    def replace_joiner(self, ticks: int) -> None:
        """Pause the joiner and start another instance, as an orchestrator would; the old one comes back."""
        self._world.slots["joiner0"].pause(ticks)
        self._world.start("joiner0")

    def fail_over(self, node: int, losing: int) -> None:
        """Stop replication, then promote the replica: what was acknowledged meanwhile is gone."""
        target = self._world.store.nodes[node]
        target.stall(losing)

        def promote() -> None:
            lost = target.fail_over()
            self._world.sim.note(f"node {node} fails over, {lost} acknowledged writes are lost")

        self._world.sim.after(losing, promote)

    def outage(self, ticks: int) -> None:
        """The control log is away for all processes."""
        self._world.control.away = True
        self._world.sim.after(ticks, lambda: setattr(self._world.control, "away", False))

    def migrate(self, bucket: int) -> None:
        """The bucket's owner hands it over."""
        for process in self._world.slots.values():
            if isinstance(process, Shard) and process.alive and bucket in process.buckets:
                process.spawn(process.migrate(bucket))

    def blind(self, slot: str, ticks: int) -> None:
        """A process cannot read `control`, and goes on with what it knows."""
        process = self._world.slots[slot]
        assert isinstance(process, Member)
        process.blind_until = self._world.sim.now + ticks

    def reclaim(self, bucket: int, ticks: int) -> None:
        """The owner claims its bucket again, as an operator may make it do: its memory of it is gone."""
        for process in self._world.slots.values():
            if isinstance(process, Shard) and process.alive and bucket in process.buckets:
                process.spawn(process.reclaim(bucket))
                process.blind_until = self._world.sim.now + ticks

    def release_partition(self, partition: int) -> None:
        """The partition's owner hands it over."""
        for process in self._world.slots.values():
            if isinstance(process, Embedder) and process.alive:
                process.spawn(process.release_partition(partition))

    def lose_rank(self, rank: int) -> None:
        """A rank of the trainer dies in its next step."""
        for process in self._world.slots.values():
            if isinstance(process, Trainer) and process.fence is not None:
                process.lose_rank(rank)

    def hand_over(self, partition: int, ticks: int) -> None:
        """A partition changes hands while the trainer sleeps on batches of the old embedder."""
        for slot, process in self._world.slots.items():
            if isinstance(process, Trainer) and process.fence is not None:
                self.pause(slot, ticks)
        self.release_partition(partition)

    def ambush(self, losing: int, then: int, *, kill: bool) -> None:
        """Strike the next claimant of a bucket: its first writes are lost, and then it dies or sleeps."""

        def strike(bucket: int, slot: str) -> None:
            self.fail_over(bucket % self._world.nodes, losing)
            self._fell(slot, then, kill=kill)

        self._world.ambushes.append(strike)

    def usurp(self, slot: str, asleep: int, *, blind: bool, kill: bool) -> None:
        """A zombie: while it sleeps its buckets are claimed; when it wakes, a failover has lost the claim.

        Blind, it cannot read `control` for a while, so it goes on as an owner would.
        """
        rng = self._rng
        wakes = self._world.sim.now + asleep
        self.pause(slot, asleep)
        if blind:
            self._world.sim.after(asleep - 1, lambda: self.blind(slot, rng.randrange(8, 90)))

        def strike(bucket: int, winner: str) -> None:
            left = max(3, wakes - self._world.sim.now + rng.randrange(-8, 8))
            self.fail_over(bucket % self._world.nodes, left)
            if rng.random() < 0.7:
                self._fell(winner, left + rng.randrange(-10, 40), kill=kill)
            if rng.random() < 0.5:
                self._world.sim.after(left + rng.randrange(60), lambda: self.kill("reader0", 5))

        self._world.ambushes.append(strike)

    def lose_claim(self) -> None:
        """A failover loses a claim that a reader has seen; the claimant had no answer, and claims again.

        In between the owner before wakes and writes on. It fell asleep with rows that readers lack.
        """
        world, sim = self._world, self._world.sim
        shards = {slot: one for slot, one in world.slots.items() if isinstance(one, Shard) and one.awake()}
        changed = [
            (slot, bucket.number)
            for slot, shard in shards.items()
            for bucket in shard.buckets.values()
            if bucket.unpublished and bucket.stored is None
        ]
        if not changed:
            sim.after(1, self.lose_claim)
            return
        slot, bucket = changed[0]
        asleep, lost_answers = 2 * LEASE + 40, sim.lost_answers
        wakes = sim.now + asleep
        self.pause(slot, asleep)
        sim.after(asleep - 1, lambda: self.blind(slot, LEASE))
        self.fail_over(bucket % world.nodes, asleep - 2)

        def strike(number: int, fence: int) -> None:
            if number != bucket or sim.now + 30 > wakes:
                return
            world.store.on_claimed = lambda number, fence: None
            winner = next(s for s in shards if dict(shards[s].owned()).get(f"bucket/{bucket}") == fence)
            self.kill("reader0", 1)
            self.pause(winner, wakes + 40 - sim.now)

        world.store.on_claimed = strike
        sim.after(asleep + 38, lambda: setattr(sim, "lost_answers", 1.0))
        sim.after(asleep + 43, lambda: setattr(sim, "lost_answers", lost_answers))

    def _fell(self, slot: str, delay: int, *, kill: bool) -> None:
        asleep = self._rng.choice([30, LEASE, LEASE + 40])
        self._world.sim.note(f"{slot} will {'die' if kill else 'sleep'} in {delay}")
        if kill:
            self._world.sim.after(max(1, delay), lambda: self.kill(slot, 30))
        else:
            self._world.sim.after(max(1, delay), lambda: self.pause(slot, asleep))

    def _again(self, slot: str) -> None:
        if not self._world.slots[slot].alive or isinstance(self._world.slots[slot], Joiner):
            self._world.start(slot)


def lost_claim(world: World, until: int) -> list[tuple[int, Strike]]:
    """Only `Faults.lose_claim`."""
    return [
        (world.sim.rng.randrange(until * 2 // 5, until * 7 // 10), ("lose a claim", Faults(world).lose_claim))
    ]


def plan(world: World, until: int) -> list[tuple[int, Strike]]:
    """Draw the faults of a seed."""
    rng, faults = world.sim.rng, Faults(world)
    slots = sorted(world.slots)
    members = [slot for slot in slots if slot.startswith(("shard", "embedder", "trainer"))]
    shards = [slot for slot in slots if slot.startswith("shard")]

    def draw() -> Strike:
        slot, member, shard = rng.choice(slots), rng.choice(members), rng.choice(shards)
        reader = rng.choice([slot for slot in slots if slot.startswith("reader")])
        node, short, long = rng.randrange(world.nodes), rng.randrange(5, 40), rng.randrange(60, 200)
        bucket, partition, rank = (
            rng.randrange(world.buckets),
            rng.randrange(world.partitions),
            rng.randrange(RANKS),
        )
        choices: list[tuple[int, str, Callable[[], None]]] = [
            (4, f"kill {slot}", lambda: faults.kill(slot, short)),
            (3, f"kill {shard}", lambda: faults.kill(shard, short)),
            (2, f"pause {slot} for {short}", lambda: faults.pause(slot, short)),
            (3, f"pause {member} for {long}", lambda: faults.pause(member, long)),
            (1, f"replace the joiner, pause it for {short}", lambda: faults.replace_joiner(short)),
            (4, f"stop replication of node {node}", lambda: faults.fail_over(node, short)),
            (1, f"control is away for {long}", lambda: faults.outage(long)),
            (2, f"migrate bucket {bucket}", lambda: faults.migrate(bucket)),
            (2, "kill joiner0", lambda: faults.kill("joiner0", short)),
            (4, f"reclaim bucket {bucket}", lambda: faults.reclaim(bucket, short % 20)),
            (2, f"blind {member} for {long}", lambda: faults.blind(member, long)),
            (2, f"release partition {partition}", lambda: faults.release_partition(partition)),
            (
                3,
                f"hand over partition {partition}, trainer asleep for {short}",
                lambda: faults.hand_over(partition, short),
            ),
            (1, f"lose rank {rank}", lambda: faults.lose_rank(rank)),
            (3, f"kill {reader}", lambda: faults.kill(reader, short)),
            (3, "ambush", lambda: faults.ambush(short, long // 3, kill=long % 2 == 0)),
            (
                4,
                f"usurp {shard}",
                lambda: faults.usurp(shard, LEASE + long // 2, blind=short % 3 > 0, kill=long % 2 == 0),
            ),
        ]
        _, name, what = rng.choices(choices, [weight for weight, _, _ in choices])[0]
        return name, what

    def moment() -> int:
        # Many in the last stretch: what goes wrong behind the last sample is not put right by the next one.
        return rng.randrange(until - 120, until) if rng.random() < 0.3 else rng.randrange(20, until)

    return sorted(((moment(), draw()) for _ in range(rng.randrange(5, 20))), key=lambda item: item[0])


FAULTS_OF = {"reader_starts_at_writer": lost_claim}
"""Faults for the rules that those of `plan` do not show to be broken in 1,200 seeds."""
