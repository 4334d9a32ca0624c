"""The cache events of one remote replica, over the replica's lives: what it holds, told to the replica's observers."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Final
from urllib.parse import urlsplit

from engine.wire import CacheEvent
from gateway.config import ReplicaConfig
from gateway.replicas.base import EventHealth
from gateway.replicas.kv_events import KvEvents
from gateway.replicas.kv_subscription import KvSubscription

__all__ = ["KvFeed"]


class KvFeed:
    """Owned by the replica; belongs to the event loop.

    It goes on while the replica is down for the gateway: a server that only failed a health check still holds what it
    held. Of one that was really gone its connection was lost too, and nothing is believed any more.
    """

    def __init__(
        self,
        id: str,
        endpoint: str,
        replay: str | None,
        *,
        max_blocks: int,
        tell: Callable[[tuple[CacheEvent, ...]], None],
    ) -> None:
        """``tell`` hears the events while the replica is up; between ``down`` and ``up`` nothing is told."""
        self._tell: Final = tell
        self._endpoint: Final = endpoint
        self._max_blocks: Final = max_blocks
        self._events: Final = KvEvents(max_blocks, self._pass_on)
        self._subscription: Final = KvSubscription(self._events, endpoint, replay, name=id)
        self._up = False

    @classmethod
    def of(
        cls, id: str, config: ReplicaConfig, max_blocks: int, tell: Callable[[tuple[CacheEvent, ...]], None]
    ) -> KvFeed | None:
        """The feed of a configured replica; None where no events are to be had."""
        if config.events is None:
            return None
        host = urlsplit(config.url).hostname or ""
        host = f"[{host}]" if ":" in host else host
        replay = config.events_replay and config.events_replay.replace("{host}", host)
        return cls(id, config.events.replace("{host}", host), replay, max_blocks=max_blocks, tell=tell)

    @property
    def exact(self) -> bool:
        """Whether the events have told all that the replica holds."""
        return self._events.exact

    @property
    def follows(self) -> bool:
        """Whether what the replica holds is known from its events: all, or what requests have found since."""
        return self._events.follows

    @property
    def block_size(self) -> int:
        """Tokens per block, as the events say; 0 before the first."""
        return self._events.block_size

    def health(self) -> EventHealth:
        """How the stream is now."""
        return self._events.health()

    def problems(self) -> tuple[str, ...]:
        """What is wrong with the stream, in words an operator can act on."""
        subscription = self._subscription
        if not subscription.connected:
            return (f"its cache events do not come from {self._endpoint}: what it holds is presumed",)
        problem = self._events.health().problem
        if problem is None:
            return ()
        if self._events.follows:
            return (f"{problem}: what it held then is learned as requests find it",)
        hint = "; they could not be replayed either" if subscription.replays_fail else ""
        return (f"{problem}{hint}: what it holds is presumed",)

    def start(self) -> None:
        """Begin to listen."""
        self._subscription.start()

    async def stop(self) -> None:
        """Close the connections."""
        await self._subscription.stop()

    def up(self, blocks: int) -> None:
        """The replica serves (again). ``blocks`` is the size of its cache, 0 where it does not tell."""
        self._events.limit(min(blocks or self._max_blocks, self._max_blocks))
        self._up = True
        self._tell(self._events.snapshot())
        self._subscription.verify()

    def down(self) -> None:
        """The replica is lost for the gateway."""
        self._up = False
        if not self._subscription.connected:
            self._subscription.reset()

    def found(self, root: bytes, token_ids: Sequence[int], cached_tokens: int) -> None:
        """A request has ended, of whose prompt under ``root`` so many tokens were cached."""
        self._events.found(root, token_ids, cached_tokens)

    def resync(self) -> None:
        """Drop what is known and learn it again."""
        self._subscription.reset()

    def _pass_on(self, events: tuple[CacheEvent, ...]) -> None:
        if self._up:
            self._tell(events)
