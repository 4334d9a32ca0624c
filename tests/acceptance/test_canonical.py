"""Acceptance cases of canonicalization that need answers of a real engine."""

from __future__ import annotations

import pytest

from .servers import Client, Server, words


@pytest.mark.parametrize("sampled", [False, True])
def test_l9_the_next_turn_finds_the_whole_last_one(sampled: bool, roomy: Server) -> None:
    async def scenario(client: Client) -> None:
        turns = [{"role": "system", "content": words(0, 100)}, {"role": "user", "content": words(200, 60)}]
        options = {"temperature": 1, "seed": 3} if sampled else {}
        first = await client.chat(turns, max_tokens=64, ignore_eos=True, **options)
        usage = first.json["usage"]
        turns += [{"role": "assistant", "content": first.text}, {"role": "user", "content": "go on"}]
        second = await client.chat(turns)
        assert second.cached >= usage["prompt_tokens"] // 16 * 16
        generated_hit = second.cached - usage["prompt_tokens"]
        print(f"of {usage['completion_tokens']} generated tokens {generated_hit} were hit")

    roomy.run(scenario)
