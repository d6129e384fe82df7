"""The way from term to term, without streams and processes."""

from control_plane.coordinator.members.terms import Standing, Terms
from nanocp.values.members import Member

FIRST, SECOND, THIRD = (Member("instance", number) for number in range(3))


class Steps:
    """Records what is to be done."""

    def __init__(self):
        self.calls = []

    def ask_to_leave(self, instance):
        self.calls.append(("leave", instance.instance))

    def ask_to_join(self):
        self.calls.append("join")

    def term_began(self):
        self.calls.append("began")

    def term_ended(self):
        self.calls.append("ended")

    def take(self):
        calls, self.calls = self.calls, []
        return calls


def all_left(terms, term, *instances):
    for instance in instances:
        terms.has_left(instance, term)


def all_joined(terms, term, *instances):
    for instance in instances:
        terms.has_joined(instance, term)


def serving():
    """Three instances in term 1."""
    steps = Steps()
    terms = Terms([FIRST, SECOND, THIRD], steps)
    for instance in terms.standing:
        terms.arrived(instance)
    all_joined(terms, 1, *terms.standing)
    assert steps.take() == ["join", "began"] and terms.is_serving
    return terms, steps


def left_out(terms):
    """Instances that have a process and are not in the term."""
    return [each for each in terms.present if each not in terms.seats]


def test_a_term_is_joined_when_all_are_here_and_begins_when_all_have_joined():
    steps = Steps()
    terms = Terms([FIRST, SECOND], steps)
    terms.arrived(SECOND)
    assert (terms.number, terms.may_be_joined, steps.take()) == (0, False, [])
    terms.arrived(FIRST)
    assert (terms.number, terms.may_be_joined, steps.take()) == (1, True, ["join"])
    terms.has_joined(FIRST, 1)
    assert not terms.is_serving
    terms.has_joined(SECOND, 1)
    assert terms.is_serving and steps.take() == ["began"]


def test_a_term_without_a_loss_ends_when_every_instance_has_left_it():
    terms, steps = serving()
    terms.end()
    terms.end()
    assert steps.take() == ["ended", ("leave", 0), ("leave", 1), ("leave", 2)]
    all_left(terms, 1, FIRST, SECOND)
    assert terms.those(Standing.LEAVING) == [THIRD] and steps.take() == []
    terms.has_left(THIRD, 1)
    assert (terms.number, steps.take()) == (2, ["join"])


def test_a_lost_seat_is_waited_for():
    terms, steps = serving()
    terms.lost(SECOND, terms.seats)
    assert steps.take() == ["ended", ("leave", 0), ("leave", 2)]
    all_left(terms, 1, FIRST, THIRD)
    assert steps.take() == [] and not terms.may_be_joined
    terms.arrived(SECOND)
    assert steps.take() == ["join"]


def test_a_loss_while_others_leave_changes_nothing_for_them():
    terms, steps = serving()
    terms.lost(SECOND, terms.seats)
    terms.lost(THIRD, terms.seats)
    terms.has_left(FIRST, 1)
    assert steps.take() == ["ended", ("leave", 0), ("leave", 2)]
    terms.arrived(THIRD)
    terms.arrived(SECOND)
    assert (terms.number, steps.take()) == (2, ["join"])


def test_a_loss_while_others_join_begins_the_term_after():
    terms, steps = serving()
    terms.end()
    all_left(terms, 1, *terms.standing)
    terms.has_joined(FIRST, 2)
    steps.take()
    terms.lost(SECOND, terms.seats)
    assert steps.take() == [("leave", 0), ("leave", 2)], "term 2 has not served"
    terms.has_joined(THIRD, 2)
    terms.has_left(FIRST, 1)
    assert terms.those(Standing.LEAVING) == [FIRST, THIRD], "one was late, one of term 1"
    all_left(terms, 2, FIRST, THIRD)
    terms.arrived(SECOND)
    assert (terms.number, steps.take()) == (3, ["join"])


def test_it_is_known_what_the_next_term_waits_for():
    waited_for = []
    terms = Terms([FIRST, SECOND], Steps(), waited_for.append)
    terms.arrived(FIRST)
    terms.arrived(SECOND)
    assert waited_for[-1] == "join"
    all_joined(terms, 1, FIRST, SECOND)
    terms.lost(SECOND, terms.seats)
    assert waited_for[-1] == "leave"
    terms.has_left(FIRST, 1)
    assert waited_for[-1] == "load"
    terms.arrived(SECOND)
    assert waited_for[-1] == "join"
    terms.lost(SECOND, terms.seats)
    assert waited_for[-1] == "leave"
    terms.lost(FIRST, terms.seats)
    assert waited_for[-1] == "load", "nobody is left who could leave"


def test_words_of_another_term_are_not_taken():
    terms, steps = serving()
    terms.end()
    steps.take()
    all_left(terms, 0, *terms.standing)
    assert steps.take() == []
    all_left(terms, 1, *(each for each in terms.standing for _ in range(2)))
    all_joined(terms, 1, *terms.standing)
    assert steps.take() == ["join"] and not terms.is_serving


def test_survivors_go_on_without_a_lost_seat_and_take_it_back_in_order():
    terms, steps = serving()
    terms.lost(SECOND, [FIRST, THIRD])
    assert steps.take() == ["ended", ("leave", 0), ("leave", 2)]
    all_left(terms, 1, FIRST, THIRD)
    assert terms.number == 2 and terms.standing[SECOND] is Standing.ABSENT
    all_joined(terms, 2, FIRST, THIRD)
    assert terms.is_serving and steps.take() == ["join", "began"] and not terms.keeps_rows
    terms.arrived(SECOND)
    assert terms.is_serving and left_out(terms) == [SECOND] and steps.take() == []
    terms.change([FIRST, SECOND, THIRD], keeps_rows=True)
    assert steps.take() == ["ended", ("leave", 0), ("leave", 2)]
    all_left(terms, 2, FIRST, THIRD)
    assert steps.take() == ["join"] and terms.keeps_rows


def test_a_loss_in_a_planned_change_keeps_no_rows():
    terms, steps = serving()
    terms.change([FIRST, SECOND], keeps_rows=True)
    terms.has_left(FIRST, 1)
    terms.lost(SECOND, [FIRST, THIRD])
    assert not terms.keeps_rows
    terms.has_left(THIRD, 1)
    assert steps.take()[-1] == "join" and terms.standing[THIRD] is Standing.JOINING


def test_an_instance_that_is_not_in_the_next_term_leaves_and_waits():
    terms, _ = serving()
    terms.change([FIRST, SECOND], keeps_rows=True)
    all_left(terms, 1, FIRST, SECOND)
    assert terms.number == 1, "the third may still write"
    terms.has_left(THIRD, 1)
    assert terms.number == 2 and terms.standing[THIRD] is Standing.OUT
    assert left_out(terms) == [THIRD]
