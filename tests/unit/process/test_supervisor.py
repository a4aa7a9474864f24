import contextlib
import os
import signal
import socket
import ssl
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from datetime import UTC, datetime
from pathlib import Path
from typing import TypeVar

import pytest
import trustme

from freshet.clock import SYSTEM_CLOCK, Clock, SystemClock
from freshet.config.settings import RunFolder, load_settings
from freshet.errors import ConfigError, Corrupt, Unavailable
from freshet.http import tls
from freshet.process import supervisor as supervisor_module
from freshet.process.ports import lease_ports
from freshet.process.restart_policy import HangPolicy
from freshet.process.run_state import RunState, read_run, read_state, write_run
from freshet.process.supervisor import DEFAULT_HANG, Process, Supervisor

T = TypeVar("T")

START = "import signal, time; print('up', flush=True); "
OBEDIENT = "import signal; signal.signal(signal.SIGTERM, lambda *_: exit(0)); " + START + "time.sleep(60)"
WAIT_AND_FAIL = "while not os.path.exists(p): time.sleep(0.01)\nexit('Corrupt: the log')"
STUBBORN = "import signal; signal.signal(signal.SIGTERM, signal.SIG_IGN); " + START + "time.sleep(60)"


def until(condition: Callable[[], T], timeout_s: float = 60.0) -> T:
    deadline = time.monotonic() + timeout_s
    pause = threading.Event()
    while not (value := condition()):
        assert time.monotonic() < deadline, "the condition did not come true in time"
        pause.wait(0.01)
    return value


@pytest.fixture
def folder(tmp_path: Path) -> RunFolder:
    return RunFolder(tmp_path / "run").create()


class WallSetBack(SystemClock):
    behind_ms = 0

    def now_ms(self) -> int:
        return super().now_ms() - self.behind_ms


class Running:
    def __init__(
        self,
        folder: RunFolder,
        code: str,
        drain_s: float = 10.0,
        clock: Clock = SYSTEM_CLOCK,
        port: int = 7000,
        hang: HangPolicy = DEFAULT_HANG,
    ) -> None:
        self.folder, self.stop = folder, threading.Event()
        self.ended: dict[str, str] = {}
        process = Process("one", [sys.executable, "-c", code], port)
        supervisor = Supervisor(folder, [process], clock, hang=hang, check_every_s=0.02)
        self.thread = threading.Thread(
            target=lambda: self.ended.update(supervisor.run(self.stop, drain_s=drain_s))
        )
        self.thread.start()

    def lines(self) -> int:
        path = self.folder.process_log("one")
        return path.read_text().count("up") if path.exists() else 0

    def pid(self) -> int:
        pid = until(lambda: read_state(self.folder).get("one", {}).get("pid"))
        assert isinstance(pid, int)
        return pid

    def run(self) -> RunState:
        run = read_run(self.folder)
        assert run is not None
        return run

    def end(self) -> dict[str, str]:
        self.stop.set()
        self.thread.join()
        return self.ended


@pytest.mark.parametrize("replaced", [False, True])
def test_moved_run_folder_ends_the_run(folder: RunFolder, replaced: bool) -> None:
    supervisor = Supervisor(folder, [Process("one", [sys.executable, "-c", STUBBORN], 7000)])
    messages: list[str] = []

    def run() -> None:
        with pytest.raises(Unavailable) as raised:
            supervisor.run(threading.Event(), drain_s=10.0)
        messages.append(str(raised.value))

    thread = threading.Thread(target=run)
    thread.start()
    pid = until(lambda: read_state(folder).get("one", {}).get("pid"))

    folder.path.rename(folder.path.with_name("moved"))
    if replaced:
        (folder.create().state / "supervisor.lock").touch()
    thread.join(60)

    assert "was moved or deleted while it ran" in messages[0]
    with pytest.raises(ProcessLookupError):
        os.kill(int(str(pid)), 0)
    assert not list(folder.state.glob("services*"))


def test_killed_service_is_restarted_and_recorded(folder: RunFolder) -> None:
    running = Running(folder, OBEDIENT)
    until(lambda: running.lines() == 1)
    first = running.pid()

    os.kill(first, signal.SIGKILL)
    until(lambda: running.lines() == 2)

    until(lambda: read_state(folder)["one"]["pid"] not in (None, first))

    state = read_state(folder)["one"]
    assert state["restarts"] == 1
    assert state["last_exit"] == "signal 9 (SIGKILL)"
    assert running.end() == {"one": "stopped"}


def test_history_has_exit_reason_and_restart(folder: RunFolder) -> None:
    failing = Running(folder, "import sys; sys.exit('Corrupt: the log\\n  restore it')")
    until(lambda: read_state(folder).get("one", {}).get("restarts", 0) >= 2)

    first = failing.run().history[0]
    failing.end()

    assert (first.name, first.how, first.why) == ("one", "exit code 1", "Corrupt: the log\n  restore it")
    assert first.again_ms is not None
    assert first.again_ms >= first.time_ms


@pytest.mark.parametrize("whole", [False, True], ids=["file", "folder"])
def test_a_restart_has_a_log_after_its_deletion(folder: RunFolder, whole: bool) -> None:
    go = folder.path / "go"
    failing = Running(folder, f"import os, time; print('up', flush=True); p = {str(go)!r}\n{WAIT_AND_FAIL}")
    try:
        until(lambda: failing.lines() == 1)
        folder.process_log("one").unlink()
        if whole:
            folder.logs.rmdir()
        go.touch()
        reasons = until(lambda: [one.why for one in failing.run().history if one.why])
    finally:
        failing.end()

    assert reasons[0] == "Corrupt: the log"
    assert failing.lines() >= 1


def test_a_wall_clock_that_is_set_back_leaves_the_state_readable(folder: RunFolder) -> None:
    clock = WallSetBack()
    failing = Running(folder, "import sys; sys.exit(1)", clock=clock)
    try:
        before = int(until(lambda: read_state(folder).get("one", {}).get("restarts", 0)))
        clock.behind_ms = 3_600_000
        until(lambda: read_state(folder)["one"]["restarts"] >= before + 2)
        run = failing.run()
    finally:
        failing.end()

    assert all(one.up_s is not None and 0 <= one.up_s < 1800 for one in run.history)
    assert run.services["one"]["since_s"] <= clock.now_ms() / 1000  # follows the new clock


def test_state_has_stop_and_command_to_continue(folder: RunFolder) -> None:
    supervisor = Supervisor(folder, [], again="freshet up spec.toml")
    stop = threading.Event()
    stop.set()
    supervisor.run(stop, drain_s=1.0)

    run = read_run(folder)
    assert run is not None
    assert run.stopped_ms is not None
    assert run.again == "freshet up spec.toml"


def test_history_has_killed_supervisor(folder: RunFolder) -> None:
    write_run(folder, RunState(supervisor=1, services={}))
    folder.process_log("gateway").write_text("its last line")
    os.utime(folder.process_log("gateway"), (1.0, 1.0))
    running = Running(folder, OBEDIENT)
    until(lambda: running.lines() == 1)
    until(lambda: running.run().supervisor == os.getpid())  # it has written its state

    history = running.run().history
    running.end()

    assert [one.name for one in history] == ["supervisor"]
    assert history[0].time_ms == 1_000  # time of the last write, not of detection
    assert "killed" in history[0].how


def test_service_stopped_during_start_counts_as_stopped(folder: RunFolder) -> None:
    running = Running(folder, "print('up', flush=True); import time; time.sleep(60)")
    until(lambda: running.lines() == 1)

    assert running.end() == {"one": "stopped"}


def test_service_is_killed_after_drain(folder: RunFolder) -> None:
    running = Running(folder, STUBBORN, drain_s=0.3)
    until(lambda: running.lines() == 1)

    assert running.end() == {"one": "killed: it had not stopped after 0.3 s"}


def test_second_supervisor_is_refused_with_id_of_first(folder: RunFolder) -> None:
    running = Running(folder, OBEDIENT)
    until(lambda: running.lines() == 1)

    with pytest.raises(ConfigError, match=f"in use by process {os.getpid()}"):
        Supervisor(folder, [])
    running.end()


def test_a_folder_where_nothing_ran_has_no_state(folder: RunFolder) -> None:
    assert read_state(folder) == {}


def test_failed_start_does_not_affect_other_services(folder: RunFolder) -> None:
    stop = threading.Event()
    processes = [
        Process("missing", ["/no/such/program"], 7001),
        Process("one", [sys.executable, "-c", OBEDIENT], 7000),
    ]
    supervisor = Supervisor(folder, processes)
    ended: dict[str, str] = {}
    thread = threading.Thread(target=lambda: ended.update(supervisor.run(stop, drain_s=10.0)))
    thread.start()
    log = folder.process_log("one")
    until(lambda: log.exists() and "up" in log.read_text())

    until(lambda: "missing" in read_state(folder))
    assert "No such file" in str(read_state(folder)["missing"]["last_exit"])
    stop.set()
    thread.join()
    assert ended["one"] == "stopped"


@pytest.mark.parametrize("text", ["", "[]", '{"services": 3}', '{"services": {"a": 1}}'])
def test_a_state_file_that_does_not_parse_is_corrupt_and_named(folder: RunFolder, text: str) -> None:
    path = folder.state / "services.json"
    path.write_text(text)
    with pytest.raises(Corrupt, match=r"services\.json"):
        read_state(folder)


ORPHAN = """
import os, subprocess, sys
child = "import os, time; from freshet.process.lifecycle import die_with_parent; "
child += "die_with_parent(int(os.environ['PARENT'])); print(os.getpid(), flush=True); time.sleep(60)"
subprocess.Popen([sys.executable, "-c", child], env={**os.environ, "PARENT": str(os.getpid())}).wait()
"""


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="only Linux signals the death of a parent")
def test_a_service_does_not_outlive_a_killed_supervisor() -> None:
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    with subprocess.Popen([sys.executable, "-c", ORPHAN], stdout=subprocess.PIPE, env=environment) as parent:
        assert parent.stdout is not None
        child = int(parent.stdout.readline())
        parent.kill()

    def gone() -> bool:
        try:
            state = Path(f"/proc/{child}/stat").read_text().rpartition(")")[2].split()[0]
        except (FileNotFoundError, ProcessLookupError):
            return True
        return state == "Z"

    assert until(gone)


ANSWERING = (
    "import http.server, sys\n"
    "class Handler(http.server.BaseHTTPRequestHandler):\n"
    "    def do_GET(self):\n"
    "        body = b'{body}'\n"
    "        self.send_response({code}); self.send_header('Content-Length', str(len(body))); "
    "self.end_headers()\n"
    "        self.wfile.write(body); print('asked', flush=True)\n"
    "    log_message = lambda *_: None\n"
    "print('up', flush=True)\n"
    "http.server.HTTPServer(('127.0.0.1', {port}), Handler).serve_forever()\n"
)


def has_request(folder: RunFolder) -> bool:
    path = folder.process_log("one")
    return path.exists() and "asked" in path.read_text()


def answering(port: int, code: int, body: str) -> str:
    return ANSWERING.replace("{port}", str(port)).replace("{code}", str(code)).replace("{body}", body)


def test_hung_service_is_killed_and_restarted(folder: RunFolder, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(supervisor_module, "CHECK_WITHIN_S", 1.0)
    [port] = lease_ports(1)
    running = Running(folder, answering(port, 200, "{}"), port=port, hang=HangPolicy(idle_s=2.0))
    until(lambda: has_request(folder))
    first = running.pid()
    os.kill(first, signal.SIGSTOP)
    until(lambda: running.lines() == 2)

    until(lambda: read_state(folder)["one"]["pid"] not in (None, first))
    (ended,) = running.run().history
    assert "hung: it has not answered for" in ended.how
    assert read_state(folder)["one"]["last_exit"] == ended.how
    running.end()


def test_service_with_stalled_main_loop_is_restarted(folder: RunFolder) -> None:
    [port] = lease_ports(1)
    alive, stuck = '{"status":"live"}', '{"status":"stuck","reason":"still for 125 s"}'
    code = answering(port, 503, stuck).replace(
        "        body =", "        Handler.n = getattr(Handler, 'n', 0) + 1\n        body ="
    )
    code = code.replace(f"b'{stuck}'", f"b'{stuck}' if Handler.n > 2 else b'{alive}'")
    code = code.replace("send_response(503)", "send_response(503 if Handler.n > 2 else 200)")
    running = Running(folder, code, port=port, hang=HangPolicy(stuck_s=0.05))
    until(lambda: running.lines() >= 2)

    assert running.run().history[0].how == "hung: still for 125 s, killed"
    running.end()


@pytest.mark.parametrize("damage", [None, b"", b"garbage", b"{}"])
def test_lost_state_is_rewritten(
    folder: RunFolder, monkeypatch: pytest.MonkeyPatch, damage: bytes | None
) -> None:
    monkeypatch.setattr(supervisor_module, "CHECK_EVERY_S", 0.0)
    running = Running(folder, OBEDIENT)
    pid = running.pid()
    path = folder.state / "services.json"
    if damage is None:
        path.unlink()
    else:
        path.write_bytes(damage)

    def is_whole() -> bool:
        try:
            return read_state(folder).get("one", {}).get("pid") == pid
        except Corrupt:
            return False

    until(is_whole)
    running.end()


@pytest.mark.parametrize(("listener", "answer"), [("expired", ""), ("foreign", ""), ("cut", None)])
def test_a_refused_certificate_shows_that_a_service_lives(
    tmp_path: Path, listener: str, answer: str | None
) -> None:
    authority, other = trustme.CA(), trustme.CA()
    authority.cert_pem.write_to_path(str(tmp_path / "ca"))
    signs, until = (other, None) if listener == "foreign" else (authority, datetime(2020, 1, 1, tzinfo=UTC))
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    signs.issue_cert("127.0.0.1", not_after=until).configure_cert(context)

    def serve() -> None:
        connection, _ = server.accept()
        connection.settimeout(60.0)
        with connection, contextlib.suppress(OSError):
            if listener == "cut":
                connection.recv(1 << 16)
            else:
                context.wrap_socket(connection, server_side=True).close()

    with socket.create_server(("127.0.0.1", 0)) as server:
        thread = threading.Thread(target=serve)
        thread.start()
        try:
            tls.use(load_settings({"FRESHET_HTTP_CA_FILE": str(tmp_path / "ca")}))
            process = Process("one", [], server.getsockname()[1])
            assert supervisor_module._request_liveness(process) == answer
        finally:
            tls.use(load_settings({}))
            thread.join()
