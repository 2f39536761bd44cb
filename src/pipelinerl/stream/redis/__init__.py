"""A stream in Redis: for stages on several machines. Needs the extra `redis`.

    {NAME}:items          a Redis stream: the item of offset n has id n-1 and one field, `item`, its JSON
    {NAME}:counts         a hash: what was written, taken, committed and dropped, and who reads (see `scripts`)
    {NAME}:writers        a hash: the number of each writer's latest append
    {NAME}:dropped:ID     what the latest append of writer ID dropped; Redis deletes it after an hour

Each operation is one script, so it happens wholly or not at all, whoever else writes or reads. Whatever an end does has a
number, or can be told from the counts it was based on: sent again after a lost connection, it is not done twice, and a Redis
that has forgotten something is found out.
"""

from pipelinerl.stream.redis.ends import RedisStreamReader, RedisStreamWriter
from pipelinerl.stream.redis.offline import remove_stream, rewind_stream, waiting_in_redis
from pipelinerl.stream.redis.server import RedisServer, start_server

__all__ = [
    "RedisServer",
    "RedisStreamReader",
    "RedisStreamWriter",
    "remove_stream",
    "rewind_stream",
    "start_server",
    "waiting_in_redis",
]
