"""Make a CPU wheel of a vLLM release that has none, of its Python files and the kernels of another release.

Run as `python -m tools.cpu_wheel VLLM_WHEEL CPU_WHEEL FOLDER`; prints the new wheel's path. The wheel shows whether
ConServe fits the release's Python side. It says nothing about the release's own kernels or their speed.
"""

import csv
import hashlib
import io
import re
import sys
import zipfile
from base64 import urlsafe_b64encode
from pathlib import Path

Contents = dict[str, bytes]


def main(release: Path, kernels: Path, folder: Path) -> Path:
    """Write the wheel into the folder."""
    version = f"{_version(release)}+cpu.kernels.{_version(kernels)}"
    info = f"vllm-{version}.dist-info"
    contents = {
        **_chosen(release, lambda name: name.startswith("vllm/") and not name.endswith(".so")),
        **_chosen(kernels, lambda name: name.endswith(".so")),
        **{f"{info}/{name}": text for name, text in _metadata(release, version).items()},
    }
    wheel = folder / f"vllm-{version}-{kernels.stem.split('-', 2)[2]}.whl"
    folder.mkdir(parents=True, exist_ok=True)
    _write(wheel, info, contents)
    return wheel


def _version(wheel: Path) -> str:
    return wheel.name.split("-")[1]


def _chosen(wheel: Path, is_wanted) -> Contents:
    with zipfile.ZipFile(wheel) as archive:
        return {name: archive.read(name) for name in archive.namelist() if is_wanted(name)}


def _metadata(release: Path, version: str) -> Contents:
    """The release's metadata with the new version, of which vLLM reads that this is a CPU build."""
    found = _chosen(release, lambda name: Path(name).name in ("METADATA", "WHEEL", "entry_points.txt"))
    texts = {Path(name).name: text for name, text in found.items()}
    head, blank, description = texts["METADATA"].decode().partition("\n\n")
    head = re.sub(r"(?m)^Version: .*$", f"Version: {version}", head)
    return {**texts, "METADATA": f"{head}{blank}{description}".encode()}


def _write(wheel: Path, info: str, contents: Contents) -> None:
    record = io.StringIO()
    rows = [(name, f"sha256={_digest(data)}", len(data)) for name, data in contents.items()]
    csv.writer(record).writerows([*rows, (f"{info}/RECORD", "", "")])
    with zipfile.ZipFile(wheel, "w", zipfile.ZIP_STORED) as archive:
        for name, data in contents.items():
            archive.writestr(name, data)
        archive.writestr(f"{info}/RECORD", record.getvalue())


def _digest(data: bytes) -> str:
    return urlsafe_b64encode(hashlib.sha256(data).digest()).rstrip(b"=").decode()


if __name__ == "__main__":
    print(main(*map(Path, sys.argv[1:4])))
