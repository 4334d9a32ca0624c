"""A request's fields as vLLM reads them, and its events as outputs."""

from __future__ import annotations

import json
from typing import Any

import pytest

from engine.wire import Output, Sampling, TokenLogprobs
from gateway.errors import HeadstartError, InvalidRequestError, ReplicaRefusal
from gateway.replicas.base import CountedOutput, GenerationRequest
from gateway.replicas.openai_completion import AnswerReader, BrokenAnswer, FailedAnswer, completion_body, refusal

from .openai_mock import event, usage

ROOT = bytes(range(16))


def ask(n: int = 1, use_cache: bool = True, **sampling: Any) -> GenerationRequest:
    return GenerationRequest([1, 2, 3], ROOT, Sampling(**{"max_tokens": 5} | sampling), use_cache=use_cache, n=n)


def body(request: GenerationRequest) -> dict[str, Any]:
    return json.loads(completion_body("m", request, stream=True))


def read(reader: AnswerReader, *events: bytes) -> list[Output]:
    return [output for item in events for output in reader.read(item.removeprefix(b"data: ").strip())]


def test_every_value_is_given_so_that_no_server_takes_its_own() -> None:
    assert body(ask()) == {
        "model": "m",
        "prompt": [1, 2, 3],
        "n": 1,
        "max_tokens": 5,
        "temperature": 1.0,
        "top_p": 1.0,
        "top_k": -1,
        "min_p": 0.0,
        "presence_penalty": 0.0,
        "frequency_penalty": 0.0,
        "repetition_penalty": 1.0,
        "stop": [],
        "stop_token_ids": [],
        "ignore_eos": False,
        "min_tokens": 0,
        "cache_salt": "000102030405060708090a0b0c0d0e0f",
        "stream": True,
        "stream_options": {"include_usage": True},
    }


def test_what_is_asked_for_is_passed_on() -> None:
    wishes: dict[str, Any] = {
        "temperature": 0.5, "top_p": 0.9, "top_k": 40, "min_p": 0.1, "seed": 7, "ignore_eos": True, "min_tokens": 2,
        "presence_penalty": 0.1, "frequency_penalty": 0.2, "repetition_penalty": 1.2,
    }  # fmt: skip
    told = body(ask(3, **wishes, stop=("a", "b"), stop_token_ids=(4,), logit_bias=((8, -100.0),), logprobs=2))
    assert {name: told[name] for name in wishes} == wishes
    assert (told["n"], told["stop"], told["stop_token_ids"]) == (3, ["a", "b"], [4])
    assert told["logit_bias"] == {"8": -100.0}
    assert (told["logprobs"], told["return_tokens_as_token_ids"]) == (2, True)


def test_a_request_that_bypasses_the_cache_has_a_namespace_for_itself() -> None:
    salts = {body(ask(use_cache=False))["cache_salt"] for _ in range(3)}
    assert len(salts) == 3
    assert ROOT.hex() not in salts


@pytest.mark.parametrize(
    ("wish", "param"), [({"beam_width": 2}, "use_beam_search"), ({"prompt_logprobs": 0}, "prompt_logprobs")]
)
def test_what_such_servers_cannot_stream_is_refused_by_name(wish: dict[str, int], param: str) -> None:
    with pytest.raises(InvalidRequestError, match=param) as caught:
        completion_body("m", ask(**wish), stream=True)
    assert (caught.value.param, caught.value.code) == (param, "unsupported_parameter")


def test_text_goes_through_at_once_and_the_last_end_with_the_counts() -> None:
    reader = AnswerReader(ask(2))
    assert read(reader, event("a"), event("b", index=1)) == [Output(0, "a"), Output(0, "b", index=1)]
    assert read(reader, event("c", index=1, finish="stop")) == [Output(0, "c", finish_reason="stop", index=1)]
    assert read(reader, event("d", finish="length")) == [Output(0, "d")]
    done = reader.done
    assert not done
    assert read(reader, usage(4, cached=2), b"[DONE]", event("late")) == []
    assert reader.done
    assert reader.end() == CountedOutput(0, finish_reason="length", cached_tokens=2, completion_tokens=4)


def test_a_server_that_counts_nothing_is_counted_by_its_events() -> None:
    reader = AnswerReader(ask())
    read(reader, event("a"), event("b"), event("", finish="stop"))
    assert reader.end() == CountedOutput(0, finish_reason="stop", cached_tokens=None, completion_tokens=2)


@pytest.mark.parametrize(
    "events",
    [[], [event("a")], [event("a"), b"[DONE]"], [event("a", finish="stop")], [usage(3), b"[DONE]"]],
    ids=["empty", "cut", "done-too-early", "one-of-two", "counts-alone"],
)
def test_an_answer_without_all_its_ends_is_broken(events: list[bytes]) -> None:
    reader = AnswerReader(ask(2))
    read(reader, *events)
    with pytest.raises(BrokenAnswer):
        reader.end()


@pytest.mark.parametrize(
    "data",
    [b"", b"{", b"[]", b"null", b'{"choices": 3}', b'{"choices": [{"text": 1}]}', b'{"choices": [{"text": "\xff"}]}'],
)
def test_what_is_no_event_breaks_the_answer(data: bytes) -> None:
    with pytest.raises(BrokenAnswer):
        AnswerReader(ask()).read(data)


@pytest.mark.parametrize("index", [-1, 1])
def test_a_choice_that_nobody_asked_for_breaks_the_answer(index: int) -> None:
    with pytest.raises(BrokenAnswer):
        read(AnswerReader(ask()), event("a", index=index))


def test_errors_in_the_stream_are_the_callers_by_their_code_else_the_servers() -> None:
    with pytest.raises(ReplicaRefusal, match="too long") as caught:
        read(AnswerReader(ask()), event(error={"message": "too long", "type": "BadRequestError", "code": 400}))
    assert (caught.value.status, caught.value.type) == (400, "BadRequestError")
    for error in ({"message": "secret words", "code": 500}, {"message": "secret words"}):
        with pytest.raises(FailedAnswer) as failed:
            read(AnswerReader(ask()), event(error=error))
        assert "secret" not in str(failed.value)
    for reason in ("abort", "error"):
        with pytest.raises(FailedAnswer):
            read(AnswerReader(ask()), event(finish=reason))


def test_log_probabilities_are_read_by_token_id() -> None:
    told = {
        "tokens": ["token_id:5", "token_id:9"],
        "token_logprobs": [-0.5, -2.0],
        "top_logprobs": [{"token_id:5": -0.5, "token_id:6": -1.5}, {"token_id:9": -2.0, "token_id:3": -0.1}],
        "text_offset": [0, 1],
    }
    choice = {"index": 0, "text": "ab", "logprobs": told, "finish_reason": None}
    (output,) = read(AnswerReader(ask(logprobs=1)), event(choices=[choice]))
    assert output.token_ids == (5, 9)
    assert output.logprobs == (TokenLogprobs(5, -0.5, 1, ((5, -0.5),)), TokenLogprobs(9, -2.0, 2, ((3, -0.1),)))


@pytest.mark.parametrize("told", [None, {"tokens": [" a"], "token_logprobs": [-1.0]}, {"content": []}])
def test_log_probabilities_that_are_not_told_by_id_are_refused_by_name(told: Any) -> None:
    choice = {"index": 0, "text": " a", "logprobs": told, "finish_reason": None}
    with pytest.raises(InvalidRequestError, match="logprobs"):
        read(AnswerReader(ask(logprobs=0)), event(choices=[choice]))


@pytest.mark.parametrize(
    ("body", "retry_after", "expected"),
    [
        (b'{"error": {"message": "m", "type": "t", "param": "p", "code": "c"}}', "7", ("m", "t", "p", "c", 7)),
        (b'{"object": "error", "message": "m", "type": "t", "code": 422}', None, ("m", "t", None, None, None)),
        (b'{"error": {"message": "m", "code": 422}}', "soon", ("m", "invalid_request_error", None, None, None)),
    ],
)
def test_a_refusal_keeps_the_servers_words(body: bytes, retry_after: str | None, expected: tuple[Any, ...]) -> None:
    error = refusal(422, body, retry_after)
    assert (error.message, error.type, error.param, error.code, error.retry_after) == expected
    assert error.status == 422


@pytest.mark.parametrize("body", [b"", b"<html>", b'{"detail": []}', b"\xff"])
def test_a_refusal_without_words_says_so(body: bytes) -> None:
    error = refusal(413, body, None)
    assert isinstance(error, HeadstartError)
    assert (error.status, "413" in error.message) == (413, True)
