"""Token counts by the tokenizer in a model's folder, without an engine, for rehearsals and previews."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from conserve.engine.runtime.vllm_flags import spelled_out, value_of
from conserve.engine.vllm.model.demo_model import DEMO_MODEL, converted
from conserve.engine.vllm.model.fingerprint import folder_of

LENGTH_FLAG = "--max-model-len"
SUFFIXES = {"k": 1_000, "K": 1_024, "m": 1_000_000, "M": 1_048_576}


class FolderTokens:
    """Tokenizer of a model on this machine; `context` is the context length that the engine would have."""

    def __init__(self, tokenizer: Any, context: int | None) -> None:
        self.tokenizer, self.context = tokenizer, context

    async def of_text(self, text: str, *, special: bool) -> int | None:
        """Number of tokens in a prompt."""
        return len(self.tokenizer(text, add_special_tokens=special)["input_ids"])

    async def of_chat(self, body: Mapping[str, Any]) -> int | None:
        """Number of tokens in a chat by the model's chat template; None if the template does not take the chat."""
        goes_on = bool(body.get("continue_final_message"))
        try:
            text = self.tokenizer.apply_chat_template(
                body["messages"],
                tools=body.get("tools"),
                documents=body.get("documents"),
                chat_template=body.get("chat_template"),
                add_generation_prompt=body.get("add_generation_prompt", not goes_on),
                continue_final_message=goes_on,
                tokenize=False,
                **(body.get("chat_template_kwargs") or {}),
            )
        except Exception:  # a chat template may raise anything
            return None
        return await self.of_text(text, special=bool(body.get("add_special_tokens")))


def folder_tokens(model: str, models_folder: Path, flags: Sequence[str] = ()) -> FolderTokens | None:
    """Tokenizer of a model whose files are on this machine; None without them or without transformers."""
    folder = converted(models_folder) if model == DEMO_MODEL else folder_at_hand(model)
    if folder is None or find_spec("transformers") is None:
        return None
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    from transformers import AutoTokenizer

    try:
        tokenizer = AutoTokenizer.from_pretrained(folder, local_files_only=True)
    except (OSError, ValueError, ImportError, KeyError):  # the folder has no tokenizer
        return None
    return FolderTokens(tokenizer, asked_length(flags) or configured_length(folder))


def folder_at_hand(model: str) -> Path | None:
    """The model's folder, as named or in the hub's cache; None if there is none."""
    path = Path(model).expanduser()
    if path.is_dir():
        return path
    return folder_of(model, None) if find_spec("huggingface_hub") is not None else None


def asked_length(flags: Sequence[str]) -> int | None:
    """Context length that vLLM's flags, also in a file, ask for, as a number or as in 8k; None if they do not."""
    text = value_of(spelled_out(flags), LENGTH_FLAG)
    return None if text is None else length(text)


def length(text: str) -> int | None:
    """Number of tokens as vLLM reads it: 8192, 8k (thousands), 8K (1,024s)."""
    digits, factor = (text[:-1], SUFFIXES[text[-1]]) if text[-1:] in SUFFIXES else (text, 1)
    try:
        number = int(float(digits) * factor)
    except (ValueError, OverflowError):
        return None
    return number if number > 0 else None  # -1 leaves the choice to vLLM


def configured_length(folder: Path) -> int | None:
    """Context length in the model's configuration; None if it names none."""
    try:
        config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None
    for part in (config, config.get("text_config") or {}):
        for name in ("max_position_embeddings", "n_positions", "max_seq_len", "seq_length"):
            if isinstance(part.get(name), int):
                return int(part[name])
    return None
