"""The settings of the quality gate as they hold for one template."""

from __future__ import annotations

from typing import Final, Literal

import msgspec

from gateway.config import QualityConfig

__all__ = ["METRICS", "Metric", "Rule", "rule_for"]

Metric = Literal["agreement", "logprob", "gold"]

METRICS: Final[tuple[Metric, ...]] = ("agreement", "logprob", "gold")


class Rule(msgspec.Struct, frozen=True):
    """``holdout`` and ``sample`` are shares of traffic, ``bounds`` the largest mean excess by metric that is tested."""

    holdout: float
    sample: float
    alpha: float
    bounds: dict[Metric, float]


def rule_for(config: QualityConfig, template: str) -> Rule:
    """The rule of a template: its own settings where it has some, else the general ones."""
    own = config.templates.get(template)

    def setting(name: str) -> float:
        value = getattr(own, name) if own is not None else None
        return float(getattr(config, name) if value is None else value)

    limits: dict[Metric, float] = {
        "agreement": setting("max_disagreement"),
        "logprob": setting("max_logprob_loss"),
        "gold": setting("max_gold_loss"),
    }
    bounds = {metric: limit for metric, limit in limits.items() if limit < 1}
    return Rule(setting("holdout"), setting("sample"), setting("alpha"), bounds)
