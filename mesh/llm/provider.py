"""One OpenAI-compatible server, asked with streaming.

Must never be imported by a worker: it holds the key.
"""

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, cast

from mesh.contract.errors import Cause, MeshError

if TYPE_CHECKING:
    from openai import AsyncOpenAI

OnDelta = Callable[[str], Awaitable[None]]


@dataclass(frozen=True)
class Reply:
    """What the model said. Units: provider's own tokens; zero when it reports none."""

    text: str
    finish_reason: str
    input_tokens: int
    output_tokens: int


class ModelError(Exception):
    """The model could not answer. `is_retryable` says whether the next attempt may fare better."""

    def __init__(self, cause: Cause, detail: str, hint: str, *, is_retryable: bool) -> None:
        super().__init__(detail)
        self.cause = cause
        self.detail = detail
        self.hint = hint
        self.is_retryable = is_retryable


class Provider:
    """Calls `/chat/completions` of one server. One instance for each node."""

    def __init__(self, base_url: str, api_key: str | None, *, timeout_s: float) -> None:
        self.base_url = base_url
        self._api_key = api_key or "not-needed"
        self._timeout_s = timeout_s
        self._client: AsyncOpenAI | None = None
        self._opening = asyncio.Lock()

    async def _opened(self) -> "AsyncOpenAI":
        async with self._opening:
            if self._client is None:
                # Importing takes half a second: not on the event loop, not before it is needed.
                openai = await asyncio.to_thread(__import__, "openai")
                self._client = openai.AsyncOpenAI(
                    base_url=self.base_url, api_key=self._api_key, timeout=self._timeout_s, max_retries=1
                )
            return self._client

    async def first_model(self) -> str:
        """Return the name of the first model that the server lists.

        Raises: ModelError.
        """
        try:
            page = await (await self._opened()).models.list()
        except Exception as error:
            raise self._explain(error) from error
        if not page.data:
            raise ModelError(
                Cause.MODEL_FAILED, f"{self.base_url} lists no model", "set INTENTMESH_LLM_MODEL", is_retryable=False
            )
        return page.data[0].id

    async def chat(
        self,
        messages: Sequence[dict[str, Any]],
        *,
        model: str,
        max_output_tokens: int,
        temperature: float | None,
        on_delta: OnDelta,
    ) -> Reply:
        """Stream one completion; `on_delta` gets every piece of text in order.

        Raises: ModelError.
        """
        # A model that knows no temperature refuses even the default, so it is sent only when someone chose it.
        optional: dict[str, Any] = {} if temperature is None else {"temperature": temperature}
        pieces: list[str] = []
        finish_reason: str | None = None
        input_tokens, output_tokens = 0, 0
        try:
            client = await self._opened()
            stream = await client.chat.completions.create(
                model=model,
                messages=cast(Any, list(messages)),
                max_tokens=max_output_tokens,
                stream=True,
                stream_options={"include_usage": True},
                **optional,
            )
            async with stream:
                async for chunk in stream:
                    if chunk.usage is not None:
                        input_tokens, output_tokens = chunk.usage.prompt_tokens, chunk.usage.completion_tokens
                    for choice in chunk.choices:
                        finish_reason = choice.finish_reason or finish_reason
                        if choice.delta.content:
                            pieces.append(choice.delta.content)
                            await on_delta(choice.delta.content)
        except Exception as error:
            raise self._explain(error) from error
        if finish_reason is None:  # a connection that just ends looks like the end of an answer
            raise self._failure("ended in the middle of its answer", "read the server's log", is_retryable=True)
        return Reply("".join(pieces), finish_reason, input_tokens, output_tokens)

    def _explain(self, error: Exception) -> Exception:
        import openai

        if isinstance(error, MeshError | ModelError):  # not about the server: raised where its text went
            return error
        match error:
            case openai.APITimeoutError():
                text, hint, again = "did not answer in time", "raise INTENTMESH_LLM_TIMEOUT_S", True
            case openai.APIConnectionError():
                text, hint, again = "cannot be reached", "check INTENTMESH_LLM_BASE_URL and that the server runs", True
            case openai.AuthenticationError() | openai.PermissionDeniedError():
                text, hint, again = f"refused the key ({error.status_code})", "check INTENTMESH_LLM_API_KEY", False
            case openai.NotFoundError():
                text, hint, again = (
                    f"does not know the model or path: {error.message}",
                    "check INTENTMESH_LLM_MODEL and that INTENTMESH_LLM_BASE_URL ends in /v1",
                    False,
                )
            case openai.RateLimitError():
                text, hint, again = "limits the rate of calls", "wait, or ask for a higher limit", True
            case openai.APIStatusError():
                again = error.status_code >= 500
                text, hint = f"answered {error.status_code}: {error.message}", "read the server's log"
            case openai.APIError():
                text, hint, again = f"broke off: {error.message}", "read the server's log", True
            case _:
                text = f"answered what is no completion ({type(error).__name__}: {error})"
                hint, again = "check that INTENTMESH_LLM_BASE_URL is an OpenAI-compatible server", True
        return self._failure(text, hint, is_retryable=again)

    def _failure(self, text: str, hint: str, *, is_retryable: bool) -> ModelError:
        detail = f"the model server {self.base_url} {text}"[:500]
        return ModelError(Cause.MODEL_FAILED, detail, hint, is_retryable=is_retryable)

    async def close(self) -> None:
        """Close the connections."""
        if self._client is not None:
            await self._client.close()
