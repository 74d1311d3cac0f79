"""Tiny models with random weights of other kinds than decoders that generate: states, images, sound, embeddings.

They are as small and as repeatable as those of `tiny_models`, and some of them are quantised.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from tests.tiny_models import EXPERTS, LAYERS, SPREAD, TOKENIZER_FILES, WIDTHS, build_tiny_model

LINEARS = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
GROUP = 32  # weights with one scale, where 4 bits are kept of each
SQUARE = 128  # rows and columns of a block of FP8 weights
PER_INT = 8  # such weights in an integer
AWQ_ORDER = (0, 2, 4, 6, 1, 3, 5, 7)
SOUND = 16_000  # samples a second

MAMBA = {
    "mamba_n_heads": 4, "mamba_d_head": 32, "mamba_n_groups": 1, "mamba_d_state": 16, "mamba_chunk_size": 32,
}  # fmt: skip
STATES: dict[str, Mapping[str, Any]] = {
    "Mamba2": {
        "hidden_size": 64, "expand": 2, "num_heads": 4, "head_dim": 32, "state_size": 16, "n_groups": 1,
        "chunk_size": 32, "initializer_range": SPREAD, "bos_token_id": 1, "eos_token_id": 2,
    },
    "FalconH1": {**WIDTHS, **MAMBA, "mamba_d_ssm": 128},
    "GraniteMoeHybrid": {
        **{name: value for name, value in WIDTHS.items() if name != "head_dim"}, **MAMBA, **EXPERTS,
        "shared_intermediate_size": 64, "layer_types": ["mamba", "attention", "mamba"] * (LAYERS // 3),
    },
    "Lfm2": {
        **WIDTHS, "block_auto_adjust_ff_dim": False, "conv_dim": 64, "conv_dim_out": 64, "block_dim": 64,
        "layer_types": ["conv", "full_attention", "conv"] * (LAYERS // 3),
    },
    "Qwen3Next": {
        **WIDTHS, "linear_key_head_dim": 128, "linear_value_head_dim": 128, "linear_num_key_heads": 2,
        "linear_num_value_heads": 4, "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 64,
        "shared_expert_intermediate_size": 64,
        "layer_types": ["linear_attention", "linear_attention", "full_attention"] * (LAYERS // 3),
    },
}  # fmt: skip


def tokenizer_with(folder: Path, tokenizer_from: Path, *words: str) -> Any:
    """The tokenizer of `tokenizer_from`, with further words that it keeps whole."""
    import transformers

    tokenizer = transformers.AutoTokenizer.from_pretrained(tokenizer_from)
    tokenizer.add_special_tokens({"additional_special_tokens": [*words]})
    tokenizer.save_pretrained(folder)
    return tokenizer


def build_tiny_listener(folder: Path, *, tokenizer_from: Path) -> Path:
    """A Qwen2-Audio: a decoder with an encoder of sound in front of it. Encoders of images want torchvision."""
    import torch
    from safetensors.torch import load_file, save_file
    from transformers import Qwen2AudioConfig, Qwen2AudioForConditionalGeneration, WhisperFeatureExtractor
    from transformers.models.qwen2_audio.processing_qwen2_audio import Qwen2AudioProcessor

    tokenizer = tokenizer_with(folder, tokenizer_from, "<|AUDIO|>", "<|audio_bos|>", "<|audio_eos|>")
    heard = {
        "d_model": 32, "encoder_layers": 2, "encoder_attention_heads": 2, "encoder_ffn_dim": 64,
        "initializer_range": SPREAD, "num_mel_bins": 80,
    }  # fmt: skip
    text = {
        **WIDTHS, "model_type": "qwen2", "architectures": ["Qwen2ForCausalLM"],
        "vocab_size": len(tokenizer), "num_hidden_layers": LAYERS,
    }  # fmt: skip
    config = Qwen2AudioConfig(
        audio_config=heard,
        text_config=text,
        audio_token_index=tokenizer.convert_tokens_to_ids("<|AUDIO|>"),
        dtype="float32",
    )
    torch.manual_seed(0)
    Qwen2AudioForConditionalGeneration(config).to(torch.float32).save_pretrained(folder)
    weights = load_file(folder / "model.safetensors")
    # Published models have the older names.
    older = {name.replace("model.model.", "model."): weight for name, weight in weights.items()}
    save_file(older, folder / "model.safetensors", {"format": "pt"})
    Qwen2AudioProcessor(WhisperFeatureExtractor(), tokenizer).save_pretrained(folder)
    return folder


def build_tiny_whisper(folder: Path, *, tokenizer_from: Path) -> Path:
    """An encoder of 30 seconds of sound, and a decoder."""
    import torch
    from transformers import WhisperConfig, WhisperFeatureExtractor, WhisperForConditionalGeneration
    from transformers.models.whisper.processing_whisper import WhisperProcessor
    from transformers.models.whisper.tokenization_whisper import WhisperTokenizer

    words = json.loads((tokenizer_from / "tokenizer.json").read_text())["model"]
    merges = [tuple(pair.split(" ")) if isinstance(pair, str) else tuple(pair) for pair in words["merges"]]
    tokenizer = WhisperTokenizer(vocab=words["vocab"], merges=merges)
    asked = ["<|startoftranscript|>", "<|en|>", "<|transcribe|>", "<|translate|>", "<|notimestamps|>"]
    tokenizer.add_special_tokens({"additional_special_tokens": asked})
    begin, end = tokenizer.convert_tokens_to_ids([asked[0], "<|endoftext|>"])
    config = WhisperConfig(
        vocab_size=len(tokenizer), d_model=64, encoder_layers=2, decoder_layers=2,
        encoder_attention_heads=2, decoder_attention_heads=2, encoder_ffn_dim=128, decoder_ffn_dim=128,
        init_std=SPREAD, decoder_start_token_id=begin, bos_token_id=end, eos_token_id=end, pad_token_id=end,
        begin_suppress_tokens=None, dtype="float32",
    )  # fmt: skip
    torch.manual_seed(0)
    WhisperForConditionalGeneration(config).to(torch.float32).save_pretrained(folder)
    WhisperProcessor(WhisperFeatureExtractor(), tokenizer).save_pretrained(folder)
    return folder


def sound(seed: int) -> Any:
    """A second of noise, and its samples a second."""
    import numpy as np

    return np.random.default_rng(seed).standard_normal(SOUND).astype(np.float32), SOUND


def build_tiny_bert(folder: Path, *, tokenizer_from: Path) -> Path:
    """An encoder whose tokens see those behind them, which embeds."""
    import torch
    from transformers import BertConfig, BertModel

    tokenizer = tokenizer_with(folder, tokenizer_from)
    config = BertConfig(
        vocab_size=len(tokenizer), hidden_size=64, num_hidden_layers=2, num_attention_heads=2,
        intermediate_size=128, max_position_embeddings=512, initializer_range=SPREAD, dtype="float32",
    )  # fmt: skip
    torch.manual_seed(0)
    BertModel(config).to(torch.float32).save_pretrained(folder)
    return folder


def build_quantised(folder: Path, *, tokenizer_from: Path, method: str) -> Path:
    """A tiny Llama whose linear layers are kept as `method` keeps them: one of `KEPT`."""
    from safetensors.torch import load_file, save_file

    square = {"hidden_size": 2 * SQUARE, "intermediate_size": 2 * SQUARE, "head_dim": SQUARE // 2}
    widths = {**WIDTHS, **square} if method == "fp8" else {}
    plain = build_tiny_model(folder / "plain", tokenizer_from=tokenizer_from, layers=LAYERS, **widths)
    kept: dict[str, Any] = {}
    for name, weight in load_file(plain / "model.safetensors").items():
        module = name.removesuffix(".weight")
        if module.rpartition(".")[2] in LINEARS:
            kept |= {f"{module}.{part}": tensor.contiguous() for part, tensor in KEPT[method](weight).items()}
        else:
            kept[name] = weight
    config = json.loads((plain / "config.json").read_text())
    config["quantization_config"] = SETTINGS[method]
    if method in ("gptq", "awq"):
        config["dtype"] = "float16"
    (folder / "config.json").write_text(json.dumps(config))
    save_file(kept, folder / "model.safetensors")
    for name in TOKENIZER_FILES:
        shutil.copy(tokenizer_from / name, folder / name)
    shutil.rmtree(plain)
    return folder


def _int8(weight: Any) -> dict[str, Any]:
    """Integers of 8 bits, (out, in), with a scale for each output."""
    import torch

    scale = weight.abs().amax(1, keepdim=True) / 127
    return {"weight": (weight / scale).round().to(torch.int8), "weight_scale": scale}


def _fp8(weight: Any) -> dict[str, Any]:
    """Numbers of 8 bits, (out, in), with a scale for each block of `SQUARE` by `SQUARE`."""
    import torch

    out, into = (size // SQUARE for size in weight.shape)
    blocks = weight.reshape(out, SQUARE, into, SQUARE)
    scale = blocks.abs().amax((1, 3), keepdim=True) / torch.finfo(torch.float8_e4m3fn).max
    numbers = (blocks / scale).reshape(weight.shape).to(torch.float8_e4m3fn)
    return {"weight": numbers, "weight_scale_inv": scale.reshape(out, into).float()}


def _four_bits(weight: Any) -> tuple[Any, Any]:
    """Numbers from 0 to 15, (in, out), and a scale for each group of inputs and each output."""
    import torch

    groups = weight.T.reshape(-1, GROUP, weight.shape[0])
    scale = groups.abs().amax(1, keepdim=True) / 7
    numbers = ((groups / scale).round() + 8).to(torch.int32)
    return numbers.reshape(weight.T.shape), scale.squeeze(1).to(torch.float16)


def _packed(numbers: Any, order: tuple[int, ...] = tuple(range(PER_INT))) -> Any:
    """Eight neighbours of the last dimension in one integer."""
    import torch

    eights = numbers.to(torch.int64).reshape(*numbers.shape[:-1], -1, PER_INT)
    packed = sum(eights[..., place] << 4 * shift for shift, place in enumerate(order))
    return torch.where(packed >= 1 << 31, packed - (1 << 32), packed).to(torch.int32)


def _gptq(weight: Any) -> dict[str, Any]:
    import torch

    numbers, scales = _four_bits(weight)
    zeros = torch.full(scales.shape, 7)  # kept less one
    return {
        "qweight": _packed(numbers.T).T,
        "qzeros": _packed(zeros),
        "scales": scales,
        "g_idx": torch.arange(weight.shape[1], dtype=torch.int32) // GROUP,
    }


def _awq(weight: Any) -> dict[str, Any]:
    import torch

    numbers, scales = _four_bits(weight)
    zeros = _packed(torch.full(scales.shape, 8), AWQ_ORDER)
    return {"qweight": _packed(numbers, AWQ_ORDER), "qzeros": zeros, "scales": scales}


KEPT: dict[str, Callable[[Any], dict[str, Any]]] = {
    "int8": _int8,
    "fp8": _fp8,
    "gptq": _gptq,
    "awq": _awq,
}
EIGHT_BITS = {"num_bits": 8, "type": "int", "symmetric": True}
SETTINGS: dict[str, dict[str, Any]] = {
    "int8": {
        "quant_method": "compressed-tensors",
        "format": "int-quantized",
        "quantization_status": "compressed",
        "ignore": ["lm_head"],
        "config_groups": {
            "group_0": {
                "targets": ["Linear"],
                "weights": {**EIGHT_BITS, "strategy": "channel", "dynamic": False},
                "input_activations": {**EIGHT_BITS, "strategy": "token", "dynamic": True},
            }
        },
    },
    "fp8": {"quant_method": "fp8", "activation_scheme": "dynamic", "weight_block_size": [SQUARE] * 2},
    "gptq": {"quant_method": "gptq", "bits": 4, "group_size": GROUP, "desc_act": False, "sym": True},
    "awq": {"quant_method": "awq", "bits": 4, "group_size": GROUP, "zero_point": True, "version": "gemm"},
}
