"""Flags that make vLLM's server checkpoint KV, beside other KV connectors of the user's."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

from conserve.engine.runtime.vllm_flags import given_flags, value_of
from conserve.engine.vllm.settings import CONNECTOR, CONNECTOR_MODULE, CONNECTOR_ROLE
from conserve.errors import SettingsError

FLAG = "--kv-transfer-config"


def with_checkpoints(flags: Sequence[str], settings: dict[str, Any]) -> list[str]:
    """The user's flags and ours; `settings` is our connector's `kv_connector_extra_config`.

    Blocks that cannot be restored are always computed again, whatever the user's connector asks for.
    """
    others, theirs = without(flags)
    ours = {
        "kv_connector": CONNECTOR,
        "kv_connector_module_path": CONNECTOR_MODULE,
        "kv_role": CONNECTOR_ROLE,
        "kv_load_failure_policy": "recompute",
        "kv_connector_extra_config": settings,
    }
    if theirs is None:
        return [*others, FLAG, json.dumps(ours)]
    both = {
        "kv_connector": "MultiConnector",
        "kv_role": theirs.get("kv_role", "kv_both"),
        "kv_load_failure_policy": "recompute",
        "kv_connector_extra_config": {"connectors": [ours, theirs]},
    }
    return [*others, FLAG, json.dumps(both)]


def without_checkpoints(flags: Sequence[str]) -> list[str]:
    """The user's flags again: undoes `with_checkpoints`."""
    others, config = _parted(flags)
    theirs = [one for one in _connectors(config) if one["kv_connector"] != CONNECTOR]
    return [*others, FLAG, json.dumps(theirs[0])] if theirs else others


def copies_bytes(flags: Sequence[str]) -> int:
    """Host memory for copies of KV blocks that these flags give an engine; 0 without checkpoints."""
    _, config = _parted(flags)
    ours = [one for one in _connectors(config) if one["kv_connector"] == CONNECTOR]
    return sum(int(one.get("kv_connector_extra_config", {}).get("host_bytes", 0)) for one in ours)


def _connectors(config: dict[str, Any] | None) -> list[dict[str, Any]]:
    """KV connectors that a configuration names, itself or beside each other."""
    if config is None:
        return []
    inner: list[dict[str, Any]] = config.get("kv_connector_extra_config", {}).get("connectors", [config])
    return inner


def without(flags: Sequence[str]) -> tuple[list[str], dict[str, Any] | None]:
    """The flags without the one that names a KV connector, and the JSON object of that one."""
    others, config = _parted(flags)
    if config is not None and config["kv_connector"] == CONNECTOR:
        raise SettingsError(f"{CONNECTOR} is set by --kv-checkpoint; leave out {FLAG}")
    return others, config


def _parted(flags: Sequence[str]) -> tuple[list[str], dict[str, Any] | None]:
    others: list[str] = []
    for flag in given_flags(flags):
        others += flag.words if flag.name != FLAG else flag.values[1:]  # vLLM names a word that is too many
    said = value_of(flags, FLAG)
    if said is None:
        return others, None
    if any(flag.name == FLAG and flag.key for flag in given_flags(flags)):
        raise SettingsError(f"{FLAG} takes one JSON object here; write it whole, without names behind a dot")
    try:
        config = json.loads(said)
        if not isinstance(config, dict) or "kv_connector" not in config:
            raise ValueError
    except ValueError:
        raise SettingsError(f"{FLAG} takes a JSON object with a kv_connector, not {said!r}") from None
    return others, config
