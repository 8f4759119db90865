"""The suite of local-llamacpp-cpu-2b-q4_0: `python3 -m unittest test_server` in the rig's folder.

Drives the built server.py beside it through a real MCP client, offline, against a fake
llama-server; needs what the server needs, and no compiler. Writes to temporary folders only.
"""

from __future__ import annotations

import unittest
from pathlib import Path

from forge.suites.answer_faults import AnswerFaultSuite
from forge.suites.bad_input import BadInputSuite
from forge.suites.catalogue import CatalogueSuite
from forge.suites.diagnosing import DiagnosingSuite
from forge.suites.fake_llama_server import FakeLlama, write_tiny_gguf
from forge.suites.full_disk import FullDiskSuite
from forge.suites.gguf_files import GgufFileSuite
from forge.suites.leaving import LeavingSuite
from forge.suites.llama_rig import (
    LlamaCommandLineSuite,
    LlamaMeasuringSuite,
    LlamaServingSuite,
    LlamaSettingsSuite,
    LlamaStartFaultSuite,
    LlamaToolSuite,
)
from forge.suites.outgoing import OutgoingSuite
from forge.suites.read_only import ReadOnlySuite
from forge.suites.rig_case import RigUnderTest, use_rig
from forge.suites.truth import TruthSuite

TOOLS_WITH_EFFECT = {
    "serve_model": "changes",
    "wait_for_model_ready": "reads",
    "stop_model": "destroys",
    "get_server_logs": "reads",
    "get_system_status": "reads",
    "get_endpoint": "reads",
    "get_model_details": "reads",
    "verify_model_health": "reads",
    "query_gemma4": "reads",
    "query_gemma4_with_stats": "reads",
    "build_llama_server": "changes",
    "get_slots": "reads",
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
    use_rig(RigUnderTest(folder, TOOLS_WITH_EFFECT, FakeLlama, write_tiny_gguf))


SUITES = (
    CatalogueSuite,
    LlamaServingSuite,
    LlamaStartFaultSuite,
    LlamaToolSuite,
    AnswerFaultSuite,
    BadInputSuite,
    LlamaSettingsSuite,
    GgufFileSuite,
    TruthSuite,
    FullDiskSuite,
    ReadOnlySuite,
    LeavingSuite,
    OutgoingSuite,
    LlamaCommandLineSuite,
    LlamaMeasuringSuite,
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
