"""Authorization of changes at the console, and the token's file."""

from __future__ import annotations

import stat
from pathlib import Path

import pytest

from freshet.errors import ConfigError
from freshet.http.authenticator import Authenticator
from freshet.http.messages import HttpError
from freshet.http.token_files import CONSOLE_HINT, console_entry, console_token

TOKEN = "a-token-of-this-run"
AUTHENTICATOR = Authenticator(more=[console_entry(TOKEN)], hint=CONSOLE_HINT)


@pytest.mark.parametrize(
    "shown", [None, b"", b"Bearer", b"Bearer ", b"Basic " + TOKEN.encode(), TOKEN.encode()]
)
def test_a_refusal_names_the_token_file(shown: bytes | None) -> None:
    with pytest.raises(HttpError) as caught:
        AUTHENTICATOR.authenticate("operate", shown, "")

    assert caught.value.status == 401
    assert "console.token" in str(caught.value.content["hint"])
    assert (b"www-authenticate", b'Bearer realm="freshet"') in caught.value.headers


@pytest.mark.parametrize(
    "shown", [b"x", TOKEN.encode()[:-1], TOKEN.encode() + b"x", TOKEN.upper().encode(), b"\xff\xfe"]
)
def test_another_token_is_refused_and_not_repeated(shown: bytes) -> None:
    with pytest.raises(HttpError) as caught:
        AUTHENTICATOR.authenticate("operate", b"Bearer " + shown, "")

    assert caught.value.status == 401
    assert TOKEN not in str(caught.value.content)


@pytest.mark.parametrize("scheme", [b"Bearer ", b"bearer ", b"BEARER  "])
def test_the_token_is_accepted(scheme: bytes) -> None:
    assert AUTHENTICATOR.authenticate("operate", scheme + TOKEN.encode(), "").name == "console"


def test_a_token_is_made_once_for_its_owner_only(tmp_path: Path) -> None:
    first = console_token("", tmp_path)

    assert console_token("", tmp_path) == first
    assert len(first) >= 32
    assert stat.S_IMODE((tmp_path / "console.token").stat().st_mode) == 0o600
    assert [p.name for p in tmp_path.iterdir()] == ["console.token"]


def test_a_token_that_others_could_read_is_closed_to_them(tmp_path: Path) -> None:
    console_token("", tmp_path)
    (tmp_path / "console.token").chmod(0o644)

    console_token("", tmp_path)

    assert stat.S_IMODE((tmp_path / "console.token").stat().st_mode) == 0o600


def test_a_token_that_is_given_needs_no_file(tmp_path: Path) -> None:
    assert console_token("given-by-the-settings", tmp_path) == "given-by-the-settings"
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("content", ["", "short", "with spaces in it, and long"])
def test_a_file_without_a_token_stops_the_start_with_a_hint(tmp_path: Path, content: str) -> None:
    (tmp_path / "console.token").write_text(content)

    with pytest.raises(ConfigError, match="delete the file"):
        console_token("", tmp_path)


def test_a_folder_that_is_not_there_stops_the_start(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="a file that can be read and written"):
        console_token("", tmp_path / "nowhere")


def test_a_token_that_cannot_be_written_leaves_nothing_behind(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def no_space(_bytes: int) -> str:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("freshet.http.token_files.secrets.token_urlsafe", no_space)

    with pytest.raises(ConfigError, match="No space left"):
        console_token("", tmp_path)
    assert list(tmp_path.iterdir()) == []


def test_a_token_may_be_in_a_read_only_file_of_a_secret(tmp_path: Path) -> None:
    secret, state = tmp_path / "secret", tmp_path / "state"
    secret.write_text(f"{TOKEN}\n")
    secret.chmod(0o444)

    assert console_token("", state, str(secret)) == TOKEN
    assert stat.S_IMODE(secret.stat().st_mode) == 0o444
    assert not state.exists()


@pytest.mark.parametrize("content", ["", "short", "sixteen letters\nand more", "é" * 20])
def test_a_file_that_holds_no_token_stops_the_start(tmp_path: Path, content: str) -> None:
    secret = tmp_path / "secret"
    secret.write_text(content)

    with pytest.raises(ConfigError, match="secret"):
        console_token("", tmp_path, str(secret))


def test_a_file_that_is_not_there_is_not_made(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="secret"):
        console_token("", tmp_path, str(tmp_path / "secret"))

    assert list(tmp_path.iterdir()) == []


def test_a_token_and_a_file_of_one_are_one_too_many(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="FRESHET_CONSOLE_TOKEN_FILE"):
        console_token(TOKEN, tmp_path, str(tmp_path / "secret"))
