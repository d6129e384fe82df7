"""Accepted drafts: reports count once all have come, and only for the row they are of."""

from types import SimpleNamespace

from control_plane.scheduler.windows.advances import Advances
from nanocp.config.scheduler import SchedulerConfig


def advance(request, position):
    request.position = position


def advances(*windows):
    """Windows in flight, as (number, drafts of a row in it)."""
    state = SimpleNamespace(advance=advance)
    share = SimpleNamespace(generated=lambda arrival, num_tokens: None)
    found = Advances(state, share, SchedulerConfig(num_drafts=4))
    for number, num_drafts in windows:
        found.issued(number, num_drafts)
    return found


def taken(found, request_id):
    """How much further a request comes when it is settled."""
    request = SimpleNamespace(request_id=request_id, position=0, arrival=None)
    found.settle(request)
    return request.position


def test_a_report_counts_when_all_instances_have_reported_the_window():
    found = advances((3, 4), (4, 8))
    assert found.slack == 12
    found.told(3, (7, 7, 9))
    assert found.slack == 12 and not found._unsettled, "another instance is still to report"
    found.told(3, (5,))
    found.told(4, (7,))
    found.reported(3)
    assert found.slack == 8
    assert dict(found._unsettled) == {7: 2, 9: 1, 5: 1}
    assert [taken(found, each) for each in (7, 9, 5, 7)] == [2, 1, 1, 0]
    found.reported(4)
    assert (found.slack, taken(found, 7)) == (0, 1)


def test_a_report_that_comes_again_for_a_window_that_was_reported_counts_nothing():
    found = advances((3, 2), (4, 2))
    found.told(3, (7,))
    found.reported(3)
    found.told(3, (7,))
    found.reported(4)
    assert taken(found, 7) == 1


def test_a_row_that_has_left_has_no_late_report():
    found = advances((3, 2), (4, 2))
    found.told(3, (7, 8))
    found.reported(3)
    found.left(7, 4)
    found.told(4, (7, 8))
    found.reported(4)
    assert taken(found, 7) == 0 and taken(found, 8) == 2


def test_the_same_id_again_has_only_what_its_new_row_was_given():
    """It was preempted or held, and came back while windows of its old row were in flight."""
    found = advances((3, 2), (4, 2))
    found.left(7, 3)
    found.told(3, (7,))
    found.told(4, (7,))  # of the row that began with window 4
    found.reported(3)
    assert taken(found, 7) == 0
    found.reported(4)
    assert taken(found, 7) == 1


def test_a_row_that_was_in_no_window_in_flight_is_not_remembered():
    found = advances()
    found.left(7, 2)
    found.issued(3, 2)
    found.told(3, (7,))
    found.reported(3)
    assert taken(found, 7) == 1
    found.left(8, None)
    assert taken(found, 8) == 0


def test_windows_without_drafts_are_not_kept():
    found = advances((3, 0), (4, 2))
    found.told(3, ())
    found.reported(3)
    assert found.slack == 2


def test_the_end_of_a_term_forgets_all():
    found = advances((3, 2), (4, 2))
    found.told(3, (7,))
    found.reported(3)
    found.left(8, 4)
    found.end_term()
    found.told(4, (8,))
    found.reported(4)
    assert (found.slack, list(found._unsettled)) == (0, [])
