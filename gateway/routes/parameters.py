"""Parameters and bodies that several routes share, as the OpenAPI document shows them.

Must never hold behaviour.
"""

from typing import Annotated, Any, Generic, TypeVar

from fastapi import Depends, Path, Query
from pydantic import BaseModel, Field

from gateway.state import Gateway, gateway_of
from mesh.contract.api import Body
from mesh.contract.ids import ID_LENGTH_MAX, ThreadId

Item = TypeVar("Item", bound=BaseModel)

GatewayOf = Annotated[Gateway, Depends(gateway_of)]
Id = Annotated[str, Path(min_length=1, max_length=ID_LENGTH_MAX)]
NewThreadId = Annotated[ThreadId, Path()]
PinKey = Annotated[str, Path(min_length=1, max_length=ID_LENGTH_MAX, pattern=r"^[^\x00-\x1f\x7f]+$")]
Cursor = Annotated[str | None, Query(max_length=512, description="`next` of the page before")]
Limit = Annotated[int, Query(ge=1, le=200, description="Items on a page")]
Words = Annotated[
    str | None,
    Query(
        max_length=4000, description="What the context is for: the next message; a longer one goes by context:explain"
    ),
]
TokensMax = Annotated[int | None, Query(ge=1, le=200_000, description="Budget in o200k tokens; default 2000")]


class Page(BaseModel, Generic[Item]):
    """One page of a list. `next` is the cursor of the page after it, null at the end."""

    items: list[Item]
    next: str | None = None


class ContextView(BaseModel):
    """A thread's context in the order in which a worker gets it, and why it is so."""

    messages: list[dict[str, Any]] = Field(description="role, content, and name where there is one")
    receipt: dict[str, Any] = Field(description="Budget, tokens, and each candidate with its scores and the reason")


class ExplainBody(Body):
    """`POST /threads/{id}/context:explain`: what to try; what is absent is as `GET` has it."""

    query: str | None = Field(None, max_length=100_000)
    max_tokens: int | None = Field(None, ge=1, le=200_000)
    recent_turns: int | None = Field(None, ge=0, le=100)
    older_turns: int | None = Field(None, ge=0, le=1000)
    settings: dict[str, Any] | None = Field(None, description="Weights and shares of the ranking to try, by name")
