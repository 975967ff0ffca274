"""Joining a Ray cluster: what can be said before Ray is asked."""

from __future__ import annotations

import pytest

from conf.schema import Cluster
from infra.ray_cluster import ClusterError, ray_cluster


def test_an_address_where_nobody_listens_is_an_error_at_once() -> None:
    cluster = Cluster(kind="existing", address="127.0.0.1:9")
    with (
        pytest.raises(ClusterError, match=r"cluster.address=127.0.0.1:9: could not connect"),
        ray_cluster(cluster, "x"),
    ):
        pass
