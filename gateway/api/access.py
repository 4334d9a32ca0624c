"""Who may call a route: guards for the routes that belong to tenants and to the operator.

A guard looks at the route that was chosen and at the connection, never at a URL put together from headers.
"""

from __future__ import annotations

from typing import Any

from litestar.connection import ASGIConnection
from litestar.handlers import BaseRouteHandler

from gateway.identity import Peer
from gateway.plan import Caller
from gateway.service import Gateway

__all__ = ["calling_tenant", "for_operator", "for_tenants", "for_tenants_and_operator", "is_operator"]

_Connection = ASGIConnection[Any, Any, Any, Any]


def for_tenants(connection: _Connection, _: BaseRouteHandler) -> None:
    """Raises ``AuthenticationError`` unless the caller has a key or needs none; or ``RateLimitedError``."""
    _gateway(connection).admission.tenant(_peer(connection))


def for_operator(connection: _Connection, _: BaseRouteHandler) -> None:
    """Raises ``AuthenticationError`` or ``PermissionDeniedError`` unless the caller is the operator."""
    _gateway(connection).admission.check_operator(_peer(connection))


def for_tenants_and_operator(connection: _Connection, handler: BaseRouteHandler) -> None:
    """Raises ``AuthenticationError`` unless one of the two other guards lets the caller pass."""
    if not is_operator(connection):
        for_tenants(connection, handler)


def is_operator(connection: _Connection) -> bool:
    """Whether the caller is the operator, on routes that others may call too."""
    return _gateway(connection).authenticator.is_operator(_peer(connection))


def calling_tenant(connection: _Connection) -> Caller:
    """Whom a call is made for. Raises ``AuthenticationError`` as ``for_tenants``."""
    return _gateway(connection).authenticator.tenant(_peer(connection))


def _gateway(connection: _Connection) -> Gateway:
    gateway = connection.app.state.gateway
    assert isinstance(gateway, Gateway)
    return gateway


def _peer(connection: _Connection) -> Peer:
    client = connection.scope["client"]
    return Peer(client[0] if client else None, connection.scope["headers"])
