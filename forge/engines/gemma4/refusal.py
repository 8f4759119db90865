"""What is said of a model folder that cannot be served as it stands.

Knows no key and no tensor: those who refuse name them.
"""

from __future__ import annotations

_REFUSAL_SHOWN = 80  # characters of a value that a message repeats


class ModelRefused(Exception):
    """A model folder cannot be served; the message names what is not understood, for people."""


class ConfigRefused(ModelRefused):
    """Something in config.json or generation_config.json is not understood."""


class WeightsRefused(ModelRefused):
    """A weights file is damaged, or holds other tensors than the config asks for."""


def shown_value(value: object) -> str:
    """`value` as a message repeats it: as Python writes it, cut when it is long."""
    text = repr(value)
    return text if len(text) <= _REFUSAL_SHOWN else text[: _REFUSAL_SHOWN - 1] + "…"
