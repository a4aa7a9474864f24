"""Checks of the Open Inference Protocol by one client: `python oip_clients.py CLIENT HTTP GRPC`.

Prints {check: "yes", "no: why" or ""} as JSON; "" where the client has no such call. It imports nothing of
ours, since kserve wants other versions of the libraries that we use.
"""

from __future__ import annotations

import asyncio
import inspect
import json
import os
import sys
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

MODEL, VERSION = "feed", "0"
ROWS = 400  # so that an answer is long enough to be compressed
IDS = np.arange(ROWS, dtype=np.int64) % 7
COUNTRIES = np.array([b"DE", b"FR"] * (ROWS // 2), object)
AGES = (np.arange(ROWS) % 8).astype(np.float32)
NULL = np.array([True, False] * (ROWS // 2))


class NotOfferedByTheClientError(Exception):
    """The client has no such call."""


@dataclass(frozen=True)
class Given:
    """One input: the datatype and the values of all rows."""

    name: str
    datatype: str
    values: Any


def given(**changes: Any) -> list[Given]:
    """Three inputs of one dimension; `changes` replace or add some, None leaves one out."""
    inputs: dict[str, Given | None] = {
        "items.id": Given("items.id", "INT64", IDS),
        "user.country": Given("user.country", "BYTES", COUNTRIES),
        "items.age_s": Given("items.age_s", "FP32", AGES),
    }
    inputs |= {name.replace("__", "."): one for name, one in changes.items()}
    return [one for one in inputs.values() if one is not None]


async def settled(result: Any) -> Any:
    """The result of a call, of a client that is asynchronous or not."""
    return await result if inspect.isawaitable(result) else result


class Triton:
    """tritonclient.http, .grpc and their .aio."""

    def __init__(self, lib: Any, address: str) -> None:
        self.lib, self.client = lib, lib.InferenceServerClient(address)
        self.is_http = ".http" in lib.__name__

    async def call(self, method: str, *arguments: Any, **options: Any) -> Any:
        if not hasattr(self.client, method):
            raise NotOfferedByTheClientError
        return await settled(getattr(self.client, method)(*arguments, **options))

    async def live(self) -> bool:
        return bool(await self.call("is_server_live"))

    async def ready(self) -> bool:
        return bool(await self.call("is_server_ready"))

    async def model_ready(self) -> bool:
        return bool(await self.call("is_model_ready", MODEL, VERSION))

    async def metadata(self) -> tuple[str, str]:
        server = await self.call("get_server_metadata")
        model = await self.call("get_model_metadata", MODEL)
        if self.is_http:
            return server["name"], model["name"]
        return server.name, model.name

    async def infer(
        self, inputs: list[Given], *, binary: bool = True, coding: str = "", id_: str = "", version: str = ""
    ) -> tuple[Any, str]:
        tensors = []
        for one in inputs:
            tensor = self.lib.InferInput(one.name, list(one.values.shape), one.datatype)
            if self.is_http:
                tensor.set_data_from_numpy(one.values, binary_data=binary)
            elif binary:
                tensor.set_data_from_numpy(one.values)
            else:
                raise NotOfferedByTheClientError
            tensors.append(tensor)
        options: dict[str, Any] = {"request_id": id_, "model_version": version}
        if coding and self.is_http:
            options |= {"request_compression_algorithm": coding, "response_compression_algorithm": coding}
        elif coding:
            options["compression_algorithm"] = coding
        result = await self.call("infer", MODEL, tensors, **options)
        said = result.get_response()
        return result.as_numpy("score"), said.get("id", "") if self.is_http else said.id

    async def close(self) -> None:
        await settled(self.client.close())


class KServe:
    """kserve's clients of REST and gRPC; both are asynchronous."""

    def __init__(self, http: str, grpc: str) -> None:
        import kserve  # noqa: PLC0415 - in an environment of its own

        self.kserve, self.url = kserve, http
        if http:
            from kserve.inference_client import RESTConfig  # noqa: PLC0415

            self.client = kserve.InferenceRESTClient(RESTConfig(protocol="v2"))
        else:
            self.client = kserve.InferenceGRPCClient(grpc)
        self.is_http = bool(http)

    async def call(self, method: str, *arguments: Any, **options: Any) -> Any:
        if not hasattr(self.client, method):
            raise NotOfferedByTheClientError
        base = [self.url] if self.is_http else []
        return await getattr(self.client, method)(*base, *arguments, **options)

    async def live(self) -> bool:
        return bool(await self.call("is_server_live"))

    async def ready(self) -> bool:
        return bool(await self.call("is_server_ready"))

    async def model_ready(self) -> bool:
        return bool(await self.call("is_model_ready", MODEL))

    async def metadata(self) -> tuple[str, str]:
        raise NotOfferedByTheClientError

    async def infer(
        self, inputs: list[Given], *, binary: bool = True, coding: str = "", id_: str = "", version: str = ""
    ) -> tuple[Any, str]:
        if coding or version:
            raise NotOfferedByTheClientError
        tensors = []
        for one in inputs:
            tensor = self.kserve.InferInput(one.name, list(one.values.shape), one.datatype)
            tensor.set_data_from_numpy(one.values, binary_data=binary)
            tensors.append(tensor)
        request = self.kserve.InferRequest(MODEL, tensors, request_id=id_ or None)
        more = {"model_name": MODEL} if self.is_http else {}
        answer = await self.call("infer", request, **more)
        score = next(o for o in answer.outputs if o.name == "score")
        return score.as_numpy(), answer.id

    async def close(self) -> None:
        await self.client.close()


Client = Triton | KServe
Check = Callable[[Client], Awaitable[None]]
CHECKS: dict[str, Check] = {}


def check(name: str) -> Callable[[Check], Check]:
    def add(function: Check) -> Check:
        CHECKS[name] = function
        return function

    return add


async def same_scores(client: Client, inputs: list[Given], expected: list[Given], **options: Any) -> None:
    """Fail unless two ways to give inputs are scored alike, in every row."""
    found, _ = await client.infer(inputs, **options)
    wanted, _ = await client.infer(expected)
    np.testing.assert_array_equal(found, wanted)


async def refused(call: Awaitable[Any], text: str) -> None:
    """Fail unless the call raises an error that holds the server's text."""
    try:
        await call
    except NotOfferedByTheClientError:
        raise
    except Exception as error:
        said = str(error)
    else:
        raise AssertionError("it is not refused")
    assert text in said, f"the error does not say {text!r}: {said}"


@check("server: live, ready")
async def _(client: Client) -> None:
    assert await client.live()
    assert await client.ready()


@check("model: ready")
async def _(client: Client) -> None:
    assert await client.model_ready()


@check("metadata of server and model")
async def _(client: Client) -> None:
    assert await client.metadata() == ("freshet", MODEL)


@check("infer, inputs of shape [N]")
async def _(client: Client) -> None:
    scores, _ = await client.infer(given())
    assert len(np.unique(scores)) > 1


@check("infer, inputs of shape [N, 1]")
async def _(client: Client) -> None:
    columns = [Given(one.name, one.datatype, one.values.reshape(-1, 1)) for one in given()]
    await same_scores(client, columns, given())


@check("infer, values as JSON or typed contents")
async def _(client: Client) -> None:
    await same_scores(client, given(), given(), binary=False)


@check("one row without a value: `<input>.null`")
async def _(client: Client) -> None:
    found, _ = await client.infer(given(**{"items.id.null": Given("items.id.null", "BOOL", NULL)}))
    known, _ = await client.infer(given())
    absent, _ = await client.infer(given(items__id=None))
    assert (known != absent).all()
    np.testing.assert_array_equal(found, np.where(NULL, absent, known))


@check("one row without a value: NaN of a float")
async def _(client: Client) -> None:
    ages = Given("items.age_s", "FP32", np.where(NULL, np.float32("nan"), AGES))
    found, _ = await client.infer(given(items__age_s=ages))
    known, _ = await client.infer(given())
    absent, _ = await client.infer(given(items__age_s=None))
    np.testing.assert_array_equal(found, np.where(NULL, absent, known))


@check("FP16")
async def _(client: Client) -> None:
    halves = Given("items.age_s", "FP16", AGES.astype(np.float16))
    await same_scores(client, given(items__age_s=halves), given())


@check("BF16")
async def _(client: Client) -> None:
    if isinstance(client, KServe):
        raise NotOfferedByTheClientError
    from tritonclient.utils import triton_to_np_dtype  # noqa: PLC0415

    halves = Given("items.age_s", "BF16", AGES.astype(triton_to_np_dtype("BF16")))
    await same_scores(client, given(items__age_s=halves), given())


@check("the request's id comes back")
async def _(client: Client) -> None:
    _, id_ = await client.infer(given(), id_="request-7")
    assert id_ == "request-7"


@check("the served version by its number")
async def _(client: Client) -> None:
    await same_scores(client, given(), given(), version=VERSION)


@check("another version is refused in words")
async def _(client: Client) -> None:
    await refused(client.infer(given(), version="9"), "only the version that `stable` names is served")


@check("a wrong input is refused in words")
async def _(client: Client) -> None:
    unknown = Given("items.unknown", "INT64", IDS)
    await refused(client.infer(given(items__unknown=unknown)), "expected one of")


@check("gzip, both ways")
async def _(client: Client) -> None:
    await same_scores(client, given(), given(), coding="gzip")


@check("deflate, both ways")
async def _(client: Client) -> None:
    await same_scores(client, given(), given(), coding="deflate")


@check("a call that is not offered is refused in words")
async def _(client: Client) -> None:
    http = client.is_http
    await refused(client.call("get_model_repository_index"), "no such path" if http else "Method not found")


async def answers(client: Client) -> dict[str, str]:
    """What became of each check."""
    found = {}
    for name, function in CHECKS.items():
        try:
            await function(client)
        except NotOfferedByTheClientError:
            found[name] = ""
        except Exception as error:
            found[name] = f"no: {' '.join(str(error).split()) or repr(error)}"[:200]
        else:
            found[name] = "yes"
    await client.close()
    return found


async def main(name: str, http: str, grpc: str) -> dict[str, str]:
    """The answers of one client, by its name."""
    if name.startswith("kserve"):
        rest = name == "kserve REST"
        return await answers(KServe(f"http://{http}" if rest else "", grpc))
    module = __import__(name, fromlist=["InferInput"])
    return await answers(Triton(module, http if ".http" in name else grpc))


if __name__ == "__main__":
    json.dump(asyncio.run(main(*sys.argv[1:])), sys.stdout)


KSERVE = Path(os.environ.get("FRESHET_TEST_KSERVE", Path(__file__).parents[2] / "build/kserve/bin/python"))
"""An interpreter that has kserve: `ops/install-kserve` makes it."""
