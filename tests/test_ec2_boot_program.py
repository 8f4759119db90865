"""ec2_boot.py as the process that it is on a machine of EC2: its order, its GPU, its secret and
bucket by the aws command, and its boots after the first, which no user data make."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
import unittest
from pathlib import Path
from typing import Any

from forge.parts.ground.lean_program import lean_program
from forge.parts.planes.ec2_user_data import USER_DATA_LIMIT, user_data
from tests import test_boot_program
from tests.boot_sandbox import (
    COMPILE_LINE,
    IMAGE,
    METRICS,
    PATIENCE_S,
    PLAIN_TOKEN,
    TOKEN,
    WEIGHTS_LINE,
    Sandbox,
)

L4 = "NVIDIA L4, 8.9, 23034, 570.133.20"
T4G = "NVIDIA T4G, 7.5, 15360, 570.133.20"
SMI = """\
+-----------------------------------------------------------------------------------------+
| NVIDIA-SMI 570.133.20             Driver Version: 570.133.20     CUDA Version: 12.8     |
|-----------------------------------------+------------------------+----------------------+
"""
RUNTIMES = {"nvidia": {"path": "nvidia-container-runtime"}, "runc": {"path": "runc"}}
NO_DRIVER = (
    "NVIDIA-SMI has failed because it couldn't communicate with the NVIDIA driver. Make sure that "
    "the latest NVIDIA driver is installed and running."
)
DENIED = (
    "aws: [ERROR]: An error occurred (AccessDeniedException) when calling the GetSecretValue "
    "operation: User: arn:aws:sts::000000000000:assumed-role/r/i-0 is not authorized to perform: "
    "secretsmanager:GetSecretValue on resource: hf-token"
)
NO_CREDENTIALS = 'Unable to locate credentials. You can configure them by running "aws login".'


class Ec2Sandbox(Sandbox):
    """A machine of AWS's image for GPUs, whose user data brought the order."""

    program = "ec2_boot"
    phases = ("driver", "docker", "image", "token", "weights", "compile", "ready")
    programs = (*Sandbox.programs, "aws", "nvidia-smi", "nvcc")

    def setUp(self) -> None:
        super().setUp()
        self.file.write_text(lean_program(self.text))  # so user data carry it
        secrets = {"us-east-1/hf-token": TOKEN}
        self.world(gpus=[L4], smi=SMI, runtimes=RUNTIMES, secrets=secrets)

    def make_document(self) -> dict[str, Any]:
        own = {"rig": "gpu-vllm-g6-2b", "project": "0" * 12, "region": "us-east-1"}
        return {**super().make_document(), **own, "gpu_arch": "8.9"}

    def give(self, document: Any) -> None:
        order = self.root / "var/lib/gemma4/order.json"
        order.parent.mkdir(parents=True, exist_ok=True)
        order.write_text(document if isinstance(document, str) else json.dumps(document))

    def refused(self, phase: str) -> str:
        """What the boot fails of, in that phase, without having run a container."""
        status, output = self.boot()
        self.assertEqual(status, 1, output)
        self.assertEqual(self.ran("docker", "run"), [])
        self.assertEqual(self.marks()[-1], f"{phase} failed")
        self.assert_watched()
        self.assert_no_canary(output)
        return self.failure()


class TestColdBoot(Ec2Sandbox):
    def test_everything_succeeds_in_order(self) -> None:
        self.world(log=[["out", WEIGHTS_LINE], ["err", COMPILE_LINE]])
        status, output = self.boot()
        self.assertEqual(status, 0, output)
        kept = [mark for mark in self.marks() if not mark.endswith("note")]
        begun = [f"{p} {s}" for p in self.phases[:-1] for s in ("begin", "done")]
        self.assertEqual(kept, [*begun, "ready done"])
        self.assertEqual(self.ran("docker", "run"), [self.document["container"]])
        self.assertEqual(self.world()["containers"]["vllm"]["env"], [f"HF_TOKEN={TOKEN}"])
        self.assertTrue(self.state().ready)
        self.assert_watched()
        self.assert_no_canary(output)

    def test_the_driver_is_told_before_anything_else_happens(self) -> None:
        self.boot()
        (told,) = [line for line in self.log().splitlines() if " driver done " in line]
        self.assertIn(
            "NVIDIA L4, compute capability 8.9, 23034 MiB, driver 570.133.20, CUDA 12.8", told
        )
        names = [argv[0] for argv in self.ran()]
        self.assertLess(names.index("nvidia-smi"), names.index("docker"))
        self.assertLess(names.index("systemctl"), names.index("nvidia-smi"))

    def test_the_secret_is_asked_for_by_the_aws_command_in_its_region(self) -> None:
        self.boot()
        argv = ["aws", "secretsmanager", "get-secret-value", "--region", "us-east-1"]
        argv += ["--secret-id", "hf-token", "--query", "SecretString", "--output", "text"]
        self.assertEqual(self.ran("aws"), [argv])

    def test_without_a_secret_no_token_is_asked_for(self) -> None:
        self.document["secret"] = ""
        self.give(self.document)
        status, output = self.boot()
        self.assertEqual(status, 0, output)
        self.assertIn("no secret is named", output)
        self.assertEqual(self.ran("aws"), [])

    def test_an_environment_as_poor_as_cloud_inits_is_enough(self) -> None:
        """No HOME, and a PATH without the folders of the aws command and of snaps."""
        for folder, names in (("usr/local/bin", ("aws",)), ("usr/bin", ("nvidia-smi", "docker"))):
            (self.root / folder).mkdir(parents=True)
            for name in names:
                (self.bin / name).rename(self.root / folder / name)
        self.assertNotIn("HOME", self.environment())
        status, output = self.boot()
        self.assertEqual(status, 0, output)
        self.assertTrue(self.ran("aws", "secretsmanager"))
        environment = {k: v for k, v in self.environment().items() if k != "PATH"}
        done = subprocess.run(
            [self.python, "-", "status", "e30"],
            env=environment,
            input=self.text,
            capture_output=True,
            text=True,
            timeout=PATIENCE_S,
        )
        self.assertEqual(json.loads(done.stdout)["container"]["state"], "running", done.stderr)


class TestColdBootOnThisPython(TestColdBoot):
    """The same on the Python that runs this; everything else is on the oldest one."""

    python = sys.executable


class TestDriver(Ec2Sandbox):
    def test_a_gpu_of_another_architecture_is_refused_before_anything_is_fetched(self) -> None:
        self.world(gpus=[T4G])
        told = self.refused("driver")
        self.assertIn("NVIDIA T4G of compute capability 7.5, this rig is for 8.9", told)
        self.assertIn("INSTANCE_TYPE", told)
        self.assertEqual(self.ran("docker"), [])
        self.assertEqual(self.ran("aws"), [])

    def test_the_first_of_several_gpus_counts(self) -> None:
        self.world(gpus=[L4, T4G])
        self.assertEqual(self.boot()[0], 0)

    def test_an_image_without_the_driver_is_told_with_its_remedy(self) -> None:
        (self.bin / "nvidia-smi").unlink()
        told = self.refused("driver")
        self.assertIn("nvidia-smi is not on this machine", told)
        self.assertIn("AMI_PARAMETER", told)

    def test_a_driver_that_is_still_loading_is_waited_for(self) -> None:
        self.world(faults={"nvidia-smi": [NO_DRIVER, NO_DRIVER]})
        self.assertEqual(self.boot()[0], 0)
        self.assertIn("driver done", self.marks())

    def test_a_driver_that_never_comes_is_told_in_its_words(self) -> None:
        self.minute_s = 0.2
        self.world(faults={"nvidia-smi": [NO_DRIVER] * 20})
        told = self.refused("driver")
        self.assertIn("couldn't communicate with the NVIDIA driver", told)
        self.assertIn("Remedy: ", told)
        self.assertEqual(len(self.ran("nvidia-smi")), 6)

    def test_a_driver_that_hangs_is_given_up_and_told(self) -> None:
        self.minute_s = 0.02
        self.world(hangs="nvidia-smi")
        self.assertIn("took more than 2 minutes", self.refused("driver"))

    def test_a_machine_without_a_gpu_is_told(self) -> None:
        self.minute_s = 0.2
        for said in ([], ["No devices were found"]):
            with self.subTest(said):
                self.forget()
                self.world(gpus=said)
                self.assertIn("nvidia-smi names no GPU", self.refused("driver"))


class TestDocker(Ec2Sandbox):
    def test_docker_that_is_missing_is_not_installed_but_told_with_the_remedy(self) -> None:
        (self.bin / "docker").unlink()
        (self.bin / "apt-get").symlink_to(self.bin / "stub")
        told = self.refused("docker")
        self.assertIn("docker is not on this machine. Remedy: ", told)
        self.assertIn("AMI_PARAMETER", told)
        self.assertEqual(self.ran("apt-get"), [])

    def test_docker_without_nvidias_runtime_is_told_before_the_image_is_pulled(self) -> None:
        self.world(runtimes={"runc": {"path": "runc"}})
        told = self.refused("docker")
        self.assertIn("docker 24.0.7 has no runtime nvidia. Remedy: ", told)
        self.assertEqual(self.ran("docker", "pull"), [])

    def test_a_daemon_that_starts_slowly_is_waited_for(self) -> None:
        down = "Cannot connect to the Docker daemon at unix:///var/run/docker.sock."
        self.world(faults={"docker version": [down, down]})
        status, output = self.boot()
        self.assertEqual(status, 0, output)


class TestToken(Ec2Sandbox):
    def told(self, *words: str) -> str:
        self.world(faults={"aws secretsmanager": list(words)})
        return self.refused("token")

    def test_a_missing_permission_is_told_with_its_remedy_at_once(self) -> None:
        told = self.told(*[DENIED] * 9)
        self.assertIn("AccessDeniedException", told)
        self.assertIn("secretsmanager:GetSecretValue); set-up makes such a role", told)
        self.assertEqual(len(self.ran("aws")), 1)

    def test_a_missing_secret_is_told_with_its_remedy(self) -> None:
        self.world(secrets={"eu-west-1/hf-token": TOKEN})
        told = self.refused("token")
        self.assertIn("secret hf-token in us-east-1", told)
        self.assertIn("can't find the specified secret", told)
        self.assertIn("save_hf_token", told)
        self.assertEqual(len(self.ran("aws")), 1)

    def test_a_machine_without_a_profile_is_told_after_some_tries(self) -> None:
        self.minute_s = 0.2
        told = self.told(*[NO_CREDENTIALS] * 9)
        self.assertIn("Unable to locate credentials", told)
        self.assertIn("INSTANCE_PROFILE", told)
        self.assertEqual(len(self.ran("aws")), 6)

    def test_credentials_that_come_late_are_waited_for(self) -> None:
        self.world(faults={"aws secretsmanager": [NO_CREDENTIALS, "Connect timeout on endpoint"]})
        status, output = self.boot()
        self.assertEqual(status, 0, output)
        self.assertEqual(len(self.ran("aws")), 3)

    def test_a_machine_without_the_aws_command_is_told(self) -> None:
        (self.bin / "aws").unlink()
        told = self.refused("token")
        self.assertIn("aws is not on this machine. Remedy: ", told)
        self.assertIn("AWS CLI", told)

    def test_a_secret_that_is_no_word_is_told_and_not_shown(self) -> None:
        for secret in ("None", "", f"{TOKEN}\nLD_PRELOAD=/x", '{"token": "x y"}'):
            with self.subTest(secret[:4]):
                self.forget()
                self.world(secrets={"us-east-1/hf-token": secret})
                self.assertIn("does not hold one plain word", self.refused("token"))
        self.world(secrets={})

    def test_a_token_of_any_shape_is_kept_out_of_every_word(self) -> None:
        self.world(secrets={"us-east-1/hf-token": PLAIN_TOKEN})
        self.cloud.answers["GET /health"] = (503, "")
        self.world(log=[["err", f"login with {PLAIN_TOKEN} refused"]])
        process = self.start()
        self.until(lambda: "vllm" in self.world()["containers"], "the container")
        self.change_container("the end", status="exited", code=1)
        output, _ = process.communicate(timeout=PATIENCE_S)
        self.assertIn("login with [redacted] refused", self.failure())
        self.assert_no_canary(output)


class TestOrder(Ec2Sandbox):
    def test_a_machine_without_its_order_says_so(self) -> None:
        (self.root / "var/lib/gemma4/order.json").unlink()
        self.assertIn("the order that the user data bring is not here", self.refused("driver"))

    def test_each_field_that_is_missing_is_named(self) -> None:
        for key in self.document:
            if key == "leave":  # of clouds whose machines ask for their own deletion
                continue
            with self.subTest(key):
                self.forget()
                self.give({k: v for k, v in self.document.items() if k != key})
                self.assertIn(f"KeyError: '{key}'", self.refused("driver"))

    def test_each_field_of_this_cloud_that_is_wrong_is_named(self) -> None:
        wrong: dict[str, tuple[Any, ...]] = {
            "project": ("", "fake-proj", "1" * 13, "٣" * 12),
            "region": ("", "us-east-1a", "us-east-1 --profile x", "../x", "--debug"),
            "gpu_arch": ("", "8", "8.9.1", "all", 8.9),
        }
        for key, values in wrong.items():
            for value in values:
                with self.subTest(key, value=value):
                    self.forget()
                    self.give({**self.document, key: value})
                    told = self.refused("driver")
                    self.assertTrue(key in told or "TypeError" in told, told)
        self.assertEqual(self.ran("nvidia-smi"), [])


class TestLaterBoots(Ec2Sandbox):
    def unit(self, name: str) -> dict[str, str]:
        """The lines of a unit, by their keys."""
        text = (self.root / "etc/systemd/system" / name).read_text()
        self.assertEqual([line[0] for line in text.splitlines() if "=" not in line], ["["] * 3)
        return dict(line.split("=", 1) for line in text.splitlines() if "=" in line)

    def test_a_service_runs_the_installed_program_after_a_start(self) -> None:
        self.boot()
        self.assertIn(["systemctl", "enable", "gemma4-boot.service"], self.ran("systemctl"))
        unit = self.unit("gemma4-boot.service")
        self.assertEqual(unit["WantedBy"], "multi-user.target")
        self.assertNotIn("Restart", unit)
        python, program = unit["ExecStart"].split()
        self.assertEqual(python, self.python)
        # cloud-init removes what it ran; only the installed copy is left.
        os.unlink(self.file)
        began = int(time.time())
        self.until(lambda: int(time.time()) > began, "the next second")
        process = self.start(file=Path(program))
        output, _ = process.communicate(timeout=PATIENCE_S)
        self.assertEqual(process.returncode, 0, output)
        self.assertEqual(self.marks().count("driver begin"), 2)
        state = self.state()
        self.assertTrue(state.ready)
        self.assertEqual([p.state for p in state.phases[2:4]], ["skipped", "skipped"])
        self.assertEqual(len(self.ran("docker", "run")), 1)

    def test_the_first_boot_does_not_start_that_service(self) -> None:
        """The boot that is under way is one already."""
        self.boot()
        now = [argv[-1] for argv in self.ran("systemctl") if "--now" in argv or "start" in argv]
        self.assertEqual(now, ["gemma4-idle.service"])
        self.assertEqual(self.unit("gemma4-idle.service")["Restart"], "always")

    def test_without_systemd_the_watch_runs_and_what_is_lost_is_said(self) -> None:
        words = "System has not been booted with systemd"
        faults = {"systemctl daemon-reload": [words], "systemctl enable": [words]}
        self.world(faults=faults)
        self.document["life_s"] = 1
        self.give(self.document)
        status, output = self.boot()
        self.assertEqual(status, 0, output)
        self.assertIn("the watch runs without its service", output)
        lost = f"a later start of this machine will not boot: systemctl enable: {words}"
        self.assertIn(lost, output)
        self.until(lambda: self.ran("shutdown"), "the end")


class TestEnd(Ec2Sandbox):
    def make_document(self) -> dict[str, Any]:
        return {**super().make_document(), "idle_minutes": 8}

    def ended(self) -> str:
        process = self.start("idle", GEMMA4_MINUTE_S="0.05")
        output, _ = process.communicate(timeout=PATIENCE_S)
        self.assertEqual(process.returncode, 0, output)
        self.assertEqual(self.ran("shutdown"), [["shutdown", "-h", "now"]])
        return output

    def test_a_machine_that_nobody_uses_shuts_down_which_terminates_it(self) -> None:
        self.boot()
        told = self.ended()
        self.assertIn("no use for 8 minutes", told)
        self.assertEqual(self.state().ending, "no use for 8 minutes")
        self.assertEqual(self.asked("DELETE", "/"), [])

    def test_the_hour_of_a_boot_is_counted_from_its_own_first_phase(self) -> None:
        self.cloud.answers["GET /metrics"] = (404, "")
        log = self.root / "var/lib/gemma4/boot.log"
        now = int(time.time())
        log.write_text(f"GEMMA4-BOOT driver begin {now}\nGEMMA4-BOOT docker begin {now - 9_000}\n")
        left = json.loads(self.act("status").stdout)["idle_left_s"]
        self.assertGreater(left, 60 * self.minute_s)

    def test_use_keeps_it_until_its_time_is_over(self) -> None:
        self.document.update(life_s=2, idle_minutes=1_000)
        self.give(self.document)
        self.boot()
        self.cloud.answers["GET /metrics"] = (200, METRICS.format(running="1.0", tokens="1.0"))
        self.assertIn("its 2 s are over", self.ended())


class TestCache(Ec2Sandbox):
    def setUp(self) -> None:
        super().setUp()
        self.document["cache"]["bucket"] = "fake-bucket"
        self.give(self.document)
        self.near = str(self.root / "var/lib/gemma4/cache")
        self.far = "s3://fake-bucket/gpu-vllm-g6-2b"
        self.sync = ["aws", "s3", "sync", "--only-show-errors", "--region", "us-east-1"]

    def test_it_is_restored_before_the_container_and_saved_when_ready(self) -> None:
        status, output = self.boot()
        self.assertEqual(status, 0, output)
        self.assertIn(f"cache restored: {self.far}", output)
        self.assertIn(f"cache saved: {self.far}", output)
        self.assertEqual(self.marks()[-2:], ["ready done", "ready note"])
        argvs = [a for a in self.ran() if a[:2] in (["aws", "s3"], ["docker", "run"])]
        self.assertEqual([a[0] for a in argvs], ["aws", "docker", "aws"])
        self.assertEqual(argvs[0], [*self.sync, self.far, self.near])
        self.assertEqual(argvs[2], [*self.sync, self.near, self.far])

    def test_a_bucket_that_cannot_be_had_costs_no_boot(self) -> None:
        words = "fatal error: An error occurred (AccessDenied) when calling the ListObjectsV2"
        self.world(faults={"aws s3": [words] * 2})
        status, output = self.boot()
        self.assertEqual(status, 0, output)
        self.assertEqual(output.count("cache not "), 2)
        self.assertTrue(self.state().ready)


class TestActs(Ec2Sandbox):
    def test_gpu_tells_the_facts_also_before_any_order(self) -> None:
        (self.root / "var/lib/gemma4/order.json").unlink()
        done = self.act("gpu")
        self.assertEqual((done.returncode, done.stderr), (0, ""))
        self.assertEqual(
            json.loads(done.stdout),
            {
                "name": "NVIDIA L4",
                "compute_capability": "8.9",
                "memory_mib": 23_034,
                "driver": "570.133.20",
                "count": 1,
                "cuda_driver": "12.8",
                "cuda_toolkit": "12.8",
            },
        )

    def test_gpu_without_a_toolkit_and_with_other_words_of_the_driver(self) -> None:
        (self.bin / "nvcc").unlink()
        self.world(smi=SMI.replace("CUDA Version: 12.8", "CUDA UMD Version: 13.1"))
        told = json.loads(self.act("gpu").stdout)
        self.assertEqual((told["cuda_driver"], told["cuda_toolkit"]), ("13.1", ""))
        self.world(smi="", gpus=["NVIDIA L4, 8.9, [N/A], 570.133.20"])
        told = json.loads(self.act("gpu").stdout)
        self.assertEqual((told["cuda_driver"], told["memory_mib"]), ("", 0))

    def test_a_toolkit_that_is_not_on_the_path_is_found(self) -> None:
        place = self.root / "usr/local/cuda/bin"
        place.mkdir(parents=True)
        (self.bin / "nvcc").rename(place / "nvcc")
        self.assertEqual(json.loads(self.act("gpu").stdout)["cuda_toolkit"], "12.8")

    def test_gpu_without_a_driver_fails_with_the_remedy(self) -> None:
        self.world(faults={"nvidia-smi": [NO_DRIVER]})
        done = self.act("gpu")
        self.assertEqual((done.returncode, done.stdout), (1, ""))
        self.assertIn("couldn't communicate", done.stderr)
        self.assertIn("Remedy: ", done.stderr)

    def test_the_container_is_stopped_and_started_as_on_any_cloud(self) -> None:
        self.boot()
        self.assertEqual(self.act("stop").stdout, "vllm was stopped\n")
        self.assertEqual(self.act("start").stdout, "vllm was started\n")
        self.until(lambda: self.marks().count("ready done") == 2, "the second ready")
        self.assertEqual(json.loads(self.act("status").stdout)["container"]["image"], IMAGE)
        self.assertEqual(self.state(self.act("boot_log").stdout), self.state())

    def test_an_answer_keeps_to_what_the_agent_carries(self) -> None:
        self.world(log=[["err", "x" * 400] for _ in range(200)] + [["err", "the end"]])
        self.boot()
        told = self.act("logs", lines=5000, limit=24_000).stdout
        self.assertLessEqual(len(told), 24_000)
        self.assertTrue(told.endswith("the end\n"))

    def test_wrong_usage_names_the_acts(self) -> None:
        done = self.act("exec")
        self.assertEqual(done.returncode, 2)
        self.assertIn("logs start stop restart rm gpu", done.stderr)


class TestText(test_boot_program.TestText):
    program = "ec2_boot"

    def test_it_travels_with_its_document_and_much_room(self) -> None:
        one = Ec2Sandbox()
        one.setUp()
        self.addCleanup(one.doCleanups)
        document = one.document
        document["container"] += [f"--option-{n}=value-{n * n}" for n in range(120)]
        text = json.dumps(document).encode()
        self.assertGreater(len(text), 3_500)
        sent = user_data(lean_program(self.text).encode(), text, 14_400)
        self.assertLess(len(sent), USER_DATA_LIMIT * 3 // 4)


if __name__ == "__main__":
    unittest.main()
