"""Joining a Ray cluster: what can be said before Ray is asked."""

from __future__ import annotations

import pytest

from conf.schema import Cluster
from infra.ray_cluster import ClusterError, ray_cluster


@pytest.mark.parametrize("address", ["127.0.0.1:9", "ray://127.0.0.1:9"])
def test_an_address_where_nobody_listens_is_an_error_at_once(address: str) -> None:
    cluster = Cluster(kind="existing", address=address)
    with pytest.raises(ClusterError, match=f"cluster.address={address}: could not connect"), ray_cluster(cluster, "x"):
        pass
