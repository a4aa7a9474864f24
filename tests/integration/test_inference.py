"""The inference server over real sockets, on a real log, row store and version store."""

from __future__ import annotations

import io
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor, as_completed
from functools import partial
from pathlib import Path
from typing import Any

import fastavro
import httpx
import numpy as np
import orjson
import pytest
import tritonclient.http as triton
from click.testing import CliRunner
from hypothesis import HealthCheck, given
from hypothesis import settings as quick
from hypothesis import strategies as st
from structlog.testing import capture_logs
from tritonclient.utils import InferenceServerException

from freshet.cli.rank import command as rank
from freshet.client import Ack, Client
from freshet.config.avro.schema import parse_schema, served_schema, to_json
from freshet.config.spec.parse import parse_spec
from freshet.errors import BadInput, Unavailable
from freshet.features import EventExtractor
from freshet.inference.pipeline import Pipeline, Scored
from freshet.inference.progress import Progress, Stage
from freshet.inference.service import MAX_QUERIES, label_delay_ms
from freshet.log.schema_ids import SchemaRegistry, framed_id
from freshet.model import build_model
from freshet.testing.conditions import wait_for
from freshet.types import Append, BytesColumn
from tests.fixtures.inference import (
    CANDIDATES,
    COLUMNS,
    CONTEXT,
    NOW,
    RANKED,
    SPEC,
    Running,
    greedy,
    serving,
    trained,
    whole,
)
from tests.fixtures.serving import JSON
from tests.fixtures.trained_model import World


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    """One that only answers; tests that change what is served make their own."""
    world = trained(tmp_path_factory.mktemp("serving"), greedy(SPEC))
    with serving(world) as running_:
        wait_for(lambda: running_.get("/health/ready").status_code == 200)
        yield running_
    world.close()


@pytest.fixture
def world(tmp_path: Path) -> Iterator[World]:
    world = trained(tmp_path, greedy(SPEC))
    yield world
    world.close()


def test_scores_equal_those_of_the_trainer_s_serving_mode(server: Running) -> None:
    answer = server.rank().json()

    expected = server.world.scores(whole(CANDIDATES), 0)
    labels = [label.name for label in SPEC.labels]
    for item in answer["items"]:
        found = [item["predictions"][label] for label in labels]
        # a request adds up the columns that its candidates share before the others
        np.testing.assert_allclose(found, expected[item["index"]], rtol=1e-5)
    click, watch, buy = expected.T
    np.testing.assert_allclose(
        [i["score"] for i in answer["items"]],
        (click * (1 + 0.1 * watch) + 20 * click * buy)[[i["index"] for i in answer["items"]]],
        rtol=1e-5,
    )


def test_a_page_of_another_site_is_not_logged_as_served(world: World) -> None:
    body = orjson.dumps({"context": CONTEXT, "candidates": CANDIDATES, "k": 3})
    headers = {**JSON, "sec-fetch-site": "cross-site", "origin": "https://evil.example"}
    with serving(world) as server:
        wait_for(lambda: server.get("/health/ready").status_code == 200)
        answer = httpx.post(f"{server.url}/v1/rank", content=body, headers=headers, timeout=60)
        server.rank(k=2)  # events are logged in their order: once this one is there, the other is not coming
        wait_for(lambda: len(server.logged()) > 0)
        logged = server.logged()

    assert (answer.status_code, answer.json()["error"]["code"]) == (403, "origin")
    assert len(logged) == 1


def test_concurrent_requests_get_the_answers_of_each_alone(server: Running) -> None:
    asked: list[dict[str, Any]] = [
        {
            "context": CONTEXT | {"user": {"id": u, "country": "DE", "last_items": [u]}},
            "candidates": c,
        }
        for u in range(4, 12)
        for c in (CANDIDATES, CANDIDATES[:3], [{"id": u, "age_s": 1.5}])
    ]
    # an id of its own: the error has an offset in the body, and generated ids differ in length
    bad: dict[str, Any] = {"candidates": [{"age_s": 1.0}], "request_id": 7}

    def ask(change: dict[str, Any]) -> tuple[Any, Any, Any]:
        answer = server.rank(**change).json()
        return answer.get("items"), answer.get("unknown_rows"), answer.get("error")

    alone = [ask(change) for change in [*asked, bad]]
    with ThreadPoolExecutor(12) as pool:
        together = [list(pool.map(ask, [*asked, bad])) for _ in range(4)]

    assert together == [alone] * 4
    assert alone[-1][2]["code"] == "bad_input"


def test_scores_of_a_batch_equal_those_of_each_request_alone(server: Running) -> None:
    world = server.world
    pipeline = Pipeline(world.spec, RANKED)
    model = build_model(world.spec, training=False)
    model.load_state(world.versions.get(0).tensors, weights_only=True)
    events = [
        {**whole(CANDIDATES[:n], request), "user": {"id": user, "country": None, "last_items": [user]}}
        for request, (user, n) in enumerate([(5, 10), (999, 3), (6, 1), (5, 7)])
    ]
    asked = [pipeline.encoded([event], len(event["items"])) for event in events]
    no_key = pipeline.encoded([{**events[0], "request_id": None}], 10)

    together = pipeline.score_all([*asked, no_key], world.rows, model)

    assert isinstance(together.pop(), BadInput)
    for found in (together, pipeline.score_all(asked, world.rows, model)):
        for one, alone in zip(found, asked, strict=True):
            assert isinstance(one, Scored)
            expected = pipeline.score(pipeline.request(alone), world.rows, model)
            np.testing.assert_array_equal(one.predictions, expected.predictions)
            np.testing.assert_array_equal(one.scores, expected.scores)
            assert one.unknown == expected.unknown
    assert together[1].unknown["user"] == 3  # type: ignore[union-attr]


def test_items_come_best_first_and_no_more_than_wanted(server: Running) -> None:
    answer = server.rank(k=3).json()
    scores = [item["score"] for item in server.rank().json()["items"]]

    assert [item["score"] for item in answer["items"]] == scores[:3]
    assert scores == sorted(scores, reverse=True)
    assert len(scores) == 10


def test_an_answer_says_version_freshness_and_what_is_unknown(server: Running) -> None:
    answer = server.rank().json()

    assert answer["version"] == 0
    assert answer["freshness_ms"] == 5_000
    assert answer["unknown_rows"]["item"] == 2  # candidates 8 and 9 were never learned
    assert "user" not in answer["unknown_rows"]
    assert not answer["explored"]


def test_metrics_have_freshness_and_its_limit(server: Running) -> None:
    text = server.get("/metrics").text

    assert "freshet_inference_freshness_seconds 5.0" in text
    assert "freshet_inference_rows_freshness_seconds 5.0" in text
    assert "freshet_inference_rows_unread_seconds 0.0" in text
    assert f"freshet_inference_label_delay_seconds {label_delay_ms(SPEC) / 1e3}" in text
    assert f"freshet_inference_publish_interval_seconds {SPEC.train.publish_interval_ms / 1e3}" in text


def test_an_unknown_user_is_counted_once_for_each_candidate(server: Running) -> None:
    context = {**CONTEXT, "user": {"id": 999, "country": None}}

    assert server.rank(context=context).json()["unknown_rows"]["user"] == 10


def test_a_field_that_is_missing_is_null_and_makes_no_row(server: Running) -> None:
    answer = server.rank(context={}, candidates=[{"id": 1}], dry_run=True)

    assert answer.status_code == 200
    assert answer.json()["unknown_rows"].get("user") is None


def test_a_request_id_is_kept_or_made(server: Running) -> None:
    assert server.rank(request_id=77).json()["request_id"] == 77
    made = [server.rank().json()["request_id"] for _ in range(5)]
    assert len(set(made)) == 5
    assert all(0 <= m < 2**53 for m in made)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"context": {"user": {"id": "five"}}}, "user.id"),
        ({"candidates": [{"id": 1}, {"id": 2, "age_s": "old"}]}, "age_s"),
        ({"candidates": [{"age_s": 1.0}]}, "items[0].id"),
        ({"context": {"user": {"id": 5}}}, "device"),
        ({"context": {**CONTEXT, "ts": NOW + 61_000}}, "ts"),
        ({"context": {**CONTEXT, "ts": NOW // 1_000}}, 'say time = "ts:s" in events.served'),
        ({"candidates": []}, "candidates"),
        ({"context": {"request_id": 1}, "request_id": 2}, "request_id"),
    ],
)
def test_a_bad_request_names_the_field(server: Running, change: dict[str, Any], message: str) -> None:
    answer = server.rank(**change)

    assert answer.status_code == 400
    assert message in answer.json()["error"]["message"]


def test_too_many_candidates_are_413(server: Running) -> None:
    assert server.rank(candidates=[{"id": 1}] * 10_001).status_code == 413


def test_the_client_ranks(server: Running) -> None:
    with Client(inference=server.url) as client:
        ranking = client.rank(CONTEXT, CANDIDATES, k=2, request_id=5, dry_run=True, explain=True)
        rows = ranking.items[0].rows
        assert rows is not None
        assert (rows["user"].known, rows["user"].age_s) == (1, 5)
        assert len(ranking.items) == 2
        assert ranking.items[0].predictions.keys() == {"click", "watch", "buy"}
        with pytest.raises(BadInput, match="candidates"):
            client.rank({}, [])


def test_what_was_served_is_logged_under_the_extended_schema(world: World) -> None:
    with serving(world) as server:
        wait_for(lambda: server.get("/health/ready").status_code == 200)
        answer = server.rank(k=4, request_id=12).json()
        wait_for(lambda: len(server.logged()) == 1)
        [record] = server.logged()

    extended = served_schema(RANKED, "items")
    assert SchemaRegistry(world.log).get(framed_id(record)) == extended
    parsed = fastavro.parse_schema(to_json(extended))
    event: Any = fastavro.schemaless_reader(io.BytesIO(record[5:]), parsed, None)
    assert (event["request_id"], event["user"]["id"]) == (12, 5)
    assert [item["id"] for item in event["items"]] == [CANDIDATES[i["index"]]["id"] for i in answer["items"]]
    assert [item["pos"] for item in event["items"]] == [0, 1, 2, 3]
    for logged, item in zip(event["items"], answer["items"], strict=True):
        served = logged["freshet_served"]
        assert served["version"] == 0
        assert served["propensity"] == 1.0
        assert served["score"] == pytest.approx(item["score"])
        assert served["predictions"] == pytest.approx(list(item["predictions"].values()))
    columns = EventExtractor(SPEC.events.served, extended).extract(BytesColumn.of([record]), framed=True)
    assert len(columns) == 4


def test_what_could_not_be_logged_is_refused_and_logs_nothing(world: World) -> None:
    with serving(world) as server:
        wait_for(lambda: server.get("/health/ready").status_code == 200)
        refused = server.rank(context={"user": {"id": 5}})  # no device, which events need
        assert refused.status_code == 400
        assert "device: expected one of phone" in refused.json()["error"]["message"]
        assert server.rank(context={"user": {"id": 5}}, dry_run=True).status_code == 200
        request = server.rank().json()["request_id"]
        wait_for(lambda: len(server.logged()) == 1)
        parsed = fastavro.parse_schema(to_json(served_schema(RANKED, "items")))
        (record,) = server.logged()
        event: Any = fastavro.schemaless_reader(io.BytesIO(record[5:]), parsed, None)
        assert event["request_id"] == request
        assert 'freshet_inference_served_dropped_total{why="schema"} 0.0' in server.get("/metrics").text


def test_without_rows_or_version_the_answer_is_503_with_a_reason(tmp_path: Path) -> None:
    world = World(tmp_path, greedy(SPEC), RANKED)
    with serving(world, inference_start_wait="0ms") as server:
        wait_for(lambda: "start its trainer" in server.get("/health/ready").text)
        assert server.get("/health/ready").status_code == 503
        assert server.get("/health/live").status_code == 200
        assert server.rank().status_code == 503
        world.create()
        wait_for(lambda: "no version has been promoted" in server.rank().text)
        world.put_version(0)
        world.promote(0)
        wait_for(lambda: server.rank().status_code == 200)
    world.close()


def test_no_version_is_reported_before_rows_are_loaded(tmp_path: Path) -> None:
    world = World(tmp_path, greedy(SPEC), RANKED)
    world.put_version(0)
    world.promote(0)
    with serving(world, inference_start_wait="0ms") as server:
        wait_for(lambda: "freshet_inference_version_swaps_total 1.0" in server.get("/metrics").text)
        assert "freshet_inference_version -1.0" in server.get("/metrics").text
        world.create()
        wait_for(lambda: "freshet_inference_version 0.0" in server.get("/metrics").text)
        assert server.rank().status_code == 200
    world.close()


def test_a_request_to_a_server_that_starts_waits_for_its_answer(tmp_path: Path) -> None:
    world = World(tmp_path, greedy(SPEC), RANKED)
    world.create()
    with serving(world, inference_start_wait="1m") as server, ThreadPoolExecutor(1) as pool:
        answer = pool.submit(server.rank)
        wait_for(lambda: "no version has been promoted" in server.get("/health/ready").text)
        assert not answer.done()
        world.put_version(0)
        world.promote(0)
        assert answer.result(60).status_code == 200
    world.close()


def test_client_that_leaves_before_the_start_is_over_is_dropped(tmp_path: Path) -> None:
    world = World(tmp_path, greedy(SPEC), RANKED)
    world.create()
    with serving(world, inference_start_wait="1m") as server:
        with pytest.raises(httpx.ReadTimeout):
            httpx.post(f"{server.url}/v1/rank", content=b"{}", headers=JSON, timeout=0.5)
        wait_for(lambda: 'freshet_inference_shed_total{why="gone"} 1.0' in server.get("/metrics").text)
        assert 'route="/v1/rank",status="gone"' in server.get("/metrics").text
        assert "freshet_http_body_bytes 0.0" in server.get("/metrics").text
        world.put_version(0)
        world.promote(0)
        wait_for(lambda: server.rank().status_code == 200)
    world.close()


def test_rows_and_versions_change_what_is_served(world: World) -> None:
    with serving(world) as server:
        wait_for(lambda: server.get("/health/ready").status_code == 200)
        before = server.rank().json()["items"]
        world.learn(whole(CANDIDATES), 99, clock_ms=NOW - 1_000)
        world.publish()

        def followed() -> bool:  # all partitions: the first one alone makes it fresh
            told = server.rank().json()
            return told["freshness_ms"] == 1_000 and "item" not in told["unknown_rows"]

        wait_for(followed)
        assert server.rank().json()["items"] != before

        world.put_version(1)
        world.promote(1)
        wait_for(lambda: server.rank().json()["version"] == 1)
        np.testing.assert_allclose(
            sorted(i["predictions"]["click"] for i in server.rank().json()["items"]),
            sorted(world.scores(whole(CANDIDATES), 1)[:, 0]),
            rtol=1e-5,
        )


def test_a_corrupt_version_is_kept_out_and_health_says_why(world: World) -> None:
    with serving(world) as server:
        wait_for(lambda: server.get("/health/ready").status_code == 200)
        world.put_version(1, noise=float("nan"))
        world.promote(1)
        wait_for(lambda: "version 1 kept out" in server.get("/health/ready").json()["versions"])
        assert server.get("/health/ready").status_code == 200
        assert server.rank().json()["version"] == 0
        assert "freshet_inference_versions_refused_total 1.0" in server.get("/metrics").text


class Hanging:
    """A store that does not answer until the test releases it."""

    def __init__(self) -> None:
        self.asked, self.answers = threading.Event(), threading.Event()

    def __getattr__(self, name: str) -> Any:
        self.asked.set()
        assert self.answers.wait(300)
        raise Unavailable(f"{name}: the store is away")


def test_hanging_stores_delay_a_stop_by_its_drain_at_most(tmp_path: Path) -> None:
    world, rows, versions = trained(tmp_path, greedy(SPEC)), Hanging(), Hanging()
    world.store.close()
    world.versions.close()
    world.store, world.versions = rows, versions
    with capture_logs() as said, serving(world, common_drain="2s") as server:
        assert rows.asked.wait(60)
        assert versions.asked.wait(60)
        server.stop.set()
        try:
            wait_for(lambda: any(line["event"] == "inference stopped" for line in said))
        finally:  # the stores answer only now
            rows.answers.set()
            versions.answers.set()

    [stopped] = [line for line in said if line["event"] == "inference stopped"]
    assert stopped["threads_left"] == ["rows", "versions"]


def test_swaps_under_load_cost_no_request_an_error(world: World) -> None:
    for number in range(1, 11):
        world.put_version(number)
    with serving(world) as server:
        wait_for(lambda: server.get("/health/ready").status_code == 200)
        statuses: list[int] = []
        versions: list[int] = []
        over = threading.Event()

        def load() -> None:
            with httpx.Client(timeout=60) as client:
                while not over.is_set():
                    body = orjson.dumps({"context": CONTEXT, "candidates": CANDIDATES})
                    answer = client.post(f"{server.url}/v1/rank", content=body, headers=JSON)
                    statuses.append(answer.status_code)
                    versions.append(answer.json().get("version"))

        threads = [threading.Thread(target=load) for _ in range(3)]
        for thread in threads:
            thread.start()
        for number in range(1, 11):
            world.promote(number)
            wait_for(partial(lambda wanted: versions[-1:] == [wanted], number))
        over.set()
        for thread in threads:
            thread.join(60)

    assert set(statuses) == {200}
    assert set(versions) == set(range(11)) - ({0} if 0 not in versions else set())


def test_exploration_is_in_the_answer_and_in_the_log(tmp_path: Path) -> None:
    world = trained(tmp_path, greedy(SPEC, share=0.5))
    with serving(world) as server:
        wait_for(lambda: server.get("/health/ready").status_code == 200)
        answers = [server.rank().json() for _ in range(40)]
        wait_for(lambda: len(server.logged()) == 40)
    assert 5 < sum(a["explored"] for a in answers) < 35
    for answer in answers:
        assert {round(i["propensity"], 3) for i in answer["items"]} <= {0.55, 0.05}
        if not answer["explored"]:
            assert {round(i["propensity"], 3) for i in answer["items"]} == {0.55}
    world.close()


def test_a_dry_run_is_neither_explored_nor_logged(tmp_path: Path) -> None:
    world = trained(tmp_path, greedy(SPEC, share=1.0))
    with serving(world) as server:
        wait_for(lambda: server.get("/health/ready").status_code == 200)
        answers = [server.rank(dry_run=True).json() for _ in range(5)]
        assert server.rank(context={**CONTEXT, "request_id": 77}).json()["explored"]
        wait_for(lambda: len(server.logged()) > 0)
        status = server.get("/status").json()
        assert len(server.logged()) == 1
    for answer in answers:
        scores = [item["score"] for item in answer["items"]]
        assert scores == sorted(scores, reverse=True)
        assert not answer["explored"]
        assert {item["propensity"] for item in answer["items"]} == {1.0}
    assert (status["requests"], status["candidates"], status["explored"]) == (6, 60, 1)
    world.close()


def test_an_explained_answer_has_each_item_s_rows_and_ages(server: Running) -> None:
    items = [{"id": 3, "age_s": 1.0}, {"id": 999_999, "age_s": 1.0}]
    answer = server.rank(explain=True, candidates=items).json()
    by_index = {item["index"]: item["rows"] for item in answer["items"]}

    assert by_index[0].keys() == {f.name for f in SPEC.features if f.table is not None}
    assert by_index[0]["user"] == {"known": 1, "of": 1, "age_s": 5}
    assert by_index[0]["item"] == {"known": 1, "of": 1, "age_s": 5}
    assert by_index[1]["item"] == {"known": 0, "of": 1, "age_s": None}
    assert by_index[0]["recent"]["of"] == 2
    assert "rows" not in server.rank().json()["items"][0]
    unknown: dict[str, int] = {}
    for rows in by_index.values():
        for feature, found in rows.items():
            unknown[feature] = unknown.get(feature, 0) + found["of"] - found["known"]
    assert {name: n for name, n in unknown.items() if n} == answer["unknown_rows"]


def test_the_verb_rank_says_what_rows_are_behind_each_item(server: Running, tmp_path: Path) -> None:
    request = tmp_path / "request.json"
    request.write_bytes(orjson.dumps({"context": CONTEXT, "candidates": [{"id": 3}, {"id": 999_999}]}))
    options = [str(request), "--url", server.url, "--dry-run", "--explain"]

    text = CliRunner().invoke(rank, options).output
    said = CliRunner().invoke(rank, [*options, "--json"]).output
    items = orjson.loads(said.splitlines()[-1])["items"]  # the server's own log lines may stand above

    assert "1 of 1, 5 s" in text
    assert "0 of 1" in text
    assert {i["index"]: i["rows"]["item"]["known"] for i in items} == {0: 1, 1: 0}


def test_the_status_shows_how_far_rows_were_followed(server: Running) -> None:
    assert server.get("/status").json()["rows_next"] == server.get("/v1/progress").json()["rows_next"]


# --- the Open Inference Protocol, by its own client


@pytest.fixture
def client(server: Running) -> Iterator[triton.InferenceServerClient]:
    client = triton.InferenceServerClient(server.url.removeprefix("http://"))
    yield client
    client.close()


def tensors(*, binary: bool) -> list[triton.InferInput]:
    made = []
    for name, values in COLUMNS.items():
        tensor = triton.InferInput(name, values.shape, triton.np_to_triton_dtype(values.dtype))
        tensor.set_data_from_numpy(values, binary_data=binary)
        made.append(tensor)
    return made


def test_tritonclient_finds_server_and_model(client: triton.InferenceServerClient) -> None:
    assert client.is_server_live()
    assert client.is_server_ready()
    assert client.is_model_ready("feed")
    assert client.is_model_ready("feed", "0")
    assert client.get_server_metadata()["name"] == "freshet"
    described = client.get_model_metadata("feed")
    assert (described["name"], described["versions"]) == ("feed", ["0"])
    assert {"name": "items.id", "datatype": "INT64", "shape": [-1]} in described["inputs"]
    assert [o["name"] for o in described["outputs"]] == ["score", "click", "watch", "buy"]
    assert client.get_model_config("feed")["name"] == "feed"


@pytest.mark.parametrize("binary_in", [True, False])
@pytest.mark.parametrize("binary_out", [True, False, None])
def test_tritonclient_infers_what_rank_predicts(
    client: triton.InferenceServerClient, server: Running, binary_in: bool, binary_out: bool | None
) -> None:
    outputs = None
    if binary_out is not None:
        outputs = [triton.InferRequestedOutput(n, binary_data=binary_out) for n in ("score", "click")]

    result = client.infer("feed", tensors(binary=binary_in), outputs=outputs, request_id="a")

    ranked = {item["index"]: item for item in server.rank().json()["items"]}
    scores = [ranked[i]["score"] for i in range(10)]
    clicks = [ranked[i]["predictions"]["click"] for i in range(10)]
    np.testing.assert_allclose(result.as_numpy("score"), scores, rtol=1e-5)
    np.testing.assert_allclose(result.as_numpy("click"), clicks, rtol=1e-5)
    assert result.get_response()["id"] == "a"
    assert result.get_response()["model_version"] == "0"


def test_a_missing_input_is_null(client: triton.InferenceServerClient) -> None:
    only = [t for t in tensors(binary=True) if t.name() == "items.id"]

    assert np.isfinite(client.infer("feed", only).as_numpy("score")).all()


@pytest.mark.parametrize("name", ["..%2f..%2fetc%2fpasswd", "%2e%2e", "feed%00", "feed%2f0"])
def test_names_are_compared_never_used_as_paths(
    server: Running, client: triton.InferenceServerClient, name: str
) -> None:
    answer = server.get(f"/v2/models/{name}/ready")

    assert answer.status_code in (400, 404)
    with pytest.raises(InferenceServerException, match="no such model"):
        client.infer(name, tensors(binary=True))


@given(
    st.binary(max_size=200),
    st.sampled_from(["/v1/rank", "/v2/models/feed/infer"]),
    st.none() | st.integers(0, 250),
)
@quick(suppress_health_check=[HealthCheck.function_scoped_fixture], max_examples=80, deadline=None)
def test_random_bytes_are_never_a_server_error(
    server: Running, body: bytes, path: str, header: int | None
) -> None:
    headers = JSON if header is None else {**JSON, "inference-header-content-length": str(header)}
    assert httpx.post(server.url + path, content=body, headers=headers).status_code < 500


json_values = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**63), 2**64 - 1) | st.floats() | st.text(max_size=9),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=9), inner, max_size=3),
    max_leaves=6,
)


@given(
    st.dictionaries(st.sampled_from(["request_id", "ts", "user", "items"]), json_values),
    st.lists(st.dictionaries(st.sampled_from(["id", "age_s", "pos"]), json_values), min_size=1, max_size=3),
)
@quick(suppress_health_check=[HealthCheck.function_scoped_fixture], max_examples=80, deadline=None)
def test_any_values_are_ranked_or_refused(server: Running, context: Any, candidates: Any) -> None:
    assert server.rank(context=context, candidates=candidates).status_code in (200, 400)


# --- progress


def test_progress_queries_are_few_at_once_and_delay_nothing(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    begun, release = threading.Event(), threading.Event()

    def stage_of(*_event: object) -> Stage:
        begun.set()
        assert release.wait(60)
        return Stage(False, "joiner")

    monkeypatch.setattr(Progress, "stage_of", stage_of)
    question = "/v1/progress?topic=app.actions&partition=0&offset=5"
    with serving(world) as server, ThreadPoolExecutor(MAX_QUERIES + 1) as clients:
        answers = [clients.submit(server.get, question) for _ in range(MAX_QUERIES + 1)]
        assert begun.wait(60)
        try:
            one_more = next(as_completed(answers, timeout=20)).result()
            assert server.get("/v1/progress").status_code == 200
        finally:
            release.set()
        statuses = sorted(answer.result(60).status_code for answer in answers)

    assert (one_more.status_code, one_more.headers["retry-after"]) == (429, "1")
    assert statuses == [200] * MAX_QUERIES + [429]


def test_progress_names_the_step_that_an_event_awaits(world: World) -> None:
    topics = world.topics
    with serving(world) as server:
        wait_for(lambda: server.get("/health/ready").status_code == 200)

        def ask() -> tuple[bool, str]:
            body = server.get("/v1/progress?topic=app.actions&partition=0&offset=5").json()
            return body["served"], body["waits_for"]

        assert ask() == (False, "joiner")
        commit = orjson.dumps({"v": 1, "kind": "commit", "next": {"served": 0, "shown": 0, "action": 6}})
        end = world.offset
        samples = [Append(topics.samples, 0, BytesColumn.of([b"block"])) for _ in range(end + 1)]
        world.writer.append(samples)
        world.writer.append([Append(topics.joiner, 0, BytesColumn.of([commit]))])
        assert ask() == (False, "trainer")

        world.learn(whole(CANDIDATES), 5)
        world.publish()
        world.flush()
        wait_for(lambda: ask() == (True, ""))
        with Client(inference=server.url) as client:
            assert client.wait_until_served(Ack("app.actions", 0, 5), timeout_s=60)
            with pytest.raises(BadInput, match="expected a topic of"):
                client.wait_until_served(Ack("nobody", 0, 5))


# --- a spec without an exploded array

ADS = """
name = "ads"
partitions = 2
[events]
served = { topic = "ads.served", key = ["auction", "ad"], time = "at:s" }
action = { topic = "ads.actions", key = ["auction", "ad"], time = "at:s" }
[labels]
click = { on = "action.kind == 'click'" }
[tables]
ad = { dim = 4 }
[features]
ad = { field = "ad", table = "ad" }
slot = { field = "page.slot", table = "ad" }
bid = { field = "bid", dense = "log1p" }
"""
AUCTION = parse_schema(
    {
        "type": "record",
        "name": "Auction",
        "fields": [
            {"name": "auction", "type": "string"},
            {"name": "ad", "type": "string"},
            {"name": "at", "type": "long"},
            {
                "name": "page",
                "type": {"type": "record", "name": "Page", "fields": [{"name": "slot", "type": "int"}]},
            },
            {"name": "bid", "type": "double"},
        ],
    }
)


def test_without_an_exploded_array_each_candidate_is_an_event(tmp_path: Path) -> None:
    world = World(tmp_path, parse_spec(ADS), AUCTION)
    world.create()
    world.learn({"auction": "x", "ad": "a", "at": NOW // 1000, "page": {"slot": 1}, "bid": 2.0}, 1)
    world.publish()
    world.put_version(0)
    world.promote(0)
    with serving(world) as server:
        wait_for(lambda: server.get("/health/ready").status_code == 200)
        answer = server.rank(
            context={"page": {"slot": 1}}, candidates=[{"ad": "a", "bid": 2.0}, {"ad": "b", "bid": 1.0}]
        ).json()
        wait_for(lambda: len(server.logged("ads.served")) == 2)
        records = server.logged("ads.served")
    assert answer["unknown_rows"] == {"ad": 1, "ad*slot": 1}  # few features are crossed in all pairs
    parsed = fastavro.parse_schema(to_json(served_schema(AUCTION, None)))
    events: list[Any] = [fastavro.schemaless_reader(io.BytesIO(r[5:]), parsed, None) for r in records]
    assert {e["auction"] for e in events} == {answer["request_id"]}
    assert {e["ad"] for e in events} == {"a", "b"}
    assert {e["at"] for e in events} == {NOW // 1000}
    world.close()
