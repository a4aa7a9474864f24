"""`freshet peek TOPIC`: records of a topic in readable form."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Mapping
from difflib import get_close_matches
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click
import orjson

from freshet.cli.options import examples, folder_option
from freshet.errors import ConfigError, Corrupt, Unavailable
from freshet.process.run_state import existing_folder
from freshet.terminal import emit

if TYPE_CHECKING:
    from freshet.config.avro.schema import Written
    from freshet.config.settings import Settings
    from freshet.config.spec.model import Stream
    from freshet.log import EventLog
    from freshet.types import TopicPartition

OFFSETS = 10**15
"""Upper bound of offsets."""

Decode = Callable[[bytes], Any]


@click.command(
    epilog=examples(
        "freshet peek",
        "freshet peek news.measures -n 1",
        "freshet peek impressions --partition 3 --from 1200 --json",
    )
)
@click.argument("topic", required=False)
@folder_option
@click.option(
    "-n",
    "--records",
    type=click.IntRange(1, OFFSETS),
    default=5,
    show_default=True,
    help="Number of records per partition, the newest by default.",
)
@click.option("--partition", type=int, help="One partition; by default all.")
@click.option(
    "--from", "start", type=click.IntRange(0, OFFSETS), help="First offset, instead of the newest records."
)
@click.option("--json", "as_json", is_flag=True, help="Print a JSON object a line, for each record or topic.")
def command(
    topic: str | None, folder: Path, records: int, partition: int | None, start: int | None, as_json: bool
) -> None:
    """Print records of TOPIC; without TOPIC, list the topics with their sizes.

    The log is that of FRESHET_COMMON_LOG_URL, by default the run folder's.
    """
    from freshet.adapters import open_eventlog
    from freshet.config.settings import load_settings

    settings = load_settings(run_folder=folder)
    common = settings.common
    if common.log_url == common.run.log_url:
        existing_folder(folder)
    log = open_eventlog(common.log_url)
    try:
        if topic is None:
            _print_topics(log, as_json)
            return
        if topic not in log.topics():
            names = ", ".join(sorted(log.topics())) or "none: the log is empty"
            near = get_close_matches(topic, log.topics(), 1)
            hint = f"did you mean {near[0]}?" if near else "`freshet peek`, without a topic, lists them"
            raise ConfigError("peek", "TOPIC", topic, f"a topic of this log ({names})", hint)
        decode = _decoder(log, topic, settings)
        found = 0
        for at in _partitions(log, topic, partition):
            for line in _lines(log, at, records, start, decode):
                found += 1
                emit(line, as_json=as_json, text=record_text(line))
        if not found:
            click.echo(f"{topic} holds no records yet" if start is None else _none_from(start), err=True)
    finally:
        log.close()


def _print_topics(log: EventLog, as_json: bool) -> None:
    from freshet.types import TopicPartition

    if not log.topics():
        click.echo("the log holds no topics yet; services create them when they start", err=True)
    for name, info in sorted(log.topics().items()):
        bounds = [log.bounds(TopicPartition(name, p)) for p in range(info.partitions)]
        held = sum(b.end - b.start for b in bounds)
        line = {"topic": name, "partitions": info.partitions, "offsets": held, "log_id": str(info.log_id)}
        text = f"{name:40} {info.partitions:3} partitions {held:12} offsets"
        emit(line, as_json=as_json, text=text)


def _none_from(start: int) -> str:
    return f"no records at offset {start} or after it; without --from the newest are shown"


def _partitions(log: EventLog, topic: str, partition: int | None) -> list[TopicPartition]:
    from freshet.types import TopicPartition

    count = log.topics()[topic].partitions
    if partition is not None and not 0 <= partition < count:
        raise ConfigError("peek", "--partition", partition, f"0 to {count - 1}")
    return [TopicPartition(topic, p) for p in ([partition] if partition is not None else range(count))]


def _lines(
    log: EventLog, at: TopicPartition, count: int, start: int | None, decode: Decode
) -> Iterator[Mapping[str, Any]]:
    if start is None:  # on Kafka every second offset may be a transaction marker, which is no record
        bounds = log.bounds(at)
        newest = _lines(log, at, 2 * count, max(bounds.start, bounds.end - 2 * count), decode)
        yield from deque(newest, count)
        return
    bounds, position = log.bounds(at), start
    reader = log.reader()
    try:
        reader.assign({at: position})
        left = count
        while left > 0 and position < bounds.end:
            for _, records in reader.poll(left, 1.0):
                for i in range(len(records)):
                    yield {
                        "partition": at.partition,
                        "offset": int(records.offsets[i]),
                        "time_ms": int(records.times_ms[i]),
                        "key": records.keys[i].decode(errors="replace"),
                        "value": _decoded_or_error(decode, records.values[i]),
                    }
                left -= len(records)
                position = records.next_offset
    finally:
        reader.close()


def _decoded_or_error(decode: Decode, value: bytes) -> Any:
    """Decode a record; return the reason in its place if it cannot be decoded. Raises Unavailable."""
    try:
        return decode(value)
    except Unavailable:
        raise
    except Exception as error:  # arbitrary bytes can raise anything in a decoder
        return {"unreadable": str(error) or repr(error), "bytes": len(value)}


def _decoder(log: EventLog, topic: str, settings: Settings) -> Decode:
    """Return the decoder by the topic's name, which determines the records' format (schemas/README.md), and
    by its stream in the spec that the run folder keeps."""
    if topic.endswith((".samples", ".samples.late")):
        return _block
    if topic.endswith(".rows"):
        return _rows
    from freshet.apps.recorded_spec import kept_spec, load_kept
    from freshet.config.spec.schemas import load_schema, streams_of
    from freshet.log.schema_ids import framed_id

    kept = kept_spec(settings)
    spec = load_kept(kept) if kept.exists() else None
    stream = next((s for s in streams_of(spec) if s.topic == topic), None) if spec else None
    if spec and stream and stream.format == "bare":
        bare = load_schema(spec, stream)
        return lambda value: _fields(bare, value)
    schemas = _schemas(log, settings, stream, kept)

    def decode(value: bytes) -> Any:
        if value[:1] in (b"{", b"["):
            return orjson.loads(value)
        schema_id = framed_id(value)
        if isinstance(schemas, str):
            return {"schema": schema_id, "bytes": value[5:].hex(), "hint": schemas}
        return _fields(schemas(schema_id), value[5:], schema_id)

    return decode


def _schemas(
    log: EventLog, settings: Settings, stream: Stream | None, kept: Path
) -> Callable[[int], Written] | str:
    """Return the schemas by id, or the reason why it is not known which schemas a topic's ids mean.

    Ids of a schema registry and freshet's own both count from 1, so a wrong guess would show fields that no
    record has.
    """
    from freshet.apps.services import external_registry
    from freshet.config.spec.topics import SCHEMAS_TOPIC
    from freshet.log.schema_ids import SchemaRegistry

    external = external_registry(settings)
    if stream is None and (kept.exists() or external is not None):
        how = "has no such topic" if kept.exists() else "does not exist"
        return f"whose schema id it is is not known: {kept} {how}; --folder names the folder of `freshet up`"
    if stream is not None and stream.external:
        return external.get if external else "FRESHET_REGISTRY_URL names the registry that has this schema"
    if SCHEMAS_TOPIC not in log.topics():  # a reader of a log creates no topic
        return f"the log has no topic {SCHEMAS_TOPIC}"
    if stream is None and settings.common.log_url != settings.common.run.log_url:
        click.echo(
            f"{kept} does not exist, so all schema ids are taken for freshet's own; fields of records that"
            " another system writes are not real: with FRESHET_REGISTRY_URL their bytes are shown",
            err=True,
        )
    return SchemaRegistry(log).get


def _fields(schema: Written, payload: bytes, schema_id: int | None = None) -> Any:
    """Decode the fields of a record. Raises Corrupt if bytes remain."""
    import io

    try:
        import fastavro
    except ImportError:
        return {
            "schema": schema_id,
            "bytes": payload.hex(),
            "hint": "pip install fastavro to see the fields",
        }
    from freshet.config.avro.schema import to_json, without_defaults

    data = io.BytesIO(payload)
    found = fastavro.schemaless_reader(data, without_defaults(to_json(schema)), None)
    if rest := len(payload) - data.tell():
        raise Corrupt(
            f"expected a record of schema {schema_id or 'in the spec'}, found {rest} bytes after its fields;"
            " was it written by another schema, or with an id of another registry?"
        )
    return found


def _block(value: bytes) -> Any:
    from freshet.features import read_blocks
    from freshet.types import BytesColumn

    block = read_blocks(BytesColumn.of([value]))
    return {
        "samples": len(block),
        "schema": int(block.schema_ids[0]),
        "times_ms": [int(block.event_times_ms.min()), int(block.event_times_ms.max())],
        "labels": block.labels.tolist()[:8],
        "values": block.values.tolist()[:8],
    }


def _rows(value: bytes) -> Any:
    from freshet.rows.deltas import decode_rows

    delta = decode_rows(value)
    return {
        "table": delta.table,
        "rows": len(delta.keys),
        "removed": len(delta.removed),
        "fence": int(delta.fence),
        "event_time_ms": int(delta.event_time_ms),
    }


def record_text(line: Mapping[str, Any]) -> str:
    """Format a record in one line; escape control characters, since the terminal shows clients' bytes."""
    value = orjson.dumps(line["value"], option=orjson.OPT_NON_STR_KEYS, default=str).decode()
    text = f"{line['partition']}:{line['offset']} {line['key']} {value}"
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in text)
