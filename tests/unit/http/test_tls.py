"""HTTPS of every listener: client certificates, renewed certificates, slow clients."""

from __future__ import annotations

import socket
import ssl
import threading
import time
from collections.abc import Iterator
from contextlib import closing, contextmanager
from datetime import UTC, datetime
from pathlib import Path

import httpx
import pytest
import trustme
from prometheus_client import CollectorRegistry, generate_latest

from freshet.client import Client, RetryPolicy
from freshet.config.settings import load_settings
from freshet.errors import BadInput, ConfigError, Unavailable
from freshet.http import admin as admin_module
from freshet.http import tls
from freshet.http.admin import Admin
from freshet.http.app import App
from freshet.http.endpoint import LIVE
from freshet.http.messages import BodyLimits, Request, Response
from freshet.http.service_client import ask
from freshet.http.tls import seconds_left
from freshet.process.telemetry import service_registry
from freshet.testing.conditions import wait_for
from tests.fixtures.serving import answering

DEADLINE_S = 60.0
DRAIN_S = 120.0
pytestmark = pytest.mark.usefixtures("patient")

PAST = datetime(2020, 1, 1, tzinfo=UTC)


def write(folder: Path, authority: trustme.CA, *hosts: str, not_after: datetime | None = None) -> None:
    """ca, key and cert of a service, in place of what was there."""
    leaf = authority.issue_cert(*(hosts or ("127.0.0.1",)), not_after=not_after)
    folder.mkdir(exist_ok=True)
    for name, text in (
        ("ca", authority.cert_pem.bytes()),
        ("key", leaf.private_key_pem.bytes()),
        ("cert", b"".join(pem.bytes() for pem in leaf.cert_chain_pems)),
    ):
        (folder / f".{name}").write_bytes(text)
        (folder / f".{name}").rename(folder / name)


def use(folder: Path | None, **more: str) -> None:
    """This process has these files from now on: its listeners, and what it asks."""
    files = (
        {f"FRESHET_HTTP_{n.upper()}_FILE": str(folder / n) for n in ("ca", "cert", "key")} if folder else {}
    )
    tls.use(load_settings({**files, **{f"FRESHET_HTTP_{name.upper()}": text for name, text in more.items()}}))


@pytest.fixture
def authority() -> trustme.CA:
    return trustme.CA()


@pytest.fixture
def files(authority: trustme.CA, tmp_path: Path) -> Iterator[Path]:
    write(tmp_path / "service", authority)
    yield tmp_path / "service"
    use(None)


async def live(_: Request) -> Response:
    return Response(200, b'{"status":"live"}')


@contextmanager
def listening(kind: str) -> Iterator[int]:
    """The port of a listener of this kind, which answers /health/live."""
    if kind == "admin":
        with closing(
            Admin("127.0.0.1", 0, registry=CollectorRegistry(), ready=lambda: None, status=dict)
        ) as admin:
            yield admin.port
        return
    app = App(CollectorRegistry(), BodyLimits(1 << 20, 5))
    app.route(LIVE, live)
    with answering(app, drain_s=DRAIN_S) as at:
        yield at.port


@pytest.fixture(params=["app", "admin"])
def listener(request: pytest.FixtureRequest, files: Path) -> Iterator[int]:
    """Its clients need a certificate."""
    use(files, client_certs="required")
    with listening(request.param) as port:
        yield port


def ended(outcome: str) -> float:
    return tls.handshakes().get((outcome,), 0)


def test_a_service_with_a_certificate_connects(listener: int) -> None:
    done = ended("done")

    assert ask(listener, "/health/live") == (200, {"status": "live"})

    assert ended("done") == done + 1


@pytest.mark.parametrize(
    ("wrong", "outcome"),
    [
        ("no certificate", "no_certificate"),
        ("of another authority", "certificate"),
        ("expired", "certificate"),
        ("no TLS", "no_tls"),
        ("does not believe us", "not_believed"),
    ],
)
def test_refused_handshakes_are_counted_and_others_succeed(
    listener: int, authority: trustme.CA, files: Path, tmp_path: Path, wrong: str, outcome: str
) -> None:
    before = ended(outcome)
    context = ssl.create_default_context(cafile=str(files / "ca"))
    if wrong == "of another authority":
        write(tmp_path / "client", trustme.CA())
        context.load_cert_chain(tmp_path / "client" / "cert", tmp_path / "client" / "key")
    elif wrong == "expired":
        write(tmp_path / "client", authority, not_after=PAST)
        context.load_cert_chain(tmp_path / "client" / "cert", tmp_path / "client" / "key")
    elif wrong == "does not believe us":
        context = ssl.create_default_context()
    scheme = "http" if wrong == "no TLS" else "https"

    with pytest.raises(httpx.TransportError):
        httpx.get(f"{scheme}://127.0.0.1:{listener}/health/live", verify=context, trust_env=False)

    wait_for(lambda: ended(outcome) == before + 1)
    assert ask(listener, "/health/live")[0] == 200


def test_a_listener_of_another_name_is_not_trusted(
    authority: trustme.CA, files: Path, tmp_path: Path
) -> None:
    write(files, authority, "elsewhere.example")
    use(files)
    with listening("app") as port, pytest.raises(OSError, match=r"not valid for '127\.0\.0\.1'"):
        ask(port, "/health/live")


def test_a_listener_without_tls_is_not_trusted(files: Path) -> None:
    with listening("app") as port:
        use(files)
        with pytest.raises(OSError, match=r"(?i)wrong.version.number|record layer"):
            ask(port, "/health/live")


def test_an_optional_certificate_may_be_missing_but_not_wrong(files: Path, tmp_path: Path) -> None:
    use(files, client_certs="optional")
    with listening("app") as port:
        url = f"https://127.0.0.1:{port}/health/live"
        context = ssl.create_default_context(cafile=str(files / "ca"))
        assert httpx.get(url, verify=context, trust_env=False).status_code == 200
        write(tmp_path / "client", trustme.CA())
        context.load_cert_chain(tmp_path / "client" / "cert", tmp_path / "client" / "key")
        with pytest.raises(httpx.TransportError):
            httpx.get(url, verify=context, trust_env=False)


def test_renewed_certificates_are_taken_while_requests_go_on(listener: int, files: Path) -> None:
    """New certificates have another authority, so that a former one would be refused; no request fails."""
    failed: list[Exception] = []
    stop, asked = threading.Event(), threading.Semaphore(0)

    def ask_on() -> None:
        context = ssl.create_default_context(cafile=str(files / "ca"))
        context.load_cert_chain(files / "cert", files / "key")
        with httpx.Client(verify=context, trust_env=False, timeout=60) as kept:  # one connection, from before
            while not stop.is_set():
                try:
                    kept.get(f"https://127.0.0.1:{listener}/health/live").raise_for_status()
                except Exception as error:
                    failed.append(error)
                asked.release()

    asking = threading.Thread(target=ask_on)
    if listener_keeps_connections(listener):
        asking.start()
        assert asked.acquire(timeout=DEADLINE_S)
    new = trustme.CA()
    write(files, new)

    assert ask(listener, "/health/live")[0] == 200
    stop.set()
    if asking.ident is not None:
        asking.join(DEADLINE_S)
    assert failed == []
    with socket.create_connection(("127.0.0.1", listener)) as plain:
        context = ssl.create_default_context(cadata=new.cert_pem.bytes().decode())
        context.load_cert_chain(files / "cert", files / "key")
        with context.wrap_socket(plain, server_hostname="127.0.0.1") as client:
            shown = client.getpeercert(binary_form=True)
    assert shown == ssl.PEM_cert_to_DER_cert((files / "cert").read_text())


@pytest.mark.parametrize("half_written", ["cert", "key", "ca"])
def test_certificates_stay_while_new_ones_are_half_written(
    listener: int, files: Path, half_written: str
) -> None:
    """Two renewals without a handshake in between; the metric has read the first."""
    write(files, trustme.CA())
    first = {name: (files / name).read_bytes() for name in ("ca", "cert", "key")}
    assert seconds_left()
    (files / half_written).write_bytes(first[half_written][:200])

    assert ask(listener, "/health/live")[0] == 200
    context = ssl.create_default_context(cadata=first["ca"].decode())
    for name in ("cert", "key"):
        (files.parent / name).write_bytes(first[name])
    context.load_cert_chain(files.parent / "cert", files.parent / "key")
    assert told_live(listener, context)[0] == b"200"


def test_a_stop_does_not_wait_for_idle_clients_to_end_tls(files: Path) -> None:
    use(files)
    with listening("app") as port:
        context = ssl.create_default_context(cafile=str(files / "ca"))
        idle = context.wrap_socket(
            socket.create_connection(("127.0.0.1", port), timeout=DEADLINE_S), server_hostname="127.0.0.1"
        )
        idle.sendall(b"GET /health/live HTTP/1.1\r\nhost: 127.0.0.1\r\n\r\n")
        assert idle.recv(1_000)
        began = time.monotonic()
    with idle:
        assert time.monotonic() - began < DRAIN_S / 2


@pytest.mark.parametrize("asked", ["optional", "required"])
@pytest.mark.parametrize("kind", ["app", "admin"])
def test_a_session_of_a_former_authority_is_refused(
    files: Path, tmp_path: Path, kind: str, asked: str
) -> None:
    use(files, client_certs=asked)
    context = ssl.create_default_context(cafile=str(files / "ca"))
    context.load_cert_chain(files / "cert", files / "key")
    context.check_hostname, context.verify_mode = (
        False,
        ssl.CERT_NONE,
    )  # it is to fail for the listener's sake
    with listening(kind) as port:
        status, session = told_live(port, context)
        assert status == b"200"
        write(files, trustme.CA())

        assert refused(port, context, session)
        assert ask(port, "/health/live")[0] == 200


@pytest.mark.parametrize("asked", ["optional", "required"])
def test_required_certificates_exclude_resumable_tls(files: Path, asked: str) -> None:
    """TLS 1.2 resumes by numbers of sessions, too."""
    context = ssl.create_default_context(cafile=str(files / "ca"))
    context.load_cert_chain(files / "cert", files / "key")
    context.maximum_version = ssl.TLSVersion.TLSv1_2
    use(files)
    with listening("app") as port:
        assert told_live(port, context)[0] == b"200"
    use(files, client_certs=asked)
    before = ended("no_tls")
    with listening("app") as port:
        assert refused(port, context, None)
    assert ended("no_tls") == before + 1


def told_live(
    port: int, context: ssl.SSLContext, session: ssl.SSLSession | None = None
) -> tuple[bytes, ssl.SSLSession | None]:
    """The status of /health/live, and the session that the listener gave to take up again."""
    with (
        socket.create_connection(("127.0.0.1", port), timeout=DEADLINE_S) as plain,
        context.wrap_socket(plain, server_hostname="127.0.0.1", session=session) as client,
    ):
        client.sendall(b"GET /health/live HTTP/1.1\r\nhost: 127.0.0.1\r\nconnection: close\r\n\r\n")
        with client.makefile("rb") as answer:
            told = answer.read()
        return told[9:12], client.session


def refused(port: int, context: ssl.SSLContext, session: ssl.SSLSession | None) -> bool:
    """Whether the handshake ends without an answer; of TLS 1.3, a client hears of it as it reads."""
    try:
        return told_live(port, context, session)[0] == b""
    except OSError:
        return True


def listener_keeps_connections(port: int) -> bool:
    """HTTP/1.1, as gateway, inference and console speak it; admin ports answer once a connection."""
    connection = tls.connection("127.0.0.1", port, DEADLINE_S)
    with closing(connection):
        connection.request("GET", "/health/live")
        return connection.getresponse().version == 11


def test_silent_clients_delay_no_others_and_are_closed(
    listener: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    silent = [socket.create_connection(("127.0.0.1", listener)) for _ in range(20)]
    try:
        assert ask(listener, "/health/live", timeout_s=60)[0] == 200
    finally:
        for one in silent:
            one.close()


def test_a_slow_handshake_at_an_admin_port_is_closed(files: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(admin_module, "HANDSHAKE_S", 0.2)
    use(files)
    with listening("admin") as port, socket.create_connection(("127.0.0.1", port)) as silent:
        silent.settimeout(DEADLINE_S)
        assert silent.recv(1) == b""


@pytest.mark.parametrize("given", [("cert",), ("cert", "key"), ("ca", "key"), ("ca", "cert")])
def test_files_are_given_whole(files: Path, given: tuple[str, ...]) -> None:
    variables = {f"FRESHET_HTTP_{name.upper()}_FILE": str(files / name) for name in given}
    with pytest.raises(ConfigError, match="ca_file, cert_file and key_file"):
        tls.use(load_settings(variables))


@pytest.mark.parametrize("asked", ["optional", "required"])
@pytest.mark.parametrize("given", [(), ("ca",), ("ca", "key")])
def test_client_certificates_need_a_certificate_of_ours(
    files: Path, asked: str, given: tuple[str, ...]
) -> None:
    """Else all would be answered over plain HTTP."""
    with pytest.raises(ConfigError, match=f"client_certs = '{asked}'"):
        use(None, client_certs=asked, **{f"{name}_file": str(files / name) for name in given})


@pytest.mark.parametrize("asked", ["none", "optional", "required"])
def test_required_client_certificates_are_reported(files: Path, asked: str) -> None:
    use(files, client_certs=asked)

    assert tls.certificate_required() == (asked == "required")


def test_handshakes_are_a_metric(listener: int) -> None:
    ask(listener, "/health/live")

    told = generate_latest(service_registry()).decode()

    assert 'freshet_tls_handshakes_total{outcome="done"}' in told
    assert 'freshet_certificate_seconds_left{of="http"}' in told


def test_the_python_client_uses_authority_and_certificate(files: Path) -> None:
    use(files, client_certs="required")
    once = RetryPolicy(attempts=1)
    with listening("app") as port:
        url, ca, pair = (
            f"https://127.0.0.1:{port}",
            str(files / "ca"),
            (str(files / "cert"), str(files / "key")),
        )
        with (
            Client(url, url, ca_file=ca, cert_file=pair[0], key_file=pair[1], retries=once) as good,
            pytest.raises(BadInput, match="404"),  # connected, but there is no such path
        ):
            good.rank({}, [])
        for believed in (ca, ""):
            with Client(url, url, ca_file=believed, retries=once) as refused, pytest.raises(Unavailable):
                refused.rank({}, [])
    with pytest.raises(ConfigError, match=r"(?s)nothing\.pem.*expected PEM files"):
        Client(url, url, ca_file="nothing.pem")
