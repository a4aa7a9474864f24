"""Whom a gRPC listener and its clients believe, by certificate and name; certificates that are renewed."""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import UTC, datetime
from pathlib import Path

import numpy as np
import pytest
import trustme

from freshet.errors import Unavailable
from freshet.rpc.channel import Transport, transport_of
from freshet.rpc.frames import Frame, Kind, Part, encode_frame
from freshet.rpc.link import Link
from freshet.rpc.server import FrameServer

LIMIT = 1 << 20
DEADLINE_S = 60.0


def certified(
    authority: trustme.CA,
    folder: Path,
    *hosts: str,
    believed: trustme.CA | None = None,
    not_after: datetime | None = None,
) -> Transport:
    """Return the transport of a service with a certificate of `authority`, which trusts `believed`."""
    leaf = authority.issue_cert(*(hosts or ("127.0.0.1",)), not_after=not_after)
    folder.mkdir(parents=True, exist_ok=True)
    for name, text in (
        ("ca", (believed or authority).cert_pem.bytes()),
        ("key", leaf.private_key_pem.bytes()),
        ("cert", b"".join(pem.bytes() for pem in leaf.cert_chain_pems)),
    ):
        (folder / f".{name}").write_bytes(text)
        os.replace(folder / f".{name}", folder / name)
    ca, cert, key = (str(folder / name) for name in ("ca", "cert", "key"))
    return transport_of(ca_file=ca, cert_file=cert, key_file=key, max_message_bytes=LIMIT)


def echo(frame: Frame) -> bytes:
    return encode_frame(frame)


@contextmanager
def listening(transport: Transport, port: int = 0) -> Iterator[FrameServer]:
    server = FrameServer(f"127.0.0.1:{port}", transport)
    server.add_stream("Test", "Echo", echo)
    server.start()
    try:
        yield server
    finally:
        server.stop(0.0)


@contextmanager
def linked(server: FrameServer, transport: Transport) -> Iterator[Link]:
    link = Link(f"127.0.0.1:{server.port}", transport, "Test", (), in_flight_bytes=LIMIT)
    try:
        yield link
    finally:
        link.close()


def asked(link: Link) -> int:
    """The number of keys that come back. Raises what the call ends with."""
    keys = {(Part.KEYS, 0): np.arange(3, dtype=np.uint64)}
    make = lambda frame_id: encode_frame(Frame(Kind.LOOKUP, frame_id, sections=keys))  # noqa: E731
    return len(link.ask("Echo", make).result(DEADLINE_S).sections[Part.KEYS, 0])


@pytest.fixture(scope="module")
def authority() -> trustme.CA:
    return trustme.CA()


PAST = datetime(2020, 1, 1, tzinfo=UTC)


@pytest.mark.parametrize("wrong", ["of another authority", "expired", "none", "no TLS"])
def test_an_untrusted_client_does_not_stop_the_listener(
    authority: trustme.CA, tmp_path: Path, wrong: str
) -> None:
    good = certified(authority, tmp_path / "server")
    client = {
        "of another authority": lambda: certified(trustme.CA(), tmp_path / "c", believed=authority),
        "expired": lambda: certified(authority, tmp_path / "c", not_after=PAST),
        "none": lambda: Transport(ca=authority.cert_pem.bytes(), max_message_bytes=LIMIT),
        "no TLS": lambda: Transport(max_message_bytes=LIMIT),
    }[wrong]()
    with listening(good) as server, linked(server, client) as link:
        with pytest.raises(Unavailable, match=rf"127\.0\.0\.1:{server.port}: ."):
            asked(link)
        assert server.counts.frames == {}
        assert server.counts.handshakes > 0
        with linked(server, certified(authority, tmp_path / "other")) as believed:
            assert asked(believed) == 3


@pytest.mark.parametrize(
    ("wrong", "told"),
    [
        ("of another authority", "unable to get local issuer.*\\n.*FRESHET_GRPC_CA_FILE"),
        ("expired", "has expired.*\\n.*renew"),
        ("of another name", "Hostname Verification.*\\n.*is not for 127.0.0.1"),
        ("no TLS", "WRONG_VERSION_NUMBER.*\\n.*speaks no TLS"),
    ],
)
def test_an_untrusted_listener_is_an_error(
    authority: trustme.CA, tmp_path: Path, wrong: str, told: str
) -> None:
    client = certified(authority, tmp_path / "client")
    server = {
        "of another authority": lambda: certified(trustme.CA(), tmp_path / "s", believed=authority),
        "expired": lambda: certified(authority, tmp_path / "s", not_after=PAST),
        "of another name": lambda: certified(authority, tmp_path / "s", "shard-1.example"),
        "no TLS": lambda: Transport(max_message_bytes=LIMIT),
    }[wrong]()
    with listening(server) as listener, linked(listener, client) as link:
        with pytest.raises(Unavailable, match=told):
            asked(link)
        assert listener.counts.frames == {}


def test_certificates_are_renewed_while_requests_go_on(authority: trustme.CA, tmp_path: Path) -> None:
    """The authority is another one afterwards, so who has not renewed would be refused."""
    server_files, client_files = tmp_path / "server", tmp_path / "client"
    client = certified(authority, client_files)
    failed: list[BaseException] = []
    stop, asked_once = threading.Event(), threading.Event()

    with listening(certified(authority, server_files)) as server, linked(server, client) as link:

        def ask_on() -> None:
            while not stop.is_set():
                try:
                    asked(link)
                except Exception as error:
                    failed.append(error)
                asked_once.set()

        asking = threading.Thread(target=ask_on)
        asking.start()
        assert asked_once.wait(DEADLINE_S)
        new = trustme.CA()
        certified(new, server_files)
        renewed = certified(new, client_files)
        with linked(server, renewed) as another:
            assert asked(another) == 3
        stop.set()
        asking.join(DEADLINE_S)
        assert failed == []  # a stream that stands goes on

        link.give_up("Echo", "the test says so")
        assert asked(link) == 3  # on a new connection, with the new files
        former = certified(authority, tmp_path / "former", believed=new)
        with linked(server, former) as late, pytest.raises(Unavailable):
            asked(late)
