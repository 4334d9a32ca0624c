"""The part that needs no server: steps of the engine in this process, held against the machine's limits."""

from __future__ import annotations

import statistics
from collections.abc import Callable
from typing import Final

import msgspec

from benchmarks.side_by_side.in_process import FirstToken, InProcessEngine, StepTime
from benchmarks.side_by_side.limits import Limits, ModelShape, measure_limits, split
from benchmarks.side_by_side.rounds import CONCURRENCY
from benchmarks.side_by_side.targets import Verdict, judge
from benchmarks.side_by_side.workload import Workload

__all__ = ["BATCHES", "PREFILL_TOKENS", "KernelRound", "KernelSize", "kernel_verdicts", "measure_round", "median_of"]

BATCHES: Final = (1, 4, 8, 16)
DECODE_CONTEXT: Final = 256
PREFILL_TOKENS: Final = 1200


class KernelSize(msgspec.Struct, frozen=True):
    """How much is measured in a round: decode steps per batch, warm requests, requests of the closed loop."""

    steps: int = 20
    requests: int = 4
    loop: int = 24


class KernelRound(msgspec.Struct, frozen=True):
    """What one round has measured, in seconds. Decode steps are by batch, at ``DECODE_CONTEXT``.

    The "whole" limits of decodes are those of weights that are read in the dtype that is computed in.
    """

    limits: Limits
    prefill_tokens: int
    prefill_s: float
    prefill_limit_s: float
    decode_s: dict[int, float]
    decode_limit_s: dict[int, float]
    decode_whole_limit_s: dict[int, float]
    cold: FirstToken
    warm: list[FirstToken]
    repeated: list[FirstToken]
    steps: list[StepTime]

    def prefill_share(self) -> float:
        """Of its limit."""
        return self.prefill_limit_s / self.prefill_s

    def decode_share(self, batch: int) -> float:
        """Of its limit."""
        return self.decode_limit_s[batch] / self.decode_s[batch]

    def decode_whole_share(self, batch: int) -> float:
        """Of its whole limit."""
        return self.decode_whole_limit_s[batch] / self.decode_s[batch]

    def warm_ttft(self) -> float:
        """In decode steps, for a prompt whose system text and documents are cached, and whose question is not."""
        return statistics.median(first.seconds / first.decode_seconds for first in self.warm)

    def repeated_ttft(self) -> float:
        """In decode steps, for a prompt that has been served before."""
        return statistics.median(first.seconds / first.decode_seconds for first in self.repeated)

    def overhead(self) -> float:
        """Share of a step of nothing but decodes that is not the model's."""
        decodes = [step for step in self.steps if not step.prefill_tokens]
        return statistics.median(1 - step.model_seconds / step.seconds for step in decodes)

    def overhead_of_all(self) -> float:
        """Share of all steps' time that is not the model's."""
        return 1 - sum(step.model_seconds for step in self.steps) / sum(step.seconds for step in self.steps)


def measure_round(
    engine: InProcessEngine, shape: ModelShape, seed: int, size: KernelSize, advance: Callable[[str], None]
) -> KernelRound:
    """Measure the limits, and right after them what is held against them; ``advance`` hears what comes next.

    The workload of ``seed`` must not have been served by this engine before.
    """
    workload = Workload(seed, lambda text: len(engine.tokenizer.encode(text).ids))
    chunks = split(PREFILL_TOKENS, engine.max_batch_tokens)
    advance("limits of the machine")
    rows = sorted({*BATCHES, *chunks})
    limits = measure_limits(shape, rows, engine.torch_dtype, engine.kernels, engine.packed_bytes)
    advance("prefill")
    prefill_s = statistics.median(engine.prefill_seconds(PREFILL_TOKENS) for _ in range(2))
    decode_s = {}
    for batch in BATCHES:
        advance(f"decode at batch {batch}")
        decode_s[batch] = engine.decode_seconds(batch, DECODE_CONTEXT, size.steps)
    advance("first token, cold and warm")
    cold = engine.first_token(workload.prompt(0).text)
    warm, repeated = [], []
    for index in range(1, size.requests + 1):
        prompt = workload.prompt(index, like=0).text
        warm.append(engine.first_token(prompt))
        repeated.append(engine.first_token(prompt))
    advance("closed loop without a server")
    steps = list(engine.closed_loop([prompt.text for prompt in workload.prompts(size.loop)], CONCURRENCY))
    return KernelRound(
        limits=limits,
        prefill_tokens=PREFILL_TOKENS,
        prefill_s=prefill_s,
        prefill_limit_s=limits.prefill_seconds(chunks),
        decode_s=decode_s,
        decode_limit_s={batch: limits.decode_seconds(batch) for batch in BATCHES},
        decode_whole_limit_s={batch: limits.whole_decode_seconds(batch) for batch in BATCHES},
        cold=cold,
        warm=warm,
        repeated=repeated,
        steps=steps,
    )


def kernel_verdicts(rounds: list[KernelRound]) -> dict[str, Verdict]:
    """The targets that need no server."""
    return {
        "prefill": judge("prefill", [each.prefill_share() for each in rounds]),
        "decode_1": judge("decode_1", [each.decode_share(1) for each in rounds]),
        "decode_16": judge("decode_16", [each.decode_share(16) for each in rounds]),
        "warm_ttft": judge("warm_ttft", [each.warm_ttft() for each in rounds]),
        "repeated_ttft": judge("repeated_ttft", [each.repeated_ttft() for each in rounds]),
        "overhead": judge("overhead", [each.overhead() for each in rounds]),
    }


def median_of(rounds: list[KernelRound], figure: Callable[[KernelRound], float]) -> float:
    """The median of a figure over the rounds."""
    return statistics.median(figure(each) for each in rounds)
