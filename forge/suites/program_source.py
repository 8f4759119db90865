"""The text of a class, for a program of its own that carries it. Knows nothing of the class."""

from __future__ import annotations

import functools
import inspect


@functools.cache  # a suite in one file is long, and each look at it reads all of it
def program_source(one: type) -> str:
    """The source of `one`, which must need nothing beyond its own text and the program's head."""
    return inspect.getsource(one)
