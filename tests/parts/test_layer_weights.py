"""Which projections a checkpoint lacks: whole ones of several shapes, and each with gaps."""

from __future__ import annotations

import unittest
from pathlib import Path
from typing import Any

from forge.parts.boundaries.checkpoint import Checkpoint, CheckpointTensor
from forge.parts.knowledge.geometry_config import geometry_from_config
from forge.parts.runtimes.layer_weights import absent_projections

LLAMA: dict[str, Any] = {
    "model_type": "llama",
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 256,
}
SLIDING, FULL = "sliding_attention", "full_attention"
GEMMA: dict[str, Any] = {
    "model_type": "gemma4_text",
    "hidden_size": 16,
    "intermediate_size": 32,
    "num_hidden_layers": 4,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 8,
    "global_head_dim": 16,
    "layer_types": [SLIDING, FULL, SLIDING, FULL],
    "sliding_window": 8,
    "vocab_size": 64,
}
MLP = ("mlp.gate_proj", "mlp.up_proj", "mlp.down_proj")
ATTENTION = tuple(f"self_attn.{part}_proj" for part in "qkvo")


def checkpoint(config: dict[str, Any], names: list[str]) -> Checkpoint:
    tensors = tuple(CheckpointTensor(name, "BF16", 4, 8) for name in names)
    return Checkpoint(Path("/m"), config, geometry_from_config(config), "", tensors)


def names_of(layers: int, without: tuple[str, ...] = (), prefix: str = "model.") -> list[str]:
    """The tensors of a model but those of `without`, each as LAYER.projection."""
    names = [f"{prefix}embed_tokens.weight", f"{prefix}norm.weight"]
    for layer in range(layers):
        names.append(f"{prefix}layers.{layer}.input_layernorm.weight")
        names += [
            f"{prefix}layers.{layer}.{part}.weight"
            for part in (*ATTENTION, *MLP)
            if f"{layer}.{part}" not in without
        ]
    return names


class AbsentTest(unittest.TestCase):
    def test_a_whole_one_lacks_nothing(self) -> None:
        self.assertEqual(absent_projections(checkpoint(LLAMA, names_of(3))), [])
        self.assertEqual(absent_projections(checkpoint(GEMMA, names_of(4))), [])

    def test_each_projection_of_each_layer_is_missed(self) -> None:
        for layer in range(3):
            for part in (*ATTENTION, *MLP):
                names = names_of(3, (f"{layer}.{part}",))
                self.assertEqual(
                    absent_projections(checkpoint(LLAMA, names)),
                    [f"model.layers.{layer}.{part}.weight"],
                )

    def test_a_whole_layer_is_missed(self) -> None:
        absent = absent_projections(checkpoint(LLAMA, names_of(2)))
        self.assertEqual(len(absent), 7)
        self.assertTrue(all(name.startswith("model.layers.2.") for name in absent))

    def test_sharing_layers_own_no_keys_and_values(self) -> None:
        config = {**GEMMA, "num_kv_shared_layers": 2}
        shared = tuple(f"{layer}.self_attn.{part}_proj" for layer in (2, 3) for part in "kv")
        self.assertEqual(absent_projections(checkpoint(config, names_of(4, shared))), [])
        # Some releases ship them all the same; and what the owners lack is missed.
        self.assertEqual(absent_projections(checkpoint(config, names_of(4))), [])
        names = names_of(4, (*shared, "1.self_attn.k_proj"))
        self.assertEqual(
            absent_projections(checkpoint(config, names)),
            ["model.layers.1.self_attn.k_proj.weight"],
        )

    def test_values_that_come_from_keys(self) -> None:
        config = {**GEMMA, "attention_k_eq_v": True, "num_global_key_value_heads": 1}
        full = ("1.self_attn.v_proj", "3.self_attn.v_proj")
        self.assertEqual(absent_projections(checkpoint(config, names_of(4, full))), [])
        names = names_of(4, (*full, "2.self_attn.v_proj"))
        self.assertEqual(
            absent_projections(checkpoint(config, names)),
            ["model.layers.2.self_attn.v_proj.weight"],
        )

    def test_a_wrapped_one_and_its_towers(self) -> None:
        prefix = "model.language_model."
        tower = ["model.vision_tower.encoder.layers.7.self_attn.q_proj.weight"]
        names = names_of(4, prefix=prefix) + tower
        self.assertEqual(absent_projections(checkpoint(GEMMA, names)), [])
        names = names_of(4, ("0.mlp.up_proj",), prefix) + tower
        self.assertEqual(
            absent_projections(checkpoint(GEMMA, names)),
            ["model.language_model.layers.0.mlp.up_proj.weight"],
        )

    def test_what_is_not_understood_is_not_judged(self) -> None:
        tensors = (CheckpointTensor("model.layers.0.mlp.up_proj.weight", "BF16", 4, 8),)
        unknown = Checkpoint(Path("/m"), {}, None, "unknown", tensors)
        self.assertEqual(absent_projections(unknown), [])
        self.assertEqual(absent_projections(checkpoint(LLAMA, ["w"])), [])


if __name__ == "__main__":
    unittest.main()
