"""The routes of the dashboard: the page and its files (public, no data in them) and the event stream (the operator's).

Who opens the gateway's bare address in a browser is led to the page.

Whoever mounts ``events`` guards it like ``/admin/*``; it takes a dependency named ``feed``.
"""

from __future__ import annotations

import hashlib
import mimetypes
from importlib.resources import files
from typing import Any, Final, NamedTuple

from litestar import HttpMethod, Request, Response, get, route
from litestar.datastructures import State
from litestar.di import NamedDependency
from litestar.exceptions import NotFoundException
from litestar.params import FromPath, FromQuery
from litestar.response import Redirect, Stream

from gateway.dashboard.feed import Feed, Window

__all__ = ["CONTENT_SECURITY_POLICY", "asset", "events", "front_door", "page"]

CONTENT_SECURITY_POLICY: Final = (
    "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self' data:; connect-src 'self'; "
    "base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
)

_HEADERS: Final = {
    "content-security-policy": CONTENT_SECURITY_POLICY,
    "x-content-type-options": "nosniff",
    "referrer-policy": "no-referrer",
    "cache-control": "no-cache",  # asked again each time, answered with 304: a new version shows at once
}
_READ: Final = [HttpMethod.GET, HttpMethod.HEAD]
_SERVED: Final = (".html", ".css", ".js", ".svg")


class _File(NamedTuple):
    body: bytes
    media_type: str
    etag: str


def _load() -> dict[str, _File]:
    """The files of the page by their path under ``static``, read once."""
    loaded = {}
    folder = files("gateway.dashboard") / "static"
    for place in (folder, folder / "vendor"):
        for entry in place.iterdir():
            if entry.name.endswith(_SERVED):
                body = entry.read_bytes()
                name = entry.name if place is folder else f"vendor/{entry.name}"
                media_type = mimetypes.guess_type(entry.name)[0] or "application/octet-stream"
                loaded[name] = _File(body, media_type, f'"{hashlib.sha256(body).hexdigest()[:32]}"')
    return loaded


_FILES: Final = _load()


def _answer(name: str, request: Request[Any, Any, State]) -> Response[bytes]:
    file = _FILES.get(name)
    if file is None:
        raise NotFoundException(f"There is no dashboard file {name!r}.")
    headers = {**_HEADERS, "etag": file.etag}
    if request.headers.get("if-none-match") == file.etag:
        return Response(b"", status_code=304, headers=headers, media_type=file.media_type)
    return Response(file.body, headers=headers, media_type=file.media_type)


@route("/", http_method=_READ, include_in_schema=False, sync_to_thread=False)
def front_door() -> Redirect:
    """To the page. Not for good: nobody is to remember it, and what is asked for beside it is not passed on."""
    return Redirect("/dashboard", status_code=307, headers={"cache-control": "no-store"})


@route("/dashboard", http_method=_READ, include_in_schema=False, sync_to_thread=False)
def page(request: Request[Any, Any, State]) -> Response[bytes]:
    """The page itself."""
    return _answer("index.html", request)


@route("/dashboard/static/{path:path}", http_method=_READ, include_in_schema=False, sync_to_thread=False)
def asset(request: Request[Any, Any, State], path: FromPath[str]) -> Response[bytes]:
    """A script, a style sheet or an image of the page."""
    return _answer(path.lstrip("/"), request)


@get("/dashboard/events", include_in_schema=False)
async def events(feed: NamedDependency[Feed], window: FromQuery[Window] = "15m") -> Stream:
    """The figures of a window, once a second, as server-sent events."""
    return Stream(
        feed.stream(window),
        media_type="text/event-stream",
        headers={"cache-control": "no-store", "x-accel-buffering": "no"},
    )
