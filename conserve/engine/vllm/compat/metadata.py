"""Attention metadata: how an iteration's is seen, and made again for the rows that stay."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

from conserve.engine.vllm.compat.versions import name_here

BUILD = "vllm.v1.worker.utils.AttentionGroup.build_metadata"


def watch_metadata(group: Any, note: Callable[[Any], None]) -> Callable[[Any], Any]:
    """Note the common metadata that a group's is built from; returns the function that builds it."""
    if name_here(BUILD) == BUILD:
        build = group.build_metadata

        def noting(common: Any, *args: Any, **kwargs: Any) -> Any:
            note(common)
            return build(common, *args, **kwargs)

        group.build_metadata = noting
        return build  # type: ignore[no-any-return]
    builder = group.get_metadata_builder()
    build_behind = builder.build  # behind a shared prefix, of which there is none here

    def noting_behind(common_prefix_len: int, common_attn_metadata: Any, *args: Any, **kwargs: Any) -> Any:
        note(common_attn_metadata)
        return build_behind(common_prefix_len, common_attn_metadata, *args, **kwargs)

    builder.build = noting_behind
    return partial(build_behind, 0)
