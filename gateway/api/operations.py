"""What the operator does to a running gateway: empty the cache."""

from __future__ import annotations

import asyncio
from typing import Literal

import msgspec
from litestar import Response, post
from litestar.di import NamedDependency

from gateway.errors import HeadstartError, ReplicaUnavailable
from gateway.replicas.base import Replica, ReplicaState
from gateway.service import Gateway

__all__ = ["reset_cache"]


class ResetResult(msgspec.Struct, frozen=True, omit_defaults=True):
    """Blocks that one replica dropped, and those it keeps until the requests that use them have ended."""

    dropped: int = 0
    kept: int = 0
    error: str | None = None


class ResetReport(msgspec.Struct, frozen=True):
    """``done``: nothing is cached. ``deferred``: blocks in use follow later. ``incomplete``: not all replicas answered.

    Replicas that do not serve have no cache and are left out.
    """

    status: Literal["done", "deferred", "incomplete"]
    replicas: dict[str, ResetResult]


@post("/admin/cache/reset")
async def reset_cache(gateway: NamedDependency[Gateway]) -> Response[ResetReport]:
    """Empty the prefix cache of every replica that serves: 200 done, 202 deferred, 502 incomplete."""
    ready = [replica for replica in gateway.replicas.values() if replica.state is ReplicaState.READY]
    if not ready:
        raise ReplicaUnavailable("No replica is ready; there is no cache to reset.")
    results = dict(
        zip(
            [replica.id for replica in ready],
            await asyncio.gather(*[_reset(replica) for replica in ready]),
            strict=True,
        )
    )
    if any(result.error is not None for result in results.values()):
        return Response(ResetReport("incomplete", results), status_code=502)
    if any(result.kept for result in results.values()):
        return Response(ResetReport("deferred", results), status_code=202)
    return Response(ResetReport("done", results), status_code=200)


async def _reset(replica: Replica) -> ResetResult:
    try:
        return msgspec.convert(await replica.call("reset_cache"), ResetResult)
    except HeadstartError as error:
        return ResetResult(error=error.message)
