"""The Open Inference Protocol v2 over gRPC: the service `inference.GRPCInferenceService`.

Tensors are raw or typed; outputs have the form of the inputs. A message's fields are counted before it is
parsed, and its limits checked before tensors are decoded, which takes the loop's time for each element.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
from numpy.typing import NDArray

from freshet.errors import BadInput
from freshet.http.authenticator import Principal
from freshet.inference.oip import (
    InferRequest,
    InputLimits,
    RequestedOutput,
    Tensor,
    check_input,
    from_binary,
    refuse_unsupported,
)
from freshet.inference.oip_model import OipModel, Output
from freshet.release import RELEASE
from freshet.rpc.public_server import OIP, PublicServer, messages, parse

_INPUT, _OUTPUT = 5, 6
"""Fields of inference.ModelInferRequest."""
_SHAPE = 3
"""Field of InferInputTensor."""

_OUTPUTS = 1_000
_FIELDS = 1_000
"""Bound of other fields of a request, and of fields of a tensor."""
_SHAPE_BYTES = 1_000


def check_message(data: bytes, limits: InputLimits) -> None:
    """Raises BadInput if a ModelInferRequest has far too many fields: a two-byte field takes 100 B parsed.

    Bytes that are no message pass: the parser refuses them.
    """
    inputs = outputs = others = 0
    for number, start, stop in _fields(data, 0, len(data)):
        if number == _INPUT:
            inputs += 1
            limits.count(inputs)
            _check_input(data, start, stop)
        elif number == _OUTPUT:
            outputs += 1
        else:
            others += 1
        if outputs > _OUTPUTS:
            raise BadInput(f"outputs: expected at most {_OUTPUTS}, found more")
        if others > _FIELDS:
            raise BadInput(f"the request: expected at most {_FIELDS} parameters and raw inputs, found more")


def _check_input(data: bytes, start: int, stop: int) -> None:
    for i, (number, begin, end) in enumerate(_fields(data, start, stop)):
        if number == _SHAPE and end - begin > _SHAPE_BYTES:
            raise BadInput("inputs: expected a shape of one or two counts, found hundreds")
        if i > _FIELDS:
            raise BadInput(f"inputs: expected at most {_FIELDS} parameters of a tensor, found more")


_VARINT, _EIGHT, _LENGTH, _FOUR = 0, 1, 2, 5


def _fields(data: bytes, at: int, stop: int) -> Iterator[tuple[int, int, int]]:
    """Yield (number, begin, end) of each field, up to the first invalid one."""
    try:
        while at < stop:
            key, at = _varint(data, at)
            kind = key & 7
            if kind == _VARINT:
                _, end = _varint(data, at)
            elif kind == _LENGTH:
                size, at = _varint(data, at)
                end = at + size
            elif kind in (_EIGHT, _FOUR):
                end = at + (8 if kind == _EIGHT else 4)
            else:
                return
            if end > stop:
                return
            yield key >> 3, at, end
            at = end
    except IndexError:
        return


def _varint(data: bytes, at: int) -> tuple[int, int]:
    """Return (value, end). Raises IndexError if it does not end within ten bytes or the data."""
    value = shift = 0
    while True:
        byte = data[at]
        at += 1
        value |= (byte & 0x7F) << shift
        if byte < 0x80:
            return value, at
        shift += 7
        if shift > 63:
            raise IndexError


SERVICE = f"{OIP}.GRPCInferenceService"

_CONTENTS = {
    "BOOL": ("bool_contents", np.bool_),
    **{f"INT{bits}": ("int_contents", np.int32) for bits in (8, 16, 32)},
    "INT64": ("int64_contents", np.int64),
    **{f"UINT{bits}": ("uint_contents", np.uint32) for bits in (8, 16, 32)},
    "UINT64": ("uint64_contents", np.uint64),
    "FP32": ("fp32_contents", np.float32),
    "FP64": ("fp64_contents", np.float64),
    "BYTES": ("bytes_contents", np.object_),
}


def add_oip(listener: PublicServer, model: OipModel) -> None:
    """Serve the protocol's six methods."""
    m = messages(OIP)

    def open_route(method: str, answer: Callable[[], Any]) -> None:
        listener.add_open_call(SERVICE, method, lambda: bytes(answer().SerializeToString()))

    def route(method: str, answer: Callable[[Any], Any]) -> None:
        request_class = getattr(m, f"{method}Request")

        async def answered(data: bytes, _: Principal) -> bytes:
            return bytes(answer(parse(request_class, data)).SerializeToString())

        listener.add_call(SERVICE, method, answered, scope="rank")

    def model_ready(request: Any) -> Any:
        model.check(request.name, request.version)
        return m.ModelReadyResponse(ready=model.is_ready())

    def metadata(request: Any) -> Any:
        return m.ModelMetadataResponse(**model.describe(request.name, request.version))

    def read(data: bytes) -> InferRequest:
        check_message(data, model.limits)
        message = parse(m.ModelInferRequest, data)
        model.check(message.model_name, message.model_version)
        return read_infer(message, model.limits)

    async def infer(data: bytes, _: Principal) -> bytes:
        done = await model.infer(lambda: read(data))
        response = write_infer(model.spec.name, done.version, done.request.id, done.outputs)
        for name, value in done.parameters.items():
            response.parameters[name].int64_param = value
        return bytes(response.SerializeToString())

    open_route("ServerLive", lambda: m.ServerLiveResponse(live=True))
    open_route("ServerReady", lambda: m.ServerReadyResponse(ready=model.is_ready()))
    open_route("ServerMetadata", lambda: m.ServerMetadataResponse(name="freshet", version=RELEASE))
    route("ModelReady", model_ready)
    route("ModelMetadata", metadata)
    listener.add_call(SERVICE, "ModelInfer", infer, scope="rank")


def read_infer(message: Any, limits: InputLimits) -> InferRequest:
    """Convert a ModelInferRequest; `limits` are checked before a tensor is decoded.

    Raises BadInput, with the tensor, if the message does not follow the protocol.
    """
    raw = message.raw_input_contents
    if raw and len(raw) != len(message.inputs):
        raise BadInput(
            f"raw_input_contents: expected one for each of {len(message.inputs)} inputs, found {len(raw)}"
        )
    limits.count(len(message.inputs))
    tensors: dict[str, Tensor] = {}
    for i, given in enumerate(message.inputs):
        if given.name in tensors:
            raise BadInput(f"input {given.name!r} is given twice")
        shape = list(given.shape)
        dtype, count = check_input(given.name, given.datatype, shape, limits)
        if not raw:
            values = from_contents(given, dtype, count)
        elif given.HasField("contents"):
            raise BadInput(f"input {given.name!r}: expected contents or raw_input_contents, found both")
        else:
            values = from_binary(given.name, dtype, memoryview(raw[i]), count)
        tensors[given.name] = Tensor(given.name, given.datatype, values.reshape(shape))
    refuse_unsupported("the request", _parameters(message.parameters))
    for where, tensors_ in (("input", message.inputs), ("output", message.outputs)):
        for tensor in tensors_:
            refuse_unsupported(f"{where} {tensor.name!r:.60}", _parameters(tensor.parameters))
    outputs = [RequestedOutput(wanted.name, bool(raw)) for wanted in message.outputs]
    id_, version = message.id or None, message.model_version
    return InferRequest(id_, tensors, outputs or None, bool(raw), message.ByteSize(), version)


def _parameters(parameters: Any) -> dict[str, Any]:
    """Convert a map of InferParameter to {name: value}; None if no field is set."""
    return {
        name: getattr(one, field) if (field := one.WhichOneof("parameter_choice")) else None
        for name, one in parameters.items()
    }


def from_contents(given: Any, dtype: Any, count: int) -> NDArray[Any]:
    """Convert `contents` to (count,) elements."""
    if given.datatype not in _CONTENTS:
        raise BadInput(f"input {given.name!r}: {given.datatype} has no typed contents, send it raw")
    field, wide = _CONTENTS[given.datatype]
    others = [f.name for f, _ in given.contents.ListFields() if f.name != field]
    if others:
        raise BadInput(f"input {given.name!r}: expected {given.datatype} in {field}, found {others[0]}")
    elements = getattr(given.contents, field)
    if len(elements) != count:
        raise BadInput(
            f"input {given.name!r}: its shape holds {count} elements, its {field} {len(elements)}; "
            "or should it be in raw_input_contents?"
        )
    values: NDArray[Any] = np.empty(count, wide)
    values[:] = elements
    with np.errstate(over="ignore"):
        narrow = values.astype(dtype)
    if narrow.dtype.kind in "iu" and (narrow != values).any():
        raise BadInput(f"input {given.name!r}: a value does not fit {given.datatype}")
    return narrow


def write_infer(model: str, version: str, id_: object, outputs: list[Output]) -> Any:
    """Make a ModelInferResponse of (B,) float32 outputs; all are raw, or none."""
    m = messages(OIP)
    response = m.ModelInferResponse(model_name=model, model_version=version, id=str(id_ or ""))
    for name, values, binary in outputs:
        described = response.outputs.add(name=name, datatype="FP32", shape=values.shape)
        if binary:
            response.raw_output_contents.append(np.ascontiguousarray(values, "<f4").tobytes())
        else:
            described.contents.fp32_contents.extend(values.tolist())
    return response
