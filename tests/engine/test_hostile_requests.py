"""Everything at once in a pool that is too small: choices, beams, log-probabilities, classes, aborts, resets.

Whatever happens, the invariants hold after every step, each request that was let be gets what it gets alone in a large
pool, and nothing is held in the end. ``HEADSTART_HOSTILE_SEEDS=200`` tries as many as that.
"""

from __future__ import annotations

import os
import random
from typing import Any

import pytest

SEEDS = int(os.environ.get("HEADSTART_HOSTILE_SEEDS", "4"))
MOST_STEPS = 20_000
VOCABULARY = 60
EOS = (3, 7, 8, 40)


def some_request(draw: random.Random, base: list[int]) -> dict[str, Any]:
    """A request of any kind, its prompt sharing a beginning of any length with others."""
    prompt = [*base[: draw.choice([0, draw.randrange(24), 16])], *(draw.randrange(VOCABULARY) for _ in range(8))]
    request: dict[str, Any] = {
        "prompt": prompt[: draw.randrange(1, len(prompt) + 1)],
        "max_tokens": draw.randrange(1, 31),
        "ignore_eos": draw.random() < 0.5,
        "use_cache": draw.random() < 0.8,
        "priority": draw.choice([0, 0, 1, 2]),
        "logprobs": draw.choice([None, None, 0, 2]),
        "prompt_logprobs": draw.choice([None, None, None, 1]),
    }
    request["class_limit"] = request["priority"] and 3
    kind = draw.randrange(4)
    if kind == 0:
        request |= {"n": draw.randrange(1, 5), "temperature": 1.0, "seed": draw.randrange(9)}
    elif kind == 1:
        width = draw.randrange(1, 7)
        request |= {"n": draw.randrange(1, width + 1), "beam_width": width, "min_tokens": draw.choice([0, 0, 5])}
        request |= {"length_penalty": draw.choice([1.0, 0.0, -1.0]), "early_stopping": draw.random() < 0.5}
    return request


def told(engine: Any, id: int, n: int) -> list[Any]:
    wholes = [engine.whole(id, index) for index in range(n)]
    return [(one.token_ids, one.text, one.finish_reason, one.logprobs, one.prompt_logprobs) for one in wholes]


@pytest.mark.parametrize("seed", range(SEEDS))
def test_whatever_happens_requests_get_what_they_get_alone(seed: int, scripted_engine: Any) -> None:
    draw = random.Random(seed)
    base = [draw.randrange(VOCABULARY) for _ in range(24)]
    block_size = draw.choice([1, 2, 4])
    # The longest request fits, and not much more.
    num_blocks = -(-(24 + 8 + 30) // block_size) + draw.randrange(4)
    tight = scripted_engine(
        num_blocks=num_blocks,
        block_size=block_size,
        max_batch_tokens=draw.choice([6, 16, 64]),
        max_running=draw.choice([6, 10]),
        vocab_size=VOCABULARY,
        eos=EOS,
    )
    roomy = scripted_engine(num_blocks=4000, block_size=16, vocab_size=VOCABULARY, eos=EOS)
    queued: dict[int, dict[str, Any]] = {}
    aborted: set[int] = set()
    coming = [some_request(draw, base) for _ in range(30)]
    for _ in range(MOST_STEPS):
        if not coming and not tight.core.has_work():
            break
        for _ in range(min(len(coming), draw.choice([0, 1, 3]))):
            request = coming.pop()
            queued[tight.queue(**request)] = request
        if draw.random() < 0.05 and queued:
            aborted.add(id := draw.choice([*queued]))
            tight.core.abort((id,))
        if draw.random() < 0.02:
            tight.core.call("reset_cache", {})
        if tight.core.has_work():
            tight.step()
            running = tight.core._scheduler.running
            used = {block for sequence in running for block in sequence.table.blocks}
            assert tight.load.used_blocks == len(used), "nobody but who runs holds blocks"
            assert len(running) <= tight.core._scheduler.max_running
    assert not coming
    tight.run()
    assert tight.load.preemptions > 0
    for id, request in queued.items():
        n = request.get("n", 1)
        if any(tight.whole(id, index).finish_reason == "abort" for index in range(n)):
            assert id in aborted
            continue
        alone = roomy.queue(**request)
        roomy.run()
        assert told(tight, id, n) == told(roomy, alone, n), request
