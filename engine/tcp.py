"""An engine that other machines can reach: a TCP socket, and a secret that both ends show they know.

Before the first message of ``engine.wire`` the engine sends a challenge, the gateway answers it and sends one of its
own, and the engine answers that. An answer is a keyed hash of both challenges: the secret itself never travels, no
recorded answer serves again, and neither end can play the other. What follows is not encrypted: the network between
the two has to be trusted, or tunnelled.

============  =======================================================================
engine        ``HELLO``, 32 random bytes
gateway       32 random bytes, its answer (32 bytes)
engine        0 or 1: whether that was right; its answer (32 bytes), zeros for 0
============  =======================================================================
"""

from __future__ import annotations

import contextlib
import hashlib
import hmac
import secrets
import socket
from typing import Final

from engine.errors import ProtocolError, WorkerError

__all__ = [
    "LEAST_SECRET_CHARS",
    "REPLY_BYTES",
    "GatewayHandshake",
    "bind_tcp_socket",
    "challenge",
    "keep_alive",
    "parse_endpoint",
    "verdict",
]

HELLO: Final = b"HSENGINE1"
LEAST_SECRET_CHARS: Final = 16

_NONCE_BYTES: Final = 32
_ANSWER_BYTES: Final = 32
REPLY_BYTES: Final = _NONCE_BYTES + _ANSWER_BYTES
_CHALLENGE_BYTES: Final = len(HELLO) + _NONCE_BYTES
_VERDICT_BYTES: Final = 1 + _ANSWER_BYTES

_ADMITTED: Final = b"\x01"
_REFUSED: Final = b"\x00" * _VERDICT_BYTES

_IDLE_S: Final = 15
_PROBE_S: Final = 5
_PROBES: Final = 3


def challenge() -> bytes:
    """What an engine sends to whoever connects; another one each time."""
    return HELLO + secrets.token_bytes(_NONCE_BYTES)


def verdict(secret: bytes, challenge: bytes, reply: bytes) -> tuple[bool, bytes]:
    """Whether ``reply`` (of ``REPLY_BYTES``) is a right answer to ``challenge``, and what to send then."""
    nonces = challenge[len(HELLO) :] + reply[:_NONCE_BYTES]
    if not hmac.compare_digest(reply[_NONCE_BYTES:], _answer(secret, b"gateway", nonces)):
        return False, _REFUSED
    return True, _ADMITTED + _answer(secret, b"engine", nonces)


class GatewayHandshake:
    """The gateway's side, as bytes come in. ``done`` once each end knows that the other one has the secret."""

    def __init__(self, secret: bytes) -> None:
        self.done = False
        self._secret: Final = secret
        self._nonce: Final = secrets.token_bytes(_NONCE_BYTES)
        self._nonces = b""

    def take(self, buffer: bytearray) -> bytes:
        """Take what is complete out of ``buffer``; what to send.

        Raises:
            ProtocolError: The other end is no engine, refuses this secret, or does not know it itself.
        """
        if not self._nonces:
            if not HELLO.startswith(bytes(buffer[: len(HELLO)])):
                raise ProtocolError("what answers there is no engine that asks for a secret")
            if len(buffer) < _CHALLENGE_BYTES:
                return b""
            self._nonces = bytes(buffer[len(HELLO) : _CHALLENGE_BYTES]) + self._nonce
            del buffer[:_CHALLENGE_BYTES]
            return self._nonce + _answer(self._secret, b"gateway", self._nonces)
        if len(buffer) < _VERDICT_BYTES:
            return b""
        told = bytes(buffer[:_VERDICT_BYTES])
        del buffer[:_VERDICT_BYTES]
        if told == _REFUSED:
            raise ProtocolError(
                "the engine does not accept our secret: "
                "set engine.secret (HEADSTART__ENGINE__SECRET) to the same at both ends"
            )
        if not hmac.compare_digest(told, _ADMITTED + _answer(self._secret, b"engine", self._nonces)):
            raise ProtocolError("what answers there does not know the secret")
        self.done = True
        return b""


def bind_tcp_socket(host: str, port: int) -> socket.socket:
    """A bound socket; port 0 takes a free one. Raises ``WorkerError`` when the address cannot be had."""
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(
            host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )[0]
        listener = socket.socket(family, kind, protocol)
        try:
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            listener.bind(address)
        except OSError:
            listener.close()
            raise
    except OSError as error:
        raise WorkerError(f"cannot listen on {host}:{port}: {error.strerror or error}") from error
    return listener


def keep_alive(connection: socket.socket) -> None:
    """Have the kernel notice within half a minute that the other machine is gone, and send small frames at once."""
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for name, value in (("TCP_KEEPIDLE", _IDLE_S), ("TCP_KEEPINTVL", _PROBE_S), ("TCP_KEEPCNT", _PROBES)):
        if hasattr(socket, name):
            connection.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)
    if hasattr(socket, "TCP_USER_TIMEOUT"):
        with contextlib.suppress(OSError):
            milliseconds = 1000 * (_IDLE_S + _PROBES * _PROBE_S)
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, milliseconds)
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)


def parse_endpoint(text: str) -> tuple[str, int]:
    """Host and port of ``HOST:PORT`` or ``[ADDRESS]:PORT``. Raises ``ValueError``."""
    host, colon, port = text.rpartition(":")
    bracketed = host.startswith("[") and host.endswith("]")
    host = host[1:-1] if bracketed else host
    if not colon or not host or (":" in host) != bracketed or not port.isascii() or not port.isdigit():
        raise ValueError(f"{text!r} is not HOST:PORT")
    if int(port) > 65535:
        raise ValueError(f"{port} is no port")
    return host, int(port)


def _answer(secret: bytes, who: bytes, nonces: bytes) -> bytes:
    return hmac.digest(hashlib.sha256(secret).digest(), b"headstart engine 1 " + who + nonces, "sha256")
