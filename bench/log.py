"""Speed of the SQLite log: appends of 300-byte records, reads of blocks and of events.

    python -m bench.log [--folder FOLDER] [--quick] [--json]

An append of many records is bound by copying and SQLite's pages, one of few by the fsync of the disk under
FOLDER (default: that of temporary files); reads come from the page cache and are bound by copying and the
CRC. Budgets (2 cores): append >= 250,000 records/s, each append durable; read >= 10 M samples/s.
"""

from __future__ import annotations

import statistics
import tempfile
import threading
import time
from pathlib import Path

import numpy as np

from bench.report import Figures, command
from freshet.log.sqlite.event_log import SqliteEventLog
from freshet.types import Append, BytesColumn, TopicPartition

RECORD_BYTES, BLOCK = 300, 256


def column(count: int, width: int) -> BytesColumn:
    """Return `count` random values of `width` bytes."""
    data = np.frombuffer(np.random.default_rng(0).bytes(count * width), np.uint8)
    return BytesColumn(data, np.arange(1, count + 1, dtype=np.int64) * width)


def append_speed(log: SqliteEventLog, batch: int, total: int) -> Figures:
    """Measure appends of `batch` records by one thread.

    Returns records a second of all appends, and times of the median one and of the slowest, which wait for
    a checkpoint or a busy disk.
    """
    topic = f"append.{batch}"
    log.create_topic(topic, partitions=1)
    writer, values, times = log.writer(), column(batch, RECORD_BYTES), []
    for _ in range(total // batch):
        began = time.perf_counter()
        writer.append([Append(topic, 0, values)])
        times.append(time.perf_counter() - began)
    p50, p99 = np.percentile(times, [50, 99])
    rate = batch * len(times) / sum(times)
    return {"records_per_s": rate, "p50_ms": float(p50) * 1e3, "p99_ms": float(p99) * 1e3}


def small_append_speed(log: SqliteEventLog, threads: int, each: int) -> float:
    """Return the appends a second of single records from several threads, each acknowledged on its own."""
    topic = f"small.{threads}"
    log.create_topic(topic, partitions=1)
    writer, values = log.writer(), column(1, RECORD_BYTES)

    def work() -> None:
        for _ in range(each):
            writer.append([Append(topic, 0, values)])

    workers = [threading.Thread(target=work) for _ in range(threads)]
    begin = time.perf_counter()
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()
    return threads * each / (time.perf_counter() - begin)


def block_read_speed(log: SqliteEventLog, blocks: int, partitions: int) -> float:
    """Return the samples a second, read as blocks from the page cache; the median of 5 reads."""
    topic = f"blocks.{partitions}"
    log.create_topic(topic, partitions=partitions)
    writer, values = log.writer(), column(16, BLOCK * RECORD_BYTES)
    for i in range(blocks // 16):
        writer.append([Append(topic, i % partitions, values)])
    speeds = []
    for _ in range(5):
        reader, seen = log.reader(), 0
        reader.assign({TopicPartition(topic, p): 0 for p in range(partitions)})
        begin = time.perf_counter()
        while seen < blocks // 16 * 16:
            seen += sum(len(records) for _, records in reader.poll(64, 1.0))
        speeds.append(seen * BLOCK / (time.perf_counter() - begin))
        reader.close()
    return statistics.median(speeds)


def event_read_speed(log: SqliteEventLog, topic: str, total: int) -> float:
    """Return the records a second of a topic of event records (CRC checked)."""
    reader, seen = log.reader(), 0
    reader.assign({TopicPartition(topic, 0): 0})
    begin = time.perf_counter()
    while seen < total:
        seen += sum(len(records) for _, records in reader.poll(100_000, 1.0))
    return seen / (time.perf_counter() - begin)


def measure(quick: bool = False, folder: Path | None = None) -> Figures:
    """Measure appends and reads."""
    total = (100 if quick else 400) * 1024
    with tempfile.TemporaryDirectory(dir=folder) as temporary:
        log = SqliteEventLog(Path(temporary) / "log")
        figures = {
            "append_of_4096": append_speed(log, 4096, total),
            "append_of_256": append_speed(log, 256, total // 4),
            "append_of_1": {
                "records_per_s_1_thread": small_append_speed(log, 1, 100 if quick else 500),
                "records_per_s_16_threads": small_append_speed(log, 16, 25 if quick else 100),
            },
            "read_blocks": {
                "samples_per_s_1_partition": block_read_speed(log, 1024 if quick else 4096, 1),
                "samples_per_s_8_partitions": block_read_speed(log, 1024 if quick else 4096, 8),
            },
            "read_events": {"records_per_s": event_read_speed(log, "append.4096", total)},
        }
        log.close()
    return figures


if __name__ == "__main__":
    command(measure, __doc__)
