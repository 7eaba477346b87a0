"""Model calls on behalf of workers: the node holds the key, meters the tokens and caps the output.

Must never hand a key, a base URL or a client to a worker.
"""

from dataclasses import dataclass, field

from mesh.contract.errors import Cause
from mesh.contract.template import ModelChoice
from mesh.llm.provider import ModelError, OnDelta, Provider, Reply
from mesh.settings import NodeSettings
from worker.frames import LlmChat

_NOT_CONFIGURED = ModelError(
    Cause.MODEL_NOT_CONFIGURED,
    "this capability calls a model, and no model is configured on this node",
    "set INTENTMESH_LLM_BASE_URL to an OpenAI-compatible server (for example http://127.0.0.1:8000/v1), and "
    "INTENTMESH_LLM_MODEL and INTENTMESH_LLM_API_KEY where it needs them; then start the mesh again. "
    "Without a model, try the capability 'recall'",
    is_retryable=False,
)


@dataclass
class Meter:
    """What the model calls of one attempt have consumed. Units: tokens."""

    calls: int = 0
    input_tokens: int = 0
    output_tokens: int = 0
    names: list[str] = field(default_factory=list)

    def add(self, reply: Reply, model: str) -> None:
        """Count one reply."""
        self.calls += 1
        self.input_tokens += reply.input_tokens
        self.output_tokens += reply.output_tokens
        self.names.append(model)


class Broker:
    """The node's one door to models."""

    def __init__(self, settings: NodeSettings) -> None:
        self._default_model = settings.llm_model
        self._listed_model: str | None = None
        key = settings.llm_api_key.get_secret_value() if settings.llm_api_key else None
        self._provider = (
            Provider(settings.llm_base_url, key, timeout_s=settings.llm_timeout_s) if settings.llm_base_url else None
        )

    async def chat(self, call: LlmChat, choice: ModelChoice, meter: Meter, on_delta: OnDelta) -> Reply:
        """Answer one `llm.chat` frame. The output is capped by the template, whatever the worker asks for.

        Raises: ModelError.
        """
        if self._provider is None:
            raise _NOT_CONFIGURED
        model = await self._model(choice, self._provider)
        try:
            reply = await self._provider.chat(
                call.messages,
                model=model,
                max_output_tokens=min(call.max_output_tokens or choice.max_output_tokens, choice.max_output_tokens),
                temperature=call.temperature if call.temperature is not None else choice.temperature,
                on_delta=on_delta,
            )
        except ModelError:
            self._listed_model = None  # the server may serve another one by now
            raise
        meter.add(reply, model)
        return reply

    async def _model(self, choice: ModelChoice, provider: Provider) -> str:
        if choice.name != "default":
            return choice.name
        if self._default_model is not None:
            return self._default_model
        if self._listed_model is None:
            self._listed_model = await provider.first_model()
        return self._listed_model

    async def close(self) -> None:
        """Close the connections to the server."""
        if self._provider is not None:
            await self._provider.close()
