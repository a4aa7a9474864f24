"""Routes of the Open Inference Protocol v2, each with and without a slash at its end.

All errors below `/v2` have the protocol's form, `{"error": "text"}`.
"""

from __future__ import annotations

import asyncio
from dataclasses import dataclass

import orjson

from freshet.errors import BadInput
from freshet.http.app import App
from freshet.http.content_encoding import accepted_coding, compressed, decompressed
from freshet.http.messages import FORM_TYPES, Headers, Request, Response, json_response, wrong_type
from freshet.inference import oip_endpoints as api
from freshet.inference.oip import InferRequest, parse_infer, write_infer
from freshet.inference.oip_model import OipModel
from freshet.inference.oip_rows import model_config
from freshet.release import RELEASE

__all__ = ["OipRoutes", "oip_error"]

COMPRESSED_BYTES = 1_024
"""Smallest answer that is compressed; a shorter one fits into a packet."""

SERVER = {"name": "freshet", "version": RELEASE, "extensions": ["binary_tensor_data", "model_configuration"]}


@dataclass(slots=True)
class OipRoutes:
    """Routes of one model."""

    model: OipModel
    max_body_bytes: int  # of a decompressed request

    def add_to(self, app: App) -> None:
        """Add all routes."""
        app.form_errors(api.SERVER.path, oip_error)
        for endpoint, handler in (
            (api.SERVER, self._server),
            (api.LIVE, self._live),
            (api.READY, self._ready),
            (api.METADATA, self._metadata),
            (api.MODEL_READY, self._model_ready),
            (api.CONFIG, self._config),
            (api.INFER, self._infer),
        ):
            versioned = endpoint.path.replace("{model}", "{model}/versions/{version}")
            forms = [endpoint]
            if versioned != endpoint.path:
                forms.append(endpoint.at(versioned, api.VERSION))
            for form in forms:
                app.route(form, handler)
                app.route(form.at(f"{form.path}/"), handler)

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
        return json_response(200, self.model.describe(*request.arguments))

    async def _config(self, request: Request) -> Response:
        return json_response(200, model_config(self.model.describe(*request.arguments)))

    async def _infer(self, request: Request) -> Response:
        if request.content_type in FORM_TYPES:  # the protocol's clients send JSON, binary or no type
            raise wrong_type(request.content_type, "application/json", "application/octet-stream")
        name, *version = request.arguments
        self.model.check(name, *version)
        outputs, inference, number = await self.model.infer(lambda: self._read(request))
        body, length = write_infer(self.model.spec.name, number, inference.id, outputs)
        headers: Headers = ()
        kind = b"application/json"
        if length is not None:
            headers = ((b"inference-header-content-length", str(length).encode()),)
            kind = b"application/octet-stream"
        coding = accepted_coding(request.headers.get(b"accept-encoding", b"").decode("latin-1"))
        if coding and len(body) >= COMPRESSED_BYTES:
            body = await asyncio.to_thread(compressed, body, coding)
            headers += ((b"content-encoding", coding.encode()), (b"vary", b"accept-encoding"))
        return Response(200, body, kind, headers)

    def _read(self, request: Request) -> InferRequest:
        coding = request.headers.get(b"content-encoding", b"").decode("latin-1")
        body = decompressed(request.body, coding, self.max_body_bytes)
        return parse_infer(body, _header_length(request), self.model.limits)


def oip_error(response: Response) -> Response:
    """Convert an error to the protocol's form, `{"error": "text"}`, which its clients require."""
    error = orjson.loads(response.body)["error"]
    parts = [error["message"]]
    for key in ("expected", "found", "hint"):
        if (value := error[key]) is not None:
            parts.append(f"{key} {', '.join(map(str, value)) if isinstance(value, list) else value}")
    return json_response(response.status, {"error": "; ".join(parts)}, response.headers)


def _header_length(request: Request) -> int | None:
    text = request.headers.get(b"inference-header-content-length")
    if text is None:
        return None
    if not text.isdigit() or len(text) > 12:
        raise BadInput(f"Inference-Header-Content-Length: expected a number, found {text[:40]!r}")
    return int(text)
