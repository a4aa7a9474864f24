"""The watermark of one partition: how far event time has certainly come in all joined topics. Plain
arithmetic.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

__all__ = ["Watermark"]


class Watermark:
    """W of one partition (PROTOCOL 19): monotone, the minimum over the joined topics of each one's clock.

    - A topic's clock is the largest reading of event time from it (`judge_times` bounds readings). It never
      goes back.
    - A topic that nothing was ever read from starts at the smallest event time of the first batch of any
      topic: events of the same moments may still come there, so nothing is closed before it has spoken or
      time has passed.
    - A topic is idle between two looks at its end that both found it read to the end, with no record in
      between. Its clock then advances by the monotonic time between the looks. A look that finds unread
      records, or a record, ends the idleness; time in which nobody looked after that (a paused process, a
      slow read) counts for nothing.
    - After a restart, the wall-clock time since the commit counts as idle time for a topic that the first
      look finds read to its end, but only up to the newest clock of the others: a wall clock that is wrong,
      or another machine's, can make W wait for the next event, and never close what is to come.
    - An active topic never waits for more than that: an idle clock runs as fast as real time, so it stays
      behind the real event time by the latency that its last event had.

    There is no allowance for disorder in W; `grace` is that.
    """

    def __init__(self, topics: Sequence[str]) -> None:
        self._clocks: dict[str, int | None] = dict.fromkeys(topics)
        self._idle_from: dict[str, float | None] = dict.fromkeys(
            topics
        )  # monotonic time up to which it was credited
        self._downtime_ms: dict[str, int] = dict.fromkeys(topics, 0)
        self._value: int | None = None

    @property
    def value(self) -> int | None:
        """W in ms since the epoch; None before the first event."""
        return self._value

    @property
    def clocks(self) -> Mapping[str, int]:
        """Clock of each topic that has one."""
        return {topic: clock for topic, clock in self._clocks.items() if clock is not None}

    def resume(self, value: int | None, clocks: Mapping[str, int], downtime_ms: int) -> None:
        """Go on from what a commit says; `downtime_ms` is the wall-clock time since it was written, as far as
        two clocks that may differ, or jump, can tell."""
        self._value = value
        for topic, clock in clocks.items():
            if topic in self._clocks:
                self._clocks[topic] = clock
                self._downtime_ms[topic] = max(0, downtime_ms)

    def observe(self, topic: str, first_ms: int, last_ms: int) -> None:
        """Records were read from a topic; the smallest and the largest reading of event time among them."""
        for other, clock in self._clocks.items():
            if clock is None:
                self._clocks[other] = first_ms
        self._clocks[topic] = max(self._clocks[topic] or 0, last_ms)
        self.behind(topic)
        self._move()

    def behind(self, topic: str) -> None:
        """The topic holds records that are not read yet, or did until now: it is not idle."""
        self._idle_from[topic] = None
        self._downtime_ms[topic] = 0

    def at_end(self, topic: str, monotonic_s: float) -> None:
        """A look at the topic's end found it read to the end."""
        clock, since = self._clocks[topic], self._idle_from[topic]
        if clock is None:
            return
        idle_ms = 0 if since is None else int((monotonic_s - since) * 1000)
        behind_ms = max(0, max(self.clocks.values()) - clock - idle_ms)
        down_ms = min(self._downtime_ms[topic], behind_ms)
        self._clocks[topic] = clock + idle_ms + down_ms
        self._downtime_ms[topic] -= down_ms
        # Whole milliseconds were credited; what is left of one is not lost.
        self._idle_from[topic] = monotonic_s if since is None else since + idle_ms / 1000
        self._move()

    def close(self, horizon_ms: int) -> None:
        """No more events will come: move past everything that could still be open."""
        latest = max(self.clocks.values(), default=None)
        if latest is not None:
            self._value = max(self._value or 0, latest + horizon_ms)

    def _move(self) -> None:
        known = [clock for clock in self._clocks.values() if clock is not None]
        if len(known) == len(self._clocks):
            self._value = min(known) if self._value is None else max(self._value, min(known))
