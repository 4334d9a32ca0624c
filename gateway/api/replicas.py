"""The operator's view of the replicas, and which of them get requests."""

from __future__ import annotations

from typing import Any, Final

import msgspec
from litestar import Request, Response, delete, get, post
from litestar.datastructures import State
from litestar.di import NamedDependency
from litestar.params import FromPath

from gateway.api.decoding import decode_body
from gateway.config import ReplicaConfig
from gateway.configuration import admitted_replica
from gateway.errors import ConfigError, ConflictError, InvalidRequestError, ReplicaNotFoundError
from gateway.membership import Source
from gateway.presence import SharedReplica
from gateway.replicas.base import EventHealth, Replica, ReplicaState
from gateway.routing.breaker import BreakerState
from gateway.routing.index import IndexTrust
from gateway.service import Gateway

__all__ = ["add_replica", "drain_replica", "list_replicas", "remove_replica", "resume_replica"]

_decoder: Final = msgspec.json.Decoder(ReplicaConfig)


class ReplicaInfo(msgspec.Struct, frozen=True):
    """What an engine says of itself, without its warm-up profile."""

    model: str
    root: str
    fingerprint: str
    boot_id: str
    dtype: str
    device: str
    policy: str
    block_size: int
    num_blocks: int
    max_model_len: int
    max_batch_tokens: int


class BreakerRow(msgspec.Struct, frozen=True):
    """A circuit breaker: ``failures`` in a row, and the seconds until a request may show that all is well again."""

    state: BreakerState
    failures: int
    retry_in_s: float


class CurveRow(msgspec.Struct, frozen=True):
    """What prefill costs: seconds per step, per token, and per token of context for each token.

    ``fitted_to`` is ``steps`` as the replica reports them, ``ttft`` as its answers begin, or nothing yet (``nominal``).
    """

    fitted_to: str
    step_s: float
    token_s: float
    context_s: float


class ReplicaRow(msgspec.Struct, frozen=True):
    """One replica. ``load`` is the state after its last step, with the fields of ``engine.wire.Load``.

    ``source`` is where it comes from. ``in_flight`` are this gateway's requests there, ``waiting_tokens`` the prompt
    tokens it still has to compute. ``index`` is what is believed of its cache, null before it was first ready, and
    ``events`` how the stream of its cache events is, null where it has none.
    """

    id: str
    url: str | None
    source: Source
    state: ReplicaState
    down_reason: str | None
    degraded: tuple[str, ...]
    draining: bool
    in_flight: int
    waiting_tokens: int
    breaker: BreakerRow
    curve: CurveRow
    index: IndexTrust | None
    events: EventHealth | None
    info: ReplicaInfo | None
    load: dict[str, int] | None


class ReplicaList(msgspec.Struct, frozen=True):
    """All replicas. ``discovery`` are the problems of looking for more, in words.

    ``elsewhere`` are the replicas of the other gateways that share this one's Redis, by gateway, some seconds old.
    """

    replicas: list[ReplicaRow]
    discovery: tuple[str, ...]
    elsewhere: dict[str, list[SharedReplica]]


@get("/admin/replicas", sync_to_thread=False)
def list_replicas(gateway: NamedDependency[Gateway]) -> ReplicaList:
    """Every replica with its state, what it serves, its load and what the router knows of it."""
    rows = [_row(gateway, replica) for replica in gateway.replicas.values()]
    elsewhere = {epoch: other.replicas for epoch, other in gateway.presence.others.items()}
    return ReplicaList(rows, gateway.membership.discovery.problems, elsewhere)


@post("/admin/replicas")
async def add_replica(request: Request[Any, Any, State], gateway: NamedDependency[Gateway]) -> Response[ReplicaRow]:
    """Add a server of the allow-list: ``url``, and as in ``[[replicas]]`` ``model`` and ``api_key``.

    201 whether or not it answers: that shows in the list. Nothing of what it answers is told.
    """
    entry = decode_body(_decoder, await request.body())
    try:
        config = admitted_replica(entry, gateway.config)
    except ConfigError as error:
        raise InvalidRequestError(error.message, param="url") from None
    return Response(_row(gateway, gateway.membership.join(config, "added")), status_code=201)


@delete("/admin/replicas/{replica_id:str}", status_code=202, sync_to_thread=False)
def remove_replica(gateway: NamedDependency[Gateway], replica_id: FromPath[str]) -> ReplicaRow:
    """Let a remote replica end what it has, then forget it. What is configured is there again after a restart."""
    replica = _known(gateway, replica_id)
    source = gateway.membership.source(replica_id)
    if source == "engine":
        raise ConflictError(f"{replica_id} is an engine of this gateway: drain it instead.")
    if source == "discovered":
        raise ConflictError(f"{replica_id} would be discovered again: take it out there, or drain it.")
    gateway.membership.leave(replica_id)
    return _row(gateway, replica)


@post("/admin/replicas/{replica_id:str}/drain", status_code=200, sync_to_thread=False)
def drain_replica(gateway: NamedDependency[Gateway], replica_id: FromPath[str]) -> ReplicaRow:
    """Send a replica nothing new; what it has goes on."""
    replica = _known(gateway, replica_id)
    gateway.router.drain(replica_id)
    return _row(gateway, replica)


@post("/admin/replicas/{replica_id:str}/resume", status_code=200, sync_to_thread=False)
def resume_replica(gateway: NamedDependency[Gateway], replica_id: FromPath[str]) -> ReplicaRow:
    """Let a drained replica have requests again, and close its breaker."""
    replica = _known(gateway, replica_id)
    if gateway.membership.is_leaving(replica_id):
        raise ConflictError(f"{replica_id} is about to leave.")
    gateway.router.resume(replica_id)
    return _row(gateway, replica)


def _known(gateway: Gateway, replica_id: str) -> Replica:
    replica = gateway.replicas.get(replica_id)
    if replica is None:
        raise ReplicaNotFoundError(f"There is no replica {replica_id[:64]!r}.")
    return replica


def _row(gateway: Gateway, replica: Replica) -> ReplicaRow:
    info = None
    if replica.info is not None:
        fields: dict[str, Any] = {name: getattr(replica.info, name) for name in ReplicaInfo.__struct_fields__}
        info = ReplicaInfo(**fields)
    view = gateway.router.view(replica.id)
    return ReplicaRow(
        id=replica.id,
        url=replica.url,
        source=gateway.membership.source(replica.id),
        state=replica.state,
        down_reason=replica.down_reason,
        degraded=replica.degraded,
        draining=view.draining,
        in_flight=view.in_flight,
        waiting_tokens=view.waiting_tokens,
        breaker=BreakerRow(view.breaker, view.failures, view.retry_in_s),
        curve=CurveRow(view.curve_from, *view.curve),
        index=gateway.router.index.trust(replica.id),
        events=replica.event_health,
        info=info,
        load=None if replica.load is None else msgspec.structs.asdict(replica.load),
    )
