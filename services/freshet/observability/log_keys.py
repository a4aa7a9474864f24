"""The keys of log lines: the same thing has the same key, whoever says it.

docs/reference/logs.md lists them, and a test compares them with every call in the code.
"""

from __future__ import annotations

__all__ = ["ALWAYS", "KEYS", "SOMETIMES"]

ALWAYS = {
    "timestamp": "when it was said, ISO 8601 in UTC",
    "level": "debug, info, warning or error",
    "event": "the message: always the same words, so that it can be searched for; what varies is in keys",
    "service": "the role that says it: gateway, joiner, embedder, paramserver, trainer, inference, console; "
    "of `freshet up` itself the verb",
    "instance": "which one of them: its `name` setting, or the host's name",
    "host": "the host's name; in a container its own",
    "pid": "the process",
    "release": "the release that runs",
}
"""In every line. Text for people has time, level, message and service, and `instance` if it has a name."""

SOMETIMES = {
    "exception": "the traceback of what is no error of ours",
    "left_out": "lines of the same message that were left out before this one, since they came too fast",
    "logger": "who says it, where it is a library: uvicorn, redis, py.warnings, …",
    "trace_id": "of the event, batch or version that the line is about, if it is traced",
    "span_id": "of what was being done, if it is traced",
}
"""Added to a line where they apply, never by a call."""

KEYS = {
    # what a line is about
    "request_ids": "ids of requests as the events give them, ten at most",
    "topic": "a topic of the log",
    "topics": "topics, each with its partition",
    "brokers": "Kafka brokers, by their ids",
    "partition": "a partition of that topic",
    "partitions": "several",
    "offset": "a record's place in the partition",
    "partitions_before": "how many partitions a topic had",
    "rows_next": "partition of `rows`: the next offset to be read",
    "schema_id": "a schema's id in its registry",
    "lane": "a lane of the trainer, from 0",
    "ranges": "a batch: the blocks of samples in it, `PARTITION:START-STOP` each, without STOP",
    "rows": "how many embedding rows",
    "max_rows": "table: how many rows it may have",
    "step": "steps of the dense weights so far",
    "step_before": "the step that was left for another rank's",
    "version": "a version of the dense weights",
    "event_time_ms": "the newest event time that it has learned from",
    "ahead_ms": "how far an event is dated ahead of the clocks",
    "clock_step_ms": "how far this machine's wall clock was set, as far as that does not count yet",
    "label": "a label of the spec",
    "samples": "how many samples",
    "rank": "a trainer's number in its world",
    "ranks": "how many the world has",
    "world": "the fence of a world of trainers, which names it",
    "fence": "the fence of a claim: the higher is the newer owner's",
    "member": "the membership lease of a process",
    "members": "how many processes share partitions",
    "shards": "how many shards there are",
    "slices": "how many slices of buckets",
    "slice": "a slice of buckets",
    "slices_moved": "how many a plan gives to another shard",
    "buckets": "how many buckets",
    "loaded": "whether they were read whole before they are served",
    "windows": "how many windows of measures",
    "visit": "a visit of a simulated reader",
    "first_visit": "the first visit that is made now",
    "seed": "of the simulated world",
    "rate": "simulated events a second",
    # who or where
    "address": "where another process answers",
    "servers": "several",
    "child": "a service that `freshet up` runs",
    "route": "the method's path as the reference has it",
    "method": "a gRPC method",
    "device": "where a network computes",
    "path": "a file or a folder",
    "connections": "how many connections are taken at once",
    "files": "how many files this process may have open",
    "client": "the address that a request came from",
    "holder": "the name of the token that it showed, if it showed one that is known",
    "tokens_known": "how many tokens a file has",
    "what": "what is closed, claimed or released",
    # what happened
    "reason": "why, in words: the error's message where there is one",
    "why": "why, in one word: the label of the metric that counts it",
    "code": "the code of an error of Kafka's client",
    "doing": "what was being done",
    "how": "how it ended",
    "last_words": "what a process said last before it ended",
    "again_in_s": "when it is tried again",
    "requests": "how many requests",
    "records": "how many records",
    "bytes": "how many bytes",
    "streams": "how many streams may be open",
    "append_left": "whether an append was still under way when the gateway ended; it may be written",
    "events_cut_off": "events that were not known to be written when the drain was over; clients were told",
    "threads_left": "threads that had not ended when the drain was over",
    "pinned": "whether `stable` stays there whatever the gate says",
    "by": "who moved it",
    "log_level": "the least severe level that is kept from now on",
    "message": "the message of lines that were left out",
    "exc_info": "the error whose traceback becomes `exception`",
}
"""What calls give, beside the message."""
