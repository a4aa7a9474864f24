"""The server for frames: clients, refused messages, limits, and its end."""

import socket
import threading
from collections import Counter
from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import replace
from functools import partial

import grpc
import numpy as np
import pytest
import trustme
from prometheus_client import CollectorRegistry, generate_latest

from freshet.config.spec.identity import SpecHash
from freshet.errors import BadInput, ConfigError, Corrupt, Fenced, Mismatch, Overloaded, TooLarge, Unavailable
from freshet.http.token_files import CHECK_S
from freshet.observability.grpc_metrics import GRPC_METRICS
from freshet.observability.metrics import register
from freshet.rpc.channel import PeerTokens, Transport, method_name, open_channel, transport_of
from freshet.rpc.errors import error_of, failure_of
from freshet.rpc.frames import BadFrame, Frame, Kind, Part, decode_frame, encode_frame, encoded_bytes
from freshet.rpc.link import Link
from freshet.rpc.pieces import MAX_PIECES, MessageAssembler, split_message
from freshet.rpc.server import Answer, FrameServer
from freshet.testing.clock import SettableClock
from freshet.testing.conditions import wait_for

PLAIN = Transport(max_message_bytes=1 << 16)
ECHO = method_name("Test", "Echo")
DEADLINE_S = 60.0


def echo(frame: Frame) -> bytes:
    """Answers with the same arrays, or fails as its flags say."""
    errors = {1: Fenced("lost"), 2: ValueError("keys must rise"), 3: KeyError("a defect")}
    if frame.flags in errors:
        raise errors[frame.flags]
    return encode_frame(replace(frame, kind=Kind.ROWS))


@contextmanager
def listening(transport: Transport = PLAIN, answer: Answer = echo, **limits) -> Iterator[FrameServer]:
    server = FrameServer("127.0.0.1:0", transport, **limits)
    server.add_stream("Test", "Echo", answer)
    server.add_call("Test", "Once", answer)
    server.start()
    try:
        yield server
    finally:
        server.stop(0.0)


def calling(server: FrameServer, transport: Transport, frames: Iterable[bytes], **call) -> list[Frame]:
    """Answers to these messages on one stream. Raises what the client would."""
    with open_channel(f"127.0.0.1:{server.port}", transport) as channel:
        stream = channel.stream_stream(ECHO)(iter(frames), timeout=DEADLINE_S, **call)
        try:
            return [decode_frame(data, max_bytes=1 << 20) for data in stream]
        except grpc.RpcError as error:
            raise error_of(error, "the test's listener") from error


def a_frame(frame_id: int = 1, flags: int = 0, size: int = 3) -> bytes:
    return encode_frame(
        Frame(Kind.LOOKUP, frame_id, flags=flags, sections={(Part.KEYS, 0): np.arange(size, dtype=np.uint64)})
    )


@pytest.fixture(scope="module")
def authority() -> trustme.CA:
    return trustme.CA()


def certified(authority: trustme.CA, **more) -> Transport:
    """A transport with a certificate that the authority has signed."""
    leaf = authority.issue_cert("127.0.0.1", "localhost")
    chain = b"".join(pem.bytes() for pem in leaf.cert_chain_pems)
    return Transport(authority.cert_pem.bytes(), chain, leaf.private_key_pem.bytes(), **more)


# Answers


def test_messages_are_answered_in_turn():
    with listening() as server:
        answers = calling(server, PLAIN, [a_frame(i, size=i) for i in range(1, 20)])
        assert [a.id for a in answers] == list(range(1, 20))
        assert [len(a.array(Part.KEYS, np.uint64)) for a in answers] == list(range(1, 20))
        assert server.counts.frames["Echo"] == 19


@pytest.mark.parametrize(("flags", "family"), [(1, Fenced), (2, BadInput)])
def test_a_request_that_fails_is_answered_and_the_stream_goes_on(flags, family):
    with listening() as server:
        failed, fine = calling(server, PLAIN, [a_frame(1, flags), a_frame(2)])
        assert (failed.id, type(failure_of(failed))) == (1, family)
        assert (fine.id, fine.kind) == (2, Kind.ROWS)


def test_a_defect_of_the_listener_is_answered_too():
    with listening() as server:
        failed, fine = calling(server, PLAIN, [a_frame(1, 3), a_frame(2)])
        assert "a defect" in str(failure_of(failed))
        assert fine.id == 2


# Messages in pieces


def whole_answers(server: FrameServer, transport: Transport, frames: list[bytes]) -> list[Frame]:
    """As `calling`, with long messages sent and received in pieces."""
    pieces = [piece for data in frames for piece in split_message(data, transport.max_message_bytes)]
    answers = calling(server, transport, pieces)
    whole = MessageAssembler(transport.whole_bytes)
    return [made for frame in answers if (made := whole.add_frame(frame)) is not None]


def test_a_long_message_and_its_answer_are_sent_in_pieces():
    with listening() as server:
        sizes = [3, 100_000, 4, 8190]
        answers = whole_answers(server, PLAIN, [a_frame(i, size=n) for i, n in enumerate(sizes, 1)])
        assert [(a.id, len(a.array(Part.KEYS, np.uint64))) for a in answers] == list(enumerate(sizes, 1))
        assert server.counts.refused.total() == 0
        assert server.counts.sent_bytes["Echo"] > sum(encoded_bytes(a.sections) for a in answers)


SIZES = [3, 100_000, 4, 8190]
"""Keys of messages; the second travels in pieces."""


def test_an_unreadable_failure_fails_its_request():
    text = {(Part.TEXT, 0): np.frombuffer(b"new", np.uint8)}
    with listening(
        answer=lambda frame: encode_frame(Frame(Kind.FAILURE, frame.id, flags=99, sections=text))
    ) as server:
        link = Link(f"127.0.0.1:{server.port}", PLAIN, "Test", (), in_flight_bytes=1 << 20)
        with pytest.raises(BadFrame, match="a family that we know, found 99: new"):
            link.ask("Echo", a_frame).result(DEADLINE_S)
        link.close()


def test_link_and_listener_count_the_same_bytes():
    with listening() as server:
        link = Link(f"127.0.0.1:{server.port}", PLAIN, "Test", (), in_flight_bytes=1 << 20)
        for size in SIZES:
            link.ask("Echo", partial(a_frame, size=size)).result(DEADLINE_S)
        received, sent = link.carried()
        link.close()
        assert sent == server.counts.received_bytes["Echo"] > 8 * sum(SIZES)
        assert received == server.counts.sent_bytes["Echo"] > 8 * sum(SIZES)
        assert link.counts.sent_frames == len(SIZES)


def test_a_link_counts_what_its_socket_carries():
    """HTTP/2 adds some bytes to a frame, and connections begin with some."""
    with listening() as server, counting_proxy(server.port) as (port, carried):
        link = Link(f"127.0.0.1:{port}", PLAIN, "Test", (), in_flight_bytes=1 << 20)
        for _ in range(10):
            link.ask("Echo", partial(a_frame, size=100_000)).result(DEADLINE_S)
        counted = link.carried()
        link.close()
    for frames, socket_bytes in zip(counted, (carried["answers"], carried["requests"]), strict=True):
        assert frames <= socket_bytes < 1.01 * frames


@contextmanager
def counting_proxy(to_port: int) -> Iterator[tuple[int, Counter[str]]]:
    """A port that carries one connection to another port, and the bytes of its two directions."""
    carried: Counter[str] = Counter()

    def carry(source: socket.socket, sink: socket.socket, way: str) -> None:
        with suppress(OSError):
            while data := source.recv(1 << 16):
                carried[way] += len(data)
                sink.sendall(data)
        with suppress(OSError):
            sink.shutdown(socket.SHUT_WR)

    def accept() -> None:
        near, _ = listener.accept()
        with near, socket.create_connection(("127.0.0.1", to_port)) as far:
            back = threading.Thread(target=carry, args=(far, near, "answers"))
            back.start()
            carry(near, far, "requests")
            back.join()

    with socket.create_server(("127.0.0.1", 0)) as listener:
        worker = threading.Thread(target=accept)
        worker.start()
        yield listener.getsockname()[1], carried
        worker.join()


def test_a_call_of_one_answer_may_get_it_in_pieces():
    with closing_link(lambda frame: a_frame(frame.id, size=100_000)) as link:
        assert len(link.call("Once", DEADLINE_S).array(Part.KEYS, np.uint64)) == 100_000


@contextmanager
def closing_link(answer: Answer) -> Iterator[Link]:
    server = FrameServer("127.0.0.1:0", PLAIN)
    server.add_call("Test", "Once", answer)
    server.start()
    link = Link(f"127.0.0.1:{server.port}", PLAIN, "Test", (), in_flight_bytes=1 << 20)
    try:
        yield link
    finally:
        link.close()
        server.stop(0.0)


def test_a_stream_that_ends_within_a_message_is_counted():
    with listening() as server:
        (answer,) = calling(server, PLAIN, list(split_message(a_frame(size=100_000), 1 << 16))[:-1])
        assert (answer.id, answer.kind) == (0, Kind.FAILURE)
        assert server.counts.refused["truncated"] == 1


def test_a_too_long_answer_names_the_setting_to_raise():
    small = Transport(max_message_bytes=1024)
    with listening(small, lambda frame: a_frame(frame.id, size=100_000)) as server:
        (failed,) = calling(server, small, [a_frame()])
        error = failure_of(failed)
        assert isinstance(error, TooLarge)
        assert f"to {-(-len(a_frame(size=100_000)) // MAX_PIECES)}" in str(error)
        assert server.counts.refused["oversized"] == 1


def test_pieces_count_as_work_when_they_arrive():
    begun, go_on = threading.Event(), threading.Event()

    def slow(frame: Frame) -> bytes:
        begun.set()
        assert go_on.wait(DEADLINE_S)
        return echo(frame)

    with listening(answer=slow, work_bytes=1 << 20) as server:
        with ThreadPoolExecutor(1) as pool:
            first = pool.submit(whole_answers, server, PLAIN, [a_frame(1, size=50_000)])
            assert begun.wait(DEADLINE_S)
            waiting = whole_answers(server, PLAIN, [a_frame(2, size=100_000)])
            go_on.set()
            assert first.result(DEADLINE_S)[0].id == 1
        (failed,) = waiting
        assert (failed.id, type(failure_of(failed))) == (2, Overloaded)
        (after,) = whole_answers(server, PLAIN, [a_frame(3, size=100_000)])
        assert after.id == 3


@pytest.mark.slow
def test_a_stream_that_stops_within_a_message_is_ended():
    over = threading.Event()

    def stopping() -> Iterator[bytes]:
        yield next(split_message(a_frame(1, size=100_000), PLAIN.max_message_bytes))
        over.wait(DEADLINE_S)

    with listening(work_bytes=850_000, piece_timeout_s=5.0) as server:
        with open_channel(f"127.0.0.1:{server.port}", PLAIN) as channel:
            stalled = channel.stream_stream(ECHO)(stopping(), timeout=DEADLINE_S)
            wait_for(lambda: server.counts.frames["Echo"] == 1, DEADLINE_S)
            (answer,) = whole_answers(server, PLAIN, [a_frame(2, size=50_000)])
            assert (answer.id, answer.kind) == (2, Kind.ROWS)
            with pytest.raises(grpc.RpcError) as ended:
                next(stalled)
            assert isinstance(error_of(ended.value, "here"), Unavailable)
            over.set()
        assert server.counts.refused == {"late": 1}
        # Its bytes are released: another message of that length fits.
        wait_for(
            lambda: whole_answers(server, PLAIN, [a_frame(3, size=100_000)])[0].kind == Kind.ROWS, DEADLINE_S
        )


@pytest.mark.slow
def test_a_slow_message_with_timely_pieces_is_answered():
    went_on = threading.Event()

    def pausing() -> Iterator[bytes]:
        for piece in split_message(a_frame(1, size=100_000), PLAIN.max_message_bytes):
            yield piece
            went_on.wait(0.4)

    def is_answered() -> bool:
        """Or not: on a machine that stood still for longer between two pieces."""
        with listening(piece_timeout_s=3.0) as server, suppress(Unavailable):
            (answer, *_) = calling(server, PLAIN, pausing())
            assert server.counts.refused == {}
            return answer.id == 1
        return False

    wait_for(is_answered, 120.0)  # a time-out of the whole message would end each try


def test_an_announced_length_above_the_limit_is_refused():
    first = next(split_message(a_frame(1, size=20_000), PLAIN.max_message_bytes))
    with listening(work_bytes=100_000) as server:
        (answer,) = calling(server, PLAIN, [first])
        error = failure_of(answer)
        assert isinstance(error, TooLarge)
        assert "at most 100000 bytes in pieces" in str(error)
        assert server.counts.refused == {"oversized": 1}


def test_answers_made_at_once_share_a_limit():
    server = FrameServer("127.0.0.1:0", PLAIN, work_bytes=100_000)
    with server.reserve_answer(90_000):
        with server.reserve_answer(10_000):
            pass
        with pytest.raises(Overloaded, match="90000 bytes of answers"), server.reserve_answer(10_001):
            pass
    with pytest.raises(TooLarge, match="at most 100000 bytes, found 100001"), server.reserve_answer(100_001):
        pass
    with pytest.raises(TooLarge, match="FRESHET_GRPC_MAX_MESSAGE_BYTES"), server.reserve_answer(1 << 40):
        pass
    with server.reserve_answer(100_000):
        assert server.counts.refused == {"overloaded": 1}


# Clients


def test_tls_both_ways_and_the_token(authority):
    transport = certified(authority, token="sesame-of-the-test")
    with listening(transport) as server:
        assert len(calling(server, transport, [a_frame()])) == 1


@pytest.mark.parametrize("token", ["", "sesame-of-another"])
def test_a_client_without_the_token_is_refused_and_counted(token):
    with listening(replace(PLAIN, token="sesame-of-the-test")) as server:
        with pytest.raises(Unavailable, match="the token is missing or wrong"):
            calling(server, replace(PLAIN, token=token), [a_frame()])
        assert server.counts.refused["token"] == 1
        assert len(calling(server, replace(PLAIN, token="sesame-of-the-test"), [a_frame()])) == 1


def test_a_token_is_replaced_without_refused_calls(tmp_path):
    clock = SettableClock()
    ours, theirs = tmp_path / "listener", tmp_path / "client"
    for file in (ours, theirs):
        file.write_text("old\n")
    listener = replace(PLAIN, tokens=PeerTokens(str(ours), clock))
    client = replace(PLAIN, tokens=PeerTokens(str(theirs), clock))
    steps = [(ours, "old\nnew\n"), (theirs, "old\nnew\n"), (theirs, "new\nold\n"), (ours, "new\nold\n"),
             (ours, "new\n"), (theirs, "new\n")]  # fmt: skip
    with listening(listener) as server:
        for file, tokens in steps:
            file.write_text(tokens)
            clock.advance(CHECK_S)
            assert len(calling(server, client, [a_frame()])) == 1, (file.name, tokens)
        with pytest.raises(Unavailable):
            calling(server, replace(PLAIN, token="old"), [a_frame()])


def test_a_client_of_another_spec_is_refused_with_the_reason():
    with listening(identity={"freshet-spec": "abc"}) as server:
        with pytest.raises(Mismatch, match="freshet-spec abc, the client is for xyz"):
            calling(server, PLAIN, [a_frame()], metadata=[("freshet-spec", "xyz")])
        assert server.counts.refused["identity"] == 1
        assert len(calling(server, PLAIN, [a_frame()], metadata=[("freshet-spec", "abc")])) == 1


def test_former_defaults_are_named_in_the_error():
    own = SpecHash.of("abc", 2, {"xyz": 1})
    with listening(identity={"freshet-spec": own}) as server:
        with pytest.raises(Mismatch, match="put `defaults = 1` at the top of the spec"):
            calling(server, PLAIN, [a_frame()], metadata=[("freshet-spec", "xyz")])
        assert len(calling(server, PLAIN, [a_frame()], metadata=[("freshet-spec", own)])) == 1


def test_a_method_that_is_not_there_is_a_mismatch():
    with listening() as server, open_channel(f"127.0.0.1:{server.port}", PLAIN) as channel:
        with pytest.raises(grpc.RpcError) as refused:
            channel.unary_unary(method_name("Test", "Other"))(b"", timeout=DEADLINE_S)
        assert isinstance(error_of(refused.value, "here"), Mismatch)


# What is refused


@pytest.mark.parametrize(
    ("data", "family", "reason"),
    [
        (a_frame()[:-8], Corrupt, "truncated"),
        (a_frame()[:10], Corrupt, "truncated"),
        (b"", Corrupt, "truncated"),
        (bytes([0xB5, 9]) + a_frame()[2:], Mismatch, "version"),
        (b"GET / HTTP/1.1 and so on", Corrupt, "magic"),
        (a_frame()[:-1] + b"\x01", Corrupt, "crc"),
        (a_frame(size=8190), TooLarge, "oversized"),
    ],
)
def test_a_wrong_frame_is_refused_by_name_and_ends_the_stream(data, family, reason):
    with listening() as server:
        (answer,) = calling(server, PLAIN, [data, a_frame()])
        assert (answer.id, answer.kind) == (0, Kind.FAILURE)
        assert isinstance(failure_of(answer), family)
        assert server.counts.refused[reason] == 1
        assert len(calling(server, PLAIN, [a_frame()])) == 1


def test_grpc_refuses_a_message_far_above_the_limit():
    with listening() as server:
        large = replace(PLAIN, max_message_bytes=1 << 24)
        with pytest.raises(TooLarge, match="larger than max"):
            calling(server, large, [a_frame(size=1 << 17)])
        assert len(calling(server, PLAIN, [a_frame()])) == 1


def test_work_beyond_the_limit_is_refused_as_overloaded():
    begun, go_on = threading.Event(), threading.Event()

    def slow(frame: Frame) -> bytes:
        begun.set()
        assert go_on.wait(DEADLINE_S)
        return echo(frame)

    with listening(work_bytes=0, answer=slow) as server:
        first: list[Frame] = []
        waiting = threading.Thread(target=lambda: first.extend(calling(server, PLAIN, [a_frame(size=5000)])))
        waiting.start()
        assert begun.wait(DEADLINE_S)
        (answer,) = calling(server, PLAIN, [a_frame(2, size=5000)])
        error = failure_of(answer)
        assert isinstance(error, Overloaded)
        assert error.retry_after_s > 0
        assert server.counts.refused["overloaded"] == 1
        go_on.set()
        waiting.join()
        assert [a.id for a in first] == [1]


def test_streams_beyond_the_limit_are_refused_but_calls_answered():
    over = threading.Event()

    def lasting() -> Iterator[bytes]:
        yield a_frame()
        over.wait(DEADLINE_S)

    with listening(streams=2) as server, open_channel(f"127.0.0.1:{server.port}", PLAIN) as channel:
        opened = [channel.stream_stream(ECHO)(lasting(), timeout=DEADLINE_S) for _ in range(2)]
        for stream in opened:
            next(stream)
        for n in range(1, 4):
            with pytest.raises(Overloaded, match="2 streams are open here"):
                calling(server, PLAIN, [a_frame()])
            assert server.counts.refused == {"streams": n}
        once = channel.unary_stream(method_name("Test", "Once"))(a_frame(7), timeout=DEADLINE_S)
        assert [decode_frame(data, max_bytes=1 << 20).id for data in once] == [7]
        over.set()
        wait_for(lambda: [list(stream) for stream in opened] == [[], []], DEADLINE_S)
        assert len(calling(server, PLAIN, [a_frame()])) == 1


# The end


def test_a_stop_waits_for_requests_in_work():
    begun, go_on = threading.Event(), threading.Event()

    def slow(frame: Frame) -> bytes:
        begun.set()
        assert go_on.wait(DEADLINE_S)
        return echo(frame)

    with listening(answer=slow) as server:
        answers: list[Frame] = []

        def ask() -> None:
            with open_channel(f"127.0.0.1:{server.port}", PLAIN) as channel, suppress(grpc.RpcError):
                for data in channel.stream_stream(ECHO)(iter([a_frame()]), timeout=DEADLINE_S):
                    answers.append(decode_frame(data, max_bytes=1 << 20))  # what follows may be cut off

        waiting = threading.Thread(target=ask)
        waiting.start()
        assert begun.wait(DEADLINE_S)
        stopping = threading.Thread(target=server.stop, args=(DEADLINE_S,))
        stopping.start()
        go_on.set()
        stopping.join()
        waiting.join()
        assert [a.kind for a in answers] == [Kind.ROWS]


def test_a_listener_that_is_gone_is_unavailable():
    with listening() as server:
        pass
    with pytest.raises(Unavailable):
        calling(server, PLAIN, [a_frame()])


def test_a_connection_closed_by_another_thread_is_unavailable():
    """A caller may hold a link that was closed as its shard went; a ValueError would end it for good."""
    with closing_link(lambda frame: b"") as link:
        link.close()

        with pytest.raises(Unavailable, match="the connection was closed"):
            link.call("Applied", 1.0)
        assert isinstance(link.ask("Echo", lambda number: b"").exception(), Unavailable)


def test_a_port_that_is_taken_is_an_error_of_the_settings():
    with listening() as server, pytest.raises(ConfigError, match="port that is free"):
        FrameServer(f"127.0.0.1:{server.port}", PLAIN).start()


# Settings and metrics


def test_certificates_are_given_whole_or_not_at_all(tmp_path):
    (tmp_path / "ca").write_bytes(b"x")
    with pytest.raises(ConfigError, match="cert_file"):
        transport_of(ca_file=str(tmp_path / "ca"), max_message_bytes=1)


def test_a_file_that_cannot_be_read_is_named(tmp_path):
    with pytest.raises(ConfigError, match="token_file"):
        transport_of(token_file=str(tmp_path / "none"), max_message_bytes=1)


def test_an_empty_token_file_is_refused(tmp_path):
    (tmp_path / "token").write_text("\n")
    with pytest.raises(ConfigError, match="one token"):
        transport_of(token_file=str(tmp_path / "token"), max_message_bytes=1)


def test_secrets_are_not_shown():
    shown = repr(Transport(b"ca", b"cert", b"the key", "the token"))
    assert "the key" not in shown
    assert "the token" not in shown


def test_counts_are_exposed():
    with listening() as server:
        calling(server, PLAIN, [a_frame()])
        calling(server, PLAIN, [b"no"])
        registry = CollectorRegistry()
        register(registry, GRPC_METRICS, lambda: server.counts)
        text = generate_latest(registry).decode()
        assert 'freshet_grpc_frames_total{method="Echo"} 2.0' in text
        assert 'freshet_grpc_refused_total{reason="truncated"} 1.0' in text
