"""Which engine is asked, and when one that failed is tried again."""

from data_plane.prefill.engines import EnginePool, EngineState


def pool_of(num, max_tokens=1000):
    pool = EnginePool([f"http://e{index}" for index in range(num)], max_tokens)
    for engine in pool.due(0.0):
        pool.passed(engine, "process", 0.0)
    return pool


def test_the_least_loaded_is_asked_and_equal_ones_in_turn():
    pool = pool_of(3)
    assert [pool.choose(100, 0.0).index for _ in range(4)] == [0, 1, 2, 0]
    pool.release(pool.engines[2], 100)
    assert pool.choose(100, 0.0).index == 2


def test_tokens_in_flight_are_bounded_but_one_prompt_is_always_taken():
    pool = pool_of(1, max_tokens=1000)
    engine = pool.choose(5000, 0.0)
    assert pool.choose(1, 0.0) is None
    pool.release(engine, 5000)
    assert pool.choose(600, 0.0) is engine
    assert pool.choose(600, 0.0) is None and pool.choose(400, 0.0) is engine


def test_an_engine_that_fails_rests_longer_each_time_and_is_asked_only_after_a_probe():
    pool = pool_of(1)
    engine, now, rests = pool.engines[0], 10.0, []
    assert pool.failed(engine, "it died", now)
    for _ in range(7):
        assert not pool.failed(engine, "it died again", now), "it rests already"
        assert pool.choose(1, now) is None and pool.none_up_since == 10.0
        rests.append(pool.next_change(now) - now)
        now = pool.next_change(now)
        assert pool.due(now - 0.01) == [] and pool.due(now) == [engine]
        assert engine.state is EngineState.PROBED and pool.choose(1, now) is None
        assert pool.due(now) == [], "one probe at a time"
        pool.unpassed(engine, "it died", now, is_busy=True)
    assert rests == [1, 2, 4, 8, 16, 30, 30]
    pool.passed(engine, "another", now)
    assert pool.choose(1, now) is engine and pool.none_up_since is None
    assert pool.failed(engine, "it died", now) and pool.next_change(now) == now + 1


def test_an_engine_that_is_up_is_probed_every_hour_and_goes_on_meanwhile():
    pool = pool_of(1)
    engine, hour = pool.engines[0], 3600.0
    assert pool.next_change(0.0) == hour
    assert pool.due(hour - 1) == [] and pool.due(hour) == [engine] and pool.due(hour) == []
    assert pool.choose(1, hour) is engine, "it goes on"
    pool.unpassed(engine, "no time", hour, is_busy=True)
    assert pool.choose(1, hour) is engine and pool.next_change(hour) == hour + 60
    assert pool.due(hour + 60) == [engine]
    pool.passed(engine, "process", hour + 60)
    assert pool.due(2 * hour) == [] and pool.due(2 * hour + 60) == [engine]
    pool.unpassed(engine, "other KV", 2 * hour + 60, is_busy=False)
    assert pool.choose(1, 2 * hour + 60) is None and pool.problems() == "http://e0: other KV"


def test_an_engine_that_dies_while_it_is_probed_is_not_probed_twice_at_once():
    pool = pool_of(1)
    (engine,) = pool.due(3600.0)
    assert pool.failed(engine, "it died", 3600.0) and pool.due(3610.0) == []
    pool.unpassed(engine, "it died", 3610.0, is_busy=False)
    assert pool.due(3610.0) == [engine]


def test_a_busy_engine_is_left_alone_for_a_moment():
    pool = pool_of(2)
    pool.busy(pool.engines[0], 5.0)
    assert pool.next_change(5.0) == 5.2 and pool.next_change(5.2) == 3600.0
    assert [pool.choose(1, 5.0).index for _ in range(2)] == [1, 1]
    assert pool.choose(1, 5.3).index == 0


def test_a_restarted_engine_is_probed_at_once():
    pool = pool_of(1)
    pool.restarted(pool.engines[0], 5.0)
    assert pool.choose(1, 5.0) is None and pool.due(5.0) == pool.engines
    assert pool.problems() == "http://e0: it was restarted"
