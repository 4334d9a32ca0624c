"""The replica contract against the real engine process, with a small random model."""

from __future__ import annotations

import asyncio
import os
import signal
from contextlib import aclosing
from pathlib import Path

import pytest

from engine.wire import Output, Sampling
from gateway.config import EngineConfig
from gateway.errors import ReplicaLost
from gateway.replicas.base import GenerationRequest, ReplicaState
from gateway.replicas.engine import EngineReplica
from gateway.replicas.supervisor import EngineLauncher, engine_command

from ..conftest import until

TIMEOUT_S = 120.0
ROOT = bytes(16)
PROMPT = [10 + i % 500 for i in range(40)]
CONFIG = EngineConfig(dtype="float32", kv_blocks=64, max_batch_tokens=32, threads=1)


def _ask(count: int) -> GenerationRequest:
    return GenerationRequest(PROMPT, ROOT, Sampling(max_tokens=count, temperature=0.0, ignore_eos=True))


async def _answer(replica: EngineReplica, count: int = 8) -> list[Output]:
    return [output async for output in replica.generate(_ask(count))]


def _ids(outputs: list[Output]) -> list[int]:
    return [token for output in outputs for token in output.token_ids]


def test_the_engine_process_keeps_the_contract_over_its_lives(tiny_model: Path) -> None:
    async def main() -> None:
        replica = EngineReplica("engine-0", EngineLauncher(engine_command(CONFIG, tiny_model, "tiny")))
        await replica.start()
        try:
            await replica.wait_ready(TIMEOUT_S)
            assert replica.info is not None
            assert (replica.info.model, replica.info.num_blocks, replica.info.dtype) == ("tiny", 64, "float32")
            assert replica.info.max_model_len == 512
            assert replica.info.root == str(tiny_model)
            assert replica.info.profile

            cold, warm = await _answer(replica), await _answer(replica)
            assert (cold[0].cached_tokens, warm[0].cached_tokens) == (0, 32)
            assert _ids(cold) == _ids(warm)
            assert len(_ids(cold)) == 8

            async with aclosing(replica.generate(_ask(400))) as outputs:
                await anext(outputs)
            await until(lambda: replica.load is not None and replica.load.running == 0, TIMEOUT_S)
            assert (await replica.call("check")) == {"ok": True}

            outputs = replica.generate(_ask(400))
            await anext(outputs)
            assert replica.pid is not None
            os.kill(replica.pid, signal.SIGKILL)
            with pytest.raises(ReplicaLost, match="SIGKILL"):
                async for _ in outputs:
                    pass
            assert replica.load is None  # or the request would be shown as running there for as long as it is down
            await until(lambda: replica.state is ReplicaState.READY, TIMEOUT_S)
            again = await _answer(replica)
            assert again[0].cached_tokens == 0
            assert _ids(again) == _ids(cold)
        finally:
            await replica.stop(0)

    asyncio.run(main())
