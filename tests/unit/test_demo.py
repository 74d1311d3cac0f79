"""`make demo` prints what the README shows: the same commands, the same sentences, other figures."""

import os
import pty
import re
import subprocess
from pathlib import Path

import pytest

from tests.commands import conserve

REPOSITORY = Path(__file__).parents[2]
README = (REPOSITORY / "README.md").read_text()
CONTROL = re.compile(r"\x1b\[\??(\d*)(?:;\d+)*([A-Za-z])")


def readme_block() -> str:
    """The README's console block, behind its first line."""
    block = re.search(r"```console\n\$ make demo\n(.*?)```", README, re.DOTALL)
    assert block is not None
    return block[1]


class Screen:
    """Text that a terminal shows in the end, after the controls that the progress bar uses."""

    def __init__(self) -> None:
        self.lines = [""]
        self._row = self._column = 0

    def write(self, text: str) -> None:
        position = 0
        for control in CONTROL.finditer(text):
            self._print(text[position : control.start()])
            self._obey(int(control[1] or 1), control[2])
            position = control.end()
        self._print(text[position:])

    def _print(self, text: str) -> None:
        for character in text:
            if character == "\r":
                self._column = 0
            elif character == "\n":
                self._row += 1
                self.lines += [""] * (self._row + 1 - len(self.lines))
            else:
                line = self.lines[self._row].ljust(self._column)
                self.lines[self._row] = line[: self._column] + character + line[self._column + 1 :]
                self._column += 1

    def _obey(self, number: int, letter: str) -> None:
        if letter == "A":
            self._row = max(0, self._row - number)
        elif letter == "K":
            self.lines[self._row] = ""
        else:
            assert letter in "mhl", f"unknown control {letter!r}"

    @property
    def text(self) -> str:
        return "\n".join(line.rstrip() for line in self.lines)


def demo(home: Path, **variables: str) -> str:
    """Text that a terminal shows after the demo."""
    terminal, end = pty.openpty()
    environment = {**os.environ, "TERM": "xterm-256color", "DEMO_HOME": str(home), **variables}
    environment.pop("NO_COLOR", None)
    with subprocess.Popen(
        ["bash", "examples/demo.sh"],
        cwd=REPOSITORY,
        env=environment,
        stdin=subprocess.DEVNULL,
        stdout=end,
        stderr=end,
        start_new_session=True,
    ) as running:
        os.close(end)
        said = b""
        while piece := read(terminal):
            said += piece
        assert running.wait(600) == 0, said.decode()
    os.close(terminal)
    screen = Screen()
    screen.write(said.decode())
    return screen.text


def score(home: Path) -> str:
    """Output of the query in examples/README.md about the demo's job."""
    block = re.search(r"```sh\n(.*?)```", (REPOSITORY / "examples" / "README.md").read_text(), re.DOTALL)
    assert block is not None
    query = block[1].replace(".demo/store", str(home))
    return subprocess.run(
        ["bash", "-ec", query], cwd=REPOSITORY, capture_output=True, text=True, check=True
    ).stdout


def read(terminal: int) -> bytes:
    """The next piece of output; none once all writers have gone."""
    try:
        return os.read(terminal, 65_536)
    except OSError:  # EIO: a terminal's way to say so
        return b""


def shape(text: str, *, home: str) -> list[str]:
    """Commands as they are but for the job's id; other lines without figures, answers and the width of columns."""
    text = re.sub(r"questions-[a-z0-9]{4}", "questions-ID", text.replace(home, "STORE"))
    shaped: list[str] = []
    quotes = 0  # of a command; it ends once they are even
    for line in text.strip().splitlines():
        if line.startswith("$ ") or quotes % 2:
            quotes += line.count('"')
            shaped.append(line)
        else:
            quotes = 0
            shaped.append(sentence(line))
    return shaped


def sentence(line: str) -> str:
    """A line of output without what differs from run to run."""
    if row := re.match(r"( +\d  \S.*?…)  +\S.*$", line):  # row_index, question, answer
        return f"{row[1]}  ANSWER"
    line = re.sub(r"(\d+ h )?(\d+ min )?\d[\d,.]* s\b", "N s", line)
    return " ".join(re.sub(r"\d[\d,.]*", "N", line).split())


def test_the_demo_prints_what_the_readme_shows(tmp_path: Path) -> None:
    home = tmp_path / "store"
    printed = demo(home, CONSERVE_ENDPOINT="fake:?token_ms=1&start_ms=300")
    assert "\x1b" not in printed
    assert "right_answers" in score(home)
    assert shape(printed, home=str(home)) == shape(readme_block(), home=".demo/store")


def test_a_demo_goes_on_with_one_that_was_interrupted(tmp_path: Path) -> None:
    home = str(tmp_path / "store")
    (tmp_path / "rows.csv").write_text("question\nJanet?\n")
    left = conserve(
        "submit", str(tmp_path / "rows.csv"), "--prompt", "{{ question }}", CONSERVE_HOME=home
    ).stdout.strip()
    printed = demo(Path(home), CONSERVE_ENDPOINT="fake:")
    assert f"{left} is not done yet: the demo goes on with it\n\n$ conserve run {left}\n" in printed
    assert "conserve submit" not in printed


@pytest.mark.parametrize(
    ("shown", "changed"),
    [
        ("--max-tokens 96", "--max-tokens 128"),
        ("limit 3", "limit 4"),
        ("rows done", "rows answered"),
        ("tokens/s", "tokens per second"),
        ("Janet", "Jane"),
        ("row_index  question  ", "question  row_index  "),
    ],
)
def test_the_comparison_sees_another_command_and_another_sentence(shown: str, changed: str) -> None:
    text = readme_block()
    assert shown in text
    assert shape(text.replace(shown, changed), home="x") != shape(text, home="x")


def test_the_comparison_does_not_see_other_figures() -> None:
    text = readme_block()
    other = re.sub(
        r"100 rows in .* \(ready after .*\)", "100 rows in 2 min 3 s, 9 tokens/s (ready after 1.0 s)", text
    )
    assert other != text
    assert shape(other, home="x") == shape(text, home="x")


def test_a_screen_shows_what_is_left_of_a_bar() -> None:
    screen = Screen()
    screen.write(
        "one\r\n\x1b[?25l\r\x1b[2K\x1b[32mbar\x1b[0m 1\r\x1b[2Kbar 2\r\n\x1b[1A\x1b[2K\x1b[?25htwo\r\n"
    )
    assert screen.text == "one\ntwo\n"
