"""The suite of tpu-jax-v5e1-2b: `python3 -m unittest test_server` in the rig's folder.

Drives the built server.py beside it through a real MCP client, offline, against a fake Google on
loopback, a stand-in for gcloud, and machines that boot and serve with a scripted jax_server.py.
Nothing is rented. Writes to temporary folders only.

What this rig shares with tpu-vllm-v5e1-2b to the letter, that rig's suite tests.
"""

from __future__ import annotations

import unittest
from pathlib import Path

from forge.suites.jax_tpu_case import (
    JAX_TPU_TOOLS_WITH_EFFECT,
    JAX_TPU_WORDS,
    JaxTpuProvider,
)
from forge.suites.jax_tpu_story import JaxTpuStorySuite
from forge.suites.rented_case import rented_rig
from forge.suites.rented_serving import RentedAnswerFaultSuite
from forge.suites.rented_shared import (
    RentedBadInputSuite,
    RentedCatalogueSuite,
    RentedReadOnlySuite,
    RentedSettingsSuite,
)
from forge.suites.rig_case import use_rig


def setUpModule() -> None:
    """Before the first test: every suite of this file tests the rig in this file's folder."""
    folder, weights = Path(__file__).resolve().parent, "google/gemma-4-E2B-it-qat-w4a16-ct"
    use_rig(rented_rig(folder, JAX_TPU_TOOLS_WITH_EFFECT, weights, JAX_TPU_WORDS, JaxTpuProvider))


SUITES = (
    RentedCatalogueSuite,
    RentedBadInputSuite,
    RentedReadOnlySuite,
    RentedSettingsSuite,
    RentedAnswerFaultSuite,
    JaxTpuStorySuite,
)


def load_tests(
    loader: unittest.TestLoader, tests: unittest.TestSuite, pattern: str | None
) -> unittest.TestSuite:
    """These alone: in one file with them stand the suites that some of them are made from."""
    del tests, pattern
    return unittest.TestSuite(loader.loadTestsFromTestCase(suite) for suite in SUITES)


if __name__ == "__main__":
    unittest.main()
