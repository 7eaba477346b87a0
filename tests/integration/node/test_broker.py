"""The broker before a model server that refuses, fails, breaks off, or is not there."""

from collections.abc import AsyncIterator
from pathlib import Path

import pytest
from pydantic import SecretStr
from support.node_lab import NodeLab
from support.process_list import processes_of
from support.running_mesh import free_port
from support.scripted_model import ScriptedModel

from mesh.contract.template import Template

KEY = "secret-of-the-operator"


@pytest.fixture
async def model() -> AsyncIterator[ScriptedModel]:
    """A model that answers in two pieces."""
    async with ScriptedModel(lambda _: ["Hello ", "you"]).serving() as model:
        yield model


@pytest.fixture
def asker(lab: NodeLab) -> Template:
    """A capability that asks the model once."""
    return lab.capability(
        """
        from worker.sdk import llm_chat_complete
        def run(intent, context):
            answer = llm_chat_complete([{"role": "user", "content": "hi"}], max_output_tokens=10_000)
            return {"text": str(answer), "output_tokens": answer.usage["output_tokens"]}
        """,
        limits="{max_attempts: 2}",
        model="{name: default, max_output_tokens: 64}",
    )


def start(lab: NodeLab, url: str) -> None:
    """A node with that model."""
    lab.node(llm_base_url=url, llm_api_key=SecretStr(KEY))


async def test_an_answer_is_streamed_metered_and_capped(lab: NodeLab, model: ScriptedModel, asker: Template) -> None:
    """The template's cap counts, whatever the worker asks for; the server's first model is `default`."""
    start(lab, model.url)
    done = await lab.run(asker)
    assert done.result == {"text": "Hello you", "output_tokens": 2}
    assert await lab.said(done) == "Hello you"
    assert done.usage is not None
    assert [done.usage[name] for name in ("input_tokens", "output_tokens", "model_calls")] == [7, 2, 1]
    assert model.requests[0]["max_tokens"] == 64
    assert model.requests[0]["model"] == "scripted"
    assert model.keys == [f"Bearer {KEY}"]


async def test_a_server_that_reports_no_usage_is_no_failure(
    lab: NodeLab, model: ScriptedModel, asker: Template
) -> None:
    """Then nothing is metered but the call."""
    model.has_usage = False
    start(lab, model.url)
    done = await lab.run(asker)
    assert done.result == {"text": "Hello you", "output_tokens": 0}
    assert done.usage is not None
    assert done.usage["model_calls"] == 1


@pytest.mark.parametrize(
    ("status", "outcome", "attempts", "text"),
    [
        (401, "failed", 1, "INTENTMESH_LLM_API_KEY"),
        (404, "failed", 1, "INTENTMESH_LLM_MODEL"),
        (400, "failed", 1, "scripted failure"),
        (429, "dead", 2, "limits the rate"),
        (500, "dead", 2, "answered 500"),
    ],
)
async def test_a_refusal_is_explained(
    lab: NodeLab, model: ScriptedModel, asker: Template, status: int, outcome: str, attempts: int, text: str
) -> None:
    """What another try may mend is tried again; the rest is said once, with the next step."""
    model.status = status
    start(lab, model.url)
    done = await lab.run(asker)
    assert (done.status, len(done.attempts), done.attempts[0].cause) == (outcome, attempts, "model_failed")
    assert done.error is not None
    assert text in f"{done.error.detail} {done.error.hint}"
    assert "hint" not in done.error.detail


@pytest.mark.parametrize("ending", ["cut", "end", "garbage", "error"])
async def test_half_an_answer_is_no_answer(lab: NodeLab, model: ScriptedModel, asker: Template, ending: str) -> None:
    """However the stream ends in the middle; the next attempt may have it whole."""
    model.ending = ending
    start(lab, model.url)
    intent = await lab.submit(asker)
    await lab.until(intent, "ready", "running", "dead")
    done = await lab.until(intent)
    assert (done.status, [attempt.cause for attempt in done.attempts]) == ("dead", ["model_failed"] * 2)
    assert await lab.said(done, 1) == await lab.said(done, 2) == "Hello you"
    model.ending = None
    assert (await lab.run(asker)).status == "succeeded"


async def test_a_server_that_is_not_there_is_named(lab: NodeLab, asker: Template) -> None:
    """With the setting to look at."""
    start(lab, f"http://127.0.0.1:{free_port()}/v1")
    dead = await lab.run(asker)
    assert (dead.status, len(dead.attempts)) == ("dead", 2)
    assert dead.error is not None
    assert "INTENTMESH_LLM_BASE_URL" in (dead.error.hint or "")


async def test_no_model_is_an_answer(lab: NodeLab, asker: Template) -> None:
    """It is said once, with what to set."""
    lab.node()
    failed = await lab.run(asker)
    assert (failed.status, failed.attempts[0].cause) == ("failed", "model_not_configured")
    assert failed.error is not None
    assert "INTENTMESH_LLM_BASE_URL" in (failed.error.hint or "")


async def test_a_handler_may_go_on_without_the_model(lab: NodeLab, model: ScriptedModel) -> None:
    """The failure is the handler's to decide about."""
    model.status = 401
    probe = lab.capability(
        """
        from worker.sdk import ModelFailed, llm_complete
        def run(intent, context):
            try:
                return llm_complete("hi")
            except ModelFailed as error:
                return {"text": f"without: {error.cause}"}
        """
    )
    start(lab, model.url)
    assert (await lab.run(probe)).result == {"text": "without: model_failed"}


async def test_a_worker_never_sees_the_key(lab: NodeLab, model: ScriptedModel, asker: Template) -> None:
    """Neither in its environment nor in that of its zygote."""
    start(lab, model.url)
    await lab.run(asker)
    for pid in processes_of(lab.folder / "node-1"):
        assert KEY.encode() not in Path(f"/proc/{pid}/environ").read_bytes()


async def test_a_slow_answer_is_cut_by_the_limit(lab: NodeLab, model: ScriptedModel) -> None:
    """A stream that drips is no way around limits.timeout_s."""
    model.script = lambda _: ["x"] * 1000
    model.pause_s = 0.05
    probe = lab.capability(
        "from worker.sdk import llm_complete\ndef run(intent, context):\n    return llm_complete('hi')\n",
        limits="{timeout_s: 1.5, max_attempts: 1}",
    )
    start(lab, model.url)
    dead = await lab.run(probe)
    assert dead.attempts[0].cause == "timed_out"
