"""How the server of the statistics is reached: at one address, as a cluster, or wherever Sentinel says it is.

====================================================  =====================================================
``redis://HOST:PORT/DB``, ``unix:///PATH``            one server
``redis+sentinel://HOST,HOST:PORT/SERVICE/DB``        the one that these Sentinels call the primary of SERVICE
``redis+cluster://HOST,HOST:PORT``                    a cluster, of which these are some nodes
====================================================  =====================================================

``rediss`` in place of ``redis`` is TLS. User and password stand before the first host, further options behind ``?`` as
redis-py has them (``ssl_ca_certs=…``); Sentinels that want a password of their own get ``sentinel_username`` and
``sentinel_password``.
"""

from __future__ import annotations

import contextlib
import re
from collections.abc import Awaitable, Callable
from typing import Any, Final
from urllib.parse import parse_qsl, urlencode, urlsplit

from redis.asyncio import Redis, RedisCluster
from redis.asyncio.cluster import ClusterNode
from redis.asyncio.connection import SSLConnection, parse_url
from redis.asyncio.retry import Retry
from redis.asyncio.sentinel import Sentinel
from redis.backoff import NoBackoff
from redis.exceptions import RedisClusterException, RedisError

from gateway.errors import ConfigError

__all__ = ["RedisClient", "StoreConnection"]

RedisClient = Redis | RedisCluster

_COMMAND_TIMEOUT_S: Final = 2.0
_SCHEME: Final = re.compile(r"(?P<transport>rediss?)(\+(?P<kind>sentinel|cluster))?|unix")
_HOST: Final = re.compile(r"(\[(?P<v6>[0-9A-Fa-f:.]+)\]|(?P<name>[^\[\]:]+))(:(?P<port>\d{1,5}))?")
_PORTS: Final = {"sentinel": 26379, "cluster": 6379}
_SENTINEL_OPTIONS: Final = {"sentinel_username": "username", "sentinel_password": "password"}


class StoreConnection:
    """A client of the server at ``url``. Connects when it is first used; owns all connections there are."""

    def __init__(self, url: str) -> None:
        """Raises ``ConfigError`` when the URL cannot be understood."""
        self._dropping: list[Callable[[], Awaitable[Any]]] = []
        self._closing: list[Callable[[], Awaitable[Any]]] = []
        self._is_cluster = False
        parts = urlsplit(url)
        self.where: Final = f"{parts.scheme}://{parts.netloc.rpartition('@')[2]}{parts.path}"
        """The URL without user, password and options."""
        try:
            self.client: Final = self._connect(url)
        except (ValueError, TypeError, RedisClusterException) as error:
            raise ConfigError(f"redis.url: {error}", param="redis.url") from error

    def prefix(self, configured: str) -> str:
        """What every key begins with. In a cluster it is a hash tag: scripts have all their keys at one node then."""
        return f"{{{configured}}}" if self._is_cluster and "{" not in configured else configured

    async def drop(self) -> None:
        """Connect anew next time: the address may lead elsewhere by then, and no half-read reply must be met again."""
        await _all(self._dropping)

    async def close(self) -> None:
        """Close all connections."""
        await _all(self._closing)

    def _connect(self, url: str) -> RedisClient:
        parts = urlsplit(url)
        scheme = _SCHEME.fullmatch(parts.scheme)
        if scheme is None:
            raise ValueError(
                "it has to be one that begins with redis://, rediss://, unix://, redis+sentinel:// or redis+cluster://."
            )
        # No retries of the client's own: they are silent, and the loop tries again anyway.
        settings: dict[str, Any] = {
            "retry": Retry(NoBackoff(), 0),
            "socket_timeout": _COMMAND_TIMEOUT_S,
            "socket_connect_timeout": _COMMAND_TIMEOUT_S,
            "protocol": 2,
        }
        kind = scheme["kind"]
        if kind is None:
            client = Redis.from_url(url, **settings)
            self._dropping = [client.connection_pool.disconnect]
            self._closing = [client.aclose]
            return client
        credentials, _, netloc = parts.netloc.rpartition("@")
        nodes = [_node(text, _PORTS[kind]) for text in netloc.split(",")]
        options = dict(parse_qsl(parts.query))
        path = [part for part in parts.path.split("/") if part]
        sentinels = {name: options.pop(option) for option, name in _SENTINEL_OPTIONS.items() if option in options}
        plain = f"{scheme['transport']}://{credentials}@host/{path[1] if len(path) > 1 else ''}?{urlencode(options)}"
        settings |= parse_url(plain)
        del settings["host"]
        if settings.pop("connection_class", None) is SSLConnection:
            settings["ssl"] = True
        if kind == "cluster":
            return self._cluster(nodes, path, settings)
        return self._sentinel(nodes, path, settings, sentinels)

    def _cluster(self, nodes: list[tuple[str, int]], path: list[str], settings: dict[str, Any]) -> RedisClient:
        if path not in ([], ["0"]):
            raise ValueError("a cluster has no databases: redis+cluster://HOST:PORT,HOST:PORT.")
        self._is_cluster = True
        # The given nodes are asked again when all others are lost: names of theirs may lead elsewhere by then.
        startup = [ClusterNode(*node) for node in nodes]
        client = RedisCluster(startup_nodes=startup, dynamic_startup_nodes=False, **settings)
        self._dropping = self._closing = [client.aclose]
        return client

    def _sentinel(
        self, nodes: list[tuple[str, int]], path: list[str], settings: dict[str, Any], own: dict[str, str]
    ) -> RedisClient:
        if not 1 <= len(path) <= 2:
            raise ValueError("the name of the service is missing: redis+sentinel://HOST:PORT,HOST:PORT/SERVICE/DB.")
        shared = {name: value for name, value in settings.items() if name not in ("db", "username", "password")}
        sentinel = Sentinel(nodes, sentinel_kwargs=shared | own, **settings)  # type: ignore[no-untyped-call]
        client: Redis = sentinel.master_for(path[0])
        watchers = [each.connection_pool.disconnect for each in sentinel.sentinels]
        self._dropping = [client.connection_pool.disconnect, *watchers]
        self._closing = [client.aclose, *(each.aclose for each in sentinel.sentinels)]
        return client


def _node(text: str, port: int) -> tuple[str, int]:
    match = _HOST.fullmatch(text)
    if match is None or not 0 < int(match["port"] or port) < 65536:
        raise ValueError("it needs hosts, as HOST:PORT,HOST:PORT.")
    return match["v6"] or match["name"], int(match["port"] or port)


async def _all(calls: list[Callable[[], Awaitable[Any]]]) -> None:
    for call in calls:
        with contextlib.suppress(RedisError, RedisClusterException, OSError):
            await call()
