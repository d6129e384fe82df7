"""The kernel that sets up turns of drafting, against the host's words for it."""

import random

import pytest
import torch
import triton

from data_plane.step.triton_turns import next_turn_kernel

HIDDEN, ROWS = 20, 5


class Turns:
    """A step's rows on the device, and what the kernel keeps."""

    def __init__(self, width, seed):
        draw = random.Random(seed)
        total = ROWS * width
        self.width = width
        self.token = torch.tensor([draw.randrange(3) for _ in range(total)])
        self.position = torch.arange(total) + 100
        self.live = torch.zeros(total, dtype=torch.bool)
        for row in range(ROWS):
            num_live = draw.randrange(width + 1)
            self.live[row * width : row * width + num_live] = True
        self.ids = torch.tensor([[draw.randrange(3) for _ in range(total)] for _ in range(4)])
        self.hidden = torch.randn(total, HIDDEN)
        self.drafted = torch.randn(total, HIDDEN)
        self.last, self.after = torch.zeros(2, total, dtype=torch.int64)

    def run(self, turn, by_host=0):
        next_turn_kernel[(ROWS,)](
            torch.tensor([by_host]), torch.tensor([turn]), self.ids, self.token, self.position,
            self.live.view(torch.uint8), self.last, self.after, self.hidden, self.drafted,
            self.ids.stride(0), HIDDEN, WIDTH=self.width,
            BLOCK_W=triton.next_power_of_2(self.width), BLOCK_X=8,
        )  # fmt: skip

    def known(self, row):
        """The tokens of a row that a step makes known: as long as its drafts are right."""
        first, known = row * self.width, []
        for offset in range(self.width):
            at = first + offset
            if not self.live[at] or (offset and known[-1] != self.token[at]):
                break
            known.append(int(self.ids[0, at]))
        return known


@pytest.mark.parametrize("width", [2, 3, 4])
@pytest.mark.parametrize("seed", range(6))
def test_the_first_turn_takes_what_is_known_and_later_ones_their_drafts(width, seed):
    turns = Turns(width, seed)
    known = [turns.known(row) for row in range(ROWS)]
    before = turns.position.clone()
    turns.run(0)
    for row, tokens in enumerate(known):
        first = row * width
        assert turns.live[first : first + width].tolist() == [
            offset < len(tokens) for offset in range(width)
        ]
        assert turns.token[first : first + len(tokens)].tolist() == tokens
    assert torch.equal(turns.position, before)
    last = [row * width + max(len(tokens) - 1, 0) for row, tokens in enumerate(known)]
    for turn in (1, 2):
        drafted = turns.drafted.clone()
        turns.run(turn)
        for row, tokens in enumerate(known):
            first = row * width
            live = turns.live[first : first + width].tolist()
            assert live == [bool(tokens), *[False] * (width - 1)]
            assert turns.token[first] == turns.ids[turn, last[row]]
            assert turns.position[first] == before[first] + len(tokens) + turn - 1
            assert torch.equal(turns.hidden[first], drafted[last[row]])
        last = [row * width for row in range(ROWS)]
        turns.drafted = torch.randn_like(turns.drafted)


def test_a_turn_that_the_host_set_up_is_left_alone():
    turns = Turns(2, 0)
    before = [each.clone() for each in (turns.token, turns.position, turns.live, turns.hidden)]
    turns.run(0, by_host=1)
    after = (turns.token, turns.position, turns.live, turns.hidden)
    assert all(map(torch.equal, before, after))
