"""Tiny models with random weights: float32 and fast, so that runs can be compared token by token."""

import json
import shutil
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

LAYERS = 6  # of models for tests in which rows leave between layers
FEW_LAYERS = 4  # the first, two in the middle and the last; an iteration costs a third less
FEW_WORDS = 2048  # of a tokenizer that is copied, loaded and looked through in no time
TOKENIZER_FILES = ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja")
RUN_AS_TRANSFORMERS_BUILDS = {"Phi"}  # by vLLM
SPREAD = 0.2  # of the weights; the usual 0.02 leaves near-ties, and one token for ever
WIDTHS = {
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "max_position_embeddings": 2048,
    "initializer_range": SPREAD,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "tie_word_embeddings": False,
}
GPT2 = {"n_embd": 64, "n_head": 2, "n_positions": 2048, "initializer_range": SPREAD}
OPT = {
    "hidden_size": 64,
    "word_embed_proj_dim": 64,
    "ffn_dim": 128,
    "num_attention_heads": 2,
    "max_position_embeddings": 2048,
    "init_std": SPREAD,
}
EXPERTS = {"num_local_experts": 4, "num_experts_per_tok": 2}
# By the name of transformers' configuration, of other builds than Llama's.
OTHERS: dict[str, Mapping[str, Any]] = {
    "Qwen3": WIDTHS,  # norms of queries and keys
    "Gemma2": {**WIDTHS, "tie_word_embeddings": True, "query_pre_attn_scalar": 32},  # two kinds of KV
    "OPT": OPT,  # learned positions, which layers do not see
    "GPT2": GPT2,  # no residual beside the hidden states
    "Mixtral": {**WIDTHS, **EXPERTS},
    "Phi": {name: value for name, value in WIDTHS.items() if name != "head_dim"},  # as transformers builds it
}


def word_tokenizer(folder: Path, *, context: int) -> Path:
    """A folder with a tokenizer whose tokens are words, a chat template and a configuration, and no weights."""
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    words = Tokenizer(models.WordLevel({"?": 0, "a": 1, "b": 2, "<turn>": 3, "<bot>": 4}, unk_token="?"))
    words.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=words, unk_token="?")
    tokenizer.chat_template = (
        "{% for m in messages %}{% if m.role == 'alien' %}{{ raise_exception('who?') }}{% endif %}"
        "{{ m.content }} <turn> {% endfor %}{% if add_generation_prompt %}<bot>{% endif %}"
    )
    tokenizer.save_pretrained(folder)
    config = {"model_type": "llama", "max_position_embeddings": context}
    (folder / "config.json").write_text(json.dumps(config))
    return folder


def few_words(folder: Path, *, tokenizer_from: Path) -> Path:
    """A folder with the first tokens of another tokenizer, for any text, and a configuration that counts them."""
    for name in TOKENIZER_FILES:
        shutil.copy(tokenizer_from / name, folder / name)
    whole = json.loads((tokenizer_from / TOKENIZER_FILES[0]).read_text())
    model = whole["model"]
    model["vocab"] = {word: number for word, number in model["vocab"].items() if number < FEW_WORDS}
    model["merges"] = [parts for parts in model["merges"] if "".join(parts) in model["vocab"]]
    (folder / TOKENIZER_FILES[0]).write_text(json.dumps(whole))
    config = json.loads((tokenizer_from / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "vocab_size": FEW_WORDS}))
    return folder


def _build_elsewhere(
    folder: Path, tokenizer_from: Path, layers: int, kind: str, settings: dict[str, Any]
) -> None:
    """Build the model in a process that has not run it: vLLM decorates transformers' own classes when it has."""
    call = f"build_tiny_model(Path({str(folder)!r}), tokenizer_from=Path({str(tokenizer_from)!r}), "
    call += f"layers={layers}, kind={kind!r}, **{settings!r})"
    code = f"from pathlib import Path; from tests.tiny_models import build_tiny_model; {call}"
    subprocess.run([sys.executable, "-c", code], cwd=Path(__file__).parents[1], check=True)


def build_tiny_model(
    folder: Path, *, tokenizer_from: Path, layers: int = 2, kind: str = "Llama", **settings: Any
) -> Path:
    """Layers of width 64 over the tokenizer of `tokenizer_from`, the same at every call."""
    if kind in RUN_AS_TRANSFORMERS_BUILDS and "vllm" in sys.modules:
        _build_elsewhere(folder, tokenizer_from, layers, kind, settings)
        return folder
    import torch
    import transformers

    vocabulary = json.loads((tokenizer_from / "config.json").read_text())["vocab_size"]
    config = getattr(transformers, f"{kind}Config")(
        vocab_size=vocabulary, num_hidden_layers=layers, dtype="float32", **(settings or WIDTHS)
    )
    torch.manual_seed(0)
    model = transformers.AutoModelForCausalLM.from_config(config)
    model.to(torch.float32).save_pretrained(folder)
    for name in TOKENIZER_FILES:
        shutil.copy(tokenizer_from / name, folder / name)
    return folder


def build_tiny_adapter(folder: Path, *, seed: int, layers: int = 2, rank: int = 8) -> Path:
    """A LoRA adapter for the queries, values and MLPs of a tiny Llama, in the format of the library peft."""
    import torch
    from safetensors.torch import save_file

    hidden, wide = WIDTHS["hidden_size"], WIDTHS["intermediate_size"]
    sizes = {
        "self_attn.q_proj": (hidden, hidden),
        "self_attn.v_proj": (hidden, hidden),
        "mlp.down_proj": (wide, hidden),
    }
    dice = torch.Generator().manual_seed(seed)
    tensors = {}
    for layer in range(layers):
        for module, (wants, gives) in sizes.items():
            name = f"base_model.model.model.layers.{layer}.{module}"
            tensors[f"{name}.lora_A.weight"] = SPREAD * torch.randn(rank, wants, generator=dice)
            tensors[f"{name}.lora_B.weight"] = SPREAD * torch.randn(gives, rank, generator=dice)
    folder.mkdir()
    save_file(tensors, folder / "adapter_model.safetensors")
    modules = [name.rpartition(".")[2] for name in sizes]
    settings = {"peft_type": "LORA", "r": rank, "lora_alpha": 2 * rank, "target_modules": modules}
    (folder / "adapter_config.json").write_text(json.dumps(settings))
    return folder
