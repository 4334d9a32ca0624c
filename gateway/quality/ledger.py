"""What is known of one template's order: the evidence of all gateways, the verdict, and the switch.

Each life of a gateway (an *epoch*) keeps a ``Tally`` of its own, in absolute numbers, and knows those of the others: a
histogram adds up, and of two switches the later test wins, within one test the one that is off. So it does not matter
when and how often a tally is read.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from typing import Final, Literal

import msgspec

from gateway.plan import Arm
from gateway.quality.evidence import SCALE, Histogram, count, interval, log_wealth, mean, merged
from gateway.quality.rules import METRICS, Metric, Rule
from gateway.stats.sums import Sums

__all__ = [
    "ROUND_PAIRS",
    "MetricRow",
    "Pair",
    "Switch",
    "Tally",
    "Verdict",
    "add_up",
    "alarm",
    "metric_rows",
    "verdict",
]

ROUND_PAIRS: Final = 1000
"""A test goes on for ever, and beside it one over the pairs of this round, which has no long past to outweigh."""

Verdict = Literal["harmless", "undecided", "harmful"]


class Pair(msgspec.Struct, frozen=True):
    """By how much a reordered request was answered worse than chance explains, from -1 to 1; None: not measured.

    ``agreement`` is its distance to the answer in the application's order less that between two of the latter,
    ``logprob`` the mean log-probability per token (nats) that its answer loses in the application's order, ``gold`` the
    share of answers with a gold answer that is lost.
    """

    agreement: float
    logprob: float | None = None
    gold: float | None = None


class Switch(msgspec.Struct, frozen=True):
    """Why reordering was switched off, and when (Unix time). ``metric`` is None when the operator did it."""

    at: float
    metric: Metric | None = None
    pairs: int = 0
    excess: float = 0.0
    bound: float = 0.0

    @property
    def words(self) -> str:
        """The reason in words."""
        if self.metric is None:
            return "the operator switched reordering off"
        return (
            f"reordering was switched off: {_SPOKEN[self.metric]} {self.excess:.2f} over {self.pairs} compared "
            f"requests, where {self.bound:g} is allowed"
        )


_ARMS: Final[tuple[Arm, ...]] = ("reordered", "preserved")

_SPOKEN: Final[Mapping[Metric, str]] = {
    "agreement": "answers differ from those in the application's order by",
    "logprob": "answers lose, in nats per token,",
    "gold": "the share of answers without a gold answer grew by",
}


class Tally(msgspec.Struct, omit_defaults=True):
    """One epoch's share in the current test of a template, or several added up. Mutable; owned by the gate.

    ``test`` counts the tests that were begun. ``whole`` has the excesses of all of this test by metric, ``recent``
    those of the round with the number ``round``. ``arms`` are the requests of both arms while a hold-out is on.
    """

    test: int = 1
    off: Switch | None = None
    whole: dict[Metric, Histogram] = {}
    round: int = 1
    recent: dict[Metric, Histogram] = {}
    arms: dict[Arm, Sums] = {}

    def add(self, pair: Pair) -> None:
        """Count one compared request."""
        for metric in METRICS:
            excess = getattr(pair, metric)
            if excess is None or math.isnan(excess):
                continue
            hundredths = round(SCALE * min(1.0, max(-1.0, excess)))
            for histograms in (self.whole, self.recent):
                histogram = histograms.setdefault(metric, {})
                histogram[hundredths] = histogram.get(hundredths, 0) + 1

    def arm(self, name: Arm) -> Sums:
        """The sums of one arm, to be changed."""
        return self.arms.setdefault(name, Sums())

    def follow(self, total: Tally) -> None:
        """Enter the test and the round that ``total`` is at; what belongs to others is over."""
        if self.test != total.test:
            self.test, self.off, self.round = total.test, None, total.round
            self.whole, self.recent, self.arms = {}, {}, {}
        if self.round != total.round:
            self.round, self.recent = total.round, {}
        self.off = total.off

    @property
    def pairs(self) -> int:
        """How many requests were compared in this test."""
        return count(self.whole.get("agreement", {}))


class MetricRow(msgspec.Struct, frozen=True):
    """What is known of a metric: the mean excess, the interval it lies in, and the bound (None: not tested).

    ``evidence`` is what betting against "within the bound" has made of 1, as a power of ten; it ends the test when it
    reaches ``limit``.
    """

    pairs: int
    excess: float
    low: float
    high: float
    bound: float | None
    evidence: float | None
    limit: float | None


def add_up(tallies: Iterable[Tally]) -> Tally:
    """The state of a template's test over all epochs, as a value of its own."""
    known = list(tallies)
    test = max((tally.test for tally in known), default=1)
    known = [tally for tally in known if tally.test == test]
    current = max((tally.round for tally in known), default=1)
    latest = [tally for tally in known if tally.round == current]
    switches = [tally.off for tally in known if tally.off is not None]
    return Tally(
        test=test,
        off=min(switches, key=lambda switch: switch.at, default=None),
        whole=_merged_by_metric(tally.whole for tally in known),
        round=current,
        recent=_merged_by_metric(tally.recent for tally in latest),
        arms={arm: sums for arm in _ARMS if (sums := _arm(known, arm)).requests},
    )


def alarm(total: Tally, rule: Rule, now: float) -> Switch | None:
    """The reason to switch reordering off, if there is one now.

    A template that is within its bounds is given one with a probability of at most ``rule.alpha``, ever, in all of a
    test: each metric has its share, of which half goes to the pairs of all rounds together and of the other half
    1 / (r * (r + 1)) to round r, which sums up to all of it.
    """
    limit = _limit(rule) if rule.bounds else 0.0
    for metric, bound in rule.bounds.items():
        whole, recent = total.whole.get(metric, {}), total.recent.get(metric, {})
        for histogram, enough in ((whole, limit), (recent, limit + math.log(total.round * (total.round + 1)))):
            if log_wealth(histogram, bound) >= enough:
                return Switch(now, metric, count(histogram), mean(histogram), bound)
    return None


def metric_rows(total: Tally, rule: Rule) -> dict[Metric, MetricRow]:
    """What is known of each metric that was measured."""
    rows: dict[Metric, MetricRow] = {}
    for metric, histogram in total.whole.items():
        bound = rule.bounds.get(metric)
        low, high = interval(histogram, rule.alpha / len(METRICS))
        evidence = None if bound is None else log_wealth(histogram, bound) / math.log(10)
        limit = None if bound is None else _limit(rule) / math.log(10)
        rows[metric] = MetricRow(count(histogram), mean(histogram), low, high, bound, evidence, limit)
    return rows


def verdict(total: Tally, rows: Mapping[Metric, MetricRow]) -> Verdict:
    """``harmless``: every metric that was measured is within its bound for certain (with ``1 - alpha``)."""
    if total.off is not None and total.off.metric is not None:
        return "harmful"
    tested = [row for row in rows.values() if row.bound is not None]
    within = all(row.high <= row.bound for row in tested if row.bound is not None)
    return "harmless" if tested and within else "undecided"


def _limit(rule: Rule) -> float:
    """What the wealth on the whole test has to reach, as a natural logarithm."""
    return math.log(2 * len(rule.bounds) / rule.alpha)


def _merged_by_metric(parts: Iterable[Mapping[Metric, Histogram]]) -> dict[Metric, Histogram]:
    known = list(parts)
    return {metric: histogram for metric in METRICS if (histogram := merged(part.get(metric, {}) for part in known))}


def _arm(tallies: Iterable[Tally], arm: Arm) -> Sums:
    return Sums.of(tally.arms[arm] for tally in tallies if arm in tally.arms)
