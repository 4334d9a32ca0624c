"""The gateway as one object: replicas, request path, dispatch and statistics, composed and with one life."""

from __future__ import annotations

import asyncio
import hashlib
import secrets
import socket
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Final

import structlog

from engine.wire import EngineInfo
from gateway.accounting import Accounting
from gateway.admission import Admission
from gateway.attribution.live import LiveAttribution
from gateway.attribution.memory import TokenMemory
from gateway.canonical.learning.background import BackgroundLearning
from gateway.canonical.learning.learner import TemplateLearner
from gateway.canonical.learning.proposals import TemplateProposals
from gateway.config import DEFAULT_TENANT, ClassConfig, Config, TenantConfig, WhatIfConfig
from gateway.configuration import check_config, local_engines, remote_replicas, served_model_name
from gateway.errors import OverloadedError
from gateway.eviction import EvictionControl
from gateway.forwarding import Forwarder
from gateway.generation import Dispatcher, Generation
from gateway.identity import Authenticator
from gateway.large_bodies import LargeBodies
from gateway.learned_store import LearnedStore
from gateway.membership import Connect, Membership
from gateway.pins.ceiling import Ceiling
from gateway.pins.control import PinControl
from gateway.pins.prefix import PrefixReader
from gateway.pins.share import PinShare
from gateway.plan import Caller
from gateway.presence import Presence
from gateway.prompt import PromptRenderer
from gateway.quality.gate import QualityGate
from gateway.quality.report import QualityReport
from gateway.quality.shadows import Shadows
from gateway.replicas.base import Replica, ReplicaObserver, ReplicaState
from gateway.replicas.discovery import Discovery, Resolver, system_resolver
from gateway.replicas.engine import EngineReplica
from gateway.replicas.remote import RemoteReplicas
from gateway.replicas.supervisor import EngineLauncher, engine_command, require_engine_packages
from gateway.request_path import Fleet, RequestPath
from gateway.routing.router import Router
from gateway.stats.board import Board
from gateway.stats.recorder import TraceRecorder
from gateway.stats.statistics import Statistics
from gateway.stats.whatif import WhatIf
from gateway.template_store import TemplateStore
from gateway.tracing import Tracing

__all__ = ["Gateway", "configured_gateway"]

_log = structlog.get_logger("headstart.gateway")


class Gateway:
    """Everything that serves requests, short of HTTP. ``start`` and ``stop`` it on the event loop it works on.

    ``model`` is the name clients use, ``folder`` the Hugging Face folder with tokenizer and chat template.
    Owns its replicas and statistics.
    """

    def __init__(
        self,
        config: Config,
        *,
        model: str,
        folder: Path,
        replicas: Sequence[Replica],
        connect: Connect | None = None,
        resolve: Resolver = system_resolver,
    ) -> None:
        """Compose; nothing is started. ``connect`` makes the replicas that join later, by discovery or on request.

        Raises:
            ConfigError: The configuration or the model folder cannot be used.
        """
        check_config(config)
        self.config: Final = config
        self.model: Final = model
        self.folder: Final = folder
        self.started_at: Final = time.time()
        self.draining = False
        self.authenticator: Final = Authenticator(config)
        self.admission: Final = Admission(config, self.authenticator)
        self.renderer: Final = PromptRenderer(folder)
        secret = _secret(config)
        self.quality: Final = QualityGate(config.quality, model=model, secret=secret)
        self.statistics: Final = Statistics(
            config.redis,
            companions=(self.quality,),
            savings=config.savings,
            documents=config.attribution.documents,
        )
        self.router: Final = Router(self.statistics.prefill_cost, config.index)
        self.whatif: Final = self._ghosts(config.whatif) if config.whatif.enabled else None
        self.prompts: Final = TokenMemory(config.attribution.remembered_tokens)
        self.attribution: Final = LiveAttribution(self.prompts) if config.attribution.enabled else None
        self.tracing: Final = Tracing(config.tracing)
        self.learner: Final = TemplateLearner()
        self.learning: Final = BackgroundLearning(self.learner)
        self.learned: Final = LearnedStore(_file(config.learned_file), self.learner)
        self.proposals: Final = TemplateProposals(self.learner, config.canonical.hoist)
        self.path: Final = self._request_path(secret, self.renderer, self.router)
        self.large: Final = LargeBodies(
            lambda fleet: self._request_path(secret, self.renderer.apart(), fleet, beside=self.path), self.router
        )
        self.templates: Final = TemplateStore(_file(config.templates_file), self.path.templates)
        self.pins: Final = self._pins(secret)
        self.statistics.also_share(PinShare(self.pins))
        self.router.when_dispatching(self.pins.dispatched)
        # In this order: choices read cost curves, and pins look at what is held.
        observers: list[ReplicaObserver] = [self.statistics, self.router, self.pins]
        observers += [part for part in (self.attribution, self.whatif) if part is not None]
        self.membership: Final = Membership(
            replicas,
            router=self.router,
            statistics=self.statistics,
            observers=observers,
            discovery=Discovery(config, resolve=resolve),
            connect=connect,
            grace_s=config.server.drain_grace_s,
        )
        self.replicas: Final[Mapping[str, Replica]] = self.membership.replicas
        self.presence: Final = Presence(
            self.replicas, self.router, self.path.templates, secret=secret, lasting=config.secret is not None
        )
        self.statistics.also_share(
            Board("gateways", self.presence.write, self.presence.read, period_s=5 * config.redis.flush_interval_s)
        )
        self.eviction: Final = EvictionControl(self.replicas, config.engine.policy)
        self.recorder: Final = TraceRecorder(config.trace) if config.trace.folder is not None else None
        self.dispatcher: Final = Dispatcher(
            self.replicas,
            self.router,
            Accounting(
                self.statistics,
                self.attribution,
                elsewhere=self.router.held_elsewhere,
                holdout=config.savings.holdout,
            ),
            max_queue=config.limits.max_queue,
            timeout_s=config.limits.request_timeout_s,
            on_served=self._follow,
            on_load=lambda: self.shadows.arrived(),
        )
        self.shadows: Final = Shadows(
            self.replicas,
            active=lambda: self.dispatcher.active,
            busy=config.quality.busy,
            judge=self.quality.judge,
        )
        self.forwarder: Final = Forwarder(
            self.replicas,
            self.path,
            self.router,
            self.dispatcher,
            self.statistics,
            timeout_s=config.limits.request_timeout_s,
            attributed=self.attribution is not None,
        )
        self._when_draining: list[Callable[[], None]] = [self.shadows.close, self.pins.close]
        for replica in replicas:
            replica.observe(self.eviction)

    @property
    def info(self) -> EngineInfo | None:
        """What the replicas serve; None until one has been ready."""
        return next((replica.info for replica in self.replicas.values() if replica.info is not None), None)

    def service_class(self, caller: Caller) -> ClassConfig:
        """The class in which the caller's requests are scheduled."""
        return self.config.classes.get(caller.service_class) or ClassConfig()

    def tenant(self, caller: Caller) -> TenantConfig:
        """What is configured for the caller's tenant."""
        return self.config.tenants.get(caller.tenant) or TenantConfig()

    @property
    def ready_replicas(self) -> int:
        """How many replicas serve now; one that is drained serves nobody new."""
        return sum(
            replica.state is ReplicaState.READY and not self.router.view(id).draining
            for id, replica in self.replicas.items()
        )

    def quality_report(self) -> QualityReport:
        """What is known of the order of documents, by template."""
        return QualityReport(self.quality.report(), self.shadows.status)

    async def start(self) -> None:
        """Start statistics and replicas; returns without waiting for the replicas."""
        await self.statistics.start()
        if self.recorder is not None:
            await self.recorder.start()
        self.shadows.start()
        self.learned.start()
        await self.pins.start()
        await self.membership.start()

    async def wait_ready(self, timeout: float) -> None:
        """Return when every replica serves. Raises ``ReplicaUnavailable`` as soon as one cannot."""
        await asyncio.gather(*[replica.wait_ready(timeout) for replica in self.replicas.values()])

    def when_draining(self, callback: Callable[[], None]) -> None:
        """Call back when ``drain`` begins, to end what would go on for ever."""
        self._when_draining.append(callback)

    def drain(self) -> None:
        """Take no new requests; those in hand go on. Safe to repeat."""
        if not self.draining:
            self.draining = True
            for callback in self._when_draining:
                callback()

    def check_open(self) -> None:
        """Raises ``OverloadedError`` while the gateway is draining."""
        if self.draining:
            raise OverloadedError("The server is shutting down; try another one, or this one again later.")

    async def stop(self, grace: float = 0.0) -> None:
        """Drain, give requests in hand ``grace`` seconds, end everything. Safe to call when ``start`` has failed."""
        self.drain()
        await self.shadows.stop()
        await self.pins.stop()
        await self.membership.stop(grace)
        self.large.close()
        self.learning.close()
        await self.learned.stop()
        await self.statistics.stop()
        if self.recorder is not None:
            await self.recorder.stop()
        await self.tracing.stop()

    def _request_path(
        self, secret: bytes, renderer: PromptRenderer, fleet: Fleet, beside: RequestPath | None = None
    ) -> RequestPath:
        return RequestPath(
            model=self.model,
            secret=secret,
            canonical=self.config.canonical,
            templates=self.config.templates,
            renderer=renderer,
            router=fleet,
            learned=self.learner,
            order_rule=self.quality.decide,
            beside=beside,
        )

    def _ghosts(self, config: WhatIfConfig) -> WhatIf:
        return WhatIf(
            config,
            policy=lambda: self.eviction.policy,
            seconds=lambda replica_id, tokens: self.statistics.prefill_cost(replica_id).seconds(tokens, 0),
        )

    def _pins(self, secret: bytes) -> PinControl:
        def quota(tenant: str) -> int:
            return self.tenant(Caller(tenant)).max_cached_blocks

        return PinControl(
            self.router,
            PrefixReader(self.path, model=self.model, tools=self.renderer.supports_tools),
            configured=self.config.pins,
            file=_file(self.config.pins_file),
            secret=secret,
            lasting_keys=self.config.secret is not None,
            tenants={key.tenant for key in self.config.keys.values()} or {DEFAULT_TENANT},
            ceiling=Ceiling(self.config.limits.max_pinned_share, quota),
            quota=quota,
            templates_generation=lambda: self.path.templates.generation,
            writer=self.statistics.epoch,
        )

    def _follow(self, generation: Generation) -> None:
        """Let quality gate, learner, memory of prompts, ghost caches and recorder have a request that was answered."""
        self.quality.served(generation)
        self.shadows.offer(generation)
        plan = generation.plan
        replica = self.replicas.get(plan.replica_id)
        info = None if replica is None else replica.info
        if info is None or not (plan.use_cache or plan.held_out):
            return
        if plan.observation is not None:
            self.learning.observe(plan.observation.source, plan.observation.text)
        if self.attribution is None and plan.use_cache:
            self.prompts.remember(plan.root, plan.tokens, 0)
        if plan.sighting is not None:
            self.path.popularity.observe(plan.sighting)
        if self.whatif is not None and plan.use_cache:
            self.whatif.observe(plan.replica_id, plan.keys, generation.prompt_tokens, generation.cached_tokens or 0)
        if self.recorder is not None:
            self.recorder.record(
                plan.keys,
                input_length=generation.prompt_tokens,
                output_length=generation.completion_tokens,
                block_size=info.block_size,
                template=plan.template,
                tenant=plan.tenant,
            )


def configured_gateway(config: Config, folder: Path) -> Gateway:
    """A gateway over the engine processes and the remote replicas of ``config``, which serve the model in ``folder``.

    Raises:
        ConfigError: The configuration or the folder cannot be used, or engines are wanted and this Python runs none.
    """
    model = served_model_name(config.engine)
    replicas: list[Replica] = []
    if engines := local_engines(config):
        require_engine_packages()
        command = engine_command(config.engine, folder, model)
        mark = _mark(config)
        replicas += [EngineReplica(f"engine-{index}{mark}", EngineLauncher(command)) for index in range(engines)]
    remote = RemoteReplicas(folder, model, max_blocks=config.index.max_blocks, engine_secret=config.engine.secret)
    if servers := remote_replicas(config):
        replicas += [remote.connect(server) for server in servers]
    return Gateway(config, model=model, folder=folder, replicas=replicas, connect=remote.connect)


def _mark(config: Config) -> str:
    """What tells this gateway's engines from those of others, whose statistics they share: the same at every start."""
    if config.redis.url is None:
        return ""
    place = f"{socket.gethostname()}:{config.server.port}"
    return f"-{hashlib.sha256(place.encode()).hexdigest()[:4]}"


def _file(path: str | None) -> Path | None:
    return None if path is None else Path(path).expanduser()


def _secret(config: Config) -> bytes:
    """The deployment secret. Made up where none is configured: nobody else has to compute this gateway's keys."""
    if config.secret is not None:
        return config.secret.encode()
    if config.redis.url is not None:
        _log.warning(
            "no secret is configured: gateways that share replicas and statistics must share one, set `secret`"
        )
    return secrets.token_bytes(32)
