"""First functions of a program: open a store, or map a table in one line."""

from contextlib import closing
from pathlib import Path
from typing import Any

from conserve.api.caller import warn
from conserve.api.store import Store
from conserve.api.twins import BlockingCall
from conserve.config import database_elsewhere, load, variables
from conserve.errors import SettingsError


@BlockingCall
def open(path: str | Path | None = None, **settings: Any) -> Store:
    """Open a store, and make it if it is not there.

    `path` is its folder, by default that of the command line. `settings` are entries of conserve.toml by name, as
    `endpoint="http://localhost:8000"`; they win over variables and files. Warns where `path` is given and
    CONSERVE_STORE names a database: the jobs are those of the database.
    """
    from conserve.store.database.store import Store as Database

    unknown = next((name for name in settings if name not in variables()), None)
    if unknown is not None:
        raise SettingsError(f"there is no setting {unknown!r}; there are: {', '.join(variables())}")
    chosen = load({"home": path, **settings})
    if "store" not in settings and (said := database_elsewhere(path, chosen)) is not None:
        warn(said, UserWarning)
    with closing(Database.open_to_read(chosen)):
        return Store(chosen)
