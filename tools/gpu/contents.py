"""Contents of the kit: packages, archives, and shapes of models without weights."""

import json
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

REQUIREMENTS = Path(__file__).with_name("requirements.txt")
# A machine with torch for CUDA has these needs of the project too; all others must be in REQUIREMENTS.
INSTALLED_THERE = {"httpx", "jinja2", "numpy", "psutil", "pyarrow", "rich", "scipy", "typer", "uvloop"}
# Hopper serves a dense model without these: FlashAttention 2 (it uses 3), other models' kernels, sources.
UNUSED = (
    *("bin", "share", "*/tests", "*/test", "*.dist-info/RECORD", "*.dist-info/licenses", "*.dist-info/sboms"),
    *("*/*.pyi", "pycountry/locales", "mistral_common/data", "vllm/vllm-rs"),
    "vllm/vllm_flash_attn/_vllm_fa2_C.abi3.so",
    *(f"vllm/_{name}.abi3.so" for name in ("moe_C_stable_libtorch", "qutlass_C", "deepselect_C")),
    *(f"vllm/_{name}.abi3.so" for name in ("flashkda_C", "flashmla_C", "flashmla_extension_C")),
    *(
        "vllm/third_party/deep_gemm",
        "vllm/third_party/fmha_sm100/cutlass",
        "vllm/third_party/fmha_sm100/csrc",
    ),
    "vllm/model_executor/layers/fused_moe/configs/*.json",
    "vllm/model_executor/layers/quantization/utils/configs/*.json",
)
# Archives in this order: each holds the matching files that no earlier one took.
ARCHIVES: Mapping[str, tuple[str, ...]] = {
    "kernels": ("vllm/_C_stable_libtorch.abi3.so",),
    "attention": ("vllm/vllm_flash_attn/_vllm_fa3_C.abi3.so",),
    "vllm": ("vllm",),
    "duckdb": ("duckdb", "_duckdb*"),
    "others": ("*",),
}
MODELS_ARCHIVE = "models"

_DENSE = {"hidden_act": "silu", "torch_dtype": "bfloat16", "tie_word_embeddings": False}
LLAMA_8B: dict[str, Any] = {
    **_DENSE,
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "max_position_embeddings": 131072,
    "rms_norm_eps": 1e-5,
    "rope_theta": 500000.0,
    "attention_bias": False,
    "mlp_bias": False,
}
QWEN_14B: dict[str, Any] = {
    **_DENSE,
    "architectures": ["Qwen2ForCausalLM"],
    "model_type": "qwen2",
    "use_sliding_window": False,
    "hidden_size": 5120,
    "intermediate_size": 13824,
    "num_hidden_layers": 48,
    "num_attention_heads": 40,
    "num_key_value_heads": 8,
    "max_position_embeddings": 32768,
    "rms_norm_eps": 1e-6,
    "rope_theta": 1000000.0,
}
TINY: dict[str, Any] = {
    **LLAMA_8B,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "max_position_embeddings": 8192,
    "num_attention_heads": 1,
    "num_key_value_heads": 1,
    "head_dim": 64,
}
MODELS = {"llama-8b": LLAMA_8B, "qwen-14b": QWEN_14B, "tiny": TINY}
TOKENIZER_FILES = ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja", "generation_config.json")
TOKENIZER_KEYS = ("vocab_size", "bos_token_id", "eos_token_id", "pad_token_id")


def write_models(folder: Path, demo_models: Path) -> None:
    """Write folders for `--load-format dummy`: a model's shape, and the demo model's tokenizer.

    Weights do not travel, since timing does not depend on their values. Raises `FileNotFoundError` if there is no
    demo model.
    """
    demo = next((found.parent for found in sorted(demo_models.glob("*/tokenizer.json"))), None)
    if demo is None:
        raise FileNotFoundError(
            f"no tokenizer in {demo_models}; run `make demo`, or set CONSERVE_MODELS to its folder"
        )
    own = json.loads((demo / "config.json").read_text())
    taken = {key: own[key] for key in TOKENIZER_KEYS if key in own}
    for name, shape in MODELS.items():
        (folder / name).mkdir(parents=True, exist_ok=True)
        (folder / name / "config.json").write_text(json.dumps({**shape, **taken}, indent=2))
        for file in TOKENIZER_FILES:
            if (demo / file).exists():
                shutil.copyfile(demo / file, folder / name / file)


def kv_bytes_per_token(shape: Mapping[str, Any]) -> int:
    """Bytes of one token's keys and values in 16-bit numbers."""
    width = shape.get("head_dim") or shape["hidden_size"] // shape["num_attention_heads"]
    return int(2 * shape["num_hidden_layers"] * shape["num_key_value_heads"] * width * 2)
