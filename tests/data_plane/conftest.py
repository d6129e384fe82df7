"""A cluster's id, for tests of what its members share."""

import uuid

import pytest

from data_plane.transport.shared_memory import unlink_cluster


@pytest.fixture
def cluster_id():
    """A fresh id; nothing of it may be left."""
    cluster_id = f"test-{uuid.uuid4().hex}"
    yield cluster_id
    left = unlink_cluster(cluster_id)
    assert not left
