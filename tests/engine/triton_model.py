"""Serves models over the Triton back end in Triton's interpreter, in a process of its own: the mode must be set first.

The arguments are prompts as JSON, and model folders. For each folder, a line of JSON on standard output: the method,
what came after the prompts when they were new, what when they were cached, how many tokens were, and how many blocks a
sliding window has given back; what those hold is poison.
"""

from __future__ import annotations

import importlib
import json
import os
import sys
from pathlib import Path
from types import ModuleType


def main() -> None:
    """Generate with each model, twice."""
    os.environ["TRITON_INTERPRET"] = "1"
    import torch

    from engine.attention.triton_backend import TritonAttention
    from engine.wire import Sampling

    package = ModuleType("engine_tests")
    package.__path__ = [str(Path(__file__).parent)]
    sys.modules["engine_tests"] = package
    fixtures = importlib.import_module("engine_tests.conftest")
    poison = importlib.import_module("engine_tests.poison").poison
    torch.set_num_threads(1)
    prompts, greedy = json.loads(sys.argv[1]), Sampling(3, temperature=0.0, ignore_eos=True)
    for folder in map(Path, sys.argv[2:]):
        engine = fixtures.ModelEngine(
            folder,
            num_blocks=16,
            block_size=16,
            max_batch_tokens=48,
            max_running=4,
            threads=1,
            backend=TritonAttention(),
        )
        if engine.core.info.window:
            poison(engine)
        cold, _ = engine.generate(prompts, greedy)
        warm, cached = engine.generate(prompts, greedy)
        windows = engine.stats()["window"]
        released = windows["released"] if windows else 0
        sys.stdout.write(json.dumps([engine.runner.method, cold, warm, cached, released]) + "\n")


if __name__ == "__main__":
    main()
