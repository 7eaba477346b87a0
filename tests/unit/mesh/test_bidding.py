"""Prices, winners and turns: the rules that the Lua book must follow."""

from hypothesis import given
from hypothesis import strategies as st
from support.mesh_messages import announcement, bid

from mesh.bidding import (
    AFFINITY_DISCOUNT,
    COLD_START,
    FAILURES_MAX,
    LOAD_MAX,
    LOSERS_MAX,
    MEMORY_PRESSURE_MAX,
    NodeSnapshot,
    Offer,
    Shares,
    choose,
    in_turn,
    make_bids,
    price,
)
from mesh.contract.messages import Announcement
from mesh.contract.template import Template

ECHO = Template(name="echo", price=2.0)
CHAT = Template(name="chat", supports_multi_turn=True)

nodes = st.sampled_from(["n1", "n2", "n3", "n4", "n5", "n6", "n7", "n8"])
prices = st.sampled_from([0.0, 0.1, 0.30000000000000004, 1.0, 1.5, 2.0]) | st.floats(0, 10)
offers = st.builds(
    lambda node, asked, discount, has_slot: Offer(bid(node, asked, affinity_discount=discount), has_slot),
    nodes,
    prices,
    st.sampled_from([0.0, 0.4, 3.0]),
    st.booleans(),
)
books = st.lists(offers, unique_by=lambda offer: offer.bid.node_id, max_size=8)
budgets = st.none() | prices


def test_an_idle_warm_node_asks_the_templates_price() -> None:
    """Nothing is added to the base when nothing stands in the way."""
    parts = price(NodeSnapshot(slots=4, free_slots=4, warm=frozenset({"echo"})), ECHO)
    assert parts.total == parts.base == 2.0


def test_each_obstacle_is_a_part_of_its_own() -> None:
    """A full, cold, crowded and failing node names all four reasons."""
    snapshot = NodeSnapshot(slots=4, free_slots=0, memory_share=1.0, recent_failures={"echo": 100})
    parts = price(snapshot, ECHO)
    assert (parts.load, parts.cold_start) == (LOAD_MAX, COLD_START)
    assert (parts.memory_pressure, parts.recent_failures) == (MEMORY_PRESSURE_MAX, FAILURES_MAX)


def test_failures_of_one_capability_do_not_raise_the_price_of_another() -> None:
    """The part counts its own capability only."""
    snapshot = NodeSnapshot(slots=1, free_slots=1, recent_failures={"chat": 3})
    assert price(snapshot, ECHO).recent_failures == 0


@given(
    st.integers(-1, 8),
    st.integers(-1, 9),
    st.floats(allow_nan=True, allow_infinity=True),
    st.integers(-5, 1000),
)
def test_no_part_leaves_its_range_whatever_the_snapshot_says(
    slots: int, free_slots: int, memory_share: float, failures: int
) -> None:
    """A measurement gone wrong makes no negative, infinite or undefined price."""
    parts = price(NodeSnapshot(slots, free_slots, memory_share, recent_failures={"echo": failures}), ECHO)
    assert 0 <= parts.load <= LOAD_MAX
    assert 0 <= parts.memory_pressure <= MEMORY_PRESSURE_MAX
    assert 0 <= parts.recent_failures <= FAILURES_MAX


@given(st.integers(1, 16), st.data())
def test_a_busier_node_never_asks_less(slots: int, data: st.DataObject) -> None:
    """Load is monotone."""
    more, less = sorted((data.draw(st.integers(0, slots)), data.draw(st.integers(0, slots))), reverse=True)
    idle, busy = (price(NodeSnapshot(slots, free), ECHO).total for free in (more, less))
    assert idle <= busy


def test_only_conversations_are_worth_keeping_on_their_node() -> None:
    """Affinity is offered where a thread has a context."""
    echo, chat = make_bids("n1", NodeSnapshot(2, 2), [ECHO, CHAT])
    assert (echo.affinity_discount, chat.affinity_discount) == (0.0, AFFINITY_DISCOUNT)
    assert chat.parts_with_affinity.total == chat.parts.total - AFFINITY_DISCOUNT


@given(books, budgets, st.none() | nodes, st.sets(nodes))
def test_the_winner_is_admissible_and_no_admissible_offer_is_cheaper(
    book: list[Offer], budget: float | None, last: str | None, excluded: set[str]
) -> None:
    """Excluded nodes, full nodes and prices over the budget never win; the cheapest of the rest does."""
    choice = choose(announcement(budget=budget), book, last_node_id=last, excluded=excluded)
    admissible = [
        offer.parts(last).total
        for offer in book
        if offer.has_slot
        and offer.bid.node_id not in excluded
        and (budget is None or offer.parts(last).total <= budget)
    ]
    if choice.winner is None or choice.parts is None:
        assert not admissible
    else:
        assert choice.parts.total == min(admissible)


@given(books, budgets, st.none() | nodes, st.sets(nodes))
def test_each_loser_has_its_true_reason(
    book: list[Offer], budget: float | None, last: str | None, excluded: set[str]
) -> None:
    """The losers are the best of the others, in the order of price, and each reason is true."""
    choice = choose(announcement(budget=budget), book, last_node_id=last, excluded=excluded)
    by_node = {offer.bid.node_id: offer for offer in book}
    others = len(book) - (choice.winner is not None)
    assert len(choice.losers) == min(others, LOSERS_MAX)
    assert [loser.price for loser in choice.losers] == sorted(loser.price for loser in choice.losers)
    for loser in choice.losers:
        truths = {
            "excluded": loser.node_id in excluded,
            "no_slot": not by_node[loser.node_id].has_slot,
            "over_budget": budget is not None and loser.price > budget,
            "outbid": choice.parts is not None and loser.price >= choice.parts.total,
        }
        assert truths[loser.reason]


@given(books, st.randoms())
def test_the_order_of_offers_does_not_matter(book: list[Offer], random: object) -> None:
    """Equal prices are decided by name, not by who came first."""
    intent = announcement()
    assert choose(intent, book) == choose(intent, list(reversed(book)))


def test_the_node_that_ran_the_last_turn_wins_though_another_is_a_little_cheaper() -> None:
    """Affinity is a discount, not a law: it loses against a much cheaper node."""
    near = Offer(bid("near", 1.0, affinity_discount=0.4))
    assert choose(announcement(), [near, Offer(bid("far", 0.7))], last_node_id="near").winner == near
    assert choose(announcement(), [near, Offer(bid("far", 0.5))], last_node_id="near").winner != near


def test_offers_for_another_capability_are_not_looked_at() -> None:
    """They neither win nor lose."""
    choice = choose(announcement(), [Offer(bid("n1", capability="chat"))])
    assert choice.winner is None
    assert choice.losers == []


def _serve(waiting: list[Announcement], shares: Shares) -> list[Announcement]:
    served = []
    while waiting:
        first = in_turn(waiting, shares)[0]
        shares.charge(first)
        waiting.remove(first)
        served.append(first)
    return served


def test_within_a_tenant_priority_goes_first_then_age() -> None:
    """Priority before age, and the id decides between twins."""
    old, new, urgent = announcement(), announcement(), announcement(priority=1)
    assert _serve([new, urgent, old], Shares()) == [urgent, old, new]


@given(st.integers(1, 5), st.integers(1, 5))
def test_tenants_share_by_weight(left: int, right: int) -> None:
    """Of any run of awards each backlogged tenant has its share, give or take one."""
    waiting = [announcement(tenant_id="a", tenant_weight=left) for _ in range(60)]
    waiting += [announcement(tenant_id="b", tenant_weight=right) for _ in range(60)]
    first = _serve(waiting, Shares())[:30]
    count = sum(intent.tenant_id == "a" for intent in first)
    assert abs(count - 30 * left / (left + right)) <= 1


def test_a_tenant_that_was_idle_gets_no_arrears() -> None:
    """After a long absence a tenant shares evenly; it does not first take all that it did not use."""
    shares = Shares()
    _serve([announcement(tenant_id="busy") for _ in range(100)], shares)
    waiting = [announcement(tenant_id=tenant) for tenant in ("busy", "idle") for _ in range(10)]
    first = _serve(waiting, shares)[:10]
    assert sum(intent.tenant_id == "idle" for intent in first) <= 6


def test_a_flood_of_one_tenant_does_not_delay_another() -> None:
    """One intent of a small tenant goes next, however many of the big one wait before it."""
    flood = [announcement(tenant_id="big", priority=100) for _ in range(50)]
    shares = Shares()
    shares.charge(flood[0])
    small = announcement(tenant_id="small")
    assert in_turn([*flood, small], shares)[0] == small
