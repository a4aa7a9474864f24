"""Inference gets more requests than it scores: every endpoint refuses alike, and before it reads."""

from __future__ import annotations

import asyncio
import gzip
import re
import threading
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from math import nan
from pathlib import Path
from typing import Any

import grpc
import httpx
import numpy as np
import orjson
import pytest
from tritonclient.utils import np_to_triton_dtype

from freshet.inference.scoring import Batcher
from freshet.process.ports import lease_ports
from freshet.rpc.public_server import OIP, messages
from freshet.testing.conditions import wait_for
from tests.fixtures.inference import CANDIDATES, COLUMNS, CONTEXT, SPEC, Running, greedy, serving, trained
from tests.fixtures.serving import JSON

M = messages(OIP)
DEADLINE_S = 60.0
SAID = re.compile(
    r"\d+ requests wait to be scored, for which .* are expected; .*FRESHET_INFERENCE_QUEUE_WAIT"
)


@dataclass(slots=True)
class Busy:
    """A server whose scorer takes no turn while it is held; one request that waits is more than it takes."""

    server: Running
    port: int
    held: threading.Event
    waits: threading.Event  # a request waits, while it is held

    def hold(self) -> None:
        self.waits.clear()
        self.held.set()

    def rank(self, body: bytes | None = None) -> tuple[int, str, str]:
        """(status, text, when to come again)."""
        return self._posted("/v1/rank", body or orjson.dumps({"context": CONTEXT, "candidates": CANDIDATES}))

    def explain(self, body: bytes | None = None) -> tuple[int, str, str]:
        asked = {"context": CONTEXT, "candidates": CANDIDATES, "explain": True}
        return self._posted("/v1/rank", body or orjson.dumps(asked))

    def infer(self, body: bytes | None = None) -> tuple[int, str, str]:
        return self._posted("/v2/models/feed/infer", body or tensors_of(COLUMNS))

    def infer_compressed(self, body: bytes) -> tuple[int, str, str]:
        coded = {**JSON, "content-encoding": "gzip"}
        return self._posted("/v2/models/feed/infer", gzip.compress(body), coded)

    def grpc(
        self, body: bytes | None = None, cancel_after: threading.Event | None = None
    ) -> tuple[int, str, str]:
        request = M.ModelInferRequest(model_name="feed")
        tensor = request.inputs.add(name="items.id", datatype="INT64", shape=[2])
        tensor.contents.int64_contents.extend(np.arange(2).tolist())
        with grpc.insecure_channel(f"127.0.0.1:{self.port}") as channel:
            call = channel.unary_unary("/inference.GRPCInferenceService/ModelInfer")
            try:
                answer = call.future(body or request.SerializeToString(), timeout=DEADLINE_S)
                if cancel_after is not None:
                    assert cancel_after.wait(DEADLINE_S)
                    answer.cancel()
                answer.result()
            except grpc.FutureCancelledError:
                return 499, "", ""
            except grpc.RpcError as error:
                metadata = dict(error.trailing_metadata() or ())
                status = 429 if error.code() is grpc.StatusCode.RESOURCE_EXHAUSTED else 500
                return status, str(error.details()), str(metadata.get("retry-after-ms", ""))
        return 200, "", ""

    timeout_s: float = DEADLINE_S

    def _posted(self, path: str, body: bytes, headers: Mapping[str, str] = JSON) -> tuple[int, str, str]:
        answer = httpx.post(self.server.url + path, content=body, headers=headers, timeout=self.timeout_s)
        return answer.status_code, answer.text, answer.headers.get("retry-after", "")

    def figure(self, name: str, unseen: float = nan) -> float:
        lines = self.server.get("/metrics").text.splitlines()
        found = (float(line.rpartition(" ")[2]) for line in lines if line.startswith(name + " "))
        return next(found, unseen)


def tensors_of(columns: Mapping[str, Any]) -> bytes:
    inputs: list[Any] = []
    for name, values in columns.items():
        data = [v.decode() for v in values] if values.dtype == object else values.tolist()
        datatype = np_to_triton_dtype(values.dtype)
        inputs.append({"name": name, "datatype": datatype, "shape": values.shape, "data": data})
    return orjson.dumps({"inputs": inputs})


@pytest.fixture
def busy(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Busy]:
    with busy_server(tmp_path, monkeypatch, inference_queue_wait="1ms") as made:
        yield made


@contextmanager
def busy_server(folder: Path, monkeypatch: pytest.MonkeyPatch, **variables: str) -> Iterator[Busy]:
    held, waits, turn = threading.Event(), threading.Event(), Batcher._turn

    def held_turn(batcher: Batcher[Any], loop: asyncio.AbstractEventLoop) -> None:
        if held.is_set():
            batcher._watch_waiting()  # as after a turn that leaves requests
            waits.set()
            loop.call_later(0.005, held_turn, batcher, loop)
        else:
            turn(batcher, loop)

    monkeypatch.setattr(Batcher, "_turn", held_turn)
    world = trained(folder, greedy(SPEC))
    (port,) = lease_ports(1)
    with serving(world, inference_grpc_port=str(port), **variables) as server:
        wait_for(lambda: server.get("/health/ready").status_code == 200)
        yield Busy(server, port, held, waits)
        held.clear()
    world.close()


DOORS = [Busy.rank, Busy.explain, Busy.infer, Busy.grpc]
SECONDS = 'freshet_http_request_seconds_count{{route="{}"}}'
GONE_SECONDS: dict[Callable[..., Any], str] = {
    Busy.rank: SECONDS.format("/v1/rank"),
    Busy.explain: SECONDS.format("/v1/rank"),
    Busy.infer: SECONDS.format("/v2/models/*/infer"),
}


@pytest.mark.parametrize("first", DOORS)
def test_all_endpoints_refuse_alike_before_they_read(
    busy: Busy, first: Callable[[Busy], tuple[int, str, str]]
) -> None:
    for why in ('shed_total{why="wait"}', 'defaulted_rows_total{why="late"}'):
        assert busy.figure(f"freshet_inference_{why}") == 0.0, "a series from the start"
    busy.hold()
    with ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(first, busy)
        assert busy.waits.wait(DEADLINE_S)
        for door in DOORS:
            for body in (None, b"\xffno request at all"):
                status, text, again = door(busy, body)
                assert (status, SAID.search(text) is not None, bool(again)) == (429, True, True), text
        assert busy.figure('freshet_inference_shed_total{why="wait"}') == 2 * len(DOORS)
        busy.held.clear()
        assert waiting.result(DEADLINE_S)[0] == 200
    assert [door(busy)[0] for door in DOORS] == [200] * len(DOORS)


def test_expanded_bytes_of_waiting_tensors_are_bounded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    large = tensors_of({**COLUMNS, "user.country": np.array([b"x" * 70_000] * 10, object)})
    bounds = {"inference_queue_wait": "0ms", "inference_max_bodies_bytes": str(1 << 20)}
    with busy_server(tmp_path, monkeypatch, **bounds) as busy, ThreadPoolExecutor(1) as pool:
        busy.hold()
        waiting = pool.submit(busy.infer_compressed, large)
        assert busy.waits.wait(DEADLINE_S)
        status, text, again = busy.infer_compressed(large)
        assert (status, "FRESHET_INFERENCE_MAX_BODIES_BYTES" in text, again) == (429, True, "1")
        assert busy.figure('freshet_inference_shed_total{why="wait"}') == 1.0
        busy.held.clear()
        assert waiting.result(DEADLINE_S)[0] == 200
        assert busy.infer_compressed(large)[0] == 200


@pytest.mark.parametrize("first", [Busy.rank, Busy.explain, Busy.infer])
def test_a_request_whose_client_has_gone_is_not_scored(
    busy: Busy, first: Callable[[Busy], tuple[int, str, str]]
) -> None:
    busy.hold()
    busy.timeout_s = 2.0
    with pytest.raises(httpx.ReadTimeout):
        first(busy)
    assert busy.waits.wait(DEADLINE_S)
    wait_for(lambda: busy.figure("freshet_http_connections") == 1.0)  # of this question itself
    busy.held.clear()

    wait_for(lambda: busy.figure('freshet_inference_shed_total{why="gone"}') == 1.0)
    assert busy.figure("freshet_inference_candidates_total") == 0.0
    assert busy.figure("freshet_http_body_bytes") == 0.0
    assert 'status="gone"' in busy.server.get("/metrics").text
    assert busy.figure(GONE_SECONDS[first]) == 1.0, "the time until it was noticed counts"


def test_a_call_whose_client_has_gone_is_not_scored(busy: Busy) -> None:
    busy.hold()
    assert busy.grpc(cancel_after=busy.waits)[0] == 499
    given_up = 'freshet_grpc_answers_total{door="passed",method="ModelInfer",status="CANCELLED"}'
    wait_for(lambda: busy.figure(given_up, 0.0) == 1.0)
    assert busy.figure('freshet_grpc_answer_seconds_count{method="ModelInfer"}') == 1.0
    busy.held.clear()

    wait_for(lambda: busy.figure('freshet_inference_shed_total{why="gone"}') == 1.0)
    assert busy.figure("freshet_inference_candidates_total") == 0.0
