"""Traces of requests for OpenTelemetry: a span for each stage, none for a chunk. No text of prompts or answers.

A request's trace is found through the context of the task that handles it, so that stages need no more than
``with stage("canonicalize"):``. Where nothing is traced that costs a look at a variable, and opentelemetry is not even
imported; but a caller's W3C trace context (``traceparent``, ``tracestate``) goes on to the replica in any case.
"""

from __future__ import annotations

import asyncio
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from contextvars import ContextVar
from typing import Any, Final

from gateway import __version__
from gateway.config import TracingConfig
from gateway.errors import ConfigError

__all__ = ["Tracing", "describe", "stage", "trace_headers"]

_CONTEXT_HEADERS: Final = (b"traceparent", b"tracestate")
_PARENT: Final = re.compile(r"[0-9a-f]{2}-[0-9a-f]{32}-[0-9a-f]{16}-[0-9a-f]{2}(-[ -~]{0,64})?")
_MOST_STATE: Final = 512  # characters of a caller's tracestate, as the W3C asks to pass on at least

Attributes = Mapping[str, str | int | float | bool]


class _Caller:
    """The trace of a caller that this gateway takes no part in."""

    def __init__(self, headers: dict[str, str]) -> None:
        self.headers: Final = headers

    def stage(self, name: str) -> AbstractContextManager[None]:
        """Nothing is recorded."""
        return _NOTHING

    def describe(self, attributes: Callable[[], Attributes]) -> None:
        """Nothing is recorded."""


class _Traced:
    """One request's span and those of its stages. Belongs to the task that handles it."""

    def __init__(self, tracing: _OpenTelemetry, span: Any) -> None:
        self._tracing: Final = tracing
        self._spans: Final = [span]

    @property
    def headers(self) -> dict[str, str]:
        """The context of the stage that goes on."""
        return self._tracing.headers(self._spans[-1])

    @contextmanager
    def stage(self, name: str) -> Iterator[None]:
        """A span within the stage that goes on."""
        span = self._tracing.start(name, self._spans[-1])
        self._spans.append(span)
        try:
            yield
        except BaseException as error:
            self._tracing.fail(span, error)
            raise
        finally:
            self._spans.pop()
            span.end()

    def describe(self, attributes: Callable[[], Attributes]) -> None:
        """Say more about the request."""
        if self._spans[0].is_recording():
            self._spans[0].set_attributes(attributes())


_current: Final[ContextVar[_Caller | _Traced | None]] = ContextVar("headstart_trace", default=None)
_NOTHING: Final = nullcontext()


def stage(name: str) -> AbstractContextManager[None]:
    """The block is a stage of the request that this task handles."""
    trace = _current.get()
    return _NOTHING if trace is None else trace.stage(name)


def describe(attributes: Callable[[], Attributes]) -> None:
    """Say more about the request that this task handles: names and numbers, never text. Not called for nothing."""
    trace = _current.get()
    if trace is not None:
        trace.describe(attributes)


def trace_headers() -> dict[str, str]:
    """The headers by which whoever is asked next takes part in the trace."""
    trace = _current.get()
    return {} if trace is None else trace.headers


class Tracing:
    """Begins the trace of each request. Owns the exporter, which sends in a thread of its own.

    Raises:
        ConfigError: Traces are wanted, but the package is not there.
    """

    def __init__(self, config: TracingConfig, *, exporter: Any = None) -> None:
        """``exporter`` is a ``SpanExporter`` for where there is no endpoint."""
        self._opentelemetry: _OpenTelemetry | None = None
        if config.endpoint is not None or exporter is not None:
            self._opentelemetry = _OpenTelemetry(config, exporter)

    def request(self, name: str, headers: Iterable[tuple[bytes, bytes]]) -> AbstractContextManager[None]:
        """The block is the handling of a request with these headers."""
        context = {key.decode(): value.decode("latin-1") for key, value in headers if key in _CONTEXT_HEADERS}
        if context and not _PARENT.fullmatch(context.get("traceparent", "")):
            context = {}
        elif len(context.get("tracestate", "")) > _MOST_STATE:
            del context["tracestate"]
        if self._opentelemetry is not None:
            return self._opentelemetry.request(name, context)
        return _following(_Caller(context)) if context else _NOTHING

    async def stop(self) -> None:
        """Send what is left."""
        if self._opentelemetry is not None:
            await asyncio.to_thread(self._opentelemetry.shutdown)


@contextmanager
def _following(trace: _Caller | _Traced) -> Iterator[None]:
    token = _current.set(trace)
    try:
        yield
    finally:
        _current.reset(token)


class _OpenTelemetry:
    """All that is asked of the package."""

    def __init__(self, config: TracingConfig, exporter: Any) -> None:
        try:
            from opentelemetry import trace
            from opentelemetry.sdk.resources import Resource
            from opentelemetry.sdk.trace import TracerProvider
            from opentelemetry.sdk.trace.export import BatchSpanProcessor
            from opentelemetry.sdk.trace.sampling import ParentBased, TraceIdRatioBased
            from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

            if exporter is None:
                from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter

                exporter = OTLPSpanExporter(endpoint=config.endpoint)
        except ImportError as error:
            raise ConfigError(
                "tracing.endpoint needs OpenTelemetry: pip install 'headstart[otel]'.", param="tracing.endpoint"
            ) from error
        self._trace: Final = trace
        self._propagator: Final = TraceContextTextMapPropagator()
        self._provider: Final = TracerProvider(
            resource=Resource.create({"service.name": config.service_name, "service.version": __version__}),
            sampler=ParentBased(TraceIdRatioBased(config.sample)),
            shutdown_on_exit=False,
        )
        self._provider.add_span_processor(BatchSpanProcessor(exporter))
        self._tracer: Final = self._provider.get_tracer("headstart", __version__)

    @contextmanager
    def request(self, name: str, context: dict[str, str]) -> Iterator[None]:
        """The span of a request within the caller's trace."""
        span = self._tracer.start_span(
            name, context=self._propagator.extract(context), kind=self._trace.SpanKind.SERVER
        )
        try:
            with _following(_Traced(self, span)):
                yield
        except BaseException as error:
            self.fail(span, error)
            raise
        finally:
            span.end()

    def start(self, name: str, parent: Any) -> Any:
        """A span within ``parent``."""
        return self._tracer.start_span(name, context=self._trace.set_span_in_context(parent))

    def headers(self, span: Any) -> dict[str, str]:
        """The context of ``span``."""
        carrier: dict[str, str] = {}
        self._propagator.inject(carrier, context=self._trace.set_span_in_context(span))
        return carrier

    def fail(self, span: Any, error: BaseException) -> None:
        """Of an error only the kind: its message may quote what was asked."""
        span.set_status(self._trace.StatusCode.ERROR, type(error).__name__)

    def shutdown(self) -> None:
        """Send what is left and end the thread."""
        self._provider.shutdown()
