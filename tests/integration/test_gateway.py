"""The gateway over real sockets and a real log: what is acknowledged can be joined."""

from __future__ import annotations

import httpx
import orjson
import pytest

from freshet.client import Client, EventsRefused
from freshet.features import EventExtractor
from freshet.log.schema_ids import SchemaRegistry, framed_id
from freshet.types import BytesColumn
from tests.fixtures.gateway import NOW, RANKED, SPEC, Running, action, gateway, ranked, start

__all__ = ["gateway", "start"]  # fixtures


def test_an_accepted_event_is_at_its_offset_and_joinable(gateway: Running) -> None:
    answer = gateway.send("impressions", ranked())

    assert answer.status_code == 202
    [ack] = answer.json()["acks"]
    [(partition, offset, key, value)] = gateway.records("feed.ranked")
    assert ack == {"topic": "feed.ranked", "partition": partition, "offset": offset}
    assert key == b"1"
    columns = EventExtractor(SPEC.events.served, RANKED).extract(BytesColumn.of([value]), framed=True)
    assert columns.times_ms.tolist() == [NOW, NOW]
    assert SchemaRegistry(gateway.log).get(framed_id(value)) == RANKED


def test_events_of_a_request_share_a_partition_in_all_streams(gateway: Running) -> None:
    for request in range(20):
        gateway.send("impressions", ranked(request))
        gateway.send("actions", action(request))
        gateway.send("shown", {"reqId": request, "item": {"id": 7}, "at": "2023-11-14T22:13:20Z"})

    def partitions(topic: str) -> dict[bytes, int]:
        return {key: p for p, _, key, _ in gateway.records(topic)}

    assert partitions("feed.ranked") == partitions("app.actions") == partitions("app.viewport")
    assert len(set(partitions("feed.ranked").values())) > 1


@pytest.mark.parametrize("as_lines", [True, False])
def test_a_batch_is_acknowledged_in_its_order(gateway: Running, as_lines: bool) -> None:
    events = [ranked(i) for i in range(30)]
    if as_lines:
        answer = gateway.post("impressions", b"\n".join(map(orjson.dumps, events)), "application/x-ndjson")
    else:
        answer = gateway.send("impressions", events)

    places = {(p, o): key for p, o, key, _ in gateway.records("feed.ranked")}
    assert answer.status_code == 202
    assert [places[a["partition"], a["offset"]] for a in answer.json()["acks"]] == [
        b"%d" % i for i in range(30)
    ]


def test_a_batch_for_a_topic_in_json_keeps_each_event_as_it_came(gateway: Running) -> None:
    texts = [orjson.dumps({**action(i), "app": {"build": i}}) for i in range(3)]

    assert gateway.post("actions", b"[" + b" ,\n".join(texts) + b"]").status_code == 202

    assert sorted(v for _, _, _, v in gateway.records("app.actions")) == sorted(texts)


def test_metrics_count_events_by_what_became_of_them(gateway: Running) -> None:
    gateway.send("impressions", [ranked(1), 7])
    text = httpx.get(f"{gateway.url}/metrics").text

    assert 'freshet_gateway_events_total{outcome="accepted",stream="served"} 1.0' in text
    assert 'freshet_gateway_events_total{outcome="refused",stream="served"} 1.0' in text
    assert 'freshet_http_requests_total{door="passed",route="/v1/impressions",status="422"} 1.0' in text


def test_the_status_counts_events_of_each_stream(gateway: Running) -> None:
    def counts() -> dict[str, dict[str, int]]:
        found: dict[str, dict[str, int]] = httpx.get(f"{gateway.url}/status").json()["events"]
        return found

    before = counts()
    gateway.send("impressions", [ranked(1), 7])

    assert before.keys() == {"served", "shown", "action"}
    assert counts()["served"] == {outcome: n + 1 for outcome, n in before["served"].items()}
    assert counts()["action"] == before["action"]


def test_the_client_sends_and_reads_refusals(gateway: Running) -> None:
    with Client(gateway.url) as client:
        receipt = client.impressions(ranked())
        assert receipt.acks[0].topic == "feed.ranked"
        with pytest.raises(EventsRefused, match="event 1"):
            client.actions([action(), action(reqId="x")])
