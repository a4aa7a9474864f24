"""Random requests for a system with a given spec: events to its gateway, rank requests to inference."""

from __future__ import annotations

import itertools
import random
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import orjson

from freshet.clock import Clock
from freshet.config.expression import compared_in
from freshet.config.spec.generate import ITEM, words_of
from freshet.config.spec.model import Spec
from freshet.config.spec.schemas import Schemas
from freshet.errors import BadInput
from freshet.load.random_events import Draws, EventBuilder, Keys, identifier, set_path

REMEMBERED = 20_000
"""Newest impressions to which actions may refer."""

SOON = 0.8
"""Share of the shortest label's window in which actions come, so that none is out of window."""

PATHS = {"served": "/v1/impressions", "shown": "/v1/shown", "action": "/v1/actions"}
RANK = "/v1/rank"


@dataclass(frozen=True, slots=True)
class Request:
    """One POST."""

    path: str
    body: bytes
    events: int = 0
    answered: Callable[[bytes], None] = lambda _: None  # called with the body of a successful answer


Source = Callable[[], Request]
"""Builds the next request, shortly before it is sent."""


@dataclass(frozen=True, slots=True)
class Shown:
    """The shown items of one request."""

    request: Any
    items: Sequence[Keys]
    at_ms: int


def compared_by(spec: Spec) -> dict[str, tuple[Any, ...]]:
    """Return {field of an action: values with which labels compare it}."""
    found: dict[str, dict[Any, None]] = {}
    for label in spec.labels:
        for path, values in compared_in(label.on).items():
            found.setdefault(path, {}).update(dict.fromkeys(values))
    return {path: tuple(values) for path, values in found.items()}


class Events:
    """Source of random impressions, and of shown events and actions for the acknowledged ones."""

    def __init__(
        self,
        spec: Spec,
        schemas: Schemas,
        draws: Draws,
        clock: Clock,
        *,
        items: int,
        actions: float,
        batch: int,
    ) -> None:
        """Prepare the builders of all streams.

        Args:
            spec:    the model's.
            schemas: of its streams.
            draws:   random values of impressions.
            clock:   event time.
            items:   per impression, if the spec explodes an array.
            actions: their share of the events, from 0 to 1.
            batch:   events per request.
        """
        compared = Draws(draws.seed, compared=compared_by(spec))
        self._served = EventBuilder(spec.events.served, schemas.served, draws)
        self._action = EventBuilder(spec.events.action, schemas.action, compared)
        shown = spec.events.shown
        self._seen = EventBuilder(shown, schemas.of("shown"), compared) if shown else None
        self._rng, self._clock = random.Random(draws.seed), clock  # nosec B311  # repeatable
        self._items = items if spec.events.served.explode is not None else 1
        self._share, self._batch = actions, batch
        self._soon_ms = int(SOON * min(label.window_ms for label in spec.labels))
        self._run = clock.now_ms() % (1 << 31)  # other runs have other ids
        self._numbers = itertools.count(self._run << 20)
        self._recent: deque[Shown] = deque(maxlen=REMEMBERED)
        self._unseen: deque[Shown] = deque(maxlen=REMEMBERED)

    def remember(self, shown: Shown) -> None:
        """Add shown items, to which shown events and actions may refer."""
        if not shown.items:
            return
        if self._seen is None:
            self._recent.append(shown)
        elif self._seen.stream.explode is not None:
            self._unseen.append(shown)
        else:  # one shown event for each item
            self._unseen.extend(replace(shown, items=[item]) for item in shown.items)

    def __call__(self) -> Request:
        """Build the next request: impressions, shown events or actions."""
        now_ms, draw = self._clock.now_ms(), self._rng.random()
        while self._recent and self._recent[0].at_ms < now_ms - self._soon_ms:
            self._recent.popleft()
        if self._recent and draw < self._share:
            pages = [self._rng.choice(self._recent) for _ in range(self._batch)]
            return _request("action", [self._action_on(page, now_ms) for page in pages])
        if self._unseen and self._seen is not None:
            pages = [self._unseen.popleft() for _ in range(min(self._batch, len(self._unseen)))]
            events = [self._seen.event(p.request, p.items, now_ms, next(self._numbers)) for p in pages]
            return _request("shown", events, lambda: self._recent.extend(pages))
        pages = [self._draw_page(now_ms) for _ in range(self._batch)]
        events = [self._served.event(p.request, p.items, now_ms, next(self._numbers)) for p in pages]
        return _request("served", events, lambda: list(map(self.remember, pages)))

    def _draw_page(self, now_ms: int) -> Shown:
        number = next(self._numbers)
        request = identifier(self._served.request_type, f"load-{number:x}", number)
        return Shown(request, self._served.draw_items(self._items), now_ms)

    def _action_on(self, page: Shown, now_ms: int) -> dict[str, Any]:
        return self._action.event(page.request, [self._rng.choice(page.items)], now_ms, next(self._numbers))


def _request(role: str, events: list[dict[str, Any]], done: Callable[[], object] = lambda: None) -> Request:
    body = orjson.dumps(events[0] if len(events) == 1 else events)
    return Request(PATHS[role], body, len(events), lambda _: (done(), None)[1])


class Ranks:
    """Source of rank requests with random candidates."""

    def __init__(
        self,
        spec: Spec,
        schemas: Schemas,
        draws: Draws,
        clock: Clock,
        *,
        candidates: int,
        k: int | None,
        dry_run: bool,
        shown: Callable[[Shown], None] = lambda _: None,
    ) -> None:
        """Prepare the builder of contexts and candidates.

        Args:
            spec:       the model's.
            schemas:    of its streams.
            draws:      random values of requests.
            clock:      time of impressions.
            candidates: per request.
            k:          items to return; None: all.
            dry_run:    keep the requests out of the served log.
            shown:      called with the ranked items, if they are in the served log.
        """
        self._builder, self._candidates = EventBuilder(spec.events.served, schemas.served, draws), candidates
        self._more = {**({"k": k} if k is not None else {}), **({"dry_run": True} if dry_run else {})}
        self._logged = spec.serve.log_served and not dry_run
        self._shown, self._clock = shown, clock
        self._key = spec.events.served.key

    def __call__(self) -> Request:
        """Build the next request."""
        builder = self._builder
        items = builder.draw_items(self._candidates)
        context = builder.context()
        if builder.stream.explode is not None:
            candidates = builder.elements(items)
        else:  # the fields named like an item's belong to the candidate
            of_item = [name for name in context if ITEM & set(words_of(name))]
            candidates = [{name: builder.context()[name] for name in of_item} for _ in items]
            for candidate, keys in zip(candidates, items, strict=True):
                for path, value in zip(self._key[1:], keys, strict=True):
                    set_path(candidate, path, value)
            context = {name: value for name, value in context.items() if name not in of_item}
        body = orjson.dumps({"context": context, "candidates": candidates, **self._more})
        return Request(RANK, body, answered=lambda answer: self._remember(answer, items))

    def _remember(self, answer: bytes, items: Sequence[Keys]) -> None:
        if self._logged:
            ranking: Mapping[str, Any] = orjson.loads(answer)
            ranked = [items[item["index"]] for item in ranking["items"]]
            self._shown(Shown(ranking["request_id"], ranked, self._clock.now_ms()))


def read_requests(path: Path) -> Source:
    """Read rank requests from a file of JSON lines; the source repeats them.

    Raises BadInput if a line is no rank request, or the file is empty.
    """
    bodies = []
    with path.open("rb") as lines:
        for number, line in enumerate(lines, 1):
            if not line.strip():
                continue
            try:
                request = orjson.loads(line)
            except orjson.JSONDecodeError as error:
                raise BadInput(f"{path}, line {number}: expected a JSON object, found {error}") from None
            if not isinstance(request, dict) or "candidates" not in request:
                raise BadInput(
                    f'{path}, line {number}: expected {{"context": {{…}}, "candidates": [{{…}}]}}, found '
                    f"{line[:60]!r}"
                )
            bodies.append(line.strip())
    if not bodies:
        raise BadInput(f"{path}: expected a rank request a line, found none")
    repeated = itertools.cycle(bodies)
    return lambda: Request(RANK, next(repeated))
