"""Lookups with too large an answer are refused before any of it is allocated."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import pytest

from freshet.errors import TooLarge
from freshet.paramserver.server import RowSizes, serve_rows
from freshet.rows.grpc.frames import lookup_frame, rows_into
from freshet.rpc.channel import Transport
from freshet.rpc.link import Link
from freshet.rpc.server import FrameServer
from freshet.types import Bucket
from freshet.wires.codecs import RowCodec
from freshet.wires.link_codecs import EXACT, LinkCodecs
from freshet.wires.row_wire import RowWire

TRANSPORT = Transport(max_message_bytes=1 << 16)
WIDTH, STATES = 60, 4
DEADLINE_S = 60.0


class Rows:
    """A row service of zeros that counts the rows looked up."""

    def __init__(self) -> None:
        self.looked_up = 0

    def lookup(self, groups: Sequence[Any], out: Sequence[Any], **_: object) -> None:
        self.looked_up += sum(len(rows) for rows in out)
        for rows in out:
            rows[...] = 0

    def push(self, push: object) -> bool:
        raise NotImplementedError

    def applied(self) -> Mapping[int, Sequence[int]]:
        return {}

    def owned(self) -> Sequence[Bucket]:
        return ()


@pytest.mark.parametrize("states", [False, True])
def test_a_lookup_with_too_large_an_answer_is_refused_unread(states: bool) -> None:
    floats = WIDTH + STATES * states
    most = 1000  # rows of the largest answer
    rows = Rows()
    server = FrameServer("127.0.0.1:0", TRANSPORT, work_bytes=4 * floats * most)
    serve_rows(server, rows, RowSizes(1, (WIDTH,), (STATES,)))
    server.start()
    link = Link(
        f"127.0.0.1:{server.port}",
        TRANSPORT,
        "Rows",
        (),
        LinkCodecs(EXACT, same_host=True),
        in_flight_bytes=1 << 20,
    )

    def ask(count: int) -> Any:
        keys, tables = np.arange(count, dtype=np.uint64), np.zeros(count, np.uint8)
        return link.ask(
            "Lookup",
            lambda n: lookup_frame(n, [(0, keys, tables)], RowCodec.FP32, create=False, states=states),
        ).result(DEADLINE_S)

    try:
        with pytest.raises(TooLarge, match=f"at most {4 * floats * most} bytes, found"):
            ask(most + 1)
        assert (rows.looked_up, server.counts.refused) == (0, {"oversized": 1})
        if not states:
            rows_into(ask(most), {0: np.empty((most, WIDTH), np.float32)}, RowWire())
            assert rows.looked_up == most
    finally:
        link.close()
        server.stop(0.0)
