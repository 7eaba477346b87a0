"""Settings of a node."""

import os
import socket
from pathlib import Path

from pydantic import Field, SecretStr

from mesh.contract.ids import new_id
from mesh.contract.settings import ADDRESS_PATTERN, MeshSettings


def _default_node_id() -> str:
    return f"{socket.gethostname()}-{new_id()[-8:]}"


class NodeSettings(MeshSettings):
    """What one node offers and how it behaves. Units stand last in each name."""

    node_id: str = Field(
        default_factory=_default_node_id,
        min_length=1,
        max_length=128,
        pattern=r"^[A-Za-z0-9_][A-Za-z0-9_.:@-]*$",
        description="Name of this node, unlike every other's; made up when unset",
    )
    node_slots: int = Field(
        default_factory=lambda: 2 * (os.cpu_count() or 1),
        ge=1,
        le=1024,
        description="Intents that this node runs at once; two for each core when unset",
    )
    node_standby: int = Field(2, ge=1, le=64, description="Worker processes kept forked ahead for each capability")
    capabilities_dir: str = Field(
        "capabilities", description="Folders of capabilities, separated by ':'; of two with one name the later wins"
    )
    capabilities_reload_s: float = Field(1.0, gt=0, description="How often changed capability folders are looked for")
    node_poll_interval_s: float = Field(
        1.0, gt=0, description="How often the ledger is asked for work while Redis is away"
    )
    node_poll_idle_interval_s: float = Field(
        5.0,
        gt=0,
        description="How often the ledger is asked for work while Redis is there, in case it forgot something",
    )
    lease_margin_s: float = Field(2.0, gt=0, description="A worker is killed this long before its lease runs out")
    drain_timeout_s: float = Field(30.0, ge=0, description="How long a stopping node waits for its workers")
    llm_base_url: str | None = Field(
        None, pattern=ADDRESS_PATTERN, description="OpenAI-compatible server, for example http://127.0.0.1:8000/v1"
    )
    llm_api_key: SecretStr | None = Field(None, description="Its key; only nodes hold it, never a worker")
    llm_model: str | None = Field(
        None, description="Model for capabilities that ask for 'default'; unset: the server's first"
    )
    llm_timeout_s: float = Field(120.0, gt=0, description="How long one model call may take")

    def capability_roots(self) -> list[Path]:
        """The folders of capabilities in the order in which they are read."""
        return [Path(part) for part in self.capabilities_dir.split(":") if part]
