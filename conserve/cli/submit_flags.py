"""Flags of `conserve submit` as an input, a task and its parameters."""

import json
from pathlib import Path
from typing import Any, NoReturn

from conserve.errors import UsageError


def read_tags(pairs: list[str]) -> dict[str, str]:
    """Tags of --tag."""
    tags: dict[str, str] = {}
    for pair in pairs:
        key, equals, value = pair.partition("=")
        if not equals or not key:
            raise UsageError(f"--tag takes KEY=VALUE, as in --tag team=search, not {pair!r}")
        if tags.setdefault(key, value) != value:
            raise UsageError(f"--tag gives {key!r} two values: {tags[key]!r} and {value!r}")
    return tags


def read_prompt(prompt: str | None, prompt_file: Path | None) -> str | None:
    """Template, from the flag or its file."""
    if prompt_file is None:
        return prompt
    if prompt is not None:
        raise UsageError("give --prompt or --prompt-file, not both")
    try:
        return prompt_file.read_text(encoding="utf-8")
    except FileNotFoundError as error:
        raise UsageError(f"there is no file {prompt_file} with the template; check the path") from error
    except OSError as error:
        raise UsageError(
            f"cannot read the template {prompt_file}: {error.strerror}; check the path and its permissions"
        ) from error
    except UnicodeDecodeError as error:
        raise UsageError(f"the template {prompt_file} is not UTF-8; convert it") from error


def read_params(pairs: list[str]) -> dict[str, Any]:
    """Fields of --param."""
    params = {}
    for pair in pairs:
        key, equals, value = pair.partition("=")
        if not equals or not key:
            raise UsageError(f"--param takes KEY=JSON, as in --param top_k=20, not {pair!r}")
        params[key] = json_or_text(value)
    return params


def json_or_text(value: str) -> Any:
    """Value of a parameter: parsed if it is JSON, else the text itself."""
    try:
        return json.loads(value, parse_constant=not_json)
    except ValueError:
        return value
    except RecursionError as error:
        raise UsageError("--param nests too deep for a request; flatten it") from error


def not_json(constant: str) -> NoReturn:
    """Refuse NaN and Infinity, which Python reads and JSON does not have."""
    raise ValueError(f"{constant} is no JSON")


def read_schema(text: str) -> dict[str, Any]:
    """Read a JSON schema, inline or from a file."""
    try:
        source = text if text.lstrip().startswith("{") else Path(text).read_text(encoding="utf-8")
        schema = json.loads(source, parse_constant=not_json)
    except OSError as error:
        raise UsageError(f"cannot read the schema {text:.200}: {error.strerror}") from error
    except ValueError as error:
        raise UsageError(f"--schema is not JSON ({error})") from error
    except RecursionError as error:
        raise UsageError("--schema nests too deep for a request; flatten it") from error
    if not isinstance(schema, dict):
        raise UsageError("--schema must be a JSON object")
    return schema
