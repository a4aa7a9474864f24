"""The measures of quality, from their descriptors."""

from __future__ import annotations

from freshet.evaluation import MEASURES, SOURCES
from ops.reference.markdown import code, escaped, grid, header

INTRO = """\
Every measure is progressive: a sample is predicted first and learned from afterwards, so none of them is
flattered. They stand in `<model>.measures` by window of event time (`train.measure_window`), label and
segment, in each version's manifest, in `freshet status`, in the metric `freshet_trainer_quality`, and in
the console. Sums are weighted by the samples' weights, but `n`. A measure that is not defined (no true
sample yet) is null.

## Measures
"""

OF = """
## Whose predictions are measured

The same measures exist several times, by where the predictions come from: `of` in windows and metrics.
"""

AFTER = """
With `emit = "early"` true samples come before false ones, so `training` is flattered by the order in
which samples arrive; judge by `served` and `random`, or by a backtest. The gate decides which version may
serve, by `serve.gate` of the [spec](feature-spec.md#serve), on the newest samples, predicted anew."""

BETTER = {"higher": "higher", "lower": "lower", "one": "near 1", "none": ""}
LABELS = {"logloss": "true or false", "number": "numbers", "any": "all"}


def page() -> str:
    """The whole page."""
    rows = [(code(m.name), m.unit, escaped(m.doc), BETTER[m.better], LABELS[m.of]) for m in MEASURES]
    sources = [(code(s.name), escaped(s.doc)) for s in SOURCES]
    lines = [
        header("Measures", "services/freshet/evaluation/descriptors.py"),
        INTRO,
        *grid(rows, ("measure", "unit", "is", "better", "labels")),
        OF,
        *grid(sources, ("of", "predictions")),
        AFTER,
    ]
    return "\n".join(lines) + "\n"
