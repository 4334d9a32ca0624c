"""``/admin/pins``: prefixes that stay in the engines' caches. Whoever mounts the routes guards them."""

from __future__ import annotations

from typing import Annotated, Any, Final

import msgspec
from litestar import Request, Response, delete, get, post
from litestar.di import NamedDependency
from litestar.params import FromPath
from msgspec import Meta

from gateway.api.decoding import decode_body
from gateway.config import PinConfig
from gateway.errors import PayloadTooLargeError
from gateway.pins.report import PinReport, PinRow
from gateway.service import Gateway

__all__ = ["create_pin", "delete_pin", "list_pins"]

_MAX_BODY_BYTES: Final = 2 * 1024 * 1024
_MAX_TTL_S: Final = 10 * 366 * 86400


class PinBody(PinConfig, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """What a ``[[pins]]`` of the configuration can say, and after how many seconds it ends (never)."""

    ttl_s: Annotated[float, Meta(gt=0, le=_MAX_TTL_S)] | None = None


_body_decoder: Final = msgspec.json.Decoder(PinBody)


@get("/admin/pins", sync_to_thread=False)
def list_pins(gateway: NamedDependency[Gateway]) -> PinReport:
    """Every pin, and how it stands at every replica."""
    return gateway.pins.report()


@post("/admin/pins")
async def create_pin(gateway: NamedDependency[Gateway], request: Request[Any, Any, Any]) -> Response[PinRow]:
    """Pin a prefix: 201, or 200 where it was pinned before, whose end is now the given one."""
    data = await request.body()
    if len(data) > _MAX_BODY_BYTES:
        raise PayloadTooLargeError(f"Pins of more than {_MAX_BODY_BYTES} bytes are not taken.")
    body = decode_body(_body_decoder, data)
    wish = PinConfig(**{field: getattr(body, field) for field in PinConfig.__struct_fields__})
    row, created = await gateway.pins.create(wish, body.ttl_s)
    return Response(row, status_code=201 if created else 200)


@delete("/admin/pins/{id:str}", status_code=204)
async def delete_pin(gateway: NamedDependency[Gateway], id: FromPath[str]) -> None:
    """Give a pin up."""
    await gateway.pins.delete(id)
