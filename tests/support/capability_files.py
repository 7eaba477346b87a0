"""Capability folders and claims made for one test."""

import textwrap
from pathlib import Path
from typing import Any

from mesh.contract.messages import Claim, ContextMessage
from worker.capability_folder import CapabilityFolder, load_capability

SHIPPED = Path(__file__).resolve().parent.parent.parent / "capabilities"


def write_capability(root: Path, name: str, files: dict[str, str], **template: Any) -> Path:
    """Write a capability's folder; `template` holds further lines of template.yaml, as YAML flow values."""
    folder = root / name
    folder.mkdir(parents=True, exist_ok=True)
    lines = {"name": name, **template}
    (folder / "template.yaml").write_text("".join(f"{key}: {value}\n" for key, value in lines.items()))
    for file_name, text in files.items():
        file = folder / file_name
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(textwrap.dedent(text))
        if text.startswith("#!"):
            file.chmod(0o755)
    return folder


def python_capability(root: Path, handler: str, *, name: str = "probe", **template: Any) -> CapabilityFolder:
    """Return a capability whose handler.py is `handler`."""
    return load_capability(write_capability(root, name, {"handler.py": handler}, **template))


def claim_of(payload: dict[str, Any] | None = None, **fields: Any) -> Claim:
    """Return a claim as a ledger would hand it out."""
    values: dict[str, Any] = {
        "tenant_id": "local",
        "intent_id": "intent-1",
        "thread_id": "thread-1",
        "capability": "probe",
        "payload": payload or {},
        "epoch": 1,
        "attempt": 1,
        "max_attempts": 3,
        "lease_ttl_s": 15.0,
        "supports_multi_turn": True,
        "turn_number_next": 1,
    }
    return Claim(**(values | fields))


def messages_of(*contents: str) -> list[ContextMessage]:
    """Return a context in which user and assistant take turns."""
    roles = ("user", "assistant")
    return [ContextMessage(role=roles[index % 2], content=content) for index, content in enumerate(contents)]
