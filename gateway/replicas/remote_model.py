"""Which model a gateway without engines serves, when its configuration does not say: that of its replicas."""

from __future__ import annotations

from pathlib import Path
from typing import Final

import msgspec

from engine.models.catalog import CATALOG
from gateway.config import Config, ReplicaConfig
from gateway.configuration import TCP_PREFIX, remote_replicas
from gateway.errors import ConfigError, ReplicaUnavailable
from gateway.replicas.discovery import Discovery
from gateway.replicas.engine import EngineReplica
from gateway.replicas.openai_server import OpenAIServer, ServerUnfit
from gateway.replicas.remote import engine_endpoint

__all__ = ["with_remote_model"]

_ENGINE_TIMEOUT_S: Final = 10.0


async def with_remote_model(config: Config) -> Config:
    """``config`` with the model of the first replica that has it from a folder which is also here, or can be fetched.

    Raises:
        ConfigError: There is none: tokenizer and chat template have to be given.
    """
    reasons = []
    for replica in [*remote_replicas(config), *await Discovery(config).look()]:
        try:
            name, root = await _served(replica, config)
        except (ServerUnfit, ReplicaUnavailable) as error:
            reasons.append(str(error).removesuffix("."))
            continue
        engine = config.engine
        folder = Path(root)
        if folder.is_absolute() and (folder / "tokenizer.json").is_file():
            engine = msgspec.structs.replace(engine, model=str(folder), served_name=engine.served_name or name)
            return msgspec.structs.replace(config, engine=engine)
        if replica.url.startswith(TCP_PREFIX) and name in CATALOG:
            return msgspec.structs.replace(config, engine=msgspec.structs.replace(engine, model=name))
        reasons.append(f"{replica.url} has {name!r} from {root!r}, which is no folder here with a tokenizer.json")
    raise ConfigError(
        f"Which model the replicas serve cannot be told: {'; '.join(reasons)}. Mend that, or name it with --model: the "
        "folder with its tokenizer.json and chat template."
    )


async def _served(replica: ReplicaConfig, config: Config) -> tuple[str, str]:
    """Name and folder of what a replica serves. Raises ``ServerUnfit`` or ``ReplicaUnavailable``."""
    if replica.url.startswith(TCP_PREFIX):
        engine = EngineReplica(replica.url, engine_endpoint(replica, config.engine.secret))
        await engine.start()
        try:
            await engine.wait_ready(_ENGINE_TIMEOUT_S, patient=False)
            assert engine.info is not None, "it is ready"
            return engine.info.model, engine.info.root
        finally:
            await engine.stop(0)
    server = OpenAIServer(replica)
    try:
        card = await server.look(config.engine.served_name or "")
    finally:
        await server.close()
    return card.id, card.root or ""
