"""A shard in this process: lookups and pushes on the native store; what changed goes to serving and to the row store."""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import structlog

from freshet.clock import Clock
from freshet.errors import Fenced, Refused, Unavailable
from freshet.paramserver.core import AfterFlush, FlushBook
from freshet.seams.eventlog import EventLog, Writer
from freshet.seams.rowservice import KeyGroup, Push
from freshet.seams.rowstore import RowStore, StoreIdentity
from freshet.spec.layout import Layout
from freshet.spec.model import Spec
from freshet.spec.topics import ROWS_PARTITIONS
from freshet.tables import PushOutcome, Store
from freshet.types import (
    F32,
    Append,
    Bucket,
    BucketDelta,
    BucketMeta,
    BucketRange,
    BytesColumn,
    Fence,
    TimeMs,
    TopicPartition,
    bucket_of,
)
from freshet.wire.rows import RowDelta, encode_rows
