"""The ledger test (PROTOCOL): whatever is killed, every acknowledged event counts exactly once, everywhere.

`FRESHET_TEST_KILLS` kills (12 by default); `FRESHET_TEST_SEED` repeats a run's traffic and choice of
victims, not its timing. `pytest -s` shows the kills and how long each process took to go on. The trainer
keeps no row in memory that it does not use, so rows go to its disk and come back all the time.
"""

from __future__ import annotations

import os
import random
from collections import Counter
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest

from freshet.apps.local import Local, local
from freshet.config.spec import load_spec
from freshet.config.spec.topics import Topics, topics_of
from freshet.log import EventLog
from freshet.testing.conditions import wait_until_nothing_differs
from tests.fixtures import audit
from tests.fixtures.commands import LEDGER, applied, drain, told_by, url_of
from tests.fixtures.tables import disk_folder
from tests.fixtures.traffic import Asker, Traffic
from tests.system.killing import Killer
from tests.system.zombies import replace_while_it_stands_still

pytestmark = [pytest.mark.system, pytest.mark.long, pytest.mark.timeout(1_200)]

KILLS = int(os.environ.get("FRESHET_TEST_KILLS", "12"))
GAP_S = float(os.environ.get("FRESHET_TEST_KILL_GAP", "2.5"))
SEED = int(os.environ.get("FRESHET_TEST_SEED", "0")) or random.SystemRandom().randrange(1, 2**31)


def test_acknowledged_events_count_exactly_once_despite_kills(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FRESHET_TRAINER_SSD_FOLDER", str(disk_folder()))
    monkeypatch.setenv("FRESHET_TRAINER_MEMORY_BYTES", "1")
    monkeypatch.setenv("FRESHET_COMMON_DRAIN", "2m")  # flushes of few buckets, on a busy disk
    print(f"\nFRESHET_TEST_SEED={SEED} FRESHET_TEST_KILLS={KILLS}")
    spec = load_spec(LEDGER)
    topics = topics_of(spec)
    folder = tmp_path / "run"
    with local(spec, folder=folder, ready_s=120) as system:
        log = audit.open_log(folder)
        traffic = Traffic([url_of(system, "gateway")], SEED)
        asker = Asker(url_of(system, "inference"))
        killer = Killer(folder, _progress(system, log, topics, traffic, asker), random.Random(SEED), GAP_S)
        traffic.start()
        asker.start()
        try:
            killer.run(KILLS // 2)
            stood = _stand_still(killer, folder, log, topics)
            killer.run(KILLS - KILLS // 2)
        finally:
            traffic.stop()
            asker.stop()
            print(killer.report())
        print(
            "stood still, replaced, came back: " + ", ".join(f"{r} after {t:.1f} s" for r, t in stood.items())
        )
        assert not traffic.errors
        drain(system, folder, log, topics, len(traffic.impressions))
        ledger = told_by(system, "joiner")["ledger"]
        ssd = told_by(system, "trainer")["ssd"]
        books = audit.read_books(log, topics)
        wait_until_nothing_differs(
            lambda: audit.against_serving(books, url_of(system, "inference")), within_s=60
        )
        ends = audit.ends_of(log, topics.samples)
        log.close()
    print(_summary(traffic, asker, killer, books, ledger), f"ssd: {ssd}")
    assert ssd["fetched"] > 100
    assert ssd["spilled"] > 100
    assert list(audit.against_joiner(books, ledger, len(traffic.impressions))) == []
    late = ledger["events"]
    excused = late["actions_late"] + late["actions_orphan"] + late["impressions_late"]
    labels = tuple(label.name for label in spec.labels)
    wrong = audit.against_acknowledged(books, traffic.impressions, traffic.actions, labels, excused=excused)
    assert list(wrong) == []
    assert list(audit.against_offsets(ends, folder, spec)) == []
    assert list(audit.against_rows(books, folder, spec)) == []
    assert list(audit.against_dense(books, folder)) == []
    assert _errors(asker, killer) == {}


def _stand_still(killer: Killer, folder: Path, log: EventLog, topics: Topics) -> dict[str, float]:
    """Joiner and trainer stand still until another has their place, and return: they must not do harm."""

    def stored() -> float:
        return float(audit.stored_offsets(folder))

    def joined() -> float:
        return float(sum(audit.ends_of(log, topics.samples).values()))

    return {
        "joiner": replace_while_it_stands_still(killer, "joiner", joined, ends_by_itself=True),
        "trainer": replace_while_it_stands_still(killer, "trainer", stored, ends_by_itself=False),
    }


def _progress(
    system: Local, log: EventLog, topics: Topics, traffic: Traffic, asker: Asker
) -> dict[str, Callable[[], float | None]]:
    return {
        "gateway": lambda: max(traffic.acked_begin.values()),
        "joiner": lambda: float(sum(audit.ends_of(log, topics.samples).values())),
        "trainer": lambda: _sum_applied(system),
        "inference": lambda: asker.last_ok_begin,
    }


def _sum_applied(system: Local) -> float | None:
    found = applied(system)
    return float(sum(found.values())) if found else None


def _errors(asker: Asker, killer: Killer) -> dict[str, int]:
    """Answers of serving that were none, but for those while a killed inference process was away."""
    away = killer.away("inference")
    return dict(
        Counter(
            outcome
            for began, ended, outcome in asker.answers
            if outcome != "200" and not any(a <= ended and began <= b + 0.5 for a, b in away)
        )
    )


def _summary(
    traffic: Traffic, asker: Asker, killer: Killer, books: audit.Books, ledger: Mapping[str, Any]
) -> str:
    outcomes = Counter(outcome for _, _, outcome in asker.answers)
    events = {name: n for name, n in ledger["events"].items() if n}
    actions = sum(map(len, traffic.actions.values()))
    return "\n".join(
        (
            f"acknowledged: {len(traffic.impressions)} impressions, {actions} actions; "
            f"{traffic.resent} requests sent again on purpose; "
            f"the longest wait for an acknowledgement was {traffic.longest_wait_s:.1f} s",
            f"samples in the log: {len(books.samples)}, late: {len(books.late)}; joiner: {events}",
            f"rows: {len(books.users)} users, {len(books.items)} items; dense: {books.dense}",
            f"rank requests: {dict(outcomes)}; not 200 outside of inference kills: {_errors(asker, killer)}",
        )
    )
