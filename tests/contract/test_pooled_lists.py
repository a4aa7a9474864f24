"""Training on lists that shards pool, in mode `sync` over gRPC: equal to training on their rows."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import cast

import numpy as np
import pytest

from freshet.config.spec.layout import layout_of
from freshet.config.spec.parse import parse_spec
from freshet.embedder.block_decoder import BlockDecoder, DecodedBatch, Places
from freshet.features import Decoded, GroupKeys, read_blocks
from freshet.log.sqlite.event_log import SqliteEventLog
from freshet.model import build_model
from freshet.rows.grpc.client import RemoteRows
from freshet.rows.grpc.handles import KeptKeys
from freshet.rows.service import KeyGroup, RowStates
from freshet.tables import Plan
from freshet.testing.contracts.batches import await_batch
from freshet.testing.contracts.rowservice import BUCKETS, PARTITIONS
from freshet.types import F32, U64, BytesColumn, OffsetRange
from freshet.wires.link_codecs import EXACT, CodecChoice
from tests.fixtures.embedder import PipelinedScene, RemoteScene
from tests.fixtures.shards import served

pytestmark = pytest.mark.slow

ITEMS, TAGS, LONGEST, DIM = 300, 200, 50, 4
BATCHES, ROWS = 12, 8
ADAGRAD = '{ name = "adagrad", lr = 0.1, initial_accumulator = 0.1 }'

SPEC = f"""
name = "contract"
partitions = {PARTITIONS}
buckets = {BUCKETS}
[events]
served = {{ schema = "i.avsc", key = ["id"], time = "ts:ms" }}
action = {{ schema = "a.avsc", key = ["id"], time = "ts:ms" }}
[labels]
click = {{ on = "action.type == 'click'" }}
[tables]
item = {{ dim = {DIM}, shared = true, optimizer = {ADAGRAD}, init = 0.3 }}
tag = {{ dim = {DIM}, optimizer = {ADAGRAD}, init = 0.3 }}
[features]
item = {{ field = "item", table = "item" }}
clicked = {{ field = "clicked", table = "item", max = {LONGEST}, pool = "mean" }}
tags = {{ field = "tags", table = "tag", max = {LONGEST}, pool = "sum" }}
[model]
kind = "deepfm"
[train]
batch = {{ rows = 1, behind = 1 }}
"""
GOLDEN = np.uint64(0x9E3779B97F4A7C15)
ALL_KEYS = np.arange(1, ITEMS + TAGS, dtype=np.uint64) * GOLDEN


class ListDecoder:
    """A decoder with features that follow from the sample's id: nulls, empty lists and repeats among them."""

    def decode(self, blocks: BytesColumn, places: Places = ()) -> DecodedBatch:
        read = read_blocks(blocks)
        samples = [np.random.default_rng(i) for i in read.sample_ids.tolist()]
        items = np.array([rng.integers(0, ITEMS) for rng in samples], np.uint64)
        clicked = [self._list(rng, ITEMS) for rng in samples]
        tags = [self._list(rng, TAGS) + np.uint64(ITEMS) for rng in samples]
        for one in tags:
            one[one == ITEMS] = 0
        keys = np.concatenate([items, *clicked, *tags]) * GOLDEN  # 0 stays 0: a null
        ends = [np.cumsum([len(one) for one in lists]).astype(np.uint32) for lists in (clicked, tags)]
        n = len(samples)
        starts = np.cumsum([0, n, ends[0][-1], ends[1][-1]]).astype(np.uint32)
        columns = Decoded(
            size=n,
            groups=[GroupKeys(keys, starts, [None, *ends])],
            dense=np.empty((n, 0), np.float32),
            segments={},
            served={},
            explored=np.zeros(n, np.bool_),
            bad=np.empty(0, np.int64),
        )
        return DecodedBatch(
            columns,
            read.sample_ids,
            read.request_ids,
            read.event_times_ms,
            read.labels,
            (read.sample_ids % 2).astype(np.float32),
            read.weights,
        )

    @staticmethod
    def _list(rng: np.random.Generator, ids: int) -> U64:
        length = rng.choice([0, 1, LONGEST, LONGEST])
        drawn: U64 = rng.integers(0, ids, length, np.uint64)
        return drawn


class Rows:
    """Remote rows that pool no lists."""

    def __init__(self, remote: RemoteRows) -> None:
        self.remote = remote
        self.push, self.push_soon = remote.push, remote.push_soon
        self.applied, self.ownership = remote.applied, remote.ownership
        self.sums = 0

    def lookup(
        self,
        groups: Sequence[KeyGroup],
        out: Sequence[F32],
        *,
        create: bool = True,
        states: RowStates | None = None,
    ) -> None:
        self.sums += sum(len(group.lists.counts) for group in groups if group.lists is not None)
        self.remote.lookup(groups, out, create=create, states=states)


class Pooling(Rows):
    """Remote rows that pool them; for the choice there is one shard, so that small batches use sums."""

    def pooling_shards(self) -> int:
        return 1


class PoolingAfter(Pooling):
    """The same with lookups beside pushes."""

    def lookup_after(
        self,
        ranges: Sequence[OffsetRange],
        groups: Sequence[KeyGroup],
        out: Sequence[F32],
        *,
        states: RowStates | None = None,
    ) -> None:
        self.sums += sum(len(group.lists.counts) for group in groups if group.lists is not None)
        self.remote.lookup_after(ranges, groups, out, states=states)


def everything(remote: RemoteRows, width: int) -> F32:
    """Return the rows of all keys of both tables, zeros where there is none."""
    plan = Plan(tables=np.array([0, 1], np.uint8), buckets=BUCKETS)
    n = len(ALL_KEYS)
    plan.build(np.concatenate([ALL_KEYS, ALL_KEYS]), np.array([0, n, 2 * n], np.uint32))
    out: F32 = np.empty((len(plan.keys), width), np.float32)
    remote.lookup([KeyGroup(0, plan.keys, plan.tables, plan.bucket_starts)], [out], create=False)
    return out


def trained(
    folder: Path,
    kind: type[Rows],
    owner_of: Sequence[int],
    text: str = SPEC,
    choice: CodecChoice = EXACT,
    scene_of: type[PipelinedScene] | type[RemoteScene] = PipelinedScene,
) -> tuple[Rows, F32, F32]:
    """Train a network; returns the row service, the predictions of each batch and the rows at the end."""
    folder.mkdir()
    log = SqliteEventLog(folder / "samples")
    spec = parse_spec(text)
    model = build_model(spec, training=True)
    lane = model.lane()
    predictions: list[F32] = []
    with served(folder, spec, max(owner_of) + 2, choice=choice, owner_of=owner_of) as (remote, _):
        rows = kind(remote)
        scene = scene_of(log, text, rows)
        scene.decoder = lambda: cast(BlockDecoder, ListDecoder())
        for i in range(BATCHES):
            scene.append(i % PARTITIONS, range(i * ROWS, (i + 1) * ROWS))
        stream = scene.stream(batch_rows=ROWS, mode="sync")
        for _ in range(BATCHES):
            batch = await_batch(stream)
            result = lane.forward_backward(batch.inputs.copied())
            predictions.append(result.predictions.copy())
            stream.push_gradients(0, batch, result.gradients)
            model.step([lane])
        assert stream.flush(60)
        stream.close()
        if isinstance(scene, RemoteScene):
            scene.close()
        found = everything(remote, layout_of(spec).groups[0].width)
    log.close()
    return rows, np.concatenate(predictions), found


SHARDINGS = {
    "one": [0] * BUCKETS,
    "two": [0, 1] * (BUCKETS // 2),
    "one of three without rows": [0, 2] * (BUCKETS // 2),
    "random of five": np.random.default_rng(3).integers(0, 5, BUCKETS).tolist(),
}


@pytest.mark.parametrize("sharding", SHARDINGS)
@pytest.mark.parametrize("kind", [Pooling, PoolingAfter])
def test_training_on_sums_of_lists_is_training_on_rows(
    tmp_path: Path, kind: type[Rows], sharding: str
) -> None:
    """The last shard owns no bucket in any of them."""
    plain, predicted, expected = trained(tmp_path / "rows", Rows, SHARDINGS["two"])
    pooling, found_predictions, found = trained(tmp_path / "sums", kind, SHARDINGS[sharding])
    assert (plain.sums, pooling.sums > BATCHES * ROWS) == (0, True)
    np.testing.assert_allclose(found_predictions, predicted, atol=1e-5)
    assert np.abs(expected).sum() > 100, "the rows have learned"
    np.testing.assert_allclose(found, expected, atol=1e-5)


@pytest.mark.parametrize("kind", ["dlrm", "dcnv2"])
def test_other_networks_train_on_sums_of_lists(tmp_path: Path, kind: str) -> None:
    text = SPEC.replace('"deepfm"', f'"{kind}"')
    _, predicted, expected = trained(tmp_path / "rows", Rows, SHARDINGS["two"], text)
    pooling, found_predictions, found = trained(tmp_path / "sums", Pooling, SHARDINGS["two"], text)
    assert pooling.sums
    np.testing.assert_allclose(found_predictions, predicted, atol=1e-5)
    np.testing.assert_allclose(found, expected, atol=1e-5)


def test_shards_that_forget_lookups_receive_the_lists_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    _, predicted, expected = trained(tmp_path / "rows", Rows, SHARDINGS["two"])
    monkeypatch.setattr(KeptKeys, "find", lambda *_: None)
    pooling, found_predictions, found = trained(tmp_path / "sums", Pooling, SHARDINGS["two"])
    assert pooling.sums
    np.testing.assert_allclose(found_predictions, predicted, atol=1e-5)
    np.testing.assert_allclose(found, expected, atol=1e-5)


def test_lists_travel_as_rows_where_shards_would_send_more_sums(tmp_path: Path) -> None:
    class OfManyShards(Pooling):
        def pooling_shards(self) -> int:
            return 1000

    rows, _, _ = trained(tmp_path / "rows", OfManyShards, SHARDINGS["one"])
    assert rows.sums == 0


def test_a_trainer_behind_an_embedder_receives_one_row_a_list(tmp_path: Path) -> None:
    _, predicted, expected = trained(tmp_path / "rows", Rows, SHARDINGS["two"])
    owner_of = SHARDINGS["one of three without rows"]
    pooling, found_predictions, found = trained(tmp_path / "sums", Pooling, owner_of, scene_of=RemoteScene)
    assert pooling.sums > BATCHES * ROWS
    np.testing.assert_allclose(found_predictions, predicted, atol=1e-5)
    np.testing.assert_allclose(found, expected, atol=1e-5)


def test_sums_and_their_gradients_may_be_rounded(tmp_path: Path) -> None:
    _, predicted, expected = trained(tmp_path / "rows", Rows, SHARDINGS["two"])
    choice = CodecChoice(rows="int8", gradients="int8")
    pooling, found_predictions, found = trained(tmp_path / "sums", Pooling, SHARDINGS["two"], choice=choice)
    assert pooling.sums
    np.testing.assert_allclose(found_predictions[:ROWS], predicted[:ROWS], atol=0.02)
    assert np.corrcoef(found.ravel(), expected.ravel())[0, 1] > 0.9, "gradients are rounded at random"
    assert np.abs(found - expected).max() > 1e-5, "codecs round"
