from collections import Counter
from dataclasses import dataclass
from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from tests.fixtures.example_scripts import example

in_order = example("own-topics", "in_order")


@dataclass(frozen=True)
class Timed:
    partition_: int
    at_ms: int

    def topic(self) -> str:
        return "t"

    def partition(self) -> int:
        return self.partition_

    def timestamp(self) -> tuple[int, int]:
        return 1, self.at_ms


def place(partition: int) -> tuple[str, int]:
    return "t", partition


def merge(partitions: int, most: int = 2_000) -> Any:
    made = in_order.InOrder(most)
    made.assign([place(p) for p in range(partitions)])
    return made


@given(
    st.lists(st.lists(st.integers(0, 50).map(float), max_size=20).map(sorted), min_size=1, max_size=4),
    st.data(),
)
def test_messages_come_out_once_by_time_for_any_read_order(
    times: list[list[int]], data: st.DataObject
) -> None:
    waiting, out = merge(len(times)), list[Any]()
    unread = {p: [Timed(p, t) for t in held] for p, held in enumerate(times)}
    while any(unread.values()):
        p = data.draw(st.sampled_from([p for p, left in unread.items() if left]))
        count = data.draw(st.integers(1, len(unread[p])))
        waiting.take(unread[p][:count])
        unread[p] = unread[p][count:]
        waiting.ended(place(q) for q, left in unread.items() if not left)
        out += waiting.ready()
    waiting.ended(map(place, unread))
    out += waiting.ready()

    assert [m.at_ms for m in out] == sorted(m.at_ms for m in out)
    assert Counter(out) == Counter(Timed(p, t) for p, held in enumerate(times) for t in held)


def test_a_message_waits_for_partitions_without_a_known_time() -> None:
    waiting = merge(2)
    waiting.take([Timed(0, 5)])
    assert waiting.ready() == []

    waiting.ended([place(1)])
    assert waiting.ready() == [Timed(0, 5)]


def test_a_revoked_partition_drops_its_buffered_messages() -> None:
    waiting = merge(2)
    waiting.take([Timed(0, 5), Timed(1, 9)])
    waiting.ready()
    waiting.assign([place(0)])
    waiting.ended([place(0)])

    assert waiting.ready() == []


def test_a_partition_that_is_far_ahead_is_full() -> None:
    waiting = merge(2, most=2)
    waiting.take([Timed(0, 1), Timed(0, 2)])
    assert waiting.full() == {place(0)}

    waiting.ended([place(1)])
    waiting.ready()
    assert waiting.full() == set()
