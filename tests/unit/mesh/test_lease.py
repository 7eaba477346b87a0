"""A node stops trusting a lease before the ledger gives it away."""

from hypothesis import given
from hypothesis import strategies as st

from mesh.lease import Lease, renew_interval_s

# Eighths of a second are exact in binary, so the bounds can be compared without a tolerance.
seconds = st.integers(1, 10**6).map(lambda eighths: eighths / 8)


@given(seconds, seconds, seconds, seconds)
def test_the_worker_is_gone_before_the_lease_ends(ttl_s: float, margin_s: float, sent_s: float, delay_s: float) -> None:
    """Whatever the margin: the kill lies between half of the lease and its end, counted from the sending."""
    lease = Lease(ttl_s, margin_s, sent_s)
    assert sent_s + ttl_s / 2 <= lease.ends_at_s < sent_s + ttl_s
    assert not lease.is_over(sent_s)
    assert lease.is_over(sent_s + ttl_s + delay_s)


def test_a_late_answer_never_shortens_a_lease() -> None:
    """Answers can overtake each other; the newest sending counts."""
    lease = Lease(10, 2, renewed_at_s=100)
    lease.renew(105)
    lease.renew(103)
    assert lease.ends_at_s == 113


@given(seconds)
def test_there_are_three_chances_in_each_lease(ttl_s: float) -> None:
    """Two renewals may be lost before the lease is."""
    assert 2.99 * renew_interval_s(ttl_s) <= ttl_s
