"""Which model the remote replicas serve: one gateway, one model."""

from __future__ import annotations

from gateway.replicas.openai_server import ServerUnfit

__all__ = ["ServedModels"]


class ServedModels:
    """The model of each remote replica that is ready. The first one decides; owned by whoever makes the replicas."""

    def __init__(self) -> None:
        self._models: dict[str, str] = {}

    def join(self, replica_id: str, url: str, model: str) -> None:
        """A replica has come up with ``model``.

        Raises:
            ServerUnfit: The others serve another one; the message names both.
        """
        for other, theirs in self._models.items():
            if other != replica_id and theirs != model:
                raise ServerUnfit(
                    f"{url} serves {model!r}, but {other} serves {theirs!r}: a gateway has one model. If both are the "
                    "same under two names, give each its model in [[replicas]]"
                )
        self._models[replica_id] = model

    def leave(self, replica_id: str) -> None:
        """A replica is not ready any more."""
        self._models.pop(replica_id, None)
