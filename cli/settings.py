"""Settings of the command line, and the folders of capabilities that it works with.

Must never read what only a role needs (database, models): roles read their own settings from the environment.
"""

from pathlib import Path

from pydantic import Field, SecretStr

from mesh.contract.settings import MeshSettings

ROOT = Path(__file__).resolve().parent.parent
LOCAL_CAPABILITIES = Path("capabilities")


class CliSettings(MeshSettings):
    """Where the command line finds a mesh, and what `up` starts."""

    url: str = Field("http://127.0.0.1:8080", description="Gateway that the command line talks to")
    api_key: SecretStr | None = Field(None, description="Key that the command line shows to the gateway")
    host: str = Field("127.0.0.1", min_length=1, description="Address that the gateway listens on")
    port: int = Field(8080, ge=1, le=65_535, description="Port that the gateway listens on; 0 takes a free one")
    ledger_port: int | None = Field(
        None, ge=1, le=65_535, description="Port on which the ledger serves nodes and gateways"
    )
    database_url: str | None = Field(
        None,
        description="PostgreSQL (postgresql://user:password@host/name) or SQLite (sqlite:///file); "
        "unset: the file ledger.sqlite3 in the data folder",
    )
    capabilities_dir: str | None = Field(
        None, description="Folders of capabilities, separated by ':'; of two with one name the later wins"
    )
    drain_timeout_s: float = Field(30.0, ge=0, description="How long a stopping node waits for its workers")
    embedding_model: str = Field(
        "all-MiniLM-L6-v2",
        min_length=1,
        max_length=200,
        description="Model of semantic ranking; 'none' switches it off",
    )
    llm_base_url: str | None = Field(None, description="OpenAI-compatible server, for example http://127.0.0.1:8000/v1")
    llm_api_key: SecretStr | None = Field(None, description="Its key; only nodes hold it, never a worker")
    llm_model: str | None = Field(
        None, description="Model for capabilities that ask for 'default'; unset: the server's first"
    )

    def capability_roots(self) -> list[Path]:
        """Folders to load, later ones winning: as set, else the shipped ones and ./capabilities.

        The latter need not exist yet: a node takes up what appears there.
        """
        if self.capabilities_dir:
            return [Path(part).expanduser().absolute() for part in self.capabilities_dir.split(":") if part]
        roots = [shipped_capabilities(), LOCAL_CAPABILITIES.resolve()]
        return roots[:1] if roots[0] == roots[1] else roots

    def new_capability_root(self) -> Path:
        """Where `capability new` writes: the last folder as set, else ./capabilities."""
        return self.capability_roots()[-1] if self.capabilities_dir else LOCAL_CAPABILITIES


def shipped_capabilities() -> Path:
    """Return the folder of capabilities that comes with the mesh: beside this package, installed or not."""
    return ROOT / "capabilities"
