"""The past, read back from records that others write, too: nothing that comes breaks it, or makes it grow."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import orjson
import pytest
from hypothesis import given
from hypothesis import strategies as st

from freshet.console.collector import Recorder
from freshet.console.core import Look
from freshet.console.history import History, Reliability, parsed, version_event
from freshet.console.instances import Service
from freshet.observability.skipped_state import skipped
from freshet.testing.clock import SettableClock
from freshet.types import Append

DAY, HOUR = 86_400_000, 3_600_000
NOW = 1_800_000_000_000


def add(history: History, *records: dict[str, Any]) -> list[dict[str, Any] | None]:
    return [history.add(history.next, orjson.dumps({"v": 1, **record}), NOW) for record in records]


def window(stop_ms: int, of: str = "served", **more: Any) -> dict[str, Any]:
    return {
        "kind": "window",
        "of": of,
        "start_ms": stop_ms - 5_000,
        "stop_ms": stop_ms,
        "label": "click",
        "segment": None,
        "value": None,
        "measures": {"n": 10.0, "auc": None},
        **more,
    }


def clicks(stop_ms: int) -> dict[str, Any]:
    counts = {"impressions": 10, "clicks": 2}
    slates = {"model": counts, "random": counts, "best": counts}
    return {"kind": "clicks", "start_ms": stop_ms - 5_000, "stop_ms": stop_ms, **slates}


def test_records_come_back_with_their_offsets() -> None:
    history = History(DAY)
    add(
        history,
        {"kind": "vitals", "time_ms": NOW, "version": 3},
        window(NOW),
        clicks(NOW),
        {"kind": "drift", "time_ms": NOW, "what": "tastes turn"},
    )

    found = history.to_json(HOUR, NOW)

    assert (found["next"], found["now_ms"]) == (4, NOW)
    assert [v["offset"] for v in found["vitals"]] == [0]
    assert [(w["offset"], w["measures"]["n"]) for w in found["windows"]] == [(1, 10.0)]
    assert found["clicks"][0]["model"] == {"impressions": 10, "clicks": 2}
    assert found["drifts"][0]["what"] == "tastes turn"
    assert history.clicks_until_ms(NOW) == NOW


class Kept:
    """A writer that adds what it is given to a history."""

    def __init__(self, history: History, clock: SettableClock) -> None:
        self.history, self.clock = history, clock

    def append(self, appends: list[Append]) -> None:
        for value in appends[0].values:
            self.history.add(self.history.next, value, self.clock.now_ms())


def test_clicks_are_recorded_once_after_a_clock_ran_ahead() -> None:
    clock, history = SettableClock(NOW), History(DAY)
    spec: Any = SimpleNamespace(tables={})
    writer: Any = Kept(history, clock)
    recorder = Recorder(spec, writer, "m", 1_000, clock)
    windows: list[dict[str, Any]] = []
    for ahead in (0, DAY, -DAY, 0):
        clock.jump(clock.now_ms() + ahead)
        clock.advance(5)
        windows.append(clicks(clock.now_ms()))
        figures = {"windows": windows}
        simulator = Service("simulator", "simulator", "ready", "", None, 1, figures=figures)
        look = Look({"simulator": simulator}, {}, {}, True)
        for _ in range(2):
            recorder.write(look, [], history, None)
            clock.advance(2)

    shown = history.to_json(HOUR, NOW)["clicks"]
    ends = [w["stop_ms"] - NOW for w in shown]
    assert ends == [5_000, 23_000, 32_000, DAY + 14_000]
    assert [w["model"]["clicks"] for w in shown] == [2] * 4


def test_pages_get_windows_without_segments_and_reliability() -> None:
    history = History(DAY)

    whole, part = add(history, window(NOW, reliability=[[5, 0.5, 0.4]]), window(NOW, segment="hour", value=3))

    assert whole is not None
    assert "reliability" not in whole
    assert part is None
    assert history.next == 2
    assert len(history.to_json(HOUR, NOW)["windows"]) == 1


def test_only_the_requested_span_is_returned() -> None:
    history = History(DAY)
    add(
        history,
        *[window(NOW - HOUR * i) for i in reversed(range(10))],
        {"kind": "drift", "time_ms": NOW - DAY},
    )

    assert len(history.to_json(HOUR // 2, NOW)["windows"]) == 1
    assert len(history.to_json(DAY, NOW)["windows"]) == 10
    assert history.to_json(HOUR, NOW)["drifts"] == []


def test_a_drift_that_was_written_twice_is_one() -> None:
    history = History(DAY)
    add(
        history,
        {"kind": "drift", "time_ms": NOW, "what": "a"},
        {"kind": "drift", "time_ms": NOW, "what": "a"},
    )

    assert len(history.drifts) == 1


@pytest.mark.parametrize(
    "value",
    [
        b"",
        b"{",
        b"[]",
        b"null",
        b'{"v": 2, "kind": "window"}',
        b'{"v": 1}',
        b'{"v": 1, "kind": "later"}',
        b'{"v": 1, "kind": "vitals", "time_ms": "now"}',
        b'{"v": 1, "kind": "vitals", "time_ms": -1}',
        b'{"v": 1, "kind": "clicks", "start_ms": 0, "stop_ms": 5, "model": {"clicks": "x"}}',
        b'{"v": 1, "kind": "window", "of": 3, "stop_ms": 5}',
    ],
)
def test_malformed_records_are_left_out(value: bytes) -> None:
    history = History(DAY)

    assert history.add(41, value, NOW) is None
    assert history.next == 42


json = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**62), 2**62) | st.floats() | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=8), inner, max_size=4),
    max_leaves=12,
)
KEYS = (
    *("of", "label", "segment", "value", "start_ms", "stop_ms", "time_ms", "measures", "reliability"),
    *("model", "random", "best", "what", "number", "verdict", "alias", "by", "reason", "pinned"),
)
KINDS = ("window", "vitals", "clicks", "drift", "verdict", "alias", "version")


@given(
    st.lists(
        st.binary(max_size=30)
        | st.builds(
            lambda kind, rest: orjson.dumps({"v": 1, **rest, "kind": kind}),
            st.sampled_from(KINDS),
            st.dictionaries(st.sampled_from(KEYS), json, max_size=len(KEYS)),
        ),
        max_size=20,
    )
)
def test_no_bytes_break_the_history(values: list[bytes]) -> None:
    history = History(DAY)
    for offset, value in enumerate(values):
        history.add(offset, value, NOW)
        record = parsed(value)
        event = version_event(record) if record is not None else None
        if event is not None:
            history.add_version(event)

    told = orjson.dumps(history.to_json(DAY, NOW))
    orjson.dumps([history.reliability.to_json(), history.segments.changes()])

    assert orjson.loads(told)["next"] == len(values)


def test_events_of_versions_are_returned() -> None:
    base = {"v": 1, "time_ms": NOW, "number": 4}

    gate = {"kind": "alias", "alias": "stable", "by": "trainer"}
    promoted = version_event({**base, **gate, "reason": "better"})
    held = version_event({**base, "kind": "verdict", "verdict": "held", "reason": "worse"})
    moved = version_event({**base, "kind": "alias", "alias": "stable", "by": "console", "pinned": True})

    assert promoted == {"time_ms": NOW, "number": 4, "what": "promoted", "reason": "better", "by": "gate"}
    assert held == {"time_ms": NOW, "number": 4, "what": "held", "reason": "worse", "by": "gate"}
    assert moved is not None
    assert (moved["what"], moved["by"]) == ("moved", "console")
    assert "promotes nothing" in moved["reason"]
    assert version_event({**base, "kind": "alias", "alias": "candidate", "by": "trainer"}) is None
    assert version_event({**base, "kind": "version"}) is None


def test_a_reliability_curve_sums_windows_of_random_slates() -> None:
    curves = Reliability()
    curves.add("served", "click", [[100, 0.5, 0.9]])
    for _ in range(2):
        curves.add("random", "click", [[10, 0.1, 0.2], [30, 0.5, 0.4]])

    (low, high) = curves.to_json()["click"]

    assert low == pytest.approx([20, 0.1, 0.2])
    assert high == pytest.approx([60, 0.5, 0.4])


def test_a_reliability_curve_forgets_old_windows() -> None:
    curves = Reliability()
    for _ in range(1_000):
        curves.add("served", "click", [[1, 0.5, 0.5]])

    assert curves.to_json()["click"][0][0] == 12


@pytest.mark.parametrize("value", [b"garbage", b"null", b'{"v":9,"kind":"window"}', b'{"v":1}'])
def test_records_that_a_console_cannot_read_are_counted(value: bytes) -> None:
    assert parsed(value) is None
    assert parsed(b"") is None

    assert skipped()["console"] == 1
