"""The operator's view of eviction: the policy in force, its switch, and what others would give."""

from __future__ import annotations

from typing import Any, Final

import msgspec
from litestar import Request, Response, get, put
from litestar.di import NamedDependency

from cache_policy.policy import POLICY_NAMES
from gateway.api.decoding import decode_body
from gateway.errors import InvalidRequestError
from gateway.eviction import PolicyChange
from gateway.service import Gateway
from gateway.stats.whatif import WhatIfReport

__all__ = ["set_policy", "show_policy", "show_whatif"]


class PolicyBody(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What to switch to."""

    policy: str


class PolicyReport(msgspec.Struct, frozen=True):
    """The policy in force, those there are, and the last switches, oldest first."""

    policy: str
    policies: tuple[str, ...]
    changes: list[PolicyChange]


class SwitchReport(msgspec.Struct, frozen=True):
    """The policy in force now, and per replica that serves ``ok`` or why it keeps another one."""

    policy: str
    replicas: dict[str, str]


_body_decoder: Final = msgspec.json.Decoder(PolicyBody)


@get("/admin/policy", sync_to_thread=False)
def show_policy(gateway: NamedDependency[Gateway]) -> PolicyReport:
    """The eviction policy."""
    return PolicyReport(gateway.eviction.policy, POLICY_NAMES, [*gateway.eviction.changes])


@put("/admin/policy")
async def set_policy(gateway: NamedDependency[Gateway], request: Request[Any, Any, Any]) -> Response[SwitchReport]:
    """Switch every engine's policy while it runs: 200, or 502 when an engine did not follow."""
    body = decode_body(_body_decoder, await request.body())
    results = await gateway.eviction.switch(body.policy)
    followed = all(result == "ok" for result in results.values())
    return Response(SwitchReport(gateway.eviction.policy, results), status_code=200 if followed else 502)


@get("/admin/whatif", sync_to_thread=False)
def show_whatif(gateway: NamedDependency[Gateway]) -> WhatIfReport:
    """What other policies and pool sizes would have hit in the last hour."""
    if gateway.whatif is None:
        raise InvalidRequestError("Ghost caches are switched off: set whatif.enabled in the configuration.")
    return gateway.whatif.report()
