"""A backtest that plots: AUC and normalised entropy by window, and how well predictions are calibrated.

    marimo edit examples/notebook/backtest.py                    in the browser
    python examples/notebook/backtest.py                         as a script, on events that it makes up
    python examples/notebook/backtest.py --spec S --file F.csv   on yours; --window-h 24 --html out.html

Every sample is scored before it is trained on, by the same log, trainer and measures as live events.
"""
# ruff: noqa: PLC0415, N803, N806, B018  cells are modules of their own: imports, constants, a last value

import marimo

app = marimo.App(width="medium", app_title="freshet backtest")


@app.cell
def _():
    import csv
    import random
    import tempfile
    from pathlib import Path

    import altair as alt
    import marimo as mo

    from freshet.apps.backtest import backtest
    from freshet.config.spec import load_spec

    return Path, alt, backtest, csv, load_spec, mo, random, tempfile


@app.cell
def _(mo):
    mo.md(
        """
        # Backtest
        One progressive pass over a file of ready samples: each is scored, counted in its window, and only
        then trained on. Without `--file`, ten days of made-up headlines are used, whose readers change
        their minds after five days: the dip is what a model that does not learn would keep.
        """
    )


@app.cell
def _(Path, csv, random):
    HOUR_MS = 3_600_000
    START_MS = 1_767_225_600_000
    TOPICS = ("politics", "sport", "science", "music", "film", "food")

    def generate(path: Path, days: int = 10, a_day: int = 4_000, seed: int = 7) -> Path:
        """Samples for the quickstart's spec: readers like two topics, and other two from half-time on."""
        rng = random.Random(seed)
        likes = [{f"r{n}": set(rng.sample(TOPICS, 2)) for n in range(60)} for _ in range(2)]
        articles = [(f"a{n}", rng.choice(TOPICS)) for n in range(150)]
        with path.open("w", newline="", encoding="utf-8") as file:
            writer = csv.writer(file)
            writer.writerow(["ts", "reader", "items.article", "items.topic", "items.age_s", "click"])
            for n in range(days * a_day):
                reader = f"r{rng.randrange(60)}"
                article, topic = rng.choice(articles)
                liked = topic in likes[n >= days * a_day // 2][reader]
                click = int(rng.random() < (0.4 if liked else 0.05))
                at_ms = START_MS + n * 24 * HOUR_MS // a_day
                writer.writerow([at_ms, reader, article, topic, round(rng.random() * 86_400), click])
        return path

    return HOUR_MS, generate


@app.cell
def _(Path, mo):
    arguments = mo.cli_args()
    here = Path(mo.notebook_dir() or ".")
    spec_file = Path(str(arguments.get("spec") or here.parent / "quickstart" / "freshet.toml"))
    samples_file = arguments.get("file")
    days = int(arguments.get("days") or 10)
    window_h = float(arguments.get("window-h") or 6)
    html = arguments.get("html")
    return days, html, samples_file, spec_file, window_h


@app.cell
def _(HOUR_MS, Path, backtest, days, generate, load_spec, samples_file, spec_file, tempfile, window_h):
    with tempfile.TemporaryDirectory() as _folder:
        _file = Path(str(samples_file)) if samples_file else generate(Path(_folder) / "samples.csv", days)
        outcome = backtest(load_spec(spec_file), [_file], lanes=1, window_ms=int(window_h * HOUR_MS))
    return (outcome,)


@app.cell
def _(outcome):
    windows = [
        {
            "window": record["start_ms"],
            "label": record["label"],
            "n": record["measures"]["n"],
            "auc": record["measures"].get("auc"),
            "ne": record["measures"].get("ne"),
            "low": record["measures"]["ne"] - 2 * (record["measures"].get("ne_error") or 0.0),
            "high": record["measures"]["ne"] + 2 * (record["measures"].get("ne_error") or 0.0),
            "calibration": record["measures"].get("calibration"),
        }
        for record in outcome.windows
        if record["of"] == "training"
        and record["segment"] is None
        and record["measures"].get("ne") is not None
    ]
    return (windows,)


@app.cell
def _(outcome):
    def reliability(records) -> list[dict[str, float | str]]:
        """Bins of the newer half of the windows, put together by tenths of the prediction."""
        sums: dict[tuple[str, int], list[float]] = {}
        closed = [r for r in records if r["of"] == "training" and r.get("reliability")]
        for record in closed[len(closed) // 2 :]:
            for n, predicted, observed in record["reliability"]:
                bin_ = sums.setdefault((record["label"], min(int(predicted * 10), 9)), [0.0, 0.0, 0.0])
                bin_[0] += n
                bin_[1] += n * predicted
                bin_[2] += n * observed
        return [
            {"label": label, "n": n, "predicted": p / n, "observed": y / n}
            for (label, _), (n, p, y) in sorted(sums.items())
        ]

    bins = reliability(outcome.windows)
    return (bins,)


@app.cell
def _(alt, bins, windows):
    _at = alt.X("window:T", title=None)
    _of = alt.Color("label:N", title="label")
    _base = alt.Chart(alt.Data(values=windows)).properties(width=640, height=160)
    _auc = _base.mark_line(point=True).encode(_at, alt.Y("auc:Q", scale={"zero": False}, title="AUC"), _of)
    _band = _base.mark_area(opacity=0.2).encode(
        _at, alt.Y("low:Q", scale={"zero": False}, title="NE, ± 2 errors"), alt.Y2("high:Q"), _of
    )
    _ne = _base.mark_line(point=True).encode(_at, alt.Y("ne:Q", scale={"zero": False}), _of)
    _curve = (
        alt.Chart(alt.Data(values=bins))
        .mark_line(point=True)
        .encode(
            alt.X("predicted:Q", scale={"domain": [0, 1]}),
            alt.Y("observed:Q", scale={"domain": [0, 1]}),
            _of,
            tooltip=["n:Q", "predicted:Q", "observed:Q"],
        )
        .properties(width=240, height=240, title="calibration, newer half")
    )
    _ideal = (
        alt.Chart(alt.Data(values=[{"x": 0, "y": 0}, {"x": 1, "y": 1}]))
        .mark_line(strokeDash=[4, 4], color="gray")
        .encode(alt.X("x:Q"), alt.Y("y:Q"))
    )
    chart = _auc & (_band + _ne) & (_ideal + _curve)
    chart
    return (chart,)


@app.cell
def _(bins, chart, html, mo, outcome, windows):
    _lines = [f"{'window':>6} {'label':12} {'n':>7} {'AUC':>6} {'NE':>6} {'calibration':>11}"]
    _lines += [
        f"{number:6} {w['label']:12} {w['n']:7.0f} {w['auc'] or float('nan'):6.3f} {w['ne']:6.3f} "
        f"{w['calibration'] or float('nan'):11.3f}"
        for number, w in enumerate(windows)
    ]
    _lines += [f"{outcome.samples:,} samples; {len(bins)} bins of calibration"]
    report = "\n".join(_lines)
    if html:
        chart.save(str(html))
    if mo.app_meta().mode == "script":
        print(report)
    return (report,)


if __name__ == "__main__":
    app.run()
