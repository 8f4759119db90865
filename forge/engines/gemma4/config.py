"""The architecture of one Gemma 4 checkpoint in numbers: what config.json says of its text half.

Knows no weights and no array library.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class LayerConfig:
    """One decoder layer.

    `sliding`: it sees `Gemma4Config.window` tokens, else all. `source` is the layer whose keys and
    values it reads: its own index for an owner, else the last owner of its kind. `k_is_v`: it has
    no v_proj, the values are made of the raw output of k_proj. Widths in elements.
    """

    index: int
    sliding: bool
    source: int
    heads: int
    kv_heads: int
    head_dim: int
    intermediate: int
    k_is_v: bool

    @property
    def owner(self) -> bool:
        """Whether it holds keys and values of its own."""
        return self.source == self.index


@dataclass(frozen=True)
class PackedRule:
    """Which matrices a checkpoint stores as packed 4-bit integers, as its config says.

    `group`: columns that share a scale. A module is packed where one of `targets` fits it and none
    of `ignored` does: a whole name, "re:" before an expression for a name's beginning, or "Linear".
    """

    group: int
    targets: tuple[str, ...]
    ignored: tuple[str, ...]


@dataclass(frozen=True)
class Gemma4Config:
    """The text half of a Gemma 4: everything that moves a logit.

    `per_layer` is the width of a per-layer embedding (0: the model has none), `experts` the number
    of experts (0: dense), `experts_used` how many a token takes, `expert_intermediate` the width of
    one. `softcap` 0 means none. `stored_dtype` is "bfloat16", "float32" or "float16". `packed` is
    None where all is stored plainly. `own_head`: the files hold the embedding a second time.
    """

    hidden: int
    vocabulary: int
    layers: tuple[LayerConfig, ...]
    window: int
    positions: int
    norm_eps: float
    softcap: float
    sliding_theta: float
    full_theta: float
    full_rotated: float
    per_layer: int
    per_layer_vocabulary: int
    experts: int
    experts_used: int
    expert_intermediate: int
    stored_dtype: str
    bos: int | None
    eos: tuple[int, ...]
    pad: int | None
    packed: PackedRule | None = None
    own_head: bool = False
