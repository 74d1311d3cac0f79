"""The Dockerfile as instructions, and its build stage run in a folder instead of a container."""

import os
import re
import shutil
import subprocess
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).parents[2]
DOCKERFILE = ROOT / "deploy/image/Dockerfile"
IGNORE = DOCKERFILE.with_suffix(".dockerignore")
PASSED_ON = ("PIP_", "UV_", "SSL_", "REQUESTS_")  # variables that say where packages come from
INSIDE = re.compile(r"(?<![\w/.-])/(?=opt/|src\b)")  # paths that the build stage writes to


class Instruction(NamedTuple):
    """One instruction, with the number of its stage from 0; what is in front of the first stage is -1."""

    stage: int
    word: str
    rest: str


def instructions(text: str) -> Iterator[Instruction]:
    """Instructions of a Dockerfile, without comments and broken lines."""
    stage = -1
    lines = "\n".join(line for line in text.splitlines() if not line.lstrip().startswith("#"))
    for line in lines.replace("\\\n", " ").splitlines():
        word, _, rest = line.strip().partition(" ")
        if word:
            stage += word == "FROM"
            yield Instruction(stage, word, " ".join(rest.split()))


def sent(path: str) -> bool:
    """True if the builder is sent this path, by the lines of the ignore file that begin with `!`."""
    wanted = [line[1:] for line in IGNORE.read_text().splitlines() if line.startswith("!")]
    return any(path == one or path.startswith(f"{one}/") for one in wanted)


def run_build_stage(folder: Path, arguments: Mapping[str, str]) -> None:
    """Run the first stage with `folder` as its root; raises `CalledProcessError` or `FileNotFoundError`."""
    at = folder
    variables = {key: value for key, value in os.environ.items() if key.startswith(PASSED_ON)}
    variables |= {"PATH": os.environ["PATH"], "HOME": str(folder), "PIP_CACHE_DIR": str(folder / "cache")}
    for stage, word, rest in instructions(DOCKERFILE.read_text()):
        if stage == 0 and word == "ARG":
            name, _, default = rest.partition("=")
            variables[name] = arguments.get(name, default)
        elif stage == 0 and word == "WORKDIR":
            at = folder / rest.lstrip("/")
            at.mkdir(parents=True)
        elif stage == 0 and word == "COPY":
            copy(rest, at)
        elif stage == 0 and word == "RUN":
            command = INSIDE.sub(f"{folder}/", rest)
            subprocess.run(
                ["sh", "-euc", command], cwd=at, env=variables, check=True, capture_output=True, text=True
            )


def copy(rest: str, at: Path) -> None:
    """Copy what the builder would be sent; raises `FileNotFoundError` for anything else."""
    *sources, target = rest.split()
    for source in sources:
        path, to = ROOT / source, at / target
        if not sent(source):
            raise FileNotFoundError(f"{IGNORE.name} keeps {source} from the builder")
        if path.is_dir():
            shutil.copytree(path, to, dirs_exist_ok=True, ignore=shutil.ignore_patterns("__pycache__"))
        else:
            to.mkdir(parents=True, exist_ok=True)
            shutil.copy2(path, to)
