"""Writing dense versions, judging them, and moving `stable`: the shell around the gate's decision."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import orjson
import structlog
from numpy.typing import NDArray

from freshet.clock import Clock
from freshet.errors import Corrupt
from freshet.measures.gate import Evaluation, Verdict, judge
from freshet.model import DenseModel
from freshet.model.inputs import ModelInputs
from freshet.seams.eventlog import Writer
from freshet.seams.versions import Manifest, Version, VersionStore
from freshet.spec.model import Spec
from freshet.types import Append, BytesColumn, Fence

__all__ = ["Snapshot", "Versioner", "latest_restart_point"]

log = structlog.get_logger("trainer.versions")


@dataclass(frozen=True, slots=True, eq=False)
class Snapshot:
    """Dense state and vector copied in the same moment, between two steps."""

    tensors: Mapping[str, NDArray[Any]]
    applied: Mapping[int, int]
    step: int
    event_time_ms: int
    measures: Mapping[str, Any]
