"""Settings: flags over CONSERVE_* variables over conserve.toml (project, then user) over defaults."""

import os
import sys
from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any, get_args
from urllib.parse import unquote

from conserve.errors import SettingsError, StoreReadOnly
from conserve.units import parse_size

DEMO_MODEL = "smollm2-demo"
PROJECT_FILE = "conserve.toml"
BACKUP = "backup.json"  # in a home that is a backup
UNSET = "none"  # takes back what a weaker source sets
MAY_BE_UNSET = ("data", "model", "endpoint", "endpoints", "metrics_port", "otlp_endpoint")
SQLITE = "sqlite:///"
UTILITY = 0.9
LOG_FORMATS = ("text", "json")
SECRETS = ("api_key", "harvest_key")
ADDRESSES = ("store", "endpoint", "endpoints", "otlp_endpoint")  # may have a password in them
MADE_BY_MAKE = Path(__file__).parents[1] / ".demo" / "models"  # in a clone, after `make demo`
KINDS = {Path: "a path", int: "a whole number", float: "a number", str: "text"}
LINUX = sys.platform == "linux"  # its folders need no platformdirs, which takes 20 ms to import

UNCOUNTED = 1 << 63  # bytes that the operating system cannot count any more


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """Settings of all commands; field `x_y` is the variable CONSERVE_X_Y and the TOML key x_y."""

    home: Path
    """Folder of the store: its database, job folders and result shards."""
    store: str | None = None
    """Database URL of the store; an SQLite file in `home` unless set."""
    data: str | None = None
    """Folder or bucket of the files of its jobs, as s3://BUCKET/PREFIX; `home` unless set."""
    model: str | None = None
    """Model of the embedded engine (smollm2-demo unless set), or the one of `endpoint`'s models to ask for."""
    endpoint: str | None = None
    """OpenAI-compatible server to use instead of the embedded engine."""
    endpoints: str | None = None
    """Lists of servers to harvest on, with spaces between: file://LIST, dns://HOST:PORT, k8s://NAMESPACE/LABEL=VALUE."""
    api_key: str | None = None
    """Bearer token for `endpoint`."""
    harvest_key: str | None = None
    """The harvester's key of a server that co-serves: its rows may go on from saved tokens."""
    models: Path | None = None
    """Folder of the converted demo model; `.demo/models` of a clone with one, else the platform's cache folder."""
    engine_args: str = ""
    """Flags for vLLM, as on its command line; the FLAGS of `conserve run -- FLAGS` come after them."""
    lease_s: float = 60.0
    """Seconds of silence after which another `run` may take the rows of this one."""
    max_attempts: int = 5
    """Faulty answers that brought no tokens to go on from, after which a row fails."""
    max_answer_s: float = 3600.0
    """Seconds that one attempt at an answer of `endpoint` may take, from sending its request to the last byte."""
    max_answer_mib: float = 64.0
    """Size that one answer of `endpoint` may have, in MiB."""
    max_answers_mib: float = 512.0
    """Size that all answers of `endpoint` under way may have together, in MiB; `max_answer_mib` if that is more."""
    input_copy_gib: float = 1.0
    """Size up to which `submit` copies Parquet files into the store unless told otherwise, in GiB."""
    utility: float = UTILITY
    """Share of several jobs' rows that are chosen for their prefix, 0 to 1; the others are the stalest."""
    share: str | None = None
    """Weights by which priorities share the tokens, as 10=3,0=1, or `jobs`; strictly by priority unless set."""
    sql_memory: str | None = None
    """Most memory a query of `conserve sql` may take, as 2GiB; by the machine unless set."""
    sql_disk: str | None = None
    """Most temporary disk a query may take; by what is free unless set."""
    sql_threads: int | None = None
    """Threads of a query; one for each core, at most 8, unless set."""
    sql_timeout_s: float = 300.0
    """Seconds that a query may compute; 0 for any time."""
    log_format: str = "text"
    """Form of the messages of long-running commands: `text`, or `json`, one object a line."""
    metrics_port: int | None = None
    """Port at which a harvester answers /metrics; 0 for a free one."""
    metrics_host: str = "127.0.0.1"
    """Address at which a harvester answers /metrics."""
    otlp_endpoint: str | None = None
    """OpenTelemetry collector that a trace of each row is sent to, over HTTP."""

    def __post_init__(self) -> None:
        self._refuse_what_is_not_utf8()
        if not 1 <= self.lease_s < 1e9:  # nor if it is no number
            raise SettingsError(f"lease_s must be at least 1 second and below 1e9, not {self.lease_s:g}")
        if self.max_attempts < 1:
            raise SettingsError(f"max_attempts must be at least 1, not {self.max_attempts}")
        for name in ("max_answer_s", "max_answer_mib", "max_answers_mib"):
            value = getattr(self, name)
            if not 0 < value < 1e9:  # nor if it is no number
                raise SettingsError(f"{name} must be above 0 and below 1e9, not {value:g}")
        if not self.input_copy_gib >= 0:  # nor if it is no number
            raise SettingsError(f"input_copy_gib must be 0 or more, not {self.input_copy_gib:g}")
        if not self.sql_timeout_s >= 0:
            raise SettingsError(f"sql_timeout_s must be 0 or more seconds, not {self.sql_timeout_s:g}")
        if self.sql_threads is not None and self.sql_threads < 1:
            raise SettingsError(f"sql_threads must be at least 1, not {self.sql_threads}")
        if self.log_format not in LOG_FORMATS:
            raise SettingsError(f"log_format is {' or '.join(LOG_FORMATS)}, not {self.log_format!r}")
        if self.metrics_port is not None and not 0 <= self.metrics_port <= 65_535:
            raise SettingsError(f"metrics_port goes from 0 to 65535, not {self.metrics_port}")
        if self.otlp_endpoint is not None:
            self._refuse_collector(self.otlp_endpoint)
        if not 0 <= self.utility <= 1:  # nor if it is no number
            raise SettingsError(
                "utility goes from 0 (the stalest row first) to 1 (always the longest shared prefix), "
                f"not {self.utility:g}; try: --utility {UTILITY}"
            )

    def _refuse_collector(self, address: str) -> None:
        """Refuse an address of a collector that its client would not take."""
        from conserve.hosts import about_login, without_login  # most commands need no names of hosts

        why = about_login(address)
        if why or not address.startswith(("http://", "https://")):
            raise SettingsError(
                f"otlp_endpoint takes an http:// or https:// address, not {without_login(address)!r}{why}; "
                "try: --otlp-endpoint http://localhost:4318"
            )

    def _refuse_what_is_not_utf8(self) -> None:
        """Name the first setting with bytes that are not UTF-8, which no database and no address holds."""
        for field in fields(self):
            value = getattr(self, field.name)
            try:
                str(value).encode()
            except UnicodeEncodeError as error:
                hidden = field.name in (*SECRETS, *ADDRESSES)
                shown = "what was given" if hidden else repr(str(value))
                raise SettingsError(
                    f"{field.name} is not UTF-8: {shown}; correct {variables()[field.name]}, or its flag"
                ) from error

    @property
    def engine_model(self) -> str:
        """Model of the embedded engine: local path, hub id, or smollm2-demo."""
        return self.model or DEMO_MODEL

    @property
    def profiles_folder(self) -> Path:
        """Folder of this machine's latency profiles."""
        return self.home / "profiles"

    @property
    def models_folder(self) -> Path:
        """Folder of the converted demo model, for all stores of the user."""
        if self.models is not None:
            return self.models
        if MADE_BY_MAKE.is_dir():
            return MADE_BY_MAKE
        from platformdirs import user_cache_path

        return user_cache_path("conserve") / "models"

    @property
    def store_url(self) -> str:
        """Database URL, given or derived from `home`."""
        return self.store or sqlite_url(self.home / "conserve.db")

    @property
    def place(self) -> str:
        """Place of the store, for messages: its folder, or its database's URL without user and password."""
        if not self.store:
            return str(self.home)
        scheme, separator, rest = self.store.partition("://")
        return f"{scheme}{separator}{rest.rpartition('@')[2].partition('?')[0]}"

    @property
    def sqlite_file(self) -> Path | None:
        """File of the database; None if that is not SQLite."""
        return sqlite_file(self.store_url)


def sqlite_url(path: Path) -> str:
    """Database URL of an SQLite file, whatever its name."""
    return SQLITE + str(path).replace("%", "%25").replace("?", "%3F")


def sqlite_file(url: str) -> Path | None:
    """File that a database URL names; None for another database."""
    return Path(unquote(url.removeprefix(SQLITE).partition("?")[0])) if url.startswith(SQLITE) else None


def model_name(model: str) -> str:
    """Name by which jobs are bound to a model: the absolute path of a folder, else the name as given."""
    try:
        model.encode()
    except UnicodeEncodeError as error:
        raise SettingsError(f"{model!r} is no name of a model; correct it") from error
    try:
        folder = Path(model).expanduser()
        return str(folder.resolve()) if folder.is_dir() else model
    except (OSError, RuntimeError, ValueError):  # not a path, or ~ of an unknown user
        return model


def model_beside(folder: Path, model: Any) -> Any:
    """Path of the model in this folder of a conserve.toml; the model as given if there is no such folder."""
    try:
        path = folder / Path(model).expanduser()
        return str(path) if model and path.is_dir() else model
    except (OSError, RuntimeError, TypeError, ValueError):  # no path, or ~ of an unknown user
        return model


def load(
    flags: Mapping[str, Any] | None = None,
    environ: Mapping[str, str] | None = None,
    cwd: Path | None = None,
) -> Settings:
    """Merge all sources into settings; `flags` that are None do not count. Raises `SettingsError`."""
    environ = os.environ if environ is None else environ
    values: dict[str, Any] = {}
    folder = Path()  # of the file that names the model
    for path in reversed(settings_files(environ, cwd or Path.cwd())):
        in_file = read_toml(path)
        folder = path.parent if "model" in in_file else folder
        values |= in_file
    # A secret that was made from a file may end in a line break.
    stronger = {name: said for name, var in variables().items() if (said := environ.get(var, "").strip())}
    stronger |= {name: value for name, value in (flags or {}).items() if value is not None}
    values |= stronger
    values = {name: value for name, value in values.items() if value != UNSET or name not in MAY_BE_UNSET}
    # To a server the model is a name, whatever lies on this machine.
    if "model" in values.keys() - stronger.keys() and not {"endpoint", "endpoints"} & values.keys():
        values["model"] = model_beside(folder, values["model"])
    if "home" not in values:
        values["home"] = default_home()
    settings = Settings(**{name: converted(name, value, environ, cwd) for name, value in values.items()})
    # A backup has its own database and files; those of another store must not be read in their place.
    return replace(settings, store=None, data=None) if is_backup(settings.home) else settings


def is_backup(home: Path) -> bool:
    """True for a backup: its manifest says what was written, so that nothing in it may change."""
    try:
        return (home / BACKUP).exists()
    except OSError:  # a forbidden folder, of which whatever opens it tells
        return False


def refuse_backup(home: Path) -> None:
    """Raise `StoreReadOnly` for a backup, before a command changes it."""
    if is_backup(home):
        raise StoreReadOnly(
            f"{home} is a backup, which commands only read; make a store of it: conserve --home NEW store restore "
            f"{home} (or remove its {BACKUP}, and it is a store from then on)"
        )


def database_elsewhere(home: object, settings: Settings) -> str | None:
    """Sentence on a database that a variable or file names, where `home` was given as a folder; else None."""
    if home is None or settings.store is None:
        return None
    source = source_of("store", settings.store)
    if source.startswith("--"):  # it was given with the folder
        return None
    fix = f"unset {source}" if source == variables()["store"] else f"remove `store` from {source}"
    return (
        f"the jobs are those of {settings.place}, which {source} names; {settings.home} is the folder of their "
        f"files alone (for a store in that folder {fix})"
    )


def converted(name: str, value: Any, environ: Mapping[str, str], cwd: Path | None) -> Any:
    """Convert `value` as `convert` does; the error names the variable or the file that says it."""
    try:
        return convert(name, value)
    except SettingsError as error:
        source = source_of(name, value, environ, cwd)
        raise SettingsError(
            f"{error}" if source.startswith("--") else f"{error}; correct {source}"
        ) from error


def variables() -> dict[str, str]:
    """Environment variable of each setting."""
    return {field.name: f"CONSERVE_{field.name.upper()}" for field in fields(Settings)}


def source_of(
    name: str, value: object, environ: Mapping[str, str] | None = None, cwd: Path | None = None
) -> str:
    """Variable or file that sets a setting to this value; its flag if none does."""
    environ = os.environ if environ is None else environ
    variable = variables()[name]
    said: dict[str, Any] = {variable: environ.get(variable, "").strip() or None}
    for path in settings_files(environ, cwd or Path.cwd()):
        said[str(path)] = read_toml(path).get(name)
    first = next(((where, given) for where, given in said.items() if given is not None), None)
    return first[0] if first is not None and first[1] == value else f"--{name.replace('_', '-')}"


def settings_files(environ: Mapping[str, str], cwd: Path) -> list[Path]:
    """Existing conserve.toml files, the strongest first: the nearest project folder's, then the user's."""
    project = next((p for folder in (cwd, *cwd.parents) if (p := folder / PROJECT_FILE).is_file()), None)
    user = user_file(environ)
    return [path for path in (project, user) if path is not None and path.is_file()]


def user_file(environ: Mapping[str, str]) -> Path:
    """Path of the user's own conserve.toml."""
    base = environ.get("XDG_CONFIG_HOME") or (Path.home() / ".config" if LINUX else None)
    if base is not None:
        return Path(base) / "conserve" / PROJECT_FILE
    from platformdirs import user_config_path

    return user_config_path("conserve") / PROJECT_FILE


def default_home() -> Path:
    """Platform's folder for a user's application data."""
    if LINUX:
        return Path(os.environ.get("XDG_DATA_HOME") or Path.home() / ".local" / "share") / "conserve"
    from platformdirs import user_data_path

    return user_data_path("conserve")


def read_toml(path: Path) -> dict[str, Any]:
    """Read the settings of one file; an unknown key is an error, so that no typing mistake goes unseen."""
    import tomllib

    try:
        values = tomllib.loads(path.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, tomllib.TOMLDecodeError) as error:
        raise SettingsError(f"cannot read {path}: {error}") from error
    known = variables()
    for name in values:
        if name not in known:
            raise SettingsError(f"{path} sets {name!r}, which is no setting; there are {', '.join(known)}")
    for name in {"home", "models"} & values.keys():  # relative to this file
        values[name] = path.parent / Path(str(values[name])).expanduser()
    if "data" in values and "://" not in str(values["data"]) and values["data"] != UNSET:
        values["data"] = str(path.parent / Path(str(values["data"])).expanduser())
    return values


def convert(name: str, value: Any) -> Any:
    """Convert `value`, which may be text from a variable, to the type of the setting."""
    kind = Settings.__annotations__[name]
    wanted = next((t for t in get_args(kind) if t is not type(None)), kind)
    try:
        if wanted is Path:
            return Path(value).expanduser().absolute()
        if wanted in (int, float) and not isinstance(value, bool):
            return wanted(value)
        if isinstance(value, wanted):
            return value
    except (TypeError, ValueError):
        pass
    shown = type(value).__name__ if name in (*SECRETS, *ADDRESSES) else repr(value)
    unit = " of seconds" if name.endswith("_s") else ""
    raise SettingsError(f"{name} must be {KINDS[wanted]}{unit}, not {shown}")


def size_bytes(name: str, text: str) -> int:
    """Bytes of the setting or flag `name`; raises `SettingsError` for zero and for text that names no size."""
    number = parse_size(text)
    if not number:
        raise SettingsError(f"{name} takes a size like 4GiB or 500MB, not {text!r}")
    if number >= UNCOUNTED:
        raise SettingsError(f"{name} takes a size below 8388608TiB, not {text:.40}")
    return int(number)
