"""Pins in force: their time, their engines' refusals, lives of real engine processes, and servers of others."""

from __future__ import annotations

import asyncio
import os
import signal
import sys
from contextlib import aclosing
from pathlib import Path

import msgspec
import pytest
from tokenizers import Tokenizer

from cache_policy.keys import chain_keys
from engine.wire import CacheEvent, EngineInfo, Load, Sampling, StepTiming
from gateway.config import PinConfig
from gateway.pins.prefix import Chain
from gateway.pins.upkeep import ReplicaPins, Target
from gateway.replicas.base import GenerationRequest, Replica, ReplicaState
from gateway.replicas.engine import EngineReplica
from gateway.replicas.scripted import ScriptedReplica, scripted_info
from gateway.replicas.supervisor import EngineLauncher
from gateway.routing.router import Router
from gateway.stats.cost import PrefillCost

from ..conftest import until
from ..replicas.openai_mock import CONFIG, MockServer, Remote, play, saying, whole
from .conftest import TEMPLATES, Bench

WORKER = [sys.executable, str(Path(__file__).parent.parent / "replicas" / "scripted_worker.py")]


def test_a_pin_ends_when_its_time_is_over_and_not_before(folder: Path) -> None:
    bench = Bench(folder)

    async def scenario() -> None:
        control = bench.control
        short, _ = await control.create(PinConfig("support"), 60.0)
        lasting, _ = await control.create(PinConfig("long"))
        assert short.expires == 1060.0
        bench.now = 1059.9
        await control.expire()
        assert len(control.report().pins) == len(await bench.told()) == 2
        bench.now = 1060.0
        await control.expire()
        assert [row.id for row in control.report().pins] == [lasting.id]
        assert len(await bench.told()) == 1

    bench.run(scenario)


def test_of_two_pins_of_the_same_blocks_one_may_end(folder: Path) -> None:
    bench = Bench(folder)

    async def scenario() -> None:
        row, _ = await bench.control.create(PinConfig("support"), 60.0)
        await until(lambda: bench.control.report().pins[0].state == "resident")
        (told,) = await bench.told()
        request = bench.replica.submitted[0]
        keys = chain_keys(request.root, request.token_ids, 16)
        assert (len(keys), keys[-1]) == (told["blocks"], told["key"])
        other, created = await bench.control.create(PinConfig(keys=tuple(key.hex() for key in keys)))
        assert created
        assert other.id != row.id
        assert await bench.told() == [told]
        bench.now += 60
        await bench.control.expire()
        assert await bench.told() == [told]
        await bench.control.delete(other.id)
        assert await bench.told() == []

    bench.run(scenario)


def test_what_an_engine_refuses_for_now_is_said_and_tried_again(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("gateway.pins.upkeep._RETRY_S", 0.01)
    bench = Bench(folder, num_blocks=32, max_model_len=512)

    async def scenario() -> None:
        request = GenerationRequest([5] * 400, bytes(16), Sampling(max_tokens=100, temperature=0.0, ignore_eos=True))
        bench.replica.hold()
        async with aclosing(bench.replica.generate(request)) as outputs:
            first = asyncio.ensure_future(anext(outputs))
            await until(lambda: len(bench.replica.submitted) == 1)
            row, _ = await bench.control.create(PinConfig("support"))  # its last tokens may need the whole pool
            here = row.replicas["engine-0"]
            assert not here.pinned
            assert here.note is not None
            assert "blocks would be pinned" in here.note
            bench.replica.let_go()
            await first
        await until(lambda: bench.control.report().pins[0].replicas["engine-0"].pinned)
        assert bench.control.report().pins[0].replicas["engine-0"].note is None
        assert len(await bench.told()) == 1

    bench.run(scenario)


class _Restarts:
    """A ``ReplicaObserver`` that has a replica's pins applied as the control does."""

    def __init__(self, pins: ReplicaPins, targets: dict[str, Target]) -> None:
        self.lives = 0
        self._pins = pins
        self._targets = targets

    def on_ready(self, replica: Replica, info: EngineInfo) -> None:
        self.lives += 1
        self._pins.want(self._targets, restarted=True)

    def on_down(self, replica: Replica, reason: str) -> None: ...

    def on_events(self, replica: Replica, events: tuple[CacheEvent, ...]) -> None: ...

    def on_step(self, replica: Replica, timing: StepTiming, load: Load) -> None: ...


def test_a_killed_engine_process_comes_back_with_its_pins_warm() -> None:
    tokens = [3 + i % 200 for i in range(96)]
    keys = tuple(chain_keys(bytes(16), tokens, 16))
    targets = {"pin-1": Target(Chain(keys, tokens, bytes(16)))}

    async def main() -> None:
        replica, router = EngineReplica("engine-0", EngineLauncher(WORKER)), Router(lambda _: PrefillCost())
        pins = ReplicaPins(replica, held=lambda: router.index.holds("engine-0"), in_flight=lambda: 0)
        observer = _Restarts(pins, targets)
        replica.observe(router)
        replica.observe(observer)
        pins.start()
        await replica.start()
        try:
            for life in (1, 2):
                await until(lambda: observer.lives == life and pins.state("pin-1") == "resident", 60.0)  # noqa: B023
                (told,) = (await replica.call("pins"))["pins"]
                assert (told["key"], told["blocks"], told["resident"]) == (keys[-1], 6, 6)
                assert (await replica.call("check")) == {"ok": True}
                assert replica.pid is not None
                os.kill(replica.pid, signal.SIGKILL)
                await until(lambda: replica.state is not ReplicaState.READY, 60.0)
                assert pins.state("pin-1") == "waiting"
        finally:
            await pins.stop()
            await replica.stop(0)

    asyncio.run(main())


def test_a_prefix_that_waits_for_an_idle_moment_says_so_and_waits_no_more_when_a_request_has_brought_it(
    folder: Path,
) -> None:
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    replica = ScriptedReplica("engine-0", tokenizer, scripted_info(tokenizer))
    tokens = [3 + i % 200 for i in range(96)]
    keys = tuple(chain_keys(bytes(16), tokens, 16))
    held: set[bytes] = set()
    now, busy = 1000.0, 1
    pins = ReplicaPins(replica, held=lambda: held, in_flight=lambda: busy, clock=lambda: now)

    async def main() -> None:
        nonlocal now, busy
        await replica.start()
        pins.want({"pin-1": Target(Chain(keys, tokens, bytes(16)))}, restarted=True)
        pins.start()
        await until(lambda: pins.pinned("pin-1") and pins._busy_since is not None)
        assert (pins.state("pin-1"), pins.problem("pin-1")) == ("waiting", None)
        now += 60
        assert pins.problem("pin-1") == "not prefilled yet: in 60 s the replica had no moment without requests"
        held.update(keys)
        assert (pins.state("pin-1"), pins.problem("pin-1")) == ("resident", None)
        await until(lambda: pins._busy_since is None)
        held.clear()
        pins.want({"pin-2": Target(Chain(keys, tokens, bytes(16)))})
        await until(lambda: pins._busy_since is not None)
        assert replica.submitted == []
        busy = 0
        await until(lambda: pins.warmed_prefixes == 1)
        assert pins.problem("pin-2") is None
        await pins.stop()
        await replica.stop(0)

    asyncio.run(main())


def test_a_remote_server_is_warmed_once_and_never_told_to_keep_anything(folder: Path) -> None:
    async def scenario(remote: Remote, server: MockServer) -> None:
        server.behave = saying(whole("x", finish="length"))
        async with remote.http.post(f"{remote.url}/admin/pins", json={"template": "support"}) as answer:
            assert answer.status == 201
        await until(lambda: remote.gateway.pins.report().pins[0].state == "warmed")
        report = remote.gateway.pins.report()
        here = report.pins[0].replicas["replica-0"]
        assert (here.pinned, here.resident_blocks, here.share) == (False, None, None)
        assert here.note == "a remote server cannot be told to keep it"
        assert report.replicas == {}
        (talk,) = server.talks
        assert (talk.body["max_tokens"], len(talk.body["prompt"])) == (1, here.tokens)
        async with remote.http.get(f"{remote.url}/admin/stats") as answer:
            assert (await answer.json())["totals"]["requests"] == 0

    play(folder, scenario, config=msgspec.structs.replace(CONFIG, templates=TEMPLATES))
