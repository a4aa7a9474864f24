"""The peers and their packages."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True)
class Peer:
    """A trainer that freshet is compared with, and its environment build/peers/<name>.

    requirements are installed with their dependencies, bare ones with `pip --no-deps`: the stated
    dependencies of these are wrong for us, and their real ones are among the requirements.
    """

    about: str
    requirements: tuple[str, ...] = ()  # "name==version" each
    bare: tuple[str, ...] = ()  # likewise, without dependencies
    base: str | None = None  # the peer whose packages this one sees; has no base itself
    imports: tuple[str, ...] = ()  # must import once all is installed
    environment: Mapping[str, str] = field(default_factory=dict)  # variables that its users would set, too
    also: tuple[str, ...] = ()  # further jobs than <name>_job.py that train the model in this environment


PEERS: dict[str, Peer] = {
    "torch": Peer(
        about="plain torch, written by hand",
        requirements=("torch==2.13.0", "numpy==2.4.6"),
        imports=("torch",),
    ),
    "torchrec": Peer(
        about="TorchRec: fused row-wise Adagrad of FBGEMM's table-batched embeddings",
        requirements=(
            "cloudpickle==3.1.2",
            "mypy-extensions==1.2.0",
            "pyre-extensions==0.0.32",
            "pyvers==0.2.3",
            "tqdm==4.70.1",
            "typing-inspect==0.9.0",
        ),
        # torchrec depends on fbgemm-gpu, a build for CUDA, and on torchmetrics, which only its metrics need.
        bare=("torchrec==1.8.0", "fbgemm-gpu-cpu==1.8.0", "tensordict==0.15.3"),
        base="torch",
        imports=("fbgemm_gpu", "torchrec"),
        also=("fbgemm",),
    ),
    "paddle": Peer(
        about="PaddlePaddle's parameter server, asynchronous: a server and a trainer on loopback",
        # Paddle 2.6.2 uses what protobuf 5 and later no longer have.
        requirements=("paddlepaddle==2.6.2", "numpy==1.26.4", "protobuf==4.25.9", "setuptools==65.5.0"),
        imports=("paddle", "paddle.distributed.fleet"),
        # Its MKL takes the slowest path on AMD; this variable makes it use AVX2, 1.9 times as fast.
        environment={"MKL_DEBUG_CPU_TYPE": "5", "OMP_NUM_THREADS": "1"},
    ),
    "tfra": Peer(
        about="TensorFlow Recommenders Addons: cuckoo hash tables; Adagrad per element, not per row",
        requirements=("tensorflow-cpu==2.16.2", "numpy==1.26.4"),
        # Both depend on `tensorflow`, the build for GPUs.
        bare=("tensorflow-recommenders-addons==0.8.1", "tf-keras==2.16.0"),
        imports=("tensorflow", "tf_keras"),
        environment={"TF_CPP_MIN_LOG_LEVEL": "2", "TF_USE_LEGACY_KERAS": "1"},
    ),
    "vw": Peer(
        about="Vowpal Wabbit's file driver: a linear model, not the comparison's; for its samples/s only",
        requirements=("vowpalwabbit==9.11.9", "numpy==1.26.4"),
        imports=("vowpalwabbit",),
    ),
}
