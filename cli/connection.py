"""One place where a command gets its client.

The client, and with it httpx and the contract's messages, is loaded only here: `--help` needs neither.
Must never keep a client beyond a command.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

from cli.settings import CliSettings

if TYPE_CHECKING:
    from cli.client import MeshClient


def open_client(url: str, key: str | None, *, tries: int | None = None, timeout_s: float = 30.0) -> "MeshClient":
    """Return a client; the caller closes it."""
    from cli.client import TRIES, MeshClient

    return MeshClient(url, key, tries=tries or TRIES, timeout_s=timeout_s)


@contextmanager
def connect() -> Iterator["MeshClient"]:
    """Open a client to the gateway that the environment names."""
    settings = CliSettings()
    client = open_client(settings.url, settings.api_key.get_secret_value() if settings.api_key else None)
    try:
        yield client
    finally:
        client.close()


def operator_connect() -> "MeshClient":
    """Open a client that shows the mesh token, as operators' calls need it.

    The token is the one set, else the one that `up` made in the data folder, else the caller's key stands in: a
    mesh without keys asks for none.
    """
    settings = CliSettings()
    token = settings.mesh_token.get_secret_value() if settings.mesh_token else None
    if token is None and (path := settings.data_dir / "mesh_token").is_file():
        token = path.read_text(encoding="utf-8").strip()
    if token is None and settings.api_key:
        token = settings.api_key.get_secret_value()
    return open_client(settings.url, token)
