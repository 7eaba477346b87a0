"""The ledger's settings: where its rows lie, how long a lease lives, how retries wait.

Must never hold a default that loses data: the default database is a file with full durability.
"""

from pathlib import Path

from pydantic import Field
from pydantic_settings import SettingsConfigDict

from mesh.contract.settings import MeshSettings


class LedgerSettings(MeshSettings):
    """Settings of the ledger; a gateway that writes through `ledger.store` reads them too."""

    model_config = SettingsConfigDict(env_prefix="INTENTMESH_", extra="ignore", frozen=True)

    database_url: str | None = Field(
        None,
        description="PostgreSQL (postgresql://user:password@host/name) or SQLite (sqlite:///file); "
        "unset: the file ledger.sqlite3 in the data folder",
    )
    database_pool_size: int = Field(8, ge=1, le=200, description="Connections to PostgreSQL that one process may hold")
    database_timeout_s: float = Field(
        2.0, gt=0, le=60, description="After this long without an answer the database counts as unavailable"
    )
    auto_upgrade: bool = Field(True, description="Bring the database's schema up to date when the ledger is opened")
    ledger_host: str = Field("127.0.0.1", description="Address on which the ledger serves nodes and gateways")
    ledger_port: int = Field(8081, ge=0, le=65535, description="Port on which the ledger serves nodes and gateways")
    lease_ttl_s: float = Field(15.0, ge=0.2, le=3600, description="A claim that is not renewed this long is lost")
    retry_backoff_s: float = Field(1.0, ge=0, le=3600, description="Wait before the second attempt; doubles each time")
    retry_backoff_max_s: float = Field(60.0, ge=0, le=86_400, description="Longest wait between two attempts")
    sweep_interval_s: float = Field(1.0, gt=0, le=60, description="Pause between two looks for what is due or lost")
    announce_again_s: float = Field(
        5.0, ge=0.1, le=600, description="A ready intent that nobody claimed this long is announced again"
    )
    node_lost_after_s: float = Field(45.0, gt=0, le=86_400, description="A node unseen this long is shown as lost")
    node_forget_after_s: float = Field(86_400.0, gt=0, description="A node unseen this long is removed from the list")
    embedding_model: str = Field(
        "all-MiniLM-L6-v2",
        min_length=1,
        max_length=200,
        description="Model of semantic ranking; 'none' switches it off",
    )

    @property
    def effective_database_url(self) -> str:
        """The database's URL, with the default filled in."""
        if self.database_url is not None:
            return self.database_url
        path = Path(self.data_dir).absolute() / "ledger.sqlite3"
        return f"sqlite:///{path}"
