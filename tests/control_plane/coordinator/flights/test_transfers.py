"""What a prefill is sent: a new one begins again with every ticket that the lost one left."""

from types import SimpleNamespace

import pytest

from control_plane.coordinator.flights.transfers import Transfers, cached_tokens
from control_plane.ports.controller_interface import Submission
from nanocp.values.commands import CancelPrefill, PagesArrived, PrefillRequest
from nanocp.values.members import PREFILL
from nanocp.values.offload import Fetch, StoredPage
from nanocp.values.plan import CARRY_PAGE, Arrival, Fence, Plan, TargetRun, Transfer, TransferFailed

TWO = (TargetRun(0, 2, 2, 5), TargetRun(2, 1, 3, 0))


class FakeMembers(SimpleNamespace):
    """Keeps what is sent to the prefill."""

    def send(self, member, message):
        if member == PREFILL:
            self.sent.append(message)

    def taken(self):
        """The messages since the last call; of a request its ticket."""
        taken = [
            each.transfer.ticket if isinstance(each, PrefillRequest) else each for each in self.sent
        ]
        self.sent.clear()
        return taken


@pytest.fixture
def members():
    return FakeMembers(expected=[PREFILL], sent=[])


def started(transfers, tickets):
    for ticket in tickets:
        transfer = Transfer(ticket, ticket, 190, TWO)
        submission = Submission(Arrival(ticket, 191, 8), range(191), salt=b"salt")
        assert transfers.start(transfer, submission) is None


@pytest.mark.parametrize(("has_drafts", "num_ids"), [(False, 190), (True, 191)])
def test_with_drafts_a_prefill_gets_the_token_after_the_last_one_with_kv(
    members, has_drafts, num_ids
):
    started(Transfers(members, has_drafts), [1])
    (request,) = members.sent
    assert list(request.token_ids) == list(range(num_ids)) and request.salt == b"salt"


def test_nothing_is_cached_of_a_prompt_whose_state_alone_is_computed():
    """Pages are those of other requests, but the prefill runs over every token."""
    plans = [
        Plan(0, transfers=(Transfer(1, 7, 128, (TargetRun(first_page, 2, 0, 20),)),))
        for first_page in (1, CARRY_PAGE)
    ]
    assert [cached_tokens(plan) for plan in plans] == [{7: 64}, {7: 0}]
    state, kv = TargetRun(CARRY_PAGE, 2, 0, 20), TargetRun(0, 2, 0, 3)
    stored = [StoredPage(page, page % 64, 0) for page in (0, 1, CARRY_PAGE, CARRY_PAGE + 1)]
    seen = []
    for targets, first, end in (((kv, state), 0, 2), ((kv, state), 0, 4), ((state,), 2, 4)):
        fetches = (Fetch(1, 0, tuple(stored[first:end])),)
        plan = Plan(0, transfers=(Transfer(1, 7, 128, targets),), fetches=fetches)
        seen.append(cached_tokens(plan))
    assert seen == [{7: 0}, {}, {}], "a state that comes from slots is not computed"


def test_what_is_cached_is_looked_up_once_for_all_placements_of_a_plan():
    """A burst after a loss places thousands of requests; each walked over all transfers before."""

    class Counted(tuple):
        walks = 0

        def __iter__(self):
            Counted.walks += 1
            return super().__iter__()

    transfers = Counted(
        Transfer(ticket, ticket, 128, (TargetRun(1, 1, 0, ticket),)) for ticket in range(50)
    )
    assert cached_tokens(Plan(0, transfers=transfers)) == dict.fromkeys(range(50), 64)
    assert Counted.walks == 1


def test_a_new_prefill_gets_what_the_lost_one_had_not_filled(members):
    transfers = Transfers(members)
    started(transfers, [1, 2, 3])
    assert members.taken() == [1, 2, 3]
    transfers.fence(Fence(1, (2, 3)))
    transfers.answered(2, 2)
    transfers.answered(2, 3)
    transfers.answered(3, 2)
    assert members.taken() == [CancelPrefill(1), PagesArrived(2)]
    transfers.prefill_arrived()
    assert members.taken() == [3], "neither the fenced one nor the filled one"
    assert transfers.num_pages_awaited == 6


def test_without_a_new_prefill_every_open_ticket_fails(members):
    transfers = Transfers(members)
    started(transfers, [1, 2])
    for instance in (2, 3):
        transfers.answered(1, instance)
    assert [failed.ticket for failed in transfers.prefill_lost()] == [2]
    late = transfers.start(Transfer(3, 3, 190, TWO), Submission(Arrival(3, 191, 8), range(191)))
    assert isinstance(late, TransferFailed)
    assert late.ticket == 3
