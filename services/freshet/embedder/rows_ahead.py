"""Rows of later batches, brought from a local disk into memory while a lane trains on the batch before.

Only a hint: batches, offsets and dead letters are those of the lane itself, which decodes the blocks again.
What is not fetched, a lookup reads.
"""

from __future__ import annotations

from concurrent.futures import Future, ThreadPoolExecutor

from freshet.embedder.batch_builder import BatchBuilder
from freshet.embedder.block_decoder import BlockDecoder
from freshet.tables import Store
from freshet.types import BytesColumn


class RowsAhead:
    """Fetches the rows of one lane's later batches, on a thread. Its lane's thread calls it."""

    def __init__(self, store: Store, builder: BatchBuilder, decoder: BlockDecoder) -> None:
        """Fetch nothing yet; `decoder` is the lane's."""
        self._store, self._builder, self._decoder = store, builder, decoder
        self._slot = builder.slot()
        self._thread = ThreadPoolExecutor(1, "rows-ahead")
        self._last: Future[None] | None = None

    def begin(self, blocks: BytesColumn) -> Future[None] | None:
        """Begin to fetch the rows of blocks, after those begun before; returns the fetch begun before.

        The lane must wait for that one before it looks these rows up, or it would read them once more.
        """
        before = self._last
        self._last = self._thread.submit(self._fetch, blocks) if len(blocks) else None
        return before

    def _fetch(self, blocks: BytesColumn) -> None:
        columns = self._decoder.peek(blocks)
        if columns is not None:
            self._store.fetch(self._builder.keys(columns, self._slot))

    def close(self) -> None:
        """End the thread, after what it has begun. Idempotent."""
        self._thread.shutdown()
