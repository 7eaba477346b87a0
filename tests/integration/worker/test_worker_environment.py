"""What a worker finds around it: its intent, its context, an empty directory, and nothing of the node's."""

import json
import os
from typing import Any

import pytest
from support.capability_files import claim_of, messages_of
from support.worker_lab import Lab

from mesh.contract.messages import ContextMessage

SHOW_ENVIRONMENT = """
    import os
    from pathlib import Path

    def run(intent, context):
        initial = Path("/proc/self/environ").read_bytes().decode()
        return {"environment": dict(os.environ), "initial": initial, "cwd": os.getcwd(), "files": os.listdir()}
"""
READ_ALL = """
    import json, os

    def read(name):
        with os.fdopen(os.dup(int(os.environ[name])), "rb") as file:
            return file.read().decode()

    def run(intent, context):
        return {
            "context_bytes": len(read("THREAD_CONTEXT_FD").encode()),
            "is_context_whole": json.loads(read_again("THREAD_CONTEXT_FD")) == context,
            "payload_length": len(json.loads(read("INTENT_PAYLOAD_FD"))["text"]),
            "environment": {name: len(value.encode()) for name, value in os.environ.items()},
            "newest": json.loads(os.environ["THREAD_CONTEXT_JSON"])[-1:],
            "child": os.spawnv(os.P_WAIT, "/bin/true", ["true"]),
        }

    def read_again(name):
        os.lseek(int(os.environ[name]), 0, 0)
        return read(name)
"""


async def test_context_and_intent_reach_the_worker_through_its_environment(lab: Lab) -> None:
    """Every documented variable holds what the claim says; the context is an array of role and content."""
    claim = claim_of({"text": "now"}, messages=messages_of("one", "two"), attempt=2, deadline_ms=1_900_000_000_000)
    outcome = await lab.run(SHOW_ENVIRONMENT, claim, supports_multi_turn="true")
    environment = outcome.result["environment"]
    assert json.loads(environment["THREAD_CONTEXT_JSON"]) == [
        {"role": "user", "content": "one"},
        {"role": "assistant", "content": "two"},
    ]
    assert json.loads(environment["INTENT_PAYLOAD"]) == {"text": "now"}
    assert environment["INTENT_ID"] == "intent-1"
    assert environment["INTENT_TYPE"] == "probe"
    assert environment["THREAD_ID"] == "thread-1"
    assert environment["TURN_ATTEMPT"] == "2"
    assert environment["DEADLINE_UNIX_MS"] == "1900000000000"
    assert environment["MESH_FD"] == "3"
    assert "THREAD_CONTEXT_TRUNCATED" not in environment
    assert "INTENT_PAYLOAD_TRUNCATED" not in environment


async def test_nothing_of_the_nodes_environment_reaches_a_worker(lab: Lab, monkeypatch: pytest.MonkeyPatch) -> None:
    """Neither a setting of the mesh nor any other secret is in os.environ or in the process's first environment."""
    monkeypatch.setenv("INTENTMESH_MESH_TOKEN", "canary-token")
    monkeypatch.setenv("INTENTMESH_LLM_API_KEY", "canary-key")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "canary-cloud")
    outcome = await lab.run(SHOW_ENVIRONMENT)
    both = json.dumps(outcome.result["environment"]) + outcome.result["initial"]
    assert "INTENTMESH" not in both
    assert "canary" not in both
    assert set(outcome.result["environment"]) == {
        *("PATH", "LANG", "HOME", "TMPDIR", "CAPABILITY_DIR", "MESH_FD", "THREAD_CONTEXT_FD", "INTENT_PAYLOAD_FD"),
        *("INTENT_ID", "INTENT_TYPE", "INTENT_PAYLOAD", "THREAD_ID", "THREAD_CONTEXT_JSON", "TURN_ATTEMPT"),
        *("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "TOKENIZERS_PARALLELISM", "PYTHONDONTWRITEBYTECODE"),
        *(("TZ",) if "TZ" in os.environ else ()),
    }


async def test_each_worker_has_an_empty_directory_of_its_own(lab: Lab) -> None:
    """Working directory, HOME and TMPDIR are one fresh directory, another one for the next worker."""
    zygote = lab.zygote(SHOW_ENVIRONMENT)
    first, second = (await lab.run(zygote)).result, (await lab.run(zygote)).result
    assert first["files"] == []
    assert first["cwd"] == first["environment"]["HOME"] == first["environment"]["TMPDIR"]
    assert first["cwd"] != second["cwd"]


async def test_a_worker_holds_no_descriptor_but_its_own(lab: Lab) -> None:
    """Null device, two pipes, the frame socket and two memory files; not even what the import had opened."""
    handler = """
        import os, socket

        KEPT = open("/etc/hostname")
        CONNECTION = socket.socket()

        def run(intent, context):
            return {fd: os.readlink(f"/proc/self/fd/{fd}") for fd in os.listdir("/proc/self/fd")
                    if os.path.exists(f"/proc/self/fd/{fd}") or os.path.islink(f"/proc/self/fd/{fd}")}
    """
    targets = (await lab.run(handler)).result
    kept = {fd: target.partition(":")[0] for fd, target in targets.items() if target != "/dev/null"}
    kept = {fd: target for fd, target in kept.items() if not target.startswith("/proc/")}
    assert kept == {"1": "pipe", "2": "pipe", "3": "socket", "4": "/memfd", "5": "/memfd"}
    assert targets["0"] == "/dev/null"


@pytest.mark.parametrize("excess", [0, 1])
async def test_context_at_the_limit_of_one_variable(lab: Lab, excess: int) -> None:
    """131,051 bytes stand in the environment, one more is cut to the newest part; the descriptor holds all."""
    empty = len(json.dumps([{"role": "user", "content": ""}], separators=(",", ":")))
    message = ContextMessage(role="user", content="x" * (131_051 - empty + excess))
    outcome = await lab.run(READ_ALL, claim_of({"text": ""}, messages=[message]), supports_multi_turn="true")
    assert outcome.result["context_bytes"] == 131_051 + excess
    assert outcome.result["is_context_whole"]
    environment = outcome.result["environment"]
    assert environment["THREAD_CONTEXT_JSON"] == 131_051
    assert ("THREAD_CONTEXT_TRUNCATED" in environment) == bool(excess)
    assert outcome.result["child"] == 0, "a program can be started with this environment"
    assert outcome.result["newest"][0]["content"].startswith("[cut] ") == bool(excess)


async def test_context_far_larger_than_the_environment(lab: Lab) -> None:
    """Of 3 MB the newest messages that fit stand in the environment, whole; the handler gets everything."""
    messages = messages_of(*(f"{number}:" + "ü" * 15_000 for number in range(100)))
    outcome = await lab.run(READ_ALL, claim_of({"text": "p" * 500_000}, messages=messages), supports_multi_turn="true")
    assert outcome.result["is_context_whole"]
    assert outcome.result["payload_length"] == 500_000
    assert outcome.result["environment"]["THREAD_CONTEXT_JSON"] <= 131_051
    assert outcome.result["environment"]["THREAD_CONTEXT_TRUNCATED"] == 1
    assert outcome.result["newest"][0]["content"] == messages[-1].content
    assert "INTENT_PAYLOAD" not in outcome.result["environment"]
    assert outcome.result["environment"]["INTENT_PAYLOAD_TRUNCATED"] == 1


async def test_without_multi_turn_a_worker_gets_no_context(lab: Lab) -> None:
    """The template decides, whatever the claim holds."""
    handler = "import os\n\ndef run(intent, context):\n    return [context, os.environ['THREAD_CONTEXT_JSON']]\n"
    outcome = await lab.run(handler, claim_of(messages=messages_of("one")))
    assert outcome.result == [[], "[]"]


async def test_the_handler_sees_turn_numbers_and_its_intent(lab: Lab) -> None:
    """`turn` comes from the receipt; the intent carries what the claim says."""
    handler = """
        def run(intent, context):
            return {"turns": [message.get("turn") for message in context], "metadata": intent.metadata,
                    "attempt": intent.attempt, "turn_number": intent.turn_number, "left": intent.seconds_left,
                    "shown": repr(intent)}
    """
    receipt: dict[str, Any] = {"messages": [{"turn_number": None}, {"turn_number": 4}]}
    claim = claim_of(messages=messages_of("a", "b"), receipt=receipt, metadata={"from": "test"}, turn_number_next=5)
    result = (await lab.run(handler, claim, supports_multi_turn="true")).result
    assert result["turns"] == [None, 4]
    assert result["metadata"] == {"from": "test"}
    assert (result["attempt"], result["turn_number"], result["left"]) == (1, 5, None)
    assert "turn 5" in result["shown"]


async def test_children_do_not_share_their_chance(lab: Lab) -> None:
    """What `random` and numpy yield differs from worker to worker, although the import was one."""
    handler = """
        import random
        import numpy

        random.seed(1)
        numpy.random.seed(1)

        def run(intent, context):
            return [random.random(), numpy.random.random()]
    """
    zygote = lab.zygote(handler, standby=3)
    first, second = (await lab.run(zygote)).result, (await lab.run(zygote)).result
    assert first[0] != second[0]
    assert first[1] != second[1]
