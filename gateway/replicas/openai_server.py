"""An OpenAI-compatible server as seen over HTTP: what it serves, whether it is well, how a completion is asked for."""

from __future__ import annotations

import asyncio
import contextlib
import os
import re
from typing import Any, Final, TypeVar

import aiohttp
import msgspec

from gateway import __version__
from gateway.config import ReplicaConfig
from gateway.replicas.http_client import AnswerCut, HttpClient, header_lines
from gateway.replicas.tokenizer_proof import TokenizerProof
from gateway.tracing import trace_headers

__all__ = [
    "COMPLETIONS",
    "EVENTS",
    "ModelCard",
    "OpenAIServer",
    "ServedModel",
    "ServerGone",
    "ServerUnfit",
    "words_for",
]

_T = TypeVar("_T")

COMPLETIONS: Final = "/v1/completions"
EVENTS: Final = {"content-type": "application/json", "accept": "text/event-stream"}
"""Headers of a request for a streamed answer."""

_WHOLE: Final = {"content-type": "application/json", "accept": "application/json"}

_AGENT: Final = {"user-agent": f"headstart/{__version__}"}

_PROBE_TIMEOUT_S: Final = 3.0
_CONNECT_TIMEOUT_S: Final = 4.0
_KEEP_ALIVE_S: Final = 4.0
"""Shorter than the five seconds after which uvicorn, on which vLLM and SGLang run, closes an idle connection."""

_MAX_PROBE_BYTES: Final = 1024 * 1024
_MISSING: Final = (404, 405, 501)
_UNAVAILABLE: Final = 503

_CACHE_CONFIG: Final = re.compile(rb"^vllm:cache_config_info\{([^}]*)\}", re.MULTILINE)
_NUMBER_LABEL: Final = re.compile(rb'(\w+)="(\d{1,9})"')


class ServerUnfit(Exception):
    """Why the server cannot be used (now), in words an operator can act on."""


class ServerGone(ServerUnfit):
    """Connections are refused there or break off: whoever took them has ended, or cannot be reached any more."""


class ModelCard(msgspec.Struct, frozen=True):
    """A model in ``/v1/models``. ``root`` is where the server has it from, as it says: often a hub id or a folder."""

    id: str
    root: str | None = None
    parent: str | None = None
    max_model_len: int | None = None


class ServedModel(msgspec.Struct, frozen=True):
    """What is known of a model before the first request.

    ``max_model_len`` bounds prompt and output together, in tokens. ``proved`` tells whether the server's tokenizer was
    shown to be ours; where it is False the server offers no way to find out. ``blocks`` of ``block_size`` tokens are
    in its cache; both 0 where it does not tell.
    """

    card: ModelCard
    max_model_len: int
    proved: bool
    block_size: int = 0
    blocks: int = 0


class _Cards(msgspec.Struct, frozen=True):
    data: list[ModelCard]


class _Slot(msgspec.Struct, frozen=True):
    n_ctx: int


class _Properties(msgspec.Struct, frozen=True):
    default_generation_settings: _Slot


class _Tokens(msgspec.Struct, frozen=True):
    tokens: list[int]


class OpenAIServer:
    """Speaks HTTP to one server. Owns its connections; made and closed on the event loop it works on."""

    def __init__(self, config: ReplicaConfig) -> None:
        headers = {"accept-encoding": "identity"}
        if config.api_key is not None:
            headers["authorization"] = f"Bearer {config.api_key}"
        self._config: Final = config
        self.client: Final = HttpClient(
            config.url,
            headers,
            connect_timeout_s=_CONNECT_TIMEOUT_S,
            keep_alive_s=_KEEP_ALIVE_S,
        )
        """For requests; whoever looks at the server now and then has a client with all comforts."""
        self._streamed: Final = self.client.head(COMPLETIONS, (_AGENT | EVENTS).items())
        self._whole: Final = self.client.head(COMPLETIONS, (_AGENT | _WHOLE).items())
        self._session: Final = aiohttp.ClientSession(
            connector=aiohttp.TCPConnector(limit=0, keepalive_timeout=_KEEP_ALIVE_S),
            timeout=aiohttp.ClientTimeout(total=None, sock_connect=_CONNECT_TIMEOUT_S),
            headers=headers,
            cookie_jar=aiohttp.DummyCookieJar(),
        )

    def head(self, route: str, headers: dict[str, str]) -> bytes:
        """The head of a request to ``route``."""
        return self.client.head(route, (_AGENT | headers | trace_headers()).items())

    def completion_head(self, *, stream: bool) -> bytes:
        """The head of a request for a completion."""
        head, traced = self._streamed if stream else self._whole, trace_headers()
        return head + header_lines(traced.items()) if traced else head

    async def look(self, wanted: str) -> ModelCard:
        """The model that requests are for, when the server is well.

        ``wanted`` is the name to prefer when it serves several models and none is configured.

        Raises:
            ServerUnfit: It cannot be reached, is not well, or serves something else.
        """
        status, _ = await self._ask("GET", "/health")
        if status != 200 and status not in _MISSING:
            raise self._unwell(status, "/health")
        return self._choose((await self._read("/v1/models", _Cards)).data, wanted)

    async def identify(self, card: ModelCard, proof: TokenizerProof) -> ServedModel:
        """What has to be known of the model of ``card``.

        Raises:
            ServerUnfit: The server does not say how long its context is, or reads text in another way than ``proof``.
        """
        limit = card.max_model_len or await self._context_length()
        return ServedModel(card, limit, await self._proves(card.id, proof), *await self._cache_geometry())

    async def close(self) -> None:
        """End all connections."""
        self.client.close()
        await self._session.close()

    # --- inside ------------------------------------------------------------------------------------------

    def _choose(self, cards: list[ModelCard], wanted: str) -> ModelCard:
        config = self._config
        models = {card.id: card for card in cards}
        if not models:
            raise ServerUnfit(f"{config.url} serves no model yet: its list in /v1/models is empty")
        if config.model is not None:
            if config.model in models:
                return models[config.model]
            raise ServerUnfit(f"{config.url} does not serve {config.model!r} but {_names(models)}")
        if wanted in models:
            return models[wanted]
        bases = [card for card in cards if card.parent is None]
        if len(bases) != 1:
            raise ServerUnfit(f"{config.url} serves {_names(models)}: say in [[replicas]] which model is meant")
        return bases[0]

    async def _context_length(self) -> int:
        """From llama.cpp's ``/props``; vLLM and SGLang say it with the model.

        So does another gateway, but not before an engine of its own is ready; it is well and names its model till then.
        """
        status, data = await self._ask("GET", "/props")
        if status == 200:
            with contextlib.suppress(ServerUnfit):
                return self._decode(data, _Properties, "/props").default_generation_settings.n_ctx
        readiness, _ = await self._ask("GET", "/ready")
        for path, answered in (("/props", status), ("/ready", readiness)):
            if answered == _UNAVAILABLE:
                raise self._unwell(answered, path)
        raise ServerUnfit(f"{self._config.url} does not say how long a context it takes (max_model_len in /v1/models)")

    async def _cache_geometry(self) -> tuple[int, int]:
        """Tokens per block and number of blocks, from vLLM's metrics; 0 each where they do not tell."""
        status, data = await self._ask("GET", "/metrics")
        told = _CACHE_CONFIG.search(data) if status == 200 else None
        labels = dict(_NUMBER_LABEL.findall(told[1])) if told else {}
        return int(labels.get(b"block_size", 0)), int(labels.get(b"num_gpu_blocks", 0))

    async def _proves(self, model: str, proof: TokenizerProof) -> bool:
        # vLLM's names of the fields and llama.cpp's.
        asked = {"model": model, "prompt": proof.text, "add_special_tokens": False}
        asked |= {"content": proof.text, "add_special": False}
        status, data = await self._ask("POST", "/tokenize", msgspec.json.encode(asked))
        if status in _MISSING:
            return False
        if status == 200 and self._decode(data, _Tokens, "/tokenize").tokens == proof.token_ids:
            return True
        if status == 200:
            raise ServerUnfit(
                f"{self._config.url} reads text with another tokenizer than this gateway: "
                f"give with --model the folder of the model that it serves, {model!r}"
            )
        raise self._unwell(status, "/tokenize")

    async def _read(self, path: str, kind: type[_T]) -> _T:
        status, data = await self._ask("GET", path)
        if status != 200:
            raise self._unwell(status, path)
        return self._decode(data, kind, path)

    def _unwell(self, status: int, path: str) -> ServerUnfit:
        if status == _UNAVAILABLE:
            return ServerUnfit(
                f"{self._config.url} is not ready: it answers {status} to {path}, as servers do that load their model"
            )
        return ServerUnfit(f"{self._config.url} answers {status} to {path}")

    def _decode(self, data: bytes, kind: type[_T], path: str) -> _T:
        try:
            return msgspec.json.decode(data, type=kind)
        except (msgspec.DecodeError, UnicodeDecodeError):
            raise ServerUnfit(f"{self._config.url} answers {path} as no OpenAI-compatible server does") from None

    async def _ask(self, method: str, path: str, body: bytes | None = None) -> tuple[int, bytes]:
        headers = {} if body is None else {"content-type": "application/json"}
        url = self._config.url + path
        try:
            async with asyncio.timeout(_PROBE_TIMEOUT_S):
                request: Any = self._session.request(method, url, data=body, headers=headers, allow_redirects=False)
                async with request as response:
                    return response.status, await _bounded(response)
        except (aiohttp.ClientError, OSError) as error:  # a time-out is an OSError
            kind = ServerGone if _is_gone(error) else ServerUnfit
            raise kind(f"{self._config.url} cannot be reached: {words_for(error)}") from None


async def _bounded(response: aiohttp.ClientResponse) -> bytes:
    """The body; one that goes on and on is cut, and will not be read as JSON then."""
    data = b""
    while len(data) < _MAX_PROBE_BYTES and (piece := await response.content.readany()):
        data += piece
    return data


def _is_gone(error: Exception) -> bool:
    """Whether the connection was refused or broken off; a slow server, or one whose name is not found, may be there."""
    if isinstance(error, TimeoutError | aiohttp.ClientConnectorDNSError | aiohttp.ClientSSLError):
        return False
    return isinstance(error, aiohttp.ClientConnectionError | ConnectionError)


def words_for(error: Exception) -> str:
    """Why a connection failed, without a word of what went over it."""
    if isinstance(error, TimeoutError):
        return "it does not answer"
    if isinstance(error, aiohttp.ClientPayloadError | AnswerCut):
        return "the connection was lost in the middle of an answer"
    refused = isinstance(error, ConnectionRefusedError | aiohttp.ClientConnectorError)
    if isinstance(error, aiohttp.ServerDisconnectedError | aiohttp.ClientOSError | ConnectionError) and not refused:
        return "the connection was lost"
    cause = error.os_error if isinstance(error, aiohttp.ClientConnectorError) else error
    if isinstance(cause, OSError):
        number = cause.errno or 0  # below 0 it is the resolver's own
        if number > 0:
            return os.strerror(number)
        # What the loop itself says of several addresses that were tried in vain names them.
        return str(cause.strerror or "it takes no connection")
    return type(error).__name__


def _names(models: dict[str, ModelCard]) -> str:
    return ", ".join(map(repr, sorted(models)))
