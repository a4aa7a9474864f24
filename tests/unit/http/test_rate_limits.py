"""Token buckets: rates, overdrawn buckets, and the number of remembered clients."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from freshet.http.addresses import client_key, forwarded_address
from freshet.http.authenticator import MAX_CLIENTS, Authenticator, RateLimiter, RateLimits
from freshet.http.messages import HttpError
from freshet.http.tokens import TokenEntry, digest_of
from freshet.testing.clock import SettableClock


def test_a_second_s_worth_at_once_and_then_by_the_rate() -> None:
    limiter = RateLimiter()

    assert [limiter.take_request("a", 4, 0.0) for _ in range(5)] == [0, 0, 0, 0, 0.25]
    assert limiter.take_request("b", 4, 0.0) == 0
    assert limiter.take_request("a", 4, 0.25) == 0
    assert limiter.take_request("a", 4, 0.25) == 0.25
    assert [limiter.take_request("a", 4, 100.0) for _ in range(5)] == [0, 0, 0, 0, 0.25]


def test_a_rate_below_one_lets_one_come_now_and_then() -> None:
    limiter = RateLimiter()

    assert [limiter.take_request("a", 0.1, 0.0), limiter.take_request("a", 0.1, 0.0)] == [0, 10]
    assert limiter.take_request("a", 0.1, 10.0) == 0


def test_an_overdrawn_bucket_refills_before_it_grants() -> None:
    limiter = RateLimiter()
    limiter.charge_events("a", 100, 0.0, 350)

    assert limiter.events_wait_s("a", 100, 0.0) == 2.5
    assert limiter.events_wait_s("a", 100, 2.5) == 0
    assert limiter.events_wait_s("b", 100, 0.0) == 0


@given(st.lists(st.tuples(st.floats(0, 0.5), st.sampled_from("ab")), max_size=200), st.floats(0.5, 50))
def test_no_client_exceeds_burst_and_rate(steps: list[tuple[float, str]], rate: float) -> None:
    limiter, now, given_ = RateLimiter(), 0.0, {"a": 0, "b": 0}
    for pause, key in steps:
        now += pause
        wait_s = limiter.take_request(key, rate, now)
        given_[key] += wait_s == 0
        assert wait_s <= 1 / rate
    assert max(given_.values()) <= max(1, rate) + rate * now + 1e-6


def test_a_new_client_replaces_the_longest_idle_one() -> None:
    limiter = RateLimiter(max_clients=100)
    for i in range(1000):
        limiter.take_request("busy", 1000, i / 1000)
        limiter.take_request(f"address {i}", 1, i / 1000)

    assert len(limiter) == 100
    assert limiter.take_request("address 999", 1, 1.0) > 0
    assert limiter.take_request("address 0", 1, 1.0) == 0


def address(i: int) -> str:
    return f"10.0.{i // 256}.{i % 256}"


def test_a_client_with_both_limits_counts_once() -> None:
    authenticator = Authenticator(None, SettableClock(), limits=RateLimits(requests_per_s=1, events_per_s=10))
    for i in range(MAX_CLIENTS):
        authenticator.charge_events(authenticator.authenticate("send", None, address(i)).allowance, 1_000)

    assert authenticator.figures()["clients"] == MAX_CLIENTS
    assert outcomes(authenticator, 1, None, address(0)) == [429], "it is still known, and what it owes, too"


def test_requests_and_events_have_their_own_limits() -> None:
    limiter = RateLimiter()
    limiter.charge_events("a", 100, 0.0, 350)

    assert limiter.take_request("a", 1, 0.0) == 0
    assert limiter.take_request("a", 1, 0.0) == 1
    assert limiter.events_wait_s("a", 100, 0.0) == 2.5


def test_an_overdrawn_client_that_keeps_asking_is_not_replaced() -> None:
    clock = SettableClock()
    authenticator = Authenticator(None, clock, limits=RateLimits(events_per_s=1))
    authenticator.charge_events(authenticator.authenticate("send", None, "192.0.2.1").allowance, 1_000)
    for i in range(MAX_CLIENTS + 1):
        assert outcomes(authenticator, 1, None, "192.0.2.1") == [429]
        authenticator.charge_events(authenticator.authenticate("send", None, address(i)).allowance, 1)


def test_a_limited_client_that_keeps_asking_is_not_replaced() -> None:
    limiter = RateLimiter(max_clients=10)
    assert limiter.take_request("busy", 0.001, 0.0) == 0
    for i in range(100):
        assert limiter.take_request("busy", 0.001, 0.0) > 0
        assert limiter.take_request(f"address {i}", 1, 0.0) == 0


def test_all_addresses_of_an_ipv6_network_are_one_client() -> None:
    assert client_key("2001:db8:1:2:3::4") == client_key("2001:db8:1:2::ffff") == "2001:db8:1:2::"
    assert client_key("2001:db8:1:3::1") != client_key("2001:db8:1:2::1")
    assert client_key("::ffff:192.0.2.7") == client_key("192.0.2.7") == "192.0.2.7"
    assert client_key("fe80::1%eth0") == "fe80::"


@pytest.mark.parametrize(
    ("forwarded", "proxies", "address"),
    [
        (None, 1, "10.0.0.1"),
        (b"203.0.113.9", 0, "10.0.0.1"),
        (b"203.0.113.9", 1, "203.0.113.9"),
        (b"6.6.6.6, 203.0.113.9", 1, "203.0.113.9"),
        (b"6.6.6.6, 203.0.113.9, 10.0.0.2", 2, "203.0.113.9"),
        (b"203.0.113.9", 2, "10.0.0.1"),
        (b"6.6.6.6, nonsense", 1, "10.0.0.1"),
        (b"[2001:db8::1]", 1, "2001:db8::1"),
        (b"2001:db8::1", 1, "2001:db8::1"),
        (b"203.0.113.9:51234", 1, "203.0.113.9"),
        (b"6.6.6.6:1, [2001:db8::1]:443", 1, "2001:db8::1"),
        (b"203.0.113.9:port", 1, "10.0.0.1"),
        (b"203.0.113.9:123456", 1, "10.0.0.1"),
        (b"[2001:db8::1", 1, "10.0.0.1"),
    ],
)
def test_only_trusted_proxies_set_the_address(forwarded: bytes | None, proxies: int, address: str) -> None:
    assert forwarded_address("10.0.0.1", forwarded, proxies) == address


@given(st.binary(max_size=100), st.integers(0, 3))
def test_no_bytes_of_the_header_break_it(forwarded: bytes, proxies: int) -> None:
    assert client_key(forwarded_address("10.0.0.1", forwarded, proxies))


def outcomes(
    authenticator: Authenticator, n: int, header: bytes | None, peer: str = "192.0.2.1"
) -> list[int]:
    found = []
    for _ in range(n):
        try:
            authenticator.authenticate("send", header, peer)
        except HttpError as error:
            found.append(error.status)
        else:
            found.append(202)
    return found


def entry(name: str, **more: float) -> TokenEntry:
    return TokenEntry(name, frozenset({"send"}), digest_of(name.encode()), None, **more)


def test_each_token_has_its_own_limit_at_all_addresses() -> None:
    authenticator = Authenticator(
        None,
        SettableClock(),
        more=[entry("a"), entry("b", requests_per_s=3.0), entry("c", requests_per_s=0.0)],
        limits=RateLimits(requests_per_s=2),
    )

    assert outcomes(authenticator, 1, b"Bearer a", "192.0.2.1") == [202]
    assert outcomes(authenticator, 2, b"Bearer a", "192.0.2.2") == [202, 429]
    assert outcomes(authenticator, 4, b"Bearer b") == [202, 202, 202, 429]
    assert outcomes(authenticator, 9, b"Bearer c") == [202] * 9
    assert authenticator.figures()["refused"] == {("too_often", "a"): 1, ("too_often", "b"): 1}


def test_tokens_of_one_name_have_their_own_limits() -> None:
    old = TokenEntry("shop", frozenset({"send"}), digest_of(b"old"), None, 2.0, 100.0)
    new = TokenEntry("shop", frozenset({"send"}), digest_of(b"new"), None, 4.0, 1000.0)
    clock = SettableClock()
    authenticator = Authenticator(None, clock, more=[old, new])

    assert outcomes(authenticator, 3, b"Bearer old") == [202, 202, 429]
    assert outcomes(authenticator, 5, b"Bearer new") == [202, 202, 202, 202, 429]
    clock.advance(1)
    allowance = authenticator.authenticate("send", b"Bearer old", "").allowance
    authenticator.authenticate("send", b"Bearer new", "")
    authenticator.charge_events(
        allowance, 150
    )  # by the rate of its own token, whichever of the name came last
    clock.advance(0.4)
    assert outcomes(authenticator, 1, b"Bearer old") == [429]
    assert outcomes(authenticator, 1, b"Bearer new") == [202]


def test_addresses_are_limited_without_tokens() -> None:
    clock = SettableClock()
    authenticator = Authenticator(None, clock, limits=RateLimits(requests_per_s=1))

    assert outcomes(authenticator, 2, None) == [202, 429]
    assert outcomes(authenticator, 1, None, "192.0.2.2") == [202]
    clock.advance(1)
    assert outcomes(authenticator, 2, None) == [202, 429]
