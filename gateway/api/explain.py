"""``/v1/explain``: what would become of a chat request, without generating."""

from __future__ import annotations

from typing import Any, Final

import msgspec
from litestar import Request, post
from litestar.di import NamedDependency

from gateway.api.access import calling_tenant
from gateway.api.decoding import decode_body
from gateway.api.validation import check_chat
from gateway.explanation import Explanation, explain
from gateway.schema import ChatRequest
from gateway.service import Gateway

__all__ = ["explain_chat"]

_decoder: Final = msgspec.json.Decoder(ChatRequest)


@post("/v1/explain", status_code=200)
async def explain_chat(gateway: NamedDependency[Gateway], request: Request[Any, Any, Any]) -> Explanation:
    """Explain a body of ``/v1/chat/completions``. Nothing is counted, learned or remembered of it."""
    body = decode_body(_decoder, await request.body())
    check_chat(body, tools_supported=gateway.renderer.supports_tools)
    gateway.path.check_model(body.model)
    weighed = gateway.path.weigh_chat(body, calling_tenant(request))
    use_cache = body.headstart is None or not body.headstart.bypass
    return explain(weighed, gateway.prompts, gateway.renderer, use_cache=use_cache)
