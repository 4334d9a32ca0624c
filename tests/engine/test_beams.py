"""Beam search on real models: the beams are those of transformers, whatever is cached, evicted or preempted."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

from engine.models.catalog import DEFAULT_MODEL, ensure_model
from engine.wire import Output, Sampling

from .conftest import FORWARDS, VOCABULARY
from .driven import noise

MakeModel = Callable[..., tuple[Any, Path]]
MakeEngine = Callable[..., Any]

TOKENS = 12
SEARCHES: list[dict[str, Any]] = [
    {"beam_width": 1},
    {"beam_width": 2, "early_stopping": True},
    {"beam_width": 3, "length_penalty": 0.0},
    {"beam_width": 4, "length_penalty": 2.0, "early_stopping": True},
    {"beam_width": 5, "length_penalty": -1.5},
    {"beam_width": 4, "min_tokens": 6},
    {"beam_width": 6, "ignore_eos": True},
]
PROMPTS = [noise(1, 1, VOCABULARY), noise(2, 22, VOCABULARY), noise(2, 17, VOCABULARY) + noise(3, 14, VOCABULARY)]


def by_transformers(model: Any, prompt: list[int], search: Sampling) -> list[tuple[list[int], float]]:
    """Generated tokens and scores of every beam, the best first."""
    eos = model.generation_config.eos_token_id
    output = model.generate(
        torch.tensor([prompt]),
        attention_mask=torch.ones(1, len(prompt)),
        do_sample=False,
        num_beams=search.beam_width,
        num_return_sequences=search.beam_width,
        max_new_tokens=search.max_tokens,
        length_penalty=search.length_penalty,
        early_stopping=search.early_stopping,
        eos_token_id=None if search.ignore_eos else eos,
        min_new_tokens=search.min_tokens or None,
        pad_token_id=0,
        return_dict_in_generate=True,
        output_scores=True,
    )
    if search.beam_width == 1:  # that is greedy search to transformers, without scores of beams
        return [(output.sequences[0, len(prompt) :].tolist(), 0.0)]
    lengths = (output.beam_indices >= 0).sum(dim=-1).tolist()
    beams = [row[len(prompt) :][:length].tolist() for row, length in zip(output.sequences, lengths, strict=True)]
    return list(zip(beams, output.sequences_scores.tolist(), strict=True))


def search(engine: Any, prompts: list[list[int]], sampling: Sampling, **options: Any) -> list[list[Output]]:
    """Every beam of each prompt, searched side by side."""
    width = sampling.beam_width
    ids = [engine.submit(prompt, sampling, n=width, **options) for prompt in prompts]
    engine.run()
    return [[engine.whole(id, index) for index in range(width)] for id in ids]


def check(found: list[Output], expected: list[tuple[list[int], float]], sampling: Sampling, eos: list[int]) -> None:
    assert [[*output.token_ids] for output in found] == [tokens for tokens, _ in expected]
    for output, (tokens, score) in zip(found, expected, strict=True):
        ended = not sampling.ignore_eos and tokens[-1] in eos
        assert output.finish_reason == ("stop" if ended else "length")
        assert [entry.token_id for entry in output.logprobs] == tokens
        if sampling.beam_width > 1:
            total = sum(entry.logprob for entry in output.logprobs)
            assert total / len(tokens) ** sampling.length_penalty == pytest.approx(score, abs=1e-3)


@pytest.mark.parametrize(
    ("family", "chosen"),
    [*(("lean", chosen) for chosen in SEARCHES), *(("modules", chosen) for chosen in SEARCHES[3:5])],
    ids=str,
)
def test_beams_are_those_of_transformers(
    family: str, chosen: dict[str, Any], tiny_model: MakeModel, model_engine: MakeEngine
) -> None:
    model, folder = tiny_model(FORWARDS[family]())
    # Tokens that come up in searches, so that some beams end early.
    best, _ = by_transformers(model, PROMPTS[1], Sampling(TOKENS, beam_width=4))[0]
    eos = sorted({*noise(5, 6, VOCABULARY), *best[4:6]})
    model.generation_config.eos_token_id = eos
    model.generation_config.save_pretrained(folder)
    sampling = Sampling(TOKENS, logprobs=0, **chosen)
    expected = [by_transformers(model, prompt, sampling) for prompt in PROMPTS]
    roomy = model_engine(folder, num_blocks=400, max_running=20)
    tight = model_engine(folder, num_blocks=11, max_running=7, max_batch_tokens=6)
    cold = search(roomy, PROMPTS, sampling)
    warm = search(roomy, PROMPTS, sampling)
    off = search(roomy, PROMPTS, sampling, use_cache=False)
    pressed = search(tight, PROMPTS, sampling)
    for found in (cold, warm, off, pressed):
        for beams, wanted in zip(found, expected, strict=True):
            check(beams, wanted, sampling, eos)
    assert warm[1][0].cached_tokens == 20
    assert tight.load.preemptions > 0 or sampling.beam_width == 1


def with_penalties(model: Any, prompt: list[int], sampling: Sampling) -> list[list[int]]:
    """The beams of a search without ends of sequence, each of its steps computed from scratch."""
    beams: list[tuple[float, list[int]]] = [(0.0, [])]
    for _ in range(sampling.max_tokens):
        continued = []
        for score, tokens in beams:
            with torch.inference_mode():
                row = model(input_ids=torch.tensor([prompt + tokens])).logits[0, -1].float()
            seen = torch.tensor([prompt + tokens])
            row = transformers.RepetitionPenaltyLogitsProcessor(sampling.repetition_penalty)(seen, row[None])[0]
            for token in tokens:
                row[token] -= sampling.frequency_penalty
            for token in set(tokens):
                row[token] -= sampling.presence_penalty
            best = row.log_softmax(-1).topk(2 * sampling.beam_width)
            continued += [(score + float(one), [*tokens, int(id)]) for one, id in zip(*best, strict=True)]
        beams = sorted(continued, key=lambda beam: -beam[0])[: sampling.beam_width]
    return [tokens for _, tokens in beams]


def test_penalties_count_the_tokens_of_each_beam(tiny_model: MakeModel, model_engine: MakeEngine) -> None:
    model, folder = tiny_model(FORWARDS["lean"]())
    penalties = {"repetition_penalty": 1.3, "frequency_penalty": 0.7, "presence_penalty": -0.4}
    sampling = Sampling(TOKENS, beam_width=4, ignore_eos=True, **penalties)
    expected = [with_penalties(model, prompt, sampling) for prompt in PROMPTS]
    assert expected[1] != with_penalties(model, PROMPTS[1], Sampling(TOKENS, beam_width=4))
    for options in ({"num_blocks": 400, "max_running": 20}, {"num_blocks": 11, "max_batch_tokens": 5}):
        found = search(model_engine(folder, **options), PROMPTS, sampling)
        assert [[[*beam.token_ids] for beam in beams] for beams in found] == expected


@pytest.mark.model
def test_beams_of_the_default_model_are_those_of_transformers(model_engine: MakeEngine) -> None:
    folder = ensure_model(DEFAULT_MODEL)
    model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, local_files_only=True).eval()
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    texts = ["Q: What is 2 + 2?\nA:", "<|im_start|>user\nSay hello.<|im_end|>\n<|im_start|>assistant\n"]
    prompts = [tokenizer.encode(text) for text in texts]
    sampling = Sampling(8, beam_width=3, logprobs=0)
    engine = model_engine(folder, num_blocks=64, block_size=16, max_running=12, threads=torch.get_num_threads())
    with torch.inference_mode():
        expected = [by_transformers(model, prompt, sampling) for prompt in prompts]
    for _ in range(2):
        for beams, wanted in zip(search(engine, prompts, sampling), expected, strict=True):
            check(beams, wanted, sampling, [model.generation_config.eos_token_id])
