"""How much memory the default device has, as far as it says.

Knows no model.
"""

from __future__ import annotations

import jax


def device_memory_bytes() -> int | None:
    """Bytes that JAX may use of it; None where it does not say, as a CPU does not, or is not there.

    For a card this is the share that JAX takes for itself, three quarters unless told otherwise
    (XLA_PYTHON_CLIENT_MEM_FRACTION).
    """
    try:
        said = jax.local_devices()[0].memory_stats() or {}
    except RuntimeError:  # no device can be had: loading will say why
        return None
    limit = said.get("bytes_limit")
    return int(limit) if limit else None
