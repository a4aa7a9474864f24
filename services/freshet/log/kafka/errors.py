"""Kafka's errors as freshet's families: what the caller should do about them."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import structlog
from confluent_kafka import KafkaError, KafkaException

from freshet.errors import ConfigError, DataLost, Fenced, FreshetError, TooLarge, Unavailable

__all__ = ["Heard", "ending", "family", "refusal", "translated"]

_log = structlog.get_logger(__name__)

FENCED = frozenset({KafkaError._FENCED, KafkaError.PRODUCER_FENCED, KafkaError.INVALID_PRODUCER_EPOCH})
LOST = frozenset({KafkaError._AUTO_OFFSET_RESET, KafkaError.OFFSET_OUT_OF_RANGE, KafkaError._LOG_TRUNCATION})
TOO_LARGE = frozenset({KafkaError.MSG_SIZE_TOO_LARGE, KafkaError.RECORD_LIST_TOO_LARGE})
FORBIDDEN = frozenset(
    {
        KafkaError.TOPIC_AUTHORIZATION_FAILED,
        KafkaError.CLUSTER_AUTHORIZATION_FAILED,
        KafkaError.GROUP_AUTHORIZATION_FAILED,
        KafkaError.TRANSACTIONAL_ID_AUTHORIZATION_FAILED,
    }
)
BAD_SETTING = frozenset({KafkaError._INVALID_ARG, KafkaError.INVALID_CONFIG, KafkaError._CONFLICT})
UNKNOWN = frozenset(
    {KafkaError.UNKNOWN_TOPIC_OR_PART, KafkaError._UNKNOWN_TOPIC, KafkaError._UNKNOWN_PARTITION}
)


AWAY = frozenset({KafkaError._ALL_BROKERS_DOWN, KafkaError._TRANSPORT, KafkaError._RESOLVE})

_TELL_EVERY_S = 10.0
"""A client that looks for brokers says every second that they are away."""

_KEPT_S = 5.0
"""How long another reason is told instead of that: a client that is turned away tries again every second."""

_ALL_AWAY = "nobody answers at these addresses, or not by this security.protocol"
"""librdkafka says more of the latter if it was told so before it counted its brokers."""


class Heard:
    """What a client was last told of its connections, for messages: that is why an answer does not come."""

    def __init__(self) -> None:
        self.serve: Callable[[], object] = int  # makes the client say what it has to say, before a message
        self._code, self._text, self._when_s = 0, "", 0.0
        self._told_s = float("-inf")  # when it was last logged that brokers are away

    def __call__(self, error: KafkaError) -> None:
        """librdkafka's `error_cb`."""
        now = time.monotonic()
        away = error.code() in AWAY
        if away:
            tell = now - self._told_s >= _TELL_EVERY_S
            self._told_s = now if tell else self._told_s
        else:
            tell = error.code() != self._code
        if tell:
            _log.warning("kafka", reason=error.str(), code=error.name())
        says_more = self._code and (self._code not in AWAY or error.code() == KafkaError._ALL_BROKERS_DOWN)
        if away and says_more and now - self._when_s < _KEPT_S:
            return  # a broker that lets nobody in counts as away, too, right after it has said why
        self._code, self._text, self._when_s = error.code(), error.str(), now

    def refused(self) -> tuple[int, str] | None:
        """(code, text) if brokers were last said not to let it in, or it does not believe them."""
        self._listen()
        said = self._text.lower()
        if self._code == KafkaError._AUTHENTICATION or (self._code == KafkaError._SSL and "verif" in said):
            return self._code, self._text
        return None

    def _listen(self) -> None:
        try:
            self.serve()
        except (KafkaException, SystemError) as error:
            self(ending(error))

    def __str__(self) -> str:
        self._listen()
        if not self._text:
            return ""
        hint = f" ({_ALL_AWAY})" if self._code == KafkaError._ALL_BROKERS_DOWN else ""
        return f"; heard {time.monotonic() - self._when_s:.1f} s ago: {self._text}{hint}"


def ending(error: KafkaException | SystemError) -> KafkaError:
    """The error that a client's exception tells.

    One that ends the client comes out of whatever it does at that moment, once, instead of a call of
    `error_cb`. A report's call that follows at once is made with the exception set: it makes a SystemError of
    it, or clears it; then only the client knows, and `_FATAL` is returned. Another SystemError is raised
    again.
    """
    cause = error if isinstance(error, KafkaException) else error.__cause__
    if isinstance(cause, KafkaException):
        found: KafkaError = cause.args[0]
        return found
    if "without setting an exception" in str(error):
        return KafkaError(KafkaError._FATAL, "the client was ended by an error that it did not tell")
    raise error


def refusal(brokers: str, code: int, text: str) -> ConfigError:
    """What to raise where brokers refuse a client that they never let in: it would be refused again."""
    if code == KafkaError._SSL:
        return ConfigError(
            "event log", "", f"{brokers}: {text}",
            "a broker whose certificate ssl.ca.location has signed, for the host that the URL names",
            "set ssl.ca.location to the PEM of the brokers' authority, or mend the broker's certificate",
        )  # fmt: skip
    return ConfigError(
        "event log", "", f"{brokers}: {text}",
        "a user and a password that the brokers know, by a mechanism that they offer",
        "mend sasl.username, sasl.password, sasl.mechanism or security.protocol, in the log's URL or in the "
        "file of its `properties`",
    )  # fmt: skip


def family(error: KafkaError, what: str, heard: object = "") -> FreshetError:
    """The error to raise; `what` says what could not be done, `heard` what else is known."""
    code, text = error.code(), f"{what}: {error.str()}{heard}"
    if code in FENCED:
        return Fenced(f"{text}\n  a later writer of that name was opened: this one must stop")
    if code in LOST:
        return DataLost(f"{text}\n  what reads from there must be told to skip it, or start anew")
    if code in TOO_LARGE:
        return TooLarge(
            f"{text}\n  the topic takes smaller records than this writer: raise its max.message.bytes"
            " (and the brokers' replica.fetch.max.bytes), or lower max_record_bytes in the log's URL"
        )
    if code in FORBIDDEN:
        return ConfigError("event log", "", text, "the right to do so", "add an ACL for this user")
    if code in BAD_SETTING:
        return ConfigError(
            "event log", "", text, "settings that librdkafka takes", "see its CONFIGURATION.md"
        )
    return Unavailable(text)


@contextmanager
def translated(what: str, heard: object = "") -> Iterator[None]:
    """Raise what Kafka's client raises within as our families; an unknown topic as KeyError."""
    try:
        yield
    except (KafkaException, SystemError) as error:
        cause = ending(error)
        if cause.code() in UNKNOWN:
            raise KeyError(f"{what}: {cause.str()}") from None
        raise family(cause, what, heard) from error
