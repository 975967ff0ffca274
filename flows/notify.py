"""Telling people through a Prefect notification block."""

from __future__ import annotations

import logging

from prefect.blocks.abstract import NotificationBlock
from prefect.blocks.core import Block

log = logging.getLogger(__name__)


def notify(block: str, subject: str, body: str) -> bool:
    """Send through the block TYPE/NAME; False, with a logged error, when that does not work.

    What is told of has failed already and must not be hidden by a messenger that fails, too.
    """
    try:
        loaded = Block.load(block)
        if not isinstance(loaded, NotificationBlock):
            raise TypeError(f"{type(loaded).__name__} is not a notification block")
        loaded.notify(body, subject)
    except Exception as error:
        # Blocks of many services and their libraries: their errors have no common base.
        log.error("sweep.corridor.notify = %s: nobody was told: %s: %s", block, type(error).__name__, error)
        return False
    return True
