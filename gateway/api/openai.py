"""``/v1/chat/completions`` and ``/v1/completions``: the hot path, on ASGI itself."""

from __future__ import annotations

import asyncio
import re
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import partial
from typing import Final, TypeVar

import msgspec
from litestar.types import ASGIApp, Receive, Scope, Send

from gateway.api.answers import AnswerFormat, ChatFormat, Choice, CompletionFormat, Shown, Usage
from gateway.api.decoding import decode_body
from gateway.api.errors import encode_error, error_headers, report_unexpected
from gateway.api.exchange import ClientGone, Exchange
from gateway.api.relay import relay
from gateway.api.validation import (
    Asked,
    chat_asked,
    check_chat,
    check_completion,
    completion_asked,
    sampling_for,
)
from gateway.errors import HeadstartError, MethodNotAllowedError, OverloadedError
from gateway.foreign import ForeignRequest, Route, foreign_request
from gateway.generation import Generation, Planner, Terms
from gateway.large_bodies import LARGE_BODY_BYTES
from gateway.plan import Caller
from gateway.request_path import single_prompt
from gateway.schema import ChatRequest, CompletionRequest, SamplingFields
from gateway.service import Gateway
from gateway.tracing import stage

__all__ = ["generation_routes"]

_Body = TypeVar("_Body", bound=SamplingFields)

_chat_decoder: Final = msgspec.json.Decoder(ChatRequest)
_completion_decoder: Final = msgspec.json.Decoder(CompletionRequest)
_UNPRINTABLE: Final = re.compile(r"[^\x20-\x7e]")


def generation_routes(gateway: Gateway) -> dict[str, ASGIApp]:
    """The two routes by path. They authenticate, name their answers and tell of errors by themselves."""
    return {
        "/v1/chat/completions": _route(gateway, "/v1/chat/completions", _chat),
        "/v1/completions": _route(gateway, "/v1/completions", _completion),
    }


def _route(gateway: Gateway, route: Route, read: _Reader) -> ASGIApp:
    async def answer(scope: Scope, receive: Receive, send: Send) -> None:
        exchange = Exchange(scope, receive, send)
        try:
            await _serve(gateway, exchange, route, read)
        except Exception as error:
            if exchange.started:
                raise
            await _refuse(
                exchange, error if isinstance(error, HeadstartError) else report_unexpected(error, exchange.id)
            )
        except asyncio.CancelledError:  # the server ends before the answer: this is the end of the task in any case
            if not exchange.started:
                await _refuse(exchange, OverloadedError("The server was stopped before it could answer; try again."))

    return answer


async def _refuse(exchange: Exchange, error: HeadstartError) -> None:
    headers = [(name.encode(), value.encode()) for name, value in error_headers(error).items()]
    await exchange.answer(headers, encode_error(error), error.status)


class _Job(msgspec.Struct, frozen=True):
    """A checked request: how to plan it, what to ask of the engine, how to write the answer."""

    body: SamplingFields
    asked: Asked
    planner: Planner
    format: AnswerFormat
    terms: Terms


_Reader = Callable[[Gateway, bytes, Caller], _Job]


def _chat(gateway: Gateway, data: bytes, caller: Caller) -> _Job:
    body = decode_body(_chat_decoder, data)
    check_chat(body, tools_supported=gateway.renderer.supports_tools)
    asked = chat_asked(body)
    path = gateway.large if len(data) > LARGE_BODY_BYTES else gateway.path
    return _Job(
        body,
        asked,
        lambda avoid: path.plan_chat(body, caller, avoid),
        ChatFormat(body.model, gateway.renderer.spellings, _shown(body, asked.logprobs)),
        _terms(gateway, caller, asked, whole=not body.stream),
    )


def _completion(gateway: Gateway, data: bytes, caller: Caller) -> _Job:
    body = decode_body(_completion_decoder, data)
    check_completion(body)
    asked = completion_asked(body)
    spellings, shown = gateway.renderer.spellings, _shown(body, body.logprobs)
    path = gateway.large if len(data) > LARGE_BODY_BYTES else gateway.path
    return _Job(
        body,
        asked,
        lambda avoid: path.plan_completion(body, caller, avoid),
        CompletionFormat(body.model, spellings, shown, partial(_prompt_text, gateway, body) if body.echo else None),
        _terms(gateway, caller, asked, whole=not body.stream),
    )


def _shown(body: SamplingFields, logprobs: int | None) -> Shown:
    with_usage = body.stream_options is not None and body.stream_options.include_usage
    return Shown(with_usage, logprobs, body.prompt_logprobs)


def _terms(gateway: Gateway, caller: Caller, asked: Asked, *, whole: bool) -> Terms:
    return Terms(
        asked.generated,
        gateway.service_class(caller),
        gateway.tenant(caller),
        prompt_only=asked.max_tokens == 0,
        whole=whole,
    )


def _prompt_text(gateway: Gateway, body: CompletionRequest, token_ids: Sequence[int]) -> str:
    """The text of a completion's prompt, as it was given where it was given as text."""
    prompt = single_prompt(body.prompt)
    return prompt if isinstance(prompt, str) else gateway.renderer.decode(token_ids)


async def _serve(gateway: Gateway, exchange: Exchange, route: Route, read: _Reader) -> None:
    """Answer one request. Errors before the first byte are raised."""
    if exchange.method != "POST":
        raise MethodNotAllowedError("Use POST.", allowed="POST")
    arrived = time.monotonic()
    peer = exchange.peer
    caller = gateway.admission.tenant(peer)
    gateway.check_open()
    with suppress(ClientGone), gateway.tracing.request("request", peer.headers):
        with stage("parse"):
            data = await exchange.body(gateway.config.limits.max_body_bytes)
            foreign, job = await _parsed(gateway, route, data, partial(read, gateway, data, caller))
        if foreign is not None:
            async with exchange.watch():
                await relay(gateway, exchange, foreign, data, caller, arrived)
        elif job is not None:
            async with exchange.watch():
                await _generate(gateway, exchange, job, arrived)


async def _parsed(
    gateway: Gateway, route: Route, data: bytes, read: Callable[[], _Job]
) -> tuple[ForeignRequest | None, _Job | None]:
    """A body as what can only be passed on, or as a job."""
    forwarder = gateway.forwarder
    forwards, only_text = forwarder.available, forwarder.only_text

    def parse() -> tuple[ForeignRequest | None, _Job | None]:
        foreign = foreign_request(route, data, only_text=only_text) if forwards else None
        return foreign, read() if foreign is None else None

    return await gateway.large.run(parse) if len(data) > LARGE_BODY_BYTES else parse()


async def _generate(gateway: Gateway, exchange: Exchange, job: _Job, arrived: float) -> None:
    body = job.body
    try:
        async with gateway.dispatcher.generate(
            job.planner,
            lambda plan, info: sampling_for(body, job.asked, plan.length, info),
            terms=job.terms,
            arrived=arrived,
        ) as generation:
            if job.format.shows_prompt:
                arguments = generation.plan.token_ids, generation.prompt_logprobs
                if generation.prompt_logprobs:
                    # In a thread: of a long prompt there are hundreds of thousands of them, all at once.
                    await asyncio.to_thread(job.format.take_prompt, *arguments)
                else:
                    job.format.take_prompt(*arguments)
            if body.stream:
                await _stream(exchange, generation, job.format)
            else:
                await _answer(exchange, generation, job.format, job.asked.n)
    except HeadstartError as error:
        if not exchange.started:
            raise
        await exchange.break_off(job.format.error_event(error))
    except asyncio.CancelledError:
        # Either the client has gone, and nothing can be sent, or the server ends before the answer did.
        if exchange.started:
            stopped = OverloadedError("The server was stopped before the answer was complete.")
            await exchange.break_off(job.format.error_event(stopped))
        raise
    except Exception as error:
        if not exchange.started:
            raise
        await exchange.break_off(job.format.error_event(report_unexpected(error, exchange.id)))


async def _answer(exchange: Exchange, generation: Generation, format: AnswerFormat, shown: int) -> None:
    choices = [Choice() for _ in range(generation.n)]
    async for output in generation:
        choices[output.index].add(output, format.logprobs(output.index, output.logprobs))
    if shown < generation.n:
        # The best have the highest log-probability per token, as OpenAI documents it; of equals the first drawn.
        choices = sorted(choices, key=lambda choice: choice.mean_logprob, reverse=True)[:shown]
    await exchange.answer(_headers(generation), format.whole(choices, _usage(generation)))


async def _stream(exchange: Exchange, generation: Generation, format: AnswerFormat) -> None:
    exchange.start_events(_headers(generation))
    begun = False
    events = b"".join([format.opening_event(index) for index in range(generation.n)])
    async for output in generation:
        logprobs = format.logprobs(output.index, output.logprobs) if output.logprobs else None
        if output.text or logprobs:
            events += format.text_event(output.index, output.text, logprobs)
        if output.finish_reason is not None:
            events += format.finish_event(output.index, output.finish_reason)
        if generation.ended:
            await exchange.end_events(events + format.closing_events(_usage(generation)))
        elif events or not begun:
            if not begun or not exchange.send_at_once(events):
                await exchange.send_events(events)
            events, begun = b"", True


def _usage(generation: Generation) -> Usage:
    return Usage.of(
        prompt=generation.prompt_tokens, cached=generation.cached_tokens, completion=generation.completion_tokens
    )


def _headers(generation: Generation) -> list[tuple[bytes, bytes]]:
    plan = generation.plan
    headers = [
        (b"x-headstart-replica", plan.replica_id.encode()),
        (b"x-headstart-prompt-tokens", b"%d" % generation.prompt_tokens),
        (b"x-headstart-order", plan.order.encode()),
    ]
    if generation.cached_tokens is not None:  # a remote replica tells at the end, which a stream's headers cannot await
        headers.append((b"x-headstart-cached-tokens", b"%d" % generation.cached_tokens))
    if plan.note is not None:
        headers.append((b"x-headstart-note", _UNPRINTABLE.sub("?", plan.note).encode()))
    return headers
