"""The documentation: generated parts are up to date, links lead somewhere, every page is in the site."""

import html
import re
import tomllib
from collections.abc import Iterator
from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest

from conserve.api.running import Outcome
from conserve.cli import fleet_report
from conserve.engine.vllm.settings import PROFILE_COMMAND
from conserve.evals.records import MeanScore, RunRecord, SuiteRecord
from conserve.jobs.requests.dry_run import DryRun
from conserve.jobs.requests.preview import Preview
from conserve.profiles.profile import Profile
from tools.docs import mechanisms, queue_drawings
from tools.docs.dots import Axis, Dot, Plot, Row, draw
from tools.docs.drawings import Arrow, Box, Drawing, faults
from tools.docs.generated import DOCS, FILES
from tools.docs.tables import numbers, tables, under

DRAWINGS = {**mechanisms.DRAWINGS, **queue_drawings.DRAWINGS}
REPOSITORY = DOCS.parent
PAGES = sorted(DOCS.rglob("*.md"))
SITE = tomllib.loads((REPOSITORY / "zensical.toml").read_text())["project"]
INTERNAL = {"job_id", "samples", "folder", "plan", "token", "overrides", "file", "target", "name"}
"""Fields that a document has under another name, or not at all."""
LINK = re.compile(r"(?<!\\)\]\(([^()\s]+)\)")


def lines_outside_of_code(page: Path) -> Iterator[str]:
    """Lines of a page that are no code."""
    fenced = False
    for line in page.read_text().splitlines():
        if line.startswith("```"):
            fenced = not fenced
        elif not fenced and not line.startswith("    "):
            yield re.sub(r"`[^`]*`", lambda code: code[0].replace("](", "] ("), line)


def anchors(page: Path) -> set[str]:
    """Anchors of a page's headings."""
    headings = [line.lstrip("# ") for line in lines_outside_of_code(page) if re.match(r"#+ ", line)]
    plain = (re.sub(r"[^\w\s-]", "", heading).strip().lower() for heading in headings)
    return {re.sub(r"[-\s]+", "-", words) for words in plain}


def in_site(nav: list[Any]) -> Iterator[str]:
    """Pages that the site's navigation names."""
    for entry in nav:
        if isinstance(entry, str):
            yield entry
        else:
            for below in entry.values():
                yield from in_site(below if isinstance(below, list) else [below])


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.name)
def test_a_generated_part_is_up_to_date(path: Path) -> None:
    assert path.read_text() == FILES[path](), "run: make reference"


def test_every_picture_is_drawn_by_code() -> None:
    assert sorted(DOCS.rglob("*.svg")) == sorted(path for path in FILES if path.suffix == ".svg")


def test_every_picture_is_on_a_page_with_words_in_its_place() -> None:
    shown = {
        (page.parent / link).resolve()
        for page in PAGES
        for words, link in re.findall(r"^!\[([^\]]+)\]\(([^)]+)\)", page.read_text(), re.MULTILINE)
    }
    assert shown == {path for path in FILES if path.suffix == ".svg"}


def test_every_picture_names_itself_and_has_both_schemes() -> None:
    for path in FILES:
        if path.suffix == ".svg" and path.name != "top.svg":  # a terminal is dark in both
            text = path.read_text()
            assert re.search('role="img" aria-label="[^"]{10,}"', text), path.name
            assert "prefers-color-scheme:dark" in text, path.name


def test_every_page_is_in_the_site() -> None:
    assert sorted(in_site(SITE["nav"])) == [str(page.relative_to(DOCS)) for page in PAGES]


@pytest.mark.parametrize(
    "page",
    [*PAGES, REPOSITORY / "README.md", REPOSITORY / "CONTRIBUTING.md"],
    ids=lambda page: str(page.relative_to(REPOSITORY)),
)
def test_links_lead_somewhere(page: Path) -> None:
    for line in lines_outside_of_code(page):
        for link in LINK.findall(line):
            if re.match(r"[a-z]+:", link):
                continue
            name, _, anchor = link.partition("#")
            target = (page.parent / name).resolve() if name else page
            assert target.is_file(), f"{link} leads nowhere"
            assert not anchor or anchor in anchors(target), f"{link}: {target.name} has no such heading"


@pytest.mark.parametrize("name", ["deploy.md", "kubernetes.md", "alerts.md", "choose-an-slo.md"])
def test_flags_in_a_recipe_exist(name: str) -> None:
    known = set(re.findall(r"(?<!\S)--[a-z][a-z-]+", (DOCS / "reference/commands.md").read_text()))
    others = {
        *("--max-model-len", "--shutdown-timeout"),  # vLLM
        *("--signal", "--kill-after"),  # timeout
        *("--read-only", "--rm", "--tmpfs", "--volume", "--shm-size", "--build", "--detach"),  # docker
        *("--create-namespace", "--from-file", "--namespace", "--now", "--set"),  # kubectl, helm, systemctl
        *("--for", "--replicas", "--reuse-values", "--timeout"),  # kubectl, helm
        *("--home-dir", "--shell", "--system"),  # useradd
        *("--pipe", "--quiet", "--uid", "--wait"),  # systemd-run
    }
    used = set(re.findall(r"(?<![\w-])--[a-z][a-z-]+", (DOCS / "how-to" / name).read_text()))
    assert used & known
    assert not used - known - others


def test_reasons_on_the_page_of_modes_are_the_programs_own() -> None:
    sources = "".join(path.read_text() for path in (REPOSITORY / "conserve/engine/vllm").rglob("*.py"))
    page = (DOCS / "reference/modes.md").read_text()
    section = page.partition("## Reasons in the report")[2].partition("\n## ")[0]
    reasons = [words for words in re.findall(r"^(?:\||-) `([^`]+)`", section, re.MULTILINE) if " " in words]
    assert len(reasons) >= 15
    for reason in reasons:
        assert reason.partition(" with xxhash")[0] in sources, reason


@pytest.mark.parametrize(
    ("title", "kind"),
    [
        ("Run", Outcome),
        ("Run", DryRun),
        ("Profiles", Profile),
        ("Evaluations", RunRecord),
        ("Evaluations", SuiteRecord),
        ("Evaluations", MeanScore),
    ],
)
def test_the_page_of_shapes_has_every_field(title: str, kind: type) -> None:
    documented = set(re.findall(r'"(\w+)"', section_of_shapes(title)))
    assert {field.name for field in fields(kind)} - documented - INTERNAL == set()


def test_pages_quote_the_command_that_measures_a_profile_as_it_is_printed() -> None:
    pages = [*(DOCS / "how-to").glob("*.md"), *(DOCS / "reference").glob("*.md")]
    quoted = [
        command
        for page in pages
        for command in re.findall(r"(?:run|measure one with): (conserve profile [^`;\n]+)", page.read_text())
    ]
    assert set(quoted) == {PROFILE_COMMAND}
    assert len(quoted) >= 3


def section_of_shapes(title: str) -> str:
    """Section of the page of JSON shapes."""
    return (DOCS / "reference/json.md").read_text().partition(f"\n## {title}\n")[2].partition("\n## ")[0]


def test_the_page_of_shapes_has_previews_and_every_state_of_a_server() -> None:
    documented = set(re.findall(r'"(\w+)"', section_of_shapes("Submit")))
    assert {*Preview._fields, "tokens"} - documented == set()
    states = {*fleet_report.WORST_FIRST, *fleet_report.COLOURS, fleet_report.NOT_FED, fleet_report.GONE}
    listed = set(re.findall(r"`([a-z ]+)`", " ".join(section_of_shapes("Fleet").split())))
    assert states - listed == set()


def test_pages_of_the_site_link_to_pages_of_the_site() -> None:
    for page in PAGES:
        for line in lines_outside_of_code(page):
            for link in LINK.findall(line):
                if not re.match(r"[a-z]+:|#", link):
                    assert (page.parent / link.partition("#")[0]).resolve().is_relative_to(DOCS), (
                        f"{page}: {link}"
                    )


def test_no_words_of_a_chart_lie_outside() -> None:
    share = {"start": 0.0, "middle": 0.5, "end": 1.0}
    for path in (DOCS / "benchmarks").glob("*.svg"):
        drawn = path.read_text()
        width = float(re.findall(r'viewBox="0 0 (\d+)', drawn)[0])
        for x, anchor, words in re.findall(r'<text x="([\d.]+)"[^>]*text-anchor="(\w+)">([^<]*)<', drawn):
            room = 7.0 * len(html.unescape(words))
            left = float(x) - share[anchor] * room
            assert 0 <= left <= width - room, f"{path.name}: {words}"


@pytest.mark.parametrize("name", DRAWINGS)
def test_nothing_overlaps_in_a_drawing(name: str) -> None:
    assert faults(DRAWINGS[name]) == []
    assert DRAWINGS[name].width <= 720


def test_what_cannot_be_read_in_a_drawing_is_found() -> None:
    left, between, right = Box(0, 0, 40, 40, "a"), Box(60, 0, 40, 40, "b"), Box(120, 0, 40, 40, "c")
    assert faults(Drawing("", 160, 40, (left, between, right, Arrow("a", "b")))) == []
    for fault, parts in {
        "the words of": (Box(0, 0, 40, 40, "too many words"),),
        "'a' meets 'b'": (left, Box(30, 0, 40, 40, "b")),
        "lies outside": (Box(130, 0, 40, 40, "a"),),
        "'a -> c: ' crosses 'b'": (left, between, right, Arrow("a", "c")),
        "meets 'a -> b: far too long'": (left, between, Arrow("a", "b", "far too long")),
    }.items():
        assert any(fault in found for found in faults(Drawing("", 160, 40, parts))), fault


def test_a_dot_stands_at_its_figure(tmp_path: Path) -> None:
    (tmp_path / "benchmarks").mkdir()
    (tmp_path / "benchmarks/page.md").write_text("| a | b |\n|---|---|\n| x | 25 |\n| y | 75 |\n")
    plot = Plot(
        "page.md",
        "Two figures",
        lambda _: [Axis("share", low=0.0, high=100.0)],
        lambda found: [Row(name, [[Dot(numbers(cell)[0], "b")]]) for name, cell in found[0].rows],
        {"a": "first", "b": "second"},
    )
    drawn = draw(tmp_path, plot)
    across = [float(x) for x in re.findall(r'd="M([\d.]+),[\d.]+ h9 v9', drawn)]
    grid = [float(x) for x in re.findall(r'<line x1="([\d.]+)"[^>]*class="grid"', drawn)]
    assert len(across) == 3  # two figures and one in the legend
    low, high = min(grid), max(grid)
    assert [(x + 4.5 - low) / (high - low) for x in across[:2]] == pytest.approx([0.25, 0.75], abs=0.001)
    assert all(f">{words}<" in drawn for words in ("x", "y", "share", "first", "second"))


def test_a_table_is_read_from_its_page(tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    page.write_text(
        "# One\n\n| a | b |\n|---|---|\n| x | **1,234** ms, -0.5 |\n\ntext\n\n| c |\n|---|\n| y |\n"
    )
    one, other = tables(page)
    assert one.header == ["a", "b"]
    assert numbers(one.row("x")[1]) == [1234.0, -0.5]
    assert other.rows == [["y"]]
    with pytest.raises(LookupError):
        one.row("z")


def test_a_table_is_found_under_its_heading_whatever_tables_come_before(tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    page.write_text("# One\n\n| a |\n|---|\n| x |\n\n## Two\n\n| b |\n|---|\n\ntext\n\n| c |\n|---|\n")
    assert [under(tables(page), "Two", place).header for place in (0, 1)] == [["b"], ["c"]]
    with pytest.raises(LookupError, match="2 tables are under 'Two'"):
        under(tables(page), "Two", 2)


def test_the_readme_names_every_extra_of_users() -> None:
    project = tomllib.loads((REPOSITORY / "pyproject.toml").read_text())["project"]
    install = (REPOSITORY / "README.md").read_text().partition("## Install")[2].partition("\n## ")[0]
    extras = project["optional-dependencies"].keys() - {"dev", "docs"}
    assert {extra for extra in extras if f"`{extra}`" not in install and f"[{extra}]" not in install} == set()
