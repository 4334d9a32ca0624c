"""The weights of the Llama family as few large matrices, taken from a transformers model without a second copy.

A configuration is understood when the model consists of exactly the modules and tensors that are known here; anything
unforeseen (another activation, a norm more, a rotary embedding of part of a head) leaves the model to transformers.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any, Final

import msgspec
import torch
from transformers import PreTrainedModel

from engine.allocator import mapped_zeros

__all__ = ["LeanLayer", "LeanWeights", "lean_weights"]

_FAMILIES: Final = frozenset({"LlamaForCausalLM", "MistralForCausalLM", "Qwen2ForCausalLM", "Qwen3ForCausalLM"})
_TENSORS: Final = frozenset(
    {"input_layernorm.weight", "post_attention_layernorm.weight"}
    | {f"self_attn.{name}_proj.{kind}" for name in "qkvo" for kind in ("weight", "bias")}
    | {f"self_attn.{name}_norm.weight" for name in "qk"}
    | {f"mlp.{name}_proj.{kind}" for name in ("gate", "up", "down") for kind in ("weight", "bias")}
)
_LAYER_TENSOR: Final = re.compile(r"model\.layers\.\d+\.(.+)")
_OTHER_TENSORS: Final = frozenset({"model.embed_tokens.weight", "model.norm.weight", "lm_head.weight"})


class LeanLayer(msgspec.Struct, frozen=True):
    """One layer: ``qkv`` is ``[(heads + 2 * kv_heads) * dim, hidden]``, ``gate_up`` ``[2 * intermediate, hidden]``.

    Biases are None where there are none. ``head_norms`` are the norms of query and key heads (Qwen3).
    """

    input_norm: torch.Tensor
    qkv: torch.Tensor
    qkv_bias: torch.Tensor | None
    head_norms: tuple[torch.Tensor, torch.Tensor] | None
    output: torch.Tensor
    output_bias: torch.Tensor | None
    mlp_norm: torch.Tensor
    gate_up: torch.Tensor
    gate_up_bias: torch.Tensor | None
    down: torch.Tensor
    down_bias: torch.Tensor | None
    scaling: float
    window: int | None


class LeanWeights(msgspec.Struct, frozen=True):
    """A whole model. ``head`` is ``embedding`` itself where they are tied; ``rotary`` is the model's own module."""

    embedding: torch.Tensor
    layers: tuple[LeanLayer, ...]
    norm: torch.Tensor
    head: torch.Tensor
    eps: float
    heads: int
    kv_heads: int
    dim: int
    rotary: torch.nn.Module


def lean_weights(model: PreTrainedModel, windows: Sequence[int | None]) -> LeanWeights | None:
    """Fuse the weights of a model that is understood; None for any other, which is left as it was.

    The model's own parameters become views of the fused ones, so that it goes on working and nothing is held twice.

    Args:
        model: as transformers has loaded it, on the CPU.
        windows: how many tokens each layer sees; None for all.
    """
    if not _understood(model):
        return None
    config = model.config
    heads, kv_heads = config.num_attention_heads, config.num_key_value_heads
    dim = getattr(config, "head_dim", None) or config.hidden_size // heads
    core: Any = model.model
    memory = _Memory(model)
    layers = tuple(_layer(layer, window, memory) for layer, window in zip(core.layers, windows, strict=True))
    memory.fuse([model.lm_head])  # and with it the embedding, where they are tied
    return LeanWeights(
        embedding=core.embed_tokens.weight,
        layers=layers,
        norm=core.norm.weight,
        head=model.lm_head.weight,
        eps=float(config.rms_norm_eps),
        heads=heads,
        kv_heads=kv_heads,
        dim=dim,
        rotary=core.rotary_emb,
    )


def _understood(model: PreTrainedModel) -> bool:
    config = model.config
    if type(model).__name__ not in _FAMILIES or not type(model).__module__.startswith("transformers.models."):
        return False
    if getattr(config, "hidden_act", None) != "silu" or getattr(config, "pretraining_tp", 1) != 1:
        return False
    dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    rotary: Any = model.model.rotary_emb
    if 2 * getattr(rotary, "inv_freq", torch.empty(0)).shape[-1] != dim:  # only part of a head is rotated
        return False
    for name in model.state_dict():
        found = _LAYER_TENSOR.fullmatch(name)
        if name not in _OTHER_TENSORS and (found is None or found[1] not in _TENSORS):
            return False
    return not any(parameter.is_quantized or parameter.dim() > 2 for parameter in model.parameters())


class _Memory:
    """Owns the memory that the matrices are moved to: in the order in which a step reads them, and in huge pages."""

    def __init__(self, model: Any) -> None:
        modules = [module for module in model.modules() if isinstance(module, torch.nn.Linear)]
        total = sum(module.weight.numel() for module in modules)
        self._free = mapped_zeros((total,), model.lm_head.weight.dtype)

    def fuse(self, parts: list[torch.nn.Linear]) -> tuple[torch.Tensor, torch.Tensor | None]:
        """One matrix and bias for modules with the same input; theirs become views of it."""
        rows, width = sum(part.out_features for part in parts), parts[0].in_features
        weight, self._free = self._free[: rows * width].view(rows, width), self._free[rows * width :]
        biased = [part.bias for part in parts if part.bias is not None]
        bias = torch.cat(tuple(biased)) if len(biased) == len(parts) else None
        start = 0
        for part in parts:
            end = start + part.out_features
            weight[start:end] = part.weight
            part.weight.data = weight[start:end]
            if bias is not None:
                part.bias.data = bias[start:end]
            start = end
        return weight, bias


def _layer(layer: Any, window: int | None, memory: _Memory) -> LeanLayer:
    attention, mlp = layer.self_attn, layer.mlp
    qkv, qkv_bias = memory.fuse([attention.q_proj, attention.k_proj, attention.v_proj])
    output, output_bias = memory.fuse([attention.o_proj])
    gate_up, gate_up_bias = memory.fuse([mlp.gate_proj, mlp.up_proj])
    down, down_bias = memory.fuse([mlp.down_proj])
    norms = (attention.q_norm.weight, attention.k_norm.weight) if hasattr(attention, "q_norm") else None
    return LeanLayer(
        input_norm=layer.input_layernorm.weight,
        qkv=qkv,
        qkv_bias=qkv_bias,
        head_norms=norms,
        output=output,
        output_bias=output_bias,
        mlp_norm=layer.post_attention_layernorm.weight,
        gate_up=gate_up,
        gate_up_bias=gate_up_bias,
        down=down,
        down_bias=down_bias,
        scaling=float(attention.scaling),
        window=window,
    )
