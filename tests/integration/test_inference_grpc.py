"""The Open Inference Protocol over gRPC: clients of others get what they get over HTTP, errors say why."""

from __future__ import annotations

import json
import os
import subprocess
from collections import Counter, deque
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import grpc
import numpy as np
import pytest
import tritonclient.grpc as triton
import tritonclient.http as triton_http
from tritonclient.utils import InferenceServerException, np_to_triton_dtype

from freshet.process.ports import lease_ports
from freshet.rpc.public_server import OIP, messages
from freshet.testing.conditions import wait_for
from tests.fixtures.inference import COLUMNS, SPEC, Running, greedy, serving, trained
from tests.integration.hostile import MESSAGES, hostile
from tests.integration.oip_clients import KSERVE

M = messages(OIP)
DEADLINE_S = 60.0


@pytest.fixture(scope="module")
def port() -> int:
    return lease_ports(1)[0]


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory, port: int) -> Iterator[Running]:
    world = trained(tmp_path_factory.mktemp("serving"), greedy(SPEC))
    with serving(world, inference_grpc_port=str(port)) as running:
        wait_for(lambda: running.get("/health/ready").status_code == 200)
        yield running
    world.close()


@pytest.fixture
def client(server: Running, port: int) -> Iterator[triton.InferenceServerClient]:
    client = triton.InferenceServerClient(f"127.0.0.1:{port}")
    yield client
    client.close()


@pytest.fixture
def channel(server: Running, port: int) -> Iterator[grpc.Channel]:
    with grpc.insecure_channel(f"127.0.0.1:{port}") as channel:
        yield channel


def called(channel: grpc.Channel, method: str, request: Any, **call: Any) -> Any:
    """The answer to a message, by a client that has only the .proto file."""
    data = channel.unary_unary(f"/inference.GRPCInferenceService/{method}")(
        request if isinstance(request, bytes) else request.SerializeToString(), timeout=DEADLINE_S, **call
    )
    return getattr(M, f"{method}Response").FromString(data)


def raw_inputs(columns: dict[str, Any] = COLUMNS) -> list[triton.InferInput]:
    made = []
    for name, values in columns.items():
        tensor = triton.InferInput(name, values.shape, np_to_triton_dtype(values.dtype))
        tensor.set_data_from_numpy(values)
        made.append(tensor)
    return made


CONTENTS = {
    "INT64": "int64_contents",
    "INT32": "int_contents",
    "FP32": "fp32_contents",
    "BYTES": "bytes_contents",
}


def typed_request(**more: Any) -> Any:
    """An infer request with typed contents."""
    request = M.ModelInferRequest(model_name="feed", **more)
    for name, values in COLUMNS.items():
        datatype = np_to_triton_dtype(values.dtype)
        tensor = request.inputs.add(name=name, datatype=datatype, shape=values.shape)
        getattr(tensor.contents, CONTENTS[datatype]).extend(values.ravel().tolist())
    return request


def over_http(server: Running, *outputs: str) -> list[Any]:
    """The same request over HTTP."""
    inputs = []
    for name, values in COLUMNS.items():
        tensor = triton_http.InferInput(name, values.shape, np_to_triton_dtype(values.dtype))
        tensor.set_data_from_numpy(values)
        inputs.append(tensor)
    with triton_http.InferenceServerClient(server.url.removeprefix("http://")) as client:
        result = client.infer("feed", inputs)
        return [result.as_numpy(name) for name in outputs]


def test_tritonclient_finds_server_and_model(client: triton.InferenceServerClient) -> None:
    assert client.is_server_live()
    assert client.is_server_ready()
    assert client.is_model_ready("feed")
    assert client.is_model_ready("feed", "0")
    assert client.get_server_metadata().name == "freshet"
    described = client.get_model_metadata("feed", as_json=True)
    assert (described["name"], described["versions"]) == ("feed", ["0"])
    assert {"name": "items.id", "datatype": "INT64", "shape": ["-1"]} in described["inputs"]
    assert [o["name"] for o in described["outputs"]] == ["score", "click", "watch", "buy"]


@pytest.mark.parametrize("asked", [None, ["click", "score"]])
def test_tritonclient_infers_what_it_infers_over_http(
    client: triton.InferenceServerClient, server: Running, asked: list[str] | None
) -> None:
    outputs = [triton.InferRequestedOutput(name) for name in asked] if asked else None

    result = client.infer("feed", raw_inputs(), outputs=outputs, request_id="a")

    expected = over_http(server, "score", "click")
    np.testing.assert_array_equal(result.as_numpy("score"), expected[0])
    np.testing.assert_array_equal(result.as_numpy("click"), expected[1])
    assert (result.as_numpy("buy") is None) == bool(asked)
    assert (result.get_response().id, result.get_response().model_version) == ("a", "0")


def test_typed_contents_give_the_same_and_are_answered_typed(channel: grpc.Channel, server: Running) -> None:
    answer = called(channel, "ModelInfer", typed_request(id="b"))

    outputs = {o.name: np.array(o.contents.fp32_contents, np.float32) for o in answer.outputs}
    score, buy = over_http(server, "score", "buy")
    np.testing.assert_array_equal(outputs["score"], score)
    np.testing.assert_array_equal(outputs["buy"], buy)
    assert (answer.id, list(answer.raw_output_contents)) == ("b", [])


def test_tritonclient_gets_errors(client: triton.InferenceServerClient) -> None:
    with pytest.raises(InferenceServerException, match="no such model; expected feed; found other"):
        client.infer("other", raw_inputs())
    with pytest.raises(InferenceServerException, match="no such model"):
        client.is_model_ready("other")
    with pytest.raises(InferenceServerException, match="only the version that `stable` names"):
        client.infer("feed", raw_inputs(), model_version="9")
    with pytest.raises(InferenceServerException, match="expected one of score"):
        client.infer("feed", raw_inputs(), outputs=[triton.InferRequestedOutput("x")])


def changed(**how: Any) -> Any:
    """A typed request whose first input (`user.id`) is changed."""
    request = typed_request()
    for name, value in how.items():
        if name == "shape":
            del request.inputs[0].shape[:]
            request.inputs[0].shape.extend(value)
        elif name == "raw":
            request.raw_input_contents.extend(value)
        elif name in CONTENTS.values():
            getattr(request.inputs[0].contents, name).extend(value)
        else:
            setattr(request.inputs[0], name, value)
    return request


@pytest.mark.parametrize(
    ("request_", "told"),
    [
        (changed(datatype="INT128"), "expected a datatype of BOOL"),
        (changed(datatype="FP32"), "expected FP32 in fp32_contents, found int64_contents"),
        (changed(datatype="FP16"), "FP16 has no typed contents, send it raw"),
        (changed(shape=[9]), "its shape holds 9 elements, its int64_contents 10"),
        (changed(shape=[2**40]), "at most 16777216 elements"),
        (changed(name="nobody"), "expected one of user.id"),
        (changed(fp32_contents=[1.0]), "expected INT64 in int64_contents, found fp32_contents"),
        (changed(raw=[b""]), "expected one for each of 8 inputs, found 1"),
        (changed(raw=[b""] * 8), "found both"),
        (M.ModelInferRequest(model_name="feed"), "no inputs"),
        (b"\xff\xff\xff", "expected a protobuf message inference.ModelInferRequest"),
    ],
)
def test_an_invalid_request_gets_the_reason(channel: grpc.Channel, request_: Any, told: str) -> None:
    with pytest.raises(grpc.RpcError, match=told) as refused:
        called(channel, "ModelInfer", request_)
    assert refused.value.code() is grpc.StatusCode.INVALID_ARGUMENT


def test_an_integer_that_does_not_fit_is_an_error(channel: grpc.Channel) -> None:
    request = typed_request()
    length = next(i for i in request.inputs if i.name == "user.last_items.length")
    length.datatype = "INT8"
    length.contents.int_contents[0] = 300
    with pytest.raises(grpc.RpcError, match="a value does not fit INT8"):
        called(channel, "ModelInfer", request)


def test_our_messages_have_the_fields_of_the_protocol() -> None:
    """Names, numbers and types are those that tritonclient was generated from."""
    theirs = triton.service_pb2.DESCRIPTOR.message_types_by_name
    for name in (f"{m}{half}" for m in METHODS for half in ("Request", "Response")):
        assert_within(getattr(M, name).DESCRIPTOR, theirs[name])


METHODS = ("ServerLive", "ServerReady", "ModelReady", "ServerMetadata", "ModelMetadata", "ModelInfer")


def assert_within(ours: Any, theirs: Any) -> None:
    known = {f.name: f for f in theirs.fields}
    for field in ours.fields:
        same = known[field.name]
        assert (field.number, field.type) == (same.number, same.type), field.full_name
        if field.message_type is not None:
            assert_within(field.message_type, same.message_type)


def live(channel: grpc.Channel, **call: Any) -> bool:
    return bool(called(channel, "ServerLive", M.ServerLiveRequest(), **call).live)


def refused(server: Running, reason: str) -> float:
    """How many this server says that it has refused for it."""
    lines = server.get("/metrics").text.splitlines()
    return sum(
        float(x.split()[-1])
        for x in lines
        if x.startswith(f'freshet_grpc_refused_total{{reason="{reason}"}}')
    )


# --- kserve, in an environment of its own


@pytest.mark.kserve
@pytest.mark.parametrize("raw", [True, False])
def test_kserves_client_infers_what_is_inferred_over_http(server: Running, port: int, raw: bool) -> None:
    assert KSERVE.exists(), f"{KSERVE}: not there; run ops/install-kserve, or leave this out: SKIP=kserve"
    columns = {
        name: {
            "datatype": np_to_triton_dtype(values.dtype),
            "shape": list(values.shape),
            "data": [v.decode() if isinstance(v, bytes) else v for v in values.ravel().tolist()],
        }
        for name, values in COLUMNS.items()
    }
    run = subprocess.run(
        [KSERVE, Path(__file__).with_name("kserve_client.py"), f"127.0.0.1:{port}"],
        input=json.dumps({"columns": columns, "raw": raw}), capture_output=True, text=True, timeout=120,
        env={k: v for k, v in os.environ.items() if k != "PYTHONPATH"}, check=False,
    )  # fmt: skip
    assert run.returncode == 0, run.stderr

    said = json.loads(run.stdout)
    (score,) = over_http(server, "score")
    np.testing.assert_array_equal(np.array(said["score"], np.float32), score)
    assert (said["live"], said["ready"], said["id"], said["model"]) == (True, True, "k", "feed")


@pytest.mark.long
def test_hostile_messages_are_refused_and_counted_and_it_lives(
    channel: grpc.Channel, server: Running
) -> None:
    good = [typed_request(id="x").SerializeToString()]
    infer = channel.unary_unary("/inference.GRPCInferenceService/ModelInfer")
    codes: Counter[Any] = Counter()
    reasons = ("bad_input", "no_model", "no_version")
    before = sum(refused(server, reason) for reason in reasons)
    waiting: deque[Any] = deque()

    def finish() -> None:
        error = waiting.popleft().exception()
        codes[error.code() if error is not None else grpc.StatusCode.OK] += 1

    for message in hostile(good, MESSAGES, seed=2):
        waiting.append(infer.future(message, timeout=DEADLINE_S))
        if len(waiting) == 64:
            finish()
    while waiting:
        finish()

    assert set(codes) <= {*REFUSED, grpc.StatusCode.OK}
    assert sum(codes[code] for code in REFUSED) > MESSAGES / 2
    after = sum(refused(server, reason) for reason in reasons)
    assert after - before == sum(codes[code] for code in REFUSED)
    assert live(channel)


REFUSED = (grpc.StatusCode.INVALID_ARGUMENT, grpc.StatusCode.NOT_FOUND)
