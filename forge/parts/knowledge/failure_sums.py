"""The arithmetic behind a failure's advice: from the numbers in a message to the number that fits.

Each sum takes the captured values as text and returns further ones; what cannot be computed is left
out, and the advice then says so in words. Knows no message.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping

_UNITS = {"": 1, "b": 1, "k": 1024, "m": 1024**2, "g": 1024**3, "t": 1024**4}


def plain_number(text: str) -> float | None:
    """``29,000`` or ``2.89`` as a number; None where it is none."""
    try:
        value = float(text.replace(",", "").strip().rstrip("."))
    except ValueError:
        return None
    return value if math.isfinite(value) else None


def size_in_bytes(text: str) -> float | None:
    """``21.95G``, ``905.37M``, ``16.2 GiB`` in bytes (powers of 1024); None where it is none."""
    word = text.replace(" ", "").replace(",", "").lower().removesuffix("ib").removesuffix("b")
    unit = word[-1:] if word[-1:].isalpha() else ""
    number = plain_number(word.removesuffix(unit))
    return None if number is None or unit not in _UNITS else number * _UNITS[unit]


def _context_that_fits(values: Mapping[str, str]) -> dict[str, str]:
    """Largest context in whole blocks of 16 tokens: given by the message, or by the rule of three.

    KV bytes grow no faster than the context, so asked * available / needed always fits.
    """
    if given := plain_number(values.get("estimated", "")):
        return {"fits": str(int(given) // 16 * 16 or int(given))}
    asked = plain_number(values.get("asked", ""))
    needed = plain_number(values.get("needed", ""))
    available = plain_number(values.get("available", ""))
    if asked is None or not needed or available is None:
        return {}
    return {"fits": str(int(asked * available / needed) // 16 * 16)}


def _chips_needed(values: Mapping[str, str]) -> dict[str, str]:
    """The next power of two of chips over which `used` fits into `capacity` each."""
    used = size_in_bytes(values.get("used", ""))
    capacity = size_in_bytes(values.get("capacity", ""))
    if not used or not capacity or used <= capacity:
        return {}
    return {
        "chips": str(2 ** math.ceil(math.log2(used / capacity))),
        "excess": f"{(used - capacity) / 1024**3:.2f}G",
    }


def _room_for_programs(values: Mapping[str, str]) -> dict[str, str]:
    """What the reservation lacks, in GiB."""
    wanted, free = size_in_bytes(values.get("wanted", "")), size_in_bytes(values.get("free", ""))
    if wanted is None or free is None or wanted <= free:
        return {}
    return {"lacking": f"{(wanted - free) / 1024**3:.2f} GiB"}


def _memory_limit(values: Mapping[str, str]) -> dict[str, str]:
    """The next power of two of GiB that leaves a quarter of what was used (MiB) to spare."""
    used = plain_number(values.get("used", ""))
    if not used:
        return {}
    return {"fits": f"{2 ** math.ceil(math.log2(used * 1.25 / 1024))}Gi"}


def _utilization_free(values: Mapping[str, str]) -> dict[str, str]:
    """The share of the card that is free now, rounded down to a hundredth."""
    free, total = plain_number(values.get("free", "")), plain_number(values.get("total", ""))
    if free is None or not total or free <= 0:
        return {}
    return {"fits": f"{math.floor(100 * free / total) / 100:.2f}"}


def _largest_divisor(values: Mapping[str, str]) -> dict[str, str]:
    """The largest number of devices, at most the asked one, that divides the heads."""
    heads, asked = plain_number(values.get("heads", "")), plain_number(values.get("asked", ""))
    if not heads or not asked:
        return {}
    return {"fits": str(max(n for n in range(1, int(asked) + 1) if int(heads) % n == 0))}


def _prompt_that_fits(values: Mapping[str, str]) -> dict[str, str]:
    """Tokens left for the answer, or the excess of the prompt, in a context of `limit`."""
    limit, prompt = plain_number(values.get("limit", "")), plain_number(values.get("prompt", ""))
    if limit is None or prompt is None:
        return {}
    if prompt < limit:
        return {"fits": str(int(limit - prompt))}
    return {"excess": str(int(prompt - limit) + 1)}


def _probe_window(values: Mapping[str, str]) -> dict[str, str]:
    """Probes of 10 s that cover half an hour, the longest window given to a GPU service."""
    return {"window": "1800", **values}


FailureSum = Callable[[Mapping[str, str]], dict[str, str]]
FAILURE_SUMS: dict[str, FailureSum] = {
    "context_that_fits": _context_that_fits,
    "chips_needed": _chips_needed,
    "room_for_programs": _room_for_programs,
    "memory_limit": _memory_limit,
    "utilization_free": _utilization_free,
    "largest_divisor": _largest_divisor,
    "prompt_that_fits": _prompt_that_fits,
    "probe_window": _probe_window,
}
