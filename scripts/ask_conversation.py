"""Import a long conversation into a thread through the public API, then ask about it with `recall`.

    .venv/bin/python scripts/ask_conversation.py --data locomo10.json [--url http://127.0.0.1:8080]

The data file is in the format of LoCoMo (Maharana et al., 2024): conversations of several sessions, with
questions and the ids of the messages that answer them. For each question the script prints what `recall`
answered and whether the messages that hold the answer were in the context that its worker got.
Must never read anything but the file that is named, nor talk to anything but the gateway.
"""

import argparse
import json
import os
import re
import sys
import time
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import httpx
from rich.console import Console
from rich.progress import Progress

MESSAGES_A_CALL = 200
INDEX_PATIENCE_S = 120
console = Console()


@dataclass(frozen=True)
class Conversation:
    """One conversation. `questions` are (question, ids of the messages that hold the answer)."""

    name: str
    messages: list[dict[str, Any]]
    questions: list[tuple[str, list[str]]]


def read_conversation(path: Path, index: int) -> Conversation:
    """Read one conversation of a LoCoMo file.

    Raises: SystemExit with a clear sentence when the file is not of that form.
    """
    try:
        sample = json.loads(path.read_text())[index]
        sessions = sample["conversation"]
        messages: list[dict[str, Any]] = []
        number = 1
        while f"session_{number}" in sessions:
            moment = datetime.strptime(sessions[f"session_{number}_date_time"], "%I:%M %p on %d %B, %Y")
            messages.extend(
                {
                    "id": turn["dia_id"],
                    "role": "user",
                    "name": turn["speaker"],
                    "content": turn["text"],
                    "at": moment.replace(tzinfo=UTC).isoformat(),
                }
                for turn in sessions[f"session_{number}"]
                if turn["text"].strip()
            )
            number += 1
        known = {message["id"] for message in messages}
        questions = []
        for entry in sample["qa"]:
            gold = [key for key in re.findall(r"D\d+:\d+", " ".join(entry.get("evidence", []))) if key in known]
            if gold and entry["category"] != 5:  # category 5 has no answer in the conversation
                questions.append((entry["question"], gold))
        return Conversation(sample["sample_id"], messages, questions)
    except (OSError, ValueError, KeyError, IndexError, TypeError) as error:
        raise SystemExit(f"{path}: not a LoCoMo file, or no conversation {index} in it ({error!r})") from error


def import_messages(client: httpx.Client, thread_id: str, messages: list[dict[str, Any]]) -> None:
    """Send the messages, with progress. Safe to repeat: each has an id."""
    with Progress(console=console) as progress:
        task = progress.add_task(f"importing into thread {thread_id}", total=len(messages))
        for start in range(0, len(messages), MESSAGES_A_CALL):
            batch = messages[start : start + MESSAGES_A_CALL]
            client.post(f"/threads/{thread_id}/messages", json={"messages": batch}).raise_for_status()
            progress.update(task, advance=len(batch))


def wait_until_indexed(client: httpx.Client, thread_id: str) -> None:
    """Wait, with progress, until the mesh has read the meaning of every message; without a model, do not."""
    with Progress(console=console) as progress:
        task = progress.add_task("indexing by meaning", total=None)
        for _ in range(INDEX_PATIENCE_S):
            receipt = client.get(f"/threads/{thread_id}/context", params={"query": "hello", "max_tokens": 200_000})
            seen = receipt.raise_for_status().json()["receipt"]
            indexed = sum(candidate["is_indexed"] for candidate in seen["candidates"])
            progress.update(task, total=len(seen["candidates"]), completed=indexed)
            if seen["semantic"] == "off" or indexed == len(seen["candidates"]):
                return
            time.sleep(1)
    console.print("[yellow]not everything is indexed yet: asking all the same")


def turn_numbers(client: httpx.Client, thread_id: str) -> dict[str, int]:
    """Return content → turn number of every message of the thread."""
    numbers: dict[str, int] = {}
    cursor: str | None = None
    while True:
        parameters = {"limit": "200"} | ({"cursor": cursor} if cursor else {})
        page = client.get(f"/threads/{thread_id}/turns", params=parameters).raise_for_status().json()
        for turn in page["items"]:
            for message in turn["messages"]:
                numbers.setdefault(message["content"], turn["turn_number"])
        cursor = page["next"]
        if cursor is None:
            return numbers


def ask(client: httpx.Client, thread_id: str, question: str) -> dict[str, Any]:
    """Ask through `POST /intent` and return the finished intent."""
    body = {"type": "recall", "thread_id": thread_id, "payload": {"text": question}}
    answer = client.post("/intent", params={"wait": 60}, json=body).raise_for_status().json()
    if answer["status"] != "succeeded":
        raise SystemExit(f"{question!r} ended as {answer['status']}: {answer.get('error')}")
    return dict(client.get(f"/intents/{answer['intent_id']}").raise_for_status().json())


def main() -> int:
    """Import, ask, print; exit 1 when no answer was found at all."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, required=True, help="a file in LoCoMo's format")
    parser.add_argument("--url", default=os.environ.get("INTENTMESH_URL", "http://127.0.0.1:8080"))
    parser.add_argument("--conversation", type=int, default=0, help="which one of the file (default 0)")
    parser.add_argument("--questions", type=int, default=10, help="how many to ask (default 10)")
    options = parser.parse_args()
    conversation = read_conversation(options.data, options.conversation)
    thread_id = f"{conversation.name}-{int(time.time())}"
    key = os.environ.get("INTENTMESH_API_KEY")
    headers = {"authorization": f"Bearer {key}"} if key else {}
    step = max(1, len(conversation.questions) // options.questions)
    chosen = conversation.questions[::step][: options.questions]
    with httpx.Client(base_url=options.url, headers=headers, timeout=120) as client:
        import_messages(client, thread_id, conversation.messages)
        wait_until_indexed(client, thread_id)
        numbers = turn_numbers(client, thread_id)
        text_of = {message["id"]: message["content"].strip() for message in conversation.messages}
        in_context = answered = 0
        for question, gold in chosen:
            intent = ask(client, thread_id, question)
            wanted = {numbers[text_of[key]] for key in gold if text_of[key] in numbers}
            included = {entry["turn_number"] for entry in intent["receipt"]["messages"]}
            hit = bool(wanted & included)
            in_context += hit
            named = intent["result"].get("turn_number") in wanted
            answered += named
            console.print(f"\n[bold]{question}[/bold]", highlight=False)
            console.print(f"  {intent['result']['text']}", markup=False, highlight=False)
            console.print(
                f"  answer stands in turn {sorted(wanted)}; in the context: {'yes' if hit else 'no'}; "
                f"named by recall: {'yes' if named else 'no'}",
                highlight=False,
            )
    console.print(
        f"\n{len(conversation.messages)} messages imported, {len(chosen)} questions asked: the answer's turn was in the "
        f"context of {in_context}, and named by recall in {answered}.",
        highlight=False,
    )
    return 0 if in_context else 1


if __name__ == "__main__":
    sys.exit(main())
