"""Events over gRPC: the service `freshet.wire.v1.Gateway` before the HTTP routes' endpoints."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from typing import Any

from freshet.errors import BadInput
from freshet.gateway.api import AVRO, AVRO_BATCH, ROLES
from freshet.gateway.stream_endpoint import JSON, Acks, StreamEndpoint
from freshet.http.authenticator import Principal
from freshet.rpc.errors import CallStatus
from freshet.rpc.public_server import GATEWAY, PublicServer, messages, parse

SERVICE = f"{GATEWAY}.Gateway"
_ROLES = dict(enumerate(ROLES, 1))
_KINDS = {1: JSON, 2: JSON, 3: AVRO, 4: AVRO_BATCH}


def add_events(listener: PublicServer, endpoints: Mapping[str, StreamEndpoint]) -> None:
    """Serve `Put` and `PutStream`. `endpoints`: by the role of their stream."""
    m = messages(GATEWAY)

    async def put(data: bytes, principal: Principal) -> bytes:
        request = parse(m.PutRequest, data)
        role, kind = _ROLES.get(request.stream), _KINDS.get(request.encoding)
        if role is None or role not in endpoints:
            known = ", ".join(f"{n} ({r})" for n, r in _ROLES.items() if r in endpoints)
            raise BadInput(f"stream: expected one of {known}; found {request.stream}")
        if kind is None:
            raise BadInput(
                f"encoding: expected JSON, JSON_LINES, AVRO or AVRO_BATCH; found {request.encoding}"
            )
        client = _Call()
        endpoints[role].submit_body(request.body, kind, client, principal.allowance)
        acks = await client.outcome
        response = m.PutResponse(id=request.id, topic=endpoints[role].topic)
        response.partitions.extend(acks.partitions)
        response.offsets.extend(acks.offsets)
        for refused in sorted(acks.refused, key=lambda r: r.index):
            response.refused.add(**refused.as_json())
        return bytes(response.SerializeToString())

    def failed(data: bytes, status: CallStatus) -> bytes:
        error = {"code": status.code, "message": status.text, "retry_after_ms": status.retry_after_ms}
        return bytes(m.PutResponse(id=_id_of(m.PutRequest, data), error=error).SerializeToString())

    listener.add_call(SERVICE, "Put", put, scope="send")
    listener.add_stream(SERVICE, "PutStream", put, failed, scope="send")


class _Call:
    """A call that waits for its acknowledgement; a `freshet.gateway.stream_endpoint.Client`."""

    in_columns = True

    def __init__(self) -> None:
        self.outcome: asyncio.Future[Acks] = asyncio.get_running_loop().create_future()

    def acknowledged(self, body: bytes) -> None:
        raise AssertionError("the endpoint must acknowledge in columns")

    def answered(self, acks: Acks) -> None:
        if not self.outcome.done():  # the client may have disconnected
            self.outcome.set_result(acks)

    def failed(self, error: Exception) -> None:
        if not self.outcome.done():
            self.outcome.set_exception(error)


def _id_of(message_class: Any, data: bytes) -> int:
    try:
        return int(parse(message_class, data).id)
    except BadInput:
        return 0
