"""Settings of joiner, trainer, embedder and paramserver."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from freshet.config.options import Choice, Duration, Integer, Number, Text, option
from freshet.config.settings.network import CODEC, HOST, HOUR, MINUTE, PORT, SECOND

__all__ = ["Embedder", "Joiner", "Paramserver", "Trainer"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Joiner:
    """The joiner: joins impressions and actions to samples."""

    name: str = option(
        "deployment",
        "name of this joiner among those that share a model's partitions (on Kafka; the embedded log has one "
        "joiner); a process that replaces another has its name; without it, host name and process id",
        Text("1 to 100 letters, digits, . - and _", r"[A-Za-z0-9._-]{1,100}"),
        default="",
    )
    admin_port: int = option("deployment", "health and metrics; 0 takes a free one", PORT, default=7010)
    read_records: int = option(
        "deployment", "records read from the log at once", Integer(1, 1_000_000), default=8_192
    )
    commit_interval_ms: int = option(
        "deployment",
        "interval of writes of samples, so also the longest wait of a decided sample; 0: by the log, 20 ms "
        "embedded, 200 ms on Kafka, where each is a transaction",
        Duration(0, MINUTE),
        key="commit_interval",
        default=0,
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class Trainer:
    """The trainer: with embedder and shard in its process, or a rank beside such processes."""

    admin_port: int = option("deployment", "health and metrics; 0 takes a free one", PORT, default=7011)
    batches: Literal["own", "shards", "embedders"] = option(
        "deployment",
        "own: embedder and shard are in this process; shards: rows are in paramserver processes, and this "
        "process looks them up ahead; embedders: batches with their rows come from embedder processes. The "
        "control topic has the addresses of shards and embedders; several trainers then share the work as "
        "ranks",
        Choice(("own", "shards", "embedders")),
        default="own",
    )
    rows: Literal["fp32", "bf16", "fp16", "int8"] = option(
        "deployment", "encoding of rows from the shards, with batches = shards", CODEC, default="fp32"
    )
    gradients: Literal["fp32", "bf16", "fp16", "int8"] = option(
        "deployment", "encoding of gradients to embedder processes or shards", CODEC, default="fp32"
    )
    memory_bytes: int = option(
        "deployment",
        "memory for rows with their indexes in a trainer that holds them itself (batches = own); above it "
        "the least recently used are evicted, table by table. Tables with max_rows keep that bound; the "
        "others share the remaining memory evenly. 0: a quarter of the machine's memory or of the cgroup's "
        "limit; inference holds the same rows in its own process",
        Integer(0, 1 << 46),
        default=0,
    )
    device: str = option(
        "deployment",
        "device of the network of kinds dlrm, deepfm, dcnv2 and classes of your own: cpu, cuda, or cuda:N. "
        "Rows stay in main memory; all ranks of a model use one kind of device",
        Text("cpu, cuda or cuda:N", r"cpu|cuda(:[0-9]{1,2})?"),
        default="cpu",
    )
    advertised_host: str = option(
        "deployment",
        "host at which other ranks connect to this one; without it, the bind address",
        HOST,
        default="",
    )
    rank_answer_ms: int = option(
        "deployment",
        "time-out of a rank's response during a step; the others then continue without it",
        Duration(100, MINUTE),
        key="rank_answer",
        default=3 * SECOND,
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class Embedder:
    """The embedder as a process beside shards: sends batches with their rows to trainers."""

    name: str = option(
        "deployment",
        "name of this embedder among those of a model; a process that replaces another has its name",
        Text("1 to 60 letters, digits, - and _", r"[A-Za-z0-9_-]{1,60}"),
        default="embedder-0",
    )
    port: int = option("deployment", "gRPC; 0 takes a free one", PORT, default=7030)
    advertised_host: str = option(
        "deployment", "host at which trainers connect; without it, the bind address", HOST, default=""
    )
    admin_port: int = option("deployment", "health and metrics; 0 takes a free one", PORT, default=7031)
    rows: Literal["fp32", "bf16", "fp16", "int8"] = option(
        "deployment", "encoding of rows from the shards and to the trainers", CODEC, default="fp32"
    )
    gradients: Literal["fp32", "bf16", "fp16", "int8"] = option(
        "deployment", "encoding of gradients to the shards", CODEC, default="fp32"
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class Paramserver:
    """A shard of the rows as a process; without one the trainer holds all rows itself."""

    name: str = option(
        "deployment",
        "name of this shard among those of a model; a process that replaces another has its name",
        Text("1 to 60 letters, digits, - and _", r"[A-Za-z0-9_-]{1,60}"),
        default="shard-0",
    )
    port: int = option("deployment", "gRPC; 0 takes a free one", PORT, default=7020)
    advertised_host: str = option(
        "deployment",
        "host at which embedders and trainers connect; without it, the bind address",
        HOST,
        default="",
    )
    admin_port: int = option("deployment", "health and metrics; 0 takes a free one", PORT, default=7021)
    memory_bytes: int = option(
        "deployment",
        "memory for its rows with their indexes; a full shard claims no slices and answers no lookups of "
        "training, and reports this, until slices have moved to shards with free memory. Flushes and "
        "messages may need as much again. 0: no limit",
        Integer(0, 1 << 46),
        default=0,
    )
    evict_bytes: int = option(
        "deployment",
        "above this many bytes of rows with their indexes, a shard evicts the least recently used, table by "
        "table, as a trainer that holds rows itself does. Tables with max_rows keep that bound; the others "
        "share the remaining memory evenly. At most 8/10 of memory_bytes, so that eviction begins before the "
        "shard is full. 0: no row is evicted for memory",
        Integer(0, 1 << 46),
        default=0,
    )
    rebalance_unevenness: float = option(
        "deployment",
        "slices move to balance load once a shard's load differs from its fair share by more than this part, "
        "until all shards are within half of it. A large number: slices move only when shards come or go",
        Number(0.05, 1e6),
        default=0.25,
    )
    rebalance_interval_ms: int = option(
        "deployment",
        "period over which load is measured, and least time between two moves for load alone; a peak shorter "
        "than half of it moves no slice",
        Duration(SECOND, 24 * HOUR),
        key="rebalance_interval",
        default=MINUTE,
    )
