"""Authentication and rate limits of clients, over HTTP and gRPC alike.

The authenticator finds the principal of a request by its token. Without tokens it accepts all requests, which
is for listeners that only this machine can reach.
"""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import structlog
from prometheus_client import CollectorRegistry

from freshet.clock import SYSTEM_CLOCK, Clock
from freshet.http.addresses import client_key, forwarded_address
from freshet.http.messages import Headers, HttpError
from freshet.http.token_files import TokenFile
from freshet.http.tokens import SCOPES, Scope, TokenEntry, bearer, matching_entry, time_text
from freshet.observability.metrics import Metric, register

log = structlog.get_logger(__name__)

AUTH_METRICS = (
    Metric(
        "freshet_door_requests",
        "counter",
        "requests",
        "Requests over HTTP, and calls and messages over gRPC, that came in by a token, by its name.",
        ("token",),
    ),
    Metric(
        "freshet_door_refused",
        "counter",
        "requests",
        "Those that were refused: by reason (token_missing, token_unknown, token_expired, token_scope, "
        'too_often), and by the token\'s name, "" if none is known.',
        ("reason", "token"),
    ),
    Metric(
        "freshet_door_clients",
        "gauge",
        "clients",
        "Tokens and addresses of which it is remembered how often they have come, where that is limited.",
    ),
    Metric("freshet_door_tokens", "gauge", "tokens", "Tokens that are valid now."),
    Metric(
        "freshet_door_tokens_file_wrong",
        "gauge",
        "yes or no",
        "1 while the file of tokens cannot be read or is wrong; those that it held before stay valid.",
    ),
)
"""Metrics of listeners for external clients; their labels are the names that the file of tokens has had."""

MAX_NAMES = 10_000
"""Token names that are counted each; further ones, of a file that changes often, are counted as "others"."""

HINT = "`freshet token new NAME --scopes SCOPES` makes one, `freshet token list` shows those there are"

OnRefused = Callable[[Scope, str, str, str], None]
"""Called with the required scope, the token's name if known, the client's address and the reason."""

MAX_CLIENTS = 10_000
"""Clients with token buckets, in about 3 MB. A new client replaces the one that was idle longest, which would
start again with full buckets: a client with so many addresses is not limited."""

BURST_S = 1.0
"""Seconds of its rate that an idle client may spend at once."""


# --- rate limits


@dataclass(frozen=True, slots=True)
class RateLimits:
    """Limits of one client: of a token, or of an address without tokens. 0: no limit."""

    requests_per_s: float = 0.0
    events_per_s: float = 0.0
    trusted_proxies: int = 0  # number of proxies that are trusted to set X-Forwarded-For


class EventAllowance(NamedTuple):
    """The bucket that a principal's events are charged to."""

    key: str
    events_per_s: float  # > 0


class _Bucket(NamedTuple):
    level: float
    at: float  # time of the level


@dataclass(slots=True)
class _Client:
    """The buckets of a client; None: full, as nothing was taken yet."""

    requests: _Bucket | None = None
    events: _Bucket | None = None


class RateLimiter:
    """Two token buckets for each client, of requests and of events. Not thread-safe; time is an argument.

    A bucket holds `BURST_S` of its rate, and at least one.
    """

    def __init__(self, max_clients: int = MAX_CLIENTS) -> None:
        self._max_clients = max_clients
        self._clients: OrderedDict[str, _Client] = OrderedDict()  # the longest idle first

    def __len__(self) -> int:
        """Return the number of clients with buckets."""
        return len(self._clients)

    def take_request(self, key: str, rate: float, now: float) -> float:
        """Take one request at a rate per second > 0; returns 0, or the seconds until one is available."""
        client = self._client(key)
        level = _level(client.requests, rate, now)
        if level < 1.0:
            return (1.0 - level) / rate
        client.requests = _Bucket(level - 1.0, now)
        return 0.0

    def events_wait_s(self, key: str, rate: float, now: float) -> float:
        """Return the seconds until the bucket of events is no longer overdrawn."""
        if key not in self._clients:
            return 0.0
        return max(0.0, -_level(self._client(key).events, rate, now) / rate)

    def charge_events(self, key: str, rate: float, now: float, n: float) -> None:
        """Take `n` events, and overdraw the bucket if it holds fewer: the events are already accepted."""
        client = self._client(key)
        client.events = _Bucket(_level(client.events, rate, now) - n, now)

    def _client(self, key: str) -> _Client:
        """Return a client as the most recent one. Refused requests count, too: otherwise an overdrawn client
        would be replaced before idle ones, and start again with full buckets."""
        client = self._clients.get(key)
        if client is not None:
            self._clients.move_to_end(key)
            return client
        if len(self._clients) >= self._max_clients:
            self._clients.popitem(last=False)
        client = self._clients[key] = _Client()
        return client


def _level(bucket: _Bucket | None, rate: float, now: float) -> float:
    full = max(1.0, rate * BURST_S)
    return full if bucket is None else min(full, bucket.level + max(0.0, now - bucket.at) * rate)


# --- principals


class Principal(NamedTuple):
    """The client of an accepted request."""

    name: str  # name of the token; "" where none is required
    address: str
    allowance: EventAllowance | None  # None: events are not limited


ANONYMOUS = Principal("", "", None)


class Authenticator:
    """Checks tokens and rate limits, and counts. Lives on one event loop."""

    def __init__(
        self,
        tokens: TokenFile | None = None,
        clock: Clock = SYSTEM_CLOCK,
        *,
        more: Sequence[TokenEntry] = (),
        hint: str = HINT,
        on_refused: OnRefused = lambda scope, name, peer, reason: None,
        limits: RateLimits | None = None,
    ) -> None:
        """Require a token if a file or `more` has some.

        Args:
            more: tokens besides those of the file.
            hint: sent with refusals; says where tokens come from.
        """
        self._tokens, self._clock, self._more, self._hint = tokens, clock, tuple(more), hint
        self._on_refused = on_refused
        self._limits = limits or RateLimits()
        self._limiter = RateLimiter()
        self.required = tokens is not None or bool(more)
        self._requests: Counter[str] = Counter()
        self._refused: Counter[tuple[str, str]] = Counter()

    def register(self, registry: CollectorRegistry) -> None:
        """Register AUTH_METRICS."""
        register(registry, AUTH_METRICS, self.figures)

    def authenticate(
        self,
        scope: Scope,
        authorization: bytes | None,
        peer: str,
        forwarded: bytes | None = None,
        or_scope: Scope | None = None,
    ) -> Principal:
        """Return the principal of a request with a valid token, within its rate limits.

        Args:
            scope: the scope that the token must have.
            authorization: value of the header or metadata `authorization`.
            peer: address of the connection.
            forwarded: value of X-Forwarded-For.
            or_scope: another sufficient scope.

        Raises:
            HttpError: 401 without a valid token, 403 for another scope, 429 beyond the rate limits.
        """
        limits = self._limits
        address = self.address(peer, forwarded)
        entry = self._entry_of(scope, authorization, address, or_scope)
        name, requests_per_s, events_per_s = "", limits.requests_per_s, limits.events_per_s
        if entry is not None:
            name = entry.name
            requests_per_s = requests_per_s if entry.requests_per_s is None else entry.requests_per_s
            events_per_s = events_per_s if entry.events_per_s is None else entry.events_per_s
        allowance = None
        if requests_per_s or events_per_s:  # by token, as another one of its name may have other rates
            key = f"token {entry.id}" if entry is not None else client_key(address)
            wait_s, limit = self._wait(scope, key, requests_per_s, events_per_s)
            if wait_s:
                self._refuse(scope, "too_often", name, address)
                raise _too_often(limit, wait_s)
            allowance = EventAllowance(key, events_per_s) if events_per_s else None
        if entry is not None:
            self._requests[self._label(name)] += 1
        return Principal(name, address, allowance)

    def check_token(
        self, scope: Scope, authorization: bytes | None, peer: str, forwarded: bytes | None = None
    ) -> None:
        """Check the token of a stream before its first message; no request is counted. Raises HttpError."""
        self._entry_of(scope, authorization, self.address(peer, forwarded))

    def address(self, peer: str, forwarded: bytes | None) -> str:
        """Return the client's address, behind the trusted proxies."""
        return forwarded_address(peer, forwarded, self._limits.trusted_proxies)

    def charge_events(self, allowance: EventAllowance | None, events: int) -> None:
        """Charge accepted events; a client that has overdrawn its allowance is refused until it refills."""
        if allowance is not None:
            now = self._clock.monotonic()
            self._limiter.charge_events(allowance.key, allowance.events_per_s, now, events)

    def figures(self) -> Mapping[str, Any]:
        """Return the figures of AUTH_METRICS; those of tokens only where tokens are required."""
        limited = {"clients": len(self._limiter), "refused": dict(self._refused)}
        if not self.required:
            return limited
        now_ms = self._clock.now_ms()
        valid = sum(e.expires_ms is None or e.expires_ms > now_ms for e in self._entries())
        return limited | {
            "requests": dict(self._requests),
            "tokens": valid,
            "tokens_file_wrong": self._tokens is not None and self._tokens.wrong,
        }

    def _entry_of(
        self, scope: Scope, authorization: bytes | None, peer: str, or_scope: Scope | None = None
    ) -> TokenEntry | None:
        if not self.required:
            return None
        token = bearer(authorization)
        entry = matching_entry(token, self._entries()) if token else None
        if entry is None:
            self._refuse(scope, "token_unknown" if token else "token_missing", "", peer)
            wanted = _either(scope, or_scope)
            raise _unknown(wanted, self._hint) if token else _missing(wanted, self._hint)
        if entry.expires_ms is not None and self._clock.now_ms() >= entry.expires_ms:
            self._refuse(scope, "token_expired", entry.name, peer)
            raise _expired(entry, entry.expires_ms, self._hint)
        if scope not in entry.scopes and or_scope not in entry.scopes:
            self._refuse(scope, "token_scope", entry.name, peer)
            raise _without_scope(entry, scope, _either(scope, or_scope), self._hint)
        return entry

    def _wait(self, scope: Scope, key: str, requests_per_s: float, events_per_s: float) -> tuple[float, str]:
        """Take one request; returns the seconds to wait, 0 for none, and the limit that was reached."""
        now = self._clock.monotonic()
        if scope == "send" and events_per_s:
            wait_s = self._limiter.events_wait_s(key, events_per_s, now)
            if wait_s:
                return wait_s, f"{events_per_s:g} events"
        if not requests_per_s:
            return 0.0, ""
        return self._limiter.take_request(key, requests_per_s, now), f"{requests_per_s:g} requests"

    def _entries(self) -> Sequence[TokenEntry]:
        if self._tokens is None:
            return self._more
        entries = self._tokens.now()
        return (*entries, *self._more) if self._more else entries

    def _refuse(self, scope: Scope, reason: str, name: str, peer: str) -> None:
        self._refused[reason, self._label(name)] += 1
        log.warning("a request was refused", reason=reason, holder=name, client=peer)
        self._on_refused(scope, name, peer, reason)

    def _label(self, name: str) -> str:
        known = name in self._requests or len(self._requests) < MAX_NAMES
        return name if known or not name else "others"


def _either(scope: Scope, or_scope: Scope | None) -> str:
    return scope if or_scope is None else f"{scope} or {or_scope}"


def _missing(wanted: str, hint: str) -> HttpError:
    return HttpError(
        401, "token_missing", "a token is asked for", expected=_header_with(wanted), found="no token",
        hint=hint, headers=_challenge(),
    )  # fmt: skip


def _unknown(wanted: str, hint: str) -> HttpError:
    return HttpError(
        401, "token_unknown", "this token is not known", expected=_header_with(wanted), found="another token",
        hint=hint, headers=_challenge('error="invalid_token"'),
    )  # fmt: skip


def _expired(entry: TokenEntry, expires_ms: int, hint: str) -> HttpError:
    return HttpError(
        401, "token_expired", "the token has expired", expected="a token that is valid",
        found=f"{entry.name}'s, valid until {time_text(expires_ms)}", hint=hint,
        headers=_challenge('error="invalid_token"'),
    )  # fmt: skip


def _without_scope(entry: TokenEntry, scope: Scope, wanted: str, hint: str) -> HttpError:
    return HttpError(
        403, "token_scope", f"this token may not {wanted}", expected=f"a token with the scope {wanted}",
        found=f"{entry.name}'s, which may {', '.join(s for s in SCOPES if s in entry.scopes)}", hint=hint,
        headers=_challenge(f'error="insufficient_scope", scope="{scope}"'),
    )  # fmt: skip


def _too_often(limit: str, wait_s: float) -> HttpError:
    return HttpError(
        429, "too_often", "this client asks too much", expected=f"at most {limit} a second", found="more",
        hint="wait Retry-After, send it again; send several events in one request", retry_after_s=wait_s,
    )  # fmt: skip


def _header_with(scope: str) -> str:
    return f"Authorization: Bearer TOKEN, with the scope {scope}"


def _challenge(more: str = "") -> Headers:
    """Return the headers of RFC 6750, section 3; the rest of a request's body is not awaited."""
    text = 'Bearer realm="freshet"' + (f", {more}" if more else "")
    return ((b"www-authenticate", text.encode()), (b"connection", b"close"))
