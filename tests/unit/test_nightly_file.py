"""nightly.toml: what it may say, and one sentence for each fault."""

import pytest

from conserve.errors import SettingsError
from conserve.evals.plan_file import plan_of
from conserve.nightly.init_file import NightlyWishes, text_of

SUITE = '\n[suites.a]\nkind = "sql"\n'


def test_a_file_says_what_is_asked_and_what_counts() -> None:
    plan = plan_of(
        """
        name = "small"
        seed = 7
        limit = 100
        overlap = "skip"
        keep = "90d"
        [worse]
        effect = 0.05
        [models.one]
        model = "a/b"
        [models.two]
        endpoint = "http://x"
        [suites.a]
        kind = "sql"
        data = "x.parquet"
        [suites.b]
        kind = "python"
        seed = 0
        limit = 3
        [suites.b.worse]
        confidence = 0.9
        [suites.b.metrics.loss]
        lower_is_better = true
        effect = 1.5
        """
    )
    first, second = plan.suites
    assert (plan.overlap, plan.keep_s, [target.name for target in plan.targets]) == (
        "skip",
        90 * 86_400.0,
        ["one", "two"],
    )
    assert (first.seed, first.limit, first.standard.effect) == (7, 100, 0.05)
    assert first.options == {"data": "x.parquet"}
    assert (second.seed, second.limit, second.standard.confidence, second.standard.effect) == (
        0,
        3,
        0.9,
        0.05,
    )
    assert second.metric("loss").lower_is_better
    assert second.metric("loss").standard.effect == 1.5
    assert second.metric("other").standard == second.standard
    assert list(plan.standards()) == ["a@one", "b@one", "a@two", "b@two"]


@pytest.mark.parametrize(
    ("text", "fault"),
    [
        ("[", "is no TOML"),
        ("", "there is no suite"),
        ("overlop = 1" + SUITE, "no entry overlop; did you mean overlap?"),
        ('overlap = "x"' + SUITE, "overlap takes skip, queue, replace, not 'x'"),
        ('keep = "90"' + SUITE, "keep takes a length of time as 20h, 90d or 8w, not '90'"),
        ("seed = true" + SUITE, "seed takes a whole number, not True"),
        ("limit = 0" + SUITE, "limit must be at least 1, not 0"),
        ("worse.effect = 0" + SUITE, "worse: the effect that counts as worse must be above 0"),
        ("worse.effect = 'a'" + SUITE, "worse.effect takes a number, not a"),
        ("worse.confidence = 2" + SUITE, "worse: confidence lies between 0.5 and 1"),
        ("[suites.a]\nx = 1", "suites.a has no kind"),
        ('[suites."a b"]\nkind = "sql"', "a name is letters, digits"),
        ('[suites.a]\nkind = "sql"\nmetrics.m = 1', "suites.a.metrics.m takes a table, not 1"),
        ('[model]\nmodel = " "' + SUITE, "model.model is empty"),
        ("[modell]" + SUITE, "no entry modell; did you mean model?"),
        ('[model]\nmodel = "x"\n[models.a]' + SUITE, "not both"),
        ('reports.forms = ["pdf"]' + SUITE, "reports.forms takes html, markdown, junit, json, not 'pdf'"),
        ('reports.webhook = "ftp://x"' + SUITE, "reports.webhook takes an http address"),
    ],
)
def test_a_fault_is_one_sentence(text: str, fault: str) -> None:
    with pytest.raises(SettingsError) as raised:
        plan_of(text)
    assert fault in str(raised.value)
    assert "\n" not in str(raised.value)


def test_the_first_file_is_a_plan() -> None:
    wishes = NightlyWishes(
        name="x",
        data="a b/quest ions.jsonl",
        prompt='say "{{ q }}"',
        expected="the answer",
        model="m",
        limit=3,
    )
    plan = plan_of(text_of(wishes, wishes.expected))
    (suite,) = plan.suites
    assert (suite.name, suite.limit, plan.targets[0].model) == ("quest-ions", 3, "m")
    assert suite.options["prompt"] == 'say "{{ q }}"'
    assert 'i."the answer"' in suite.options["score"]
