"""The one factory of Redis clients; each connection verifies that its server can be used.

Must never hand out a client with redis-py's defaults: its 5 s time-out and 10 retries would hold a ledger's
transaction for half a minute, the shapes of its replies depend on `legacy_responses`, and its handshake for
maintenance notices switches off the check that a pooled connection holds no old reply.
"""

import re
from collections.abc import Mapping

from redis.asyncio import ConnectionPool, Redis
from redis.asyncio.connection import AbstractConnection
from redis.asyncio.retry import Retry
from redis.backoff import NoBackoff
from redis.exceptions import ConnectionError as RedisConnectionError
from redis.exceptions import RedisError
from redis.maint_notifications import MaintNotificationsConfig

from mesh.contract.errors import ErrorCode, MeshError, unavailable

CONNECT_TIMEOUT_S = 0.4
VERSION_MIN = (7, 0)
_SECTIONS = ("server", "memory", "persistence", "replication")


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
            redis_connect_func=_greet,
        )
    except ValueError as error:
        raise MeshError(
            ErrorCode.INVALID_REQUEST,
            f"the Redis URL cannot be read: {error}",
            hint="write redis://host:6379/0, rediss://… or unix:///path/to/redis.sock",
        ) from error
    return Redis.from_pool(pool)


class UnfitServer(RedisError):
    """The server answers and may not be used; `reason` says what to change. Raised by any call that connects."""

    def __init__(self, reason: MeshError) -> None:
        super().__init__(reason.detail)
        self.reason = reason


async def verify_server(redis: Redis) -> None:
    """Refuse a server that is too old, evicts keys, only reads, or is still loading.

    Raises: UnfitServer; redis-py's other errors when there is no answer.
    """
    _judge({name: str(value) for name, value in (await redis.info(*_SECTIONS)).items()})


async def _greet(connection: AbstractConnection) -> None:
    """Begin a connection: whatever server came back behind the address, it is verified before it is used."""
    await connection.on_connect()
    await connection.send_command("INFO", *_SECTIONS, check_health=False)
    text = str(await connection.read_response())
    _judge(dict(line.split(":", 1) for line in text.splitlines() if ":" in line))


def _judge(info: Mapping[str, str]) -> None:
    version = info.get("redis_version", "0")
    policy = info.get("maxmemory_policy", "noeviction")
    if info.get("loading", "0") == "1":
        raise UnfitServer(unavailable("the Redis server is still loading its data"))
    if tuple(int(part) for part in re.findall(r"\d+", version)[:2]) < VERSION_MIN:
        reason = f"the Redis server is version {version}"
        raise UnfitServer(
            MeshError(ErrorCode.INVALID_REQUEST, reason, hint="use Redis 7.0 or newer, or Valkey"),
        )
    if policy != "noeviction":
        reason = f"the Redis server may evict keys (maxmemory-policy {policy}): it could drop part of the book unseen"
        hint = "set maxmemory-policy to noeviction (CONFIG SET maxmemory-policy noeviction)"
        raise UnfitServer(MeshError(ErrorCode.INVALID_REQUEST, reason, hint=hint))
    if info.get("role", "master") != "master":
        raise UnfitServer(unavailable("the Redis server is a replica: it takes no writes"))
