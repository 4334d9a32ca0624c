"""A log that is sent as one batch has its documents ordered together, and can be written in that order."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import msgspec
import pytest

from gateway.analysis.log import LogError
from gateway.analysis.passes import Job
from gateway.analysis.report import HitRates
from gateway.analysis.run import analyze
from gateway.cli.main import run
from tests.gateway.analysis.conftest import DOCUMENTS, SYSTEM, bodies

Writer = Callable[[Iterable[Any]], Path]
Jobs = Callable[..., Job]


def rates(job: Job, ordered: Path | None = None) -> HitRates:
    return analyze(job, lambda step, fraction: None, ordered).analysis.hit_rate


def documents(line: str) -> list[str]:
    return [document["id"] for document in json.loads(line)["documents"]]


def test_a_batch_that_is_written_and_sent_hits_what_its_analysis_said_and_more_than_one_by_one(
    write_log: Writer, job: Jobs, tmp_path: Path
) -> None:
    # The document that all have comes last: whoever does not know it orders the first requests by what they have alone.
    lines = [line | {"documents": [DOCUMENTS[1 + at % 5], DOCUMENTS[0]]} for at, line in enumerate(bodies(20))]
    one_by_one = job(write_log(lines))
    ordered = tmp_path / "ordered.jsonl"
    batch = rates(msgspec.structs.replace(one_by_one, batch=True), ordered)
    assert batch.canonical["inf"] > rates(one_by_one).canonical["inf"]
    written = ordered.read_text().splitlines()
    assert rates(job(ordered)).canonical == batch.canonical
    assert [sorted(documents(line)) for line in written] == [sorted(documents(json.dumps(line))) for line in lines]
    assert {json.loads(line)["headstart"]["order"] for line in written} == {"preserve"}
    assert [json.loads(line)["messages"] for line in written] == [line["messages"] for line in lines]


@pytest.mark.parametrize(
    "change",
    [
        {"headstart": {"order": "preserve"}},
        {"headstart": {"order": "canonical"}},
        {"headstart": {"keep_first": 1}},
        {"headstart": {"hint": True}},
        {"documents": [*DOCUMENTS[2:0:-1], DOCUMENTS[1]]},
        {"documents": DOCUMENTS[:1]},
        {"documents": [{"id": "no text"}, DOCUMENTS[1]]},
    ],
)
def test_requests_that_want_something_else_are_written_as_they_are(
    change: dict[str, Any], write_log: Writer, job: Jobs, tmp_path: Path
) -> None:
    lines = ["no request", *bodies(6), bodies(1)[0] | change, bodies(1)[0] | change]
    log, ordered = write_log(lines), tmp_path / "ordered.jsonl"
    rates(job(log, batch=True), ordered)
    before, after = log.read_text().splitlines(), ordered.read_text().splitlines()
    assert [before[at] == after[at] for at in range(len(before))] == [True, *[False] * 6, True, True]


def test_requests_share_an_order_only_with_those_that_begin_alike(write_log: Writer, job: Jobs, tmp_path: Path) -> None:
    """The second document is the one that most requests have, but not behind the same beginning."""
    first, second, third = DOCUMENTS[:3]
    lines = [line | {"documents": [first, second]} for line in bodies(2)]
    lines += [line | {"documents": [second, third], "cache_salt": "other"} for line in bodies(5)]
    ordered = tmp_path / "ordered.jsonl"
    rates(job(write_log(lines), batch=True), ordered)
    assert {tuple(documents(line)) for line in ordered.read_text().splitlines()[:2]} == {("kb-0", "kb-1")}


def test_what_a_batch_does_not_order_is_written_byte_for_byte(write_log: Writer, job: Jobs, tmp_path: Path) -> None:
    log, ordered = write_log(bodies(2)), tmp_path / "ordered.jsonl"
    odd = '"metadata": {"id": 12345678901234567890123, "of": "caf\\u00e9"}, "headstart": {"keep_last": 0}'
    log.write_text("".join(f"{line[:-1]}, {odd}}}\n" for line in log.read_text().splitlines()))
    rates(job(log, batch=True), ordered)
    for line in ordered.read_text().splitlines():
        assert '{"id": 12345678901234567890123, "of": "caf\\u00e9"}' in line
        assert json.loads(line)["headstart"] == {"keep_last": 0, "order": "preserve"}


def test_a_batch_that_cannot_be_written_is_told(write_log: Writer, job: Jobs, tmp_path: Path) -> None:
    with pytest.raises(LogError, match="cannot be written"):
        rates(job(write_log(bodies(3)), batch=True), tmp_path / "absent" / "ordered.jsonl")


def test_a_log_is_never_overwritten_by_its_own_batch(write_log: Writer, job: Jobs, tmp_path: Path) -> None:
    log = write_log(bodies(3))
    before, same = log.read_bytes(), tmp_path / "same.jsonl"
    same.symlink_to(log)
    for ordered in (log, same):
        with pytest.raises(LogError, match="another file"):
            rates(job(log, batch=True), ordered)
    assert log.read_bytes() == before


def test_the_command_writes_a_batch_and_only_that(
    write_log: Writer, model_folder: Callable[[str], Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    log, ordered = write_log(bodies(8)), tmp_path / "ordered.jsonl"
    command = ["analyze", str(log), "--model", str(model_folder("chatml")), "--write-ordered", str(ordered)]
    assert run(command) == 1
    assert "--order batch" in capsys.readouterr().err
    assert run([*command, "--order", "batch", "--json"]) == 0
    assert len(ordered.read_text().splitlines()) == 8
    assert SYSTEM[:20] in ordered.read_text()
