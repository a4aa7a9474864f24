"""Every verb in every state that it can be met in: a clear error, the right exit code, nothing half-made.

An error says what was expected, what was found, where, and what to do; no traceback (an exception that
escapes the command fails the test).
"""

from __future__ import annotations

import os
import shutil
import socket
from pathlib import Path

import pytest

from freshet.apps.ports import PORT_SETTINGS
from tests.integration.errors import (
    Shell,
    State,
    a_file,
    contents,
    damaged_log,
    damaged_state,
    empty,
    ended,
    missing,
    no_permission,
    no_space,
    somebody_elses,
    without_data,
)

pytestmark = pytest.mark.timeout(120)

QUICKSTART = Path(__file__).parents[2] / "examples" / "quickstart"

LOOKING = (
    ("status",),
    ("peek",),
    ("peek", "impressions"),
    ("version", "list"),
    ("version", "show", "1"),
    ("version", "promote", "1"),
    ("version", "rollback"),
    ("rank", "REQUEST"),
    ("replay", "topics", "SPEC", "--from"),
)
"""Verbs that read a run folder: `--folder RUN` is added, where they do not name it themselves."""


@pytest.fixture
def shell(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Shell:
    return Shell(capsys, monkeypatch)


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A working folder with a spec, its schemas and a request."""
    folder = tmp_path / "place"
    shutil.copytree(QUICKSTART, folder, ignore=shutil.ignore_patterns("*.py", "__pycache__"))
    (folder / "request.json").write_text('{"context": {"reader": "u1"}, "candidates": [{"article": "a1"}]}')
    (folder / "rows.csv").write_text("ts,reader\n1,u1\n")
    monkeypatch.chdir(folder)
    for name in (*PORT_SETTINGS.values(), "FRESHET_SIMULATOR_ADMIN_PORT"):
        monkeypatch.setenv(name, "0")
    return folder


def looking(verb: tuple[str, ...], folder: str) -> list[str]:
    words = [{"REQUEST": "request.json", "SPEC": "freshet.toml"}.get(word, word) for word in verb]
    return [*words, *([folder] if words[-1] == "--from" else ["--folder", folder])]


@pytest.mark.parametrize("verb", LOOKING, ids=" ".join)
@pytest.mark.parametrize("state", [missing, a_file, empty, somebody_elses], ids=lambda s: s.__name__)
def test_a_folder_that_is_no_run_is_refused_and_left_as_it_is(
    shell: Shell, place: Path, verb: tuple[str, ...], state: State
) -> None:
    state(place / "run")
    before = contents(place)

    said = shell(*looking(verb, "run"))

    assert said.code == 1
    assert "run " in said.text
    assert "expected" in said.text
    assert "freshet demo" in said.text  # what to do
    assert contents(place) == before


NO_DATA = {
    ("status",): (0, "nothing has run in run yet; `freshet up SPEC --folder run` starts it"),
    ("peek",): (0, "the log holds no topics yet"),
    ("peek", "impressions"): (1, "none: the log is empty"),
    ("version", "list"): (0, "no version is stored yet"),
    ("version", "show", "1"): (1, "see `freshet version list`"),
    ("version", "promote", "1"): (1, "see `freshet version list`"),
    ("version", "rollback"): (1, "no older promoted version is stored"),
    ("rank", "REQUEST"): (1, "`freshet up SPEC --folder run` starts one"),
    ("replay", "topics", "SPEC", "--from"): (1, "the log has no topic 'impressions'"),
}


@pytest.mark.parametrize("verb", LOOKING, ids=" ".join)
def test_where_there_is_no_data_yet_that_is_said(shell: Shell, place: Path, verb: tuple[str, ...]) -> None:
    without_data(place / "run")
    code, words = NO_DATA[verb]

    said = shell(*looking(verb, "run"))

    assert (said.code, words in said.text) == (code, True), said.text


def test_the_status_of_a_stopped_run_says_how_to_go_on(shell: Shell, place: Path) -> None:
    ended(place / "run")

    said = shell("status", "--folder", "run")

    assert said.code == 0
    assert "`freshet up here` goes on where it was" in said.text


def test_a_request_to_a_dead_server_says_where_to_look(shell: Shell, place: Path) -> None:
    ended(place / "run")

    said = shell("rank", "request.json", "--folder", "run")

    assert said.code == 1
    assert "`freshet status --folder run` says how it is" in said.text


def test_a_wrong_url_is_refused_at_once(shell: Shell, place: Path) -> None:
    said = shell("rank", "request.json", "--url", "localhost:7001")

    assert said.code == 1
    assert "expected a URL such as http://127.0.0.1:7001" in said.text


@pytest.mark.parametrize("request_text", ["[1]", "3", "{", "\x00"])
def test_a_request_that_is_no_object_is_refused_with_an_example(
    shell: Shell, place: Path, request_text: str
) -> None:
    (place / "request.json").write_text(request_text)

    said = shell("rank", "request.json", "--url", "http://127.0.0.1:9")

    assert said.code == 1
    assert 'such as {"context"' in said.text


@pytest.mark.parametrize("verb", [("peek",), ("replay", "topics", "SPEC", "--from")], ids=" ".join)
def test_a_damaged_log_is_named_and_not_touched(shell: Shell, place: Path, verb: tuple[str, ...]) -> None:
    damaged_log(place / "run")
    before = contents(place)

    said = shell(*looking(verb, "run"))

    assert said.code == 1
    assert "run/log/catalog.sqlite: expected an intact SQLite file" in said.text
    assert contents(place) == before


@pytest.mark.parametrize(("verb", "code"), [(("status",), 0), (("rank", "REQUEST"), 1)], ids=str)
def test_a_damaged_state_is_named_with_what_to_do(
    shell: Shell, place: Path, verb: tuple[str, ...], code: int
) -> None:
    damaged_state(place / "run")

    said = shell(*looking(verb, "run"))

    assert said.code == code
    assert "run/state/services.json: expected the state of services" in said.text
    assert "`freshet up` writes it anew" in said.text


STARTING = (
    ("demo",),
    ("up", "freshet.toml", "--folder"),
    ("run", "gateway", "freshet.toml", "--folder"),
    ("backtest", "freshet.toml", "rows.csv", "--keep"),
    ("replay", "files", "freshet.toml", "--impressions", "rows.csv", "--actions", "rows.csv", "--keep"),
)
"""Verbs that make a run folder: its path is added."""


@pytest.mark.parametrize("verb", STARTING, ids=" ".join)
@pytest.mark.parametrize("at", ["file", "file/run", "/proc/freshet-run"])
def test_where_no_folder_can_be_made_nothing_starts(
    shell: Shell, place: Path, verb: tuple[str, ...], at: str
) -> None:
    (place / "file").write_text("mine")
    before = contents(place)

    said = shell(*verb, at)

    assert said.code == 1
    assert at in said.text
    assert "expected" in said.text
    assert contents(place) == before


@pytest.mark.parametrize("verb", STARTING, ids=" ".join)
def test_without_permission_nothing_starts(shell: Shell, place: Path, verb: tuple[str, ...]) -> None:
    (place / "file").write_text("mine")
    shell(*verb, "file/run")  # imports everything that is no longer readable below
    (place / "locked").mkdir()

    with no_permission(place / "locked"):
        said = shell(*verb, str(place / "locked" / "run"))

    assert said.code == 1
    assert "ermission denied" in said.text
    assert contents(place / "locked") == {}


@pytest.mark.parametrize(
    ("port", "line"),
    [("SIMULATOR_ADMIN_PORT", "simulate"), ("GATEWAY_PORT", "run gateway freshet.toml")],
)
def test_a_port_in_use_is_refused_with_its_owner(
    shell: Shell, place: Path, monkeypatch: pytest.MonkeyPatch, port: str, line: str
) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        monkeypatch.setenv(f"FRESHET_{port}", str(taken.getsockname()[1]))

        said = shell(*line.split(), "--folder", "run")

    assert said.code == 1
    assert "is held by process" in said.text


@pytest.mark.parametrize(
    "options",
    [
        ("--rate", "5"),
        ("--rate", "many"),
        ("--rate", "nan"),
        ("--seed", "-1"),
        ("--seed", "1" * 30),
        ("--seconds", "0"),
        ("--seconds", "nan"),
        ("--seconds", "inf"),
        ("--seconds", "1e300"),
    ],
)
def test_an_option_out_of_range_is_wrong_usage(shell: Shell, place: Path, options: tuple[str, str]) -> None:
    before = contents(place)

    said = shell("demo", "run", *options)

    assert said.code == 2
    assert f"Invalid value for '{options[0]}'" in said.text
    assert contents(place) == before


@pytest.mark.parametrize(
    "line",
    [
        "peek impressions --from -1",
        "peek impressions --from 99999999999999999999",
        "peek impressions -n 0",
        "replay files freshet.toml --impressions rows.csv --actions rows.csv --speed nan",
        "replay files freshet.toml --impressions rows.csv --actions rows.csv --speed 0",
        "replay files freshet.toml --impressions . --actions rows.csv",
        "simulate --seed -1",
    ],
)
def test_a_number_or_a_file_that_no_verb_can_take_is_wrong_usage(
    shell: Shell, place: Path, line: str
) -> None:
    before = contents(place)

    said = shell(*line.split())

    assert said.code == 2
    assert "Invalid value for" in said.text
    assert contents(place) == before


@pytest.mark.parametrize("path", ["", os.fsdecode(b"\xff")])
@pytest.mark.parametrize(
    "verb", [("up", "freshet.toml", "--folder"), ("demo",), ("status", "--folder")], ids=" ".join
)
def test_a_folder_without_a_valid_name_is_wrong_usage(
    shell: Shell, place: Path, verb: tuple[str, ...], path: str
) -> None:
    before = contents(place)

    said = shell(*verb, path)

    assert said.code == 2
    assert "a path" in said.text
    assert contents(place) == before


def test_two_slashes_before_a_folder_are_one(shell: Shell, place: Path) -> None:
    without_data(place / "run")

    said = shell("peek", "--folder", f"/{place / 'run'}")

    assert said.code == 0, said.text


@pytest.mark.parametrize(
    "url", ["http://", "http://[::1", "http://127.0.0.1:9\n", "http://ä ü", "http://h:99999999"]
)
def test_an_invalid_url_is_refused_before_any_request(shell: Shell, place: Path, url: str) -> None:
    said = shell("rank", "request.json", "--url", url)

    assert said.code == 1
    assert "expected a URL such as http://127.0.0.1:700" in said.text


@pytest.mark.parametrize("verb", ["demo", "simulate"])
def test_a_drift_that_is_no_duration_is_refused(shell: Shell, place: Path, verb: str) -> None:
    said = shell(verb, "--drift-at", "soon")

    assert said.code == 1
    assert "--drift-at" in said.text
    assert "soon" in said.text


@pytest.mark.parametrize("verb", LOOKING, ids=" ".join)
def test_without_permission_looking_says_so(shell: Shell, place: Path, verb: tuple[str, ...]) -> None:
    ended(place / "run")
    shell(*looking(verb, "run"))

    with no_permission(place / "run"):
        said = shell(*looking(verb, str(place / "run")))

    assert said.code == 1
    assert "ermission denied" in said.text or "may this user" in said.text


@pytest.mark.parametrize("verb", STARTING, ids=" ".join)
def test_without_space_nothing_starts(shell: Shell, place: Path, verb: tuple[str, ...]) -> None:
    with no_space():
        said = shell(*verb, "run")

    assert said.code == 1
    assert "space" in said.text or "disk" in said.text
    left = [name for name, what in contents(place / "run").items() if what != "folder"]
    assert left in ([], ["state/supervisor.lock"])  # and the next start takes the folder


def test_without_space_init_leaves_what_was_there(shell: Shell, place: Path) -> None:
    before = contents(place)
    schemas = ["--schema", "impressions.avsc", "--schema", "actions.avsc"]

    with no_space():
        said = shell("init", *schemas, "--out", "freshet.toml", "--force")

    assert said.code == 1
    assert "expected a path that can be written to" in said.text
    assert contents(place) == before


@pytest.mark.parametrize(
    ("out", "words"),
    [
        ("freshet.toml", "--force replaces it"),
        ("folder", "the path of a file, not a folder"),
        ("missing/freshet.toml", "No such file or directory"),
        ("/proc/freshet.toml", "expected a path that can be written to"),
    ],
)
def test_init_says_where_it_cannot_write(shell: Shell, place: Path, out: str, words: str) -> None:
    (place / "folder").mkdir()
    before = contents(place)

    said = shell("init", "--schema", "impressions.avsc", "--schema", "actions.avsc", "--out", out)

    assert (said.code, words in said.text) == (1, True), said.text
    assert contents(place) == before


@pytest.mark.parametrize("verb", [("check",), ("up",), ("run", "joiner"), ("backtest", "SPEC", "rows.csv")])
@pytest.mark.parametrize("spec", ["missing.toml", "folder", "binary.toml", "empty.toml", "actions.avsc"])
def test_what_is_no_spec_is_refused_before_anything_is_made(
    shell: Shell, place: Path, verb: tuple[str, ...], spec: str
) -> None:
    (place / "folder").mkdir()
    (place / "binary.toml").write_bytes(bytes(range(256)))
    (place / "empty.toml").write_text("")
    words = [spec if word == "SPEC" else word for word in verb]
    before = contents(place)

    said = shell(*words, *([] if "backtest" in verb else [spec]))

    assert said.code == 1
    assert spec in said.text
    assert "expected" in said.text
    assert {name for name in contents(place) if not name.startswith("freshet-run")} == set(before)
    assert not (place / "freshet-run" / "log" / "catalog.sqlite").exists()


@pytest.mark.parametrize("text", ["", "ts,reader\n"])
def test_a_file_without_rows_is_refused(shell: Shell, place: Path, text: str) -> None:
    (place / "rows.csv").write_text(text)

    said = shell("backtest", "freshet.toml", "rows.csv")

    assert said.code == 1
    assert "rows.csv" in said.text


def test_a_folder_that_holds_a_run_takes_no_second_pass(shell: Shell, place: Path) -> None:
    without_data(place / "run")
    before = contents(place)

    said = shell("backtest", "freshet.toml", "rows.csv", "--keep", "run")

    assert said.code == 1
    assert "run is not empty" in said.text
    assert contents(place) == before


@pytest.mark.parametrize("existed", [False, True])
def test_a_pass_that_fails_leaves_no_half_of_it(shell: Shell, place: Path, existed: bool) -> None:
    if existed:
        (place / "run").mkdir()
    before = contents(place)

    said = shell("backtest", "freshet.toml", "rows.csv", "--keep", "run")

    assert said.code == 1
    assert "no column" in said.text
    assert contents(place) == before


@pytest.mark.parametrize(
    ("ports", "words"),
    [
        ({}, "gateway port = 0"),
        ({"GATEWAY_PORT": "1", "JOINER_ADMIN_PORT": "1"}, "a port of its own (gateway has this one)"),
    ],
)
@pytest.mark.parametrize("verb", ["up freshet.toml --folder run", "demo run"])
def test_services_with_an_unreachable_address_do_not_start(
    shell: Shell,
    place: Path,
    monkeypatch: pytest.MonkeyPatch,
    verb: str,
    ports: dict[str, str],
    words: str,
) -> None:
    for name, port in ports.items():
        monkeypatch.setenv(f"FRESHET_{name}", port)

    said = shell(*verb.split())

    assert said.code == 1
    assert words in said.text
    assert not (place / "run" / "state" / "services.json").exists()


def test_a_demo_leaves_a_run_of_another_spec_as_it_is(shell: Shell, place: Path) -> None:
    ended(place / "run")
    before = contents(place)

    said = shell("demo", "run")

    assert said.code == 1
    assert "an empty folder, one of the demo's, or none yet" in said.text
    assert contents(place) == before


def test_the_nearest_run_folder_is_offered(shell: Shell, place: Path) -> None:
    ended(place / "freshet-demo")

    said = shell("status")

    assert said.code == 1
    assert "did you mean --folder freshet-demo?" in said.text


NO_STATES = {
    "no services": '{"supervisor": 1}',
    "a service of another shape": '{"supervisor": 1, "services": {"gateway": []}}',
    "a port that is none": '{"supervisor": 1, "services": {"gateway": {"port": "b"}}}',
    "a process that is none": '{"supervisor": 1, "services": {"gateway": {"pid": -1}}}',
    "no date": '{"supervisor": 1, "services": {}, "stopped_ms": 1e300}',
    "no ending": '{"supervisor": 1, "services": {}, "history": [{"name": 3, "time_ms": 0, "how": ""}]}',
}


@pytest.mark.parametrize("state", NO_STATES)
def test_a_state_file_of_another_kind_is_named_with_a_remedy(shell: Shell, place: Path, state: str) -> None:
    without_data(place / "run")
    (place / "run" / "state" / "services.json").write_text(NO_STATES[state])

    said = shell("status", "--folder", "run")

    assert said.code == 0
    assert "run/state/services.json: expected the state of services" in said.text
    assert "`freshet up` writes it anew" in said.text


@pytest.mark.parametrize("verb", [("status",), ("version", "list")], ids=" ".join)
def test_a_damaged_version_hides_nothing_else(shell: Shell, place: Path, verb: tuple[str, ...]) -> None:
    ended(place / "run")
    manifest = place / "run" / "versions" / "0000000001" / "manifest.json"
    manifest.parent.mkdir()
    manifest.write_text("{")

    said = shell(*verb, "--folder", "run")

    assert said.code == 0
    assert "damaged" in said.text
    assert str(manifest.relative_to(place)) in said.text


@pytest.mark.parametrize("content", ["", "abc", "9" * 5000])
@pytest.mark.parametrize("verb", [("status",), ("version", "list")], ids=" ".join)
def test_a_damaged_alias_hides_nothing_else(
    shell: Shell, place: Path, verb: tuple[str, ...], content: str
) -> None:
    ended(place / "run")
    alias = place / "run" / "versions" / "aliases" / "stable"
    alias.parent.mkdir()
    alias.write_text(content)
    (place / "run" / "versions" / "0000000001").mkdir()

    said = shell(*verb, "--folder", "run")

    assert said.code == 0
    assert "damaged" in said.text


def test_an_empty_log_differs_from_another_program_s(shell: Shell, place: Path) -> None:
    without_data(place / "run")
    (place / "run" / "log" / "catalog.sqlite").write_bytes(b"")

    said = shell("peek", "--folder", "run")

    assert said.code == 1
    assert "found an empty file" in said.text


def test_a_token_that_is_none_is_refused_before_anything_starts(
    shell: Shell, place: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for number, name in enumerate(PORT_SETTINGS.values(), 1):
        monkeypatch.setenv(name, str(number))
    without_data(place / "run")
    (place / "run" / "state" / "console.token").write_text("short")

    said = shell("up", "freshet.toml", "--folder", "run")

    assert said.code == 1
    assert "delete the file: the next start makes a new one" in said.text


def test_what_makes_no_end_is_no_spec(shell: Shell, place: Path) -> None:
    said = shell("check", "/dev/zero")

    assert said.code == 1
    assert "more than 4 MiB" in said.text


def test_a_spec_of_an_editor_that_marks_its_files_is_read(shell: Shell, place: Path) -> None:
    spec = place / "freshet.toml"
    spec.write_bytes(b"\xef\xbb\xbf" + spec.read_bytes().replace(b"\n", b"\r\n"))

    said = shell("check", "freshet.toml")

    assert said.code == 0, said.text


def test_init_writes_over_no_device_and_through_a_link(shell: Shell, place: Path) -> None:
    os.mkfifo(place / "pipe")
    (place / "link.toml").symlink_to("freshet.toml")
    init = ["init", "--schema", "impressions.avsc", "--schema", "actions.avsc", "--force", "--out"]

    refused, written = shell(*init, "pipe"), shell(*init, "link.toml")

    assert (refused.code, written.code) == (1, 0), refused.text + written.text
    assert (place / "pipe").is_fifo()
    assert (place / "link.toml").is_symlink()
    assert (place / "freshet.toml").read_text().startswith("#:schema")
