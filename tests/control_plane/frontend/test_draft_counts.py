"""Drafts of an answer, counted by its tokens."""

from hypothesis import given
from hypothesis import strategies as st

from control_plane.frontend.client_stream import DraftCounts


@given(st.lists(st.tuples(st.integers(0, 3), st.integers(0, 3)), max_size=30))
def test_each_step_counts_by_how_many_of_its_drafts_were_right(steps):
    steps = [(drafts, min(right, drafts)) for drafts, right in steps]
    counts = DraftCounts()
    for drafts, right in steps:
        for number in [drafts, *[-1] * right]:
            counts.add(number)
    found = counts.num_steps_by_accepted
    assert counts.num_drafts == sum(drafts for drafts, _ in steps)
    assert sum(found) == sum(drafts > 0 for drafts, _ in steps)
    assert sum(i * n for i, n in enumerate(found)) == sum(right for _, right in steps)
    assert len(found) == 1 + max((drafts for drafts, _ in steps), default=-1) or not any(found)


def test_drafts_of_a_step_whose_first_token_another_attempt_had_are_no_step():
    counts = DraftCounts()
    for number in (2, -1, 0, -1, 1):
        counts.add(number)
    assert (counts.num_drafts, counts.num_steps_by_accepted) == (3, [1, 1, 0])
