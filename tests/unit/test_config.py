"""Sources of settings, and the source that wins."""

from pathlib import Path
from urllib.parse import quote

import pytest

from conserve import config
from conserve.api.running import ProfileFlags, check_endpoint
from conserve.config import Settings, load, sqlite_file, sqlite_url
from conserve.endpoints.exchange import AnswerLimits
from conserve.errors import SettingsError
from conserve.store.database.connection import address, engine_of, masked, parse


@pytest.fixture
def sources(tmp_path: Path) -> tuple[Path, dict[str, str]]:
    """A project folder and an environment, each with a conserve.toml of its own."""
    project = tmp_path / "project" / "deep"
    project.mkdir(parents=True)
    (tmp_path / "project" / "conserve.toml").write_text(
        'model = "of-project"\nlease_s = 30\nhome = "store"\n'
    )
    user = tmp_path / "config" / "conserve"
    user.mkdir(parents=True)
    (user / "conserve.toml").write_text('model = "of-user"\nmax_attempts = 9\n')
    return project, {"XDG_CONFIG_HOME": str(tmp_path / "config")}


def test_flags_win_over_variables_over_project_over_user_over_defaults(
    sources: tuple[Path, dict[str, str]], tmp_path: Path
) -> None:
    cwd, environ = sources
    assert load({}, {"XDG_CONFIG_HOME": str(tmp_path / "none")}, tmp_path).model is None
    assert load({}, environ, tmp_path).model == "of-user"
    assert load({}, environ, cwd).model == "of-project"
    environ["CONSERVE_MODEL"] = "of-variable"
    assert load({}, environ, cwd).model == "of-variable"
    assert load({"model": "of-flag"}, environ, cwd).model == "of-flag"
    assert load({"model": None}, environ, cwd).model == "of-variable"
    environ["CONSERVE_MODEL"] = ""
    assert load({}, environ, cwd).model == "of-project", "an empty variable is no value"
    environ["CONSERVE_MODEL"] = "none"
    assert (load({}, environ, cwd).model, load({}, environ, cwd).engine_model) == (None, "smollm2-demo")


def test_sources_are_merged_setting_by_setting(sources: tuple[Path, dict[str, str]], tmp_path: Path) -> None:
    cwd, environ = sources
    settings = load({}, environ, cwd)
    assert (settings.lease_s, settings.max_attempts) == (30.0, 9)
    assert settings.home == tmp_path / "project" / "store", "paths are relative to the file that names them"


def test_what_a_weaker_source_sets_is_taken_back_by_variables_and_files(
    sources: tuple[Path, dict[str, str]],
) -> None:
    cwd, environ = sources
    said = {"data": "s3://team/conserve", "metrics_port": "9108", "otlp_endpoint": "http://collector:4318"}
    lines = "".join(f"{name} = 'none'\n" for name in said)
    (cwd / "conserve.toml").write_text(lines)
    (Path(environ["XDG_CONFIG_HOME"]) / "conserve" / "conserve.toml").write_text(
        "".join(f"{name} = {value!r}\n" for name, value in said.items())
    )
    unset = dict.fromkeys(said)
    assert {name: getattr(load({}, environ, cwd), name) for name in said} == unset
    (cwd / "conserve.toml").unlink()
    assert load({}, environ, cwd).metrics_port == 9108
    variables = {f"CONSERVE_{name.upper()}": "none" for name in said}
    found = load({}, {**environ, **variables}, cwd)
    assert {name: getattr(found, name) for name in said} == unset


def test_a_model_of_a_file_is_a_folder_beside_it_where_there_is_one(tmp_path: Path) -> None:
    deep, mine = tmp_path / "deep", tmp_path / "models" / "mine"
    deep.mkdir()
    mine.mkdir(parents=True)
    file = tmp_path / "conserve.toml"
    environ = {"XDG_CONFIG_HOME": str(tmp_path / "none")}
    for said, found in {"models/mine": str(mine), "models/other": "models/other", "~/none": "~/none"}.items():
        file.write_text(f'model = "{said}"')
        assert load({}, environ, deep).engine_model == found
    file.write_text('model = "models/mine"')
    assert load({}, {**environ, "CONSERVE_MODEL": "models/mine"}, deep).model == "models/mine"
    assert load({"model": "models/mine"}, environ, deep).model == "models/mine"
    for server in ({"endpoint": "http://a"}, {"endpoints": "servers.txt"}):
        assert load(server, environ, deep).model == "models/mine", "the name that a server knows"
    assert load({"endpoint": "none"}, environ, deep).model == str(mine)
    file.write_text("model = 3")
    with pytest.raises(SettingsError, match="model must be text"):
        load({}, environ, deep)


def test_an_endpoint_is_taken_back_and_a_refusal_names_who_set_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    file, url = tmp_path / "conserve.toml", "http://127.0.0.1:9"
    file.write_text(f'endpoint = "{url}"')
    with pytest.raises(SettingsError, match=f"and {file} sets an endpoint; .*: --endpoint none"):
        check_endpoint(load(), ["--max-model-len", "9"], ProfileFlags())
    with pytest.raises(SettingsError, match="and --endpoint was given"):
        check_endpoint(load({"endpoint": f"{url}/v1"}), [], ProfileFlags(tbt_ms=9))
    check_endpoint(load({"endpoint": "none"}), ["--max-model-len", "9"], ProfileFlags(tbt_ms=9))
    monkeypatch.setenv("CONSERVE_ENDPOINT", url)
    with pytest.raises(SettingsError, match="and CONSERVE_ENDPOINT sets an endpoint"):
        check_endpoint(load(), ["--max-model-len", "9"], ProfileFlags())
    monkeypatch.setenv("CONSERVE_ENDPOINT", "none")
    assert load().endpoint is None


@pytest.mark.parametrize(
    ("toml", "message"),
    [
        ('modle = "x"', "'modle', which is no setting"),
        ("model = 3", "model must be text, not 3; correct .*conserve.toml"),
        ('lease_s = "soon"', "lease_s must be a number of seconds, not 'soon'; correct .*conserve.toml"),
        ("max_attempts = 0", "at least 1"),
        ("lease_s = 0.5", "lease_s must be at least 1 second"),
        ("lease_s = nan", "lease_s must be at least 1 second"),
        ("lease_s = inf", "lease_s must be .* below 1e9"),
        ("utility = -1", "from 0 .* to 1 .*, not -1"),
        ("max_answer_s = 0", "max_answer_s must be above 0"),
        ("max_answer_s = nan", "max_answer_s must be above 0"),
        ("max_answer_mib = -1", "max_answer_mib must be above 0"),
        ("max_answer_mib = inf", "max_answer_mib must be above 0"),
        ("max_answers_mib = 0", "max_answers_mib must be above 0"),
        ("model = ", "cannot read"),
    ],
)
def test_a_mistake_in_a_file_is_one_sentence(tmp_path: Path, toml: str, message: str) -> None:
    (tmp_path / "conserve.toml").write_text(toml)
    with pytest.raises(SettingsError, match=message):
        load({}, {"XDG_CONFIG_HOME": str(tmp_path)}, tmp_path)


def test_a_variable_of_the_wrong_type_is_named(tmp_path: Path) -> None:
    with pytest.raises(
        SettingsError, match="max_attempts must be a whole number, not 'many'; correct CONSERVE_M"
    ):
        load({}, {"CONSERVE_MAX_ATTEMPTS": "many"}, tmp_path)


@pytest.mark.parametrize("name", ["home", "store", "data", "model", "endpoint"])
def test_a_value_that_is_not_utf8_is_named(tmp_path: Path, name: str) -> None:
    with pytest.raises(SettingsError, match=f"{name} is not UTF-8: .*; correct CONSERVE_{name.upper()}"):
        load({}, {f"CONSERVE_{name.upper()}": f"{tmp_path}/m\udcff"}, tmp_path)


def test_a_secret_that_is_not_utf8_is_not_shown(tmp_path: Path) -> None:
    with pytest.raises(SettingsError, match="api_key is not UTF-8") as refused:
        load({}, {"CONSERVE_API_KEY": "hidden\udcff"}, tmp_path)
    assert "hidden" not in str(refused.value)


@pytest.mark.parametrize("address", ["otlp://ann:secret@host", "http://ann:secret/x@host", "ann:secret@host"])
def test_a_collector_that_has_no_address_is_named_without_its_password(tmp_path: Path, address: str) -> None:
    with pytest.raises(SettingsError, match=r"an http:// or https:// address, not '[a-z:/]*host'") as refused:
        load({"otlp_endpoint": address}, {}, tmp_path)
    assert "secret" not in str(refused.value)


@pytest.mark.parametrize(
    ("name", "value"), [("api_key", 12345), ("endpoint", 12345), ("store", "12345\udcff")]
)
def test_no_message_on_a_setting_of_the_wrong_kind_shows_a_secret(
    tmp_path: Path, name: str, value: object
) -> None:
    with pytest.raises(SettingsError, match=name) as refused:
        load({name: value}, {}, tmp_path)
    assert "12345" not in str(refused.value)


def test_answers_are_bounded_as_the_settings_say(tmp_path: Path) -> None:
    given = load({}, {"CONSERVE_MAX_ANSWER_S": "2.5", "CONSERVE_MAX_ANSWER_MIB": "0.5"}, tmp_path)
    assert AnswerLimits.of(given) == AnswerLimits(seconds=2.5, num_bytes=512 << 10)
    assert AnswerLimits.of(load({}, {}, tmp_path)) == AnswerLimits(), (
        "the defaults are the same in both places"
    )


@pytest.mark.parametrize(
    ("store", "path"),
    [
        (None, "/x/q?%41/conserve.db"),
        ("sqlite:////y/a%3Fb%20c.db?timeout=3", "/y/a?b c.db"),
        ("postgresql://db/conserve", None),
    ],
)
def test_the_file_of_an_sqlite_store_is_the_one_that_its_url_names(
    store: str | None, path: str | None
) -> None:
    settings = Settings(home=Path("/x/q?%41"), store=store)
    assert settings.sqlite_file == (Path(path) if path else None)
    opened = parse(settings.store_url)
    assert path is None or opened.database == path


@pytest.mark.parametrize("name", ["a%20b", "a?b=c", "a#b", "ünï @:;&", "100%", "a%3Fb"])
def test_the_address_of_an_sqlite_store_is_its_url_and_names_its_file(name: str) -> None:
    """Messages tell users to set CONSERVE_STORE to it, and SQLAlchemy 2.0 writes paths as they are."""
    path = Path("/x") / name / "a.db"
    url = sqlite_url(path) + "?timeout=3"
    assert address(engine_of(url)) == masked(url) == url
    assert masked(f"sqlite:///{quote(str(path))}?timeout=3") == url, "as SQLAlchemy 2.1 writes it"
    assert sqlite_file(url) == path


def test_a_line_break_behind_a_secret_is_none_of_it(tmp_path: Path) -> None:
    environ = {"CONSERVE_STORE": "postgresql://db/x\n", "CONSERVE_API_KEY": "key\n"}
    said = load({}, environ, tmp_path)
    assert (said.store, said.api_key) == ("postgresql://db/x", "key")


def test_a_clone_has_the_demo_model_where_make_puts_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = tmp_path / "clone" / ".demo" / "models"
    makefile = (Path(__file__).parents[2] / "Makefile").read_text()
    assert "CONSERVE_MODELS ?= $(CURDIR)/.demo/models\n" in makefile
    assert Path(__file__).parents[2] / ".demo" / "models" == config.MADE_BY_MAKE
    monkeypatch.setattr(config, "MADE_BY_MAKE", made)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    assert load({}, {}, tmp_path).models_folder == tmp_path / "cache" / "conserve" / "models"
    made.mkdir(parents=True)
    assert load({}, {}, tmp_path).models_folder == made
    assert load({}, {"CONSERVE_MODELS": "/other"}, tmp_path).models_folder == Path("/other")
