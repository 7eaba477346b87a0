"""The one factory of Redis clients, and the check that a server can be used.

Must never hand out a client with redis-py's defaults: its 5 s time-out and 10 retries would hold a ledger's
transaction for half a minute, the shapes of its replies depend on `legacy_responses`, and its handshake for
maintenance notices switches off the check that a pooled connection holds no old reply.
"""

import re

from redis.asyncio import ConnectionPool, Redis
from redis.asyncio.retry import Retry
from redis.backoff import NoBackoff
from redis.exceptions import ConnectionError as RedisConnectionError
from redis.maint_notifications import MaintNotificationsConfig

from mesh.contract.errors import ErrorCode, MeshError, unavailable

CONNECT_TIMEOUT_S = 0.4
VERSION_MIN = (7, 0)


def connect(url: str, *, is_blocking: bool = False) -> Redis:
    """Return a client for redis://, rediss:// or unix:// URLs. Connects with the first call, not now.

    It waits for replies without end: put every call under `asyncio.timeout`; a cancelled call drops its
    connection. (With `socket_timeout` set, redis-py sends through `asyncio.wait_for`, which on Python 3.11 loses
    a cancellation that comes while it ends: measured 1 in 20 at the start of a call.)

    Args:
        is_blocking: for blocking reads, which tell every break of the connection; other calls are tried once more
            when their connection turned out to be dead, as after a restart of the server.

    Raises: MeshError `invalid_request` when the URL cannot be read.
    """
    try:
        pool = ConnectionPool.from_url(
            url,
            socket_timeout=None,
            socket_connect_timeout=CONNECT_TIMEOUT_S,
            retry=Retry(NoBackoff(), 0 if is_blocking else 1, supported_errors=(RedisConnectionError,)),
            protocol=3,
            legacy_responses=False,
            maint_notifications_config=MaintNotificationsConfig(enabled=False),
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
