"""Processes that `conserve serve` starts for files and batches, and the keys that it asks for."""

import os
import subprocess
import sys
from contextlib import closing
from dataclasses import replace
from pathlib import Path

import pytest

from conserve.batch_api.serving import at_path
from conserve.cli.serve import keyed
from conserve.cli.serve_batches import batch_api, open_batches, told_of, with_store_keys
from conserve.cli.serve_notices import batches_left_out
from conserve.config import Settings, load
from conserve.engine.service import ProcessCommand
from conserve.errors import SettingsError
from conserve.niceness import AUTOGROUP, BESIDE_NICE
from conserve.store.database.store import Store
from conserve.variables import BATCH_API
from tests.commands import conserve


def test_the_plug_in_is_told_of_the_socket(settings: Settings) -> None:
    server = ProcessCommand(name="server", words=["serve"], environment={"a": "b"})
    with batch_api(settings, 5, 6, wanted=False) as nothing:
        assert told_of(nothing, server) == server
    with batch_api(settings, 5, 6) as command:
        assert command is not None
        told = told_of(command, server).environment
        assert told == {"a": "b", BATCH_API: command.environment[BATCH_API]}
        path = Path(command.environment[BATCH_API])
        assert str(path) == command.words[command.words.index("--socket") + 1]
        assert path.parent.stat().st_mode & 0o77 == 0, "no other user reaches it"
    assert not path.parent.exists()


def test_a_server_over_a_store_with_keys_asks_for_one(store: Store, settings: Settings) -> None:
    assert with_store_keys(settings).api_key is None
    assert with_store_keys(settings, batches=False).api_key is None
    assert conserve("keys", "add", "ann").returncode == 0
    made = with_store_keys(settings).api_key
    assert made is not None
    assert made != with_store_keys(settings).api_key
    with pytest.raises(SettingsError, match="leave out --no-batches, or set CONSERVE_API_KEY"):
        with_store_keys(settings, batches=False)
    own = replace(settings, api_key="sesame")
    assert with_store_keys(own, batches=False) == own
    assert conserve("keys", "revoke", "ann").returncode == 0
    assert with_store_keys(settings).api_key is not None, "it is not open again"


def test_vllms_own_variable_stays_the_key_over_a_store_with_keys(
    store: Store, settings: Settings, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert conserve("keys", "add", "ann").returncode == 0
    monkeypatch.setenv("VLLM_API_KEY", "sesame")
    assert keyed(with_store_keys(settings)).api_key == "sesame"


def test_batches_without_keys_are_for_this_machine_alone(settings: Settings) -> None:
    assert open_batches("0.0.0.0", settings)
    assert not open_batches("127.0.0.1", settings)
    assert not open_batches("0.0.0.0", replace(settings, api_key="sesame"))
    assert batches_left_out("0.0.0.0").endswith("run: conserve keys add NAME")


def test_a_store_out_of_reach_opens_no_server(tmp_path: Path) -> None:
    (tmp_path / "home").mkdir()
    (tmp_path / "home" / "conserve.db").write_bytes(b"no database" * 100)
    settings = load({"home": tmp_path / "home"})
    with pytest.raises(SettingsError, match="whether requests need a key cannot be read"):
        with_store_keys(settings)


def test_no_other_user_opens_the_socket(tmp_path: Path) -> None:
    for _ in range(2):
        with closing(at_path(tmp_path / "s")):
            assert (tmp_path / "s").stat().st_mode & 0o77 == 0
    (tmp_path / "file").write_text("kept")
    with pytest.raises(SettingsError, match="cannot be made"):
        at_path(tmp_path / "file")
    assert (tmp_path / "file").read_text() == "kept"


@pytest.mark.skipif(not AUTOGROUP.exists(), reason="the kernel does not group processes by session")
@pytest.mark.parametrize("leads", [True, False])
def test_the_batch_api_makes_its_own_session_nicer_and_no_other(leads: bool) -> None:
    before = AUTOGROUP.read_text()
    code = "from conserve.niceness import *; give_way(); print(os.nice(0)); print(AUTOGROUP.read_text())"
    words = [sys.executable, "-c", code]
    said = subprocess.run(
        words, start_new_session=leads, stdout=subprocess.PIPE, text=True, check=True
    ).stdout
    own, group = said.split("\n", maxsplit=1)  # the file is empty for the session that a system began with
    assert int(own) == os.nice(0) + BESIDE_NICE
    assert group.strip().endswith(f"nice {BESIDE_NICE}") if leads else group.strip() == before.strip()
    assert AUTOGROUP.read_text() == before
