"""A POST's span in its client's trace."""

from __future__ import annotations

from collections.abc import Mapping

from freshet.http.responses import Response
from freshet.http.routes import Reply
from freshet.observability.tracing import Context, Tracer, parsed_traceparent

__all__ = ["traced"]


def traced(
    tracer: Tracer, role: str, route: str, headers: Mapping[bytes, bytes], reply: Reply
) -> tuple[Context | None, Reply]:
    """The span of a request in its client's trace, if it has one, and the reply that tells of it; `role` says
    who answers."""
    client = parsed_traceparent(headers.get(b"traceparent"))
    if client is None:
        return None, reply
    span, started_ns = tracer.new(client), tracer.now_ns()

    def answer(response: Response) -> None:
        tracer.span(
            f"POST {route}",
            role,
            started_ns,
            kind="server",
            context=span,
            parent=client,
            attributes={
                "http.request.method": "POST",
                "http.route": route,
                "http.response.status_code": response.status,
            },
            error="" if response.status < 500 else f"answered with {response.status}",
            asked_for=True,
        )
        reply(response)

    return span, answer
