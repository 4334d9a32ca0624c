"""On a part of the reference RAG log, learned fields reach what declared ones give; the benchmark has the whole log."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from benchmarks.learning import Boundless, learn, make_path, replay
from benchmarks.reference_log import read_log
from engine.models.catalog import DEFAULT_MODEL, ensure_model
from gateway.canonical.learning.learner import TemplateLearner
from gateway.prompt import PromptRenderer

ROOT = Path(__file__).resolve().parents[2]
LOG = (ROOT / os.environ.get("HEADSTART_REFERENCE_DATA", "../shared/data")).resolve() / "rag_xquad_en"

pytestmark = [
    pytest.mark.model,
    pytest.mark.skipif(not LOG.is_dir(), reason="reference data is absent; HEADSTART_REFERENCE_DATA names its folder"),
]


def test_learned_fields_reach_what_declared_ones_give() -> None:
    bodies, templates = read_log(LOG, 1200, 5)
    renderer = PromptRenderer(ensure_model(DEFAULT_MODEL))
    whole, later = "token_hit_rate", "token_hit_rate_from_201"

    declared_fleet = Boundless()
    declared = replay("declared", bodies, make_path(renderer, declared_fleet, templates, None), declared_fleet, None)
    assert declared[whole] > 0.4

    offline_fleet, offline = Boundless(), TemplateLearner(salt=0)
    learn(bodies, offline)
    figures = replay("offline", bodies, make_path(renderer, offline_fleet, {}, offline), offline_fleet, None)
    assert figures[whole] >= 0.98 * declared[whole]

    live_fleet, live = Boundless(), TemplateLearner(salt=0)
    figures = replay("live", bodies, make_path(renderer, live_fleet, {}, live), live_fleet, live)
    assert figures[later] >= 0.95 * declared[later]
    assert len([*live.templates()]) == len(templates)
    assert live.examined < 40, "what has a known form is not looked at closely again"
