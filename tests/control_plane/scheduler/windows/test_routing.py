"""Dense rows and slots, and Q-route against Res-route."""

from hypothesis import given
from hypothesis import strategies as st

from control_plane.scheduler.windows.routing import DenseList, Routes, build_routes
from nanocp.values.table import DIGEST_MASK, ROW, InstanceTable
from nanocp.values.table_changes import RowChange, TableChanges

actions = st.lists(st.tuples(st.booleans(), st.integers(1, 8), st.booleans()), max_size=50)


@given(actions)
def test_changes_bring_another_table_to_the_same_dense_list(actions):
    """`adds, request, takes changes now`: the table asserts that no hole is ever left."""
    dense, table, present, digest = DenseList(ROW), InstanceTable(0, 1), set(), 0
    for adds, request_id, takes in actions:
        if adds and request_id not in present:
            dense.add(request_id)
            present.add(request_id)
        elif not adds and request_id in present:
            dense.remove(request_id)
            present.remove(request_id)
        if takes:
            before = list(table.rows)
            changes, difference = dense.take_changes()
            digest += difference
            table.apply(TableChanges(rows=tuple(RowChange(*change) for change in changes)))
            assert table.rows == dense.entries and set(dense.entries) == present
            assert table.digest == digest & DIGEST_MASK
            for row, new in changes:
                assert (before[row] if row < len(before) else None) != new, (
                    "a change that changes nothing"
                )


bindings = st.dictionaries(
    st.integers(1, 30),
    st.tuples(st.integers(0, 3), st.sets(st.integers(0, 3), min_size=1)),
    max_size=12,
)


@given(bindings)
def test_res_route_is_the_transpose_of_q_route(bindings):
    q_route, res_route = build_routes(
        [(r, moe, sorted(kv)) for r, (moe, kv) in bindings.items()], 4
    )
    routes = Routes(4)
    for request_id, (moe_binding, kv_binding) in sorted(bindings.items()):
        routes.add(request_id, moe_binding, kv_binding)
    q_changes, res_changes = routes.take_route_changes()
    tables = [InstanceTable(instance, 4) for instance in range(4)]
    for i, table in enumerate(tables):
        table.apply(
            TableChanges(
                q_route=tuple(q_changes.get(i, ())), res_route=tuple(res_changes.get(i, ()))
            )
        )
    for i in range(4):
        assert tables[i].digest == routes.digests[i] & DIGEST_MASK
        assert q_route[i][i] == []
        for j in range(4):
            assert q_route[i][j] == res_route[j][i]
            assert tables[i].q_route[j] == tables[j].res_route[i]
            assert sorted(tables[i].q_route[j]) == q_route[i][j]
