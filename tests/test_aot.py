"""Tests of `make aot` without libtpu: shapes, the planner's side, the table and where it is put."""

from __future__ import annotations

import argparse
import importlib.metadata
import io
import json
import os
import tempfile
import unittest
from contextlib import redirect_stderr, redirect_stdout
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from forge import aot
from forge.aot_chips import CHIPS, compiler_requirements
from forge.aot_compile import (
    AotCase,
    AotProgram,
    config_of_geometry,
    formed,
    model_of,
    planned_bytes,
)
from forge.engines.gemma4.sizes import (
    cached_elements,
    marks_bytes,
    parameter_groups,
    weight_group_bytes,
)
from forge.parts.knowledge.cache_bytes import kv_bytes
from forge.parts.knowledge.hardware import ACCELERATORS
from forge.parts.knowledge.memory import parameter_counts, weight_bytes
from forge.parts.knowledge.models import GEMMA4
from tests.engines.gemma4_files import moe_config, text_config, write_config

FITS = AotProgram("decode of 4", 12.34, 9_388_415_488, 63_587_840, 11_294_720, 9_500_894_208)
PIECE = AotProgram("prefill of 256", 5.0, 6_789_603_840, 119_895_040, 18_293_248, 6_893_125_120)
REFUSED = AotProgram("decode of 4", 6.4, refusal="Ran out of memory on HBM (23.53G of 15.75G).")
LIMIT = round(15.75 * (1 << 30))


class Models(unittest.TestCase):
    def test_the_engines_view_of_a_shape_is_the_planners(self) -> None:
        for name, model in GEMMA4.items():
            with self.subTest(model=name):
                geometry = model.geometry
                config = config_of_geometry(geometry)
                counted = sum(parameter_groups(config).values()) - geometry.layers
                self.assertEqual(counted, parameter_counts(geometry).total)
                for context in (100, 4096):
                    kept = 2 * sum(cached_elements(config, context).values())
                    self.assertEqual(kept, kv_bytes(geometry, context, 1, 2, "ring"))

    def test_the_layers_of_a_shape(self) -> None:
        config = config_of_geometry(GEMMA4["E2B"].geometry)
        self.assertEqual(
            [a.index for a in config.layers if not a.sliding], [4, 9, 14, 19, 24, 29, 34]
        )
        self.assertEqual({a.source for a in config.layers if not a.owner}, {13, 14})
        self.assertEqual({a.intermediate for a in config.layers if not a.owner}, {2 * 6144})
        dense = config_of_geometry(GEMMA4["12B"].geometry)
        self.assertTrue(all(a.k_is_v != a.sliding for a in dense.layers))

    def test_a_folder_is_a_model_too(self) -> None:
        for stated in (text_config(), moe_config()):
            with tempfile.TemporaryDirectory() as folder:
                write_config(Path(folder), stated)
                geometry, config = model_of(AotCase(folder, "v5e"))
                self.assertEqual(geometry.layers, len(config.layers))
                counted = sum(parameter_groups(config).values()) - geometry.layers
                self.assertEqual(counted, parameter_counts(geometry).total)

    def test_what_the_planner_says(self) -> None:
        case = AotCase("E2B", "v5e", slots=4, context=4096)
        geometry = GEMMA4["E2B"].geometry
        expected = weight_bytes(geometry, "bf16") + kv_bytes(geometry, 4096, 4, 2, "ring")
        self.assertEqual(
            planned_bytes(case) - expected, marks_bytes(config_of_geometry(geometry), 4)
        )
        more = planned_bytes(replace(case, slots=8)) - planned_bytes(case)
        self.assertEqual(more, kv_bytes(geometry, 4096, 4, 2, "ring") + 4 * 5 * 262144)

    def test_every_model_and_chip_is_known(self) -> None:
        self.assertLessEqual(set(aot.MODELS), set(GEMMA4))
        self.assertIn(aot.WHOLE_MODEL, aot.MODELS)
        for chip in CHIPS:
            self.assertIsNotNone(ACCELERATORS[chip].visible_memory.value)

    def test_forms_are_the_planners_encodings(self) -> None:
        quantised = {(model, form) for model, form, _ in aot.QUANTISED}
        for model, form in (*quantised, ("26B-A4B", "int8"), ("31B", "w4a16"), ("E2B", "bf16")):
            with self.subTest(model=model, form=form):
                case = AotCase(model, "v5e", form=form)
                geometry = GEMMA4[model].geometry
                config, forms = formed(case)
                mine = sum(weight_group_bytes(config, 2, forms).values())
                self.assertAlmostEqual(mine / weight_bytes(geometry, form), 1, delta=0.007)
                caches = kv_bytes(geometry, 4096, 4, 2, "ring") + marks_bytes(config, 4)
                self.assertEqual(planned_bytes(case) - caches, weight_bytes(geometry, form))
                kinds = {"w4a16": "packed", "int8": "int8"}
                self.assertEqual(set(forms.values()), {"plain", kinds.get(form, "plain")})
        self.assertEqual(AotCase("E2B", "v5e", form="int8").title, "E2B int8")
        self.assertEqual(AotCase("E2B", "v5e").title, "E2B")
        kept = AotCase("E2B", "v5e", form="w4a16", kv="int8")
        self.assertEqual(kept.title, "E2B w4a16, int8 KV")
        halved = kv_bytes(GEMMA4["E2B"].geometry, 4096, 4, 1, "ring")
        self.assertEqual(
            planned_bytes(AotCase("E2B", "v5e", form="w4a16")) - halved, planned_bytes(kept)
        )

    def test_which_cases_are_compiled(self) -> None:
        def wanted(*chips: str, **given: Any) -> list[AotCase]:
            usual = dict(
                slots=4, context=4096, chunk=256, every=False, models=[], form=None, kv="bf16"
            )
            return aot.wanted_cases(argparse.Namespace(**usual | given), chips or tuple(CHIPS))

        whole = wanted()
        tpus = sum(chip.platform == "tpu" for chip in CHIPS.values())
        plain = tpus * len(aot.MODELS) + len(CHIPS) - tpus
        self.assertEqual(len(whole), plain + len(aot.QUANTISED))
        self.assertEqual({case.chip for case in whole if case.form != "bf16"}, {"v5e"})
        self.assertTrue(all(case.form == "bf16" for case in wanted("v6e", "l4")))
        some = wanted("v5e", models=["12B"], form=["w4a16"])
        self.assertEqual([(c.model, c.chip, c.form) for c in some], [("12B", "v5e", "w4a16")])
        self.assertEqual(
            [(c.model, c.form) for c in wanted("v5e", form=["int8", "w4a16"])],
            [("E2B", "int8"), ("E2B", "w4a16")],
        )
        self.assertTrue(all(c.every for c in wanted("v5e", models=["E2B"])))
        self.assertFalse(any(c.every for c in some))
        kept = wanted("v5e", kv="int8")
        self.assertEqual([(c.model, c.form, c.kv) for c in kept], [("E2B", "bf16", "int8")])

    def test_the_title_names_no_folder(self) -> None:
        self.assertEqual(AotCase("26B-A4B", "v6e").title, "26B-A4B")
        self.assertEqual(AotCase("/somewhere/private/tiny", "v6e").title, "tiny")


class Compilers(unittest.TestCase):
    def test_libtpu_is_the_release_that_jax_asks_for(self) -> None:
        (release,) = compiler_requirements("tpu")
        self.assertRegex(release, r"^libtpu==[\d.]+\*?$")
        asked = importlib.metadata.requires("jax") or []
        self.assertTrue(any(line.startswith(release) for line in asked))

    def test_the_cuda_plugin_is_of_jaxs_own_release(self) -> None:
        jax = importlib.metadata.version("jax")
        plugin, runtime, nvcc = compiler_requirements("cuda")
        self.assertEqual(plugin, f"jax-cuda12-plugin=={jax}")
        self.assertEqual(runtime, f"jax-cuda12-pjrt=={jax}")
        self.assertRegex(nvcc, r"^nvidia-cuda-nvcc-cu12==[\d.]+$")

    def test_what_the_compiler_is_told_of_a_card_is_what_the_planner_knows(self) -> None:
        for name in ("l4", "t4"):
            card = ACCELERATORS[name]
            assert card.visible_memory.value is not None and card.bandwidth.value is not None
            size = int(card.visible_memory.value * (1 << 30))
            self.assertIn(f"device_memory_size: {size}", CHIPS[name].target)
            speed = int(card.bandwidth.value * 1e9)
            self.assertIn(f"memory_bandwidth: {speed} ", CHIPS[name].target)
            self.assertNotIn("{card}", CHIPS[name].target)
        self.assertEqual(CHIPS["v5e"].target, "")


class Table(unittest.TestCase):
    def outcome(self, *programs: AotProgram, chip: str = "v5e") -> aot.AotOutcome:
        return aot.AotOutcome(AotCase("E2B", chip), 9_388_210_688, LIMIT, programs)

    def row(self, program: AotProgram) -> list[str]:
        """The cells of the program's row."""
        line = aot.table_lines([self.outcome(program)])[-1]
        return [cell.strip() for cell in line.strip("|").split("|")]

    def test_a_program_that_reads_everything(self) -> None:
        expected = ["E2B", "v5e", "decode of 4", "12.3 s", "9.388 GB", "9.388 GB", "64 MB"]
        self.assertEqual(self.row(FITS), [*expected, "9.501 GB", "56 %"])

    def test_a_program_that_does_not_stands_beside_no_plan(self) -> None:
        self.assertEqual(self.row(PIECE)[4:7], ["6.790 GB", "-", "120 MB"])

    def test_what_does_not_fit_says_so_in_the_compilers_words(self) -> None:
        cells = self.row(REFUSED)
        self.assertEqual(cells[-1], f"does not fit: {REFUSED.refusal}")
        self.assertEqual(cells[4:8], ["-", "9.388 GB", "-", "-"])

    def test_rows_are_as_wide_as_the_head(self) -> None:
        lines = aot.table_lines([self.outcome(FITS, PIECE), self.outcome(REFUSED, chip="v6e")])
        self.assertEqual(len(lines), 5)
        self.assertEqual({line.count("|") for line in lines}, {10})

    def test_the_readme_says_what_the_table_does_not(self) -> None:
        results = {
            "date": "2026-11-30",
            "jax": "0.10.2",
            "compilers": ["libtpu 0.0.42.1", "jax-cuda12-plugin 0.10.2"],
            "machine": "2 cores",
        }
        text = "\n".join(aot.readme_lines(results, [self.outcome(FITS)]))
        for words in (
            "jax 0.10.2, libtpu 0.0.42.1 and jax-cuda12-plugin 0.10.2",
            "4 slots of 4,096",
            "does not say",
        ):
            self.assertIn(words, text)
        self.assertIn(aot.table_lines([self.outcome(FITS)])[-1], text)


class Readme(unittest.TestCase):
    def setUp(self) -> None:
        made = tempfile.TemporaryDirectory()
        self.addCleanup(made.cleanup)
        self.path = Path(made.name) / "README.md"

    def test_what_stands_between_the_markers_is_replaced_and_nothing_else(self) -> None:
        before = f"# Rig\n\n{aot.BEGIN}\nnot measured yet\n{aot.END}\n\nMore | text\n"
        self.path.write_text(before, encoding="utf-8")
        for lines in (["| a |", "| b |"], ["| c |"]):
            self.assertTrue(aot.write_between(self.path, lines))
            body = "\n".join(lines)
            expected = f"# Rig\n\n{aot.BEGIN}\n{body}\n{aot.END}\n\nMore | text\n"
            self.assertEqual(self.path.read_text(encoding="utf-8"), expected)

    def test_a_readme_without_them_is_left_alone(self) -> None:
        self.assertFalse(aot.write_between(self.path, ["x"]))
        self.assertFalse(self.path.exists())
        for text in ("", aot.BEGIN, aot.END + aot.BEGIN, (aot.BEGIN + aot.END) * 2):
            self.path.write_text(text, encoding="utf-8")
            self.assertFalse(aot.write_between(self.path, ["x"]))
            self.assertEqual(self.path.read_text(encoding="utf-8"), text)


class Children(unittest.TestCase):
    """A case runs in a process of its own; how that ends is told."""

    def test_a_child_that_fails_is_a_failure_with_its_last_words(self) -> None:
        told: list[AotProgram] = []
        lost = {"JAX_PLATFORMS": "cpu", "TPU_LIBRARY_PATH": "/nowhere/libtpu.so"}
        with tempfile.TemporaryDirectory() as folder:
            write_config(Path(folder), text_config())
            case = AotCase(folder, "v5e")
            outcome = aot.measure_case(case, {**os.environ, **lost}, told.append)
        self.assertTrue(outcome.failure.startswith("status 1: "), outcome.failure)
        self.assertEqual((outcome.programs, told), ((), []))
        self.assertGreater(outcome.planned, 0)

    def test_models_that_are_none(self) -> None:
        with tempfile.TemporaryDirectory() as folder:
            write_config(Path(folder), text_config(attention_bias=True))
            for model, named in (("E3B", "E3B"), (folder, "attention_bias"), (f"{folder}/x", "x")):
                with self.assertRaises(SystemExit), redirect_stderr(io.StringIO()) as said:
                    aot.main([model])
                self.assertIn(named, said.getvalue())

    def test_programs_travel_as_json(self) -> None:
        for program in (FITS, REFUSED):
            line = json.dumps(asdict(program))
            self.assertTrue(line.startswith('{"name"'))
            self.assertEqual(AotProgram(**json.loads(line)), program)

    def test_wrong_words(self) -> None:
        for argv in (["--chip", "v4"], ["--slots", "many"]):
            with self.assertRaises(SystemExit), redirect_stderr(io.StringIO()) as said:
                aot.main(argv)
            self.assertIn(argv[1], said.getvalue())
        with self.assertRaises(SystemExit) as left, redirect_stdout(io.StringIO()) as said:
            aot.main(["--help"])
        self.assertEqual(left.exception.code, 0)
        self.assertIn("Nothing runs", said.getvalue())
