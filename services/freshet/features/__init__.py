"""Events to columns to keys: one implementation for training, replay and serving (a facade over the
native core).

Every way in ends in Avro bytes: JSON and csv/parquet columns are encoded by the same schema first, so
that keys cannot differ between training, replay and serving. From Avro bytes there is one way on, the
native walker.
"""

from freshet.features.blocks import BlockColumns, encode_block, encode_blocks, read_blocks
from freshet.features.decoded import ABSENT_KEY, Decoded, GroupKeys
from freshet.features.decoder import SampleDecoder
from freshet.features.encoder import Column, ColumnEncoder, EncodedRows
from freshet.features.events import EventColumn, EventColumns, EventExtractor
from freshet.features.frames import add_frames, frame_ids, rows_by_id, strip_frames, take
from freshet.features.hashing import (
    cross_seed,
    hash_text,
    key_of,
    keys_of,
    partition_of,
    row_salt,
    table_salt,
)
from freshet.features.intake import EventIntake, TakenBodies
from freshet.features.program import written_path
from freshet.features.requests import DecodedRequests, RequestDecoder
from freshet.features.transcode import JsonTranscoder, RefusedEvent, Transcoded
from freshet.features.validate import AvroValidator

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
