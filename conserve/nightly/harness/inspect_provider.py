"""Entry point `inspect_ai`: the model provider `conserve/MODEL`."""

from typing import TYPE_CHECKING

from inspect_ai.model import modelapi

if TYPE_CHECKING:
    from inspect_ai.model import ModelAPI


@modelapi(name="conserve")  # type: ignore[untyped-decorator]
def conserve() -> "type[ModelAPI]":
    """Class of the provider, imported when a model of it is named."""
    from conserve.nightly.harness.inspect_model import ConserveAPI

    return ConserveAPI
