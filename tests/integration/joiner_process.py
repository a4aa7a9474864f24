"""A joiner of the tests' events as a process: `python -m tests.integration.joiner_process URL NAME`.

It says how it stands as JSON, a line a time.
"""

from __future__ import annotations

import json
import sys
from dataclasses import replace
from pathlib import Path
from threading import Event

from freshet.adapters import open_eventlog
from freshet.clock import SYSTEM_CLOCK
from freshet.coordination.assignment import PartitionAssignment
from freshet.coordination.claims import Claims
from freshet.joiner.service import Intervals, JoinerService, JoinerStatus
from freshet.process.lifecycle import stop_on_signals
from tests.fixtures.join_events import label, plan_of
from tests.fixtures.joiner import World

PARTITIONS = 4
PLAN = plan_of(label("click", 300), label("buy", 900, given=0), grace_ms=120)
INTERVALS = Intervals(
    flush_interval_ms=50, commit_interval_ms=50, end_check_interval_ms=10**9, status_interval_ms=50
)
"""Topics never count as idle, so that no event is late, however long a takeover takes."""


def main() -> None:
    """Join until a signal stops it."""
    url, name = sys.argv[1:]
    stop = Event()
    stop_on_signals(stop)
    log = open_eventlog(url)
    world = World(Path(), PLAN, PARTITIONS, other_log=log)
    claims = Claims(log, "m.control")
    assignment = PartitionAssignment(claims, "joiner", "join", name, name, PARTITIONS, SYSTEM_CLOCK)
    context = replace(world.context(), clock=SYSTEM_CLOCK)
    JoinerService(context, assignment=assignment, intervals=INTERVALS, stop=stop, on_status=say).run()
    claims.close()
    log.close()


def say(status: JoinerStatus) -> None:
    """One line."""
    held = sorted(status.watermark_ms)
    said = {"partitions": held, "events": status.events, "samples": status.samples}
    print(json.dumps(said) + "\n", end="", flush=True)  # one write: librdkafka writes to the same file


if __name__ == "__main__":
    main()
