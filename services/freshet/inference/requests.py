"""Rank requests: their parsing, the id and time that they lack, the events they make, and their order.

No I/O. Letters: C candidates of a request, K items answered.
"""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any

import numpy as np
import orjson

from freshet import _native
from freshet.config.avro.schema import Primitive, Record, field_at
from freshet.config.spec.model import Explore, Spec, Stream, TimeField
from freshet.errors import BadInput, TooLarge
from freshet.json_text import MOST_LEVELS, kind_of, shown, too_deep, written
from freshet.types import F32, I64


@dataclass(frozen=True, slots=True)
class RankRequest:
    """A parsed body of `POST /v1/rank`."""

    context: Mapping[str, Any]  # the served event's fields outside the candidates
    candidates: Sequence[Mapping[str, Any]]  # (C,)
    k: int  # items to return, 1 to C
    request_id: str | int | None
    dry_run: bool = False  # do not log, do not explore
    explain: bool = False  # report the rows of each item


KEYS = ("candidates", "context", "dry_run", "explain", "k", "request_id")


def parse_rank(body: bytes, max_candidates: int) -> RankRequest:
    """Parse the body of `POST /v1/rank`.

    Raises BadInput, with the key, if the body is wrong, and TooLarge if it has too many candidates.
    """
    try:
        tree = orjson.loads(body)
    except orjson.JSONDecodeError as error:
        raise BadInput(f"the body is not JSON: {error}") from None
    if (name := _native.repeated_name(body)) is not None:
        raise BadInput(f"{name:.60}: expected each name once in an object, found it again")
    if not isinstance(tree, dict):
        raise BadInput(f"expected an object with context and candidates, found {kind_of(tree)}")
    unknown = tree.keys() - set(KEYS)
    if unknown:
        raise BadInput(f"expected {', '.join(KEYS[:-1])} and {KEYS[-1]}, found {sorted(unknown)[0]!r:.60}")
    context, candidates = tree.get("context", {}), tree.get("candidates")
    if not isinstance(context, dict):
        raise BadInput(f"context: expected an object, found {kind_of(context)}")
    if not isinstance(candidates, list) or not candidates:
        found = "none" if isinstance(candidates, list) else kind_of(candidates)
        raise BadInput(f"candidates: expected a list of 1 to {max_candidates} objects, found {found}")
    if len(candidates) > max_candidates:
        raise TooLarge(f"candidates: expected at most {max_candidates}, found {len(candidates)}")
    if set(map(type, candidates)) != {dict}:  # five times as fast as a loop
        i, wrong = next((i, kind_of(c)) for i, c in enumerate(candidates) if type(c) is not dict)
        raise BadInput(f"candidates[{i}]: expected an object, found {wrong}")
    k = tree.get("k", len(candidates))
    if not isinstance(k, int) or isinstance(k, bool) or k < 1:
        raise BadInput(f"k: expected an integer of 1 or more, found {shown(k)}")
    request_id = tree.get("request_id")
    if isinstance(request_id, bool) or not isinstance(request_id, (str, int, type(None))):
        raise BadInput(f"request_id: expected a string or an integer, found {shown(request_id)}")
    dry_run, explain = tree.get("dry_run", False), tree.get("explain", False)
    for key, flag in (("dry_run", dry_run), ("explain", explain)):
        if not isinstance(flag, bool):
            raise BadInput(f"{key}: expected true or false, found {shown(flag)}")
    return RankRequest(context, candidates, min(k, len(candidates)), request_id, dry_run, explain)


EXPANDED_BODIES = 4
"""Bound of a request with a copy of the context per candidate, in bodies of the largest size."""


def refuse_expanded(explode: str | None, request: RankRequest, body_bytes: int, max_body_bytes: int) -> None:
    """Raises TooLarge if copies of the context for every candidate would exceed the bound.

    Only specs that explode no array copy the context.
    """
    most, copies = EXPANDED_BODIES * max_body_bytes, len(request.candidates)
    if explode is not None or copies * body_bytes <= most:
        return
    context = len(written(request.context, "context"))
    if copies * context > most:
        raise TooLarge(
            f"context: {context:,} bytes, which each of {copies:,} candidates carries, as the spec explodes "
            f"no array: {copies * context:,} bytes together\n"
            f"  expected at most {most:,} ({EXPANDED_BODIES} times FRESHET_INFERENCE_MAX_BODY_BYTES): send "
            "fewer candidates per request, or a smaller context"
        )


def get_path(tree: Mapping[str, Any], path: str) -> Any:
    """Return the value at a dotted path, or None."""
    value: Any = tree
    for part in path.split("."):
        if not isinstance(value, Mapping):
            return None
        value = value.get(part)
    return value


def set_path(tree: Mapping[str, Any], path: str, value: Any) -> dict[str, Any]:
    """Return a tree with a value at a path; copies only objects along it.

    Raises BadInput if a part of the path is no object.
    """
    head, _, rest = path.partition(".")
    out = dict(tree)
    if not rest:
        out[head] = value
        return out
    below = out.get(head)
    if below is None:
        below = {}
    if not isinstance(below, Mapping):
        raise BadInput(f"{head}: expected an object, found {kind_of(below)}")
    out[head] = set_path(below, rest, value)
    return out


def merged(below: Mapping[str, Any], above: Mapping[str, Any], levels: int = MOST_LEVELS) -> dict[str, Any]:
    """Merge two objects recursively; values of `above` win.

    Raises BadInput if both are nested deeper than `levels`.
    """
    if not levels:
        raise too_deep("context and a candidate")
    out = dict(below)
    for key, value in above.items():
        mine = out.get(key)
        # isinstance with dict is twenty times as fast as with Mapping
        out[key] = (
            merged(mine, value, levels - 1) if isinstance(mine, dict) and isinstance(value, dict) else value
        )
    return out


def events_of(
    spec: Spec, context: Mapping[str, Any], candidates: Sequence[Mapping[str, Any]]
) -> list[dict[str, Any]]:
    """Return the served event of a request, or one event per candidate if the spec explodes no array."""
    explode = spec.events.served.explode
    if explode is not None:
        return [set_path(context, explode, candidates)]
    return [merged(context, candidate) for candidate in candidates]


def time_value(now_ms: int, field: TimeField) -> int | float | str:
    """Return a time in the spec's unit of event times."""
    match field.unit:
        case "iso":
            return datetime.fromtimestamp(now_ms / 1e3, UTC).isoformat(timespec="milliseconds")
        case "s":
            return now_ms // 1_000
        case "us":
            return now_ms * 1_000
        case "ns":
            return now_ms * 1_000_000
        case "days":
            return now_ms // 86_400_000
        case "ms":
            return now_ms


@dataclass(frozen=True, slots=True)
class Filling:
    """Fills in the id and the time of rank requests."""

    stream: Stream
    number_ids: bool  # whether request ids are integers in the user's schema

    @classmethod
    def of(cls, stream: Stream, schema: Record) -> Filling:
        """Derive the type of ids from the user's schema of served events."""
        kind = field_at(schema, stream.key[0]).type
        return cls(stream, isinstance(kind, Primitive) and kind.name in ("int", "long"))

    def filled(
        self, context: Mapping[str, Any], request_id: str | int | None, now_ms: int
    ) -> Mapping[str, Any]:
        """Return the context with id and time; values that the client sent are kept.

        Raises BadInput if `request_id` differs from the context's id, or the id is empty: the joiner would
        take all requests with an empty id for duplicates of the first.
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
            context = set_path(context, key, int(given))  # the log's key of 5.0 is "5"
        if given is None:
            context = set_path(context, key, self.new_id() if request_id is None else request_id)
        path = self.stream.time.path
        if get_path(context, path) is None:
            context = set_path(context, path, time_value(now_ms, self.stream.time))
        return context

    def new_id(self) -> str | int:
        """Generate a random id; a number has 53 bits, which JavaScript represents exactly."""
        return _IDS.getrandbits(53) if self.number_ids else f"{_IDS.getrandbits(128):032x}"


_IDS = random.SystemRandom()
"""Ids must not be guessable: a client that knows an id can report actions on its impression."""


@dataclass(frozen=True, slots=True, eq=False)
class Order:
    """The candidates to return, in order, with their propensities."""

    indices: I64  # (K,) candidates, best first
    propensity: F32  # (K,) probability that the policy gives this candidate this position
    explored: bool  # whether the order is random


def order(scores: F32, k: int, explore: Explore, rng: random.Random) -> Order:
    """Order candidates by (C,) float32 scores, ties in the order of the request, NaN last.

    With probability epsilon = `explore.share` the order is random and uniform. A candidate has a given
    position with probability (1 - epsilon) * [its position by score] + epsilon / C.
    """
    count = len(scores)
    epsilon = explore.share if explore.policy == "epsilon" else 0.0
    explored = epsilon > 0 and rng.random() < epsilon
    greedy = _native.best(scores, k)
    chosen, in_place = greedy, np.ones(len(greedy), bool)
    if explored:
        shuffled = list(range(count))
        rng.shuffle(shuffled)
        chosen = np.array(shuffled[:k], np.int64)
        in_place = chosen == greedy
    propensity = (1 - epsilon) * in_place + epsilon / count
    return Order(chosen, propensity.astype(np.float32), explored)
