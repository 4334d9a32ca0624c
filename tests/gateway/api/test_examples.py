"""The example applications, run as a reader would run them, against a gateway with their configuration."""

from __future__ import annotations

import asyncio
import os
import re
import sys
from importlib.util import find_spec
from pathlib import Path

import msgspec
import pytest

from gateway.configuration import load_config

from .conftest import BASE, Bench, Service

EXAMPLES = Path(__file__).parents[3] / "examples"
CONFIG = msgspec.structs.replace(BASE, templates=load_config(EXAMPLES / "headstart.toml").templates)
APPLICATIONS = {
    "openai_sdk": ("handbook-openai", ("openai",)),
    "langchain_app": ("handbook-langchain", ("langchain_openai",)),
    "llama_index_app": ("handbook-llama-index", ("llama_index",)),
}


@pytest.mark.parametrize("name", APPLICATIONS)
def test_an_example_runs_and_finds_its_passages_cached(name: str, bench: Bench) -> None:
    template, packages = APPLICATIONS[name]
    for package in packages:
        if find_spec(package) is None:
            pytest.skip(f"{package} is not installed: pip install 'headstart[examples]'")

    async def scenario(service: Service) -> None:
        process = await asyncio.create_subprocess_exec(
            sys.executable,
            str(EXAMPLES / f"{name}.py"),
            env={**os.environ, "OPENAI_BASE_URL": f"{service.url}/v1", "OPENAI_API_KEY": "none"},
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.PIPE,
        )
        out, err = await process.communicate()
        assert process.returncode == 0, err.decode()
        told = [(int(a), int(b)) for a, b in re.findall(r"(\d+) of (\d+) prompt tokens were cached", out.decode())]
        assert len(told) == 6
        assert told[0][0] == 0
        assert all(cached > 0 for cached, _ in told[1:])  # the clock has moved out of the way
        assert service.stats().templates[template].requests == 6
        prompts = [service.gateway.renderer.decode(sent.token_ids) for sent in service.replica.submitted]
        assert all("It is (see metadata)" in prompt and "Metadata: now=" in prompt for prompt in prompts)
        assert all(prompt.count("A loan can be extended twice") <= 1 for prompt in prompts)

    bench.run(scenario, CONFIG, num_blocks=2048, max_model_len=16384)
