"""How long messages of a spec's batches may become: known before the first of them."""

from __future__ import annotations

from freshet.config.spec.layout import Layout, layout_of
from freshet.config.spec.model import Spec
from freshet.errors import ConfigError
from freshet.rpc.channel import Transport
from freshet.rpc.pieces import MOST_PIECES, SMALLEST_LIMIT

__all__ = ["check_messages", "largest_batch_bytes", "streams", "work_bytes"]

BLOCK_ROWS = 256
"""Samples of a block that an earlier release wrote; a batch takes it whole, even if it has fewer rows."""

SAMPLE_BYTES = 8 + 8 + 8 + 1 + 4 + 4 + 1 + 8
"""Ids of sample and request, time, label, value, weight, explored, item."""

KEY_BYTES = 8 + 1 + 4 + 4
"""Key and table of a row, its scale in the codec int8, and the position of an occurrence."""

AROUND_BYTES = 1 << 16
"""Header, directory, ranges and offsets of 256 partitions."""

MOMENTS = 256
"""At which buckets may have been read, each with the offsets of all partitions: several a shard."""


def largest_batch_bytes(spec: Spec, layout: Layout) -> int:
    """Of a batch on its way to a trainer with the optimiser state of its rows, if every list is as long as it
    may be and no two keys are equal. Nothing else that is sent of a batch is longer: rows that occur in
    several steps have several gradients, but never more than they occur.

    A request of which more samples were decided at once than a batch has rows may exceed it.
    """
    train = spec.train
    known = 8 * MOMENTS * spec.partitions + 4 * spec.buckets * len(layout.groups)
    sample = SAMPLE_BYTES + 8 * len(spec.train.segments) + 4 * len(spec.labels) + 8 * len(layout.dense)
    for group in layout.groups:
        features = [spec.features[f] for f in group.features]
        keys = sum(feature.max or 1 for feature in features)
        lists = sum(feature.kind == "list" for feature in features)
        sample += 4 * lists + keys * (KEY_BYTES + 4 * (group.width + group.state_floats))
    return AROUND_BYTES + known + max(train.behind_rows(native_loop=False), BLOCK_ROWS) * sample


def check_messages(spec: Spec, transport: Transport) -> None:
    """Raise ConfigError if no pieces could carry a batch that the spec allows."""
    largest = largest_batch_bytes(spec, layout_of(spec))
    needed = max(SMALLEST_LIMIT, -(-largest // MOST_PIECES))
    if transport.max_message_bytes < needed:
        raise ConfigError(
            "grpc",
            "max_message_bytes",
            transport.max_message_bytes,
            f"at least {needed}: a batch of {spec.name} may have {largest} bytes, and goes in {MOST_PIECES} "
            "messages at most",
            f"raise FRESHET_GRPC_MAX_MESSAGE_BYTES to {needed} on every service of the model, or take fewer "
            "rows in a batch (train.batch.rows, train.batch.behind) or shorter lists (max)",
        )


def streams(spec: Spec, at_least: int) -> int:
    """That may be open at one embedder or shard, so that none of its clients is kept out: lanes or embedders,
    each with two for as long as it runs.

    No more lanes than partitions get any; twice, for those of clients that have just connected again.
    """
    return max(at_least, 4 * spec.partitions)


def work_bytes(spec: Spec, at_least: int) -> int:
    """Of requests that an embedder or shard may have in work at once, so that an embedder refuses no
    gradients of a batch that it has handed out: credits bound those.

    A lane sends one message of gradients at a time, no longer than its batch. No more lanes than partitions
    get any; twice, for those of a lane that has just connected again.
    """
    return max(at_least, 2 * spec.partitions * largest_batch_bytes(spec, layout_of(spec)))
