"""The compose file under load for an hour: do memory and disk stay as they are, does everything count once?

    python -m tests.compose.soak [MINUTES [EVENTS_PER_S [RANKS_PER_S]]]    # 60, 1000 and 50

Events are kept for ten minutes only, so that disks can be seen to stay as they are; samples are read while
they are there. Prints a line a minute: memory of all containers, what volumes hold, freshness of rankings; at
the end the figures of the load, memory by container and disk by volume early and late, and what the audit
found. A benchmark, no test; needs a docker engine and built images.
"""

from __future__ import annotations

import gc
import json
import os
import shutil
import sys
import tempfile
import threading
import time
from collections.abc import Mapping
from contextlib import suppress
from functools import partial
from pathlib import Path

from freshet.config.spec import Spec, load_spec
from freshet.config.spec.topics import topics_of
from freshet.errors import Unavailable
from freshet.log import EventLog
from freshet.testing.conditions import wait_until
from freshet.types import TopicPartition
from tests.compose.auditing import differences
from tests.compose.figures import memory_mb, volumes_mb
from tests.compose.loading import Load
from tests.compose.stack import EXACT, Stack
from tests.fixtures import audit
from tests.fixtures.commands import LEDGER

RETENTION = '\n[retention]\nevents = "10m"\nrows = "10m"\nmeasures = "10m"\n'


class Follower:
    """Reads samples as they are written, before retention takes them. One thread."""

    def __init__(self, log: EventLog, topic: str) -> None:
        self.samples: list[audit.Sample] = []
        self.at: dict[int, int] = dict.fromkeys(audit.ends_of(log, topic), 0)
        self.failed: BaseException | None = None
        self._log, self._topic = log, topic
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name=f"follow {topic}")
        self._thread.start()

    def _run(self) -> None:
        reader = self._log.reader()
        try:
            reader.assign({TopicPartition(self._topic, p): n for p, n in self.at.items()})
            while not self._stop.is_set():
                with suppress(Unavailable):  # a broker that is busy for a second is polled again
                    for where, records in reader.poll(1_000, 0.5):
                        self.samples += audit.samples_in(records.values)
                        self.at[where.partition] = records.next_offset
        except BaseException as error:
            self.failed = error
        finally:
            reader.close()

    def to_the_end(self) -> list[audit.Sample]:
        """Everything, once nothing is written any more."""
        ends = audit.ends_of(self._log, self._topic)
        wait_until(
            f"{self._topic} is read",
            lambda: self.failed is not None or all(self.at[p] >= end for p, end in ends.items()),
            within_s=300,
        )
        self._stop.set()
        self._thread.join(30)
        if self.failed is not None:
            raise self.failed
        return self.samples


def main(minutes: float, events: float, ranks: float) -> None:
    """Start, load, look once a minute, audit."""
    with tempfile.TemporaryDirectory(prefix="freshet-soak-") as made:
        folder = Path(made)
        shutil.copytree(LEDGER.parent, folder / "spec")
        spec_file = folder / "spec" / LEDGER.name
        spec_file.write_text(spec_file.read_text() + RETENTION)
        stack = Stack(spec_file.parent, folder, variables=EXACT)
        stack.down(volumes=True)
        try:
            print(f"all healthy after {stack.up():.0f} s", flush=True)
            os.environ |= stack.settings(folder)
            _soak(stack, load_spec(spec_file), folder, round(minutes), events, ranks)
        finally:
            stack.keep_words(Path(tempfile.gettempdir()))
            stack.down(volumes=True)
            stack.close()


def _soak(stack: Stack, spec: Spec, folder: Path, minutes: int, events: float, ranks: float) -> None:
    topics, log = topics_of(spec), audit.open_log(folder)
    samples, late = Follower(log, topics.samples), Follower(log, topics.late)
    load = Load(stack.gateway, stack.inference, events=events, ranks=ranks, seed=1)
    load.start()
    memory: list[Mapping[str, float]] = []
    disks: list[Mapping[str, float]] = []
    looked = 0
    for minute in range(1, minutes + 1):
        wait_until("a minute passes", partial(_sent_for, load, 60.0 * minute), within_s=300)
        memory.append(memory_mb(stack))
        part, looked = load.figures_since(looked), len(load.parts)
        disks.append(disk := volumes_mb(stack))
        gc.freeze()  # the books are millions of objects: to look through them would hold up the load
        fresh, sent = part["ranks"].freshness, part["events"]
        said = (
            f"memory {sum(memory[-1].values()):.0f} MB",
            f"volumes {sum(disk.values()):.0f} MB (kafka {disk.get('kafka', 0):.0f})",
            f"events {sent.events_per_s:.0f}/s",
            f"failed {sent.failed + part['ranks'].failed}",
            f"freshness p50 {_s(fresh.percentile(50))} p99 {_s(fresh.percentile(99))}",
        )
        print(f"{minute:3} min", *said, sep="  ", flush=True)
    for name, lane in load.stop().items():
        print(name, json.dumps(lane.as_json()), flush=True)
    for what, by_minute in (("container", memory), ("volume", disks)):
        places = sorted({len(by_minute) * part // 6 for part in range(1, 6)} | {len(by_minute) - 1})
        print(f"MB by {what} after minutes {', '.join(str(place + 1) for place in places)}")
        for name in sorted(by_minute[-1]):
            print(f"  {name:14}", *(f"{by_minute[place].get(name, 0):6.0f}" for place in places))
    began = time.monotonic()
    stack.drain(log, topics, folder, len(load.impressions))
    books = audit.Books(samples.to_the_end(), late.to_the_end())
    log.close()
    found = differences(stack, spec, folder, books, load.impressions, load.actions)
    print(f"{len(load.impressions)} impressions, {len(books.samples)} samples, {len(books.late)} late")
    print("exact" if not found else "\n".join(found), f"({time.monotonic() - began:.0f} s)")


def _sent_for(load: Load, seconds: float) -> bool:
    return bool(load.parts) and load.parts[-1][0] >= seconds


def _s(seconds: float | None) -> str:
    return "-" if seconds is None else f"{seconds:.2f} s"


if __name__ == "__main__":
    given = [float(word) for word in sys.argv[1:]]
    main(*(given + [60.0, 1_000.0, 50.0][len(given) :]))
