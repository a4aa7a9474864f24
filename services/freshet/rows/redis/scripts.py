"""What is sent to Redis: keys, Lua scripts, and how a command is written.

A bucket has two keys in one slot: `{name:bucket}:rows`, a hash of pages of its rows (`freshet.tables.runs`),
and `{name:bucket}:meta`, a hash of fence, seq and the rest of `BucketMeta`, and of how many bytes the pages
take: `base` those that the bucket began with when it was last written whole or put together, `added` those
since. What both hold changes in one step:

- Nothing but meta: one script, APPLY.
- Changed rows and removed keys: MULTI, GATE, a plain HSET of their pages, COMMIT, EXEC. GATE compares
  (fence, seq); if the flush may not be written it moves the rows out of the way, so that the HSET fills a
  hash that COMMIT throws away. Pages are thus written by a native command (Lua hashes every byte of a
  script's arguments: measured, that doubles a server's work), and nothing else runs between MULTI and EXEC.
- A whole bucket: its pages are first gathered under a key of their own, which expires if nobody finishes it;
  then one script, SWAP, puts it in the place of the old ones. However large a bucket, that is one RENAME.
- Pages put together: gathered likewise; REPLACE puts them in the place of those that they were made of, if
  (fence, seq) is still what it was when those were read.

Redis refuses a script, and an EXEC, as a whole if memory is full: before anything has been done.

Scripts are sent as text (EVAL): a transaction whose GATE was not found, as a new master does not know it,
would go on without it.
"""

from __future__ import annotations

from collections.abc import Sequence

__all__ = [
    "APPLY",
    "CLAIM",
    "COMMIT",
    "CREATE",
    "EXEC",
    "GATE",
    "META_FIELDS",
    "MULTI",
    "OPEN",
    "REPLACE",
    "SLACK_BYTES",
    "SWAP",
    "WRITTEN",
    "command",
    "command_of",
    "evaluate",
]

META_FIELDS = (b"fence", b"seq", b"rows", b"applied", b"rows_offset", b"clock_ms", b"format")
"""Of a bucket's meta, in the order in which scripts take them."""

WRITTEN = 3
"""COMMIT's answer if pages were written is this and the bytes that the bucket's pages now take, if they
should be put together; 0 if not. 1 and 2 are a FlushOutcome."""

STAGE_EXPIRES_S = 600
"""Pages that were gathered for a whole bucket and never put in place: longer than any call takes."""

SLACK_BYTES = 64 << 10
"""Pages are put together when those added take more than half of what the bucket began with, and this more:
small buckets would be written again and again. Worst case: 64 MiB for a model of 1,024 buckets."""

_VERDICT = """
local function verdict(fence, seq)
local s = redis.call('HMGET', KEYS[1], 'fence', 'seq')
if not s[1] then return 2 end
if tonumber(s[1]) > tonumber(fence) then return 1 end
if s[1] ~= fence then return 2 end
if s[2] == seq then return 0 end
if tonumber(s[2]) == tonumber(seq) - 1 then return 3 end
return 2
end
"""

_META = """
local function meta()
redis.call('HSET', KEYS[1], 'fence', ARGV[1], 'seq', ARGV[2], 'rows', ARGV[3], 'applied', ARGV[4],
'rows_offset', ARGV[5], 'clock_ms', ARGV[6], 'format', ARGV[7])
end
"""

_STAGED = """
local function staged(expected)
local n = redis.call('HLEN', KEYS[3]) - 1
if n == tonumber(expected) then return n end
redis.call('UNLINK', KEYS[3])
return nil, redis.error_reply('STAGE holds ' .. n .. ' pages, expected ' .. expected)
end
local function put(n, bytes)
redis.call('HSET', KEYS[1], 'base', bytes, 'added', 0)
redis.call('UNLINK', KEYS[2])
redis.call('HDEL', KEYS[3], '')
if n > 0 then
redis.call('RENAME', KEYS[3], KEYS[2])
redis.call('PERSIST', KEYS[2])
end
end
"""

APPLY = (
    _VERDICT
    + _META
    + """
local v = verdict(ARGV[1], ARGV[2])
if v ~= 3 then return v end
meta()
return 0
"""
)
"""KEYS meta; ARGV META_FIELDS."""

GATE = (
    _VERDICT
    + """
redis.call('HLEN', KEYS[2])
local v = verdict(ARGV[1], ARGV[2])
redis.call('HSET', KEYS[1], 'gate', v)
if v ~= 3 and redis.call('EXISTS', KEYS[2]) == 1 then redis.call('RENAME', KEYS[2], KEYS[3]) end
return v
"""
)
"""KEYS meta, rows, aside; ARGV fence, seq."""

COMMIT = (
    _META
    + f"""
local v = redis.call('HGET', KEYS[1], 'gate')
if not v then return redis.error_reply('GATE did not run') end
redis.call('HDEL', KEYS[1], 'gate')
if v == '3' then
meta()
local added = redis.call('HINCRBY', KEYS[1], 'added', ARGV[8])
local base = tonumber(redis.call('HGET', KEYS[1], 'base') or 0)
if added <= base / 2 + {SLACK_BYTES} then return 0 end
return {WRITTEN} + base + added
end
redis.call('UNLINK', KEYS[2])
if redis.call('EXISTS', KEYS[3]) == 1 then redis.call('RENAME', KEYS[3], KEYS[2]) end
return tonumber(v)
"""
)
"""KEYS meta, rows, aside; ARGV META_FIELDS, bytes of the pages."""

OPEN = f"""
if redis.call('EXISTS', KEYS[1]) == 1 then redis.call('DEL', KEYS[1]) end
redis.call('HSET', KEYS[1], '', '')
return redis.call('EXPIRE', KEYS[1], {STAGE_EXPIRES_S})
"""
"""KEYS stage. No DEL of nothing: a full server lets a script that has written go on to write."""

SWAP = (
    _VERDICT
    + _META
    + _STAGED
    + """
local v = verdict(ARGV[1], ARGV[2])
if v == 0 or v == 1 then
redis.call('UNLINK', KEYS[3])
return v
end
local n, wrong = staged(ARGV[8])
if wrong then return wrong end
meta()
put(n, ARGV[9])
return 0
"""
)
"""KEYS meta, rows, stage; ARGV META_FIELDS, pages in the stage, their bytes."""

REPLACE = (
    _STAGED
    + """
local s = redis.call('HMGET', KEYS[1], 'fence', 'seq')
if s[1] ~= ARGV[1] or s[2] ~= ARGV[2] then
redis.call('UNLINK', KEYS[3])
return 0
end
local n, wrong = staged(ARGV[3])
if wrong then return wrong end
put(n, ARGV[4])
return 1
"""
)
"""KEYS meta, rows, stage; ARGV fence, seq, pages in the stage, their bytes. Answers 1 if it was done."""

CLAIM = """
local f = redis.call('HGET', KEYS[1], 'fence')
if not f or tonumber(f) > tonumber(ARGV[1]) then return f end
redis.call('HSET', KEYS[1], 'fence', ARGV[1])
return redis.call('HMGET', KEYS[1], 'fence', 'seq', 'rows', 'applied', 'rows_offset', 'clock_ms', 'format')
"""
"""KEYS meta; ARGV fence. Answers the meta as it then is, the higher fence that there is, or nil."""

CREATE = (
    _META
    + """
if redis.call('EXISTS', KEYS[1]) == 0 then meta() end
return 0
"""
)
"""KEYS meta; ARGV META_FIELDS."""


def command(*arguments: bytes) -> bytes:
    """One command in Redis's protocol."""
    return command_of(0, *arguments)


def command_of(more: int, *arguments: bytes) -> bytes:
    """The begin of a command: so many more arguments, as they go over the wire, are to follow."""
    known = b"".join([b"$%d\r\n%b\r\n" % (len(argument), argument) for argument in arguments])
    return b"*%d\r\n%b" % (len(arguments) + more, known)


def evaluate(script: str, keys: Sequence[bytes], arguments: Sequence[bytes], more: int = 0) -> bytes:
    """EVAL of a script; `more`: as of `command_of`."""
    return command_of(more, b"EVAL", script.strip().encode(), b"%d" % len(keys), *keys, *arguments)


MULTI, EXEC = command(b"MULTI"), command(b"EXEC")
