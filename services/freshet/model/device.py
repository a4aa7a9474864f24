"""Where a torch network computes: on this processor, or on a GPU that numbers come to and go from through
page-locked memory.

A lane has a place of its own. On a GPU that is a stream of its own too: its copies run while other lanes
compute, and a lane waits once a batch, for its results.
"""

from __future__ import annotations

import contextlib
import re
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from typing import Any, Protocol

import numpy as np
import torch
from numpy.typing import NDArray

from freshet.errors import ConfigError
from freshet.types import F32

__all__ = ["DEVICES", "Here", "Place", "Staged", "places"]

DEVICES = re.compile(r"cpu|cuda(:\d{1,2})?")
"""Names of devices."""

Cuda = Any
"""`torch.cuda`, whose stubs leave streams untyped."""


class Place(Protocol):
    """Used by one thread at a time. Arrays and tensors of a name are valid until the name is used again."""

    device: torch.device

    def running(self) -> AbstractContextManager[Any]:
        """What is computed within is this place's."""

    def room(self, name: str, shape: tuple[int, ...]) -> F32:
        """An array to fill, which `send` takes without a copy in between."""

    def send(self, name: str, array: NDArray[Any]) -> torch.Tensor:
        """The array as a tensor where the network is."""

    def fetch(self, tensors: Mapping[str, torch.Tensor]) -> dict[str, F32]:
        """float32 tensors as arrays here; returns when they are there, and all that was begun is done."""


class Here:
    """On this processor: tensors share their memory with the arrays."""

    device = torch.device("cpu")

    def running(self) -> AbstractContextManager[Any]:
        """Nothing to prepare."""
        return contextlib.nullcontext()

    def room(self, name: str, shape: tuple[int, ...]) -> F32:
        """A new array."""
        return np.empty(shape, np.float32)

    def send(self, name: str, array: NDArray[Any]) -> torch.Tensor:
        """A view of the array."""
        return torch.from_numpy(array)

    def fetch(self, tensors: Mapping[str, torch.Tensor]) -> dict[str, F32]:
        """Views of the tensors."""
        return {name: tensor.detach().numpy() for name, tensor in tensors.items()}


class Staged:
    """On another device: by way of page-locked arrays, which grow with the batches and are kept."""

    def __init__(self, device: torch.device) -> None:
        """`device`: a GPU, or for tests of the staging itself this processor, without streams."""
        self.device = device
        cuda: Cuda = torch.cuda
        self._stream = cuda.Stream(device) if device.type == "cuda" else None
        self._here: dict[str, torch.Tensor] = {}
        self._there: dict[str, torch.Tensor] = {}

    @contextlib.contextmanager
    def _on_stream(self) -> Any:
        cuda: Cuda = torch.cuda
        with cuda.device(self.device), cuda.stream(self._stream):
            yield

    def running(self) -> AbstractContextManager[Any]:
        """On the stream of this place."""
        return self._on_stream() if self._stream is not None else contextlib.nullcontext()

    def room(self, name: str, shape: tuple[int, ...]) -> F32:
        """An array in page-locked memory."""
        found: F32 = self._staging(name, int(np.prod(shape)), torch.float32).numpy().reshape(shape)
        return found

    def send(self, name: str, array: NDArray[Any]) -> torch.Tensor:
        """A copy that is under way; what is computed within `running` comes after it."""
        flat = array.reshape(-1)
        staged = self._staging(name, flat.size, torch.from_numpy(array).dtype)
        if not np.shares_memory(flat, staged.numpy()):
            staged.numpy()[:] = flat
        there = self._held(self._there, name, flat.size, staged.dtype, self.device)
        there.copy_(staged, non_blocking=True)
        return there.view(array.shape)

    def fetch(self, tensors: Mapping[str, torch.Tensor]) -> dict[str, F32]:
        """Copies in page-locked memory."""
        found: dict[str, F32] = {}
        for name, tensor in tensors.items():
            staged = self._staging(f"back/{name}", tensor.numel(), torch.float32)
            staged.copy_(tensor.detach().reshape(-1), non_blocking=True)
            found[name] = staged.numpy().reshape(tuple(tensor.shape))
        if self._stream is not None:
            cuda: Cuda = torch.cuda
            cuda.current_stream(self.device).synchronize()
        return found

    def _staging(self, name: str, size: int, dtype: torch.dtype) -> torch.Tensor:
        return self._held(self._here, name, size, dtype, None)

    def _held(
        self,
        held: dict[str, torch.Tensor],
        name: str,
        size: int,
        dtype: torch.dtype,
        device: torch.device | None,
    ) -> torch.Tensor:
        """The first `size` of a kept array of that name; a quarter more than was needed when it has to
        grow."""
        kept = held.get(name)
        if kept is None or kept.numel() < size or kept.dtype != dtype:
            locked = device is None and self._stream is not None
            with torch.inference_mode(False):  # whoever asks first: the lane also learns with it
                kept = torch.empty(size + size // 4, dtype=dtype, device=device, pin_memory=locked)
            held[name] = kept
        return kept[:size]


def places(device: str) -> Callable[[], Place]:
    """Makes places on `cpu`, `cuda` or `cuda:N`. Raises ConfigError if torch cannot compute there."""
    where, expected = "the trainer's device", "cpu, cuda, or cuda:N of a GPU that is there"
    if not DEVICES.fullmatch(device):
        raise ConfigError(where, "", repr(device), expected)
    if device == "cpu":
        return Here
    cuda: Cuda = torch.cuda
    if not cuda.is_available():
        found = f"{device!r}, and torch {torch.__version__} sees no GPU"
        hint = "nvidia-smi lists GPUs and driver; a torch whose version ends in +cpu was built without CUDA"
        raise ConfigError(where, "", found, expected, hint)
    there = torch.device(device)
    if (there.index or 0) >= (count := cuda.device_count()):
        raise ConfigError(where, "", f"{device!r}, and torch sees {count} GPUs", expected)
    return lambda: Staged(there)
