"""The reference figures of document orders on the reference RAG log, reached by the order that the gateway chooses."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

from benchmarks.ordering import SIZES, OnlineOrder, as_retrieved, known_in_advance, replay
from benchmarks.rag_trace import RagPrompt, rag_prompts
from engine.models.catalog import DEFAULT_MODEL, ensure_model

ROOT = Path(__file__).resolve().parents[2]
DATA = (ROOT / os.environ.get("HEADSTART_REFERENCE_DATA", "../shared/data")).resolve()

pytestmark = [
    pytest.mark.model,
    pytest.mark.skipif(not DATA.is_dir(), reason="reference data is absent; HEADSTART_REFERENCE_DATA names its folder"),
]

LOOKS_AHEAD = "pop_static"


@pytest.fixture(scope="module")
def prompts() -> list[RagPrompt]:
    tokenizer = ensure_model(DEFAULT_MODEL) / "tokenizer.json"
    return [*rag_prompts(DATA / "rag_xquad_en", tokenizer, hoist=True)]


@pytest.fixture(scope="module")
def reference() -> dict[str, dict[str, float]]:
    rows = json.loads((DATA / "ORACLES.json").read_text())["rag_order"]["xquad_en"]
    return {
        row["order"]: {**row["lru"], "inf": row["inf_token_hit"]}
        for row in rows
        if row["k"] == 5 and row["hoist"] and "lru" in row
    }


def test_the_replay_has_the_semantics_of_the_reference(
    prompts: list[RagPrompt], reference: dict[str, dict[str, float]]
) -> None:
    assert replay(prompts, as_retrieved, 1024) == pytest.approx(reference["relevance"]["1024"], abs=1e-5)


@pytest.mark.parametrize("blocks", SIZES)
def test_what_is_resident_and_popular_beats_every_online_order_of_the_reference(
    blocks: int | None, prompts: list[RagPrompt], reference: dict[str, dict[str, float]]
) -> None:
    rate = replay(prompts, OnlineOrder(), blocks)
    if blocks is None:
        assert rate >= 0.715
    else:
        best = max(rates[str(blocks)] for order, rates in reference.items() if order != LOOKS_AHEAD)
        assert rate >= best + 0.005


def test_an_order_that_knows_what_comes_beats_all_that_do_not(
    prompts: list[RagPrompt], reference: dict[str, dict[str, float]]
) -> None:
    assert replay(prompts, known_in_advance(prompts), None) > max(rates["inf"] for rates in reference.values())


def test_what_is_remembered_of_the_whole_log_is_bounded(prompts: list[RagPrompt]) -> None:
    order = OnlineOrder()
    replay(prompts, order, 1024)
    assert 0 < order.popularity.documents < 10_000
    assert 0 < order.popularity.pairs < 40_000
    assert 0 < order.paths.remembered < 100_000
