"""A conversation at the keyboard, against a client that plays the gateway."""

from collections.abc import Iterator
from typing import Any

import pytest

from cli.chat import Conversation
from cli.client import StreamEvent
from cli.failures import CallFailed


class Gateway:
    """Plays the gateway: `events` are streamed, `outcome` is what the intent has become."""

    def __init__(self, *events: StreamEvent | type[BaseException], **outcome: Any) -> None:
        self.calls: list[tuple[str, str, Any]] = []
        self.outcome = {"intent_id": "i", "status": "succeeded", "result": {"text": "whole answer"}} | outcome
        self._events = list(events)

    def submit(self, body: dict[str, Any]) -> dict[str, Any]:
        self.calls.append(("SUBMIT", "/intent", body))
        return {"intent_id": "i", "thread_id": body.get("thread_id", "made")}

    def events(self, path: str, *, after: int = 0) -> Iterator[StreamEvent]:
        self.calls.append(("EVENTS", path, after))
        while self._events:
            event = self._events.pop(0)
            if not isinstance(event, StreamEvent):
                raise event
            yield event

    def get(self, path: str, **parameters: Any) -> Any:
        self.calls.append(("GET", path, parameters))
        match path:
            case "/capabilities":
                return {"items": [{"name": "chat"}, {"name": "recall"}]}
            case "/threads/t":
                return {"status": "idle", "turn_count": 2, "pins": [{"key": "k", "text": "a fact"}]}
            case "/threads/t/context":
                return {"messages": [], "receipt": {"tokens": 0, "budget": 2000}}
        return self.outcome

    def pages(self, path: str, *, count_max: int) -> list[dict[str, Any]]:
        if "absent" in path:
            raise CallFailed("not_found", "there is no thread 'absent'", status=404)
        message = {"role": "user", "content": "said before", "name": None}
        return [{"turn_number": number, "mark": None, "messages": [message]} for number in range(1, 13)]

    def post(self, path: str, body: Any = None) -> Any:
        self.calls.append(("POST", path, body))
        return {"status": "cancel_requested"}

    def put(self, path: str, body: Any) -> None:
        self.calls.append(("PUT", path, body))

    def delete(self, path: str) -> None:
        self.calls.append(("DELETE", path, None))


def event(number: int, kind: str, **data: Any) -> StreamEvent:
    """One event of the intent."""
    return StreamEvent(number, kind, "i", data)


def conversation_with(gateway: Gateway, thread_id: str | None = None, capability: str = "chat") -> Conversation:
    """A conversation whose gateway is played."""
    return Conversation(gateway, capability, thread_id)  # type: ignore[arg-type]


def test_deltas_appear_and_the_result_is_not_said_twice(capsys: pytest.CaptureFixture[str]) -> None:
    """What was streamed is the answer; a second turn goes to the thread that the first one made."""
    gateway = Gateway(event(3, "delta", text="whole "), event(4, "delta", text="answer"), event(5, "result.committed"))
    conversation = conversation_with(gateway)
    conversation.take("hello")
    conversation.take("again")
    assert capsys.readouterr().out.startswith("whole answer\n")
    bodies = [body for kind, _, body in gateway.calls if kind == "SUBMIT"]
    assert bodies[0] == {"type": "chat", "payload": {"text": "hello"}}
    assert bodies[1]["thread_id"] == "made"


def test_an_answer_without_deltas_is_printed_from_the_result(capsys: pytest.CaptureFixture[str]) -> None:
    """A capability that does not stream can be talked to as well."""
    conversation_with(Gateway(event(1, "result.committed"))).take("hello")
    assert capsys.readouterr().out == "whole answer\n"


def test_ctrl_c_cancels_the_turn_and_listens_on(capsys: pytest.CaptureFixture[str]) -> None:
    """The program goes on; the cancelled turn's end is awaited from the last event that was seen."""
    gateway = Gateway(
        event(7, "delta", text="par"), KeyboardInterrupt, event(8, "intent.cancelled"), status="cancelled"
    )
    conversation_with(gateway).take("hello")
    assert ("POST", "/intents/i/cancel", None) in gateway.calls
    assert [after for kind, _, after in gateway.calls if kind == "EVENTS"] == [0, 7]
    assert "(cancelled)" in capsys.readouterr().err


def test_a_second_ctrl_c_stops_listening(capsys: pytest.CaptureFixture[str]) -> None:
    """A node that does not react does not hold the terminal."""
    gateway = Gateway(KeyboardInterrupt, KeyboardInterrupt, status="running")
    conversation_with(gateway).take("hello")
    assert "intentmesh intents show i" in capsys.readouterr().err


def test_without_a_model_the_hint_names_the_settings_and_recall(capsys: pytest.CaptureFixture[str]) -> None:
    """The most common first failure explains itself."""
    error = {"code": "model_not_configured", "detail": "no model", "hint": None}
    conversation = conversation_with(Gateway(event(1, "intent.failed"), status="failed", error=error))
    conversation.take("hello")
    said = capsys.readouterr().err
    assert "INTENTMESH_LLM_BASE_URL" in said
    assert "--capability recall" in said
    assert conversation.failed_count == 1


def test_a_retry_starts_the_answer_anew(capsys: pytest.CaptureFixture[str]) -> None:
    """What a failed attempt streamed is left behind, with the reason."""
    gateway = Gateway(
        event(1, "delta", text="half"),
        event(2, "intent.retrying", cause="worker_crashed"),
        event(3, "result.committed"),
    )
    conversation_with(gateway).take("hello")
    captured = capsys.readouterr()
    assert captured.out == "half\nwhole answer\n"
    assert "worker_crashed" in captured.err


def test_an_unknown_capability_is_refused_before_the_first_word() -> None:
    """With the names of those that are there."""
    with pytest.raises(CallFailed, match="offered: chat, recall"):
        conversation_with(Gateway(), capability="talk").begin(is_person=True)


def test_a_capability_without_a_node_is_said_before_the_first_word(capsys: pytest.CaptureFixture[str]) -> None:
    """Else the person would wait and not know for what."""
    gateway = Gateway()
    gateway.get = lambda _path, **_: {"items": [{"name": "chat", "is_available": False}]}  # type: ignore[method-assign]
    conversation_with(gateway).begin(is_person=True)
    assert "no node that offers chat is up" in capsys.readouterr().err


def test_an_existing_thread_shows_its_last_turns(capsys: pytest.CaptureFixture[str]) -> None:
    """Ten of them, and how to see the rest."""
    conversation_with(Gateway(), "t").begin(is_person=True)
    captured = capsys.readouterr()
    assert captured.out.count("said before") == 10
    assert "2 earlier turns: /history" in captured.err


def test_a_thread_that_does_not_exist_yet_begins(capsys: pytest.CaptureFixture[str]) -> None:
    """A person may choose its name; the first message makes it."""
    gateway = Gateway(event(1, "result.committed"))
    conversation = conversation_with(gateway, "absent")
    conversation.begin(is_person=True)
    assert "thread absent is new" in capsys.readouterr().err
    conversation.take("hello")
    assert gateway.calls[1][2]["thread_id"] == "absent"


def test_commands_about_the_thread(capsys: pytest.CaptureFixture[str]) -> None:
    """/thread, /context, /pin, /pins and /unpin ask for what they say."""
    gateway = Gateway()
    conversation = conversation_with(gateway, "t")
    for line in ("/thread", "/context what now?", "/pin name Ada Lovelace", "/pins", "/unpin name", "/help"):
        conversation.take(line)
    assert ("GET", "/threads/t/context", {"query": "what now?"}) in gateway.calls
    assert ("PUT", "/threads/t/pins/name", {"text": "Ada Lovelace"}) in gateway.calls
    assert ("DELETE", "/threads/t/pins/name", None) in gateway.calls
    said = capsys.readouterr().out
    assert "idle, 2 turns" in said
    assert "k: a fact" in said
    assert "/pin KEY TEXT" in said


@pytest.mark.parametrize("line", ["/thread", "/context", "/pin a b", "/pins", "/unpin a", "/history"])
def test_commands_before_the_first_message_say_so(line: str, capsys: pytest.CaptureFixture[str]) -> None:
    """There is no thread to ask about yet."""
    gateway = Gateway()
    conversation_with(gateway).take(line)
    assert "say something first" in capsys.readouterr().err
    assert gateway.calls == []


def test_a_mistyped_command_is_not_sent_as_a_message(capsys: pytest.CaptureFixture[str]) -> None:
    """And /pin without a text says how it is written."""
    gateway = Gateway()
    conversation_with(gateway, "t").take("/contxt")
    conversation_with(gateway, "t").take("/pin key")
    said = capsys.readouterr().err
    assert "there is no /contxt" in said
    assert "write: /pin KEY TEXT" in said
    assert gateway.calls == []


def test_new_starts_another_thread() -> None:
    """/new forgets the thread, not what is in it."""
    gateway = Gateway(event(1, "result.committed"))
    conversation = conversation_with(gateway, "t")
    conversation.take("/new")
    conversation.take("hello")
    assert "thread_id" not in gateway.calls[0][2]
    assert conversation.thread_id == "made"
