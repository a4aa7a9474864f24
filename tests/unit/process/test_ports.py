"""Holders of ports, errors of listeners, leases of ports."""

from __future__ import annotations

import errno
import multiprocessing
import os
import socket
from collections.abc import Callable, Sequence
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path

import pytest
from prometheus_client import CollectorRegistry

from freshet.errors import ConfigError
from freshet.http.addresses import Address, reachable_host
from freshet.http.admin import Admin
from freshet.http.app import App
from freshet.http.messages import BodyLimits
from freshet.http.server import bind
from freshet.http.service_client import why_unready
from freshet.process.ports import lease_ports, owner_of_port, release_ports
from freshet.rpc.channel import Transport
from freshet.rpc.server import FrameServer
from tests.fixtures.serving import answering


def listening(proc: Path, port: int) -> None:
    """Create a /proc with one listening socket."""
    (proc / "net").mkdir()
    (proc / "net" / "tcp").write_text(
        "sl local_address rem_address st tx rx tr tm retr uid timeout inode\n"
        f"0: 0100007F:{port:04X} 00000000:0000 0A 0 0 0 0 0 77 1\n"
    )


def process(proc: Path, pid: int, command: bytes) -> Path:
    """Add a process to it; return the folder of its file descriptors."""
    handles = proc / str(pid) / "fd"
    handles.mkdir(parents=True)
    (proc / str(pid) / "cmdline").write_bytes(command)
    return handles


def test_the_holder_of_a_port_is_named() -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()

        assert f"is held by process {os.getpid()} (" in str(owner_of_port(taken.getsockname()[1]))


def admin(host: str, port: int) -> None:
    Admin(host, port, registry=CollectorRegistry(), ready=lambda: None, status=dict).close()


@pytest.mark.parametrize("listen", [bind, admin])
@pytest.mark.parametrize(
    ("host", "why"), [("192.0.2.7", "assign"), ("no-such-host.invalid", ""), ("2001:db8::1", "assign")]
)
def test_foreign_address_is_named_instead_of_port(
    listen: Callable[[str, int], object], host: str, why: str
) -> None:
    with pytest.raises(ConfigError) as raised:
        listen(host, 0)

    message = str(raised.value)
    assert f"bind_address = {host!r}" in message
    assert "FRESHET_COMMON_BIND_ADDRESS" in message
    assert "_PORT" not in message
    assert why in message


@pytest.mark.parametrize(("listen", "setting"), [(bind, "_PORT"), (admin, "_ADMIN_PORT")])
def test_privileged_port_has_its_own_error(
    listen: Callable[[str, int], object], setting: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refused(*_: object) -> None:
        raise PermissionError(errno.EACCES, "Permission denied")

    monkeypatch.setattr(socket.socket, "bind", refused)
    with pytest.raises(ConfigError) as raised:
        listen("127.0.0.1", 80)

    assert "above 1023" in str(raised.value)
    assert f"FRESHET_<SERVICE>{setting}" in str(raised.value)


@pytest.mark.parametrize("host", ["::1", "127.0.0.2", "localhost"])
def test_every_listener_binds_every_local_address(host: str) -> None:
    server = Admin(host, 0, registry=CollectorRegistry(), ready=lambda: None, status=dict)
    grpc = FrameServer(str(Address(host, 0)), Transport())
    app = App(CollectorRegistry(), BodyLimits(1_000, 5))
    with answering(app, bind(host, 0)) as answers:
        try:
            grpc.start()
            for port in (answers.port, server.port, grpc.port):
                socket.create_connection((reachable_host(host), port), timeout=5).close()
            assert why_unready(server.port, host=reachable_host(host), timeout_s=60) == ""
        finally:
            grpc.stop(0.0)
            server.close()


def test_closed_file_does_not_hide_holder(tmp_path: Path) -> None:
    listening(tmp_path, 7000)
    handles = process(tmp_path, 5, b"python\0-m\0x\x1b[31m\0")
    for name in "0123456789":
        (handles / name).write_text("no link any more")
    (handles / "10").symlink_to("socket:[77]")

    assert owner_of_port(7000, tmp_path) == "port 7000 is held by process 5 (python -m x?[31m)"


def test_a_port_of_another_user_is_taken_too(tmp_path: Path) -> None:
    listening(tmp_path, 7000)

    assert owner_of_port(7000, tmp_path) == "port 7000 is held by a process of another user"
    assert owner_of_port(7001, tmp_path) is None


def test_leased_ports_are_different_ones_that_no_client_is_given() -> None:
    found = lease_ports(20)
    release_ports(found)

    assert len(set(found)) == 20
    assert max(found) < 32_768


def lease_first(ports: Sequence[int]) -> int:
    """Lease the first of these ports that is free."""
    drawn = iter(ports)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("freshet.process.ports.random.choice", lambda _: next(drawn))
        return lease_ports(1)[0]


def test_a_port_belongs_to_one_process_until_that_process_ends() -> None:
    ports = lease_ports(3)  # a process beside this test may take one of them
    release_ports(ports)
    with ProcessPoolExecutor(1, multiprocessing.get_context("spawn")) as other:
        first = other.submit(lease_first, ports).result()
        second = lease_first(ports)
        assert second != first
    assert lease_first(ports) == first
    release_ports([first, second])
    assert lease_first(ports) == first
    release_ports([first])


def test_without_a_loopback_interface_no_port_is_leased(monkeypatch: pytest.MonkeyPatch) -> None:
    def bind_fails(*_: object) -> None:
        raise OSError(errno.EADDRNOTAVAIL, "Cannot assign requested address")

    monkeypatch.setattr(socket.socket, "bind", bind_fails)
    with pytest.raises(OSError, match="Cannot assign"):
        lease_ports(1)
