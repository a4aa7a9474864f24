"""What is sent to Redis: keys, Lua scripts, and the commands of a bucket's flush.

A bucket has two keys in one slot: `{name:bucket}:rows`, a hash of its rows (`freshet.tables.hashes`), and
`{name:bucket}:meta`, a hash of fence, seq and the rest of `BucketMeta`. What both hold changes in one step:

- Nothing but meta and removed keys: one script, APPLY.
- Changed rows: MULTI, GATE, plain HSETs, COMMIT, EXEC. GATE compares (fence, seq); if the flush may not be
  written it moves the rows out of the way, so that the HSETs fill a hash that COMMIT throws away. Rows are
  thus written by native commands (measured: at 0.8 to 0.9 of what plain HSETs reach; rows as a script's
  arguments: 0.35 to 0.6), and nothing else runs between MULTI and EXEC. Redis refuses the EXEC as a whole
  if memory is full, and so before GATE has done anything.
- A whole bucket: its rows are first gathered under a key of their own, which expires if nobody finishes it;
  then one script, SWAP, puts it in the place of the old ones. However large a bucket, that is one RENAME.

Scripts are sent as text (EVAL): a transaction whose GATE was not found, as a new master does not know it,
would go on without it.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

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
    "SWAP",
    "WRITE",
    "command",
    "evaluate",
]

META_FIELDS = (b"fence", b"seq", b"rows", b"applied", b"rows_offset", b"clock_ms", b"format")
"""Of a bucket's meta, in the order in which scripts take them."""

WRITE = 3
"""GATE's answer if the flush is to be written; any other is a FlushOutcome."""

STAGE_EXPIRES_S = 600
"""Rows that were gathered for a whole bucket and never put in place: longer than any call takes."""

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
local function meta()
redis.call('HSET', KEYS[1], 'fence', ARGV[1], 'seq', ARGV[2], 'rows', ARGV[3], 'applied', ARGV[4],
'rows_offset', ARGV[5], 'clock_ms', ARGV[6], 'format', ARGV[7])
end
local function remove(first)
for i = first, #ARGV, 1000 do
redis.call('HDEL', KEYS[2], unpack(ARGV, i, math.min(i + 999, #ARGV)))
end
end
"""

APPLY = (
    _VERDICT
    + """
local v = verdict(ARGV[1], ARGV[2])
if v ~= 3 then return v end
meta()
remove(8)
return 0
"""
)
"""KEYS meta, rows; ARGV META_FIELDS, removed fields. Meta first: a full server refuses that, and with it
all."""

GATE = (
    _VERDICT[: _VERDICT.index("local function meta")]
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
    _VERDICT[_VERDICT.index("local function meta") :]
    + """
local v = redis.call('HGET', KEYS[1], 'gate')
if not v then return redis.error_reply('GATE did not run') end
redis.call('HDEL', KEYS[1], 'gate')
if v == '3' then
meta()
remove(8)
return 0
end
redis.call('UNLINK', KEYS[2])
if redis.call('EXISTS', KEYS[3]) == 1 then redis.call('RENAME', KEYS[3], KEYS[2]) end
return tonumber(v)
"""
)
"""KEYS meta, rows, aside; ARGV META_FIELDS, removed fields."""

OPEN = f"""
if redis.call('EXISTS', KEYS[1]) == 1 then redis.call('DEL', KEYS[1]) end
redis.call('HSET', KEYS[1], '', '')
return redis.call('EXPIRE', KEYS[1], {STAGE_EXPIRES_S})
"""
"""KEYS stage. No DEL of nothing: a full server lets a script that has written go on to write."""

SWAP = (
    _VERDICT
    + """
local v = verdict(ARGV[1], ARGV[2])
if v == 0 or v == 1 then
redis.call('UNLINK', KEYS[3])
return v
end
local n = redis.call('HLEN', KEYS[3]) - 1
if n ~= tonumber(ARGV[8]) then
redis.call('UNLINK', KEYS[3])
return redis.error_reply('STAGE holds ' .. n .. ' rows, expected ' .. ARGV[8])
end
meta()
redis.call('UNLINK', KEYS[2])
redis.call('HDEL', KEYS[3], '')
if n > 0 then
redis.call('RENAME', KEYS[3], KEYS[2])
redis.call('PERSIST', KEYS[2])
end
return 0
"""
)
"""KEYS meta, rows, stage; ARGV META_FIELDS, rows in the stage."""

CLAIM = """
local f = redis.call('HGET', KEYS[1], 'fence')
if not f or tonumber(f) > tonumber(ARGV[1]) then return f end
redis.call('HSET', KEYS[1], 'fence', ARGV[1])
return redis.call('HMGET', KEYS[1], 'fence', 'seq', 'rows', 'applied', 'rows_offset', 'clock_ms', 'format')
"""
"""KEYS meta; ARGV fence. Answers the meta as it then is, the higher fence that there is, or nil."""

CREATE = (
    _VERDICT[_VERDICT.index("local function meta") : _VERDICT.index("local function remove")]
    + """
if redis.call('EXISTS', KEYS[1]) == 0 then meta() end
return 0
"""
)
"""KEYS meta; ARGV META_FIELDS."""


def command(*arguments: bytes) -> bytes:
    """One command in Redis's protocol."""
    return b"*%d\r\n%b" % (len(arguments), _bulk(arguments))


def evaluate(
    script: str,
    keys: Sequence[bytes],
    arguments: Sequence[bytes],
    more: bytes | memoryview = b"",
    how_many_more: int = 0,
) -> bytes:
    """EVAL of a script; `more` holds further arguments, as they go over the wire."""
    known = (b"EVAL", script.strip().encode(), b"%d" % len(keys), *keys, *arguments)
    return b"".join((b"*%d\r\n" % (len(known) + how_many_more), _bulk(known), more))


def _bulk(arguments: Iterable[bytes]) -> bytes:
    return b"".join([b"$%d\r\n%b\r\n" % (len(argument), argument) for argument in arguments])


MULTI, EXEC = command(b"MULTI"), command(b"EXEC")
