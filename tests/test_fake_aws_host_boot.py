"""The boot program of the EC2 rigs with vLLM, bundled as it is, on machines of the fake EC2.

From the user data of the plane to a served model, through everything that goes wrong on the way;
then stopped, started again, left alone, and asked through Systems Manager.
"""

from __future__ import annotations

import ast
import asyncio
import functools
import json
import re
import time
import unittest
from pathlib import Path
from typing import Any

from forge.bundle import bundle
from forge.parts.boundaries.aws_clients import Aws
from forge.parts.boundaries.ssm_shell import SsmShell
from forge.parts.ground.errors import RigError
from forge.parts.planes.ec2_user_data import user_data
from forge.suites.fake_aws_host_machine import FakeAwsHost
from tests.test_fake_aws_host import PATIENCE_S, REGION, AwsHostCase

ROOT = Path(__file__).resolve().parent.parent
CANARY = "hf_CanaryCanaryCanary0123456789abcdef"
IMAGE = "vllm/vllm-openai:v0.32.0"
DOCUMENT: dict[str, Any] = {
    "v": 1,
    "rig": "gpu-vllm-g6-2b",
    "project": "111122223333",
    "region": REGION,
    "gpu_arch": "8.9",
    "image": IMAGE,
    "container": [
        *("docker", "run", "--detach", "--name", "vllm", "--restart", "unless-stopped"),
        *("--publish", "127.0.0.1:8000:8000", "--gpus", "device=0"),
        *("--env-file", "/run/gemma4/token.env", "--entrypoint", "vllm"),
        *(IMAGE, "serve", "some/model", "--port", "8000"),
    ],
    "health": "http://127.0.0.1:8000/health",
    "metrics": "http://127.0.0.1:8000/metrics",
    "marks": {"weights": [r"\] Loading model"], "compile": [r"\] Starting torch\.compile"]},
    "used": ["vllm:num_requests_running", "vllm:generation_tokens_total"],
    "secret": "hf-token",
    "token_file": "/run/gemma4/token.env",
    "cache": {"folder": "/var/lib/gemma4/cache", "bucket": ""},
    "idle_minutes": 0,
    "life_s": 14_400,
}


@functools.cache
def boot_program(name: str) -> bytes:
    """A boot program as one file without the words for people: user data have 16 KB."""
    text = bundle(f"forge.programs.{name}", ROOT).render()
    tree = ast.parse(text)
    for node in ast.walk(tree):
        body = getattr(node, "body", None)
        first = body[0] if isinstance(body, list) and body else None
        if isinstance(first, ast.Expr) and isinstance(first.value, ast.Constant):
            first.value.value = "."
    return b"#!/usr/bin/env python3\n" + ast.unparse(tree).encode("ascii")


class BootCase(AwsHostCase):
    """The boot programs of the EC2 rigs, as they are, on such machines."""

    program, document, kind = "ec2_boot", DOCUMENT, "g6.xlarge"

    def setUp(self) -> None:
        super().setUp()
        self.cloud.put_secret(REGION, "hf-token", CANARY)

    def boot(self, life_s: int = 600, name: str = "rig-1", **changes: Any) -> FakeAwsHost:
        document = json.dumps({**self.document, **changes}).encode()
        data = user_data(boot_program(self.program), document, life_s)
        return self.machine(data, name=name, InstanceType=self.kind)

    def booted(self, **changes: Any) -> tuple[int, FakeAwsHost]:
        host = self.boot(**changes)
        return host.booted(PATIENCE_S), host

    def marks(self, host: FakeAwsHost) -> list[str]:
        log = host.root / "var/lib/gemma4/boot.log"
        found = re.findall(r"GEMMA4-BOOT (\w+ \w+) ", log.read_text() if log.exists() else "")
        return [mark for mark in found if not mark.endswith("note")]

    def check_faults(self, cases: tuple[tuple[dict[str, Any], str], ...]) -> None:
        for orders, words in cases:
            with self.subTest(words):
                self.hosts.orders = orders
                status, host = self.booted()
                self.assertEqual(status, 1, host.console())
                failed = [line for line in host.console().splitlines() if " failed " in line]
                self.assertIn(words, failed[0])
                self.client("ec2").terminate_instances(InstanceIds=[host.id])

    def no_canary(self, host: FakeAwsHost) -> None:
        self.assertNotIn(CANARY, host.console())
        self.assertNotIn(CANARY, json.dumps(host.programs()))
        for path in host.root.rglob("*"):
            if path.is_file() and path.stat().st_size < 1_000_000:
                self.assertNotIn(CANARY.encode(), path.read_bytes(), path)


class VllmBootTest(BootCase):
    """A container with the GPU."""

    def test_to_a_model_that_answers(self) -> None:
        status, host = self.booted()
        self.assertEqual(status, 0, host.console())
        self.assertTrue(self.served(host.port))
        (begun,) = host.engine.starts()
        self.assertEqual(begun["argv"][:2], ["serve", "some/model"])
        self.assertEqual(begun["environment"]["HF_TOKEN"], "given")
        phases = ("driver", "docker", "image", "token", "weights", "compile")
        marks = [f"{one} {word}" for one in phases for word in ("begin", "done")]
        self.assertEqual(self.marks(host), [*marks, "ready done"])
        self.assertEqual((host.root / "var/lib/gemma4/order.json").stat().st_mode & 0o777, 0o600)
        self.no_canary(host)

    def test_acts_through_systems_manager(self) -> None:
        _status, host = self.booted()
        program = boot_program(self.program)

        async def acts() -> dict[str, str]:
            shell = SsmShell(Aws("111122223333"), REGION)
            self.assertTrue(await shell.online(host.id))
            words = ("gpu", "status", "boot_log", "logs", "stop")
            return {
                word: await shell.run(host.id, program, word, {"lines": 50}, 60.0) for word in words
            }

        told = asyncio.run(acts())
        self.assertEqual(json.loads(told["gpu"])["compute_capability"], "8.9")
        self.assertEqual(json.loads(told["status"])["container"]["state"], "running")
        self.assertIn("GEMMA4-BOOT ready done", told["boot_log"])
        self.assertIn("Loading model from scratch", told["logs"])
        self.assertEqual(told["stop"].strip(), "vllm was stopped")
        self.assertFalse(self.served(host.port))
        with self.assertRaises(RigError) as raised:
            shell = SsmShell(Aws("111122223333"), REGION)
            asyncio.run(
                shell.run(host.id, b"import sys\nprint('no luck')\nsys.exit(9)\n", "go", {}, 60)
            )
        self.assertIn("no luck", str(raised.exception))

    def test_a_machine_that_is_started_again_boots_again(self) -> None:
        _status, host = self.booted()
        ec2 = self.client("ec2")
        end = (host.root / "var/lib/gemma4/end").read_text()
        ec2.stop_instances(InstanceIds=[host.id])
        self.until(lambda: self.state(host) == "stopped" and not self.marked(host))
        self.assertFalse(self.served(host.port))
        ec2.start_instances(InstanceIds=[host.id])
        self.until(lambda: self.marks(host).count("ready done") == 2, host)
        self.assertTrue(self.served(host.port))
        self.assertEqual(self.marks(host).count("token begin"), 1)  # the container was there
        self.assertEqual((host.root / "var/lib/gemma4/end").read_text(), end)
        active = host.run("systemctl", "is-active", "gemma4-end.timer").stdout
        self.assertEqual(active, "active\n")

    def test_its_end_comes_by_the_timer(self) -> None:
        host = self.boot(life_s=4)
        self.until(lambda: "GEMMA4-END written" in host.console(), host)
        self.until(lambda: self.state(host) == "terminated", host)
        self.until(lambda: not self.marked(host))
        calls = [words for words in host.programs() if words[0] == "shutdown"]
        self.assertEqual(calls, [["shutdown", "-P", "now"]])

    def test_its_end_comes_at_once_where_its_time_passed_while_it_was_stopped(self) -> None:
        host = self.boot(life_s=5)
        ec2 = self.client("ec2")
        self.until(lambda: "GEMMA4-END written" in host.console(), host)
        ec2.stop_instances(InstanceIds=[host.id])
        end = int((host.root / "var/lib/gemma4/end").read_text())
        self.until(lambda: self.state(host) == "stopped" and time.time() > end + 0.5)
        ec2.start_instances(InstanceIds=[host.id])
        self.until(lambda: self.state(host) == "terminated", host)

    def test_a_machine_that_nobody_uses_ends(self) -> None:
        status, host = self.booted(idle_minutes=3)
        self.assertEqual(status, 0, host.console())
        self.until(lambda: self.state(host) == "terminated", host)
        self.until(lambda: not self.marked(host))
        found = self.client("ec2").describe_instances(InstanceIds=[host.id])
        reason = found["Reservations"][0]["Instances"][0]["StateReason"]["Code"]
        self.assertEqual(reason, "Client.InstanceInitiatedShutdown")

    def test_what_goes_wrong_by_the_script(self) -> None:
        self.check_faults(
            (
                ({"gpu": "g4dn"}, "Tesla T4 of compute capability 7.5"),
                ({"gpu": "absent"}, "No devices were found"),
                ({"driver": False}, "couldn't communicate with the NVIDIA driver"),
                ({"nvidia_runtime": False}, "no runtime nvidia"),
                ({"docker": False}, "docker is not on this machine"),
                ({"secret": "User: x is not authorized to perform"}, "AccessDeniedException"),
                ({"profile": False}, "Unable to locate credentials"),
                ({"pull": "Error response from daemon: manifest unknown"}, "manifest unknown"),
                ({"disk_full": True}, "no space left on device"),
                ({"network": False}, "server misbehaving"),
                ({"run": "something else"}, "weights failed"),
            )
        )

    def test_a_container_that_is_killed_for_memory(self) -> None:
        self.hosts.orders = {"oom": True}
        status, host = self.booted()
        self.assertEqual(status, 1)
        self.assertIn("OOMKilled", host.console())


if __name__ == "__main__":
    unittest.main()
