"""The native core. Arrays are C-contiguous numpy arrays of exactly these types; calls on whole batches release
the GIL."""

from collections.abc import Mapping, Sequence
from typing import Any, TypeAlias

from numpy import uint16
from numpy.typing import NDArray

from freshet.types import F32, F64, I32, I64, U8, U32, U64

def instruction_set() -> str: ...

# --- tables: see freshet.tables, which checks, names and documents

class Plan:
    def __init__(self, buckets: int) -> None: ...
    def run(self, keys: U64, feature_starts: U32, feature_tables: U8) -> None: ...
    @property
    def unique(self) -> int: ...
    @property
    def keys(self) -> U64: ...
    @property
    def tables(self) -> U8: ...
    @property
    def positions(self) -> I32: ...
    @property
    def bucket_starts(self) -> U32: ...
    @property
    def order(self) -> U32: ...
    @property
    def order_starts(self) -> U32: ...

_Slot: TypeAlias = tuple[int, int, float, str, Mapping[str, float]]  # start, width, init, rule, parameters

class RowSteps:
    def __init__(self, slots: Sequence[_Slot]) -> None: ...
    def step(
        self,
        keys: U64,
        tables: U8,
        bucket_starts: U32,
        values: F32,
        states: F32,
        their_keys: U64,
        their_tables: U8,
        their_bucket_starts: U32,
        gradients: F32,
    ) -> int: ...
    @property
    def state_floats(self) -> int: ...

class ColdFault(OSError): ...

class Store:
    def __init__(
        self,
        groups: Sequence[tuple[Sequence[int], Sequence[_Slot], bool]],  # tables, slots, last slot in bf16
        tables: Sequence[tuple[int, int, int, int]],  # id, ttl_ms, max_rows, admission
        buckets: int,
        partitions: int,
        seed: int,
        serving: bool,
        publish: bool,
        flush: bool,
        held: bool,
    ) -> None: ...
    def lookup(
        self,
        group: int,
        keys: U64,
        tables: U8,
        bucket_starts: U32,
        out: F32,
        create: bool,
        found: U8 | None,
        touched: U32 | None = None,
        states: F32 | None = None,
        known_pushes: I64 | None = None,
    ) -> int: ...
    def push(
        self,
        ranges: I64,
        clock_ms: int,
        groups: Sequence[tuple[int, U64, U8, U32, F32]],
        owned: U8 | None = None,
    ) -> int: ...
    def set_applied(self, bucket: int, offsets: I64, clock_ms: int) -> None: ...
    def applied_of(self, bucket: int) -> I64: ...
    def clock_of(self, bucket: int) -> int: ...
    def applied(self) -> list[set[int]]: ...
    def held(self) -> list[int]: ...
    def drop_bucket(self, bucket: int) -> None: ...
    def begin_loading(self, bucket: int, offsets: I64, clock_ms: int, fence: int) -> None: ...
    def unread(
        self, groups: Sequence[tuple[int, U64, U8, U32]]
    ) -> tuple[I64, U8, U64, I64]: ...  # buckets, tables, keys, fences
    def import_unread(self, directory: U8, body: U8, start: int, fence: int) -> None: ...
    def settle(self, buckets: I64, tables: U8, keys: U64, fence: int) -> None: ...
    def finish_loading(self, bucket: int, fence: int) -> bool: ...
    def keep_cold(self, folder: str, memory_bytes: int, disk_bytes: int) -> None: ...
    def fetch(self, group: int, keys: U64, tables: U8, bucket_starts: U32) -> U8: ...
    def cold_counts(self) -> dict[str, Any]: ...
    def check_cold(self) -> None: ...
    def collect_flush(
        self, buckets: Sequence[int], whole: bool
    ) -> tuple[I64, I64, I64, I64, U8, U8]: ...  # the last two: directory and body of runs
    def import_runs(self, directory: U8, body: U8, start: int) -> None: ...
    def unpack_runs(self, directory: U8, body: U8, start: int) -> list[tuple[int, U64, F32, U32]]: ...
    def collect_publish(self, max_rows: int) -> tuple[list[tuple[int, U64, F32, U64]], int, int, int]: ...
    def collect_inexact(self, max_rows: int) -> tuple[list[tuple[int, U64, F32, U64]], int, int, int]: ...
    def inexact(self) -> int: ...
    def round_published(self, bits: int, scalars: Sequence[int]) -> None: ...
    def drained(self) -> int: ...
    def put_back_published(self, table: int, keys: U64, removed: U64) -> None: ...
    def pending(self, consumer: int) -> int: ...
    def import_rows(self, table: int, keys: U64, records: U8) -> None: ...
    def export_rows(self, table: int, keys: U64) -> tuple[U8, U8]: ...
    def import_values(
        self,
        table: int,
        keys: U64,
        values: F32,
        clock_ms: int,
        touched: U32 | None = None,
    ) -> None: ...
    def remove(self, table: int, keys: U64) -> int: ...
    def evict(self, now_ms: int, budget: int) -> tuple[int, int, bool]: ...
    def rows(self, table: int) -> int: ...
    def evicted(self, table: int) -> int: ...
    def bytes(self) -> int: ...
    def counts(self) -> tuple[int, int, int, int]: ...
    def record_bytes(self, group: int) -> int: ...
    def packed_bytes(self, group: int) -> int: ...

# --- runs of packed rows: see freshet.tables.runs

def merge_runs(
    newest_first: Sequence[tuple[U8, U8, int]], widths: U32, keep_removed: bool, most_bytes: int
) -> tuple[U8, U8, int, str]: ...  # directory, body, the source that is wrong, and why; "" if none is
def pick_runs(
    directory: U8, body: U8, start: int, widths: U32, buckets: I64, tables: U8, keys: U64
) -> tuple[U8, U8]: ...
def runs_fault(directory: U8, body: U8, start: int, widths: U32) -> str: ...

# --- rows as pages of Redis hashes: see freshet.tables.runs

def page_writes(
    directory: U8,
    body: U8,
    start: int,
    widths: U32,
    buckets: I64,
    seqs: I64,
    whole: bool,
    page_bytes: int,
) -> tuple[U8, I64, I64, str]: ...  # arguments, ends of pages, how many of each bucket; what is wrong
def runs_of_pages(
    buckets: Sequence[tuple[int, list[bytes]]], widths: U32, most_bytes: int
) -> tuple[U8, U8, int, str]: ...  # directory, body, the bucket that is wrong, and why; "" if none is

# --- join: see freshet.joiner.core

def join_sample_id(high: int, low: int, label: int) -> int: ...
def join_sample_ids(keys: U64, labels: int) -> I64: ...  # (N, 2) keys -> (N, labels)
def join_kept(sample: int, share: float) -> bool: ...
def join_counters() -> tuple[list[str], list[str]]: ...

class JoinState:
    def __init__(
        self,
        windows_ms: list[int],
        given: list[int],
        numeric: list[bool],
        aggregate_labels: list[int],
        aggregate_kinds: list[int],
        grace_ms: int,
        require_shown: bool,
        early: bool,
        negatives: float,
        ramp: int = 0,
    ) -> None: ...
    def on_served(
        self,
        data: U8,
        offsets: I64,
        requests: U64,
        schemas: U32,
        begins: I64,
        prefix_ends: I64,
        suffix_begins: I64,
        ends: I64,
        events: U32,
        times: I64,
        keys: U64,
        element_begins: I64,
        element_ends: I64,
        outcomes: U8,
    ) -> None: ...
    def on_shown(self, offsets: I64, times: I64, keys: U64, outcomes: U8) -> None: ...
    def on_actions(
        self, offsets: I64, times: I64, keys: U64, ids: U64, masks: U32, values: F64, outcomes: U8
    ) -> None: ...
    def advance(self, watermark: int) -> None: ...
    def due(self, watermark: int) -> bool: ...
    def restart_at(self, watermark: int) -> None: ...
    def set_back(self, watermark: int) -> None: ...
    def end_recall(self) -> None: ...
    def begin_at(self, began: int) -> None: ...
    @property
    def began(self) -> int | None: ...
    def ready(self, late: bool) -> tuple[int, int]: ...
    def take(
        self,
        late: bool,
        ids: I64,
        times: I64,
        requests: U64,
        values: F32,
        weights: F32,
        labels: U8,
        schemas: U32,
        ends: I64,
        payload: U8,
        aggregates: F64,
    ) -> None: ...
    def no_value(self, label: int, matched: bool) -> None: ...
    def discard(self) -> None: ...
    def low(self, topic: int, next: int) -> int: ...
    def counters(self, out: I64) -> None: ...
    def set_counters(self, counters: I64) -> None: ...
    def pending(self, out: I64) -> None: ...
    @property
    def waiting(self) -> int: ...
    @property
    def ids(self) -> int: ...
    @property
    def payload_bytes(self) -> int: ...
    @property
    def horizon_ms(self) -> int: ...

# --- model: the dense part

_Group = tuple[Any, ...]  # rows (U, S) f32, positions (N,) i32, feature_starts (F + 1,) u32, list_ends
_GroupPlan = tuple[int, int, int, int, int, int, int, int, list[tuple[int, bool]]]
_InputPlan = tuple[int, int, int, int, list[tuple[bool, int]], list[_GroupPlan]]

def kernel_names() -> list[str]: ...

class HedgeModel:
    def __init__(
        self,
        *,
        input: _InputPlan,
        losses: Sequence[int],
        early: Sequence[bool],
        experts: Sequence[tuple[int, bool, bool, float, bool, bool, bool]],
        hidden: Sequence[int],
        discount: float,
        dense_rate: float,
        momentum: float,
        warmup_steps: int,
        batch_rows: int,
        bias_rate: float,
        training: bool,
        bf16: bool,
        kernels: str | None = None,
    ) -> None: ...
    steps: int
    variance_steps: int
    @property
    def not_finite(self) -> tuple[int, int]: ...
    @property
    def kernels(self) -> str: ...
    def freeze_variance(self) -> None: ...
    def array(self, name: str) -> NDArray[Any]: ...
    def refresh(self) -> None: ...
    def finite(self) -> bool: ...
    def mixture(self) -> list[float]: ...
    def step(self, lanes: Sequence[HedgeLane]) -> None: ...
    def begin_step(self, lanes: Sequence[HedgeLane]) -> None: ...
    def step_part(self, lanes: Sequence[HedgeLane], part: int, parts: int) -> None: ...

class Gate:
    def __init__(self, parties: int) -> None: ...
    def arrive(self) -> int: ...
    def open(self) -> None: ...
    def abort(self) -> None: ...

class InSteps: ...

def dense_steps(rows: int, step: int) -> int: ...

class HedgeLane:
    def __init__(self, model: HedgeModel, training: bool) -> None: ...
    def forward_backward(
        self,
        model: HedgeModel,
        groups: list[_Group],
        dense: F32,
        label: U8,
        value: F32,
        weight: F32,
        learn_dense: bool,
        gradients: list[F32],
        predictions: F32,
        losses: F64,
        rows: F64,
    ) -> None: ...
    def begin_steps(
        self,
        model: HedgeModel,
        groups: list[_Group],
        dense: F32,
        label: U8,
        value: F32,
        weight: F32,
        learn_dense: bool,
        dense_steps: bool,
        steps: list[RowSteps],
        copies: list[F32],
        states: list[F32],
        predictions: F32,
    ) -> InSteps: ...
    def advance_steps(self, batch: InSteps) -> bool: ...
    def end_steps(self, batch: InSteps, losses: F64, rows: F64) -> list[int]: ...
    def take_steps(self, group: int, counts: U32, gradients: F32) -> None: ...
    def score(
        self,
        model: HedgeModel,
        groups: list[_Group],
        dense: F32,
        predictions: F32,
        requests: tuple[U32, Sequence[U8]] | None = None,
    ) -> None: ...
    def add(self, other: HedgeLane) -> None: ...
    def clear(self) -> None: ...
    def gradients(self) -> F32: ...
    def sums(self) -> F64: ...

RanTuple = tuple[int, int, int, int, int, list[float]]  # ended, trained, pushed, skipped, bucket, seconds

class HedgeLoop:
    def __init__(
        self,
        store: Store,
        model: HedgeModel,
        tables: Sequence[Sequence[int]],
        lanes: int,
        sync: bool,
        in_steps: bool,
    ) -> None: ...
    def run(
        self,
        lane: int,
        groups: Sequence[tuple[U64, U32, Sequence[U32 | None]]],
        dense: F32,
        label: U8,
        value: F32,
        weight: F32,
        times_ms: I64,
        ends: I64,
        ranges: I64,
        range_ends: I64,
        learn_dense: U8,
        keep: U8,
        predictions: F32,
        moments: I64 | None = None,
    ) -> RanTuple: ...
    def join(self, lane: int) -> RanTuple: ...
    def kept(self, lane: int) -> list[tuple[int, list[tuple[F32, I32, U32, list[U32 | None]]]]]: ...
    def abort(self) -> None: ...
    @property
    def dense_steps(self) -> int: ...

# --- features: hashing, programs, samples, events (bind_features.cpp)

BytesTuple = tuple[U8, I64]
DecodedTuple = tuple[
    int, list[tuple[U64, U32, list[int]]], list[U32], F32, list[U64], F32, I64
]  # size, groups (keys, feature starts, list or -1 of each feature), list ends, dense, segments, served, failures
ExtractedTuple = tuple[
    I64, BytesTuple, I64, U64, U64, U64, I64, I64, list[tuple[F64 | U64, U8]], I64
]  # events, request keys, event index, impressions, requests, ids, times, spans, columns (values, null), failures

def xxh3_64(data: bytes, seed: int, /) -> int: ...
def keys_of_bytes(data: U8, ends: I64, salt: int, /) -> U64: ...
def keys_of_ints(values: I64, salt: int, /) -> U64: ...
def keys_of_doubles(values: F64, salt: int, /) -> U64: ...
def murmur2(key: bytes, /) -> int: ...
def partition_of(data: U8, ends: I64, partitions: int, /) -> I32: ...
def parse_iso_time(text: str, /) -> int | None: ...

class Program:
    def __init__(self, nodes: I64, sinks: U64, words: U64, text: U8, text_ends: I64, /) -> None: ...

class DecodePlan: ...
class EventPlan: ...

def feature_plan(
    groups: Sequence[Sequence[int]],
    segments: Sequence[int],
    columns: int,
    list_max: Sequence[int],
    log1p: Sequence[bool],
    served: int,
    times: Sequence[Sequence[int]],
    crosses: Sequence[Sequence[int]],
    constant_keys: Sequence[Sequence[int | U64]],
    constant_dense: Sequence[int],
    constant_values: Sequence[float],
    /,
) -> DecodePlan: ...
def decode_features(
    plan: DecodePlan,
    programs: Sequence[Program],
    which: I32,
    data: U8,
    ends: I64,
    times_ms: I64,
    serving: bool,
    /,
) -> DecodedTuple: ...
def decode_usual_blocks(
    plan: DecodePlan, program: Program, schema_id: int, data: U8, ends: I64, /
) -> tuple[DecodedTuple, tuple[I64, U64, I64, U8, F32, F32]] | None: ...
def event_plan(
    explode: bool,
    has_id: bool,
    time_in_element: bool,
    id_in_element: bool,
    part_in_element: Sequence[bool],
    column_is_hash: Sequence[bool],
    column_in_element: Sequence[bool],
    /,
) -> EventPlan: ...
def extract_events(
    plan: EventPlan, program: Program, data: U8, ends: I64, framed: bool, /
) -> ExtractedTuple: ...
def splice(data: U8, spans: I64, /) -> BytesTuple: ...

# --- requests (bind_requests.cpp)

class RequestPlan:
    def __init__(
        self,
        decode: DecodePlan,
        explode: bool,
        time_in_element: bool,
        column_in_element: Sequence[bool],
        list_in_element: Sequence[bool],
        dense_in_element: Sequence[bool],
        part_in_element: Sequence[bool],
        /,
    ) -> None: ...
    def check(self, program: Program, /) -> None: ...

def decode_requests(
    plan: RequestPlan, program: Program, data: U8, ends: I64, counts: U32, /
) -> tuple[int, list[tuple[U64, U32, list[int]]], list[U32], F32, I64]: ...

class RequestScorer:
    def __init__(
        self,
        plan: RequestPlan,
        program: Program,
        tables: Sequence[Sequence[int]],
        shared: Sequence[Sequence[int]],
        score: Sequence[tuple[int, float]],
        buckets: int,
        /,
    ) -> None: ...
    def score(
        self, store: Store, model: HedgeModel, lane: HedgeLane, data: U8, ends: I64, counts: U32, /
    ) -> tuple[F32, F32, I64 | None, tuple[U32, U8, U64] | None] | None: ...

# --- rank requests as text (bind_rank.cpp)

def best(scores: F32, k: int, /) -> I64: ...

class RankRules:
    def __init__(
        self,
        candidates: str,
        id: str,
        time: str,
        served: str,
        places: Sequence[str],
        labels: Sequence[str],
        max_candidates: int,
        /,
    ) -> None: ...

class RankText:
    @staticmethod
    def read(
        rules: RankRules,
        request: WriterSchema,
        body: bytes,
        new_id: str,
        now: str,
        logged: WriterSchema | None,
        plan: EventPlan | None,
        program: Program | None,
        latest_ms: int,
    ) -> RankText | None: ...
    def record(self) -> BytesTuple: ...
    @property
    def id(self) -> str: ...
    @property
    def candidates(self) -> int: ...
    @property
    def k(self) -> int: ...
    @property
    def logged_bytes(self) -> int: ...
    @property
    def dry_run(self) -> bool: ...
    def ranked(
        self,
        rules: RankRules,
        indices: I64,
        scores: F32,
        predictions: F32,
        propensity: F32,
        version: int,
        explored: bool,
        log: bool,
        /,
    ) -> tuple[bytes, bytes | None]: ...

# --- bodies of requests to what the log takes (bind_intake.cpp)

IntakeTuple = tuple[
    I64, I32, I64, I64, BytesTuple, BytesTuple
]  # counts a body, partitions, positions, starts by partition, records, keys

def intake_json(
    plan: EventPlan,
    program: Program,
    schema: WriterSchema,
    bodies: list[bytes],
    ignore_unknown: bool,
    prefix: bytes,
    keep_text: bool,
    partitions: int,
    latest_ms: int,
    max_events: int,
    /,
) -> IntakeTuple: ...
def intake_avro(
    plan: EventPlan,
    program: Program,
    schema_id: int,
    bodies: list[bytes],
    lengths: bool,
    partitions: int,
    latest_ms: int,
    max_events: int,
    /,
) -> IntakeTuple: ...
def write_acks(topic: str, counts: I64, partitions: I32, positions: I64, firsts: I64, /) -> list[bytes]: ...

# --- blocks of samples (bind_blocks.cpp)

def read_blocks(
    data: U8, ends: I64, /
) -> tuple[int, str] | tuple[U32, U32, I64, I64, U64, F32, F32, U8, BytesTuple]: ...
def encode_blocks(
    schema_id: int,
    sample_ids: I64,
    times_ms: I64,
    requests: U64,
    values: F32,
    weights: F32,
    labels: U8,
    data: U8,
    ends: I64,
    block_ends: I64,
    /,
) -> BytesTuple: ...
def block_crc32(data: bytes, /) -> int: ...
def crc32(data: U8, crc: int, /) -> int: ...

# --- values of rows in fewer bits (bind_codec.cpp)

def pack_bf16(values: F32, out: NDArray[uint16]) -> None: ...
def unpack_bf16(packed: NDArray[uint16], out: F32) -> None: ...
def pack_fp16(values: F32, out: NDArray[uint16]) -> None: ...
def unpack_fp16(packed: NDArray[uint16], out: F32) -> None: ...
def pack_integers(values: F32, bits: int, asymmetric: bool, scalars: int, seed: int, out: U8) -> None: ...
def unpack_integers(packed: U8, bits: int, asymmetric: bool, scalars: int, out: F32) -> None: ...

class InputLane:
    def __init__(self, input: _InputPlan) -> None: ...
    def gather(
        self, groups: list[_Group], dense: F32, mean: F64, scale: F64, limit: float, x: F32, scalars: F32
    ) -> None: ...
    def reduce(
        self, groups: list[_Group], dense: F32, dx: F32, d_scalars: F32, gradients: list[F32]
    ) -> None: ...

# --- ways into Avro: JSON, columns; the check of Avro (bind_avro.cpp)

TranscodedTuple = tuple[
    BytesTuple, I64, list[tuple[int, int, int, int, str, str, str]], I64, I64
]  # records, events, bad (index, why, node, position, path, found, expected), begin and end of each event's text
ColumnTuple = tuple[int, I64 | F64 | U8, I64, U8]  # kind, values or data, ends, nulls

class WriterSchema:
    def __init__(self, nodes: I64, words: U64, text: U8, text_ends: I64, decimals: I64, /) -> None: ...

def transcode_each(
    schema: WriterSchema, data: U8, ends: I64, ignore_unknown: bool, prefix: bytes, /
) -> TranscodedTuple: ...
def transcode_body(
    schema: WriterSchema, body: bytes, ignore_unknown: bool, prefix: bytes, max_events: int, /
) -> TranscodedTuple: ...
def repeated_name(text: bytes, /) -> str | None: ...
def encode_columns(
    schema: WriterSchema, columns: list[ColumnTuple], source_of: I32, rows: int, /
) -> tuple[BytesTuple, I64, I64]: ...
def validate_avro(program: Program, data: U8, ends: I64, framed: bool, /) -> I64: ...

# --- measures (bind_measures.cpp)

def aucs(starts: I64, positive: F64, negative: F64, out: F64) -> None: ...
def group_samples(
    windows: I64,
    labels: U8,
    label_count: int,
    segments: list[tuple[U64, U64]],
    sums: F64,
    bins: I64,
    counts: F64,
    coarse_bits: int,
) -> tuple[I64, U64, F64, I64, I64, F64]: ...
