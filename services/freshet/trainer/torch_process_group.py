"""The process group of several ranks, on torch.distributed with gloo.

The group is constructed directly, not by `init_process_group`: a process needs one for every quorum, and the
global group of the library cannot be created anew while a rank is unreachable. The rank that wrote the
quorum's record hosts the store.

No other module of the trainer imports torch at its top.
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
from freshet.trainer.membership import Quorum, QuorumOptions
from freshet.trainer.process_group import (
    LocalProcessGroup,
    ProcessGroup,
    Proposal,
    RankLost,
    decode_proposal,
    encode_proposal,
    proposal_size,
)
from freshet.types import F32, F64, U8

distributed: Any = _distributed
"""Untyped: the library's stubs lack process groups and stores."""

Store = Any
"""A `torch.distributed.TCPStore`."""

BACKLOG = 128

BROADCAST_BYTES = 4 * 2**20
"""Most bytes of one operation of a broadcast. Each has the time-out of a collective, so a state of any size
arrives over a link that carries a piece within it."""


def host_store(address: str, form_s: float) -> tuple[Store, str]:
    """Host a store for one quorum that listens at `address` only; returns it and its `host:port`."""
    families = {family for family, *_ in socket.getaddrinfo(address, None, type=socket.SOCK_STREAM)}
    family = socket.AF_INET if socket.AF_INET in families else socket.AF_INET6  # a name may have both
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


def connect_store(store_address: str, form_s: float) -> Store:
    """Connect to the store at `host:port`. Raises RankLost if it does not answer within `form_s`."""
    try:
        at = address_of(store_address)
        return distributed.TCPStore(
            at.host, at.port, is_master=False, wait_for_workers=False, timeout=_seconds(form_s)
        )
    except (RuntimeError, ValueError) as error:
        raise RankLost(
            f"the ranks' store at {store_address} cannot be reached: {_first_line(error)}"
        ) from error


def _device(address: str) -> Any:
    """Create gloo's device. Raises ConfigError if this torch lacks the transport, else RankLost."""
    try:
        return distributed.ProcessGroupGloo.create_device(hostname=address)
    except RuntimeError as error:
        transport = os.environ.get("GLOO_DEVICE_TRANSPORT", "")
        if "unsupported gloo device" not in str(error) or not transport:
            _raise_lost(error)
        raise ConfigError(
            "ranks", "GLOO_DEVICE_TRANSPORT", transport, "a transport that this build of torch has",
            "torch's own wheels have no TLS for gloo: unset it, and give ranks a network of their own, or "
            "WireGuard between their hosts",
        ) from error  # fmt: skip


class TorchProcessGroup:
    """A `freshet.trainer.process_group.ProcessGroup` of several ranks."""

    def __init__(
        self,
        store: Store,
        quorum: Quorum,
        rank: int,
        options: QuorumOptions,
        part: Sequence[int] | None = None,
    ) -> None:
        """Connect to the other ranks of the quorum as its `rank`; `store` is the quorum's.

        `part`: its ranks that form this group; None: all.

        Raises:
            RankLost: not all ranks connected.
            ConfigError: this torch lacks the transport of GLOO_DEVICE_TRANSPORT.
        """
        ranks = range(len(quorum.members)) if part is None else part
        self.rank, self.size, self.fence = ranks.index(rank), len(ranks), quorum.fence
        self._quorum, self._options, self._rank = quorum, options, rank
        self._store, self._closed = store, False
        self._proposal_size = proposal_size(quorum.lanes, options.partitions)
        self._proposals = torch.zeros(self.size * self._proposal_size, dtype=torch.int64)
        gloo = distributed.ProcessGroupGloo._Options()
        gloo._devices = [_device(options.address)]
        gloo._timeout = _seconds(options.form_s)
        gloo._threads = 2  # the two sums of a step run concurrently
        name = f"world-{int(quorum.fence)}" + ("" if part is None else f"-{part[0]}")
        try:
            prefix = distributed.PrefixStore(name, store)
            self._group = distributed.ProcessGroupGloo(prefix, self.rank, self.size, gloo)
            self._count_ranks()
        except RuntimeError as error:
            _raise_lost(error)
        self._group._set_default_timeout(_seconds(options.answer_s))

    def gather(self, proposal: Proposal) -> Sequence[Proposal]:
        """Return the proposals of all ranks."""
        mine = torch.from_numpy(encode_proposal(proposal, self._proposal_size))
        self._wait(lambda: [self._group._allgather_base(self._proposals, mine)])
        return [decode_proposal(part) for part in self._proposals.numpy().reshape(self.size, -1)]

    def reduce(self, buffers: Sequence[F32 | F64]) -> None:
        """Sum each (N,) array over the ranks in place.

        Gloo sums each part of an array on one rank and sends the result to the others, so all ranks get the
        same bits.
        """
        tensors = [torch.from_numpy(buffer) for buffer in buffers if len(buffer)]
        self._wait(lambda: [self._group.allreduce([tensor]) for tensor in tensors])

    def all_to_all(self, parts: Sequence[U8], sizes: Sequence[int] | None = None) -> list[U8]:
        """Send part j, (N_j,) bytes, to rank j; returns the parts for this rank, of `sizes` bytes."""
        lengths = [len(part) for part in parts]
        if sizes is None:
            rows = torch.zeros(self.size * self.size, dtype=torch.int64)
            self._wait(lambda: [self._group._allgather_base(rows, torch.tensor(lengths))])
            sizes = rows.numpy().reshape(self.size, self.size)[:, self.rank].tolist()
        options = distributed.AllToAllOptions()
        sent = torch.from_numpy(np.concatenate(parts))
        received = torch.empty(sum(sizes), dtype=torch.uint8)
        self._wait(lambda: [self._group.alltoall_base(received, sent, list(sizes), lengths, options)])
        return np.split(received.numpy(), np.cumsum(sizes)[:-1])

    def all_gather(self, part: U8, sizes: Sequence[int] | None = None) -> list[U8]:
        """Return the (N_i,) bytes of every rank, whose lengths are `sizes`.

        Each rank sends its part to each other, with no padding to the longest.
        """
        if sizes is None:
            found = torch.zeros(self.size, dtype=torch.int64)
            self._wait(lambda: [self._group._allgather_base(found, torch.tensor([len(part)]))])
            sizes = found.tolist()
        return self.all_to_all([part] * self.size, sizes)

    def exchange(self, data: bytes) -> Sequence[bytes]:
        """Return the bytes of all ranks."""
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
        """Return the bytes of rank `source`, sent in pieces of BROADCAST_BYTES."""
        options = distributed.BroadcastOptions()
        options.rootRank = source
        size = torch.tensor([0 if data is None else len(data)])
        self._wait(lambda: [self._group.broadcast([size], options)])
        whole = torch.zeros(int(size[0]), dtype=torch.uint8)
        if data is not None:
            whole.numpy()[:] = np.frombuffer(data, np.uint8)
        for start in range(0, len(whole), BROADCAST_BYTES):
            piece = whole[start : start + BROADCAST_BYTES]
            self._wait(lambda: [self._group.broadcast([piece], options)])  # noqa: B023 - called at once
        return whole.numpy().tobytes()

    def split(self, site: str) -> ProcessGroup:
        """Return a group of the ranks that gave the same `site`. Raises RankLost: not all connected."""
        sites = self.exchange(site.encode())
        ranks = [rank for rank, of_rank in enumerate(sites) if of_rank == sites[self.rank]]
        if len(ranks) == 1:
            return LocalProcessGroup(self.fence)
        return TorchProcessGroup(self._store, self._quorum, self._rank, self._options, ranks)

    def close(self) -> None:
        """Close the connections."""
        if not self._closed:
            self._closed = True
            self._group.abort()
            del self._group, self._store

    def _count_ranks(self) -> None:
        ranks = torch.ones(1, dtype=torch.int64)
        self._group.allreduce([ranks]).wait()
        if int(ranks[0]) != self.size:
            raise RankLost(f"{int(ranks[0])} ranks connected, expected {self.size}")

    def _wait(self, begin: Callable[[], list[Any]]) -> None:
        try:
            for work in begin():
                work.wait()
        except RuntimeError as error:
            _raise_lost(error)


def _raise_lost(error: RuntimeError) -> NoReturn:
    raise RankLost(f"a rank ended or does not answer: {_first_line(error)}") from error


def _first_line(error: Exception) -> str:
    return str(error).partition(". This is typically")[0].partition("\n")[0]


def _seconds(seconds: float) -> datetime.timedelta:
    return datetime.timedelta(seconds=seconds)
