"""The whole gate over stub models: who is harmed is switched back, who is not is left alone."""

from __future__ import annotations

import pytest
import structlog

from engine.wire import Sampling
from gateway.config import CanonicalConfig, QualityConfig, QualityTemplateConfig, TemplateConfig
from gateway.quality.ledger import Pair

from .conftest import CALLER, Lab, Labs, Model, noisy, order_insensitive, order_sensitive

REQUESTS = 200
DRAWN = Sampling(max_tokens=200, temperature=0.8)


async def traffic(lab: Lab, *, sampling: Sampling | None = None, until_off: bool = True) -> int:
    """Up to 200 requests with pauses; how many there were when reordering was switched off."""
    for number in range(1, REQUESTS + 1):
        await lab.ask(sampling=sampling)
        if number % 50 == 0:
            await lab.compared()
        if until_off and lab.gateway.quality.report() and not lab.row.reordering:
            return number
    return REQUESTS


@pytest.mark.parametrize("sampling", [None, DRAWN], ids=["greedy", "drawn"])
def test_an_order_sensitive_model_is_switched_back_within_200_requests(labs: Labs, sampling: Sampling | None) -> None:
    async def scenario(lab: Lab) -> None:
        with structlog.testing.capture_logs() as lines:
            await traffic(lab, sampling=sampling)
        row = lab.row
        assert (row.template, row.reordering, row.verdict) == ("unregistered", False, "harmful")
        assert row.switched.metric in ("agreement", "logprob")
        assert row.switched.excess > row.switched.bound
        (line,) = [line for line in lines if "switched off" in line["event"]]
        assert str(row.switched.pairs) in line["reason"]
        assert not any(word in str(lines) for word in ("river", "Question", "About"))
        asked = len(lab.shadow_requests)
        generation = await lab.ask(lab.body(ids=["C", "A", "B"]))
        assert generation.plan.order == "preserve"
        assert generation.plan.document_ids == ("C", "A", "B")
        assert "keeps the application's order: reordering was switched off" in (generation.plan.note or "")
        await lab.compared()
        assert len(lab.shadow_requests) == asked  # nothing is left to compare

    labs.run(scenario)


@pytest.mark.parametrize(
    ("model", "sampling", "runs"),
    [(noisy, DRAWN, 20), (noisy, None, 2), (order_insensitive, None, 2)],
    ids=["drawn with noise", "greedy with noise", "certain"],
)
def test_an_order_insensitive_model_never_is_in_20_seeded_runs(
    labs: Labs, model: Model, sampling: Sampling | None, runs: int
) -> None:
    async def scenario(lab: Lab) -> None:
        lab.replica.tells_logprobs = model is order_insensitive
        await traffic(lab, sampling=sampling)
        row = lab.row
        assert row.reordering, row
        assert row.pairs > 60
        agreement = row.metrics["agreement"]
        assert abs(agreement.excess) < 0.1
        if model is order_insensitive:
            assert row.verdict == "harmless"
            assert agreement.high <= 0.5

    for seed in range(runs):
        # A replica that is noisy without being asked to draw is no engine of ours in float32.
        dtype = "bfloat16" if model is noisy else "float32"
        labs.run(scenario, model, QualityConfig(sample=0.5), seed=seed, dtype=dtype)


def test_gold_answers_alone_can_tell_that_reordering_harms(labs: Labs) -> None:
    """Only the document that the application puts first has the answer, and only what stands first is read."""
    golds_only = QualityConfig(sample=1.0, max_disagreement=1.0, max_logprob_loss=1.0)

    async def scenario(lab: Lab) -> None:
        for _ in range(2):
            for _ in range(50):
                ids = lab.rng.sample("ABCDEFGHI", 4)
                await lab.ask(lab.body(ids=ids, headstart={"gold": ["something else", f"river{ids[0]}"]}))
            await lab.compared()
        row = lab.row
        assert row.switched.metric == "gold"
        assert "share of answers without a gold answer" in row.reason
        assert row.metrics["gold"].excess > 0.3
        assert row.metrics["agreement"].bound is None  # measured, not tested

    labs.run(scenario, order_sensitive, golds_only)


def test_one_template_is_switched_back_and_the_others_are_not(labs: Labs) -> None:
    quality = QualityConfig(templates={"first": QualityTemplateConfig(sample=1.0)})
    templates = {name: TemplateConfig(f"You are {name}.\nAnswer.") for name in ("first", "second")}

    async def scenario(lab: Lab) -> None:
        for _ in range(3):
            for _ in range(50):
                for name in templates:
                    await lab.ask(lab.body(headstart={"template": name}))
            await lab.compared()
        assert lab.row.template == "first"
        assert not lab.row.reordering
        assert (await lab.ask(lab.body(ids=["B", "A"], headstart={"template": "first"}))).plan.order == "preserve"
        assert (await lab.ask(lab.body(ids=["B", "A"], headstart={"template": "second"}))).plan.order == "canonical"

    labs.run(scenario, order_sensitive, quality, templates=templates)


def test_a_request_that_names_its_order_is_left_alone(labs: Labs) -> None:
    async def scenario(lab: Lab) -> None:
        lab.gateway.quality.judge("unregistered", Pair(0.0))
        lab.gateway.quality.switch("unregistered", reordering=False)
        named = lab.body(ids=["B", "A"], headstart={"order": "canonical"})
        assert (await lab.ask(named)).plan.document_ids == ("A", "B")
        assert (await lab.ask(lab.body(ids=["B", "A"]))).plan.document_ids == ("B", "A")
        assert "the operator switched reordering off" in lab.row.reason

    labs.run(scenario)


def test_switched_on_again_the_test_starts_anew(labs: Labs) -> None:
    async def scenario(lab: Lab) -> None:
        await traffic(lab)
        assert not lab.row.reordering
        lab.gateway.quality.switch("unregistered", reordering=True)
        row = lab.row
        assert (row.reordering, row.verdict, row.pairs, row.test, row.reason) == (True, "undecided", 0, 2, None)
        lab.replica.model = order_insensitive
        await traffic(lab)
        assert lab.row.reordering
        assert lab.row.verdict == "harmless"

    labs.run(scenario)


def test_nothing_is_compared_by_default_nor_where_nothing_was_moved(labs: Labs) -> None:
    async def scenario(lab: Lab) -> None:
        for _ in range(5):
            await lab.ask(lab.body(ids=["A", "B", "C"]))
            await lab.ask(lab.body(ids=["B"]))
        await lab.compared()
        assert lab.shadow_requests == []
        assert lab.gateway.quality.report() == []

    labs.run(scenario)
    labs.run(scenario, order_sensitive, QualityConfig(), canonical=CanonicalConfig(order="preserve"))


def test_the_sample_has_the_share_that_was_asked_for(labs: Labs) -> None:
    async def scenario(lab: Lab) -> None:
        lab.gateway.shadows.close()
        compared = 0
        for _ in range(400):
            plan = lab.gateway.path.plan_chat(lab.body(ids=["B", "A"]), CALLER)
            compared += plan.comparison is not None
        assert 60 <= compared <= 140

    labs.run(scenario, order_sensitive, QualityConfig(sample=0.25))
