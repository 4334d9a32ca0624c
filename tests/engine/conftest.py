"""Tiny models with random weights, and engines around real and scripted models without process or socket."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from engine.core import EngineCore
from engine.wire import EngineInfo, Output, Sampling

from .driven import DrivenEngine, ScriptedEngine

if TYPE_CHECKING:
    from engine.native.library import Kernels

VOCABULARY = 211
SMALL: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "hidden_size": 32,
    "intermediate_size": 52,  # no multiple of eight
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 200,
    "initializer_range": 0.2,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
    "tie_word_embeddings": False,
}
"""The shape of the tiny models, as arguments of a configuration of transformers."""


def _llama() -> Any:
    from transformers import LlamaConfig

    return LlamaConfig(**(SMALL | {"head_dim": 16}))


def _gemma2() -> Any:
    from transformers import Gemma2Config

    sizes = {"head_dim": 16, "query_pre_attn_scalar": 16, "sliding_window": 9, "final_logit_softcapping": 5.0}
    return Gemma2Config(**(SMALL | sizes))


FORWARDS: dict[str, Callable[[], Any]] = {"lean": _llama, "modules": _gemma2}
"""Configurations of one model for each forward: the lean one, and transformers' modules."""


class NoText:
    """A detokenizer for models that have no text."""

    def push(self, token_id: int) -> tuple[str, bool]:
        return "", False

    def finish(self) -> str:
        return ""


class ModelEngine(DrivenEngine):
    """Runs prompts to their end through scheduler, block manager and model; then the invariants are checked."""

    def __init__(
        self,
        folder: Path,
        *,
        num_blocks: int,
        block_size: int,
        max_batch_tokens: int,
        max_running: int,
        threads: int,
        window_blocks: int = 0,
        **options: Any,
    ) -> None:
        from engine.runner import ModelRunner

        self.runner = ModelRunner(
            folder,
            dtype="float32",
            num_blocks=num_blocks,
            window_blocks=window_blocks,
            block_size=block_size,
            threads=threads,
            **options,
        )
        model = self.runner.info
        info = EngineInfo(
            model="test",
            root=str(folder),
            fingerprint=self.runner.fingerprint,
            boot_id="boot",
            max_model_len=min(model.max_positions, num_blocks * block_size),
            num_blocks=num_blocks,
            block_size=block_size,
            dtype=self.runner.dtype,
            device=self.runner.device,
            vocab_size=model.vocab_size,
            eos_token_ids=model.eos_token_ids,
            policy="lru",
            max_batch_tokens=max_batch_tokens,
            window=model.window,
            window_blocks=window_blocks or num_blocks,
        )
        super().__init__(EngineCore(self.runner, info, detokenizer=lambda _stop: NoText(), max_running=max_running))

    def answers(
        self,
        prompts: Sequence[list[int]],
        sampling: Sampling | Sequence[Sampling],
        *,
        use_cache: bool = True,
    ) -> list[Output]:
        """The whole answers to prompts that are submitted at once."""
        each = [sampling] * len(prompts) if isinstance(sampling, Sampling) else sampling
        ids = [self.submit(prompt, chosen, use_cache=use_cache) for prompt, chosen in zip(prompts, each, strict=True)]
        self.run()
        answers = [self.whole(id) for id in ids]
        assert [answer.error for answer in answers] == [None] * len(answers)
        return answers

    def generate(
        self,
        prompts: Sequence[list[int]],
        sampling: Sampling | Sequence[Sampling],
        *,
        use_cache: bool = True,
    ) -> tuple[list[list[int]], list[int]]:
        """Generated tokens, and prompt tokens taken from the cache, of prompts that are submitted at once."""
        answers = self.answers(prompts, sampling, use_cache=use_cache)
        return [[*answer.token_ids] for answer in answers], [answer.cached_tokens or 0 for answer in answers]

    def choices(self, prompt: list[int], sampling: Sampling, n: int) -> list[list[int]]:
        """Generated tokens of the ``n`` choices of one prompt."""
        id = self.submit(prompt, sampling, n=n)
        self.run()
        answers = [self.whole(id, index) for index in range(n)]
        assert [answer.error for answer in answers] == [None] * n
        return [[*answer.token_ids] for answer in answers]

    def forget(self) -> None:
        """Make the cache cold."""
        self.core.call("reset_cache", {})


@pytest.fixture
def scripted_engine() -> type[ScriptedEngine]:
    """Makes engines over scripted runners."""
    return ScriptedEngine


@pytest.fixture
def model_engine() -> Callable[..., ModelEngine]:
    """Makes engines over a model folder; ``options`` are the runner's."""

    def make(
        folder: Path,
        *,
        num_blocks: int = 64,
        block_size: int = 4,
        max_batch_tokens: int = 64,
        max_running: int = 8,
        threads: int = 1,
        **options: Any,
    ) -> ModelEngine:
        return ModelEngine(
            folder,
            num_blocks=num_blocks,
            block_size=block_size,
            max_batch_tokens=max_batch_tokens,
            max_running=max_running,
            threads=threads,
            **options,
        )

    return make


@pytest.fixture(scope="session")
def kernels() -> Kernels:
    """The C++ kernels, built into the user's cache when they are not there yet."""
    from engine.native.build import build_kernels, compiler
    from engine.native.library import Kernels

    if compiler() is None:
        pytest.skip("there is no C++ compiler")
    return Kernels(build_kernels())


@pytest.fixture
def tiny_model(tmp_path: Path) -> Callable[..., tuple[Any, Path]]:
    """Makes a model of random weights from a configuration: the transformers model, and the folder it is saved in.

    The weights are large enough for the output to depend on everything before it.
    """
    import torch
    from transformers import AutoModelForCausalLM

    torch.set_num_threads(1)

    def make(config: Any, name: str = "model") -> tuple[Any, Path]:
        torch.manual_seed(0)
        model = AutoModelForCausalLM.from_config(config).eval()
        folder = tmp_path / name
        model.save_pretrained(folder)
        (folder / "tokenizer.json").write_text("{}")
        return model, folder

    return make
