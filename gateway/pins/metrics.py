"""What a scrape shows of pins."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily
from prometheus_client.metrics_core import Metric
from prometheus_client.registry import Collector

from gateway.pins.control import PinControl

__all__ = ["PinsCollector"]


class PinsCollector(Collector):
    """Pins by state, the blocks they take on each replica, and what warming them up took."""

    def __init__(self, pins: PinControl) -> None:
        self._pins = pins

    def collect(self) -> Iterator[Metric]:
        """The families of one scrape."""
        report = self._pins.report()
        pins = GaugeMetricFamily("headstart_pins", "Pinned prefixes.", labels=("state",))
        for state, count in Counter(row.state for row in report.pins).items():
            pins.add_metric((state,), count)
        blocks = GaugeMetricFamily(
            "headstart_pinned_blocks", "Blocks that are pinned: there, or to come.", labels=("replica", "state")
        )
        warmed = CounterMetricFamily(
            "headstart_warmed_tokens", "Prompt tokens prefilled for pins, for no user's request.", labels=("replica",)
        )
        for id, summary in report.replicas.items():
            blocks.add_metric((id, "resident"), summary.resident_blocks)
            blocks.add_metric((id, "missing"), summary.pinned_blocks - summary.resident_blocks)
            warmed.add_metric((id,), summary.warmed_tokens)
        return iter((pins, blocks, warmed))
