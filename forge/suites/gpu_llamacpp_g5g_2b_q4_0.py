"""The suite of gpu-llamacpp-g5g-2b-q4_0: `python3 -m unittest test_server` in the rig's folder.

Drives the built server.py beside it through a real MCP client, offline, against an AWS account on
loopback, a stand-in for session-manager-plugin, and machines that boot, build and serve a scripted
llama-server. Nothing is rented. Writes to temporary folders only.

What this rig shares with gpu-vllm-g6-2b to the letter, that rig's suite tests: leaving, full disks,
the gate of RIG_READ_ONLY while a server runs, set-up, secrets on the way out, what is launched and
lost, triage.py by itself.
"""

from __future__ import annotations

import unittest
from pathlib import Path

from forge.suites.ec2_build_case import Ec2BuildProvider
from forge.suites.ec2_build_faults import Ec2BuildFaultSuite
from forge.suites.ec2_build_shared import Ec2BuildCommandLineSuite, Ec2BuildSettingsSuite
from forge.suites.ec2_build_story import (
    Ec2BuildBucketSuite,
    Ec2BuildServerSuite,
    Ec2BuildStorySuite,
)
from forge.suites.ec2_case import EC2_WORDS
from forge.suites.ec2_matrix import Ec2BuildMatrixSuite
from forge.suites.rented_case import rented_rig
from forge.suites.rented_serving import RentedAnswerFaultSuite
from forge.suites.rented_shared import RentedBadInputSuite, RentedCatalogueSuite
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
    "wait_for_model_ready": "reads",
    "get_server_logs": "reads",
    "get_endpoint": "reads",
    "manage_llama_server": "destroys",
    "query_gemma4": "reads",
    "query_gemma4_with_stats": "reads",
    "verify_model_health": "reads",
    "get_model_details": "reads",
    "get_job": "reads",
    "cancel_job": "destroys",
    "run_benchmark": "changes",
    "analyze_logs": "reads",
    "suggest_sre_remediation": "reads",
    "get_boot_timeline": "reads",
    "estimate_deployment_cost": "reads",
    "save_hf_token": "changes",
    "verify_gpu_arch": "reads",
    "get_build_progress": "reads",
    "get_help": "reads",
}


def setUpModule() -> None:
    """Before the first test: every suite of this file tests the rig in this file's folder."""
    folder, weights = Path(__file__).resolve().parent, "google/gemma-4-E2B-it-qat-q4_0-gguf"
    use_rig(rented_rig(folder, TOOLS_WITH_EFFECT, weights, EC2_WORDS, Ec2BuildProvider))


SUITES = (
    RentedCatalogueSuite,
    RentedBadInputSuite,
    Ec2BuildSettingsSuite,
    RentedAnswerFaultSuite,
    Ec2BuildCommandLineSuite,
    Ec2BuildStorySuite,
    Ec2BuildServerSuite,
    Ec2BuildBucketSuite,
    Ec2BuildFaultSuite,
    Ec2BuildMatrixSuite,
)


def load_tests(
    loader: unittest.TestLoader, tests: unittest.TestSuite, pattern: str | None
) -> unittest.TestSuite:
    """These alone: in one file with them stand the suites that some of them are made from."""
    del tests, pattern
    return unittest.TestSuite(loader.loadTestsFromTestCase(suite) for suite in SUITES)


if __name__ == "__main__":
    unittest.main()
