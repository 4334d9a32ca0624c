"""``headstart serve``: the gateway with its engines or in front of other servers."""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING, get_args

import rich_click as click

from gateway.cli.options import engine_options
from gateway.cli.terminal import fetch_model
from gateway.config import OrderMode

if TYPE_CHECKING:
    from gateway.service import Gateway

__all__ = ["serve"]

_START_TIMEOUT_S = 600.0


@click.command()
@click.option(
    "--config",
    type=click.Path(path_type=Path, dir_okay=False),
    metavar="FILE",
    help="A headstart.toml: templates, API keys and everything below; options win over it.",
)
@engine_options()
@click.option(
    "--engines",
    type=click.IntRange(1, 64),
    metavar="N",
    help="Engine processes to run.  [default: 1, or none with --replica]",
)
@click.option(
    "--replica",
    "replicas",
    multiple=True,
    metavar="URL",
    help="An OpenAI-compatible server (vLLM, SGLang, llama.cpp) that generates; may be repeated. dns+http://NAME:PORT "
    "stands for every address behind the name, as they come and go, and tcp://HOST:PORT for a headstart engine on "
    "another machine. The model's tokenizer and chat template are taken from the folder given with --model, else from "
    "where the server has them.",
)
@click.option(
    "--order",
    type=click.Choice(get_args(OrderMode)),
    help="Order of structured documents in the prompt.  [default: cache-aware]",
)
@click.option(
    "--redis",
    metavar="URL",
    help="Share statistics and pins there: redis://, rediss:// (TLS), redis+sentinel://HOST:PORT,HOST:PORT/SERVICE or "
    "redis+cluster://HOST:PORT,HOST:PORT.  [default: a private Valkey server is started]",
)
@click.option(
    "--host",
    metavar="ADDRESS",
    help="Address to listen on; wider than loopback needs API keys.  [default: 127.0.0.1]",
)
@click.option("--port", type=click.IntRange(0, 65535), help="Port to listen on; 0 takes a free one.  [default: 8000]")
def serve(config: Path | None, replicas: tuple[str, ...], **options: str | int | None) -> None:
    """Serve a model through the OpenAI API.

    Without `--replica` the gateway runs an engine itself, whose default model is fetched on the first start. The
    dashboard is at `/dashboard`. Every setting can also come from the file given with `--config` or from the
    environment (`HEADSTART__SERVER__PORT=9000`). SIGINT or SIGTERM lets running answers end; a second one does not.
    """
    from gateway.configuration import load_config, local_engines, model_spec
    from gateway.logs import configure_logging
    from gateway.replicas.remote_model import with_remote_model
    from gateway.server import run
    from gateway.service import configured_gateway

    given: dict[str, object] = {_SETTING[name]: value for name, value in options.items()}
    settings = load_config(config, os.environ, given | {"replicas": replicas or None})
    configure_logging(settings.server.log_level)
    if settings.engine.model is None and not local_engines(settings):
        settings = run(with_remote_model(settings))
    spec = model_spec(settings.engine)
    # Weights are an engine's matter: in front of other servers a folder with the tokenizer is enough.
    folder = Path(spec).expanduser().resolve()
    engines = local_engines(settings) > 0
    if engines or not folder.is_dir():
        folder = fetch_model(spec, for_engine=engines)
    run(_serve(configured_gateway(settings, folder)))


_SETTING = {
    "model": "engine.model",
    "device": "engine.device",
    "dtype": "engine.dtype",
    "kv_dtype": "engine.kv_dtype",
    "kv_blocks": "engine.kv_blocks",
    "block_size": "engine.block_size",
    "policy": "engine.policy",
    "engines": "engine.engines",
    "order": "canonical.order",
    "redis": "redis.url",
    "host": "server.host",
    "port": "server.port",
}


async def _serve(gateway: Gateway) -> None:
    """Serve until a signal. Raises ``ReplicaUnavailable`` when no engine comes up at its first try.

    With remote replicas the gateway waits for them as long as it takes: they come and go without it.
    """
    import structlog

    from gateway.configuration import has_remote_replicas
    from gateway.server import serve as serve_http
    from gateway.server import settle_memory

    log = structlog.get_logger("headstart.serve")

    def announce(url: str) -> None:
        log.info("listening", api=f"{url}/v1", dashboard=f"{url}/dashboard")

    settle_memory()
    await serve_http(
        gateway, on_listening=announce, start_timeout=None if has_remote_replicas(gateway.config) else _START_TIMEOUT_S
    )
