"""The keys of log lines: the same thing has the same key in all services.

docs/reference/logs.md lists them, and a test compares them with every call in the code.
"""

from __future__ import annotations

ALWAYS = {
    "timestamp": "time of the line, ISO 8601 in UTC",
    "level": "debug, info, warning or error",
    "event": "the message: always the same words, so that it can be searched for; values are in keys",
    "service": "the process's role: gateway, joiner, embedder, paramserver, trainer, inference, console; of "
    "`freshet up` itself the verb",
    "instance": "the process's name: its `name` setting, or the host's name",
    "host": "the host's name; in a container its own",
    "pid": "the process",
    "release": "the release that runs",
}
"""Keys of every line. Text for people has time, level, message, service, and `instance` if it has a name."""

SOMETIMES = {
    "exception": "the traceback of an unexpected error",
    "left_out": "lines of the same message that were left out before this one, since they came too fast",
    "logger": "the library that wrote the line: uvicorn, redis, py.warnings, …",
    "trace_id": "trace of the event, batch or version that the line is about",
    "span_id": "span of the work during which the line was written",
}
"""Keys that processors add where they apply."""

KEYS = {
    # subjects
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
    "steps_made_again": "steps of the dense weights that are made again",
    "step_before": "the step before the state of another rank was taken",
    "version": "a version of the dense weights",
    "event_time_ms": "the newest event time that it has learned from",
    "ahead_ms": "how far an event is dated ahead of the clocks",
    "retention_ms": "age at which the log removes records of that topic",
    "expected_ms": "least retention with which a restart finds what it needs",
    "clock_step_ms": "unconfirmed step of this machine's wall clock",
    "label": "a label of the spec",
    "samples": "how many samples",
    "rank": "a trainer's number in its quorum",
    "ranks": "number of ranks of the quorum",
    "world": "the fence of a quorum of trainers, which names it",
    "fence": "the fence of a claim: the higher is the newer owner's",
    "member": "the membership lease of a process",
    "members": "how many processes share partitions",
    "shards": "how many shards there are",
    "slices": "how many slices of buckets",
    "slice": "a slice of buckets",
    "slices_moved": "number of slices that a plan moves to another shard",
    "buckets": "how many buckets",
    "loaded": "whether they were read whole before they are served",
    "windows": "how many windows of measures",
    "visit": "a visit of a simulated reader",
    "first_visit": "the first visit that is made now",
    "seed": "seed of the simulation",
    "rate": "simulated events a second",
    # processes and places
    "address": "address of another process",
    "servers": "several",
    "carries": "what a link's codec encodes: rows or gradients",
    "codec": "the codec that it uses from now on",
    "child": "a service that `freshet up` runs",
    "route": "the method's path as the reference has it",
    "method": "a gRPC method",
    "device": "where a network computes",
    "path": "a file or a folder",
    "connections": "how many connections are taken at once",
    "files": "how many files this process may have open",
    "client": "the address that a request came from",
    "holder": "the name of the request's token, if it is known",
    "tokens_known": "how many tokens a file has",
    "what": "the part that is closed, claimed or released",
    # events
    "reason": "the reason as a sentence: the error's message, if there is one",
    "why": "the reason as one word: the label of the metric that counts it",
    "code": "the code of an error of Kafka's client",
    "doing": "the work during which it happened",
    "how": "the outcome",
    "last_words": "the last error in the log of a process that ended",
    "again_in_s": "seconds until the next try",
    "requests": "how many requests",
    "records": "how many records",
    "bytes": "how many bytes",
    "streams": "how many streams may be open",
    "append_left": "whether an append was still under way when the gateway ended; it may be written",
    "events_cut_off": "events not known to be written at the end of the drain; clients got an error",
    "threads_left": "threads that had not ended when the drain was over",
    "pinned": "whether `stable` stays there whatever the gate says",
    "by": "user or token that moved it",
    "log_level": "the least severe level that is kept from now on",
    "message": "the message of lines that were left out",
    "exc_info": "the error whose traceback becomes `exception`",
}
"""Keys of calls."""
