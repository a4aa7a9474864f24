"""Descriptions of the supported routes of the Open Inference Protocol v2."""

from __future__ import annotations

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

__all__ = ["CONFIG", "INFER", "LIVE", "METADATA", "MODEL_READY", "READY", "SERVER", "VERSION"]

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
