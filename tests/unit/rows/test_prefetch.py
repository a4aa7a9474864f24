"""Prefetch: the next item is computed while one is used."""

import threading
from collections.abc import Iterator

import pytest

from freshet.rows.redis.pages import ahead

DEADLINE_S = 60.0


def test_items_keep_their_order():
    assert list(ahead(range(100))) == list(range(100))
    assert list(ahead([])) == []


def test_the_next_item_is_computed_during_use():
    made = threading.Event()

    def steps() -> Iterator[int]:
        yield 1
        made.set()
        yield 2

    coming = ahead(steps())
    assert next(coming) == 1
    assert made.wait(DEADLINE_S)
    assert list(coming) == [2]


def test_an_error_is_raised_in_place_of_its_item():
    def steps() -> Iterator[int]:
        yield 1
        raise OSError("gone")

    coming = ahead(steps())
    assert next(coming) == 1
    with pytest.raises(OSError, match="gone"):
        next(coming)


def test_an_early_close_computes_at_most_one_more_item():
    made, before = [], set(threading.enumerate())

    def steps() -> Iterator[int]:
        for i in range(10):
            made.append(i)
            yield i

    coming = ahead(steps())
    next(coming)
    coming.close()  # type: ignore[attr-defined]
    assert made in ([0], [0, 1])
    assert set(threading.enumerate()) <= before
