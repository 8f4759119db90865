"""Up to eight virtual devices against one, for each shape of Gemma 4: tensor and data parallel.

With eight query heads, so that all of these divide; two key heads are then whole on four devices
and more. About three minutes of two cores.
"""

from __future__ import annotations

import tempfile
import unittest
from pathlib import Path

from tests.engines.devices_case import check_devices
from tests.engines.tiny import make_checkpoint


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


if __name__ == "__main__":
    unittest.main()
