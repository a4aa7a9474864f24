"""Routes of the Open Inference Protocol v2. Errors are told as the protocol says: `{"error": "text"}`."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import orjson

from freshet.errors import BadInput
from freshet.inference import oip_endpoints as api
from freshet.inference.core import time_ms_of
from freshet.inference.oip import parse_infer, write_infer
from freshet.inference.oip_rows import SCORE, metadata, model_config, rows_of
from freshet.inference.pipeline import Pipeline, Scored
from freshet.inference.versions import ServingVersion
from freshet.release import RELEASE
from freshet.runtime.http import App, HttpError, Request, Response, error_response, json_response
from freshet.spec.model import Spec
from freshet.types import I64

__all__ = ["OipRoutes"]

SERVER = {"name": "freshet", "version": RELEASE, "extensions": ["binary_tensor_data", "model_configuration"]}

Score = Callable[[list[dict[str, Any]], I64], tuple[Scored, ServingVersion]]


@dataclass(slots=True)
class OipRoutes:
    """One model, under its name, with or without the number of the version served."""

    spec: Spec
    pipeline: Pipeline
    score: Score  # rows and their times to predictions; raises Unavailable while nothing is served
    serving: Callable[[], ServingVersion | None]  # the version served now, None while rows or weights lack
    now_ms: Callable[[], int]
    max_rows: int

    def add_to(self, app: App) -> None:
        """Route everything."""
        app.route(api.SERVER, self._told(self._server))
        app.route(api.SERVER.at("/v2/"), self._told(self._server))
        app.route(api.LIVE, self._told(self._live))
        app.route(api.READY, self._told(self._ready))
        for endpoint, handler in (
            (api.METADATA, self._metadata),
            (api.MODEL_READY, self._model_ready),
            (api.CONFIG, self._config),
            (api.INFER, self._infer),
        ):
            versioned = endpoint.path.replace("{model}", "{model}/versions/{version}")
            app.route(endpoint, self._told(handler))
            app.route(endpoint.at(versioned, api.VERSION), self._told(handler))

    @staticmethod
    def _told(
        handler: Callable[[Request], Awaitable[Response]],
    ) -> Callable[[Request], Awaitable[Response]]:
        async def answer(request: Request) -> Response:
            try:
                return await handler(request)
            except Exception as error:
                made = error_response(error)
                told = orjson.loads(made.body)["error"]
                parts = [told["message"]] + [
                    f"{key} {told[key]}" for key in ("expected", "found", "hint") if told[key] is not None
                ]
                return json_response(made.status, {"error": "; ".join(parts)}, made.headers)

        return answer

    async def _server(self, _request: Request) -> Response:
        return json_response(200, SERVER)

    async def _live(self, _request: Request) -> Response:
        return json_response(200, {"live": True})

    async def _ready(self, _request: Request) -> Response:
        ready = self.serving() is not None
        return json_response(200 if ready else 503, {"ready": ready})

    async def _model_ready(self, request: Request) -> Response:
        self._check(request)
        ready = self.serving() is not None
        return json_response(200 if ready else 503, {"name": self.spec.name, "ready": ready})

    async def _metadata(self, request: Request) -> Response:
        return json_response(200, self._described(request))

    async def _config(self, request: Request) -> Response:
        return json_response(200, model_config(self._described(request)))

    def _described(self, request: Request) -> dict[str, Any]:
        version = self._check(request)
        labels = tuple(label.name for label in self.spec.labels)
        return metadata(self.spec.name, version, self.pipeline.inputs, labels)

    def _check(self, request: Request) -> str:
        """The version's number as text. Raises HttpError for another model or version than is served."""
        name, *version = request.arguments
        if name != self.spec.name:
            raise HttpError(404, "no_model", "no such model", expected=self.spec.name, found=name[:100])
        serving = self.serving()
        number = "" if serving is None else str(serving.manifest.number)
        if version and version[0] not in ("", number):
            raise HttpError(
                404, "no_version", "only the version that `stable` names is served",
                expected=number, found=version[0][:100],
            )  # fmt: skip
        return number

    async def _infer(self, request: Request) -> Response:
        self._check(request)
        asked = parse_infer(request.body, _header_length(request))
        rows = rows_of(asked.tensors, self.pipeline.inputs, self.max_rows)
        scored, serving = self.score(rows, self._times(rows))
        values = {SCORE: scored.scores}
        for i, label in enumerate(self.spec.labels):
            values[label.name] = scored.predictions[:, i]
        wanted = [(o.name, o.binary) for o in asked.outputs or ()]
        wanted = wanted or [(name, asked.binary_outputs) for name in values]
        unknown = [name for name, _ in wanted if name not in values]
        if unknown:
            raise BadInput(f"output {unknown[0]!r}: expected one of {', '.join(values)}")
        body, length = write_infer(
            self.spec.name,
            str(serving.manifest.number),
            asked.id,
            [(name, values[name], binary) for name, binary in wanted],
        )
        if length is None:
            return Response(200, body)
        header = ((b"inference-header-content-length", str(length).encode()),)
        return Response(200, body, b"application/octet-stream", header)

    def _times(self, rows: list[dict[str, Any]]) -> I64:
        """(B,) event times: the rows' own where they have one, else now."""
        field = self.spec.events.served.time
        now = self.now_ms()
        times = np.full(len(rows), now, np.int64)
        for i, row in enumerate(rows):
            value = row.pop(field.path, None) if field.path in row else None
            if value is not None:
                time_ms = time_ms_of(value, field)
                if time_ms is None:
                    raise BadInput(
                        f"input {field.path!r}: expected a time in {field.unit}, found {value!r:.60}"
                    )
                times[i] = time_ms
        return times


def _header_length(request: Request) -> int | None:
    if b"content-encoding" in request.headers:
        raise HttpError(415, "encoding", "compressed bodies are not taken")
    text = request.headers.get(b"inference-header-content-length")
    if text is None:
        return None
    if not text.isdigit() or len(text) > 12:
        raise BadInput(f"Inference-Header-Content-Length: expected a number, found {text[:40]!r}")
    return int(text)
