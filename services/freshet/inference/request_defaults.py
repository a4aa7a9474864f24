"""What a client may leave out of a rank request: the request's id and its time are filled in."""

from __future__ import annotations

import random
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from freshet.config.avro.schema import Primitive, Record, field_at
from freshet.config.spec.model import Stream
from freshet.errors import BadInput
from freshet.inference.core import get_path, set_path, time_value
from freshet.json_text import shown

__all__ = ["Filling"]


@dataclass(frozen=True, slots=True)
class Filling:
    """How requests of a stream of served events are completed."""

    stream: Stream
    number_ids: bool  # whether request ids are integers in the user's schema

    @classmethod
    def of(cls, stream: Stream, schema: Record) -> Filling:
        """As the user's schema of served events wants it."""
        kind = field_at(schema, stream.key[0]).type
        return cls(stream, isinstance(kind, Primitive) and kind.name in ("int", "long"))

    def filled(
        self, context: Mapping[str, Any], request_id: str | int | None, now_ms: int
    ) -> Mapping[str, Any]:
        """The context with id and time, which are the whole event's; what the client sent stays as it is.

        Raises BadInput if `request_id` is not the context's own, or the id is empty: all requests with it
        would be one to the joiner, and only the first of them would be learned from.
        """
        key = self.stream.key[0]
        given = get_path(context, key)
        if "" in (request_id, given):
            where = "request_id" if request_id == "" else f"context.{key}"
            raise BadInput(
                f'{where}: expected an id that no other request has, or none (then one is made), found ""'
            )
        other = isinstance(given, (dict, list)) or str(given) != str(request_id)
        if request_id is not None and given is not None and other:
            raise BadInput(
                f"request_id: expected that of the context's {key}, {shown(given)}; found {shown(request_id)}"
            )
        if self.number_ids and isinstance(given, float) and given.is_integer():
            context = set_path(context, key, int(given))  # 5.0: the log's key is written without a fraction
        if given is None:
            context = set_path(context, key, self.new_id() if request_id is None else request_id)
        path = self.stream.time.path
        if get_path(context, path) is None:
            context = set_path(context, path, time_value(now_ms, self.stream.time))
        return context

    def new_id(self) -> str | int:
        """An id that no other request has; of 53 bits if it is a number, which JavaScript keeps exact."""
        return _IDS.getrandbits(53) if self.number_ids else f"{_IDS.getrandbits(128):032x}"


_IDS = random.SystemRandom()
"""Nobody may guess the id of a request that he was not answered: by it alone he could report its clicks."""
