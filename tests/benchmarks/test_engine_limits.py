"""The arithmetic of what a step could take at best, and the figures that are made of it."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from tokenizers import Tokenizer
from tokenizers.models import BPE
from tokenizers.pre_tokenizers import ByteLevel

from benchmarks.side_by_side import limits as module
from benchmarks.side_by_side.command import main
from benchmarks.side_by_side.limits import Limits, ModelShape, Product, best_seconds, model_shape, split
from benchmarks.side_by_side.targets import judge

SHAPE = ModelShape((Product("qkv", 10, 30, 2), Product("down", 20, 10, 2)), Product("head", 10, 100))


def limits(bandwidth: float, bytes_read: int = 8000) -> Limits:
    rates = {rows: {"qkv": 100.0, "down": 50.0, "head": 25.0} for rows in (1, 4, 8)}
    return Limits(SHAPE, 4, bytes_read, bandwidth, rates)


def test_a_decode_is_limited_by_reading_or_by_its_products_whichever_takes_longer() -> None:
    assert SHAPE.weights == 600 + 400 + 1000
    products = 2 * 4 * (600 / 100 + 400 / 50 + 1000 / 25)
    assert limits(1.0).decode_seconds(4) == 2000 * 4 / 1.0
    assert limits(1e9).decode_seconds(4) == pytest.approx(products)


def test_weights_that_are_kept_in_fewer_bits_are_read_faster_and_the_whole_limit_is_still_told() -> None:
    assert limits(1.0, 2500).decode_seconds(1) == 2500
    assert limits(1.0, 2500).whole_decode_seconds(1) == 8000


def test_a_prefill_is_limited_by_the_products_of_its_chunks_and_one_row_of_the_head() -> None:
    expected = 2 * (8 + 8 + 4) * (600 / 100 + 400 / 50) + 2 * 1000 / 25
    assert limits(1.0).prefill_seconds([8, 8, 4]) == pytest.approx(expected)


@pytest.mark.parametrize(("tokens", "chunks"), [(1200, [512, 512, 176]), (1024, [512, 512]), (5, [5]), (0, [])])
def test_a_prompt_is_split_into_the_largest_chunks(tokens: int, chunks: list[int]) -> None:
    assert split(tokens, 512) == chunks


def test_a_time_at_its_best_is_that_of_one_call() -> None:
    calls: list[None] = []
    assert 0 < best_seconds(lambda: calls.append(None)) < 1e-3
    assert len(calls) > 5


def test_a_target_is_held_against_the_median_round() -> None:
    assert judge("prefill", [0.1, 0.61, 0.9]).met
    assert not judge("prefill", [0.1, 0.59, 0.9]).met
    assert judge("overhead", [0.04, 0.01]).met
    assert not judge("overhead", [0.9, 0.051, 0.01]).met
    verdict = judge("warm_ttft", [3.0, 2.0])
    assert (verdict.measured, verdict.lowest, verdict.highest, verdict.met) == (2.5, 2.0, 3.0, True)


def save_tiny_model(folder: Path) -> None:
    """Random weights, and a tokenizer for which each byte is a token."""
    import torch
    from transformers import AutoModelForCausalLM, LlamaConfig

    torch.manual_seed(0)
    config = LlamaConfig(
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        vocab_size=256,
        max_position_embeddings=2048,
        eos_token_id=None,
    )
    AutoModelForCausalLM.from_config(config).save_pretrained(folder)
    alphabet = {letter: number for number, letter in enumerate(sorted(ByteLevel.alphabet()))}
    tokenizer = Tokenizer(BPE(alphabet, []))
    tokenizer.pre_tokenizer = ByteLevel(add_prefix_space=False)
    tokenizer.save(str(folder / "tokenizer.json"))


def test_the_shapes_of_a_model_are_all_its_weights_but_the_small_ones(tmp_path: Path) -> None:
    save_tiny_model(tmp_path)
    shape = model_shape(tmp_path)
    assert shape.weights == 2 * (32 * 64 + 32 * 32 + 3 * 32 * 48) + 256 * 32


def test_a_short_run_prints_one_json_value_with_every_target(
    tmp_path: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    save_tiny_model(tmp_path)
    monkeypatch.setattr(module, "_BUFFER_BYTES", 1 << 22)
    options = f"--only kernel --short --rounds 2 --json --dtype float32 --model {tmp_path}"
    assert main(None, options.split()) == 0
    result = json.loads(capfd.readouterr().out)
    assert set(result["verdicts"]) >= {"prefill", "decode_1", "decode_16", "warm_ttft", "overhead"}
    first, second = result["kernel"]
    for each in (first, second):
        assert each["cold"]["cached_tokens"] == 0
        assert each["warm"][0]["cached_tokens"] > 1000
        assert each["repeated"][0]["prompt_tokens"] - each["repeated"][0]["cached_tokens"] <= 16
        assert sum(step["prefill_tokens"] for step in each["steps"]) > 1000
        assert all(step["model_seconds"] <= step["seconds"] for step in each["steps"])
    verdict = result["verdicts"]["prefill"]
    shares = [each["prefill_limit_s"] / each["prefill_s"] for each in (first, second)]
    assert verdict["measured"] == pytest.approx(sum(shares) / 2)
