"""Pages of other sites: what they may not ask of this machine, and what is none of our business."""

from __future__ import annotations

import pytest

from freshet.runtime.answers import HttpError
from freshet.runtime.browsers import is_this_machine, refuse_other_sites


@pytest.mark.parametrize(
    "host", [b"127.0.0.1:7000", b"localhost:7001", b"LOCALHOST", b"[::1]:7000", b"0.0.0.0:7000"]
)
def test_a_page_of_another_site_may_not_ask_this_machine(host: bytes) -> None:
    with pytest.raises(HttpError) as refused:
        refuse_other_sites(
            {b"host": host, b"sec-fetch-site": b"cross-site", b"origin": b"https://evil.example"}
        )

    assert (refused.value.status, refused.value.content["code"]) == (403, "origin")
    assert refused.value.content["found"] == "https://evil.example"


@pytest.mark.parametrize(
    "headers",
    [
        {b"host": b"127.0.0.1:7000"},
        {},
        {b"host": b"localhost", b"sec-fetch-site": b"same-origin"},
        {b"host": b"localhost", b"sec-fetch-site": b"none"},
        {b"host": b"events.shop.example", b"sec-fetch-site": b"cross-site"},
    ],
    ids=["a program", "no headers", "our own page", "an address typed in", "let in by a proxy"],
)
def test_others_may(headers: dict[bytes, bytes]) -> None:
    refuse_other_sites(headers)


@pytest.mark.parametrize("name", ["", "localhost.example", "127.0.0.1.example", "10.0.0.1", "::2"])
def test_other_names_are_other_machines(name: str) -> None:
    assert not is_this_machine(name)
