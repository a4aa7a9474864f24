"""`freshet token`: printed once, listed without the token, dropped by name or id."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from click.testing import CliRunner, Result

from freshet.cli.audit import command as audit
from freshet.cli.token import command
from freshet.errors import ConfigError
from freshet.http.authenticator import Authenticator
from freshet.http.messages import HttpError
from freshet.http.token_files import TokenFile
from freshet.observability.audit import read_audit


@pytest.fixture
def path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)  # no run folder is there
    return tmp_path / "tokens"


def run(*arguments: str) -> Result:
    return CliRunner().invoke(command, arguments, catch_exceptions=False, standalone_mode=False)


def made(path: Path, name: str, scopes: str, *more: str) -> str:
    return run("new", name, "--scopes", scopes, "--file", str(path), *more).stdout.strip()


def may(path: Path, scope: str, token: str) -> bool:
    try:
        Authenticator(TokenFile(str(path))).authenticate(scope, f"Bearer {token}".encode(), "")  # type: ignore[arg-type]
    except HttpError:
        return False
    return True


def test_new_token_grants_its_scopes_and_is_not_stored(path: Path) -> None:
    token = made(path, "shop", "send,rank")

    assert [may(path, scope, token) for scope in ("send", "rank", "operate")] == [True, True, False]
    assert token not in path.read_text()
    assert token not in run("list", "--file", str(path)).output


def test_tokens_of_a_name_overlap_until_the_old_one_is_dropped(path: Path) -> None:
    old, new = made(path, "shop", "send"), made(path, "shop", "send")
    assert may(path, "send", old)
    assert may(path, "send", new)
    listed = json.loads(run("list", "--file", str(path), "--json").stdout)["tokens"]
    run("drop", "shop", "--id", listed[0]["id"], "--file", str(path))

    assert [may(path, "send", token) for token in (old, new)] == [False, True]
    run("drop", "shop", "--file", str(path))
    assert not may(path, "send", new)


def test_json_describes_the_new_token(path: Path) -> None:
    answer = json.loads(
        run("new", "ada", "--scopes", "operate", "--expires", "90d", "--file", str(path), "--json").stdout
    )

    assert (answer["name"], answer["scopes"]) == ("ada", ["operate"])
    assert answer["expires"].endswith("Z")
    assert may(path, "operate", answer["token"])


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        (["new", "no name", "--scopes", "send"], "letters"),
        (["new", "shop", "--scopes", "sell"], "send,rank,operate"),
        (["new", "shop", "--scopes", "send,send"], "send,rank,operate"),
        (["new", "shop", "--scopes", "send", "--expires", "soon"], "--expires"),
        (["drop", "shop"], "freshet token new"),
        (["list"], "can be read"),
    ],
)
def test_invalid_options_are_refused_and_create_no_file(
    path: Path, arguments: list[str], expected: str
) -> None:
    with pytest.raises(ConfigError) as caught:
        run(*arguments, "--file", str(path))

    assert expected in str(caught.value)
    assert not path.exists()


def test_dropping_what_is_not_there_is_an_error(path: Path) -> None:
    made(path, "shop", "send")

    with pytest.raises(ConfigError, match="web"):
        run("drop", "web", "--file", str(path))
    with pytest.raises(ConfigError, match="--id"):
        run("drop", "shop", "--id", "00000000", "--file", str(path))


def audited(path: Path) -> list[tuple[str, str]]:
    audit = read_audit(path, 100)
    found, damaged = audit.lines, audit.damaged
    assert damaged == 0
    assert all(line.who.startswith("user:") for line in found)
    return [(line.action, line.outcome) for line in found]


def test_audit_log_has_changes_without_the_token(path: Path) -> None:
    token = made(path, "shop", "send")
    with pytest.raises(ConfigError):
        run("drop", "web", "--file", str(path))
    run("drop", "shop", "--file", str(path))

    log = path.with_name("tokens.audit.jsonl")
    assert audited(log) == [("token new", "done"), ("token drop", "failed"), ("token drop", "done")]
    assert token not in log.read_text()


def test_the_audit_log_is_where_the_settings_say(
    path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FRESHET_COMMON_AUDIT_FILE", str(tmp_path / "who"))
    made(path, "shop", "send")

    assert audited(tmp_path / "who") == [("token new", "done")]
    said = CliRunner().invoke(audit, ["--json"], catch_exceptions=False).stdout
    assert [line["what"]["name"] for line in json.loads(said)["lines"]] == ["shop"]
    assert "token new" in CliRunner().invoke(audit, [], catch_exceptions=False).stdout
