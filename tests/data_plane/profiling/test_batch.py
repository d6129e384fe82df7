"""The batches that `nanocp profile` measures load the instances as they say."""

from hypothesis import given
from hypothesis import strategies as st

from data_plane.profiling.batch import BatchRequest, linked_batches, local_batches, num_frames
from nanocp.config.cluster import BoundsConfig
from nanocp.simulator.fit.fit import loads_of
from nanocp.values.plan import PAGE_SIZE


@given(st.integers(1, 5000), st.permutations(range(6)), st.integers(1, 6))
def test_a_request_lies_on_its_kv_binding_once_and_evenly(length, instances, degree):
    request = BatchRequest(length, tuple(instances[:degree]))
    pages = [list(request.pages_of(instance)) for instance in range(6)]
    num_pages = -(-length // PAGE_SIZE)
    assert sorted(page for held in pages for page in held) == list(range(num_pages))
    assert num_pages - 1 in pages[request.moe_binding]
    counts = [len(pages[instance]) for instance in request.kv_binding]
    assert max(counts) - min(counts) <= 1
    assert sum(request.tokens_of(instance) for instance in range(6)) == length


@given(
    st.integers(2, 5),
    st.integers(512, 8192),
    st.integers(1, 64),
    st.integers(1, 16),
    st.integers(1, 48),
)
def test_batches_load_all_instances_alike_and_keep_the_bounds(
    num_instances, max_tokens, rows, links, partials
):
    bounds = BoundsConfig(
        max_rows=rows, max_links=links, max_attention_rows=rows + links, max_partials=partials
    )
    local = list(local_batches(num_instances, bounds.max_rows, max_tokens))
    linked = list(linked_batches(num_instances, bounds, max_tokens))
    assert local
    for batch in [*local, *linked]:
        loads = loads_of(batch, num_instances)
        for of_instance in (loads.kv_tokens, loads.rows, loads.attention_rows, loads.links):
            assert len(set(of_instance)) == 1
        assert loads.kv_tokens[0] <= max_tokens
        assert loads.rows[0] <= bounds.max_rows
        assert loads.attention_rows[0] <= bounds.max_attention_rows
        assert loads.links[0] <= bounds.max_partials
        assert max(num_frames(batch, instance) for instance in range(num_instances)) <= -(
            -max_tokens // PAGE_SIZE
        )
    assert not any(loads_of(batch, num_instances).links[0] for batch in local)
    assert all(loads_of(batch, num_instances).links[0] > 0 for batch in linked)
