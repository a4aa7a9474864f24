"""Partitions without a leader, on a real Kafka of two brokers: transactions that end meanwhile, and
events of a gateway for these and other partitions.

Kafka 4.3.0 to 4.4.0 take such a partition for deleted (KAFKA-20734) and write no marker there, so what it
holds of the transaction hangs until the next one of the same name commits it, too. FRESHET_TEST_KAFKA names a
folder with the jars of another release: if these tests pass there, it has not the fault.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterator, Sequence
from contextlib import suppress
from uuid import uuid4

import pytest
from confluent_kafka import KafkaException, Producer
from confluent_kafka.admin import AdminClient
from confluent_kafka.cimpl import NewTopic
from prometheus_client import CollectorRegistry

from freshet.errors import Unavailable
from freshet.gateway.group_commit import Committer, QueueLimits
from freshet.log import GroupOutcome
from freshet.log.kafka.admin import KafkaAdmin
from freshet.log.kafka.connection import parse_url
from freshet.log.kafka.event_log import KafkaEventLog, open_url
from freshet.testing.conditions import wait_until
from freshet.testing.contracts.eventlog import answered, append_to
from freshet.types import TopicPartition
from tests.servers.kafka import Kafka

T, COMMITS = TopicPartition("t", 0), TopicPartition("commits", 0)
DEADLINE_S = 120.0
"""For what must come at last: a broker starts anew in 3 to 20 s."""

LET_GO_S = 20.0
"""For who comes later: brokers write at once that the transaction is over, and wait with its markers, and
with their answer, for a leader."""

NOBODY = -1
"""The leader of a partition that has none."""


class Brokers:
    """Broker 1, which decides about transactions and stays, and broker 2, which goes and comes back."""

    def __init__(self, first: Kafka, second: Kafka) -> None:
        self.first, self.second = first, second
        self._admin = AdminClient({"bootstrap.servers": first.bootstrap, "log_level": 0})

    def place(self, topic: str, *brokers: int) -> None:
        """Make a topic with a partition for each of these brokers, which has its only replica there."""
        placed = [[broker] for broker in brokers]
        new = NewTopic(topic, len(brokers), replica_assignment=placed)
        self._admin.create_topics([new])[topic].result(30)
        self.wait_for_leader(topic, *brokers)

    def wait_for_leader(self, topic: str, *brokers: int) -> None:
        """Wait until brokers report these leaders of the topic, or none."""
        wait_until(f"{brokers} lead {topic}", lambda: self.leaders(topic) == {*brokers}, within_s=DEADLINE_S)

    def leaders(self, topic: str) -> set[int]:
        """Return the leaders of its partitions; none if it is not known."""
        partitions = self._admin.list_topics(topic, timeout=30).topics[topic].partitions
        return {partition.leader for partition in partitions.values()}

    def client(self, name: str) -> Producer:
        """What a writer of that name, the log's prefix included, sends by."""
        settings = {"bootstrap.servers": self.first.bootstrap, "transactional.id": name, "log_level": 0}
        return Producer({**settings, "transaction.timeout.ms": 300_000})


@pytest.fixture(scope="module")
def brokers(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Brokers]:
    """Both run. The topic of transactions' states was made while the first was alone: it keeps all of it."""
    first = Kafka(tmp_path_factory.mktemp("first"))
    second = Kafka(tmp_path_factory.mktemp("second"), joins=first)
    with first:
        brokers = Brokers(first, second)
        brokers.client("whoever").init_transactions(DEADLINE_S)
        with second:
            assert brokers.leaders("__transaction_state") == {1}
            yield brokers


@pytest.fixture
def prefix() -> str:
    return uuid4().hex


def url_of(brokers: Brokers, prefix: str) -> str:
    return f"kafka://{brokers.first.bootstrap}/{prefix}?accept_kafka_20734=true"  # of any release


@pytest.fixture
def opened(brokers: Brokers, prefix: str) -> Iterator[KafkaEventLog]:
    """The log without topics."""
    log = open_url(url_of(brokers, prefix))
    yield log
    log.close()
    if not brokers.second.alive:  # a test failed with it away: the next ones need not
        brokers.second.start()
    brokers.second.resume()


@pytest.fixture
def log(brokers: Brokers, prefix: str, opened: KafkaEventLog) -> KafkaEventLog:
    brokers.place(f"{prefix}.commits", 1)
    brokers.place(f"{prefix}.t", 2)
    return opened


def numbers(log: KafkaEventLog, at: TopicPartition) -> list[int]:
    """What is read of a partition, in order."""
    reader, found, position, end = log.reader(), list[int](), 0, log.bounds(at).end
    reader.assign({at: 0})
    while position < end:
        for _, records in answered(reader, 1000, 1.0):
            found += [int(value.decode()) for value in records.values]
            position = records.next_offset
    reader.close()
    return found


@pytest.mark.timeout(900)
@pytest.mark.parametrize("places", [[T], [COMMITS, T]], ids=["all-of-it", "a-part-of-it"])
@pytest.mark.parametrize("end", ["committed", "left-open"])
def test_a_repeated_append_after_a_lost_leader_is_there_once(
    brokers: Brokers, log: KafkaEventLog, prefix: str, end: str, places: list[TopicPartition]
) -> None:
    log.writer("w").append([append_to(at, [b"0"]) for at in places])
    client = brokers.client(f"{prefix}.w")
    client.init_transactions(DEADLINE_S)
    client.begin_transaction()
    for number in range(1, 5):
        for at in places:
            client.produce(f"{prefix}.{at.topic}", b"%d" % number, partition=0)
    assert client.flush(DEADLINE_S) == 0
    brokers.second.kill()
    brokers.wait_for_leader(f"{prefix}.t", NOBODY)
    if end == "committed":
        client.commit_transaction(DEADLINE_S)
    else:
        with suppress(KafkaException):  # brokers abort it for a later one of its name, who waits for that
            brokers.client(f"{prefix}.w").init_transactions(LET_GO_S)
        with pytest.raises(KafkaException, match=r"fenced|epoch"):  # that it was heard
            client.commit_transaction(DEADLINE_S)
    brokers.second.start()
    brokers.wait_for_leader(f"{prefix}.t", 2)

    writer = log.writer("w")
    for number in range(numbers(log, places[0])[-1] + 1, 8):  # what became of the earlier ones, the log says
        writer.append([append_to(at, [b"%d" % number]) for at in places])
    log.writer("w")  # once the last commit shows, which brokers answer before

    assert {at: numbers(log, at) for at in places} == {at: list(range(8)) for at in places}
    admin = KafkaAdmin(
        parse_url(url_of(brokers, prefix)), {"bootstrap.servers": brokers.first.bootstrap, "log_level": 0}
    )
    assert admin.bounds(places) == admin.bounds(places, committed=False)


async def acknowledged(commit: Committer, at: TopicPartition, number: int) -> Sequence[int]:
    """Submit a number as a request of its own; returns its offset. Raises the error that its client gets."""
    done = asyncio.get_running_loop().create_future()

    def answer(outcomes: Sequence[GroupOutcome | None]) -> None:
        done.set_result(outcomes[0])

    commit.submit([[append_to(at, [b"%d" % number])]], answer)
    outcome: GroupOutcome = await done
    if isinstance(outcome, Exception):
        raise outcome
    return outcome


@pytest.mark.timeout(600)
@pytest.mark.parametrize("how", ["killed", "paused"])
def test_a_lost_leader_delays_only_its_partitions_events(
    brokers: Brokers, prefix: str, opened: KafkaEventLog, how: str
) -> None:
    brokers.place(f"{prefix}.t", 1, 2)
    log, live, lost = opened, TopicPartition("t", 0), TopicPartition("t", 1)
    writer, second, sent = log.group_writer(), brokers.second, 1

    async def main() -> None:
        nonlocal sent
        commit = Committer(
            writer, QueueLimits(1000, 1 << 20), CollectorRegistry(), wait_s=0.0, batch_events=100
        )
        commit.start()
        await asyncio.gather(*(acknowledged(commit, at, 0) for at in (live, lost)))
        second.kill() if how == "killed" else second.pause()
        waiting = [asyncio.ensure_future(acknowledged(commit, lost, number)) for number in range(1, 6)]
        while not any(task.done() for task in waiting):  # until the log's time-out, 10 s
            assert await acknowledged(commit, live, sent) == [sent]
            sent += 1
        failed = await asyncio.gather(*waiting, return_exceptions=True)
        assert all(isinstance(error, Unavailable) and "t[1]" in str(error) for error in failed), failed
        assert await acknowledged(commit, live, sent) == [sent]
        assert commit.healthy, "the log takes events of other partitions"
        sent += 1
        second.start() if how == "killed" else second.resume()
        brokers.wait_for_leader(f"{prefix}.t", 1, 2)
        for number in range(1, 6):  # as a client does with events that are not known to be written
            await acknowledged(commit, lost, number)
        for number in range(6, 9):
            await acknowledged(commit, lost, number)
        assert await commit.close(DEADLINE_S) == 0

    asyncio.run(main())
    assert sent > 20, "with one append at a time it would be 2"
    assert numbers(log, live) == list(range(sent))
    found = numbers(log, lost)
    assert sorted(set(found)) == list(range(9))
    assert found[-8:] == list(range(1, 9)), "what was sent again, and later, is there once and in order"
