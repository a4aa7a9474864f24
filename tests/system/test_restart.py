"""Stopping, starting again, and what stands in the way: a loop goes on where it was, or says why not."""

from __future__ import annotations

import os
import resource
import socket
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import httpx
import pytest

import freshet
from freshet.adapters import open_versions
from freshet.apps.local import Local, local
from freshet.config.settings import RunFolder, load_settings
from freshet.config.spec import Spec, load_spec
from freshet.config.spec.identity import render
from freshet.config.spec.topics import topics_of
from freshet.coordination.claims import LEASE_S
from freshet.process.run_state import read_state
from freshet.testing.conditions import wait_until, wait_until_nothing_differs
from tests.fixtures import audit
from tests.fixtures.commands import LEDGER, drain, own_ports, told_by, url_of
from tests.fixtures.traffic import Impression

pytestmark = [pytest.mark.system, pytest.mark.timeout(240)]

Sent = dict[tuple[str, int], Impression]


@pytest.fixture
def spec() -> Spec:
    """The ledger's, with windows so short that a run comes to rest within seconds."""
    spec = load_spec(LEDGER)
    labels = tuple(replace(label, window_ms=1_000) for label in spec.labels)
    return replace(spec, labels=labels, join=replace(spec.join, grace_ms=1_000))


def send(system: Local, name: str, requests: int) -> Sent:
    """Impressions of two items each, acknowledged."""
    now = time.time_ns() // 1_000_000
    sent: Sent = {}
    pages = []
    for i in range(requests):
        user = f"user-{i % 5}"
        pages.append(
            {
                "request_id": f"{name}-{i}",
                "ts": now,
                "user": user,
                "items": [{"item": item, "seq": 2.0 * i + item} for item in (0, 1)],
            }
        )
        sent |= {(f"{name}-{i}", item): Impression(2 * i + item, user, now) for item in (0, 1)}
    system.send(impressions=pages)
    return sent


def check(system: Local, folder: Path, spec: Spec, sent: Sent) -> None:
    """Everything sent is in the log, stored, summed up and served, exactly once."""
    log = audit.open_log(folder)
    topics = topics_of(spec)
    try:
        drain(system, folder, log, topics, len(sent))
        books = audit.read_books(log, topics)
    finally:
        log.close()
    labels = tuple(label.name for label in spec.labels)
    assert list(audit.against_acknowledged(books, sent, {}, labels, excused=0)) == []
    wait_until_nothing_differs(lambda: audit.against_serving(books, url_of(system, "inference")), within_s=60)
    assert list(audit.against_dense(books, folder)) == []
    wait_until_nothing_differs(lambda: audit.against_rows(books, folder, spec), within_s=60)


def up(spec_file: Path, folder: Path, environment: Mapping[str, str] | None = None) -> subprocess.Popen[str]:
    with_us = {"PYTHONPATH": str(Path(freshet.__file__).parents[1])}
    return subprocess.Popen(
        [sys.executable, "-m", "freshet.cli", "up", str(spec_file), "--folder", str(folder)],
        env={**os.environ, **own_ports(), **with_us, **(environment or {})},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )


def test_after_ctrl_c_up_goes_on_where_it_was(spec: Spec, tmp_path: Path) -> None:
    folder = tmp_path / "run"
    with local(spec, folder=folder, ready_s=120) as system:
        sent = send(system, "before", 20)
        first = audit.newest_version(folder).number
    stopped = read_state(RunFolder(folder))
    with local(spec, folder=folder, ready_s=120) as system:
        sent |= send(system, "after", 20)
        check(system, folder, spec, sent)

    assert all(service["pid"] is None and not service["restarts"] for service in stopped.values())
    assert audit.newest_version(folder).number > first


def test_a_store_of_another_spec_is_refused_with_the_edit(spec: Spec, tmp_path: Path) -> None:
    folder = tmp_path / "run"
    with local(spec, folder=folder, ready_s=120):
        pass
    other = replace(spec, join=replace(spec.join, grace_ms=5_000))
    file = tmp_path / "other.toml"
    file.write_text(render(_beside(other, tmp_path)))

    process = up(file, folder)
    said, _ = process.communicate(timeout=120)

    assert process.returncode == 1
    assert "holds model 'ledger' of another spec" in said
    assert 'join.grace: "1s" -> "5s" (identity)' in said
    assert "--folder" in said


def test_a_port_in_use_names_its_owner_and_the_way_out(tmp_path: Path) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = str(taken.getsockname()[1])

        process = up(LEDGER, tmp_path / "run", {"FRESHET_GATEWAY_PORT": port})
        said, _ = process.communicate(timeout=120)

    assert process.returncode == 1
    assert f"port {port} is held by process {os.getpid()}" in said
    assert "FRESHET_GATEWAY_PORT" in said


def test_a_second_up_in_the_folder_is_refused(spec: Spec, tmp_path: Path) -> None:
    folder = tmp_path / "run"
    with local(spec, folder=folder, ready_s=120) as system:
        process = up(LEDGER, folder)
        said, _ = process.communicate(timeout=120)
        still = all(told_by(system, role) for role in system.ports)

    assert process.returncode == 1
    assert "is in use by process" in said
    assert still


def test_an_older_version_is_used_if_the_newest_is_damaged(spec: Spec, tmp_path: Path) -> None:
    folder = tmp_path / "run"
    with local(spec, folder=folder, ready_s=120) as system:
        sent = send(system, "before", 20)
        check(system, folder, spec, sent)
    damaged = audit.newest_version(folder).number
    (folder / "versions" / f"{damaged:010d}" / "weights.safetensors").write_bytes(b"damaged")

    with local(spec, folder=folder, ready_s=120) as system:
        assert told_by(system, "inference")["version"] is not None
        sent |= send(system, "after", 20)
        check(system, folder, spec, sent)

    versions = open_versions(load_settings(run_folder=folder).common.versions_url)
    assert versions.aliases()["stable"] > damaged
    assert "trying an older one" in RunFolder(folder).process_log("trainer").read_text()


def test_a_full_disk_refuses_events_and_loses_none_acknowledged(spec: Spec, tmp_path: Path) -> None:
    folder = tmp_path / "run"
    page = {"request_id": "full", "ts": 0, "user": "user-0", "items": [{"item": 0, "seq": 1000.0}]}
    refusals = []
    with local(spec, folder=folder, ready_s=120) as system:
        sent = send(system, "before", 20)
        with _full_disk(folder):
            began = time.monotonic()
            while time.monotonic() - began < 2 * LEASE_S:  # longer than anything may stay silent
                page["ts"] = time.time_ns() // 1_000_000
                url = f"{url_of(system, 'gateway')}/v1/impressions"
                refusals.append(httpx.post(url, json=page, timeout=30))
            ranked = system.rank({"user": "user-0"}, [{"item": 0, "seq": 1}])
        sent |= _sent_again(system, page)
        sent |= send(system, "after", 20)
        check(system, folder, spec, sent)

    assert {answer.status_code for answer in refusals} == {503}
    assert "impressions" in refusals[0].json()["error"]["message"]  # the file that cannot be written
    assert len(ranked.items) == 1


def _sent_again(system: Local, page: dict[str, object]) -> Sent:
    """What was refused with 503 may be sent again, whether it was written or not."""
    wait_until(
        "the gateway takes events again",
        lambda: (
            httpx.post(f"{url_of(system, 'gateway')}/v1/impressions", json=page, timeout=30).status_code
            == 202
        ),
        within_s=60,
    )
    return {("full", 0): Impression(1000, "user-0", int(str(page["ts"])))}


@contextmanager
def _full_disk(folder: Path) -> Iterator[None]:
    """No process of the run can write to a file, as if the disk were full: files may have 0 bytes."""
    pids = [int(str(s["pid"])) for s in read_state(RunFolder(folder)).values() if s["pid"] is not None]
    assert len(pids) == 4
    before = {pid: resource.prlimit(pid, resource.RLIMIT_FSIZE) for pid in pids}
    for pid, (_, hard) in before.items():
        resource.prlimit(pid, resource.RLIMIT_FSIZE, (0, hard))
    try:
        yield
    finally:
        for pid, limits in before.items():
            if _is_alive(pid):
                resource.prlimit(pid, resource.RLIMIT_FSIZE, limits)


def _is_alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return True


def _beside(spec: Spec, folder: Path) -> Spec:
    """The spec with the paths of its schemas absolute, so that it may be written elsewhere."""
    events = spec.events
    schemas = LEDGER.parent
    served = replace(events.served, schema=str(schemas / str(events.served.schema)))
    action = replace(events.action, schema=str(schemas / str(events.action.schema)))
    return replace(spec, events=replace(events, served=served, action=action), folder=str(folder))
