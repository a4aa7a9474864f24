from confluent_kafka.admin import AdminClient
from confluent_kafka.cimpl import NewTopic

from tests.servers.kafka import Kafka


def test_kafka_that_was_killed_comes_back_with_its_data(kafka: Kafka) -> None:
    client = AdminClient({"bootstrap.servers": kafka.bootstrap, "log_level": 0})
    for created in client.create_topics([NewTopic("servers.kept", 2, 1)]).values():
        created.result(30)
    kafka.restart()
    assert len(client.list_topics("servers.kept", timeout=30).topics["servers.kept"].partitions) == 2
