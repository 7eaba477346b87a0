"""What a handler imports. A capability of `runtime: python` is one function in handler.py:

    from worker.sdk import Context, Intent, llm_chat_complete

    def run(intent: Intent, context: Context) -> dict:
        answer = llm_chat_complete([*context, {"role": "user", "content": intent.payload["text"]}])
        return {"text": answer}

`run` is called once, in a process of its own that ends with it. Its first argument is the intent; the second is
the conversation so far, oldest first, without the current message (empty when template.yaml does not say
`supports_multi_turn: true`). What it returns is the intent's result and must be JSON: dict, list, str, int,
float, bool, None. `async def run` works too.

    say something while working   delta("piece of the answer"), progress(0.5, "half way"), log("for operators")
    ask a model                   llm_complete("prompt"), llm_chat_complete([messages])
    cause an effect once          call_tool("send_mail", {"to": "a@b.c"}, send)
    change the thread             update_thread(plan=…, contextual_memory=…, pins=…, messages=…)
    say no, for good              raise Refused("why")

Any other exception fails the attempt, which is tried again (limits.max_attempts). What is printed goes to the
attempt's log. Open files, connections and threads inside `run`, never when handler.py is imported: the import
happens once, in a process that is copied for each intent.

Must never import more than the standard library, and never hold a secret: models and keys are the node's.
"""

import itertools
import json
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, TypeVar

from worker.channel import Channel

__all__ = [
    "Completion",
    "Context",
    "Intent",
    "ModelFailed",
    "Refused",
    "ToolCall",
    "UncertainToolCall",
    "call_tool",
    "delta",
    "llm_chat_complete",
    "llm_complete",
    "log",
    "progress",
    "tool_call",
    "update_thread",
]

# Messages, oldest first: {"role", "content"}, "name" when the speaker has one. Where they are known: "turn", its number;
# "similarity", how near its meaning is to the current message's (cosine, -1 to 1); "relevance", how it ranks in the
# whole thread (standard deviations above its mean, words and meaning together).
Context = list[dict[str, Any]]
_T = TypeVar("_T")
_DELTA_CHARACTERS_MAX = 100_000  # a frame takes 1 MiB, and one character at most 6 bytes of it

_REMARKS = frozenset({"turn", "similarity", "relevance"})

_channel: Channel | None = None
_intent: "Intent | None" = None
_request_numbers = itertools.count(1)
_call_numbers: dict[str, "itertools.count[int]"] = {}


class Refused(Exception):
    """Raise it to say no to an intent: it fails with this text and is not tried again."""


class ModelFailed(Exception):
    """The model gave no answer. `cause` is `model_failed` or `model_not_configured`; `hint` says what to do."""

    def __init__(self, detail: str, *, cause: str = "model_failed", hint: str | None = None) -> None:
        super().__init__(detail)
        self.detail = detail
        self.cause = cause
        self.hint = hint


class UncertainToolCall(Exception):
    """An earlier attempt began this call and nobody knows whether its effect happened.

    Look whether it did, then call again with `repeat_uncertain=True` or go on without.
    """

    def __init__(self, name: str, arguments: Any) -> None:
        super().__init__(f"an earlier attempt began the tool call {name!r} and did not report its end")
        self.name = name
        self.arguments = arguments


class Intent:
    """What the worker has been asked to do. All of it can be read, none of it does anything."""

    def __init__(self, claim: dict[str, Any]) -> None:
        self.intent_id: str = claim["intent_id"]
        self.type: str = claim["capability"]
        """Name of the capability."""
        self.payload: dict[str, Any] = claim["payload"]
        """What the caller sent; it is valid against the template's input_schema."""
        self.metadata: dict[str, Any] = claim["metadata"]
        """What the caller wants kept with the intent."""
        self.thread_id: str = claim["thread_id"]
        self.turn_number: int = claim["turn_number_next"]
        """The number that this turn gets in its thread, from 1."""
        self.attempt: int = claim["attempt"]
        """1 for the first attempt."""
        self.max_attempts: int = claim["max_attempts"]
        self.deadline_unix_ms: int | None = claim["deadline_ms"]
        """When this attempt must be done, in milliseconds since 1970, or None."""
        self.supports_multi_turn: bool = claim["supports_multi_turn"]
        self.tool_records: list[dict[str, Any]] = claim["tool_records"]
        """Tool calls of earlier attempts: call_id, name, arguments, status (finished, uncertain), result, attempt."""

    @property
    def seconds_left(self) -> float | None:
        """Seconds until the deadline, never below 0; None when there is none."""
        if self.deadline_unix_ms is None:
            return None
        return max(0.0, self.deadline_unix_ms / 1000 - time.time())

    def __repr__(self) -> str:
        return f"Intent({self.type} {self.intent_id}, turn {self.turn_number}, attempt {self.attempt})"


class Completion(str):
    """A model's answer: the text itself, with `usage` (input_tokens, output_tokens) and `finish_reason`."""

    usage: dict[str, int]
    finish_reason: str

    def __new__(cls, text: str, *, usage: dict[str, int] | None = None, finish_reason: str = "stop") -> "Completion":
        self = super().__new__(cls, text)
        self.usage = usage or {}
        self.finish_reason = finish_reason
        return self


def connect(channel: Channel, intent: Intent) -> None:
    """Bind this module to the worker's frame socket. The worker does so itself, before it calls `run`."""
    global _channel, _intent
    _channel, _intent = channel, intent
    _call_numbers.clear()


def _send(frame: dict[str, Any]) -> None:
    _connected().send(frame)


def _connected() -> Channel:
    if _channel is None:
        raise RuntimeError("worker.sdk speaks to the node only inside run(intent, context), not at import")
    return _channel


def delta(text: str) -> None:
    """Stream a piece of the answer to whoever listens. It adds nothing to the result: return the whole."""
    for start in range(0, len(text), _DELTA_CHARACTERS_MAX):
        _send({"kind": "delta", "text": text[start : start + _DELTA_CHARACTERS_MAX]})


def progress(fraction: float | None = None, note: str | None = None) -> None:
    """Say how far the work is. `fraction` runs from 0 to 1."""
    _send({"kind": "progress", "fraction": fraction, "note": note})


def log(text: str, *, level: str = "info") -> None:
    """Write a line to the node's log. `level`: debug, info, warning or error. Never log what people wrote."""
    _send({"kind": "log", "level": level, "text": text})


def update_thread(
    *,
    messages: Context | None = None,
    plan: dict[str, Any] | None = None,
    contextual_memory: dict[str, Any] | None = None,
    tool_calls: dict[str, Any] | None = None,
    pins: dict[str, str | None] | None = None,
    title: str | None = None,
) -> None:
    """Change the thread together with the result: both are committed, or neither.

    Without it the turn is the payload's text and the result's text. What is left out stays as it is.

    Args:
        messages: what this turn adds to the conversation, instead of that pair.
        plan: the plan from now on, for example {"steps": […], "completed": […]}.
        contextual_memory: merged key by key; a value None removes the key.
        tool_calls: last tool calls, id to {"name", "arguments", "result"}; merged key by key.
        pins: facts that every later context holds word for word; a text None removes the pin.
        title: the thread's title.
    """
    if messages is not None:
        messages = _without_remarks(messages)
    fields = {
        "messages": messages,
        "plan": plan,
        "contextual_memory": contextual_memory,
        "tool_calls": tool_calls,
        "pins": pins,
        "title": title,
    }
    _send({"kind": "thread.updated", **{name: value for name, value in fields.items() if value is not None}})


def llm_complete(
    prompt: str,
    *,
    stream_to_caller: bool = True,
    max_output_tokens: int | None = None,
    temperature: float | None = None,
    on_delta: Callable[[str], None] | None = None,
) -> Completion:
    """Return the model's answer to one prompt. As `llm_chat_complete` with a single user message."""
    return llm_chat_complete(
        [{"role": "user", "content": prompt}],
        stream_to_caller=stream_to_caller,
        max_output_tokens=max_output_tokens,
        temperature=temperature,
        on_delta=on_delta,
    )


def llm_chat_complete(
    messages: Context,
    *,
    stream_to_caller: bool = True,
    max_output_tokens: int | None = None,
    temperature: float | None = None,
    on_delta: Callable[[str], None] | None = None,
) -> Completion:
    """Return the model's answer to a conversation. The node makes the call; no key is in this process.

    Args:
        messages: {"role", "content"} dicts, oldest first; the context can be put in as it is.
        stream_to_caller: whether the caller sees the answer as it is written, as with `delta`.
        max_output_tokens: at most this many; the template's `model` says the default and the upper bound.
        temperature: 0 to 2; the template's by default.
        on_delta: called with each piece as it arrives.

    Raises: ModelFailed. Not caught, it fails the attempt with its cause.
    """
    channel = _connected()
    request_id = f"chat-{next(_request_numbers)}"
    request = {
        "kind": "llm.chat",
        "request_id": request_id,
        "messages": _without_remarks(messages),
        "stream_to_caller": stream_to_caller,
        "max_output_tokens": max_output_tokens,
        "temperature": temperature,
    }
    channel.open_inbox(request_id)
    try:
        channel.send(request)
        while True:
            answer = channel.receive(request_id)
            match answer["kind"]:
                case "llm.delta" if on_delta is not None:
                    on_delta(answer["text"])
                case "llm.result":
                    return Completion(answer["text"], usage=answer["usage"], finish_reason=answer["finish_reason"])
                case "llm.error":
                    raise ModelFailed(answer["detail"], cause=answer["cause"], hint=answer.get("hint"))
    finally:
        channel.close_inbox(request_id)


class ToolCall:
    """One call of a tool. Set `result` (JSON) before the `with` block ends."""

    def __init__(self, call_id: str, name: str, arguments: Any, *, is_finished: bool, result: Any) -> None:
        self.call_id = call_id
        self.name = name
        self.arguments = arguments
        self.is_finished = is_finished
        """True when an earlier attempt finished it: `result` is what it returned then. Do nothing again."""
        self.result = result


@contextmanager
def tool_call(name: str, arguments: Any = None, *, repeat_uncertain: bool = False) -> Iterator[ToolCall]:
    """Wrap an effect in the write-ahead log, so that another attempt knows about it.

        with tool_call("charge", {"order": 7}) as call:
            if not call.is_finished:
                call.result = charge(7)

    The block starts when the ledger has written that the call began, and ends when it has written its result.
    A call of an earlier attempt is recognised by its name, its arguments and its place among equal calls.

    An exception in the block leaves the call without an end: catch what proves that nothing happened, and set
    a result that says so.

    Raises: UncertainToolCall when an earlier attempt began the call without finishing it, unless
    `repeat_uncertain` says that doing it twice is harmless.
    """
    call_id = _call_id(name, arguments)
    record = _earlier(call_id)
    if record is not None and record["status"] == "finished":
        yield ToolCall(call_id, name, arguments, is_finished=True, result=record["result"])
        return
    if record is not None and not repeat_uncertain:
        raise UncertainToolCall(name, arguments)
    call = ToolCall(call_id, name, arguments, is_finished=False, result=None)
    _send_and_wait({"kind": "tool.started", "call_id": call_id, "name": name, "arguments": arguments}, call_id)
    # An exception in the block leaves the call without an end, which is what `uncertain` means.
    yield call
    _send_and_wait({"kind": "tool.finished", "call_id": call_id, "result": call.result}, call_id)


def call_tool(name: str, arguments: Any, effect: Callable[[], _T], *, repeat_uncertain: bool = False) -> _T:
    """Return effect(), done at most once over all attempts; a finished call returns its recorded result.

    Raises: UncertainToolCall, see `tool_call`.
    """
    with tool_call(name, arguments, repeat_uncertain=repeat_uncertain) as call:
        if not call.is_finished:
            call.result = effect()
        result: _T = call.result
    return result


def _send_and_wait(frame: dict[str, Any], ref: str) -> None:
    channel = _connected()
    channel.open_inbox(ref)
    try:
        channel.send(frame)
        channel.receive(ref)
    finally:
        channel.close_inbox(ref)


def _call_id(name: str, arguments: Any) -> str:
    """Name a call so that another attempt which does the same names it the same."""
    import hashlib  # only here: it would cost every worker memory

    text = json.dumps([name, arguments], sort_keys=True, separators=(",", ":"), allow_nan=False)
    digest = hashlib.sha256(text.encode()).hexdigest()[:24]
    number = next(_call_numbers.setdefault(digest, itertools.count(1)))
    return f"{digest}-{number}"


def _earlier(call_id: str) -> dict[str, Any] | None:
    records = _intent.tool_records if _intent is not None else []
    matching = [record for record in records if record["call_id"] == call_id]
    finished = [record for record in matching if record["status"] == "finished"]
    best = finished or matching
    return best[-1] if best else None


def _without_remarks(messages: Context) -> Context:
    """Return messages as a model or the ledger takes them."""
    return [{key: value for key, value in message.items() if key not in _REMARKS} for message in messages]
