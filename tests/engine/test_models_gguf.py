"""A GGUF file becomes the model it was made from: same weights, configuration and tokenizer."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
from tokenizers import Tokenizer
from tokenizers.pre_tokenizers import ByteLevel
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM

from engine.errors import ModelError
from engine.models.catalog import check_model_folder
from engine.models.gguf import convert
from engine.models.loading import read_model_info

HEADS, KV_HEADS, HIDDEN, LAYERS = 4, 2, 64, 2
SPECIAL = ["<unk>", "<s>", "</s>"]
PIECES = [*SPECIAL, *sorted(ByteLevel.alphabet()), "th", "Ġth"]
MERGES = ["t h", "Ġ th"]


def llama() -> LlamaForCausalLM:
    torch.manual_seed(3)
    config = LlamaConfig(
        vocab_size=len(PIECES),
        hidden_size=HIDDEN,
        intermediate_size=96,
        num_hidden_layers=LAYERS,
        num_attention_heads=HEADS,
        num_key_value_heads=KV_HEADS,
        max_position_embeddings=128,
        rms_norm_eps=1e-3,
        initializer_range=0.2,
        bos_token_id=1,
        eos_token_id=2,
        rope_parameters={"rope_type": "default", "rope_theta": 5000.0},
        tie_word_embeddings=False,
    )
    return LlamaForCausalLM(config).eval()


def interleaved(weight: np.ndarray[Any, Any], heads: int) -> np.ndarray[Any, Any]:
    """Rows of a query or key projection in the order of GGUF's rotary embedding."""
    rows, columns = weight.shape
    return weight.reshape(heads, 2, rows // heads // 2, columns).swapaxes(1, 2).reshape(rows, columns)


def write_gguf(model: LlamaForCausalLM, path: Path, quantized: str) -> None:
    """Write the model as llama.cpp's converter would, the tensor ``quantized`` in 8 bits."""
    config = model.config
    writer = gguf.GGUFWriter(str(path), "llama")
    writer.add_name("tiny")
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(HIDDEN)
    writer.add_block_count(LAYERS)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(HEADS)
    writer.add_head_count_kv(KV_HEADS)
    writer.add_rope_dimension_count(HIDDEN // HEADS)
    writer.add_rope_freq_base(5000.0)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_vocab_size(len(PIECES))
    writer.add_tokenizer_model("gpt2")
    writer.add_token_list(PIECES)
    writer.add_token_types([3 if piece in SPECIAL else 1 for piece in PIECES])
    writer.add_token_merges(MERGES)
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    writer.add_chat_template("{{ messages[0]['content'] }}")
    names = gguf.get_tensor_name_map(gguf.MODEL_ARCH.LLAMA, LAYERS)
    for name, tensor in model.state_dict().items():
        data = tensor.numpy()
        if name.endswith("q_proj.weight"):
            data = interleaved(data, HEADS)
        if name.endswith("k_proj.weight"):
            data = interleaved(data, KV_HEADS)
        target = names.get_name(name, try_suffixes=(".weight",))
        assert target is not None
        if name == quantized:
            eight_bits = gguf.GGMLQuantizationType.Q8_0
            writer.add_tensor(target, gguf.quants.quantize(data, eight_bits), raw_dtype=eight_bits)
        else:
            writer.add_tensor(target, np.ascontiguousarray(data))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def test_the_converted_folder_is_the_model_in_the_file(tmp_path: Path) -> None:
    model = llama()
    quantized = "model.layers.1.mlp.up_proj.weight"
    (tmp_path / "gguf").mkdir()
    write_gguf(model, tmp_path / "gguf" / "tiny.gguf", quantized)
    folder = tmp_path / "folder"
    convert(tmp_path / "gguf" / "tiny.gguf", folder)

    check_model_folder(folder)
    info = read_model_info(folder)
    assert (info.max_positions, info.vocab_size, info.eos_token_ids) == (128, len(PIECES), (2,))
    converted = AutoModelForCausalLM.from_pretrained(folder, local_files_only=True).eval()
    assert converted.dtype == torch.float32
    assert converted.config.rms_norm_eps == pytest.approx(1e-3)
    ours, theirs = converted.state_dict(), model.state_dict()
    assert ours.keys() == theirs.keys()
    for name, tensor in theirs.items():
        if name == quantized:
            torch.testing.assert_close(ours[name], tensor, atol=0.01, rtol=0)
            assert not torch.equal(ours[name], tensor)
        else:
            assert torch.equal(ours[name], tensor), name

    model.load_state_dict(ours)
    ids = torch.arange(3, 43)[None]
    with torch.inference_mode():
        torch.testing.assert_close(converted(ids).logits, model(ids).logits)

    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    text = "the naïve 漢字"
    ids_of_text = tokenizer.encode(text, add_special_tokens=False).ids
    assert tokenizer.decode(ids_of_text) == text
    assert PIECES.index("th") in ids_of_text
    assert "messages[0]" in (folder / "chat_template.jinja").read_text()


def test_a_file_that_is_no_gguf_is_an_error(tmp_path: Path) -> None:
    (tmp_path / "broken.gguf").write_bytes(b"GGUF but no more")
    with pytest.raises(ModelError):
        convert(tmp_path / "broken.gguf", tmp_path / "folder")
