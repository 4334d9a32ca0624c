"""What every replica promises, whatever is behind it."""

from __future__ import annotations

import asyncio
import os
import re
import signal
import sys
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AsyncExitStack, aclosing, asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Tokenizer

from engine.scripted import scripted_continuation
from engine.wire import AllBlocksCleared, BlockStored, CacheEvent, EngineInfo, Load, Output, Sampling, StepTiming
from gateway.config import Config, RedisConfig, ReplicaConfig, ServerConfig
from gateway.errors import HeadstartError, ReplicaError, ReplicaLost, ReplicaUnavailable
from gateway.replicas.base import GenerationRequest, Replica, ReplicaState
from gateway.replicas.engine import EngineReplica
from gateway.replicas.openai_http import OpenAIReplica
from gateway.replicas.remote import RemoteReplicas
from gateway.replicas.scripted import ScriptedReplica, scripted_info
from gateway.replicas.supervisor import EngineLauncher
from gateway.replicas.tokenizer_proof import TokenizerProof
from gateway.server import run as run_on_our_loop
from gateway.server import serving
from gateway.service import Gateway

from ..conftest import until
from .relay import Relay
from .tcp_engine import SECRET, TcpEngine

WORKER = [sys.executable, str(Path(__file__).with_name("scripted_worker.py"))]
ROOT = bytes(16)
TIMEOUT_S = 60.0


class Bench:
    """A replica under test, the engine that computes behind it, and how to kill what is behind it."""

    def __init__(self, replica: Replica, kill: Callable[[], Awaitable[None]], engine: Replica | None = None) -> None:
        self.replica = replica
        self.engine = engine or replica
        self.kill = kill
        self.heard = Recorder()
        replica.observe(self.heard)

    @property
    def running(self) -> int | None:
        """Requests that the engine computes."""
        return None if self.engine.load is None else self.engine.load.running


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


def scripted(tokenizer: Tokenizer) -> ScriptedReplica:
    return ScriptedReplica("r", tokenizer, scripted_info(tokenizer, num_blocks=64, max_model_len=1024))


async def scripted_bench(tokenizer: Tokenizer, folder: Path, stack: AsyncExitStack) -> Bench:
    replica = scripted(tokenizer)

    async def kill() -> None:
        replica.lose()
        await asyncio.sleep(0)
        replica.recover()

    return Bench(replica, kill)


async def engine_bench(tokenizer: Tokenizer, folder: Path, stack: AsyncExitStack) -> Bench:
    replica: Any = EngineReplica("r", EngineLauncher(WORKER))

    async def kill() -> None:
        os.kill(int(replica.info.boot_id), signal.SIGKILL)
        await until(lambda: replica.state is not ReplicaState.READY)

    return Bench(replica, kill)


async def tcp_bench(tokenizer: Tokenizer, folder: Path, stack: AsyncExitStack) -> Bench:
    """The same engine as an engine of its own, on another machine as far as the replica can tell."""
    engine = await stack.enter_async_context(TcpEngine(tokenizer))
    replica = RemoteReplicas(folder, "scripted", engine_secret=SECRET).connect(ReplicaConfig(engine.url))

    async def kill() -> None:
        await engine.stop()
        await until(lambda: replica.state is not ReplicaState.READY)
        await engine.listen()

    return Bench(replica, kill)


async def openai_bench(tokenizer: Tokenizer, folder: Path, stack: AsyncExitStack) -> Bench:
    """Behind it is a gateway of our own, which is an OpenAI-compatible server like others."""
    engine = scripted(tokenizer)
    config = Config(server=ServerConfig(port=0, drain_grace_s=0.0), redis=RedisConfig(url="redis://127.0.0.1:1/0"))
    url = await stack.enter_async_context(serving(Gateway(config, model="m", folder=folder, replicas=[engine])))
    relay = await stack.enter_async_context(Relay(int(url.rpartition(":")[2])))
    replica = OpenAIReplica("r", ReplicaConfig(relay.url), TokenizerProof.of(folder), model="m")

    async def kill() -> None:
        relay.cut()
        engine.lose()
        await until(lambda: replica.state is not ReplicaState.READY)
        engine.recover()
        await relay.listen()

    return Bench(replica, kill, engine)


BENCHES = {"scripted": scripted_bench, "engine": engine_bench, "tcp": tcp_bench, "openai": openai_bench}


def ask(tokens: list[int], **sampling: Any) -> GenerationRequest:
    options: dict[str, Any] = {"max_tokens": 8, "temperature": 0.0} | sampling
    return GenerationRequest(tokens, ROOT, Sampling(**options))


async def answer(replica: Replica, request: GenerationRequest) -> list[Output]:
    return [output async for output in replica.generate(request)]


def ids(outputs: list[Output]) -> list[int]:
    """The tokens of an answer, from its text: not every replica tells them, and each has a word of its own."""
    text = "".join(output.text for output in outputs)
    read = [int(number) for number in re.findall(r"w(\d+)", text)]
    told = [token for output in outputs for token in output.token_ids]
    assert told in ([], read)
    assert text == "".join(f"w{token}" for token in read)
    return read


def cached(outputs: list[Output]) -> int:
    """The cached tokens, which are told once."""
    (tokens,) = [output.cached_tokens for output in outputs if output.cached_tokens is not None]
    return tokens


def prompt(start: int, count: int) -> list[int]:
    return [(start + i) % 256 for i in range(count)]


Scenario = Callable[[Bench], Awaitable[None]]


@asynccontextmanager
async def bench(kind: str, tokenizer: Tokenizer, folder: Path) -> AsyncIterator[Bench]:
    async with AsyncExitStack() as stack:
        under_test = await BENCHES[kind](tokenizer, folder, stack)
        replica = under_test.replica
        await replica.start()
        try:
            await replica.wait_ready(TIMEOUT_S)
            yield under_test
        finally:
            await replica.stop(0)


@pytest.fixture(params=list(BENCHES))
def kind(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture
def run(kind: str, tokenizer: Tokenizer, tmp_path: Path) -> Callable[[Scenario], None]:
    """Run a scenario on a fresh replica of each kind."""
    tokenizer.save(str(tmp_path / "tokenizer.json"))

    def run_scenario(scenario: Scenario) -> None:
        async def main() -> None:
            async with bench(kind, tokenizer, tmp_path) as under_test, asyncio.timeout(TIMEOUT_S):
                await scenario(under_test)

        run_on_our_loop(main())

    return run_scenario


ours = pytest.mark.parametrize("kind", ["scripted", "engine"])
"""What only our own engine tells and obeys."""


def test_one_that_ends_is_started_again_by_this_gateway_or_has_an_address_of_its_own(
    run: Callable[[Scenario], None],
) -> None:
    """A request may wait for the one; of the other nobody here knows whether it comes back."""

    async def scenario(bench: Bench) -> None:
        assert bench.replica.restarts is (bench.replica.url is None)
        await bench.kill()
        await until(lambda: bench.replica.state is ReplicaState.READY)
        assert bench.heard.calls[-2:] == ["down", "ready"]

    run(scenario)


def test_an_answer_is_the_models_and_ends_once(run: Callable[[Scenario], None]) -> None:
    async def scenario(bench: Bench) -> None:
        outputs = await answer(bench.replica, ask(prompt(3, 40)))
        assert ids(outputs) == scripted_continuation(prompt(3, 40), 8, vocab_size=256)
        assert [output.finish_reason for output in outputs] == [None] * (len(outputs) - 1) + ["length"]
        assert cached(outputs) == 0

    run(scenario)


def test_a_second_request_hits_what_the_first_has_published(run: Callable[[Scenario], None]) -> None:
    async def scenario(bench: Bench) -> None:
        first = await answer(bench.replica, ask(prompt(0, 64)))
        second = await answer(bench.replica, ask(prompt(0, 64)))
        assert cached(second) == 48
        assert ids(first) == ids(second)
        bypass = GenerationRequest(prompt(0, 64), ROOT, Sampling(max_tokens=1, temperature=0.0), use_cache=False)
        assert cached(await answer(bench.replica, bypass)) == 0
        other = GenerationRequest(prompt(0, 64), bytes(range(16)), Sampling(max_tokens=1, temperature=0.0))
        assert cached(await answer(bench.replica, other)) == 0, "another namespace"

    run(scenario)


def test_concurrent_requests_do_not_mix(run: Callable[[Scenario], None]) -> None:
    async def scenario(bench: Bench) -> None:
        prompts = [prompt(start, 30) for start in range(12)]
        answers = await asyncio.gather(*[answer(bench.replica, ask(tokens, max_tokens=20)) for tokens in prompts])
        for tokens, outputs in zip(prompts, answers, strict=True):
            assert ids(outputs) == scripted_continuation(tokens, 20, vocab_size=256)

    run(scenario)


def test_choices_are_told_apart(run: Callable[[Scenario], None]) -> None:
    async def scenario(bench: Bench) -> None:
        sampling = Sampling(max_tokens=8, temperature=0.0)
        outputs = await answer(bench.replica, GenerationRequest(prompt(3, 40), ROOT, sampling, n=3))
        for index in range(3):
            of_one = [output for output in outputs if output.index == index]
            assert ids(of_one) == scripted_continuation(prompt(3, 40), 8, vocab_size=256)
            assert [output.finish_reason for output in of_one] == [None] * (len(of_one) - 1) + ["length"]

    run(scenario)


def test_closing_the_generator_aborts_at_the_replica(run: Callable[[Scenario], None]) -> None:
    async def scenario(bench: Bench) -> None:
        async with aclosing(bench.replica.generate(ask(prompt(0, 20), max_tokens=900))) as outputs:
            async for _ in outputs:
                break
        await until(lambda: bench.running == 0)
        assert (await bench.engine.call("stats"))["used_blocks"] == 0

    run(scenario)


def test_cancelling_the_reader_aborts_at_the_replica(run: Callable[[Scenario], None]) -> None:
    async def scenario(bench: Bench) -> None:
        task = asyncio.create_task(answer(bench.replica, ask(prompt(0, 20), max_tokens=900)))
        await until(lambda: bench.running == 1)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        await until(lambda: bench.running == 0)

    run(scenario)


def test_what_cannot_be_served_is_the_callers_error(run: Callable[[Scenario], None]) -> None:
    async def scenario(bench: Bench) -> None:
        for tokens, code in ((prompt(0, 1024), "context_length_exceeded"), ([256], "invalid_token")):
            with pytest.raises(HeadstartError) as caught:
                await answer(bench.replica, ask(tokens))
            assert (caught.value.status, caught.value.code) == (400, code)
        assert len(ids(await answer(bench.replica, ask(prompt(0, 20))))) == 8

    run(scenario)


@ours
def test_observers_hear_of_blocks_and_steps(run: Callable[[Scenario], None]) -> None:
    async def scenario(bench: Bench) -> None:
        await answer(bench.replica, ask(prompt(0, 40)))
        stored = [key for event in bench.heard.events if isinstance(event, BlockStored) for key in event.block_hashes]
        assert len(set(stored)) == 2
        assert bench.heard.prefilled == 40
        assert bench.heard.calls == ["ready"]

    run(scenario)


@ours
def test_a_replica_tells_again_what_it_holds_when_it_is_asked_to(run: Callable[[Scenario], None]) -> None:
    async def scenario(bench: Bench) -> None:
        assert bench.replica.tells_events
        for start in (0, 100):
            await answer(bench.replica, ask(prompt(start, 40)))
        before = [key for event in bench.heard.events if isinstance(event, BlockStored) for key in event.block_hashes]
        bench.heard.events.clear()
        bench.replica.resync()
        await until(lambda: len(bench.heard.events) > 0)
        first, *events = bench.heard.events
        assert first == AllBlocksCleared()
        told = [key for event in events if isinstance(event, BlockStored) for key in event.block_hashes]
        assert sorted(told) == sorted(before)
        assert len(told) == 4

    run(scenario)


def test_calls_are_answered_or_refused(kind: str, run: Callable[[Scenario], None]) -> None:
    async def scenario(bench: Bench) -> None:
        await answer(bench.replica, ask(prompt(0, 40)))
        if kind == "openai":
            with pytest.raises(ReplicaError, match="reset_cache"):
                await bench.replica.call("reset_cache")
            assert cached(await answer(bench.replica, ask(prompt(0, 40)))) == 32
        else:
            assert (await bench.replica.call("reset_cache"))["dropped"] == 2
            assert cached(await answer(bench.replica, ask(prompt(0, 40)))) == 0
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
        assert cached(await answer(replica, ask(prompt(0, 40)))) == 0

    run(scenario)


def test_a_stopped_replica_lets_requests_end_and_takes_no_more(run: Callable[[Scenario], None]) -> None:
    async def scenario(bench: Bench) -> None:
        replica = bench.replica
        running = asyncio.create_task(answer(replica, ask(prompt(0, 20), max_tokens=400)))
        await until(lambda: bench.running == 1)
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
        await until(lambda: bench.running == 1)
        await bench.replica.stop(0)
        with pytest.raises(ReplicaLost):
            await running
        if bench.engine is not bench.replica:
            await until(lambda: bench.running == 0)

    run(scenario)
