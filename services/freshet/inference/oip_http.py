"""The Open Inference Protocol v2 over HTTP: descriptions of its routes, and their handlers.

Each route is there with and without a slash at its end. All errors below `/v2` have the protocol's form,
`{"error": "text"}`.
"""

from __future__ import annotations

import asyncio
from dataclasses import dataclass

import orjson

from freshet.errors import BadInput
from freshet.http.app import App
from freshet.http.content_encoding import accepted_coding, compressed, decompressed
from freshet.http.endpoint import (
    ERROR,
    TOKEN_CODES,
    Answer,
    Body,
    Endpoint,
    Parameter,
    array,
    boolean,
    by_status,
    integer,
    json,
    record,
    refusals,
    text,
    words,
)
from freshet.http.messages import FORM_TYPES, Headers, Request, Response, json_response, wrong_type
from freshet.inference.oip import InferRequest, parse_infer, write_infer
from freshet.inference.oip_model import OipModel, model_config
from freshet.release import RELEASE

OIP_ERROR = record("OipError", {"error": text("what was expected, what was found, what to do")})

DATATYPES = (
    "BOOL",
    *(f"{sign}INT{bits}" for sign in ("", "U") for bits in (8, 16, 32, 64)),
    "FP16",
    "BF16",
    "FP32",
    "FP64",
    "BYTES",
)
OPEN = {"type": "object"}
SHAPE = array(integer(minimum=0), "one or two counts, the number of rows first")
TENSOR_SIZE = array(integer(), "-1: any number of rows")


def _errors(*codes: str) -> tuple[Answer, ...]:
    """Describe a route's errors, in the protocol's form."""
    return tuple(Answer(status, means, (json(OIP_ERROR),)) for status, means in by_status(codes).items())


MODEL = Parameter("model", "path", "the model's name in the spec", required=True)
VERSION = Parameter("version", "path", "number of the version served", required=True)

SERVER = Endpoint(
    "GET",
    "/v2",
    "Return the server's name and extensions.",
    (
        Answer(
            200,
            "the server",
            (json(record("OipServer", {"name": text(), "version": text(), "extensions": array(text())})),),
        ),
    ),
)
LIVE = Endpoint(
    "GET",
    "/v2/health/live",
    "Report that the process runs.",
    (Answer(200, "it runs", (json(record("OipLive", {"live": boolean()})),)),),
)
_READY = json(record("OipReady", {"ready": boolean()}))
READY = Endpoint(
    "GET",
    "/v2/health/ready",
    "Report whether a model is served.",
    (Answer(200, "a model is served", (_READY,)), Answer(503, "not yet", (_READY,))),
)
_MODEL_READY = json(record("OipModelReady", {"name": text(), "ready": boolean()}))
MODEL_READY = Endpoint(
    "GET",
    "/v2/models/{model}/ready",
    "Report whether this model is served.",
    (
        Answer(200, "the model is served", (_MODEL_READY,)),
        Answer(503, "not yet", (_MODEL_READY,)),
        *_errors("no_model", "no_version"),
        *refusals(*TOKEN_CODES),
    ),
    parameters=(MODEL,),
    scope="rank",
)

_TENSOR = record("OipTensor", {"name": text(), "datatype": words(DATATYPES), "shape": TENSOR_SIZE})
METADATA = Endpoint(
    "GET",
    "/v2/models/{model}",
    "Return the model's inputs and outputs.",
    (
        Answer(
            200,
            "one input per field that features read; the outputs are `score` and one per label",
            (
                json(
                    record(
                        "OipModel",
                        {
                            "name": text(),
                            "versions": array(text()),
                            "platform": text(),
                            "inputs": array(_TENSOR),
                            "outputs": array(_TENSOR),
                        },
                    )
                ),
            ),
        ),
        *_errors("no_model", "no_version"),
        *refusals(*TOKEN_CODES),
    ),
    parameters=(MODEL,),
    scope="rank",
)
_CONFIG_TENSOR = record("OipConfigTensor", {"name": text(), "data_type": text(), "dims": TENSOR_SIZE})
CONFIG = Endpoint(
    "GET",
    "/v2/models/{model}/config",
    "Return the model's metadata as Triton's model configuration.",
    (
        Answer(
            200,
            "the configuration",
            (
                json(
                    record(
                        "OipConfig",
                        {
                            "name": text(),
                            "platform": text(),
                            "backend": text(),
                            "max_batch_size": integer(),
                            "input": array(_CONFIG_TENSOR),
                            "output": array(_CONFIG_TENSOR),
                        },
                    )
                ),
            ),
        ),
        *_errors("no_model", "no_version"),
        *refusals(*TOKEN_CODES),
    ),
    parameters=(MODEL,),
    scope="rank",
)

_INPUT = {
    "title": "OipInput",
    "type": "object",
    "required": ["name", "shape", "datatype"],
    "properties": {
        "name": text(
            "an input of the model's metadata; `<list>.length` gives the length of each row's list, "
            "`<input>.null` the rows that are null"
        ),
        "shape": SHAPE,
        "datatype": words(DATATYPES),
        "data": {
            "type": "array",
            "description": "row by row, null if a row has no value; absent if binary data follows",
        },
        "parameters": OPEN,
    },
}
INFER_REQUEST = {
    "title": "OipInferRequest",
    "type": "object",
    "required": ["inputs"],
    "properties": {
        "id": {"type": ["string", "integer", "null"], "description": "returned in the answer"},
        "inputs": array(_INPUT, "a missing input is null in every row"),
        "outputs": {
            "type": ["array", "null"],
            "items": OPEN,
            "description": "outputs to return; default: all",
        },
        "parameters": {"type": ["object", "null"]},
    },
}
_OUTPUT = record(
    "OipOutput",
    {"name": text(), "datatype": words(("FP32",)), "shape": SHAPE},
    {"data": array({"type": ["number", "null"]}), "parameters": OPEN},
)
INFER_ANSWER = record(
    "OipInferAnswer",
    {"model_name": text(), "model_version": text(), "outputs": array(_OUTPUT)},
    {"id": {"type": ["string", "integer"]}},
)
_LENGTH = "bytes of JSON before the binary data"
INFER = Endpoint(
    "POST",
    "/v2/models/{model}/infer",
    "Score rows, without ranking or logging. For training, send impressions to the gateway, or use "
    "`/v1/rank`, which logs them.",
    (
        Answer(
            200,
            "the outputs as JSON, or as JSON followed by binary tensors if the request says so",
            (json(INFER_ANSWER), Body("application/octet-stream")),
            {"Inference-Header-Content-Length": _LENGTH},
        ),
        *_errors(
            "bad_input",
            "no_model",
            "no_version",
            "body_too_large",
            "too_large",
            "encoding",
            "internal",
            "unavailable",
        ),
        Answer(
            429,
            by_status(("overloaded", "too_often"))[429],
            (json({"anyOf": [OIP_ERROR, ERROR]}),),  # of the queue, of the rate limiter
            {"Retry-After": "seconds to wait before trying again"},
        ),
        # before the protocol is known
        *refusals("origin", *(code for code in TOKEN_CODES if code != "too_often"), "body_timeout"),
    ),
    "The route supports Triton's binary tensor extension, so `tritonclient.http` works unchanged. Requests "
    "may have a `Content-Encoding` of gzip or deflate; answers of a KiB or more have the one that "
    "`Accept-Encoding` prefers.",
    parameters=(MODEL, Parameter("Inference-Header-Content-Length", "header", _LENGTH, integer(minimum=0))),
    bodies=(json(INFER_REQUEST), Body("application/octet-stream")),
    scope="rank",
)


COMPRESSED_BYTES = 1_024
"""Smallest answer that is compressed; a shorter one fits into a packet."""

_SERVER_BODY = {
    "name": "freshet",
    "version": RELEASE,
    "extensions": ["binary_tensor_data", "model_configuration"],
}


@dataclass(slots=True)
class OipRoutes:
    """Routes of one model."""

    model: OipModel
    max_body_bytes: int  # of a decompressed request

    def add_to(self, app: App) -> None:
        """Add all routes."""
        app.form_errors(SERVER.path, oip_error)
        for endpoint, handler in (
            (SERVER, self._server),
            (LIVE, self._live),
            (READY, self._ready),
            (METADATA, self._metadata),
            (MODEL_READY, self._model_ready),
            (CONFIG, self._config),
            (INFER, self._infer),
        ):
            versioned = endpoint.path.replace("{model}", "{model}/versions/{version}")
            forms = [endpoint]
            if versioned != endpoint.path:
                forms.append(endpoint.at(versioned, VERSION))
            for form in forms:
                app.route(form, handler)
                app.route(form.at(f"{form.path}/"), handler)

    async def _server(self, _request: Request) -> Response:
        return json_response(200, _SERVER_BODY)

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
        done = await self.model.infer(lambda: self._read(request, *version), request.watch_client)
        body, length = write_infer(
            self.model.spec.name, done.version, done.request.id, done.outputs, done.parameters
        )
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

    def _read(self, request: Request, version: str = "") -> InferRequest:
        coding = request.headers.get(b"content-encoding", b"").decode("latin-1")
        body = decompressed(request.body, coding, self.max_body_bytes)
        return parse_infer(body, _header_length(request), self.model.limits, version)


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
