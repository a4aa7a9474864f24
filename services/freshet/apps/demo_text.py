"""Texts of `freshet demo`: figures of the simulator and of serving as lines, without I/O."""

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

DRIFT_AT, DRIFT_EVERY = "150s", "5m"
"""Defaults of `freshet simulate` and `freshet demo`: the first drift of the readers' tastes, and the interval
of later ones."""


def seconds_of(option: str, text: str) -> float:
    """Parse a duration of the command line, in seconds. Raises ConfigError that names the option."""
    from freshet.config.options import Duration, Wrong
    from freshet.errors import ConfigError

    form = Duration(1_000, 365 * 86_400_000)
    try:
        return float(form.read(text) or 0) / 1_000
    except Wrong as wrong:
        raise ConfigError(option, "", text, wrong.expected, wrong.hint) from None


DEMO_FOLDER = "freshet-demo"
"""Default folder of the demo, in the working directory."""

RECENT_WINDOWS = 6
"""Windows (of 5 s) that a line covers: in half a minute random slates have about a hundred clicks even at a
low rate."""


@dataclass(frozen=True, slots=True)
class ClickRates:
    """Clicks per item shown, 0 to 1; None where nothing was shown."""

    model: float | None
    random: float | None
    best: float | None  # the best possible order of the requests that the model ranked

    def as_json(self) -> dict[str, float | None]:
        """Return the object for `--json`."""
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
    """Return the rates over the last windows of a simulator's `/status`; None before the first has closed."""
    recent = windows[-last:]
    if not recent:
        return None

    def rate(policy: str) -> float | None:
        shown = sum(window[policy]["impressions"] for window in recent)
        return sum(window[policy]["clicks"] for window in recent) / shown if shown else None

    return ClickRates(rate("model"), rate("random"), rate("best"))


def progress_line(seconds: float, simulator: Mapping[str, Any], inference: Mapping[str, Any]) -> str:
    """Return click rates, freshness and event rate in one line."""
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


def drift_lines(seconds: float, drifts: Sequence[Mapping[str, Any]], reported: int) -> Iterator[str]:
    """Yield a line for each drift after the first `reported` ones."""
    for drift in drifts[reported:]:
        yield f"{span_of(seconds):>6}  DRIFT: {drift['what']}; watch the model fall back and learn again"


def farewell(folder: str, seconds: float, simulator: Mapping[str, Any] | None) -> Iterator[str]:
    """Yield the summary at the end, and the commands to continue."""
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
    """Format as `1:05`, minutes and seconds; as `1:02:05` from an hour on."""
    whole = int(seconds)
    minutes = f"{whole // 60 % 60}:{whole % 60:02d}"
    return minutes if whole < 3600 else f"{whole // 3600}:{whole // 60 % 60:02d}:{whole % 60:02d}"


def _percent(rate: float | None) -> str:
    return "-" if rate is None else f"{100 * rate:.1f} %"
