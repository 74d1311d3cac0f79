"""Addresses that servers listen at."""

import socket

from conserve.errors import SettingsError


def require_free(host: str, port: int) -> None:
    """Raise if another process listens there: its answers would pass for the server's."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    with socket.socket(family) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((host, port))
        except OSError as error:
            raise SettingsError(f"cannot listen at {host}:{port} ({error}); give another --port") from error
