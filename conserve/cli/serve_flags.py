"""Flags of `conserve serve` and what they mean: times, promises, policies, checkpoints, and vLLM's own flags."""

from math import inf
from pathlib import Path
from typing import Any

from msgspec import UNSET, UnsetType

from conserve.api.running import engine_flags, flags_as_given
from conserve.config import Settings, size_bytes
from conserve.engine.policy.checkpointing import HOST_BYTES
from conserve.engine.policy.own_checkpoints import policy_named
from conserve.engine.policy.policies import COMPARED, POLICIES, SERVING, named
from conserve.engine.runtime.api_limits import ApiLimits
from conserve.engine.runtime.receipt import LARGEST_SHARE
from conserve.engine.runtime.vllm_flags import files_of, given_flags, names_of, value_of, words_of_file
from conserve.engine.section import LIVE_PREFIXES, MOST_PREFIXES
from conserve.errors import SettingsError
from conserve.names import OFF
from conserve.units import GIB, parse_ms, parse_share


def require_policy(name: str) -> None:
    """Raise if live traffic cannot be served under this policy."""
    if name in POLICIES and name not in SERVING:
        command = "conserve bench" if name in COMPARED else "conserve run"
        raise SettingsError(
            f"the policy {name} is for {command}; for live traffic there are {', '.join(SERVING)}"
        )
    try:
        named(name)
    except ValueError as error:
        raise SettingsError(f"--policy: {error}") from error


def drain_s(flags: list[str]) -> float:
    """Seconds that the server may take to end: vLLM's own time-out, and some more."""
    text = value_of(flags, "--shutdown-timeout") or ""
    return (float(text) if text.isdecimal() else 30.0) + 15.0


def recording_at(file: Path) -> Path:
    """The file's absolute path; raises `SettingsError` if nothing can be written there."""
    path = file.expanduser().absolute()
    if path.is_dir() or not path.parent.is_dir():
        raise SettingsError(f"--record-views {file} is no file in a folder that exists; name one")
    return path


def require_weights(settings: Settings) -> None:
    """Raise before anything starts if the harvester could not read its weights (`--share`)."""
    from conserve.jobs.window.shares import Weights

    if settings.share is not None:
        Weights.of(settings.share)


OURS = ("--scheduler-cls", "--worker-cls", "--scheduling-policy", "--additional-config")
PROMISES = {"ttft": "--ttft-slo", "tbt": "--tbt-slo"}  # vLLM has no flag with such a word
NOT_WITH = ("--api-server-count", "--headless", "--grpc", "--uds", "--ssl-keyfile", "--ssl-certfile")
LISTENING = ("--host", "--port")  # flags of vLLM's that the command has too
COUNTS_ROWS = ("--max-num-queued-reqs", "--max-num-queued-tokens")  # vLLM's front end knows no lanes


def vllms_flags(settings: Settings, words: list[str]) -> list[str]:
    """Flags of vLLM by the settings and the command line; raises for those that the server cannot have."""
    given = flags_as_given(settings, words)
    refuse_ours(given)
    refuse_addresses(given)
    return engine_flags(settings, words)


def refuse_addresses(flags: list[str]) -> None:
    """Raise for an address in a file of `--config`: the server listens at that of `conserve serve` itself."""
    for file in files_of(flags):
        for flag in given_flags(words_of_file(file)):
            if flag.name in LISTENING:
                raise SettingsError(
                    f"conserve serve does not listen where {file} says; "
                    f"take it out there and give {flag.name} {flag.value} to conserve serve itself"
                )


def refuse_ours(flags: list[str], command: str = "conserve serve") -> None:
    """Raise for flags of vLLM, also in a file of `--config`, that the command sets itself or cannot supervise."""
    if "--api-key" in names_of(flags):
        raise SettingsError("a key among vLLM's flags can be read by all; set CONSERVE_API_KEY instead")
    _refuse_ours(flags, command)
    for file in files_of(flags):
        words = words_of_file(file)
        if "--api-key" in names_of(words):
            raise SettingsError(f"ConServe does not see the key in {file}; set CONSERVE_API_KEY instead")
        if value_of(words, "--hf-token"):
            raise SettingsError(
                f"the token in {file} would stand on a command line, which all can read; set HF_TOKEN instead"
            )
        _refuse_ours(words, command, f" (in {file})")


def _refuse_ours(flags: list[str], command: str, where: str = "") -> None:
    refuse_machines(flags, command)
    for name in names_of(flags):
        for word, flag in PROMISES.items():
            if name == flag:
                raise SettingsError(f"{name}{where} is no flag of vLLM's; give it to {command} itself")
            if word in name.split("-"):
                raise SettingsError(f"there is no flag {name}{where}; {flag} promises a {word.upper()}")
        if name in OURS:
            raise SettingsError(
                f"{name}{where} is set by {command}; leave it out, or start vllm serve yourself"
            )
        if name in NOT_WITH:
            raise SettingsError(
                f"{command} cannot run with {name}{where}; start vllm serve with ConServe's plug-in"
            )
        if name in COUNTS_ROWS:
            raise SettingsError(
                f"{command} cannot run with {name}{where}: vLLM counts rows too, and would refuse live requests "
                "as long as rows wait; leave it out"
            )


def refuse_machines(flags: list[str], command: str = "conserve serve") -> None:
    """Raise for flags of a model that spans machines, which share no memory with the scheduler."""
    for flag in given_flags(flags):
        name, value = flag.name, flag.value
        ray = name in ("--distributed-executor-backend", "--data-parallel-backend") and value == "ray"
        if ray or (name == "--nnodes" and value not in ("", "1")):
            raise SettingsError(
                f"{command} cannot run with {name} {value}: rows leave an iteration by a flag in shared "
                "memory, which reaches no other machine; start vllm serve with it, and feed that: "
                "conserve harvest --endpoint URL"
            )


def refuse_engines(flags: list[str], spill: Path | None) -> None:
    """Raise for what one engine alone can do, where the flags start several."""
    from conserve.engine.vllm.launching.flags import engines_of

    engines = engines_of(flags)
    if engines > 1 and spill is not None:
        raise SettingsError(
            f"--kv-spill is for one engine, not for --data-parallel-size {engines}; leave it out"
        )


def checkpointing(
    flags: list[str], policy: str, host_memory: str | None, spill: Path | None = None
) -> list[str]:
    """Flags of engines whose KV is checkpointed, each with its part of the host memory; none if it is not."""
    from conserve.engine.vllm.checkpoint.kv_transfer import with_checkpoints
    from conserve.engine.vllm.launching.flags import engines_of

    refuse_engines(flags, spill)
    if policy == OFF:
        if host_memory is not None:
            raise SettingsError("--kv-host-memory is for checkpoints; leave it out with --kv-checkpoint off")
        if spill is not None:
            raise SettingsError("--kv-spill is for checkpoints, which are off; give --kv-checkpoint adaptive")
        return flags
    try:
        policy_named(policy)
    except ValueError as error:
        raise SettingsError(f"--kv-checkpoint: {error}") from error
    each = host_bytes(host_memory) // engines_of(flags)
    ours: dict[str, Any] = {"policy": policy, "host_bytes": each}
    return with_checkpoints(flags, {**ours, "spill": str(spill.resolve())} if spill is not None else ours)


def host_bytes(text: str | None) -> int:
    """Bytes of host memory; by default 4 GiB, or a quarter of a machine or container with less than 16 GiB."""
    from conserve.engine.runtime.machine import memory_bytes

    whole, _ = memory_bytes()
    if text is None:
        return min(HOST_BYTES, whole // 4)
    size = size_bytes("--kv-host-memory", text)
    if size > whole:
        has = f"{whole / GIB:.0f} GiB"
        raise SettingsError(f"--kv-host-memory {text} is more than the {has} of this machine; give less")
    return size


def milliseconds(flag: str, text: str | None) -> float | None:
    """Parse a time with its unit, in ms."""
    if text is None:
        return None
    if not (ms := parse_ms(text)):
        raise SettingsError(f"{flag} takes a time like 1500ms or 1.5s, not {text!r}")
    return ms


def promise(flag: str, text: str | None) -> float | dict[str, float] | None:
    """Parse a time, or times by name such as `p50=40ms,p99=150ms` or `mean=60ms`, in ms."""
    from conserve.engine.policy.promises import bounds

    if text is None or "=" not in text:
        return milliseconds(flag, text)
    parts = [part.partition("=") for part in text.split(",")]
    named = {name.strip(): milliseconds(flag, time) or 0.0 for name, _, time in parts}
    if len(named) < len(parts):
        raise SettingsError(f"{flag} {text} names a promise twice; give each once")
    try:
        return bounds(named)
    except ValueError as error:
        raise SettingsError(f"{flag} {text}: {error}; write e.g. {flag} p50=40ms,p99=150ms") from error


def harm_of(text: str | None) -> float | UnsetType | None:
    """The harm of `--harm`: None for off, unset where the flag is not given."""
    return UNSET if text is None else share("--harm", text)


def receipt_of(text: str | None) -> float | None:
    """The share of `--receipt`: 0 for off, None where the flag is not given."""
    return None if text is None else share("--receipt", text, most=LARGEST_SHARE) or 0.0


def live_prefixes_of(text: str | None) -> float:
    """The share of `--live-prefixes`: 0 for off."""
    return LIVE_PREFIXES if text is None else share("--live-prefixes", text, most=MOST_PREFIXES) or 0.0


def share(flag: str, text: str, *, most: float = inf) -> float | None:
    """Parse a share such as 10%, of which the flag takes so much at most; None for off."""
    if text.strip() == OFF:
        return None
    if not (found := parse_share(text)):
        raise SettingsError(f"{flag} takes a share like 10%, or off, not {text!r}")
    if found > most:
        raise SettingsError(f"{flag} takes at most {most:.0%}, not {text}")
    return found


def front_of(max_body: str, max_file: str, connections: int, *, open_metrics: bool) -> ApiLimits:
    """Limits of the API server by the flags."""
    return ApiLimits(
        body_bytes=size_bytes("--max-body", max_body),
        file_bytes=size_bytes("--max-file", max_file),
        connections=connections,
        open_metrics=open_metrics,
    )
