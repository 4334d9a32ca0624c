"""``/admin/misses``: each token that was missed has one cause, over HTTP and real block managers."""

from __future__ import annotations

import asyncio
from typing import Any

import msgspec
import pytest

from gateway.config import AdminConfig, AttributionConfig, SavingsConfig, TemplateConfig

from ..conftest import until
from .conftest import BASE, Bench, Service

SYSTEM = "It is {now} now. Answer from the documents, and from nothing else. Be brief."
TEMPLATES = {"dated": TemplateConfig(SYSTEM, hoist="off", order="preserve")}
CONFIG = msgspec.structs.replace(BASE, templates=TEMPLATES)
DOCUMENTS = [{"id": f"d{number}", "text": f"Text number {number} says something. " * 6} for number in range(3)]


async def ask(service: Service, now: str, question: str, documents: list[dict[str, str]] = DOCUMENTS) -> None:
    fields: dict[str, Any] = {"documents": documents, "headstart": {"template": "dated", "fields": {"now": now}}}
    assert (await service.chat(question, **fields)).status == 200


async def causes(service: Service, query: str = "") -> dict[str, int]:
    """What was missed by cause, after having checked that all sums agree."""
    report = (await service.get(f"/admin/misses{query}")).json
    stats = (await service.get(f"/admin/stats{query}")).json
    found = {cause: lost["tokens"] for cause, lost in report["causes"].items() if lost["tokens"]}
    assert sum(found.values()) == report["missed_tokens"] == stats["totals"]["missed_tokens"]
    assert sum(row["tokens"] for row in report["rows"]) == report["missed_tokens"]
    for table in ("templates", "tenants", "replicas", "models"):
        for figures in stats[table].values():
            assert sum(lost["tokens"] for lost in figures["missed"].values()) == figures["missed_tokens"]
        assert sum(figures["missed_tokens"] for figures in stats[table].values()) == report["missed_tokens"]
    return found


def example(report: Any, cause: str) -> Any:
    (row,) = [row for row in report["rows"] if row["cause"] == cause]
    return row["example"]


def test_a_value_in_front_of_all_is_found_to_cost_what_is_behind_it(bench: Bench) -> None:
    async def scenario(service: Service) -> None:
        await ask(service, "10:01", "Why?")
        first = await causes(service)
        assert set(first) == {"never_seen"}
        await ask(service, "10:02", "Why?")
        second = await causes(service)
        assert second["volatile"] > 100
        assert await causes(service, "?window=5m") == await causes(service, "?window=30d") == second

    bench.run(scenario, CONFIG)


def test_the_latest_requests_are_told_one_by_one_newest_first(bench: Bench) -> None:
    async def scenario(service: Service) -> None:
        await ask(service, "10:01", "Why?")
        await ask(service, "10:01", "Why?")
        newest, oldest = (await service.get("/admin/requests")).json["requests"]
        assert newest["finished_at"] >= oldest["finished_at"]
        assert oldest["cached_tokens"] == 0 < newest["cached_tokens"]
        for row in (newest, oldest):
            assert row["template"] == "dated"
            assert sum(row["missed"].values()) == row["prompt_tokens"] - row["cached_tokens"]
        assert "10:01" not in str(newest)

    bench.run(scenario, CONFIG)


def test_another_order_of_documents_is_a_cause_of_its_own(bench: Bench) -> None:
    async def scenario(service: Service) -> None:
        await ask(service, "10:01", "Why?")
        await ask(service, "10:01", "Why?", [DOCUMENTS[2], DOCUMENTS[1], DOCUMENTS[0]])
        assert (await causes(service))["document_order"] > 100

    bench.run(scenario, CONFIG)


def test_what_was_evicted_is_told_from_what_was_never_there_and_how_long_ago(bench: Bench) -> None:
    async def scenario(service: Service) -> None:
        await service.complete(bench.tokens(0, 160))
        for start in range(1, 8):
            await service.complete(bench.tokens(31 * start, 160))
        before = await causes(service)
        assert before.get("evicted", 0) == 0
        await service.complete(bench.tokens(0, 160))
        assert (await causes(service))["evicted"] == 144  # the last block ends with the prompt and is computed anyway
        (row,) = [row for row in (await service.get("/admin/misses")).json["rows"] if row["cause"] == "evicted"]
        assert row["evicted_ago_p50_s"] is not None

    bench.run(scenario, num_blocks=24)


def test_what_another_replica_holds_is_no_eviction(bench: Bench) -> None:
    async def scenario(service: Service) -> None:
        prompt = bench.tokens(0, 160)
        first = await service.complete(prompt)
        holder, other = sorted(service.replicas, key=lambda each: each.id != first.headers["x-headstart-replica"])
        holder.hold()  # so that its share of the load fills up
        async with asyncio.TaskGroup() as group:
            for _ in range(6):
                group.create_task(service.complete(prompt))
            await until(lambda: bool(other.submitted))
            holder.let_go()
        assert (await causes(service))["other_replica"] >= 144

    bench.run(scenario, replicas=2)


def test_short_prompts_and_those_that_bypass_the_cache_have_their_own_causes(bench: Bench) -> None:
    async def scenario(service: Service) -> None:
        await service.complete(bench.tokens(0, 9))
        await service.complete(bench.tokens(0, 50), headstart={"bypass": True})
        assert await causes(service) == {"below_minimum": 9, "bypass": 50}

    bench.run(scenario)


def test_texts_are_blotted_out_unless_the_operator_wants_them(bench: Bench) -> None:
    shown: dict[bool, Any] = {}

    for show_text in (False, True):

        async def scenario(service: Service, show_text: bool = show_text) -> None:
            await ask(service, "10:01", "Why?")
            await ask(service, "10:02", "Why?")
            shown[show_text] = (await service.get("/admin/misses")).json

        bench.run(scenario, msgspec.structs.replace(CONFIG, attribution=AttributionConfig(show_text=show_text)))
    redacted, plain = example(shown[False], "never_seen"), example(shown[True], "never_seen")
    assert redacted["token"] == plain["token"]
    assert shown[False]["redacted"]
    assert not shown[True]["redacted"]
    plain, redacted = example(shown[True], "volatile"), example(shown[False], "volatile")
    assert "It is 10:0" in plain["text_before"]
    assert plain["here"].startswith("2 now")
    assert plain["there"].startswith("1 now")
    assert redacted["there"].startswith("0 xxx")
    assert "Answer" not in str(shown[False])


def test_attribution_can_be_switched_off(bench: Bench) -> None:
    async def scenario(service: Service) -> None:
        await service.complete(bench.tokens(0, 50))
        report = (await service.get("/admin/misses")).json
        assert not report["enabled"]
        assert report["missed_tokens"] == 50
        assert report["rows"] == []

    bench.run(scenario, msgspec.structs.replace(BASE, attribution=AttributionConfig(enabled=False)))


def test_windows_are_refused_where_they_are_none_or_longer_than_thirty_days(bench: Bench) -> None:
    async def scenario(service: Service) -> None:
        for query in ("31d", "0", "5 m", "x", "-1"):
            assert (await service.get("/admin/misses", params={"window": query})).status == 400
            assert (await service.get("/admin/stats", params={"window": query})).status == 400

    bench.run(scenario)


def test_misses_are_the_operators(bench: Bench) -> None:
    async def scenario(service: Service) -> None:
        assert (await service.get("/admin/misses")).status in (401, 403)

    bench.run(scenario, msgspec.structs.replace(BASE, admin=AdminConfig(key_sha256="0" * 64)))


def test_a_request_that_is_held_out_neither_reads_nor_fills_the_cache_and_is_held_against_its_estimate(
    bench: Bench,
) -> None:
    async def scenario(service: Service) -> None:
        for _ in range(5):
            answer = await service.complete(bench.tokens(0, 160))
            assert answer.cached == 0
        totals = (await service.get("/admin/stats")).json["totals"]
        assert totals["calibration"]["requests"] == 5
        assert totals["calibration"]["measured_prefill_s"] == totals["prefill_s"] > 0
        assert await causes(service) == {"bypass": 800}

    bench.run(scenario, msgspec.structs.replace(BASE, savings=SavingsConfig(holdout=1.0)))


def test_money_is_shown_where_a_price_is_configured_and_nowhere_else(bench: Bench) -> None:
    async def scenario(service: Service) -> None:
        for _ in range(2):
            await service.complete(bench.tokens(0, 160))
        stats = (await service.get("/admin/stats")).json
        totals, price = stats["totals"], stats["price"]
        assert totals["saved_prefill_s"] > 0
        if price is None:
            assert totals["saved_money"] is None
        else:
            assert totals["saved_money"]["amount"] == pytest.approx(totals["saved_prefill_s"] / 3600 * 2.5)

    bench.run(scenario)
    bench.run(scenario, msgspec.structs.replace(BASE, savings=SavingsConfig(gpu_hour_price=2.5)))
