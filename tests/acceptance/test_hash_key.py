"""Cases of the kind hash-key: whose keys and values a cached block holds is part of its key."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM

from gateway.replicas.base import ReplicaState

from .models import make_model, write_weights
from .servers import Client, Server, tok

PROMPT = tok(0, 80)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_model(tmp_path_factory.mktemp("revisions") / "tiny", 1)


def _by_transformers(folder: Path, server: Server) -> str:
    """The greedy answer to the prompt of an engine that has nothing in common with ours, and no cache."""
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, local_files_only=True).eval()
    model.generation_config.eos_token_id = None
    ids = torch.tensor([PROMPT])
    with torch.inference_mode():
        whole = model.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=16, do_sample=False)
    return server.tokenizer.decode(whole[0, len(PROMPT) :].tolist())


def test_a7_other_weights_under_the_same_name_share_nothing_with_the_old_ones(
    folder: Path, start_server: Callable[..., Server]
) -> None:
    """The engine starts again over new weights while the gateway, and with it the router's index, lives on.

    What a cold server answers on each revision is computed by ``transformers.generate``.
    """
    server = start_server(folder, kv_blocks=64)
    first = _by_transformers(folder, server)
    server.wait_ready()

    async def scenario(client: Client) -> None:
        replica, router = server.replica, server.gateway.router
        answers = [await client.complete(PROMPT, ignore_eos=True) for _ in range(2)]
        assert [answer.cached for answer in answers] == [0, 64]
        assert [answer.text for answer in answers] == [first, first]
        assert replica.info is not None
        assert replica.pid is not None
        old = replica.info
        assert router.index.size() > 0
        write_weights(folder, 2)
        second = _by_transformers(folder, server)
        assert second != first
        os.kill(replica.pid, signal.SIGKILL)
        await client.poll(lambda: replica.state is ReplicaState.READY and replica.info.boot_id != old.boot_id)
        assert router.index.size() == 0
        assert replica.info.model == old.model
        assert replica.info.fingerprint != old.fingerprint
        answers = [await client.complete(PROMPT, ignore_eos=True) for _ in range(2)]
        assert [answer.cached for answer in answers] == [0, 64]
        assert [answer.text for answer in answers] == [second, second]

    server.run(scenario)
