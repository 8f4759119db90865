"""Measures how fast this machine reads its memory: the bound of every decode step.

Knows no model and no accelerator.
"""

from __future__ import annotations

import os
import time
from concurrent.futures import ThreadPoolExecutor

import numpy as np

_SPEED_BYTES = 512_000_000  # of all readers together: beyond most machines' caches
_SPEED_PASSES = 5


def read_speed() -> float:
    """Bytes a second that all of this process's processors read together: the best of some passes.

    Takes half a gigabyte of memory and less than a second on two cores.
    """
    readers = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    readers = readers or 1
    buffers = [np.ones(_SPEED_BYTES // readers // 8, dtype=np.int64) for _ in range(readers)]
    best = 0.0
    with ThreadPoolExecutor(readers) as pool:
        for _ in range(_SPEED_PASSES):
            begun = time.perf_counter()
            list(pool.map(np.sum, buffers))  # numpy leaves the interpreter's lock while it sums
            read = sum(buffer.nbytes for buffer in buffers)
            best = max(best, read / (time.perf_counter() - begun))
    return best
