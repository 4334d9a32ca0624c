"""What prefill costs on a replica, fitted to its own steps: the measure for routing and for what the cache saved.

A step that computes ``tokens`` prompt tokens whose predecessors sum up to ``context`` takes about

    seconds = a + b * tokens + c * context

where ``a`` is the fixed cost of a step (weights read, launches), ``b`` the linear layers and ``c`` attention,
the only part that grows with what lies before. The three are found by weighted least squares with none of them
negative; old steps are forgotten exponentially, so that the curve follows the machine, while the warm-up profile
stays as a weak prior that covers sizes which traffic has not shown for a while.

How far an estimate may be off is told by those of the last requests: each one's prefill is foretold from the curve as
it was when the request was sent, and held against what was measured.
"""

from __future__ import annotations

import itertools
import math
from bisect import bisect_right
from collections.abc import Iterable
from typing import Final

import msgspec

from engine.wire import StepTiming
from gateway.stats.spread import Spread

__all__ = ["Curve", "PrefillCost", "Saving"]

_TOKENS_SCALE = (
    256.0  # brings the three terms of a typical step to the same size, which keeps the equations well conditioned
)
_CONTEXT_SCALE = 256.0 * 256.0
_FORGETTING = 0.99  # weight of the past after one more step: a half-life of 69 steps
_PROFILE_STEPS = 5.0  # the profile counts like so many live steps, for ever
_ROBUST_LIMIT = 0.5  # relative error from which a step's weight falls (a paused process is not a slow model)
_NOMINAL_SECONDS_PER_TOKEN = 1e-3
_SIZES: Final = (128, 512)  # tokens; estimates of short prompts and of long ones are not equally good

_Vector = list[float]
_Matrix = list[list[float]]


class Curve(msgspec.Struct, frozen=True):
    """A prefill-cost curve at one moment: seconds per step, per token, and per token of context."""

    per_step: float
    per_token: float
    per_context: float
    max_batch_tokens: int

    def seconds(self, tokens: int, context: int) -> float:
        """As ``PrefillCost.seconds``."""
        steps = -(-tokens // self.max_batch_tokens)
        quadratic = tokens * context + tokens * (tokens - 1) / 2
        return self.per_step * steps + self.per_token * tokens + self.per_context * quadratic


class Saving(msgspec.Struct, frozen=True):
    """An estimate of the prefill seconds that cached tokens made unnecessary; of ten it holds for nine.

    The interval reaches from ``seconds`` - ``below`` to ``seconds`` + ``above``. ``bias`` is how far the curve itself
    may be off, an error that all requests of its replica share.
    """

    seconds: float = 0.0
    below: float = 0.0
    above: float = 0.0
    bias: float = 0.0


_NOTHING: Final = Saving()


class PrefillCost:
    """The prefill-cost curve of one replica. Owns its fit; fed with step timings, asked for seconds.

    Before anything was measured, ``seconds`` answers with a nominal millisecond per token, enough to rank candidates,
    and ``saved`` with 0: no saving is claimed without a measurement.
    """

    def __init__(self, max_batch_tokens: int = 512) -> None:
        self.max_batch_tokens = max_batch_tokens
        self._profile = _NormalEquations()
        self._live = _NormalEquations()
        self._coefficients: tuple[float, float, float] | None = None
        self._stale = False
        self._spreads: Final = tuple(Spread() for _ in range(len(_SIZES) + 1))

    @property
    def fitted(self) -> bool:
        """Whether any step was measured."""
        return self._fit() is not None

    @property
    def coefficients(self) -> tuple[float, float, float]:
        """Seconds per step, per token, and per token of context; zeros before anything was measured."""
        return self._fit() or (0.0, 0.0, 0.0)

    def seed(self, profile: Iterable[StepTiming], max_batch_tokens: int) -> None:
        """Start over with the warm-up profile of a replica that has just come up.

        ``max_batch_tokens`` is its token budget per step, by which long prompts are cut into chunks. Steps
        without prefill are ignored.
        """
        self.max_batch_tokens = max_batch_tokens
        self._profile, self._live = _NormalEquations(), _NormalEquations()
        for timing in profile:
            if timing.prefill_tokens > 0 and timing.seconds > 0:
                self._profile.add(*_row(timing), 1.0)
        if self._profile.weight:
            self._profile.scale(_PROFILE_STEPS / self._profile.weight)
        self._coefficients, self._stale = None, True

    def observe(self, timing: StepTiming) -> None:
        """Learn from one step. Steps that are mostly decode say little about prefill and are skipped.

        The few decodes that ride along count as prompt tokens: one more row in the same matrix products.
        """
        if timing.seconds <= 0 or timing.prefill_tokens < 1 or timing.decode_tokens * 8 > timing.prefill_tokens:
            return
        tokens, context, seconds = _row(timing)
        weight = 1.0
        current = self._fit()
        if current is not None:
            a, b, c = current
            expected = a + b * tokens + c * context
            error = abs(seconds - expected) / max(expected, 1e-6)
            weight = min(1.0, _ROBUST_LIMIT / error) if error > 0 else 1.0
        self._live.scale(_FORGETTING)
        self._live.add(tokens, context, seconds, weight)
        self._stale = True

    def seconds(self, tokens: int, context: int) -> float:
        """Seconds to prefill ``tokens`` prompt tokens that follow ``context`` tokens already in the cache.

        Cut into as many steps as the replica's token budget asks for, with nothing else in the batch.
        """
        if tokens <= 0:
            return 0.0
        curve = self.curve
        return tokens * _NOMINAL_SECONDS_PER_TOKEN if curve is None else curve.seconds(tokens, context)

    @property
    def curve(self) -> Curve | None:
        """The curve as it is now; None before anything was measured."""
        current = self._fit()
        return None if current is None else Curve(*current, self.max_batch_tokens)

    def saved(self, prompt_tokens: int, cached_tokens: int) -> Saving:
        """What ``cached_tokens`` at the front of a prompt made unnecessary, never negative.

        It is the difference of two estimates, that of the whole prompt and that of its rest; their errors are taken to
        be independent, which if anything makes the interval wider than it had to be.
        """
        curve = self.curve if cached_tokens > 0 else None
        if curve is None:
            return _NOTHING
        left = prompt_tokens - cached_tokens
        spread = self._spread(prompt_tokens)
        factor = spread.factor
        whole, rest = factor * curve.seconds(prompt_tokens, 0), factor * curve.seconds(left, cached_tokens)
        seconds = max(0.0, whole - rest)
        whole_low, whole_high = spread.interval
        rest_low, rest_high = self._spread(left).interval
        return Saving(
            seconds,
            min(seconds, math.hypot(whole * (1 - whole_low), rest * (rest_high - 1))),
            math.hypot(whole * (whole_high - 1), rest * (1 - rest_low)),
            seconds * spread.bias,
        )

    def outlook(self, tokens: int) -> tuple[float, float, float]:
        """What to multiply the curve's seconds by for a prompt of which ``tokens`` are computed: the estimate, and the
        ends of the interval that holds nine of ten.
        """
        spread = self._spread(tokens)
        low, high = spread.interval
        return spread.factor, spread.factor * low, spread.factor * high

    def check(self, tokens: int, estimated: float, measured: float, *, held_out: bool = False) -> None:
        """Learn how good the curve is from one request, of which ``tokens`` were computed; all in seconds.

        ``estimated`` must be by the curve from before the request, or it has seen what it is to be held against.
        """
        if estimated > 0 and measured > 0:
            self._spread(tokens).add(measured / estimated, held_out=held_out)

    def _spread(self, tokens: int) -> Spread:
        return self._spreads[bisect_right(_SIZES, tokens)]

    def _fit(self) -> tuple[float, float, float] | None:
        if self._stale:
            self._coefficients = _solve_non_negative(self._profile, self._live)
            self._stale = False
        return self._coefficients


def _row(timing: StepTiming) -> tuple[int, int, float]:
    return (
        timing.prefill_tokens + timing.decode_tokens,
        timing.prefill_context + timing.decode_context,
        timing.seconds,
    )


class _NormalEquations:
    """The sums of weighted least squares: ``matrix`` = X'WX and ``vector`` = X'Wy over scaled features."""

    __slots__ = ("matrix", "vector", "weight")

    def __init__(self) -> None:
        self.matrix: _Matrix = [[0.0] * 3 for _ in range(3)]
        self.vector: _Vector = [0.0] * 3
        self.weight = 0.0

    def add(self, tokens: int, context: int, seconds: float, weight: float) -> None:
        """Add one step. Errors grow with a step's size, hence the division by its squared size."""
        size = tokens + 32.0
        w = weight * (_TOKENS_SCALE / size) ** 2
        x = (1.0, tokens / _TOKENS_SCALE, context / _CONTEXT_SCALE)
        for i in range(3):
            wx = w * x[i]
            row = self.matrix[i]
            for j in range(3):
                row[j] += wx * x[j]
            self.vector[i] += wx * seconds
        self.weight += weight

    def scale(self, factor: float) -> None:
        """Multiply every weight by ``factor``."""
        for row in self.matrix:
            for j in range(3):
                row[j] *= factor
        self.vector = [value * factor for value in self.vector]
        self.weight *= factor


def _solve_non_negative(*parts: _NormalEquations) -> tuple[float, float, float] | None:
    """Minimise the weighted squared error over coefficients >= 0; None when there is no observation.

    With three coefficients all seven sets of free ones are tried: exact, and cheaper than anything iterative.
    """
    if not any(part.weight for part in parts):
        return None
    matrix = [[sum(part.matrix[i][j] for part in parts) for j in range(3)] for i in range(3)]
    vector = [sum(part.vector[i] for part in parts) for i in range(3)]
    best: _Vector | None = None
    lowest = 0.0  # the objective of all-zero coefficients, up to a constant
    for count in (3, 2, 1):
        for free in itertools.combinations(range(3), count):
            solution = _solve([[matrix[i][j] for j in free] for i in free], [vector[i] for i in free])
            if solution is None or min(solution) < 0:
                continue
            objective = -sum(vector[i] * value for i, value in zip(free, solution, strict=True))
            if objective < lowest:
                lowest = objective
                best = [0.0] * 3
                for i, value in zip(free, solution, strict=True):
                    best[i] = value
    if best is None:
        return None
    return best[0], best[1] / _TOKENS_SCALE, best[2] / _CONTEXT_SCALE


def _solve(matrix: _Matrix, vector: _Vector) -> _Vector | None:
    """Gaussian elimination with pivoting; None when the system is (nearly) singular."""
    n = len(vector)
    rows = [[*matrix[i], vector[i]] for i in range(n)]
    tiny = 1e-10 * max(matrix[i][i] for i in range(n))
    for column in range(n):
        pivot = max(range(column, n), key=lambda i: abs(rows[i][column]))
        if abs(rows[pivot][column]) <= tiny:
            return None
        rows[column], rows[pivot] = rows[pivot], rows[column]
        for i in range(column + 1, n):
            factor = rows[i][column] / rows[column][column]
            for j in range(column, n + 1):
                rows[i][j] -= factor * rows[column][j]
    solution = [0.0] * n
    for i in reversed(range(n)):
        known = sum(rows[i][j] * solution[j] for j in range(i + 1, n))
        solution[i] = (rows[i][n] - known) / rows[i][i]
    return solution
