"""Sizes of weights in each form against the planner's, and the gate before a start."""

from __future__ import annotations

import dataclasses
import json
import re
import tempfile
import unittest
from pathlib import Path
from typing import Any

from forge.aot_compile import config_of_geometry
from forge.engines.gemma4.config import Gemma4Config, PackedRule
from forge.engines.gemma4.config_reader import read_config
from forge.engines.gemma4.explain import explain_text
from forge.engines.gemma4.memory_need import MemoryNeed, memory_need, refuse_beyond
from forge.engines.gemma4.refusal import ModelRefused
from forge.engines.gemma4.sizes import decode_cost, temporary_bytes, weight_group_bytes
from forge.engines.gemma4.tensor_names import model_tensors
from forge.engines.gemma4.weight_files import stored_tensors
from forge.engines.gemma4.weight_forms import forms_title, is_int8_tensor, weight_forms
from forge.packed_checkpoint import pack_checkpoint
from forge.parts.knowledge.cache_bytes import kv_bytes
from forge.parts.knowledge.memory import parameter_counts, step_bytes, weight_bytes
from forge.parts.knowledge.models import GEMMA4
from tests.engines.gemma4_files import model_folder, moe_config, text_config

# facts/bench.md D, 2026-11-29: what was resident there. E2B's release packs the per-layer
# projection as well, which the planner's encoding leaves at 16 bits: 0.02 GB.
RESIDENT_GB = {"E2B": 6.579, "12B": 8.146, "31B": 19.29}


def real_config(model: str) -> Gemma4Config:
    """The engine's config of a real size, whose matrices are packed."""
    plain = config_of_geometry(GEMMA4[model].geometry)
    return dataclasses.replace(plain, packed=PackedRule(32, ("Linear",), ()))


def as_planned(config: Gemma4Config) -> list[str]:
    """The matrices that the planner's w4a16 packs."""
    return [name for name in model_tensors(config) if is_int8_tensor(name)]


class AgainstThePlanner(unittest.TestCase):
    def test_packed_weights(self) -> None:
        for model, resident in RESIDENT_GB.items():
            with self.subTest(model=model):
                geometry, config = GEMMA4[model].geometry, real_config(model)
                forms = weight_forms(config, as_planned(config))
                scalars = 2 * geometry.layers
                total = sum(weight_group_bytes(config, 2, forms).values())
                self.assertEqual(total - scalars, weight_bytes(geometry, "w4a16"))
                self.assertAlmostEqual(total / 1e9 / resident, 1, delta=3e-4)
                for streams in (1, 8):
                    read = decode_cost(config, 2, streams, 100, forms).weights - scalars
                    wanted = step_bytes(geometry, "w4a16", streams=streams)
                    self.assertAlmostEqual(read, wanted, delta=1)

    def test_int8_weights_are_the_planners_and_a_scale_for_each_row(self) -> None:
        for model in GEMMA4:
            with self.subTest(model=model):
                geometry = GEMMA4[model].geometry
                config = config_of_geometry(geometry)
                forms = weight_forms(config, (), "int8")
                quantised = [n for n, form in forms.items() if form == "int8"]
                shapes = model_tensors(config)
                elements = rows = 0
                for name in quantised:
                    *outer, inputs = shapes[name]
                    count = 1
                    for size in outer:
                        count *= size
                    rows += count
                    elements += count * inputs
                self.assertEqual(elements, parameter_counts(geometry).linear)
                total = sum(weight_group_bytes(config, 2, forms).values())
                wanted = weight_bytes(geometry, "int8") + 4 * rows + 2 * geometry.layers
                self.assertEqual(total, wanted)
                self.assertLess(4 * rows, 0.006 * total)

    def test_plain_weights_are_what_they_were(self) -> None:
        for model in GEMMA4:
            geometry, config = GEMMA4[model].geometry, real_config(model)
            for forms in (
                None,
                weight_forms(config, (), "none"),
                weight_forms(config, (), unpack="load"),
            ):
                total = sum(weight_group_bytes(config, 2, forms).values())
                self.assertEqual(total - 2 * geometry.layers, weight_bytes(geometry, "bf16"))

    def test_packed_matrices_need_a_block_for_unpacking(self) -> None:
        config = real_config("E2B")
        forms = weight_forms(config, as_planned(config))
        more = temporary_bytes(config, 256, 4, forms)
        self.assertEqual(more.pop("unpacked weights"), 4 * 512 * 2 * 6144)
        self.assertEqual(more, temporary_bytes(config, 256, 4))


class Forms(unittest.TestCase):
    def test_what_stays_plain(self) -> None:
        config = config_of_geometry(GEMMA4["26B-A4B"].geometry)
        forms = weight_forms(config, (), "int8")
        self.assertEqual(forms["layers.3.experts.gate_up_proj"], "int8")
        self.assertEqual(forms["layers.3.self_attn.o_proj.weight"], "int8")
        for name in ("embed_tokens.weight", "layers.3.router.proj.weight", "norm.weight"):
            self.assertEqual(forms[name], "plain")
        small = weight_forms(config_of_geometry(GEMMA4["E2B"].geometry), (), "int8")
        self.assertEqual(small["layers.3.per_layer_input_gate.weight"], "int8")
        self.assertEqual(small["layers.3.per_layer_projection.weight"], "int8")
        for name in ("embed_tokens_per_layer.weight", "per_layer_model_projection.weight"):
            self.assertEqual(small[name], "plain")
        self.assertEqual(set(small.values()), {"plain", "int8"})
        for name in small:
            if "norm" in name or name.endswith("layer_scalar"):
                self.assertEqual(small[name], "plain")

    def test_packed_ones_are_not_quantised_again(self) -> None:
        config = real_config("12B")
        with self.assertRaisesRegex(ModelRefused, "int8"):
            weight_forms(config, as_planned(config), "int8")

    def test_titles(self) -> None:
        config = real_config("12B")
        packed = weight_forms(config, as_planned(config))
        self.assertEqual(forms_title(packed, "bf16"), "packed 4-bit integers and bf16")
        plain = dataclasses.replace(config, packed=None)
        self.assertEqual(
            forms_title(weight_forms(plain, (), "int8"), "f32"), "8-bit integers and f32"
        )
        self.assertEqual(forms_title(weight_forms(plain, ()), "f32"), "f32")


class FolderCase(unittest.TestCase):
    def setUp(self) -> None:
        made = tempfile.TemporaryDirectory()
        self.addCleanup(made.cleanup)
        self.plain, self.config = model_folder(
            Path(made.name) / "plain", text_config(hidden_size_per_layer_input=32)
        )
        self.packed = pack_checkpoint(self.plain, Path(made.name) / "packed")


class Explained(FolderCase):
    def explained(self, folder: Path, **how: Any) -> tuple[str, dict[str, Any]]:
        *lines, last = explain_text(folder, bandwidth_gb_s=20.0, **how).splitlines()
        return "\n".join(lines), json.loads(last)

    def test_a_packed_folder(self) -> None:
        table, told = self.explained(self.packed, dtype="bf16", context=64)
        self.assertIn("weights as packed 4-bit integers and bf16", table)
        places = stored_tensors(self.packed, read_config(self.packed))
        head = places["lm_head.weight"].size
        shapes = 16 * sum(len(shape) == 2 for shape in model_tensors(self.config).values()) - 32
        weights = sum(told["weights_bytes"].values())
        self.assertEqual(weights, told["stored_bytes"] - head - shapes)
        self.assertEqual(
            told["steps"][0]["weights_read"], weights - told["weights_bytes"]["per-layer table"]
        )
        _, loaded = self.explained(self.packed, dtype="bf16", context=64, unpack="load")
        _, plain = self.explained(self.plain, dtype="bf16", context=64)
        for same in ("weights_bytes", "total_bytes", "steps", "weights"):
            self.assertEqual(loaded[same], plain[same])
        self.assertGreater(loaded["total_bytes"], told["total_bytes"])

    def test_int8(self) -> None:
        table, told = self.explained(self.plain, quantization="int8", context=64)
        self.assertIn("weights as 8-bit integers and f32", table)
        _, plain = self.explained(self.plain, context=64)
        for group, size in told["weights_bytes"].items():
            if group in ("attention", "MLP", "per-layer gates"):
                self.assertLess(size, plain["weights_bytes"][group] / 3)
            else:
                self.assertEqual(size, plain["weights_bytes"][group])
        with self.assertRaisesRegex(ModelRefused, "int8"):
            self.explained(self.packed, quantization="int8")


class TheGate(FolderCase):
    def need(self, **changes: Any) -> MemoryNeed:
        how: dict[str, Any] = dict(dtype="bf16", slots=4, context=1024, chunk=64)
        return memory_need(self.packed, **(how | changes))

    def refusal(self, need: MemoryNeed, limit: int) -> str:
        with self.assertRaises(ModelRefused) as caught:
            refuse_beyond(need, limit)
        return str(caught.exception)

    def test_what_is_needed_is_what_is_explained(self) -> None:
        need = self.need()
        told = json.loads(
            explain_text(
                self.packed, dtype="bf16", slots=4, context=1024, chunk=64, bandwidth_gb_s=1.0
            ).splitlines()[-1]
        )
        self.assertEqual(told["total_bytes"], need.total)
        self.assertEqual(told["weights_bytes"], need.weights)
        refuse_beyond(need, need.total)  # as much as there is, is not too much

    def test_the_sum_stands_in_the_message(self) -> None:
        geometry, config = GEMMA4["E2B"].geometry, real_config("E2B")
        forms = weight_forms(config, as_planned(config))
        need = MemoryNeed(config, forms, "bf16", "bf16", 4, 4096, 256)
        self.assertEqual(sum(need.caches.values()), kv_bytes(geometry, 4096, 4, 2, "ring"))
        said = self.refusal(need, 6_700_000_000)
        figures = [float(figure) for figure in re.findall(r"(\d+\.\d{3}) (?:GB|[a-z])", said)]
        total, more, limit, *parts = figures
        self.assertAlmostEqual(total, need.total / 1e9, delta=5e-4)
        self.assertAlmostEqual(total - more, limit, delta=2e-3)
        self.assertAlmostEqual(sum(parts[:4]), total, delta=2.5e-3)
        self.assertEqual(parts[0], 6.579)

    def test_each_way_out_fits_and_one_step_more_does_not(self) -> None:
        need = self.need(slots=8)
        for share in (0.9, 0.7, 0.5):
            grown = need.total - self.need(slots=1, context=256).total
            limit = self.need(slots=1, context=256).total + int(grown * share)
            said = self.refusal(need, limit)
            slots = int(re.search(r"--slots (\d+)", said)[1])  # type: ignore[index]
            context = int(re.search(r"--max-model-len (\d+)", said)[1])  # type: ignore[index]
            self.assertLessEqual(self.need(slots=slots).total, limit)
            self.assertGreater(self.need(slots=slots + 1).total, limit)
            self.assertLessEqual(self.need(slots=8, context=context).total, limit)
            self.assertGreater(self.need(slots=8, context=context + 256).total, limit)

    def test_where_neither_alone_does(self) -> None:
        need = self.need(slots=8, context=1000)
        limit = self.need(slots=1, context=256).total
        self.assertIn("It fits with --slots 1 --max-model-len 256", self.refusal(need, limit))

    def test_where_nothing_fits(self) -> None:
        least = self.need(slots=1, context=256).total
        said = self.refusal(self.need(), least - 1)
        self.assertNotIn("It fits", said)
        self.assertIn(f"would still need {least / 1e9:.3f} GB", said)

    def test_caches_of_integers_are_half_and_each_device_has_its_part(self) -> None:
        need, small = self.need(), self.need(kv_dtype="int8")
        self.assertEqual(small.weights, need.weights)
        for kind, size in small.caches.items():
            self.assertGreater(size, need.caches[kind] / 2)
            self.assertLess(size, need.caches[kind] * 0.6)
        part = self.need(ways=2)
        self.assertLess(sum(part.weights.values()), 0.6 * sum(need.weights.values()))
        self.assertEqual(part.caches, need.caches)  # of one key head, which both have
        self.assertEqual(part.marks, need.marks)

    def test_a_sparse_model_has_its_experts(self) -> None:
        folder, config = model_folder(self.plain.with_name("moe"), moe_config())
        need = memory_need(folder, dtype="bf16", slots=1, context=64, chunk=16)
        self.assertIn("experts", need.weights)
        small = memory_need(
            folder, dtype="bf16", slots=1, context=64, chunk=16, quantization="int8"
        )
        self.assertLess(small.weights["experts"], need.weights["experts"] * 0.6)


if __name__ == "__main__":
    unittest.main()
