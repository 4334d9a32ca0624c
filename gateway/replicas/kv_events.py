"""One engine's stream of KV cache events, from ZeroMQ messages to what this gateway's observers hear."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Final

from engine.wire import CacheEvent
from gateway.replicas.base import EventHealth
from gateway.replicas.kv_blocks import KvBlocks
from gateway.replicas.kv_messages import MalformedEvents, decode_events
from gateway.replicas.kv_sequence import KvSequence

__all__ = ["KvEvents"]

_NUMBER_BYTES: Final = 8
_END: Final = -1


class KvEvents:
    """Follows one engine; does no input or output. Belongs to the event loop.

    ``tell`` hears what becomes of the engine's blocks, in this gateway's keys. At most ``capacity`` are followed.
    """

    def __init__(self, capacity: int, tell: Callable[[tuple[CacheEvent, ...]], None]) -> None:
        self._tell: Final = tell
        self._blocks: Final = KvBlocks(capacity)
        self.sequence: Final = KvSequence(self._deliver, self._restart)
        self._messages = 0
        self._malformed = 0
        self._failures = 0

    def limit(self, capacity: int) -> None:
        """Follow so many blocks at most from now on."""
        self._blocks.limit(capacity)

    @property
    def exact(self) -> bool:
        """Whether the events have told all that the engine holds."""
        return self._blocks.complete and self._blocks.tells_salt and not self._blocks.overflowed

    @property
    def follows(self) -> bool:
        """Whether what the events have told, and what requests have found since, is held, and nearly all that is."""
        known = self._blocks.complete or self._blocks.learns
        return known and self._blocks.tells_salt and not self._blocks.overflowed

    @property
    def block_size(self) -> int:
        """Tokens per block, as the events say; 0 before the first."""
        return self._blocks.block_size

    def health(self) -> EventHealth:
        """How the stream is now."""
        sequence = self.sequence
        return EventHealth(
            self.exact,
            self._problem(),
            self._messages,
            sequence.repeated,
            sequence.gaps,
            sequence.losses,
            sequence.restarts,
            self._malformed,
            self._failures,
            len(self._blocks),
        )

    def snapshot(self) -> tuple[CacheEvent, ...]:
        """All that is known to be held, told from the beginning."""
        return tuple(self._blocks.snapshot())

    def receive(self, frames: Sequence[bytes]) -> None:
        """Take a message as it was published: topic, number, payload."""
        number = _number(frames)
        if number is None or number < 0:
            self._refuse()
        else:
            self.sequence.receive(number, frames[-1])

    def replay(self, frames: Sequence[bytes]) -> bool:
        """Take a message that was asked for; False when it says that there are no more.

        vLLM repeats the topic in front of the number, older versions and SGLang do not.
        """
        number = _number(frames)
        if number == _END:
            return False
        if number is None or number < 0:
            self._refuse()
        else:
            self.sequence.replayed(number, frames[-1])
        return True

    def found(self, root: bytes, token_ids: Sequence[int], cached_tokens: int) -> None:
        """A request has ended, of whose prompt under ``root`` so many tokens were cached."""
        if told := tuple(self._blocks.found(root, token_ids, cached_tokens)):
            self._tell(told)

    def failed(self) -> None:
        """What has come could not be taken in: without learning it all again it would count as exact."""
        self._failures += 1
        self.sequence.reset()

    # --- inside ------------------------------------------------------------------------------------------

    def _deliver(self, payload: bytes) -> None:
        self._messages += 1
        told: list[CacheEvent] = []
        try:
            for event in decode_events(payload):
                told.extend(self._blocks.apply(event))
        except MalformedEvents:
            # What it should have told is unknown, so it may be about any block.
            self._refuse()
            told = [self._blocks.clear(complete=False)]
        if told:
            self._tell(tuple(told))

    def _restart(self, complete: bool) -> None:
        self._tell((self._blocks.clear(complete=complete),))

    def _refuse(self) -> None:
        self._malformed += 1
        self._blocks.complete = False

    def _problem(self) -> str | None:
        if not self._blocks.tells_salt:
            return "its cache events do not tell the cache salt, as vLLM's do since early 2026"
        if self._blocks.overflowed:
            return "it holds more blocks than are followed (index.max_blocks)"
        if not self._blocks.complete:
            return "its cache events were not heard from the beginning of its life"
        return None


def _number(frames: Sequence[bytes]) -> int | None:
    """The number of a message; None when there is none."""
    if len(frames) < 2 or len(frames[-2]) != _NUMBER_BYTES:
        return None
    return int.from_bytes(frames[-2], "big", signed=True)
