import orjson
import pytest

from freshet.log.sqlite.event_log import SqliteEventLog
from freshet.observability.skipped_state import skipped
from freshet.types import Append, BytesColumn
from freshet.versions.promotions import Pin, Pins

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


class Counted:
    """A log that counts the records that its readers return."""

    def __init__(self, log):
        self._log, self.records = log, 0

    def __getattr__(self, name):
        return getattr(self._log, name)

    def reader(self):
        reader, outer = self._log.reader(), self

        class Wrapped:
            assign, close = reader.assign, reader.close

            def poll(self, most, wait_s):
                found = reader.poll(most, wait_s)
                outer.records += sum(len(records) for _, records in found)
                return found

        return Wrapped()


OLD = 3000


@pytest.fixture
def old(log):
    """A log with a rollback, and after it many moves of a release that wrote no `pins`."""
    tell(log, alias="stable", number=1, by="operator", pinned=True)
    move = {"v": 1, "kind": "alias", "alias": "stable", "number": 7, "by": "trainer"}
    writer = log.writer()
    writer.append([Append(TOPIC, 0, BytesColumn.of([orjson.dumps(move)] * OLD))])
    writer.close()
    return Counted(log)


def known(log):
    pins = Pins(log, TOPIC)
    pins.pin()
    pins.close()
    return pins.known()


def found(log):
    pins = Pins(log, TOPIC)
    pin = pins.pin()
    pins.close()
    return pin, pins.stable


def test_early_rollback_is_found_in_few_records(old):
    tell(old, alias="candidate", number=8, by="trainer", pins=known(old))
    old.records = 0

    assert found(old) == (Pin(1), 7)
    assert old.records < OLD / 10
    tell(old, alias="stable", number=4, by="operator", pinned=False)
    assert found(old) == (None, 4)


def test_a_topic_without_pins_is_read_whole(old):
    assert found(old) == (Pin(1), 7)


def test_move_that_the_trainer_had_not_read_is_found(old):
    pins = known(old)
    tell(old, alias="stable", number=4, by="operator", pinned=False)
    tell(old, alias="candidate", number=8, by="trainer", pins=pins)

    assert found(old) == (None, 4)


def test_a_reader_that_is_far_behind_skips_ahead(log, old):
    behind = Pins(old, TOPIC)
    tell(old, alias="candidate", number=8, by="trainer", pins=known(log))

    assert (behind.pin(), behind.stable) == (Pin(1), 7)
    assert old.records < OLD / 10
    behind.close()


@pytest.mark.parametrize(
    "damage",
    [
        None,
        7,
        {"upto": OLD},
        {"upto": True, "stable": 2, "pinned": 2},
        {"upto": 10**9, "stable": 2, "pinned": 2},
        {"upto": OLD, "stable": 2, "pinned": -2},
        {"upto": OLD, "stable": "2", "pinned": 2},
    ],
)
def test_damaged_pins_in_a_record_are_not_taken(old, damage):
    tell(old, alias="candidate", number=8, by="trainer", pins=damage)

    assert found(old) == (Pin(1), 7)
