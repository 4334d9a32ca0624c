"""Engines without process or socket that tests step by hand, and scripted ones, which need no model either."""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import Any

from cache_policy.keys import token_bytes
from engine.batch import Batch, ChunkResult
from engine.core import EngineCore
from engine.scripted import ScriptedRunner, scripted_continuation
from engine.wire import EngineInfo, Load, Output, Sampling, StepReport, Submit

ROOT = b"r" * 16
VOCABULARY = 1000
MOST_STEPS = 20_000


def tok(first: int, count: int) -> list[int]:
    """``TOK(first, count)`` of the acceptance cases."""
    return [(first + i) % VOCABULARY for i in range(count)]


def noise(seed: int, count: int, below: int = VOCABULARY) -> list[int]:
    """Tokens that nobody else has."""
    generator = random.Random(seed)
    return [generator.randrange(below) for _ in range(count)]


def expected(prompt: Sequence[int], count: int) -> list[int]:
    """What a scripted engine says after the prompt, by itself and greedily."""
    return scripted_continuation(prompt, count, vocab_size=VOCABULARY)


class Words:
    """A detokenizer that writes each token as a word, and stops at words."""

    def __init__(self, stop: tuple[str, ...]) -> None:
        self.stop = stop

    def push(self, token_id: int) -> tuple[str, bool]:
        word = f"w{token_id} "
        return ("", True) if word.strip() in self.stop else (word, False)

    def finish(self) -> str:
        return "."


class Answer:
    """One choice of a request: what it has been told so far, and how it ended."""

    def __init__(self) -> None:
        self.parts: list[Output] = []
        self.cached_tokens: int | None = None
        self.prefill_s: float | None = None
        self.finish_reason: str | None = None
        self.error: tuple[str, str] | None = None
        self.first_step: int | None = None
        """The number of the step, from 1 on, that brought its first token."""

    def take(self, output: Output, step: int) -> None:
        assert self.finish_reason is None, "an output after the last one"
        if output.cached_tokens is not None:
            assert self.cached_tokens is None, "cached tokens are told once"
            assert not self.tokens
            self.cached_tokens, self.prefill_s = output.cached_tokens, output.prefill_s
            assert output.queue_s is not None
        if output.token_ids and self.first_step is None:
            self.first_step = step
        self.parts.append(output)
        self.finish_reason = output.finish_reason

    @property
    def tokens(self) -> list[int]:
        return [token for part in self.parts for token in part.token_ids]

    @property
    def text(self) -> str:
        return "".join(part.text for part in self.parts)


class DrivenEngine:
    """Submits requests to a core, steps it, and keeps what each choice was told, by request and index."""

    def __init__(self, core: EngineCore) -> None:
        self.core = core
        self.told: dict[tuple[int, int], Answer] = {}
        self.reports: list[StepReport] = []
        self._next_id = 0

    @property
    def load(self) -> Load:
        return self.core.load()

    def stats(self) -> dict[str, Any]:
        return self.core.call("stats", {})

    def submit(
        self, prompt: Sequence[int], sampling: Sampling, *, n: int = 1, use_cache: bool = True, **options: Any
    ) -> int:
        """Queue a request; return its id. ``options`` are of its class and its owner."""
        id = self._next_id
        self._next_id += 1
        self.told |= {(id, index): Answer() for index in range(n)}
        self.core.submit(Submit(id, token_bytes(list(prompt)), ROOT, sampling, use_cache, n, **options))
        return id

    def step(self) -> StepReport:
        report = self.core.step()
        assert report is not None
        self.reports.append(report)
        for output in report.outputs:
            self.told[output.id, output.index].take(output, len(self.reports))
            if output.error is not None:  # it ends the whole request
                for (id, _), answer in self.told.items():
                    if id == output.id:
                        answer.finish_reason, answer.error = "error", output.error
        return report

    def run(self) -> None:
        """Step until nothing is left to do; then everybody has an end, and nothing is held."""
        for _ in range(MOST_STEPS):
            if not self.core.has_work():
                break
            self.step()
        self.core.call("check", {})
        load = self.load
        assert (load.running, load.waiting, load.used_blocks, load.queued_tokens) == (0, 0, 0, 0)
        assert all(answer.finish_reason is not None for answer in self.told.values())

    def whole(self, id: int, index: int = 0) -> Output:
        """All outputs of one choice as one."""
        answer = self.told[id, index]
        parts = answer.parts
        assert answer.finish_reason is not None
        return Output(
            id,
            answer.text,
            tuple(answer.tokens),
            answer.finish_reason,
            answer.cached_tokens,
            error=answer.error,
            index=index,
            logprobs=tuple(entry for part in parts for entry in part.logprobs),
            prompt_logprobs=parts[0].prompt_logprobs,
        )


class FailingRunner(ScriptedRunner):
    """Raises in the steps whose number is in ``fail``."""

    fail: tuple[int, ...] = ()
    step = 0

    def execute(self, batch: Batch) -> list[ChunkResult]:
        self.step += 1
        if self.step in self.fail:
            for chunk in batch.chunks:  # leave garbage where the KV should be
                for block in chunk.block_table[chunk.start // self.block_size :]:
                    self.pool[block] = [b"garbage"] * self.block_size
            raise RuntimeError("out of memory")
        return super().execute(batch)


class ScriptedEngine(DrivenEngine):
    """An engine on a scripted runner; its invariants are checked after every step."""

    def __init__(
        self,
        num_blocks: int = 64,
        block_size: int = 16,
        *,
        max_batch_tokens: int = 256,
        max_running: int = 32,
        max_model_len: int = 1_000_000,
        vocab_size: int = VOCABULARY,
        eos: tuple[int, ...] = (),
        window: int = 0,
        window_blocks: int = 0,
        runner: type[ScriptedRunner] = ScriptedRunner,
    ) -> None:
        info = EngineInfo(
            model="scripted",
            root="",
            fingerprint="f",
            boot_id="b",
            max_model_len=min(max_model_len, num_blocks * block_size),
            num_blocks=num_blocks,
            block_size=block_size,
            dtype="none",
            device="none",
            vocab_size=vocab_size,
            eos_token_ids=eos,
            policy="lru",
            max_batch_tokens=max_batch_tokens,
            window=window,
            window_blocks=window_blocks,
        )
        self.runner = runner(num_blocks, block_size, vocab_size=vocab_size, eos=eos)
        super().__init__(EngineCore(self.runner, info, detokenizer=Words, max_running=max_running))

    @property
    def answers(self) -> list[Answer]:
        """The first choice of each request."""
        return [answer for (_, index), answer in self.told.items() if index == 0]

    def queue(
        self,
        prompt: Sequence[int],
        *,
        n: int = 1,
        use_cache: bool = True,
        priority: int = 0,
        class_limit: int = 0,
        owner: str = "",
        max_cached_blocks: int = 0,
        **sampling: Any,
    ) -> int:
        """Queue a request, by default greedy for 4 tokens; return its id."""
        chosen = Sampling(**{"max_tokens": 4, "temperature": 0.0, **sampling})
        return self.submit(
            prompt,
            chosen,
            n=n,
            use_cache=use_cache,
            priority=priority,
            class_limit=class_limit,
            owner=owner,
            max_cached_blocks=max_cached_blocks,
        )

    def start(self, prompt: Sequence[int], count: int = 4, **options: Any) -> Answer:
        """Queue a request for ``count`` tokens; return its answer, which grows with the steps."""
        return self.start_choices(1, prompt, count, **options)[0]

    def start_choices(self, n: int, prompt: Sequence[int], count: int = 4, **options: Any) -> list[Answer]:
        """The same with several choices."""
        id = self.queue(prompt, n=n, max_tokens=count, **options)
        return [self.told[id, index] for index in range(n)]

    def ask(self, prompt: Sequence[int], **options: Any) -> Output:
        """Queue a request, run until nothing is left to do, and return the whole of its first choice."""
        id = self.queue(prompt, **options)
        self.run()
        return self.whole(id)

    def step(self) -> StepReport:
        report = super().step()
        self.core.call("check", {})
        load, info = report.load, self.core.info
        assert load.used_blocks + load.cached_blocks + load.free_blocks == info.num_blocks
        if report.timing is not None:
            assert 0 < report.timing.prefill_tokens + report.timing.decode_tokens <= info.max_batch_tokens
        for queue in (self.core._scheduler.waiting, self.core._scheduler.running):
            for urgency in {sequence.urgency for sequence in queue}:
                ids = [sequence.id for sequence in queue if sequence.urgency == urgency]
                assert ids == sorted(ids), "never an older one behind a newer one of its class"
        return report
