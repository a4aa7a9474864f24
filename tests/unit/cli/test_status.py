from freshet.cli.status import as_text

SERVICE = {
    "pid": 7,
    "port": 7011,
    "state": "ready",
    "reason": "",
    "up_s": 3.0,
    "restarts": 1,
    "last_exit": "signal 9",
    "memory_mb": 90.0,
    "figures": {
        "samples": 1200,
        "steps": 9,
        "rows": {0: 10, 1: 5},
        "lag_blocks": 0,
        "measures": {"served": {"click": {"n": 1200.0, "auc": 0.75, "ne": None, "calibration": 1.0}}},
    },
}
VERSIONS = {
    "stored": 3,
    "newest": 2,
    "verdict": "held",
    "reason": "calibration",
    "aliases": {"stable": 1},
}


def test_the_status_says_what_was_trained_how_good_it_is_and_why_a_version_is_held():
    text = as_text({"folder": "run", "services": {"trainer": SERVICE}, "versions": VERSIONS})

    assert "trained   1200 samples in 9 steps; 15 rows; 0 blocks behind" in text
    assert "click, served: n 1200, auc 0.750, calibration 1.000" in text
    assert "newest 2 held (calibration); aliases {'stable': 1}" in text
    assert "signal 9" in text


def test_a_folder_where_nothing_ran_says_how_to_start():
    text = as_text({"folder": "run", "services": {}, "versions": {}})

    assert text == "nothing has run in run yet; `freshet up SPEC` starts it"
