"""Who holds a port, and which are free."""

from __future__ import annotations

import os
import socket
from pathlib import Path

from freshet.runtime.ports import free_ports, owner_of_port


def listening(proc: Path, port: int) -> None:
    """A /proc in which a socket listens on a port."""
    (proc / "net").mkdir()
    (proc / "net" / "tcp").write_text(
        "sl local_address rem_address st tx rx tr tm retr uid timeout inode\n"
        f"0: 0100007F:{port:04X} 00000000:0000 0A 0 0 0 0 0 77 1\n"
    )


def process(proc: Path, pid: int, command: bytes) -> Path:
    """One process of it; returns where its files stand."""
    handles = proc / str(pid) / "fd"
    handles.mkdir(parents=True)
    (proc / str(pid) / "cmdline").write_bytes(command)
    return handles


def test_the_holder_of_a_port_is_named() -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()

        assert f"is held by process {os.getpid()} (" in str(owner_of_port(taken.getsockname()[1]))


def test_a_file_that_is_closed_meanwhile_hides_no_holder(tmp_path: Path) -> None:
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


def test_free_ports_are_different_ones() -> None:
    assert len(set(free_ports(20))) == 20
