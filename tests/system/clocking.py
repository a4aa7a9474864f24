"""Wall clocks of one process after the other set wrong and right again, and what became of the events of a
client meanwhile.
"""

from __future__ import annotations

import base64
import re
import threading
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import httpx
import orjson

from freshet.config.spec.topics import Topics
from freshet.log import EventLog
from freshet.testing.contracts.eventlog import answered
from freshet.types import TopicPartition
from tests.fixtures import audit

JUMPS_S: Mapping[str, float] = {"+1 h": 3_600, "-1 h": -3_600, "+1 day": 86_400, "-1 day": -86_400}
WRONG_S, RIGHT_S = 6.0, 20.0
CLICK_AFTER_S = 0.4
MARGIN_S = CLICK_AFTER_S + 0.6
"""Between the last request of a case and the next case: its click is sent by then."""

LEDGER_FIGURES = ("impressions_late", "actions_late", "actions_orphan")


class Clocked(Protocol):
    """A running system, of which each part has a wall clock that can be set. Parts are processes; beside them
    "client" and "all", which is the client with every process."""

    @property
    def parts(self) -> Sequence[str]:
        """The processes whose clock can be set."""

    def jump(self, part: str, seconds: float) -> None:
        """Set a part's clock so much ahead of the machine's."""

    def joiner(self) -> dict[str, Any]:
        """What the joiner says of itself; empty while it does not answer."""

    def applied(self) -> int:
        """Sum of the offsets of samples that the trainer has learned from; 0 while it does not answer."""

    def births(self) -> Mapping[str, int]:
        """{process: its process id}"""


@dataclass(slots=True)
class Request:
    """One impression and its click, as the client sent them."""

    name: str
    by: str  # "gateway" or "rank"
    at: float  # monotonic
    refused: str = ""  # why the impression was not acknowledged
    click_refused: str = ""


class Clicker:
    """Sends an impression every `pause_s`, by the gateway and by rank requests in turn, and a click on each.
    It dates its events by a clock that can be set."""

    def __init__(self, gateway: str, inference: str, pause_s: float = 0.25) -> None:
        self.requests: list[Request] = []
        self.errors: list[BaseException] = []
        self.offset_s = 0.0
        self._gateway, self._inference, self._pause_s = gateway, inference, pause_s
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._work)

    def start(self) -> None:
        """Begin to send."""
        self._thread.start()

    def stop(self) -> None:
        """Send the clicks that are due, and no more."""
        self._stop.set()
        self._thread.join(60)
        assert not self._thread.is_alive()

    def _now_ms(self) -> int:
        return round((time.time() + self.offset_s) * 1_000)

    def _work(self) -> None:
        due: list[Request] = []
        try:
            with httpx.Client(timeout=30) as client:
                while not self._stop.wait(self._pause_s):
                    request = self._show(client)
                    if not request.refused:
                        due.append(request)
                    ripe = [r for r in due if r.at + CLICK_AFTER_S <= time.monotonic()]
                    due = [r for r in due if r not in ripe]
                    for one in ripe:
                        self._click(client, one)
                for one in due:
                    self._click(client, one)
        except BaseException as error:
            self.errors.append(error)

    def _show(self, client: httpx.Client) -> Request:
        number = len(self.requests)
        by = "rank" if number % 2 else "gateway"
        request = Request(f"clk-{number:06}", by, time.monotonic())
        self.requests.append(request)
        item = {"item": number % 40, "seq": float(number + 1)}
        user = f"user-{number % 60}"
        if by == "rank":
            body = {"request_id": request.name, "context": {"user": user}, "candidates": [item]}
            answer = client.post(f"{self._inference}/v1/rank", json=body)
        else:
            page = {"request_id": request.name, "ts": self._now_ms(), "user": user, "items": [item]}
            answer = client.post(f"{self._gateway}/v1/impressions", json=page)
        request.refused = _refusal(answer)
        return request

    def _click(self, client: httpx.Client, request: Request) -> None:
        action = {
            "event_id": f"{request.name}/click",
            "request_id": request.name,
            "item": int(request.name[4:]) % 40,
            "type": "click",
            "ts": self._now_ms(),
        }
        request.click_refused = _refusal(client.post(f"{self._gateway}/v1/actions", json=action))


def _refusal(answer: httpx.Response) -> str:
    if answer.status_code < 400:
        return ""
    found = re.search(r"[^\"{}]*(?:ahead|1970)[^\"{}]*", answer.text)
    return f"{answer.status_code} {found[0].strip() if found else answer.text[:80]}"


@dataclass
class Case:
    """One clock set wrong for WRONG_S and then right, with what the joiner counted."""

    part: str
    jump: str
    began: float = 0.0  # monotonic
    right_at: float = 0.0
    ended: float = 0.0
    figures: list[Counter[str]] = field(default_factory=list)  # before, at `right_at`, at `ended`
    applied: tuple[int, int] = (0, 0)  # at `right_at`, at `ended`
    step_ms: int = 0  # the largest step of its clock in the joiner's status
    disputed: int = 0  # most partitions that waited


def run_case(system: Clocked, clicker: Clicker, part: str, jump: str) -> Case:
    """Set one part's clock wrong, let WRONG_S pass, set it right, let RIGHT_S pass."""
    case = Case(part, jump)

    def set_clocks(seconds: float) -> None:
        if part in ("client", "all"):
            clicker.offset_s = seconds
        if part != "client":
            system.jump(part, seconds)

    case.figures.append(_figures(system))
    case.began = time.monotonic()
    set_clocks(JUMPS_S[jump])
    _watch(system, case, WRONG_S)
    set_clocks(0.0)
    case.right_at = time.monotonic()
    case.figures.append(_figures(system))
    learned = system.applied()
    _watch(system, case, RIGHT_S)
    case.ended = time.monotonic()
    _watch(system, case, MARGIN_S)
    case.figures.append(_figures(system))
    case.applied = (learned, system.applied())
    return case


def _figures(system: Clocked) -> Counter[str]:
    """Return the counts of the joiner's ledger, as soon as it answers."""
    pause, deadline = threading.Event(), time.monotonic() + 60
    while "ledger" not in (said := system.joiner()):
        assert time.monotonic() < deadline, "the joiner does not say how it is"
        pause.wait(0.1)
    ledger = said["ledger"]
    return Counter({name: ledger["events"][name] for name in LEDGER_FIGURES} | {"refused": ledger["refused"]})


def _watch(system: Clocked, case: Case, seconds: float) -> None:
    """Poll the joiner's reports on clocks, for so long."""
    until, pause = time.monotonic() + seconds, threading.Event()
    while (left := until - time.monotonic()) > 0:
        said = system.joiner()
        case.step_ms = max(case.step_ms, said.get("clock_step_ms", 0), key=abs)
        case.disputed = max(case.disputed, len(said.get("disputed_ms", {})))
        pause.wait(min(0.4, left))


@dataclass(frozen=True, slots=True)
class Fate:
    """What became of a request: "joined", or why not."""

    request: Request
    what: str


def fates_of(
    requests: Sequence[Request], log: EventLog, topics: Topics, books: audit.Books
) -> Mapping[str, Fate]:
    """By the log: each request's sample of the label click."""
    values: dict[str, list[float]] = {}
    for sample in books.samples:
        if sample.label == 0:
            values.setdefault(sample.request_id, []).append(sample.value)
    late = {sample.request_id for sample in books.late}
    letters = _letters(log, topics)
    return {r.name: Fate(r, _fate(r, values.get(r.name, []), late, letters)) for r in requests}


def _fate(
    request: Request, values: Sequence[float], late: set[str], letters: Mapping[tuple[str, str], str]
) -> str:
    served, clicked = letters.get(("served", request.name)), letters.get(("action", request.name))
    verdicts: list[tuple[object, str]] = [
        (len(values) > 1, f"DOUBLED: {values}"),
        (request.refused, f"impression refused at the door: {_plain(request.refused)}"),
        (served, f"impression a dead letter: {_plain(served or '')}"),
        (request.name in late, "impression late"),
        (not values, "LOST"),
        (1.0 in values, "joined"),
        (request.click_refused, f"click refused at the door: {_plain(request.click_refused)}"),
        (clicked, f"click a dead letter: {_plain(clicked or '')}"),
    ]
    return next((what for holds, what in verdicts if holds), "click late")


def _plain(reason: str) -> str:
    """A reason without its numbers of the moment."""
    return re.sub(r"\d{5,}", "N", reason)[:110]


def _letters(log: EventLog, topics: Topics) -> dict[tuple[str, str], str]:
    """{("served" or "action", request): reason} of dead letters."""
    found: dict[tuple[str, str], str] = {}
    roles = {topics.served: "served", topics.action: "action"}
    for partition in range(log.topics()[topics.dead_letters].partitions):
        at = TopicPartition(topics.dead_letters, partition)
        position, end = log.bounds(at).start, log.bounds(at).end
        reader = log.reader()
        reader.assign({at: position})
        try:
            while position < end:
                for _, records in answered(reader, 1_000, 1.0):
                    position = records.next_offset
                    for value in records.values:
                        letter = orjson.loads(value)
                        named = re.search(rb"clk-\d{6}", base64.b64decode(letter["bytes"]))
                        if named:
                            found[roles[letter["topic"]], named[0].decode()] = letter["reason"]
        finally:
            reader.close()
    return found


@dataclass(frozen=True, slots=True)
class Row:
    """A case and what became of its requests: {fate: how many}, while the clock was wrong and after."""

    case: Case
    wrong: Counter[str]
    right: Counter[str]

    @property
    def late_after(self) -> int:
        """Requests after the correction that were not joined as they happened."""
        return self.right.total() - self.right["joined"]


def rows_of(cases: Sequence[Case], fates: Mapping[str, Fate]) -> list[Row]:
    """One of each case."""

    def between(begin: float, end: float) -> Counter[str]:
        return Counter(f.what for f in fates.values() if begin <= f.request.at < end)

    return [
        Row(case, between(case.began, case.right_at), between(case.right_at, case.ended)) for case in cases
    ]


def table(form: str, rows: Sequence[Row]) -> str:
    """Process, jump, form; of the requests while the clock was wrong: joined, and why not; the same after;
    what the joiner's ledger counts; what its status says of clocks."""
    lines = [
        "process | jump | form | joined of sent, wrong | why not | joined of sent, after | ledger | told"
    ]
    for row in rows:
        case = row.case
        before, wrong, after = case.figures
        ledger = "; ".join(
            f"{name} +{wrong[name] - before[name]}/+{after[name] - wrong[name]}"
            for name in (*LEDGER_FIGURES, "refused")
            if after[name] != before[name]
        )
        told = f"step {case.step_ms} ms" if case.step_ms else ""
        if case.disputed:
            told = f"{told}, {case.disputed} partitions wait".strip(", ")
        lines.append(
            f"{case.part} | {case.jump} | {form} | {_share(row.wrong)} | {_why(row.wrong)} | "
            f"{_share(row.right)}{' ' + _why(row.right) if row.late_after else ''} | {ledger} | {told}"
        )
    return "\n".join(lines)


def _share(fates: Counter[str]) -> str:
    return f"{fates['joined']} of {fates.total()}"


def _why(fates: Counter[str]) -> str:
    return "; ".join(f"{n} {what}" for what, n in fates.most_common() if what != "joined")
