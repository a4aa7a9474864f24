"""The Open Inference Protocol, by the clients that people use; docs/inference-protocol.md has the results.

`FRESHET_WRITE_DOCS=1` writes the table of that page anew.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path

import httpx
import pytest

from freshet.process.ports import lease_ports
from freshet.testing.conditions import wait_for
from tests.fixtures.inference import SPEC, Running, greedy, serving, trained
from tests.integration import oip_clients
from tests.integration.oip_clients import KSERVE

PAGE = Path(__file__).parents[2] / "docs" / "inference-protocol.md"
BEGIN, END = "<!-- clients: begin -->\n", "<!-- clients: end -->"
TRITON = ("tritonclient.http", "tritonclient.http.aio", "tritonclient.grpc", "tritonclient.grpc.aio")
CLIENTS = (*TRITON, "kserve REST", "kserve gRPC")


@pytest.fixture(scope="module")
def grpc_port() -> int:
    return lease_ports(1)[0]


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory, grpc_port: int) -> Iterator[Running]:
    world = trained(tmp_path_factory.mktemp("serving"), greedy(SPEC))
    with serving(world, inference_grpc_port=str(grpc_port)) as running:
        wait_for(lambda: running.get("/health/ready").status_code == 200)
        yield running
    world.close()


def columns() -> dict[str, dict[str, str]]:
    """What the page says: client -> check -> cell."""
    text = PAGE.read_text(encoding="utf-8")
    head, _, *lines = text[text.index(BEGIN) + len(BEGIN) : text.index(END)].strip().splitlines()
    clients = [cell.strip(" `") for cell in head.strip("|").split("|")[1:]]
    found: dict[str, dict[str, str]] = {client: {} for client in clients}
    for line in lines:
        name, *cells = (cell.strip() for cell in line.strip("|").split("|"))
        for client, cell in zip(clients, cells, strict=True):
            found[client][name] = cell
    return found


def write(table: Mapping[str, Mapping[str, str]]) -> None:
    """Put a table into the page."""
    lines = [
        "| | " + " | ".join(f"`{client}`" for client in CLIENTS) + " |",
        "| --- |" + " --- |" * len(CLIENTS),
        *(
            f"| {name} | " + " | ".join(table.get(client, {}).get(name, "?") for client in CLIENTS) + " |"
            for name in oip_clients.CHECKS
        ),
    ]
    text = PAGE.read_text(encoding="utf-8")
    before, after = text[: text.index(BEGIN) + len(BEGIN)], text[text.index(END) :]
    PAGE.write_text(before + "\n".join(lines) + "\n" + after, encoding="utf-8")


@pytest.mark.parametrize(
    "client", [*TRITON, *(pytest.param(c, marks=pytest.mark.kserve) for c in CLIENTS[len(TRITON) :])]
)
def test_each_client_can_do_what_the_page_says(server: Running, grpc_port: int, client: str) -> None:
    python = Path(sys.executable)
    if client.startswith("kserve"):
        python = KSERVE
        assert python.exists(), f"{python}: not there; run ops/install-kserve, or leave this out: SKIP=kserve"
    address = server.url.removeprefix("http://")
    run = subprocess.run(
        [python, oip_clients.__file__, client, address, f"127.0.0.1:{grpc_port}"],
        capture_output=True, text=True, timeout=120, check=False,
        env={k: v for k, v in os.environ.items() if k != "PYTHONPATH"},
    )  # fmt: skip
    assert run.returncode == 0, run.stderr
    found = {name: cell or "–" for name, cell in json.loads(run.stdout).items()}

    if os.environ.get("FRESHET_WRITE_DOCS"):
        write({**columns(), client: found})
    assert found == columns()[client], "the page tells otherwise: FRESHET_WRITE_DOCS=1 writes it anew"


PLAIN = {"name": "user.id", "datatype": "INT64", "shape": [2], "data": [1, 2]}


def infer(server: Running, *inputs: object, **more: object) -> httpx.Response:
    return httpx.post(f"{server.url}/v2/models/feed/infer", json={"inputs": inputs, **more}, timeout=15)


@pytest.mark.parametrize("name", ["user.id", "user.country", "items.ctr_1h"])
def test_null_in_a_row_of_json_is_a_row_without_a_value(server: Running, name: str) -> None:
    datatype, value = {"user.id": ("INT64", 5), "user.country": ("BYTES", "DE")}.get(name, ("FP32", 0.4))
    column = {"name": name, "datatype": datatype, "shape": [2], "data": [None, value]}
    other = {"name": "items.id", "datatype": "INT64", "shape": [2], "data": [1, 1]}

    null, known = infer(server, column, other).json()["outputs"][0]["data"]
    absent, _ = infer(server, other).json()["outputs"][0]["data"]

    assert (null, null == known) == (absent, False)


@pytest.mark.parametrize(
    "path",
    [
        "/v2/nowhere",
        "/v2/models/feed/stats",
        "/v2/repository/index",
        "/v2/models/other",
        "/v2/models/feed/infer",
    ],
)
@pytest.mark.parametrize("method", ["GET", "POST", "DELETE"])
def test_every_error_below_v2_is_a_text(server: Running, method: str, path: str) -> None:
    answer = httpx.request(method, server.url + path, timeout=15)

    assert answer.status_code in (400, 404, 405)
    assert isinstance(answer.json()["error"], str)


@pytest.mark.parametrize("slash", ["", "/"])
@pytest.mark.parametrize(
    "path",
    ["/v2", "/v2/health/live", "/v2/health/ready", "/v2/models/feed", "/v2/models/feed/ready",
     "/v2/models/feed/versions/0", "/v2/models/feed/versions/0/ready", "/v2/models/feed/config"],
)  # fmt: skip
def test_a_slash_at_the_end_and_head_and_options_are_answered(server: Running, path: str, slash: str) -> None:
    url = server.url + path + slash
    assert httpx.get(url).status_code == 200
    assert (httpx.head(url).status_code, httpx.head(url).content) == (200, b"")
    assert httpx.options(url).headers["allow"] == "GET, HEAD, OPTIONS"


@pytest.mark.parametrize("id_", ["a", "", "é", 7, 2**64 - 1])
def test_an_id_comes_back_as_it_was_sent(server: Running, id_: str | int) -> None:
    assert infer(server, PLAIN, id=id_).json()["id"] == id_


def test_a_compressed_body_is_bounded_by_its_length_without(server: Running) -> None:
    import gzip  # noqa: PLC0415

    body = gzip.compress(b" " * (1 << 28))
    answer = httpx.post(
        f"{server.url}/v2/models/feed/infer", content=body, headers={"content-encoding": "gzip"}, timeout=60
    )

    assert answer.status_code == 413
    assert "too large without its coding" in answer.json()["error"]
