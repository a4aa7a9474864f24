"""Speed of the log on Kafka: appends and reads of 300-byte records and of blocks, transactions.

    python -m tests.perf.kafka [--brokers HOST:PORT] [--quick] [--json]

Without --brokers it starts a Kafka of its own (the jars of `ops/install-kafka`) in a temporary folder: broker
and clients then share the cores, and rates are those of both. Data is in the page cache; Kafka does not wait
for a disk. Goals: consume >= 500,000 records/s; in transactions, committed about every 200 ms, >= 100,000
events/s.
"""

from __future__ import annotations

import tempfile
import time
from contextlib import ExitStack
from pathlib import Path
from uuid import uuid4

import numpy as np

from freshet.seams.eventlog import EventLog
from freshet.seams.open import open_eventlog
from freshet.types import Append, TopicPartition
from tests.perf.log import BLOCK, RECORD_BYTES, column
from tests.perf.report import Figures, command
from tests.servers.kafka import Kafka

COMMIT_S = 0.2


def append_speed(log: EventLog, batch: int, total: int, width: int = RECORD_BYTES) -> Figures:
    """Of one thread, `batch` records to an append, one after the other."""
    topic = f"append.{batch}.{width}"
    log.create_topic(topic, partitions=1)
    writer, values, times = log.writer(), column(batch, width), []
    writer.append([Append(topic, 0, column(1, 1))])
    for _ in range(total // batch):
        began = time.perf_counter()
        writer.append([Append(topic, 0, values)])
        times.append(time.perf_counter() - began)
    writer.close()
    p50, p99 = np.percentile(times, [50, 99])
    return {"records_per_s": batch / float(p50), "p50_ms": float(p50) * 1e3, "p99_ms": float(p99) * 1e3}


def read_speed(log: EventLog, topic: str, total: int, at_once: int) -> Figures:
    """All records of a topic of one partition, from the first; processor time is the reading process's."""
    reader, seen, size = log.reader(), 0, 0
    reader.assign({TopicPartition(topic, 0): 0})
    began, cpu = time.perf_counter(), time.process_time()
    while seen < total:
        for _, records in reader.poll(at_once, 1.0):
            seen, size = seen + len(records), size + len(records.values.data)
    took, cpu = time.perf_counter() - began, time.process_time() - cpu
    reader.close()
    return {
        "records_per_s": seen / took,
        "mb_per_s": size / took / 1e6,
        "cpu_us_per_record": cpu / seen * 1e6,
    }


def transaction_speed(log: EventLog, partitions: int, seconds: float, per_commit: int | None) -> Figures:
    """A named writer that commits to several partitions at once.

    Args:
        log: the log.
        partitions: of the topic; each gets its share of each transaction.
        seconds: for how long.
        per_commit: events of a transaction, one begun every COMMIT_S or when the last is done; None: one
            event, as fast as commits go.
    """
    topic = f"transactions.{per_commit}"
    log.create_topic(topic, partitions=partitions)
    writer, values = (
        log.writer(f"perf.{per_commit}"),
        column(max((per_commit or 1) // partitions, 1), RECORD_BYTES),
    )
    appends = [Append(topic, p, values) for p in range(partitions if per_commit else 1)]
    events, times = 0, []
    writer.append(appends)
    began = time.perf_counter()
    while (now := time.perf_counter()) < began + seconds:
        writer.append(appends)
        times.append(time.perf_counter() - now)
        events += len(appends) * len(values)
        if per_commit:
            time.sleep(max(0.0, now + COMMIT_S - time.perf_counter()))
    took = time.perf_counter() - began
    writer.close()
    p50, p99 = np.percentile(times, [50, 99])
    return {
        "events_per_s": events / took,
        "transactions_per_s": len(times) / took,
        "p50_ms": float(p50) * 1e3,
        "p99_ms": float(p99) * 1e3,
    }


def measure(quick: bool = False, brokers: str | None = None) -> Figures:
    """Rates of appends, reads and transactions."""
    total = (50 if quick else 200) * 1024
    with ExitStack() as stack:
        if brokers is None:
            folder = Path(stack.enter_context(tempfile.TemporaryDirectory())) / "kafka"
            brokers = stack.enter_context(Kafka(folder)).bootstrap
        log = open_eventlog(f"kafka://{brokers}/{uuid4().hex}")
        stack.callback(log.close)
        blocks, width = total // 64, BLOCK * RECORD_BYTES
        figures: Figures = {
            "append_of_4096": append_speed(log, 4096, total),
            "append_of_256": append_speed(log, 256, total // 4),
            "append_of_1": append_speed(log, 1, total // 256),
            "append_of_16_blocks": append_speed(log, 16, blocks // 16 * 16, width),
            "read_events": read_speed(log, f"append.4096.{RECORD_BYTES}", total // 4096 * 4096, 16_384),
            "read_blocks": read_speed(log, f"append.16.{width}", blocks // 16 * 16, 64),
        }
        figures["read_blocks"]["samples_per_s"] = figures["read_blocks"]["records_per_s"] * BLOCK
        seconds = 3.0 if quick else 6.0
        figures["transactions_of_1"] = transaction_speed(log, 4, seconds, None)
        for per_commit in (4_000, 20_000, 40_000):
            figures[f"transactions_of_{per_commit}"] = transaction_speed(log, 4, seconds, per_commit)
    return figures


def main() -> None:
    """Measure and print."""
    command(measure, __doc__, {"brokers": str})


if __name__ == "__main__":
    main()
