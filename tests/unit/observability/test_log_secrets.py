"""No credential gets into a log, and no text of a client takes long to scan."""

from __future__ import annotations

import time
from collections.abc import Callable

import pytest
from hypothesis import given
from hypothesis import strategies as st

from freshet.errors import ConfigError
from freshet.http.tokens import TOKEN, digest_of, new_token, parse_tokens
from freshet.observability.logging import (
    HIDDEN,
    MOST_CHARS,
    MOST_CHARS_IN_ALL,
    scrubbed,
    without_secrets,
)
from ops.reference.metrics_page import SERVICES

HARD = [
    "a", "a.", "a-", "a b", "é", "password", "password ", "password=", "password= ", "token='", 'token="a ',
    "token=\\'", "token:\\\\", "x-amz-signature", "sasl.", "a://", "://", "://a", "@", "://@", "://a@",
    "Bearer ", "Bearer", "basic\t", "freshet_", "freshet_a", "freshet_A", "_", "\\", "'", " ", "\n", "=",
]  # fmt: skip
"""Repeated pieces of texts that are hard to scan."""


def seconds(look: Callable[[str], object], text: str) -> float:
    """Processor time of this thread, which others on the machine do not lengthen; the best of some."""
    best = float("inf")
    for _ in range(5):
        began = time.thread_time()
        look(text)
        best = min(best, time.thread_time() - began)
    return best


@pytest.mark.slow
@pytest.mark.parametrize("piece", HARD, ids=ascii)
def test_the_time_for_a_text_grows_with_its_length_alone(piece: str) -> None:
    few, more, most = ((piece * size)[:size] for size in (500, 4_000, 100_000))

    # 8 and 25 times the length; a quadratic pattern takes 64 and 625 times as long.
    assert seconds(without_secrets, more) < 32 * max(seconds(without_secrets, few), 2e-6)
    assert seconds(without_secrets, most) < 120 * seconds(without_secrets, more)


@pytest.mark.parametrize("piece", HARD, ids=ascii)
def test_the_scanned_part_of_a_value_is_bounded(piece: str) -> None:
    for size in (MOST_CHARS, 100_000):
        assert len(scrubbed("reason", (piece * size)[:size])) < 2 * MOST_CHARS + 100
    wide = scrubbed("reason", [[piece * MOST_CHARS] * 50] * 50)
    assert sum(len(text) for row in wide for text in row) < 2 * MOST_CHARS_IN_ALL + 50 * 50 * 50


TOKENS = st.builds(new_token)
AROUND = st.text(max_size=30)


@given(AROUND, TOKENS, AROUND)
def test_a_token_of_ours_is_hidden_wherever_it_stands(before: str, token: str, after: str) -> None:
    for value in (before + token + after, [before + token], {"deep": {token + after: before}}):
        assert token[:30] not in str(scrubbed("reason", value))


@given(TOKENS, st.integers(0, 60))
def test_a_token_across_a_cut_is_hidden(token: str, shown: int) -> None:
    start = scrubbed("reason", "." * (MOST_CHARS - shown) + token + "." * MOST_CHARS)
    end = scrubbed("exception", "." * MOST_CHARS + token + "." * (MOST_CHARS - shown))

    assert token[8:16] not in start
    assert token[-8:] not in end


def test_names_of_metrics_are_no_tokens() -> None:
    for metrics in SERVICES.values():
        for metric in metrics:
            text = f"{metric.exposed} of freshet_http_request_seconds_bucket is 7"
            assert scrubbed("reason", text) == text


PASSWORDS = st.text(
    st.characters(min_codepoint=33, max_codepoint=126, exclude_characters="/'\"\\"), min_size=4
)


@given(PASSWORDS)
def test_a_password_in_a_url_is_hidden_to_its_last_character(password: str) -> None:
    assert scrubbed("reason", f"no redis://:{password}@h:1/0") == f"no redis://{HIDDEN}@h:1/0"


@given(
    st.sampled_from(["'", '"', "\\'", '\\"']),
    st.text(st.characters(min_codepoint=32, max_codepoint=126, exclude_characters="'\"\\"), min_size=1),
)
def test_a_quoted_value_is_hidden_to_its_quote(quote: str, value: str) -> None:
    text = f"sasl.password={quote}{value}{quote}, a=1"

    assert scrubbed("reason", text) == f"sasl.password={quote}{HIDDEN}{quote}, a=1"


def test_an_unclosed_quoted_value_is_hidden_to_the_lines_end() -> None:
    assert scrubbed("reason", "token: 'my pass wo\nnext") == f"token: '{HIDDEN}\nnext"
    assert scrubbed("reason", r'"secret": "a\"b c", "d": 1') == f'"secret": "{HIDDEN}", "d": 1'


@given(TOKENS, st.integers(0, 5))
def test_an_error_in_a_token_file_repeats_no_word_of_it(token: str, place: int) -> None:
    digest = f"sha256:{digest_of(b'x').hex()}"
    words = ["shop", "send", digest, "expires=2027-02-20T00:00:00Z", "requests_per_s=5", "events_per_s=5"]
    for slipped in (token, f"{words[place].partition('=')[0]}={token}"):
        line = " ".join([*words[:place], slipped, *words[place + 1 :]])
        with pytest.raises(ConfigError, match="tokens:1") as caught:
            parse_tokens(line, "tokens")
        assert token not in str(caught.value)
        assert "word" in str(caught.value)


@given(TOKENS)
def test_new_tokens_are_recognised_as_tokens(token: str) -> None:
    assert TOKEN.fullmatch(token)
