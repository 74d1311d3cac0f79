"""Launch of a process of vLLM's server: written into its command line, and read back from it."""

import json
from collections.abc import Sequence
from typing import Self

import msgspec

from conserve.engine.runtime.api_limits import ApiLimits
from conserve.engine.section import EngineSection


class ServerLaunch(msgspec.Struct, frozen=True, kw_only=True):
    """A model, its settings and limits, and flags of vLLM, which stay words of the command line."""

    model: str
    models_folder: str
    section: EngineSection
    limits: ApiLimits = ApiLimits()
    keyed: bool = False  # a printed command takes keys from its shell
    flags: Sequence[str] = ()

    def words(self) -> list[str]:
        """The launch as words of a command line: a JSON object, and the flags."""
        settings = msgspec.to_builtins(msgspec.structs.replace(self, flags=()))
        return [json.dumps(settings), *self.flags]  # any number, and file names that are no UTF-8

    @classmethod
    def of(cls, words: Sequence[str]) -> Self:
        """Read the words back."""
        settings, *flags = words
        return msgspec.structs.replace(msgspec.convert(json.loads(settings), cls), flags=tuple(flags))
