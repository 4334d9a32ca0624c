"""What is served: ``/v1/models``, ``/tokenize`` and ``/detokenize``, the last two in vLLM's shapes."""

from __future__ import annotations

import asyncio
from typing import Annotated, Any, Final

import msgspec
from litestar import Request, get, post
from litestar.di import NamedDependency
from litestar.params import FromPath
from msgspec import Meta

from gateway.api.access import calling_tenant
from gateway.api.decoding import decode_body
from gateway.errors import InvalidRequestError, PayloadTooLargeError
from gateway.schema import MAX_DOCUMENTS, ChatMessage, ChatRequest, HeadstartOptions
from gateway.service import Gateway

__all__ = ["detokenize", "list_models", "show_model", "tokenize"]

_MAX_BODY_BYTES: Final = 1024 * 1024
"""Nothing ends early here as it does in front of an engine: a megabyte takes a quarter of a second, and tokens of 8 MB
would take a gigabyte of memory."""


class ModelCard(msgspec.Struct, frozen=True):
    """One served model. ``max_model_len`` is the enforced limit of prompt plus output, null until an engine is up."""

    id: str
    created: int
    root: str
    max_model_len: int | None
    object: str = "model"
    owned_by: str = "headstart"
    parent: None = None


class ModelList(msgspec.Struct, frozen=True):
    """All served models."""

    data: list[ModelCard]
    object: str = "list"


class TokenizeRequest(msgspec.Struct, frozen=True):
    """A text, or a chat, which is laid out as for generation with its documents in the caller's order."""

    model: str | None = None
    prompt: str | None = None
    messages: list[ChatMessage] | None = None
    add_special_tokens: bool = True
    documents: Annotated[list[dict[str, Any]], Meta(max_length=MAX_DOCUMENTS)] | None = None
    tools: list[dict[str, Any]] | None = None
    headstart: HeadstartOptions | None = None


class TokenizeResponse(msgspec.Struct, frozen=True):
    """The ids and how many there are."""

    count: int
    max_model_len: int | None
    tokens: list[int]
    token_strs: None = None


class DetokenizeRequest(msgspec.Struct, frozen=True):
    """Token ids."""

    tokens: list[int]
    model: str | None = None


class DetokenizeResponse(msgspec.Struct, frozen=True):
    """Their text."""

    prompt: str


_tokenize_decoder: Final = msgspec.json.Decoder(TokenizeRequest)
_detokenize_decoder: Final = msgspec.json.Decoder(DetokenizeRequest)


@get("/v1/models", sync_to_thread=False)
def list_models(gateway: NamedDependency[Gateway]) -> ModelList:
    """The served model."""
    return ModelList([_card(gateway)])


@get("/v1/models/{model:path}", sync_to_thread=False)
def show_model(gateway: NamedDependency[Gateway], model: FromPath[str]) -> ModelCard:
    """One model by its name, which may hold slashes."""
    gateway.path.check_model(model.removeprefix("/"))
    return _card(gateway)


@post("/tokenize", status_code=200)
async def tokenize(gateway: NamedDependency[Gateway], request: Request[Any, Any, Any]) -> TokenizeResponse:
    """Token ids of a text or a chat."""
    body = decode_body(_tokenize_decoder, await _small_body(request))
    if body.model is not None:
        gateway.path.check_model(body.model)
    if (body.prompt is None) == (body.messages is None):
        raise InvalidRequestError("Give either prompt or messages.", param="prompt")
    if body.prompt is not None:
        # The tokenizer is immutable and lets go of the interpreter while it works.
        tokens = await asyncio.to_thread(gateway.renderer.encode, body.prompt, body.add_special_tokens)
    else:
        tokens = gateway.path.tokenize_chat(
            ChatRequest(
                model=gateway.model,
                messages=body.messages or [],
                documents=body.documents,
                tools=body.tools,
                headstart=body.headstart,
            ),
            calling_tenant(request),
        )
    return TokenizeResponse(len(tokens), _max_model_len(gateway), tokens)


@post("/detokenize", status_code=200)
async def detokenize(gateway: NamedDependency[Gateway], request: Request[Any, Any, Any]) -> DetokenizeResponse:
    """Text of token ids."""
    body = decode_body(_detokenize_decoder, await _small_body(request))
    if body.model is not None:
        gateway.path.check_model(body.model)
    return DetokenizeResponse(gateway.renderer.decode(body.tokens))


async def _small_body(request: Request[Any, Any, Any]) -> bytes:
    data = await request.body()
    if len(data) > _MAX_BODY_BYTES:
        raise PayloadTooLargeError(f"Bodies of more than {_MAX_BODY_BYTES} bytes are not taken here.")
    return data


def _card(gateway: Gateway) -> ModelCard:
    return ModelCard(gateway.model, int(gateway.started_at), str(gateway.folder), _max_model_len(gateway))


def _max_model_len(gateway: Gateway) -> int | None:
    return None if gateway.info is None else gateway.info.max_model_len
