"""Convert a GGUF file to a Hugging Face folder: ``python -m engine.models.gguf FILE.gguf FOLDER``.

transformers maps names, configuration, tokenizer and chat template and dequantizes the weights; they are written as
float32, so that what the file holds is kept exactly.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path

from engine.errors import ModelError

__all__ = ["convert"]


def convert(gguf: Path, folder: Path) -> None:
    """Write ``gguf`` as a Hugging Face folder (configuration, fast tokenizer, float32 safetensors).

    Raises:
        ModelError: transformers does not know this architecture, or the file is no GGUF file.
    """
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer, GgufConfig
    from transformers.utils import logging

    logging.set_verbosity_error()
    logging.disable_progress_bar()
    try:
        tokenizer = AutoTokenizer.from_pretrained(gguf.parent, gguf_file=gguf.name)
        loaded = AutoModelForCausalLM.from_pretrained(
            gguf.parent, gguf_file=gguf.name, quantization_config=GgufConfig(dequantize=True)
        )
    except Exception as error:  # what transformers raises over a damaged file is anything: struct.error, IndexError…
        raise ModelError(f"{type(error).__name__}: {error}") from error
    config = loaded.config
    if hasattr(config, "quantization_config"):
        del config.quantization_config
    # A fresh model: the loaded one still counts as quantized and refuses to be saved.
    with torch.device("meta"):
        model = type(loaded)(config)
    model.load_state_dict(loaded.state_dict(), assign=True)
    model.tie_weights()
    model.to(torch.float32)
    config.dtype = torch.float32
    model.generation_config = loaded.generation_config
    folder.mkdir(parents=True, exist_ok=True)
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)


def main() -> None:
    """The command line: two paths; the reason of a failure is the last line on stderr."""
    if len(sys.argv) != 3:
        sys.exit("usage: python -m engine.models.gguf FILE.gguf FOLDER")
    # Before transformers is imported: looking for the file's folder on the hub would take minutes without a network.
    os.environ["HF_HUB_OFFLINE"] = "1"
    try:
        convert(Path(sys.argv[1]), Path(sys.argv[2]))
    except (ModelError, OSError) as error:
        sys.exit(" ".join(str(error).split()))


if __name__ == "__main__":
    main()
