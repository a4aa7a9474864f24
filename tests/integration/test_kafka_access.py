"""Who is let into a real Kafka: by password over TLS, with rights; and what is said to who is not."""

from __future__ import annotations

import time
from pathlib import Path
from uuid import uuid4

import pytest
import trustme
from click.testing import CliRunner
from confluent_kafka.admin import (
    AdminClient,
    ScramCredentialInfo,
    ScramMechanism,
    UserScramCredentialUpsertion,
)
from structlog.testing import capture_logs

from freshet.adapters import open_eventlog
from freshet.cli.prepare import command as prepare
from freshet.demo import DEMO_SPEC
from freshet.errors import ConfigError, Unavailable
from freshet.testing.contracts.eventlog import append_to, read_all
from freshet.types import TopicPartition
from tests.servers.certificates import issued
from tests.servers.kafka import PASSWORD, USER, Kafka, secure_url

T = TopicPartition("t", 0)


@pytest.fixture
def no_request_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    """An error that is not raised at once comes after pytest's time-out."""
    monkeypatch.setattr("freshet.log.kafka.admin._REQUEST_S", 600.0)


@pytest.fixture
def prefix(kafka: Kafka) -> str:
    prefix = uuid4().hex
    kafka.allow(prefix)
    return prefix


@pytest.mark.parametrize("mechanism", ["PLAIN", "SCRAM-SHA-512"])
def test_a_password_and_a_certificate_open_the_log(
    kafka: Kafka, prefix: str, tmp_path: Path, mechanism: str
) -> None:
    log = open_eventlog(secure_url(kafka, prefix, tmp_path, mechanism))
    log.create_topic("t", partitions=1)
    with capture_logs() as logs:
        log.writer("w").append([append_to(T, [b"x"])])
    assert [line["brokers"] for line in logs if "release of brokers is not known" in line["event"]] == [[1]]
    reader = log.reader()
    reader.assign({T: 0})
    assert read_all(reader, 1) == {T: [(0, b"x")]}
    log.close()


@pytest.mark.usefixtures("no_request_ends")
@pytest.mark.parametrize("mechanism", ["PLAIN", "SCRAM-SHA-512"])
@pytest.mark.parametrize("first", ["topics", "create_topic", "bounds"])
def test_a_wrong_password_is_refused_at_once_and_not_shown(
    kafka: Kafka, prefix: str, tmp_path: Path, mechanism: str, first: str
) -> None:
    log = open_eventlog(secure_url(kafka, prefix, tmp_path, mechanism, password="a-wrong-word"))
    calls = {
        "topics": log.topics,
        "create_topic": lambda: log.create_topic("t", partitions=1),
        "bounds": lambda: log.bounds(T),
    }
    with pytest.raises(ConfigError, match=r"(?i)authentication.*\n.*\n.*sasl\.password") as refused:
        calls[first]()
    assert "a-wrong-word" not in str(refused.value)
    log.close()


def test_an_unsupported_mechanism_is_refused_at_once(kafka: Kafka, prefix: str, tmp_path: Path) -> None:
    log = open_eventlog(secure_url(kafka, prefix, tmp_path, "SCRAM-SHA-256"))
    with pytest.raises(ConfigError, match=r"SCRAM-SHA-512.*\n.*\n.*sasl\.mechanism"):
        log.topics()
    log.close()


@pytest.mark.usefixtures("no_request_ends")
def test_a_broker_of_another_authority_is_not_believed(kafka: Kafka, prefix: str, tmp_path: Path) -> None:
    other = issued(trustme.CA(), tmp_path).ca
    log = open_eventlog(secure_url(kafka, prefix, tmp_path, "PLAIN", authority=other))
    with pytest.raises(ConfigError, match=r"certificate verify failed(.*\n)+.*ssl\.ca\.location"):
        log.topics()
    log.close()


def test_a_client_without_tls_is_refused_with_the_setting(kafka: Kafka, prefix: str) -> None:
    url = f"kafka://127.0.0.1:{kafka.secure_port}/{prefix}?security.protocol=PLAINTEXT"
    log = open_eventlog(url)
    with pytest.raises(Unavailable, match=r"security\.protocol"):
        log.topics()
    log.close()


def test_a_password_that_changes_later_is_no_reason_to_end(kafka: Kafka, prefix: str, tmp_path: Path) -> None:
    """Brokers may refuse for a while whom they know: while they start, or while a password is changed."""
    log = open_eventlog(secure_url(kafka, prefix, tmp_path, "SCRAM-SHA-512"))
    log.create_topic("t", partitions=1)
    change_password(kafka, "another-word")
    try:
        kafka.restart()
        with pytest.raises(Unavailable):
            log.topics()
    finally:
        change_password(kafka, PASSWORD)
    deadline = time.monotonic() + 60
    while True:
        try:
            assert "t" in log.topics()
            break
        except Unavailable:
            assert time.monotonic() < deadline
    log.close()


def change_password(kafka: Kafka, password: str) -> None:
    admin = AdminClient({"bootstrap.servers": kafka.bootstrap, "log_level": 0})
    how = ScramCredentialInfo(ScramMechanism.SCRAM_SHA_512, 4096)
    wanted = UserScramCredentialUpsertion(USER, how, password.encode())
    for done in admin.alter_user_scram_credentials([wanted]).values():
        done.result(60)


def test_a_missing_right_is_refused_with_the_acl(kafka: Kafka, tmp_path: Path) -> None:
    log = open_eventlog(secure_url(kafka, uuid4().hex, tmp_path, "SCRAM-SHA-512"))
    with pytest.raises(ConfigError, match="add an ACL"):
        log.create_topic("t", partitions=1)
    log.close()


@pytest.mark.usefixtures("no_request_ends")
def test_prepare_ends_at_once_with_what_to_do(
    kafka: Kafka, prefix: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    spec = DEMO_SPEC
    run = ["--folder", str(tmp_path / "run"), "--wait", "60"]
    for password in (PASSWORD, "a-wrong-word"):
        monkeypatch.setenv(
            "FRESHET_COMMON_LOG_URL", secure_url(kafka, prefix, tmp_path, "PLAIN", password=password)
        )
        result = CliRunner().invoke(prepare, [str(spec), *run])
        if password == PASSWORD:
            assert result.exit_code == 0, result.output
        else:
            assert isinstance(result.exception, ConfigError)
