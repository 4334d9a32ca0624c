"""An analysis counts exactly: hits of simulated caches, and one cause for every token that was missed."""

from __future__ import annotations

import gzip
import tomllib
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gateway.analysis import run
from gateway.analysis.cache import SimulatedFleet, _Bounded, _LeastRecent
from gateway.analysis.log import LogError
from gateway.analysis.passes import Job
from gateway.analysis.report import Report
from gateway.analysis.run import analyze
from gateway.analysis.suggestion import toml_text
from gateway.config import CanonicalConfig
from gateway.configuration import load_config
from tests.gateway.analysis.conftest import DOCUMENTS, SYSTEM, bodies

Writer = Callable[[Iterable[Any]], Path]
Jobs = Callable[..., Job]


def report_of(job: Job) -> Report:
    return analyze(job, lambda step, fraction: None)


def by_cause(report: Report) -> dict[str, int]:
    sums: dict[str, int] = {}
    for row in report.analysis.causes:
        sums[row.cause] = sums.get(row.cause, 0) + row.tokens
    return sums


def chat(system: str, question: str, **fields: Any) -> dict[str, Any]:
    return {"messages": [{"role": "system", "content": system}, {"role": "user", "content": question}], **fields}


@pytest.fixture(scope="module")
def log_lines() -> list[dict[str, Any]]:
    return bodies(80)


@pytest.mark.parametrize("sizes", [(None,), (None, 64), (64, 16), (8,)])
def test_the_causes_add_up_to_the_tokens_missed_in_the_smallest_cache(
    sizes: tuple[int | None, ...], log_lines: list[Any], write_log: Writer, job: Jobs
) -> None:
    bypassed = log_lines[:10] + [line | {"headstart": {"bypass": True}} for line in log_lines[:2]]
    salted = [line | {"cache_salt": "other"} for line in log_lines[:5]]
    report = report_of(job(write_log(bypassed + salted + log_lines), sizes=sizes))
    rates = report.analysis.hit_rate.as_is
    smallest = min(rates, key=lambda name: float(name))
    missed = report.analysis.tokens * (1 - rates[smallest])
    assert sum(row.tokens for row in report.analysis.causes) == pytest.approx(missed, abs=1e-6)
    assert report.causes_at == smallest
    assert {"volatile", "never_seen", "bypass", "namespace"} <= set(by_cause(report))


def test_canonicalization_finds_more_and_the_bound_more_still(
    log_lines: list[Any], write_log: Writer, job: Jobs
) -> None:
    rates = report_of(job(write_log(log_lines), sizes=(None, 40))).analysis.hit_rate
    assert rates.as_is["40"] <= rates.as_is["inf"] < 0.3
    assert rates.as_is["inf"] + 0.2 < rates.canonical["inf"] < rates.position_independent
    assert rates.canonical["40"] < rates.canonical["inf"]


def test_the_bound_is_one_also_where_documents_are_pasted_into_the_system_message(write_log: Writer, job: Jobs) -> None:
    texts = "\n\n".join(document["text"] for document in DOCUMENTS)
    lines = [chat(f"Answer from these.\n\n{texts}\n\nNumber {serial}", f"why {serial}?") for serial in range(20)]
    rates = report_of(job(write_log(lines), templates={}, canonical=CanonicalConfig(hoist="off"))).analysis.hit_rate
    assert 0.5 < rates.canonical["inf"] <= rates.position_independent


def test_learned_fields_do_as_well_as_declared_ones_and_are_the_first_cause(
    log_lines: list[Any], write_log: Writer, job: Jobs
) -> None:
    path = write_log(log_lines)
    declared = report_of(job(path))
    learned = report_of(job(path, templates={}, canonical=CanonicalConfig(hoist="apply")))
    assert learned.analysis.hit_rate.canonical["inf"] >= 0.98 * declared.analysis.hit_rate.canonical["inf"]
    assert learned.analysis.causes[0].cause == "volatile"
    (template,) = learned.templates
    assert len(template.fields) == 2
    assert by_cause(learned)["volatile"] == pytest.approx(by_cause(declared)["volatile"], rel=0.02)


def test_fields_left_in_place_are_named_as_cause_all_the_same(
    log_lines: list[Any], write_log: Writer, job: Jobs
) -> None:
    report = report_of(job(write_log(log_lines), templates={}, canonical=CanonicalConfig(hoist="off")))
    rates = report.analysis.hit_rate
    assert rates.canonical["inf"] == pytest.approx(rates.as_is["inf"], abs=0.02)
    assert report.analysis.causes[0].cause == "volatile"


def test_an_example_shows_where_prompts_part(log_lines: list[Any], write_log: Writer, job: Jobs) -> None:
    report = report_of(job(write_log(log_lines)))
    row = report.analysis.causes[0]
    assert (row.cause, row.template) == ("volatile", "support")
    assert row.example is not None
    assert "You are the support assistant of Acme. Now: 2026-03-02 08:" in row.example.text_before
    assert row.example.here != row.example.there
    assert row.example.here[0] != row.example.there[0]
    assert "Talking to dev-" in row.example.here


def test_documents_in_another_order_and_other_spellings_are_told_apart(write_log: Writer, job: Jobs) -> None:
    rules = "Answer from the documents only.\nBe brief, be friendly, and name the document."
    lines = [
        chat(rules, "why?", documents=DOCUMENTS[:3]),
        chat(rules, "why?", documents=DOCUMENTS[2::-1]),
        chat(rules.replace("\n", "\r\n"), "why?", documents=DOCUMENTS[:3]),
        chat(rules, "why?", documents=DOCUMENTS[:3], cache_salt="other"),
        chat(rules, "why?", documents=DOCUMENTS[:3]),
    ]
    report = report_of(job(write_log(lines), templates={}, sizes=(None,)))
    sums = by_cause(report)
    assert {"never_seen", "document_order", "text_form", "namespace", "block_rounding"} == set(sums)
    per_prompt = report.analysis.tokens / 5
    assert sums["namespace"] == pytest.approx(per_prompt, rel=0.1)
    assert sums["never_seen"] == pytest.approx(per_prompt, rel=0.1)
    assert sums["document_order"] < sums["text_form"] < per_prompt
    assert report.analysis.hit_rate.as_is["inf"] > 0.18


def test_a_small_cache_evicts(write_log: Writer, job: Jobs) -> None:
    first, other = (chat(f"System {name}. " + "words and more words. " * 20, "why?") for name in "AB")
    report = report_of(job(write_log([first, other, first]), templates={}, sizes=(None, 10)))
    sums = by_cause(report)
    assert sums["evicted"] > 0
    assert report.analysis.hit_rate.as_is["10"] < report.analysis.hit_rate.as_is["inf"]


def test_prompts_below_one_block_are_said_to_be(write_log: Writer, job: Jobs) -> None:
    report = report_of(job(write_log([chat("A", "b")] * 3), templates={}, block_size=1024))
    assert set(by_cause(report)) == {"below_minimum"}


def test_the_same_log_gives_the_same_report_in_one_process_and_in_two(
    log_lines: list[Any], write_log: Writer, job: Jobs, monkeypatch: pytest.MonkeyPatch
) -> None:
    work = job(write_log([*log_lines, "{"]), templates={}, canonical=CanonicalConfig(hoist="apply"))
    alone = report_of(work)
    monkeypatch.setattr(run, "_WORTH_A_PROCESS", 0)
    monkeypatch.setattr(run.os, "cpu_count", lambda: 2)
    assert msgspec.json.encode(report_of(work)) == msgspec.json.encode(alone)


def test_a_failure_in_the_second_process_is_told(
    write_log: Writer, job: Jobs, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "log.gz"
    path.write_bytes(gzip.compress(write_log(bodies(30)).read_bytes())[:-9])
    monkeypatch.setattr(run, "_WORTH_A_PROCESS", 0)
    with pytest.raises(LogError, match="cannot be read"):
        report_of(job(path))


def test_bad_lines_are_counted_once_and_the_rest_is_analyzed(
    log_lines: list[Any], write_log: Writer, job: Jobs
) -> None:
    broken = [
        "{",
        chat("S", "q", documents=[{"id": "a"}]),
        chat("S", "q", documents=[{"id": "a", "text": "x"}, {"id": "a", "text": "y"}]),
        chat("S", "q", headstart={"template": "none"}),
        {"messages": [{"role": "user", "content": [{"type": "image_url"}]}]},
        {"messages": []},
    ]
    report = report_of(job(write_log([*log_lines[:5], *broken, *log_lines[5:10]])))
    assert report.analysis.requests == 10
    assert [(bad.line, bad.field) for bad in report.bad_lines] == [
        (6, None),
        (7, "documents[0].text"),
        (8, "documents[1].id"),
        (9, "headstart.template"),
        (10, "messages[0].content[0].type"),
        (11, "messages"),
    ]


def test_a_log_without_a_request_is_an_error(write_log: Writer, job: Jobs) -> None:
    with pytest.raises(LogError, match=r"no line of it is a request \(1 bad"):
        report_of(job(write_log(["{"])))
    with pytest.raises(LogError, match=r"no line of it is a request \(0 bad"):
        report_of(job(write_log([])))


def test_the_suggested_configuration_does_what_was_learned(log_lines: list[Any], write_log: Writer, job: Jobs) -> None:
    path = write_log(log_lines)
    learned = report_of(job(path, templates={}, canonical=CanonicalConfig(hoist="apply", order="preserve")))
    file = path.with_name("headstart.toml")
    file.write_text(learned.configuration)
    config = load_config(file)
    assert config.canonical.order == "cache-aware"
    (template,) = config.templates.values()
    now, user = learned.templates[0].fields
    assert template.system == SYSTEM.format(now=f"{{{now}}}", user=f"{{{user}}}")
    replayed = report_of(job(path, templates=config.templates, canonical=config.canonical))
    assert replayed.analysis.hit_rate.canonical["inf"] >= learned.analysis.hit_rate.canonical["inf"]
    assert "Nothing to configure" in replayed.configuration


def test_a_suggested_template_tells_how_many_requests_of_the_whole_log_are_of_it(
    log_lines: list[Any], write_log: Writer, job: Jobs
) -> None:
    """Not how many came after it was found, which takes some."""
    others = [chat("Another system text.", f"{number}?") for number in range(7)]
    path = write_log([*log_lines, *others])
    learned = report_of(job(path, templates={}, canonical=CanonicalConfig(hoist="apply")))
    assert f"# {len(log_lines)} of the log's {len(log_lines) + 7} requests have this system" in learned.configuration


def test_nothing_is_suggested_where_nothing_helps(write_log: Writer, job: Jobs) -> None:
    report = report_of(job(write_log([chat("System.", "why?")] * 5), templates={}))
    assert load_text(report.configuration) == {}


def load_text(text: str) -> Mapping[str, Any]:
    return tomllib.loads(text)


@pytest.mark.parametrize(
    "text",
    ['quotes """ and " at the end"', "back\\slash", "a\ttab\nand\x07bell\x7f", "\n leading", "", 'ends in ""', "é漢"],
)
def test_any_text_survives_as_toml(text: str) -> None:
    assert load_text(f"x = {toml_text(text)}")["x"] == text


def test_the_keys_of_a_simulated_cache_cannot_be_listed_but_asked_for() -> None:
    cache = SimulatedFleet((4,), "fifo", 16, 100).caches[0]
    keys = [bytes([index] * 16) for index in range(6)]
    assert cache.request(keys) == 0
    assert cache.request(keys) == 4
    assert [key in cache.resident for key in keys] == [True] * 4 + [False] * 2
    assert len(cache.resident) == 4


CHAIN = st.lists(st.integers(0, 3), max_size=8)


@settings(deadline=None)
@given(st.lists(CHAIN, max_size=40), st.integers(1, 12))
def test_the_short_way_of_lru_hits_and_holds_what_the_engines_policy_does(chains: list[list[int]], blocks: int) -> None:
    quick, slow = _LeastRecent(blocks), _Bounded("lru", blocks)
    for chain in chains:
        keys = [hash((7, *chain[: depth + 1])).to_bytes(16, "little", signed=True) for depth in range(len(chain))]
        assert quick.request(keys) == slow.request(keys)
        assert len(quick.resident) == len(slow.resident)
        assert all(key in slow.resident for key in quick.resident)
