"""Limits of inference requests, checked before decoding, which takes the loop's time for each element."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from freshet.errors import BadInput

__all__ = ["InputLimits", "check_message"]


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
