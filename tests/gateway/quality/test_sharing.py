"""Several gateways and several lives of one agree on a verdict, through a real server."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import msgspec
import pytest

from gateway.config import QualityConfig, RedisConfig
from gateway.errors import TemplateNotFoundError
from gateway.quality.gate import QualityGate
from gateway.quality.ledger import ROUND_PAIRS, Pair, Switch, Tally, add_up, alarm
from gateway.quality.rules import rule_for
from gateway.schema import ChatRequest
from gateway.stats.statistics import Statistics

from ..conftest import until
from ..stats.conftest import ValkeyServer, valkey
from .conftest import CALLER

assert valkey  # a fixture

BODY = msgspec.convert({"model": "m", "messages": [{"role": "user", "content": "Why?"}]}, ChatRequest)
HARM, NONE = Pair(1.0, 0.4, None), Pair(0.0, 0.0, None)


def gate(**settings: Any) -> QualityGate:
    return QualityGate(QualityConfig(sample=1.0, **settings), model="m", secret=b"s" * 32)


@asynccontextmanager
async def sharing(server: ValkeyServer, shared: QualityGate) -> AsyncIterator[QualityGate]:
    config = RedisConfig(url=server.url, flush_interval_s=0.02)
    statistics = Statistics(config, companions=(shared,))
    await statistics.start()
    try:
        yield shared
    finally:
        await statistics.stop()


def row(shared: QualityGate) -> Any:
    return next(iter(shared.report()), None)


def order(shared: QualityGate) -> str:
    return shared.decide("support", "canonical", BODY, CALLER).order


def test_two_gateways_add_their_pairs_up_and_switch_together(valkey: ValkeyServer) -> None:
    async def scenario() -> None:
        async with sharing(valkey, gate()) as one, sharing(valkey, gate()) as two:
            for _ in range(6):  # too few for a verdict of its own
                one.judge("support", HARM)
                two.judge("support", HARM)
            assert order(one) == order(two) == "canonical"
            await until(lambda: row(one).pairs == row(two).pairs == 12)
            while row(one).reordering and row(two).reordering:
                two.judge("support", HARM)
            assert row(two).pairs < 40
            await until(lambda: order(one) == order(two) == "preserve")
            assert row(one).reason == row(two).reason
            one.switch("support", reordering=True)
            assert order(one) == "canonical"
            await until(lambda: order(two) == "canonical")
            assert (row(two).test, row(two).pairs) == (2, 0)

    asyncio.run(scenario())


def test_a_verdict_outlives_the_gateway_that_found_it(valkey: ValkeyServer) -> None:
    async def scenario() -> None:
        async with sharing(valkey, gate()) as former:
            for _ in range(40):
                former.judge("support", HARM)
            former.judge("other", NONE)
            reason = row(former).reason
        async with sharing(valkey, gate()) as present:
            await until(lambda: len(present.report()) == 2)
            assert order(present) == "preserve"
            rows = {row.template: row for row in present.report()}
            assert rows["support"].pairs == 40
            assert rows["support"].verdict == "harmful"
            assert (rows["other"].pairs, rows["other"].reordering) == (1, True)
            assert [row.reason for row in present.report() if row.reason] == [reason or rows["support"].reason]
            present.switch("support", reordering=True)
        async with sharing(valkey, gate()) as third:
            await until(lambda: bool(third.report()))
            assert order(third) == "canonical"
            assert {row.template: row.test for row in third.report()} == {"support": 2, "other": 1}

    asyncio.run(scenario())


def test_what_redis_loses_the_gateways_still_know(valkey: ValkeyServer) -> None:
    async def scenario() -> None:
        async with sharing(valkey, gate()) as one, sharing(valkey, gate()) as two:
            for _ in range(40):
                one.judge("support", HARM)
            await until(lambda: order(two) == "preserve")
            valkey.client().flushall()
            await until(lambda: valkey.client().zcard("headstart:quality:epochs") == 2)
            await until(lambda: row(two).pairs == 40)
            assert order(one) == order(two) == "preserve"

    asyncio.run(scenario())


def test_only_names_and_numbers_are_shared_and_other_models_are_others(valkey: ValkeyServer) -> None:
    async def scenario() -> None:
        client = valkey.client()
        client.zadd("headstart:quality:epochs", {"foreign": 1.0})
        good = msgspec.json.encode(Tally(off=Switch(1.0)))
        client.hset(
            "headstart:quality:foreign",
            mapping={"nonsense": "x", '["another model","support"]': good, '["m","mine"]': good},
        )
        async with sharing(valkey, gate()) as shared:
            shared.judge("support", Pair(0.25, None, -1.0))
            await until(lambda: len(shared.report()) == 2)
            assert {row.template: row.reordering for row in shared.report()} == {"support": True, "mine": False}
            await until(lambda: client.zcard("headstart:quality:epochs") == 2)
            (epoch,) = [name for name in client.zrange("headstart:quality:epochs", 0, -1) if name != b"foreign"]
            await until(lambda: client.hlen(f"headstart:quality:{epoch.decode()}") == 2)
            stored = client.hget(f"headstart:quality:{epoch.decode()}", '["m","support"]')
            assert msgspec.json.decode(stored or b"") == {
                "whole": {"agreement": {"25": 1}, "gold": {"-100": 1}},
                "recent": {"agreement": {"25": 1}, "gold": {"-100": 1}},
            }

    asyncio.run(scenario())


def test_a_late_harm_is_found_in_its_round_however_good_the_past_was() -> None:
    shared = gate()
    for _ in range(5 * ROUND_PAIRS):
        shared.judge("support", NONE)
    assert row(shared).round == 6
    for _ in range(100):
        shared.judge("support", Pair(0.9))
        if not row(shared).reordering:
            break
    assert row(shared).switched.pairs < ROUND_PAIRS
    assert not row(shared).reordering


def test_the_alarm_of_a_round_needs_more_the_more_there_were() -> None:
    rule = rule_for(QualityConfig(sample=1.0, max_logprob_loss=1.0, max_gold_loss=1.0), "support")
    recent = {"agreement": {100: 30}}

    def off(round: int) -> bool:
        return alarm(Tally(round=round, recent=recent), rule, 0.0) is not None  # type: ignore[arg-type]

    assert [off(1), off(100)] == [True, False]


@pytest.mark.parametrize("seed", range(3))
def test_tallies_add_up_whatever_order_they_are_read_in(seed: int) -> None:
    import random

    rng = random.Random(seed)
    parts = []
    for _ in range(5):
        tally = Tally(test=rng.randrange(1, 3), round=rng.randrange(1, 3))
        tally.off = Switch(rng.random()) if rng.random() < 0.4 else None
        for _ in range(20):
            tally.add(Pair(rng.uniform(-1, 1), rng.choice((None, 0.5, float("nan"))), None))
        parts.append(tally)
    total = add_up(parts)
    assert add_up(reversed(parts)) == total
    current = [tally for tally in parts if tally.test == total.test]
    assert total.pairs == 20 * len(current)
    assert (total.off is not None) == any(tally.off is not None for tally in current)
    assert total.round == max(tally.round for tally in current)


def test_so_many_templates_are_kept_apart_and_no_more() -> None:
    shared = gate()
    for number in range(300):
        shared.judge(f"t{number}", NONE)
    rows = {row.template: row.pairs for row in shared.report()}
    assert len(rows) == 257
    assert rows["other"] == 300 - 256
    for _ in range(120):
        shared.judge("t299", HARM)
    assert shared.decide("t299", "canonical", BODY, CALLER).order == "preserve"
    assert shared.decide("t0", "canonical", BODY, CALLER).order == "canonical"


def test_an_unknown_template_cannot_be_switched() -> None:
    with pytest.raises(TemplateNotFoundError):
        gate().switch("support", reordering=True)
