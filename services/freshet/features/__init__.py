"""Events to columns to keys: one implementation for training, replay and serving, a facade over the native
core.

JSON and columns of csv and Parquet are encoded to Avro by the same schema first. From Avro bytes on there is
one code path, the native walker, so keys cannot differ between training, replay and serving.
"""

from freshet.features.blocks import (
    BlockColumns,
    SampleColumns,
    add_frames,
    encode_blocks,
    frame_ids,
    read_blocks,
    rows_by_id,
    take,
)
from freshet.features.decoder import ABSENT_KEY, Decoded, GroupKeys, SampleDecoder
from freshet.features.encoder import Column, ColumnEncoder
from freshet.features.events import EventColumns, EventExtractor
from freshet.features.hashing import (
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
    AcceptedBodies,
    AvroValidator,
    EventIntake,
    JsonTranscoder,
    RefusedEvent,
    Transcoded,
)

__all__ = [
    "ABSENT_KEY",
    "AcceptedBodies",
    "AvroValidator",
    "BlockColumns",
    "Column",
    "ColumnEncoder",
    "Decoded",
    "DecodedRequests",
    "EventColumns",
    "EventExtractor",
    "EventIntake",
    "GroupKeys",
    "JsonTranscoder",
    "RefusedEvent",
    "RequestDecoder",
    "SampleColumns",
    "SampleDecoder",
    "Transcoded",
    "add_frames",
    "encode_blocks",
    "frame_ids",
    "hash_text",
    "key_of",
    "keys_of",
    "partition_of",
    "read_blocks",
    "row_salt",
    "rows_by_id",
    "table_salt",
    "take",
    "written_path",
]
