import orjson
import pytest

from freshet.log.sqlite.event_log import SqliteEventLog
from freshet.observability.skipped_state import skipped
from freshet.trainer.version_writer import Pin, Pins
from freshet.types import Append, BytesColumn

TOPIC = "toy.versions"


@pytest.fixture
def log(tmp_path):
    log = SqliteEventLog(tmp_path / "log")
    log.create_topic(TOPIC, partitions=1)
    yield log
    log.close()


def tell(log, **record):
    writer = log.writer()
    writer.append([Append(TOPIC, 0, BytesColumn.of([orjson.dumps({"v": 1, "kind": "alias", **record})]))])
    writer.close()


def test_rollback_pins_stable_until_an_operator_promotes(log):
    pins = Pins(log, TOPIC)
    tell(log, alias="stable", number=3, by="trainer")
    assert pins.pin() is None

    tell(log, alias="stable", number=1, by="operator", pinned=True)
    assert pins.pin() == Pin(1)

    tell(log, alias="stable", number=4, by="operator", pinned=False)
    assert pins.pin() is None
    pins.close()


def test_rollback_before_the_start_still_pins(log):
    tell(log, alias="stable", number=1, by="operator", pinned=True)

    pins = Pins(log, TOPIC)

    assert pins.pin() is not None
    pins.close()


def test_reason_of_a_pin_is_a_command_that_can_be_typed():
    assert "`freshet version promote NUMBER`" in Pin(5).reason


def test_rollback_in_the_console_pins_too(log):
    pins = Pins(log, TOPIC)
    tell(log, alias="stable", number=2, by="console", pinned=True)
    assert pins.pin() == Pin(2)

    tell(log, alias="stable", number=5, by="console", pinned=False)
    assert pins.pin() is None
    pins.close()


GARBAGE = [
    b"null",
    b"[]",
    b"\x00",
    b"",
    b'"alias"',
    b'{"v":1}',
    b'{"v":1,"kind":7}',
    b'{"v":1,"kind":"alias","alias":"stable","by":"operator","pinned":true}',
    b'{"v":1,"kind":"alias","alias":"stable","number":true,"by":"operator","pinned":true}',
    b'{"v":1,"kind":"alias","alias":"stable","number":-3,"by":["operator"],"pinned":true}',
    b'{"v":1,"kind":"alias","alias":"stable","number":4,"by":["operator"],"pinned":true}',
]


def test_garbage_in_the_topic_of_versions_is_skipped(log):
    tell(log, alias="stable", number=2, by="operator", pinned=True)
    pins = Pins(log, TOPIC)
    writer = log.writer()
    writer.append([Append(TOPIC, 0, BytesColumn.of(GARBAGE))])
    writer.close()
    before = skipped()["versions"]

    assert pins.pin() == Pin(2)
    assert pins.stable == 2
    assert skipped()["versions"] > before
    tell(log, alias="stable", number=5, by="trainer")
    assert (pins.pin(), pins.stable) == (Pin(2), 5)
    pins.close()
