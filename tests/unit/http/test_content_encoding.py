"""Content codings: what clients compress is read, bounded by its length without; weights are heeded."""

from __future__ import annotations

import gzip
import zlib

import pytest
from hypothesis import given
from hypothesis import strategies as st

from freshet.errors import BadInput
from freshet.http.content_encoding import CODINGS, accepted_coding, compressed, decompressed
from freshet.http.messages import HttpError

MOST = 10_000


def raw_deflate(body: bytes) -> bytes:
    """Deflate without the zlib header, as some clients send it."""
    encoder = zlib.compressobj(wbits=-15)
    return encoder.compress(body) + encoder.flush()


@given(st.binary(max_size=2_000))
def test_a_body_is_the_same_after_any_coding(body: bytes) -> None:
    for coding in CODINGS:
        assert decompressed(compressed(body, coding), coding, MOST) == body
    assert decompressed(gzip.compress(body), "GZIP", MOST) == body
    assert decompressed(raw_deflate(body), "deflate", MOST) == body
    assert decompressed(body, "identity", MOST) == body


@pytest.mark.parametrize("coding", CODINGS)
def test_a_small_body_of_a_large_one_is_refused(coding: str) -> None:
    assert decompressed(compressed(bytes(MOST), coding), coding, MOST) == bytes(MOST)
    with pytest.raises(HttpError, match="too large"):
        decompressed(compressed(bytes(1 << 28), coding), coding, MOST)


@pytest.mark.parametrize("coding", CODINGS)
def test_truncated_and_trailing_bytes_are_refused(coding: str) -> None:
    whole = compressed(b"some bytes", coding)
    with pytest.raises(BadInput, match="cut off"):
        decompressed(whole[:-1], coding, MOST)
    with pytest.raises(BadInput, match="3 bytes follow"):
        decompressed(whole + b"abc", coding, MOST)


@given(st.binary(max_size=300), st.sampled_from(CODINGS))
def test_random_bytes_are_a_body_or_bad_input(body: bytes, coding: str) -> None:
    try:
        assert len(decompressed(body, coding, MOST)) <= MOST
    except BadInput:
        return


def test_another_coding_is_refused_with_those_that_are_taken() -> None:
    with pytest.raises(HttpError) as error:
        decompressed(b"", "br", MOST)

    assert error.value.status == 415
    assert error.value.content["expected"] == ["gzip", "deflate", "identity"]


@pytest.mark.parametrize(
    ("accept", "coding"),
    [
        ("", ""),
        ("gzip", "gzip"),
        ("deflate", "deflate"),
        ("gzip, deflate, br, zstd", "gzip"),
        ("gzip;q=0.2, deflate;q=0.9", "deflate"),
        ("gzip;q=0", ""),
        ("gzip;q=0, *", "deflate"),
        ("*", "gzip"),
        ("identity", ""),
        ("gzip;q=x", ""),
        ("GZip ; q=1", "gzip"),
    ],
)
def test_the_coding_that_weighs_most_is_chosen(accept: str, coding: str) -> None:
    assert accepted_coding(accept) == coding
