"""Contexts of stored threads: fresh, within budget, private, and honest about what was searched."""

import asyncio
from collections.abc import Awaitable, Callable

import pytest
from support import ledger_rows as rows
from support.word_embedder import WordEmbedder

from ledger.context import BuiltContext, open_share
from ledger.indexer import Indexer
from ledger.ledger import Ledger
from ledger.ranking import PARTS
from mesh.contract.errors import Cause, ErrorCode, MeshError
from mesh.contract.messages import ContextMessage, ThreadUpdate
from mesh.contract.template import ContextShare

Say = Callable[..., Awaitable[None]]
SHARE = ContextShare(max_tokens=200)
FILLER = [f"Small talk about the weather, number {number}, and nothing else of note." for number in range(60)]


def contents(built: BuiltContext) -> list[str]:
    """Return the texts of a context."""
    return [message.content for message in built.messages]


async def index(ledger: Ledger, embedder: WordEmbedder) -> None:
    """Embed all that lacks vectors."""
    indexer = Indexer(ledger.store, embedder)
    while await indexer.step():
        pass


async def test_an_unknown_thread_is_not_found(ledger: Ledger, say: Say) -> None:
    """Also one that belongs to another tenant."""
    await say("t", "hello", tenant_id="other")
    with pytest.raises(MeshError) as caught:
        await ledger.context.build("local", "t", query="hello", share=SHARE)
    assert caught.value.code is ErrorCode.NOT_FOUND


async def test_the_next_turn_sees_the_last_one_embedded_or_not(ledger: Ledger, say: Say) -> None:
    """Read your own writes: each message is in the context that is built right after it was stored."""
    for number in range(30):
        await say("t", f"message number {number}")
        assert f"message number {number}" in contents(await ledger.context.build("local", "t", query="x", share=SHARE))


async def test_an_older_turn_that_matters_is_found(ledger: Ledger, say: Say, embedder: WordEmbedder) -> None:
    """One relevant message among sixty others is in a context that holds a few of them."""
    await say("t", "My sister Clara breeds alpacas in Bolivia", *FILLER)
    await index(ledger, embedder)
    built = await ledger.context.build("local", "t", query="Who breeds alpacas?", share=SHARE)
    assert "My sister Clara breeds alpacas in Bolivia" in contents(built)
    assert built.receipt["semantic"] == "used"
    assert built.receipt["tokens"] <= 200
    best = built.receipt["candidates"][0]
    assert (best["turn_number"], best["included"], best["is_indexed"]) == (1, True, True)
    assert set(best["scores"]) == set(PARTS)
    assert len(built.receipt["messages"]) == len(built.messages)


@pytest.mark.parametrize("trouble", ["absent", "slow", "failing"])
async def test_without_the_embedder_words_decide(
    ledger: Ledger, say: Say, embedder: WordEmbedder, trouble: str
) -> None:
    """The context comes all the same, soon, and the receipt says what is missing."""
    await say("t", "My sister Clara breeds alpacas in Bolivia", *FILLER)
    embedder.is_ready = trouble != "absent"
    embedder.delay_s = 60.0 if trouble == "slow" else 0.0
    embedder.poison = "alpacas" if trouble == "failing" else None
    async with asyncio.timeout(5):
        built = await ledger.context.build("local", "t", query="Who breeds alpacas?", share=SHARE)
    assert "My sister Clara breeds alpacas in Bolivia" in contents(built)
    assert built.receipt["semantic"] == "unavailable"


async def test_an_embedder_that_has_not_named_its_model_is_unavailable_not_off(
    ledger: Ledger, say: Say, embedder: WordEmbedder
) -> None:
    """As a gateway sees it whose ledger does not answer yet."""
    await say("t", "My sister Clara breeds alpacas in Bolivia", *FILLER)
    embedder.model_id = ""
    built = await ledger.context.build("local", "t", query="Who breeds alpacas?", share=SHARE)
    assert built.receipt["semantic"] == "unavailable"


async def test_vectors_that_come_later_are_used(ledger: Ledger, say: Say, embedder: WordEmbedder) -> None:
    """What was kept in memory before indexing does not hide the vectors."""
    await say("t", "alpha beta", *FILLER)
    await ledger.context.build("local", "t", query="alpha", share=SHARE)
    await index(ledger, embedder)
    built = await ledger.context.build("local", "t", query="alpha", share=SHARE)
    assert all(candidate["is_indexed"] for candidate in built.receipt["candidates"])


async def test_vectors_of_two_models_never_mix(ledger: Ledger, say: Say, embedder: WordEmbedder) -> None:
    """After a change of model the old vectors are as good as none, until all is embedded anew."""
    await say("t", "alpha beta", *FILLER)
    await index(ledger, embedder)
    await ledger.context.build("local", "t", query="alpha", share=SHARE)
    embedder.model_id = "words@2"
    built = await ledger.context.build("local", "t", query="alpha", share=SHARE)
    assert built.receipt["semantic"] == "unavailable"
    await index(ledger, embedder)
    built = await ledger.context.build("local", "t", query="alpha", share=SHARE)
    assert built.receipt["semantic"] == "used"


async def test_an_erased_thread_is_never_served_again(ledger: Ledger, say: Say, embedder: WordEmbedder) -> None:
    """Neither from memory nor from vectors, also when a thread of the same id and length takes its place."""
    await say("t", "the secret is 1234", "second")
    await index(ledger, embedder)
    assert "the secret is 1234" in contents(await ledger.context.build("local", "t", query="secret", share=SHARE))
    ledger.context.forget = lambda *_: None  # type: ignore[method-assign]
    await ledger.threads.delete("local", "t")
    await say("t", "nothing here", "second")
    assert contents(await ledger.context.build("local", "t", query="secret", share=SHARE)) == ["nothing here", "second"]


async def test_equal_thread_ids_of_two_tenants_stay_apart(ledger: Ledger, say: Say, embedder: WordEmbedder) -> None:
    """The same id, the same question: each tenant gets its own words only."""
    for tenant in ("red", "blue"):
        await say("same", f"the canary of {tenant} sings", *FILLER[:5], tenant_id=tenant)
    await index(ledger, embedder)
    for tenant, other in (("red", "blue"), ("blue", "red")):
        built = await ledger.context.build(tenant, "same", query="canary", share=open_share(4000))
        text = str(built.messages) + str(built.receipt)
        assert f"canary of {tenant}" in text
        assert f"canary of {other}" not in text


async def test_pins_stand_first_and_word_for_word(ledger: Ledger, say: Say) -> None:
    """A pinned fact is in every context of its thread."""
    await say("t", *FILLER)
    await ledger.threads.put_pin("local", "t", "diet", "No nuts,  ever!")
    built = await ledger.context.build("local", "t", query="weather", share=SHARE)
    assert built.messages[0].role == "system"
    assert built.messages[0].content.endswith("No nuts,  ever!")
    assert built.receipt["messages"][0]["source"] == "pin"


async def test_without_a_query_the_newest_turns_are_given(ledger: Ledger, say: Say) -> None:
    """A budget and no question: a sliding window."""
    await say("t", *FILLER)
    built = await ledger.context.build("local", "t", query=None, share=SHARE)
    assert contents(built) == FILLER[-len(built.messages) :]
    assert built.receipt["semantic"] == "off"


async def test_explain_takes_other_settings_and_refuses_wrong_ones(ledger: Ledger, say: Say) -> None:
    """A dry run with words switched off; an unknown setting is named."""
    await say("t", "alpha beta", *FILLER)
    built = await ledger.context.explain("local", "t", query="alpha", share=SHARE, settings={"lexical_weight": 0})
    assert all(candidate["scores"]["lexical"] == 0 for candidate in built.receipt["candidates"])
    for wrong in ({"lexical_wait": 1}, {"lexical_weight": -1}, {"lexical_weight": "much"}):
        with pytest.raises(MeshError) as caught:
            await ledger.context.explain("local", "t", query="alpha", share=SHARE, settings=wrong)
        assert caught.value.code is ErrorCode.INVALID_REQUEST
        assert caught.value.field == f"settings.{next(iter(wrong))}"


async def test_names_of_special_tokens_and_long_queries_are_plain_text(ledger: Ledger, say: Say) -> None:
    """Neither a stored special token nor a megabyte of question is an error."""
    await say("t", "<|endoftext|> <|im_start|>", *FILLER[:3])
    built = await ledger.context.build("local", "t", query="<|endoftext|> " * 70_000, share=SHARE)
    assert built.receipt["tokens"] <= 200


async def test_many_contexts_of_one_thread_at_once_agree(ledger: Ledger, say: Say) -> None:
    """Twenty at the same time, while the thread grows: each is whole and none is older than what it began with."""
    await say("t", *FILLER)
    built = await asyncio.gather(
        *(ledger.context.build("local", "t", query="weather", share=SHARE) for _ in range(20)), say("t", "the last")
    )
    assert all(FILLER[-1] in contents(each) for each in built[:20] if each)
    assert "the last" in contents(await ledger.context.build("local", "t", query="weather", share=SHARE))


async def test_a_claim_brings_tool_calls_plan_and_memory_of_the_turn_before(ledger: Ledger) -> None:
    """What a turn left behind stands in the next turn's context: call and result together, notes before them."""
    call = {"id": "c1", "type": "function", "function": {"name": "book", "arguments": "{}"}}
    update = ThreadUpdate(
        messages=[
            ContextMessage(role="user", content="book a table"),
            ContextMessage(role="assistant", content="", tool_calls=[call]),
            ContextMessage(role="tool", content="booked for 7", tool_call_id="c1"),
            ContextMessage(role="assistant", content="It is booked."),
        ],
        plan={"steps": ["book", "remind"], "completed": ["book"]},
        contextual_memory={"party": 4},
        tool_calls={"c1": {"name": "book", "status": "uncertain"}},
    )
    held = await rows.claim(ledger, await rows.submit(ledger, "book a table"))
    await rows.commit(ledger, held, update=update)
    claim = await rows.claim(ledger, await rows.submit(ledger, "and tomorrow?"))
    assert [message.role for message in claim.messages] == ["system", "user", "assistant", "tool", "assistant"]
    assert claim.messages[2].tool_calls == [call]
    notes = claim.messages[0].content
    for part in ("remind", "uncertain", "party"):
        assert part in notes
    assert [part["source"] for part in claim.receipt["messages"]] == ["note", *["recent"] * 4]


async def test_a_partial_answer_says_that_it_is_partial(ledger: Ledger) -> None:
    """The text of a turn that was cancelled is in the context, marked, and within the budget."""
    intent = await rows.submit(ledger, "tell me a story")
    held = await rows.claim(ledger, intent)
    await ledger.intents.cancel("local", intent.intent_id)
    await rows.fail(ledger, held, Cause.CANCELLED, partial_text="Once upon a")
    built = await ledger.context.build("local", "t", query="go on", share=SHARE)
    assert contents(built)[-1] == "Once upon a\n[cancelled before the end]"
