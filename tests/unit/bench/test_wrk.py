"""Load by wrk: the script that it gets, and the answers that count as a failure."""

import json

import pytest

from bench import wrk

GOOD = {"requests": 20, "seconds": 2.0, "not_2xx": 0, "socket_errors": 0, "p50_ms": 1.5, "p99_ms": 9.0}


@pytest.fixture
def fake_wrk(tmp_path, monkeypatch):
    """Put a wrk on the PATH that prints figures; returns what to print, and the file of its arguments."""

    def install(figures):
        program, arguments = tmp_path / "wrk", tmp_path / "arguments"
        lines = ["#!/bin/sh", f'echo "$@" > {arguments}', "echo Running", f"echo '{json.dumps(figures)}'"]
        program.write_text("\n".join(lines))
        program.chmod(0o755)
        monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
        return arguments

    return install


def test_the_figures_are_those_of_the_last_line(fake_wrk):
    arguments = fake_wrk(GOOD)

    assert wrk.load(7001, "", 4, 2, ["500"]) == {
        k: GOOD[k] for k in ("requests", "seconds", "p50_ms", "p99_ms")
    }
    said = arguments.read_text()
    assert "-c4 -d2s" in said
    assert said.endswith("http://127.0.0.1:7001 -- 500\n")


@pytest.mark.parametrize("problem", ["not_2xx", "socket_errors"])
def test_a_failed_request_fails_the_measurement(fake_wrk, problem):
    fake_wrk({**GOOD, problem: 1})

    with pytest.raises(RuntimeError, match="some requests failed"):
        wrk.load(7001, "", 4, 2)


def test_without_wrk_the_error_names_it(monkeypatch):
    monkeypatch.setenv("PATH", "")

    with pytest.raises(RuntimeError, match="wrk, which is not on the PATH"):
        wrk.load(7001, "", 4, 2)


def test_posted_bodies_are_quoted_for_lua():
    script = wrk.posts("/v1/rank", [b'{"a": "\\n"}', b'{"b": [[1]]}'])

    assert '[==[{"a": "\\n"}]==]' in script
    assert '[==[{"b": [[1]]}]==]' in script
    assert '"POST", "/v1/rank"' in script
    assert "% #requests" in script
