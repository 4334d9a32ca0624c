"""The order of an engine's event messages: each once, none left out, and none of a former life.

Messages are numbered from 0 in each life of the engine. They come over a channel that loses, and so may be repeated or
late; the engine keeps the last ones for whoever asks for them again, from a number on. A number alone does not tell one
life from another: the message that was taken last is asked for too, and has to be the same.
"""

from __future__ import annotations

import enum
from collections import OrderedDict
from collections.abc import Callable
from typing import Final

from xxhash import xxh3_64_intdigest

__all__ = ["MAX_HELD", "MAX_HELD_BYTES", "KvSequence"]

MAX_HELD: Final = 10_000
MAX_HELD_BYTES: Final = 64 * 1024 * 1024
"""What may wait behind a gap; more than that, and the gap is given up."""

_REMEMBERED: Final = 1024
_ATTEMPTS: Final = 3


class _Replay(enum.Enum):
    """What the replay that is under way has shown."""

    NONE = enum.auto()
    BEGUN = enum.auto()  # nothing has come yet
    VERIFIED = enum.auto()  # it began with the message that was taken last, or at the very beginning
    VOID = enum.auto()  # what it tells is of no use


class KvSequence:
    """Puts the messages of one publisher in order. Owned by its event feed; does no input or output.

    ``deliver`` gets each payload in its turn. ``restart`` is called when all that was delivered before has lost its
    meaning, with whether what follows is complete from the beginning of the engine's life. ``wanted`` is the number
    from which a replay should be asked for, None while there is no need.
    """

    def __init__(self, deliver: Callable[[bytes], None], restart: Callable[[bool], None]) -> None:
        self._deliver: Final = deliver
        self._restart: Final = restart
        self._next: int | None = None  # None: nothing is known of where the publisher is
        self._recent: OrderedDict[int, int] = OrderedDict()  # number -> digest of what was delivered
        self._held: dict[int, bytes] = {}
        self._held_bytes = 0
        self._doubtful = True  # whether this is still the life that was followed has to be found out
        self._stray: tuple[int, bytes] | None = None  # below what was taken, and too old to be remembered
        self._replay = _Replay.NONE
        self._asked_at: int | None = None  # ``_next`` when the replay was begun
        self._attempts = 0
        self.wanted: int | None = 0
        self.gaps = 0
        """Times that messages were missing."""
        self.restarts = 0
        """Times that the publisher had begun a new life."""
        self.losses = 0
        """Times that what was missing could not be had any more."""
        self.repeated = 0
        """Messages that had come before."""

    @property
    def settled(self) -> bool:
        """Whether all that has come was delivered."""
        return not self._doubtful and not self._held and self._replay is _Replay.NONE

    def doubt(self) -> None:
        """The connection was lost: nothing more is taken before it is verified that the publisher still lives."""
        self._doubtful = True
        self._want()

    def check(self) -> None:
        """Nothing has come for a while: have it verified that nothing is missing."""
        if self._replay is _Replay.NONE:
            self._want()

    def reset(self) -> None:
        """Learn everything again."""
        self._forget()
        self._restart(False)
        self._next = None
        self._void()
        self.doubt()

    def receive(self, number: int, payload: bytes) -> None:
        """A message has come by itself."""
        if self._next is not None and number < self._next:
            self._seen_before(number, payload)
        elif number == self._next and not self._doubtful:
            self._take(number, payload)
            self._take_held()
        else:
            self._hold(number, payload)
            if self._replay is _Replay.NONE and self.wanted is None:
                self.gaps += 1
                self._want()

    def begin_replay(self) -> None:
        """What was ``wanted`` has been asked for; ``replayed`` gets what comes, then one of the two below is called."""
        self._replay = _Replay.BEGUN
        self._asked_at = self._next
        self.wanted = None

    def replayed(self, number: int, payload: bytes) -> None:
        """A message has come because it was asked for."""
        if self._replay is _Replay.BEGUN:
            self._replay = self._judge(number, payload)
        if self._replay is not _Replay.VERIFIED or self._next is None:
            return
        if number == self._next:
            self._take(number, payload)
        elif number > self._next:
            self._hold(number, payload)

    def end_replay(self) -> None:
        """The replay is complete."""
        state, self._replay = self._replay, _Replay.NONE
        if state is _Replay.VOID:
            self._want()
            return
        if state is _Replay.BEGUN and self._next:
            self._begin_anew()  # the publisher does not know of what was taken last
            return
        if self._next is None:  # nothing was published yet
            self._start(0, complete=True)
        self._doubtful = False
        self._stray = None
        self._take_held()
        if not self._held or self._next != self._asked_at:
            self._attempts = 0
        if self._held:
            self._try_again()

    def fail_replay(self) -> None:
        """There is no replay, or it has not come in time."""
        self._replay = _Replay.NONE
        self._try_again()

    def abandon_replay(self) -> None:
        """The connection was lost in the middle of it: it says nothing, and is asked for again."""
        self._replay = _Replay.NONE
        self._want()

    def give_up(self) -> None:
        """There is no replay, and never will be."""
        self._replay = _Replay.NONE
        self._give_up()

    # --- inside ------------------------------------------------------------------------------------------

    def _judge(self, number: int, payload: bytes) -> _Replay:
        """What the first message of a replay shows."""
        if self._next is None:
            self._start(number, complete=number == 0)
            return _Replay.VERIFIED
        if not self._next:
            return _Replay.VERIFIED
        if number < self._next:
            if self._recent.get(number) in (None, xxh3_64_intdigest(payload)):
                return _Replay.VERIFIED
            self._begin_anew()
            return _Replay.VOID
        # The publisher has forgotten where this was.
        self.losses += 1
        self._start(number, complete=False)
        return _Replay.VERIFIED

    def _seen_before(self, number: int, payload: bytes) -> None:
        known = self._recent.get(number)
        if known == xxh3_64_intdigest(payload):
            self.repeated += 1
            return
        if known is None and number:  # of another life, or too long ago to be remembered
            self._stray = number, payload
            self.doubt()
            return
        self.restarts += 1
        self._forget()
        self._void()
        self._start(0, complete=True)
        self._doubtful = False
        self.receive(number, payload)

    def _begin_anew(self) -> None:
        """The publisher lives another life: learn it from its beginning."""
        self.restarts += 1
        self._forget()
        self._restart(False)
        self._next = None
        self._doubtful = True
        self._want()

    def _try_again(self) -> None:
        self._attempts += 1
        if self._attempts < _ATTEMPTS:
            self._want()
        else:
            self._give_up()

    def _give_up(self) -> None:
        """Go on from what is there, without what is missing."""
        self._attempts = 0
        self.wanted = None
        self._doubtful = False
        if self._stray is not None:
            stray, self._stray = self._stray, None
            self.restarts += 1
            self._forget()
            self._start(stray[0], complete=False)
            self._take(*stray)
            return
        first = min(self._held, default=None)
        if first is None or first == self._next:
            self._take_held()
            return
        if self._next is not None:
            self.losses += 1
        self._start(first, complete=first == 0)
        self._take_held()

    def _start(self, number: int, *, complete: bool) -> None:
        self._recent.clear()
        self._next = number
        self._restart(complete)

    def _forget(self) -> None:
        self._held.clear()
        self._held_bytes = 0
        self._attempts = 0
        self._stray = None
        self._recent.clear()

    def _void(self) -> None:
        if self._replay is not _Replay.NONE:
            self._replay = _Replay.VOID

    def _want(self) -> None:
        self.wanted = max(0, self._next - 1) if self._next else 0

    def _take(self, number: int, payload: bytes) -> None:
        self._next = number + 1
        self._recent[number] = xxh3_64_intdigest(payload)
        if len(self._recent) > _REMEMBERED:
            self._recent.popitem(last=False)
        self._deliver(payload)

    def _take_held(self) -> None:
        held = self._held
        while held and self._next in held:
            payload = held.pop(self._next)
            self._held_bytes -= len(payload)
            self._take(self._next, payload)
        if held and self._next is not None:
            for number in [number for number in held if number < self._next]:
                self._held_bytes -= len(held.pop(number))

    def _hold(self, number: int, payload: bytes) -> None:
        if number in self._held:
            self.repeated += 1
            return
        if self._held and (len(self._held) >= MAX_HELD or self._held_bytes + len(payload) > MAX_HELD_BYTES):
            self._give_up()
            self.receive(number, payload)
            return
        self._held[number] = payload
        self._held_bytes += len(payload)
