"""A tiny language model whose answers tell exactly what it has read, made in a second.

Its vocabulary has a token for each word ``w0``, ``w1``, … and for each byte, so that tokens and text determine each
other. Its weights are random, and so large that what comes next depends on every token in front. With one exception:
``START`` is always followed by ``SCRIPT``, which are characters in pieces, and then by the end of the text.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Final

from tokenizers import AddedToken, Regex, Tokenizer, decoders, pre_tokenizers
from tokenizers.models import BPE

from ..gateway.conftest import CHATML

__all__ = ["EOS", "MAX_POSITIONS", "SCRIPT", "SCRIPT_TEXT", "START", "VOCABULARY", "make_model", "write_weights"]

_SPECIALS: Final = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
_LONG_PIECES: Final = (b"\xf0\x9f", b"\xa7\x91", b"\xf0\x9f\x8f", b"\xe6\xbc")
_FIRST_BYTE: Final = len(_SPECIALS)
_FIRST_PIECE: Final = _FIRST_BYTE + 256
_FIRST_WORD: Final = _FIRST_PIECE + len(_LONG_PIECES)
_WORDS: Final = 10_000


def _piece(data: bytes) -> int:
    return _FIRST_BYTE + data[0] if len(data) == 1 else _FIRST_PIECE + _LONG_PIECES.index(data)


EOS: Final = 2
START: Final = _FIRST_WORD
SCRIPT: Final = [
    *map(_piece, (*_LONG_PIECES[:3], b"\xbd", b"\xc3", b"\xa9", _LONG_PIECES[3], b"\xa2", b"\x80", b"!")),
    EOS,
]  # fmt: skip
"""What follows ``START``: characters, cut as byte-level vocabularies cut them, a byte that is none, and the end."""
SCRIPT_TEXT: Final = "🧑🏽é漢\ufffd!"
VOCABULARY: Final = _FIRST_WORD + _WORDS
MAX_POSITIONS: Final = 8192

_HIDDEN: Final = 128
_SCRIPTED: Final = 16  # dimensions of the hidden state that say nothing but how far the script is
_LOUD: Final = 1e4


def make_model(folder: Path, seed: int) -> Path:
    """Write weights, tokenizer and chat template into ``folder``; another seed is another model of the same shape."""
    folder.mkdir(parents=True)
    _write_tokenizer(folder)
    write_weights(folder, seed)
    return folder


def _write_tokenizer(folder: Path) -> None:
    from transformers.convert_slow_tokenizer import bytes_to_unicode

    spelled = bytes_to_unicode()
    names = [*_SPECIALS, *(spelled[byte] for byte in range(256))]
    names += ["".join(spelled[byte] for byte in piece) for piece in _LONG_PIECES]
    names += [f"{spelled[ord(' ')]}w{i}" for i in range(_WORDS)]
    tokenizer = Tokenizer(BPE({name: i for i, name in enumerate(names)}, [], ignore_merges=True))
    tokenizer.add_special_tokens([AddedToken(name, special=True) for name in _SPECIALS])
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(r" ?\S+|\s"), "isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.save(str(folder / "tokenizer.json"))
    (folder / "chat_template.jinja").write_text(CHATML)
    settings = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": _SPECIALS[EOS]}
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))


def write_weights(folder: Path, seed: int) -> None:
    """Write configuration and weights, over those that are there."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(seed)
    config = LlamaConfig(
        vocab_size=VOCABULARY, hidden_size=_HIDDEN, intermediate_size=256, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, max_position_embeddings=MAX_POSITIONS, initializer_range=0.3, tie_word_embeddings=False,
        eos_token_id=EOS, bos_token_id=None, pad_token_id=None,
    )  # fmt: skip
    model = LlamaForCausalLM(config)
    with torch.no_grad():
        embedding, head = model.model.embed_tokens.weight, model.lm_head.weight
        embedding[:, -_SCRIPTED:] = 0
        head[:, -_SCRIPTED:] = 0
        for layer in model.model.layers:
            # Attention looks at many tokens instead of one, and no layer writes where the script is.
            layer.self_attn.q_proj.weight *= 0.3
            layer.self_attn.o_proj.weight[-_SCRIPTED:] = 0
            layer.mlp.down_proj.weight[-_SCRIPTED:] = 0
        for step, (token, successor) in enumerate(zip([START, *SCRIPT], SCRIPT, strict=False)):
            embedding[token, -1 - step] = _LOUD
            head[successor] = 0
            head[successor, -1 - step] = 10
    model.save_pretrained(folder)
