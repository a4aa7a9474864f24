"""What a `kafka:` URL may say, and how it is refused."""

from pathlib import Path
from urllib.parse import quote

import pytest
from hypothesis import given
from hypothesis import strategies as st

from freshet.errors import ConfigError
from freshet.log.kafka.connection import parse_url


def test_brokers_and_a_prefix_are_enough() -> None:
    settings = parse_url("kafka://a:9092,b:9093/team")
    assert (settings.brokers, settings.prefix) == ("a:9092,b:9093", "team")
    assert (settings.replication, settings.min_insync, settings.client) == (-1, None, {})


def test_what_the_url_says_goes_before_the_properties_file(tmp_path: Path) -> None:
    file = tmp_path / "kafka.properties"
    file.write_text("# ours\nsecurity.protocol = SASL_SSL\nsocket.timeout.ms=1000\n\n")
    settings = parse_url(
        f"kafka://a:1?properties={quote(str(file))}&socket.timeout.ms=2000&topic.segment.bytes=7"
    )
    assert settings.client == {"security.protocol": "SASL_SSL", "socket.timeout.ms": "2000"}
    assert settings.topic == {"segment.bytes": "7"}


def test_secrets_come_from_files_and_the_environment(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "word").write_text("hidden\n")
    monkeypatch.setenv("KAFKA_USER_OF_A_TEST", "somebody")
    user, word = quote("${env:KAFKA_USER_OF_A_TEST}"), quote(f"${{file:{tmp_path}/word}}")
    settings = parse_url(f"kafka://a:1?sasl.username={user}&sasl.password={word}")
    assert settings.client == {"sasl.username": "somebody", "sasl.password": "hidden"}
    assert "hidden" not in repr(settings)


@pytest.mark.parametrize(
    ("url", "said"),
    [
        ("kafka://me:word@a:1", "without a user or a password"),
        ("kafka://a:1?sasl.password=word", "seen in logs"),
        ("kafka://a:1?enable.auto.commit=true", "exactly-once depends on it"),
        ("kafka://a:1?message.max.bytes=7", "max_record_bytes"),
        ("kafka://a:1?accept_kafka_20734=yes", "true or false"),
        ("kafka://a:1?replication=none", "an integer from 1"),
        ("kafka://a:1?replicas=3", "replication, min_insync"),
        ("kafka://a:1/a/b", "at most 48"),
        ("kafka:///x", "kafka://HOST:PORT"),
        ("kafka://a:99999", "no host with a port below 65536"),
        ("kafka://a:0", "no host with a port below 65536"),
        ("kafka://a:1, b:1", "no host with a port below 65536"),
        ("kafka://[a:1", "kafka://HOST:PORT"),
        ("kafka://a:1?properties=/nowhere", "a file that can be read"),
        ("kafka://a:1?sasl.username=${env:NOT_SET_BY_ANYBODY}", "set in the environment"),
    ],
)
def test_what_is_wrong_is_refused_with_what_to_write(url: str, said: str) -> None:
    with pytest.raises(ConfigError, match=said) as refused:
        parse_url(url)
    assert "word" not in str(refused.value).replace("password", "")


@given(st.text(st.characters(codec="utf-8"), max_size=60))
def test_any_text_is_a_url_or_a_config_error(text: str) -> None:
    try:
        settings = parse_url("kafka://" + text)
    except ConfigError:
        return
    assert settings.brokers
