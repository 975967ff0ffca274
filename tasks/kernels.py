"""Where an engine's compiled kernels live, around its start."""

from __future__ import annotations

import logging
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from conf.schema import RunConfig
from infra.device import device_facts
from infra.kernel_cache import KernelCache, machine_kind
from infra.provenance import versions
from infra.store_files import StoreFiles

log = logging.getLogger(__name__)


def kernel_cache(config: RunConfig) -> KernelCache | None:
    """The folder of `cluster.kernel_cache` on this machine; None leaves every library its own."""
    if config.cluster.kernel_cache is None:
        return None
    kind = machine_kind(device_facts(), versions())
    return KernelCache(Path(config.cluster.kernel_cache).expanduser() / kind, kind)


@contextmanager
def compiled_kernels(config: RunConfig, url: str) -> Iterator[None]:
    """Around what compiles: kernels come from the store and, where new ones were made, go back to it.

    `url`: the store's, as the driver resolved it. Sets the variables of the compilers' caches, for this process and
    those it starts.
    """
    cache = kernel_cache(config)
    if cache is None:
        yield
        return
    os.environ.update(cache.environment())
    kept = StoreFiles(url, config.storage.options) if config.storage.keep_kernels else None
    if kept is not None:
        cache.fetch(kept)
    yield
    if kept is not None:
        try:
            cache.keep(kept)
        except (OSError, ValueError) as error:
            # The engine runs; only the next machine has to compile again.
            log.warning("compiled kernels could not be kept in the store: %s", error)
