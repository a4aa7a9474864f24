"""The model behind the Open Inference Protocol, for HTTP and gRPC: its inputs and outputs, tensors to rows.

Each field that features read is an input named by its path, of shape [B] or [B, 1], or two dimensions for a
list feature. Outputs are `score` and one per label.

A missing input has its field's default in every row, or is null; a row without the event's time has that of
now. JSON has null; binary and typed tensors have only NaN of floats, so an optional BOOL input `<field>.null`
marks null rows. `<field>.length` gives the length of each row's list.
Letters: B rows.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from itertools import zip_longest
from typing import Any

import numpy as np
from numpy.typing import NDArray

from freshet.clock import Clock
from freshet.config.avro.schema import Array, Fixed, Map, Record, Type, Union, field_at, sample_schema
from freshet.config.avro.types import decimal_scale, leaf_name
from freshet.config.spec.layout import layout_of
from freshet.config.spec.model import Spec
from freshet.config.spec.schemas import feature_fields
from freshet.errors import BadInput
from freshet.features import DecodedRequests, JsonTranscoder, RequestDecoder
from freshet.features.program import WHY_TIME
from freshet.http.messages import HttpError
from freshet.inference.oip import InferRequest, InputLimits, Tensor
from freshet.inference.pipeline import avro_of, unreadable
from freshet.inference.requests import get_path, set_path, time_value
from freshet.inference.schemas import row_schema
from freshet.inference.scoring import Scoring, Watch

LENGTH = ".length"
NULL = ".null"
SCORE = "score"
DEFAULT_MAX = 50
"""Longest list if the spec sets no `max`."""

_FRACTIONS = {"FP32", "FP64"}
_DATATYPES = {"int": "INT64", "long": "INT64", "float": "FP32", "double": "FP64", "boolean": "BOOL"}
_KINDS = {"BYTES": "O", "FP64": "iuf", "FP32": "iuf", "INT64": "iu", "BOOL": "b"}
"""Kinds of numpy that each datatype takes; of several datatypes of a field, the first is in the metadata."""
_BITS = {"FP32": 24, "FP16": 11, "BF16": 7}
"""Precision of narrow floats. BF16 has 8 bits, but some clients cut a float32 instead of rounding it."""


@dataclass(frozen=True, slots=True)
class Step:
    """One part of the path of an input."""

    name: str
    arrays: int  # levels of arrays here, whose elements further parts enter
    is_key: bool  # a key of a map


@dataclass(frozen=True, slots=True)
class Input:
    """One input tensor."""

    name: str  # path of the field in a sample
    datatype: str
    max: int | None  # longest list; None: one value per row
    steps: tuple[Step, ...]  # the path
    latin: bool  # whether the field holds bytes, which JSON encodes as code points below 256
    is_decimal: bool = False
    others: tuple[str, ...] = ()  # further datatypes that it takes, as a field of integers and text

    @property
    def shape(self) -> list[int]:
        """Shape in the metadata; -1 is the number of rows."""
        return [-1] if self.max is None else [-1, self.max]

    @property
    def companion(self) -> str:
        """Name of the optional input of lengths or nulls; empty for floats, which have NaN."""
        if self.max is not None:
            return self.name + LENGTH
        return "" if self.datatype.startswith("FP") else self.name + NULL


def inputs_of(spec: Spec, sample: Record) -> tuple[Input, ...]:
    """Return a model's inputs in the order of its features; the event's time last, if a feature reads it."""
    lists: dict[str | None, int] = {}
    for f in spec.features:
        if f.kind == "list":  # several may read one field
            lists[f.field] = max(f.max or DEFAULT_MAX, lists.get(f.field, 0))
    paths = list(feature_fields(spec))
    time = spec.events.served.time.path
    if any(f.kind == "time" for f in spec.features) and time not in paths:
        paths.append(time)
    return tuple(_input(sample, path, lists.get(path)) for path in paths)


def _input(sample: Record, path: str, longest: int | None) -> Input:
    parts = path.split(".")
    steps: list[Step] = []
    leaf: Type = sample
    for i, part in enumerate(parts, 1):
        is_key = isinstance(leaf, Map)
        leaf = _bare(field_at(sample, ".".join(parts[:i])).type)
        arrays = 0
        while isinstance(leaf, Array):
            leaf, arrays = _bare(leaf.items), arrays + 1
        steps.append(Step(part, arrays, is_key))
    leaves = leaf.others if isinstance(leaf, Union) else (leaf,)
    found = {_DATATYPES.get(leaf_name(one), "BYTES") for one in leaves}  # a decimal is a number
    if found & _FRACTIONS and len(found - {"BOOL", "BYTES"}) > 1:
        found = found - _FRACTIONS - {"INT64"} | {"FP64"}
    datatype, *others = (one for one in _KINDS if one in found)
    texts = [one for one in leaves if leaf_name(one) not in _DATATYPES]
    latin = bool(texts) and all(isinstance(one, Fixed) or leaf_name(one) == "bytes" for one in texts)
    decimal = any(decimal_scale(one) is not None for one in leaves)
    return Input(path, datatype, longest, tuple(steps), latin, decimal, tuple(others))


def _bare(type_: Type) -> Type:
    others = type_.others if isinstance(type_, Union) else (type_,)
    return others[0] if len(others) == 1 else type_


def limits_of(inputs: tuple[Input, ...], rows: int) -> InputLimits:
    """Return the limits that are checked before tensors are decoded."""
    widths: dict[str, int | None] = {one.name: one.max for one in inputs}
    return InputLimits({**{one.companion: None for one in inputs if one.companion}, **widths}, rows)


def metadata(name: str, version: str, inputs: tuple[Input, ...], labels: tuple[str, ...]) -> dict[str, Any]:
    """Return the protocol's metadata of the model."""
    tensors: list[dict[str, Any]] = []
    for one in inputs:
        tensors.append({"name": one.name, "datatype": one.datatype, "shape": one.shape})
        if one.companion:
            datatype = "BOOL" if one.max is None else "INT32"
            tensors.append({"name": one.companion, "datatype": datatype, "shape": [-1]})
    return {
        "name": name,
        "versions": [version] if version else [],
        "platform": "freshet",
        "inputs": tensors,
        "outputs": [{"name": o, "datatype": "FP32", "shape": [-1]} for o in (SCORE, *labels)],
    }


def model_config(described: Mapping[str, Any]) -> dict[str, Any]:
    """Convert metadata to Triton's model configuration."""

    def tensors(key: str) -> list[dict[str, Any]]:
        return [
            {
                "name": t["name"],
                "data_type": "TYPE_" + t["datatype"].replace("BYTES", "STRING"),
                "dims": t["shape"],
            }
            for t in described[key]
        ]

    return {
        "name": described["name"],
        "platform": described["platform"],
        "backend": "freshet",
        "max_batch_size": 0,
        "input": tensors("inputs"),
        "output": tensors("outputs"),
    }


def rows_of(tensors: Mapping[str, Tensor], inputs: tuple[Input, ...], max_rows: int) -> list[dict[str, Any]]:
    """Convert tensors to B rows, each a sample's JSON object.

    Raises BadInput if an input is unknown, does not fit the metadata, or the numbers of rows differ.
    """
    known = {one.name: one for one in inputs}
    allowed = [*known, *(one.companion for one in inputs if one.companion)]
    unknown = [name for name in tensors if name not in allowed]
    if unknown:
        raise BadInput(f"input {unknown[0]!r}: expected one of {', '.join(allowed)}")
    sizes = {name: len(tensor.values) for name, tensor in tensors.items()}
    if not sizes or len(set(sizes.values())) > 1:
        raise BadInput(f"expected inputs of one number of rows, found {sizes or 'no inputs'}")
    count = next(iter(sizes.values()))
    if not 1 <= count <= max_rows:
        raise BadInput(f"expected 1 to {max_rows} rows, found {count}")
    rows: list[dict[str, Any]] = [{} for _ in range(count)]
    spread: list[tuple[Input, list[Any], list[int] | None]] = []
    for name, one in known.items():
        if name in tensors:
            values = _values(one, tensors[name])
            for i in np.flatnonzero(_nulls(tensors, one, count)).tolist():
                values[i] = None
            lengths = _lengths(tensors, one, count)
            _fill(rows, one, values, lengths)
            if any(step.arrays for step in one.steps[:-1]):
                spread.append((one, values, lengths))
        elif one.companion in tensors:
            raise BadInput(f"input {one.companion!r} describes {name!r}, which is missing")
    for filled in spread if len(spread) > 1 else ():
        _fill(rows, *filled)  # again: null in elements of an array that another input has made longer
    return rows


def _values(one: Input, tensor: Tensor) -> list[Any]:
    values = tensor.values
    if one.max is None and values.ndim == 2 and values.shape[1] == 1:
        values = values[:, 0]
    if values.ndim != len(one.shape):
        raise BadInput(f"input {one.name!r}: expected shape {one.shape}, found {list(values.shape)}")
    datatypes = (one.datatype, *one.others)
    if not any(values.dtype.kind in _KINDS[datatype] for datatype in datatypes):
        raise BadInput(f"input {one.name!r}: expected {' or '.join(datatypes)}, found {tensor.datatype}")
    if values.dtype.kind == "f":
        finite = np.isfinite(values)
        numbers = values[finite].tolist()
        bits = _BITS.get(tensor.datatype) if one.is_decimal else None
        out = np.full(values.shape, None, object)
        out[finite] = numbers if bits is None else [_shortest(v, bits) for v in numbers]
        return list(out.tolist())
    if values.dtype.kind == "u" and values.dtype.itemsize == 8 and (values > np.uint64(2**63 - 1)).any():
        raise BadInput(f"input {one.name!r}: expected INT64, found a value beyond its range")
    plain = list(values.tolist())
    return plain if values.dtype.kind != "O" else _texts(one, plain)


def _shortest(value: float, bits: int) -> float:
    """Return the number of fewest digits that a float of so many bits stands for; a whole one is itself.

    A decimal 0.1 arrives in 24 bits as 0.10000000149011612, which no decimal of two digits takes.
    """
    if value.is_integer():
        return value
    half = math.ulp(value) * 2.0 ** (52 - bits)  # of the distance between two such floats
    near = (float(f"{value:.{digits}g}") for digits in range(1, 18))  # 17 digits are exact
    return next(short for short in near if abs(short - value) < half)


def _texts(one: Input, values: list[Any]) -> list[Any]:
    try:
        return [
            _texts(one, v) if isinstance(v, list) else v.decode("latin-1" if one.latin else "utf-8")
            for v in values
        ]
    except UnicodeDecodeError as error:
        raise BadInput(f"input {one.name!r}: expected UTF-8, found {error.object[:40]!r}") from None


def _nulls(tensors: Mapping[str, Tensor], one: Input, count: int) -> NDArray[np.bool_]:
    """Return (B,) which rows are null in JSON or by the companion. Raises BadInput."""
    by_json = tensors[one.name].nulls
    nulls = np.zeros(count, np.bool_) if by_json is None else by_json
    tensor = tensors.get(one.companion) if one.max is None else None
    if tensor is None:
        return nulls
    if tensor.values.dtype.kind != "b" or tensor.values.size != count or tensor.nulls is not None:
        raise BadInput(f"input {tensor.name!r}: expected {count} values of BOOL, true where the row is null")
    return np.asarray(nulls | tensor.values.reshape(count))


def _lengths(tensors: Mapping[str, Tensor], one: Input, count: int) -> list[int] | None:
    tensor = tensors.get(one.companion)
    if one.max is None or tensor is None:
        return None
    width = tensors[one.name].values.shape[-1]
    lengths = tensor.values.reshape(count) if tensor.values.size == count else tensor.values
    if (
        lengths.shape != (count,)
        or tensor.nulls is not None
        or lengths.dtype.kind not in "iu"
        or not ((lengths >= 0) & (lengths <= width)).all()
    ):
        raise BadInput(
            f"input {tensor.name!r}: expected {count} integers from 0 to {width}, the list's width"
        )
    return [int(n) for n in lengths]


def _fill(rows: list[dict[str, Any]], one: Input, values: list[Any], lengths: list[int] | None) -> None:
    for i, row in enumerate(rows):
        value = values[i]
        if lengths is not None and value is not None:
            value = value[: lengths[i]]
        _put(row, one.steps, value)


def _put(node: dict[str, Any], steps: tuple[Step, ...], value: Any) -> None:
    """Put a value, or a list for the outermost array of the path; each array inside it has one element."""
    step, rest = steps[0], steps[1:]
    elements = node.get(step.name) if step.arrays and rest else None
    if value is None and not elements and (step.arrays or not rest):
        if not step.is_key:  # a map has no null values: its key is left out
            node.setdefault(step.name, None)
    elif not rest:
        node[step.name] = [_within(v, step.arrays - 1) for v in value] if step.arrays else value
    elif step.arrays:  # one record per element of the longest list; a list that ends before is null there
        values, inside = value or (), any(further.arrays for further in rest)
        new = (_within({}, step.arrays - 1) for _ in range(len(values) - len(elements or ())))
        node[step.name] = elements = [*(elements or ()), *new]
        for outer, v in zip_longest(elements, values):
            element = outer
            for _ in range(step.arrays - 1):
                element = element[0]
            _put(element, rest, [v] if inside and v is not None else v)
    else:
        _put(node.setdefault(step.name, {}), rest, value)


def _within(value: Any, arrays: int) -> Any:
    for _ in range(arrays):
        value = [value]
    return value


@dataclass(frozen=True, slots=True, eq=False)
class Inferred:
    """The outcome of a request of the Open Inference Protocol."""

    outputs: list[Output]
    request: InferRequest
    version: str
    parameters: Mapping[str, int]  # of the response


Output = tuple[str, NDArray[np.float32], bool]
"""Name, (B,) values, whether they are sent as binary."""


class OipModel:
    """One model, by its name and optionally the number of the version served."""

    def __init__(self, spec: Spec, served: Record, scoring: Scoring, *, clock: Clock, max_rows: int) -> None:
        """Derive the inputs. Raises ConfigError if the spec does not fit `served`, the schema of events."""
        sample = sample_schema(served, spec.events.served.explode)
        self.spec, self.inputs = spec, inputs_of(spec, sample)
        self.limits = limits_of(self.inputs, max_rows)
        row = row_schema(sample, [*(one.name for one in self.inputs), spec.events.served.time.path])
        self._transcoder = JsonTranscoder(row)
        # each row is an event of one candidate, without the key, which no feature needs
        stream = replace(spec.events.served, explode=None, key=())
        events = replace(spec, events=replace(spec.events, served=stream))
        self._decoder = RequestDecoder(events, layout_of(spec), row)
        self._scoring, self._clock, self._max_rows = scoring, clock, max_rows

    def is_ready(self) -> bool:
        """Return whether the model is served."""
        return self._scoring.live.version() is not None

    def describe(self, name: str, version: str = "") -> dict[str, Any]:
        """Return the protocol's metadata. Raises as `check`."""
        number = self.check(name, version)
        labels = tuple(label.name for label in self.spec.labels)
        return metadata(self.spec.name, number, self.inputs, labels)

    def check(self, name: str, version: str = "") -> str:
        """Return the version's number as text. Raises HttpError if another model or version is served."""
        if name != self.spec.name:
            raise HttpError(404, "no_model", "no such model", expected=self.spec.name, found=name[:100])
        serving = self._scoring.live.version()
        number = "" if serving is None else str(serving.manifest.number)
        _check_version(version, number)
        return number

    async def infer(self, read: Callable[[], InferRequest], watch: Watch | None = None) -> Inferred:
        """Score a request.

        Args:
            read: parses the request; not called if the expected wait is too long.
            watch: begins to watch the client; None: the call is cancelled when its client disconnects.

        Raises:
            BadInput: an input or output does not fit the metadata.
            HttpError: another version than the request's is served when its turn comes.
            Unavailable: no model is served yet.   ClientGoneError: the client disconnected meanwhile.
            Overloaded: the expected wait is too long, or too many bytes of requests wait.
        """
        self._scoring.queue.refuse_if_late()
        request = read()
        count = max((len(tensor.values) for tensor in request.tensors.values()), default=0)
        scored, serving = await self._scoring.score_samples(
            count, lambda: self._decoded(request), request.size, watch
        )
        number = str(serving.manifest.number)
        _check_version(request.version, number)  # it may have changed while the request waited
        self._scoring.counts.scored(scored)
        values = {SCORE: scored.scores}
        for i, label in enumerate(self.spec.labels):
            values[label.name] = scored.predictions[:, i]
        wanted = [(o.name, o.binary) for o in request.outputs or ()]
        wanted = wanted or [(name, request.binary_outputs) for name in values]
        unknown = [name for name, _ in wanted if name not in values]
        if unknown:
            raise BadInput(f"output {unknown[0]!r:.60}: expected one of {', '.join(values)}")
        defaulted = sum(scored.defaulted.values())
        return Inferred(
            [(name, values[name], binary) for name, binary in wanted],
            request,
            number,
            {"defaulted_rows": defaulted} if defaulted else {},
        )

    def _decoded(self, request: InferRequest) -> DecodedRequests:
        rows = rows_of(request.tensors, self.inputs, self._max_rows)
        time = self.spec.events.served.time
        now = time_value(self._clock.now_ms(), time)
        for i, row in enumerate(rows):
            if get_path(row, time.path) is None:
                rows[i] = set_path(row, time.path, now)
        decoded = self._decoder.decode(avro_of(self._transcoder, rows), np.array([len(rows)], np.uint32))
        if len(decoded.bad):
            if WHY_TIME in decoded.why[0]:
                raise BadInput(
                    f"input {time.path!r}: expected a time ({time.unit}) in the years 1 to 9999, found "
                    f"{get_path(rows[int(decoded.bad[0])], time.path)!r:.60}"
                )
            raise unreadable(decoded.why[0])
        return decoded


def _check_version(wanted: str, served: str) -> None:
    if wanted not in ("", served):
        raise HttpError(
            404, "no_version", "only the version that `stable` names is served",
            expected=served, found=wanted[:100],
        )  # fmt: skip
