"""The Python client: events to a gateway, ranked items and scores from an inference server.

Needs the extra `client` (httpx). Events have ids, so sending one again after a lost answer changes nothing:
temporary failures (429, 503, a broken connection) are retried with growing pauses. So is a rank request with
a `request_id`. Without one each attempt may be logged as an impression of its own, so the request is retried
only if nothing can have been done: it was not sent, or the server refused it unread or as it is overloaded.
"""

from __future__ import annotations

import asyncio
import math
import random
import ssl
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from ipaddress import ip_address
from types import TracebackType
from typing import Any, Generic, Self, TypeVar

import httpx
import orjson

from freshet.errors import BadInput, ConfigError, Overloaded, Unavailable

__all__ = [
    "Ack",
    "AsyncClient",
    "Client",
    "EventsRefused",
    "Item",
    "Ranking",
    "Receipt",
    "RetryPolicy",
    "Rows",
]

Event = Mapping[str, Any]
PROGRESS_POLL_S = 0.05

_RETRIED = (429, 502, 503, 504)
_NOT_SENT = (httpx.ConnectError, httpx.ConnectTimeout, httpx.PoolTimeout)
_REFUSED_UNREAD = ("bodies", "connections")
"""Codes of 503 with which a server refuses a request before it reads it; `unavailable` may come after."""

_JSON = {"content-type": "application/json"}


@dataclass(frozen=True, slots=True)
class Ack:
    """Position of an event in the log, where it is durable."""

    topic: str
    partition: int
    offset: int


@dataclass(frozen=True, slots=True)
class Receipt:
    """Outcome of the events of one call."""

    acks: tuple[Ack, ...]  # of the accepted events, in the order of the call
    refused: tuple[Mapping[str, Any], ...] = ()  # {index, path, expected, found} of the other events


class EventsRefused(BadInput):
    """Some events do not fit the schema or are dated ahead; `receipt` lists them. The others are accepted."""

    def __init__(self, message: str, receipt: Receipt) -> None:
        super().__init__(message)
        self.receipt = receipt


@dataclass(frozen=True, slots=True)
class Rows:
    """Rows of one feature of a candidate."""

    known: int  # values that have a row
    of: int  # values: one, or as many as a list holds; 0 for a null
    age_s: int | None  # age of the newest event that one of the rows has learned from


@dataclass(frozen=True, slots=True)
class Item:
    """A ranked candidate."""

    index: int  # of the candidate in the request
    score: float
    predictions: Mapping[str, float]  # label -> prediction
    propensity: float  # probability with which the policy puts this candidate in this place
    rows: Mapping[str, Rows] | None = None  # by feature; None without `explain`


@dataclass(frozen=True, slots=True)
class Ranking:
    """The answer to a rank request."""

    request_id: str
    items: tuple[Item, ...]  # best first
    version: int  # of the dense weights
    freshness_ms: int | None  # now minus the newest event time the model has learned from
    unknown_rows: Mapping[str, int]  # feature -> values that have no row yet
    explored: bool  # whether the order is random
    defaulted_rows: Mapping[str, int] = field(default_factory=dict)
    """Reason -> rows that the scores lack though the server's disk may have them."""


@dataclass(frozen=True, slots=True)
class RetryPolicy:
    """Number of attempts, and pauses between them."""

    attempts: int = 6
    first_pause_s: float = 0.1  # doubled each time, half of it random so that clients spread
    longest_pause_s: float = 5.0

    def pause_s(self, attempt: int, retry_after: str | None, chance: float) -> float | None:
        """Return the pause after a failed attempt (0 is the first), or None to give up; `chance`: 0 to 1."""
        if attempt + 1 >= self.attempts:
            return None
        pause: float = min(self.first_pause_s * 2.0**attempt, self.longest_pause_s) * (0.5 + 0.5 * chance)
        return max(pause, min(_seconds(retry_after), 60.0))


def _seconds(retry_after: str | None) -> float:
    """Return the seconds of a Retry-After header; 0 if it is absent or a date."""
    text = (retry_after or "").strip()
    return float(text) if text.isascii() and text.isdigit() else 0.0


def _checked(url: str) -> str:
    """Return a server's URL without a slash at its end. Raises ConfigError for other text."""
    try:
        parsed = httpx.URL(url)
        whole = parsed.scheme in ("http", "https") and parsed.host and (parsed.port or 0) < 65_536
        reason = "" if whole else "scheme or host is missing, or the port is none"
    except (httpx.InvalidURL, ValueError) as error:
        reason = str(error)
    if reason:
        raise ConfigError("client", "URL", url, "a URL such as http://127.0.0.1:7000", reason)
    return url.rstrip("/")


def _verification(ca_file: str, cert_file: str, key_file: str) -> ssl.SSLContext | bool:
    """Return the option `verify` of httpx for the files of `Client`. Raises ConfigError if one is invalid."""
    if not (ca_file or cert_file or key_file):
        return True
    try:
        context = ssl.create_default_context(cafile=ca_file or None)
        if cert_file or key_file:
            # With the empty password an encrypted key is refused; without one OpenSSL would prompt.
            context.load_cert_chain(cert_file, key_file or None, password="")  # nosec B106
    except (OSError, ValueError) as error:
        found = ", ".join(path for path in (ca_file, cert_file, key_file) if path)
        raise ConfigError(
            "client", "", f"{found}: {error}",
            "PEM files of an authority (ca_file), of a certificate and of its key, not encrypted",
        ) from error  # fmt: skip
    return context


def _authorization(token: str) -> dict[str, str]:
    """Return the header of a token. Raises ConfigError, without the token, if it is malformed."""
    if token and not (token.isascii() and token.isprintable() and len(token.split()) == 1):
        raise ConfigError("client", "token", "not shown here", "printable ASCII without spaces")
    return {"authorization": f"Bearer {token}"} if token else {}


def _is_loopback(host: str) -> bool:
    try:
        return ip_address(host).is_loopback
    except ValueError:  # a host name
        return host == "localhost"


def _json(value: Any) -> bytes:
    """Encode a value as JSON. Raises BadInput for values that JSON lacks, such as NaN."""
    try:
        text = orjson.dumps(value, option=orjson.OPT_SERIALIZE_NUMPY)
    except TypeError as error:
        raise BadInput(
            "expected dicts, lists, texts, booleans, None, finite floats and integers of 64 bits; "
            f"found: {error}"
        ) from None
    if b"null" in text:  # orjson writes NaN so, too
        _refuse_not_finite(value, "")
    return text


def _refuse_not_finite(value: Any, path: str) -> None:
    if isinstance(value, Mapping):
        for name, inner in value.items():
            _refuse_not_finite(inner, f"{path}.{name}" if path else str(name))
    elif isinstance(value, list | tuple):
        for index, inner in enumerate(value):
            _refuse_not_finite(inner, f"{path}[{index}]")
    elif hasattr(value, "tolist"):  # numpy's arrays and scalars
        _refuse_not_finite(value.tolist(), path)
    elif isinstance(value, float) and not math.isfinite(value):
        raise BadInput(f"{path}: expected a finite number, found {value}; send None where there is no value")


def _receipt(answer: httpx.Response) -> Receipt:
    body = _body(answer, (202, 422))
    if "acks" not in body:
        raise BadInput(_message(body))
    receipt = Receipt(
        tuple(Ack(a["topic"], a["partition"], a["offset"]) for a in body["acks"]),
        tuple(body.get("refused", ())),
    )
    if receipt.refused:
        first = receipt.refused[0]
        raise EventsRefused(
            f"event {first['index']}: {first['path'] or 'as a whole'}: expected {first['expected']}, "
            f"found {first['found']} ({len(receipt.refused)} of "
            f"{len(receipt.refused) + len(receipt.acks)} refused; the others are accepted)",
            receipt,
        )
    return receipt


def _ranking(answer: httpx.Response) -> Ranking:
    body = _body(answer, (200,))
    return Ranking(
        str(body["request_id"]),
        tuple(map(_item, body["items"])),
        body["version"],
        body["freshness_ms"],
        body["unknown_rows"],
        body["explored"],
        body.get("defaulted_rows", {}),  # absent in answers of older servers
    )


class _Looks:
    """The queries of one wait for progress, without I/O: pauses between them, and the outcome."""

    def __init__(self) -> None:
        self._problem = "no answer"  # of the newest complete query; "": none

    def answered(self, answer: httpx.Response) -> float:
        """Return the pause before the next query; 0: the event is served. Raises as `_body`."""
        if answer.status_code not in _RETRIED:
            self._problem = ""
            return 0.0 if _body(answer, (200,))["served"] else PROGRESS_POLL_S
        overloaded = answer.status_code == 429
        self._problem = "" if overloaded else f"{answer.status_code}: {_message(_json_of(answer))}"
        return max(PROGRESS_POLL_S, _seconds(answer.headers.get("retry-after")))

    def failed(self, problem: httpx.TransportError) -> float:
        """Return the pause after a query without an answer."""
        self._problem = repr(problem)
        return PROGRESS_POLL_S

    def ended(self, url: str) -> bool:
        """Return False: the event was not served in time. Raises Unavailable if that is not known."""
        if self._problem:
            raise Unavailable(f"{url}: {self._problem}; whether the event is served is not known: wait again")
        return False


def _nothing_done(answer: httpx.Response | None, problem: Exception | None) -> bool:
    """Return whether a failed attempt has certainly changed nothing."""
    if answer is None:
        return isinstance(problem, _NOT_SENT)
    error = _error(_json_of(answer))
    code = error.get("code") if isinstance(error, Mapping) else None
    return answer.status_code == 429 or (answer.status_code == 503 and code in _REFUSED_UNREAD)


def _json_of(answer: httpx.Response) -> Any:
    try:
        return orjson.loads(answer.content)
    except orjson.JSONDecodeError:
        return {}


def _body(answer: httpx.Response, good: tuple[int, ...]) -> Any:
    body = _json_of(answer)
    if answer.status_code in good:
        return body
    message = f"{answer.request.url}: {answer.status_code}: {_message(body)}"
    if answer.status_code == 429:
        raise Overloaded(message, retry_after_s=_seconds(answer.headers.get("retry-after")))
    if answer.status_code >= 500:
        raise Unavailable(message)
    raise BadInput(message)


def _item(item: Mapping[str, Any]) -> Item:
    rows = item.get("rows")
    return Item(
        item["index"],
        item["score"],
        item["predictions"],
        item["propensity"],
        None if rows is None else {n: Rows(r["known"], r["of"], r["age_s"]) for n, r in rows.items()},
    )


def _error(body: Any) -> Any:
    return body.get("error") if isinstance(body, Mapping) else None


def _message(body: Any) -> str:
    error = _error(body)
    if not isinstance(error, Mapping):
        return str(error or "no reason given")
    parts = [str(error.get("message"))]
    parts += [f"{key} {error[key]}" for key in ("expected", "found", "hint") if error.get(key) is not None]
    return "; ".join(parts)


def _query(ack: Ack) -> dict[str, str | int]:
    return {"topic": ack.topic, "partition": ack.partition, "offset": ack.offset}


_Http = TypeVar("_Http", httpx.Client, httpx.AsyncClient)


class _BaseClient(Generic[_Http]):
    """Options, requests and answers of both clients, without I/O."""

    _open: type[_Http]

    def __init__(
        self,
        gateway: str = "http://127.0.0.1:7000",
        inference: str = "http://127.0.0.1:7001",
        *,
        token: str = "",
        ca_file: str = "",
        cert_file: str = "",
        key_file: str = "",
        timeout_s: float = 10.0,
        retries: RetryPolicy | None = None,
    ) -> None:
        self._gateway, self._inference = _checked(gateway), _checked(inference)
        self._retries, self._timeout_s = retries or RetryPolicy(), timeout_s
        hosts = {httpx.URL(url).host for url in (self._gateway, self._inference)}
        direct = {f"all://[{h}]" if ":" in h else f"all://{h}" for h in hosts if _is_loopback(h)}
        self._http: _Http = self._open(
            headers=_authorization(token),
            timeout=timeout_s,
            trust_env=len(direct) < len(hosts),
            mounts=dict.fromkeys(direct),  # None: no proxy, as none reaches this machine
            verify=_verification(ca_file, cert_file, key_file),
        )

    @staticmethod
    def _rank_body(
        context: Event,
        candidates: Sequence[Event],
        k: int | None,
        request_id: str | int | None,
        **flags: bool,
    ) -> bytes:
        body = {"context": context, "candidates": candidates, "k": k, "request_id": request_id}
        body |= {name: flag or None for name, flag in flags.items()}
        return _json({key: value for key, value in body.items() if value is not None})

    def _pause_s(
        self,
        attempt: int,
        url: str,
        answer: httpx.Response | None,
        problem: Exception | None,
        *,
        repeatable: bool,
    ) -> float | None:
        """Return the pause before the next attempt; None if the answer stands.

        Raises Unavailable if there is no answer after the last attempt, or if the request is not `repeatable`
        and may have been carried out.
        """
        if answer is not None and answer.status_code not in _RETRIED:
            return None
        if not repeatable and not _nothing_done(answer, problem):
            found = repr(problem) if answer is None else f"{answer.status_code}: {_message(_json_of(answer))}"
            raise Unavailable(
                f"{url}: {found}; not repeated, as the impression may be logged: pass a `request_id`, "
                "with which repeats count once"
            ) from problem
        after = answer.headers.get("retry-after") if answer is not None else None
        pause_s = self._retries.pause_s(attempt, after, random.random())  # nosec B311  # a pause
        if pause_s is None and answer is None:
            raise Unavailable(f"{url}: {problem!r} after {attempt + 1} attempts") from problem
        return pause_s


class Client(_BaseClient[httpx.Client]):
    """Blocking client; thread-safe. Close it, or use it in `with`.

    `token` is sent with all requests. A proxy of the environment is used for servers on other machines only.
    For https:// URLs, `ca_file` holds the authority of the servers' certificates (by default, the system's
    authorities), and `cert_file` with `key_file` is the client's certificate. Raises ConfigError for a
    malformed URL or token, and for files that cannot be read or do not match.
    """

    _open = httpx.Client

    def impressions(self, events: Event | Sequence[Event]) -> Receipt:
        """Send impressions, one event or a batch; return when they are durable in the log.

        Raises:
            EventsRefused: some events do not fit; the others are accepted.
            BadInput: JSON lacks a value, such as NaN; nothing was sent.
            Overloaded, Unavailable: all attempts failed; sending the events again is safe.
        """
        return self._send("impressions", events)

    def shown(self, events: Event | Sequence[Event]) -> Receipt:
        """Send events of items that were really seen; as `impressions`."""
        return self._send("shown", events)

    def actions(self, events: Event | Sequence[Event]) -> Receipt:
        """Send actions; as `impressions`."""
        return self._send("actions", events)

    def rank(
        self,
        context: Event,
        candidates: Sequence[Event],
        *,
        k: int | None = None,
        request_id: str | int | None = None,
        dry_run: bool = False,
        explain: bool = False,
    ) -> Ranking:
        """Order candidates by the spec's score, best first; at most `k` of them.

        With `dry_run` nothing is logged as served and nothing is explored. With `explain` each item has its
        `rows`.

        Without `request_id` (an id in `context` does not count) each attempt may be logged as an impression
        of its own, so an attempt that may have been carried out is not repeated, except in a dry run.

        Raises BadInput if a field has the wrong type, Unavailable after the last attempt.
        """
        content = self._rank_body(context, candidates, k, request_id, dry_run=dry_run, explain=explain)
        repeatable = dry_run or request_id is not None
        return _ranking(self._post(f"{self._inference}/v1/rank", content, repeatable=repeatable))

    def wait_until_served(self, ack: Ack | Receipt, *, timeout_s: float = 30.0) -> bool:
        """Wait until served rows have learned from an event; return False if they have not in `timeout_s`.

        The inference server answers from the log and the row store (`/v1/progress`): the joiner has read the
        event, every bucket has applied its samples, and the server has those rows. An event without samples
        counts once the joiner has read it: its window is open, it is one of a model's first positives, which
        are held, or it makes none, as one that is late or a dead letter.

        Temporary failures are retried until then.

        Raises:
            Unavailable: at the end of `timeout_s` the newest query had failed, or none was answered; or the
                server has an internal error.
            BadInput: the server refuses the query, as for a topic of another model.
        """
        acks = (ack,) if isinstance(ack, Ack) else ack.acks
        url, looks, deadline = f"{self._inference}/v1/progress", _Looks(), time.monotonic() + timeout_s
        for one in acks:
            pause_s = PROGRESS_POLL_S
            while pause_s:
                patience_s = min(self._timeout_s, max(deadline - time.monotonic(), PROGRESS_POLL_S))
                try:
                    pause_s = looks.answered(self._http.get(url, params=_query(one), timeout=patience_s))
                except httpx.TransportError as problem:
                    if time.monotonic() >= deadline:  # the end may have cut this query short
                        return looks.ended(url)
                    pause_s = looks.failed(problem)
                left_s = deadline - time.monotonic()
                if pause_s and left_s <= 0:
                    return looks.ended(url)
                time.sleep(max(0.0, min(pause_s, left_s)))
        return True

    def _send(self, stream: str, events: Event | Sequence[Event]) -> Receipt:
        return _receipt(self._post(f"{self._gateway}/v1/{stream}", _json(events)))

    def _post(self, url: str, content: bytes, *, repeatable: bool = True) -> httpx.Response:
        attempt = 0
        while True:
            answer, problem = None, None
            try:
                answer = self._http.post(url, content=content, headers=_JSON)
            except httpx.TransportError as error:
                problem = error
            pause_s = self._pause_s(attempt, url, answer, problem, repeatable=repeatable)
            if pause_s is None and answer is not None:
                return answer
            time.sleep(pause_s or 0.0)
            attempt += 1

    def close(self) -> None:
        """Close connections. Idempotent."""
        self._http.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()


class AsyncClient(_BaseClient[httpx.AsyncClient]):
    """As `Client`, for asyncio. Close it, or use it in `async with`."""

    _open = httpx.AsyncClient

    async def impressions(self, events: Event | Sequence[Event]) -> Receipt:
        """As `Client.impressions`."""
        return await self._send("impressions", events)

    async def shown(self, events: Event | Sequence[Event]) -> Receipt:
        """As `Client.shown`."""
        return await self._send("shown", events)

    async def actions(self, events: Event | Sequence[Event]) -> Receipt:
        """As `Client.actions`."""
        return await self._send("actions", events)

    async def rank(
        self,
        context: Event,
        candidates: Sequence[Event],
        *,
        k: int | None = None,
        request_id: str | int | None = None,
        dry_run: bool = False,
        explain: bool = False,
    ) -> Ranking:
        """As `Client.rank`."""
        content = self._rank_body(context, candidates, k, request_id, dry_run=dry_run, explain=explain)
        repeatable = dry_run or request_id is not None
        return _ranking(await self._post(f"{self._inference}/v1/rank", content, repeatable=repeatable))

    async def wait_until_served(self, ack: Ack | Receipt, *, timeout_s: float = 30.0) -> bool:
        """As `Client.wait_until_served`."""
        acks = (ack,) if isinstance(ack, Ack) else ack.acks
        url, looks = f"{self._inference}/v1/progress", _Looks()
        try:
            async with asyncio.timeout(timeout_s):
                for one in acks:
                    pause_s = PROGRESS_POLL_S
                    while pause_s:
                        try:
                            pause_s = looks.answered(await self._http.get(url, params=_query(one)))
                        except httpx.TransportError as problem:
                            pause_s = looks.failed(problem)
                        await asyncio.sleep(pause_s)
        except TimeoutError:
            return looks.ended(url)
        return True

    async def _send(self, stream: str, events: Event | Sequence[Event]) -> Receipt:
        url = f"{self._gateway}/v1/{stream}"
        return _receipt(await self._post(url, _json(events)))

    async def _post(self, url: str, content: bytes, *, repeatable: bool = True) -> httpx.Response:
        attempt = 0
        while True:
            answer, problem = None, None
            try:
                answer = await self._http.post(url, content=content, headers=_JSON)
            except httpx.TransportError as error:
                problem = error
            pause_s = self._pause_s(attempt, url, answer, problem, repeatable=repeatable)
            if pause_s is None and answer is not None:
                return answer
            await asyncio.sleep(pause_s or 0.0)
            attempt += 1

    async def close(self) -> None:
        """Close connections. Idempotent."""
        await self._http.aclose()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        await self.close()
