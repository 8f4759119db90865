"""The fake EC2's machines: services, timers, and programs that speak as the real ones do."""

from __future__ import annotations

import json
import os
import signal
import time
import unittest
from pathlib import Path

from tests.test_fake_aws_host import REGION, AwsHostCase

CANARY = "hf_CanaryCanaryCanary0123456789abcdef"
NO_DEVICE = 'could not select device driver "" with capabilities: [[gpu]]'
IMAGE = "vllm/vllm-openai:v0.32.0"


def unit_of(root: Path, name: str, text: str) -> None:
    (root / "etc/systemd/system").mkdir(parents=True, exist_ok=True)
    (root / "etc/systemd/system" / name).write_text(text)


class SystemdTest(AwsHostCase):
    """Services, timers and the journal."""

    def setUp(self) -> None:
        super().setUp()
        self.host = self.machine()
        self.host.booted()
        self.beats = self.host.root / "beats"

    def service(
        self, name: str, *lines: str, command: str = "echo beat >>$GEMMA4_ROOT/beats"
    ) -> None:
        own = f"[Service]\nExecStart=/bin/sh -c '{command}'\n" + "".join(f"{x}\n" for x in lines)
        unit_of(self.host.root, name, f"{own}[Install]\nWantedBy=multi-user.target\n")

    def systemctl(self, *words: str, status: int = 0) -> str:
        done = self.host.run("systemctl", *words)
        self.assertEqual(done.returncode, status, done.stdout + done.stderr)
        return done.stdout + done.stderr

    def shown(self, name: str, key: str) -> str:
        return self.systemctl("show", name, f"--property={key}", "--value").strip()

    def count(self) -> int:
        return len(self.beats.read_text().split()) if self.beats.exists() else 0

    def test_a_service_is_kept_going_and_stopped(self) -> None:
        self.service(
            "a.service", "Restart=always", command="echo beat >>$GEMMA4_ROOT/beats; sleep 9"
        )
        self.systemctl("daemon-reload")
        self.assertIn("Created symlink", self.systemctl("enable", "--now", "a.service"))
        self.until(lambda: self.count() == 1)
        self.assertEqual(self.systemctl("is-active", "a.service"), "active\n")
        os.kill(int(self.shown("a", "MainPID")), signal.SIGKILL)
        self.until(lambda: self.count() == 2)
        self.assertEqual(self.shown("a", "NRestarts"), "1")
        self.systemctl("stop", "a.service")
        self.assertEqual(self.systemctl("is-active", "a.service", status=3), "inactive\n")
        self.assertEqual(self.systemctl("is-enabled", "a.service"), "enabled\n")
        self.systemctl("disable", "a.service")
        self.assertEqual(self.systemctl("is-enabled", "a.service", status=1), "disabled\n")

    def test_one_that_fails_at_once_is_given_up(self) -> None:
        for line in ("Restart=on-failure", "Restart=always"):
            self.service("b.service", line, command="echo beat >>$GEMMA4_ROOT/beats; exit 4")
            before = self.count()
            self.systemctl("start", "b")
            self.until(lambda: self.shown("b", "ActiveState") == "failed")
            self.assertEqual(self.count() - before, 5)
            self.assertEqual(self.shown("b", "ExecMainStatus,Result"), "4\nexit-code")
            self.systemctl("is-failed", "b")
            self.systemctl("reset-failed", "b")
            self.systemctl("is-failed", "b", status=1)

    def test_one_that_is_to_wait_longer_goes_on_and_on(self) -> None:
        self.service(
            "c.service",
            "Restart=on-failure",
            "RestartSec=5",
            command="echo beat >>$GEMMA4_ROOT/beats; exit 4",
        )
        self.systemctl("start", "c")
        self.until(lambda: self.count() >= 7)
        self.assertIn(self.shown("c", "ActiveState"), ("activating", "active"))

    def test_oneshot(self) -> None:
        self.service("d.service", "Type=oneshot")
        self.systemctl("start", "d")
        self.assertEqual(self.count(), 1)
        self.service("e.service", "Type=oneshot", command="exit 2")
        self.assertIn(
            "control process exited with error code", self.systemctl("start", "e", status=1)
        )
        self.service("f.service", "Type=oneshot", "RemainAfterExit=yes")
        self.systemctl("start", "f")
        self.assertEqual(self.shown("f", "ActiveState,SubState"), "active\nexited")

    def test_what_it_refuses(self) -> None:
        for words, told, status in (
            (("start", "none"), "Unit none.service not found", 5),
            (("enable", "none"), "does not exist", 1),
            (("dance", "none"), "Unknown command verb", 1),
            (("start",), "Too few arguments", 1),
        ):
            self.assertIn(told, self.systemctl(*words, status=status))
        unit_of(self.host.root, "g.service", "[Service]\nExecStart=/bin/true\n")
        self.assertIn("no installation config", self.systemctl("enable", "g", status=1))
        self.assertEqual(self.shown("none", "LoadState"), "not-found")
        self.systemctl("is-active", "docker")

    def test_the_journal(self) -> None:
        self.service(
            "h.service",
            command="echo one; echo two >&2; echo $WHO; echo $HOME",
        )
        unit = self.host.root / "etc/systemd/system/h.service"
        (self.host.root / "etc/who").write_text("WHO=me\n")
        unit.write_text(unit.read_text() + "[Service]\nEnvironmentFile=/etc/who\nEnvironment=A=b\n")
        self.systemctl("start", "h")
        self.until(lambda: self.shown("h", "ActiveState") == "inactive")
        told = self.host.run("journalctl", "-u", "h", "-o", "cat", "--no-pager", "-n", "3").stdout
        self.assertEqual(told, "two\nme\n\n")  # a service has no HOME
        self.assertIn("sh[", self.host.run("journalctl", "--unit=h.service").stdout)
        none = self.host.run("journalctl", "-u", "other").stdout
        self.assertEqual(none, "-- No entries --\n")

    def test_output_to_a_file(self) -> None:
        self.service("i.service", "StandardOutput=append:/var/log/i.log", command="echo told")
        self.systemctl("start", "i")
        log = self.host.root / "var/log/i.log"
        self.until(lambda: log.exists() and log.read_text() == "told\n")

    def timer(self, *lines: str) -> None:
        self.service("j.service")
        text = "[Timer]\n" + "".join(f"{line}\n" for line in lines)
        unit_of(self.host.root, "j.timer", f"{text}[Install]\nWantedBy=timers.target\n")

    def test_a_timer_of_an_absolute_time(self) -> None:
        for form in ("@%s", "%Y-%m-%d %H:%M:%S UTC"):
            before = self.count()
            due = time.gmtime(time.time() + 2)
            self.timer(
                "OnCalendar="
                + (f"@{int(time.time()) + 2}" if "@" in form else time.strftime(form, due))
            )
            self.systemctl("start", "j.timer")
            self.assertEqual(self.shown("j.timer", "SubState"), "waiting")
            self.until(lambda: self.count() == before + 1)  # noqa: B023
            self.systemctl("stop", "j.timer")

    def test_a_timer_makes_up_for_a_stop_only_if_it_is_persistent(self) -> None:
        for line, beats in (("Persistent=true", 1), ("Persistent=false", 0)):
            with self.subTest(line):
                self.beats.unlink(missing_ok=True)
                (self.host.place / "j.timer.stamp").unlink(missing_ok=True)
                self.timer(f"OnCalendar=@{int(time.time()) + 2}", line)
                self.systemctl("enable", "--now", "j.timer")
                self.host.stop()
                time.sleep(2.5)
                self.assertEqual(self.count(), 0)
                self.host.start()
                self.host.booted()
                self.until(lambda: self.shown("j.timer", "SubState") == "elapsed")
                time.sleep(0.3)
                self.assertEqual(self.count(), beats)

    def test_a_timer_that_it_cannot_read_fails(self) -> None:
        self.timer("OnCalendar=every now and then")
        self.systemctl("start", "j.timer")
        self.assertEqual(self.shown("j.timer", "ActiveState"), "failed")


class ProgramsTest(AwsHostCase):
    """What the machine's programs say, as the real ones do."""

    def setUp(self) -> None:
        super().setUp()
        self.host = self.machine()
        self.host.booted()

    def run_on(self, *words: str, status: int = 0) -> str:
        done = self.host.run(*words)
        self.assertEqual(done.returncode, status, done.stdout + done.stderr)
        return done.stdout + done.stderr

    def test_the_gpu_is_that_of_the_type_unless_it_is_ordered_otherwise(self) -> None:
        ask = ("nvidia-smi", "--query-gpu=name,compute_cap,memory.total")
        plain = "--format=csv,noheader,nounits"
        self.assertEqual(self.run_on(*ask, plain), "NVIDIA L4, 8.9, 23034\n")
        self.assertEqual(
            self.run_on(*ask, "--format=csv").split("\n")[1], "NVIDIA L4, 8.9, 23034 MiB"
        )
        self.assertIn("CUDA Version: 13.0", self.run_on("nvidia-smi"))
        self.assertIn("NVIDIA L4", self.run_on("nvidia-smi", "-L"))
        wrong = self.run_on("nvidia-smi", "--query-gpu=soul", plain, status=2)
        self.assertIn('Field "soul" is not a valid field', wrong)
        self.host.script(gpu="g4dn")
        self.assertEqual(self.run_on(*ask, plain), "Tesla T4, 7.5, 15360\n")
        self.host.script(gpu="absent")
        self.assertEqual(self.run_on(*ask, plain, status=6), "No devices were found\n")
        self.host.script(driver=False)
        self.assertIn(
            "couldn't communicate with the NVIDIA driver", self.run_on(*ask, plain, status=9)
        )

    def test_docker_gives_the_gpu_only_with_nvidias_runtime_and_a_driver(self) -> None:
        runtimes = ("docker", "info", "--format", "{{json .Runtimes}}")
        self.assertIn('"nvidia"', self.run_on(*runtimes))
        run = ("docker", "run", "--detach", "--gpus", "all", "--publish")
        run += (f"127.0.0.1:{self.host.port}:8000", IMAGE, "some/model")
        self.host.script(nvidia_runtime=False)
        self.assertNotIn('"nvidia"', self.run_on(*runtimes))
        self.assertIn(NO_DEVICE, self.run_on(*run, status=125))
        self.run_on("docker", "rm", "--force", "nameless")
        self.host.script(driver=False)
        self.assertIn("driver not loaded", self.run_on(*run, status=125))
        self.run_on("docker", "rm", "--force", "nameless")
        self.host.script()
        self.run_on(*run)
        self.until(lambda: self.served(self.host.port))

    def test_a_secret_by_the_aws_command(self) -> None:
        ask = ("aws", "secretsmanager", "get-secret-value", "--region", REGION)
        ask += ("--secret-id", "hf-token", "--query", "SecretString", "--output", "text")
        self.assertIn("ResourceNotFoundException", self.run_on(*ask, status=254))
        self.cloud.put_secret(REGION, "hf-token", CANARY)
        self.assertEqual(self.run_on(*ask), f"{CANARY}\n")
        for orders, words, status in (
            ({"secret": "not authorized"}, "(AccessDeniedException)", 254),
            ({"profile": False}, "Unable to locate credentials", 253),
            ({"network": False}, "Could not connect to the endpoint URL", 255),
        ):
            self.host.script(**orders)
            self.assertIn(words, self.run_on(*ask, status=status))
        self.assertNotIn(CANARY, json.dumps(self.host.programs()))

    def test_a_bucket_by_the_aws_command(self) -> None:
        near = self.host.root / "var/cache"
        (near / "deep").mkdir(parents=True)
        (near / "deep/a").write_text("compiled")
        sync = ("aws", "s3", "sync", "--only-show-errors", "--region", REGION)
        far = "s3://some-bucket/rig"
        self.assertIn("NoSuchBucket", self.run_on(*sync, str(near), far, status=1))
        s3 = self.client("s3")
        s3.create_bucket(Bucket="some-bucket")
        self.assertEqual(self.run_on(*sync, str(near), far), "")
        body = s3.get_object(Bucket="some-bucket", Key="rig/deep/a")["Body"].read()
        self.assertEqual(body, b"compiled")
        again = self.machine(name="rig-2")
        there = again.root / "var/cache"
        done = again.run(*sync, far, str(there))
        self.assertEqual(done.returncode, 0, done.stderr)
        self.assertEqual((there / "deep/a").read_text(), "compiled")
        self.host.script(bucket="An error occurred (403)")
        self.assertIn("403", self.run_on(*sync, far, str(there), status=1))

    def test_swap(self) -> None:
        path = str(self.host.root / "swapfile")
        self.run_on("fallocate", "--length", str(2 << 30), path)
        self.run_on("swapon", path, status=255)
        self.run_on("mkswap", path)
        self.run_on("swapon", path)
        about = self.host.root / "proc/meminfo"
        self.assertRegex(about.read_text(), r"SwapTotal: +2097152 kB")
        self.run_on("swapoff", path)
        self.assertRegex(about.read_text(), r"SwapTotal: +0 kB")
        self.host.script(disk_full=True)
        self.assertIn("No space left", self.run_on("fallocate", "-l", "8G", path, status=1))

    def test_what_is_missing_can_be_installed(self) -> None:
        self.hosts.orders = {"tools": False, "docker": False}
        host = self.machine(name="rig-2")
        self.assertFalse((host.bin / "cmake").exists() or (host.bin / "docker").exists())
        packages = ("cmake", "ninja-build", "g++", "python3-pip", "docker.io")
        host.script(apt="E: Could not get lock /var/lib/dpkg/lock-frontend")
        self.assertEqual(host.run("apt-get", "install", "--yes", *packages).returncode, 100)
        host.script()
        self.assertEqual(host.run("apt-get", "install", "--yes", *packages).returncode, 0)
        for name in ("cmake", "ninja", "g++", "docker"):
            self.assertEqual(
                host.run(name, "--version" if name != "docker" else "ps").returncode, 0
            )


if __name__ == "__main__":
    unittest.main()
