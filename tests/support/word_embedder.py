"""An embedder without a model: texts that share words have like vectors. It can be made slow, absent or failing."""

import asyncio
import zlib
from collections.abc import Sequence
from typing import Any

import numpy as np

from ledger.words import terms_of
from mesh.contract.errors import unavailable

DIMENSION = 64


class WordEmbedder:
    """Implements contract.ports.Embedder. `poison`: a text that holds this word makes every call fail."""

    def __init__(self, model_id: str = "words@1") -> None:
        self.model_id = model_id
        self.is_ready = True
        self.delay_s = 0.0
        self.poison: str | None = None
        self.seen: list[str] = []
        self.calls = 0

    async def embed(self, texts: Sequence[str], *, timeout_s: float) -> Any:
        """Return unit vectors, float32[n, DIMENSION]."""
        if not self.is_ready:
            raise unavailable("not ready")
        if self.delay_s > timeout_s:
            raise unavailable("too slow")
        self.calls += 1
        await asyncio.sleep(self.delay_s)
        if self.poison and any(self.poison in text for text in texts):
            raise unavailable("the model crashed")
        self.seen += texts
        vectors = np.full((len(texts), DIMENSION), 1e-3, dtype=np.float32)
        for row, text in zip(vectors, texts, strict=True):
            for term in terms_of(text):
                row[zlib.crc32(term.encode()) % DIMENSION] += 1
        return vectors / np.linalg.norm(vectors, axis=1, keepdims=True)
