"""One lock a purpose, held across processes: two servers of one rig never act at the same time.

The lock library's files die with their holder's process, so a killed server blocks nobody.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

from forge.parts.ground.errors import RigError
from forge.parts.ground.state import private_folder


@asynccontextmanager
async def held_lock(folder: Path, purpose: str, wait_s: float = 5.0) -> AsyncIterator[None]:
    """Hold `folder`/`purpose`.lock; BUSY when another process keeps it beyond `wait_s` seconds.

    Polled instead of blocked on: a blocking wait in a thread could not be cancelled.
    """
    import filelock

    private_folder(folder)
    lock = filelock.FileLock(folder / f"{purpose}.lock", mode=0o600, thread_local=False)
    deadline = time.monotonic() + wait_s
    while True:
        try:
            lock.acquire(timeout=0)
            break
        except filelock.Timeout:
            if time.monotonic() > deadline:
                raise RigError(
                    "BUSY",
                    f"another client of this rig is in the middle of '{purpose}'",
                    "get_system_status()",
                ) from None
            await asyncio.sleep(0.05)
        except OSError as error:
            raise RigError("DENIED", f"the lock {lock.lock_file}: {error.strerror}") from error
    try:
        yield
    finally:
        lock.release()
