"""What the engine has to reach, and whether it did."""

from __future__ import annotations

import statistics
from typing import Final

import msgspec

__all__ = ["TARGETS", "Target", "Verdict", "judge"]


class Target(msgspec.Struct, frozen=True):
    """A bound for one figure: at least, or with ``upper`` at most, ``bound``. ``percent`` is how it is printed."""

    name: str
    bound: float
    upper: bool = False
    percent: bool = False

    def shown(self, figure: float) -> str:
        """The figure as it is printed."""
        return f"{100 * figure:.1f} %" if self.percent else f"{figure:.2f} x"


class Verdict(msgspec.Struct, frozen=True):
    """A target, the median of what was measured for it, and the lowest and highest round."""

    target: Target
    measured: float
    lowest: float
    highest: float
    met: bool


TARGETS: Final = {
    "prefill": Target("prefill, share of its limit", 0.6, percent=True),
    "decode_1": Target("decode at batch 1, context 256, share of its limit", 0.6, percent=True),
    "decode_16": Target("decode at batch 16, context 256, share of its limit", 0.5, percent=True),
    "warm_ttft": Target("warm TTFT at 1,200 tokens, another question, in decode steps there", 2.5, upper=True),
    "repeated_ttft": Target("warm TTFT at 1,200 tokens, the same prompt, in decode steps there", 2.5, upper=True),
    "served_ttft": Target("warm TTFT over HTTP, another question, in decode steps there", 2.5, upper=True),
    "overhead": Target("scheduling and block management, share of a step", 0.05, upper=True, percent=True),
    "closed_loop": Target("closed loop at 8, requests/s against vLLM-CPU", 1.5),
}


def judge(name: str, rounds: list[float]) -> Verdict:
    """Hold the median of the rounds against the target of that name."""
    target = TARGETS[name]
    middle = statistics.median(rounds)
    met = middle <= target.bound if target.upper else middle >= target.bound
    return Verdict(target, middle, min(rounds), max(rounds), met)
