"""How far what was predicted of a replica's cache came true, over its recent requests."""

from __future__ import annotations

from collections import deque
from typing import Final

__all__ = ["MIN_REQUESTS", "WINDOW", "Agreement"]

WINDOW: Final = 64
"""Requests that are looked back on."""

MIN_REQUESTS: Final = 8
"""So few requests for which anything was predicted prove nothing yet."""


class Agreement:
    """Predicted against reported cached tokens of the last ``WINDOW`` requests that had either. One thread uses it."""

    __slots__ = ("_both", "_predicted", "_reported", "_requests", "_with_prediction")

    def __init__(self) -> None:
        self._requests: deque[tuple[int, int]] = deque()
        self._predicted = self._reported = self._both = self._with_prediction = 0

    def add(self, predicted: int, reported: int) -> None:
        """One request: prompt tokens that were predicted to be cached, and those that the replica says were."""
        if predicted == reported == 0:
            return
        self._requests.append((predicted, reported))
        self._count(predicted, reported, 1)
        if len(self._requests) > WINDOW:
            self._count(*self._requests.popleft(), -1)

    @property
    def requests(self) -> int:
        """How many it covers."""
        return len(self._requests)

    @property
    def precision(self) -> float | None:
        """Share of the predicted tokens that were cached; None as long as that proves nothing."""
        return self._both / self._predicted if self._with_prediction >= MIN_REQUESTS else None

    @property
    def recall(self) -> float | None:
        """Share of the cached tokens that had been predicted; None as long as none were cached."""
        return self._both / self._reported if self._reported else None

    def _count(self, predicted: int, reported: int, sign: int) -> None:
        self._predicted += sign * predicted
        self._reported += sign * reported
        self._both += sign * min(predicted, reported)
        self._with_prediction += sign * (predicted > 0)
