"""The balancer of experts: better tables, few changes, small steps, and no expert lost."""

from random import Random

import pytest

from control_plane.coordinator.members import expert_moves
from control_plane.coordinator.members.expert_moves import HALVED_EVERY, MAX_TRIALS, ExpertMoves
from nanocp.values.experts import home_table

PAIRS = 10_000_000
"""Pairs of a layer, of which chance explains little."""


def table_of(num_experts, num_seats, num_slots):
    """Experts in turn, and free slots."""
    table = [-1] * num_seats * num_slots
    for expert in range(num_experts):
        table[expert % num_seats * num_slots + expert // num_seats] = expert
    return table


def balancer(shares, num_seats, num_slots, table=None, pairs=PAIRS, budget=1, random=None):
    """One layer of such loads. random: of rows by chance."""
    table = table or table_of(len(shares), num_seats, num_slots)
    moves = ExpertMoves(len(shares), num_slots, 1.1, budget)
    moves.use(1, [table], range(num_seats))
    counts = [pairs * each / sum(shares) for each in shares]
    if random:
        counts = [round(random.gauss(each, each**0.5)) for each in counts]
    report(moves, table, counts, num_seats, num_slots)
    return moves, table


def report(moves, table, counts, num_seats, num_slots, number=1, window=0):
    for seat in range(num_seats):
        held = table[seat * num_slots : (seat + 1) * num_slots]
        pairs = [counts[each] / table.count(each) if each >= 0 else 0 for each in held]
        moves.report(number, window, seat, [pairs])


def carried_out(moves, table, num_seats):
    """(the table after all changes of the plan, experts loaded, how often there were some).

    Each time all experts are in slots that no change writes.
    """
    table, num_loaded, turns = [*table], 0, 0
    experts = {*table} - {-1}
    while changes := moves.changes():
        numbers = [change.number for change in changes]
        assert len({*numbers}) == len(numbers)
        assert {each for n, each in enumerate(table) if n not in numbers} - {-1} == experts
        for _, number, expert in changes:
            num_loaded += expert >= 0
            table[number] = expert
        moves.use(1, [table], range(num_seats))
        turns += 1
    return table, num_loaded, turns


@pytest.mark.parametrize("seed", range(60))
def test_any_loads_get_a_better_table_within_the_budget_and_keep_every_expert(seed):
    """Twice: the second table begins from the first, with other loads."""
    random = Random(seed)
    num_seats, home = random.choice([(2, 5), (4, 4), (8, 8), (32, 2), (48, 1)])
    num_slots, budget = home + random.randint(1, 2), random.randint(1, 2)
    table = None
    for _ in range(2):
        shares = [random.lognormvariate(0, 1.2) for _ in range(num_seats * home)]
        moves, table = balancer(shares, num_seats, num_slots, table, budget=budget)
        before = moves.placement(0).imbalance
        assert all(step is None for step in moves.plan())
        table, num_loaded, _ = carried_out(moves, table, num_seats)
        after = moves.placement(0).imbalance
        assert after < before or (after == before and not num_loaded)
        assert before < 1.1 or after < before or num_seats == 2
        assert num_loaded <= budget * num_seats
        for seat in range(num_seats):
            held = [each for each in table[seat * num_slots : (seat + 1) * num_slots] if each >= 0]
            assert len({*held}) == len(held)


@pytest.mark.parametrize("seed", range(5))
def test_round_by_round_even_a_few_full_instances_become_even(seed):
    """The first round fills each slot but the hottest instance's: then one of two lends a slot."""
    random, table = Random(seed), [*home_table(32, 4, 1).experts()]
    shares = [random.uniform(5, 15) for _ in range(8)] + [random.random() for _ in range(24)]
    found = []
    for _ in range(6):
        moves, table = balancer(shares, 4, 9, table)
        found.append(moves.placement(0).imbalance)
        assert all(step is None for step in moves.plan())
        table, _, _ = carried_out(moves, table, 4)
    assert found[0] > 2.5 and found[-1] < 1.2, found


@pytest.mark.parametrize(("num_seats", "home"), [(4, 64), (32, 8), (256, 1)])
def test_even_loads_and_chance_move_nothing(num_seats, home):
    for seed in range(20):
        for pairs in (0, 100 * num_seats, 1000 * num_seats):
            even = [1.0] * num_seats * home
            moves, _ = balancer(even, num_seats, home + 1, pairs=pairs, random=Random(seed))
            assert [*moves.plan()] == [None] and not moves.changes()


@pytest.mark.parametrize(("num_seats", "home"), [(2, 128), (32, 8), (256, 1)])
def test_a_step_of_a_plan_is_short(monkeypatch, num_seats, home):
    """Candidates are counted, not time; a plan made anew looks for one place in a step."""
    tried, ways = [0], expert_moves.LayerPlacement._ways

    def counted(*of):
        for way in ways(*of):
            tried[0] += 1
            yield way

    monkeypatch.setattr(expert_moves.LayerPlacement, "_ways", counted)
    random, most = Random(0), 0
    shares = [random.lognormvariate(0, 1.2) for _ in range(num_seats * home)]
    shares[::num_seats] = [3 * each for each in shares[::num_seats]]
    moves, _ = balancer(shares, num_seats, home + 1)
    for _ in moves.plan():
        most, tried[0] = max(most, tried[0]), 0
    assert 0 < most <= MAX_TRIALS


def test_reports_of_another_table_are_dropped_and_old_loads_fade():
    moves, table = balancer([4.0, 1, 1, 1], 4, 2)
    assert moves.placement(0).imbalance == pytest.approx(16 / 7)
    report(moves, table, [0, PAIRS, PAIRS, PAIRS], 4, 2, number=2)
    assert moves.placement(0).imbalance == pytest.approx(16 / 7)
    report(moves, table, [0, 0, 0, 4 / 7 * PAIRS], 4, 2, window=2 * HALVED_EVERY)
    assert moves.placement(0).instance_loads == pytest.approx(
        [PAIRS / 7, PAIRS / 28, PAIRS / 28, (1 / 28 + 4 / 7) * PAIRS]
    )


def test_other_seats_end_a_plan():
    moves, _ = balancer([8.0, 1, 1, 1], 4, 2)
    assert [*moves.plan()] and moves.changes()
    half_way = moves.plan()
    next(half_way)
    moves.use(2, [[0, 3, 1, -1, 2, -1, -1, -1]], [0, 1, 2])
    assert [*half_way] == [] and not moves.changes()
    assert [*moves.plan()] and all(change.number < 6 for change in moves.changes())


def test_an_exchange_frees_a_slot_only_once_its_expert_is_elsewhere():
    """Two heavy experts on one of two seats, which have a free slot each."""
    moves, table = balancer([5.0, 1, 5, 1], 2, 3)
    assert [*moves.plan()] and moves.placement(0).imbalance > 1.6
    first = moves.changes()
    assert all(table[change.number] < 0 for change in first)
    _, _, turns = carried_out(moves, table, 2)
    assert turns > 1 and moves.placement(0).imbalance == pytest.approx(1, abs=0.05)
