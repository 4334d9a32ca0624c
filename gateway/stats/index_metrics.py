"""What the index holds of each replica and how far it comes true, for ``/metrics``."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import Final

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily
from prometheus_client.metrics_core import Metric
from prometheus_client.registry import Collector

from gateway.replicas.base import EventHealth, Replica
from gateway.routing.index import FleetIndex, IndexTrust

__all__ = ["IndexCollector"]

_TRUST: Final[tuple[tuple[str, str, Callable[[IndexTrust], float | None]], ...]] = (
    ("blocks", "Blocks that the replica is believed to hold.", lambda trust: trust.blocks),
    ("believed", "0 while the index of the replica is not believed.", lambda trust: trust.believed),
    ("exact", "1 where cache events tell what the replica holds.", lambda trust: trust.source == "events"),
    ("precision", "Share of the predicted cached tokens that were cached.", lambda trust: trust.precision),
    ("recall", "Share of the cached tokens that had been predicted.", lambda trust: trust.recall),
)
_EVENTS: Final[tuple[tuple[str, str, Callable[[EventHealth], int]], ...]] = (
    ("messages", "Messages of cache events that were taken.", lambda health: health.messages),
    ("repeated", "Messages of cache events that had come before.", lambda health: health.repeated),
    ("gaps", "Times that messages of cache events were missing.", lambda health: health.gaps),
    ("losses", "Times that missing cache events could not be had.", lambda health: health.losses),
    ("restarts", "Times that the engine was found to have begun anew.", lambda health: health.restarts),
    ("malformed", "Messages that were none.", lambda health: health.malformed),
    ("failures", "Messages that this gateway could not take in.", lambda health: health.failures),
)


class IndexCollector(Collector):
    """Reads index and streams at the scrape."""

    def __init__(self, index: FleetIndex, replicas: Callable[[], Iterable[Replica]]) -> None:
        self._index = index
        self._replicas = replicas

    def collect(self) -> Iterator[Metric]:
        """The families of one scrape."""
        replicas = list(self._replicas())
        for name, text, read in _TRUST:
            gauge = GaugeMetricFamily(f"headstart_index_{name}", text, labels=("replica",))
            for replica in replicas:
                trust = self._index.trust(replica.id)
                value = None if trust is None else read(trust)
                if value is not None:
                    gauge.add_metric((replica.id,), float(value))
            yield gauge
        for name, text, count in _EVENTS:
            counter = CounterMetricFamily(f"headstart_cache_event_{name}", text, labels=("replica",))
            for replica in replicas:
                health = replica.event_health
                if health is not None:
                    counter.add_metric((replica.id,), count(health))
            yield counter
