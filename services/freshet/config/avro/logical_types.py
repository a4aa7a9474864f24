"""What logical types make of values: decimals are numbers, UUIDs text, times have a unit.

A logical type that does not fit its type is as if it were not there, as the specification has it.
"""

from __future__ import annotations

from typing import NamedTuple

from freshet.config.avro.types import Fixed, Primitive, Recursion, Type, Union, is_null

__all__ = [
    "DAY_NS",
    "TimeUnit",
    "decimal_digits",
    "decimal_scale",
    "is_uuid",
    "leaf_name",
    "leaf_names",
    "time_unit",
]

DAY_NS = 86_400 * 10**9
_UNIT_NS = {"millis": 10**6, "micros": 10**3, "nanos": 1}
LARGEST_SCALE = 400


class TimeUnit(NamedTuple):
    """What a number counts."""

    of_day: bool  # since midnight, not since 1970
    ns: int  # a tick


def decimal_scale(type_: Type) -> int | None:
    """Digits after the point of a decimal; None: it is none."""
    if not isinstance(type_, Primitive | Fixed) or type_.logical != "decimal":
        return None
    if isinstance(type_, Primitive) and type_.name != "bytes":
        return None
    attributes = dict(type_.attributes)
    precision, scale = attributes.get("precision", 0), attributes.get("scale", 0)
    return scale if 0 <= scale <= min(precision, LARGEST_SCALE) and precision > 0 else None


def decimal_digits(type_: Type) -> int:
    """Digits that a decimal has at most; 0 where its type does not say."""
    return dict(type_.attributes).get("precision", 0) if isinstance(type_, Primitive | Fixed) else 0


def is_uuid(type_: Type) -> bool:
    """Whether these are 16 bytes of a UUID. One that is written as text is text."""
    return isinstance(type_, Fixed) and type_.logical == "uuid" and type_.size == 16


def time_unit(type_: Type) -> TimeUnit | None:
    """The unit of a date, time or timestamp; None: it is none."""
    if not isinstance(type_, Primitive) or type_.logical is None or type_.name not in ("int", "long"):
        return None
    if type_.logical == "date":
        return TimeUnit(of_day=False, ns=DAY_NS) if type_.name == "int" else None
    family, _, unit = type_.logical.rpartition("-")
    if family not in ("time", "timestamp", "local-timestamp") or unit not in _UNIT_NS:
        return None
    fits = "int" if type_.logical == "time-millis" else "long"
    return TimeUnit(of_day=family == "time", ns=_UNIT_NS[unit]) if type_.name == fits else None


def leaf_name(type_: Type) -> str:
    """The primitive type that a value is handed over as, or `fixed`, `enum`; of a container its kind."""
    scale = decimal_scale(type_)
    if scale is not None:
        return "double" if scale else "long"
    if is_uuid(type_):
        return "string"
    match type_:
        case Primitive(name):
            return name
        case Recursion():
            return "record"
        case _:
            return type(type_).__name__.lower()


def leaf_names(type_: Type) -> set[str]:
    """`leaf_name` of every type that a value of this type can have, null left out."""
    if isinstance(type_, Union):
        return {name for b in type_.branches if not is_null(b) for name in leaf_names(b)}
    return {leaf_name(type_)}
