"""How long ago something was evicted, in classes: sums of them add up, and a median can be told from them."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Final

__all__ = ["age_bucket", "median_age"]

_LAST_BUCKET: Final = 24
"""The longest ages are of 2**23 seconds, a quarter of a year, and more."""


def age_bucket(seconds: float) -> int:
    """The class of an age: 0 up to a second, then one for each doubling."""
    return 0 if seconds <= 1 else min(_LAST_BUCKET, math.ceil(math.log2(seconds)))


def median_age(histogram: Mapping[int, int]) -> float | None:
    """The median age in seconds, right to a factor of two; None when there is none."""
    half = sum(histogram.values()) / 2
    if not half:
        return None
    below = 0
    for bucket in sorted(histogram):
        below += histogram[bucket]
        if below >= half:
            return 2.0**bucket
    return None
