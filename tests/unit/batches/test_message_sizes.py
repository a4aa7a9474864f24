"""The largest message of a spec is known at the start; too small a limit is refused there."""

import threading
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from freshet.apps.embedder import EmbedderProcess
from freshet.batches.frames import Names, batch_frame, check_messages, largest_batch_bytes, streams
from freshet.clock import Stopwatch
from freshet.config.settings import load_settings
from freshet.config.spec.layout import layout_of
from freshet.config.spec.model import Spec
from freshet.config.spec.parse import parse_spec
from freshet.embedder.batch_builder import BatchBuilder
from freshet.embedder.block_decoder import DecodedBatch
from freshet.embedder.core import BatchPlan
from freshet.errors import ConfigError
from freshet.features import Decoded, GroupKeys
from freshet.log.sqlite.event_log import SqliteEventLog
from freshet.log.topics import ModelContext
from freshet.rpc.channel import MIB, Transport
from freshet.rpc.pieces import MAX_PIECES
from freshet.rpc.server import STREAMS, WORK_BYTES
from freshet.tables import KnownPushes
from freshet.types import BytesColumn, Fence, OffsetRange
from freshet.wires.codecs import RowCodec
from freshet.wires.row_wire import RowWire
from tests.fixtures.effort import examples


def spec_of(dim: int, optimizer: str, longest: int, rows: int) -> Spec:
    return parse_spec(f"""
name = "sized"
[events]
served = {{ schema = "i.avsc", key = ["id"], time = "ts:ms" }}
action = {{ schema = "a.avsc", key = ["id"], time = "ts:ms" }}
[labels]
click = {{ on = "action.type == 'click'" }}
[tables]
user = {{ dim = {dim}, optimizer = "{optimizer}" }}
item = {{ dim = {dim}, optimizer = "{optimizer}" }}
[features]
user = {{ field = "user", table = "user" }}
recent = {{ field = "recent", table = "item", max = {longest} }}
price = {{ field = "price", dense = ["standard"] }}
[train]
batch = {{ rows = {rows}, behind = {rows} }}
""")


def fullest(spec: Spec) -> int:
    """Return the bytes of a batch with lists of maximal length and distinct keys."""
    layout, rows = layout_of(spec), spec.train.behind_rows(native_loop=False)
    groups, many = [], 1
    for group in layout.groups:
        counts = [rows * (spec.features[f].max or 1) for f in group.features]
        starts = np.concatenate([[0], np.cumsum(counts)]).astype(np.uint32)
        keys = np.arange(many, many + sum(counts), dtype=np.uint64) * np.uint64(0x9E3779B97F4A7C15)
        many += len(keys)
        ends = [
            np.arange(1, rows + 1, dtype=np.uint32) * np.uint32(spec.features[f].max or 1)
            if spec.features[f].kind == "list"
            else None
            for f in group.features
        ]
        groups.append(GroupKeys(keys, starts, ends))
    dense = np.zeros((rows, 2 * len(layout.dense)), np.float32)
    columns = Decoded(rows, groups, dense, {}, {}, np.zeros(rows, np.bool_), np.empty(0, np.int64))
    ids, ones = np.arange(rows), np.ones(rows, np.float32)
    decoded = DecodedBatch(columns, ids, ids.astype(np.uint64), ids, np.zeros(rows, np.uint8), ones, ones)
    plan = BatchPlan((OffsetRange(0, 0, 1),), BytesColumn.of([]), (), rows)
    builder = BatchBuilder(spec, layout, states=True)
    built = builder.build(plan, decoded, builder.slot(), replayed=False, stages=Stopwatch(("plan",)))
    assert built.looked is not None
    # the most moments that shards and pushes in flight produce
    moments = {g: np.zeros(spec.buckets, np.uint32) for g in range(len(groups))}
    built.looked.states.known = KnownPushes(np.zeros((256, spec.partitions), np.int64), moments)
    for memory in [*(inputs.rows for inputs in built.inputs.groups), *built.looked.states.floats]:
        memory[:] = 0
    return len(
        batch_frame(
            1, 1, built.batch(Fence(1), looked=True), Names.of(spec, layout), RowWire(), RowCodec.FP32
        )
    )


@settings(deadline=None, max_examples=examples(25))
@given(
    dim=st.integers(1, 32),
    optimizer=st.sampled_from(["sgd", "adam", "rowwise_adagrad", "ftrl"]),
    longest=st.integers(1, 9),
    rows=st.integers(256, 700),
)
def test_largest_batch_size_is_a_tight_bound(dim, optimizer, longest, rows):
    spec = spec_of(dim, optimizer, longest, rows)
    bound, found = largest_batch_bytes(spec, layout_of(spec)), fullest(spec)
    assert found <= bound < found + 2**18 + rows * 64


def test_too_small_message_limit_fails_with_the_needed_limit():
    spec = spec_of(16, "adam", 5000, 4096)
    needed = -(-largest_batch_bytes(spec, layout_of(spec)) // MAX_PIECES)
    with pytest.raises(
        ConfigError, match=f"raise FRESHET_GRPC_MAX_MESSAGE_BYTES to {needed} on every service"
    ):
        check_messages(spec, Transport(max_message_bytes=needed - 1))
    check_messages(spec, Transport(max_message_bytes=needed))


def test_usual_specs_fit_the_default_limit():
    check_messages(spec_of(64, "adam", 50, 4096), Transport())
    check_messages(spec_of(16, "rowwise_adagrad", 50, 65_536), Transport(max_message_bytes=64 * MIB))


@pytest.mark.parametrize("longest", [1, 2000])
def test_memory_budget_fits_gradients_of_every_lane(tmp_path, longest):
    spec = spec_of(16, "adam", longest, 4096)
    log, given = SqliteEventLog(tmp_path), {"FRESHET_EMBEDDER_PORT": "0"}
    context = ModelContext.open(spec, "hash", log)
    embedding = EmbedderProcess(context, load_settings(given, run_folder=str(tmp_path)))
    room, most = embedding.server.work_bytes, embedding.server.streams
    stop = threading.Event()
    stop.set()
    embedding.run(stop)
    log.close()
    assert most == max(STREAMS, 4 * spec.partitions)
    assert room >= WORK_BYTES
    assert room > spec.partitions * largest_batch_bytes(spec, layout_of(spec))


def test_stream_limit_lets_every_lane_reconnect():
    spec = replace(spec_of(16, "adam", 1, 4096), partitions=100)
    assert streams(spec, STREAMS) == 400
    assert streams(replace(spec, partitions=1), STREAMS) == STREAMS
