"""Settings of each service, and of the simulator."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from freshet.config.options import Choice, Duration, Integer, Number, Text, deployment
from freshet.config.settings.common import (
    ADMIN_PORT,
    AUTO,
    BODIES,
    BODY,
    BODY_TIMEOUT,
    CLIENT_REQUESTS,
    CODEC,
    GIB,
    HOST,
    HOSTS,
    HOUR,
    KIB,
    MIB,
    MINUTE,
    PATH,
    PEM,
    PORT,
    SECOND,
    SSD_BYTES,
    SSD_FOLDER,
    Codec,
)


@dataclass(frozen=True, slots=True, kw_only=True)
class GrpcListener:
    """gRPC listener of a service with external clients; it needs the extra `grpc`."""

    grpc_port: int = deployment("gRPC; 0: none", PORT, default=0)
    grpc_cert_file: str = deployment("certificate of the gRPC listener; without it no TLS", PEM, default="")
    grpc_key_file: str = deployment("the private key of the certificate", PEM, default="")
    grpc_ca_file: str = deployment(
        "the authority that signs clients' certificates; without it clients need none", PEM, default=""
    )
    grpc_max_bodies_bytes: int = deployment(
        "memory budget of gRPC messages that are received and processed at once. Each read reserves the size "
        "of the largest message, so this divided by that size is the number of calls and streams read at "
        "once; more wait, and an idle stream ends to release its reservation",
        Integer(MIB, 1 << 40),
        default=256 * MIB,
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class Gateway(GrpcListener):
    """The gateway: accepts events."""

    port: int = deployment("HTTP; 0 takes a free one", PORT, default=7000)
    max_body_bytes: int = deployment(BODY, Integer(KIB, GIB), default=8 * MIB)
    max_bodies_bytes: int = deployment(BODIES, Integer(MIB, 1 << 40), default=128 * MIB)
    max_events: int = deployment(
        "a request with more events is refused with 413", Integer(1, 1_000_000), default=10_000
    )
    client_requests_per_s: float = deployment(CLIENT_REQUESTS, Number(0, 1e9), default=0)
    client_events_per_s: float = deployment(
        "events of one client; a client that exceeds the rate gets 429 until its token bucket refills. 0: no "
        "limit",
        Number(0, 1e9),
        default=0,
    )
    queue_events: int = deployment(
        "events that wait for the log; more get 429 with Retry-After", Integer(1, 10_000_000), default=50_000
    )
    queue_bytes: int = deployment(
        "bytes of events that wait for the log; more get 429 with Retry-After",
        Integer(KIB, 1 << 46),
        default=64 * MIB,
    )
    body_timeout_ms: int = deployment(BODY_TIMEOUT, Duration(10, HOUR), default=10 * SECOND)
    append_events: int = deployment(
        "events of one append; more wait for the next", Integer(1, 1_000_000), default=20_000
    )
    append_wait_ms: int = deployment(
        "how long an append waits for events of other requests, which then share one write",
        Duration(0, SECOND),
        default=2,
    )
    retry_after_ms: int = deployment(
        "value of the header Retry-After", Duration(SECOND, HOUR), default=SECOND
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class Inference(GrpcListener):
    """The inference server."""

    port: int = deployment("HTTP; 0 takes a free one", PORT, default=7001)
    client_requests_per_s: float = deployment(CLIENT_REQUESTS, Number(0, 1e9), default=0)
    start_wait_ms: int = deployment(
        "how long a rank request waits for rows and a version while the server starts; then it gets 503. Use "
        "0ms behind a proxy that retries at another server",
        Duration(0, MINUTE),
        default=5 * SECOND,
    )
    max_candidates: int = deployment(
        "a request with more is refused with 413", Integer(1, 1_000_000), default=10_000
    )
    batch_budget_ms: int = deployment(
        "waiting rank requests are scored together up to this expected duration; 0: one by one",
        Duration(0, SECOND),
        default=5,
    )
    queue_wait_ms: int = deployment(
        "longest expected wait of a request in the queue; above it 429 with Retry-After, over gRPC "
        "RESOURCE_EXHAUSTED with retry-after-ms. 0: no bound",
        Duration(0, HOUR),
        default=2 * SECOND,
    )
    max_body_bytes: int = deployment(BODY, Integer(KIB, GIB), default=16 * MIB)
    max_bodies_bytes: int = deployment(BODIES, Integer(MIB, 1 << 40), default=256 * MIB)
    body_timeout_ms: int = deployment(BODY_TIMEOUT, Duration(10, HOUR), default=10 * SECOND)
    queue_served: int = deployment(
        "served events that wait for the log; more are dropped and counted, and the response is sent anyway",
        Integer(1, 10_000_000),
        default=100_000,
    )
    queue_served_bytes: int = deployment(
        "bytes of served events that wait for the log; more are dropped and counted",
        Integer(KIB, 1 << 46),
        default=64 * MIB,
    )
    memory_bytes: int = deployment(
        "memory for rows with their indexes, with ssd_folder; while rows are read from the row store anew, "
        "twice as much memory and disk. 0: all rows are in memory",
        Integer(0, 1 << 46),
        default=0,
    )
    ssd_folder: str = deployment(SSD_FOLDER.format("memory_bytes"), PATH, default="")
    ssd_bytes: int = deployment(SSD_BYTES, Integer(0, 1 << 50), default=0)
    rows_wait_ms: int = deployment(
        "how long a request waits for rows on disk; then it is scored without them, and its answer has their "
        "number (`defaulted_rows`)",
        Duration(1, MINUTE),
        default=20,
    )
    follow_wait_ms: int = deployment(
        "longest sleep between reads of changed rows", Duration(1, MINUTE), default=20
    )
    version_poll_ms: int = deployment(
        "interval of reads of the alias `stable` from the version store", Duration(10, MINUTE), default=200
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class Console:
    """The console: a web page with the state of the services, the quality of predictions and the versions."""

    port: int = deployment("HTTP; 0 takes a free one", PORT, default=7002)
    token: str = deployment(
        "token for promote and rollback; without it, the one in state/console.token of the run folder",
        Text("16 to 200 letters, digits, - and _", r"[A-Za-z0-9_-]{16,200}"),
        default="",
    )
    token_file: str = deployment(
        "a file with that token, such as a mounted secret; not together with FRESHET_CONSOLE_TOKEN",
        PATH,
        default="",
    )
    host: str = deployment(
        "host names that only the console accepts, besides those of FRESHET_COMMON_HOSTS; separated by "
        "commas",
        HOSTS,
        default="",
    )
    services: str = deployment(
        "HTTP addresses of the services, if not on this machine at their own ports: role=host:port, "
        "separated by commas; a role may occur several times, IPv6 addresses need brackets",
        Text("role=host:port with commas between", longest=50_000),
        default="",
    )
    poll_ms: int = deployment(
        "interval of status requests to the services", Duration(50, MINUTE), default=SECOND
    )
    vitals_ms: int = deployment(
        "interval of writes of rates, lags and memory to the topic of measures",
        Duration(100, HOUR),
        default=5 * SECOND,
    )
    trace_ms: int = deployment(
        "pause between two actions that are traced to the served rows",
        Duration(100, HOUR),
        default=3 * SECOND,
    )
    history_ms: int = deployment(
        "length of the page's history; at start measures and versions are read from so far back",
        Duration(MINUTE, 7 * 24 * HOUR),
        default=24 * HOUR,
    )
    max_streams: int = deployment(
        "pages with live updates at once, one more gets 503; also requests for history at once, one more "
        "gets 429",
        Integer(1, 10_000),
        default=64,
    )
    max_body_bytes: int = deployment(BODY, Integer(KIB, GIB), default=MIB)
    max_bodies_bytes: int = deployment(BODIES, Integer(MIB, 1 << 40), default=16 * MIB)
    body_timeout_ms: int = deployment(BODY_TIMEOUT, Duration(10, HOUR), default=10 * SECOND)


@dataclass(frozen=True, slots=True, kw_only=True)
class Simulator:
    """The simulator of `freshet simulate` and `freshet demo`."""

    admin_port: int = deployment(ADMIN_PORT, PORT, default=7012)


@dataclass(frozen=True, slots=True, kw_only=True)
class Joiner:
    """The joiner: joins impressions and actions to samples."""

    name: str = deployment(
        "name of this joiner among those that share a model's partitions (on Kafka; the embedded log has one "
        "joiner); a process that replaces another has its name; without it, host name and process id",
        Text("1 to 100 letters, digits, . - and _", r"[A-Za-z0-9._-]{1,100}"),
        default="",
    )
    admin_port: int = deployment(ADMIN_PORT, PORT, default=7010)
    read_records: int = deployment("records read from the log at once", Integer(1, 1_000_000), default=8_192)
    commit_interval_ms: int = deployment(
        "interval of writes of samples, so also the longest wait of a decided sample; 0: by the log, 20 ms "
        "embedded, 200 ms on Kafka, where each is a transaction",
        Duration(0, MINUTE),
        default=0,
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class Trainer:
    """The trainer: with embedder and shard in its process, or a rank beside such processes."""

    admin_port: int = deployment(ADMIN_PORT, PORT, default=7011)
    batches: Literal["own", "shards", "embedders"] = deployment(
        "own: embedder and shard are in this process; shards: rows are in paramserver processes, and this "
        "process looks them up ahead; embedders: batches with their rows come from embedder processes. The "
        "control topic has the addresses of shards and embedders; several trainers then share the work as "
        "ranks",
        Choice(("own", "shards", "embedders")),
        default="own",
    )
    rows: Codec = deployment(
        f"encoding of rows from embedder processes or shards; {AUTO}", CODEC, default="auto"
    )
    gradients: Codec = deployment(
        "encoding of gradients to embedder processes or shards; auto as for rows", CODEC, default="auto"
    )
    memory_bytes: int = deployment(
        "memory for rows with their indexes in a trainer that holds them itself (batches = own); above it "
        "the least recently used are evicted, table by table. Tables with max_rows keep that bound; the "
        "others share the remaining memory evenly. 0: a quarter of the machine's memory or of the cgroup's "
        "limit; inference holds the same rows in its own process",
        Integer(0, 1 << 46),
        default=0,
    )
    ssd_folder: str = deployment(SSD_FOLDER.format("memory_bytes"), PATH, default="")
    ssd_bytes: int = deployment(SSD_BYTES, Integer(0, 1 << 50), default=0)
    device: str = deployment(
        "device of the network of kinds dlrm, deepfm, dcnv2 and classes of your own: cpu, cuda, or cuda:N. "
        "Rows stay in main memory; all ranks of a model use one kind of device",
        Text("cpu, cuda or cuda:N", r"cpu|cuda(:[0-9]{1,2})?"),
        default="cpu",
    )
    advertised_host: str = deployment(
        "host at which other ranks connect to this one; without it, the bind address", HOST, default=""
    )
    site: str = deployment(
        "mode async: the rank's site, such as a host or a zone; ranks of one site sum their gradients in "
        "every step, and the sites average their dense states. Without it each rank is a site of its own",
        Text("at most 60 letters, digits, ., - and _", r"[A-Za-z0-9._-]{0,60}"),
        default="",
    )
    rank_answer_ms: int = deployment(
        "time-out of a rank's response during a step; the others then continue without it",
        Duration(100, MINUTE),
        default=3 * SECOND,
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class Embedder:
    """The embedder as a process beside shards: sends batches with their rows to trainers."""

    name: str = deployment(
        "name of this embedder among those of a model; a process that replaces another has its name",
        Text("1 to 60 letters, digits, - and _", r"[A-Za-z0-9_-]{1,60}"),
        default="embedder-0",
    )
    port: int = deployment("gRPC; 0 takes a free one", PORT, default=7030)
    advertised_host: str = deployment(
        "host at which trainers connect; without it, the bind address", HOST, default=""
    )
    admin_port: int = deployment(ADMIN_PORT, PORT, default=7031)
    rows: Codec = deployment(f"encoding of rows from the shards; {AUTO}", CODEC, default="auto")
    gradients: Codec = deployment(
        "encoding of gradients to the shards; auto as for rows", CODEC, default="auto"
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class Paramserver:
    """A shard of the rows as a process; without one the trainer holds all rows itself."""

    name: str = deployment(
        "name of this shard among those of a model; a process that replaces another has its name",
        Text("1 to 60 letters, digits, - and _", r"[A-Za-z0-9_-]{1,60}"),
        default="shard-0",
    )
    port: int = deployment("gRPC; 0 takes a free one", PORT, default=7020)
    advertised_host: str = deployment(
        "host at which embedders and trainers connect; without it, the bind address", HOST, default=""
    )
    admin_port: int = deployment(ADMIN_PORT, PORT, default=7021)
    memory_bytes: int = deployment(
        "memory for its rows with their indexes; a full shard claims no slices and answers no lookups of "
        "training, and reports this, until slices have moved to shards with free memory. Flushes and "
        "messages may need as much again. 0: no limit",
        Integer(0, 1 << 46),
        default=0,
    )
    evict_bytes: int = deployment(
        "above this many bytes of rows with their indexes, a shard evicts the least recently used, table by "
        "table, as a trainer that holds rows itself does. Tables with max_rows keep that bound; the others "
        "share the remaining memory evenly. At most 8/10 of memory_bytes, so that eviction begins before the "
        "shard is full. 0: no row is evicted for memory",
        Integer(0, 1 << 46),
        default=0,
    )
    ssd_folder: str = deployment(SSD_FOLDER.format("evict_bytes"), PATH, default="")
    ssd_bytes: int = deployment(SSD_BYTES, Integer(0, 1 << 50), default=0)
    rebalance_unevenness: float = deployment(
        "slices move to balance load once a shard's load differs from its fair share by more than this part, "
        "until all shards are within half of it. A large number: slices move only when shards come or go",
        Number(0.05, 1e6),
        default=0.25,
    )
    rebalance_interval_ms: int = deployment(
        "period over which load is measured, and least time between two moves for load alone; a peak shorter "
        "than half of it moves no slice",
        Duration(SECOND, 24 * HOUR),
        default=MINUTE,
    )
