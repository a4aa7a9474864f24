"""Events for a system that is being killed: each is sent until the gateway has acknowledged it, and kept."""

from __future__ import annotations

import random
import threading
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import httpx

from freshet.client import Client, RetryPolicy

USERS, ITEMS = 60, 40
ACTED_ON = 0.3  # share of impressions with a click; half of these are bought too
SENT_TWICE = 0.03  # share of requests whose acknowledged events are sent again
ACTION_FIRST = 0.05  # share of actions that overtake their impression
ACTION_DELAY_MS = (20, 900)
PATIENCE = RetryPolicy(attempts=10_000, first_pause_s=0.05, longest_pause_s=0.4)


@dataclass(frozen=True, slots=True)
class Impression:
    """One item served to a user; (request, item) identifies it."""

    seq: int
    user: str
    ts: int


@dataclass
class Traffic:
    """Threads that send requests of several items, and actions on them, each to one of the gateways. What is
    acknowledged stands in its books."""

    gateways: Sequence[str]
    seed: int
    threads: int = 2
    pause_s: float = 0.04  # between two requests of a thread
    life: str = ""  # of request ids, where several send to the same system one after the other
    first_seq: int = 0

    def __post_init__(self) -> None:
        self.impressions: dict[tuple[str, int], Impression] = {}
        self.actions: dict[tuple[str, int], set[str]] = {}  # impression -> types of its actions
        self.acked_begin = dict.fromkeys(
            self.gateways, 0.0
        )  # monotonic: begin of the newest acknowledged call
        self.longest_wait_s = 0.0  # for an acknowledgement
        self.errors: list[BaseException] = []
        self.resent = 0
        self._seq = self.first_seq
        self._lock = threading.Lock()
        self._stop = threading.Event()
        self._threads = [threading.Thread(target=self._work, args=(i,)) for i in range(self.threads)]

    def start(self) -> None:
        """Begin to send."""
        for thread in self._threads:
            thread.start()

    def stop(self, *, within_s: float = 60.0) -> None:
        """No new requests; returns when everything begun has been acknowledged."""
        self._stop.set()
        for thread in self._threads:
            thread.join(within_s)
            assert not thread.is_alive(), "the gateway acknowledges nothing any more"

    def _work(self, worker: int) -> None:
        rng = random.Random(f"{self.seed}/{worker}")
        gateway = self.gateways[worker % len(self.gateways)]
        client = Client(gateway=gateway, timeout_s=5.0, retries=PATIENCE)
        due: list[tuple[float, dict[str, Any]]] = []
        number = 0
        try:
            while not self._stop.wait(self.pause_s * rng.uniform(0.2, 1.8)):
                number += 1
                page = self._page(f"{self.life}{worker}-{number}", rng)
                actions = list(_actions(page, rng))
                early = [a for a in actions if rng.random() < ACTION_FIRST]
                self._send_actions(client, gateway, early)
                self._send_page(client, gateway, page, again=rng.random() < SENT_TWICE)
                now = time.monotonic()
                due += [(now + rng.uniform(0, 0.6), a) for a in actions if a not in early]
                ripe = [a for at, a in due if at <= now]
                due = [(at, a) for at, a in due if at > now]
                self._send_actions(client, gateway, ripe)
            self._send_actions(client, gateway, [a for _, a in due])
        except BaseException as error:
            self.errors.append(error)
        finally:
            client.close()

    def _acknowledged(self, gateway: str, began: float) -> None:
        self.acked_begin[gateway] = max(self.acked_begin[gateway], began)
        self.longest_wait_s = max(self.longest_wait_s, time.monotonic() - began)

    def _page(self, request: str, rng: random.Random) -> dict[str, Any]:
        items = rng.sample(range(ITEMS), rng.randint(1, 4))
        with self._lock:
            first, self._seq = self._seq, self._seq + len(items)
        return {
            "request_id": request,
            "ts": time.time_ns() // 1_000_000,
            "user": f"user-{min(rng.randrange(USERS), rng.randrange(USERS))}",
            "items": [{"item": item, "seq": float(first + i)} for i, item in enumerate(items)],
        }

    def _send_page(self, client: Client, gateway: str, page: Mapping[str, Any], *, again: bool) -> None:
        began = time.monotonic()
        client.impressions([page])
        self._acknowledged(gateway, began)
        for one in page["items"]:
            made = Impression(int(one["seq"]), page["user"], page["ts"])
            self.impressions[page["request_id"], one["item"]] = made
        if again:
            client.impressions([page])
            self.resent += 1

    def _send_actions(self, client: Client, gateway: str, actions: Iterable[Mapping[str, Any]]) -> None:
        events = list(actions)
        if not events:
            return
        began = time.monotonic()
        client.actions(events)
        self._acknowledged(gateway, began)
        for event in events:
            self.actions.setdefault((event["request_id"], event["item"]), set()).add(event["type"])


def _actions(page: Mapping[str, Any], rng: random.Random) -> Iterable[dict[str, Any]]:
    for one in page["items"]:
        if rng.random() < ACTED_ON:
            for kind in ("click", "buy") if rng.random() < 0.5 else ("click",):
                yield {
                    "event_id": f"{page['request_id']}/{one['item']}/{kind}",
                    "request_id": page["request_id"],
                    "item": one["item"],
                    "type": kind,
                    "ts": page["ts"] + rng.randint(*ACTION_DELAY_MS),
                }


@dataclass
class Asker:
    """Asks for a ranking again and again, and keeps what serving answered."""

    inference: str
    pause_s: float = 0.05

    def __post_init__(self) -> None:
        self.answers: list[tuple[float, float, str]] = []  # monotonic begin and end, status or "connection"
        self.last_ok_begin = 0.0
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._work)

    def start(self) -> None:
        """Begin to ask."""
        self._thread.start()

    def stop(self) -> None:
        """Ask no more."""
        self._stop.set()
        self._thread.join(30)

    def _work(self) -> None:
        body = {"context": {"user": "user-0"}, "candidates": [{"item": i, "seq": 1} for i in range(10)]}
        with httpx.Client(timeout=20.0) as client:
            while not self._stop.wait(self.pause_s):
                began = time.monotonic()
                try:
                    outcome = str(client.post(f"{self.inference}/v1/rank", json=body).status_code)
                except httpx.TransportError as error:
                    outcome = f"connection ({type(error).__name__})"
                self.answers.append((began, time.monotonic(), outcome))
                if outcome == "200":
                    self.last_ok_begin = max(self.last_ok_begin, began)
