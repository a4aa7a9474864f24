"""Addresses as settings write them: what they mean, and what is refused."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from freshet.http.addresses import Address, address_of, reachable_host

LABELS = st.from_regex(r"[a-z0-9]([a-z0-9_-]{0,20}[a-z0-9])?", fullmatch=True)
NAMES = st.lists(LABELS, min_size=1, max_size=4).map(".".join)
HOSTS = NAMES | st.ip_addresses().map(str)


@given(HOSTS, st.integers(1, 65_535))
def test_written_text_is_parsed_again(host: str, port: int) -> None:
    assert address_of(str(Address(host, port))) == Address(host, port)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("gateway", "host:port"),
        ("gateway:", "a port"),
        ("gateway:x", "a port"),
        ("gateway:0", "a port"),
        ("gateway:65536", "a port"),
        ("gateway:\u0663", "a port"),  # a digit, but none of ASCII's
        (":7000", "a host name"),
        ("a b:7000", "a host name"),
        ("a..b:7000", "a host name"),
        (f"{'a' * 64}:7000", "a host name"),  # names are looked up label by label
        ("user@gateway:7000", "a host name"),
        ("http://gateway:7000", "brackets"),
        ("::1:7000", "in brackets"),
        ("[::1:7000", "in brackets"),
        ("[gateway]:7000", "between the brackets"),
    ],
)
def test_a_wrong_address_is_refused_with_the_expected_form(text: str, expected: str) -> None:
    with pytest.raises(ValueError, match=expected):
        address_of(text)


@given(st.text(max_size=60))
def test_any_text_is_parsed_or_refused(text: str) -> None:
    try:
        address = address_of(text)
    except ValueError:
        return
    address.host.encode("idna")  # as a socket does; raises for names that cannot be looked up
    assert address_of(str(address)) == address


@pytest.mark.parametrize(
    ("bound", "host"),
    [("0.0.0.0", "127.0.0.1"), ("::", "::1"), ("10.0.0.5", "10.0.0.5"), ("gateway-0", "gateway-0")],
)
def test_an_unspecified_address_is_reached_by_loopback(bound: str, host: str) -> None:
    assert reachable_host(bound) == host
