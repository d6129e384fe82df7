"""The table of runs against plain dictionaries: where pages are; equal tables, equal digests."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from nanocp.values.table import InstanceTable
from nanocp.values.table_changes import HolderChange, PageClear, PageRun, TableChanges

SPANS = st.tuples(st.integers(0, 30), st.integers(1, 8))


def rebuilt(table: InstanceTable) -> InstanceTable:
    fresh = InstanceTable(0, 1)
    fresh.apply(table.full_changes())
    return fresh


@given(st.lists(st.tuples(st.booleans(), st.integers(1, 2), SPANS), max_size=30))
def test_pages_are_where_the_runs_and_cuts_say(history):
    table, plain, next_frame = InstanceTable(0, 1), {1: {}, 2: {}}, 0
    for is_cut, request_id, (first_page, num_pages) in history:
        pages = range(first_page, first_page + num_pages)
        frames = plain[request_id]
        if is_cut and all(page in frames for page in pages):
            table.apply(TableChanges(cleared=(PageClear(request_id, first_page, num_pages),)))
            for page in pages:
                del frames[page]
        elif not is_cut and not any(page in frames for page in pages):
            table.apply(
                TableChanges(pages=(PageRun(request_id, first_page, num_pages, next_frame),))
            )
            frames.update({page: next_frame + index for index, page in enumerate(pages)})
            next_frame += num_pages + 1
        assert {request: table.frames(request) for request in plain} == plain
        fresh = rebuilt(table)
        assert (fresh.digest, fresh.pages) == (table.digest, table.pages), (
            "a resync is the sum of the deltas"
        )
    table.apply(TableChanges(forgotten=(1, 2)))
    assert table.digest == 0 and not table.pages


@pytest.mark.parametrize(
    "wrong",
    [TableChanges(pages=(PageRun(1, 3, 2, 50),)),
     TableChanges(pages=(PageRun(1, 0, 3, 50),)),
     TableChanges(cleared=(PageClear(1, 1, 3),)),
     TableChanges(cleared=(PageClear(2, 2, 1),)),
     TableChanges(holders=(HolderChange(1, 5, 0), HolderChange(1, 5, 1)))],
    ids=["tail of a run twice", "head of a run twice", "more than there is", "another request's",
         "holders that stand"],
)  # fmt: skip
def test_changes_that_cannot_be_are_refused(wrong):
    table = InstanceTable(0, 1)
    table.apply(TableChanges(pages=(PageRun(1, 2, 2, 10),)))
    with pytest.raises(AssertionError):
        table.apply(wrong)


def test_a_row_appends_to_its_own_pages_until_another_holder_is_named():
    table = InstanceTable(0, 2)
    table.apply(TableChanges(holders=(HolderChange(7, 4, 1), HolderChange(7, 6, 0))))
    assert [table.holder(7, page) for page in (3, 4, 5, 6, 90)] == [0, 1, 1, 0, 0]
    assert table.holder(8, 3) == 0
    table.apply(TableChanges(holders_forgotten=(7,)))
    assert table.holder(7, 4) == 0 and table.digest == 0


def test_a_frame_elsewhere_or_a_run_cut_elsewhere_changes_the_digest():
    digests = set()
    for pages in [
        (PageRun(1, 0, 4, 8),),
        (PageRun(1, 0, 4, 9),),
        (PageRun(1, 0, 2, 8), PageRun(1, 2, 2, 10)),
        (PageRun(2, 0, 4, 8),),
    ]:
        table = InstanceTable(0, 1)
        table.apply(TableChanges(pages=pages))
        digests.add(table.digest)
    assert len(digests) == 4
