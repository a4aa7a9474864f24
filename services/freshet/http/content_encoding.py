"""Content codings of HTTP bodies (RFC 9110 §8.4.1): gzip and deflate, by zlib."""

from __future__ import annotations

import zlib

from freshet.errors import BadInput
from freshet.http.messages import HttpError

CODINGS = ("gzip", "deflate")
"""Supported codings, the preferred one first."""

_GZIP, _ZLIB, _RAW = 31, 15, -15
"""Values of zlib's `wbits`."""

_LEVEL = 1
"""Responses are numbers, which higher levels hardly compress further."""


def decompressed(body: bytes, coding: str, most_bytes: int) -> bytes:
    """Decompress a body, up to `most_bytes`: a body may expand to a thousand times its size.

    Args:
        body: the body as it was sent.
        coding: value of Content-Encoding.
        most_bytes: limit of the decompressed body.

    Raises:
        HttpError: 415 for another coding; 413 above the limit.
        BadInput: the body does not have the coding, is truncated, or other bytes follow it.
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
    """Return the supported coding with the highest weight in Accept-Encoding; empty for none.

    `*` stands for codings that are not listed; a malformed weight counts as 0.
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
    """Compress a body by one of `CODINGS`."""
    encoder = zlib.compressobj(_LEVEL, zlib.DEFLATED, _GZIP if coding == "gzip" else _ZLIB)
    return encoder.compress(body) + encoder.flush()


def _has_zlib_header(body: bytes) -> bool:
    """Return whether a deflate body has the zlib format of RFC 9110; some clients send raw data."""
    return len(body) >= 2 and body[0] & 0x0F == 8 and int.from_bytes(body[:2], "big") % 31 == 0
