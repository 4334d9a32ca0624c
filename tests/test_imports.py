"""Imports go gateway -> engine -> cache_policy and never back; the outer packages need no torch to be loaded."""

from __future__ import annotations

import json
import os
import subprocess
import sys

import pytest

SCRIPT = """
import importlib, json, pkgutil, sys

class Blocker:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in BLOCKED:
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)

PACKAGE, BLOCKED = sys.argv[1], set(sys.argv[2].split(","))
sys.meta_path.insert(0, Blocker())
package = importlib.import_module(PACKAGE)
names = [module.name for module in pkgutil.walk_packages(package.__path__, PACKAGE + ".")]
for name in names:
    if not name.endswith("__main__"):
        importlib.import_module(name)
print(json.dumps({"modules": names, "loaded": sorted({name.partition(".")[0] for name in sys.modules})}))
"""

ENGINE_PACKAGES = "torch,transformers,triton,gguf,accelerate"


@pytest.mark.parametrize(
    ("package", "blocked", "never_loaded", "a_module"),
    [
        (
            "cache_policy",
            f"engine,gateway,litestar,redis,aiohttp,{ENGINE_PACKAGES}",
            "engine gateway",
            "cache_policy.keys",
        ),
        ("engine", "gateway,litestar,uvicorn,redis,bm25s", "gateway litestar", "engine.core"),
        ("gateway", f"bm25s,{ENGINE_PACKAGES}", "torch transformers", "gateway.app"),
    ],
)
def test_every_module_loads_without_what_its_package_must_not_know(
    package: str, blocked: str, never_loaded: str, a_module: str
) -> None:
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    run = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", SCRIPT, package, blocked],
        env=environment,
        capture_output=True,
        text=True,
    )
    assert run.returncode == 0, run.stderr
    seen = json.loads(run.stdout.splitlines()[-1])
    assert a_module in seen["modules"]
    assert not set(never_loaded.split()) & set(seen["loaded"])
