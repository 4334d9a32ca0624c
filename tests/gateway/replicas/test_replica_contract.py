"""What every replica promises, whatever is behind it."""

from __future__ import annotations

import asyncio
import os
import signal
import sys
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import aclosing, asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Tokenizer

from engine.scripted import scripted_continuation
from engine.wire import BlockStored, CacheEvent, EngineInfo, Load, Output, Sampling, StepTiming
from gateway.errors import HeadstartError, ReplicaError, ReplicaLost, ReplicaUnavailable
from gateway.replicas.base import GenerationRequest, Replica, ReplicaState
from gateway.replicas.engine import EngineReplica
from gateway.replicas.scripted import ScriptedReplica, scripted_info
from gateway.replicas.supervisor import EngineLauncher
from gateway.server import run as run_on_our_loop

from ..conftest import until

WORKER = [sys.executable, str(Path(__file__).with_name("scripted_worker.py"))]
ROOT = bytes(16)
TIMEOUT_S = 20.0


class Bench:
    """A replica under test, and how to kill what is behind it."""

    def __init__(self, replica: Replica, kill: Callable[[], Awaitable[None]]) -> None:
        self.replica = replica
        self.kill = kill
        self.heard = Recorder()
        replica.observe(self.heard)


class Recorder:
    """An observer that writes down what it hears."""

    def __init__(self) -> None:
        self.calls: list[str] = []
        self.events: list[CacheEvent] = []
        self.prefilled = 0

    def on_ready(self, replica: Replica, info: EngineInfo) -> None:
        self.calls.append("ready")
        self.events.clear()

    def on_down(self, replica: Replica, reason: str) -> None:
        self.calls.append("down")

    def on_events(self, replica: Replica, events: tuple[CacheEvent, ...]) -> None:
        self.events.extend(events)

    def on_step(self, replica: Replica, timing: StepTiming, load: Load) -> None:
        self.prefilled += timing.prefill_tokens


@asynccontextmanager
async def bench(kind: str, tokenizer: Tokenizer) -> AsyncIterator[Bench]:
    replica: Any
    if kind == "scripted":
        replica = ScriptedReplica("r", tokenizer, scripted_info(tokenizer, num_blocks=64, max_model_len=1024))

        async def kill() -> None:
            replica.lose()
            await asyncio.sleep(0)
            replica.recover()
    else:
        replica = EngineReplica("r", EngineLauncher(WORKER))

        async def kill() -> None:
            os.kill(int(replica.info.boot_id), signal.SIGKILL)
            await until(lambda: replica.state is not ReplicaState.READY)

    under_test = Bench(replica, kill)
    await replica.start()
    try:
        await replica.wait_ready(TIMEOUT_S)
        yield under_test
    finally:
        await replica.stop(0)


def ask(tokens: list[int], **sampling: Any) -> GenerationRequest:
    options: dict[str, Any] = {"max_tokens": 8, "temperature": 0.0} | sampling
    return GenerationRequest(tokens, ROOT, Sampling(**options))


async def answer(replica: Replica, request: GenerationRequest) -> list[Output]:
    return [output async for output in replica.generate(request)]


def ids(outputs: list[Output]) -> list[int]:
    return [token for output in outputs for token in output.token_ids]


def prompt(start: int, count: int) -> list[int]:
    return [(start + i) % 256 for i in range(count)]


Scenario = Callable[[Bench], Awaitable[None]]


@pytest.fixture(params=["scripted", "engine"])
def run(request: pytest.FixtureRequest, tokenizer: Tokenizer) -> Callable[[Scenario], None]:
    """Run a scenario on a fresh replica of each kind."""

    def run_scenario(scenario: Scenario) -> None:
        async def main() -> None:
            async with bench(request.param, tokenizer) as under_test, asyncio.timeout(TIMEOUT_S):
                await scenario(under_test)

        run_on_our_loop(main())

    return run_scenario


def test_an_answer_is_the_models_and_ends_once(run: Callable[[Scenario], None]) -> None:
    async def scenario(bench: Bench) -> None:
        outputs = await answer(bench.replica, ask(prompt(3, 40)))
        assert ids(outputs) == scripted_continuation(prompt(3, 40), 8, vocab_size=256)
        assert "".join(output.text for output in outputs) == "".join(f"w{i}" for i in ids(outputs))
        assert [output.finish_reason for output in outputs] == [None] * (len(outputs) - 1) + ["length"]
        assert outputs[0].cached_tokens == 0
        assert all(output.cached_tokens is None for output in outputs[1:])

    run(scenario)


def test_a_second_request_hits_what_the_first_has_published(run: Callable[[Scenario], None]) -> None:
    async def scenario(bench: Bench) -> None:
        first = await answer(bench.replica, ask(prompt(0, 64)))
        second = await answer(bench.replica, ask(prompt(0, 64)))
        assert second[0].cached_tokens == 48
        assert ids(first) == ids(second)
        bypass = GenerationRequest(prompt(0, 64), ROOT, Sampling(max_tokens=1, temperature=0.0), use_cache=False)
        assert (await answer(bench.replica, bypass))[0].cached_tokens == 0

    run(scenario)


def test_concurrent_requests_do_not_mix(run: Callable[[Scenario], None]) -> None:
    async def scenario(bench: Bench) -> None:
        prompts = [prompt(start, 30) for start in range(12)]
        answers = await asyncio.gather(*[answer(bench.replica, ask(tokens, max_tokens=20)) for tokens in prompts])
        for tokens, outputs in zip(prompts, answers, strict=True):
            assert ids(outputs) == scripted_continuation(tokens, 20, vocab_size=256)

    run(scenario)


def test_closing_the_generator_aborts_at_the_replica(run: Callable[[Scenario], None]) -> None:
    async def scenario(bench: Bench) -> None:
        async with aclosing(bench.replica.generate(ask(prompt(0, 20), max_tokens=900))) as outputs:
            async for _ in outputs:
                break
        await until(lambda: bench.replica.load is not None and bench.replica.load.running == 0)
        assert (await bench.replica.call("stats"))["used_blocks"] == 0

    run(scenario)


def test_cancelling_the_reader_aborts_at_the_replica(run: Callable[[Scenario], None]) -> None:
    async def scenario(bench: Bench) -> None:
        task = asyncio.create_task(answer(bench.replica, ask(prompt(0, 20), max_tokens=900)))
        await until(lambda: bench.replica.load is not None and bench.replica.load.running == 1)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        await until(lambda: bench.replica.load is not None and bench.replica.load.running == 0)

    run(scenario)


def test_what_cannot_be_served_is_the_callers_error(run: Callable[[Scenario], None]) -> None:
    async def scenario(bench: Bench) -> None:
        for tokens, code in ((prompt(0, 1024), "context_length_exceeded"), ([256], "invalid_token")):
            with pytest.raises(HeadstartError) as caught:
                await answer(bench.replica, ask(tokens))
            assert (caught.value.status, caught.value.code) == (400, code)
        assert len(ids(await answer(bench.replica, ask(prompt(0, 20))))) == 8

    run(scenario)


def test_observers_hear_of_blocks_and_steps(run: Callable[[Scenario], None]) -> None:
    async def scenario(bench: Bench) -> None:
        await answer(bench.replica, ask(prompt(0, 40)))
        stored = [key for event in bench.heard.events if isinstance(event, BlockStored) for key in event.block_hashes]
        assert len(set(stored)) == 2
        assert bench.heard.prefilled == 40
        assert bench.heard.calls == ["ready"]

    run(scenario)


def test_calls_are_answered_or_refused(run: Callable[[Scenario], None]) -> None:
    async def scenario(bench: Bench) -> None:
        await answer(bench.replica, ask(prompt(0, 40)))
        assert (await bench.replica.call("reset_cache"))["dropped"] == 2
        assert (await answer(bench.replica, ask(prompt(0, 40))))[0].cached_tokens == 0
        assert (await bench.replica.call("check")) == {"ok": True}
        with pytest.raises(ReplicaError, match="no-such"):
            await bench.replica.call("no-such")

    run(scenario)


def test_a_death_ends_requests_and_the_replica_comes_back_empty(run: Callable[[Scenario], None]) -> None:
    async def scenario(bench: Bench) -> None:
        replica = bench.replica
        assert replica.info is not None
        first_boot = replica.info.boot_id
        await answer(replica, ask(prompt(0, 40)))
        outputs = replica.generate(ask(prompt(50, 20), max_tokens=900))
        await anext(outputs)
        await bench.kill()
        with pytest.raises(ReplicaLost) as caught:
            async for _ in outputs:
                pass
        assert caught.value.produced
        await until(lambda: replica.state is ReplicaState.READY)
        assert bench.heard.calls == ["ready", "down", "ready"]
        assert replica.info.boot_id != first_boot
        assert (await answer(replica, ask(prompt(0, 40))))[0].cached_tokens == 0

    run(scenario)


def test_a_stopped_replica_lets_requests_end_and_takes_no_more(run: Callable[[Scenario], None]) -> None:
    async def scenario(bench: Bench) -> None:
        replica = bench.replica
        running = asyncio.create_task(answer(replica, ask(prompt(0, 20), max_tokens=400)))
        await until(lambda: replica.load is not None and replica.load.running == 1)
        stopping = asyncio.create_task(replica.stop(TIMEOUT_S))
        await until(lambda: replica.state is ReplicaState.STOPPED)
        with pytest.raises(ReplicaUnavailable):
            await answer(replica, ask(prompt(0, 20)))
        assert len(ids(await running)) == 400
        await stopping
        assert bench.heard.calls == ["ready"]

    run(scenario)


def test_a_stop_without_grace_ends_requests_with_an_error(run: Callable[[Scenario], None]) -> None:
    async def scenario(bench: Bench) -> None:
        running = asyncio.create_task(answer(bench.replica, ask(prompt(0, 20), max_tokens=900)))
        await until(lambda: bench.replica.load is not None and bench.replica.load.running == 1)
        await bench.replica.stop(0)
        with pytest.raises(ReplicaLost):
            await running

    run(scenario)
