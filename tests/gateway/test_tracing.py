"""Traces: a span for each stage and none for a chunk, the caller's context goes on, no text, and nothing when off."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import aiohttp
import pytest
from tokenizers import Tokenizer

from gateway.config import Config, RedisConfig, ServerConfig, TracingConfig
from gateway.errors import ConfigError
from gateway.replicas.scripted import ScriptedReplica, scripted_info
from gateway.server import serving
from gateway.service import Gateway
from gateway.tracing import Tracing, describe, stage, trace_headers

TRACE = "4bf92f3577b34da6a3ce929d0e0e4736"
PARENT = f"00-{TRACE}-00f067aa0ba902b7-01"


def test_without_an_endpoint_nothing_is_imported_and_a_stage_is_nothing() -> None:
    tracing = Tracing(TracingConfig())
    with tracing.request("request", [(b"host", b"x")]):
        assert trace_headers() == {}
        assert stage("plan") is stage("decode")
        describe(lambda: pytest.fail("nobody asked"))


def test_a_callers_context_goes_on_whether_traces_are_sent_or_not() -> None:
    tracing = Tracing(TracingConfig())
    headers = [(b"traceparent", PARENT.encode()), (b"tracestate", b"vendor=1"), (b"x", b"y")]
    with tracing.request("request", headers), stage("plan"):
        assert trace_headers() == {"traceparent": PARENT, "tracestate": "vendor=1"}
    assert trace_headers() == {}


@pytest.mark.parametrize("parent", ["", "x", PARENT.upper(), PARENT + "\r\nx: y", PARENT[:-1]])
def test_a_malformed_context_does_not(parent: str) -> None:
    with Tracing(TracingConfig()).request("request", [(b"traceparent", parent.encode()), (b"tracestate", b"a=1")]):
        assert trace_headers() == {}


def test_an_endless_tracestate_is_left_behind() -> None:
    headers = [(b"traceparent", PARENT.encode()), (b"tracestate", b"a=" + b"1" * 5000)]
    with Tracing(TracingConfig()).request("request", headers):
        assert trace_headers() == {"traceparent": PARENT}


def test_an_endpoint_without_the_package_is_a_clear_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "opentelemetry", None)
    with pytest.raises(ConfigError, match=r"headstart\[otel\]"):
        Tracing(TracingConfig(endpoint="http://127.0.0.1:1/v1/traces"))


@pytest.fixture
def exported() -> Any:
    memory = pytest.importorskip(
        "opentelemetry.sdk.trace.export.in_memory_span_exporter", reason="the extra is missing"
    )
    return memory.InMemorySpanExporter()


def test_requests_that_run_side_by_side_have_traces_of_their_own(exported: Any) -> None:
    async def one(tracing: Tracing, number: int) -> None:
        parent = f"00-{number:032x}-00f067aa0ba902b7-01"
        with tracing.request("request", [(b"traceparent", parent.encode())]):
            for name in ("plan", "prefill", "decode"):
                with stage(name):
                    await asyncio.sleep(0)
                    assert trace_headers()["traceparent"].split("-")[1] == f"{number:032x}"

    async def scenario() -> None:
        tracing = Tracing(TracingConfig(), exporter=exported)
        await asyncio.gather(*[one(tracing, number) for number in range(1, 9)])
        await tracing.stop()

    asyncio.run(scenario())
    spans = exported.get_finished_spans()
    assert len(spans) == 8 * 4
    for span in spans:
        if span.name != "request":
            (root,) = [s for s in spans if s.name == "request" and s.context.trace_id == span.context.trace_id]
            assert span.parent.span_id == root.context.span_id


def test_a_failed_stage_tells_the_kind_of_error_and_not_its_words(exported: Any) -> None:
    async def scenario() -> None:
        tracing = Tracing(TracingConfig(), exporter=exported)
        with pytest.raises(ValueError, match="secret"), tracing.request("request", []), stage("plan"):
            raise ValueError("secret text")
        await tracing.stop()

    asyncio.run(scenario())
    for span in exported.get_finished_spans():
        assert span.status.description == "ValueError"
        assert "secret" not in span.to_json()


def test_a_streamed_answer_of_many_chunks_has_one_span_per_stage(
    exported: Any, model_folder: Callable[[str], Path]
) -> None:
    async def scenario() -> None:
        folder = model_folder("chatml")
        tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
        replica = ScriptedReplica("engine-0", tokenizer, scripted_info(tokenizer, root=str(folder)))
        config = Config(server=ServerConfig(port=0), redis=RedisConfig(url="redis://127.0.0.1:1/0"))
        gateway = Gateway(config, model="scripted", folder=folder, replicas=[replica])
        gateway.tracing = Tracing(TracingConfig(), exporter=exported)  # type: ignore[misc]
        body = {
            "model": "scripted",
            "messages": [{"role": "user", "content": "zebra-7731"}],
            "max_tokens": 40,
            "ignore_eos": True,
            "stream": True,
        }
        async with serving(gateway) as url, aiohttp.ClientSession() as http:
            await gateway.wait_ready(10)
            headers = {"traceparent": PARENT}
            async with http.post(f"{url}/v1/chat/completions", json=body, headers=headers) as response:
                assert response.status == 200
                await response.read()

    asyncio.run(scenario())
    spans = {span.name: span for span in exported.get_finished_spans()}
    stages = ["parse", "canonicalize", "tokenize and route", "plan", "prefill", "decode", "request"]
    assert sorted(span.name for span in exported.get_finished_spans()) == sorted(stages)
    assert all(f"{span.context.trace_id:032x}" == TRACE for span in spans.values())
    assert spans["canonicalize"].parent.span_id == spans["plan"].context.span_id
    assert spans["request"].attributes["headstart.completion_tokens"] == 40
    assert spans["request"].attributes["headstart.replica"] == "engine-0"
    assert not any("zebra" in span.to_json() for span in spans.values())
