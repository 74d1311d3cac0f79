"""Addresses that servers listen at."""

import socket

from conserve.errors import SettingsError

HERE = "127.0.0.1"


def require_free(host: str, port: int) -> None:
    """Raise if another process listens there: its answers would pass for the server's."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    with socket.socket(family) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((host, port))
        except OSError as error:
            raise SettingsError(f"cannot listen at {host}:{port} ({error}); give another --port") from error


def url_of(host: str, port: int) -> str:
    """Address at which this machine reaches a server that listens there."""
    address = HERE if host in ("0.0.0.0", "::") else host
    return f"http://[{address}]:{port}" if ":" in address else f"http://{address}:{port}"


def free_port() -> int:
    """Unused port of this machine."""
    with socket.socket() as probe:
        probe.bind((HERE, 0))
        number: int = probe.getsockname()[1]
        return number
