"""What is asked of a system with a given spec: events for its gateway, rankings of its inference server."""

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
from freshet.config.expression.literals import compared_in
from freshet.config.spec.guess import ITEM, words_of
from freshet.config.spec.model import Spec
from freshet.config.spec.schemas import Schemas
from freshet.errors import BadInput
from freshet.load.event_maker import Form, Keys, identifier, put
from freshet.load.values import Draws

__all__ = ["Events", "Ranks", "Request", "Shown", "Source", "compared_by", "read_requests"]

REMEMBERED = 20_000
"""Impressions, at most, on which actions may follow."""

SOON = 0.8
"""Actions come within this part of the shortest label's window, so that none comes too late to count."""

PATHS = {"served": "/v1/impressions", "shown": "/v1/shown", "action": "/v1/actions"}
RANK = "/v1/rank"


@dataclass(frozen=True, slots=True)
class Request:
    """One POST."""

    path: str
    body: bytes
    events: int = 0  # in it
    answered: Callable[[bytes], None] = lambda _: None  # gets the body of a good answer


Source = Callable[[], Request]
"""Makes the next request, shortly before it is sent."""


@dataclass(frozen=True, slots=True)
class Shown:
    """What one request has shown."""

    request: Any
    items: Sequence[Keys]
    at_ms: int


def compared_by(spec: Spec) -> dict[str, tuple[Any, ...]]:
    """Field of an action -> values that labels look for."""
    found: dict[str, dict[Any, None]] = {}
    for label in spec.labels:
        for path, values in compared_in(label.on).items():
            found.setdefault(path, {}).update(dict.fromkeys(values))
    return {path: tuple(values) for path, values in found.items()}


class Events:
    """Impressions by chance, and what follows on those that were acknowledged."""

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
        """Make no events yet.

        Args:
            spec:    of the model.
            schemas: of its streams.
            draws:   by which impressions are made.
            clock:   of the events' times.
            items:   of an impression, where the spec explodes an array.
            actions: their share of the events, from 0 to 1.
            batch:   events of a request.
        """
        doing = Draws(draws.seed, compared=compared_by(spec))
        self._served = Form(spec.events.served, schemas.served, draws)
        self._action = Form(spec.events.action, schemas.action, doing)
        self._seen = Form(spec.events.shown, schemas.of("shown"), doing) if spec.events.shown else None
        self._rng, self._clock = random.Random(draws.seed), clock  # nosec B311  # to be repeated
        self._items = items if spec.events.served.explode is not None else 1
        self._share, self._batch = actions, batch
        self._soon_ms = int(SOON * min(label.window_ms for label in spec.labels))
        self._run = clock.now_ms() % (1 << 31)  # another's ids differ
        self._numbers = itertools.count(self._run << 20)
        self._recent: deque[Shown] = deque(maxlen=REMEMBERED)
        self._unseen: deque[Shown] = deque(maxlen=REMEMBERED)

    def remember(self, shown: Shown) -> None:
        """Something was shown, by whomever: more may follow."""
        if not shown.items:
            return
        if self._seen is None:
            self._recent.append(shown)
        elif self._seen.stream.explode is not None:
            self._unseen.append(shown)
        else:  # what was seen is told of each item by itself
            self._unseen.extend(replace(shown, items=[item]) for item in shown.items)

    def __call__(self) -> Request:
        """The next: impressions, what was seen of them, or actions on them."""
        now_ms, draw = self._clock.now_ms(), self._rng.random()
        while self._recent and self._recent[0].at_ms < now_ms - self._soon_ms:
            self._recent.popleft()
        if self._recent and draw < self._share:
            pages = [self._rng.choice(self._recent) for _ in range(self._batch)]
            return _request("action", [self._acted(page, now_ms) for page in pages])
        if self._unseen and self._seen is not None:
            pages = [self._unseen.popleft() for _ in range(min(self._batch, len(self._unseen)))]
            events = [self._seen.event(p.request, p.items, now_ms, next(self._numbers)) for p in pages]
            return _request("shown", events, lambda: self._recent.extend(pages))
        pages = [self._page(now_ms) for _ in range(self._batch)]
        events = [self._served.event(p.request, p.items, now_ms, next(self._numbers)) for p in pages]
        return _request("served", events, lambda: list(map(self.remember, pages)))

    def _page(self, now_ms: int) -> Shown:
        number = next(self._numbers)
        request = identifier(self._served.request_type, f"load-{number:x}", number)
        return Shown(request, self._served.draw_items(self._items), now_ms)

    def _acted(self, page: Shown, now_ms: int) -> dict[str, Any]:
        return self._action.event(page.request, [self._rng.choice(page.items)], now_ms, next(self._numbers))


def _request(role: str, events: list[dict[str, Any]], done: Callable[[], object] = lambda: None) -> Request:
    body = orjson.dumps(events[0] if len(events) == 1 else events)
    return Request(PATHS[role], body, len(events), lambda _: (done(), None)[1])


class Ranks:
    """Rankings of candidates by chance."""

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
        """Ask nothing yet.

        Args:
            spec:       of the model.
            schemas:    of its streams.
            draws:      by which requests are made.
            clock:      of the time at which something was shown.
            candidates: of a request.
            k:          items wanted; all without it.
            dry_run:    nothing is logged as served.
            shown:      gets what was ranked, if it is logged as served.
        """
        self._form, self._candidates = Form(spec.events.served, schemas.served, draws), candidates
        self._more = {**({"k": k} if k is not None else {}), **({"dry_run": True} if dry_run else {})}
        self._logged = spec.serve.log_served and not dry_run
        self._shown, self._clock = shown, clock
        self._key = spec.events.served.key

    def __call__(self) -> Request:
        """The next."""
        form = self._form
        items = form.draw_items(self._candidates)
        context = form.context()
        if form.stream.explode is not None:
            candidates = form.elements(items)
        else:  # of one record, what is an item's by its name is the candidate's
            mine = [name for name in context if ITEM & set(words_of(name))]
            candidates = [{name: form.context()[name] for name in mine} for _ in items]
            for candidate, keys in zip(candidates, items, strict=True):
                for path, value in zip(self._key[1:], keys, strict=True):
                    put(candidate, path, value)
            context = {name: value for name, value in context.items() if name not in mine}
        body = orjson.dumps({"context": context, "candidates": candidates, **self._more})
        return Request(RANK, body, answered=lambda answer: self._remember(answer, items))

    def _remember(self, answer: bytes, items: Sequence[Keys]) -> None:
        if self._logged:
            ranking: Mapping[str, Any] = orjson.loads(answer)
            ranked = [items[item["index"]] for item in ranking["items"]]
            self._shown(Shown(ranking["request_id"], ranked, self._clock.now_ms()))


def read_requests(path: Path) -> Source:
    """Rank requests of a file, a JSON object a line, again and again.

    Raises:
        BadInput: a line is none, or there is none.
    """
    bodies = []
    with path.open("rb") as lines:
        for number, line in enumerate(lines, 1):
            if not line.strip():
                continue
            try:
                made = orjson.loads(line)
            except orjson.JSONDecodeError as error:
                raise BadInput(f"{path}, line {number}: expected a JSON object, found {error}") from None
            if not isinstance(made, dict) or "candidates" not in made:
                raise BadInput(
                    f'{path}, line {number}: expected {{"context": {{…}}, "candidates": [{{…}}]}}, found '
                    f"{line[:60]!r}"
                )
            bodies.append(line.strip())
    if not bodies:
        raise BadInput(f"{path}: expected a rank request a line, found none")
    turns = itertools.cycle(bodies)
    return lambda: Request(RANK, next(turns))
