"""The handler behind `runtime: prompt`: render prompts/system.md and prompts/user.md, ask the model, return its text.

Templates see `payload`, `context` and `metadata`. Must never evaluate what a caller or a model wrote: only the
author's files are templates.
"""

from pathlib import Path
from typing import Any

from jinja2 import TemplateError

from worker.prompt_files import REQUIRED_PROMPT, SYSTEM_PROMPT, prompt_environment
from worker.sdk import Context, Intent, Refused, llm_chat_complete


class PromptHandler:
    """`run` of a prompt capability."""

    def __init__(self, user: str, system: str | None) -> None:
        environment = prompt_environment()
        self._user = environment.from_string(user)
        self._system = environment.from_string(system) if system is not None else None

    def __call__(self, intent: Intent, context: Context) -> dict[str, Any]:
        """Return {"text": the model's answer}.

        Raises: Refused when a template names what the payload does not hold: it would fail again.
        """
        values = {"payload": intent.payload, "context": context, "metadata": intent.metadata}
        try:
            system = self._system.render(values).strip() if self._system is not None else ""
            user = self._user.render(values).strip()
        except (TemplateError, TypeError, ArithmeticError, LookupError) as error:
            raise Refused(f"the prompt cannot be rendered for this payload: {error}") from error
        messages: Context = [{"role": "system", "content": system}] if system else []
        answer = llm_chat_complete([*messages, *context, {"role": "user", "content": user}])
        return {"text": str(answer)}


def load_prompts(folder: str) -> PromptHandler:
    """Read and compile the prompts of the capability in `folder`."""
    prompts = Path(folder) / "prompts"
    system = prompts / SYSTEM_PROMPT
    return PromptHandler(
        (prompts / REQUIRED_PROMPT).read_text(encoding="utf-8"),
        system.read_text(encoding="utf-8") if system.exists() else None,
    )
