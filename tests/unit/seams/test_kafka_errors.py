"""Kafka's errors as freshet's families."""

from __future__ import annotations

import pytest
from confluent_kafka import KafkaError, KafkaException

from freshet.errors import Fenced
from freshet.seams.eventlog.kafka_errors import Heard, family

FENCED = KafkaError(KafkaError._FENCED, "fenced by a newer instance", fatal=True)


def test_a_client_that_is_ended_while_it_is_asked_for_a_message_does_not_hide_the_message() -> None:
    heard = Heard()

    def ended() -> None:
        raise KafkaException(FENCED)

    heard.serve = ended
    found = family(FENCED, "a commit failed", heard)
    assert isinstance(found, Fenced)
    assert "a commit failed" in str(found) and "heard 0.0 s ago: fenced by a newer instance" in str(found)


def test_so_it_is_if_the_client_is_ended_within_a_report() -> None:
    heard = Heard()

    def ended() -> None:
        raise SystemError("a report's call") from KafkaException(FENCED)

    heard.serve = ended
    assert isinstance(family(FENCED, "a commit failed", heard), Fenced)


def test_what_else_goes_wrong_within_the_client_is_raised() -> None:
    heard = Heard()

    def broken() -> None:
        raise SystemError("no client")

    heard.serve = broken
    with pytest.raises(SystemError, match="no client"):
        str(heard)
