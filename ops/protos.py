"""`python -m ops.protos` compiles the .proto files in `schemas/` to the descriptors that the package carries.

Needs grpcio-tools, which comes with the test dependencies.
"""

from __future__ import annotations

import sys
import tempfile
from pathlib import Path

from grpc_tools import protoc

ROOT = Path(__file__).parents[1]
SCHEMAS = ROOT / "schemas"
FILES = ("freshet/wire/v1/gateway.proto", "inference/open_inference_v2.proto")
DESCRIPTORS = ROOT / "services/freshet/rpc/protobuf.binpb"


def compiled() -> bytes:
    """A FileDescriptorSet of FILES. Raises RuntimeError if one of them does not compile; protoc says why."""
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "set.binpb"
        if protoc.main(["protoc", f"-I{SCHEMAS}", f"--descriptor_set_out={out}", *FILES]):
            raise RuntimeError("protoc has failed; what it found stands above")
        return out.read_bytes()


if __name__ == "__main__":
    DESCRIPTORS.write_bytes(compiled())
    sys.stdout.write(f"wrote {DESCRIPTORS.relative_to(ROOT)}\n")
