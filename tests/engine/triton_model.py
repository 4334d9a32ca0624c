"""Serves models over the Triton back end in Triton's interpreter, in a process of its own: the mode must be set first.

The arguments are prompts as JSON, and model folders. For each folder, a line of JSON on standard output: the method,
what came after the prompts when they were new, what when they were cached, and how many tokens were.
"""

from __future__ import annotations

import importlib.util
import json
import os
import sys
from pathlib import Path


def main() -> None:
    """Generate with each model, twice."""
    os.environ["TRITON_INTERPRET"] = "1"
    import torch

    from engine.attention.triton_backend import TritonAttention
    from engine.wire import Sampling

    spec = importlib.util.spec_from_file_location("engine_fixtures", Path(__file__).with_name("conftest.py"))
    assert spec is not None
    assert spec.loader is not None
    fixtures = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(fixtures)
    torch.set_num_threads(1)
    prompts, greedy = json.loads(sys.argv[1]), Sampling(4, temperature=0.0, ignore_eos=True)
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
        cold, _ = engine.generate(prompts, greedy)
        warm, cached = engine.generate(prompts, greedy)
        sys.stdout.write(json.dumps([engine.runner.method, cold, warm, cached]) + "\n")


if __name__ == "__main__":
    main()
