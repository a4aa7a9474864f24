"""The model behind the Open Inference Protocol, for HTTP and gRPC. Letters: B rows."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from freshet.config.spec.model import Spec
from freshet.errors import BadInput
from freshet.http.messages import HttpError
from freshet.inference.core import time_ms_of
from freshet.inference.oip import InferRequest
from freshet.inference.oip_limits import InputLimits
from freshet.inference.oip_rows import SCORE, Input, limits_of, metadata, rows_of
from freshet.inference.pipeline import Scored
from freshet.inference.scorer import Rows, Scoring
from freshet.inference.versions import ServingVersion
from freshet.types import I64

__all__ = ["OipModel", "Output"]

Output = tuple[str, NDArray[np.float32], bool]
"""Name, (B,) values, whether they are sent as binary."""


@dataclass(slots=True)
class OipModel:
    """One model, by its name and optionally the number of the version served."""

    spec: Spec
    inputs: tuple[Input, ...]
    scoring: Scoring
    count: Callable[[Scored], None]  # called with each scored request
    serving: Callable[
        [], ServingVersion | None
    ]  # the version served; None before rows and weights are loaded
    now_ms: Callable[[], int]
    max_rows: int
    limits: InputLimits = field(init=False)

    def __post_init__(self) -> None:
        self.limits = limits_of(self.inputs, self.max_rows)

    def is_ready(self) -> bool:
        """Return whether the model is served."""
        return self.serving() is not None

    def describe(self, name: str, version: str = "") -> dict[str, Any]:
        """Return the protocol's metadata. Raises as `check`."""
        number = self.check(name, version)
        labels = tuple(label.name for label in self.spec.labels)
        return metadata(self.spec.name, number, self.inputs, labels)

    def check(self, name: str, version: str = "") -> str:
        """Return the version's number as text. Raises HttpError if another model or version is served."""
        if name != self.spec.name:
            raise HttpError(404, "no_model", "no such model", expected=self.spec.name, found=name[:100])
        serving = self.serving()
        number = "" if serving is None else str(serving.manifest.number)
        if version not in ("", number):
            raise HttpError(
                404, "no_version", "only the version that `stable` names is served",
                expected=number, found=version[:100],
            )  # fmt: skip
        return number

    async def infer(self, read: Callable[[], InferRequest]) -> tuple[list[Output], InferRequest, str]:
        """Score a request; return the outputs, the request, and the number of the version.

        Args:
            read: parses the request; not called if the expected wait is too long.

        Raises:
            BadInput: an input or output does not fit the metadata.
            Unavailable: no model is served yet.   Overloaded: the expected wait is too long.
        """
        self.scoring.refuse_if_late()
        request = read()
        count = max((len(tensor.values) for tensor in request.tensors.values()), default=0)
        scored, serving = await self.scoring.score_rows(count, lambda: self._rows(request))
        self.count(scored)
        values = {SCORE: scored.scores}
        for i, label in enumerate(self.spec.labels):
            values[label.name] = scored.predictions[:, i]
        wanted = [(o.name, o.binary) for o in request.outputs or ()]
        wanted = wanted or [(name, request.binary_outputs) for name in values]
        unknown = [name for name, _ in wanted if name not in values]
        if unknown:
            raise BadInput(f"output {unknown[0]!r:.60}: expected one of {', '.join(values)}")
        number = str(serving.manifest.number)
        return [(name, values[name], binary) for name, binary in wanted], request, number

    def _rows(self, request: InferRequest) -> Rows:
        rows = rows_of(request.tensors, self.inputs, self.max_rows)
        return rows, self._times(rows)

    def _times(self, rows: list[dict[str, Any]]) -> I64:
        """Return (B,) event times: the rows' own, or now if a row has none."""
        time = self.spec.events.served.time
        now = self.now_ms()
        times = np.full(len(rows), now, np.int64)
        for i, row in enumerate(rows):
            value = row.pop(time.path, None) if time.path in row else None
            if value is not None:
                time_ms = time_ms_of(value, time)
                if time_ms is None:
                    raise BadInput(
                        f"input {time.path!r}: expected a time in {time.unit}, found {value!r:.60}"
                    )
                times[i] = time_ms
        return times
