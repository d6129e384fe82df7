"""The count of a step's instructions does not depend on the machine."""

import step_instructions


def test_a_longer_run_counts_the_same_step():
    counts = [step_instructions.count(num)[0] * num for num in (4, 8, 12)]
    first, second = counts[1] - counts[0], counts[2] - counts[1]
    assert first == second > 4 * 1000
