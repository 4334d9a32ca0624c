"""Model folders without weights: small tokenizers of the families in wide use, each with a chat template.

And how every test here waits for something: ``until`` it is so.
"""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Callable
from functools import cache
from pathlib import Path

import msgspec
import pytest
from tokenizers import Regex, Tokenizer, decoders, normalizers, pre_tokenizers, trainers
from tokenizers.models import BPE

from engine.models.catalog import DEFAULT_MODEL, ensure_model
from engine.wire import EngineInfo, Load
from gateway.prompt import PromptRenderer
from gateway.replicas.base import ReplicaState

CHATML = (
    "{% for message in messages %}{% if loop.first and messages[0]['role'] != 'system' %}"
    "{{ '<|im_start|>system\nYou are a model.<|im_end|>\n' }}{% endif %}"
    "{{'<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>' + '\n'}}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
HEADERS = (
    "{{- bos_token }}{%- for message in messages %}"
    "{{- '<|start_header_id|>' + message['role'] + '<|end_header_id|>\n\n' }}"
    "{{- message['content'] | trim + '<|eot_id|>' }}"
    "{%- endfor %}{%- if add_generation_prompt %}"
    "{{- '<|start_header_id|>assistant<|end_header_id|>\n\n' }}{%- endif %}"
)
INSTRUCTIONS = (
    "{{ bos_token }}{% for message in messages %}{% if message['role'] == 'system' %}"
    "{{ '[SYS] ' + message['content'] + '\n' }}{% elif message['role'] == 'user' %}"
    "{{ '[INST] ' + message['content'] + ' [/INST]' }}{% elif message['role'] == 'assistant' %}"
    "{{ message['content'] + eos_token }}{% else %}{{ raise_exception('Only user and assistant roles are known.') }}"
    "{% endif %}{% endfor %}"
)
CL100K = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+"
)

# Whatever joins across newlines in some pre-tokenizer occurs often, so that a wrong cut changes ids.
TRAINING_TEXT = [
    "The cache keeps blocks. Each block has sixteen tokens!\n\nWhat a prefix shares is computed once.\n",
    "[Document d1] A title\nIts text, in two lines.\nThe second line ends here.\n\nQuestion: what is cached?\n\n",
    "def f(x):\n    return {'a': x + 1}\n\n\n/usr/lib/x.py\n\n  indented\t tabs \n \n mixed   \n\n\n",
    "Ümläute, é, 漢字 and 1234567890; it's we're.\r\n\r\nCarriage returns.\n\n...\n\n!!!\n\n///\n\n((( )))\n",
    "<|im_start|>user\n\n[Document d2] ## heading\n\n* item\n\n2024-01-02 03:04:05\n\n42\n\n",
] * 3


def _bpe(specials: list[str], *, byte_level: bool = True) -> tuple[Tokenizer, trainers.BpeTrainer]:
    tokenizer = Tokenizer(BPE(unk_token=None))
    printable = [*map(chr, range(32, 127)), *"\n\t\r\u00a0▁é漢字"]
    alphabet = pre_tokenizers.ByteLevel.alphabet() if byte_level else printable
    trainer = trainers.BpeTrainer(
        vocab_size=700, special_tokens=specials, initial_alphabet=alphabet, show_progress=False, min_frequency=2
    )
    return tokenizer, trainer


def train_tokenizer(pre_tokenizer: pre_tokenizers.PreTokenizer, specials: list[str]) -> Tokenizer:
    """A byte-level BPE tokenizer behind ``pre_tokenizer``."""
    tokenizer, trainer = _bpe(specials)
    tokenizer.pre_tokenizer = pre_tokenizer
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.train_from_iterator(TRAINING_TEXT, trainer)
    return tokenizer


def _chatml() -> tuple[Tokenizer, str, dict[str, str]]:
    split = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    tokenizer = train_tokenizer(split, ["<|endoftext|>", "<|im_start|>", "<|im_end|>"])
    tokenizer.add_tokens(["<tool_call>", "   "])  # not special: markup, and a run of blanks that is only text
    return tokenizer, CHATML, {"eos_token": "<|im_end|>"}


def _headers() -> tuple[Tokenizer, str, dict[str, str]]:
    split = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(CL100K), "isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    specials = ["<|begin_of_text|>", "<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>"]
    tokenizer = train_tokenizer(split, specials)
    return tokenizer, HEADERS, {"bos_token": "<|begin_of_text|>", "eos_token": "<|eot_id|>"}


def _instructions() -> tuple[Tokenizer, str, dict[str, str]]:
    """A SentencePiece look-alike: one metasymbol in front of the text, no pre-tokenizer to cut at."""
    tokenizer, trainer = _bpe(["<s>", "</s>", "[INST]", "[/INST]"], byte_level=False)
    tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    tokenizer.decoder = decoders.Sequence([decoders.Replace("▁", " "), decoders.Fuse(), decoders.Strip(" ", 1, 0)])
    tokenizer.train_from_iterator([text.replace("\n", "\n ") for text in TRAINING_TEXT], trainer)
    return tokenizer, INSTRUCTIONS, {"bos_token": "<s>", "eos_token": "</s>"}


async def until(condition: Callable[[], bool], timeout_s: float = 60.0) -> None:
    """Poll a condition; fails when it is not met in time."""
    deadline = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline, "the condition was not met in time"
        await asyncio.sleep(0.002)


@pytest.fixture(scope="session")
def tokenizer_behind() -> Callable[[pre_tokenizers.PreTokenizer], Tokenizer]:
    """``tokenizer_behind(pre_tokenizer)``: a small byte-level BPE tokenizer with ChatML's control tokens."""
    return lambda pre_tokenizer: train_tokenizer(pre_tokenizer, ["<|im_start|>", "<|im_end|>"])


_KINDS = {"chatml": _chatml, "headers": _headers, "instructions": _instructions}


@pytest.fixture(scope="session")
def model_folder(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """``model_folder(kind)``: tokenizer and chat template; kinds ``chatml``, ``headers``, ``instructions``."""

    @cache
    def make(kind: str) -> Path:
        folder = tmp_path_factory.mktemp(kind)
        tokenizer, template, spellings = _KINDS[kind]()
        tokenizer.save(str(folder / "tokenizer.json"))
        (folder / "chat_template.jinja").write_text(template)
        config = {"tokenizer_class": "PreTrainedTokenizerFast", **spellings}
        (folder / "tokenizer_config.json").write_text(json.dumps(config))
        return folder

    return make


@pytest.fixture(scope="session")
def renderer(model_folder: Callable[[str], Path]) -> Callable[[str], PromptRenderer]:
    """``renderer(kind)``: one renderer per kind for the whole session."""
    return cache(lambda kind: PromptRenderer(model_folder(kind)))


@pytest.fixture(scope="session")
def default_model() -> Path:
    """The folder of the default model, fetched and converted when it is not there yet; for tests marked ``model``."""
    return ensure_model(DEFAULT_MODEL)


class QuietReplica:
    """A replica that only says what it serves and how busy it is; requests are planned for it, never sent."""

    def __init__(self, id: str, info: EngineInfo) -> None:
        self.id = id
        self.url: str | None = None
        self.restarts = True
        self.state = ReplicaState.READY
        self.info: EngineInfo | None = info
        self.load: Load | None = None
        self.down_reason: str | None = None
        self.tells_events = True
        self.reads_tokens = True
        self.forgiven = True
        self.cache_blocks = info.num_blocks
        self.resyncs = 0

    def resync(self) -> None:
        self.resyncs += 1


@pytest.fixture
def quiet_replica() -> Callable[..., QuietReplica]:
    """``quiet_replica(id, **info)``: a ready replica with blocks of 16 tokens and room for 4,096."""
    info = EngineInfo(
        model="m",
        root="",
        fingerprint="weights",
        boot_id="1",
        max_model_len=4096,
        num_blocks=256,
        block_size=16,
        dtype="float32",
        device="cpu",
        vocab_size=500,
        eos_token_ids=(),
        policy="lru",
        max_batch_tokens=512,
    )
    return lambda id="engine-0", **changes: QuietReplica(id, msgspec.structs.replace(info, **changes))
