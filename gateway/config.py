"""The whole configuration as typed structs, and where its values come from.

Later sources win: defaults, ``headstart.toml`` (``--config``), environment ``HEADSTART__SECTION__KEY``, command line.
Unknown keys are errors that name the key, so that a typing mistake never passes in silence.
"""

from __future__ import annotations

from typing import Annotated, Any, Final, Literal

import msgspec
from msgspec import Meta

from engine.pool import MAX_PINNED_SHARE
from engine.tcp import LEAST_SECRET_CHARS

__all__ = [
    "DEFAULT_TENANT",
    "AdminConfig",
    "ApiKey",
    "AttributionConfig",
    "CanonicalConfig",
    "ClassConfig",
    "Config",
    "DiscoveryConfig",
    "DocumentFormat",
    "EngineConfig",
    "HoistMode",
    "IndexConfig",
    "LayoutConfig",
    "LimitsConfig",
    "OrderMode",
    "PinConfig",
    "QualityConfig",
    "QualityTemplateConfig",
    "RedisConfig",
    "ReplicaConfig",
    "SavingsConfig",
    "ServerConfig",
    "TemplateConfig",
    "TenantConfig",
    "TraceConfig",
    "TracingConfig",
    "WhatIfConfig",
]

OrderMode = Literal["preserve", "canonical", "popularity", "cache-aware"]
HoistMode = Literal["off", "declared", "suggest", "apply"]

DocumentFormat = Literal["langchain", "llama-index", "xml", "numbered"]
"""How an application pastes documents into its messages."""

DEFAULT_TENANT: Final = "default"
"""The only tenant there is without ``[keys]``."""

_Endpoint = Annotated[str, Meta(pattern=r"^(tcp://(\{host\}|\[[0-9A-Fa-f:.]+\]|[A-Za-z0-9._-]+):\d{1,5}|ipc:///.+)$")]
_Positive = Annotated[int, Meta(ge=1)]
_Share = Annotated[float, Meta(ge=0, le=1)]
_Alpha = Annotated[float, Meta(ge=1e-9, lt=1)]


class ServerConfig(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """``[server]``: where the gateway listens and how long a shutdown waits for running streams (seconds).

    ``trusted_proxies`` are addresses or networks whose ``X-Forwarded-For`` is believed where callers are counted.
    """

    host: str = "127.0.0.1"
    port: Annotated[int, Meta(ge=0, le=65535)] = 8000
    drain_grace_s: Annotated[float, Meta(ge=0)] = 30.0
    log_level: Literal["debug", "info", "warning", "error"] = "info"
    trusted_proxies: tuple[str, ...] = ()


class EngineConfig(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """``[engine]``: the local engines.

    ``model`` is a name of ``headstart model list``, a Hugging Face folder or a GGUF file (default: the default model,
    or what the ``replicas`` serve). ``served_name`` is the name clients use (default: the model's name). ``engines``
    are started: one by default, none where there are ``replicas``. ``kv_blocks`` 0 sizes the pool from free memory.
    ``device`` is ``cpu``, or ``cuda`` or ``cuda:N`` for a GPU. ``kv_dtype`` auto keeps the cache in ``dtype``.
    ``threads`` 0 shares the cores among the engines. ``max_batch_tokens`` is the token budget of a step
    (prefill chunks and decodes together); no more than ``max_running`` requests, nor than that many, run at once.
    ``secret`` is what engines that listen on TCP and their gateways must both know, 16 characters at least.
    """

    model: str | None = None
    served_name: str | None = None
    engines: Annotated[int, Meta(ge=0, le=64)] | None = None
    device: Annotated[str, Meta(pattern=r"^(cpu|cuda(:\d+)?)$")] = "cpu"
    dtype: Literal["auto", "float32", "bfloat16"] = "auto"
    kv_dtype: Literal["auto", "float32", "bfloat16", "int8"] = "auto"
    block_size: Annotated[int, Meta(ge=1, le=1024)] = 16
    kv_blocks: Annotated[int, Meta(ge=0)] = 0
    policy: str = "lru"
    max_batch_tokens: _Positive = 512
    max_running: _Positive = 32
    threads: Annotated[int, Meta(ge=0)] = 0
    secret: Annotated[str, Meta(min_length=LEAST_SECRET_CHARS)] | None = None


class ReplicaConfig(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """``[[replicas]]``: an OpenAI-compatible server (vLLM, SGLang, llama.cpp) that generates for this gateway.

    Or ``tcp://HOST:PORT``, a ``headstart engine``; its ``api_key`` is its secret, by default ``engine.secret``.
    ``url`` is its base, with or without ``/v1``; ``dns+http://NAME:PORT`` stands for every address behind the name.
    ``model`` is the name by which it serves the model (default: the only one it has), ``api_key`` the key it wants. An
    answer on which nothing comes for ``idle_timeout_s`` seconds after its beginning is given up.

    ``events`` is the ZeroMQ address at which a vLLM publishes its cache events (``--kv-events-config``), and
    ``events_replay`` the one at which it repeats those that were missed; ``{host}`` in them is the host of ``url``.
    Without them it is presumed that the server keeps what is sent to it. ``block_size`` is in tokens (default: what the
    server says of itself, else 16).
    """

    url: str
    model: str | None = None
    api_key: str | None = None
    idle_timeout_s: Annotated[float, Meta(gt=0)] = 60.0
    events: _Endpoint | None = None
    events_replay: _Endpoint | None = None
    block_size: Annotated[int, Meta(ge=1, le=65536)] | None = None


class IndexConfig(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """``[index]``: what the gateway keeps of the blocks that its replicas hold, to send requests where their prefix is.

    At most ``max_blocks`` are kept of each replica. An index of which less than the share ``min_precision`` of the
    predicted cached tokens comes true is not believed until it does again.
    """

    max_blocks: _Positive = 200_000
    min_precision: _Share = 0.5


class DiscoveryConfig(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """``[discovery]``: remote replicas that join and leave while the gateway serves.

    ``file`` lists them: one URL a line, or a list ``replicas`` in TOML (``.toml``), or a JSON list. It, and the
    addresses behind URLs that begin with ``dns+``, are looked up every ``interval_s`` seconds.
    """

    file: str | None = None
    interval_s: Annotated[float, Meta(ge=0.1)] = 5.0


class RedisConfig(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """``[redis]``: an own server (``url``), else a Valkey started beside the gateway on a private unix socket.

    ``url`` is ``redis://HOST:PORT/DB``, ``unix:///PATH``, ``redis+sentinel://HOST:PORT,HOST:PORT/SERVICE/DB`` or
    ``redis+cluster://HOST:PORT,HOST:PORT``, with ``rediss`` for TLS (see ``gateway.stats.connection``).
    ``prefix`` starts every key. ``flush_interval_s`` is how often totals are written.
    """

    url: str | None = None
    prefix: str = "headstart"
    flush_interval_s: Annotated[float, Meta(gt=0)] = 1.0


class CanonicalConfig(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """``[canonical]``: defaults for every request; templates and bodies may say otherwise.

    ``order`` is the order of documents. Whatever it is, the first ``keep_first`` and the last ``keep_last`` keep their
    places, and no other one moves further than ``max_displacement`` places. With ``hint`` a line behind structured
    documents that stand in another order gives their ids in the caller's.

    ``text`` is whether system texts are normalized (NFC, LF, no BOM, no trailing blanks). ``hoist`` is what happens
    with volatile fields: none is moved (``off``), those that templates declare (``declared``), the same while others
    are looked for and proposed (``suggest``), or those found are moved too (``apply``).
    """

    order: OrderMode = "cache-aware"
    keep_first: Annotated[int, Meta(ge=0)] = 0
    keep_last: Annotated[int, Meta(ge=0)] = 0
    max_displacement: Annotated[int, Meta(ge=0)] | None = None
    hint: bool = False
    hoist: HoistMode = "suggest"
    text: bool = True


class LayoutConfig(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """``[templates.NAME.layout]``: how structured documents and the question behind them are written.

    ``document`` has ``{id}`` and ``{text}``, mostly ``{title}``, and any attribute by its name; those that it does not
    name stand as lines before the text. ``question`` has ``{question}``. None for the usual form.
    """

    document: str | None = None
    question: str | None = None


class TemplateConfig(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """``[templates.NAME]``: a system prompt as its application writes it, ``{field}`` where values differ per request.

    A literal brace is written ``{{`` or ``}}``. Requests name the template in ``headstart.template`` or are
    recognised by their system text.

    ``documents`` says how the application pastes documents into a message: in the system message where ``system`` has
    ``{context}``, ``{context_str}`` or ``{documents}``, else in the last user message. ``document_separator`` is what
    it joins them with (``langchain``; default: a blank line). Such documents keep the caller's order unless ``order``
    is set; the numbers of a numbered list mean places, so that it always keeps it. ``keep_first``, ``keep_last``,
    ``max_displacement`` and ``hint`` are those of ``[canonical]``.

    ``repeat`` says what becomes of a document that stands in an earlier turn of the conversation, byte for byte: it is
    sent in ``full`` again, or the model is told to ``refer`` to it by its label.
    """

    system: str
    order: OrderMode | None = None
    keep_first: Annotated[int, Meta(ge=0)] | None = None
    keep_last: Annotated[int, Meta(ge=0)] | None = None
    max_displacement: Annotated[int, Meta(ge=0)] | None = None
    hint: bool | None = None
    hoist: HoistMode | None = None
    documents: DocumentFormat | None = None
    document_separator: Annotated[str, Meta(min_length=1)] | None = None
    layout: LayoutConfig | None = None
    repeat: Literal["full", "refer"] = "full"


class ApiKey(msgspec.Struct, frozen=True, forbid_unknown_fields=True, rename={"service_class": "class"}):
    """One entry of ``[keys]``: whom the key stands for."""

    tenant: Annotated[str, Meta(min_length=1, max_length=64, pattern=r"^[A-Za-z0-9._-]+$")]
    service_class: str = "default"


class ClassConfig(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """``[classes.NAME]``: a service class, which entries of ``[keys]`` name. ``default`` is there without an entry.

    The classes of lower ``priority`` go first; each has a priority of its own. Of a class at most ``max_running``
    answers are generated at once on each engine (0: as many as run at all); further requests wait.
    """

    priority: Annotated[int, Meta(ge=0, le=100)] = 0
    max_running: Annotated[int, Meta(ge=0)] = 0


class TenantConfig(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """``[tenants.NAME]``: what a tenant of ``[keys]`` may take, or the tenant ``default`` where there are no keys.

    At most ``max_cached_blocks`` of its blocks are kept on each engine (0: as many as there is room for).
    """

    max_cached_blocks: Annotated[int, Meta(ge=0)] = 0


class AdminConfig(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """``[admin]``: the SHA-256 (hex) of the key that guards ``/admin/*``; ``headstart hash-key`` prints it.

    ``replica_urls`` are the servers (``http://HOST:PORT``) that may be added through ``POST /admin/replicas``.
    """

    key_sha256: str | None = None
    replica_urls: tuple[str, ...] = ()


class TraceConfig(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """``[trace]``: a recording of the traffic for ``headstart simulate``: ids, lengths and times, no text.

    ``folder`` None records nothing. A file is packed when it has ``max_file_mb``; the newest ``files`` are kept.
    """

    folder: str | None = None
    max_file_mb: _Positive = 64
    files: _Positive = 8


class TracingConfig(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """``[tracing]``: traces of requests for OpenTelemetry (the extra ``otel``), a span for each stage, without text.

    ``endpoint`` is where they are sent by OTLP over HTTP (``http://localhost:4318/v1/traces``); None sends none.
    ``sample`` is the share of requests that are traced where their caller does not say. Whatever it is, a caller's
    trace context goes on to remote replicas.
    """

    endpoint: str | None = None
    service_name: Annotated[str, Meta(min_length=1)] = "headstart"
    sample: _Share = 1.0


class WhatIfConfig(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """``[whatif]``: which eviction policies and pool sizes (1 is the real one) are followed on live traffic.

    The policy in force is always followed. ``cpu_share`` is the part of a core that this may cost.
    """

    enabled: bool = True
    policies: tuple[str, ...] = ("lru", "s3fifo", "arc")
    sizes: tuple[Annotated[float, Meta(gt=0, le=16)], ...] = (0.5, 1.0, 2.0)
    cpu_share: Annotated[float, Meta(gt=0, le=1)] = 0.02


class AttributionConfig(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """``[attribution]``: why prompt tokens were not in the cache, token by token, while it happens.

    ``show_text``: ``GET /admin/misses`` shows the operator texts of prompts, else only their shape, letters and digits
    blotted out. ``remembered_tokens`` of recent prompts are kept to hold others against, 4 to 11 bytes each; with less
    of them than the caches hold, what was evicted counts as never seen. Of ``documents`` so many are kept apart in each
    span of time.
    """

    enabled: bool = True
    show_text: bool = False
    remembered_tokens: Annotated[int, Meta(ge=1024)] = 4_000_000
    documents: Annotated[int, Meta(ge=1, le=10_000)] = 128


class SavingsConfig(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """``[savings]``: how saved prefill time is checked, and what it is worth.

    ``holdout`` is the share of requests that are kept from the cache, so that estimates can be held against what is
    measured. ``gpu_hour_price`` is what an hour of a replica costs, in ``currency``; without it no money is shown.
    """

    holdout: _Share = 0.0
    gpu_hour_price: Annotated[float, Meta(gt=0)] | None = None
    currency: Annotated[str, Meta(pattern=r"^[A-Z]{3}$")] = "USD"


class QualityTemplateConfig(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """``[quality.templates.NAME]``: what is otherwise for a template; ``unregistered`` has a name too."""

    holdout: _Share | None = None
    sample: _Share | None = None
    alpha: _Alpha | None = None
    max_disagreement: _Share | None = None
    max_logprob_loss: _Share | None = None
    max_gold_loss: _Share | None = None


class QualityConfig(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """``[quality]``: how it is made sure that another order of documents harms no answers. Off by default.

    ``holdout`` is the share of conversations that keep the application's order, ``sample`` the share of reordered
    requests that are asked again in the application's order while at most ``busy`` requests are in hand. Reordering is
    switched off for a template whose answers are worse by more than the bounds: ``max_disagreement`` (1 - F1 of the
    words, beyond what the same prompt differs by itself), ``max_logprob_loss`` (nats per token), ``max_gold_loss``
    (share of requests with gold answers); 1 does not test. ``alpha`` is the probability of doing so for no reason.
    """

    holdout: _Share = 0.0
    sample: _Share = 0.0
    alpha: _Alpha = 0.05
    max_disagreement: _Share = 0.5
    max_logprob_loss: _Share = 0.25
    max_gold_loss: _Share = 0.05
    busy: Annotated[int, Meta(ge=0)] = 0
    templates: dict[str, QualityTemplateConfig] = {}


class PinConfig(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """``[[pins]]``: the beginning of prompts that is prefilled at every start of an engine and stays in its cache.

    Either what all requests of a ``template`` begin with that have these ``documents``, in this order, in front of all
    others, and these ``tools``. Or ``keys``, a chain of block keys (hex, first block first), as ``/v1/explain`` lists
    them. ``tenant`` may be left out where there is one alone. ``cache_salt`` is that of the requests, if they have one.
    """

    template: Annotated[str, Meta(min_length=1, max_length=128)] | None = None
    documents: Annotated[tuple[dict[str, Any], ...], Meta(max_length=1000)] = ()
    tools: Annotated[tuple[dict[str, Any], ...], Meta(max_length=1000)] = ()
    keys: Annotated[tuple[Annotated[str, Meta(max_length=64)], ...], Meta(max_length=65_536)] = ()
    tenant: Annotated[str, Meta(min_length=1, max_length=64)] | None = None
    cache_salt: Annotated[str, Meta(min_length=1, max_length=256)] | None = None


class LimitsConfig(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """``[limits]``: what callers may ask at most. ``max_queue`` requests may wait or run at once over all callers.

    ``requests_per_minute`` are let in of each tenant, or from each address where there are no keys, and as many wrong
    keys from each address; 0 is no limit. ``max_pinned_share`` is the part of each engine's cache that pins may take
    together.
    """

    max_body_bytes: _Positive = 8 * 1024 * 1024
    max_queue: _Positive = 1024
    requests_per_minute: Annotated[int, Meta(ge=0)] = 0
    request_timeout_s: Annotated[float, Meta(gt=0)] = 600.0
    max_pinned_share: Annotated[float, Meta(ge=0, le=MAX_PINNED_SHARE)] = MAX_PINNED_SHARE


class Config(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Everything ``headstart.toml`` can say. ``keys`` maps the SHA-256 (hex) of an API key to its owner.

    ``templates_file`` keeps the templates that are written through the API, ``learned_file`` those that were learned,
    ``pins_file`` the pins (default: they last as long as the gateway). ``secret`` is the deployment secret under which
    block keys are derived; gateways that share statistics must share it. An entry of ``replicas`` may be the URL alone.
    """

    server: ServerConfig = ServerConfig()
    engine: EngineConfig = EngineConfig()
    replicas: tuple[ReplicaConfig | str, ...] = ()
    discovery: DiscoveryConfig = DiscoveryConfig()
    index: IndexConfig = IndexConfig()
    redis: RedisConfig = RedisConfig()
    canonical: CanonicalConfig = CanonicalConfig()
    templates: dict[str, TemplateConfig] = {}
    templates_file: str | None = None
    learned_file: str | None = None
    pins: tuple[PinConfig, ...] = ()
    pins_file: str | None = None
    classes: dict[str, ClassConfig] = {}
    tenants: dict[str, TenantConfig] = {}
    keys: dict[str, ApiKey] = {}
    admin: AdminConfig = AdminConfig()
    limits: LimitsConfig = LimitsConfig()
    trace: TraceConfig = TraceConfig()
    whatif: WhatIfConfig = WhatIfConfig()
    attribution: AttributionConfig = AttributionConfig()
    savings: SavingsConfig = SavingsConfig()
    tracing: TracingConfig = TracingConfig()
    quality: QualityConfig = QualityConfig()
    secret: str | None = None
