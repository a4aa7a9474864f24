"""Who may come in by a door, over HTTP and gRPC alike: by tokens with scopes, where a file of them is set.

Without tokens a door lets everybody in who reaches it, which is for this machine alone.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import structlog
from prometheus_client import CollectorRegistry

from freshet.clock import SYSTEM_CLOCK, Clock
from freshet.http.rate_limits import Buckets, Payer, address_key, forwarded_address
from freshet.http.responses import Headers, HttpError
from freshet.http.token_file import TokenFile
from freshet.http.tokens import SCOPES, Scope, TokenEntry, bearer, shown, time_text
from freshet.observability.metrics import Metric, register

__all__ = ["DOOR_METRICS", "NOBODY", "Guard", "Guest", "Limits"]

log = structlog.get_logger(__name__)

DOOR_METRICS = (
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
"""What doors count for which tokens are set; names are at most as many as their file has had."""

MOST_NAMES = 10_000
"""Names that are counted one by one; more, of a file that changes all the time, are counted as "others"."""


HINT = "`freshet token new NAME --scopes SCOPES` makes one, `freshet token list` shows those there are"

OnRefused = Callable[[Scope, str, str, str], None]
"""Told the scope that was asked for, the token's name if it is known, the address, and why."""


@dataclass(frozen=True, slots=True)
class Limits:
    """How often one client may come: one token, or one address where no tokens are asked for. 0: no limit."""

    requests_per_s: float = 0.0
    events_per_s: float = 0.0
    trusted_proxies: int = 0  # whose X-Forwarded-For is believed


class Guest(NamedTuple):
    """Who was let in."""

    who: str  # the token's name; "" where none is asked for
    address: str
    payer: Payer | None  # by whom events are paid; None where they are not limited


NOBODY = Guest("", "", None)


class Guard:
    """Decides, and counts. Lives on one event loop."""

    def __init__(
        self,
        tokens: TokenFile | None = None,
        clock: Clock = SYSTEM_CLOCK,
        *,
        more: Sequence[TokenEntry] = (),
        hint: str = HINT,
        on_refused: OnRefused = lambda scope, name, peer, why: None,
        limits: Limits | None = None,
    ) -> None:
        """Of a file, and of `more` besides; without any token nobody is asked for one. `hint` says to who is
        refused where tokens come from; `on_refused` is told of each."""
        self._tokens, self._clock, self._more, self._hint = tokens, clock, tuple(more), hint
        self._on_refused = on_refused
        self._limits = limits or Limits()
        self._buckets = Buckets()
        self.asks = tokens is not None or bool(more)
        self._requests: Counter[str] = Counter()
        self._refused: Counter[tuple[str, str]] = Counter()

    def register(self, registry: CollectorRegistry) -> None:
        """Serve DOOR_METRICS."""
        register(registry, DOOR_METRICS, self.figures)

    def admit(
        self,
        scope: Scope,
        authorization: bytes | None,
        peer: str,
        forwarded: bytes | None = None,
        or_scope: Scope | None = None,
    ) -> Guest:
        """Let in whoever shows a token with this scope, and does not come too often.

        Args:
            scope: what is to be done.
            authorization: the header, or the metadata, of that name.
            peer: the address that the connection comes from.
            forwarded: the header X-Forwarded-For.
            or_scope: another that is as good.

        Raises HttpError: 401 without a valid token, 403 if it has another scope, 429 for too much.
        """
        limits = self._limits
        address = self.address(peer, forwarded)
        entry = self._checked(scope, authorization, address, or_scope)
        name, requests_per_s, events_per_s = "", limits.requests_per_s, limits.events_per_s
        if entry is not None:
            name = entry.name
            requests_per_s = requests_per_s if entry.requests_per_s is None else entry.requests_per_s
            events_per_s = events_per_s if entry.events_per_s is None else entry.events_per_s
        payer = None
        if requests_per_s or events_per_s:  # of a token's own line: another of its name may have other rates
            key = f"token {entry.id}" if entry is not None else address_key(address)
            self._hold_back(scope, name, address, key, requests_per_s, events_per_s)
            payer = Payer(key, events_per_s) if events_per_s else None
        if entry is not None:
            self._requests[self._counted(name)] += 1
        return Guest(name, address, payer)

    def check(
        self, scope: Scope, authorization: bytes | None, peer: str, forwarded: bytes | None = None
    ) -> None:
        """As `admit`, when what is asked for comes later: nothing is counted as a request."""
        self._checked(scope, authorization, self.address(peer, forwarded))

    def address(self, peer: str, forwarded: bytes | None) -> str:
        """Who asks, behind as many proxies as are trusted."""
        return forwarded_address(peer, forwarded, self._limits.trusted_proxies)

    def pay(self, payer: Payer | None, events: int) -> None:
        """Events of a guest were taken. Who has sent more than it may is refused until they are earned."""
        if payer is not None:
            now = self._clock.monotonic()
            self._buckets.pay(payer.key, payer.events_per_s, now, events)

    def _checked(
        self, scope: Scope, authorization: bytes | None, peer: str, or_scope: Scope | None = None
    ) -> TokenEntry | None:
        if not self.asks:
            return None
        token = bearer(authorization)
        entry = shown(token, self._entries()) if token else None
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

    def _hold_back(
        self, scope: Scope, name: str, address: str, key: str, requests_per_s: float, events_per_s: float
    ) -> None:
        now = self._clock.monotonic()
        wait_s, what = 0.0, f"{events_per_s:g} events"
        if scope == "send" and events_per_s:
            wait_s = self._buckets.debt_s(key, events_per_s, now)
        if not wait_s and requests_per_s:
            wait_s, what = self._buckets.take(key, requests_per_s, now), f"{requests_per_s:g} requests"
        if wait_s:
            self._refuse(scope, "too_often", name, address)
            raise _too_often(what, wait_s)

    def figures(self) -> Mapping[str, Any]:
        """Return the figures of DOOR_METRICS; those of tokens only where tokens are required."""
        limited = {"clients": len(self._buckets), "refused": dict(self._refused)}
        if not self.asks:
            return limited
        now_ms = self._clock.now_ms()
        valid = sum(e.expires_ms is None or e.expires_ms > now_ms for e in self._entries())
        return limited | {
            "requests": dict(self._requests),
            "tokens": valid,
            "tokens_file_wrong": self._tokens is not None and self._tokens.wrong,
        }

    def _entries(self) -> Sequence[TokenEntry]:
        if self._tokens is None:
            return self._more
        entries = self._tokens.entries()
        return (*entries, *self._more) if self._more else entries

    def _refuse(self, scope: Scope, reason: str, name: str, peer: str) -> None:
        self._refused[reason, self._counted(name)] += 1
        log.warning("refused at the door", why=reason, holder=name, client=peer)
        self._on_refused(scope, name, peer, reason)

    def _counted(self, name: str) -> str:
        known = name in self._requests or len(self._requests) < MOST_NAMES
        return name if known or not name else "others"


def _either(scope: Scope, or_scope: Scope | None) -> str:
    return scope if or_scope is None else f"{scope} or {or_scope}"


def _missing(wanted: str, hint: str) -> HttpError:
    return HttpError(
        401, "token_missing", "a token is asked for", expected=_shown_as(wanted), found="no token", hint=hint,
        headers=_challenge(),
    )  # fmt: skip


def _unknown(wanted: str, hint: str) -> HttpError:
    return HttpError(
        401, "token_unknown", "this token is not known", expected=_shown_as(wanted), found="another token",
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


def _too_often(most: str, wait_s: float) -> HttpError:
    return HttpError(
        429, "too_often", "this client asks too much", expected=f"at most {most} a second", found="more",
        hint="wait Retry-After, send it again; send several events in one request", retry_after_s=wait_s,
    )  # fmt: skip


def _shown_as(wanted: str) -> str:
    return f"Authorization: Bearer TOKEN, with the scope {wanted}"


def _challenge(more: str = "") -> Headers:
    """RFC 6750, section 3."""
    text = 'Bearer realm="freshet"' + (f", {more}" if more else "")
    return ((b"www-authenticate", text.encode()), (b"connection", b"close"))  # a body is not waited for
