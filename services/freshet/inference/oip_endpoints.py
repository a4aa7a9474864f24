"""The routes of the Open Inference Protocol v2, described as far as this server speaks it."""

from __future__ import annotations

from freshet.http.endpoint import (
    TOKEN_CODES,
    Answer,
    Body,
    Endpoint,
    Parameter,
    array,
    boolean,
    integer,
    json,
    record,
    refusals,
    text,
    words,
)
from freshet.http.error_codes import ERROR, by_status

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
TENSOR_SIZE = array(integer(), "-1 stands for any number of rows")


def _errors(*codes: str) -> tuple[Answer, ...]:
    """The errors that a route may give, told in the protocol's form."""
    return tuple(Answer(status, means, (json(OIP_ERROR),)) for status, means in by_status(codes).items())


MODEL = Parameter("model", "path", "the model's name, as the spec has it", required=True)
VERSION = Parameter("version", "path", "number of the dense version served", required=True)

SERVER = Endpoint(
    "GET",
    "/v2",
    "Name and extensions of the server.",
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
    "Whether the process runs.",
    (Answer(200, "it does", (json(record("OipLive", {"live": boolean()})),)),),
)
_READY = json(record("OipReady", {"ready": boolean()}))
READY = Endpoint(
    "GET",
    "/v2/health/ready",
    "Whether a model is served.",
    (Answer(200, "it is", (_READY,)), Answer(503, "not yet", (_READY,))),
)
_MODEL_READY = json(record("OipModelReady", {"name": text(), "ready": boolean()}))
MODEL_READY = Endpoint(
    "GET",
    "/v2/models/{model}/ready",
    "Whether this model is served.",
    (
        Answer(200, "it is", (_MODEL_READY,)),
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
    "Inputs and outputs of the model.",
    (
        Answer(
            200,
            "an input for each field that features read; outputs are `score` and one for each label",
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
    "The same as Triton's model configuration.",
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
            "an input of the model's metadata; `<list>.length` says how long each row's list is, "
            "`<input>.null` which rows are null"
        ),
        "shape": SHAPE,
        "datatype": words(DATATYPES),
        "data": {
            "type": "array",
            "description": "row by row, null where a row has no value; absent where binary data follows",
        },
        "parameters": OPEN,
    },
}
INFER_REQUEST = {
    "title": "OipInferRequest",
    "type": "object",
    "required": ["inputs"],
    "properties": {
        "id": {"type": ["string", "integer", "null"], "description": "given back as it was sent"},
        "inputs": array(_INPUT, "a missing one is null in every row"),
        "outputs": {"type": ["array", "null"], "items": OPEN, "description": "those wanted; all without it"},
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
    "Score rows; nothing is ordered, explored or logged. Rows are not impressions: send what was shown to "
    "the gateway, or rank by `/v1/rank`, which logs it.",
    (
        Answer(
            200,
            "the outputs; as JSON, or as JSON followed by binary tensors where the client asked for those",
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
            (json({"anyOf": [OIP_ERROR, ERROR]}),),  # of the queue, of the door
            {"Retry-After": "seconds to wait before trying again"},
        ),
        # before the protocol is known
        *refusals("origin", *(code for code in TOKEN_CODES if code != "too_often"), "body_timeout"),
    ),
    "The binary tensor extension of Triton is spoken, so `tritonclient.http` works unchanged. Requests may "
    "have a `Content-Encoding` of gzip or deflate, and answers of a KiB or more have the one that "
    "`Accept-Encoding` prefers.",
    parameters=(MODEL, Parameter("Inference-Header-Content-Length", "header", _LENGTH, integer(minimum=0))),
    bodies=(json(INFER_REQUEST), Body("application/octet-stream")),
    scope="rank",
)
