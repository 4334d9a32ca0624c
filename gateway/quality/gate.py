"""Which order a request's documents take as far as harm is concerned, and what becomes of the answers."""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Mapping
from hashlib import blake2b
from typing import Final

import msgspec
import structlog

from gateway.config import OrderMode, QualityConfig
from gateway.errors import TemplateNotFoundError
from gateway.generation import Generation
from gateway.plan import Arm, Caller, OrderDecision
from gateway.quality.evidence import Histogram
from gateway.quality.ledger import (
    ROUND_PAIRS,
    MetricRow,
    Pair,
    Switch,
    Tally,
    Verdict,
    add_up,
    alarm,
    metric_rows,
    verdict,
)
from gateway.quality.rules import Metric, Rule, rule_for
from gateway.schema import ChatRequest
from gateway.stats.record import RequestRecord
from gateway.stats.snapshot import Figures, figures
from gateway.stats.sums import OTHER

__all__ = ["QualityGate", "TemplateQuality"]

_MOST_TEMPLATES: Final = 256
"""So many templates are kept apart; later ones share one verdict, ``other``. A tally is some 5 KB, 80 at most."""

_HELD_OUT: Final = "held out: the application's order is kept, to measure what reordering earns"

_encode: Final = msgspec.json.Encoder().encode
_decode_tally: Final = msgspec.json.Decoder(Tally).decode
_decode_label: Final = msgspec.json.Decoder(tuple[str, str]).decode
_log = structlog.get_logger("headstart.quality")


class TemplateQuality(msgspec.Struct, frozen=True):
    """One template. ``reordering`` is off when a test or the operator switched it off, for the ``reason`` in words.

    ``arms`` are the figures of the requests that were reordered and of those that were held out, while a hold-out is
    on: the hit rates of both say what reordering earns. ``round`` is the part of the test that has no long past.
    """

    template: str
    reordering: bool
    verdict: Verdict
    reason: str | None
    switched: Switch | None
    test: int
    round: int
    pairs: int
    holdout: float
    sample: float
    metrics: dict[Metric, MetricRow]
    arms: dict[Arm, Figures]


class QualityGate:
    """Owns the verdicts: this gateway's tallies, those of others as read from Redis, and the switches.

    ``decide`` changes nothing and is asked for every chat. It is a companion of the statistics' store, through which
    gateways share their tallies (template names and numbers). Belongs to the event loop.
    """

    def __init__(
        self,
        config: QualityConfig,
        *,
        model: str,
        secret: bytes,
        rng: random.Random | None = None,
        clock: Callable[[], float] = time.time,
    ) -> None:
        """``model`` is the served name: a verdict holds for it alone. ``rng`` draws the sample."""
        self._config: Final = config
        self._model: Final = model
        self._key: Final = blake2b(secret, digest_size=32, person=b"headstart.hold").digest()
        self._rng: Final = rng or random.Random()  # noqa: S311 - nobody gains from guessing whose answer is compared
        self._clock: Final = clock
        self._own: dict[str, Tally] = {}
        self._others: dict[str, dict[str, Tally]] = {}
        self._totals: dict[str, Tally] = {}
        self._stale: set[str] = set()
        self._rows: dict[str, TemplateQuality] = {}
        self._measured: dict[str, tuple[dict[Metric, Histogram], dict[Metric, MetricRow]]] = {}
        self._rules: dict[str, Rule] = {}
        self.revision = 0
        """Grows whenever this gateway's tallies change."""

    # --- requests ----------------------------------------------------------------------------------

    def decide(self, template: str, order: OrderMode, body: ChatRequest, caller: Caller) -> OrderDecision:
        """The order for a request whose template or configuration asks for ``order``; for one with documents.

        One that names an order itself is left alone. The same conversation is always on the same side of a hold-out.
        """
        options = body.headstart
        if order == "preserve" or (options is not None and options.order is not None):
            return OrderDecision(order)
        label = self._label(template)
        total = self._totals.get(label)
        if total is not None and total.off is not None:
            return OrderDecision("preserve", f"template {template} keeps the application's order: {total.off.words}")
        rule = self._rule(label)
        if options is not None and options.bypass:
            return OrderDecision(order)
        if rule.holdout and self._share(body, caller) < rule.holdout:
            return OrderDecision("preserve", _HELD_OUT, "preserved")
        compared = rule.sample > 0 and _has_one_answer(body) and self._rng.random() < rule.sample
        return OrderDecision(order, None, "reordered" if rule.holdout else None, compared)

    def served(self, generation: Generation) -> None:
        """Count an answered request in its arm."""
        plan = generation.plan
        if plan.arm is None or not generation.ended:
            return
        label = self._label(plan.template)
        self._tally(label).arm(plan.arm).count(
            RequestRecord(
                finished_at=self._clock(),
                tenant=plan.tenant,
                template=plan.template,
                replica=plan.replica_id,
                status="ok",
                prompt_tokens=generation.prompt_tokens,
                cached_tokens=generation.cached_tokens or 0,
                completion_tokens=generation.completion_tokens,
                ttft_s=generation.ttft_s,
                prefill_s=generation.prefill_s,
                saved_prefill_s=0.0,
            )
        )
        if label not in self._totals:
            self._changed(label)
        else:  # nothing that decides about the next request
            self._stale.add(label)
            self.revision += 1

    def judge(self, template: str, pair: Pair) -> None:
        """Take in one comparison; switches reordering off for the template when that was one too many."""
        label = self._label(template)
        self._tally(label).add(pair)
        self._changed(label)
        self._test(label)

    # --- the operator ------------------------------------------------------------------------------

    def switch(self, template: str, *, reordering: bool) -> TemplateQuality:
        """Switch reordering on, which begins a new test, or off, for all gateways that share statistics.

        Raises:
            TemplateNotFoundError: nothing was measured of such a template yet.
        """
        total = self._totals.get(template)
        if total is None:
            raise TemplateNotFoundError(f"Nothing was measured of a template {template[:64]!r} yet.")
        tally = self._tally(template)
        if reordering:
            tally.follow(Tally(test=total.test + 1))
        elif total.off is None:
            tally.off = Switch(self._clock())
        self._changed(template)
        _log.info("reordering was switched by the operator", template=template, reordering=reordering, test=tally.test)
        return self._row(template)

    def report(self) -> list[TemplateQuality]:
        """Every template of which something is known, by name."""
        for label in [*self._stale]:
            self._changed(label, own=False)
        return [self._row(label) for label in sorted(self._totals)]

    # --- what gateways share (``gateway.stats.store.Companion``) -----------------------------------

    name: Final = "quality"

    def fields(self) -> dict[bytes, bytes]:
        """All that this gateway has to tell."""
        return {_encode((self._model, label)): _encode(tally) for label, tally in self._own.items()}

    def set_epoch(self, epoch: str, fields: Mapping[bytes, bytes]) -> bool:
        """Replace what another epoch tells. False: some of it could not be read and was left out."""
        tallies: dict[str, Tally] = {}
        readable = True
        for key, value in fields.items():
            try:
                model, label = _decode_label(key)
                tally = _decode_tally(value)
            except msgspec.MsgspecError:
                readable = False
                continue
            if model == self._model:
                tallies[label] = tally
        before = self._others.pop(epoch, {})
        self._others[epoch] = tallies
        for label in before.keys() | tallies.keys():
            self._changed(label, own=False)
            self._test(label)
        return readable

    def keep_only(self, epochs: set[str]) -> None:
        """Forget epochs that Redis no longer knows."""
        for epoch in self._others.keys() - epochs:
            for label in self._others.pop(epoch):
                self._changed(label, own=False)

    # --- inside ------------------------------------------------------------------------------------

    def _test(self, label: str) -> None:
        total = self._totals.get(label)
        if total is None or total.off is not None:
            return
        rule = self._rule(label)
        reason = alarm(total, rule, self._clock())
        if reason is not None:
            self._tally(label).off = reason
            self._changed(label)
            _log.warning("reordering is switched off for a template", template=label, reason=reason.words)
        elif sum(total.recent.get("agreement", {}).values()) >= ROUND_PAIRS:
            tally = self._tally(label)
            tally.round, tally.recent = total.round + 1, {}
            self._changed(label)

    def _changed(self, label: str, *, own: bool = True) -> None:
        """Add up anew, and let this gateway's own tally follow to the test, round and switch that are in force."""
        if own:
            self.revision += 1
        self._stale.discard(label)
        self._rows.pop(label, None)
        parts = [tallies[label] for tallies in self._others.values() if label in tallies]
        mine = self._own.get(label)
        total = add_up([*parts, mine] if mine is not None else parts)
        if not parts and mine is None:
            self._totals.pop(label, None)
            return
        self._totals[label] = total
        if (total.test, total.round, total.off) != _position(mine):
            self._tally(label).follow(total)  # so that what is known outlives those it was learnt from
            self.revision += 1

    def _tally(self, label: str) -> Tally:
        tally = self._own.get(label)
        if tally is None:
            tally = self._own[label] = Tally()
            if (total := self._totals.get(label)) is not None:
                tally.follow(total)
        return tally

    def _label(self, template: str) -> str:
        known = self._totals
        return template if template in known or len(known) < _MOST_TEMPLATES else OTHER

    def _rule(self, label: str) -> Rule:
        rule = self._rules.get(label)
        if rule is None:
            rule = rule_for(self._config, label)
            if len(self._rules) < 2 * _MOST_TEMPLATES:
                self._rules[label] = rule
        return rule

    def _share(self, body: ChatRequest, caller: Caller) -> float:
        """A number from 0 to 1 that stays the same for a conversation and cannot be foreseen from outside."""
        digest = blake2b(key=self._key, digest_size=8)
        for part in (caller.tenant, body.user or "", body.prompt_cache_key or "", _opening(body)):
            data = part.encode("utf-8", "surrogatepass")
            digest.update(len(data).to_bytes(8, "little") + data)
        return int.from_bytes(digest.digest(), "little") / 2**64

    def _row(self, label: str) -> TemplateQuality:
        row = self._rows.get(label)
        if row is None:
            total, rule = self._totals[label], self._rule(label)
            measured = self._measured.get(label)
            if (
                measured is None or measured[0] != total.whole
            ):  # an interval takes milliseconds, an arm grows all the time
                measured = self._measured[label] = total.whole, metric_rows(total, rule)
            metrics = measured[1]
            row = self._rows[label] = TemplateQuality(
                template=label,
                reordering=total.off is None,
                verdict=verdict(total, metrics),
                reason=None if total.off is None else total.off.words,
                switched=total.off,
                test=total.test,
                round=total.round,
                pairs=total.pairs,
                holdout=rule.holdout,
                sample=rule.sample,
                metrics=metrics,
                arms={arm: figures(sums) for arm, sums in total.arms.items()},
            )
        return row


def _position(tally: Tally | None) -> tuple[int, int, Switch | None] | None:
    return None if tally is None else (tally.test, tally.round, tally.off)


def _has_one_answer(body: ChatRequest) -> bool:
    return (body.n or 1) == 1 and not body.use_beam_search


def _opening(body: ChatRequest) -> str:
    """How the conversation began: all of its later turns begin so too."""
    for message in body.messages:
        if message.role == "user":
            content = message.content
            return content if isinstance(content, str) else "\n".join(str(part.get("text")) for part in content or ())
    return ""
