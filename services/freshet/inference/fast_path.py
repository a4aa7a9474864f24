"""The fast path of rank requests: native code parses a body once and writes events and answer as text.

Requests with an error, an `explain` or two ids go through `core.parse_rank`, which gives reasons and costs
ten times as much.
"""

from __future__ import annotations

from dataclasses import dataclass

import orjson

from freshet import _native
from freshet.config.avro.schema import SERVED_FIELD
from freshet.config.spec.model import Spec
from freshet.features import JsonTranscoder
from freshet.inference.core import Order, time_value
from freshet.inference.fields import Filling
from freshet.inference.log_limits import Loggable, NativeRules
from freshet.inference.pipeline import Encoded, Scored
from freshet.inference.served_log import Served, places_of
from freshet.types import BytesColumn

__all__ = ["FastPath", "FastRequest"]

_NOTHING_LOGGED: NativeRules = (None, None, None, 0)
_NO_ID = '""'
"""JSON of the empty id, which `Filling` refuses."""

MOST_PLACES = 64  # RankText's bound of fields by which an item has its position


@dataclass(frozen=True, slots=True, eq=False)
class FastRequest:
    """A request that native code has parsed."""

    encoded: Encoded
    k: int  # items to return, 1 to the number of candidates
    dry_run: bool
    _text: _native.RankText
    _rules: _native.RankRules

    def answer(
        self, order: Order, scored: Scored, version: int, freshness_ms: int | None, *, log: bool
    ) -> tuple[bytes, Served | None]:
        """Return the answer's body, and the impression if `log` is true."""
        text = self._text
        items, served = text.ranked(
            self._rules,
            order.indices,
            scored.scores,
            scored.predictions,
            order.propensity,
            version,
            order.explored,
            log,
        )
        body = (
            b'{"request_id":%b,"items":%b,"version":%d,"freshness_ms":%b,"unknown_rows":%b,"explored":%b}'
            % (
                text.id.encode(),
                items,
                version,
                b"null" if freshness_ms is None else b"%d" % freshness_ms,
                orjson.dumps(scored.unknown),
                b"true" if order.explored else b"false",
            )
        )
        return body, None if served is None else Served([text.id.strip('"').encode()], [served])


class FastPath:
    """Parses requests of one spec. Thread-safe."""

    def __init__(
        self,
        spec: Spec,
        transcoder: JsonTranscoder,
        filling: Filling,
        max_candidates: int,
        loggable: Loggable | None = None,
    ) -> None:
        """Compile the rules; raises ValueError if the spec does not fit (see `fits`).

        Args:
            transcoder: of the request schema.
            loggable: checks the impression; None: none is logged.
        """
        stream = spec.events.served
        if not self.fits(spec):
            raise ValueError(
                "expected a spec whose candidates, request id and time stand at the top of events"
            )
        self._filling, self._loggable = filling, loggable
        self._writer, _, _ = transcoder.native
        self._rules = _native.RankRules(
            stream.explode or "",
            stream.key[0],
            stream.time.path,
            SERVED_FIELD,
            places_of(spec),
            [orjson.dumps(label.name).decode() for label in spec.labels],
            max_candidates,
        )

    @staticmethod
    def fits(spec: Spec) -> bool:
        """Return whether candidates, request id and time are top-level fields of the served event."""
        stream = spec.events.served
        names = [stream.explode or ".", stream.key[0], stream.time.path, *places_of(spec)]
        return len(names) <= MOST_PLACES and not any("." in name for name in names)

    def read(self, body: bytes, now_ms: int) -> FastRequest | None:
        """Parse a request's body; None if it cannot take the fast path."""
        filling = self._filling
        new_id = orjson.dumps(filling.new_id()).decode()
        now = orjson.dumps(time_value(now_ms, filling.stream.time)).decode()
        logged = self._loggable.native(now_ms) if self._loggable is not None else _NOTHING_LOGGED
        text = _native.RankText.read(self._rules, self._writer, body, new_id, now, *logged)
        if text is None or text.id == _NO_ID:
            return None
        encoded = Encoded(BytesColumn(*text.record()), text.candidates)
        return FastRequest(encoded, text.k, text.dry_run, text, self._rules)
