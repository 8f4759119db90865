"""Up to eight virtual devices against one, for each shape of Gemma 4: tensor and data parallel.

With eight query heads, so that all of these divide; two key heads are then whole on four devices
and more. About three minutes of two cores.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import unittest
from pathlib import Path
from unittest import mock

from forge.aot_chips import compiler_environment
from forge.engines.gemma4.config_reader import read_config
from tests.engines.devices_case import check_collectives, check_devices
from tests.engines.gemma4_files import FULL, SLIDING, write_config
from tests.engines.many_devices import ROOT
from tests.engines.test_gemma4_sizes import REAL
from tests.engines.tiny import make_checkpoint

CACHE = os.environ.get("RIG_REAL_CACHE") or "/var/cache/gemma4-rigs-real"


class DevicesTest(unittest.TestCase):
    def check(self, shape: str, *ways: tuple[int, int]) -> None:
        with tempfile.TemporaryDirectory() as folder:
            made = make_checkpoint(Path(folder) / shape, shape, num_attention_heads=8)
            check_devices(self, made, ways, slots=2)

    def test_e2b(self) -> None:
        self.check("e2b", (2, 2), (8, 1))

    def test_12b(self) -> None:
        self.check("12b", (2, 1), (4, 1))

    def test_experts(self) -> None:
        self.check("moe", (1, 2), (4, 2))


class ChipsTest(unittest.TestCase):
    """Compiled for four v5e chips that are not here: what the CPU's compiler chooses says little.

    libtpu is kept in RIG_REAL_CACHE, as for test_jax_aot.
    """

    def test_no_weight_is_moved_between_four_chips(self) -> None:
        """E2B's widths and vocabulary, and fewer layers."""
        few = {"num_hidden_layers": 3, "layer_types": [SLIDING, FULL, FULL]}
        with tempfile.TemporaryDirectory() as folder:
            stated = {**REAL["E2B"], "num_kv_shared_layers": 1, **few}
            config = read_config(write_config(Path(folder), stated))
            with mock.patch.dict(os.environ, {"XDG_CACHE_HOME": CACHE}):
                _, environment = compiler_environment("tpu")
            environment["PYTHONPATH"] = os.pathsep.join([str(ROOT), *filter(None, sys.path)])
            command = [sys.executable, "-m", "tests.real.tpu_collectives", folder]
            ended = subprocess.run(
                command, cwd=ROOT, env=environment, capture_output=True, text=True
            )
        self.assertEqual(ended.returncode, 0, ended.stderr[-2000:])
        told = json.loads(ended.stdout.splitlines()[-1])
        self.assertEqual(set(told), {"prefill of 16", "decode of 4"})
        for name, collectives in told.items():
            check_collectives(self, config, name, collectives, 4)


if __name__ == "__main__":
    unittest.main()
