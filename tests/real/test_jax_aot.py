"""`make aot` for real: a tiny engine's programs compiled for a v5e and an L4 that are not here.

libtpu and JAX's CUDA plugin, 0.4 GB to fetch and 1.3 GB there, are kept in RIG_REAL_CACHE, outside
HOME. About a minute of two cores.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import unittest
from pathlib import Path
from typing import Any

from tests.engines.gemma4_files import moe_config, text_config, write_config

ROOT = Path(__file__).resolve().parent.parent.parent
SMALLEST = ("--slots", "1", "--context", "64", "--chunk", "16")
CACHE = Path(os.environ.get("RIG_REAL_CACHE") or "/var/cache/gemma4-rigs-real")


def compiled(
    chip: str, config: dict[str, Any], *more: str
) -> tuple[int, list[str], dict[str, Any]]:
    """(status, lines for people, results) of `make aot` for a folder with this config."""
    with tempfile.TemporaryDirectory() as folder:
        write_config(Path(folder), config)
        places = os.pathsep.join([str(ROOT), *filter(None, sys.path)])
        environment = {**os.environ, "XDG_CACHE_HOME": str(CACHE), "PYTHONPATH": places}
        command = [sys.executable, "-m", "forge.aot", "--chip", chip, *more, folder]
        ended = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True)
    *lines, last = ended.stdout.splitlines() or [""]
    try:
        return ended.returncode, lines, json.loads(last)
    except ValueError:
        raise AssertionError(ended.stderr[-2000:]) from None


class TinyModels(unittest.TestCase):
    def test_every_program_of_an_engine_is_compiled(self) -> None:
        readme = ROOT / "local-jax-cpu-2b" / "README.md"
        before = readme.read_bytes() if readme.exists() else b""
        status, lines, results = compiled(
            "v5e", text_config(), "--slots", "2", "--context", "64", "--chunk", "16"
        )
        self.assertEqual(status, 0, lines)
        (outcome,) = results["outcomes"]
        names = ["prefill of 16", "first token", "decode of 1", "decode of 2", "moving a row"]
        self.assertEqual([program["name"] for program in outcome["programs"]], names)
        for program in outcome["programs"]:
            self.assertEqual(program["refusal"], "")
            self.assertGreater(program["arguments"], 0)
            self.assertGreater(program["peak"], program["arguments"] // 2)
        self.assertRegex(results["compilers"][0], r"^libtpu \d+\.\d+")
        self.assertTrue(any("| decode of 2 |" in line for line in lines))
        self.assertEqual(readme.read_bytes() if readme.exists() else b"", before)

    def test_a_sparse_one_that_does_not_fit_is_told_in_the_compilers_words(self) -> None:
        """Experts of 40 GB: refused by the compiler, and no failure of `make aot`."""
        huge = moe_config(num_experts=65536, moe_intermediate_size=512, hidden_size=64)
        status, lines, results = compiled("v5e", huge, *SMALLEST)
        self.assertEqual(status, 0, lines)
        (outcome,) = results["outcomes"]
        self.assertGreater(outcome["planned"], outcome["limit"])
        refusals = [program["refusal"] for program in outcome["programs"]]
        self.assertTrue(any("HBM" in refusal for refusal in refusals), refusals)
        self.assertTrue(any("does not fit: " in line for line in lines))

    def test_integers_are_part_of_the_product_and_no_matrix_is_unpacked_in_memory(self) -> None:
        """MLPs of 128 times as much as all else: unpacked, one matrix would be 25 MB."""
        wide = text_config(
            hidden_size=256,
            hidden_size_per_layer_input=32,
            intermediate_size=49152,
            num_hidden_layers=2,
            layer_types=["sliding_attention", "full_attention"],
            num_kv_shared_layers=0,
            per_layer_config={"1": {"head_dim": 64}},
        )
        forms = ("--form", "w4a16", "--form", "int8")
        status, lines, results = compiled("v5e", wide, *forms, *SMALLEST)
        self.assertEqual(status, 0, lines)
        self.assertEqual(len(results["outcomes"]), 2)
        for outcome in results["outcomes"]:
            with self.subTest(form=outcome["case"]["form"]):
                (decode,) = (p for p in outcome["programs"] if p["name"] == "decode of 1")
                self.assertEqual(decode["refusal"], "")
                self.assertLess(decode["arguments"], 1.1 * outcome["planned"])
                self.assertLess(decode["temporaries"], 12e6)

    def test_a_card(self) -> None:
        status, lines, results = compiled("l4", text_config(), *SMALLEST)
        self.assertEqual(status, 0, lines)
        (outcome,) = results["outcomes"]
        names = ["prefill of 16", "first token", "decode of 1"]
        self.assertEqual([program["name"] for program in outcome["programs"]], names)
        for program in outcome["programs"]:
            self.assertGreater(program["peak"], program["arguments"])
        self.assertRegex(results["compilers"][0], r"^jax-cuda12-plugin \d+\.\d+")
