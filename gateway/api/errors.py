"""Every error as OpenAI clients expect it: ``{"error": {"message", "type", "param", "code"}}``."""

from __future__ import annotations

from typing import Any, Final

import msgspec
import structlog
from litestar import Request, Response
from litestar.exceptions import HTTPException
from litestar.types import ExceptionHandlersMap

from gateway.api.exchange import request_id
from gateway.errors import HeadstartError, MethodNotAllowedError
from gateway.logs import where_from

__all__ = ["EXCEPTION_HANDLERS", "ErrorBody", "encode_error", "error_headers", "report_unexpected"]

_CODES: Final = {404: "not_found", 405: "method_not_allowed", 413: "payload_too_large"}

_log = structlog.get_logger("headstart.api")


class _ErrorDetail(msgspec.Struct, frozen=True):
    message: str
    type: str
    param: str | None
    code: str | None


class ErrorBody(msgspec.Struct, frozen=True):
    """The body of every response that is no success, and of the event that ends a broken stream."""

    error: _ErrorDetail


def encode_error(error: HeadstartError) -> bytes:
    """The JSON of ``error``."""
    detail = _ErrorDetail(error.message, error.type, error.param, error.code)
    return msgspec.json.encode(ErrorBody(detail))


def report_unexpected(error: BaseException, request: str) -> HeadstartError:
    """Log a fault of ours, without its message; what the caller is told gives nothing away."""
    _log.error("unexpected error", request_id=request, error=where_from(error))
    return HeadstartError("Internal error. The log of the gateway says more under this request id.", code="internal")


def error_headers(error: HeadstartError) -> dict[str, str]:
    """What the head of a response says of ``error`` besides its status."""
    headers = {} if error.retry_after is None else {"retry-after": str(error.retry_after)}
    if error.status == 401:
        headers["www-authenticate"] = "Bearer"
    if isinstance(error, MethodNotAllowedError):
        headers["allow"] = error.allowed
    return headers


def _handle_own(request: Request[Any, Any, Any], error: HeadstartError) -> Response[bytes]:
    return _response(request, error, error.status, error_headers(error))


def _handle_framework(request: Request[Any, Any, Any], error: HTTPException) -> Response[bytes]:
    """What the framework refuses: unknown paths and methods, parameters of the wrong type, bodies too long."""
    status = error.status_code
    if status >= 500:
        return _handle_unexpected(request, error)
    param = None
    message = {
        404: f"There is nothing at {request.method} {request.scope['path'][:128]}.",
        413: "The body is longer than allowed (limits.max_body_bytes).",
    }.get(status, error.detail)
    if isinstance(error.extra, list) and error.extra and isinstance(error.extra[0], dict):
        param, reason = error.extra[0].get("key"), error.extra[0].get("message")
        message = f"{param}: {reason}" if reason else message
    own = HeadstartError(message, param=param, code=_CODES.get(status))
    own.type = "invalid_request_error"
    return _response(request, own, status, dict(error.headers or {}))


def _handle_unexpected(request: Request[Any, Any, Any], error: Exception) -> Response[bytes]:
    return _response(request, report_unexpected(error, request_id(request.scope)), 500, {})


def _response(
    request: Request[Any, Any, Any], error: HeadstartError, status: int, headers: dict[str, str]
) -> Response[bytes]:
    headers["x-request-id"] = request_id(request.scope)
    return Response(encode_error(error), status_code=status, headers=headers, media_type="application/json")


EXCEPTION_HANDLERS: Final[ExceptionHandlersMap] = {
    HeadstartError: _handle_own,
    HTTPException: _handle_framework,
    Exception: _handle_unexpected,
}
