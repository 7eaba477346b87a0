"""The files of a new capability: small, working, multi-turn, and commented for the one who changes them.

Must never write into a folder that exists.
"""

from pathlib import Path
from typing import Literal

Runtime = Literal["python", "exec", "prompt"]

_TEMPLATE = """\
# What the mesh knows about this capability. `intentmesh capability check .` verifies it.
name: {name}
version: "1"
description: {description}
# The worker gets the conversation so far. Without this line it gets only the payload.
supports_multi_turn: true
runtime: {runtime}
# How much of the conversation: a budget in tokens, the last turns, and older turns that matter to the message.
context: {{max_tokens: 2000, recent_turns: 3, older_turns: 8}}
# A payload that this JSON Schema refuses never reaches a worker.
input_schema:
  type: object
  required: [text]
  properties:
    text: {{type: string, minLength: 1, maxLength: 10000}}
limits: {{timeout_s: {timeout_s}, memory_mb: 512, max_attempts: 3}}
"""

_HANDLER = '''\
"""{name}: says what was said now and before. Replace `answer_to` with what you need.

The mesh calls `run` once, in a process of its own that ends with it. Import libraries at the top (that happens
once); open files, connections and threads inside `run`.
"""

from worker.sdk import Context, Intent, delta


def run(intent: Intent, context: Context) -> dict[str, str]:
    """Answer one intent. What is returned must be JSON; its `text` becomes the turn's answer in the thread.

    `context` is the conversation so far, oldest first: messages with "role" and "content". To ask a model:
    from worker.sdk import llm_chat_complete
    answer = llm_chat_complete([*context, {{"role": "user", "content": intent.payload["text"]}}])
    """
    answer = answer_to(intent.payload["text"], context)
    delta(answer)  # the caller sees it at once; call it as often as there is something new
    return {{"text": answer}}


def answer_to(text: str, context: Context) -> str:
    """Return the answer; without the mesh around it, so that a test can call it."""
    earlier = [message["content"] for message in context if message["role"] == "user"]
    if not earlier:
        return f"You said: {{text}}"
    return f"You said: {{text}} (and before that: {{earlier[-1]}})"
'''

_TEST = '''\
"""Tests of {name}; run them with the Python that runs the mesh: .venv/bin/python {path}"""

import runpy
import unittest
from pathlib import Path

answer_to = runpy.run_path(str(Path(__file__).with_name("handler.py")))["answer_to"]


class {title}Test(unittest.TestCase):
    """What {name} says."""

    def test_first_turn(self) -> None:
        """Without a conversation it says only what is new."""
        self.assertEqual(answer_to("hello", []), "You said: hello")

    def test_later_turn(self) -> None:
        """It remembers what was said before, because the mesh hands it the conversation."""
        context = [{{"role": "user", "content": "I am Ada"}}, {{"role": "assistant", "content": "Hello Ada"}}]
        self.assertIn("I am Ada", answer_to("who am I?", context))


if __name__ == "__main__":
    unittest.main()
'''

_SCRIPT = """\
#!/bin/sh
# {name}: any program in any language can be a worker. It reads its environment and writes frames, one JSON
# object a line, to the descriptor MESH_FD; what it prints to stdout and stderr is kept as its log.
# INTENT_PAYLOAD holds the payload, THREAD_CONTEXT_JSON the conversation so far: [{{"role", "content"}}, …].
set -eu

frame() {{
    printf '%s\\n' "$1" >&"$MESH_FD"
}}

earlier=$(printf '%s' "${{THREAD_CONTEXT_JSON:-[]}}" | grep -o '"role"' | wc -l)
payload=${{INTENT_PAYLOAD:-}}
answer="I was called with ${{#payload}} characters, after $((earlier)) earlier messages"

frame '{{"kind": "progress", "fraction": 0.5, "note": "half way"}}'
frame "{{\\"kind\\": \\"delta\\", \\"text\\": \\"$answer\\"}}"
frame "{{\\"kind\\": \\"result\\", \\"result\\": {{\\"text\\": \\"$answer\\"}}}}"
"""

_SYSTEM_PROMPT = """\
You are {name}, a helpful assistant. Answer in one or two sentences.
Use what was said earlier in this conversation; say so when it does not hold the answer.
"""

_USER_PROMPT = """\
{{ payload.text }}
"""

_PAYLOAD = """\
{"text": "hello"}
"""

_DESCRIPTIONS: dict[Runtime, str] = {
    "python": "Says what was said now and before",
    "exec": "Counts what it was given",
    "prompt": "Answers by a model, without code",
}


def scaffold(folder: Path, name: str, runtime: Runtime) -> list[Path]:
    """Write a working capability into `folder`, which must not exist, and return its files.

    Raises: FileExistsError, OSError.
    """
    template = _TEMPLATE.format(
        name=name, runtime=runtime, description=_DESCRIPTIONS[runtime], timeout_s=120 if runtime == "prompt" else 60
    )
    files = {"payload.json": _PAYLOAD}
    match runtime:
        case "python":
            files["handler.py"] = _HANDLER.format(name=name)
            title = "".join(word.capitalize() for word in name.replace("_", "-").split("-"))
            files["test_handler.py"] = _TEST.format(name=name, title=title, path=folder / "test_handler.py")
        case "exec":
            template += 'command: ["./run.sh"]\n'
            files["run.sh"] = _SCRIPT.format(name=name)
        case "prompt":
            template += "model: {name: default, max_output_tokens: 512}\n"
            files["prompts/system.md"] = _SYSTEM_PROMPT.format(name=name)
            files["prompts/user.md"] = _USER_PROMPT
    files["template.yaml"] = template
    folder.mkdir(parents=True)
    written = []
    for relative, text in sorted(files.items()):
        file = folder / relative
        file.parent.mkdir(exist_ok=True)
        file.write_text(text, encoding="utf-8")
        if relative.endswith(".sh"):
            file.chmod(0o755)
        written.append(file)
    return written
