"""Tiny models with random weights, and engines around real and scripted models without process or socket."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from cache_policy.keys import token_bytes
from engine.core import EngineCore
from engine.scripted import ScriptedRunner
from engine.wire import EngineInfo, Load, Output, Sampling, StepReport, Submit

if TYPE_CHECKING:
    from engine.native.library import Kernels

ROOT = b"r" * 16
VOCABULARY = 211


class NoText:
    """A detokenizer for models that have no text."""

    def push(self, token_id: int) -> tuple[str, bool]:
        return "", False

    def finish(self) -> str:
        return ""


class ModelEngine:
    """Runs prompts to their end through scheduler, block manager and model; checks the invariants at each step."""

    def __init__(
        self,
        folder: Path,
        *,
        num_blocks: int,
        block_size: int,
        max_batch_tokens: int,
        max_running: int,
        threads: int,
        **options: Any,
    ) -> None:
        from engine.runner import ModelRunner

        self.runner = ModelRunner(
            folder, dtype="float32", num_blocks=num_blocks, block_size=block_size, threads=threads, **options
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
        )
        self.core = EngineCore(self.runner, info, detokenizer=lambda _stop: NoText(), max_running=max_running)
        self._next_id = 0

    @property
    def load(self) -> Load:
        return self.core.load()

    def generate(
        self,
        prompts: Sequence[list[int]],
        sampling: Sampling | Sequence[Sampling],
        *,
        use_cache: bool = True,
    ) -> tuple[list[list[int]], list[int]]:
        """Generated tokens, and prompt tokens taken from the cache, of prompts that are submitted at once."""
        each = [sampling] * len(prompts) if isinstance(sampling, Sampling) else sampling
        first = self._next_id
        self._next_id += len(prompts)
        for id, (prompt, chosen) in enumerate(zip(prompts, each, strict=True), first):
            self.core.submit(Submit(id, token_bytes(prompt), ROOT, chosen, use_cache))
        tokens: list[list[int]] = [[] for _ in prompts]
        cached = [-1] * len(prompts)
        while self.core.has_work():
            report = self.core.step()
            assert report is not None
            for output in report.outputs:
                assert output.error is None, output.error
                tokens[output.id - first] += output.token_ids
                if output.cached_tokens is not None:
                    cached[output.id - first] = output.cached_tokens
        self.core.call("check", {})
        assert self.load.used_blocks == 0
        return tokens, cached

    def choices(self, prompt: list[int], sampling: Sampling, n: int) -> list[list[int]]:
        """Generated tokens of the ``n`` choices of one prompt."""
        self.core.submit(Submit(self._next_id, token_bytes(prompt), ROOT, sampling, n=n))
        self._next_id += 1
        tokens: list[list[int]] = [[] for _ in range(n)]
        while self.core.has_work():
            report = self.core.step()
            assert report is not None
            for output in report.outputs:
                assert output.error is None, output.error
                tokens[output.index] += output.token_ids
        self.core.call("check", {})
        assert self.load.used_blocks == 0
        return tokens

    def forget(self) -> None:
        """Make the cache cold."""
        self.core.call("reset_cache", {})


class ScriptedEngine:
    """An engine on a scripted runner; its invariants are checked after every step.

    ``outputs`` are those of each choice, by request and index.
    """

    def __init__(
        self,
        *,
        num_blocks: int = 64,
        block_size: int = 16,
        max_batch_tokens: int = 256,
        max_running: int = 32,
        vocab_size: int = 1000,
        eos: tuple[int, ...] = (),
    ) -> None:
        self.info = EngineInfo(
            model="scripted",
            root="",
            fingerprint="f",
            boot_id="b",
            max_model_len=num_blocks * block_size,
            num_blocks=num_blocks,
            block_size=block_size,
            dtype="none",
            device="none",
            vocab_size=vocab_size,
            eos_token_ids=eos,
            policy="lru",
            max_batch_tokens=max_batch_tokens,
        )
        self.runner = ScriptedRunner(num_blocks, block_size, vocab_size=vocab_size, eos=eos)
        self.core = EngineCore(self.runner, self.info, detokenizer=lambda _stop: NoText(), max_running=max_running)
        self.outputs: dict[tuple[int, int], list[Output]] = {}
        self._next_id = 0

    def submit(self, prompt: Sequence[int], *, n: int = 1, use_cache: bool = True, **sampling: Any) -> int:
        """Queue a request, by default greedy for 4 tokens; return its id."""
        id = self._next_id
        self._next_id += 1
        self.outputs |= {(id, index): [] for index in range(n)}
        chosen = Sampling(**{"max_tokens": 4, "temperature": 0.0, **sampling})
        self.core.submit(Submit(id, token_bytes(list(prompt)), ROOT, chosen, use_cache, n))
        return id

    def step(self) -> StepReport:
        report = self.core.step()
        assert report is not None
        for output in report.outputs:
            told = self.outputs[output.id, output.index]
            assert not told or told[-1].finish_reason is None, "an output after the last one"
            told.append(output)
        self.core.call("check", {})
        return report

    def run(self) -> None:
        """Step until nothing is left to do; then nothing must be held either."""
        for _ in range(5000):
            if not self.core.has_work():
                break
            self.step()
        load = self.core.load()
        assert (load.running, load.waiting, load.used_blocks, load.queued_tokens) == (0, 0, 0, 0)

    def whole(self, id: int, index: int = 0) -> Output:
        """All outputs of one choice as one."""
        parts = self.outputs[id, index]
        assert parts[-1].finish_reason is not None
        return Output(
            id,
            "".join(part.text for part in parts),
            tuple(token for part in parts for token in part.token_ids),
            parts[-1].finish_reason,
            parts[0].cached_tokens,
            error=parts[-1].error,
            index=index,
            logprobs=tuple(entry for part in parts for entry in part.logprobs),
            prompt_logprobs=parts[0].prompt_logprobs,
        )

    def ask(self, prompt: Sequence[int], **options: Any) -> Output:
        """Submit a request, run until nothing is left to do, and return the whole of its first choice."""
        id = self.submit(prompt, **options)
        self.run()
        return self.whole(id)

    def stats(self) -> dict[str, Any]:
        return self.core.call("stats", {})


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
