"""Events over gRPC: the doors of HTTP, behind messages of `freshet.wire.v1.Gateway`."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from typing import Any

from freshet.errors import BadInput
from freshet.gateway.api import AVRO, AVRO_BATCH, ROLES
from freshet.gateway.stream_endpoint import JSON, Acks, Door
from freshet.http.authenticator import Guest
from freshet.rpc.protobuf import GATEWAY, messages, parse
from freshet.rpc.public_listener import GrpcDoor
from freshet.rpc.status_codes import Told

__all__ = ["add_events"]

SERVICE = f"{GATEWAY}.Gateway"
_ROLES = dict(enumerate(ROLES, 1))
_KINDS = {1: JSON, 2: JSON, 3: AVRO, 4: AVRO_BATCH}


def add_events(door: GrpcDoor, doors: Mapping[str, Door]) -> None:
    """Serve `Put` and `PutStream`. `doors`: by the role of their stream."""
    m = messages(GATEWAY)

    async def put(data: bytes, guest: Guest) -> bytes:
        asked = parse(m.PutRequest, data)
        role, kind = _ROLES.get(asked.stream), _KINDS.get(asked.encoding)
        if role is None or role not in doors:
            there = ", ".join(f"{n} ({r})" for n, r in _ROLES.items() if r in doors)
            raise BadInput(f"stream: expected one of {there}; found {asked.stream}")
        if kind is None:
            raise BadInput(f"encoding: expected JSON, JSON_LINES, AVRO or AVRO_BATCH; found {asked.encoding}")
        client = _Waiting()
        doors[role].take_body(asked.body, kind, client, guest.payer)
        acks = await client.outcome
        response = m.PutResponse(id=asked.id, topic=doors[role].topic)
        response.partitions.extend(acks.partitions)
        response.offsets.extend(acks.offsets)
        for refused in sorted(acks.refused, key=lambda r: r.index):
            response.refused.add(**refused.as_json())
        return bytes(response.SerializeToString())

    def failed(data: bytes, told: Told) -> bytes:
        error = {"code": told.code, "message": told.text, "retry_after_ms": told.retry_after_ms}
        return bytes(m.PutResponse(id=_id_of(m.PutRequest, data), error=error).SerializeToString())

    door.call(SERVICE, "Put", put, scope="send")
    door.stream(SERVICE, "PutStream", put, failed, scope="send")


class _Waiting:
    """A call that waits for its acknowledgement; see `freshet.gateway.stream_endpoint.Client`."""

    in_columns = True

    def __init__(self) -> None:
        self.outcome: asyncio.Future[Acks] = asyncio.get_running_loop().create_future()

    def acknowledged(self, body: bytes) -> None:
        raise AssertionError("acknowledgements are wanted in columns")

    def told(self, acks: Acks) -> None:
        if not self.outcome.done():  # the client may be gone
            self.outcome.set_result(acks)

    def failed(self, error: Exception) -> None:
        if not self.outcome.done():
            self.outcome.set_exception(error)


def _id_of(message_class: Any, data: bytes) -> int:
    try:
        return int(parse(message_class, data).id)
    except BadInput:
        return 0
