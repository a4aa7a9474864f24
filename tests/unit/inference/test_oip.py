"""Open Inference Protocol bodies: what tritonclient writes is read, anything else is refused in words."""

from __future__ import annotations

import struct
from typing import Any

import numpy as np
import orjson
import pytest
import tritonclient.http as triton
from hypothesis import given, settings
from hypothesis import strategies as st

from freshet.errors import BadInput
from freshet.inference.oip import InputLimits, RequestedOutput, parse_infer, write_infer
from freshet.inference.oip_grpc import read_infer
from freshet.rpc.public_server import OIP, messages
from tests.fixtures.effort import examples

M = messages(OIP)
LIMITS = InputLimits({"x": 10, "y": None, "z": None}, 10)


def body(*inputs: Any, **more: Any) -> bytes:
    return orjson.dumps({"inputs": list(inputs), **more})


def ints(**changes: Any) -> dict[str, Any]:
    return {"name": "x", "datatype": "INT64", "shape": [2], "data": [1, 2], **changes}


def test_json_data_becomes_an_array_of_the_datatype() -> None:
    request = parse_infer(body(ints(), id="a"), None, LIMITS)

    assert request.tensors["x"].values.dtype == np.int64
    assert request.tensors["x"].values.tolist() == [1, 2]
    assert request.id == "a"
    assert request.outputs is None


def test_nested_json_rows_are_taken_too() -> None:
    request = parse_infer(body(ints(shape=[2, 2], data=[[1, 2], [3, 4]])), None, LIMITS)

    assert request.tensors["x"].values.tolist() == [[1, 2], [3, 4]]


def test_strings_become_bytes() -> None:
    request = parse_infer(body(ints(datatype="BYTES", data=["a", "é"])), None, LIMITS)

    assert request.tensors["x"].values.tolist() == [b"a", "é".encode()]


def test_size_of_a_request_counts_numbers_and_strings() -> None:
    numbers_ = parse_infer(body(ints(shape=[8], data=[1] * 8)), None, LIMITS)
    texts = parse_infer(body(ints(datatype="BYTES", shape=[8], data=["x" * 1_000] * 8)), None, LIMITS)

    assert numbers_.size == 64
    assert 8_000 < texts.size < 9_000


WHOLE = [f"{sign}INT{bits}" for sign in ("", "U") for bits in (8, 16, 32, 64)]
numbers = st.sampled_from([*WHOLE, "FP16", "BF16", "FP32", "FP64", "BOOL"])


@given(numbers, st.integers(1, 4), st.integers(1, 4), st.booleans())
def test_what_tritonclient_writes_is_read_back(datatype: str, rows: int, width: int, binary: bool) -> None:
    values = (np.arange(rows * width).reshape(rows, width) % 2).astype(triton.triton_to_np_dtype(datatype))
    if datatype in ("FP16", "BF16"):
        binary = True  # tritonclient has no JSON for them
    tensor = triton.InferInput("x", values.shape, datatype)
    tensor.set_data_from_numpy(values, binary_data=binary)

    raw, header = triton.InferenceServerClient.generate_request_body([tensor])
    found = parse_infer(raw, header, LIMITS).tensors["x"].values

    assert found.dtype == (np.float32 if datatype == "BF16" else values.dtype)  # numpy has no BF16
    np.testing.assert_array_equal(found, values.astype(found.dtype))


@given(st.text() | st.integers(-(2**63), 2**64 - 1))
def test_an_id_is_returned_as_it_was_sent(id_: str | int) -> None:
    try:
        request = parse_infer(body(ints(), id=id_), None, LIMITS)
    except TypeError:
        return  # half a surrogate, which orjson does not write
    answer, _ = write_infer("m", "3", request.id, [], {})

    assert orjson.loads(answer)["id"] == id_


@given(st.lists(st.floats(width=32, allow_nan=False), min_size=1, max_size=5))
def test_bf16_is_the_upper_half_of_fp32(values: list[float]) -> None:
    tensor = triton.InferInput("y", [len(values)], "BF16")
    halves = np.array(values, np.float32).astype(triton.triton_to_np_dtype("BF16"))
    tensor.set_data_from_numpy(halves)

    raw, header = triton.InferenceServerClient.generate_request_body([tensor])
    found = parse_infer(raw, header, LIMITS).tensors["y"].values

    assert found.tolist() == halves.astype(np.float32).tolist()


@given(st.lists(st.text(st.characters(codec="utf-8"), max_size=5), min_size=1, max_size=5), st.booleans())
def test_strings_of_tritonclient_are_read_back(texts: list[str], binary: bool) -> None:
    values = np.array([t.encode() for t in texts], object)
    tensor = triton.InferInput("x", values.shape, "BYTES")
    tensor.set_data_from_numpy(values, binary_data=binary)

    raw, header = triton.InferenceServerClient.generate_request_body([tensor])

    assert parse_infer(raw, header, LIMITS).tensors["x"].values.tolist() == values.tolist()


def test_requested_outputs_are_binary_or_json() -> None:
    outputs = [{"name": "score", "parameters": {"binary_data": True}}, {"name": "click"}]

    assert parse_infer(body(ints(), outputs=outputs), None, LIMITS).outputs == [
        RequestedOutput("score", True),
        RequestedOutput("click", False),
    ]


def test_all_outputs_may_be_requested_in_binary() -> None:
    request = parse_infer(
        body(ints(), outputs=[{"name": "score"}], parameters={"binary_data_output": True}),
        None,
        LIMITS,
    )

    assert request.binary_outputs
    assert request.outputs == [RequestedOutput("score", True)]


def test_an_answer_is_read_by_tritonclient() -> None:
    score, click = np.array([0.5, 0.25], np.float32), np.array([1, 2], np.float32)

    raw, header = write_infer("m", "3", "id1", [("score", score, True), ("click", click, False)], {})
    result = triton.InferenceServerClient.parse_response_body(raw, header_length=header)

    np.testing.assert_array_equal(result.as_numpy("score"), score)
    np.testing.assert_array_equal(result.as_numpy("click"), click)
    assert result.get_response()["model_version"] == "3"


@pytest.mark.parametrize(
    ("bad", "message"),
    [
        (b"{", "not JSON"),
        (b"[]", "the request: expected an object, found an array"),
        (b"{}", "inputs: expected a list of tensors, found null"),
        (b'{"inputs": [], "id": "a", "id": "b"}', "id: expected each name once in an object"),
        (body(ints(datatype="UINT8", data=[1, -1])), "expected UINT8 values from 0 to 255, found -1 at 1"),
        (body(ints(data=[1, 2**63])), "to 9223372036854775807, found 9223372036854775808 at 1"),
        (body(7), "inputs: expected an object"),
        (body(ints(name=None)), "needs a name"),
        (body(ints(), ints()), "given twice"),
        (body(ints(datatype="BF8")), "expected a datatype of"),
        (body(ints(), id=True), "id: expected a text, found true"),
        (body(ints(), id=["a"]), "id: expected a text"),
        (body(ints(shape=[2, 2], data=[[1, None], None])), "expected INT64 values, found null at 1"),
        (body(ints(shape=[2, 2], data=[[1, 2, 3], [4]])), "expected 2 elements in row 0"),
        (body(ints(shape=[4], data=[[1, 2], [3, 4]])), "its shape holds 4 rows, its data 2"),
        (body(ints(datatype=["x"])), "expected a datatype of"),
        (body(ints(shape=[])), "a shape of one or two counts"),
        (body(ints(shape=[1, 1, 2])), "a shape of one or two counts"),
        (body(ints(shape=[-1])), "a shape of one or two counts"),
        (body(ints(shape=[True])), "a shape of one or two counts"),
        (body(ints(shape=[2**40, 2**40])), "at most 16777216 elements"),
        (body(ints(shape=[2**40, 0])), "at most 16777216 elements"),
        (body(ints(shape=[3])), "holds 3 elements, its data 2"),
        (body(ints(data=None)), "data as a list, or binary_data_size"),
        (body(ints(data=[1, "2"])), "expected INT64 values, found '2' at 1"),
        (body(ints(data=[1, True])), "found true at 1"),
        (body(ints(datatype="BOOL")), "expected BOOL values, found 1 at 0"),
        (body(ints(datatype="INT8", data=[1, 300])), "expected INT8 values from -128 to 127, found 300 at 1"),
        (body(ints(datatype="BYTES")), "expected strings, found 1 at 0"),
        (body(ints(parameters={"binary_data_size": 5})), "a binary_data_size from 0 to 0"),
        (body(ints(parameters=[1])), "parameters: expected an object"),
        (body(ints(), outputs=7), "outputs: expected a list"),
        (body(ints(), outputs=[{}]), "each needs a name"),
        (body(ints(), outputs=[{"name": "x", "parameters": {"classification": 3}}]), "classification"),
    ],
)
def test_what_is_not_the_protocol_is_refused_in_words(bad: bytes, message: str) -> None:
    with pytest.raises(BadInput, match=message):
        parse_infer(bad, None, LIMITS)


def binary(datatype: str, shape: list[int], blob: bytes, *, size: int | None = None) -> tuple[bytes, int]:
    size = len(blob) if size is None else size
    head = body({"name": "x", "datatype": datatype, "shape": shape, "parameters": {"binary_data_size": size}})
    return head + blob, len(head)


@pytest.mark.parametrize(
    ("request_", "message"),
    [
        (binary("INT32", [2], b"1234567"), "takes 8 bytes, its data has 7"),
        (binary("INT32", [1], b"1234", size=9), "from 0 to 4"),
        (binary("INT32", [1], b"12345", size=4), "add up to 4 bytes, the body holds 5"),
        (binary("BYTES", [2], struct.pack("<I", 0)), "at least 8 bytes"),
        (binary("BYTES", [1], struct.pack("<I", 2**32 - 1) + b"abc"), "reaches beyond"),
        (binary("BYTES", [1], struct.pack("<I", 1) + b"ab"), "1 bytes are left over"),
        (binary("BYTES", [2], struct.pack("<I", 3) + b"abc" + b"x"), "reaches beyond"),
        ((b"{}", 9), "from 0 to 2"),
    ],
)
def test_binary_data_that_does_not_add_up_is_refused(request_: tuple[bytes, int], message: str) -> None:
    with pytest.raises(BadInput, match=message):
        parse_infer(*request_, LIMITS)


@given(st.binary(max_size=120), st.none() | st.integers(-3, 130))
@settings(max_examples=examples(300))
def test_random_bytes_are_bad_input(raw: bytes, header: int | None) -> None:
    with pytest.raises(BadInput):
        parse_infer(raw, header, LIMITS)


@given(
    st.binary(max_size=60),
    st.sampled_from(["BYTES", "INT32", "BOOL", "FP16", "BF16"]),
    st.lists(st.integers(0, 9), min_size=1, max_size=2),
)
def test_random_binary_data_is_a_tensor_or_bad_input(blob: bytes, datatype: str, shape: list[int]) -> None:
    try:
        request = parse_infer(*binary(datatype, shape, blob), LIMITS)
    except BadInput:
        return
    assert request.tensors["x"].values.shape == tuple(shape)


@given(
    st.recursive(
        st.none() | st.booleans() | st.integers(-9, 2**63) | st.text(max_size=9),
        lambda v: (
            st.lists(v, max_size=3)
            | st.dictionaries(
                st.sampled_from(
                    [
                        "inputs",
                        "outputs",
                        "name",
                        "datatype",
                        "shape",
                        "data",
                        "parameters",
                        "binary_data_size",
                        "id",
                    ]
                ),
                v,
                max_size=5,
            )
        ),
    )
)
@settings(max_examples=examples(300))
def test_any_json_is_a_request_or_bad_input(tree: Any) -> None:
    try:
        parse_infer(orjson.dumps(tree), None, LIMITS)
    except BadInput:
        return


UNOFFERED = [
    ("sequence_id", 7),
    ("sequence_id", "s"),
    ("sequence_start", True),
    ("sequence_end", True),
    ("shared_memory_region", "r"),
]
NOTHING = [
    ("sequence_id", 0),
    ("sequence_id", ""),
    ("sequence_start", False),
    ("priority", 3),
    ("timeout", 9),
]


def as_message(where: str, name: str, value: Any) -> Any:
    """The message of gRPC with one parameter."""
    message = M.ModelInferRequest(model_name="m")
    tensor = message.inputs.add(name="x", datatype="INT64", shape=[1])
    tensor.contents.int64_contents.append(1)
    output = message.outputs.add(name="click")
    field = {bool: "bool_param", int: "int64_param", str: "string_param"}[type(value)]
    setattr({"": message, "inputs": tensor, "outputs": output}[where].parameters[name], field, value)
    return message


def as_body(where: str, name: str, value: Any) -> bytes:
    """The same over HTTP."""
    given = {"parameters": {name: value}}
    wanted = {"name": "click", **(given if where == "outputs" else {})}
    return body(ints(**(given if where == "inputs" else {})), outputs=[wanted], **({} if where else given))


@pytest.mark.parametrize("where", ["", "inputs", "outputs"])
@pytest.mark.parametrize(("name", "value"), UNOFFERED)
def test_an_unsupported_extension_is_refused(where: str, name: str, value: Any) -> None:
    with pytest.raises(BadInput, match=f"no parameter {name}, found .* extension is not supported"):
        parse_infer(as_body(where, name, value), None, LIMITS)
    with pytest.raises(BadInput, match=f"no parameter {name}, found .* extension is not supported"):
        read_infer(as_message(where, name, value), LIMITS)


@pytest.mark.parametrize(("name", "value"), NOTHING)
def test_parameters_that_ask_for_nothing_are_taken(name: str, value: Any) -> None:
    assert parse_infer(as_body("", name, value), None, LIMITS).tensors.keys() == {"x"}
    assert read_infer(as_message("", name, value), LIMITS).tensors.keys() == {"x"}
