"""The one factory of Redis clients, and the check that a server can be used.

Must never hand out a client with redis-py's defaults: its 5 s time-out and 10 retries would hold a ledger's
transaction for half a minute, and the shapes of its replies depend on `legacy_responses`.
"""

import re

from redis.asyncio import BlockingConnectionPool, Redis
from redis.asyncio.retry import Retry
from redis.backoff import NoBackoff
from redis.exceptions import ConnectionError as RedisConnectionError

from mesh.contract.errors import ErrorCode, MeshError, unavailable

CALL_TIMEOUT_S = 0.4
POOL_WAIT_S = 0.4
POOL_SIZE = 32
VERSION_MIN = (7, 0)


def connect(url: str, *, reply_timeout_s: float = CALL_TIMEOUT_S) -> Redis:
    """Return a client for redis://, rediss:// or unix:// URLs. Connects with the first call, not now.

    A call is tried once more when its connection turned out to be dead (a restarted server), never after a
    time-out. A cancelled call drops its connection.

    Args:
        reply_timeout_s: how long a reply may take; for blocking reads more than they block.

    Raises: MeshError `invalid_request` when the URL cannot be read.
    """
    try:
        pool = BlockingConnectionPool.from_url(
            url,
            max_connections=POOL_SIZE,
            timeout=POOL_WAIT_S,
            socket_timeout=reply_timeout_s,
            socket_connect_timeout=CALL_TIMEOUT_S,
            retry=Retry(NoBackoff(), 1, supported_errors=(RedisConnectionError,)),
            protocol=3,
            legacy_responses=False,
            decode_responses=True,
        )
    except ValueError as error:
        raise MeshError(
            ErrorCode.INVALID_REQUEST,
            f"the Redis URL cannot be read: {error}",
            hint="write redis://host:6379/0, rediss://… or unix:///path/to/redis.sock",
        ) from error
    return Redis.from_pool(pool)


async def verify_server(redis: Redis) -> None:
    """Refuse a server that is too old, evicts keys, or only reads.

    Raises: MeshError `invalid_request` with what to change; `unavailable` while it loads; redis-py's own errors
        when there is no answer.
    """
    info = await redis.info("server", "memory", "persistence", "replication")
    if str(info.get("loading", "0")) == "1":
        raise unavailable("the Redis server is still loading its data")
    text = str(info.get("redis_version", "0"))
    version = tuple(int(part) for part in re.findall(r"\d+", text)[:2])
    if version < VERSION_MIN:
        raise MeshError(
            ErrorCode.INVALID_REQUEST,
            f"the Redis server is version {text}",
            hint="use Redis 7.0 or newer, or Valkey",
        )
    policy = str(info.get("maxmemory_policy", "noeviction"))
    if policy != "noeviction":
        raise MeshError(
            ErrorCode.INVALID_REQUEST,
            f"the Redis server may evict keys (maxmemory-policy {policy}): it could drop part of the book unseen",
            hint="set maxmemory-policy to noeviction (CONFIG SET maxmemory-policy noeviction)",
        )
    if str(info.get("role", "master")) != "master":
        raise unavailable("the Redis server is a replica: it takes no writes")
