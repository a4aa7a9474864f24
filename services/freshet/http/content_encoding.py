"""Content codings of HTTP bodies (RFC 9110 §8.4.1): gzip and deflate, by zlib."""

from __future__ import annotations

import zlib

from freshet.errors import BadInput
from freshet.http.messages import HttpError

__all__ = ["CODINGS", "accepted_coding", "compressed", "decompressed"]

CODINGS = ("gzip", "deflate")
"""Those that are read and written, the preferred one first."""

_GZIP, _ZLIB, _RAW = 31, 15, -15
"""Values of zlib's `wbits`."""

_LEVEL = 1
"""Answers are numbers, which higher levels make hardly smaller."""


def decompressed(body: bytes, coding: str, most_bytes: int) -> bytes:
    """A body without its coding.

    A body of `most_bytes` may stand for a thousand times as many, so decompression ends at that length.

    Args:
        body: as it was sent.
        coding: value of Content-Encoding.
        most_bytes: that the body may have without its coding.

    Raises:
        HttpError: 415, the coding is another one; 413, the body is longer than that.
        BadInput: the body is not of that coding, is cut off, or something follows it.
    """
    coding = coding.strip().lower()
    if coding in ("", "identity"):
        return body
    if coding not in CODINGS:
        raise HttpError(
            415, "encoding", "bodies of this coding are not taken",
            expected=[*CODINGS, "identity"], found=coding[:100],
        )  # fmt: skip
    wbits = _GZIP if coding == "gzip" else _ZLIB if _has_zlib_header(body) else _RAW
    decoder = zlib.decompressobj(wbits)
    try:
        plain = decoder.decompress(body, most_bytes + 1)
    except zlib.error as error:
        raise BadInput(f"Content-Encoding: expected a body of {coding}, found another: {error}") from None
    if len(plain) > most_bytes:
        raise HttpError(
            413, "body_too_large", "the body is too large without its coding",
            expected=f"at most {most_bytes} bytes", found="more", hint="send smaller batches",
        )  # fmt: skip
    if not decoder.eof:
        raise BadInput(f"Content-Encoding: the body of {coding} is cut off after {len(plain)} bytes")
    if decoder.unused_data:
        raise BadInput(f"Content-Encoding: {len(decoder.unused_data)} bytes follow the body of {coding}")
    return plain


def accepted_coding(accept: str) -> str:
    """The coding of ours that a value of Accept-Encoding weighs most; empty for none of them.

    `*` counts for those that the value does not name; a weight that is no number counts as 0.
    """
    weights: dict[str, float] = {}
    for item in accept.lower().split(","):
        name, _, parameters = item.partition(";")
        key, _, weight = parameters.partition("=")
        try:
            weights[name.strip()] = float(weight) if key.strip() == "q" else 1.0
        except ValueError:
            weights[name.strip()] = 0.0
    others = weights.get("*", 0.0)
    best = max(CODINGS, key=lambda coding: weights.get(coding, others))
    return best if weights.get(best, others) > 0 else ""


def compressed(body: bytes, coding: str) -> bytes:
    """A body in one of `CODINGS`."""
    encoder = zlib.compressobj(_LEVEL, zlib.DEFLATED, _GZIP if coding == "gzip" else _ZLIB)
    return encoder.compress(body) + encoder.flush()


def _has_zlib_header(body: bytes) -> bool:
    """Whether a body of deflate has the zlib format of RFC 9110; some clients send the data without it."""
    return len(body) >= 2 and body[0] & 0x0F == 8 and int.from_bytes(body[:2], "big") % 31 == 0
