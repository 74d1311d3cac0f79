"""python -m tools.mutants [--since COMMIT] [PATH ...]: list the mutants that no test kills."""

import argparse
import difflib
import io
import json
import os
import pickle
import re
import subprocess
import sys
import tokenize
import zlib
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

import pytest

from tools.mutants.children import Fate, Outcome
from tools.mutants.mutations import Mutant, mutants_of, source_of
from tools.mutants.named import Key, as_toml, key, named
from tools.mutants.survey import FOLDER, Survey
from tools.mutants.trial import OPTIONS, Trials, try_at_import

PATHS = ("conserve/engine/policy", "conserve/profiles", "conserve/jobs", "conserve/store")
TESTS = ("tests/unit", "tests/property")
SURVIVORS = FOLDER / "survivors.json"
UNNAMED = FOLDER / "unnamed.toml"
Lines = Mapping[str, frozenset[int]]  # of each file


def main() -> int:
    """Choose mutants, try them, report."""
    arguments = parse()
    paths = arguments.paths or PATHS
    since = arguments.since or (None if arguments.paths else base())
    mutants = [mutant for path in files(paths) for mutant in mutants_of(path)]
    if since:
        changed = changed_since(since, paths)
        mutants = [
            m
            for m in mutants
            if not changed.get(m.path, frozenset()).isdisjoint(range(m.lines[0], m.lines[1] + 1))
        ]
    if arguments.again:
        known = {tuple(entry) for entry in json.loads(SURVIVORS.read_text())}
        mutants = [mutant for mutant in mutants if identity(mutant) in known]
    mutants = of_share(mutants, arguments.share)
    where = f"what changed since {since} in " if since else ""
    print(f"{len(mutants)} mutants of {where}{', '.join(paths)}", flush=True)
    outcomes = run(mutants, arguments)
    report(outcomes)
    return 0


def parse() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(prog="python -m tools.mutants", description=__doc__)
    parser.add_argument("paths", nargs="*", help=f"files and folders; without any: {' '.join(PATHS)}")
    parser.add_argument("--since", help="only statements that changed since this commit; the default without "
                        "paths: where the branch left origin/main, else the last tag")  # fmt: skip
    parser.add_argument("--tests", nargs="+", default=TESTS, help=f"tests to choose from ({' '.join(TESTS)})")
    parser.add_argument("--examples", type=int, default=60, help="of each property test at most (60)")
    parser.add_argument("--seconds", type=float, default=60.0, help="of processor time at most for the tests of "
                        "one mutant, the most specific ones first (60)")  # fmt: skip
    parser.add_argument("--jobs", type=int, default=1, help="mutants at a time (1)")
    parser.add_argument("--share", type=share, default=(0.0, 1.0), help="of the mutants, always the same ones "
                        "(1.0); 0.3:0.4 are others than those of 0.3, and a tenth of all")  # fmt: skip
    parser.add_argument("--again", action="store_true", help="only those that survived the last run")
    return parser.parse_args()


def share(text: str) -> tuple[float, float]:
    """Bounds of a share: `0.3` begins at 0, `0.3:0.4` where that ends. Raises `ValueError` for any other text."""
    begin, _, end = text.rpartition(":")
    bounds = float(begin or 0), float(end)
    if not 0 <= bounds[0] < bounds[1] <= 1:
        raise ValueError(text)
    return bounds


def of_share(mutants: Sequence[Mutant], bounds: tuple[float, float]) -> list[Mutant]:
    """The mutants of a share: the same ones whatever the others are; disjoint shares have none in common."""
    begin, end = (1000 * bound for bound in bounds)
    return [m for m in mutants if begin <= zlib.crc32(repr(identity(m)).encode()) % 1000 < end]


def files(paths: Iterable[str]) -> list[str]:
    """The Python files at or below the paths, each once."""
    found = [sorted(Path(name).rglob("*.py")) if Path(name).is_dir() else [Path(name)] for name in paths]
    return [str(path) for path in dict.fromkeys(path for group in found for path in group)]


def base() -> str:
    """The commit that a change is compared with where none is named."""
    for command in (["merge-base", "HEAD", "origin/main"], ["describe", "--tags", "--abbrev=0"]):
        found = subprocess.run(["git", *command], capture_output=True, text=True)
        if not found.returncode:
            return found.stdout.strip()
    raise SystemExit(
        "there is neither origin/main nor a tag to compare with; name a commit: make mutants SINCE=COMMIT"
    )


def changed_since(commit: str, paths: Sequence[str]) -> Lines:
    """The lines of each file that are not as in the commit."""
    command = ["git", "diff", "-U0", "--no-color", "--no-ext-diff", "--relative", commit, "--", *paths]
    found = subprocess.run(command, capture_output=True, text=True)
    if found.returncode:
        raise SystemExit(f"git cannot compare with {commit}: {found.stderr.strip()}")
    lines: dict[str, set[int]] = {}
    path = ""
    for line in found.stdout.splitlines():
        if line.startswith("+++ "):
            path = line.removeprefix("+++ ").removeprefix("b/")
        elif match := re.match(r"@@ -\S+ \+(\d+)(?:,(\d+))? @@", line):
            first, count = int(match[1]), int(match[2] or 1)
            lines.setdefault(path, set()).update(range(first, first + count))
    listed = subprocess.run(
        ["git", "ls-files", "--others", "--exclude-standard", "--", *paths], capture_output=True, text=True
    )
    for path in listed.stdout.splitlines():
        lines[path] = set(range(1, len(Path(path).read_bytes().splitlines()) + 1))
    return {path: frozenset(numbers) for path, numbers in lines.items()}


def run(mutants: Sequence[Mutant], arguments: argparse.Namespace) -> list[Outcome]:
    """Try them all; survivors are printed as they are found."""
    outcomes: list[Outcome] = []
    reasons = named()

    def on_outcome(outcome: Outcome) -> None:
        outcomes.append(outcome)
        if outcome.fate != Fate.KILLED and key_of(outcome) not in reasons:
            show(outcome)
        if len(outcomes) % 100 == 0:
            print(f"{len(outcomes)} of {len(mutants)}", file=sys.stderr, flush=True)

    # Where tests are collected the package is imported, so that happens in a process of its own.
    ours, its = os.pipe()
    sys.stdout.flush()
    pid = os.fork()
    if not pid:
        trials = Trials(
            mutants=mutants,
            examples=arguments.examples,
            seconds=arguments.seconds,
            jobs=arguments.jobs,
            on_outcome=on_outcome,
        )
        pytest.main([*OPTIONS, "-m", "not engine and not soak", *arguments.tests], plugins=[trials])
        sys.stdout.flush()
        with os.fdopen(its, "wb") as file:
            pickle.dump((outcomes, trials.elsewhere, trials.survey), file)
        os._exit(0)
    os.close(its)
    with os.fdopen(ours, "rb") as file:
        result = file.read()
    os.waitpid(pid, 0)
    if not result:
        raise SystemExit("the tests could not be collected")
    tried, elsewhere, surveyed = pickle.loads(result)
    outcomes += tried
    limits = {"examples": arguments.examples, "seconds": arguments.seconds, "jobs": arguments.jobs}
    try_at_import(elsewhere, surveyed, words(surveyed), **limits, on_outcome=on_outcome)
    return outcomes


def words(surveyed: Survey) -> Mapping[str, Lines]:
    """The lines that use each name, of the package and of the tests."""
    found: dict[str, dict[str, set[int]]] = {}
    paths = {name.partition("::")[0] for name in surveyed} | {p for t in surveyed.values() for p in t.lines}
    for path in paths:
        for token in tokenize.generate_tokens(io.StringIO(Path(path).read_text()).readline):
            if token.type == tokenize.NAME:
                found.setdefault(token.string, {}).setdefault(path, set()).add(token.start[0])
    return {name: {path: frozenset(n) for path, n in at.items()} for name, at in found.items()}


def identity(mutant: Mutant) -> tuple[str, str, str, str]:
    """Key that recognises a mutant after lines before it have moved."""
    before, after = change(mutant)
    return mutant.path, mutant.function or "", before, after


def change(mutant: Mutant) -> tuple[str, str]:
    """The changed lines, without and with the mutant."""
    source = source_of(mutant.path)
    first = source.rfind(b"\n", 0, mutant.start) + 1
    last = source.find(b"\n", mutant.end) % (len(source) + 1)
    after = source[first : mutant.start] + mutant.text.encode() + source[mutant.end : last]
    return source[first:last].decode(), after.decode()


def show(outcome: Outcome) -> None:
    """Print a survivor."""
    mutant = outcome.mutant
    print(f"\n{mutant.path}:{mutant.line}: {mutant.kind}, {outcome.fate} ({outcome.tests} tests)")
    before, after = (text.splitlines() for text in change(mutant))
    for line in difflib.unified_diff(before, after, lineterm="", n=0):
        if not line.startswith(("---", "+++", "@@")):
            print(f"    {line}", flush=True)


def report(outcomes: Sequence[Outcome]) -> None:
    """Keep the survivors for `--again`, those without a reason as entries to fill in; print a table by folder."""
    FOLDER.mkdir(exist_ok=True)
    killed = [outcome for outcome in outcomes if outcome.fate == Fate.KILLED]
    left = [outcome for outcome in outcomes if outcome.fate != Fate.KILLED]
    SURVIVORS.write_text(json.dumps([identity(outcome.mutant) for outcome in left], indent=1))
    (FOLDER / "killers.json").write_text(
        json.dumps([[*identity(o.mutant), o.test] for o in killed], indent=1)
    )
    reasons = named()
    unnamed = {key_of(outcome): said(outcome) for outcome in left if key_of(outcome) not in reasons}
    UNNAMED.write_text(as_toml(unnamed.items()))
    table: dict[str, Counter[str]] = {}
    for outcome in outcomes:
        for folder in (str(Path(outcome.mutant.path).parent), "all"):
            table.setdefault(folder, Counter())[outcome.fate] += 1
            if outcome.fate != Fate.KILLED and key_of(outcome) in reasons:
                table[folder]["named"] += 1
    print(
        f"\n{'folder':32}{'mutants':>9}{'killed':>9}{'survived':>10}{'not reached':>13}{'unknown':>9}"
        f"{'left':>8}{'named':>7}"
    )
    for folder, fates in sorted(table.items(), key=lambda entry: (entry[0] == "all", entry[0])):
        count = fates.total() - fates["named"]
        print(
            f"{folder:32}{count:9}{fates[Fate.KILLED]:9}{fates[Fate.SURVIVED]:10}{fates[Fate.UNREACHED]:13}"
            f"{fates[Fate.UNKNOWN]:9}{1 - fates[Fate.KILLED] / count:8.1%}{fates['named']:7}"
        )
    stale = reasons.keys() & set(map(key_of, killed)) - set(map(key_of, left))
    for path, function, _, after in sorted(stale):
        print(f"named in tests/survivors, but killed: {path}, {function}: {after}")
    if unnamed:
        print(
            f"{len(unnamed)} are left without a reason; {UNNAMED} has an entry for each, for tests/survivors"
        )


def key_of(outcome: Outcome) -> Key:
    """Key under which the mutant would be named."""
    return key(*identity(outcome.mutant))


def said(outcome: Outcome) -> str:
    """Outcome of a mutant in words, for its entry."""
    return f"line {outcome.mutant.line}: {outcome.mutant.kind}, {outcome.fate} ({outcome.tests} tests)"


if __name__ == "__main__":
    sys.exit(main())
