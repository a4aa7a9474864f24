"""A group of ranks on torch.distributed: gloo between hosts, with NCCL for the sums of models on GPUs.

Process groups are made directly, not by `init_process_group`: a process makes one for every generation of
its world, and the library's global group could not be made anew while another rank is away. The group's store
is hosted by the rank that wrote the world's record.

This is the only module of the trainer that imports torch.
"""

from __future__ import annotations

import datetime
import os
import socket
from collections.abc import Callable, Sequence
from typing import Any, NoReturn

import numpy as np
import torch
from torch import distributed as _distributed

from freshet.errors import ConfigError
from freshet.http.addresses import Address, address_of
from freshet.trainer.ranks import Offer, RankLost, read_offer, size_of, write_offer
from freshet.types import F32, F64, Fence

__all__ = ["Store", "TorchRanks", "connect_store", "host_store"]

distributed: Any = _distributed
"""Without types: the library's stubs leave out process groups and stores."""

Store = Any
"""A `torch.distributed.TCPStore`."""

BACKLOG = 128


def host_store(address: str, form_s: float) -> tuple[Store, str]:
    """A store for one generation, listening at `address` only; with where others find it, `host:port`."""
    families = {family for family, *_ in socket.getaddrinfo(address, None, type=socket.SOCK_STREAM)}
    family = socket.AF_INET if socket.AF_INET in families else socket.AF_INET6  # a name may be of both
    listener = socket.create_server((address, 0), family=family, backlog=BACKLOG)
    port = listener.getsockname()[1]
    store = distributed.TCPStore(
        address,
        port,
        is_master=True,
        wait_for_workers=False,
        timeout=_seconds(form_s),
        master_listen_fd=listener.detach(),
    )
    return store, str(Address(address, port))


def connect_store(place: str, form_s: float) -> Store:
    """The store that another rank hosts at `place`. Raises RankLost if it does not answer in time."""
    try:
        at = address_of(place)
        return distributed.TCPStore(
            at.host, at.port, is_master=False, wait_for_workers=False, timeout=_seconds(form_s)
        )
    except (RuntimeError, ValueError) as error:
        raise RankLost(f"the ranks' store at {place} cannot be reached: {_first_line(error)}") from error


def _device(address: str) -> Any:
    """What gloo speaks by. Raises ConfigError for a transport that this torch does not have, RankLost."""
    try:
        return distributed.ProcessGroupGloo.create_device(hostname=address)
    except RuntimeError as error:
        transport = os.environ.get("GLOO_DEVICE_TRANSPORT", "")
        if "unsupported gloo device" not in str(error) or not transport:
            _lost(error)
        raise ConfigError(
            "ranks", "GLOO_DEVICE_TRANSPORT", transport, "a transport that this build of torch has",
            "torch's own wheels have no TLS for gloo: unset it, and give ranks a network of their own, or "
            "WireGuard between their hosts",
        ) from error  # fmt: skip


class TorchRanks:
    """See `freshet.trainer.ranks.RankGroup`."""

    def __init__(
        self,
        store: Store,
        *,
        fence: Fence,
        rank: int,
        size: int,
        lanes: int,
        partitions: int,
        address: str,
        form_s: float,
        answer_s: float,
    ) -> None:
        """Meet the other ranks.

        Args:
            store: of this generation. fence: of its record; no two generations have the same.
            lanes: of every rank. partitions: of the model. address: of this host, as the others reach it.
            form_s: how long to wait for the others now. answer_s: and at every later call.

        Raises RankLost if not all of them come.
        """
        self.rank, self.size, self.fence = rank, size, fence
        self._store, self._closed = store, False
        self._offer_size = size_of(lanes, partitions)
        self._offers = torch.zeros(size * self._offer_size, dtype=torch.int64)
        options = distributed.ProcessGroupGloo._Options()
        options._devices = [_device(address)]
        options._timeout = _seconds(form_s)
        options._threads = 2  # the two sums of a step are under way together
        try:
            prefix = distributed.PrefixStore(f"world-{int(fence)}", store)
            self._group = distributed.ProcessGroupGloo(prefix, rank, size, options)
            self._meet()
        except RuntimeError as error:
            _lost(error)
        self._group._set_default_timeout(_seconds(answer_s))

    def gather(self, offer: Offer) -> Sequence[Offer]:
        """All ranks' offers."""
        mine = torch.from_numpy(write_offer(offer, self._offer_size))
        self._wait(lambda: [self._group._allgather_base(self._offers, mine)])
        return [read_offer(part) for part in self._offers.numpy().reshape(self.size, -1)]

    def reduce(self, buffers: Sequence[F32 | F64]) -> None:
        """Sum each array over the ranks, in place.

        Gloo adds up each part of an array on one rank and gives the others that sum: all have the same bits.
        """
        tensors = [torch.from_numpy(buffer) for buffer in buffers if len(buffer)]
        self._wait(lambda: [self._group.allreduce([tensor]) for tensor in tensors])

    def exchange(self, data: bytes) -> Sequence[bytes]:
        """All ranks' bytes."""
        sizes = torch.zeros(self.size, dtype=torch.int64)
        mine = torch.tensor([len(data)])
        self._wait(lambda: [self._group._allgather_base(sizes, mine)])
        longest = int(sizes.max())
        if not longest:
            return [b""] * self.size
        padded = torch.zeros(longest, dtype=torch.uint8)
        padded.numpy()[: len(data)] = np.frombuffer(data, np.uint8)
        parts = torch.zeros(self.size * longest, dtype=torch.uint8)
        self._wait(lambda: [self._group._allgather_base(parts, padded)])
        rows = parts.numpy().reshape(self.size, longest)
        return [rows[i, :size].tobytes() for i, size in enumerate(sizes.tolist())]

    def broadcast(self, data: bytes | None, source: int) -> bytes:
        """The bytes of rank `source`."""
        options = distributed.BroadcastOptions()
        options.rootRank = source
        size = torch.tensor([0 if data is None else len(data)])
        self._wait(lambda: [self._group.broadcast([size], options)])
        whole = torch.zeros(int(size[0]), dtype=torch.uint8)
        if data is not None:
            whole.numpy()[:] = np.frombuffer(data, np.uint8)
        if len(whole):
            self._wait(lambda: [self._group.broadcast([whole], options)])
        return whole.numpy().tobytes()

    def close(self) -> None:
        """Close the connections."""
        if not self._closed:
            self._closed = True
            self._group.abort()
            del self._group, self._store

    def _meet(self) -> None:
        here = torch.ones(1, dtype=torch.int64)
        self._group.allreduce([here]).wait()
        if int(here[0]) != self.size:
            raise RankLost(f"{int(here[0])} ranks met, expected {self.size}")

    def _wait(self, begin: Callable[[], list[Any]]) -> None:
        try:
            for work in begin():
                work.wait()
        except RuntimeError as error:
            _lost(error)


def _lost(error: RuntimeError) -> NoReturn:
    raise RankLost(f"a rank is gone or does not answer: {_first_line(error)}") from error


def _first_line(error: Exception) -> str:
    return str(error).partition(". This is typically")[0].partition("\n")[0]


def _seconds(seconds: float) -> datetime.timedelta:
    return datetime.timedelta(seconds=seconds)
