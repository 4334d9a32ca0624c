"""What one replica presumably holds when it does not tell: the blocks of the prompts that were sent to it."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence, Set

__all__ = ["RecencyIndex"]


class RecencyIndex:
    """The blocks of recent prompts, at most ``capacity``, those of the longest unused prompts forgotten first.

    Prompts are numbered as they are sent. One is pending until its blocks are computed: they attract further prompts
    already, but whoever finds them missing then has found nothing out. What is found missing otherwise was evicted, and
    with it, as most engines evict the longest unused first, all that was last used before it. One thread uses it; an
    entry takes about 150 bytes.
    """

    def __init__(self, capacity: int) -> None:
        """``capacity`` is in blocks.

        Raises:
            ValueError: It is not positive.
        """
        if capacity < 1:
            raise ValueError(f"capacity must be at least 1 block, not {capacity}")
        self.capacity = capacity
        self._last_use: OrderedDict[bytes, int] = OrderedDict()  # the longest unused first, so numbers never fall
        self._pending: set[int] = set()
        self._sent = 0

    def __len__(self) -> int:
        """Blocks presumed to be held."""
        return len(self._last_use)

    @property
    def keys(self) -> Set[bytes]:
        """The keys of the blocks presumed to be held: a view, which follows what comes."""
        return self._last_use.keys()

    def computed_uses(self, keys: Sequence[bytes]) -> list[int]:
        """For each block from the start of a prompt that is held and computed, the prompt that used it last."""
        uses = []
        for key in keys:
            number = self._last_use.get(key)
            if number is None or number in self._pending:
                break
            uses.append(number)
        return uses

    def send(self, keys: Sequence[bytes]) -> int:
        """A prompt goes out with these blocks, first to last. Returns its number, pending until ``settle``."""
        self._sent += 1
        self._pending.add(self._sent)
        uses = self._last_use
        for key in reversed(keys):  # the end of a prompt is of no use without its beginning, and leaves before it
            uses[key] = self._sent
            uses.move_to_end(key)
        while len(uses) > self.capacity:
            uses.popitem(last=False)
        return self._sent

    def settle(self, number: int) -> None:
        """The prompt of this number is computed, or never will be. Safe to repeat."""
        self._pending.discard(number)

    def evicted(self, number: int) -> None:
        """A block that prompt ``number`` used last is gone: so is all that was not used later."""
        uses = self._last_use
        while uses and next(iter(uses.values())) <= number:
            uses.popitem(last=False)
