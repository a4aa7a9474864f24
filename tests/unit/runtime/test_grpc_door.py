"""What a gRPC call shows at the door."""

from __future__ import annotations

from typing import Any

from freshet.runtime.grpc_door import _shown
from freshet.runtime.rates import forwarded_address


class Call:
    """What a call's context tells of who asks."""

    def __init__(self, *metadata: tuple[str, str | bytes]) -> None:
        self._metadata = metadata

    def invocation_metadata(self) -> tuple[tuple[str, str | bytes], ...]:
        return self._metadata

    def peer(self) -> str:
        return "ipv4:10.0.0.1:50000"


def shown(*metadata: tuple[str, str | bytes]) -> tuple[bytes | None, str, bytes | None]:
    call: Any = Call(*metadata)
    return _shown(call)


def test_all_lines_of_proxies_are_one_list() -> None:
    lines = [("x-forwarded-for", line) for line in ("6.6.6.6", "203.0.113.9", "10.0.0.2")]

    _, peer, forwarded = shown(*lines, ("x-forwarded-for-not", "x"))

    assert forwarded == b"6.6.6.6,203.0.113.9,10.0.0.2"
    assert forwarded_address(peer, forwarded, 2) == "203.0.113.9"


def test_of_several_tokens_the_last_is_shown() -> None:
    assert shown(("authorization", "Bearer a"), ("authorization", b"Bearer b"))[0] == b"Bearer b"


def test_without_metadata_there_is_an_address_alone() -> None:
    assert shown() == (None, "10.0.0.1", None)
