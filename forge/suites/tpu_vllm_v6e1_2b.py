"""The suite of tpu-vllm-v6e1-2b: `python3 -m unittest test_server` in the rig's folder.

Drives the built server.py beside it through a real MCP client, offline, against a fake Google on
loopback, a stand-in for gcloud, and machines that boot and serve a scripted vLLM. Nothing is
rented. Writes to temporary folders only.
"""

from __future__ import annotations

import unittest
from pathlib import Path

from forge.suites.google_case import GoogleProvider
from forge.suites.rented_case import rented_rig
from forge.suites.rented_commands import RentedCommandLineSuite
from forge.suites.rented_endings import EndingFaultSuite
from forge.suites.rented_faults import AskingFaultSuite
from forge.suites.rented_hostile import HostileTextSuite
from forge.suites.rented_matrix import MatrixSuite
from forge.suites.rented_outgoing import RentedOutgoingSuite
from forge.suites.rented_reaching import ReachingFaultSuite
from forge.suites.rented_serving import (
    RentedAnswerFaultSuite,
    RentedDiagnosingSuite,
    RentedMeasuringSuite,
)
from forge.suites.rented_shared import (
    RENTED_WORDS,
    RentedBadInputSuite,
    RentedCatalogueSuite,
    RentedFullDiskSuite,
    RentedLeavingSuite,
    RentedReadOnlySuite,
    RentedSettingsSuite,
)
from forge.suites.rented_story import RentedStorySuite
from forge.suites.rig_case import use_rig

TOOLS_WITH_EFFECT = {
    "find_tpu_vm": "changes",
    "create_tpu_vm_instance": "changes",
    "list_tpu_vm_instances": "reads",
    "describe_tpu_vm_instance": "reads",
    "plan_destroy": "reads",
    "destroy_tpu_vm_instance": "destroys",
    "list_orphans": "reads",
    "reap_orphans": "destroys",
    "get_system_status": "reads",
    "wait_for_vllm_ready": "reads",
    "get_vllm_docker_logs": "reads",
    "get_vllm_endpoint": "reads",
    "manage_vllm_docker": "destroys",
    "query_gemma4": "reads",
    "query_gemma4_with_stats": "reads",
    "verify_model_health": "reads",
    "get_model_details": "reads",
    "get_job": "reads",
    "cancel_job": "destroys",
    "run_vllm_benchmark": "changes",
    "analyze_logs": "reads",
    "suggest_sre_remediation": "reads",
    "get_boot_timeline": "reads",
    "analyze_cloud_logging": "reads",
    "save_hf_token": "changes",
    "estimate_deployment_cost": "reads",
    "get_tpu_vm_serial_log": "reads",
    "get_help": "reads",
}


def setUpModule() -> None:
    """Before the first test: every suite of this file tests the rig in this file's folder."""
    folder, weights = Path(__file__).resolve().parent, "google/gemma-4-E2B-it"
    use_rig(rented_rig(folder, TOOLS_WITH_EFFECT, weights, RENTED_WORDS, GoogleProvider))


SUITES = (
    RentedCatalogueSuite,
    RentedBadInputSuite,
    RentedReadOnlySuite,
    RentedSettingsSuite,
    RentedLeavingSuite,
    RentedFullDiskSuite,
    RentedAnswerFaultSuite,
    RentedCommandLineSuite,
    RentedMeasuringSuite,
    RentedDiagnosingSuite,
    RentedOutgoingSuite,
    RentedStorySuite,
    *(AskingFaultSuite, EndingFaultSuite, ReachingFaultSuite, HostileTextSuite, MatrixSuite),
)


def load_tests(
    loader: unittest.TestLoader, tests: unittest.TestSuite, pattern: str | None
) -> unittest.TestSuite:
    """These alone: in one file with them stand the suites that some of them are made from."""
    del tests, pattern
    return unittest.TestSuite(loader.loadTestsFromTestCase(suite) for suite in SUITES)


if __name__ == "__main__":
    unittest.main()
