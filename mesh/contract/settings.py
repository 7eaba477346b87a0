"""The settings that more than one role reads; each role's own class extends this one.

Every setting is an environment variable with the prefix INTENTMESH_; docs/SETTINGS.md is generated from here.
"""

import sys
from pathlib import Path
from typing import TypeVar

from pydantic import Field, SecretStr, ValidationError
from pydantic_settings import BaseSettings, SettingsConfigDict

S = TypeVar("S", bound="MeshSettings")

# What an address of another part looks like.
ADDRESS_PATTERN = r"^https?://[^\s/]"


class MeshSettings(BaseSettings):
    """Settings shared by the roles."""

    model_config = SettingsConfigDict(env_prefix="INTENTMESH_", extra="ignore", frozen=True)

    data_dir: Path = Field(Path(".intentmesh"), description="Folder of everything that the embedded mesh keeps")
    redis_url: str | None = Field(
        None, description="Redis or Valkey, 7.0 or newer; unset: the mesh polls the ledger instead, slower"
    )
    redis_server: Path | None = Field(
        None,
        description="Server program that the embedded mesh runs; unset: valkey-server or redis-server "
        "(7.0 or newer) on PATH, else the one that is installed along",
    )
    redis_prefix: str = Field("intentmesh", min_length=1, max_length=64, description="First part of every key in Redis")
    mesh_token: SecretStr | None = Field(
        None, description="Secret that nodes and gateways show to the ledger, and operators to the gateway"
    )
    ledger_url: str = Field(
        "http://127.0.0.1:8081", pattern=ADDRESS_PATTERN, description="Where nodes and gateways reach the ledger"
    )
    log_level: str = Field("info", pattern="^(debug|info|warning|error)$", description="debug, info, warning or error")
    log_json: bool = Field(False, description="One JSON object a line instead of text for people")


def bad_settings(error: ValidationError) -> list[tuple[str, str]]:
    """Return (environment variable, what is wrong with it) for each mistake."""
    return [
        (
            "INTENTMESH_" + "_".join(str(part) for part in mistake["loc"]).upper(),
            "write an address such as http://host:port"
            if mistake.get("ctx", {}).get("pattern") == ADDRESS_PATTERN
            else mistake["msg"],
        )
        for mistake in error.errors()
    ]


def read_settings(settings: type[S]) -> S:
    """Return a role's settings from the environment; a person is told of every bad one, and the process ends with 2."""
    try:
        return settings()
    except ValidationError as error:
        for name, text in bad_settings(error):
            sys.stderr.write(f"{name}: {text} (see docs/SETTINGS.md)\n")
        raise SystemExit(2) from None
