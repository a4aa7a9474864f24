"""A record at which the decoder raises an error is refused alone, and a restart rebuilds the same state."""

from __future__ import annotations

import random
from dataclasses import replace
from pathlib import Path

import orjson
import pytest

from freshet.joiner.core import ImpressionColumns
from freshet.joiner.decoder import BAD_IN_A_ROW, Refused
from freshet.joiner.service import Intervals
from freshet.types import Records
from tests.fixtures.join_events import JsonDecoder, Served, label, plan_of
from tests.fixtures.joiner import Sample, World, random_events

INTERVALS = Intervals(
    flush_interval_ms=0, commit_interval_ms=0, end_check_interval_ms=10**9, pin_interval_ms=10**9
)
PLAN = plan_of(label("click", 300), label("buy", 500))
ERRORS = {b"!r": RecursionError, b"!u": UnicodeError, b"!o": OverflowError, b"!k": KeyError}


class Raises(JsonDecoder):
    """A decoder with a fault: some bytes raise an unexpected error."""

    def served(self, records: Records) -> tuple[ImpressionColumns, Refused]:
        for value in records.values:
            if value[:2] in ERRORS:
                raise ERRORS[value[:2]]("poison")
        return super().served(records)


def joined(folder: Path, poison: list[bytes], seed: int) -> tuple[list[Sample], list[str], int]:
    """Return (samples, reasons of dead letters, refused by the ledger) of a joiner that often restarts."""
    world = World(folder, PLAN, partitions=1)
    events = random_events(random.Random(seed), PLAN, requests=40, disorder_ms=300)
    chance = random.Random(seed + 1)
    for value in poison:
        events.insert(chance.randrange(len(events)), value)  # type: ignore[arg-type]
    for start in range(0, len(events), 30):
        world.send(events[start : start + 30], time_ms=4_000)
        joiner = world.joiner(INTERVALS, replace(world.context(), decoder=lambda: Raises(PLAN)))
        joiner.open()
        for _ in range(3):
            joiner.step()
        if start + 30 < len(events):
            joiner.close()  # the next joiner recovers its state
    joiner.run(until_end=True)
    assert joiner.status is not None
    letters = [orjson.loads(value)["reason"] for _, value in world.values("m.dead-letters")]
    samples = sorted(world.samples())
    world.close()
    return samples, letters, joiner.status.ledger.refused


@pytest.mark.parametrize("seed", range(2))
def test_poison_among_events_changes_no_sample(tmp_path: Path, seed: int) -> None:
    poison = [b"!r", b"!u", b"!o", b"!k", b"!r again", b"\xff", b""]
    expected, letters, refused = joined(tmp_path / "clean", [], seed)
    assert expected
    assert (letters, refused) == ([], 0)
    found, letters, refused = joined(tmp_path / "poisoned", poison, seed)
    assert found == expected
    assert refused == len(poison)
    assert sorted(letters) == sorted(
        [
            "expected JSON",
            "expected JSON",
            "the decoder raises KeyError: 'poison'",
            "the decoder raises OverflowError: poison",
            "the decoder raises RecursionError: poison",
            "the decoder raises RecursionError: poison",
            "the decoder raises UnicodeError: poison",
        ]
    )


def test_stream_of_only_refused_events_is_reported(tmp_path: Path) -> None:
    world = World(tmp_path, PLAN, partitions=1)
    intervals = Intervals(flush_interval_ms=0, commit_interval_ms=0, status_interval_ms=0)
    joiner = world.joiner(intervals, replace(world.context(), decoder=lambda: Raises(PLAN)))
    joiner.open()

    def trouble(*events: bytes | Served) -> str | None:
        world.send(events, time_ms=4_000)
        joiner.step()
        assert joiner.status is not None
        return joiner.status.trouble

    good = Served("r", ("x",), 4_000)
    assert trouble(*[b"{"] * (BAD_IN_A_ROW - 1)) is None
    assert "events of served were all refused: expected JSON" in (trouble(b"{") or "")
    assert trouble(good) is None
    assert trouble(*[b"{"] * BAD_IN_A_ROW, good) is None
    joiner.close()
    world.close()
