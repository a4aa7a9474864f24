"""A closed loop of real parts: what serving logs, a trainer learns from, and the server follows.

A log, stores and a trainer in one folder; a server on a socket; requests as clients send them.
"""

from __future__ import annotations

import random
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import orjson

from freshet.config.avro.schema import parse_schema, sample_schema, to_json
from freshet.config.spec.model import Explore, Spec
from freshet.config.spec.parse import parse_spec
from freshet.config.spec.topics import topics_of
from freshet.features import EventColumns, EventExtractor, SampleColumns
from freshet.inference.service import Parts, run
from freshet.log.schema_ids import SchemaRegistry, framed_id
from freshet.log.sqlite.event_log import open_url as open_log
from freshet.log.topics import ModelContext
from freshet.rows.sqlite.row_store import open_url as open_store
from freshet.testing.conditions import wait_for
from freshet.types import Append, BytesColumn, TopicPartition
from freshet.versions.folder import open_url as open_versions
from tests.fixtures.blocks import encode_block
from tests.fixtures.serving import FEED, JSON, running, schema, settings
from tests.fixtures.trainers import own_trainer

CANDIDATES = 20
BLOCK = 256
HASH = "spec-hash"
NAMED = 'experts = ["wide", "cross", "fm", "deep"]'
NOW = 1_700_000_000_000
SCORE = "items.freshet_served.score"


def _spec() -> Spec:
    """The feed with the default experts: three labels, lists, crosses, a position, running statistics,
    admission by count, and weights that depend on how often a row was learned."""
    text = (FEED / "freshet.toml").read_text()
    spec = parse_spec(text.replace(NAMED, ""), folder=str(FEED))
    assert "counts" in spec.model.experts
    explore = Explore(policy="epsilon", share=0.1)
    return replace(
        spec,
        buckets=64,
        serve=replace(spec.serve, explore=explore),
        train=replace(spec.train, precision="fp32"),
    )


SPEC = _spec()
DEFAULTS: dict[str, Any] = {
    "user": {"id": 7, "country": "AT", "last_items": [3, 1]},
    "country": "DE",
    "last_items": [1, 2],
    "age_s": 60.5,
    "ctr_1h": 0.25,
}
"""Field -> its default here; the feed's own are null or empty."""


def _with_defaults(tree: Any) -> Any:
    """Add DEFAULTS to a schema's JSON, so that a request without these fields is served with values."""
    if isinstance(tree, list):
        return [_with_defaults(part) for part in tree]
    if not isinstance(tree, dict):
        return tree
    made = {key: _with_defaults(part) for key, part in tree.items()}
    if made.get("name") in DEFAULTS:
        made["default"] = DEFAULTS[made["name"]]
        if isinstance(made["type"], list):
            made["type"].reverse()  # the first branch is that of the default
    return made


RANKED = parse_schema(_with_defaults(to_json(schema("ranked"))), "ranked")
TOPICS = topics_of(SPEC)


# --- requests


def requests(seed: int, impressions: int) -> Iterator[dict[str, Any]]:
    """Rank requests as clients send them: users and items known and new, fields missing, null or odd."""
    rng = random.Random(seed)
    for number in range(-(-impressions // CANDIDATES)):
        context: dict[str, Any] = {
            "request_id": seed * 1_000_000 + number,
            "user": {"id": rng.choice((rng.randrange(200), -rng.randrange(1 << 60)))},
            "device": rng.choice(("phone", "tablet", "tv")),
        }
        if rng.random() < 0.8:
            context["ts"] = NOW + rng.randrange(7 * 86_400_000)
        if rng.random() < 0.8:
            context["user"]["country"] = rng.choice(("DE", "US", "", "Ω\u0000é", None))
        if rng.random() < 0.8:  # more than the feature's `max`, too
            items = [int(rng.paretovariate(0.6)) % 2_000 for _ in range(rng.randrange(70))]
            context["user"]["last_items"] = items
        if rng.random() < 0.2:
            context["experiment"] = {"arm": rng.choice("ab")}
        if number % 10 == 9:
            del context["user"]
        yield {"context": context, "candidates": [_candidate(rng) for _ in range(CANDIDATES)]}


def _candidate(rng: random.Random) -> dict[str, Any]:
    candidate: dict[str, Any] = {
        "id": int(rng.paretovariate(0.6)) % 2_000,
        "age_s": rng.choice((0, 0.1, 1e-30, 3.0e9, rng.expovariate(1e-4))),
    }
    if candidate["age_s"] == 0.1:
        del candidate["age_s"]
    if rng.random() < 0.7:
        candidate["ctr_1h"] = rng.choice((None, rng.random(), 1))
    if rng.random() < 0.1:
        candidate["pos"] = rng.randrange(CANDIDATES)  # trained on; a constant when serving
    return candidate


# --- the loop


class Loop:
    """Log, stores and a trainer in one folder; `ask` closes the loop through a server."""

    def __init__(self, folder: Path) -> None:
        self.log = open_log(f"sqlite:{folder}/log")
        self.rows, self.versions = (
            open_store(f"sqlite:{folder}/rows"),
            open_versions(f"file:{folder}/versions"),
        )
        self.context = ModelContext.open(SPEC, HASH, self.log)
        self.training = own_trainer(self.context, self.rows, self.versions, lanes=1)
        self.registry = SchemaRegistry(self.log)
        self.read: dict[int, int] = dict.fromkeys(range(SPEC.partitions), 0)  # of the served topic

    def close(self) -> None:
        self.versions.close()
        self.rows.close()
        self.log.close()

    @contextmanager
    def serving(self) -> Iterator[str]:
        """A server on a socket; yields its address once it serves."""
        made = settings(inference_version_poll="10ms", inference_follow_wait="5ms")
        parts = Parts(SPEC, HASH, RANKED, self.log, self.rows, self.versions, rng=random.Random(3))

        def target(stop: threading.Event, ready: Callable[[str], None]) -> None:
            run(parts, made.inference, made.common, stop=stop, ready=ready)

        with running(target) as (url, _):
            wait_for(lambda: httpx.get(f"{url}/health/ready").status_code == 200)
            yield url

    def train(self, served: Logged) -> None:
        """Train on what was served, labels drawn at random, until the log's end; then nothing publishes."""
        rng = np.random.default_rng(1)
        columns, payloads = served.columns, served.samples
        writer = self.log.writer()
        for block in range(0, len(columns), BLOCK):
            part = slice(block, min(block + BLOCK, len(columns)))
            count = part.stop - part.start
            value = encode_block(
                served.sample_schema_id,
                SampleColumns(
                    sample_ids=np.arange(part.start, part.stop),
                    event_times_ms=columns.times_ms[part],
                    request_ids=columns.request[part],
                    values=(rng.random(count) < 0.3).astype(np.float32),
                    weights=np.ones(count, np.float32),
                    labels=rng.integers(0, len(SPEC.labels), count).astype(np.uint8),
                ),
                payloads=payloads.slice(part.start, part.stop),
            )
            writer.append([Append(TOPICS.samples, block // BLOCK % SPEC.partitions, BytesColumn.of([value]))])
        writer.close()
        self.training.run_to_the_end()
        newest = max(self.versions.numbers())
        assert newest > 0
        self.versions.point("stable", newest)  # whatever the gate says of labels drawn at random

    def caught_up(self, url: str) -> bool:
        """Whether the server has followed all rows, and serves the stable version."""
        told = httpx.get(f"{url}/v1/progress").json()
        ends = {
            str(p): self.log.bounds(TopicPartition(TOPICS.rows, p)).end
            for p in range(self.log.topics()[TOPICS.rows].partitions)
        }
        stable = self.versions.aliases()["stable"]
        followed = all(told["rows_next"].get(p, 0) >= end for p, end in ends.items())
        return followed and bool(told["version"] == stable)

    def ask(self, url: str, seed: int, impressions: int) -> list[Answer]:
        """Have impressions ranked, one request after the other."""
        answers = []
        with httpx.Client(timeout=15) as client:
            for request in requests(seed, impressions):
                response = client.post(f"{url}/v1/rank", content=orjson.dumps(request), headers=JSON)
                assert response.status_code == 200, response.text
                answers.append(Answer(request["context"]["request_id"], response.json()))
        return answers

    def logged(self, impressions: int) -> Logged:
        """The next so many impressions of the served topic, as the joiner reads them."""
        values: list[bytes] = []

        def whole() -> bool:
            reader = self.log.reader()
            reader.assign({TopicPartition(TOPICS.served, p): n for p, n in self.read.items()})
            for where, records in reader.poll(1_000_000, 0):
                values.extend(records.values)
                self.read[where.partition] = records.next_offset
            reader.close()
            return len(values) >= -(-impressions // CANDIDATES)

        wait_for(whole)
        return Logged.of(values, self.registry)


@dataclass(frozen=True)
class Answer:
    request_id: int
    body: dict[str, Any]


@dataclass(frozen=True, eq=False)
class Logged:
    """Served events read back: identities, and the samples spliced from their bytes."""

    columns: EventColumns
    samples: BytesColumn
    sample_schema_id: int

    @classmethod
    def of(cls, values: Sequence[bytes], registry: SchemaRegistry) -> Logged:
        (schema_id,) = {framed_id(value) for value in values}
        written_by = registry.get(schema_id)
        column = BytesColumn.of(values)
        columns = EventExtractor(SPEC.events.served, written_by, [SCORE]).extract(column, framed=True)
        assert not len(columns.bad), columns.why
        sample = registry.register(sample_schema(written_by, SPEC.events.served.explode))
        return cls(columns, columns.samples(column), sample)

    def requests(self) -> list[int]:
        """(M,) the request id of each impression."""
        ids = {
            int(e): int(key) for e, key in zip(self.columns.events, self.columns.request_keys, strict=True)
        }
        return [ids[e] for e in self.columns.event_index.tolist()]
