"""Pack vLLM's CUDA build and the project's needs: `python -m tools.gpu.prepare`, in the project's root.

Fills `.gpu/`, which git ignores, and prints the calls to make on the GPU machine. Needs pip, a network, 3 GB of
disk and about ten minutes; a second time it takes seconds.
"""

import hashlib
import json
import os
import re
import shutil
import subprocess
import sys
import tomllib
from concurrent.futures import ProcessPoolExecutor, as_completed
from pathlib import Path
from typing import NamedTuple

from tools.gpu import contents, parts

OUT = Path(".gpu")
BUILD = OUT / "build"
SITE = BUILD / "site"
PLATFORMS = (
    *(f"manylinux_2_{minor}_x86_64" for minor in range(5, 40)),
    *("manylinux2014_x86_64", "manylinux2010_x86_64", "manylinux1_x86_64", "linux_x86_64"),
)
CALL_S = 600  # limit of one call; the steps get less, since the machine's start and the transfer count too


class Call(NamedTuple):
    """One command on the GPU machine."""

    carry: str  # ignored folder to upload with the working tree, if any
    steps: str  # arguments of `tools.gpu.measure`, if any


MEASURED = (
    "--keep --limit 540 serve-shared,stock-shared --rates 0.7",
    "--keep --limit 260 stock-shared --rates 2",
    "--limit 180 bench-shared --rates 0.7 --policies online-only,non-preemptive/planned",
    "--limit 560 serve-default,reaction-default,offline-default,pair-default --rates 0.7",
    "--limit 560 profile,smoke,bare-copies",
    "--limit 560 ablation-default --rates 0.7",
    "--limit 560 bench-default --rates 0.7",
    "--limit 560 serve-eager-v1,reaction-eager-v1,offline-eager-v1,pair-eager-v1 --rates 0.7",
    "--limit 560 serve-eager-v2,reaction-eager-v2,offline-eager-v2,pair-eager-v2 --rates 0.7",
    "--limit 560 serve-sync,offline-sync,serve-plain,offline-plain,copies-saving",
)  # the most wanted first: a lease may end
ASIDE = ("docs", "tests", "examples", "deploy")  # folders that no call needs


def calls(num_parts: int) -> list[Call]:
    """Calls in their order: the parts, the last one with the first steps, then the other steps."""
    carried = [Call(f".gpu/part{number}", "") for number in range(1, num_parts)]
    first, *others = MEASURED
    return [*carried, Call(f".gpu/part{num_parts}", first), *(Call("", steps) for steps in others)]


def wanted(requirements: str, pyproject: str, lock: str) -> list[str]:
    """Requirements of the kit, and those of the project that neither they nor the machine have."""
    lines = requirements.split()
    have = contents.INSTALLED_THERE | {line.split("==")[0].lower() for line in lines}
    pins = dict(re.findall(r"^([\w.-]+)==(\S+)", lock, re.MULTILINE))
    for text in tomllib.loads(pyproject)["project"]["dependencies"]:
        name = re.split(r"[^\w.-]", text)[0].lower()
        if name not in have:
            lines.append(f"{name}=={pins[name]}" if name in pins else text)
    return lines


def download(lines: list[str]) -> None:
    """Install everything for CPython 3.12 into one folder, without the files that serving never loads."""
    shutil.rmtree(SITE, ignore_errors=True)
    listed = BUILD / "requirements.txt"
    listed.write_text("\n".join(lines))
    target = ("--python-version", "3.12", "--implementation", "cp", "--target", str(SITE))
    platforms = [word for name in PLATFORMS for word in ("--platform", name)]
    options = ("--disable-pip-version-check", "--no-deps", "--no-compile", "--only-binary=:all:", "--quiet")
    pip = [sys.executable, "-m", "pip", "install", *options, *target, *platforms, "-r", str(listed)]
    subprocess.run(pip, check=True)
    for pattern in contents.UNUSED:
        for path in sorted(SITE.glob(pattern)):
            shutil.rmtree(path) if path.is_dir() else path.unlink()


def archive(name: str) -> Path:
    """Path at which an archive is built."""
    return BUILD / f"{name}.tar.xz"


def compress() -> None:
    """Pack the downloaded files, two archives at a time."""
    grouped = parts.group(SITE, contents.ARCHIVES)
    # First the one that takes longest. A dictionary of 64 MiB pays where kernels repeat each other.
    presets: dict[str, parts.Preset] = {name: 9 if name == "attention" else 6 for name in grouped}
    with ProcessPoolExecutor(2) as pool:
        packing = {
            pool.submit(parts.pack, archive(name), SITE, grouped[name], preset=presets[name]): name
            for name in sorted(grouped, key=presets.__getitem__, reverse=True)
        }
        for done in as_completed(packing):
            print(f"prepare: {archive(packing[done])}: {done.result():,} bytes", flush=True)


def build(lines: list[str]) -> None:
    """Download and compress, unless the last build had the same contents."""
    stamp = hashlib.sha256(repr((lines, contents.UNUSED, contents.ARCHIVES)).encode()).hexdigest()
    done = BUILD / "done"
    if done.exists() and done.read_text() == stamp:
        return
    done.unlink(missing_ok=True)
    print(f"prepare: downloading {len(lines)} packages, 400 MB", flush=True)
    download(lines)
    compress()
    done.write_text(stamp)


def lay_out() -> int:
    """Copy the archives into folders of parts; returns their number."""
    names = [*contents.ARCHIVES, contents.MODELS_ARCHIVE]
    sizes = {name: archive(name).stat().st_size for name in names}
    for old in OUT.glob("part*"):
        shutil.rmtree(old)
    shared = parts.share_out(sizes)
    for number, held in enumerate(shared, 1):
        folder = OUT / f"part{number}"
        folder.mkdir()
        for name in held:
            shutil.copyfile(archive(name), folder / archive(name).name)
        (folder / "archives.json").write_text(json.dumps([archive(name).name for name in names]))
        print(f"prepare: {folder}: {sum(map(sizes.__getitem__, held)) / 2**20:.1f} MiB ({', '.join(held)})")
    return len(shared)


def tree_bytes() -> int:
    """Bytes of the files that travel with each call: all that git does not ignore, and no folder set aside."""
    aside = [f":(exclude){name}" for name in ASIDE]
    listed = ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard", "--", ".", *aside]
    names = subprocess.run(listed, check=True, capture_output=True, text=True).stdout.split("\0")
    return sum(Path(name).stat().st_size for name in names if name and Path(name).is_file())


def main() -> int:
    """Build the kit and print the calls."""
    if not Path("pyproject.toml").exists():
        print("prepare: run it in the project's root", file=sys.stderr)
        return 2
    BUILD.mkdir(parents=True, exist_ok=True)
    try:
        demo_models = Path(os.environ.get("CONSERVE_MODELS", ".demo/models"))
        contents.write_models(BUILD / "models", demo_models)
        build(wanted(*(Path(name).read_text() for name in
                       (str(contents.REQUIREMENTS), "pyproject.toml", "requirements/cpu.lock"))))  # fmt: skip
        parts.pack(archive(contents.MODELS_ARCHIVE), BUILD / "models", sorted(contents.MODELS))
        number = lay_out()
    except (FileNotFoundError, parts.PartTooLarge) as error:
        print(f"prepare: {error}", file=sys.stderr)
        return 1
    size = tree_bytes()
    print(
        f"prepare: the working tree adds {size / 2**20:.1f} MiB"
        + (", TOO MUCH" if size > parts.TREE_BYTES else "")
    )
    print(f"\nbefore the calls:  mkdir .gpu/aside && mv {' '.join(ASIDE)} .gpu/aside")
    print("behind them:       mv .gpu/aside/* . && rmdir .gpu/aside")
    for place, call in enumerate(calls(number), 1):
        measure = f" && python3 -m tools.gpu.measure {call.steps}" if call.steps else ""
        print(f"\n{place}. carry: {call.carry or '-'}; limit: {CALL_S} s\n   . tools/gpu/install.sh{measure}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
