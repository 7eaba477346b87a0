"""`chat`: talk to a capability in a thread, with the answer appearing as it is made.

Ctrl-C cancels the running turn, Ctrl-D leaves. Must never keep history of its own: the thread is in the ledger.
"""

import contextlib
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.text import Text

from cli.connection import connect
from cli.context import print_context
from cli.failures import CallFailed
from cli.output import answer_text, err, note, out
from cli.threads import print_turns
from mesh.contract.errors import Cause
from mesh.contract.states import State

if TYPE_CHECKING:
    from cli.client import MeshClient

HISTORY_SHOWN_TURNS = 10
LINES_KEPT = 1000
DEFAULT_CAPABILITY = "chat"

HELP = """\
/help               this
/thread             the thread's id and state
/context [QUERY]    what a worker would be shown for QUERY (your last message when absent), and why
/pin KEY TEXT       keep a fact in every context, word for word
/pins, /unpin KEY   list or remove such facts
/history            all turns so far
/new                start a new thread
/quit               leave (Ctrl-D does too)
Ctrl-C cancels the turn that is running."""

MODEL_HINT = """\
No model is configured, so this capability cannot answer. Either
  - set INTENTMESH_LLM_BASE_URL (any OpenAI-compatible server; INTENTMESH_LLM_MODEL and INTENTMESH_LLM_API_KEY
    as it needs) and start the mesh again, or
  - ask the thread's memory, which needs no model: intentmesh chat --capability recall"""


def chat(
    thread: Annotated[str | None, typer.Option(help="Go on in this thread; a new one when absent.")] = None,
    capability: Annotated[
        str, typer.Option(help="Capability that answers; 'recall' needs no model.")
    ] = DEFAULT_CAPABILITY,
) -> None:
    """Talk in a thread."""
    is_person = sys.stdin.isatty()
    with connect() as client:
        conversation = Conversation(client, capability, thread)
        conversation.begin(is_person=is_person)
        save_lines = _edit_lines() if is_person else lambda: None
        try:
            _read_and_answer(conversation, is_person=is_person)
        finally:
            save_lines()
    if is_person and conversation.thread_id:
        which = "" if capability == DEFAULT_CAPABILITY else f" --capability {capability}"
        note(f"go on later with: intentmesh chat{which} --thread {conversation.thread_id}")
    if conversation.failed_count and not is_person:
        raise typer.Exit(1)


def _read_and_answer(conversation: "Conversation", *, is_person: bool) -> None:
    while True:
        try:
            line = input("you: " if is_person else "").strip()
        except EOFError:
            if is_person:
                err.print()
            return
        except KeyboardInterrupt:
            note("\n(Ctrl-D or /quit leaves)")
            continue
        if line in {"/quit", "/exit"}:
            return
        if line:
            try:
                conversation.take(line)
            except CallFailed as error:
                conversation.failed_count += 1
                _complain(error.detail, error.hint)


def _edit_lines() -> Callable[[], None]:
    """Switch on line editing with a history file; returns what saves it. Works without readline, too."""
    try:
        import readline
    except ImportError:
        return lambda: None
    folder = Path(os.environ.get("XDG_STATE_HOME") or Path.home() / ".local" / "state") / "intentmesh"
    file = folder / "chat_lines"
    with contextlib.suppress(OSError):
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        readline.read_history_file(file)
    readline.set_history_length(LINES_KEPT)

    def save() -> None:
        with contextlib.suppress(OSError):
            readline.write_history_file(file)
            file.chmod(0o600)

    return save


def _complain(detail: str, hint: str | None = None) -> None:
    err.print(Text(detail, style="red"), soft_wrap=True)
    if hint:
        err.print(Text(hint, style="dim"), soft_wrap=True)


class Conversation:
    """One thread as the person at the keyboard sees it."""

    def __init__(self, client: "MeshClient", capability: str, thread_id: str | None) -> None:
        self.thread_id = thread_id
        self.failed_count = 0
        self._client = client
        self._capability = capability
        self._last_text = ""

    def begin(self, *, is_person: bool) -> None:
        """Check that the capability is there, and show where an existing thread stands."""
        answer = self._client.get("/capabilities")
        items = {item["name"]: item for item in (answer["items"] if isinstance(answer, dict) else answer)}
        if self._capability not in items:
            known = ", ".join(sorted(items)) or "none yet: is a node running?"
            raise CallFailed("unknown_capability", f"no node offers {self._capability!r} (offered: {known})")
        if not items[self._capability].get("is_available", True):
            note(f"no node that offers {self._capability} is up: messages wait until one comes (intentmesh node)")
        if self.thread_id and is_person:
            self._show_history(HISTORY_SHOWN_TURNS)
        if is_person:
            note(f"talking to {self._capability}; /help lists commands, Ctrl-D leaves")

    def take(self, line: str) -> None:
        """Obey a command, or send a message and show the answer."""
        if not line.startswith("/"):
            self._say(line)
            return
        word, _, rest = line[1:].partition(" ")
        rest = rest.strip()
        match word:
            case "help":
                out.print(HELP)
            case "new":
                self.thread_id, self._last_text = None, ""
                note("the next message starts a new thread")
            case "thread" | "context" | "pin" | "pins" | "unpin" | "history":
                if self.thread_id is None:
                    note("there is no thread yet: say something first")
                else:
                    self._about_thread(self.thread_id, word, rest)
            case _:
                note(f"there is no /{word}; /help lists the commands")

    def _about_thread(self, thread_id: str, word: str, rest: str) -> None:
        path = f"/threads/{thread_id}"
        match word:
            case "thread":
                thread = self._client.get(path)
                out.print(f"{thread_id}  {thread['status']}, {thread['turn_count']} turns", soft_wrap=True)
            case "context":
                query = rest or self._last_text
                print_context(self._client.get(f"{path}/context", query=query or None))
            case "pins":
                for pin in self._client.get(path)["pins"]:
                    out.print(Text(f"{pin['key']}: {pin['text']}"), soft_wrap=True)
            case "pin":
                key, _, text = rest.partition(" ")
                if not text.strip():
                    note("write: /pin KEY TEXT")
                    return
                self._client.put(f"{path}/pins/{key}", {"text": text.strip()})
                note(f"pinned {key}")
            case "unpin":
                if not rest:
                    note("write: /unpin KEY")
                    return
                self._client.delete(f"{path}/pins/{rest}")
                note(f"unpinned {rest}")
            case "history":
                self._show_history(None)

    def _show_history(self, turn_count: int | None) -> None:
        try:
            turns = self._client.pages(f"/threads/{self.thread_id}/turns", count_max=100_000)
        except CallFailed as error:
            if error.code != "not_found":
                raise
            note(f"thread {self.thread_id} is new: it begins with your first message")
            return
        shown = turns if turn_count is None else turns[-turn_count:]
        if len(shown) < len(turns):
            note(f"({len(turns) - len(shown)} earlier turns: /history)")
        print_turns(shown)

    def _say(self, text: str) -> None:
        self._last_text = text
        body: dict[str, Any] = {"type": self._capability, "payload": {"text": text}}
        if self.thread_id:
            body["thread_id"] = self.thread_id
        accepted = self._client.submit(body)
        if self.thread_id is None:
            self.thread_id = accepted["thread_id"]
            note(f"thread {self.thread_id}")
        has_streamed = self._follow(accepted["intent_id"])
        self._show_outcome(self._client.get(f"/intents/{accepted['intent_id']}"), has_streamed=has_streamed)

    def _follow(self, intent_id: str) -> bool:
        """Print the answer as it comes until the intent is finished. Returns whether any of it was printed.

        Ctrl-C asks for the turn to be cancelled and goes on listening for the end; a second one stops listening.
        """
        number = 0
        is_cancelling = False
        has_streamed = False
        while True:
            try:
                for event in self._client.events(f"/intents/{intent_id}/events", after=number):
                    number = event.number
                    has_streamed = _show_event(event.kind, event.data, has_streamed=has_streamed)
                break
            except KeyboardInterrupt:
                if is_cancelling:
                    break
                is_cancelling = True
                self._cancel(intent_id)
        _write("\n" if has_streamed else "")
        return has_streamed

    def _cancel(self, intent_id: str) -> None:
        note("\n(cancelling)")
        try:
            self._client.post(f"/intents/{intent_id}/cancel")
        except CallFailed as error:
            if error.code != "already_terminal":
                raise

    def _show_outcome(self, intent: dict[str, Any], *, has_streamed: bool) -> None:
        match State(intent["status"]):
            case State.SUCCEEDED:
                if not has_streamed:
                    out.print(Text(answer_text(intent["result"])), soft_wrap=True)
            case State.CANCELLED:
                note("(cancelled)")
            case State.FAILED | State.DEAD | State.EXPIRED:
                self.failed_count += 1
                error = intent.get("error") or {"code": "unknown", "detail": intent["status"]}
                if error["code"] == Cause.MODEL_NOT_CONFIGURED:
                    _complain(MODEL_HINT)
                else:
                    _complain(f"{intent['status']}: {error['detail']}", error.get("hint"))
            case _:
                note(f"(still {intent['status']}: intentmesh intents show {intent['intent_id']})")


def _show_event(kind: str, data: dict[str, Any], *, has_streamed: bool) -> bool:
    """Print what an event of a running turn says; returns whether a part of the answer now stands on the line."""
    match kind:
        case "delta":
            _write(data.get("text", ""))
            return True
        case "intent.retrying":
            _write("\n" if has_streamed else "")
            note(f"(trying again: {data.get('detail') or data.get('cause', 'it failed')})")
            return False
        case _:
            return has_streamed


def _write(text: str) -> None:
    sys.stdout.write(text)
    sys.stdout.flush()
