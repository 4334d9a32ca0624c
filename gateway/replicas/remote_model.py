"""Which model a gateway without engines serves, when its configuration does not say: that of its replicas."""

from __future__ import annotations

from pathlib import Path

import msgspec

from gateway.config import Config
from gateway.configuration import remote_replicas
from gateway.errors import ConfigError
from gateway.replicas.discovery import Discovery
from gateway.replicas.openai_server import OpenAIServer, ServerUnfit

__all__ = ["with_remote_model"]


async def with_remote_model(config: Config) -> Config:
    """``config`` with the model of the first replica that has it from a folder which is also here.

    Raises:
        ConfigError: There is none: tokenizer and chat template have to be given.
    """
    reasons = []
    for replica in [*remote_replicas(config), *await Discovery(config).look()]:
        server = OpenAIServer(replica)
        try:
            card = await server.look(config.engine.served_name or "")
        except ServerUnfit as unfit:
            reasons.append(str(unfit))
            continue
        finally:
            await server.close()
        folder = Path(card.root or "")
        if folder.is_absolute() and (folder / "tokenizer.json").is_file():
            engine = config.engine
            named = msgspec.structs.replace(engine, model=str(folder), served_name=engine.served_name or card.id)
            return msgspec.structs.replace(config, engine=named)
        reasons.append(
            f"{replica.url} has {card.id!r} from {card.root!r}, which is no folder here with a tokenizer.json"
        )
    raise ConfigError(
        "With --replica, --model is needed: the folder with tokenizer.json and chat template of the model that the "
        f"replicas serve. ({'; '.join(reasons)}.)"
    )
