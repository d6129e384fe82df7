"""The window edge that both instances share: plans that do not fit, hand-offs that cross."""

import pytest

from data_plane.transport.exchange import Channel
from harness.hash_clusters.followed_tables import full
from harness.hash_clusters.hash_instance import HashInstance, region_layout
from harness.hash_clusters.hash_model import HashModel
from harness.transports.local_exchange import LocalExchange
from harness.transports.local_pages import LocalPageRing, local_peer_rings
from nanocp.config.cluster import ClusterConfig
from nanocp.config.whole import Config
from nanocp.values.members import Resync
from nanocp.values.plan import HandOff, InstancePlan, RowStart
from nanocp.values.sampling import RowInput, SamplingParams
from nanocp.values.table import InstanceTable
from nanocp.values.table_changes import PageRun, RowChange, TableChanges
from nanocp.wire.rows import encode_row_input

CONFIG = Config(cluster=ClusterConfig(num_instances=2, num_frames=16, max_model_len=1024))
ROW_7 = TableChanges(rows=(RowChange(0, 7),), pages=(PageRun(7, 0, 2, 4),))
ROW_8 = TableChanges(rows=(RowChange(0, 8),), pages=(PageRun(8, 0, 1, 9),))
SECOND_ROW_8 = ROW_8._replace(rows=(RowChange(1, 8),))


@pytest.fixture
def instances():
    exchanges = LocalExchange.create_all(2, region_layout(CONFIG), CONFIG.limits)
    return [
        HashInstance(CONFIG, HashModel(), exchange, [LocalPageRing()], moves)
        for exchange, moves in zip(exchanges, local_peer_rings(2), strict=True)
    ]


class Tables:
    """The tables as the scheduler knows them; makes plans that fit them."""

    def __init__(self):
        self.tables = [InstanceTable(0, 2), InstanceTable(1, 2)]
        self.window = -1

    def plan(self, instance, changes, starts=(), **fields):
        """The next window's plan for the instance, in which these requests' rows start."""
        self.window += 1
        table = self.tables[instance]
        base = table.digest
        table.apply(changes)
        row = encode_row_input(RowInput(5, SamplingParams(max_tokens=9), "front-end:1"))
        rows = tuple(RowStart(request_id, 70, 9, row) for request_id in starts)
        return InstancePlan(
            instance, self.window, self.window, 1, base, table.digest, changes=changes, starts=rows
        )._replace(**fields)


def assert_is(instance, table):
    assert instance._table.now.digest == table.digest
    assert instance._table.now.full_changes() == table.full_changes()


def test_a_plan_for_another_table_is_refused_though_its_result_would_be_right(instances):
    tables = Tables()
    plan = tables.plan(0, ROW_7, starts=[7])
    needed = instances[0].begin(plan._replace(base_digest=5))
    assert needed == Resync(0, "the table's digest is 0x0, the plan's base is 0x5")
    assert_is(instances[0], InstanceTable(0, 2))
    assert instances[0].begin(full(plan, tables.tables[0])) is None
    assert_is(instances[0], tables.tables[0])


def test_a_plan_that_lost_a_change_is_refused(instances):
    tables = Tables()
    plan = tables.plan(0, ROW_7, starts=[7])
    needed = instances[0].begin(plan._replace(changes=plan.changes._replace(rows=())))
    assert needed.reason.endswith(f"the plan's is {plan.result_digest:#x}")
    whole = full(plan, tables.tables[0])
    assert isinstance(instances[0].begin(whole._replace(result_digest=5)), Resync)
    assert instances[0].begin(whole) is None
    assert_is(instances[0], tables.tables[0])


def test_a_full_plan_replaces_the_table_whatever_was_in_it(instances):
    tables = Tables()
    assert instances[0].begin(tables.plan(0, ROW_7, starts=[7])) is None
    plan = tables.plan(0, SECOND_ROW_8, starts=[8])
    instances[0]._table.now.apply(TableChanges(rows=(RowChange(1, 9), RowChange(2, 3))))
    assert isinstance(instances[0].begin(plan), Resync)
    assert instances[0].begin(full(plan, tables.tables[0])) is None
    assert_is(instances[0], tables.tables[0])


def test_two_instances_hand_rows_to_each_other_in_one_window(instances):
    """Both post before either waits (protocol.md, hand-offs)."""
    tables = [Tables(), Tables()]
    for number, changes in enumerate((ROW_7, ROW_8)):
        plan = tables[number].plan(number, changes, starts=[7 + number])
        assert instances[number].begin(plan) is None
        instances[number]._window = None  # its steps have run
    begun = []
    for number in range(2):
        out, to_come = (7, 8) if number == 0 else (8, 7)
        plan = tables[number].plan(
            number,
            TableChanges(rows=(RowChange(0, to_come),)),
            hand_offs_out=(HandOff(out, 1 - number),),
            hand_offs_in=(HandOff(to_come, 1 - number),),
        )
        begun.append(instances[number].begin_steps(plan))
    assert next(begun[0]) == ((Channel.MAILBOX, 1, 1),), "it waits for the other's row"
    for steps in reversed(begun):
        with pytest.raises(StopIteration):
            next(steps)
    assert [[row.request_id for row in i._window.lanes[0].rows] for i in instances] == [[8], [7]]
    assert [list(i._rows) for i in instances] == [[8], [7]]
