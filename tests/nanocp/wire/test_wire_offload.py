"""Commands about pages outside the frames survive the wire."""

from hypothesis import given
from hypothesis import strategies as st

from nanocp.values.offload import Fetch, StoredPage, Stow
from nanocp.wire.offload import fetch_from_wire, fetch_to_wire, stow_from_wire, stow_to_wire
from nanocp.wire.v1 import cluster_pb2 as pb

U32, TICKET = st.integers(0, 2**32 - 1), st.integers(1, 2**64 - 1)


def some(pages):
    return st.lists(pages, min_size=1, max_size=4).map(tuple)


@given(st.builds(Stow, TICKET, U32, some(st.tuples(U32, U32)), st.booleans()))
def test_a_stow_survives(stow):
    data = stow_to_wire(stow).SerializeToString()
    assert stow_from_wire(pb.Stow.FromString(data)) == stow


@given(st.builds(Fetch, TICKET, U32, some(st.builds(StoredPage, U32, U32, U32))))
def test_a_fetch_survives(fetch):
    data = fetch_to_wire(fetch).SerializeToString()
    assert fetch_from_wire(pb.Fetch.FromString(data)) == fetch
