"""What is done inside Redis, in Lua. Each script runs alone and wholly.

Fields of `{NAME}:counts`:

    life        a random word, new whenever the stream is begun anew
    written     the next item's offset
    cursor      the next item to be taken or dropped has this offset or a later one
    taken       items that were taken; goes back to `settled` when a reader is opened
    committed   everything before this offset is dealt with, and deleted
    settled     of the items before `committed`, those that were taken and not dropped
    dropped     items that were dropped; each was deleted at once
    reader      the one reader's word, empty if there is none
    read_*      the first and the last offset that the latest `TAKE` took

So there are always `written - settled - dropped` items. Redis keeps the number of items itself: each script compares.

A script answers with a list: `ok` and its results, or one of the words that `ends.TROUBLE` explains. Its arguments begin
with `life`.
"""

from __future__ import annotations

_PRELUDE = """
local items, counts, writers, told = KEYS[1], KEYS[2], KEYS[3], KEYS[4]
local state = redis.call('HMGET', counts, 'life', 'written', 'taken', 'cursor', 'committed', 'settled', 'dropped')
if not state[1] then return {'gone'} end
if state[1] ~= ARGV[1] then return {'replaced'} end
local written, taken, cursor = tonumber(state[2]), tonumber(state[3]), tonumber(state[4])
local committed, settled, dropped = tonumber(state[5]), tonumber(state[6]), tonumber(state[7])
if redis.call('XLEN', items) ~= written - settled - dropped then return {'damaged'} end
local function offset_of(entry) return tonumber(string.match(entry[1], '^%d+')) end
"""

_READER = """
local known_taken, known_committed = tonumber(ARGV[3]), tonumber(ARGV[4])
if redis.call('HGET', counts, 'reader') ~= ARGV[2] then return {'displaced'} end
if taken < known_taken or committed < known_committed then return {'forgot'} end
"""

OPEN = """
local life = redis.call('HGET', KEYS[2], 'life')
if not life then
  if redis.call('EXISTS', KEYS[1], KEYS[2]) > 0 then return {'foreign'} end
  life = ARGV[1]
  redis.call('DEL', KEYS[3])
  redis.call('HSET', KEYS[2], 'life', life, 'written', 0, 'taken', 0, 'cursor', 0, 'committed', 0, 'settled', 0,
             'dropped', 0, 'reader', '')
end
return {'ok', life}
"""
"""life if the stream is new -> its life"""

STATS = _PRELUDE + "return {'ok', written, taken, dropped}"
"""life -> written, taken, dropped"""

ENROL = _PRELUDE + "redis.call('HSETNX', writers, ARGV[2], 0) return {'ok'}"
"""life, writer"""

DISMISS = "redis.call('HDEL', KEYS[3], ARGV[2]) redis.call('DEL', KEYS[4]) return {'ok'}"
"""life, writer"""

APPEND = (
    _PRELUDE
    + """
local number, capacity, drops, tell = tonumber(ARGV[3]), tonumber(ARGV[4]), ARGV[5] == 'drop_oldest', ARGV[6] == '1'
local latest = tonumber(redis.call('HGET', writers, ARGV[2]) or -1)
if latest == number then return {'ok', redis.call('LRANGE', told, 0, -1)} end
if latest ~= number - 1 then return {'forgot'} end
local pending = written - taken - dropped
if pending >= capacity and not drops then return {'full'} end
local lost = {}
if pending >= capacity then
  for _, entry in ipairs(redis.call('XRANGE', items, cursor, '+', 'COUNT', pending - capacity + 1)) do
    redis.call('XDEL', items, entry[1])
    cursor = offset_of(entry) + 1
    dropped = dropped + 1
    if tell then lost[#lost + 1] = entry[2][2] end
  end
end
redis.call('XADD', items, string.format('%d-1', written), 'item', ARGV[7])
redis.call('HSET', counts, 'written', written + 1, 'cursor', cursor, 'dropped', dropped)
redis.call('HSET', writers, ARGV[2], number)
if drops then redis.call('DEL', told) end
if #lost > 0 then
  for _, item in ipairs(lost) do redis.call('RPUSH', told, item) end
  redis.call('PEXPIRE', told, 3600000)
end
return {'ok', lost}
"""
)
"""life, writer, number of this append, capacity, when_full, 1 to be told what was dropped, item -> dropped items"""

READER = _PRELUDE + "return {'ok', redis.call('HGET', counts, 'reader')}"
"""life -> the reader's word"""

CLAIM = (
    _PRELUDE
    + """
local holder = redis.call('HGET', counts, 'reader')
if holder ~= ARGV[2] and holder ~= ARGV[3] then return {'displaced'} end
redis.call('HSET', counts, 'reader', ARGV[3], 'taken', settled, 'cursor', committed)
return {'ok', settled, committed}
"""
)
"""life, the reader before, the new one -> taken, committed"""

RELEASE = (
    "if redis.call('HGET', KEYS[2], 'reader') == ARGV[2] then redis.call('HSET', KEYS[2], 'reader', '') end return {'ok'}"
)
"""life, reader"""

TAKE = (
    _PRELUDE
    + _READER
    + """
if taken > known_taken then
  local unanswered = redis.call('HMGET', counts, 'read_first', 'read_last')
  return {'ok', redis.call('XRANGE', items, unanswered[1], unanswered[2])}
end
if cursor >= written then return {'ok', {}} end
local found = redis.call('XRANGE', items, cursor, '+', 'COUNT', ARGV[5])
if #found > 0 then
  local first, last = offset_of(found[1]), offset_of(found[#found])
  redis.call('HSET', counts, 'cursor', last + 1, 'taken', taken + #found, 'read_first', first, 'read_last', last)
end
return {'ok', found}
"""
)
"""life, reader, its `taken`, its `committed`, limit -> [id, [field, item]] of each item"""

COMMIT = (
    _PRELUDE
    + _READER
    + """
local offset, reached = tonumber(ARGV[5]), cursor
if offset > cursor then
  local following = redis.call('XRANGE', items, cursor, '+', 'COUNT', 1)
  reached = #following > 0 and offset_of(following[1]) or written
end
if offset > reached then return {'early', reached} end
if offset > committed then
  settled = settled + redis.call('XTRIM', items, 'MINID', offset)
  redis.call('HSET', counts, 'committed', offset, 'settled', settled)
end
return {'ok'}
"""
)
"""life, reader, its `taken`, its `committed`, offset"""

PEEK = (
    _PRELUDE
    + """
local from = math.max(tonumber(ARGV[2]), 0)
if ARGV[3] == 'waiting' then from = math.max(from, cursor) end
return {'ok', redis.call('XRANGE', items, string.format('%d', from), '+', 'COUNT', ARGV[4])}
"""
)
"""life, offset, `waiting` to leave out what was taken, limit -> [id, [field, item]] of each item; takes nothing"""

POSITION = _PRELUDE + "return {'ok', written, committed, settled}"
"""life -> written, committed, settled"""

REMOVE = "redis.call('DEL', KEYS[1], KEYS[2], KEYS[3]) return {'ok'}"
"""life"""

REWIND = """
local state = redis.call('HMGET', KEYS[2], 'life')
if state[1] == ARGV[2] then return {'ok'} end
if state[1] ~= ARGV[1] then return {'replaced'} end
local life, from, next = ARGV[2], tonumber(ARGV[3]), tonumber(ARGV[3])
redis.call('DEL', KEYS[5])
for i = 5, #ARGV do
  local entry = redis.call('XRANGE', KEYS[1], ARGV[i], ARGV[i])[1]
  if not entry then return {'damaged'} end
  redis.call('XADD', KEYS[5], string.format('%d-1', next), 'item', entry[2][2])
  next = next + 1
end
redis.call('DEL', KEYS[1], KEYS[3])
if next > from then redis.call('RENAME', KEYS[5], KEYS[1]) end
local dropped = tonumber(ARGV[4])
redis.call('HSET', KEYS[2], 'life', life, 'written', next, 'taken', from - dropped, 'cursor', from, 'committed', from,
           'settled', from - dropped, 'dropped', dropped, 'reader', '')
return {'ok'}
"""
"""life, the new life, offset, drops before it, ids of the items that stay"""
