"""What a shard tells of lookups and pushes of traced batches, and of the changed rows that it publishes."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import numpy as np

from freshet.observability.tracing import Context, Tracer, active, current, harmless, within
from freshet.types import Append

__all__ = ["answered", "answering", "published_rows"]


@contextmanager
def answering(method: str, asked: Context | None = None) -> Iterator[None]:
    """Answer a lookup or a push; `asked`: the span that it is part of, if this thread's is another."""
    tracer = active()
    parent = None if tracer is None else asked or current()
    if tracer is None or parent is None:
        yield
        return
    span, began_ns, error = tracer.new(parent), tracer.now_ns(), ""
    try:
        with within(span):
            yield
    except Exception as failed:
        error = str(failed)
        raise
    finally:
        answered(tracer, method, span, parent, began_ns, error)


@harmless
def answered(
    tracer: Tracer,
    method: str,
    span: Context,
    parent: Context,
    began_ns: int,
    error: str,
    end_ns: int | None = None,
) -> None:
    """Tell of a lookup or a push that is over; without `end_ns` just now."""
    tracer.span(
        f"Rows/{method}",
        "paramserver",
        began_ns,
        end_ns=end_ns,
        kind="server",
        context=span,
        parent=parent,
        attributes={"rpc.service": "Rows", "rpc.method": method},
        error=error,
    )
    if method == "Push" and not error:
        tracer.pushes.append(span)


@harmless
def published_rows(tracer: Tracer, appends: Sequence[Append], firsts: Sequence[int], began_ns: int) -> None:
    """Changed rows are in the log, each append from its first offset on: the records that are traced, with
    the traced pushes since the last of them."""
    traced = []
    for append, first in zip(appends, firsts, strict=True):
        offsets = np.arange(first, first + len(append.values), dtype=np.int64)
        traced += [(append, *one) for one in tracer.rows(append.partition, offsets)]
    if not traced:
        return
    pushes = [tracer.pushes.popleft() for _ in range(len(tracer.pushes))]  # others append meanwhile
    for append, offset, context in traced:
        tracer.span(
            f"send {append.topic}",
            "paramserver",
            began_ns,
            kind="producer",
            context=context,
            links=pushes,
            attributes={
                **tracer.on_topic("send", append.topic, append.partition),
                "messaging.kafka.offset": offset,
            },
        )
