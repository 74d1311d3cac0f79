"""The body of `POST /v1/conserve`: sent by `conserve bench`, read by the server and by its scheduler."""

from typing import Annotated, Any

import msgspec
from msgspec import UNSET, Meta, UnsetType

from conserve.names import OFF, ON

Switch = Annotated[str, Meta(pattern=rf"\A({ON}|{OFF})\Z")]


class RegimeChange(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Settings of a server that change while it runs; what is unset stays as it is."""

    policy: str | UnsetType = UNSET
    preemption: str | UnsetType = UNSET
    checkpoint: Switch | UnsetType = UNSET
    batching: Switch | UnsetType = UNSET
    slo: dict[str, Any] | UnsetType = UNSET  # all promises, as `Promises` reads them
    hygen: dict[str, Any] | UnsetType = UNSET  # terms of a policy of HyGen's, as `RowTerms` reads them

    def document(self) -> dict[str, Any]:
        """The change for JSON."""
        document: dict[str, Any] = msgspec.to_builtins(self)
        return document
