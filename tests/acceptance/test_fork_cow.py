"""Cases of the kind fork-cow: choices that share a prompt's blocks are draws of their own."""

from __future__ import annotations

from .servers import Client, Server, tok


def test_d4_choices_differ_and_are_the_same_whatever_is_cached(roomy: Server) -> None:
    fields = {"n": 4, "temperature": 1, "seed": 7, "max_tokens": 24, "ignore_eos": True}

    async def scenario(client: Client) -> None:
        runs = [await client.complete(tok(0, 40), **fields) for _ in range(2)]
        assert (await client.reset()).status == 200
        runs.append(await client.complete(tok(0, 40), **fields))
        assert [run.cached for run in runs] == [0, 32, 0]
        for run in runs:
            assert [choice["index"] for choice in run.json["choices"]] == [0, 1, 2, 3]
            assert run.json["usage"]["prompt_tokens"] == 40
            assert run.json["usage"]["completion_tokens"] == 4 * 24
        texts = [[choice["text"] for choice in run.json["choices"]] for run in runs]
        assert len(set(texts[0])) >= 3
        assert texts == [texts[0]] * 3

    roomy.run(scenario)


def test_beams_are_distinct_best_first_and_the_same_as_a_stream(roomy: Server) -> None:
    fields = {"n": 3, "use_beam_search": True, "max_tokens": 12, "ignore_eos": True, "logprobs": 0}

    async def scenario(client: Client) -> None:
        whole = await client.complete(tok(0, 40), **fields)
        assert whole.status == 200, whole.body
        choices = whole.json["choices"]
        assert len({choice["text"] for choice in choices}) == 3
        sums = [sum(choice["logprobs"]["token_logprobs"]) for choice in choices]
        assert sums == sorted(sums, reverse=True)
        greedy = await client.complete(tok(0, 40), max_tokens=12, ignore_eos=True, logprobs=0)
        assert sums[0] >= sum(greedy.json["choices"][0]["logprobs"]["token_logprobs"]) - 1e-4
        streamed = await client.complete(tok(0, 40), stream=True, **fields)
        texts = [""] * 3
        for event in streamed.events[:-1]:
            for choice in event["choices"]:
                texts[choice["index"]] += choice["text"]
        assert texts == [choice["text"] for choice in choices]

    roomy.run(scenario)
