"""Cases of the kind logprobs: right with the cache hit, and bounded before they cost anything."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from .servers import Client, Server, tok


@pytest.mark.parametrize("fields", [{"echo": True, "logprobs": 1}, {"prompt_logprobs": 1}], ids=["echo", "prompt"])
def test_f1_logprobs_of_the_prompt_are_the_same_cold_and_cached(roomy: Server, fields: dict[str, Any]) -> None:
    def told(answer: Any) -> list[dict[str, float] | None]:
        """Alternatives by token, for each token of the prompt."""
        (choice,) = answer.json["choices"]
        if "echo" in fields:
            assert len(choice["logprobs"]["token_logprobs"]) == 40 + 1
            tops: list[dict[str, float] | None] = choice["logprobs"]["top_logprobs"][:40]
            assert [top and top[token] for top, token in zip(tops, choice["logprobs"]["tokens"], strict=False)] == (
                choice["logprobs"]["token_logprobs"][:40]
            )
            return tops
        return [
            row and {entry["decoded_token"]: entry["logprob"] for entry in row.values()}
            for row in choice["prompt_logprobs"]
        ]

    async def scenario(client: Client) -> None:
        prompt = tok(0, 40)
        cold = told(await client.complete(prompt, max_tokens=1, **fields))
        assert (await client.complete(prompt, max_tokens=1)).cached == 32
        cached = told(await client.complete(prompt, max_tokens=1, **fields))
        for rows in (cold, cached):
            assert len(rows) == 40
            assert rows[0] is None
        for one, other in zip(cold[1:], cached[1:], strict=True):
            assert one is not None
            assert other is not None
            assert one == pytest.approx(other, abs=1e-4)
            assert max(one.values()) < 0

    roomy.run(scenario)


def _resident_bytes(*pids: int | str) -> int:
    """Memory of processes; 0 where there is no /proc."""
    files = [Path(f"/proc/{pid}/statm") for pid in pids]
    return 4096 * sum(int(file.read_text().split()[1]) for file in files if file.exists())


def test_f3_logprobs_are_bounded_before_they_cost_anything(roomy: Server) -> None:
    """What is refused never reaches the engine, which is more than that it is refused within 100 ms."""
    chats = [({"logprobs": True, "top_logprobs": value}, value) for value in (-1, 0, 1, 20, 21, 10**6)]
    completions = [({"logprobs": value}, value) for value in (-1, 0, 5, 20, 21, 10**6)]
    completions += [({"prompt_logprobs": value}, value) for value in (-1, 21, 10**6)]

    async def scenario(client: Client) -> None:
        assert roomy.replica.pid is not None
        before = _resident_bytes("self", roomy.replica.pid)
        for ask, cases in ((client.chat, chats), (client.complete, completions)):
            for fields, value in cases:
                steps = (await client.load())["steps"]
                answer = await ask("w1 w2 w3", max_tokens=7, ignore_eos=True, **fields)
                if not 0 <= value <= 20:
                    assert answer.status == 400
                    assert answer.json["error"]["param"] in fields
                    assert (await client.load())["steps"] == steps
                    continue
                assert answer.status == 200
                (choice,) = answer.json["choices"]
                assert answer.json["usage"]["completion_tokens"] == 7
                if "message" in choice:
                    tops = [entry["top_logprobs"] for entry in choice["logprobs"]["content"]]
                    assert [len(top) for top in tops] == [value] * 7
                else:
                    assert [len(entries) for entries in choice["logprobs"].values()] == [7] * 4
        assert _resident_bytes("self", roomy.replica.pid) - before < 20 * 2**20

    roomy.run(scenario)


def test_i9_a_tiny_temperature_is_greedy_and_all_logprobs_are_finite(roomy: Server) -> None:
    async def scenario(client: Client) -> None:
        greedy = await client.complete(tok(3, 30), temperature=0, logprobs=20)
        for fields in ({"temperature": 1e-9}, {"temperature": 1e-9, "top_k": 10**9, "top_p": 1e-9}):
            answer = await client.complete(tok(3, 30), logprobs=20, **fields)
            assert answer.text == greedy.text
            assert answer.json["choices"][0]["logprobs"] == greedy.json["choices"][0]["logprobs"]
        extreme = {"presence_penalty": -2, "frequency_penalty": 2, "repetition_penalty": 0.01, "temperature": 2}
        bias = {str(token): (-1) ** token * 100 for token in tok(0, 300)}
        answer = await client.complete(tok(3, 30), logprobs=20, logit_bias=bias, **extreme)
        assert answer.status == 200
        logprobs = answer.json["choices"][0]["logprobs"]
        assert all(-1e4 < value <= 0 for top in logprobs["top_logprobs"] for value in top.values())

    roomy.run(scenario)
