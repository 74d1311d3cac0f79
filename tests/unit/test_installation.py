"""The line that installs an extra comes from where this copy came from, and works as printed."""

import importlib.metadata
import json
import os
import re
import shutil
import subprocess
import sys
import tomllib
import venv
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Thread
from types import SimpleNamespace
from typing import Any

import pytest

from conserve import installation
from conserve.engine.vllm.compat import installed
from conserve.installation import DISTRIBUTION, TORCH_ON_CPUS, install_line, packages, requirement
from tests.commands import conserve

REPOSITORY = Path(__file__).parents[2]
COMMIT = "0123456789abcdef0123456789abcdef01234567"
WHEEL = "https://host/conserve_llm-0.1.0-py3-none-any.whl"
GIT: dict[str, Any] = {
    "url": "https://host/conserve.git",
    "vcs_info": {"vcs": "git", "requested_revision": "main", "commit_id": COMMIT},
}


def test_the_distribution_has_a_name_of_its_own() -> None:
    project = tomllib.loads((REPOSITORY / "pyproject.toml").read_text())["project"]
    assert project["name"] == DISTRIBUTION == "conserve-llm"
    assert project["scripts"]["conserve"] == "conserve.__main__:main"


@pytest.mark.parametrize(
    ("origin", "printed"),
    [
        (None, '"conserve-llm[plot]"'),
        ({"url": WHEEL, "archive_info": {}}, f'"conserve-llm[plot] @ {WHEEL}"'),
        (GIT, f'"conserve-llm[plot] @ git+https://host/conserve.git@{COMMIT}"'),
        (
            {**GIT, "subdirectory": "sub"},
            f'"conserve-llm[plot] @ git+{GIT["url"]}@{COMMIT}#subdirectory=sub"',
        ),
        ({"url": "FOLDER", "dir_info": {}}, '"conserve-llm[plot] @ FOLDER"'),
        ({"url": "FOLDER", "dir_info": {"editable": True}}, '-e "PATH[plot]"'),
        ({"url": "FOLDER/gone.whl", "archive_info": {}}, '"matplotlib>=3.9"'),
        ({**GIT, "url": "FOLDER"}, '"matplotlib>=3.9"'),
    ],
)
def test_an_extra_is_installed_from_where_conserve_came_from(
    origin: dict[str, Any] | None, printed: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    stated = ['matplotlib>=3.9; extra == "plot"', "duckdb>=1.3", "vllm==0.32.0 ; extra == 'cuda'"]
    monkeypatch.setattr(importlib.metadata, "requires", lambda name: stated)
    folder = tmp_path / "a folder"
    folder.mkdir()
    if origin is not None:
        origin = {**origin, "url": origin["url"].replace("FOLDER", folder.as_uri())}
    expected = printed.replace("FOLDER", folder.as_uri()).replace("PATH", str(folder))
    assert requirement("plot", origin) == expected


def test_the_packages_of_an_extra_are_those_of_no_other(monkeypatch: pytest.MonkeyPatch) -> None:
    stated = ["psycopg[binary]>=3.2; extra == 'postgres'", "a; extra == 'postgres2'", "b"]
    monkeypatch.setattr(importlib.metadata, "requires", lambda name: stated)
    assert packages("postgres") == ["psycopg[binary]>=3.2"]
    assert packages("postgres2") == ["a"]


def noted(text: str | None) -> Callable[[str], Any]:
    return lambda name: SimpleNamespace(read_text=lambda file: text if file == "direct_url.json" else None)


def test_what_pip_noted_is_read(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.metadata, "distribution", noted(json.dumps(GIT)))
    assert installation.direct_url() == GIT
    monkeypatch.setattr(importlib.metadata, "distribution", noted(None))
    assert installation.direct_url() is None


def test_a_copy_that_was_never_installed_is_a_clone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def unknown(name: str) -> Any:
        raise importlib.metadata.PackageNotFoundError(name)

    monkeypatch.setattr(importlib.metadata, "distribution", unknown)
    assert installation.direct_url() == {"url": REPOSITORY.as_uri(), "dir_info": {"editable": True}}
    assert f'-e "{REPOSITORY}[plot]"' in install_line("plot")
    monkeypatch.setattr(installation, "ROOT", tmp_path)
    assert installation.direct_url() is None


def test_the_line_is_for_this_interpreter(monkeypatch: pytest.MonkeyPatch) -> None:
    pip = Path(sys.executable).parent / "pip"
    monkeypatch.setattr(shutil, "which", lambda name: str(pip))
    assert installation.pip("install") == "pip install"
    monkeypatch.setattr(shutil, "which", lambda name: "/usr/bin/pip")
    assert installation.pip("install") == f"{sys.executable} -m pip install"
    monkeypatch.setattr(installation.PathFinder, "find_spec", lambda name: None)
    assert installation.pip("uninstall") == f"uv pip uninstall --python {sys.executable}"


def test_torch_for_cpus_is_looked_for_where_it_is() -> None:
    assert TORCH_ON_CPUS in install_line("cpu")
    assert TORCH_ON_CPUS not in install_line("cuda")


def test_every_line_that_is_printed_is_this_one(monkeypatch: pytest.MonkeyPatch) -> None:
    """No other module spells an install line, and none names the stranger's distribution."""
    spelled = [
        path.relative_to(REPOSITORY)
        for path in (REPOSITORY / "conserve").rglob("*.py")
        if path.name != "installation.py" and "pip install" in path.read_text()
    ]
    assert spelled == []
    monkeypatch.setattr(installed, "installed_engine", lambda: None)
    monkeypatch.setattr(installed, "_nvidia_gpu_visible", lambda: False)
    (problem,) = installed.describe_engine().problems
    assert problem.fix == f"run: {install_line('cpu')}"


@pytest.mark.parametrize(
    "words",
    [
        "bench --sweep quick --simulated",
        "bench --sweep quick",
        "bench --gamma 1,1,64,16",
        "tune llama-3.1-8b-h100 --trace azure_conv_2023_10min",
        "serve smollm2-demo --print-flags",
    ],
)
def test_a_command_without_its_engine_says_what_to_install(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, words: str
) -> None:
    monkeypatch.setattr(installed, "installed_engine", lambda: None)
    monkeypatch.chdir(tmp_path)
    done = conserve(*words.split())
    assert (done.returncode, done.stdout) == (1, "")
    (line,) = done.stderr.splitlines()
    assert line.startswith("conserve: no engine is installed (vLLM); run: ")


def test_the_documentation_installs_nothing_by_a_name_that_no_index_has() -> None:
    """The distribution is not published: whoever took its name could not be told from us."""
    pages = [REPOSITORY / "README.md", *(REPOSITORY / "docs").rglob("*.md")]
    by_name = re.compile(rf"pip install [^\n`]*\b{DISTRIBUTION}\b(?![^\n`]* @ )")
    assert [page.name for page in pages if by_name.search(page.read_text())] == []


# Setting up a clone


RECORD = '#!/bin/sh\necho "$(basename "$0") $*" >> "$LOG"\n'


def test_make_setup_removes_the_distribution_of_the_old_name_first(tmp_path: Path) -> None:
    """Both names own the command `conserve`: removed later, the old one would take the new one's."""
    (tmp_path / "tools").mkdir()
    shutil.copy(REPOSITORY / "tools" / "setup.sh", tmp_path / "tools")
    shutil.copytree(REPOSITORY / "requirements", tmp_path / "requirements")
    (tmp_path / "pyproject.toml").touch()
    log = tmp_path / "log"
    for name in ("python", "uv"):
        program = tmp_path / ".venv" / "bin" / name
        program.parent.mkdir(parents=True, exist_ok=True)
        program.write_text(RECORD)
        program.chmod(0o755)
    (tmp_path / ".venv" / ".locked").write_text("of the old name")
    run = ["bash", str(tmp_path / "tools" / "setup.sh")]
    environment = {**os.environ, "PYTHON": sys.executable, "LOG": str(log)}
    ready = "setup: ready: run `. .venv/bin/activate` for the command conserve, or call .venv/bin/conserve"
    said = subprocess.run(run, check=True, env=environment, capture_output=True, text=True).stderr
    assert said.splitlines()[-1] == ready
    lines = log.read_text().splitlines()
    (removed,) = [n for n, line in enumerate(lines) if line.startswith("uv pip uninstall")]
    (installed,) = [n for n, line in enumerate(lines) if line.endswith("--editable .")]
    assert lines[removed].split()[-1] == "conserve"
    assert removed < installed
    log.unlink()
    for quiet, words in (("", [ready]), ("1", [])):
        given = {**environment, "QUIET": quiet}
        said = subprocess.run(run, check=True, env=given, capture_output=True, text=True).stderr
        assert said.splitlines() == words
    assert not log.exists()  # up to date


# In an empty environment, from each origin


def built(folder: Path) -> Path:
    """A wheel of this repository."""
    command = [
        sys.executable,
        "-m",
        "build",
        "--wheel",
        "--no-isolation",
        "--outdir",
        str(folder),
        str(REPOSITORY),
    ]
    subprocess.run(command, check=True, capture_output=True)
    (wheel,) = folder.glob("*.whl")
    return wheel


def cloned(folder: Path) -> Path:
    """A repository with this work tree as its only commit."""
    listed = subprocess.run(
        ["git", "ls-files", "--cached", "--others", "--exclude-standard", "-z"],
        cwd=REPOSITORY,
        check=True,
        capture_output=True,
        text=True,
    ).stdout.split("\0")
    for name in filter(None, listed):
        source = REPOSITORY / name
        if source.is_file() and not source.is_symlink():
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(source, folder / name)
    author = ["-c", "user.name=t", "-c", "user.email=t@t"]
    for words in (["init", "-q"], ["add", "-A"], [*author, "commit", "-qm", "c"]):
        subprocess.run(["git", *words], cwd=folder, check=True, capture_output=True)
    return folder


@contextmanager
def served(repository: Path, folder: Path) -> Iterator[str]:
    """The address of a bare clone, over HTTP."""
    bare = folder / "conserve.git"
    for words in (
        ["clone", "-q", "--bare", str(repository), str(bare)],
        ["-C", str(bare), "update-server-info"],
    ):
        subprocess.run(["git", *words], check=True, capture_output=True)
    handler = partial(Quiet, directory=str(folder))
    with ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        thread = Thread(target=server.serve_forever, kwargs={"poll_interval": 0.05})
        thread.start()
        yield f"http://127.0.0.1:{server.server_port}/conserve.git"
        server.shutdown()
        thread.join()


class Quiet(SimpleHTTPRequestHandler):
    def log_message(self, *_: Any) -> None: ...


@pytest.mark.full
@pytest.mark.parametrize("origin", ["wheel", "folder", "editable", "git", "index"])
def test_the_printed_line_works_in_an_empty_environment(origin: str, tmp_path: Path) -> None:
    """The extra `postgres`, the smallest; `cpu` and `cuda` are gigabytes and take the same way."""
    source = tmp_path / "source"
    source.mkdir()
    made = built(source) if origin in ("wheel", "index") else cloned(source)
    more = [os.environ.get("PIP_FIND_LINKS", ""), str(source) if origin == "index" else ""]
    environment = {
        **{name: value for name, value in os.environ.items() if name not in ("PYTHONPATH", "PIP_FIND_LINKS")},
        **({"PIP_FIND_LINKS": " ".join(filter(None, more))} if any(more) else {}),
        "PIP_NO_COMPILE": "1",  # for speed
        "PATH": f"{tmp_path / 'env' / 'bin'}{os.pathsep}{os.environ['PATH']}",
    }
    venv.create(tmp_path / "env", with_pip=True)

    def run(*words: str) -> str:
        done = subprocess.run(
            words, cwd=tmp_path, env=environment, capture_output=True, text=True, check=False
        )
        assert done.returncode == 0, done.stderr
        return done.stdout

    with ExitStack() as stack:
        first = {
            "wheel": lambda: [str(made)],
            "folder": lambda: [str(made)],
            "editable": lambda: ["-e", str(made)],
            "git": lambda: [f"git+{stack.enter_context(served(made, tmp_path))}"],
            "index": lambda: [DISTRIBUTION],
        }[origin]()
        run("pip", "install", "--quiet", "--no-deps", *first)
        code = "from conserve.installation import install_line; print(install_line('postgres'))"
        line = run("python", "-c", code).strip()
        assert line.startswith("pip install ")
        run("bash", "-c", line)
    run("python", "-c", "import psycopg")
    assert run("conserve", "--version").startswith("conserve ")
    names = [entry["name"] for entry in json.loads(run("pip", "list", "--format", "json"))]
    assert "conserve-llm" in names
    assert "conserve" not in names
    assert run("python", "-c", code).strip() == line  # installed so, it comes from there still
