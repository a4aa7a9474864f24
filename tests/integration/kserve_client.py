"""kserve's own v2 client over gRPC, run by an interpreter that has kserve: `python kserve_client.py ADDRESS`.

Reads {"columns": {name: {"datatype", "shape", "data"}}, "raw": bool} as JSON from standard input and writes
{"ready", "name", "score": [...]}. It imports nothing of ours: kserve wants other versions of what we use.
"""

import asyncio
import json
import sys

import numpy as np
from kserve import InferenceGRPCClient, InferInput, InferRequest

DTYPES = {"INT64": np.int64, "INT32": np.int32, "FP32": np.float32, "BYTES": np.object_}


async def main(address: str) -> None:
    asked = json.load(sys.stdin)
    inputs = []
    for name, column in asked["columns"].items():
        values = [v.encode() for v in column["data"]] if column["datatype"] == "BYTES" else column["data"]
        tensor = InferInput(name, column["shape"], column["datatype"])
        array = np.array(values, DTYPES[column["datatype"]]).reshape(column["shape"])
        tensor.set_data_from_numpy(array, binary_data=asked["raw"])
        inputs.append(tensor)
    client = InferenceGRPCClient(url=address)
    answer = await client.infer(InferRequest(model_name="feed", infer_inputs=inputs, request_id="k"))
    said = {
        "live": await client.is_server_live(),
        "ready": await client.is_model_ready("feed"),
        "id": answer.id,
        "model": answer.model_name,
        "score": next(o for o in answer.outputs if o.name == "score").as_numpy().tolist(),
    }
    await client.close()
    json.dump(said, sys.stdout)


asyncio.run(main(sys.argv[1]))
