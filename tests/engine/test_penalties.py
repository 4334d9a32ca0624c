"""Penalties and biases: what they do to the logits, counted token by token, whatever else is in the batch."""

from __future__ import annotations

import gc
import random
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.batch import Chunk, History
from engine.penalties import Penalties
from engine.sampling import Sampler
from engine.wire import Sampling

VOCABULARY = 60
TOKENS = 24
tokens = st.lists(st.integers(0, VOCABULARY - 1), max_size=30)
penalties = st.sampled_from([0.0, 0.3, 2.0, -1.5])


def chunk(sampling: Sampling, history: History) -> Chunk:
    generated = len(history.tokens) - history.prompt_tokens
    return Chunk(0, [1], 0, [0], True, sampling, 0, generated, history)


def by_hand(row: torch.Tensor, prompt: list[int], generated: list[int], sampling: Sampling) -> torch.Tensor:
    """Straight from the definitions; the factor by transformers' own processor."""
    row = row.clone()
    if sampling.repetition_penalty != 1.0 and prompt + generated:
        processor = transformers.RepetitionPenaltyLogitsProcessor(sampling.repetition_penalty)
        row = processor(torch.tensor([prompt + generated]), row[None])[0]
    for token, count in Counter(generated).items():
        row[token] -= sampling.presence_penalty + count * sampling.frequency_penalty
    for token, bias in dict(sampling.logit_bias).items():
        row[token] += bias
    return row


@given(
    prompt=tokens.filter(len),
    generated=tokens,
    presence=penalties,
    frequency=penalties,
    repetition=st.sampled_from([1.0, 1.3, 0.5, 100.0]),
    bias=st.dictionaries(st.integers(0, VOCABULARY - 1), st.floats(-100, 100, width=32), max_size=4),
    skipped=st.integers(1, 5),
)
@settings(deadline=None, max_examples=150)
def test_logits_change_by_the_definitions_however_the_tokens_came(
    prompt: list[int],
    generated: list[int],
    presence: float,
    frequency: float,
    repetition: float,
    bias: dict[int, float],
    skipped: int,
) -> None:
    sampling = Sampling(
        1,
        presence_penalty=presence,
        frequency_penalty=frequency,
        repetition_penalty=repetition,
        logit_bias=tuple(bias.items()),
    )
    row = 4 * torch.randn(VOCABULARY, generator=torch.Generator().manual_seed(len(prompt)))
    expected = by_hand(row, prompt, generated, sampling)
    grown = History([*prompt], len(prompt))
    stepwise = Penalties()
    for at in range(0, len(generated) + 1, skipped):
        grown.tokens[:] = [*prompt, *generated[:at]]
        stepwise.apply(row.clone(), chunk(sampling, grown))
    grown.tokens[:] = [*prompt, *generated]
    changed, at_once = row.clone(), row.clone()
    stepwise.apply(changed, chunk(sampling, grown))
    Penalties().apply(at_once, chunk(sampling, History(grown.tokens, len(prompt))))
    assert torch.equal(changed, at_once)  # to the last bit: a preemption must not show
    torch.testing.assert_close(changed, expected, atol=1e-4, rtol=1e-5)


def test_a_greedy_request_obeys_its_penalties_and_bias() -> None:
    row = torch.tensor([5.0, 4.0, 3.0, 0.0])

    def most_likely(prompt: list[int], generated: list[int], **wanted: Any) -> int:
        sampling = Sampling(9, temperature=0.0, **wanted)
        history = History(prompt + generated, len(prompt))
        return Sampler(()).sample(row.clone()[None], [chunk(sampling, history)])[0][0]

    assert most_likely([0], [0, 0, 0]) == 0
    assert most_likely([0], [1], presence_penalty=2.0) == 0  # the prompt's tokens do not count
    assert most_likely([3], [0], presence_penalty=2.0) == 1
    assert most_likely([3], [0, 0, 0, 1], frequency_penalty=0.9) == 1
    assert most_likely([3], [0, 0, 0, 1, 1], frequency_penalty=0.9) == 2
    assert most_likely([0], [3], repetition_penalty=2.0) == 1
    assert most_likely([1], [0], repetition_penalty=2.0) == 2
    assert most_likely([1], [0], logit_bias=((3, 6.0),)) == 3
    assert most_likely([1], [0], logit_bias=((0, -2.0), (1, -2.0))) == 0 + 2 * (5 - 2 < 3)


def test_log_probabilities_are_of_the_model_not_of_what_penalties_made_of_it() -> None:
    row = torch.tensor([5.0, 4.0, 3.0, 0.0])
    sampling = Sampling(9, temperature=0.0, logit_bias=((3, 50.0),), logprobs=2)
    ((token, told),) = Sampler(()).sample(row.clone()[None], [chunk(sampling, History([1], 1))])
    assert token == 3
    assert told is not None
    expected = row.log_softmax(-1)
    assert told.logprob == pytest.approx(float(expected[3]), abs=1e-6)
    assert told.rank == 4
    assert [place for place, _ in told.top] == [0, 1]


def test_counts_live_as_long_as_their_sequence() -> None:
    applied = Penalties()
    history = History([1, 2], 1)
    applied.apply(torch.zeros(VOCABULARY), chunk(Sampling(1, presence_penalty=1.0), history))
    assert len(applied._counted) == 1
    del history
    gc.collect()
    assert len(applied._counted) == 0


def test_requests_without_penalties_are_never_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Penalties, "apply", lambda *_: pytest.fail("counted"))
    Sampler(()).sample(torch.zeros(1, VOCABULARY), [chunk(Sampling(1), History([1], 1))])


KINDS: list[dict[str, Any]] = [
    {"presence_penalty": 1.5},
    {"frequency_penalty": 1.0, "logit_bias": ((7, 3.0), (9, -100.0))},
    {"repetition_penalty": 1.4, "temperature": 0.0},
    {"repetition_penalty": 0.8, "presence_penalty": -0.5},
]


@pytest.mark.parametrize("kind", KINDS, ids=str)
def test_j1_a_seeded_request_with_penalties_gets_its_tokens_in_any_company(
    kind: dict[str, Any], tiny_model: Callable[..., tuple[Any, Path]], model_engine: Callable[..., Any]
) -> None:
    config = transformers.LlamaConfig(
        vocab_size=211,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=16,
        max_position_embeddings=160,
        initializer_range=0.2,
        eos_token_id=2,
    )
    engine = model_engine(tiny_model(config)[1], num_blocks=24, max_running=16, max_batch_tokens=40)
    rng = random.Random(3)
    mine = [rng.randrange(3, 211) for _ in range(19)]
    chosen = {"temperature": 1.0, "seed": 42, "ignore_eos": True}
    seeded = Sampling(TOKENS, **{**chosen, **kind})
    alone = engine.generate([mine], seeded)[0][0]
    without = {key: value for key, value in kind.items() if key == "temperature"}
    assert engine.generate([mine], Sampling(TOKENS, **{**chosen, **without}))[0][0] != alone
    for _ in range(3):
        others = [[rng.randrange(3, 211) for _ in range(rng.randrange(1, 30))] for _ in range(7)]
        kinds = [
            Sampling(TOKENS, temperature=1.0, seed=rng.choice([None, 1]), ignore_eos=True, **rng.choice(KINDS[:2]))
            for _ in others
        ]
        at = rng.randrange(len(others) + 1)
        prompts, sampling = [*others[:at], mine, *others[at:]], [*kinds[:at], seeded, *kinds[at:]]
        assert engine.generate(prompts, sampling)[0][at] == alone
    assert engine.load.preemptions > 0
    if "temperature" not in kind:
        unseeded = Sampling(TOKENS, temperature=1.0, ignore_eos=True, **kind)
        assert engine.generate([mine], unseeded)[0] != engine.generate([mine], unseeded)[0]
