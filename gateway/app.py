"""The web application: every route, who may call it, and how errors look."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from litestar import Litestar, Router, asgi
from litestar.datastructures import State
from litestar.di import Provide
from litestar.types import ASGIApp, Receive, Scope, Send

from gateway.api.access import for_operator, for_tenants, for_tenants_and_operator
from gateway.api.errors import EXCEPTION_HANDLERS
from gateway.api.eviction import set_policy, show_policy, show_whatif
from gateway.api.exchange import name_response
from gateway.api.explain import explain_chat
from gateway.api.health import health, ready, version
from gateway.api.learned import list_proposals, switch_proposal
from gateway.api.models import detokenize, list_models, show_model, tokenize
from gateway.api.openai import generation_routes
from gateway.api.operations import reset_cache
from gateway.api.pins import create_pin, delete_pin, list_pins
from gateway.api.quality import show_quality, switch_quality
from gateway.api.replicas import add_replica, drain_replica, list_replicas, remove_replica, resume_replica
from gateway.api.statistics import (
    admin_documents,
    admin_misses,
    admin_prefixes,
    admin_requests,
    admin_stats,
    prometheus,
)
from gateway.api.templates import create_template, delete_template, list_templates, show_template
from gateway.canonical.learning.proposals import TemplateProposals
from gateway.dashboard import routes as dashboard
from gateway.dashboard.feed import Feed
from gateway.learned_store import LearnedStore
from gateway.pins.metrics import PinsCollector
from gateway.service import Gateway
from gateway.stats.index_metrics import IndexCollector
from gateway.stats.metrics import (
    DispatchCollector,
    Exposition,
    LearningCollector,
    OrderingCollector,
    PromptsCollector,
    QualityCollector,
)
from gateway.stats.statistics import Statistics

__all__ = ["asgi_app", "create_app"]


def asgi_app(gateway: Gateway) -> ASGIApp:
    """``create_app``, with a short way to the routes on which a framework's routing would be a tenth of the cost."""
    app, shortcuts = create_app(gateway), generation_routes(gateway)

    async def dispatch(scope: Scope, receive: Receive, send: Send) -> None:
        await (shortcuts.get(scope.get("path", ""), app))(scope, receive, send)

    return dispatch


def create_app(gateway: Gateway) -> Litestar:
    """The ASGI application of ``gateway``, which it starts and stops with its own life."""
    feed = Feed(gateway.statistics, gateway.eviction, gateway.whatif, gateway.quality_report)
    gateway.when_draining(feed.close)

    @asynccontextmanager
    async def live(_app: Litestar) -> AsyncIterator[None]:
        try:
            await gateway.start()
            yield
        finally:
            await gateway.stop()

    def provide_gateway() -> Gateway:
        return gateway

    def provide_statistics() -> Statistics:
        return gateway.statistics

    def provide_exposition() -> Exposition:
        return Exposition(
            gateway.statistics,
            LearningCollector(gateway.learner),
            OrderingCollector(gateway.path, gateway.router),
            IndexCollector(gateway.router.index, gateway.replicas.values),
            PromptsCollector(gateway.prompts),
            QualityCollector(gateway.quality_report),
            PinsCollector(gateway.pins),
            DispatchCollector(gateway.dispatcher),
        )

    def provide_proposals() -> TemplateProposals:
        return gateway.proposals

    def provide_learned() -> LearnedStore:
        return gateway.learned

    def provide_feed() -> Feed:
        return feed

    tenants = Router(
        "/", route_handlers=[list_models, show_model, tokenize, detokenize, explain_chat], guards=[for_tenants]
    )
    readers = Router("/", route_handlers=[list_templates, show_template], guards=[for_tenants_and_operator])
    operator = Router(
        "/",
        route_handlers=[
            admin_stats,
            admin_misses,
            admin_documents,
            admin_prefixes,
            admin_requests,
            prometheus,
            list_replicas,
            add_replica,
            remove_replica,
            drain_replica,
            resume_replica,
            reset_cache,
            show_policy,
            set_policy,
            show_whatif,
            show_quality,
            switch_quality,
            create_template,
            delete_template,
            list_proposals,
            switch_proposal,
            list_pins,
            create_pin,
            delete_pin,
            dashboard.events,
        ],
        guards=[for_operator],
    )
    public = (health, ready, version, dashboard.front_door, dashboard.page, dashboard.asset)
    return Litestar(
        # The generation routes authenticate, name their answers and tell of errors by themselves.
        route_handlers=[
            *[asgi(path, copy_scope=False)(answer) for path, answer in generation_routes(gateway).items()],
            Router("/", route_handlers=[tenants, readers, operator, *public], middleware=[name_response]),
        ],
        dependencies={
            "gateway": Provide(provide_gateway, sync_to_thread=False),
            "statistics": Provide(provide_statistics, sync_to_thread=False),
            "exposition": Provide(provide_exposition, sync_to_thread=False),
            "proposals": Provide(provide_proposals, sync_to_thread=False),
            "learned": Provide(provide_learned, sync_to_thread=False),
            "feed": Provide(provide_feed, sync_to_thread=False),
        },
        state=State({"gateway": gateway}),
        exception_handlers=EXCEPTION_HANDLERS,
        lifespan=[live],
        request_max_body_size=gateway.config.limits.max_body_bytes,
        openapi_config=None,
        logging_config=None,
    )
