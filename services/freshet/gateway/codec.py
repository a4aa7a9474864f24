"""Events of one stream between what clients send and what the log holds: checked, encoded, framed."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from freshet.gateway.core import Candidate, Envelope, Refusal

__all__ = ["Checked", "StreamCodec"]


@dataclass(frozen=True, slots=True)
class Checked:
    """What became of a request's events: records as the log takes them, and refusals."""

    good: Sequence[tuple[int, Envelope, bytes]]  # (index in the request, envelope, record)
    bad: Sequence[Refusal]


class StreamCodec(Protocol):
    """Checks events against the user's schema."""

    def from_json(self, candidates: Sequence[Candidate]) -> Checked:
        """Encode objects; what does not fit the schema is refused by field."""

    def from_avro(self, records: Sequence[bytes]) -> Checked:
        """Check framed records; the good ones are passed on byte for byte."""
