"""A Hugging Face folder as a model that attends over our pool, and what is known of it before its weights are read."""

from __future__ import annotations

import contextlib
import hashlib
import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, Final

import msgspec
import torch
from safetensors import SafetensorError
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedConfig, PreTrainedModel
from transformers.utils import logging as transformers_logging

from engine.attention.backend import LayerShape
from engine.errors import ModelError, UnsupportedModelError
from engine.models.catalog import check_model_folder, weight_files

__all__ = [
    "ModelInfo",
    "kv_bytes_per_block",
    "load_model",
    "read_model_info",
    "resolve_dtype",
    "resolve_kv_dtype",
    "weights_fingerprint",
]

_DTYPES: Final = {"float32": torch.float32, "bfloat16": torch.bfloat16}
_KV_DTYPES: Final = _DTYPES | {"int8": torch.int8}
_LAYER_TYPES: Final = frozenset({"full_attention", "sliding_attention"})
# Their frequencies depend on the longest sequence of a batch, so a cached key would depend on its neighbours.
_MOVING_ROPE: Final = frozenset({"dynamic", "longrope"})
_SAMPLES: Final = 64
_SAMPLE_BYTES: Final = 4096


class ModelInfo(msgspec.Struct, frozen=True):
    """What a model folder says of itself, without its weights.

    ``layers`` is what each layer stores per token and ``windows`` how many tokens it sees (None: all).
    ``max_positions`` is the longest sequence, in tokens. ``vocab_size`` counts the rows of the embedding.
    """

    folder: Path
    architecture: str
    layers: tuple[LayerShape, ...]
    windows: tuple[int | None, ...]
    max_positions: int
    vocab_size: int
    eos_token_ids: tuple[int, ...]

    @property
    def window(self) -> int:
        """The most tokens that a layer with a sliding window sees; 0 when none sees fewer than there can be."""
        return max((width for width in map(self.windows.__getitem__, self.windowed) if width is not None), default=0)

    @property
    def windowed(self) -> tuple[int, ...]:
        """The layers that need the K and V of a window only."""
        return tuple(i for i, width in enumerate(self.windows) if width is not None and width < self.max_positions)

    @property
    def windowed_layers(self) -> tuple[LayerShape, ...]:
        """What those store per token."""
        return tuple(self.layers[index] for index in self.windowed)

    @property
    def full_layers(self) -> tuple[LayerShape, ...]:
        """What the others store per token."""
        windowed = frozenset(self.windowed)
        return tuple(shape for index, shape in enumerate(self.layers) if index not in windowed)


def read_model_info(folder: Path) -> ModelInfo:
    """Read the configuration of a Hugging Face folder.

    Raises:
        ModelError: it is incomplete or of an architecture that transformers does not know.
        UnsupportedModelError: it is of a kind that paged attention cannot serve exactly.
    """
    check_model_folder(folder)
    try:
        whole = AutoConfig.from_pretrained(folder, local_files_only=True)
    except (ValueError, KeyError, OSError) as error:
        raise ModelError(f"{folder / 'config.json'} cannot be used: {_first_line(error)}") from error
    config = whole.get_text_config()
    architecture = (whole.architectures or [whole.model_type])[0]
    _refuse_unsupported(config, architecture)
    count = config.num_hidden_layers
    heads = config.num_attention_heads
    kv_heads = getattr(config, "num_key_value_heads", None) or heads
    dim = getattr(config, "head_dim", None) or config.hidden_size // heads
    key_dim, value_dim = dim, dim
    if getattr(config, "kv_lora_rank", None):  # multi-head latent attention, stored decompressed
        kv_heads, key_dim, value_dim = heads, config.qk_nope_head_dim + config.qk_rope_head_dim, config.v_head_dim
    return ModelInfo(
        folder=folder,
        architecture=architecture,
        layers=(LayerShape(kv_heads, key_dim, value_dim),) * count,
        windows=_windows(config, count),
        max_positions=config.max_position_embeddings,
        vocab_size=config.vocab_size,
        eos_token_ids=_eos_token_ids(folder, config),
    )


def kv_bytes_per_block(layers: Sequence[LayerShape], dtype: torch.dtype, block_size: int) -> int:
    """Bytes that one block of ``block_size`` tokens takes over ``layers``, keys and values, in a pool of ``dtype``."""
    elements = sum(layer.kv_heads * (layer.key_dim + layer.value_dim) for layer in layers)
    scales = 2 * sum(layer.kv_heads for layer in layers) if dtype == torch.int8 else 0
    return (elements * dtype.itemsize + scales * torch.float32.itemsize) * block_size


def resolve_dtype(name: str, device: str = "cpu") -> torch.dtype:
    """The dtype for ``auto``, ``float32`` or ``bfloat16``; ``auto`` is bfloat16 where the device multiplies it itself.

    Raises:
        ModelError: any other name.
    """
    if name == "auto":
        if torch.device(device).type == "cuda":
            fast = torch.cuda.is_bf16_supported(including_emulation=False)
        else:
            capabilities = torch.cpu.get_capabilities()
            fast = any(capabilities.get(flag) for flag in ("avx512_bf16", "amx_bf16", "bf16"))
        return torch.bfloat16 if fast else torch.float32
    try:
        return _DTYPES[name]
    except KeyError:
        raise ModelError(f"unknown dtype {name!r}: use auto, {', '.join(_DTYPES)}") from None


def resolve_kv_dtype(name: str, dtype: torch.dtype, device: str = "cpu") -> torch.dtype:
    """The dtype of the KV pool for ``auto`` (the model's ``dtype``), ``float32``, ``bfloat16`` or ``int8``.

    Raises:
        ModelError: any other name, or one whose cache the kernels of the device do not read.
    """
    if name == "auto":
        return dtype
    if name not in _KV_DTYPES:
        raise ModelError(f"unknown KV dtype {name!r}: use auto, {', '.join(_KV_DTYPES)}")
    if _KV_DTYPES[name] == torch.int8 and torch.device(device).type != "cpu":
        raise ModelError(f"KV dtype int8 is for the CPU: on {device} use auto, float32 or bfloat16")
    return _KV_DTYPES[name]


def load_model(info: ModelInfo, dtype: torch.dtype, device: str = "cpu") -> PreTrainedModel:
    """The model with transformers' own attention on its device, ready for inference.

    Raises:
        ModelError: the weights do not belong to the configuration, or cannot be read.
        UnsupportedModelError: its attention cannot be replaced.
    """
    try:
        with _silent_transformers():
            model, loading = AutoModelForCausalLM.from_pretrained(
                info.folder, dtype=dtype, local_files_only=True, use_safetensors=True, output_loading_info=True
            )
            model.to(device)
    except (ValueError, KeyError, OSError, RuntimeError, ImportError, SafetensorError) as error:
        raise ModelError(f"the model in {info.folder} cannot be loaded: {_first_line(error)}") from error
    if absent := sorted(loading["missing_keys"]):  # transformers would make them up
        raise ModelError(
            f"the weights in {info.folder} do not belong to its configuration: "
            f"{len(absent)} tensors are missing, the first is {absent[0]}"
        )
    if not model._supports_attention_backend:
        raise UnsupportedModelError(
            f"{info.architecture} does not let its attention be replaced, so its KV cannot be paged."
        )
    model.requires_grad_(False)
    model.eval()
    return model


def weights_fingerprint(folder: Path) -> str:
    """A key for the weights, in a few milliseconds: configuration, and of each file size, header and sampled bytes.

    Training changes nearly every number, so samples tell two sets of weights apart as well as the whole would.
    """
    digest = hashlib.blake2b((folder / "config.json").read_bytes(), digest_size=16)
    for path in weight_files(folder):
        size = path.stat().st_size
        digest.update(f"{path.name}:{size}".encode())
        with path.open("rb") as file:
            header = int.from_bytes(file.read(8), "little")
            digest.update(file.read(min(header, size)))
            for sample in range(_SAMPLES):
                file.seek(max(0, size - _SAMPLE_BYTES) * sample // (_SAMPLES - 1))
                digest.update(file.read(_SAMPLE_BYTES))
    return digest.hexdigest()


def _refuse_unsupported(config: PreTrainedConfig, architecture: str) -> None:
    reason = None
    if getattr(config, "is_encoder_decoder", False):
        reason = "it is an encoder-decoder model"
    elif unknown := set(getattr(config, "layer_types", None) or ()) - _LAYER_TYPES:
        reason = f"it has layers of type {', '.join(sorted(unknown))}"
    elif getattr(config, "num_kv_shared_layers", 0):
        reason = "some of its layers share their K and V"
    elif moving := _rope_types(config) & _MOVING_ROPE:
        reason = f"its rotary embedding ({', '.join(moving)}) changes with the length of the batch"
    elif not getattr(config, "max_position_embeddings", None) or not getattr(config, "num_attention_heads", None):
        reason = "its configuration names no number of positions or attention heads"
    if reason is not None:
        raise UnsupportedModelError(f"{architecture} cannot be served exactly with a paged cache: {reason}.")


def _rope_types(config: PreTrainedConfig) -> set[str]:
    """The kinds of rotary embedding, which may differ per layer type."""
    parameters: dict[str, Any] = getattr(config, "rope_parameters", None) or {}
    several = [value for value in parameters.values() if isinstance(value, dict)]
    return {str(one.get("rope_type", "default")) for one in several or [parameters]}


def _windows(config: PreTrainedConfig, count: int) -> tuple[int | None, ...]:
    """The sliding window that each layer's attention function must be told, by the configuration."""
    window = getattr(config, "sliding_window", None)
    if window is None or getattr(config, "use_sliding_window", None) is False:
        return (None,) * count
    types = getattr(config, "layer_types", None) or ["sliding_attention"] * count
    return tuple(window if kind == "sliding_attention" else None for kind in types)


def _eos_token_ids(folder: Path, config: PreTrainedConfig) -> tuple[int, ...]:
    """The ids that end a text: of ``generation_config.json`` where it has them, else of the configuration."""
    ids: int | list[int] | None = None
    path = folder / "generation_config.json"
    if path.is_file():
        try:
            ids = json.loads(path.read_text()).get("eos_token_id")
        except ValueError as error:
            raise ModelError(f"{path} is not valid JSON: {error}") from error
    if ids is None:
        ids = getattr(config, "eos_token_id", None)
    if ids is None:
        return ()
    return tuple(ids) if isinstance(ids, list) else (ids,)


@contextlib.contextmanager
def _silent_transformers() -> Iterator[None]:
    """Without progress bars and advice on stderr, which is the worker's log."""
    verbosity, bars = transformers_logging.get_verbosity(), transformers_logging.is_progress_bar_enabled()
    transformers_logging.set_verbosity_error()
    transformers_logging.disable_progress_bar()
    try:
        yield
    finally:
        transformers_logging.set_verbosity(verbosity)
        if bars:
            transformers_logging.enable_progress_bar()


def _first_line(error: Exception) -> str:
    lines = str(error).strip().splitlines()
    return lines[0] if lines else type(error).__name__
