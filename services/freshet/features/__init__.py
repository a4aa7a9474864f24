"""Events to columns to keys: one implementation for training, replay and serving (a facade over the
native core).

Every way in ends in Avro bytes: JSON and csv/parquet columns are encoded by the same schema first, so
that keys cannot differ between training, replay and serving. From Avro bytes there is one way on, the
native walker.
"""

from freshet.features.blocks import (
    BlockColumns,
    add_frames,
    encode_block,
    encode_blocks,
    frame_ids,
    read_blocks,
    rows_by_id,
    strip_frames,
    take,
)
from freshet.features.decoder import ABSENT_KEY, Decoded, GroupKeys, SampleDecoder
from freshet.features.encoder import Column, ColumnEncoder, EncodedRows
from freshet.features.events import EventColumn, EventColumns, EventExtractor
from freshet.features.hashing import (
    cross_seed,
    hash_text,
    key_of,
    keys_of,
    partition_of,
    row_salt,
    table_salt,
)
from freshet.features.program import written_path
from freshet.features.requests import DecodedRequests, RequestDecoder
from freshet.features.transcode import (
    AvroValidator,
    EventIntake,
    JsonTranscoder,
    RefusedEvent,
    TakenBodies,
    Transcoded,
)

__all__ = [
    "ABSENT_KEY",
    "AvroValidator",
    "BlockColumns",
    "Column",
    "ColumnEncoder",
    "Decoded",
    "DecodedRequests",
    "EncodedRows",
    "EventColumn",
    "EventColumns",
    "EventExtractor",
    "EventIntake",
    "GroupKeys",
    "JsonTranscoder",
    "RefusedEvent",
    "RequestDecoder",
    "SampleDecoder",
    "TakenBodies",
    "Transcoded",
    "add_frames",
    "cross_seed",
    "encode_block",
    "encode_blocks",
    "frame_ids",
    "hash_text",
    "key_of",
    "keys_of",
    "partition_of",
    "read_blocks",
    "row_salt",
    "rows_by_id",
    "strip_frames",
    "table_salt",
    "take",
    "written_path",
]
