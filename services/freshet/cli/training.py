"""The training process put together: embedder, shard and trainer, which meet in their seams."""

from __future__ import annotations

import os
import threading
import uuid
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import structlog

from freshet.clock import SYSTEM_CLOCK, Clock
from freshet.embedder.core import lanes_for
from freshet.embedder.decoding import BlockDecoder
from freshet.embedder.stream import LocalStream
from freshet.features import SampleDecoder
from freshet.measures.gate import pinned_by
from freshet.model import build_model
from freshet.paramserver.shard import Shard
from freshet.runtime.lifecycle import Cleanup
from freshet.seams.eventlog import EventLog
from freshet.seams.eventlog.claims import Claims
from freshet.seams.eventlog.topics import ensure_topics
from freshet.seams.rowstore import RowStore
from freshet.seams.versions import VersionStore
from freshet.spec.identity import identity_hash
from freshet.spec.layout import layout_of
from freshet.spec.model import Spec
from freshet.trainer.core import DenseLedger
from freshet.trainer.quality import Quality
from freshet.trainer.service import Trainer
from freshet.trainer.versioning import Versioner, restart_point
from freshet.types import Append, BytesColumn, TopicPartition
from freshet.wire.schemas import SchemaRegistry

__all__ = ["Training", "assemble"]
