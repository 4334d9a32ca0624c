"""The operator's view of the quality gate: what is known of each template's order, and the switch."""

from __future__ import annotations

from typing import Any, Final

import msgspec
from litestar import Request, get, post
from litestar.di import NamedDependency
from litestar.params import FromPath

from gateway.api.decoding import decode_body
from gateway.quality.gate import TemplateQuality
from gateway.quality.report import QualityReport
from gateway.service import Gateway

__all__ = ["show_quality", "switch_quality"]


class SwitchBody(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Whether documents may be reordered."""

    reordering: bool


_body_decoder: Final = msgspec.json.Decoder(SwitchBody)


@get("/admin/quality", sync_to_thread=False)
def show_quality(gateway: NamedDependency[Gateway]) -> QualityReport:
    """Verdicts, intervals, and what reordering earns."""
    return gateway.quality_report()


@post("/admin/quality/{template:str}", status_code=200)
async def switch_quality(
    gateway: NamedDependency[Gateway], request: Request[Any, Any, Any], template: FromPath[str]
) -> TemplateQuality:
    """Switch reordering on for a template, which begins a new test, or off."""
    body = decode_body(_body_decoder, await request.body())
    return gateway.quality.switch(template, reordering=body.reordering)
