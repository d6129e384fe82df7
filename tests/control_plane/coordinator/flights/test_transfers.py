"""What a prefill is sent: a new one begins again with every ticket that the lost one left."""

from types import SimpleNamespace

import pytest

from control_plane.coordinator.flights.transfers import Transfers, cached_tokens
from control_plane.coordinator.members.output import MembersOutput
from control_plane.ports.controller_interface import Submission
from nanocp.values.commands import (
    CancelPrefill,
    HoldBlocks,
    PagesArrived,
    PrefillRequest,
    RefuseBlocks,
    ReleaseBlocks,
)
from nanocp.values.members import PREFILL, PULLER
from nanocp.values.offload import Fetch, StoredPage
from nanocp.values.plan import CARRY_PAGE, Arrival, Fence, Plan, TargetRun, Transfer, TransferFailed
from nanocp.values.remote_blocks import RemoteBlocks

TWO = (TargetRun(0, 2, 2, 5), TargetRun(2, 1, 3, 0))


class FakeMembers(SimpleNamespace):
    """Keeps what is sent to the prefill and to the puller."""

    def send(self, member, message):
        if member == PREFILL:
            self.sent.append(message)
        elif member == PULLER:
            self.pulled.append(message)

    def taken(self):
        """The messages since the last call; of a request its ticket."""
        taken = [
            each.transfer.ticket if isinstance(each, PrefillRequest) else each for each in self.sent
        ]
        self.sent.clear()
        return taken


@pytest.fixture
def members():
    return FakeMembers(expected=[PREFILL], sent=[], pulled=[], output=MembersOutput())


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
    transfers.prefill_arrived(PREFILL)
    assert members.taken() == [3], "neither the fenced one nor the filled one"
    assert transfers.num_pages_awaited == 6


def test_without_a_new_prefill_every_open_ticket_fails(members):
    transfers = Transfers(members)
    started(transfers, [1, 2])
    for instance in (2, 3):
        transfers.answered(1, instance)
    assert [failed.ticket for failed in transfers.prefill_lost(PREFILL)] == [2]
    late = transfers.start(Transfer(3, 3, 190, TWO), Submission(Arrival(3, 191, 8), range(191)))
    assert isinstance(late, TransferFailed)
    assert late.ticket == 3


BLOCKS = RemoteBlocks("engine", "cmpl-1", (4, 5, 6), "host", 5600, 1, 191)


def held(members, expected=(PREFILL, PULLER), request_ids=(1,), recomputes=True):
    members.expected = expected
    transfers = Transfers(members, recomputes=recomputes)
    for request_id in request_ids:
        transfers.held.hold(request_id, BLOCKS)
    members.pulled.clear()
    return transfers


def pulled(members):
    """The messages to the puller since the last call; of a request its ticket."""
    taken, members.pulled = members.pulled, []
    return [each.transfer.ticket if isinstance(each, PrefillRequest) else each for each in taken]


def test_the_puller_keeps_blocks_from_submission_until_all_pages_have_arrived(members):
    members.expected = (PREFILL, PULLER)
    transfers = Transfers(members)
    transfers.held.hold(1, BLOCKS)
    started(transfers, [1, 2])
    transfers.held.placed(1)
    transfers.held.placed(2)
    assert pulled(members) == [HoldBlocks(1, BLOCKS), 1]
    assert members.taken() == [2], "a request without blocks is computed"
    transfers.answered(1, 2)
    assert 1 in transfers.held
    transfers.answered(1, 3)
    assert pulled(members) == [PagesArrived(1), ReleaseBlocks(1)]
    transfers.held.release(1)
    assert pulled(members) == []


def test_blocks_of_which_nothing_is_needed_are_released_at_the_placement(members):
    transfers = held(members, request_ids=[1, 2, 3])
    submission = Submission(Arrival(2, 191, 8), range(191))
    transfers.start(Transfer(1, 1, 190, TWO, source=0), None)
    transfers.start(Transfer(2, 2, 190, TWO), submission, num_fetched=3)
    submission = Submission(Arrival(3, 191, 8), range(191), prompt_logprobs=1)
    transfers.start(Transfer(3, 3, 190, TWO), submission)
    for request_id in (1, 2, 3):
        transfers.held.placed(request_id)
    assert pulled(members) == [ReleaseBlocks(1), ReleaseBlocks(2), ReleaseBlocks(3)]
    assert members.taken() == [3], "an engine computed no log probabilities of the prompt"


def test_a_request_that_ends_releases_its_blocks_once(members):
    transfers = held(members)
    started(transfers, [1])
    transfers.fence(Fence(1, (2, 3)))
    transfers.held.release(1)
    transfers.held.release(1)
    transfers.answered(1, 2)
    transfers.answered(1, 3)
    assert pulled(members) == [1, CancelPrefill(1), ReleaseBlocks(1), PagesArrived(1)]


def test_what_cannot_be_read_is_computed_under_the_same_ticket(members):
    transfers = held(members)
    started(transfers, [1])
    assert transfers.failed(PULLER, TransferFailed(1, "the lease is over")) is None
    assert members.taken() == [1] and pulled(members) == [1, ReleaseBlocks(1)]
    assert "the lease is over" in members.output.says[0].text
    assert transfers.failed(PREFILL, TransferFailed(1, "no")) == TransferFailed(1, "no")
    transfers.fence(Fence(1, (2, 3)))
    assert members.taken() == [CancelPrefill(1)] and not pulled(members)


def test_without_a_prefill_what_cannot_be_read_fails(members):
    transfers = held(members, (PULLER,))
    started(transfers, [1])
    assert transfers.failed(PULLER, TransferFailed(1, "no")) == TransferFailed(1, "no")
    assert pulled(members) == [1, ReleaseBlocks(1)]
    late = transfers.start(Transfer(3, 3, 190, TWO), Submission(Arrival(3, 191, 8), range(191)))
    assert late.ticket == 3 and "nothing here computes prompts" in late.message


def test_what_two_pullers_could_not_read_is_computed_once(members):
    transfers = held(members)
    started(transfers, [1])
    transfers.prefill_arrived(PULLER)
    for reason in ("said by the lost one", "said by the next one"):
        assert transfers.failed(PULLER, TransferFailed(1, reason)) is None
    assert members.taken() == [1]


def test_with_on_failure_fail_engines_do_not_compute_what_cannot_be_read(members):
    transfers = held(members, recomputes=False)
    started(transfers, [1])
    assert transfers.failed(PULLER, TransferFailed(1, "no")) == TransferFailed(1, "no")
    assert members.taken() == [] and pulled(members) == [1, ReleaseBlocks(1)]


def test_a_late_failure_of_a_ticket_that_was_fenced_computes_nothing(members):
    transfers = held(members)
    started(transfers, [1])
    transfers.fence(Fence(1, (2, 3)))
    transfers.failed(PULLER, TransferFailed(1, "no"))
    assert members.taken() == []


def test_a_new_puller_gets_what_is_held_and_then_the_open_tickets(members):
    transfers = held(members, request_ids=[1, 2])
    started(transfers, [1])
    pulled(members)
    transfers.prefill_arrived(PREFILL)
    assert pulled(members) == [] == members.taken()
    transfers.prefill_arrived(PULLER)
    assert pulled(members) == [HoldBlocks(1, BLOCKS), HoldBlocks(2, BLOCKS), 1]


def test_a_lost_puller_fails_its_own_tickets_only(members):
    transfers = held(members)
    started(transfers, [1, 2])
    assert [failed.ticket for failed in transfers.prefill_lost(PULLER)] == [1]


def test_blocks_of_a_refused_request_are_named_to_the_puller(members):
    held(members).held.refuse(BLOCKS)
    assert pulled(members) == [RefuseBlocks(BLOCKS)]


def test_an_attempt_after_a_term_pulls_again(members):
    transfers = held(members)
    started(transfers, [1])
    transfers.end_term()
    transfers.held.hold(1, BLOCKS)
    pulled(members)
    transfers.held.placed(1)
    assert pulled(members) == [ReleaseBlocks(1)], "its KV was kept, and nothing is read"
