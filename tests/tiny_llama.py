"""A tiny Llama with random weights: float32 and fast, so that runs can be compared token by token."""

import json
import shutil
from pathlib import Path

LAYERS = 6  # of the model for tests in which rows leave between layers
TOKENIZER_FILES = ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja")


def build_tiny_llama(folder: Path, *, tokenizer_from: Path, layers: int = 2) -> Path:
    """Layers of width 64 over the tokenizer of `tokenizer_from`, the same at every call."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    vocabulary = json.loads((tokenizer_from / "config.json").read_text())["vocab_size"]
    config = LlamaConfig(
        vocab_size=vocabulary,
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=layers,
        num_attention_heads=2,
        num_key_value_heads=2,
        head_dim=32,
        max_position_embeddings=2048,
        initializer_range=0.2,  # the usual 0.02 leaves near-ties, and one token for ever
        bos_token_id=1,
        eos_token_id=2,
        tie_word_embeddings=False,
        dtype="float32",
    )
    torch.manual_seed(0)
    LlamaForCausalLM(config).to(torch.float32).save_pretrained(folder)
    for name in TOKENIZER_FILES:
        shutil.copy(tokenizer_from / name, folder / name)
    return folder
