"""Logs of a small application, written line by line."""

from __future__ import annotations

import json
import random
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import pytest

from gateway.analysis.passes import Job
from gateway.config import CanonicalConfig, TemplateConfig

SYSTEM = (
    "You are the support assistant of Acme. Now: {now}. Talking to {user}.\nAnswer from the documents only, briefly."
)
DOCUMENTS = [
    {"id": f"kb-{index}", "title": f"Article {index}", "text": f"Article {index} says: " + "word " * 12 + f"{index}."}
    for index in range(6)
]


def bodies(count: int, *, seed: int = 7) -> list[dict[str, Any]]:
    """Requests of one template: its fields differ each time, three of six documents in any order, other questions."""
    rng = random.Random(seed)
    return [
        {
            "model": "any",
            "messages": [
                {
                    "role": "system",
                    "content": SYSTEM.format(
                        now=f"2026-03-02 08:{serial // 60:02}:{serial % 60:02}", user=f"dev-{rng.randrange(1000):03}"
                    ),
                },
                {"role": "user", "content": f"What does article {rng.randrange(100)} say?"},
            ],
            "documents": rng.sample(DOCUMENTS, 3),
        }
        for serial in range(count)
    ]


@pytest.fixture
def write_log(tmp_path: Path) -> Callable[[Iterable[Any]], Path]:
    """``write_log(lines)``: a file of bodies; strings are written as they are."""

    def write(lines: Iterable[Any]) -> Path:
        path = tmp_path / "log.jsonl"
        path.write_text("".join((line if isinstance(line, str) else json.dumps(line)) + "\n" for line in lines))
        return path

    return write


@pytest.fixture
def job(model_folder: Callable[[str], Path]) -> Callable[..., Job]:
    """``job(log, **changes)``: an analysis with the template declared and two cache sizes."""

    def make(log: Path, **changes: Any) -> Job:
        settings: dict[str, Any] = {
            "log": log,
            "name": "log.jsonl",
            "folder": model_folder("chatml"),
            "canonical": CanonicalConfig(),
            "templates": {"support": TemplateConfig(SYSTEM)},
            "sizes": (None, 64),
            "policy": "lru",
            "block_size": 16,
        }
        return Job(**settings | changes)

    return make
