"""What a broker does with its logs now and then: flushes by time, retention, checkpoints; and with old offsets."""

from __future__ import annotations

import asyncio
import logging
import time

from spark_klog.broker.broker import Broker

_log = logging.getLogger(__name__)
_LONGEST_PAUSE = 1.0


async def keep_house(broker: Broker) -> None:
    """Runs until it is cancelled. A disk that fails is told in the log; the next round tries again."""
    logs, config = broker.logs, broker.config
    shortest = min(config.log.flush_ms, config.housekeeping_ms, config.checkpoint_ms) / 1000
    pause = max(0.05, min(_LONGEST_PAUSE, shortest))
    expired_at = checkpoint_at = offsets_at = time.monotonic()
    while True:
        await asyncio.sleep(pause)
        logs.flush_due()
        now = time.monotonic()
        if now - expired_at >= config.housekeeping_ms / 1000:
            logs.delete_expired()
            expired_at = now
        if now - offsets_at >= config.offsets_check_ms / 1000:
            broker.expire_offsets()
            offsets_at = now
        if now - checkpoint_at >= config.checkpoint_ms / 1000:
            try:
                logs.write_checkpoints()
            except OSError as error:
                _log.error("checkpoints of %s can't be written: %s", logs.path, error)
            checkpoint_at = now
