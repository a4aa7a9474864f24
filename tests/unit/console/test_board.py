"""Event streams: framing, resuming after a gap, resets, and the cost of a page that sleeps."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Callable, Coroutine
from typing import Any

import orjson
import pytest
from hypothesis import given
from hypothesis import strategies as st

from freshet.console.board import KEPT, Board, event


def events_of(piece: bytes) -> list[dict[str, str]]:
    """Events as a browser reads them: fields by line, an empty line ends each."""
    found = []
    for block in piece.decode().split("\n\n"):
        fields = dict(line.split(": ", 1) for line in block.split("\n") if line and not line.startswith(":"))
        if fields:
            found.append(fields)
    return found


def seen(
    board: Board, start: int | None, pieces: int, then: Callable[[], None] = lambda: None
) -> list[dict[str, str]]:
    """Events of the first pieces of a stream; `then` is called after the first."""

    async def main() -> list[dict[str, str]]:
        stream = board.stream(start)
        found: list[dict[str, str]] = []
        try:
            for number in range(pieces):
                found += events_of(await asyncio.wait_for(anext(stream), 5))
                if number == 0:
                    then()
        finally:
            await stream.aclose()
        return found

    return asyncio.run(main())


def offsets(found: list[dict[str, str]]) -> list[int]:
    return [int(e["id"]) for e in found if e.get("event") == "record"]


def kinds(found: list[dict[str, str]]) -> list[str]:
    return [e["event"] for e in found if "event" in e]


def filled(records: int, *, shown: bool = True) -> Board:
    board = Board()
    board.begin(0)
    if shown:
        board.show({"health": "good"})
    for offset in range(records):
        board.publish_record(offset, {"kind": "vitals", "n": offset})
        board.advance(offset + 1)
    return board


def test_a_page_gets_the_state_at_once_and_then_new_records_only() -> None:
    board = filled(5)

    found = seen(board, None, 2, lambda: board.publish_record(5, {"kind": "vitals"}))

    assert found[0] == {"retry": "1000"}
    assert sorted(kinds(found)) == ["record", "state"]
    assert offsets(found) == [5]


def test_a_page_that_read_the_history_goes_on_where_that_ended() -> None:
    assert offsets(seen(filled(10), 7, 2)) == [7, 8, 9]


def test_a_page_at_the_end_misses_nothing() -> None:
    board = filled(10)

    found = seen(board, 10, 2, lambda: board.publish_record(10, {}))

    assert "reset" not in kinds(found)
    assert offsets(found) == [10]


@pytest.mark.parametrize("start", [2, 3])
def test_an_event_of_a_version_in_a_gap_comes_after_it(start: int) -> None:
    board = filled(2)
    board.publish_version({"number": 7})
    board.publish_record(2, {"kind": "vitals"})
    board.advance(3)

    found = seen(board, start, 2)

    told = kinds(found)[:-1]
    assert told == (["version", "record"] if start == 2 else []), "between the records where it came"


def test_an_event_of_a_version_after_the_newest_record_is_sent() -> None:
    board = filled(2)
    board.publish_version({"number": 7})

    assert kinds(seen(board, 2, 2)) == ["version", "state"]


def test_records_that_are_not_published_leave_no_gap() -> None:
    board = Board()
    board.begin(0)
    board.publish_record(3, {})
    board.advance(9)

    assert kinds(seen(board, 0, 2)) == ["record"]
    assert "reset" not in kinds(seen(board, 9, 2, lambda: board.show({})))


def test_missed_records_are_a_reset_with_the_next_offset() -> None:
    board = filled(KEPT + 100)

    found = seen(board, 50, 2)

    assert kinds(found) == ["reset"]
    assert orjson.loads(found[1]["data"]) == {"next": KEPT + 100}


def test_an_offset_beyond_the_end_is_of_another_log() -> None:
    assert kinds(seen(filled(3), 70, 2)) == ["reset"]


def test_a_log_that_begins_anew_resets_the_pages_that_are_open() -> None:
    board = filled(3)

    def anew() -> None:
        board.begin(0)
        board.publish_record(0, {"kind": "vitals", "life": 2})

    found = seen(board, None, 2, anew)

    assert kinds(found) == ["reset", "state"]


def test_a_page_that_sleeps_gets_only_the_newest_state() -> None:
    board = filled(0)

    def meanwhile() -> None:
        for n in range(1_000):
            board.show({"n": n})

    found = seen(board, None, 2, meanwhile)

    assert [orjson.loads(e["data"]) for e in found if e.get("event") == "state"] == [{"n": 999}]


def test_a_page_that_slept_too_long_is_reset() -> None:
    board = filled(10)

    def meanwhile() -> None:
        for offset in range(10, 10 + 2 * KEPT):
            board.publish_record(offset, {})

    assert kinds(seen(board, 5, 2, meanwhile)) == ["reset", "state"]


def test_a_closed_stream_leaves_nothing_behind() -> None:
    board = filled(3)
    seen(board, None, 2)

    assert board.streams == 0
    board.show({})  # without a stream to wake


@pytest.mark.parametrize("turns", range(8))
def test_a_stream_cancelled_at_a_wake_ends(turns: int) -> None:
    """Its reader is cancelled some turns of the loop after the wake."""
    board = filled(0)

    async def read() -> None:
        async for _ in board.stream(None):
            pass

    async def is_gone() -> bool:
        page = asyncio.create_task(read())
        for _ in range(20):  # then it waits
            await asyncio.sleep(0)
        board.show({"health": "down"})
        for _ in range(turns):
            await asyncio.sleep(0)
        page.cancel()
        return bool((await asyncio.wait([page], timeout=2))[0])

    assert asyncio.run(is_gone())


def test_many_records_come_in_pieces_of_bounded_size() -> None:
    board = filled(1_200, shown=False)

    async def sizes(stream: AsyncGenerator[bytes]) -> list[int]:
        counts = [len(events_of(await anext(stream))) for _ in range(4)]
        await stream.aclose()
        return counts

    work: Coroutine[Any, Any, list[int]] = sizes(board.stream(0))
    assert asyncio.run(work) == [1, 500, 500, 200]


@given(st.text(), st.integers(0, 2**53))
def test_any_text_is_one_event(text: str, offset: int) -> None:
    found = events_of(event("record", orjson.dumps({"text": text}), offset))

    assert len(found) == 1
    assert (found[0]["id"], found[0]["event"]) == (str(offset), "record")
    assert orjson.loads(found[0]["data"]) == {"text": text}
