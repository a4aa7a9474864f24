"""Speed of the log on Kafka: appends and reads of 300-byte records and of blocks, transactions.

    python -m bench.kafka [--brokers HOST:PORT] [--quick] [--json]

Without --brokers it starts a Kafka of its own (the jars of `ops/install-kafka`) in a temporary folder: broker
and clients then share the cores, and rates are those of both. Data is in the page cache; Kafka does not wait
for a disk. The joiner reads a backlog of the shapes of `bench.join` over 8 partitions, each with a named
writer, and appends samples and commits in transactions. Goals: consume >= 500,000 records/s; the joiner >=
100,000 events/s.
"""

from __future__ import annotations

import json
import tempfile
import time
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from uuid import uuid4

import numpy as np

from bench.decode import rows_of, schema_of, spec_of
from bench.join import ACTION, SERVED, SPEC, action, served
from bench.log import BLOCK, RECORD_BYTES, column
from bench.report import Figures, command
from freshet.adapters import open_eventlog
from freshet.config.spec.layout import layout_of
from freshet.config.spec.parse import parse_spec
from freshet.features import SampleColumns, SampleDecoder, encode_blocks, read_blocks
from freshet.joiner.start import intervals_of, make
from freshet.log import EventLog
from freshet.log.schema_ids import SchemaRegistry
from freshet.log.topics import ensure_topics
from freshet.types import Append, BytesColumn, TopicPartition
from tests.servers.kafka import Kafka

COMMIT_S = 0.2
SENT_AT_ONCE = 65_536
JOINED = [  # emit, items, events: several seconds, of which the last transactions are a small part
    ("early", 1, 1_000_000),
    ("window", 1, 1_000_000),
    ("early", 8, 600_000),
    ("window", 8, 600_000),
]


def append_speed(log: EventLog, batch: int, total: int, width: int = RECORD_BYTES) -> Figures:
    """Measure appends of `batch` records by one thread, one after the other."""
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
    rate = batch * len(times) / sum(times)
    return {"records_per_s": rate, "p50_ms": float(p50) * 1e3, "p99_ms": float(p99) * 1e3}


def read_speed(log: EventLog, topic: str, total: int, at_once: int) -> Figures:
    """Read all records of a topic of one partition; processor time is the reading process's."""
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
    """Measure a named writer that commits to several partitions at once.

    Args:
        log: the log.
        partitions: of the topic; each gets its share of each transaction.
        seconds: duration.
        per_commit: events of a transaction, which begins every COMMIT_S or when the last is done; None: one
            event, as fast as commits go.
    """
    topic = f"transactions.{per_commit or 1}"
    log.create_topic(topic, partitions=partitions)
    writer, values = (
        log.writer(f"perf.{per_commit or 1}"),
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


def decode_speed(log: EventLog, total: int) -> Figures:
    """Read blocks of samples of 40 fields and decode them to keys and columns, in one thread."""
    schema, spec = schema_of(False), spec_of(False)
    rows = rows_of(schema, BLOCK, False).records
    block = encode_blocks(
        1,
        SampleColumns(
            sample_ids=np.arange(BLOCK),
            event_times_ms=np.full(BLOCK, 1_700_000_000_000),
            request_ids=np.arange(BLOCK, dtype=np.uint64),
            values=np.zeros(BLOCK, np.float32),
            weights=np.ones(BLOCK, np.float32),
            labels=np.zeros(BLOCK, np.uint8),
        ),
        payloads=rows,
        block_ends=np.array([BLOCK]),
    )
    at = TopicPartition("samples.of.40.fields", 0)
    log.create_topic(at.topic, partitions=1)
    writer, sixteen = log.writer(), BytesColumn.concat([block] * 16)
    for _ in range(total // (16 * BLOCK)):
        writer.append([Append(at.topic, 0, sixteen)])
    writer.close()
    decoder = SampleDecoder(spec, layout_of(spec), lambda _: schema)
    wanted = total // (16 * BLOCK) * 16 * BLOCK
    reader, seen = log.reader(), 0
    reader.assign({at: 0})
    began, cpu = time.perf_counter(), time.process_time()
    while seen < wanted:
        for _, records in reader.poll(64, 1.0):
            read = read_blocks(records.values)
            decoder.decode(read.payloads, 1, read.event_times_ms)
            seen += len(read.payloads)
    took, cpu = time.perf_counter() - began, time.process_time() - cpu
    reader.close()
    return {
        "samples_per_s": seen / took,
        "mb_per_s": seen / BLOCK * len(block.data) / took / 1e6,
        "cpu_us_per_sample": cpu / seen * 1e6,
    }


def joiner_speed(log: EventLog, folder: Path, emit: str, items: int, events: int) -> Figures:
    """Run a joiner through a backlog; opening its writers is measured apart.

    Args:
        log: has no topics of the spec yet.
        folder: where the files of the schemas are written.
        emit: `early` or `window`.
        items: impressions of a served event; every tenth gets an action.
        events: served events and actions.
    """
    spec, registry = parse_spec(SPEC.format(emit=emit)), SchemaRegistry(log)
    streams = (spec.events.served, SERVED), (spec.events.action, ACTION)
    for number, (stream, schema) in enumerate(streams, start=1):
        (folder / str(stream.schema)).write_text(json.dumps(schema))
        assert registry.register(json.dumps(schema)) == number, "as in its frames"
    spec = replace(spec, folder=str(folder))
    topics = ensure_topics(log, spec)
    sent = _send_events(log, topics.served, topics.action, spec.partitions, items, events)
    joiner = make(spec, log, intervals=intervals_of(log, commit_interval_ms=0, poll_records=16_384))
    began = time.perf_counter()
    joiner.open()
    opened, cpu = time.perf_counter(), time.process_time()
    while sum(task.events for task in joiner.tasks.values()) < sent:
        joiner.step()
    joiner.finish()
    took, cpu = time.perf_counter() - opened, time.process_time() - cpu
    status = joiner.status
    joiner.close()
    assert status is not None
    assert status.events == sent
    return {
        "events_per_s": sent / took,
        "samples_per_s": status.samples / took,
        "cpu_us_per_event": cpu / sent * 1e6,
        "commits_per_s": status.commits / took,
        "open_s": opened - began,
    }


def _send_events(
    log: EventLog, served_topic: str, action_topic: str, partitions: int, items: int, events: int
) -> int:
    """Append requests of `items` items and the actions on them to all partitions; returns the events."""
    writer, now_ms, sent = log.writer(), 10**7, 0
    requests = round(events / (1 + items / 10))
    for first in range(0, requests, SENT_AT_ONCE):
        of_topics: dict[tuple[str, int], list[bytes]] = {}
        for r in range(first, min(first + SENT_AT_ONCE, requests)):
            of_topics.setdefault((served_topic, r % partitions), []).append(
                served(r, 1_000 + r, range(items))
            )
            deeds = [action(r, i, 3_000 + r) for i in range(items) if (r * items + i) % 10 == 0]
            if deeds:
                of_topics.setdefault((action_topic, r % partitions), []).extend(deeds)
        for (topic, partition), values in of_topics.items():
            times = np.full(len(values), now_ms)
            writer.append([Append(topic, partition, BytesColumn.of(values), times_ms=times)])
            sent += len(values)
    writer.close()
    return sent


def measure(quick: bool = False, brokers: str | None = None) -> Figures:
    """Measure appends, reads, transactions and a joiner."""
    total = (50 if quick else 200) * 1024
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        if brokers is None:
            brokers = stack.enter_context(Kafka(folder / "kafka")).bootstrap
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
        figures["read_and_decode_blocks"] = decode_speed(log, 4 * total)
        for emit, items, events in JOINED:
            alone = open_eventlog(f"kafka://{brokers}/{uuid4().hex}")
            stack.callback(alone.close)
            shape = f"joiner_{emit}_{items}_{'item' if items == 1 else 'items'}"
            figures[shape] = joiner_speed(alone, folder, emit, items, events // 4 if quick else events)
    return figures


if __name__ == "__main__":
    command(measure, __doc__)
