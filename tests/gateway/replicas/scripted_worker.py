"""An engine process that serves the scripted runner: our socket and protocol without a model."""

from __future__ import annotations

import argparse
import asyncio
import os
import sys
from pathlib import Path

from tokenizers import Tokenizer, decoders, models

from engine.core import EngineCore
from engine.detokenize import IncrementalDetokenizer
from engine.parent import die_with_parent
from engine.scripted import ScriptedRunner
from engine.server import EngineServer, bind_unix_socket
from engine.wire import EngineInfo


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--socket", type=Path, required=True)
    parser.add_argument("--parent", type=int)
    parser.add_argument("--fail", action="store_true")
    options = parser.parse_args()
    if options.parent is not None:
        die_with_parent(options.parent)
    if options.fail:
        sys.exit("worker: there is no such model")
    tokenizer = Tokenizer(models.WordLevel({f"w{i}": i for i in range(256)}, unk_token="w0"))
    tokenizer.decoder = decoders.Fuse()
    info = EngineInfo("scripted", "", "scripted", str(os.getpid()), 1024, 64, 16, "none", "cpu", 256, (), "lru", 128)
    core = EngineCore(
        ScriptedRunner(info.num_blocks, info.block_size, vocab_size=info.vocab_size),
        info,
        detokenizer=lambda stop: IncrementalDetokenizer(tokenizer, stop),
    )
    print("scripted worker is up", file=sys.stderr, flush=True)
    asyncio.run(EngineServer(core, bind_unix_socket(options.socket)).serve())


if __name__ == "__main__":
    main()
