"""When the demo's world drifts: defaults and durations of `freshet simulate` and `freshet demo`."""

from __future__ import annotations

__all__ = ["DRIFT_AT", "DRIFT_EVERY", "seconds_of"]

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
