"""Messages of the .proto files in `schemas/`, from compiled descriptors beside this module.

They live in a pool of their own: `tritonclient` and `kserve` bring descriptors of the same names, and one
process may hold all of them. Classes are made by protobuf's runtime, so that no generated code ties us to one
release of it. `python -m ops.protos` compiles anew; a test says when that is due.
"""

from __future__ import annotations

from functools import cache
from pathlib import Path
from typing import Any

from google.protobuf import descriptor_pb2, descriptor_pool, message_factory
from google.protobuf.message import DecodeError

from freshet.errors import BadInput

__all__ = ["DESCRIPTORS", "GATEWAY", "OIP", "Messages", "messages", "parse"]

DESCRIPTORS = Path(__file__).with_name("protobuf.binpb")
"""A FileDescriptorSet of all of them."""

OIP, GATEWAY = "inference", "freshet.wire.v1"
"""Packages."""


class Messages:
    """The message classes of one package, as attributes; their fields are as the .proto file names them."""

    def __init__(self, package: str) -> None:
        self._package = package

    def __getattr__(self, name: str) -> Any:
        try:
            made = message_factory.GetMessageClass(_pool().FindMessageTypeByName(f"{self._package}.{name}"))
        except KeyError:
            raise AttributeError(f"{self._package} has no message {name}") from None
        setattr(self, name, made)
        return made


@cache
def messages(package: str) -> Messages:
    """The messages of OIP or GATEWAY."""
    return Messages(package)


def parse(message_class: Any, data: bytes) -> Any:
    """A message from its bytes; fields that are not known are ignored. Raises BadInput."""
    try:
        return message_class.FromString(data)
    except DecodeError:
        name = message_class.DESCRIPTOR.full_name
        raise BadInput(f"expected a protobuf message {name}, found {len(data)} bytes that are none") from None


@cache
def _pool() -> descriptor_pool.DescriptorPool:
    pool = descriptor_pool.DescriptorPool()
    for file in descriptor_pb2.FileDescriptorSet.FromString(DESCRIPTORS.read_bytes()).file:
        pool.Add(file)
    return pool
