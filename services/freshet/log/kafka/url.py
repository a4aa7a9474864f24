"""What a `kafka:` URL says: brokers, a prefix of all names, settings of the client and of the topics made.

    kafka://HOST:PORT,HOST:PORT[/PREFIX][?KEY=VALUE&...]

| key | what |
|---|---|
| `replication` | replicas of the topics that are made; without it the brokers' default |
| `min_insync` | replicas without which nothing is written; without it the brokers' default |
| `max_record_bytes` | largest record, keys included; 16 MiB |
| `accept_kafka_20734` | `true`: named writers also on brokers 4.3 and later (KAFKA-20734) |
| `topic.NAME` | setting NAME of the topics that are made, such as `topic.segment.bytes` |
| `properties` | a file of `NAME=VALUE` lines, settings of librdkafka; what the URL says goes before it |
| NAME with a dot | a setting of librdkafka, such as `security.protocol` |

A value may be `${env:NAME}` or `${file:/path}`, in the URL and in the file: what is secret stands there,
never in a URL. The text of a file is taken without the white space at its ends.
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from urllib.parse import parse_qsl, urlsplit

from freshet.errors import ConfigError

__all__ = ["KafkaSettings", "parse_url"]

_WHERE = "event log"

_MAX_RECORD_BYTES = 16 << 20
"""Far above a block of samples (about 75 KB) and a message of changed rows; brokers' own limit is 1 MiB."""

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
            "enable.auto.commit",
            "enable.auto.offset.store",
            "enable.partition.eof",
            "auto.offset.reset",
            "group.id",
        ),
        "exactly-once rests on it: it is always set as that needs",
    ),
}
"""Settings of librdkafka that nobody else sets, and why."""

_PORT = 9092
"""Of brokers that are named without one."""

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
    topic: Mapping[str, str] = field(default_factory=dict)  # settings of the topics that are made
    client: Mapping[str, str] = field(default_factory=dict, repr=False)  # of librdkafka; may be secret


def parse_url(url: str) -> KafkaSettings:
    """Parse it, reading the files and the environment that it names. Raises ConfigError."""
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
