"""Traced events at the gateway, and traced batches over real links between embedders, shards and trainers."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest

from bench.workload import Workload, append, plain_spec
from freshet.apps.pipeline import Pipeline
from freshet.apps.remote_sources import FromShards
from freshet.errors import Unavailable
from freshet.features import EventExtractor
from freshet.features.blocks import read_blocks
from freshet.gateway.api import AVRO_BATCH
from freshet.log.schema_ids import frame
from freshet.observability.trace_ids import TraceIds
from freshet.observability.tracing import install
from freshet.rows.grpc.frames import lookup_frame, span_of
from freshet.rpc.frames import BadFrame, Frame, Kind, Part, decode_frame
from freshet.testing.conditions import wait_until
from freshet.types import BytesColumn, TopicPartition
from freshet.wires.codecs import RowCodec
from tests.fixtures.gateway import RANKED, SPEC, Running, action, avro, ranked, start
from tests.fixtures.spans import Recorded, recording
from tests.fixtures.trainers import rank_of
from tests.integration.embedder_run import DEADLINE_S, ROWS, scene, shards

__all__ = ["start"]  # a fixture


class Told:
    """The spans that were recorded, by service and name."""

    def __init__(self, ratio: float = 1.0) -> None:
        self.tracer, self.spans = recording("model", ratio)
        self.ids = self.tracer.ids

    def of(self, role: str, name: str) -> list[Recorded]:
        return [span for span in list(self.spans) if (span.role, span.name) == (role, name)]


@pytest.fixture
def told() -> Iterator[Told]:
    made = Told()
    install(made.tracer)
    yield made
    install(None)


def requests_in(gateway: Running, topic: str = "feed.ranked") -> dict[bytes, int]:
    """{record's key: hash of its request, as the joiner reads it}."""
    extractor = EventExtractor(SPEC.events.served, RANKED)
    found = {}
    for _, _, key, value in gateway.records(topic):
        found[key] = int(extractor.extract(BytesColumn.of([value]), framed=True).request[0])
    return found


def test_events_are_in_the_traces_that_the_joiner_derives(start: Callable[..., Running], told: Told) -> None:
    gateway = start()
    events = [ranked(request) for request in (7, 8, 9)]
    assert gateway.send("impressions", events).status_code == 202
    assert gateway.send("actions", action(8)).status_code == 202

    served, actions = told.of("gateway", "send feed.ranked"), told.of("gateway", "send app.actions")
    requests = requests_in(gateway)
    places = {key: (partition, offset) for partition, offset, key, _ in gateway.records("feed.ranked")}
    assert {s.attributes["freshet.request_id"]: s.context for s in served} == {
        key.decode(): told.ids.event(request, "served") for key, request in requests.items()
    }
    for span in served:
        where = (
            int(span.attributes["messaging.destination.partition.id"]),
            span.attributes["messaging.kafka.offset"],
        )
        assert where == places[str(span.attributes["freshet.request_id"]).encode()]
    assert [span.parent for span in actions] == [told.ids.event(requests[b"8"], "served")]
    assert actions[0].context.trace_id == told.ids.event(requests[b"8"], "served").trace_id
    assert not {span.error for span in told.spans} - {""}


def test_avro_and_single_events_are_traced_too(start: Callable[..., Running], told: Told) -> None:
    gateway = start()
    schema_id = int.from_bytes(_framed(gateway)[1:5], "big")
    records = [frame(schema_id, avro(ranked(request))) for request in (1, 2)]
    body = b"".join(len(r).to_bytes(4, "big") + r for r in records)
    assert gateway.post("impressions", body, AVRO_BATCH).status_code == 202
    mixed = gateway.send("impressions", [ranked(3), {"request_id": 4}])
    assert mixed.status_code == 422

    ids = {
        span.attributes["freshet.request_id"]: span.context for span in told.of("gateway", "send feed.ranked")
    }
    requests = requests_in(gateway)
    assert ids == {k.decode(): told.ids.event(r, "served") for k, r in requests.items()}
    assert set(ids) == {"0", "1", "2", "3"}, "what was refused is in no trace"


def _framed(gateway: Running) -> bytes:
    """A record as the gateway writes it: with the id of the schema."""
    assert gateway.send("impressions", ranked(0)).status_code == 202
    (record,) = [value for *_, value in gateway.records("feed.ranked")]
    return record


def test_a_failed_append_has_a_failed_span(start: Callable[..., Running], told: Told) -> None:
    gateway = start()
    gateway.gate.error = Unavailable("the log is away")

    assert gateway.send("impressions", ranked(5)).status_code == 503
    assert gateway.send("impressions", [ranked(6), {"request_id": 4}]).status_code == 503

    spans = told.of("gateway", "send feed.ranked")
    assert [span.attributes["freshet.request_id"] for span in spans] == ["5", "6"]
    assert all("the log is away" in span.error for span in spans)


def test_a_fault_in_tracing_costs_no_event(
    start: Callable[..., Running], told: Told, monkeypatch: pytest.MonkeyPatch
) -> None:
    gateway = start()

    def broken(*_: object) -> None:
        raise RuntimeError("a fault of ours")

    monkeypatch.setattr(told.ids, "sampled", broken)

    assert gateway.send("impressions", ranked(5)).status_code == 202
    assert gateway.send("impressions", [ranked(6), {"request_id": 4}]).status_code == 422
    assert len(gateway.records("feed.ranked")) == 2


@pytest.mark.parametrize("ratio", [1.0, 0.02])
def test_a_batch_is_one_trace_over_embedder_shard_and_trainer(tmp_path: Path, ratio: float) -> None:
    told = Told(ratio)
    install(told.tracer)
    try:
        with scene(tmp_path, plain_spec("")) as made:
            made.serving.start()
            rank = made.rank(2)
            training = threading.Thread(target=rank.run)
            training.start()
            try:
                made.trained([rank])
            finally:
                rank.stop()
                training.join()
            expected = hashes(made.pipeline, told.ids)
    finally:
        install(None)

    check_batches(told, expected)


def test_a_rank_that_asks_shards_carries_a_batch_s_span_to_them(tmp_path: Path) -> None:
    told = Told()
    install(told.tracer)
    pipeline = Pipeline(plain_spec(""), tmp_path / "run", 2)
    assert append(pipeline, Workload(rows=ROWS, cardinality=500).arrays(), 1) == ROWS
    try:
        rank = rank_of(pipeline, FromShards, lanes=2)
        training = threading.Thread(target=rank.run)
        with shards(pipeline, 2):
            training.start()
            wait_until(
                "all is trained on", lambda: rank.trainer.progress.samples == ROWS, within_s=DEADLINE_S
            )
            rank.stop()
            training.join()
        expected = hashes(pipeline, told.ids)
    finally:
        install(None)
        pipeline.close()

    check_batches(told, expected, shards=2)
    rows = told.of("paramserver", f"send {pipeline.topics.rows}")
    pushes = {span.context for span in told.of("paramserver", "Rows/Push")}
    assert {link for span in rows for link in span.links} <= pushes
    assert any(span.links for span in rows)


def hashes(pipeline: Pipeline, ids_of: TraceIds) -> set[int]:
    """The traced requests of all samples."""
    found: set[int] = set()
    for p in range(pipeline.spec.partitions):
        reader = pipeline.log.reader()
        reader.assign({TopicPartition(pipeline.topics.samples, p): 0})
        for _, records in reader.poll(100_000, 0):
            ids = read_blocks(records.values).request_ids
            found |= set(ids[ids_of.sampled(ids)].tolist())
        reader.close()
    return found


def check_batches(told: Told, expected: set[int], shards: int = 1) -> None:
    """Each batch with traced events is one trace over all processes that had it; no other batch has spans."""
    processed = {s.context: s for s in told.spans if s.role == "embedder" and s.name.startswith("process ")}
    trained = told.of("trainer", "train")
    assert processed
    assert {span.parent for span in trained} <= processed.keys()
    assert len({span.context.trace_id for span in trained}) == len(trained), "each was trained once"
    events = {told.ids.event(request, "samples") for request in expected}
    linked = {link for span in trained for link in span.links}
    assert linked <= events
    if len(expected) < 100:  # else spans link to some
        assert linked == events
    for kind, parent in (
        ("Lookup", {p.trace_id: p for p in processed}),
        ("Push", {t.context.trace_id: t.context for t in trained}),
    ):
        asked = {s.context: s for s in told.of("embedder", f"Rows/{kind}")}
        answered = [s for s in told.of("paramserver", f"Rows/{kind}") if s.parent in asked]
        assert {s.context.trace_id for s in asked.values()} == parent.keys()
        assert all(s.parent == parent[s.context.trace_id] for s in asked.values())
        assert len(answered) >= shards * len(asked)
        assert len({s.parent for s in answered}) == len(asked)
    learned = {span.parent for span in told.of("trainer", "learn")}
    assert learned == linked


KEYS = (0, np.array([5], np.uint64), np.zeros(1, np.uint8))


def test_a_frame_s_span_comes_back_and_a_bad_one_is_refused() -> None:
    context = Told().ids.event(3, "served")
    data = lookup_frame(1, [KEYS], RowCodec.FP32, create=True, span=context)

    assert span_of(decode_frame(data, max_bytes=1 << 20)) == context
    plain = lookup_frame(1, [KEYS], RowCodec.FP32, create=True)
    assert span_of(decode_frame(plain, max_bytes=1 << 20)) is None
    with pytest.raises(BadFrame):
        span_of(Frame(Kind.LOOKUP, sections={(Part.SPAN, 0): np.zeros(2, np.uint64)}))
    assert span_of(Frame(Kind.LOOKUP, sections={(Part.SPAN, 0): np.zeros(3, np.uint64)})) is None
