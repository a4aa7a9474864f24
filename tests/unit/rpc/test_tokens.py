"""Tokens between services: several in a file, read again; and the grace time of a refusal."""

from __future__ import annotations

from pathlib import Path

import pytest

from freshet.errors import ConfigError, Unavailable
from freshet.rpc.channel import MAX_TOKENS, TOKENS_CHECK_S, PeerTokens
from freshet.rpc.errors import TOKEN_FORGET_S, TOKEN_GRACE_S, TokenRefusals
from freshet.testing.clock import SettableClock


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "token"
    path.write_text("first\n\n  second \nfirst\n")
    return path


def test_a_file_holds_several_of_which_the_first_is_shown(file: Path) -> None:
    assert PeerTokens(str(file)).now() == ("first", "second")


def test_a_change_is_taken_up_at_the_next_look_and_not_before(file: Path) -> None:
    clock = SettableClock()
    tokens = PeerTokens(str(file), clock)
    file.write_text("second\nthird\n")

    assert tokens.now() == ("first", "second")
    clock.advance(TOKENS_CHECK_S)
    assert tokens.now() == ("second", "third")


@pytest.mark.parametrize(
    "wrong", [None, "", "\n", "two words\n", "Schlüssel\n", "x\n" + "\n".join(map(str, range(MAX_TOKENS)))]
)
def test_a_wrong_token_file_leaves_the_former_tokens_valid(file: Path, wrong: str | None) -> None:
    clock = SettableClock()
    tokens = PeerTokens(str(file), clock)
    if wrong is None:
        file.unlink()
    else:
        file.write_text(wrong)
    clock.advance(TOKENS_CHECK_S)
    assert tokens.now() == ("first", "second")

    file.write_text("third\n")
    clock.advance(TOKENS_CHECK_S)
    assert tokens.now() == ("third",)


@pytest.mark.parametrize("wrong", ["", "two words\n", "x" * (65 << 10)])
def test_at_a_start_such_a_file_is_an_error(file: Path, wrong: str) -> None:
    file.write_text(wrong)

    with pytest.raises(ConfigError, match="one token of letters and digits a line"):
        PeerTokens(str(file))


def test_a_refusal_is_borne_for_some_seconds_and_then_ends_us() -> None:
    clock = SettableClock()
    patience = TokenRefusals(clock)

    for _ in range(round(TOKEN_GRACE_S)):
        assert isinstance(patience.error_of("shard-0:7", "the token is wrong"), Unavailable)
        clock.advance(1.0)
    ended = patience.error_of("shard-0:7", "the token is wrong")

    assert isinstance(ended, ConfigError)
    assert "FRESHET_GRPC_TOKEN_FILE" in str(ended)
    assert isinstance(patience.error_of("shard-1:7", "the token is wrong"), Unavailable), "another listener's"


def test_a_refusal_long_after_the_last_begins_anew() -> None:
    clock = SettableClock()
    patience = TokenRefusals(clock)
    patience.error_of("shard-0:7", "the token is wrong")
    clock.advance(max(TOKEN_FORGET_S, TOKEN_GRACE_S) + 1)

    assert isinstance(patience.error_of("shard-0:7", "the token is wrong"), Unavailable)
