"""What an operator may set of a gateway, with every default."""

from __future__ import annotations

from dataclasses import dataclass

__all__ = ["GatewaySettings"]


@dataclass(frozen=True, slots=True, kw_only=True)
class GatewaySettings:
    """All of it is deployment: nothing here changes what events mean."""

    host: str = "127.0.0.1"
    port: int = 7701  # 0: any free one
    max_body_bytes: int = 8 << 20
    body_timeout_s: float = 10.0  # for a whole body to arrive
    max_events: int = 10_000  # of one request
    queue_events: int = 100_000  # waiting for the log; above: 429
    queue_bytes: int = 64 << 20
    commit_wait_ms: float = 2.0  # how long the first request of a commit waits for company
    commit_events: int = 20_000  # of one append
    drain_s: float = 10.0  # for requests begun when the gateway is told to stop
