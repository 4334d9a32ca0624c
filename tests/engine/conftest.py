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
MOST_STEPS = 20_000


class NoText:
    """A detokenizer for models that have no text."""

    def push(self, token_id: int) -> tuple[str, bool]:
        return "", False

    def finish(self) -> str:
        return ""


class Words:
    """A detokenizer that writes each token as a word, and stops at words."""

    def __init__(self, stop: tuple[str, ...]) -> None:
        self.stop = stop

    def push(self, token_id: int) -> tuple[str, bool]:
        word = f"w{token_id} "
        return ("", True) if word.strip() in self.stop else (word, False)

    def finish(self) -> str:
        return "."


class DrivenEngine:
    """Submits requests to a core, steps it, and keeps what each choice was told, by request and index."""

    def __init__(self, core: EngineCore) -> None:
        self.core = core
        self.outputs: dict[tuple[int, int], list[Output]] = {}
        self._next_id = 0

    @property
    def load(self) -> Load:
        return self.core.load()

    def stats(self) -> dict[str, Any]:
        return self.core.call("stats", {})

    def submit(
        self, prompt: Sequence[int], sampling: Sampling, *, n: int = 1, use_cache: bool = True, **options: int
    ) -> int:
        """Queue a request; return its id. ``options`` are of its class."""
        id = self._next_id
        self._next_id += 1
        self.outputs |= {(id, index): [] for index in range(n)}
        self.core.submit(Submit(id, token_bytes(list(prompt)), ROOT, sampling, use_cache, n, **options))
        return id

    def step(self) -> StepReport:
        report = self.core.step()
        assert report is not None
        for output in report.outputs:
            told = self.outputs[output.id, output.index]
            assert not told or told[-1].finish_reason is None, "an output after the last one"
            told.append(output)
        return report

    def run(self) -> None:
        """Step until nothing is left to do; then nothing must be held either."""
        for _ in range(MOST_STEPS):
            if not self.core.has_work():
                break
            self.step()
        self.core.call("check", {})
        load = self.load
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


class ScriptedEngine(DrivenEngine):
    """An engine on a scripted runner; its invariants are checked after every step."""

    def __init__(
        self,
        *,
        num_blocks: int = 64,
        block_size: int = 16,
        max_batch_tokens: int = 256,
        max_running: int = 32,
        vocab_size: int = 1000,
        eos: tuple[int, ...] = (),
        runner: type[ScriptedRunner] = ScriptedRunner,
    ) -> None:
        info = EngineInfo(
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
        self.runner = runner(num_blocks, block_size, vocab_size=vocab_size, eos=eos)
        super().__init__(EngineCore(self.runner, info, detokenizer=Words, max_running=max_running))

    def queue(
        self,
        prompt: Sequence[int],
        *,
        n: int = 1,
        use_cache: bool = True,
        priority: int = 0,
        class_limit: int = 0,
        **sampling: Any,
    ) -> int:
        """Queue a request, by default greedy for 4 tokens; return its id."""
        chosen = Sampling(**{"max_tokens": 4, "temperature": 0.0, **sampling})
        return self.submit(prompt, chosen, n=n, use_cache=use_cache, priority=priority, class_limit=class_limit)

    def ask(self, prompt: Sequence[int], **options: Any) -> Output:
        """Queue a request, run until nothing is left to do, and return the whole of its first choice."""
        id = self.queue(prompt, **options)
        self.run()
        return self.whole(id)

    def step(self) -> StepReport:
        report = super().step()
        self.core.call("check", {})
        return report


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
