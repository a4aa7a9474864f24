"""What is refused of an inference request before its elements are decoded, and what that costs."""

from __future__ import annotations

from typing import Any

import orjson
import pytest
from hypothesis import given
from hypothesis import strategies as st

from freshet.errors import BadInput
from freshet.inference import oip, oip_grpc
from freshet.inference.oip import InputLimits, parse_infer
from freshet.inference.oip_grpc import check_message, read_infer
from freshet.rpc.public_server import OIP, messages, parse

M = messages(OIP)
LIMITS = InputLimits({"user": None, "items": 3, "items.length": None}, 10)


def over_http(name: str, shape: list[int], elements: list[str], *, binary: bool = False) -> None:
    entry: dict[str, Any] = {"name": name, "datatype": "BYTES", "shape": shape}
    blob = b""
    if binary:
        blob = b"".join(len(e).to_bytes(4, "little") + e.encode() for e in elements)
        entry["parameters"] = {"binary_data_size": len(blob)}
    else:
        entry["data"] = elements
    head = orjson.dumps({"inputs": [entry]})
    parse_infer(head + blob, len(head) if binary else None, LIMITS)


def over_grpc(name: str, shape: list[int], elements: list[str], *, binary: bool = False) -> None:
    request = M.ModelInferRequest()
    tensor = request.inputs.add(name=name, datatype="BYTES", shape=shape)
    encoded = [e.encode() for e in elements]
    if binary:
        request.raw_input_contents.append(b"".join(len(e).to_bytes(4, "little") + e for e in encoded))
    else:
        tensor.contents.bytes_contents.extend(encoded)
    data = request.SerializeToString()
    check_message(data, LIMITS)
    read_infer(parse(M.ModelInferRequest, data), LIMITS)


@pytest.mark.parametrize("asked", [over_http, over_grpc])
@pytest.mark.parametrize("binary", [False, True])
@pytest.mark.parametrize(
    ("name", "shape", "told"),
    [
        ("nobody", [1], "input 'nobody': expected one of user, items, items.length"),
        ("user", [11], r"input 'user': expected at most 10 rows, found shape \[11\]"),
        ("items", [10, 4], r"input 'items': expected shape \[-1, 3\], found \[10, 4\]"),
        ("user", [5, 2], r"input 'user': expected shape \[-1\], found \[5, 2\]"),
    ],
)
def test_what_the_model_does_not_take_is_refused_undecoded(
    monkeypatch: pytest.MonkeyPatch, asked: Any, binary: bool, name: str, shape: list[int], told: str
) -> None:
    def decoded(*_: object) -> None:
        raise AssertionError("elements were decoded")

    for module, other in ((oip, "from_json"), (oip_grpc, "from_contents")):
        for function in ("from_binary", other):
            monkeypatch.setattr(module, function, decoded)
    count = 1
    for n in shape:
        count *= n

    with pytest.raises(BadInput, match=told):
        asked(name, shape, ["a"] * count, binary=binary)


@pytest.mark.parametrize("asked", [over_http, over_grpc])
@pytest.mark.parametrize("binary", [False, True])
def test_what_the_model_takes_is_taken(asked: Any, binary: bool) -> None:
    asked("items", [10, 3], ["a"] * 30, binary=binary)
    asked("user", [10], [""] * 10, binary=binary)


EMPTY_INPUT, EMPTY_OUTPUT, EMPTY_RAW, MORE = b"\x2a\0", b"\x32\0", b"\x3a\0", b"\x22\0"


@pytest.mark.parametrize(
    ("part", "told"),
    [
        (EMPTY_INPUT, "expected at most 3 inputs"),
        (EMPTY_OUTPUT, "outputs: expected at most 1000"),
        (EMPTY_RAW, "expected at most 1000 parameters and raw inputs"),
        (MORE, "expected at most 1000 parameters and raw inputs"),
    ],
)
def test_of_many_empty_parts_none_is_made_an_object(part: bytes, told: str) -> None:
    with pytest.raises(BadInput, match=told):
        check_message(part * 100_000, LIMITS)


def input_with(field: bytes) -> bytes:
    """A request with one input that has this field."""
    size = len(field)
    return b"\x2a" + bytes([size & 0x7F | 0x80, size >> 7 & 0x7F | 0x80, size >> 14]) + field


def test_long_shapes_and_many_parameters_are_refused() -> None:
    with pytest.raises(BadInput, match="a shape of one or two counts, found hundreds"):
        check_message(input_with(b"\x1a\xd0\x0f" + bytes(2000)), LIMITS)
    for unpacked in (b"\x18\x01", b"\x22\0"):
        with pytest.raises(BadInput, match="at most 1000 parameters of a tensor"):
            check_message(input_with(unpacked * 2000), LIMITS)


def test_many_inputs_outputs_and_counts_over_http_are_refused() -> None:
    for tree, told in (
        ({"inputs": [{}] * 4}, "expected at most 3 inputs, found 4"),
        ({"inputs": [], "outputs": [{"name": "x"}] * 1001}, "outputs: expected at most 1000, found 1001"),
        ({"inputs": [{"name": "user", "datatype": "INT64", "shape": [[]] * 100_000}]}, "one or two counts"),
    ):
        with pytest.raises(BadInput, match=told) as refused:
            parse_infer(orjson.dumps(tree), None, LIMITS)
        assert len(str(refused.value)) < 300


@pytest.mark.parametrize("key", ["name", "datatype", "shape", "data", "parameters"])
def test_what_is_nested_deep_is_refused_not_a_fault(key: str) -> None:
    deep = b"[" * 990 + b"]" * 990
    given = {"name": b'"user"', "datatype": b'"INT64"', "shape": b"[1]", "data": b"[1]", "parameters": b"{}"}
    given[key] = b"[" + deep + b"]" if key == "data" else deep
    entry = b",".join(b'"%b":%b' % (k.encode(), v) for k, v in given.items())

    with pytest.raises(BadInput) as refused:
        parse_infer(b'{"inputs":[{' + entry + b"}]}", None, LIMITS)
    assert len(str(refused.value)) < 300


@given(st.binary(max_size=200))
def test_any_bytes_are_checked_without_an_error(data: bytes) -> None:
    try:
        check_message(data, LIMITS)
    except BadInput:
        return
