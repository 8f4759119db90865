"""The suite of gpu-vllm-g6-2b: `python3 -m unittest test_server` in the rig's folder.

Drives the built server.py beside it through a real MCP client, offline, against an AWS account on
loopback, a stand-in for session-manager-plugin, and machines that boot and serve a scripted vLLM.
Nothing is rented. Writes to temporary folders only.
"""

from __future__ import annotations

import unittest
from pathlib import Path

from forge.suites.ec2_case import EC2_WORDS, Ec2Provider
from forge.suites.ec2_commands import Ec2CommandLineSuite, Ec2SetUpSuite
from forge.suites.ec2_endings import Ec2EndingFaultSuite
from forge.suites.ec2_faults import Ec2AskingFaultSuite
from forge.suites.ec2_hostile import Ec2HostileTextSuite
from forge.suites.ec2_launches import Ec2LaunchFaultSuite
from forge.suites.ec2_leaving import Ec2LeavingSuite
from forge.suites.ec2_machine import Ec2MachineSuite
from forge.suites.ec2_matrix import Ec2MatrixSuite
from forge.suites.ec2_outgoing import Ec2OutgoingSuite
from forge.suites.ec2_reaching import Ec2ReachingFaultSuite
from forge.suites.ec2_records import Ec2RecordFaultSuite
from forge.suites.ec2_story import Ec2StorySuite
from forge.suites.rented_case import rented_rig
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
    RentedReadOnlySuite,
    RentedSettingsSuite,
)
from forge.suites.rig_case import use_rig

TOOLS_WITH_EFFECT = {
    "find_gpu": "changes",
    "create_gpu_instance": "changes",
    "list_gpu_instances": "reads",
    "describe_gpu_instance": "reads",
    "plan_destroy": "reads",
    "destroy_gpu_instance": "destroys",
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
    "estimate_deployment_cost": "reads",
    "save_hf_token": "changes",
    "get_console_log": "reads",
    "verify_gpu_arch": "reads",
    "get_help": "reads",
}


def setUpModule() -> None:
    """Before the first test: every suite of this file tests the rig in this file's folder."""
    folder, weights = Path(__file__).resolve().parent, "google/gemma-4-E2B-it"
    words = {**RENTED_WORDS, **EC2_WORDS}
    use_rig(rented_rig(folder, TOOLS_WITH_EFFECT, weights, words, Ec2Provider))


SUITES = (
    RentedCatalogueSuite,
    RentedBadInputSuite,
    RentedReadOnlySuite,
    RentedSettingsSuite,
    Ec2LeavingSuite,
    RentedFullDiskSuite,
    RentedAnswerFaultSuite,
    *(Ec2CommandLineSuite, Ec2SetUpSuite),
    RentedMeasuringSuite,
    RentedDiagnosingSuite,
    Ec2OutgoingSuite,
    *(Ec2StorySuite, Ec2MachineSuite),
    *(Ec2AskingFaultSuite, Ec2LaunchFaultSuite, Ec2ReachingFaultSuite, Ec2EndingFaultSuite),
    *(Ec2RecordFaultSuite, Ec2HostileTextSuite, Ec2MatrixSuite),
)


def load_tests(
    loader: unittest.TestLoader, tests: unittest.TestSuite, pattern: str | None
) -> unittest.TestSuite:
    """These alone: in one file with them stand the suites that some of them are made from."""
    del tests, pattern
    return unittest.TestSuite(loader.loadTestsFromTestCase(suite) for suite in SUITES)


if __name__ == "__main__":
    unittest.main()
