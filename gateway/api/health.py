"""For whoever watches over the process: alive, ready, which version. Open to all, and silent about traffic."""

from __future__ import annotations

from typing import Any, Final

import msgspec
from litestar import HttpMethod, Request, Response, route
from litestar.datastructures import State
from litestar.di import NamedDependency

import gateway as package
from gateway.api.access import is_operator
from gateway.redaction import redacted
from gateway.replicas.base import ReplicaState
from gateway.routing.breaker import BreakerState
from gateway.service import Gateway

__all__ = ["health", "ready", "version"]

_READ: Final = [HttpMethod.GET, HttpMethod.HEAD]
"""Balancers and monitors often ask for the head alone."""


class Health(msgspec.Struct, frozen=True):
    """The process answers."""

    status: str = "ok"


class Readiness(msgspec.Struct, frozen=True):
    """Whether requests can be served. ``degraded`` says in words what does not work as it should."""

    ready: bool
    replicas: dict[str, str]
    degraded: list[str]


class Version(msgspec.Struct, frozen=True):
    """The running version."""

    version: str


@route("/health", http_method=_READ, sync_to_thread=False)
def health() -> Health:
    """200 as long as the event loop turns."""
    return Health()


@route("/ready", http_method=_READ, sync_to_thread=False)
def ready(request: Request[Any, Any, State], gateway: NamedDependency[Gateway]) -> Response[Readiness]:
    """200 while at least one replica serves and the gateway is not shutting down, else 503.

    Addresses of servers and paths of files are for the operator: others are told names.
    """
    is_ready = gateway.ready_replicas > 0 and not gateway.draining
    states = {id: str(replica.state) for id, replica in gateway.replicas.items()}
    problems = [*_degraded(gateway)]
    if not is_operator(request):
        problems = [redacted(words) for words in problems]
    return Response(Readiness(is_ready, states, problems), status_code=200 if is_ready else 503)


@route("/version", http_method=_READ, sync_to_thread=False)
def version() -> Version:
    """The version of this package."""
    return Version(package.__version__)


def _degraded(gateway: Gateway) -> list[str]:
    problems = ["shutting down"] if gateway.draining else []
    for id, replica in gateway.replicas.items():
        if replica.state is not ReplicaState.READY:
            reason = f": {replica.down_reason}" if replica.down_reason else ""
            problems.append(f"{id} is {replica.state}{reason}")
        problems += [f"{id}: {words}" for words in (*replica.degraded, *_not_routed_to(gateway, id))]
    problems += [f"replicas cannot be looked up: {words}" for words in gateway.membership.discovery.problems]
    store = gateway.statistics.store_status
    if store.state not in ("ok", "starting"):
        problems.append(f"statistics are not shared: {store.where} is {store.state}")
    problems += gateway.presence.problems
    if gateway.recorder is not None and gateway.recorder.problem is not None:
        problems.append(gateway.recorder.problem)
    if count := gateway.pins.problems:
        problems.append(f"{count} pins are in force nowhere: GET /admin/pins says why")
    return problems


def _not_routed_to(gateway: Gateway, replica_id: str) -> list[str]:
    view = gateway.router.view(replica_id)
    words = ["drained by the operator"] if view.draining else []
    if view.breaker is not BreakerState.CLOSED:
        words.append(f"left alone after {view.failures} failures in a row")
    return words
