"""Open Inference Protocol v2: parse request bodies, write response bodies.

Both take JSON and Triton's binary tensor extension (header `Inference-Header-Content-Length`). Sources:
github.com/kserve/open-inference-protocol and Triton's `protocol/extension_binary_data.md`. Letters: B rows.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from sys import getsizeof
from typing import Any

import numpy as np
import orjson
from numpy.typing import NDArray

from freshet import _native
from freshet.errors import BadInput
from freshet.json_text import kind_of, shown

MAX_ELEMENTS = 1 << 24
"""Bound of one tensor's elements: far above any batch, far below the memory."""

MOST_OUTPUTS = 1_000
MOST_NAME = 1_000
"""Bound of a name's characters."""

STRING_BYTES = getsizeof(b"")

_DTYPES: dict[str, Any] = {
    "BOOL": np.dtype(np.bool_),
    **{f"INT{bits}": np.dtype(f"<i{bits // 8}") for bits in (8, 16, 32, 64)},
    **{f"UINT{bits}": np.dtype(f"<u{bits // 8}") for bits in (8, 16, 32, 64)},
    "FP16": np.dtype("<f2"),
    "BF16": np.dtype("V2"),  # numpy lacks it; `from_binary` extends it to float32
    "FP32": np.dtype("<f4"),
    "FP64": np.dtype("<f8"),
    "BYTES": np.dtype(object),
}


@dataclass(frozen=True, slots=True, eq=False)
class Tensor:
    """One input, in the datatype's numpy type: BYTES are an object array of `bytes`, BF16 is float32."""

    name: str
    datatype: str
    values: NDArray[Any]  # (B,) or (B, width)
    nulls: NDArray[np.bool_] | None = None  # (B,) rows that are null in JSON; None: none


@dataclass(frozen=True, slots=True)
class RequestedOutput:
    """One output that the request names."""

    name: str
    binary: bool


@dataclass(frozen=True, slots=True, eq=False)
class InferRequest:
    """A parsed inference request."""

    id: str | int | None  # as it was sent, if any
    tensors: Mapping[str, Tensor]
    outputs: Sequence[RequestedOutput] | None  # None: all
    binary_outputs: bool  # whether outputs are binary that the request does not name

    encoded_bytes: int  # of the request as sent, which are at least those of its strings
    version: str = ""  # of the model that must answer; empty: any

    @property
    def size(self) -> int:
        """Bytes of its tensors in memory, at most and about."""
        values = [tensor.values for tensor in self.tensors.values()]
        strings = sum(array.size for array in values if array.dtype.hasobject)
        numbers = sum(array.nbytes for array in values)
        return numbers + (strings * STRING_BYTES + self.encoded_bytes if strings else 0)


def parse_infer(
    body: bytes, header_length: int | None, limits: InputLimits, version: str = ""
) -> InferRequest:
    """Parse a request. Raises BadInput, with the tensor, if it does not follow the protocol.

    Args:
        header_length: bytes of JSON before the binary data; None if the whole body is JSON.
        limits: checked before a tensor is decoded.
        version: of the model that must answer; empty: any.
    """
    if header_length is not None and not 0 <= header_length <= len(body):
        raise BadInput(
            f"Inference-Header-Content-Length: expected from 0 to {len(body)}, the body's bytes; "
            f"found {header_length}"
        )
    text = body if header_length is None else body[:header_length]
    binary = memoryview(b"" if header_length is None else body[header_length:])
    try:
        tree = orjson.loads(text)
    except orjson.JSONDecodeError as error:
        raise BadInput(f"the request is not JSON: {error}") from None
    if (repeated := _native.repeated_name(text)) is not None:
        raise BadInput(f"{repeated:.60}: expected each name once in an object, found it again")
    tree = _object(tree, "the request")
    inputs = tree.get("inputs")
    if not isinstance(inputs, list):
        raise BadInput(f"inputs: expected a list of tensors, found {kind_of(inputs)}")
    limits.count(len(inputs))
    tensors: dict[str, Tensor] = {}
    at = 0
    for entry in inputs:
        tensor, taken = _tensor(_object(entry, "inputs"), binary[at:], limits)
        if tensor.name in tensors:
            raise BadInput(f"input {tensor.name!r} is given twice")
        tensors[tensor.name] = tensor
        at += taken
    if at != len(binary):
        raise BadInput(f"the inputs' binary_data_size add up to {at} bytes, the body holds {len(binary)}")
    parameters = _object(tree.get("parameters") or {}, "parameters")
    refuse_unsupported("the request", parameters)
    all_binary = parameters.get("binary_data_output") is True
    id_ = tree.get("id")
    if id_ is not None and (isinstance(id_, bool) or not isinstance(id_, str | int)):
        raise BadInput(f"id: expected a text, found {shown(id_)}")
    outputs = _outputs(tree.get("outputs"), all_binary)
    return InferRequest(id_, tensors, outputs, all_binary, len(body), version)


_UNSUPPORTED: Mapping[str, str] = {
    "classification": "classification",
    "sequence_id": "sequence",
    "sequence_start": "sequence",
    "sequence_end": "sequence",
    "shared_memory_region": "shared memory",
    "shared_memory_offset": "shared memory",
    "shared_memory_byte_size": "shared memory",
}
"""{parameter that would change the meaning of an answer: its extension of the protocol}."""


def refuse_unsupported(where: str, parameters: Mapping[str, Any]) -> None:
    """Raises BadInput if a parameter requests an unsupported extension; 0, false and "" do not.

    Other parameters are ignored.
    """
    for name in _UNSUPPORTED.keys() & parameters.keys():
        if parameters[name] not in (None, 0, "") or name == "classification":
            raise BadInput(
                f"{where}: expected no parameter {name}, found {shown(parameters[name])}: the "
                f"{_UNSUPPORTED[name]} extension is not supported, and each request is answered by itself"
            )


def write_infer(
    model: str,
    version: str,
    id_: str | int | None,
    outputs: Sequence[tuple[str, NDArray[np.float32], bool]],
    parameters: Mapping[str, int],
) -> tuple[bytes, int | None]:
    """Write a response body; return it, and the length of its JSON if binary data follows.

    Args:
        outputs: name, (B,) float32 values, whether they are binary.
        parameters: of the response; left out if empty.
    """
    blobs: list[bytes] = []
    described: list[dict[str, Any]] = []
    for name, values, binary in outputs:
        entry: dict[str, Any] = {"name": name, "datatype": "FP32", "shape": list(values.shape)}
        if binary:
            blob = np.ascontiguousarray(values, "<f4").tobytes()
            entry["parameters"] = {"binary_data_size": len(blob)}
            blobs.append(blob)
        else:
            entry["data"] = values.ravel()
        described.append(entry)
    head: dict[str, Any] = {"model_name": model, "model_version": version, "outputs": described}
    if id_ is not None:
        head["id"] = id_
    if parameters:
        head["parameters"] = parameters
    text = orjson.dumps(head, option=orjson.OPT_SERIALIZE_NUMPY)
    return (b"".join([text, *blobs]), len(text)) if blobs else (text, None)


def _outputs(entries: Any, all_binary: bool) -> Sequence[RequestedOutput] | None:
    if entries is None or entries == []:
        return None
    if not isinstance(entries, list):
        raise BadInput(f"outputs: expected a list, found {kind_of(entries)}")
    if len(entries) > MOST_OUTPUTS:
        raise BadInput(f"outputs: expected at most {MOST_OUTPUTS}, found {len(entries)}")
    outputs: list[RequestedOutput] = []
    for entry in entries:
        name = _object(entry, "outputs").get("name")
        if not isinstance(name, str) or len(name) > MOST_NAME:
            raise BadInput("outputs: each needs a name")
        parameters = _object(entry.get("parameters") or {}, f"outputs {name!r} parameters")
        refuse_unsupported(f"output {name!r:.60}", parameters)
        outputs.append(RequestedOutput(name, parameters.get("binary_data", all_binary) is True))
    return outputs


def _object(value: Any, where: str) -> dict[str, Any]:
    if not isinstance(value, dict):
        raise BadInput(f"{where}: expected an object, found {kind_of(value)}")
    return value


def _tensor(entry: dict[str, Any], binary: memoryview, limits: InputLimits) -> tuple[Tensor, int]:
    name: Any = entry.get("name")
    datatype: Any = entry.get("datatype")
    shape: Any = entry.get("shape")
    dtype, count = check_input(name, datatype, shape, limits)
    parameters = _object(entry.get("parameters") or {}, f"input {name!r} parameters")
    refuse_unsupported(f"input {name!r:.60}", parameters)
    size = parameters.get("binary_data_size")
    nulls = None
    if size is None:
        values, nulls = from_json(name, datatype, dtype, entry.get("data"), shape)
        taken = 0
    else:
        if not isinstance(size, int) or isinstance(size, bool) or not 0 <= size <= len(binary):
            raise BadInput(
                f"input {name!r}: expected a binary_data_size from 0 to {len(binary)}, the bytes left; "
                f"found {shown(size)}"
            )
        values = from_binary(name, dtype, binary[:size], count)
        taken = size
    return Tensor(name, datatype, values.reshape(shape), nulls), taken


def check_input(name: object, datatype: object, shape: object, limits: InputLimits) -> tuple[Any, int]:
    """Validate an input's description; return its numpy type and number of elements. Raises BadInput."""
    if not isinstance(name, str) or len(name) > MOST_NAME:
        raise BadInput("inputs: each needs a name")
    limits.name(name)
    dtype = _DTYPES.get(datatype) if isinstance(datatype, str) else None
    if dtype is None:
        raise BadInput(
            f"input {name!r}: expected a datatype of {', '.join(_DTYPES)}, found {shown(datatype)}"
        )
    if (
        not isinstance(shape, list)
        or not 1 <= len(shape) <= 2
        or not all(isinstance(n, int) and not isinstance(n, bool) and n >= 0 for n in shape)
    ):
        raise BadInput(f"input {name!r}: expected a shape of one or two counts, found {shown(shape)}")
    count = math.prod(shape)
    if count > MAX_ELEMENTS or max(shape) > MAX_ELEMENTS:
        raise BadInput(f"input {name!r}: expected at most {MAX_ELEMENTS} elements, found shape {shape}")
    limits.shape(name, shape)
    return dtype, count


def from_json(
    name: str, datatype: Any, dtype: Any, data: Any, shape: Sequence[int]
) -> tuple[NDArray[Any], NDArray[np.bool_] | None]:
    """Return the elements of all rows, and (B,) which rows are null, if any. Raises BadInput."""
    if not isinstance(data, list):
        raise BadInput(f"input {name!r}: expected data as a list, or binary_data_size; found neither")
    width = math.prod(shape[1:])
    flat, nulls = _rows(name, data, shape[0], width)
    if len(flat) != shape[0] * width:
        raise BadInput(f"input {name!r}: its shape holds {shape[0] * width} elements, its data {len(flat)}")
    wanted: Any = str if datatype == "BYTES" else bool if datatype == "BOOL" else int
    if datatype.startswith(("FP", "BF")):
        wanted = (int, float)
    empty = "" if datatype == "BYTES" else False if datatype == "BOOL" else 0
    for i, v in enumerate(flat):
        if v is None and (width == 1 or nulls[i // width]):
            nulls[i // width] = True
            flat[i] = empty
        elif not isinstance(v, wanted) or (wanted is not bool and isinstance(v, bool)):
            kind = "strings" if datatype == "BYTES" else f"{datatype} values"
            raise BadInput(f"input {name!r}: expected {kind}, found {shown(v)} at {i}")
    if datatype == "BYTES":
        values = np.empty(len(flat), object)
        values[:] = [v.encode("utf-8", "surrogatepass") for v in flat]
    else:
        try:
            with np.errstate(over="ignore"):
                values = np.array(flat, np.float32 if datatype == "BF16" else dtype)
        except (OverflowError, ValueError):
            raise _out_of_range(name, datatype, dtype, flat) from None
    return values, nulls if nulls.any() else None


def _out_of_range(name: str, datatype: str, dtype: Any, flat: Sequence[Any]) -> BadInput:
    """Make the error for numbers of which one is out of the datatype's range."""
    if dtype.kind not in "iu":
        return BadInput(f"input {name!r}: a value does not fit {datatype}")
    low, high = np.iinfo(dtype).min, np.iinfo(dtype).max
    i, v = next((i, v) for i, v in enumerate(flat) if not low <= v <= high)
    return BadInput(
        f"input {name!r}: expected {datatype} values from {low} to {high}, found {shown(v)} at {i}"
    )


def _rows(name: str, data: list[Any], rows: int, width: int) -> tuple[list[Any], NDArray[np.bool_]]:
    """Flatten data that may be nested by row; return it, and (B,) which nested rows are null.

    A null row has null for each of its elements. Raises BadInput.
    """
    nulls = np.zeros(rows, np.bool_)
    if not any(isinstance(row, list) for row in data):
        return list(data), nulls
    if len(data) != rows:
        raise BadInput(f"input {name!r}: its shape holds {rows} rows, its data {len(data)}")
    flat: list[Any] = []
    for i, row in enumerate(data):
        if row is not None and (not isinstance(row, list) or len(row) != width):
            raise BadInput(f"input {name!r}: expected {width} elements in row {i}, found {shown(row)}")
        nulls[i] = row is None
        flat += [None] * width if row is None else row
    return flat, nulls


def from_binary(name: str, dtype: Any, data: memoryview, count: int) -> NDArray[Any]:
    """Decode (count,) elements of the protocol's binary form. Raises BadInput."""
    if dtype.hasobject:
        return _bytes_elements(name, data, count)
    if len(data) != count * dtype.itemsize:
        raise BadInput(
            f"input {name!r}: its shape takes {count * dtype.itemsize} bytes, its data has {len(data)}"
        )
    if dtype.kind == "V":  # BF16
        return (np.frombuffer(data, "<u2").astype("<u4") << 16).view("<f4")
    if dtype.kind == "b":  # bytes other than 0 and 1 are no valid numpy booleans
        return np.asarray(np.frombuffer(data, np.uint8) != 0)
    return np.frombuffer(data, dtype)


def _bytes_elements(name: str, data: memoryview, count: int) -> NDArray[Any]:
    if count * 4 > len(data):
        raise BadInput(
            f"input {name!r}: {count} byte strings take at least {count * 4} bytes, found {len(data)}"
        )
    elements: list[bytes] = []
    at, whole, stop = 0, bytes(data), len(data)
    for i in range(count):
        begin = at + 4
        at = begin + int.from_bytes(whole[at:begin], "little")
        if at > stop or begin > stop:
            raise BadInput(f"input {name!r}: byte string {i} reaches beyond the tensor's {stop} bytes")
        elements.append(whole[begin:at])
    if at != stop:
        raise BadInput(f"input {name!r}: {stop - at} bytes are left over after {count} byte strings")
    values = np.empty(count, object)
    values[:] = elements
    return values


@dataclass(frozen=True, slots=True)
class InputLimits:
    """Names and sizes of a model's inputs."""

    widths: Mapping[str, int | None]  # {input: its longest list; None: one value per row}
    rows: int

    def count(self, inputs: int) -> None:
        """Raises BadInput if there are more inputs than the model has."""
        if inputs > len(self.widths):
            raise BadInput(f"expected at most {len(self.widths)} inputs, found {inputs}")

    def name(self, name: str) -> None:
        """Raises BadInput if the model has no such input."""
        if name not in self.widths:
            raise BadInput(f"input {name!r:.60}: expected one of {', '.join(self.widths)}")

    def shape(self, name: str, shape: list[int]) -> None:
        """Raises BadInput if an input has too many rows, or longer lists than the model reads."""
        if shape[0] > self.rows:
            raise BadInput(f"input {name!r}: expected at most {self.rows} rows, found shape {shape}")
        width = self.widths[name]
        if len(shape) > 1 and shape[1] > (width or 1):
            wanted = "[-1]" if width is None else f"[-1, {width}]"
            raise BadInput(f"input {name!r}: expected shape {wanted}, found {shape}")
