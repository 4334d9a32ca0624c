"""``headstart analyze``: exit codes, the JSON, the page, and what it says about bad input."""

from __future__ import annotations

import io
import json
import re
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from gateway.cli.main import run

from .conftest import Headstart

NOW = "You answer from the documents. It is 2026-03-02 08:00:{:02}. Be brief, be friendly, name the <document>."


def line(serial: int) -> dict[str, Any]:
    return {
        "messages": [
            {"role": "system", "content": NOW.format(serial)},
            {"role": "user", "content": f"Question {serial}?"},
        ],
        "documents": [{"id": "a", "text": "The text of a, with some more words in it."}],
    }


@pytest.fixture
def log(tmp_path: Path) -> Path:
    path = tmp_path / "some <log>.jsonl"
    path.write_text("".join(json.dumps(line(serial)) + "\n" for serial in range(30)))
    return path


@pytest.fixture
def analyze(model_folder: Callable[[str], Path]) -> Callable[..., int]:
    folder = str(model_folder("chatml"))
    return lambda *arguments: run(["analyze", *map(str, arguments), "--model", folder])


def test_the_json_has_exactly_the_documented_fields(
    log: Path, analyze: Callable[..., int], capsys: pytest.CaptureFixture[str]
) -> None:
    assert analyze(log, "--json") == 0
    found = json.loads(capsys.readouterr().out)
    assert set(found) == {"requests", "tokens", "hit_rate", "causes"}
    assert found["requests"] == 30
    assert set(found["hit_rate"]) == {"as_is", "canonical", "position_independent"}
    assert set(found["hit_rate"]["as_is"]) == set(found["hit_rate"]["canonical"]) == {"inf", "8192"}
    assert found["hit_rate"]["as_is"]["inf"] < 0.4 < found["hit_rate"]["canonical"]["inf"]
    for row in found["causes"]:
        assert set(row) == {"cause", "template", "requests", "tokens", "example"}
        assert set(row["example"]) == {"token", "text_before", "here", "there"}
    assert found["causes"][0]["cause"] == "volatile"


def test_two_runs_print_the_same(log: Path, analyze: Callable[..., int], capsys: pytest.CaptureFixture[str]) -> None:
    assert analyze(log, "--json") == analyze(log, "--json") == 0
    whole = capsys.readouterr().out
    assert whole[: len(whole) // 2] == whole[len(whole) // 2 :]


def test_a_finding_over_the_threshold_exits_with_2(
    log: Path, analyze: Callable[..., int], capsys: pytest.CaptureFixture[str]
) -> None:
    assert analyze(log, "--fail-on", "volatile>0.1", "--fail-on", "hit_rate.as_is.inf>0.9") == 2
    captured = capsys.readouterr()
    assert "volatile is 0." in captured.err
    assert "hit_rate" not in captured.err
    assert "[templates.learned_1]" in captured.out
    assert analyze(log, "--hoist", "off", "--fail-on", "hit_rate.canonical.inf>0.5") == 0


def test_bad_lines_are_told_and_strict_makes_them_an_error(
    log: Path, analyze: Callable[..., int], capsys: pytest.CaptureFixture[str]
) -> None:
    log.write_text(log.read_text() + '{"messages": [{"role": "wizard", "content": "x"}]}\n')
    assert analyze(log, "--json") == 0
    captured = capsys.readouterr()
    assert json.loads(captured.out)["requests"] == 30
    told = " ".join(captured.err.split())
    assert re.search(r"log>\.jsonl: line 31, field messages\[0\]\.role: must be one of", told) or (
        "line 31, field messages[0].role" in told
    )
    assert "Lines left out: 1; requests that were analyzed: 30." in told
    assert analyze(log, "--strict") == 1


def test_a_log_can_come_from_standard_input(
    log: Path, analyze: Callable[..., int], capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    assert analyze(log, "--json", "--kv-blocks", "inf, 100") == 0
    expected = capsys.readouterr().out
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(log.read_bytes())))
    assert analyze("-", "--json", "--kv-blocks", "inf,100") == 0
    assert capsys.readouterr().out == expected


def test_the_page_needs_nothing_from_elsewhere_and_escapes_all_text(
    log: Path, analyze: Callable[..., int], capsys: pytest.CaptureFixture[str]
) -> None:
    page = log.with_name("page.html")
    assert analyze(log, "--json", "--html", page) == 0
    text = page.read_text()
    assert not re.search(r"(src|href)=|url\(|@import|<script", text)
    assert "some &lt;log&gt;.jsonl" in text
    assert "&lt;document&gt;" in text
    assert "<document>" not in text
    assert "prefers-color-scheme: dark" in text
    assert "[templates.learned_1]" in text
    for heading in (
        "Tokens found in the cache",
        "Why the rest was not",
        "Where prompts part",
        "Suggested configuration",
    ):
        assert heading in text


def test_the_suggestion_is_taken_as_a_configuration(
    log: Path, analyze: Callable[..., int], capsys: pytest.CaptureFixture[str]
) -> None:
    file = log.with_name("headstart.toml")
    assert analyze(log, "--json", "--suggest", file) == 0
    learned = json.loads(capsys.readouterr().out)["hit_rate"]["canonical"]
    assert analyze(log, "--json", "--config", file, "--hoist", "declared") == 0
    found = json.loads(capsys.readouterr().out)
    assert found["hit_rate"]["canonical"]["inf"] == pytest.approx(learned["inf"], abs=0.02)
    assert {row["template"] for row in found["causes"]} == {"learned_1"}


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--kv-blocks", "some"], "--kv-blocks 'some'"),
        (["--kv-blocks", "0"], "--kv-blocks '0'"),
        (["--fail-on", "volatile"], "volatile>0.1"),
        (["--fail-on", "speed>1"], "'speed' is no figure"),
        (["--policy", "mru"], "mru"),
        (["--config", "absent.toml"], "absent.toml"),
        (["--html", "/absent/page.html"], "/absent/page.html"),
    ],
)
def test_a_mistake_is_named(
    log: Path,
    arguments: list[str],
    message: str,
    analyze: Callable[..., int],
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert analyze(log, *arguments) == 1
    captured = capsys.readouterr()
    assert captured.out == ""
    assert message in " ".join(captured.err.split())


def test_an_empty_log_is_an_error(log: Path, analyze: Callable[..., int], capsys: pytest.CaptureFixture[str]) -> None:
    log.write_text("")
    assert analyze(log) == 1
    assert "no line of it is a request" in " ".join(capsys.readouterr().err.split())


def test_neither_torch_nor_an_engine_is_needed(
    log: Path, model_folder: Callable[[str], Path], headstart: Headstart
) -> None:
    without = headstart.without("torch", "transformers", "triton", "gguf")
    done = without.run("analyze", str(log), "--model", str(model_folder("chatml")), "--json")
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["requests"] == 30
