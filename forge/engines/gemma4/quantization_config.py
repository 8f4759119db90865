"""Reads `quantization_config`: which matrices a checkpoint packs, and refuses every other kind.

Knows no tensors. The one kind that is read is what Google's `-w4a16-ct` releases are: 4-bit
integers, a scale for each group of a row, no offsets, activations as they come.

Keys and what they do: compressed-tensors 0.20.1, quantization/quant_config.py, quant_scheme.py,
quant_args.py and utils/match.py.
"""

from __future__ import annotations

import re

from forge.engines.gemma4.config import PackedRule
from forge.engines.gemma4.config_fields import ConfigFields

_PACKED_FORMAT = "pack-quantized"
_PACKED_WORD = 8  # integers of 4 bits in a word of 32: a group may not end within one
# Book-keeping, how scales were found, and types of offsets that symmetric integers do not have.
_PACKED_HARMLESS = frozenset(("global_compression_ratio", "run_compressed", "version"))
_PACKED_HARMLESS_ARGUMENTS = frozenset(("observer", "observer_kwargs", "zp_dtype"))


def read_packed_rule(text: ConfigFields, outside: ConfigFields) -> PackedRule | None:
    """What `quantization_config` says, in either half of the config; None where there is none.

    Raises ConfigRefused that names whatever could move a weight and is not understood.
    """
    stated = [
        fields for fields in (text, outside) if fields.value("quantization_config") is not None
    ]
    if not stated:
        return None
    rules = {_packed_rule(fields.child("quantization_config")) for fields in stated}
    if len(rules) > 1:
        raise outside.refused("quantization_config", "text_config's says otherwise")
    return rules.pop()


def _packed_rule(fields: ConfigFields) -> PackedRule:
    fields.one_of("quant_method", ("compressed-tensors",))
    fields.one_of("format", (_PACKED_FORMAT,))
    fields.one_of("quantization_status", ("compressed",), "compressed")
    for key in ("sparsity_config", "transform_config"):
        if fields.value(key) not in (None, {}):
            raise fields.refused(key, "this engine reads none")
    groups = fields.child("config_groups")
    if len(groups.keys()) != 1:
        raise fields.refused("config_groups", "this engine reads one group")
    scheme = groups.child(groups.keys()[0])
    scheme.one_of("format", (_PACKED_FORMAT, None))
    group = _packed_arguments(scheme.child("weights"))
    rule = PackedRule(group, _packed_names(scheme, "targets"), _packed_names(fields, "ignore"))
    if not rule.targets:
        raise scheme.refused("targets", "nothing would be packed")
    scheme.refuse_rest(())
    fields.refuse_rest(_PACKED_HARMLESS)
    return rule


def _packed_arguments(weights: ConfigFields) -> int:
    """The size of a group; everything else has to be the one way that is read."""
    weights.one_of("num_bits", (4,))
    weights.one_of("type", ("int",), "int")
    weights.one_of("symmetric", (True,), True)
    weights.one_of("strategy", ("group",))
    weights.one_of("dynamic", (False,), False)
    # "weight" and "static" only say in which order the integers were found.
    weights.one_of("actorder", (None, False, "weight", "static"))
    weights.one_of("scale_dtype", (None, "bfloat16", "torch.bfloat16"))
    group = weights.whole("group_size")
    if group % _PACKED_WORD:
        raise weights.refused("group_size", f"it has to be a multiple of {_PACKED_WORD}")
    weights.refuse_rest(_PACKED_HARMLESS_ARGUMENTS)
    return group


def _packed_names(fields: ConfigFields, key: str) -> tuple[str, ...]:
    """A list of names and expressions."""
    listed = fields.value(key)
    if listed is None:
        return ()
    if not isinstance(listed, list) or not all(isinstance(name, str) for name in listed):
        raise fields.refused(key, "it has to be a list of names")
    for name in listed:
        try:
            re.compile(name[3:] if name.startswith("re:") else "")
        except (re.error, RecursionError, OverflowError):
            raise fields.refused(key, f"{name[:80]!r} is no expression") from None
    return tuple(listed)
