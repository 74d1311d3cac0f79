"""On the GPU machine: `python3 -m tools.gpu.unpack FOLDER` unpacks the parts of this call."""

import json
import shutil
import sys
import tarfile
import tomllib
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any


def unpack(archive: Path, kit: Path) -> None:
    """Unpack an archive, once."""
    mark = kit / f".have-{archive.name}"
    if not mark.exists():
        with tarfile.open(archive, "r:xz") as tar:
            tar.extractall(kit, filter="data")
        mark.touch()
        print(f"install: {archive}", flush=True)


def missing(kit: Path) -> list[str]:
    """Archives that no call has brought yet."""
    listed = kit / "archives.json"
    names = json.loads(listed.read_text()) if listed.exists() else ["all of them"]
    return [name for name in names if not (kit / f".have-{name}").exists()]


def write_entry_points(project: dict[str, Any], meta: Path) -> None:
    """Write the metadata of an installed package, by which vLLM finds the plug-in in the working tree."""
    info = meta / f"{project['name']}-0.dist-info"
    info.mkdir(parents=True, exist_ok=True)
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {project['name']}\nVersion: 0\n")
    groups = project.get("entry-points", {}).items()
    sections = [f"[{group}]\n" + "".join(f"{k} = {v}\n" for k, v in names.items()) for group, names in groups]
    (info / "entry_points.txt").write_text("".join(sections))


def main(root: Path, kit: Path) -> int:
    """Unpack, and return 3 while a part is missing."""
    for listed in sorted(root.glob(".gpu/part*/archives.json")):
        shutil.copyfile(listed, kit / "archives.json")
    with ThreadPoolExecutor(8) as pool:
        list(pool.map(lambda archive: unpack(archive, kit), sorted(root.glob(".gpu/part*/*.tar.xz"))))
    write_entry_points(tomllib.loads((root / "pyproject.toml").read_text())["project"], kit / "meta")
    if to_come := missing(kit):
        print(f"install: still to come: {', '.join(to_come)}", flush=True)
        return 3
    return 0


if __name__ == "__main__":
    sys.exit(main(Path.cwd(), Path(sys.argv[1])))
