"""What the demo promises, without an engine: the real walk of a request against a replica that never forgets."""

from __future__ import annotations

import json
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest
from tokenizers import Tokenizer
from tokenizers.decoders import ByteLevel as ByteLevelDecoder
from tokenizers.models import BPE
from tokenizers.pre_tokenizers import ByteLevel
from tokenizers.trainers import BpeTrainer

from engine.wire import BlockStored, EngineInfo
from gateway.config import CanonicalConfig
from gateway.demo.application import Application
from gateway.demo.corpus import Passage, read_corpus
from gateway.demo.prompts import SYSTEM_PROMPTS, template_configs
from gateway.demo.retrieval import Retriever
from gateway.demo.workload import draw_workload
from gateway.plan import Caller
from gateway.prompt import PromptRenderer
from gateway.replicas.base import ReplicaState
from gateway.request_path import RequestPath
from gateway.routing.router import Router
from gateway.schema import ChatRequest

CHATML = (
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n{{ message['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


@pytest.fixture(scope="module")
def corpus() -> list[Passage]:
    return read_corpus()


@pytest.fixture(scope="module")
def renderer(corpus: list[Passage], tmp_path_factory: pytest.TempPathFactory) -> PromptRenderer:
    """A byte-level BPE tokenizer as language models have them, trained on the corpus itself."""
    tokenizer = Tokenizer(BPE())
    tokenizer.pre_tokenizer = ByteLevel(add_prefix_space=False)
    tokenizer.decoder = ByteLevelDecoder()
    trainer = BpeTrainer(
        vocab_size=6000, special_tokens=["<|im_start|>", "<|im_end|>"], initial_alphabet=ByteLevel.alphabet(),
        show_progress=False,
    )  # fmt: skip
    tokenizer.train_from_iterator([passage.text for passage in corpus], trainer)
    folder = tmp_path_factory.mktemp("tokenizer")
    tokenizer.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(json.dumps({"chat_template": CHATML}))
    return PromptRenderer(folder)


class FreeCurve:
    """Prefill cost does not matter with one replica."""

    def seconds(self, tokens: int, context: int) -> float:
        return 0.0


def replay(renderer: PromptRenderer, bodies: list[dict[str, Any]]) -> tuple[float, list[Any]]:
    """Hit rate of ``bodies`` one after the other on a cold replica with room for everything, and their plans."""
    replica: Any = SimpleNamespace(
        id="engine-0",
        state=ReplicaState.READY,
        load=None,
        tells_events=True,
        reads_tokens=True,
        forgiven=True,
        cache_blocks=0,
        restarts=0,
        info=EngineInfo(
            model="m", root="", fingerprint="f", boot_id="1", max_model_len=8192, num_blocks=1, block_size=16,
            dtype="float32", device="cpu", vocab_size=renderer.vocab_size, eos_token_ids=(), policy="lru",
            max_batch_tokens=512,
        ),
    )  # fmt: skip
    router = Router(lambda _replica_id: FreeCurve())
    router.on_ready(replica, replica.info)
    path = RequestPath(
        model="m", secret=b"secret", canonical=CanonicalConfig(), templates=template_configs(), renderer=renderer,
        router=router,
    )  # fmt: skip
    plans = []
    for body in bodies:
        plan = path.plan_chat(msgspec.convert(body, ChatRequest), Caller("default"))
        router.on_events(replica, (BlockStored(tuple(plan.keys), None, 16),))
        plans.append(plan)
    return sum(plan.predicted_cached for plan in plans) / sum(len(plan.token_ids) for plan in plans), plans


def test_canonicalization_makes_most_of_a_cold_cache(corpus: list[Passage], renderer: PromptRenderer) -> None:
    application = Application(Retriever(corpus), "m", max_tokens=16)
    asks = draw_workload(110)
    as_is, plans = replay(renderer, [application.as_written(ask) for ask in asks])
    assert as_is <= 0.10
    assert {plan.template for plan in plans} == set(SYSTEM_PROMPTS)
    canonical, plans = replay(renderer, [application.structured(ask) for ask in asks])
    assert canonical >= 0.42
    assert {plan.template for plan in plans} == set(SYSTEM_PROMPTS)
    assert {plan.order for plan in plans} == {"cache-aware"}


def test_canonicalization_keeps_every_word_of_the_request(corpus: list[Passage], renderer: PromptRenderer) -> None:
    application = Application(Retriever(corpus), "m", max_tokens=16)
    for ask in draw_workload(5):
        body = application.structured(ask)
        _, (plan,) = replay(renderer, [body])
        prompt = renderer.decode(plan.token_ids)
        for document in body["documents"]:
            assert f"\n\n[Document {document['id']}] {document['title']}\n{document['text']}" in prompt
        assert all(f"{field}={value}" in prompt for field, value in ask.fields.items())
        assert f"\n\nQuestion: {ask.question}" in prompt
