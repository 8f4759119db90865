"""Reads the text half of a Gemma 4 from config.json, and refuses by name what it does not know.

Knows no tensors and no array library.

Facts and defaults of absent keys: transformers 5.24, configuration_gemma4.py (Gemma4TextConfig),
configuration_gemma4_unified.py (Gemma4UnifiedTextConfig) and modeling_gemma4.py.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from forge.engines.gemma4.config import Gemma4Config, LayerConfig
from forge.engines.gemma4.config_fields import ConfigFields
from forge.engines.gemma4.model_folder import folder_json, has_model_file
from forge.engines.gemma4.quantization_config import read_packed_rule
from forge.engines.gemma4.refusal import ConfigRefused, ModelRefused

_CONFIG_SLIDING, _CONFIG_FULL = "sliding_attention", "full_attention"
_CONFIG_MOST_LAYERS = 1000  # a list is made of them: a damaged file must not cost gigabytes


@dataclass(frozen=True)
class _ConfigKind:
    """What one model_type of the text half takes for absent keys, and whether it has more rules.

    rich: it may have per-layer embeddings and experts.
    """

    window: int
    positions: int
    per_layer: int
    bidirectional: str | None
    rich: bool


_CONFIG_KINDS = {
    "gemma4_text": _ConfigKind(512, 131_072, 256, None, True),
    "gemma4_unified_text": _ConfigKind(1024, 262_144, 0, "vision", False),
}
# The whole model's model_type, and that of its text half.
_CONFIG_WRAPPERS = {"gemma4": "gemma4_text", "gemma4_unified": "gemma4_unified_text"}
_CONFIG_ARCHITECTURES = (
    *("Gemma4ForCausalLM", "Gemma4TextModel", "Gemma4ForConditionalGeneration", "Gemma4Model"),
    *("Gemma4UnifiedForCausalLM", "Gemma4UnifiedTextModel"),
    *("Gemma4UnifiedForConditionalGeneration", "Gemma4UnifiedModel"),
)
# Keys that no forward pass reads: training, book-keeping, what is given back beside logits.
_CONFIG_HARMLESS = frozenset(
    ("_name_or_path", "attention_dropout", "chunk_size_feed_forward", "id2label")
    + ("initializer_range", "label2id", "num_labels", "output_attentions", "output_hidden_states")
    + ("problem_type", "return_dict", "transformers_version", "use_cache")
)
# Beside the text half: the towers and the tokens that stand for what is no text.
_CONFIG_HARMLESS_OUTSIDE = _CONFIG_HARMLESS | frozenset(
    ("audio_config", "vision_config", "audio_token_id", "boa_token_id", "boi_token_id")
    + ("eoa_token_id", "eoa_token_index", "eoi_token_id", "image_token_id", "video_token_id")
    + ("bos_token_id", "pad_token_id", "vision_soft_tokens_per_image")
)


def read_config(folder: Path) -> Gemma4Config:
    """What `folder` says of its model's text half.

    Takes the text half bare or wrapped (`text_config`), with `global_head_dim` and
    `num_global_key_value_heads` or with `per_layer_config`. The tokens that end an answer are those
    of generation_config.json where it names any; what else stands there are defaults of requests,
    and moves no logit.
    Raises ConfigRefused that names the key and the value which are not understood.
    """
    try:
        outside = ConfigFields("config.json", folder_json(folder, "config.json"))
        sampling: dict[str, object] = {}
        if has_model_file(folder, "generation_config.json"):
            sampling = folder_json(folder, "generation_config.json")
    except ModelRefused as refusal:
        raise ConfigRefused(str(refusal)) from None
    model_type = outside.one_of("model_type", (*_CONFIG_KINDS, *_CONFIG_WRAPPERS))
    _config_architectures(outside)
    text = outside
    if model_type in _CONFIG_WRAPPERS:
        text = outside.child("text_config")
        text.one_of("model_type", (_config_text_type(model_type),), _config_text_type(model_type))
    config = _config_text(text, outside, _CONFIG_KINDS[_config_text_type(model_type)], sampling)
    text.refuse_rest(_CONFIG_HARMLESS)
    outside.refuse_rest(_CONFIG_HARMLESS_OUTSIDE)
    return config


def _config_text_type(model_type: object) -> str:
    """The text half's model_type for that of a whole model, or for its own."""
    return _CONFIG_WRAPPERS.get(str(model_type), str(model_type))


def _config_text(
    text: ConfigFields, outside: ConfigFields, kind: _ConfigKind, sampling: dict[str, object]
) -> Gemma4Config:
    packed = read_packed_rule(text, outside)
    tied = [_config_tied(fields, packed is not None) for fields in (text, outside)]
    text.one_of("hidden_activation", ("gelu_pytorch_tanh",), "gelu_pytorch_tanh")
    text.one_of("attention_bias", (False,), False)
    # "vision" lets pictures see themselves whole; text stays causal.
    text.one_of("use_bidirectional_attention", (None, "vision"), kind.bidirectional)
    vocabulary = text.whole("vocab_size", 262_144)
    layers = _config_layers(text)
    sliding_theta, full_theta, full_rotated = _config_rope(text, layers)
    per_layer, table_rows = _config_per_layer(text, kind, vocabulary)
    experts, experts_used, expert_width = _config_experts(text, kind)
    softcap = 0.0
    if text.value("final_logit_softcapping") is not None:
        softcap = text.number("final_logit_softcapping")
    return Gemma4Config(
        hidden=text.whole("hidden_size", 2304),
        vocabulary=vocabulary,
        layers=layers,
        window=text.whole("sliding_window", kind.window),
        positions=text.whole("max_position_embeddings", kind.positions),
        norm_eps=text.number("rms_norm_eps", 1e-6),
        softcap=softcap,
        sliding_theta=sliding_theta,
        full_theta=full_theta,
        full_rotated=full_rotated,
        per_layer=per_layer,
        per_layer_vocabulary=table_rows,
        experts=experts,
        experts_used=experts_used,
        expert_intermediate=expert_width,
        stored_dtype=_config_dtype(text, outside),
        bos=text.token("bos_token_id", 2),
        eos=_config_ends(text, outside, sampling),
        pad=text.token("pad_token_id", 0),
        packed=packed,
        own_head=not all(tied),
    )


def _config_tied(fields: ConfigFields, packed: bool) -> bool:
    """Whether the head is the embedding; these rules may stand in either half.

    Tools that pack a model untie it first: there a head of its own is read, and has to be equal.
    """
    fields.one_of("is_encoder_decoder", (False,), False)
    allowed = (True, False) if packed else (True,)
    return bool(fields.one_of("tie_word_embeddings", allowed, True))


def _config_architectures(outside: ConfigFields) -> None:
    listed = outside.value("architectures")
    for name in listed if isinstance(listed, list) else [listed]:
        if name is not None and name not in _CONFIG_ARCHITECTURES:
            known = ", ".join(_CONFIG_ARCHITECTURES)
            raise outside.refused("architectures", f"known are {known}")


def _config_dtype(text: ConfigFields, outside: ConfigFields) -> str:
    """`dtype`, or `torch_dtype` as older files say. The whole's decides: it is what was saved."""
    found: str | None = None
    for fields in (text, outside):
        for key in ("torch_dtype", "dtype"):
            if fields.value(key) is not None:
                found = str(fields.one_of(key, ("bfloat16", "float32", "float16")))
    if found is None:
        raise ConfigRefused("config.json: dtype is missing")
    return found


def _config_ends(
    text: ConfigFields, outside: ConfigFields, sampling: dict[str, object]
) -> tuple[int, ...]:
    """The tokens that end an answer: generation_config.json's, else the whole's, else the text's.

    All three are read, so that a wrong one is refused wherever it stands.
    """
    chosen: tuple[int, ...] = (1,)
    for fields in (text, outside, ConfigFields("generation_config.json", sampling)):
        value = fields.value("eos_token_id")
        if value is None:
            continue
        listed: list[Any] = value if isinstance(value, list) else [value]
        if not listed or any(type(token) is not int or token < 0 for token in listed):
            raise fields.refused("eos_token_id", "it has to be a token's id or a list of them")
        chosen = tuple(listed)
    return chosen


def _config_layers(text: ConfigFields) -> tuple[LayerConfig, ...]:
    """The layers. The last `num_kv_shared_layers` read the last owner of their own kind."""
    kinds = _config_layer_types(text)
    owners = len(kinds) - text.whole("num_kv_shared_layers", 0, least=0)
    if owners < 1 or set(kinds[owners:]) - set(kinds[:owners]):
        raise text.refused("num_kv_shared_layers", "some layer reads keys that none before it owns")
    k_eq_v = text.flag("attention_k_eq_v")
    heads = text.whole("num_attention_heads", 8)
    shapes = _config_head_shapes(text, kinds, k_eq_v)
    for head_dim, kv_heads in shapes.values():
        if heads % kv_heads or head_dim % 2:
            raise text.refused(
                "num_attention_heads",
                f"num_key_value_heads = {kv_heads} with head_dim = {head_dim} do not fit",
            )
    intermediate = text.whole("intermediate_size", 9216)
    wide = 2 if text.flag("use_double_wide_mlp") else 1
    layers = []
    for index, kind in enumerate(kinds):
        own = index < owners
        last_owner = max(i for i in range(owners) if kinds[i] == kind)
        layers.append(
            LayerConfig(
                index=index,
                sliding=kind == _CONFIG_SLIDING,
                source=index if own else last_owner,
                heads=heads,
                kv_heads=shapes[kind][1],
                head_dim=shapes[kind][0],
                intermediate=intermediate * (1 if own else wide),
                k_is_v=own and k_eq_v and kind == _CONFIG_FULL,
            )
        )
    return tuple(layers)


def _config_layer_types(text: ConfigFields) -> list[str]:
    """The kind of each layer: five sliding, one full where the file says none; the last is full."""
    count = text.whole("num_hidden_layers", 30)
    if count > _CONFIG_MOST_LAYERS:
        raise text.refused("num_hidden_layers", f"no model has over {_CONFIG_MOST_LAYERS}")
    listed = text.value("layer_types")
    if listed is None:
        listed = [_CONFIG_SLIDING if (i + 1) % 6 else _CONFIG_FULL for i in range(count)]
    if not isinstance(listed, list) or len(listed) != count:
        raise text.refused("layer_types", f"it has to list num_hidden_layers = {count}")
    for kind in listed:
        if kind not in (_CONFIG_SLIDING, _CONFIG_FULL):
            raise text.refused("layer_types", f"{kind!r} is no known kind of layer")
    return [*listed[:-1], _CONFIG_FULL]


def _config_head_shapes(
    text: ConfigFields, kinds: Sequence[str], k_eq_v: bool
) -> dict[str, tuple[int, int]]:
    """(width of a head, number of key heads) of each kind of layer, from either spelling.

    transformers reads `global_head_dim` and `num_global_key_value_heads` (the latter only where
    keys double as values) and writes `per_layer_config`, which then decides. The rotation and the
    sharing need one shape for all layers of a kind.
    """
    plain = (text.whole("head_dim", 256), text.whole("num_key_value_heads", 4))
    legacy = (text.whole("global_head_dim", 512), plain[1])
    global_heads = text.value("num_global_key_value_heads")
    if global_heads is not None and k_eq_v:
        legacy = (legacy[0], text.whole("num_global_key_value_heads"))
    if not text.has("per_layer_config"):
        return {_CONFIG_SLIDING: plain, _CONFIG_FULL: legacy}
    shapes = [plain] * len(kinds)
    overrides = text.child("per_layer_config")
    for key in overrides.keys():
        if not (key.isdecimal() and int(key) < len(kinds)):
            raise overrides.refused(key, f"it names none of {len(kinds)} layers")
        layer = overrides.child(key)
        shapes[int(key)] = (
            layer.whole("head_dim", plain[0]),
            layer.whole("num_key_value_heads", plain[1]),
        )
        layer.refuse_rest(())
    found: dict[str, tuple[int, int]] = {}
    for kind, shape in zip(kinds, shapes, strict=True):
        if found.setdefault(kind, shape) != shape:
            raise text.refused("per_layer_config", f"it gives {kind} layers different heads")
    said_twice = text.has("global_head_dim") or global_heads is not None
    if said_twice and found[_CONFIG_FULL] != legacy:
        raise text.refused("per_layer_config", "global_head_dim or its heads say otherwise")
    return found


def _config_rope(text: ConfigFields, layers: Sequence[LayerConfig]) -> tuple[float, float, float]:
    """(theta of sliding layers, theta of full ones, share of a full head that is rotated)."""
    if text.value("rope_parameters") is None:
        return 10_000.0, 1_000_000.0, 0.25
    ropes = text.child("rope_parameters")
    sliding = (10_000.0, 1.0)
    if ropes.has(_CONFIG_SLIDING) or any(layer.sliding for layer in layers):
        sliding = _config_rope_entry(ropes.child(_CONFIG_SLIDING))
        if sliding[1] != 1.0:
            raise ropes.refused(_CONFIG_SLIDING, "sliding layers rotate whole heads here")
    full = _config_rope_entry(ropes.child(_CONFIG_FULL))
    ropes.refuse_rest(())
    return sliding[0], *full


def _config_rope_entry(entry: ConfigFields) -> tuple[float, float]:
    """(theta, rotated share). "default" is "proportional" over the whole head, without a factor.

    Source: transformers 5.24, modeling_rope_utils, _compute_proportional_rope_parameters.
    """
    rope_type = entry.one_of("rope_type", ("default", "proportional"))
    share = entry.number("partial_rotary_factor", 1.0)
    if share > 1 or (rope_type == "default" and share != 1):
        raise entry.refused("partial_rotary_factor", "it has to be 1, or less if proportional")
    if entry.number("factor", 1.0) != 1:
        raise entry.refused("factor", "this engine does not stretch positions")
    theta = entry.number("rope_theta")
    entry.refuse_rest(())
    return theta, share


def _config_per_layer(text: ConfigFields, kind: _ConfigKind, vocabulary: int) -> tuple[int, int]:
    """(width of a per-layer embedding, rows of its table); (0, 0) without one."""
    width = text.whole("hidden_size_per_layer_input", kind.per_layer, least=0)
    rows = text.whole("vocab_size_per_layer_input", 262_144, least=0)
    if not width:
        return 0, 0
    if not kind.rich:
        raise text.refused("hidden_size_per_layer_input", "this kind of Gemma 4 has none")
    if rows < vocabulary:
        raise text.refused("vocab_size_per_layer_input", f"{vocabulary} tokens need a row each")
    return width, rows


def _config_experts(text: ConfigFields, kind: _ConfigKind) -> tuple[int, int, int]:
    """(experts, experts of a token, width of one); zeros for a dense model, whatever it lists."""
    names = ("num_experts", "top_k_experts", "moe_intermediate_size")
    if not text.flag("enable_moe_block"):
        for name in names:
            text.value(name)
        return 0, 0, 0
    if not kind.rich:
        raise text.refused("enable_moe_block", "this kind of Gemma 4 has no experts")
    experts, used, width = (text.whole(name) for name in names)
    if used > experts:
        raise text.refused("top_k_experts", f"there are {experts} experts")
    return experts, used, width
