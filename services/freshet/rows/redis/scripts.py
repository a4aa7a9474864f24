"""Keys, Lua scripts and the encoding of commands for Redis.

A bucket has two keys in one slot: `{name:bucket}:rows`, a hash of pages of its rows (`freshet.tables.runs`),
and `{name:bucket}:meta`, a hash of the fields of `BucketMeta` and of bytes of pages: `base` when the bucket
was last written whole or merged, `added` since. Both keys change in one step:

- Only the meta: one script, APPLY.
- Changed rows and removed keys: MULTI, GATE, HSET of their pages, COMMIT, EXEC. GATE compares (fence, seq).
  If the flush must not be written it renames the rows, so that HSET fills a hash that COMMIT deletes. Pages
  are thus written by a native command; Lua would hash every byte of a script's arguments, which doubles a
  server's work as measured. No other command runs between MULTI and EXEC.
- A whole bucket: its pages are first written to a stage, a key of their own that expires if it is not used.
  One script, SWAP, then replaces the rows by one RENAME, however large the bucket is.
- Merged pages: staged likewise; REPLACE replaces the pages that were merged, if (fence, seq) has not changed
  since they were read.

If memory is full, Redis refuses a script or an EXEC as a whole before it has an effect.

Scripts are sent as text (EVAL): after a failover the new master may lack a script, and a transaction would
continue without its GATE.
"""

from __future__ import annotations

from collections.abc import Sequence

META_FIELDS = (b"fence", b"seq", b"rows", b"applied", b"rows_offset", b"clock_ms", b"format")
"""Fields of a bucket's meta, in the order of the scripts' arguments."""

READ_FIELDS = (*META_FIELDS, b"writer")
"""The same with the fence of the last flush, which a claim leaves alone; earlier releases do not write it."""

WRITTEN = 3
"""COMMIT returns WRITTEN plus the bytes of the bucket's pages if they were written and should be merged, or 0
if they were written; 1 and 2 are a FlushOutcome."""

STAGE_EXPIRES_S = 600
"""Lifetime of staged pages that are never used; longer than any call takes."""

SLACK_BYTES = 64 << 10
"""Pages are merged when the added bytes exceed half of `base` by this much; without it small buckets would be
rewritten all the time. Cost: at most 64 MiB for a model of 1,024 buckets."""

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
'rows_offset', ARGV[5], 'clock_ms', ARGV[6], 'format', ARGV[7], 'writer', ARGV[1])
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
"""KEYS stage. DEL only an existing key: a full server refuses a script before, but not after its first
write."""

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
"""KEYS meta, rows, stage; ARGV fence, seq, pages in the stage, their bytes. Returns 1 if it replaced them."""

CLAIM = """
local f = redis.call('HGET', KEYS[1], 'fence')
if not f or tonumber(f) > tonumber(ARGV[1]) then return f end
redis.call('HSET', KEYS[1], 'fence', ARGV[1])
return redis.call('HMGET', KEYS[1], 'fence', 'seq', 'rows', 'applied', 'rows_offset', 'clock_ms', 'format',
'writer')
"""
"""KEYS meta; ARGV fence. Returns the new meta, the higher fence that is stored, or nil without a meta."""

CREATE = (
    _META
    + """
if redis.call('EXISTS', KEYS[1]) == 0 then meta() end
return 0
"""
)
"""KEYS meta; ARGV META_FIELDS."""


def command(*arguments: bytes) -> bytes:
    """Encode a command in Redis's protocol."""
    return command_of(0, *arguments)


def command_of(more: int, *arguments: bytes) -> bytes:
    """Encode the start of a command, to be followed by `more` encoded arguments."""
    known = b"".join([b"$%d\r\n%b\r\n" % (len(argument), argument) for argument in arguments])
    return b"*%d\r\n%b" % (len(arguments) + more, known)


def evaluate(script: str, keys: Sequence[bytes], arguments: Sequence[bytes]) -> bytes:
    """Encode an EVAL of a script."""
    return command(b"EVAL", script.strip().encode(), b"%d" % len(keys), *keys, *arguments)


MULTI, EXEC = command(b"MULTI"), command(b"EXEC")
