"""Identity of a model: equal only for equal models, and cheap to compute."""

import hashlib
import os
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from vllm.config import ModelConfig, VllmConfig

SMALL_FILES = ("*.json", "*.jinja", "*.model", "*.txt")  # configuration, tokenizer, chat template: read whole
WEIGHT_FILES = ("*.safetensors", "*.bin", "*.pt", "*.gguf")
SAMPLES = 64
SAMPLE_BYTES = 4096


def model_identity(
    name: str, folder: Path | None, settings: Iterable[object], *, weights: Path | None = None
) -> str:
    """`name`, and a digest of the model's files and of the engine `settings` that change its tokens.

    `weights` is the folder of the weights where that is another one.

    Weights are sampled: a fine-tune differs everywhere, and reading gigabytes at every start would cost too much.
    Modification times are left out, so that copies on two machines have one identity.
    """
    digest = hashlib.sha256()
    for setting in settings:
        digest.update(f"{setting!r}\0".encode())
    for path in [path for one in (folder, weights) if one is not None for path in _files(one)]:
        digest.update(f"{path.name}\0{path.stat().st_size}\0".encode())
        for part in _content(path):
            digest.update(part)
    return f"{name}@{digest.hexdigest()[:16]}"


def _files(folder: Path) -> list[Path]:
    if folder.is_file():
        return [folder]
    return sorted({path for pattern in (*SMALL_FILES, *WEIGHT_FILES) for path in folder.glob(pattern)})


def _content(path: Path) -> Iterator[bytes]:
    if not any(path.match(pattern) for pattern in WEIGHT_FILES):
        yield path.read_bytes()
        return
    size = path.stat().st_size
    with path.open("rb") as file:
        for number in range(SAMPLES):
            yield os.pread(file.fileno(), SAMPLE_BYTES, size * number // SAMPLES)


def identity_of(name: str, config: "VllmConfig") -> str:
    """Identity of the model that an engine with this configuration serves."""
    model = config.model_config
    settings = (
        model.dtype,
        model.quantization,
        model.tokenizer,
        model.revision,
        model.hf_overrides,
        model.override_generation_config,
        config.cache_config.cache_dtype,
        *_seldom_set(model),
    )
    downloads = config.load_config.download_dir
    weights = folder_of(model.model, model.revision, cache=downloads) if downloads else None
    return model_identity(name, folder_of(model.model, model.revision), settings, weights=weights)


def _seldom_set(model: "ModelConfig") -> Iterator[object]:
    """Yield settings that few users make, so that the identities of all others stay as they are."""
    if model.hf_config_path is not None:
        yield model.hf_config.to_json_string()
    if model.multimodal_config is not None and (given := model.multimodal_config.mm_processor_kwargs):
        yield sorted(given.items())


def folder_of(model: str, revision: str | None, *, cache: str | None = None) -> Path | None:
    """Folder of the model's files, in the hub's cache or in another one; None if they are not there."""
    if Path(model).exists():
        return Path(model)
    from huggingface_hub import snapshot_download

    try:
        return Path(snapshot_download(model, revision=revision, cache_dir=cache, local_files_only=True))
    except (OSError, ValueError):
        return None
