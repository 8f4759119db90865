"""The suite of local-jax-cpu-2b: `python3 -m unittest test_server` in the rig's folder.

Drives the built server.py beside it through a real MCP client, offline, against a fake engine.
Needs what the server needs, ml_dtypes and tokenizers, and no JAX. Writes to temporary folders only.
"""

from __future__ import annotations

import unittest
from pathlib import Path

from forge.suites.answer_faults import AnswerFaultSuite
from forge.suites.bad_input import BadInputSuite
from forge.suites.catalogue import CatalogueSuite
from forge.suites.command_line import CommandLineSuite
from forge.suites.diagnosing import DiagnosingSuite
from forge.suites.fake_jax_server import FakeJax
from forge.suites.full_disk import FullDiskSuite
from forge.suites.jax_rig import (
    JAX_WORDS,
    JaxFolderSuite,
    JaxRigSuite,
    JaxServingSuite,
    JaxSettingsSuite,
    JaxStartFaultSuite,
)
from forge.suites.leaving import LeavingSuite
from forge.suites.measuring import MeasuringSuite
from forge.suites.outgoing import OutgoingSuite
from forge.suites.read_only import ReadOnlySuite
from forge.suites.rig_case import RigUnderTest, use_rig
from forge.suites.truth import TruthSuite

TOOLS_WITH_EFFECT = {
    "serve_model": "changes",
    "wait_for_jax_ready": "reads",
    "stop_model": "destroys",
    "get_jax_logs": "reads",
    "get_system_status": "reads",
    "get_endpoint": "reads",
    "get_model_details": "reads",
    "verify_model_health": "reads",
    "query_gemma4": "reads",
    "query_gemma4_with_stats": "reads",
    "get_job": "reads",
    "cancel_job": "destroys",
    "get_metrics": "reads",
    "run_benchmark": "changes",
    "list_reports": "reads",
    "show_report": "reads",
    "compare_reports": "reads",
    "plan_deployment": "reads",
    "probe_capabilities": "changes",
    "analyze_logs": "reads",
    "suggest_sre_remediation": "reads",
    "get_boot_timeline": "reads",
    "get_help": "reads",
}


def setUpModule() -> None:
    """Before the first test: every suite of this file tests the rig in this file's folder."""
    folder = Path(__file__).resolve().parent
    use_rig(RigUnderTest(folder, TOOLS_WITH_EFFECT, make_engine=FakeJax, words=JAX_WORDS))


SUITES = (
    CatalogueSuite,
    JaxServingSuite,
    JaxStartFaultSuite,
    JaxRigSuite,
    AnswerFaultSuite,
    BadInputSuite,
    JaxSettingsSuite,
    JaxFolderSuite,
    TruthSuite,
    FullDiskSuite,
    ReadOnlySuite,
    LeavingSuite,
    OutgoingSuite,
    CommandLineSuite,
    MeasuringSuite,
    DiagnosingSuite,
)


def load_tests(
    loader: unittest.TestLoader, tests: unittest.TestSuite, pattern: str | None
) -> unittest.TestSuite:
    """These alone: in one file with them stand the suites that some of them are made from."""
    del tests, pattern
    return unittest.TestSuite(loader.loadTestsFromTestCase(suite) for suite in SUITES)


if __name__ == "__main__":
    unittest.main()
