"""Answer the newest message of a conversation. Must never keep anything between two intents."""

from pathlib import Path

from worker.sdk import Context, Intent, llm_chat_complete

SYSTEM = (Path(__file__).parent / "prompts" / "system.md").read_text(encoding="utf-8").strip()


def run(intent: Intent, context: Context) -> dict[str, str]:
    """Return {"text": the model's answer}; it is streamed while it is written."""
    messages = [{"role": "system", "content": SYSTEM}, *context, {"role": "user", "content": intent.payload["text"]}]
    return {"text": str(llm_chat_complete(messages))}
