"""Cases of the kind block-manager: the operator can trust what a reset answers."""

from __future__ import annotations

from .servers import Client, Server, tok


def test_c12_a_reset_says_what_it_could_do_and_harms_no_running_request(roomy: Server) -> None:
    prompt, fields = tok(0, 100), {"max_tokens": 200, "ignore_eos": True}

    async def scenario(client: Client) -> None:
        undisturbed = (await client.complete(prompt, **fields)).text
        async with client.stream(prompt, **fields) as stream:
            text = await stream.take(5)
            during = await client.reset()
            assert during.status == 202
            assert during.json["status"] == "deferred"
            (engine,) = during.json["replicas"].values()
            assert engine["kept"] > 0
            assert text + await stream.rest() == undisturbed
        await client.idle()
        assert (await client.complete(prompt, **fields)).cached == 0, "what was computed before the reset was hit"
        assert (await client.complete(prompt, **fields)).cached == 96
        after = await client.reset()
        assert after.status == 200
        assert after.json["status"] == "done"
        (engine,) = after.json["replicas"].values()
        assert engine["dropped"] > 0
        again = await client.complete(prompt, **fields)
        assert (again.cached, again.text) == (0, undisturbed)

    roomy.run(scenario)
