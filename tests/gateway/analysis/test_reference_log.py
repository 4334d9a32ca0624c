"""The reference RAG log as bodies: fields of its system prompts are the first cause, and the reference figures hold."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

from benchmarks.analyze import write_bodies
from gateway.analysis.passes import Job
from gateway.analysis.run import analyze
from gateway.analysis.threshold import figures
from gateway.config import CanonicalConfig

ROOT = Path(__file__).resolve().parents[3]
DATA = (ROOT / os.environ.get("HEADSTART_REFERENCE_DATA", "../shared/data")).resolve()
LOG = DATA / "rag_xquad_en"

pytestmark = [
    pytest.mark.model,
    pytest.mark.skipif(not LOG.is_dir(), reason="reference data is absent; HEADSTART_REFERENCE_DATA names its folder"),
]

REQUESTS = 400
"""The whole log takes half a minute on two slow cores; ``HEADSTART_ANALYZE_REQUESTS=5000`` is the long form."""


@pytest.fixture(scope="module")
def count() -> int:
    return int(os.environ.get("HEADSTART_ANALYZE_REQUESTS", REQUESTS))


@pytest.fixture(scope="module")
def job(default_model: Path, count: int, tmp_path_factory: pytest.TempPathFactory) -> Job:
    """An analysis of the log with nothing declared."""
    log = tmp_path_factory.mktemp("log") / "rag.jsonl"
    write_bodies(LOG, log, count, 5)
    return Job(log, "rag.jsonl", default_model, CanonicalConfig(hoist="apply"), {}, (None, 8192), "lru", 16)


def test_the_volatile_fields_are_named_as_the_first_cause(job: Job, count: int) -> None:
    report = analyze(job, lambda step, fraction: None)
    rates = report.analysis.hit_rate
    assert report.analysis.requests == count
    assert not report.bad_lines
    assert [len(template.fields) for template in report.templates] == [3, 3, 3, 3]
    volatile = [row for row in report.analysis.causes if row.cause == "volatile"]
    assert list(report.analysis.causes[:4]) == volatile
    places = [" ".join(row.example.text_before.split()) for row in volatile if row.example is not None]
    for words in ("Current date and time: ", "Request ", "Today is ", "Session: user="):
        assert any(words.strip() in place for place in places)
    assert rates.as_is["inf"] < 0.04
    assert rates.canonical["inf"] > 0.4
    assert figures(report)["volatile"] > 0.3
    if count == 5000:
        reference = {
            (row["order"], row["hoist"]): row
            for row in json.loads((DATA / "ORACLES.json").read_text())["rag_order"]["xquad_en"]
            if row["k"] == 5
        }
        as_is = reference["relevance", 0]
        assert report.analysis.tokens == as_is["tokens"]
        assert rates.as_is["inf"] == pytest.approx(as_is["inf_token_hit"], abs=1e-9)
        assert rates.as_is["8192"] == pytest.approx(as_is["lru"]["8192"], abs=1e-6)
        bound = reference["position_independent_upper_bound", 1]["inf_token_hit"]
        assert rates.position_independent == pytest.approx(bound, abs=0.004)
        assert rates.canonical["inf"] > 0.71
