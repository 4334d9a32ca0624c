"""The registry that gateways keep of each other in Redis: the replicas that each has, and its templates by name.

Ids, names, numbers and digests only; no address and no text.
"""

from __future__ import annotations

from collections.abc import Mapping
from hashlib import blake2b
from typing import Final

import msgspec

from gateway.canonical.registry import TemplateRegistry
from gateway.replicas.base import Replica, ReplicaState
from gateway.routing.router import Router

__all__ = ["Presence", "SharedGateway", "SharedReplica"]


class SharedReplica(msgspec.Struct, frozen=True):
    """A replica as one gateway sees it: ``in_flight`` are that gateway's requests there."""

    id: str
    state: ReplicaState
    model: str | None
    blocks: int
    in_flight: int


class SharedGateway(msgspec.Struct, frozen=True):
    """What one gateway tells of itself.

    ``templates`` are digests of their definitions by name, under the deployment secret that ``secret`` tells apart.
    """

    secret: str
    replicas: list[SharedReplica]
    templates: dict[str, str]


_encode: Final = msgspec.msgpack.Encoder().encode
_encode_definition: Final = msgspec.json.Encoder(order="sorted").encode
_decode: Final = msgspec.msgpack.Decoder(SharedGateway).decode


class Presence:
    """This gateway's note (see ``gateway.stats.board``), and what others say in theirs. Owns the latter."""

    def __init__(
        self,
        replicas: Mapping[str, Replica],
        router: Router,
        templates: TemplateRegistry,
        *,
        secret: bytes,
        lasting: bool,
    ) -> None:
        """``secret`` is the deployment secret, ``lasting`` whether it was configured."""
        self.others: Mapping[str, SharedGateway] = {}
        """The other gateways that run, by epoch."""
        self._replicas: Final = replicas
        self._router: Final = router
        self._templates: Final = templates
        self._lasting: Final = lasting
        self._key: Final = blake2b(secret, digest_size=32, person=b"headstart-regist").digest()
        self._generation = -1
        self._digests: dict[str, str] = {}

    def write(self) -> bytes:
        """What this gateway tells."""
        replicas = [
            SharedReplica(
                id,
                replica.state,
                None if replica.info is None else replica.info.model,
                replica.cache_blocks,
                self._router.in_flight(id),
            )
            for id, replica in self._replicas.items()
        ]
        return _encode(SharedGateway(self._digest(b"secret"), replicas, self._template_digests()))

    def read(self, notes: Mapping[str, bytes]) -> bool:
        """What others tell; False when some of it is not to be understood."""
        others, readable = {}, True
        for epoch, note in notes.items():
            try:
                others[epoch] = _decode(note)
            except msgspec.MsgspecError:
                readable = False
        self.others = others
        return readable

    @property
    def problems(self) -> list[str]:
        """What keeps gateways from sharing what they could, in words."""
        if not self._lasting:
            return []  # said at the start: nobody can have the same secret
        own, templates = self._digest(b"secret"), self._template_digests()
        strangers = sum(other.secret != own for other in self.others.values())
        found = [f"{strangers} other gateways have another secret: they share no cache entries"] if strangers else []
        differing = {
            name
            for other in self.others.values()
            if other.secret == own
            for name, digest in other.templates.items()
            if templates.get(name, digest) != digest
        }
        return found + [
            f"template {name[:64]!r} is another one at other gateways: their prompts share no cache entries"
            for name in sorted(differing)
        ]

    def _template_digests(self) -> dict[str, str]:
        if self._generation != self._templates.generation:
            self._generation = self._templates.generation
            self._digests = {
                name: self._digest(_encode_definition(template.config))
                for name, template in self._templates.by_name.items()
                if "@" not in name
            }
        return self._digests

    def _digest(self, data: bytes) -> str:
        return blake2b(data, key=self._key, digest_size=8).hexdigest()
