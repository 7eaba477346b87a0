"""`python -m ledger.embedder NAME PARENT_PID`: the embedding model as a process. Started by EmbedderProcess only."""

import sys

from ledger.embedder.process import serve

if __name__ == "__main__":
    if len(sys.argv) != 3:
        sys.exit("usage: python -m ledger.embedder MODEL PARENT_PID (the ledger starts this by itself)")
    serve(sys.argv[1], int(sys.argv[2]))
