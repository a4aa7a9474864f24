"""Settings of the services between the log and the model."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from freshet.config.options import Choice, Duration, Integer, Number, Text, option
from freshet.config.settings.network import CODEC, HOST, HOUR, MINUTE, PORT, SECOND

__all__ = ["Embedder", "Joiner", "Paramserver", "Trainer"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Joiner:
    """Impressions and actions to samples."""

    name: str = option(
        "deployment",
        "tells joiners that share a model's partitions apart (on Kafka; the embedded log has one joiner);"
        " a process that takes the place of another has its name; without it, host name and process id",
        Text("1 to 100 letters, digits, . - and _", r"[A-Za-z0-9._-]{1,100}"),
        default="",
    )
    admin_port: int = option("deployment", "health and metrics; 0 takes a free one", PORT, default=7010)
    read_records: int = option(
        "deployment", "records taken from the log at once", Integer(1, 1_000_000), default=8_192
    )
    commit_interval_ms: int = option(
        "deployment",
        "how often samples are written; also the longest a decided sample waits;"
        " 0: as is good for the log, 20 ms embedded, 200 ms on Kafka, where each is a transaction",
        Duration(0, MINUTE),
        key="commit_interval",
        default=0,
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class Trainer:
    """The trainer: alone with embedder and shard in its process, or a rank among others beside theirs."""

    admin_port: int = option("deployment", "health and metrics; 0 takes a free one", PORT, default=7011)
    batches: Literal["own", "shards", "embedders"] = option(
        "deployment",
        "own: embedder and shard are in this process; shards: rows are in paramserver processes, which this "
        "one asks ahead of time; embedders: batches come with their rows from embedder processes. Shards and "
        "embedders are found in the control topic, and then several trainers share the work as ranks",
        Choice(("own", "shards", "embedders")),
        default="own",
    )
    rows: Literal["fp32", "bf16", "fp16", "int8"] = option(
        "deployment", "how rows travel from the shards, where this process asks them", CODEC, default="fp32"
    )
    gradients: Literal["fp32", "bf16", "fp16", "int8"] = option(
        "deployment", "how gradients travel to embedder processes, or to the shards", CODEC, default="fp32"
    )
    memory_bytes: int = option(
        "deployment",
        "what rows, with their indexes, may take in a trainer that holds them itself (batches = own); beyond "
        "it the least recently used are evicted, table by table. Tables with max_rows keep that; the others "
        "share the rest evenly. 0: a quarter of this machine's memory, or of the cgroup's limit; inference "
        "holds the same rows in its own process",
        Integer(0, 1 << 46),
        default=0,
    )
    device: str = option(
        "deployment",
        "where the network of kinds dlrm, deepfm, dcnv2 and classes of your own computes: cpu, cuda, or "
        "cuda:N. Rows stay in memory; ranks of a model are all on one kind of device",
        Text("cpu, cuda or cuda:N", r"cpu|cuda(:[0-9]{1,2})?"),
        default="cpu",
    )
    advertised_host: str = option(
        "deployment",
        "the host that other ranks reach this one by; without it, the bind address",
        HOST,
        default="",
    )
    rank_answer_ms: int = option(
        "deployment",
        "a rank that is silent for longer during a step is lost to the others, which go on without it",
        Duration(100, MINUTE),
        key="rank_answer",
        default=3 * SECOND,
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class Embedder:
    """Samples with their rows to trainers, as a process of its own beside shards."""

    name: str = option(
        "deployment",
        "tells the embedders of a model apart; a process that takes the place of another has its name",
        Text("1 to 60 letters, digits, - and _", r"[A-Za-z0-9_-]{1,60}"),
        default="embedder-0",
    )
    port: int = option("deployment", "gRPC; 0 takes a free one", PORT, default=7030)
    advertised_host: str = option(
        "deployment", "the host that trainers reach it by; without it, the bind address", HOST, default=""
    )
    admin_port: int = option("deployment", "health and metrics; 0 takes a free one", PORT, default=7031)
    rows: Literal["fp32", "bf16", "fp16", "int8"] = option(
        "deployment", "how rows travel from the shards and to the trainers", CODEC, default="fp32"
    )
    gradients: Literal["fp32", "bf16", "fp16", "int8"] = option(
        "deployment", "how gradients travel to the shards", CODEC, default="fp32"
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class Paramserver:
    """A shard of the rows as a process of its own; without one the trainer holds all rows itself."""

    name: str = option(
        "deployment",
        "tells the shards of a model apart; a process that takes the place of another has its name",
        Text("1 to 60 letters, digits, - and _", r"[A-Za-z0-9_-]{1,60}"),
        default="shard-0",
    )
    port: int = option("deployment", "gRPC; 0 takes a free one", PORT, default=7020)
    advertised_host: str = option(
        "deployment",
        "the host that embedders and trainers reach it by; without it, the bind address",
        HOST,
        default="",
    )
    admin_port: int = option("deployment", "health and metrics; 0 takes a free one", PORT, default=7021)
    memory_bytes: int = option(
        "deployment",
        "what its rows, with their indexes, may take; a shard that is full takes no slices, answers no "
        "lookups of training, and says so, until slices have moved to shards with room. "
        "Leave as much again for flushes and messages. 0: no limit",
        Integer(0, 1 << 46),
        default=0,
    )
    evict_bytes: int = option(
        "deployment",
        "beyond so many bytes of rows, with their indexes, a shard evicts the least recently used, table by "
        "table, as a trainer that holds rows itself does. Tables with max_rows keep that; the others share "
        "the rest evenly. At most 8/10 of memory_bytes, so that the shard is not full before. 0: no row is "
        "evicted for memory",
        Integer(0, 1 << 46),
        default=0,
    )
    rebalance_unevenness: float = option(
        "deployment",
        "slices move for load alone once a shard has this part too much, or too little, of its fair share; "
        "then until all are within half of it. A large number: only when shards come or go",
        Number(0.05, 1e6),
        default=0.25,
    )
    rebalance_interval_ms: int = option(
        "deployment",
        "over which load is measured, and from one plan to the next for load alone; what is over within half "
        "of it moves nothing",
        Duration(SECOND, 24 * HOUR),
        key="rebalance_interval",
        default=MINUTE,
    )
