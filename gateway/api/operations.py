"""What the operator does to a running gateway: empty the cache."""

from __future__ import annotations

import asyncio
from typing import Literal

import msgspec
from litestar import Response, post
from litestar.di import NamedDependency

from gateway.errors import HeadstartError, NotSupportedByReplica, ReplicaUnavailable
from gateway.replicas.base import Replica, ReplicaState
from gateway.service import Gateway

__all__ = ["reset_cache"]


Status = Literal["done", "deferred", "not_supported", "failed"]


class ResetResult(msgspec.Struct, frozen=True, omit_defaults=True):
    """What became of one replica's cache.

    ``done``: nothing is cached there; ``dropped`` blocks were. ``deferred``: ``kept`` blocks follow when the requests
    that use them have ended. ``not_supported``: a server of another kind, which cannot be asked for it by OpenAI's API.
    ``failed``: why is ``error``.
    """

    status: Status
    dropped: int = 0
    kept: int = 0
    error: str | None = None


class ResetReport(msgspec.Struct, frozen=True):
    """``done``: nothing is cached. ``deferred``: blocks in use follow later. ``incomplete``: some keep what they have.

    Replicas that do not serve have no cache and are left out.
    """

    status: Literal["done", "deferred", "incomplete"]
    replicas: dict[str, ResetResult]


class _Dropped(msgspec.Struct, frozen=True):
    """What an engine of ours answers."""

    dropped: int = 0
    kept: int = 0


@post("/admin/cache/reset")
async def reset_cache(gateway: NamedDependency[Gateway]) -> Response[ResetReport]:
    """Empty the prefix cache of every replica that can: 200, 202 while blocks are in use, 502 where one has failed."""
    ready = [replica for replica in gateway.replicas.values() if replica.state is ReplicaState.READY]
    if not ready:
        raise ReplicaUnavailable("No replica is ready; there is no cache to reset.")
    told = await asyncio.gather(*[_reset(replica) for replica in ready])
    results = {replica.id: result for replica, result in zip(ready, told, strict=True)}
    states = {result.status for result in told}
    status = 502 if "failed" in states else 202 if "deferred" in states else 200
    if states & {"failed", "not_supported"}:
        return Response(ResetReport("incomplete", results), status_code=status)
    return Response(ResetReport("deferred" if "deferred" in states else "done", results), status_code=status)


async def _reset(replica: Replica) -> ResetResult:
    try:
        answer = msgspec.convert(await replica.call("reset_cache"), _Dropped)
    except NotSupportedByReplica as error:
        return ResetResult("not_supported", error=error.message)
    except HeadstartError as error:
        return ResetResult("failed", error=error.message)
    return ResetResult("deferred" if answer.kept else "done", answer.dropped, answer.kept)
