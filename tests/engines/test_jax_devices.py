"""Several devices against one: eight virtual ones in a process of their own, one small model.

The real shapes, and more devices, are in tests/real/test_jax_devices.py.
"""

from __future__ import annotations

import tempfile
import unittest
from pathlib import Path
from typing import Any

from tests.engines.devices_case import check_devices
from tests.engines.tiny import make_checkpoint


class DevicesTest(unittest.TestCase):
    def test_two_devices_give_the_answers_of_one(self) -> None:
        """A model of all kinds: per-layer tables, shared keys, one key head and two, experts."""
        kinds: dict[str, Any] = {
            "num_hidden_layers": 3,
            "layer_types": ["sliding_attention", "full_attention", "full_attention"],
            "num_kv_shared_layers": 1,
            "num_key_value_heads": 2,
            "num_global_key_value_heads": 1,
            "attention_k_eq_v": True,
            "enable_moe_block": True,
            "num_experts": 8,
            "top_k_experts": 2,
            "moe_intermediate_size": 32,
        }
        with tempfile.TemporaryDirectory() as folder:
            check_devices(self, make_checkpoint(Path(folder), "e2b", **kinds), [(2, 1)])


if __name__ == "__main__":
    unittest.main()
