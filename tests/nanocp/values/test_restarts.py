from nanocp.values.restarts import Restarts


def test_pauses_grow_and_the_last_one_repeats():
    restarts = Restarts((0.0, 1.0, 4.0))
    assert [restarts.pause_s() for _ in range(5)] == [0.0, 1.0, 4.0, 4.0, 4.0]
    restarts.clear()
    assert restarts.pause_s() == 0.0


def test_too_many_ends_within_a_time_are_the_last():
    restarts = Restarts((1.0, 2.0), max_ends=3, within_s=10.0)
    assert [restarts.pause_s(now) for now in (0.0, 5.0, 10.0)] == [1.0, 2.0, 2.0]
    assert restarts.pause_s(14.9) is None
    assert restarts.pause_s(30.0) == 1.0
