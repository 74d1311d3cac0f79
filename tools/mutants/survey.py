"""Lines that each test runs, and the time it takes; kept for each test file until it or the code changes."""

import hashlib
import os
import pickle
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import NoReturn

import coverage
import pytest
from _pytest.runner import runtestprotocol

FOLDER = Path(".mutants")


@dataclass(frozen=True, slots=True, kw_only=True)
class Tested:
    """One test on the code as it is."""

    passed: bool
    seconds: float
    cpu_s: float
    lines: Mapping[str, frozenset[int]]  # of each file of the package that it runs


Survey = dict[str, Tested]  # by the test's node id


def survey(items: Sequence[pytest.Item], *, examples: int) -> Survey:
    """Run the tests of files that changed since the last time, in a child, and add what is known of the others."""
    by_file: dict[Path, list[pytest.Item]] = {}
    for item in items:
        by_file.setdefault(item.path, []).append(item)
    helpers = _digest(sorted(Path("tests").glob("*.py")))
    found: Survey = {}
    for path, tests in by_file.items():
        kept = FOLDER / "survey" / f"{path.stem}-{_digest([path])}-{helpers}-{examples}.pickle"
        known = _known(kept)
        if known is None:
            print(f"surveying {path.name}: {len(tests)} tests", flush=True)
            kept.parent.mkdir(parents=True, exist_ok=True)
            pid = os.fork()
            if not pid:
                try:
                    silence()
                    result = _run(tests)
                    files = sorted({file for tested in result.values() for file in tested.lines})
                    kept.write_bytes(pickle.dumps((files, _digest(map(Path, files)), result)))
                finally:
                    os._exit(0)  # a child that failed has left no file
            os.waitpid(pid, 0)
            known = _known(kept)
        if known is None:
            raise SystemExit(f"the survey of {path.name} ended early; does `pytest {path}` pass?")
        found |= known
    return found


def _known(kept: Path) -> Survey | None:
    """Findings of an earlier survey, if the files that the tests run are still the same."""
    if not kept.is_file():
        return None
    files, digest, result = pickle.loads(kept.read_bytes())
    paths = [Path(file) for file in files]
    return result if all(map(Path.is_file, paths)) and _digest(paths) == digest else None


def _run(items: Sequence[pytest.Item]) -> Survey:
    measured = coverage.Coverage(data_file=None, include=["conserve/*"], config_file=False, messages=False)
    measured.set_option(
        "run:disable_warnings", ["no-data-collected"]
    )  # tests of tools run no line of the package
    results: dict[str, tuple[bool, float, float]] = {}
    lines: dict[str, dict[str, set[int]]] = {}
    with forks_followed(measured, Path.cwd()) as of_forks:
        measured.start()
        for item in items:
            measured.switch_context(item.nodeid)
            begun, cpu = time.monotonic(), time.process_time()
            passed = not any(report.failed for report in runtestprotocol(item, log=False, nextitem=None))
            results[item.nodeid] = passed, time.monotonic() - begun, time.process_time() - cpu
            lines[item.nodeid] = {}
        measured.stop()
        for test, path, numbers in [*_lines(measured, Path.cwd()), *of_forks()]:
            lines[test].setdefault(path, set()).update(numbers)
    return {
        name: Tested(
            passed=passed, seconds=s, cpu_s=cpu, lines={p: frozenset(n) for p, n in lines[name].items()}
        )
        for name, (passed, s, cpu) in results.items()
    }


Found = list[tuple[str, str, list[int]]]  # test, file, lines


def _lines(measured: coverage.Coverage, folder: Path) -> Found:
    data = measured.get_data()
    found: dict[tuple[str, str], list[int]] = {}
    for file in data.measured_files():
        for line, tests in data.contexts_by_lineno(file).items():
            for test in filter(None, tests):
                found.setdefault((test, str(Path(file).relative_to(folder))), []).append(line)
    return [(test, path, numbers) for (test, path), numbers in found.items()]


@contextmanager
def forks_followed(measured: coverage.Coverage, folder: Path) -> Iterator[Callable[[], Found]]:
    """Yield a function that returns the lines of files in the folder which forked children ran until `os._exit`."""
    ours, leave = os.getpid(), os._exit
    with tempfile.TemporaryDirectory() as place:

        def end(code: int) -> NoReturn:
            if os.getpid() != ours:
                with suppress(Exception):  # a child without memory, say
                    measured.stop()
                    written = pickle.dumps(_lines(measured, folder))
                    with tempfile.NamedTemporaryFile(dir=place, delete=False) as file:
                        file.write(written)
            leave(code)

        os._exit = end  # type: ignore[assignment]
        try:
            yield lambda: [one for path in Path(place).iterdir() for one in pickle.loads(path.read_bytes())]
        finally:
            os._exit = leave


def _digest(paths: Iterable[Path]) -> str:
    whole = hashlib.sha256()
    for path in paths:
        whole.update(str(path).encode() + b"\0" + path.read_bytes())
    return whole.hexdigest()[:16]


def silence() -> None:
    """Drop what this process prints."""
    nowhere = os.open(os.devnull, os.O_RDWR)
    for stream in (0, 1, 2):
        os.dup2(nowhere, stream)
