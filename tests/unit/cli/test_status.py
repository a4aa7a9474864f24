import json
import os
import socket
import subprocess
import sys
import time
from contextlib import ExitStack

import pytest
from click.testing import CliRunner
from prometheus_client import CollectorRegistry

from freshet.apps.status import collect
from freshet.cli.options import DEFAULT_FOLDER
from freshet.cli.status import as_text, command
from freshet.config.settings import RunFolder
from freshet.errors import ConfigError
from freshet.http.admin import Admin
from freshet.process.run_state import Ended, RunState, write_run

NOW_MS = 1_767_225_600_000
FIGURES = {
    "samples": 1200,
    "steps": 9,
    "rows": {"user": 10, "item": 5},
    "lag_blocks": 0,
    "measures": {
        "served": {"click": {"n": 1200.0, "auc": 0.75, "ne": None, "calibration": 1.0}},
        "random": {"click": {"n": 120.0, "auc": 0.71}},
        "popularity": {"click": {"n": 120.0, "auc": 0.58}},
    },
    "lately": {"random": {"click": {"n": 20.0, "auc": 0.81}}, "popularity": {}},
}
SERVICE = {
    "pid": 7,
    "port": 7011,
    "state": "ready",
    "reason": "",
    "up_s": 3.0,
    "restarts": 1,
    "last_exit": "signal 9 (SIGKILL)",
    "memory_mb": 90.0,
    "figures": FIGURES,
}
VERSIONS = {
    "stored": 3,
    "newest": 2,
    "verdict": "held",
    "reason": "calibration",
    "aliases": {"stable": 1},
}


def status(**more):
    return {"folder": "run", "services": {"trainer": SERVICE}, "versions": VERSIONS, **more}


def made_run(tmp_path, run):
    """A run folder as a supervisor leaves it behind."""
    folder = RunFolder(tmp_path / "run").create()
    write_run(folder, run)
    return folder.path


def test_status_has_samples_measures_and_verdict():
    text = as_text(status())

    assert "trained   1200 samples in 9 steps; 15 rows; 0 blocks behind" in text
    assert "click, served: n 1200, auc 0.750, calibration 1.000" in text
    assert "click, served, random slates: n 120, auc 0.710; lately n 20, auc 0.810" in text
    assert "click, popularity, the baseline: n 120, auc 0.580" in text
    assert "newest 2 held (calibration); aliases: stable 1" in text
    assert "signal 9 (SIGKILL)" in text


def test_unusable_samples_are_counted_by_reason():
    figures = {**FIGURES, "refused": {"unreadable": 2, "no_schema": 0, "label": 1}}

    text = as_text(status(services={"trainer": {**SERVICE, "figures": figures}}))

    assert (
        "lost      3 samples could not be used (unreadable 2, label 1) since the trainer was started" in text
    )
    assert "samples could not be used" not in as_text(status())


def test_links_say_which_codec_they_use_and_why():
    seconds = {"encode_s": 1e-6, "decode_s": 3e-6}
    counts = {"rows": 10, "bytes_raw": 1000, "bytes_wire": 250, "relative_error": 0.004, **seconds}
    exact = {"rows": 10, "bytes_raw": 1000, "bytes_wire": 1000, "relative_error": None, **seconds}
    ways = {
        "rows": {"codec": "int8", "why": "busy 4.0% of the time at 12 MB/s, in fp32 14%"},
        "gradients": {"codec": "fp32", "why": "as set"},
    }
    figures = {
        **FIGURES,
        "codecs": {f"10.0.0.{i}:7103": ways for i in range(10)},
        "wires": {"batch": {"user,item": {"uint8": counts}}, "gradients": {"user,item": {"fp32": exact}}},
    }
    text = as_text(status(services={"trainer": SERVICE | {"figures": figures}}), NOW_MS)
    assert (
        "link      10.0.0.0:7103: rows int8: busy 4.0% of the time at 12 MB/s, in fp32 14%; "
        "gradients fp32: as set"
    ) in text
    assert "2 more links; --json has them" in text
    assert (
        "batch: 4.0 times shorter than fp32, relative error up to 0.40%; "
        "encoding and decoding take 400 ns a row"
    ) in text
    assert "gradients: " not in text, "what is not shortened needs no line"


def test_a_folder_where_nothing_ran_says_how_to_start():
    text = as_text({"folder": "run", "services": {}, "versions": {}})

    assert text == "nothing has run in run yet; `freshet up SPEC --folder run` starts it"


def test_ended_processes_have_time_reason_and_restart():
    killed = Ended("trainer", NOW_MS - 5_000, "signal 9 (SIGKILL)", up_s=33.1, again_ms=NOW_MS - 4_900)
    failed = Ended("joiner", NOW_MS - 1_000, "exit code 1", why="Corrupt: the log\n  restore it", up_s=0.5)
    history = [{name: getattr(one, name) for name in Ended.__dataclass_fields__} for one in (killed, failed)]

    text = as_text(status(history=history), NOW_MS)

    assert "(5 s ago)  trainer    signal 9 (SIGKILL) after 33.1 s; started again 0.1 s later" in text
    assert "joiner     exit code 1 after 0.5 s; not started again\n      Corrupt: the log" in text


def test_long_history_shows_the_newest_and_counts_the_rest():
    one = {
        "name": "joiner",
        "time_ms": NOW_MS,
        "how": "exit code 1",
        "why": "",
        "up_s": 1.0,
        "again_ms": None,
    }

    text = as_text(status(history=[one] * 20), NOW_MS)

    assert text.count("exit code 1") == 8
    assert "12 before; --json has them" in text


def test_a_stopped_run_says_when_and_how_to_go_on(tmp_path):
    service = {"pid": None, "port": 1, "since_s": 0.0, "restarts": 0, "last_exit": ""}
    again = "freshet demo here"
    folder = made_run(tmp_path, RunState(1, {"gateway": service}, again, stopped_ms=NOW_MS))

    found = collect(folder)

    assert found["supervisor"]["state"] == "stopped"
    assert "`freshet demo here` goes on where it was" in as_text(found)


def test_killed_supervisor_is_reported(tmp_path):
    with subprocess.Popen([sys.executable, "-c", ""]) as process:
        pass
    service = {"pid": process.pid, "port": 1, "since_s": 0.0, "restarts": 0, "last_exit": ""}
    folder = made_run(tmp_path, RunState(process.pid, {"gateway": service}, "freshet up spec"))
    (folder / "logs" / "gateway.log").write_text("said before it was killed")

    found = collect(folder)

    assert found["supervisor"]["state"] == "gone"
    assert found["services"]["gateway"]["state"] == "down"
    assert abs(found["supervisor"]["time_ms"] / 1000 - time.time()) < 60
    assert "was killed, or the machine went down" in as_text(found)


def test_reused_process_id_is_no_service(tmp_path):
    service = {"pid": 1, "port": 1, "since_s": 0.0, "restarts": 0, "last_exit": ""}
    folder = made_run(tmp_path, RunState(os.getpid(), {"gateway": service}))

    assert collect(folder)["services"]["gateway"]["state"] == "down"


@pytest.mark.usefixtures("patient")
def test_listed_services_are_queried_at_their_addresses(monkeypatch, tmp_path):
    """As in containers: no run folder knows of them."""
    monkeypatch.chdir(tmp_path)
    with ExitStack() as stack:

        def serving(reason, **figures):
            admin = Admin(
                "127.0.0.1", 0, registry=CollectorRegistry(), ready=lambda: reason, status=lambda: figures
            )
            stack.callback(admin.close)
            return admin.port

        joiner = serving(None, samples=7, events=9)
        trainers = serving(None, samples=5, steps=2), serving("waits for its lease", samples=0)
        with socket.create_server(("127.0.0.1", 0)) as free:
            nobody = free.getsockname()[1]
        listed = ",".join(
            f"{role}=127.0.0.1:{port}"
            for role, port in (
                ("inference", nobody),
                ("trainer", trainers[0]),
                ("joiner", joiner),
                ("trainer", trainers[1]),
            )
        )
        monkeypatch.setenv("FRESHET_CONSOLE_SERVICES", listed)
        (tmp_path / DEFAULT_FOLDER).mkdir()  # a container has one, too, in which nothing ran
        result = CliRunner().invoke(command, ["--json"])
        shown = CliRunner().invoke(command, [])

    assert result.exit_code == shown.exit_code == 0, result.output + shown.output
    services = json.loads(result.output)["services"]
    assert {name: one["state"] for name, one in services.items()} == {
        "joiner": "ready",
        "trainer-0": "ready",
        "trainer-1": "starting",
        "inference": "away",
    }
    assert services["joiner"]["figures"] == {"samples": 7, "events": 9, "skipped": {}}
    assert services["joiner"]["address"] == f"127.0.0.1:{joiner}"
    assert "waits for its lease" in shown.output
    assert "joined    7 samples of 9 events since the joiner was started\n" in shown.output
    assert "trained   5 samples in 2 steps; 0 blocks behind (trainer-0)" in shown.output
    assert "does not answer" in shown.output


def test_invalid_list_is_refused_with_the_format(tmp_path):
    result = CliRunner().invoke(command, ["--services", "joiner:7010"])
    assert isinstance(result.exception, ConfigError)
    assert "role=host:port" in str(result.exception)
