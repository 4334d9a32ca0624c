"""How replicas elsewhere are made: their names, the proof of their tokenizer, the one model they share."""

from __future__ import annotations

import hashlib
from functools import cached_property
from pathlib import Path
from typing import Final

from tokenizers import Tokenizer

from engine.detokenize import vocabulary_digest
from engine.tcp import parse_endpoint
from engine.wire import EngineInfo
from gateway.config import IndexConfig, ReplicaConfig
from gateway.configuration import TCP_PREFIX
from gateway.errors import ConfigError
from gateway.replicas.base import Replica
from gateway.replicas.engine import EngineReplica, TcpEndpoint
from gateway.replicas.openai_http import OpenAIReplica
from gateway.replicas.openai_server import ServerUnfit
from gateway.replicas.served_models import ServedModels
from gateway.replicas.tokenizer_proof import TokenizerProof

__all__ = ["RemoteReplicas", "engine_endpoint", "replica_id"]

_ID_DIGITS: Final = 8


class RemoteReplicas:
    """Makes replicas that serve the model in ``folder``, which clients know as ``model``.

    What they have in common is owned here: which model each of them serves.
    """

    def __init__(
        self,
        folder: Path,
        model: str,
        *,
        max_blocks: int = IndexConfig().max_blocks,
        engine_secret: str | None = None,
    ) -> None:
        """``max_blocks`` bounds what is kept of the blocks of each. Engines of our own want ``engine_secret``."""
        self._max_blocks: Final = max_blocks
        self._engine_secret: Final = engine_secret
        self._folder: Final = folder
        self._model: Final = model
        self._models: Final = ServedModels()

    def connect(self, config: ReplicaConfig) -> Replica:
        """A replica for one server, not started.

        Raises:
            ConfigError: The folder has no usable tokenizer, or no secret is known for an engine.
        """
        if config.url.startswith(TCP_PREFIX):
            return self._engine(config)
        return OpenAIReplica(
            replica_id(config.url),
            config,
            self._proof,
            model=self._model,
            served_models=self._models,
            max_blocks=self._max_blocks,
        )

    def _engine(self, config: ReplicaConfig) -> EngineReplica:
        id, vocabulary = replica_id(config.url), self._vocabulary

        def unfit(info: EngineInfo) -> str | None:
            if info.vocabulary not in ("", vocabulary):
                return (
                    f"{config.url} has another tokenizer than this gateway, whose is in {str(self._folder)!r}: "
                    f"give with --model the folder of the model that it serves, {info.model!r}"
                )
            if config.model not in (None, info.model):
                return f"{config.url} serves {info.model!r}, not {config.model!r}"
            try:
                if config.model is None:
                    self._models.join(id, config.url, info.model)
            except ServerUnfit as error:
                return str(error)
            return None

        endpoint = engine_endpoint(config, self._engine_secret)
        return EngineReplica(id, endpoint, url=config.url, unfit=unfit, left=lambda: self._models.leave(id))

    @cached_property
    def _proof(self) -> TokenizerProof:
        return TokenizerProof.of(self._folder)

    @cached_property
    def _vocabulary(self) -> str:
        return vocabulary_digest(Tokenizer.from_file(str(self._folder / "tokenizer.json")))


def engine_endpoint(config: ReplicaConfig, secret: str | None) -> TcpEndpoint:
    """Where the engine of ``tcp://HOST:PORT`` is, and its ``api_key`` or the ``secret`` of all engines.

    Raises:
        ConfigError: Neither is known.
    """
    secret = config.api_key or secret
    if not secret:
        raise ConfigError(
            f"replicas: {config.url} is an engine that wants a secret: set engine.secret "
            "(HEADSTART__ENGINE__SECRET) to the one it was started with, or api_key of its [[replicas]]."
        )
    return TcpEndpoint(*parse_endpoint(config.url.removeprefix(TCP_PREFIX)), secret.encode())


def replica_id(url: str) -> str:
    """The name of the replica at ``url``: the same at every gateway and start, and telling callers no address."""
    return f"replica-{hashlib.sha256(url.encode()).hexdigest()[:_ID_DIGITS]}"
