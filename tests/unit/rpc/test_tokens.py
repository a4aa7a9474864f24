"""Tokens between services: several in a file; and the grace time of a refusal."""

from __future__ import annotations

from pathlib import Path

import pytest

from freshet.errors import ConfigError, Unavailable
from freshet.rpc.channel import MAX_TOKENS, PeerTokens
from freshet.rpc.errors import TOKEN_FORGET_S, TOKEN_GRACE_S, TokenRefusals
from freshet.testing.clock import SettableClock


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "token"
    path.write_text("first\n\n  second \nfirst\n")
    return path


def test_a_file_holds_several_of_which_the_first_is_shown(file: Path) -> None:
    assert PeerTokens(str(file)).now() == ("first", "second")


@pytest.mark.parametrize(
    "wrong",
    [
        "",
        "\n",
        "two words\n",
        "Schlüssel\n",
        "x\n" + "\n".join(map(str, range(MAX_TOKENS))),
        "x" * (65 << 10),
    ],
)
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
