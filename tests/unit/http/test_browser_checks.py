"""Host names, origins and content types that HTTP ports accept."""

from __future__ import annotations

import socket

import pytest
from hypothesis import given
from hypothesis import strategies as st

from freshet.http.browser_checks import AllowedSites, host_name, is_this_machine
from freshet.http.messages import HttpError, Request, require_json

SITES = AllowedSites("10.1.2.3", "shop.example, .cluster.local,News.Example.", "fd00::5,")


def refusal(headers: dict[bytes, bytes], sites: AllowedSites = SITES) -> str | None:
    try:
        sites.check(headers)
    except HttpError as error:
        return str(error.content["code"])
    return None


def test_a_refusal_names_the_setting() -> None:
    for headers in ({b"host": b"evil.example"}, {b"origin": b"null"}):
        with pytest.raises(HttpError) as caught:
            SITES.check(headers)
        assert caught.value.status == 403
        assert "FRESHET_COMMON_HOSTS" in str(caught.value.content["hint"])
        assert "shop.example" in str(caught.value.content["expected"])


@pytest.mark.parametrize(
    "host",
    [
        "localhost",
        "localhost:7000",
        "LOCALHOST",
        "localhost.",
        "tab.localhost",
        "127.0.0.1:7001",
        "127.0.0.2",
        "0.0.0.0:7000",
        "192.168.1.5:7000",
        "[::1]:7002",
        "[2001:db8::1]",
        "gateway:7000",
        "shop.example:443",
        "news.example",
        "gateway.prod.svc.cluster.local:7000",
        socket.gethostname(),
    ],
)
def test_safe_and_configured_host_names_are_accepted(host: str) -> None:
    assert refusal({b"host": host.encode()}) is None


@pytest.mark.parametrize(
    "host",
    ["", "evil.example", "localhost.evil.example", "127.0.0.1.evil.example:7002", "evil.example:7#localhost",
     "[::1", "localhost:x", "localhost@evil.example", "::1", "ashop.example", "cluster.local", "evil example",
     "127.1", "0x7f.1"],
)  # fmt: skip
def test_other_names_are_refused(host: str) -> None:
    assert refusal({b"host": host.encode()}) == "host"
    assert refusal({b"host": host.encode()}) == "host"  # nothing is remembered of it


def test_without_a_host_there_is_no_browser() -> None:
    assert refusal({}) is None


@pytest.mark.parametrize(
    "origin",
    ["http://evil.example", "null", "https://localhost.evil.example", "file://", "evil.example", "",
     "http://192.168.1.66", "http://gateway", "chrome-extension://abcdefghijklmnop"],
)  # fmt: skip
@pytest.mark.parametrize("host", [b"localhost:7000", b"10.1.2.3:7000", b"shop.example"])
def test_pages_of_other_sites_are_refused(origin: str, host: bytes) -> None:
    assert refusal({b"host": host, b"origin": origin.encode()}) == "origin"


@pytest.mark.parametrize(
    ("host", "origin"),
    [
        (b"localhost:7002", b"http://localhost:7002"),
        (b"127.0.0.1:7000", b"http://localhost:3000"),
        (b"192.168.1.5:7002", b"http://192.168.1.5:7002"),
        (b"console:7002", b"http://console:7002"),
        (b"127.0.0.1:7000", b"https://shop.example"),
        (b"gateway", b"https://a.cluster.local"),
    ],
)
def test_pages_of_own_and_configured_sites_are_accepted(host: bytes, origin: bytes) -> None:
    assert refusal({b"host": host, b"origin": origin, b"sec-fetch-site": b"cross-site"}) is None


def test_cross_site_images_are_refused_and_links_accepted() -> None:
    headers = {b"host": b"localhost", b"sec-fetch-site": b"cross-site"}
    assert refusal({**headers, b"sec-fetch-mode": b"no-cors"}) == "origin"
    assert refusal(headers) == "origin"
    assert refusal({**headers, b"sec-fetch-mode": b"navigate"}) is None
    assert refusal({b"host": b"localhost", b"sec-fetch-site": b"same-origin"}) is None


@given(st.binary(max_size=60))
def test_no_bytes_of_a_header_break_the_check(text: bytes) -> None:
    assert refusal({b"host": text, b"origin": text}, AllowedSites()) in (None, "host", "origin")


@given(st.text(max_size=40))
def test_a_name_is_never_longer_than_its_header(host: str) -> None:
    assert len(host_name(host)) <= len(host.lower())


@pytest.mark.parametrize("name", ["", "localhost.example", "127.0.0.1.example", "10.0.0.1", "::2"])
def test_other_names_are_other_machines(name: str) -> None:
    assert not is_this_machine(name)


@pytest.mark.parametrize(
    "kind", [b"text/plain", b"application/x-www-form-urlencoded", b"multipart/form-data; boundary=x", None]
)
def test_content_types_of_forms_are_refused_with_a_hint(kind: bytes | None) -> None:
    headers = {} if kind is None else {b"content-type": kind}
    with pytest.raises(HttpError) as caught:
        require_json(Request("POST", "/", "", headers, b"{}"))

    assert caught.value.status == 415
    assert "curl: -H 'content-type: application/json'" in str(caught.value.content["hint"])


@pytest.mark.parametrize("coding", [b"gzip", b"deflate", b"br", b"gzip, gzip", b"X-Gzip"])
def test_a_compressed_body_is_refused_by_its_coding(coding: bytes) -> None:
    headers = {b"content-type": b"application/json", b"content-encoding": coding}
    with pytest.raises(HttpError) as caught:
        require_json(Request("POST", "/", "", headers, b"\x1f\x8b"))

    assert (caught.value.status, caught.value.content["code"]) == (415, "encoding")
    assert caught.value.content["found"] == coding.decode()


@pytest.mark.parametrize("coding", [b"identity", b" Identity ", b""])
def test_a_body_without_a_coding_may_say_so(coding: bytes) -> None:
    headers = {b"content-type": b"application/json", b"content-encoding": coding}
    require_json(Request("POST", "/", "", headers, b"{}"))


def test_json_with_a_charset_is_json() -> None:
    headers = {b"content-type": b"Application/JSON; charset=utf-8"}
    require_json(Request("POST", "/", "", headers, b"{}"))
