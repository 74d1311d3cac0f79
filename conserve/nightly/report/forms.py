"""Forms of a run's document: a self-contained page, Markdown, JUnit XML, JSON."""

import json
from importlib.resources import files
from xml.etree import ElementTree

from conserve.nightly.report.chart import chart
from conserve.nightly.report.document import Document
from conserve.units import count, duration

SUFFIXES = {"html": ".html", "markdown": ".md", "junit": ".xml", "json": ".json"}


def text_in_form(document: Document, form: str) -> str:
    """Document in a form: "html", "markdown", "junit" or "json"."""
    if form == "json":
        return json.dumps(document, indent=2, ensure_ascii=False) + "\n"
    if form == "junit":
        return junit(document)
    return render(document, "page.html" if form == "html" else "page.md")


def render(document: Document, template: str) -> str:
    """Document by a template of this folder."""
    from jinja2 import Environment, StrictUndefined

    source = (files("conserve.nightly.report") / template).read_text(encoding="utf-8")
    environment = Environment(
        autoescape=template.endswith(".html"), undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True
    )
    environment.filters |= {"duration": duration, "cell": cell, "figure": figure, "signed": signed}
    page: str = environment.from_string(source).render(
        **document,
        charts=[] if template != "page.html" else charts(document),
        facts=facts(document["run"]),
        compared={(one["suite"], one["metric"]): one for one in verdicts(document)},
        count=count,
    )
    return page


def verdicts(document: Document) -> list[Document]:
    """Verdicts on the suites' metrics."""
    comparison = document["comparison"]
    return [] if comparison is None else comparison["suites"]


def charts(document: Document) -> list[tuple[str, str, str | None]]:
    """Title and SVG of each metric's nights, and the first one where the suite asked otherwise before."""
    return [
        (title := f"{one['suite']}: {one['metric']}", chart(one["scores"], title=title), one["since"])
        for one in document["nights"]
    ]


def facts(run: Document) -> list[tuple[str, str, str]]:
    """Facts of a run: name, value, and suites that it holds for where these are not all."""
    found: dict[tuple[str, str], list[str]] = {}
    for suite in run["suites"]:
        for name, value in suite["facts"].items():
            found.setdefault((name, value), []).append(suite["suite"])
    every = sum(bool(suite["facts"]) for suite in run["suites"])
    return [
        (name, value, "" if len(suites) == every else ", ".join(suites))
        for (name, value), suites in sorted(found.items())
    ]


def cell(text: object) -> str:
    """Text as a cell of a Markdown table."""
    return " ".join(str(text).replace("|", "\\|").split())


def figure(value: float | None) -> str:
    """Score with four digits; a dash for None."""
    return "–" if value is None else f"{value:.4g}"


def signed(value: float | None) -> str:
    """Difference with its sign; a dash for None."""
    return "–" if value is None else f"{value:+.3g}"


def junit(document: Document) -> str:
    """JUnit XML: a test case for each suite and metric. Worse is a failure; what cannot be told is skipped."""
    run = document["run"]
    cases = [case_of(one) for one in verdicts(document)]
    judged = {(one["suite"], one["metric"]) for one in verdicts(document)}
    for suite in run["suites"]:
        if suite["error"] is not None:
            cases.append(case(suite["suite"], "scores", "error", suite["error"]))
        cases += [
            case(suite["suite"], score["metric"], "skipped", "nothing to compare with")
            for score in suite["scores"]
            if (suite["suite"], score["metric"]) not in judged
        ]
    comparison = document["comparison"] or {"missing": {}, "changes": []}
    failed = {suite["suite"] for suite in run["suites"] if suite["error"] is not None}
    cases += [
        case(suite, "comparison", "skipped", why)
        for suite, why in comparison["missing"].items()
        if suite not in failed
    ]
    changes = comparison["changes"]
    for change in changes:
        said = f"{change['before']:.4g} before {change['night']}, {change['since']:.4g} since"
        cases.append(case(change["suite"], f"{change['metric']} over the nights", "failure", said))
    tree = ElementTree.Element(
        "testsuite",
        name=run["evaluation"],
        tests=str(len(cases)),
        failures=str(sum(one.find("failure") is not None for one in cases)),
        errors=str(sum(one.find("error") is not None for one in cases)),
        skipped=str(sum(one.find("skipped") is not None for one in cases)),
        time=f"{run['work_s']:.3f}",
        timestamp=str(run["began_at"]),
    )
    tree.extend(cases)
    ElementTree.indent(tree)
    return '<?xml version="1.0" encoding="UTF-8"?>\n' + ElementTree.tostring(tree, encoding="unicode") + "\n"


def case_of(one: Document) -> ElementTree.Element:
    """Test case of a metric's verdict."""
    outcome = {"worse": "failure", "cannot tell": "skipped"}.get(one["verdict"])
    return case(one["suite"], one["metric"], outcome, one["sentence"])


def case(suite: str, metric: str, outcome: str | None, message: str) -> ElementTree.Element:
    """Test case with its outcome; None: it passed."""
    made = ElementTree.Element("testcase", classname=suite, name=metric)
    if outcome is None:
        ElementTree.SubElement(made, "system-out").text = message
    else:
        ElementTree.SubElement(made, outcome, message=message)
    return made
