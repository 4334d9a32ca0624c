"""What one request cost and saved, and why its other tokens were missed: made into one record when it has ended."""

from __future__ import annotations

import random
import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Final

import msgspec

from engine.wire import EngineInfo
from gateway.attribution.live import Judged, LiveAttribution
from gateway.plan import Plan
from gateway.routing.flight import Flight
from gateway.stats.cost import Curve, PrefillCost
from gateway.stats.record import HeldOut, RequestRecord
from gateway.stats.statistics import Statistics

if TYPE_CHECKING:
    from gateway.generation import Generation

__all__ = ["Account", "Accounting"]

_NOT_JUDGED: Final = Judged({}, ())


class Accounting:
    """Opens an account for each request. Belongs to the event loop.

    ``attribution`` None attributes nothing. ``elsewhere`` tells how many tokens of a plan's prompt another replica than
    its own holds. A share ``holdout`` of the requests is kept from the cache, to see what their prefill takes; ``draw``
    gives numbers from 0 to below 1.
    """

    def __init__(
        self,
        statistics: Statistics,
        attribution: LiveAttribution | None = None,
        *,
        elsewhere: Callable[[Plan], int] = lambda plan: 0,
        holdout: float = 0.0,
        draw: Callable[[], float] = random.random,
    ) -> None:
        self.statistics: Final = statistics
        self.attribution: Final = attribution
        self.elsewhere: Final = elsewhere
        self._holdout: Final = holdout
        self._draw: Final = draw

    def open(self, arrived: float) -> Account:
        """The account of a request that arrived then (``time.monotonic``)."""
        return Account(self, arrived)

    def held_out(self) -> bool:
        """Whether the next request is to be kept from the cache."""
        return self._holdout > 0 and self._draw() < self._holdout


class Account:
    """One request on its way. Turns it into one record, once. Owned by the task that handles it."""

    def __init__(self, accounting: Accounting, arrived: float) -> None:
        self._accounting: Final = accounting
        self.arrived: Final = arrived
        self.generation: Generation | None = None
        self.flight: Flight | None = None
        self._plan: Plan | None = None
        self._model = ""
        self._block_size = 1
        self._elsewhere = 0
        self._cost: PrefillCost | None = None
        self._curve: Curve | None = None
        self._outlook = (1.0, 0.0, 0.0)

    @property
    def is_planned(self) -> bool:
        """Whether it was decided where the request goes."""
        return self._plan is not None

    @property
    def replica_id(self) -> str:
        """Where it was sent last."""
        return self._plan.replica_id if self._plan is not None else "none"

    def tell(self) -> None:
        """Let the router know what the replica has said of its cache."""
        if self.flight is not None and self.generation is not None:
            self.flight.told(self.generation.cached_tokens)

    def planned(self, plan: Plan, info: EngineInfo) -> Plan:
        """Note what is known before the request is sent, and return what is to be sent: it may be held out."""
        accounting = self._accounting
        cost = self._cost = accounting.statistics.prefill_cost(plan.replica_id)
        self._curve = cost.curve
        self._outlook = cost.outlook(plan.length)
        if plan.use_cache and self._curve is not None and accounting.held_out():
            plan = msgspec.structs.replace(plan, use_cache=False, predicted_cached=0, held_out=True)
        self._plan, self._model, self._block_size = plan, info.model, info.block_size
        self._elsewhere = accounting.elsewhere(plan) if accounting.attribution is not None and plan.use_cache else 0
        return plan

    def close(self, status: str) -> None:
        """Record the request; one that was never planned leaves no record."""
        plan, generation = self._plan, self.generation
        if plan is None:
            return
        statistics = self._accounting.statistics
        if generation is None:
            whose = plan.tenant, plan.template, plan.replica_id
            statistics.record(RequestRecord(time.time(), *whose, status, 0, 0, 0, None, 0.0, 0.0, model=self._model))
            return
        prompt, cached, spent = generation.prompt_tokens, generation.cached_tokens or 0, generation.prefill_s
        assert self._cost is not None, "only a planned request was generated"
        saving = self._cost.saved(prompt, cached)
        if plan.use_cache:
            statistics.prefixes.observe(plan.tenant, plan.template, plan.keys)
        judged = self._judged(plan, cached)
        if judged is not _NOT_JUDGED:
            keys = plan.keys if plan.use_cache else ()
            statistics.documents.observe(plan.tenant, keys, judged, cached, saving.seconds)
        held_out = self._check(self._cost, prompt, cached, spent, held_out=plan.held_out) if spent > 0 else None
        statistics.record(
            RequestRecord(
                finished_at=time.time(),
                tenant=plan.tenant,
                template=plan.template,
                replica=plan.replica_id,
                status=status,
                prompt_tokens=prompt,
                cached_tokens=cached,
                completion_tokens=generation.completion_tokens,
                ttft_s=generation.ttft_s,
                prefill_s=spent,
                saved_prefill_s=saving.seconds,
                saved_below_s=saving.below,
                saved_above_s=saving.above,
                saved_bias_s=saving.bias,
                model=self._model,
                missed=judged.missed,
                evicted_ages=judged.evicted_ages,
                held_out=held_out if plan.held_out else None,
            )
        )

    def _judged(self, plan: Plan, cached: int) -> Judged:
        attribution = self._accounting.attribution
        if attribution is None:
            return _NOT_JUDGED
        return attribution.judge(plan, self._block_size, cached, self._elsewhere)

    def _check(self, cost: PrefillCost, prompt: int, cached: int, spent: float, *, held_out: bool) -> HeldOut | None:
        """Hold what was foretold of the prefill against what it took."""
        if self._curve is None:
            return None
        foretold = self._curve.seconds(prompt - cached, cached)
        cost.check(prompt - cached, foretold, spent, held_out=held_out)
        factor, low, high = self._outlook
        return HeldOut(spent, foretold * factor, foretold * low, foretold * high)
