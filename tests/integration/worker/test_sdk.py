"""The handler authors' face, spoken with a node that answers."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from support.capability_files import SHIPPED, claim_of, messages_of, write_capability
from support.worker_lab import Lab

from mesh.contract.errors import Cause
from mesh.contract.messages import Claim, ToolRecord, Usage
from worker import frames as wire
from worker.capability_folder import CapabilityFolder, load_capability
from worker.frames import Frame
from worker.spawner import Worker

Answer = Callable[[Frame], list[dict[str, Any]]]


def model_says(text: str) -> Answer:
    """Return a node whose model answers every chat with `text`, in two pieces."""

    def answer(frame: Frame) -> list[dict[str, Any]]:
        match frame:
            case wire.LlmChat():
                half = len(text) // 2
                usage = Usage(input_tokens=10, output_tokens=3, model_calls=1)
                return [
                    wire.llm_delta(frame.request_id, text[:half]),
                    wire.llm_delta(frame.request_id, text[half:]),
                    wire.llm_result(frame.request_id, text, usage=usage, finish_reason="stop"),
                ]
            case wire.ToolStarted() | wire.ToolFinished():
                return [wire.ack(frame.call_id)]
            case _:
                return []

    return answer


async def talk(lab: Lab, what: str | CapabilityFolder, answer: Answer, claim: Claim | None = None) -> list[Frame]:
    """Run one intent and answer its frames; return them all."""
    worker: Worker = await lab.begin(lab.zygote(what), claim)
    frames = []
    async for frame in worker.frames():
        frames.append(frame)
        for reply in answer(frame):
            await worker.send(reply)
    await worker.wait()
    return frames


def result_of(frames: list[Frame]) -> Any:
    """Return the result; fail with all frames when there is none."""
    last = frames[-1]
    assert isinstance(last, wire.Result), frames
    return last.result


async def test_a_completion_is_its_text_with_its_usage(lab: Lab) -> None:
    """It can be used as a string; pieces reach `on_delta`; the request says what was asked for."""
    handler = """
        from worker.sdk import llm_chat_complete, llm_complete

        def run(intent, context):
            pieces = []
            first = llm_complete("hi", max_output_tokens=5, temperature=0.5, on_delta=pieces.append)
            second = llm_chat_complete([{"role": "user", "content": "ho", "turn": 3}], stream_to_caller=False)
            return [first.upper(), first.usage, first.finish_reason, pieces, second]
    """
    frames = await talk(lab, handler, model_says("hello"))
    usage = {"input_tokens": 10, "output_tokens": 3}
    assert result_of(frames) == ["HELLO", usage, "stop", ["he", "llo"], "hello"]
    first, second = [frame for frame in frames if isinstance(frame, wire.LlmChat)]
    assert (first.max_output_tokens, first.temperature, first.stream_to_caller) == (5, 0.5, True)
    assert (second.messages, second.stream_to_caller) == ([{"role": "user", "content": "ho"}], False)
    assert first.request_id != second.request_id


async def test_a_model_that_fails_fails_the_attempt_with_its_cause(lab: Lab) -> None:
    """Not caught, the error frame carries cause, detail and hint; caught, the handler goes on."""

    def answer(frame: Frame) -> list[dict[str, Any]]:
        assert isinstance(frame, wire.LlmChat | wire.Error | wire.Result)
        if not isinstance(frame, wire.LlmChat):
            return []
        return [
            wire.llm_error(frame.request_id, cause=Cause.MODEL_NOT_CONFIGURED, detail="no model", hint="set LLM_MODEL")
        ]

    asks = "from worker.sdk import ModelFailed, llm_complete\n\ndef run(i, c):\n    return llm_complete('x')\n"
    error = (await talk(lab, asks, answer))[-1]
    assert isinstance(error, wire.Error)
    assert (error.cause, error.detail, error.hint) == (Cause.MODEL_NOT_CONFIGURED, "no model", "set LLM_MODEL")
    catches = (
        "from worker.sdk import ModelFailed, llm_complete\n\n"
        "def run(i, c):\n    try:\n        llm_complete('x')\n    except ModelFailed as error:\n        return error.cause\n"
    )
    assert result_of(await talk(lab, catches, answer)) == "model_not_configured"


async def test_threads_ask_the_model_at_once(lab: Lab) -> None:
    """Each thread gets the answer to its own question, in whatever order the answers come."""
    handler = """
        from concurrent.futures import ThreadPoolExecutor
        from worker.sdk import llm_complete

        def run(intent, context):
            with ThreadPoolExecutor(4) as pool:
                return list(pool.map(llm_complete, ["a", "b", "c", "d"]))
    """
    asked: list[wire.LlmChat] = []

    def answer(frame: Frame) -> list[dict[str, Any]]:
        if not isinstance(frame, wire.LlmChat):
            return []
        asked.append(frame)
        if len(asked) < 4:
            return []
        return [
            wire.llm_result(one.request_id, one.messages[0]["content"] * 2, usage=Usage(), finish_reason="stop")
            for one in reversed(asked)
        ]

    assert result_of(await talk(lab, handler, answer)) == ["aa", "bb", "cc", "dd"]


async def test_a_tool_call_is_written_before_and_after_its_effect(lab: Lab) -> None:
    """started, effect, finished; an equal call later is another call."""
    handler = """
        from worker.sdk import call_tool, delta, tool_call

        def run(intent, context):
            with tool_call("mail", {"to": "a"}) as call:
                delta("effect 1")
                call.result = {"sent": True}
            second = call_tool("mail", {"to": "a"}, lambda: delta("effect 2") or "again")
            return [call.result, second]
    """
    frames = await talk(lab, handler, model_says(""))
    assert result_of(frames) == [{"sent": True}, "again"]
    assert [frame.kind for frame in frames] == ["tool.started", "delta", "tool.finished"] * 2 + ["result"]
    started = [frame for frame in frames if isinstance(frame, wire.ToolStarted)]
    assert (started[0].name, started[0].arguments) == ("mail", {"to": "a"})
    assert len({frame.call_id for frame in started}) == 2


TWO_CALLS = """
    from worker.sdk import call_tool

    def run(intent, context):
        repeat = intent.payload.get("repeat", False)
        return [call_tool(name, [1, "é"], lambda: name + " now", repeat_uncertain=repeat) for name in ("a", "b")]
"""


async def test_another_attempt_knows_the_calls_of_the_first(lab: Lab) -> None:
    """A finished call is not done again; an uncertain one stops the attempt, unless a repeat is harmless."""
    first = await talk(lab, TWO_CALLS, model_says(""))
    assert result_of(first) == ["a now", "b now"]
    ids = [frame.call_id for frame in first if isinstance(frame, wire.ToolStarted)]
    records = [
        ToolRecord(call_id=ids[0], name="a", status="finished", result="a then", attempt=1),
        ToolRecord(call_id=ids[1], name="b", status="uncertain", attempt=1),
    ]
    stopped = await talk(lab, TWO_CALLS, model_says(""), claim_of(attempt=2, tool_records=records))
    error = stopped[-1]
    assert isinstance(error, wire.Error)
    assert error.is_retryable is False
    assert "'b'" in error.detail
    assert len(stopped) == 1, "nothing was begun"
    claim = claim_of({"repeat": True}, attempt=2, tool_records=records)
    assert result_of(await talk(lab, TWO_CALLS, model_says(""), claim)) == ["a then", "b now"]


async def test_thread_updates_progress_and_logs(lab: Lab) -> None:
    """Each becomes its frame; what is not given is not sent; a null inside a mapping is."""
    handler = """
        from worker.sdk import delta, log, progress, update_thread

        def run(intent, context):
            progress(0.5, "half")
            log("hm", level="warning")
            delta("x" * 250_000)
            update_thread(messages=[*context, {"role": "assistant", "content": "a"}], pins={"name": "Ada", "old": None})
            update_thread(contextual_memory={"topic": None}, plan={"steps": []}, title="t")
    """
    claim = claim_of(messages=messages_of("m"), receipt={"messages": [{"turn_number": 1}]})
    folder = load_capability(
        write_capability(lab.root / "c", "probe", {"handler.py": handler}, supports_multi_turn="true")
    )
    frames = await talk(lab, folder, model_says(""), claim)
    assert frames[0] == wire.Progress(kind="progress", fraction=0.5, note="half")
    assert frames[1] == wire.Log(kind="log", level="warning", text="hm")
    assert [len(frame.text) for frame in frames if isinstance(frame, wire.Delta)] == [100_000, 100_000, 50_000]
    first, second = [frame for frame in frames if isinstance(frame, wire.ThreadUpdated)]
    assert first.messages is not None
    assert [message.wire() for message in first.messages] == [
        {"role": "user", "content": "m"},
        {"role": "assistant", "content": "a"},
    ]
    assert first.pins == {"name": "Ada", "old": None}
    assert second.contextual_memory == {"topic": None}
    assert second.messages is None
    merged = wire.merge_updates(first.update(), second.update())
    assert (merged.pins, merged.title, merged.plan) == ({"name": "Ada", "old": None}, "t", {"steps": []})
    assert result_of(frames) is None


@pytest.mark.parametrize("call", ["progress(1.5)", "log('x', level='loud')", "update_thread(plan=['no'])"])
async def test_a_call_that_the_protocol_refuses(lab: Lab, call: str) -> None:
    """The node's reader names the field; nothing is silently dropped."""
    with pytest.raises(wire.FrameInvalid):
        await lab.run(f"from worker.sdk import *\n\ndef run(i, c):\n    {call}\n")


async def test_chat_sends_system_prompt_context_and_message(lab: Lab) -> None:
    """The shipped chat streams, and its messages stand in the right order."""
    claim = claim_of({"text": "my name?"}, messages=messages_of("I am Ada", "Hello Ada"))
    frames = await talk(lab, load_capability(SHIPPED / "chat"), model_says("Ada."), claim)
    assert result_of(frames) == {"text": "Ada."}
    chat = frames[0]
    assert isinstance(chat, wire.LlmChat)
    assert chat.stream_to_caller
    assert [message["role"] for message in chat.messages] == ["system", "user", "assistant", "user"]
    assert chat.messages[-1]["content"] == "my name?"
    assert "helpful assistant" in chat.messages[0]["content"]


async def test_summarize_renders_its_prompts(lab: Lab) -> None:
    """A prompt capability needs no code; what a caller writes is never a template."""
    claim = claim_of({"text": "A {{ 7 * 7 }} b", "sentences": 2})
    frames = await talk(lab, load_capability(SHIPPED / "summarize"), model_says("short"), claim)
    assert result_of(frames) == {"text": "short"}
    chat = frames[0]
    assert isinstance(chat, wire.LlmChat)
    assert [message["role"] for message in chat.messages] == ["system", "user"]
    assert "at most 2 sentence(s)" in chat.messages[1]["content"]
    assert chat.messages[1]["content"].endswith("A {{ 7 * 7 }} b")


async def test_a_prompt_that_needs_what_is_not_there(lab: Lab, tmp_path: Path) -> None:
    """An undefined name refuses the intent: another attempt would fail the same way."""
    folder = load_capability(
        write_capability(tmp_path, "probe", {"prompts/user.md": "{{ payload.colour }}"}, runtime="prompt")
    )
    error = (await talk(lab, folder, model_says("")))[-1]
    assert isinstance(error, wire.Error)
    assert error.cause is Cause.HANDLER_REFUSED
    assert "colour" in error.detail


async def test_a_prompt_cannot_reach_python(lab: Lab, tmp_path: Path) -> None:
    """The sandbox refuses what leads out of it."""
    prompt = "{{ payload.__class__.__mro__[1].__subclasses__() }}"
    folder = load_capability(write_capability(tmp_path, "probe", {"prompts/user.md": prompt}, runtime="prompt"))
    error = (await talk(lab, folder, model_says("")))[-1]
    assert isinstance(error, wire.Error)
    assert error.cause is Cause.HANDLER_REFUSED


async def test_recall_and_echo_run(lab: Lab) -> None:
    """The shipped capabilities without a model, in real workers."""
    receipt = {"messages": [{"turn_number": 1}, {"turn_number": 1}]}
    claim = claim_of({"text": "What is my name?"}, messages=messages_of("My name is Ada.", "Noted."), receipt=receipt)
    frames = await talk(lab, load_capability(SHIPPED / "recall"), model_says(""), claim)
    assert result_of(frames) == {
        "text": "In turn 1 you said: My name is Ada.",
        "found": True,
        "turn_number": 1,
        "quote": "My name is Ada.",
    }
    payload = {"a": [1, 2.5, None, True, "ü"]}
    assert result_of(await talk(lab, load_capability(SHIPPED / "echo"), model_says(""), claim_of(payload))) == payload
