"""Token buckets: how often a client may come, what it owes, and how many are remembered."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from freshet.http.authenticator import Guard, Limits
from freshet.http.rate_limits import Buckets, address_key, forwarded_address
from freshet.http.responses import HttpError
from freshet.http.tokens import TokenEntry, digest_of
from freshet.testing.clock import SettableClock


def test_a_second_s_worth_at_once_and_then_by_the_rate() -> None:
    buckets = Buckets()

    assert [buckets.take("a", 4, 0.0) for _ in range(5)] == [0, 0, 0, 0, 0.25]
    assert buckets.take("b", 4, 0.0) == 0
    assert buckets.take("a", 4, 0.25) == 0
    assert buckets.take("a", 4, 0.25) == 0.25
    assert [buckets.take("a", 4, 100.0) for _ in range(5)] == [0, 0, 0, 0, 0.25]


def test_a_rate_below_one_lets_one_come_now_and_then() -> None:
    buckets = Buckets()

    assert [buckets.take("a", 0.1, 0.0), buckets.take("a", 0.1, 0.0)] == [0, 10]
    assert buckets.take("a", 0.1, 10.0) == 0


def test_what_was_taken_on_credit_is_earned_before_more_is_given() -> None:
    buckets = Buckets()
    buckets.pay("a", 100, 0.0, 350)

    assert buckets.debt_s("a", 100, 0.0) == 2.5
    assert buckets.debt_s("a", 100, 2.5) == 0
    assert buckets.debt_s("b", 100, 0.0) == 0


@given(st.lists(st.tuples(st.floats(0, 0.5), st.sampled_from("ab")), max_size=200), st.floats(0.5, 50))
def test_nobody_gets_more_than_the_burst_and_the_rate(steps: list[tuple[float, str]], rate: float) -> None:
    buckets, now, given_ = Buckets(), 0.0, {"a": 0, "b": 0}
    for pause, key in steps:
        now += pause
        wait_s = buckets.take(key, rate, now)
        given_[key] += wait_s == 0
        assert wait_s <= 1 / rate
    assert max(given_.values()) <= max(1, rate) + rate * now + 1e-6


def test_only_so_many_are_remembered_and_the_quietest_is_forgotten() -> None:
    buckets = Buckets(most=100)
    for i in range(1000):
        buckets.take("busy", 1000, i / 1000)
        buckets.take(f"address {i}", 1, i / 1000)

    assert len(buckets) == 100
    assert buckets.take("address 999", 1, 1.0) > 0
    assert buckets.take("address 0", 1, 1.0) == 0


def test_a_client_with_both_limits_is_one_of_those_that_fit() -> None:
    guard = Guard(None, SettableClock(), limits=Limits(requests_per_s=1, events_per_s=10))
    guard._buckets = Buckets(most=100)
    for i in range(100):
        guard.pay(guard.admit("send", None, f"192.0.2.{i}").payer, 1_000)

    assert guard.figures()["clients"] == 100
    assert outcomes(guard, 1, None, "192.0.2.0") == [429], "it is still known, and what it owes, too"


def test_requests_and_events_are_held_back_each_by_its_own_limit() -> None:
    buckets = Buckets()
    buckets.pay("a", 100, 0.0, 350)

    assert buckets.take("a", 1, 0.0) == 0
    assert buckets.take("a", 1, 0.0) == 1
    assert buckets.debt_s("a", 100, 0.0) == 2.5


def test_who_is_refused_for_what_it_owes_is_not_forgotten_while_it_keeps_coming() -> None:
    clock = SettableClock()
    guard = Guard(None, clock, limits=Limits(events_per_s=1))
    guard._buckets = Buckets(most=10)
    guard.pay(guard.admit("send", None, "192.0.2.1").payer, 1_000)
    for i in range(100):
        assert outcomes(guard, 1, None, "192.0.2.1") == [429]
        guard.pay(guard.admit("send", None, f"198.51.100.{i}").payer, 1)


def test_who_is_refused_for_coming_too_often_is_not_forgotten_while_it_keeps_coming() -> None:
    buckets = Buckets(most=10)
    assert buckets.take("busy", 0.001, 0.0) == 0
    for i in range(100):
        assert buckets.take("busy", 0.001, 0.0) > 0
        assert buckets.take(f"address {i}", 1, 0.0) == 0


def test_all_addresses_of_an_ipv6_network_are_one_client() -> None:
    assert address_key("2001:db8:1:2:3::4") == address_key("2001:db8:1:2::ffff") == "2001:db8:1:2::"
    assert address_key("2001:db8:1:3::1") != address_key("2001:db8:1:2::1")
    assert address_key("::ffff:192.0.2.7") == address_key("192.0.2.7") == "192.0.2.7"
    assert address_key("fe80::1%eth0") == "fe80::"


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
    ],
)
def test_an_address_is_believed_only_of_proxies_that_are_ours(
    forwarded: bytes | None, proxies: int, address: str
) -> None:
    assert forwarded_address("10.0.0.1", forwarded, proxies) == address


@given(st.binary(max_size=100), st.integers(0, 3))
def test_no_bytes_of_the_header_break_it(forwarded: bytes, proxies: int) -> None:
    assert address_key(forwarded_address("10.0.0.1", forwarded, proxies))


def outcomes(guard: Guard, n: int, header: bytes | None, peer: str = "192.0.2.1") -> list[int]:
    found = []
    for _ in range(n):
        try:
            guard.admit("send", header, peer)
        except HttpError as error:
            found.append(error.status)
        else:
            found.append(202)
    return found


def entry(name: str, **more: float) -> TokenEntry:
    return TokenEntry(name, frozenset({"send"}), digest_of(name.encode()), None, **more)


def test_tokens_are_held_back_each_by_its_own_limit_wherever_they_come_from() -> None:
    guard = Guard(
        None,
        SettableClock(),
        more=[entry("a"), entry("b", requests_per_s=3.0), entry("c", requests_per_s=0.0)],
        limits=Limits(requests_per_s=2),
    )

    assert outcomes(guard, 1, b"Bearer a", "192.0.2.1") + outcomes(guard, 2, b"Bearer a", "192.0.2.2") == [
        202, 202, 429
    ]  # fmt: skip
    assert outcomes(guard, 4, b"Bearer b") == [202, 202, 202, 429]
    assert outcomes(guard, 9, b"Bearer c") == [202] * 9


def test_two_tokens_of_one_name_are_held_back_each_by_its_own_line() -> None:
    old = TokenEntry("shop", frozenset({"send"}), digest_of(b"old"), None, 2.0, 100.0)
    new = TokenEntry("shop", frozenset({"send"}), digest_of(b"new"), None, 4.0, 1000.0)
    clock = SettableClock()
    guard = Guard(None, clock, more=[old, new])

    assert outcomes(guard, 3, b"Bearer old") == [202, 202, 429]
    assert outcomes(guard, 5, b"Bearer new") == [202, 202, 202, 202, 429]
    clock.advance(1)
    payer = guard.admit("send", b"Bearer old", "").payer
    guard.admit("send", b"Bearer new", "")
    guard.pay(payer, 150)  # by the rate of its own token, whichever of the name came last
    clock.advance(0.4)
    assert outcomes(guard, 1, b"Bearer old") == [429]
    assert outcomes(guard, 1, b"Bearer new") == [202]


def test_addresses_are_held_back_where_no_tokens_are_asked_for() -> None:
    clock = SettableClock()
    guard = Guard(None, clock, limits=Limits(requests_per_s=1))

    assert outcomes(guard, 2, None) == [202, 429]
    assert outcomes(guard, 1, None, "192.0.2.2") == [202]
    clock.advance(1)
    assert outcomes(guard, 2, None) == [202, 429]
