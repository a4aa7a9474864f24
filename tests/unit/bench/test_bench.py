"""`python -m bench`: failures are named, the figures of the others are printed."""

import importlib
import inspect
import json
from pathlib import Path

import pytest

import bench.__main__ as bench
from bench.__main__ import BY_HAND, NAMES, main
from bench.runner import run_measurement
from freshet.testing.conditions import wait_until


@pytest.fixture
def modules(tmp_path, monkeypatch):
    """Writes measurements with given bodies where the runner finds them."""
    package = tmp_path / "bench"
    package.mkdir()

    def make(**bodies):
        for name, body in bodies.items():
            (package / f"{name}.py").write_text(body)
        return dict.fromkeys(bodies, "a test")

    (package / "__init__.py").touch()
    monkeypatch.chdir(tmp_path)
    return make


def last_line(capsys):
    return json.loads(capsys.readouterr().out.strip().splitlines()[-1])


GOOD = """
import json, sys
print("words before")
print(json.dumps({"rows_per_s": 5, "quick": "--quick" in sys.argv}))
"""


def test_the_last_line_has_the_machine_and_the_figures_of_each(modules, capsys):
    assert main(["--quick"], modules(one=GOOD, two=GOOD)) == 0

    figures = last_line(capsys)
    assert figures["one"] == figures["two"] == {"rows_per_s": 5, "quick": True}
    assert set(figures["machine"]) >= {"cpu", "cores", "instruction_set", "load_before", "python", "commit"}


def test_one_that_fails_is_named_and_the_others_still_run(modules, capsys):
    names = modules(bad="raise SystemExit(3)", good=GOOD)

    assert main([], names) == 1

    out, err = capsys.readouterr()
    figures = json.loads(out.strip().splitlines()[-1])
    assert figures["failed"] == {"bad": "exit status 3"}
    assert figures["good"]["rows_per_s"] == 5
    assert "bad failed: exit status 3" in err


def test_with_json_there_is_only_the_line(modules, capsys):
    main(["--json"], modules(one=GOOD))

    assert capsys.readouterr().out.count("\n") == 1


def test_only_those_that_are_named_run(modules, capsys):
    main(["two"], modules(one="raise SystemExit(3)", two=GOOD))

    assert "one" not in last_line(capsys)


def test_an_unknown_name_is_refused_with_the_known_ones(capsys):
    assert main(["tabel"], {"log": "", "table": ""}) == 2
    assert "there are log, table" in capsys.readouterr().err


def test_one_that_is_run_by_hand_says_so(capsys):
    assert main(["spread"]) == 2
    assert "by hand" in capsys.readouterr().err


def test_output_that_is_no_json_is_a_failure(modules):
    modules(wordy='print("42 rows/s")')

    assert run_measurement("bench.wordy", [], 30) == "the last line is not a JSON object: '42 rows/s'"


@pytest.mark.slow
def test_one_that_hangs_is_ended_with_what_it_started(modules, tmp_path):
    child = "import time, signal; signal.signal(signal.SIGTERM, signal.SIG_DFL); time.sleep(600)"
    modules(
        stuck=f"import subprocess, sys\np = subprocess.Popen([sys.executable, '-c', {child!r}])\n"
        "open('child', 'w').write(str(p.pid))\np.wait()"
    )

    assert run_measurement("bench.stuck", [], 10) == "not done after 10 s"
    pid = int((tmp_path / "child").read_text())

    def ended() -> bool:  # an orphan: this process cannot wait for it
        try:
            return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "Z"
        except FileNotFoundError:
            return True

    wait_until("the child has ended", ended, within_s=60)


def test_the_list_has_all_measurements(capsys):
    assert main(["--list"]) == 0
    out = capsys.readouterr().out
    assert all(name in out for name in (*NAMES, *BY_HAND))


@pytest.mark.parametrize("name", list(NAMES))
def test_a_measurement_follows_the_contract(name):
    module = importlib.import_module(f"bench.{name}")

    assert inspect.signature(module.measure).parameters["quick"].default is False
    assert f"python -m bench.{name}" in (module.__doc__ or "")
    assert "ound by" in (module.__doc__ or ""), "a measurement says what bounds it"


def test_what_is_missing_is_named_before_anything_runs(modules, capsys, monkeypatch):
    monkeypatch.setitem(bench.PROGRAMS, "one", "no-such-program")
    monkeypatch.setitem(bench.PACKAGES, "two", "no_such_package")

    assert main([], modules(one=GOOD, two=GOOD)) == 2

    out, err = capsys.readouterr()
    assert out == ""
    assert err.splitlines() == [
        "one needs no-such-program on the PATH: `make bench` installs it, or apt-get install no-such-program",
        "two needs no_such_package: pip install no_such_package",
    ]
