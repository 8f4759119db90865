"""The shape of a decoder: layers, heads, widths.

Knows nothing about bytes, chips, which checkpoints exist or how their files spell it.
"""

from __future__ import annotations

from dataclasses import dataclass

SLIDING_LAYER = "sliding_attention"
FULL_LAYER = "full_attention"


@dataclass(frozen=True, slots=True)
class Geometry:
    """The text half of a decoder-only model: widths are in elements, counts are per layer.

    layer_types: one of SLIDING_LAYER, FULL_LAYER per layer, in order.
    kv_heads, head_dim: of sliding layers; global_kv_heads, global_head_dim: of full layers.
    window: tokens a sliding layer sees, the newest included; None without sliding layers.
    kv_shared_layers: that many last layers own no keys and values and read an earlier layer's.
    k_eq_v: full layers have no v_proj; their values come from k_proj (still cached apart).
    ple_dim: width of per-layer embeddings (0: none); ple_vocab: rows of their table.
    double_wide_mlp: the sharing layers have twice the intermediate width.
    experts, top_k, expert_width: a mixture beside the dense MLP (0: none).
    tied: the output head is the embedding.
    block_norms: RMSNorms of hidden width per layer, without those of PLE and experts.
    head_norms: q and k are normed by a weight of head width.
    qkv_bias, out_bias, mlp_bias: those projections add a bias.

    Source: transformers 5.24, modeling_gemma4, _llama, _mistral, _qwen2, _qwen3, _gemma3.
    Raises ValueError for a shape that no such model can have.
    """

    layer_types: tuple[str, ...]
    hidden: int
    intermediate: int
    heads: int
    kv_heads: int
    global_kv_heads: int
    head_dim: int
    global_head_dim: int
    vocab: int
    window: int | None = None
    kv_shared_layers: int = 0
    k_eq_v: bool = False
    ple_dim: int = 0
    ple_vocab: int = 0
    double_wide_mlp: bool = False
    experts: int = 0
    top_k: int = 0
    expert_width: int = 0
    tied: bool = True
    block_norms: int = 4
    head_norms: bool = True
    qkv_bias: bool = False
    out_bias: bool = False
    mlp_bias: bool = False

    def __post_init__(self) -> None:
        for kind in self.layer_types:
            if kind not in (SLIDING_LAYER, FULL_LAYER):
                raise ValueError(f"layer type {kind!r} is not understood")
        if SLIDING_LAYER in self.layer_types and not self.window:
            raise ValueError("sliding layers without a window are not understood")
        if not 0 <= self.kv_shared_layers < len(self.layer_types):
            raise ValueError(
                f"{self.kv_shared_layers} of {len(self.layer_types)} layers sharing keys and"
                " values is not understood: some layer must own them"
            )
        if set(self.layer_types[self.owners :]) - set(self.layer_types[: self.owners]):
            raise ValueError("a sharing layer has no owner of its own type before it")
        for kv_heads in (self.kv_heads, self.global_kv_heads):
            if kv_heads < 1 or self.heads % kv_heads:
                raise ValueError(f"{self.heads} heads over {kv_heads} kv heads is not understood")

    @property
    def layers(self) -> int:
        """How many layers there are."""
        return len(self.layer_types)

    @property
    def owners(self) -> int:
        """How many layers own keys and values: the first ones, all but the sharing."""
        return len(self.layer_types) - self.kv_shared_layers

    def is_full(self, layer: int) -> bool:
        """Whether the layer attends to the whole context."""
        return self.layer_types[layer] == FULL_LAYER

    def head_width(self, layer: int) -> int:
        """Elements per head in that layer."""
        return self.global_head_dim if self.is_full(layer) else self.head_dim

    def kv_width(self, layer: int) -> int:
        """Elements of one token's keys in that layer (its values have as many)."""
        heads = self.global_kv_heads if self.is_full(layer) else self.kv_heads
        return heads * self.head_width(layer)

    def mlp_width(self, layer: int) -> int:
        """Intermediate width of that layer's dense MLP."""
        wide = self.double_wide_mlp and layer >= self.owners
        return 2 * self.intermediate if wide else self.intermediate
