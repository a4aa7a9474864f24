import multiprocessing

from confluent_kafka.admin import AdminClient
from confluent_kafka.cimpl import NewTopic

from tests.servers.kafka import Kafka
from tests.servers.processes import lasting_ports, lease_port


def test_kafka_that_was_killed_comes_back_with_its_data(kafka: Kafka) -> None:
    client = AdminClient({"bootstrap.servers": kafka.bootstrap, "log_level": 0})
    for created in client.create_topics([NewTopic("servers.kept", 2, 1)]).values():
        created.result(30)
    kafka.restart()
    assert len(client.list_topics("servers.kept", timeout=30).topics["servers.kept"].partitions) == 2


def test_a_port_belongs_to_one_process_until_that_process_ends() -> None:
    (port,) = lasting_ports(1)
    context = multiprocessing.get_context("spawn")
    with context.Pool(1) as other:
        assert not other.apply(lease_port, (port,))
        (theirs,) = other.apply(lasting_ports, (1,))
        assert not lease_port(theirs)
    assert lease_port(theirs)
