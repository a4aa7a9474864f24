"""Placement of a torch network: on the CPU, or on a GPU with copies through page-locked memory.

Each lane has its own placement, on a GPU with its own stream: copies overlap with the computation of other
lanes, and a lane waits only once per batch, for its results.
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

DEVICES = re.compile(r"cpu|cuda(:\d{1,2})?")
"""Names of devices."""

Cuda = Any
"""`torch.cuda`, the stubs of which leave streams untyped."""


class Placement(Protocol):
    """Device of a network and copies to and from it, for one thread.

    An array or tensor is valid until its name is used again.
    """

    device: torch.device

    def running(self) -> AbstractContextManager[Any]:
        """Return a context in which torch computes on this placement's device and stream."""

    def send(self, name: str, array: NDArray[Any]) -> torch.Tensor:
        """Return an array of any shape and dtype as a tensor of the same on the device."""

    def fetch(self, tensors: Mapping[str, torch.Tensor]) -> dict[str, F32]:
        """Return float32 tensors as arrays, after all work of this placement has finished."""


class CpuPlacement:
    """Placement on the CPU: tensors share their memory with the arrays."""

    device = torch.device("cpu")

    def running(self) -> AbstractContextManager[Any]:
        """Return an empty context."""
        return contextlib.nullcontext()

    def send(self, name: str, array: NDArray[Any]) -> torch.Tensor:
        """Return a view of the array, of its shape and dtype; of a copy if the array is read-only.

        A tensor cannot be read-only. Columns of a received batch are, but not a gathered input.
        """
        return torch.from_numpy(array if array.flags.writeable else array.copy())

    def fetch(self, tensors: Mapping[str, torch.Tensor]) -> dict[str, F32]:
        """Return views of the tensors."""
        return {name: tensor.detach().numpy() for name, tensor in tensors.items()}


class StagedPlacement:
    """Placement on another device: copies through page-locked arrays, which grow to the largest batch."""

    def __init__(self, device: torch.device) -> None:
        """Create a placement on a GPU, or on the CPU without streams, for tests of the staging."""
        self.device = device
        cuda: Cuda = torch.cuda
        self._stream = cuda.Stream(device) if device.type == "cuda" else None
        self._host: dict[str, torch.Tensor] = {}
        self._device: dict[str, torch.Tensor] = {}

    @contextlib.contextmanager
    def _on_stream(self) -> Any:
        cuda: Cuda = torch.cuda
        with cuda.device(self.device), cuda.stream(self._stream):
            yield

    def running(self) -> AbstractContextManager[Any]:
        """Return a context of the device and this placement's stream."""
        return self._on_stream() if self._stream is not None else contextlib.nullcontext()

    def send(self, name: str, array: NDArray[Any]) -> torch.Tensor:
        """Start a copy to a tensor of the array's shape and dtype; work in `running` is ordered after it."""
        flat = array.reshape(-1)
        staged = self._staging(name, flat.size, torch.from_numpy(np.empty(0, array.dtype)).dtype)
        staged.numpy()[:] = flat
        sent = self._buffer(self._device, name, flat.size, staged.dtype, self.device)
        sent.copy_(staged, non_blocking=True)
        return sent.view(array.shape)

    def fetch(self, tensors: Mapping[str, torch.Tensor]) -> dict[str, F32]:
        """Return copies in page-locked memory, after a wait for the stream."""
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
        return self._buffer(self._host, name, size, dtype, None)

    def _buffer(
        self,
        buffers: dict[str, torch.Tensor],
        name: str,
        size: int,
        dtype: torch.dtype,
        device: torch.device | None,
    ) -> torch.Tensor:
        """Return the first `size` elements of a named buffer; it grows to 1.25 times the size."""
        buffer = buffers.get(name)
        if buffer is not None and buffer.dtype != dtype:  # two arrays of one name would overwrite each other
            raise TypeError(f"array {name!r} was {buffer.dtype}, found {dtype}: give one another name")
        if buffer is None or buffer.numel() < size:
            locked = device is None and self._stream is not None
            with torch.inference_mode(False):  # training uses the buffer too, though scoring may allocate it
                buffer = torch.empty(size + size // 4, dtype=dtype, device=device, pin_memory=locked)
            buffers[name] = buffer
        return buffer[:size]


def placement_factory(device: str) -> Callable[[], Placement]:
    """Return a factory of placements on `cpu`, `cuda` or `cuda:N`.

    Raises ConfigError if torch cannot compute on the device.
    """
    where, expected = "the trainer's device", "cpu, cuda, or cuda:N of a GPU that is there"
    if not DEVICES.fullmatch(device):
        raise ConfigError(where, "", repr(device), expected)
    if device == "cpu":
        return CpuPlacement
    cuda: Cuda = torch.cuda
    if not cuda.is_available():
        found = f"{device!r}, and torch {torch.__version__} sees no GPU"
        hint = "nvidia-smi lists GPUs and driver; a torch whose version ends in +cpu was built without CUDA"
        raise ConfigError(where, "", found, expected, hint)
    gpu = torch.device(device)
    if (gpu.index or 0) >= (count := cuda.device_count()):
        raise ConfigError(where, "", f"{device!r}, and torch sees {count} GPUs", expected)
    return lambda: StagedPlacement(gpu)
