"""Limits of the API server: size of a body, open connections, and access to its metrics."""

from dataclasses import dataclass

from conserve.http_server import CONNECTIONS

BODY_BYTES = 64 << 20  # images travel in bodies, as base64
FILE_BYTES = 200_000_000  # as OpenAI has it


@dataclass(frozen=True, slots=True, kw_only=True)
class ApiLimits:
    """Limits of the API server."""

    body_bytes: int = BODY_BYTES  # of one request
    file_bytes: int = FILE_BYTES  # of an upload to the Batch API
    connections: int = CONNECTIONS  # open at once
    open_metrics: bool = False  # True: `/metrics` is answered without a key
