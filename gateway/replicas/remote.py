"""How replicas of remote servers are made: their names, the proof of their tokenizer, the one model they share."""

from __future__ import annotations

import hashlib
from functools import cached_property
from pathlib import Path
from typing import Final

from gateway.config import IndexConfig, ReplicaConfig
from gateway.replicas.openai_http import OpenAIReplica
from gateway.replicas.served_models import ServedModels
from gateway.replicas.tokenizer_proof import TokenizerProof

__all__ = ["RemoteReplicas", "replica_id"]

_ID_DIGITS: Final = 8


class RemoteReplicas:
    """Makes replicas that serve the model in ``folder``, which clients know as ``model``.

    What they have in common is owned here: which model each of them serves.
    """

    def __init__(self, folder: Path, model: str, *, max_blocks: int = IndexConfig().max_blocks) -> None:
        """``max_blocks`` bounds what is kept of the blocks of each."""
        self._max_blocks: Final = max_blocks
        self._folder: Final = folder
        self._model: Final = model
        self._models: Final = ServedModels()

    def connect(self, config: ReplicaConfig) -> OpenAIReplica:
        """A replica for one server, not started. Raises ``ConfigError`` when the folder has no usable tokenizer."""
        return OpenAIReplica(
            replica_id(config.url),
            config,
            self._proof,
            model=self._model,
            served_models=self._models,
            max_blocks=self._max_blocks,
        )

    @cached_property
    def _proof(self) -> TokenizerProof:
        return TokenizerProof.of(self._folder)


def replica_id(url: str) -> str:
    """The name of the replica at ``url``: the same at every gateway and start, and telling callers no address."""
    return f"replica-{hashlib.sha256(url.encode()).hexdigest()[:_ID_DIGITS]}"
