"""Sampling: the candidates are transformers', the draw is the request's own whatever the batch."""

from __future__ import annotations

import itertools
import math
import random
from collections import Counter

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import MinPLogitsWarper, TemperatureLogitsWarper, TopKLogitsWarper, TopPLogitsWarper

from engine.batch import Chunk
from engine.errors import EngineError
from engine.sampling import Sampler, uniform
from engine.wire import Sampling

EOS = (2,)


def chunk(sampling: Sampling, *, seed: int = 0, output_index: int = 0) -> Chunk:
    return Chunk(0, [1], 0, [0], True, sampling, seed, output_index)


def draw(row: torch.Tensor, sampling: Sampling, *, seed: int = 0, output_index: int = 0) -> int:
    return Sampler(EOS).sample(row.clone()[None], [chunk(sampling, seed=seed, output_index=output_index)])[0][0]


def probabilities(row: torch.Tensor, sampling: Sampling) -> torch.Tensor:
    """The distribution by transformers' own processors."""
    scores = TemperatureLogitsWarper(sampling.temperature)(None, row[None].clone())
    if 0 < sampling.top_k < len(row):
        scores = TopKLogitsWarper(sampling.top_k)(None, scores)
    if sampling.top_p < 1:
        scores = TopPLogitsWarper(sampling.top_p)(None, scores)
    if sampling.min_p > 0:
        scores = MinPLogitsWarper(sampling.min_p)(None, scores)
    return scores[0].double().softmax(-1)


@given(
    vocabulary=st.sampled_from([3, 40, 700]),
    temperature=st.floats(0.05, 3),
    top_k=st.sampled_from([0, 1, 5, 600, 10**9]),
    top_p=st.sampled_from([1.0, 0.999, 0.9, 0.5, 0.01]),
    min_p=st.sampled_from([0.0, 0.05, 0.9]),
    seed=st.integers(0, 2**32),
)
@settings(deadline=None, max_examples=150)
def test_draws_invert_the_distribution_of_transformers(
    vocabulary: int, temperature: float, top_k: int, top_p: float, min_p: float, seed: int
) -> None:
    row = 3 * torch.randn(vocabulary, generator=torch.Generator().manual_seed(seed))
    sampling = Sampling(1, temperature, top_p, top_k, min_p)
    expected = probabilities(row, sampling)
    cumulative = expected.cumsum(-1)
    for output_index in range(8):
        target = uniform(seed, output_index)
        token = draw(row, sampling, seed=seed, output_index=output_index)
        assert expected[token] > 0
        assert float(cumulative[token]) > target - 1e-4
        assert float(cumulative[token] - expected[token]) < target + 1e-4


def by_definition(row: torch.Tensor, sampling: Sampling, target: float) -> int:
    """The draw as it is defined, one token after the other."""
    weights = ((row - row.max()) / sampling.temperature).softmax(-1).tolist()
    if 0 < sampling.top_k < len(weights):
        least = sorted(weights)[-sampling.top_k]
        weights = [weight if weight >= least else 0.0 for weight in weights]
    if sampling.top_p < 1:
        ordered = sorted(weights, reverse=True)
        reached = list(itertools.accumulate(ordered))
        least = next(w for w, sum in zip(ordered, reached, strict=True) if sum >= sampling.top_p * reached[-1])
        weights = [weight if weight >= least else 0.0 for weight in weights]
    if sampling.min_p > 0:
        least = float(torch.tensor(sampling.min_p) * torch.tensor(max(weights)))
        weights = [weight if weight >= least else 0.0 for weight in weights]
    cumulative = list(itertools.accumulate(weights))
    return next(i for i, sum in enumerate(cumulative) if sum > target * cumulative[-1])


@pytest.mark.parametrize("top_k", [0, 1, 37, 1900])
@pytest.mark.parametrize("top_p", [1.0, 0.95, 0.3, 1e-9])
@pytest.mark.parametrize("min_p", [0.0, 0.4])
@pytest.mark.parametrize("shape", ["random", "flat", "equal", "tied", "one"])
def test_the_draw_is_the_plain_definitions(shape: str, min_p: float, top_p: float, top_k: int) -> None:
    generator = torch.Generator().manual_seed(1)
    row = {
        "random": 3 * torch.randn(2000, generator=generator),
        "flat": 1e-3 * torch.rand(2000, generator=generator),
        "equal": torch.zeros(2000),
        "tied": torch.randint(0, 4, (2000,), generator=generator).float(),
        "one": torch.cat([torch.full((1999,), -200.0), torch.tensor([3.0])]),
    }[shape]
    sampling = Sampling(1, 0.8, top_p, top_k, min_p)
    rows = 12
    chunks = [chunk(sampling, seed=3, output_index=i) for i in range(rows)]
    drawn = [token for token, _ in Sampler(EOS).sample(row.repeat(rows, 1), chunks)]
    assert drawn == [by_definition(row, sampling, uniform(3, i)) for i in range(rows)]


def test_draws_follow_the_probabilities() -> None:
    row = torch.tensor([0.0, 1.0, 2.0, -50.0])
    sampling = Sampling(1, temperature=1.0)
    count = 4000
    drawn = Counter(draw(row, sampling, seed=11, output_index=i) for i in range(count))
    for token, probability in enumerate(row.softmax(-1).tolist()):
        assert abs(drawn[token] / count - probability) < 5 * math.sqrt(0.25 / count)


def test_uniform_is_spread_evenly_and_fixed_by_seed_and_index() -> None:
    numbers = [uniform(seed, index) for seed in (0, 7, -1, 2**63, -(2**63)) for index in range(400)]
    assert len(set(numbers)) == len(numbers)
    assert all(0 <= number < 1 for number in numbers)
    buckets = Counter(int(number * 10) for number in numbers)
    assert all(140 <= buckets[i] <= 260 for i in range(10))
    assert uniform(7, 3) == uniform(7, 3)


def test_j1_a_draw_is_the_same_alone_and_in_any_batch() -> None:
    rng = random.Random(5)
    generator = torch.Generator().manual_seed(5)
    row = torch.randn(300, generator=generator)
    mine = chunk(Sampling(1, temperature=1.0, top_p=0.95), seed=42, output_index=6)
    sampler = Sampler(EOS)
    alone = sampler.sample(row.clone()[None], [mine])[0]
    for _ in range(20):
        others = [
            chunk(Sampling(1, temperature=rng.choice([0.0, 0.7, 1.0])), seed=rng.randrange(99), output_index=i)
            for i in range(rng.randint(1, 31))
        ]
        at = rng.randint(0, len(others))
        logits = torch.randn(len(others) + 1, 300, generator=generator)
        logits[at] = row
        assert sampler.sample(logits, [*others[:at], mine, *others[at:]])[at] == alone


@pytest.mark.parametrize("temperature", [0.0, 1e-9, 1e-6])
def test_no_temperature_is_the_most_likely_token(temperature: float) -> None:
    row = torch.tensor([1.0, 5.0, 5.0, 2.0])
    sampling = Sampling(1, temperature, top_p=0.1, top_k=1)
    assert {draw(row, sampling, seed=seed) for seed in range(9)} == {1}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("temperature", [1e-4, 2.0, 1e30])
def test_extreme_but_valid_values_draw_a_real_token(temperature: float, dtype: torch.dtype) -> None:
    row = torch.tensor([-1e30, 1e4, -1e4, 3.0]).to(dtype)
    assert draw(row, Sampling(1, temperature, top_p=1e-9, top_k=10**9, min_p=1.0), seed=3) in range(4)


def test_tokens_that_would_end_the_request_wait_for_min_tokens() -> None:
    row = torch.tensor([0.0, 1.0, 9.0, 5.0])
    for temperature in (0.0, 0.3):
        sampling = Sampling(9, temperature, min_tokens=2, stop_token_ids=(3,))
        for seed in range(5):
            assert draw(row, sampling, seed=seed, output_index=1) in (0, 1)
        assert draw(row, sampling, output_index=2) == 2
        ignoring = Sampling(9, temperature, min_tokens=2, stop_token_ids=(3,), ignore_eos=True)
        assert draw(row, ignoring, output_index=0) == 2


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_logits_that_are_no_numbers_are_an_error(bad: float) -> None:
    with pytest.raises(EngineError, match="finite"):
        draw(torch.tensor([0.0, bad]), Sampling(1))
