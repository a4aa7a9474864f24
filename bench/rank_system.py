"""Inference and trainer of the feed example as processes, and samples that keep the trainer busy."""

from __future__ import annotations

import os
import shutil
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import orjson

from bench.machine import cpu_s
from bench.services import ready_service
from freshet.adapters import open_eventlog
from freshet.apps.ports import PORT_SETTINGS
from freshet.config.avro.schema import parse_schema, sample_schema
from freshet.config.settings import load_settings
from freshet.config.spec.parse import load_spec
from freshet.features import JsonTranscoder, SampleColumns, encode_blocks
from freshet.log.schema_ids import SchemaRegistry
from freshet.log.topics import ensure_topics
from freshet.process.ports import lease_ports
from freshet.testing.conditions import wait_until
from freshet.types import Append, BytesColumn
from tests.fixtures.serving import FEED

USERS, ITEMS = 50_000, 5_000
SAMPLES = 20_000  # that differ; they come again under new ids
BLOCK = 100
HISTORY = 20  # items a user has seen
WAIT_S = 60.0  # until the trainer has trained on the samples
NICE = 10
"""The priority of the trainer, as an operator would set it on a machine that serves, too."""


def context(rng: np.random.Generator, now_ms: int) -> dict[str, Any]:
    """Draw the context of a request."""
    user = int(rng.zipf(1.2)) % USERS
    seen = (rng.zipf(1.2, HISTORY) % ITEMS).tolist()
    country = ["DE", "FR", "US", None][user % 4]
    return {
        "ts": now_ms,
        "user": {"id": user, "country": country, "last_items": seen},
        "device": "phone",
        "experiment": {},
    }


def candidate(rng: np.random.Generator) -> dict[str, Any]:
    """Draw a candidate."""
    return {
        "id": int(rng.zipf(1.2)) % ITEMS,
        "age_s": float(rng.integers(1, 10**6)),
        "ctr_1h": float(rng.random()),
    }


def bodies(count: int, candidates: int) -> list[bytes]:
    """Draw rank requests for the best ten candidates."""
    rng, now_ms = np.random.default_rng(3), int(time.time() * 1e3)
    return [
        orjson.dumps(
            {
                "context": context(rng, now_ms),
                "candidates": [candidate(rng) for _ in range(candidates)],
                "k": 10,
            }
        )
        for _ in range(count)
    ]


@dataclass(frozen=True, slots=True)
class System:
    """Two services of a run folder."""

    folder: Path
    ports: dict[str, int]
    pids: dict[str, int]

    def status(self, role: str) -> dict[str, Any]:
        """Return the `/status` of a service."""
        found: dict[str, Any] = httpx.get(f"http://127.0.0.1:{self.ports[role]}/status", timeout=30).json()
        return found

    def cpu_s(self, role: str) -> float:
        """Return the CPU seconds that a service has used, all threads."""
        return cpu_s(self.pids[role])

    def feed(self, samples: int) -> None:
        """Append samples for the trainer."""
        append_samples(self.folder, samples)


def background() -> list[str]:
    """Return the words before a command that pin it to the last CPU at low priority."""
    pinned = ["taskset", "-c", str((os.cpu_count() or 1) - 1)]
    return [*pinned, "nice", "-n", str(NICE)]


@contextmanager
def system(folder: Path, settings: dict[str, str] | None = None) -> Iterator[System]:
    """Run a trainer, pinned to the last CPU at low priority, and inference, until it has rows to look up."""
    for file in FEED.glob("*.*sc"):
        shutil.copy(file, folder)
    spec = folder / "freshet.toml"
    shutil.copy(FEED / "freshet.toml", spec)
    roles = ("trainer", "inference")
    ports = dict(zip(roles, lease_ports(len(roles)), strict=True))
    environment = {
        **os.environ,
        **{PORT_SETTINGS[role]: str(port) for role, port in ports.items()},
        "FRESHET_COMMON_RUN_FOLDER": str(folder / "run"),
        "FRESHET_COMMON_LOG_LEVEL": "warning",
        **(settings or {}),
    }
    append_samples(folder / "run", SAMPLES)
    with ExitStack() as stack:
        pids = {}
        for role, before in (("trainer", background()), ("inference", [])):
            words = [*before, sys.executable, "-m", "freshet.cli", "run", role, str(spec)]
            pids[role] = stack.enter_context(ready_service(words, environment, ports[role])).pid
        started = System(folder / "run", ports, pids)
        wait_until(
            f"{SAMPLES} samples trained on",
            lambda: started.status("trainer")["samples"] >= SAMPLES,
            within_s=WAIT_S,
        )
        yield started


def append_samples(run: Path, count: int) -> None:
    """Append blocks of samples to the model's log, as the joiner writes them."""
    common = load_settings({}, run_folder=run).common
    common.run.create()
    spec = load_spec(FEED / "freshet.toml")
    log = open_eventlog(common.log_url)
    try:
        topics = ensure_topics(log, spec)
        schema = sample_schema(parse_schema((FEED / "ranked.avsc").read_text(), "ranked"), "items")
        schema_id, writer = SchemaRegistry(log).register(schema), log.writer()
        payloads = JsonTranscoder(schema).column(_samples()).records
        for turn in range(-(-count // SAMPLES)):
            blocks = _blocks(schema_id, payloads, turn)
            for p in range(spec.partitions):
                mine = blocks[p :: spec.partitions]
                writer.append([Append(topics.samples, p, BytesColumn.of(mine))])
        writer.close()
    finally:
        log.close()


def _samples() -> BytesColumn:
    rng, now_ms = np.random.default_rng(1), int(time.time() * 1e3)
    return BytesColumn.of(
        orjson.dumps(
            {
                "request_id": i,
                **context(rng, now_ms),
                "items": {**candidate(rng), "pos": int(rng.integers(10))},
            }
        )
        for i in range(SAMPLES)
    )


def _blocks(schema_id: int, payloads: BytesColumn, turn: int) -> Sequence[bytes]:
    rng = np.random.default_rng(turn)
    at = time.time_ns() // 1000 + np.arange(SAMPLES, dtype=np.int64)
    return list(
        encode_blocks(
            schema_id,
            SampleColumns(
                sample_ids=at,
                event_times_ms=np.full(SAMPLES, time.time() * 1e3).astype(np.int64),
                request_ids=at.astype(np.uint64),
                values=(rng.random(SAMPLES) < 0.1).astype(np.float32),
                weights=np.ones(SAMPLES, np.float32),
                labels=np.zeros(SAMPLES, np.uint8),
            ),
            payloads=payloads,
            block_ends=np.arange(BLOCK, SAMPLES + 1, BLOCK, dtype=np.int64),
        )
    )
