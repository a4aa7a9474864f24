"""The Open Inference Protocol v2 over gRPC: the service `inference.GRPCInferenceService`.

Tensors are raw or typed; outputs have the form of the inputs.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
from numpy.typing import NDArray

from freshet.errors import BadInput
from freshet.http.authenticator import Principal
from freshet.inference.oip import (
    InferRequest,
    RequestedOutput,
    Tensor,
    check_input,
    from_binary,
    refuse_unsupported,
)
from freshet.inference.oip_limits import InputLimits, check_message
from freshet.inference.oip_model import OipModel, Output
from freshet.release import RELEASE
from freshet.rpc.protobuf import OIP, messages, parse
from freshet.rpc.public_server import PublicServer

__all__ = ["add_oip", "read_infer", "write_infer"]

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
        outputs, request, number = await model.infer(lambda: read(data))
        return bytes(write_infer(model.spec.name, number, request.id, outputs).SerializeToString())

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
            values = _typed(given, dtype, count)
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
    return InferRequest(message.id or None, tensors, outputs or None, bool(raw))


def _parameters(parameters: Any) -> dict[str, Any]:
    """Convert a map of InferParameter to {name: value}; None if no field is set."""
    return {
        name: getattr(one, field) if (field := one.WhichOneof("parameter_choice")) else None
        for name, one in parameters.items()
    }


def _typed(given: Any, dtype: Any, count: int) -> NDArray[Any]:
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
