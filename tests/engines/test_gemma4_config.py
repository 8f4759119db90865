"""Tests of reading config.json: every rule, both spellings, and that nothing is passed over."""

from __future__ import annotations

import json
import math
import os
import tempfile
import unittest
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from forge.engines.gemma4.config import Gemma4Config
from forge.engines.gemma4.config_reader import read_config
from forge.engines.gemma4.refusal import ConfigRefused
from tests.engines.gemma4_files import (
    FULL,
    ROPE,
    SLIDING,
    legacy,
    moe_config,
    text_config,
    wrapped,
    write_config,
)


class ConfigCase(unittest.TestCase):
    """A folder of its own for each test."""

    def setUp(self) -> None:
        made = tempfile.TemporaryDirectory()
        self.addCleanup(made.cleanup)
        self.folder = Path(made.name)

    def read(
        self, config: Mapping[str, Any], generation: Mapping[str, Any] | None = None
    ) -> Gemma4Config:
        return read_config(write_config(self.folder, config, generation))

    def refusal(
        self, config: Mapping[str, Any], generation: Mapping[str, Any] | None = None
    ) -> str:
        """The words in which `config` is refused."""
        with self.assertRaises(ConfigRefused) as caught:
            self.read(config, generation)
        return str(caught.exception)


class WhatIsRead(ConfigCase):
    def test_every_field(self) -> None:
        read = self.read(text_config())
        self.assertEqual(read.hidden, 64)
        self.assertEqual(read.vocabulary, 512)
        self.assertEqual(read.window, 8)
        self.assertEqual(read.positions, 1024)
        self.assertEqual(read.norm_eps, 1e-6)
        self.assertEqual(read.softcap, 30.0)
        self.assertEqual((read.sliding_theta, read.full_theta), (1e4, 1e6))
        self.assertEqual(read.full_rotated, 0.25)
        self.assertEqual((read.per_layer, read.per_layer_vocabulary), (16, 512))
        self.assertEqual((read.experts, read.experts_used, read.expert_intermediate), (0, 0, 0))
        self.assertEqual(read.stored_dtype, "float32")
        self.assertEqual((read.bos, read.eos, read.pad), (2, (1,), 0))
        self.assertEqual([layer.index for layer in read.layers], list(range(8)))
        kinds = [True, True, False, True, False, True, True, False]
        self.assertEqual([layer.sliding for layer in read.layers], kinds)
        self.assertEqual({layer.heads for layer in read.layers}, {4})
        self.assertEqual({layer.kv_heads for layer in read.layers}, {1})
        widths = [32 if sliding else 64 for sliding in kinds]
        self.assertEqual([layer.head_dim for layer in read.layers], widths)

    def test_sharing_layers_read_the_last_owner_of_their_kind_and_are_twice_as_wide(self) -> None:
        read = self.read(text_config())
        sources = [layer.source for layer in read.layers]
        self.assertEqual(sources, [0, 1, 2, 3, 4, 3, 3, 4])
        self.assertEqual([layer.owner for layer in read.layers], [True] * 5 + [False] * 3)
        widths = [layer.intermediate for layer in read.layers]
        self.assertEqual(widths, [128] * 5 + [256] * 3)
        plain = self.read(text_config(use_double_wide_mlp=False))
        self.assertEqual({layer.intermediate for layer in plain.layers}, {128})

    def test_the_owners_of_e2b_and_e4b(self) -> None:
        """facts 1.4: E2B's sharing layers read 13 and 14, E4B's 22 and 23."""
        for layers, every, shared, expected in ((35, 5, 20, {13, 14}), (42, 6, 18, {22, 23})):
            kinds = [SLIDING if (i + 1) % every else FULL for i in range(layers)]
            config = legacy(text_config(), num_hidden_layers=layers, layer_types=kinds)
            read = self.read(config | {"num_kv_shared_layers": shared})
            self.assertEqual({a.source for a in read.layers if not a.owner}, expected)
            for layer in read.layers:
                self.assertEqual(layer.sliding, read.layers[layer.source].sliding)

    def test_values_come_from_keys_in_full_layers_alone(self) -> None:
        read = self.read(moe_config())
        for layer in read.layers:
            self.assertEqual(layer.k_is_v, not layer.sliding)
            self.assertEqual(layer.kv_heads, 2 if layer.sliding else 1)
        self.assertFalse(any(layer.k_is_v for layer in self.read(text_config()).layers))
        shared = self.read(text_config(attention_k_eq_v=True))
        self.assertEqual([a.index for a in shared.layers if a.k_is_v], [2, 4])

    def test_experts(self) -> None:
        read = self.read(moe_config())
        self.assertEqual((read.experts, read.experts_used, read.expert_intermediate), (8, 2, 32))
        dense = self.read(moe_config(enable_moe_block=False))
        self.assertEqual((dense.experts, dense.experts_used), (0, 0))

    def test_both_spellings_say_the_same(self) -> None:
        for config in (text_config(), moe_config()):
            self.assertEqual(self.read(legacy(config)), self.read(config))

    def test_global_heads_count_only_where_keys_double_as_values(self) -> None:
        config = legacy(moe_config(), attention_k_eq_v=False)
        self.assertEqual({layer.kv_heads for layer in self.read(config).layers}, {2})
        unset = legacy(moe_config(), num_global_key_value_heads=None)
        self.assertEqual({layer.kv_heads for layer in self.read(unset).layers}, {2})

    def test_wrapped_says_the_same_as_bare(self) -> None:
        for config in (text_config(), moe_config(), legacy(text_config())):
            self.assertEqual(self.read(wrapped(config)), self.read(config))
        nameless = wrapped(text_config())
        del nameless["text_config"]["model_type"]
        self.assertEqual(self.read(nameless), self.read(text_config()))

    def test_the_last_layer_is_full_whatever_the_file_says(self) -> None:
        config = legacy(text_config(layer_types=[*([SLIDING, FULL] * 3), SLIDING, SLIDING]))
        read = self.read(config | {"num_kv_shared_layers": 0})
        self.assertFalse(read.layers[-1].sliding)
        self.assertEqual(read.layers[-1].head_dim, 64)

    def test_what_an_empty_config_means(self) -> None:
        """The class defaults of transformers 5.24, which are no real model's."""
        read = self.read({"model_type": "gemma4_text", "dtype": "bfloat16"})
        self.assertEqual((read.hidden, read.vocabulary, len(read.layers)), (2304, 262144, 30))
        self.assertEqual([a.index for a in read.layers if not a.sliding], [5, 11, 17, 23, 29])
        self.assertEqual((read.window, read.positions, read.softcap), (512, 131072, 0.0))
        self.assertEqual((read.per_layer, read.per_layer_vocabulary), (256, 262144))
        first, last = read.layers[0], read.layers[-1]
        self.assertEqual((first.heads, first.kv_heads, first.head_dim), (8, 4, 256))
        self.assertEqual((last.kv_heads, last.head_dim, last.intermediate), (4, 512, 9216))
        self.assertEqual((read.sliding_theta, read.full_theta, read.full_rotated), (1e4, 1e6, 0.25))

    def test_what_an_empty_unified_config_means(self) -> None:
        for config in (
            {"model_type": "gemma4_unified_text", "dtype": "bfloat16"},
            {"model_type": "gemma4_unified", "dtype": "bfloat16", "text_config": {}},
        ):
            read = self.read(config)
            self.assertEqual((read.window, read.positions), (1024, 262144))
            self.assertEqual((read.per_layer, read.per_layer_vocabulary), (0, 0))

    def test_rope_of_other_kinds_that_mean_a_known_one(self) -> None:
        whole = {"rope_type": "default", "rope_theta": 5e5}
        read = self.read(text_config(rope_parameters=ROPE | {FULL: whole}))
        self.assertEqual((read.full_theta, read.full_rotated), (5e5, 1.0))
        same = {"rope_type": "proportional", "rope_theta": 2e4, "factor": 1.0}
        read = self.read(text_config(rope_parameters=ROPE | {SLIDING: same}))
        self.assertEqual(read.sliding_theta, 2e4)
        self.assertEqual(self.read(text_config(rope_parameters=None)).full_rotated, 0.25)

    def test_full_layers_alone_need_no_sliding_rope(self) -> None:
        config = legacy(text_config(layer_types=[FULL] * 8, rope_parameters={FULL: ROPE[FULL]}))
        self.assertFalse(any(layer.sliding for layer in self.read(config).layers))

    def test_no_softcap(self) -> None:
        self.assertEqual(self.read(text_config(final_logit_softcapping=None)).softcap, 0.0)

    def test_nulls_set_nothing(self) -> None:
        read = self.read(text_config(expert_intermediate_size=None, whatever=None))
        self.assertEqual(read, self.read(text_config()))


class WhereAnswersEnd(ConfigCase):
    def test_generation_config_decides(self) -> None:
        read = self.read(text_config(), {"eos_token_id": [1, 106], "temperature": 1.0})
        self.assertEqual(read.eos, (1, 106))

    def test_then_the_whole_then_the_text_half(self) -> None:
        outer = wrapped(text_config(), eos_token_id=[1, 50])
        self.assertEqual(self.read(outer, {"pad_token_id": 0}).eos, (1, 50))
        self.assertEqual(self.read(wrapped(text_config(eos_token_id=7)), {}).eos, (7,))
        unset = text_config()
        del unset["eos_token_id"]
        self.assertEqual(self.read(unset).eos, (1,))

    def test_tokens_that_are_unset(self) -> None:
        read = self.read(text_config(bos_token_id=None, pad_token_id=None))
        self.assertEqual((read.bos, read.pad), (None, None))

    def test_what_is_no_token(self) -> None:
        for wrong in ("1", -1, True, [1, "2"], [], 1.0, {}):
            with self.subTest(wrong=wrong):
                self.assertIn("eos_token_id", self.refusal(text_config(), {"eos_token_id": wrong}))
                self.assertIn("eos_token_id", self.refusal(text_config(eos_token_id=wrong)))


class StoredType(ConfigCase):
    def test_each(self) -> None:
        for name in ("bfloat16", "float32", "float16"):
            self.assertEqual(self.read(text_config(dtype=name)).stored_dtype, name)

    def test_the_older_key_and_either_half(self) -> None:
        old = text_config()
        old["torch_dtype"] = old.pop("dtype")
        self.assertEqual(self.read(old).stored_dtype, "float32")
        outside = wrapped(text_config(), dtype="bfloat16")
        self.assertEqual(self.read(outside).stored_dtype, "bfloat16")
        del outside["dtype"]
        self.assertEqual(self.read(outside).stored_dtype, "float32")

    def test_others_and_none(self) -> None:
        for wrong in ("int8", "float8_e4m3fn", "auto", 16, ["bfloat16"]):
            self.assertIn(f"dtype = {wrong!r}", self.refusal(text_config(dtype=wrong)))
        unset = text_config()
        del unset["dtype"]
        self.assertIn("dtype is missing", self.refusal(unset))


class WhatIsRefused(ConfigCase):
    """Each by the key's name and its value."""

    def test_keys_that_would_move_a_logit(self) -> None:
        for key, value in (
            ("attention_bias", True),
            ("hidden_activation", "gelu"),
            ("hidden_activation", "silu"),
            ("tie_word_embeddings", False),
            ("use_bidirectional_attention", "all"),
            ("is_encoder_decoder", True),
            ("final_logit_softcapping", 0.0),
            ("final_logit_softcapping", -30.0),
            ("num_kv_shared_layers", 8),
            ("num_kv_shared_layers", 7),
            ("num_hidden_layers", 9),
            ("num_hidden_layers", 1001),
            ("num_attention_heads", 0),
            ("num_key_value_heads", 3),
            ("head_dim", 31),
            ("vocab_size_per_layer_input", 511),
            ("rms_norm_eps", 0),
            ("layer_types", [SLIDING] * 7 + ["chunked_attention"]),
            ("layer_types", SLIDING),
            ("rope_scaling", {"rope_type": "linear", "factor": 8.0}),
            ("rope_theta", 10000.0),
            ("attn_logit_softcapping", 50.0),
            ("query_pre_attn_scalar", 256),
            ("altup_num_inputs", 4),
            ("auto_map", {"AutoModel": "code.Model"}),
            ("a_key_of_next_year", False),
        ):
            with self.subTest(key=key, value=value):
                said = self.refusal(text_config(**{key: value}))
                self.assertIn(key, said)
                self.assertIn(repr(value)[:60], said)
                self.assertIn("text_config", self.refusal(wrapped(text_config(**{key: value}))))

    def test_experts_that_do_not_fit(self) -> None:
        self.assertIn("top_k_experts = 9", self.refusal(moe_config(top_k_experts=9)))
        for key in ("num_experts", "top_k_experts", "moe_intermediate_size"):
            self.assertIn(key, self.refusal(moe_config(**{key: None})))

    def test_rope_that_is_not_understood(self) -> None:
        full = ROPE[FULL]
        for named, ropes in (
            ("yarn", ROPE | {FULL: full | {"rope_type": "yarn"}}),
            ("factor = 8.0", ROPE | {FULL: full | {"factor": 8.0}}),
            ("partial_rotary_factor = 1.5", ROPE | {FULL: full | {"partial_rotary_factor": 1.5}}),
            ("partial_rotary_factor = 0.25", ROPE | {FULL: full | {"rope_type": "default"}}),
            ("attention_factor = 0.7", ROPE | {FULL: full | {"attention_factor": 0.7}}),
            ("rope_theta is missing", ROPE | {SLIDING: {"rope_type": "default"}}),
            ("rope_type = absent", ROPE | {SLIDING: {"rope_theta": 1e4}}),
            (SLIDING, ROPE | {SLIDING: full}),
            (FULL, ROPE | {FULL: None}),
            (SLIDING, {FULL: full}),
            (f"{SLIDING} = absent", {"rope_type": "default", "rope_theta": 1e4}),
            ("chunked_attention", ROPE | {"chunked_attention": full}),
            ("rope_parameters", 10000.0),
            ("rope_theta = 0", ROPE | {FULL: full | {"rope_theta": 0}}),
            ("rope_theta = True", ROPE | {FULL: full | {"rope_theta": True}}),
        ):
            with self.subTest(named=named):
                self.assertIn(named, self.refusal(text_config(rope_parameters=ropes)))

    def test_layers_of_one_kind_with_different_heads(self) -> None:
        shapes = text_config()["per_layer_config"]
        for change in (
            {"2": {"head_dim": 32}},
            {"0": {"head_dim": 64}},
            {"8": {"head_dim": 64}},
            {"full_attention": {"head_dim": 64}},
            {"2": {"head_dim": 64, "sliding_window": 4}},
            {"2": 64},
            {"-1": {"head_dim": 64}},
        ):
            with self.subTest(change=change):
                said = self.refusal(text_config(per_layer_config=shapes | change))
                self.assertIn("per_layer_config", said)
        self.assertIn("per_layer_config", self.refusal(text_config(per_layer_config=None)))

    def test_two_spellings_that_disagree(self) -> None:
        agreeing = text_config(global_head_dim=64)
        self.assertEqual(self.read(agreeing), self.read(text_config()))
        for change in ({"global_head_dim": 128}, {"num_global_key_value_heads": 2}):
            said = self.refusal(moe_config(**change))
            self.assertIn("say otherwise", said)

    def test_other_models(self) -> None:
        for model_type in ("gemma3", "gemma3n_text", "gemma4_assistant", "llama", None, 4):
            said = self.refusal(text_config(model_type=model_type))
            self.assertIn(f"model_type = {model_type!r}", said)
        odd = text_config(architectures=["Gemma4ForSequenceClassification"])
        self.assertIn("Gemma4ForSequenceClassification", self.refusal(odd))
        nothing = text_config()
        del nothing["model_type"]
        self.assertIn("model_type = absent", self.refusal(nothing))

    def test_a_unified_model_has_neither_tables_nor_experts(self) -> None:
        plain = {"model_type": "gemma4_unified_text", "dtype": "bfloat16"}
        for change in ({"hidden_size_per_layer_input": 256}, {"enable_moe_block": True}):
            self.assertIn(next(iter(change)), self.refusal(plain | change))

    def test_what_stands_outside_the_text_half(self) -> None:
        for key, value in (
            ("tie_word_embeddings", False),
            ("text_config", None),
            ("text_config", []),
            ("auto_map", {"AutoConfig": "code.Config"}),
            ("final_logit_softcapping", 30.0),
        ):
            with self.subTest(key=key):
                self.assertIn(
                    f"{key} = {value!r}", self.refusal(wrapped(text_config(), **{key: value}))
                )
        other = wrapped(text_config(model_type="gemma4_unified_text"))
        self.assertIn("model_type = 'gemma4_unified_text'", self.refusal(other))

    def test_no_wrong_value_of_any_key_passes_unseen(self) -> None:
        """Every key that is read, with every kind of nonsense: refused, or it changes nothing."""
        always = {"attention_dropout", "initializer_range", "use_cache", "transformers_version"}
        always |= {"architectures"}  # an empty list of them says nothing
        # Beside those: what the other kind of model has, and this one does not read.
        for made, idle in (
            (moe_config, {"vocab_size_per_layer_input", "use_double_wide_mlp"}),
            (text_config, {"num_experts", "top_k_experts", "moe_intermediate_size"}),
        ):
            good = self.read(made())
            for key, stated in made().items():
                for value in (None, [], {}, "x", -1, 0.5, True, False, math.inf, math.nan, 1 << 70):
                    try:
                        read = self.read(made(**{key: value}))
                    except ConfigRefused as refusal:
                        if value is not None:  # unset, it may leave another key without its fellow
                            also = "|num_experts" if key == "enable_moe_block" else ""
                            self.assertRegex(str(refusal), key + also)
                        continue
                    if read == good and key not in always | idle:
                        self.assertIn(value, (None, stated), f"{key} was passed over")


class DamagedFiles(ConfigCase):
    def raw(self, text: bytes) -> str:
        (self.folder / "config.json").write_bytes(text)
        with self.assertRaises(ConfigRefused) as caught:
            read_config(self.folder)
        return str(caught.exception)

    def test_no_json_object(self) -> None:
        for text in (b"", b"{", b"[]", b"null", b"\xff\xfe", b"[" * 100_000, b'"gemma4"'):
            self.assertIn("config.json is no JSON", self.raw(text))

    def test_a_key_twice(self) -> None:
        text = json.dumps(text_config())
        twice = text.replace('"sliding_window": 8', '"sliding_window": 8, "sliding_window": 16')
        self.assertIn("'sliding_window' twice", self.raw(twice.encode()))
        nested = text.replace(
            '"rope_type": "default"', '"rope_type": "default", "rope_type": "yarn"'
        )
        self.assertIn("'rope_type' twice", self.raw(nested.encode()))

    def test_a_damaged_generation_config(self) -> None:
        write_config(self.folder, text_config())
        (self.folder / "generation_config.json").write_bytes(b"{")
        with self.assertRaisesRegex(ConfigRefused, "generation_config.json is no JSON"):
            read_config(self.folder)

    def test_no_file_no_folder_no_plain_file(self) -> None:
        with self.assertRaisesRegex(ConfigRefused, "has no config.json"):
            read_config(self.folder)
        with self.assertRaisesRegex(ConfigRefused, "has no config.json"):
            read_config(self.folder / "nowhere")
        (self.folder / "config.json").mkdir()
        with self.assertRaisesRegex(ConfigRefused, "no plain file"):
            read_config(self.folder)

    def test_a_pipe_is_not_waited_for(self) -> None:
        os.mkfifo(self.folder / "config.json")
        with self.assertRaisesRegex(ConfigRefused, "no plain file"):
            read_config(self.folder)

    def test_too_long_to_be_one(self) -> None:
        with (self.folder / "config.json").open("wb") as file:
            file.truncate(100_000_000)
        with self.assertRaisesRegex(ConfigRefused, "100000000 bytes"):
            read_config(self.folder)

    def test_a_long_value_is_cut_in_the_message(self) -> None:
        said = self.refusal(text_config(hidden_activation="x" * 10_000))
        self.assertLess(len(said), 400)
