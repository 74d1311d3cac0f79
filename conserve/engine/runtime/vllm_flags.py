"""Flags of vLLM as they stand on a command line, read as vLLM reads them. Needs no vLLM."""

import json
from collections.abc import Iterator, Sequence
from itertools import chain, pairwise
from pathlib import Path
from typing import Any, NamedTuple

from conserve.errors import SettingsError

LONG = {
    "-ac": "--attention-config",
    "-asc": "--api-server-count",
    "-cc": "--compilation-config",
    "-dp": "--data-parallel-size",
    "-dpb": "--data-parallel-backend",
    "-n": "--nnodes",
    "-pp": "--pipeline-parallel-size",
    "-q": "--quantization",
    "-r": "--node-rank",
    "-sc": "--speculative-config",
    "-tp": "--tensor-parallel-size",
}
"""Long names of short ones, as far as one is asked for here or has JSON keys behind it."""


ASKED = (
    *("--additional-config", "--api-key", "--api-server-count", "--async-scheduling", "--config"),
    *("--data-parallel-backend", "--data-parallel-size", "--distributed-executor-backend", "--dtype"),
    *("--enforce-eager", "--grpc", "--headless", "--hf-token", "--kv-transfer-config", "--max-model-len"),
    *("--max-num-queued-reqs", "--max-num-queued-tokens", "--model", "--nnodes", "--no-async-scheduling"),
    *("--pipeline-parallel-size", "--quantization"),
    *("--scheduler-cls", "--scheduling-policy", "--shutdown-timeout", "--ssl-certfile", "--ssl-keyfile"),
    *("--uds", "--worker-cls"),
)
"""Long names that are asked for. No name of vLLM's is the beginning of one of them."""

CONFIG, MODEL = "--config", "--model"
ALONE = (
    *("--aggregate-engine-logging", "--data-parallel-multi-port-external-lb", "--disable-log-stats"),
    *("--grpc", "--headless"),
)
"""Switches without one that begins with `--no-`: off in a file, they are left out."""


class GivenFlag(NamedTuple):
    """A flag with the values behind it; its name is long and has dashes."""

    name: str
    values: Sequence[str]
    words: Sequence[str]  # as they were given
    key: str = ""  # of a JSON object: `a.b` of `--name.a.b 1`

    @property
    def value(self) -> str:
        """The first value; empty for a switch."""
        return self.values[0] if self.values else ""


def given_flags(words: Sequence[str]) -> Iterator[GivenFlag]:
    """Yield the flags in the order of the command line; words before the first one have an empty name."""
    starts = [place for place, word in enumerate(words) if is_flag(word) or place == 0]
    for start, end in pairwise([*starts, len(words)]):
        group = words[start:end]
        if not is_flag(group[0]):
            yield GivenFlag("", group, group)
            continue
        named, joined, value = group[0].partition("=")
        if named[:2] in LONG and len(named) > 2:  # -n2 is -n 2
            named, joined, value = named[:2], "=", group[0][2:]
        name, _, key = named.partition(".")
        values = [value, *group[1:]] if joined else group[1:]
        yield GivenFlag(whole_name(name.replace("_", "-")), values, group, key)


def whole_name(name: str) -> str:
    """The long name of a flag that may be short, or cut short: vLLM takes what only one of its names begins with.

    Names that are not asked for are unknown here. What one of them begins with too, vLLM itself refuses.
    """
    known = ASKED if name.startswith("--") else tuple(LONG)
    if name not in known:
        begun = [one for one in known if one.startswith(name)]
        name = begun[0] if len(begun) == 1 else name
    return LONG.get(name, name)


def words_of_file(file: str) -> list[str]:
    """Flags in a YAML file of `--config`, as vLLM makes them from its keys; raises `SettingsError`."""
    try:
        import yaml

        said = yaml.safe_load(Path(file).read_text(encoding="utf-8"))
    except ImportError as error:
        raise SettingsError(
            f"{CONFIG} {file} cannot be read without PyYAML, which comes with vLLM"
        ) from error
    except (OSError, ValueError, yaml.YAMLError) as error:
        raise SettingsError(f"{CONFIG} {file} cannot be read: {' '.join(str(error).split())}") from error
    if not isinstance(said, dict):
        raise SettingsError(f"{CONFIG} {file} has no flags; write one a line, such as  max-model-len: 4096")
    return [word for key, value in said.items() for word in _words(f"--{key}", value)]


def _words(name: str, value: Any) -> list[str]:
    if value is False:
        return [] if name.replace("_", "-") in ALONE else [f"--no-{name[2:]}"]
    if value is True:
        return [name]
    if isinstance(value, list):
        return [name, *map(str, value)] if value else []
    return [name, json.dumps(value) if isinstance(value, dict) else str(value)]


def files_of(words: Sequence[str]) -> list[str]:
    """Files that `--config` names."""
    return [flag.value for flag in given_flags(words) if flag.name == CONFIG]


def spelled_out(words: Sequence[str]) -> list[str]:
    """The flags, with those of `--config FILE` in front, where vLLM puts them; raises `SettingsError`.

    The command line names the model, as it does for vLLM.
    """
    of_files = [flag for file in files_of(words) for flag in given_flags(words_of_file(file))]
    said = [word for flag in of_files if flag.name not in (CONFIG, MODEL) for word in flag.words]
    others = (flag.values[1:] if flag.name == CONFIG else flag.words for flag in given_flags(words))
    return [*said, *chain.from_iterable(others)]


def is_flag(word: str) -> bool:
    """True for the name of a flag; a number below zero is a value."""
    return word.startswith("-") and not word[1:2].isdigit() and word[1:2] not in ("", ".")


def names_of(words: Sequence[str]) -> list[str]:
    """Names of the flags, in the order of the command line."""
    return [flag.name for flag in given_flags(words) if flag.name]


def value_of(words: Sequence[str], name: str) -> str | None:
    """Value of a flag, of which the last one counts; None if it is not given, empty for a switch."""
    return next((flag.value for flag in reversed([*given_flags(words)]) if flag.name == name), None)
