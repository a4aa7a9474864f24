"""How large an inference request may be: looked at before anything of it is decoded, which takes the loop's
time for each element."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from freshet.errors import BadInput

__all__ = ["InputLimits", "check_message"]


@dataclass(frozen=True, slots=True)
class InputLimits:
    """What a model's inputs may be."""

    widths: Mapping[str, int | None]  # of each input's name: its longest list; None: one value a row
    rows: int

    def count(self, inputs: int) -> None:
        """Raise BadInput if there are more inputs than the model has."""
        if inputs > len(self.widths):
            raise BadInput(f"expected at most {len(self.widths)} inputs, found {inputs}")

    def name(self, name: str) -> None:
        """Raise BadInput if the model has no such input."""
        if name not in self.widths:
            raise BadInput(f"input {name!r:.60}: expected one of {', '.join(self.widths)}")

    def shape(self, name: str, shape: list[int]) -> None:
        """Raise BadInput if it has more rows than are taken, or longer lists than the model reads."""
        if shape[0] > self.rows:
            raise BadInput(f"input {name!r}: expected at most {self.rows} rows, found shape {shape}")
        width = self.widths[name]
        if len(shape) > 1 and shape[1] > (width or 1):
            wanted = "[-1]" if width is None else f"[-1, {width}]"
            raise BadInput(f"input {name!r}: expected shape {wanted}, found {shape}")


_INPUT, _OUTPUT = 5, 6
"""Fields of inference.ModelInferRequest."""
_SHAPE = 3
"""Of its InferInputTensor."""

_OUTPUTS = 1_000
_FIELDS = 1_000
"""Of a request besides its tensors, and of a tensor: names, parameters."""
_SHAPE_BYTES = 1_000


def check_message(data: bytes, limits: InputLimits) -> None:
    """Refuse a ModelInferRequest of far too many parts before they are all made objects.

    Two bytes of an empty part take a hundred of memory. What is no message at all passes: parsing it says so.

    Raises:
        BadInput: says what there is too much of.
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
    """(Number, where it begins, where it ends) of each field, until something is no field."""
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
    """(Value, where it ends). Raises IndexError where it does not end in ten bytes or in the data."""
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
