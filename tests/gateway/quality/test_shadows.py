"""Asking again costs no user anything: not time, not memory, not a figure."""

from __future__ import annotations

import asyncio

import pytest

from engine.wire import Load, Sampling
from gateway.config import QualityConfig
from gateway.plan import Arm
from gateway.quality import shadows
from gateway.quality.shadows import MAX_AGE_S, MAX_KEPT

from ..conftest import until
from .conftest import CALLER, Lab, Labs, is_shadow, order_insensitive

MOVED = ["C", "A", "B"]
"""An order in which something moves."""


def test_a_greedy_answer_is_compared_with_one_in_the_applications_order(labs: Labs) -> None:
    async def scenario(lab: Lab) -> None:
        generation = await lab.ask(lab.body(ids=MOVED))
        await lab.compared()
        once, own, other = lab.shadow_requests
        plain = lab.gateway.path.plan_chat(lab.body(ids=MOVED, question="Question 1?"), CALLER)
        assert once.token_ids == plain.comparison.application_prompt()  # type: ignore[union-attr]
        assert once.token_ids != generation.plan.token_ids
        answer = own.token_ids[len(generation.plan.token_ids) :]
        assert own.token_ids == generation.plan.token_ids + answer
        assert other.token_ids == once.token_ids + answer
        assert not any(request.use_cache for request in lab.shadow_requests)
        assert min(request.priority for request in lab.shadow_requests) > 100
        assert lab.row.metrics["agreement"].excess == 1  # every word of the stub's answer depends on what stands first
        assert lab.row.metrics["logprob"].excess > 0.5

    labs.run(scenario)


@pytest.mark.parametrize(
    ("temperature", "dtype", "asked"),
    [(0.0, "float32", [1]), (0.0, "bfloat16", [1, 1]), (0.7, "float32", [2])],
    ids=["greedy and exact", "greedy", "drawn"],
)
def test_the_noise_of_answers_is_measured_where_there_is_some(
    labs: Labs, temperature: float, dtype: str, asked: list[int]
) -> None:
    async def scenario(lab: Lab) -> None:
        lab.replica.tells_logprobs = False
        await lab.ask(lab.body(ids=MOVED), sampling=Sampling(max_tokens=50, temperature=temperature, seed=7))
        await lab.compared()
        answers = [request for request in lab.shadow_requests if request.sampling.prompt_logprobs is None]
        assert [request.n for request in answers] == asked
        assert {request.sampling.seed for request in answers} == {None}
        assert "logprob" not in lab.row.metrics
        await lab.ask(lab.body(ids=MOVED))
        await lab.compared()
        scored = [request for request in lab.shadow_requests if request.sampling.prompt_logprobs is not None]
        assert len(scored) == 1  # a replica that tells none is not asked twice

    labs.run(scenario, order_insensitive, dtype=dtype)


def test_nothing_is_asked_while_users_wait_and_what_runs_ends_when_one_comes(labs: Labs) -> None:
    async def scenario(lab: Lab) -> None:
        replica = lab.replica
        replica.shadow_gate.clear()
        await lab.ask(lab.body(ids=MOVED))
        await until(lambda: replica.shadows_running == 1)
        await lab.ask(lab.body(ids=["A", "B"]))  # a user comes: the shadow leaves at once
        await until(lambda: replica.ended == ["closed"])
        await until(lambda: lab.gateway.shadows.status.interrupted == 1)
        replica.shadow_gate.set()
        await lab.compared()
        assert lab.gateway.shadows.status.compared == 1

        # While one user's request is in hand, nothing is begun.
        async with lab.gateway.dispatcher.generate(
            lambda avoid: lab.gateway.path.plan_chat(lab.body(ids=MOVED), CALLER, avoid),
            lambda plan, info: Sampling(max_tokens=50, temperature=0.0),
            arrived=0.0,
        ):
            before = len(lab.shadow_requests)
            await lab.ask(lab.body(ids=MOVED))
            await asyncio.sleep(0.2)  # longer than it waits for calm; what must not happen has no event
            assert len(lab.shadow_requests) == before
            assert lab.gateway.shadows.status.kept == 1
        await lab.compared()
        assert len(lab.shadow_requests) > before

    labs.run(scenario)


def test_what_others_do_on_a_replica_counts_as_busy(labs: Labs) -> None:
    async def scenario(lab: Lab) -> None:
        lab.replica.load = Load(0, 3, 0, 0, 0, 1024, 0, 0, 0, 0)
        await lab.ask(lab.body(ids=MOVED))
        await asyncio.sleep(0.3)  # what must not happen has no event
        assert lab.shadow_requests == []
        lab.replica.load = Load(0, 0, 0, 0, 0, 1024, 0, 0, 0, 0)
        await lab.compared()
        assert lab.gateway.shadows.status.compared == 1

    labs.run(scenario)


def test_one_that_is_interrupted_again_and_again_is_dropped(labs: Labs) -> None:
    async def scenario(lab: Lab) -> None:
        lab.replica.shadow_gate.clear()
        await lab.ask(lab.body(ids=MOVED))
        for tries in range(1, 4):
            await until(lambda: lab.replica.shadows_running == 1)
            await lab.ask(lab.body(ids=["A", "B"]))
            await until(lambda tries=tries: lab.gateway.shadows.status.interrupted == tries)  # type: ignore[misc]
        await lab.compared()
        status = lab.gateway.shadows.status
        assert (status.interrupted, status.dropped, status.compared) == (3, 1, 0)

    labs.run(scenario)


def test_users_may_be_in_hand_where_the_operator_allows_it(labs: Labs) -> None:
    async def scenario(lab: Lab) -> None:
        lab.replica.shadow_gate.clear()
        await lab.ask(lab.body(ids=MOVED))
        await until(lambda: lab.replica.shadows_running == 1)
        await lab.ask(lab.body(ids=["A", "B"]))
        assert lab.replica.shadows_running == 1
        lab.replica.shadow_gate.set()
        await lab.compared()
        assert lab.gateway.shadows.status.interrupted == 0

    labs.run(scenario, order_insensitive, QualityConfig(sample=1.0, busy=1))


def test_a_replica_that_dies_meanwhile_harms_nobody(labs: Labs) -> None:
    async def scenario(lab: Lab) -> None:
        one, two = lab.replicas
        one.shadow_gate.clear()
        two.shadow_gate.clear()
        await lab.ask(lab.body(ids=MOVED))
        await until(lambda: one.shadows_running + two.shadows_running == 1)
        dying, other = (one, two) if one.shadows_running else (two, one)
        dying.lose()
        await until(lambda: lab.gateway.shadows.status.failed == 1)
        assert (await lab.ask(lab.body(ids=MOVED))).ended
        other.shadow_gate.set()
        await lab.compared()
        assert lab.gateway.shadows.status.compared == 1
        other.lose()
        await dying.recover()
        dying.shadow_gate.set()
        await lab.ask(lab.body(ids=MOVED))
        await lab.compared()
        assert lab.gateway.shadows.status.compared == 2
        assert {row.failed for row in lab.gateway.statistics.snapshot().replicas.values()} == {0}

    labs.run(scenario, order_insensitive, replicas=2)


def test_shadows_are_in_no_figure_of_the_users(labs: Labs) -> None:
    async def scenario(lab: Lab) -> None:
        for _ in range(5):
            await lab.ask(lab.body(ids=MOVED))
        await lab.compared()
        assert lab.gateway.shadows.status.compared == 5
        snapshot = lab.gateway.statistics.snapshot()
        users = [request for request in lab.replica.asked if not is_shadow(request)]
        assert snapshot.totals.requests == 5
        assert snapshot.totals.prompt_tokens == sum(len(request.token_ids) for request in users)

    labs.run(scenario, order_insensitive)


def test_what_is_kept_is_bounded_in_number_bytes_and_age(labs: Labs, monkeypatch: pytest.MonkeyPatch) -> None:
    now = [0.0]

    async def scenario(lab: Lab) -> None:
        gateway = lab.gateway
        lab.replica.load = Load(0, 1, 0, 0, 0, 1024, 0, 0, 0, 0)  # never idle
        gateway.shadows._clock = lambda: now[0]  # type: ignore[misc]
        for _ in range(MAX_KEPT + 6):
            await lab.ask(lab.body(ids=MOVED))
        status = gateway.shadows.status
        assert (status.kept, status.dropped) == (MAX_KEPT, 6)
        one = status.kept_bytes // MAX_KEPT
        assert 500 < one < 20_000
        monkeypatch.setattr(shadows, "MAX_BYTES", 10 * one)
        await lab.ask(lab.body(ids=MOVED))
        status = gateway.shadows.status
        assert 5 <= status.kept <= 11
        assert status.kept_bytes <= 10 * one
        now[0] = MAX_AGE_S + 1
        await until(lambda: gateway.shadows.status.kept == 0)
        assert gateway.shadows.status.kept_bytes == 0
        assert gateway.shadows.status.compared == 0

    labs.run(scenario)


def test_a_gateway_that_drains_asks_nothing_any_more(labs: Labs) -> None:
    async def scenario(lab: Lab) -> None:
        lab.replica.shadow_gate.clear()
        await lab.ask(lab.body(ids=MOVED))
        await lab.ask(lab.body(ids=MOVED))
        await until(lambda: lab.replica.shadows_running == 1)
        lab.gateway.drain()
        await until(lambda: lab.replica.shadows_running == 0)
        assert lab.replica.ended == ["closed"]
        assert lab.gateway.shadows.status.kept == 0

    labs.run(scenario)


@pytest.mark.parametrize("fields", [{"n": 2}, {"use_beam_search": True}, {"headstart": {"bypass": True}}], ids=str)
def test_what_has_no_one_answer_or_no_cache_is_not_compared(labs: Labs, fields: dict[str, object]) -> None:
    async def scenario(lab: Lab) -> None:
        plan = lab.gateway.path.plan_chat(lab.body(ids=MOVED, **fields), CALLER)
        assert plan.comparison is None

    labs.run(scenario)


def test_the_hold_out_has_its_share_and_shows_what_reordering_earns(labs: Labs) -> None:
    async def scenario(lab: Lab) -> None:
        arms: dict[Arm | None, int] = {}
        for _ in range(600):
            generation = await lab.ask(lab.body(ids=MOVED))
            plan = generation.plan
            arms[plan.arm] = arms.get(plan.arm, 0) + 1
            if plan.arm == "preserved":
                assert plan.order == "preserve"
                assert list(plan.document_ids) == MOVED
                assert (plan.note or "").startswith("held out")
            else:
                assert (plan.order, plan.note) == ("canonical", None)
        assert set(arms) == {"reordered", "preserved"}
        assert 80 <= arms["preserved"] <= 160
        figures = lab.row.arms
        assert figures["preserved"].requests == arms["preserved"]
        assert figures["reordered"].requests == arms["reordered"]
        assert figures["reordered"].ttft_p50_s is not None
        assert lab.shadow_requests == []

    labs.run(scenario, order_insensitive, QualityConfig(holdout=0.2))


def test_a_conversation_stays_on_its_side(labs: Labs) -> None:
    def conversation(lab: Lab, number: int, turns: int) -> list[dict[str, str]]:
        messages = [{"role": "system", "content": f"Now: {lab.rng.random()}."}]
        for turn in range(turns):
            messages += [
                {"role": "user", "content": f"Question {number}, turn {turn}"},
                {"role": "assistant", "content": "Well."},
            ]
        return messages[:-1]

    async def scenario(lab: Lab) -> None:
        sides: set[Arm | None] = set()
        for number in range(40):
            arms = [
                lab.gateway.path.plan_chat(lab.body(ids=MOVED, messages=conversation(lab, number, turns)), CALLER).arm
                for turns in (1, 2, 5)
            ]
            assert len(set(arms)) == 1
            sides.add(arms[0])
        assert sides == {"reordered", "preserved"}

    labs.run(scenario, order_insensitive, QualityConfig(holdout=0.5))


def test_an_unexpected_failure_of_a_comparison_is_counted_and_named_by_its_type(
    labs: Labs, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(one: str, other: str) -> float:
        raise ZeroDivisionError("with the text of an answer")

    async def scenario(lab: Lab) -> None:
        await lab.ask(lab.body(ids=MOVED))
        await lab.compared()
        assert lab.gateway.shadows.status.failed == 1
        monkeypatch.undo()
        await lab.ask(lab.body(ids=MOVED))
        await lab.compared()
        assert lab.gateway.shadows.status.compared == 1

    monkeypatch.setattr(shadows, "distance", broken)
    labs.run(scenario)
