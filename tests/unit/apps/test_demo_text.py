from freshet.apps.demo import click_rates, drift_lines, farewell, progress_line, span_of


def window(model, random, best, shown=100):
    def of(clicks):
        return {"impressions": shown, "clicks": clicks}

    return {"start_ms": 0, "stop_ms": 5_000, "model": of(model), "random": of(random), "best": of(best)}


def test_rates_are_clicks_by_items_shown_over_the_last_windows():
    rates = click_rates([window(0, 0, 0), *[window(20, 5, 25)] * 6])

    assert rates is not None
    assert (rates.model, rates.random, rates.best) == (0.20, 0.05, 0.25)
    assert str(rates) == "model 20.0 %, random 5.0 % (4.0x), best possible 25.0 % (80 %)"


def test_no_rate_before_a_window_has_closed():
    assert click_rates([]) is None
    assert "known once" in progress_line(3, {"windows": []}, {})


def test_without_random_slates_there_is_no_ratio():
    rates = click_rates([window(2, 0, 3), {**window(2, 0, 3), "random": {"impressions": 0, "clicks": 0}}][1:])

    assert str(rates) == "model 2.0 %, random -, best possible 3.0 % (67 %)"


def test_a_line_has_rates_freshness_and_traffic():
    line = progress_line(
        65, {"windows": [window(20, 10, 25)], "measured_rate": 1012.4}, {"freshness_ms": 900}
    )

    assert line == (
        "  1:05  clicks: model 20.0 %, random 10.0 % (2.0x), best possible 25.0 % (80 %); "
        "fresh to 0.9 s; 1,012 events/s"
    )


def test_each_drift_is_reported_once():
    drifts = [{"time_ms": 1, "what": "tastes of a third of the users"}, {"time_ms": 2, "what": "again"}]

    assert len(list(drift_lines(9, drifts, 0))) == 2
    assert list(drift_lines(9, drifts, 1)) == [
        "  0:09  DRIFT: again; watch the model fall back and learn again"
    ]


def test_farewell_has_totals_and_next_commands():
    simulator = {"events": 12000, "impressions": 9000, "clicks": 900, "purchases": 9, "windows": []}

    text = "\n".join(farewell("here", 61, simulator))

    assert "sent 12,000 events: 9,000 items shown, 900 clicks, 9 purchases" in text
    assert "freshet status --folder here" in text
    assert "stopped after 1:01" in text


def test_farewell_without_figures_has_next_commands():
    assert "freshet demo here" in "\n".join(farewell("here", 1, {"windows": [], "drifts": []}))


def test_spans_are_minutes_and_seconds():
    assert [span_of(s) for s in (0, 59.9, 60, 3599, 3725)] == ["0:00", "0:59", "1:00", "59:59", "1:02:05"]
