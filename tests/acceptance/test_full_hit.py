"""Cases of the kind full-hit: what is cached whole is answered as if nothing were, with exact counts."""

from __future__ import annotations

from .servers import Client, Server, tok


def test_b1_a_prompt_that_is_cached_whole_is_answered_alike(roomy: Server) -> None:
    async def scenario(client: Client) -> None:
        answers = [await client.complete(tok(0, 32), max_tokens=8) for _ in range(3)]
        assert [answer.status for answer in answers] == [200] * 3
        assert len({answer.text for answer in answers}) == 1
        assert [answer.cached for answer in answers] == [0, 16, 16]

    roomy.run(scenario)


def test_b2_hits_are_exact_at_every_length(roomy: Server) -> None:
    async def scenario(client: Client) -> None:
        for count in range(1, 50):
            answers = [await client.complete(tok(100 * count, count), max_tokens=4) for _ in range(3)]
            assert [answer.status for answer in answers] == [200] * 3
            assert len({answer.text for answer in answers}) == 1
            assert [answer.cached for answer in answers] == [0, 16 * ((count - 1) // 16), 16 * ((count - 1) // 16)]

    roomy.run(scenario)
