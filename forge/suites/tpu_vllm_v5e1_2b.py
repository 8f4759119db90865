"""The suite of tpu-vllm-v5e1-2b: `python3 -m unittest test_server` in the rig's folder.

Drives the built server.py beside it through a real MCP client, offline, against a fake Google on
loopback, a stand-in for gcloud, and machines that boot and serve a scripted vLLM. Nothing is
rented. Writes to temporary folders only.
"""

from __future__ import annotations

import unittest
from pathlib import Path

from forge.suites.rented_case import FakeProvider
from forge.suites.rented_serving import (
    RentedAnswerFaultSuite,
    RentedDiagnosingSuite,
    RentedMeasuringSuite,
)
from forge.suites.rented_shared import (
    RentedBadInputSuite,
    RentedCatalogueSuite,
    RentedReadOnlySuite,
    RentedSettingsSuite,
)
from forge.suites.rented_tpu import (
    TPU_TOOLS_WITH_EFFECT,
    TPU_WORDS,
    QueuedStorySuite,
)
from forge.suites.rig_case import RigUnderTest, use_rig


def hub_id(folder: Path) -> Path:
    """The id of what the rig serves, in the form in which a suite holds a model."""
    del folder
    return Path("google/gemma-4-E2B-it")


def setUpModule() -> None:
    """Before the first test: every suite of this file tests the rig in this file's folder."""
    folder = Path(__file__).resolve().parent
    rig = RigUnderTest(
        folder,
        TPU_TOOLS_WITH_EFFECT,
        make_engine=FakeProvider,
        make_model=hub_id,
        words=TPU_WORDS,
    )
    use_rig(rig)


SUITES = (
    RentedCatalogueSuite,
    RentedBadInputSuite,
    RentedReadOnlySuite,
    RentedSettingsSuite,
    RentedAnswerFaultSuite,
    RentedMeasuringSuite,
    RentedDiagnosingSuite,
    QueuedStorySuite,
)


def load_tests(
    loader: unittest.TestLoader, tests: unittest.TestSuite, pattern: str | None
) -> unittest.TestSuite:
    """These alone: in one file with them stand the suites that some of them are made from."""
    del tests, pattern
    return unittest.TestSuite(loader.loadTestsFromTestCase(suite) for suite in SUITES)


if __name__ == "__main__":
    unittest.main()
