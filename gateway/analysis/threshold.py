"""Conditions on the figures of an analysis, as ``--fail-on`` takes them: ``hit_rate.as_is.inf<0.5``."""

from __future__ import annotations

import operator
import re
from collections.abc import Callable
from typing import Final

import msgspec

from gateway.analysis.report import Report
from gateway.attribution.causes import CAUSES

__all__ = ["Threshold", "figures"]

_COMPARISONS: Final[dict[str, Callable[[float, float], bool]]] = {
    "<=": operator.le,
    ">=": operator.ge,
    "==": operator.eq,
    "!=": operator.ne,
    "<": operator.lt,
    ">": operator.gt,
}
_FORM: Final = re.compile(r"\s*([A-Za-z_][\w.]*)\s*(<=|>=|==|!=|<|>)\s*([0-9.]+(?:[eE][+-]?\d+)?)\s*(%?)\s*")


class Threshold(msgspec.Struct, frozen=True):
    """``figure`` compared with ``value``: a finding when it holds."""

    figure: str
    comparison: str
    value: float

    @classmethod
    def parse(cls, text: str) -> Threshold:
        """Read ``FIGURE<NUMBER`` and the like; ``10%`` is 0.1. Raises ``ValueError`` with what is expected."""
        match = _FORM.fullmatch(text)
        if match is None:
            raise ValueError(f"{text!r}: write a figure, one of < <= > >= == !=, and a number, as in volatile>0.1")
        figure, comparison, number, percent = match.groups()
        try:
            value = float(number)
        except ValueError:
            raise ValueError(f"{text!r}: {number!r} is no number") from None
        return cls(figure, comparison, value / 100 if percent else value)

    def finding(self, known: dict[str, float]) -> str | None:
        """What there is to say when it holds of ``known``, else None. Raises ``ValueError`` for an unknown figure."""
        if self.figure not in known:
            raise ValueError(f"{self.figure!r} is no figure of this analysis; there are {', '.join(known)}")
        value = known[self.figure]
        if not _COMPARISONS[self.comparison](value, self.value):
            return None
        return f"{self.figure} is {value:.6g}, which is {self.comparison} {self.value:.6g}"


def figures(report: Report) -> dict[str, float]:
    """All figures by name. A cause is the share of all prompt tokens that were missed for it."""
    analysis = report.analysis
    rates = analysis.hit_rate
    known: dict[str, float] = {"requests": analysis.requests, "tokens": analysis.tokens}
    known |= {f"hit_rate.as_is.{size}": rate for size, rate in rates.as_is.items()}
    known |= {f"hit_rate.canonical.{size}": rate for size, rate in rates.canonical.items()}
    known["hit_rate.position_independent"] = rates.position_independent
    known["bad_lines"] = len(report.bad_lines)
    for cause in CAUSES:
        lost = sum(row.tokens for row in analysis.causes if row.cause == cause)
        known[cause] = lost / analysis.tokens if analysis.tokens else 0.0
    return known
