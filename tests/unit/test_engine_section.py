"""The section of vLLM's configuration that users and commands write, and the times that an engine starts with."""

import json
from math import inf
from pathlib import Path
from typing import Any

import pytest

from conserve.engine.known_times import KnownTimes
from conserve.engine.runtime.api_limits import ApiLimits
from conserve.engine.section import AUTO, EngineSection, require_policy
from conserve.engine.server_launch import ServerLaunch
from conserve.errors import SettingsError
from conserve.profiles.batch import Batch, Slice
from conserve.profiles.conserve import ConServeModel

WHOLE = EngineSection(
    policy="priority",
    ttft_slo_ms={"p50": 300.0, "p99": 1500.0},
    tbt_slo_ms=100.0,
    harm=None,
    receipt=0.02,
    push_slo_scale=2.0,
    live_prefixes=0.0,
    profile=AUTO,
    profiles="/profiles",
    control=True,
    preemption="never",
    safepoint_every=4,
    record_views="/views.jsonl",
    classes={"chat": {"ttft_slo_ms": 300.0, "keys": ["web"]}},
    record_arrivals="/arrivals.csv",
)


@pytest.mark.parametrize("section", [EngineSection(), EngineSection(harm=None), WHOLE])
def test_what_is_written_is_read_again(section: EngineSection) -> None:
    assert EngineSection.of(json.loads(json.dumps(section.document()))) == section


def test_defaults_are_not_written() -> None:
    assert EngineSection().document() == {}
    assert EngineSection(harm=None, receipt=0.0).document() == {"harm": None, "receipt": 0.0}
    assert WHOLE.document().keys() == set(EngineSection.__struct_fields__)


def test_null_is_as_if_nothing_was_said_but_for_harm() -> None:
    names = ("ttft_slo_ms", "tbt_slo_ms", "profile", "profiles", "safepoint_every", "record_views", "classes")
    assert EngineSection.of(dict.fromkeys(names)) == EngineSection()


@pytest.mark.parametrize(
    ("said", "why"),
    [
        ({"polcy": "conserve"}, r"^additional_config\.conserve has polcy; it takes policy, ttft_slo_ms, "),
        ({"policy": "none"}, "^there is no policy 'none'; there are conserve, "),
        ({"policy": None}, r"^additional_config\.conserve\.policy takes a name, not None$"),
        ({"policy": 5}, r"^additional_config\.conserve\.policy takes a name, not 5$"),
        ({"live_prefixes": 5, "receipt": 5}, r"^additional_config\.conserve\.receipt takes a share from 0 "),
        (None, r"^additional_config\.conserve takes an object, not None$"),
        ({"preemption": None}, "^there is no rule of preemption None; there are prompt, "),
        ({"push_slo_scale": 11}, r"^additional_config\.conserve\.push_slo_scale is from 1 to 10, not 11$"),
        (
            {"safepoint_every": True},
            r"^additional_config\.conserve\.safepoint_every takes layers from 1, not",
        ),
        ({"record_views": 1}, r"^additional_config\.conserve\.record_views takes a file, not 1$"),
        ({"classes": ["chat"]}, r"^additional_config\.conserve\.classes: classes are an object by name"),
        ({"control": "yes"}, r"^additional_config\.conserve: Expected `bool`, got `str` - at `\$\.control`$"),
    ],
)
def test_what_cannot_be_is_refused_with_its_name(said: Any, why: str) -> None:
    with pytest.raises(SettingsError, match=why):
        EngineSection.of(said)


def test_a_policy_of_the_users_own_is_looked_for_where_it_is_used() -> None:
    """Readers of other settings may be where its module is not."""
    assert EngineSection.of({"policy": "absent.module.Policy"}).policy == "absent.module.Policy"
    with pytest.raises(SettingsError, match=r"the policy absent\.module\.Policy .*cannot be made"):
        require_policy("absent.module.Policy")


@pytest.mark.parametrize(
    ("section", "rule"),
    [
        (EngineSection(), "prompt"),
        (EngineSection(policy="priority"), "prompt"),
        (EngineSection(policy="paced"), "off"),
        (EngineSection(policy="paced", preemption="never"), "never"),
    ],
)
def test_rows_leave_for_arrivals_unless_the_policy_treats_all_alike(
    section: EngineSection, rule: str
) -> None:
    assert section.leave_rule == rule


def test_known_times_travel_as_json(tmp_path: Path) -> None:
    model = ConServeModel.of(0.3, 1e-4, 2e-4, 1.5e-3, 0.15, 1.0, 1e-3, 15.0)
    times = KnownTimes.made_up(model, tmp_path, of="test", residuals=[(ms, 1.0) for ms in range(1, 200)])
    again = KnownTimes(**json.loads(json.dumps(times.document())))
    assert (again.source, again.hygen_model()) == ("profile", None)
    batch = Batch.of([Slice(1, 100, True)])
    assert again.corrected_model().first.predict(batch) == model.predict(batch)


@pytest.mark.parametrize("flags", [(), ("--max-model-len", "2048", "--", "x")])
def test_a_server_is_started_with_what_its_command_line_says(flags: tuple[str, ...]) -> None:
    launch = ServerLaunch(
        model="m", models_folder="/models", section=WHOLE, limits=ApiLimits(connections=7), flags=flags
    )
    assert launch.words()[1:] == [*flags]
    assert ServerLaunch.of(launch.words()) == launch


@pytest.mark.parametrize(
    "section", [EngineSection(harm=inf), EngineSection(profile="/caf\udce9.json", record_views="/\udce9")]
)
def test_numbers_and_files_reach_a_server_as_they_were_given(section: EngineSection) -> None:
    """What cannot be is refused there, and a name that is no UTF-8 is a file's."""
    launch = ServerLaunch(model="m", models_folder="/models", section=section, limits=ApiLimits())
    words = launch.words()
    assert words[0].isascii()
    assert ServerLaunch.of(words) == launch


def test_what_a_server_is_started_with_is_validated_there() -> None:
    with pytest.raises(SettingsError, match="harm is a share above 0"):
        EngineSection.of(EngineSection(harm=inf).document())
