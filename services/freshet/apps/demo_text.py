"""What `freshet demo` says of how it goes: figures of the simulator and of serving as lines; no I/O."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

__all__ = [
    "DEMO_FOLDER",
    "DRIFT_AT",
    "DRIFT_EVERY",
    "ClickRates",
    "click_rates",
    "drift_lines",
    "farewell",
    "progress_line",
    "seconds_of",
    "span_of",
]

# --- When the demo's world drifts: defaults and durations of `freshet simulate` and `freshet demo`.


DRIFT_AT, DRIFT_EVERY = "150s", "5m"


def seconds_of(option: str, text: str) -> float:
    """A duration of the command line. Raises ConfigError, naming the option."""
    from freshet.config.options import Duration, Wrong
    from freshet.errors import ConfigError

    form = Duration(1_000, 365 * 86_400_000)
    try:
        return float(form.read(text) or 0) / 1_000
    except Wrong as wrong:
        raise ConfigError(option, "", text, wrong.expected, wrong.hint) from None


DEMO_FOLDER = "freshet-demo"
"""Where the demo runs if no other folder is named, below the one that one stands in."""

RECENT_WINDOWS = 6
"""Windows (of 5 s) that a line looks at: half a minute, in which random slates have some hundred clicks even
at a low rate."""


@dataclass(frozen=True, slots=True)
class ClickRates:
    """Clicks an item shown, 0 to 1; None where nothing was shown."""

    model: float | None
    random: float | None
    best: float | None  # of the best order of the requests that the model ranked

    def as_json(self) -> dict[str, float | None]:
        """For `--json`."""
        return {"model": self.model, "random": self.random, "best": self.best}

    def __str__(self) -> str:
        parts = [f"model {_percent(self.model)}", f"random {_percent(self.random)}"]
        if self.model is not None and self.random:
            parts[1] += f" ({self.model / self.random:.1f}x)"
        parts.append(f"best possible {_percent(self.best)}")
        if self.model is not None and self.best:
            parts[2] += f" ({100 * self.model / self.best:.0f} %)"
        return ", ".join(parts)


def click_rates(windows: Sequence[Mapping[str, Any]], last: int = RECENT_WINDOWS) -> ClickRates | None:
    """Of the last windows of a simulator's `/status`; None if none has closed yet."""
    recent = windows[-last:]
    if not recent:
        return None

    def rate(who: str) -> float | None:
        shown = sum(window[who]["impressions"] for window in recent)
        return sum(window[who]["clicks"] for window in recent) / shown if shown else None

    return ClickRates(rate("model"), rate("random"), rate("best"))


def progress_line(seconds: float, simulator: Mapping[str, Any], inference: Mapping[str, Any]) -> str:
    """How it goes, in one line."""
    rates = click_rates(simulator.get("windows", ()))
    clicks = (
        f"clicks: {rates}" if rates is not None else "clicks: known once they have had their time to come"
    )
    parts = [clicks]
    if (fresh := inference.get("freshness_ms")) is not None:
        parts.append(f"fresh to {fresh / 1000:.1f} s")
    if (rate := simulator.get("measured_rate")) is not None:
        parts.append(f"{rate:,.0f} events/s")
    return f"{span_of(seconds):>6}  " + "; ".join(parts)


def drift_lines(seconds: float, drifts: Sequence[Mapping[str, Any]], told: int) -> Iterator[str]:
    """A line for each drift after the first `told` ones."""
    for drift in drifts[told:]:
        yield f"{span_of(seconds):>6}  DRIFT: {drift['what']}; watch the model fall back and learn again"


def farewell(folder: str, seconds: float, simulator: Mapping[str, Any] | None) -> Iterator[str]:
    """The summary at the end, and how to go on."""
    yield f"stopped after {span_of(seconds)}"
    if simulator and "events" in simulator:
        yield (
            f"  sent {simulator['events']:,} events: {simulator['impressions']:,} items shown, "
            f"{simulator['clicks']:,} clicks, {simulator['purchases']:,} purchases"
        )
        rates = click_rates(simulator["windows"])
        if rates is not None:
            yield f"  clicks of items shown, the last half minute: {rates}"
    yield f"everything is kept in {folder}"
    yield f"  freshet status --folder {folder}    what it has learned"
    yield f"  freshet demo {folder}               goes on where it was"
    yield f"  rm -r {folder}                      starts over"
    yield "your own events: freshet init --schema impressions.avsc --schema actions.avsc   writes a spec"


def span_of(seconds: float) -> str:
    """`1:05`, minutes and seconds; `1:02:05` from an hour on."""
    whole = int(seconds)
    minutes = f"{whole // 60 % 60}:{whole % 60:02d}"
    return minutes if whole < 3600 else f"{whole // 3600}:{whole // 60 % 60:02d}:{whole % 60:02d}"


def _percent(rate: float | None) -> str:
    return "-" if rate is None else f"{100 * rate:.1f} %"
