"""Messages of the .proto files in `schemas/`, from compiled descriptors beside this module.

The descriptors have their own pool, as `tritonclient` and `kserve` register the same names in the default.
Protobuf's runtime makes the classes, so that no generated code requires one release of protobuf.
`python -m ops.protos` compiles the descriptors; a test fails when they are stale.
"""

from __future__ import annotations

from functools import cache
from pathlib import Path
from typing import Any

from google.protobuf import descriptor_pb2, descriptor_pool, message_factory
from google.protobuf.message import DecodeError

from freshet.errors import BadInput

DESCRIPTORS = Path(__file__).with_name("protobuf.binpb")
"""A FileDescriptorSet of all .proto files."""

OIP, GATEWAY = "inference", "freshet.wire.v1"
"""Packages of the .proto files."""


class Messages:
    """The message classes of one package as attributes, with the fields of the .proto file."""

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
    """Return the messages of OIP or GATEWAY."""
    return Messages(package)


def parse(message_class: Any, data: bytes) -> Any:
    """Parse a message; unknown fields are ignored. Raises BadInput."""
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
