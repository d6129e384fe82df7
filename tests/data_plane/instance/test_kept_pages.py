"""What an instance tells the next controller of its pages."""

from dataclasses import replace
from types import SimpleNamespace

import pytest

from harness.hash_clusters.hash_instance import HashInstance, region_layout
from harness.hash_clusters.hash_model import HashModel
from harness.transports.local_exchange import LocalExchange
from harness.transports.local_pages import LocalPageRing, local_peer_rings
from nanocp.config.cluster import ClusterConfig
from nanocp.config.whole import Config
from nanocp.values.plan import CARRY_PAGE, InstancePlan, TargetRun, Transfer
from nanocp.values.table import InstanceTable
from nanocp.values.table_changes import PageRun, TableChanges

CONFIG = Config(cluster=ClusterConfig(num_instances=2, num_frames=16, max_model_len=1024))
OF_7 = (PageRun(7, 0, 2, 4), PageRun(7, 5, 1, 9))
OF_8 = PageRun(8, 3, 1, 6)


class Story:
    """Instance 0, and its table as the controller knows it."""

    def __init__(self, config=CONFIG, linear_layers=()):
        exchange = LocalExchange.create_all(2, region_layout(config), config.limits)[0]
        model, moves = HashModel(linear_layers=linear_layers), local_peer_rings(2)[0]
        self.instance = HashInstance(config, model, exchange, [LocalPageRing()], moves)
        self.table, self.window = InstanceTable(0, 2), 0

    def begin(self, **changes):
        base = self.table.digest
        self.table.apply(changes := TableChanges(**changes))
        plan = InstancePlan(0, self.window, self.window, 1, base, self.table.digest)
        assert self.instance.begin(plan._replace(changes=changes)) is None
        self.window += 1

    def expect(self, request_id, first_page, frame):
        self.instance.pages.expect(
            Transfer(3, request_id, 640, (TargetRun(first_page, 1, 0, frame),))
        )

    def kept(self):
        """Leave the term, and say what is kept."""
        self.instance.leave()
        return self.instance.kept_pages()


@pytest.fixture
def story():
    story = Story()
    story.begin(pages=(*OF_7, OF_8))
    return story


def test_the_pages_of_the_table_are_kept(story):
    assert story.kept() == [*OF_7, OF_8]
    assert story.kept() == [*OF_7, OF_8], "another controller may be lost before a term begins"


def test_no_expert_loads_once_the_term_is_left(story, monkeypatch):
    stopped = []
    monkeypatch.setattr(story.instance.experts.slots, "stop", lambda: stopped.append(True))
    story.kept()
    assert stopped, "else a hello would say what slots held"


@pytest.mark.parametrize(
    ("first_page", "frame"), [(0, 5), (5, 9)], ids=["as another page", "as the same page"]
)
def test_a_request_whose_frame_was_given_to_another_keeps_nothing(story, first_page, frame):
    """The plan that takes the frame from its owner is still under way."""
    story.expect(99, first_page, frame)
    assert story.kept() == [OF_8]


def test_a_request_whose_frames_were_given_to_its_own_next_attempt_in_another_order(story):
    story.expect(7, 1, 4)
    assert story.kept() == [OF_8]


def test_a_request_whose_frame_was_anothers_in_between_keeps_nothing(story):
    story.expect(99, 0, 5)
    story.expect(7, 1, 5)
    assert story.kept() == [OF_8]


def test_a_request_keeps_what_its_own_ticket_brought(story):
    story.expect(9, 0, 12)
    story.begin(pages=(PageRun(9, 0, 1, 12),))
    assert story.kept() == [*OF_7, OF_8, PageRun(9, 0, 1, 12)]


def test_an_instance_whose_table_differs_tells_of_no_page(story):
    plan = InstancePlan(0, 1, 1, 1, base_digest=5, result_digest=5)
    assert story.instance.begin(plan) is not None
    assert story.kept() == []


def test_tickets_are_forgotten_when_every_plan_made_before_them_was_applied(story):
    story.expect(8, 0, 9)
    story.begin(forgotten=(7,))
    story.begin()
    assert len(story.instance._table._given) == 1
    story.begin(pages=(PageRun(7, 0, 1, 9),))
    assert not story.instance._table._given
    assert story.kept() == [OF_8, PageRun(7, 0, 1, 9)]


@pytest.mark.parametrize("depth", [1, 4])
def test_a_row_may_go_on_from_where_its_state_is_folded_to_where_it_was(depth):
    cluster = replace(CONFIG.cluster, carry_pages=1)
    story = Story(replace(CONFIG, cluster=cluster), linear_layers=(1,))
    story.begin(pages=(PageRun(7, 0, 1, 4), PageRun(7, CARRY_PAGE, 1, cluster.num_frames)))
    states = story.instance._frames.states
    states.depth = depth
    for position in range(9):
        states.step(0, 1, position, position)
    story.instance._rows[7] = SimpleNamespace(position=9)
    assert story.instance.restarts() == [(7, 9 - depth, 9)]
    states.step(0, 1, 9, 9)  # of a step that is abandoned in a later layer
    assert story.instance.restarts() == [(7, 10 - depth, 9)]
