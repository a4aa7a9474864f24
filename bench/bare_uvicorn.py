"""A bare ASGI application under the gateway's uvicorn settings: the bound of single requests.

    python -m bench.bare_uvicorn ANSWER_BYTES       prints its port, runs until it is killed

It reads the body and answers 202 with JSON of ANSWER_BYTES: the cost of HTTP alone on this machine.
"""

from __future__ import annotations

import asyncio
import socket
import sys
from typing import Any

import uvicorn
import uvloop

from freshet.http.server import BACKLOG, UVICORN


def application(answer_bytes: int) -> Any:
    """Return an application that reads a request and answers it with 202 and `answer_bytes` bytes."""
    answer = b'"' + b"x" * (answer_bytes - 2) + b'"'
    headers = [(b"content-type", b"application/json"), (b"content-length", str(answer_bytes).encode())]

    async def app(_scope: Any, receive: Any, send: Any) -> None:
        while (await receive()).get("more_body", False):
            pass
        await send({"type": "http.response.start", "status": 202, "headers": headers})
        await send({"type": "http.response.body", "body": answer})

    return app


def main() -> None:
    sock = socket.create_server(("127.0.0.1", 0), backlog=BACKLOG)
    config = uvicorn.Config(application(int(sys.argv[1])), **UVICORN)
    print(sock.getsockname()[1], flush=True)
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(uvicorn.Server(config).serve([sock]))


if __name__ == "__main__":
    main()
