"""Routes of the Open Inference Protocol v2. Errors are told as the protocol says: `{"error": "text"}`."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from dataclasses import dataclass

import orjson

from freshet.errors import BadInput
from freshet.inference import oip_endpoints as api
from freshet.inference.oip import parse_infer, write_infer
from freshet.inference.oip_model import OipModel
from freshet.inference.oip_rows import model_config
from freshet.release import RELEASE
from freshet.runtime.answers import HttpError, Response, error_response, json_response
from freshet.runtime.http import App
from freshet.runtime.requests import Request

__all__ = ["OipRoutes"]

SERVER = {"name": "freshet", "version": RELEASE, "extensions": ["binary_tensor_data", "model_configuration"]}


@dataclass(slots=True)
class OipRoutes:
    """One model, under its name, with or without the number of the version served."""

    model: OipModel

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
        ready = self.model.is_ready()
        return json_response(200 if ready else 503, {"ready": ready})

    async def _model_ready(self, request: Request) -> Response:
        name, *version = request.arguments
        self.model.check(name, *version)
        ready = self.model.is_ready()
        return json_response(200 if ready else 503, {"name": name, "ready": ready})

    async def _metadata(self, request: Request) -> Response:
        return json_response(200, self.model.described(*request.arguments))

    async def _config(self, request: Request) -> Response:
        return json_response(200, model_config(self.model.described(*request.arguments)))

    async def _infer(self, request: Request) -> Response:
        name, *version = request.arguments
        self.model.check(name, *version)
        outputs, asked, number = await self.model.infer(
            lambda: parse_infer(request.body, _header_length(request), self.model.limits)
        )
        body, length = write_infer(self.model.spec.name, number, asked.id, outputs)
        if length is None:
            return Response(200, body)
        header = ((b"inference-header-content-length", str(length).encode()),)
        return Response(200, body, b"application/octet-stream", header)


def _header_length(request: Request) -> int | None:
    if b"content-encoding" in request.headers:
        raise HttpError(415, "encoding", "compressed bodies are not taken")
    text = request.headers.get(b"inference-header-content-length")
    if text is None:
        return None
    if not text.isdigit() or len(text) > 12:
        raise BadInput(f"Inference-Header-Content-Length: expected a number, found {text[:40]!r}")
    return int(text)
