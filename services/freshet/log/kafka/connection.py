"""Connections to Kafka brokers: the log's URL, and errors of librdkafka as freshet's families.

    kafka://HOST:PORT,HOST:PORT[/PREFIX][?KEY=VALUE&...]

| key | meaning |
|---|---|
| `replication` | replicas of created topics; without it the brokers' default |
| `min_insync` | replicas without which nothing is written; without it the brokers' default |
| `max_record_bytes` | largest record, keys included; 16 MiB |
| `accept_kafka_20734` | `true`: named writers also on brokers 4.3 and later (KAFKA-20734) |
| `topic.NAME` | setting NAME of created topics, such as `topic.segment.bytes` |
| `properties` | a file of `NAME=VALUE` lines with settings of librdkafka; the URL's settings override them |
| NAME with a dot | a setting of librdkafka, such as `security.protocol` |

A value may be `${env:NAME}` or `${file:/path}`, in the URL and in the file, so that a URL contains no
secrets. White space at both ends of a file's text is removed.
"""

from __future__ import annotations

import os
import re
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from urllib.parse import parse_qsl, urlsplit

import structlog
from confluent_kafka import KafkaError, KafkaException

from freshet.errors import ConfigError, DataLost, Fenced, FreshetError, TooLarge, Unavailable

_log = structlog.get_logger(__name__)

FENCED = frozenset({KafkaError._FENCED, KafkaError.PRODUCER_FENCED, KafkaError.INVALID_PRODUCER_EPOCH})
LOST = frozenset({KafkaError._AUTO_OFFSET_RESET, KafkaError.OFFSET_OUT_OF_RANGE, KafkaError._LOG_TRUNCATION})
DAMAGED = frozenset({KafkaError._BAD_MSG, KafkaError._BAD_COMPRESSION})
"""A batch fails its checksum, or cannot be decompressed. Where librdkafka goes on then is undefined."""
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

_LOG_EVERY_S = 10.0
"""Time between two log lines that brokers are away; a client reports it every second."""

_KEPT_S = 5.0
"""Time for which another reason is reported instead: a refused client tries again every second."""

_ALL_AWAY = "no broker answers at these addresses, or not by this security.protocol"


class LastError:
    """The last error that a client reported of its connections, as the reason why an answer does not come.

    `str` of it is the end of a message, "" without an error.
    """

    def __init__(self) -> None:
        self.serve: Callable[[], object] = int  # makes the client deliver its reports, before a message
        self._code, self._text, self._when_s = 0, "", 0.0
        self._logged_s = float("-inf")  # when it was last logged that brokers are away

    def __call__(self, error: KafkaError) -> None:
        """librdkafka's `error_cb`."""
        now = time.monotonic()
        away = error.code() in AWAY
        if away:
            is_news = now - self._logged_s >= _LOG_EVERY_S
            self._logged_s = now if is_news else self._logged_s
        else:
            is_news = error.code() != self._code
        if is_news:
            _log.warning("kafka", reason=error.str(), code=error.name())
        says_more = self._code and (self._code not in AWAY or error.code() == KafkaError._ALL_BROKERS_DOWN)
        if away and says_more and now - self._when_s < _KEPT_S:
            return  # a broker that refuses a client counts as away, too, right after it has given the reason
        self._code, self._text, self._when_s = error.code(), error.str(), now

    def refused(self) -> tuple[int, str] | None:
        """(code, text) if brokers refused this client last, or it does not trust their certificate."""
        self._listen()
        untrusted = self._code == KafkaError._SSL and "verif" in self._text.lower()
        if self._code == KafkaError._AUTHENTICATION or untrusted:
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
        return f"; reported {time.monotonic() - self._when_s:.1f} s ago: {self._text}{hint}"


def ending(error: KafkaException | SystemError) -> KafkaError:
    """Return the error in a client's exception.

    An error that ends the client is raised once, by any call at that moment, instead of a call of `error_cb`.
    A report that is delivered at once is called with the exception set: it makes a SystemError of it, or
    clears it; then only the client knows the error, and `_FATAL` is returned.

    Raises:
        SystemError: `error`, if it has another cause.
    """
    cause = error if isinstance(error, KafkaException) else error.__cause__
    if isinstance(cause, KafkaException):
        found: KafkaError = cause.args[0]
        return found
    if "without setting an exception" in str(error):
        return KafkaError(KafkaError._FATAL, "the client was ended by an error that it did not report")
    raise error


def refusal(brokers: str, code: int, text: str) -> ConfigError:
    """Return the error for a client that brokers refuse and never accepted: they would refuse it again."""
    if code == KafkaError._SSL:
        return ConfigError(
            "event log", "", f"{brokers}: {text}",
            "a broker whose certificate ssl.ca.location has signed, for the host that the URL names",
            "set ssl.ca.location to the PEM of the brokers' authority, or mend the broker's certificate",
        )  # fmt: skip
    return ConfigError(
        "event log", "", f"{brokers}: {text}",
        "a user and a password that the brokers know, by a mechanism that they support",
        "mend sasl.username, sasl.password, sasl.mechanism or security.protocol, in the log's URL or in the "
        "file of its `properties`",
    )  # fmt: skip


def family(error: KafkaError, failure: str, last: object = "") -> FreshetError:
    """Return the error to raise: `failure` names the failed operation, `last` is a detail as of LastError."""
    code, text = error.code(), f"{failure}: {error.str()}{last}"
    if code in FENCED:
        return Fenced(f"{text}\n  a later writer of that name was opened: this one must stop")
    if code in LOST:
        return DataLost(f"{text}\n  set the reader to a later offset, or start anew")
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
def translated(failure: str, last: object = "") -> Iterator[None]:
    """Raise errors of Kafka's client in the body as freshet's families; see `family`.

    Raises:
        KeyError: a topic is not known.
        SystemError: as `ending`.
    """
    try:
        yield
    except (KafkaException, SystemError) as error:
        cause = ending(error)
        if cause.code() in UNKNOWN:
            raise KeyError(f"{failure}: {cause.str()}") from None
        raise family(cause, failure, last) from error


_WHERE = "event log"

_MAX_RECORD_BYTES = 16 << 20
"""Far above a block of samples (about 75 KB) and a record of changed rows; the brokers' limit is 1 MiB."""

_OURS = {
    "bootstrap.servers": "the brokers stand in the URL's place of the host",
    "metadata.broker.list": "the brokers stand in the URL's place of the host",
    "message.max.bytes": "max_record_bytes sets it, here and for the topics that are made",
    **dict.fromkeys(
        (
            "acks",
            "request.required.acks",
            "enable.idempotence",
            "transactional.id",
            "isolation.level",
            "check.crcs",
            "enable.auto.commit",
            "enable.auto.offset.store",
            "enable.partition.eof",
            "auto.offset.reset",
            "group.id",
        ),
        "exactly-once depends on it: freshet always sets it",
    ),
}
"""Settings of librdkafka that only freshet sets, with the reason."""

_PORT = 9092
"""Port of a broker without one in the URL."""

_FORM = "kafka://HOST:PORT,HOST:PORT/PREFIX?KEY=VALUE"
_SECRET = re.compile(r"password|secret|\.key\.pem|\.token|sasl\.oauthbearer\.config")
_REFERENCE = re.compile(r"\$\{(env|file):([^}]+)\}")


@dataclass(frozen=True, slots=True)
class KafkaSettings:
    """A parsed URL."""

    brokers: str  # host:port,host:port
    prefix: str = ""  # before the names of topics, writers and groups
    replication: int = -1  # -1: the brokers' default
    min_insync: int | None = None  # None: the brokers' default
    max_record_bytes: int = _MAX_RECORD_BYTES
    accept_kafka_20734: bool = False  # named writers also on brokers 4.3 and later
    topic: Mapping[str, str] = field(default_factory=dict)  # settings of created topics
    client: Mapping[str, str] = field(default_factory=dict, repr=False)  # librdkafka's; may be secret


def parse_url(url: str) -> KafkaSettings:
    """Parse a URL, with the files and environment variables that it names. Raises ConfigError."""
    try:
        parts = urlsplit(url)
    except ValueError:  # brackets that are no address
        raise ConfigError(_WHERE, "url", url, _FORM) from None
    if "@" in parts.netloc:
        raise ConfigError(
            _WHERE,
            "url",
            f"{parts.scheme}://…@{parts.netloc.rpartition('@')[2]}",
            "brokers without a user or a password",
            "name them by sasl.username=… and sasl.password=${file:/path}",
        )
    for broker in parts.netloc.split(","):
        found = re.fullmatch(r"(?:\[[^]]+\]|[^:\[\]\s]+)(?::([0-9]{1,5}))?", broker)
        if found is None or not 0 < int(found[1] or _PORT) < 1 << 16:  # librdkafka takes a port modulo 65536
            raise ConfigError(_WHERE, "url", url, _FORM, f"{broker!r} is no host with a port below 65536")
    prefix = parts.path.strip("/")
    if not re.fullmatch(r"[A-Za-z0-9._-]{0,48}", prefix):
        raise ConfigError(_WHERE, "prefix in the url", prefix, "at most 48 of A-Z a-z 0-9 . _ -")
    given = dict(parse_qsl(parts.query, keep_blank_values=True))
    for key, value in given.items():
        if _SECRET.search(key) and not _REFERENCE.fullmatch(value):
            raise ConfigError(
                _WHERE, f"{key} in the url", "…", "${env:NAME} or ${file:/path}", "a URL is seen in logs"
            )
    client = _properties(given.pop("properties", None))
    client |= {key: given.pop(key) for key in list(given) if "." in key and not key.startswith("topic.")}
    topic = {key.removeprefix("topic."): given.pop(key) for key in list(given) if key.startswith("topic.")}
    for key in client:
        if key in _OURS:
            raise ConfigError(_WHERE, key, client[key], "that it is not set", _OURS[key])
    settings = KafkaSettings(
        brokers=parts.netloc,
        prefix=prefix,
        replication=_whole(given, "replication", 1, 100) or -1,
        min_insync=_whole(given, "min_insync", 1, 100),
        max_record_bytes=_whole(given, "max_record_bytes", 1 << 16, 1 << 30) or _MAX_RECORD_BYTES,
        accept_kafka_20734=_truth(given, "accept_kafka_20734"),
        topic=topic,
        client={key: _resolved(key, value) for key, value in client.items()},
    )
    if given:
        key, value = next(iter(given.items()))
        known = (
            "replication, min_insync, max_record_bytes, accept_kafka_20734, properties, topic.NAME or a "
            "setting of librdkafka"
        )
        raise ConfigError(_WHERE, f"{key} in the url", value, known)
    return settings


def _whole(given: dict[str, str], key: str, least: int, most: int) -> int | None:
    text = given.pop(key, None)
    if text is None:
        return None
    if not re.fullmatch(r"[0-9]{1,12}", text) or not least <= int(text) <= most:
        raise ConfigError(_WHERE, f"{key} in the url", text, f"an integer from {least:,} to {most:,}")
    return int(text)


def _truth(given: dict[str, str], key: str) -> bool:
    text = given.pop(key, "false")
    if text not in ("true", "false"):
        raise ConfigError(_WHERE, f"{key} in the url", text, "true or false")
    return text == "true"


def _properties(path: str | None) -> dict[str, str]:
    if path is None:
        return {}
    found = {}
    for number, line in enumerate(_text(Path(path), "properties").splitlines(), 1):
        text = line.strip()
        if text and not text.startswith("#"):
            key, equals, value = text.partition("=")
            if not equals:
                raise ConfigError(f"{path}:{number}", "", "a line without =", "NAME=VALUE")
            found[key.strip()] = value.strip()
    return found


def _resolved(key: str, value: str) -> str:
    def referred(found: re.Match[str]) -> str:
        if found[1] == "file":
            return _text(Path(found[2]), key).strip()
        if found[2] not in os.environ:
            raise ConfigError(_WHERE, key, found[0], f"that {found[2]} is set in the environment")
        return os.environ[found[2]]

    return _REFERENCE.sub(referred, value)


def _text(path: Path, key: str) -> str:
    try:
        return path.read_text()
    except (OSError, UnicodeDecodeError) as error:
        why = error.strerror if isinstance(error, OSError) else "it is not UTF-8"
        raise ConfigError(_WHERE, key, str(path), "a file that can be read", str(why)) from None
