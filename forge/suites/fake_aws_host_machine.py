"""One machine of the fake EC2 that really runs: a sandbox that boots as cloud-init does.

Its first boot runs the boothook, writes the files and runs the scripts; later ones run the boothook
and what is enabled under systemd. Its agent runs commands, its console is kept. Knows no rig.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import subprocess
import threading
import time
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from forge.suites.fake_aws_host_build import (
    FakeBuildProgram,
    write_llama_source,
    write_llama_template,
)
from forge.suites.fake_aws_host_data import UserDataPart, user_data_parts, write_cloud_files
from forge.suites.fake_aws_host_hub import FakeHub
from forge.suites.fake_aws_host_program import FakeEc2Program
from forge.suites.fake_aws_host_systemd import FakeSystemd
from forge.suites.fake_aws_host_units import FakeUnitKeeper
from forge.suites.fake_aws_machine import FakeMachine
from forge.suites.fake_host_programs import (
    CUDA_ENGINE_WORDS,
    FakeMachineProgram,
    write_computer_programs,
    write_docker_program,
    write_fake_program,
)
from forge.suites.fake_host_sandbox import FakeSandbox, write_startable

# What nvidia-smi says of the cards of EC2's families: name, compute capability, MiB.
_CARDS = {
    "g6": ("NVIDIA L4", "8.9", 23_034),
    "g5g": ("NVIDIA T4G", "7.5", 15_360),
    "g4dn": ("Tesla T4", "7.5", 15_360),
    "g5": ("NVIDIA A10G", "8.6", 23_028),
}
_DRIVER, _CUDA = "580.95.05", "13.0"
_NO_DRIVER = (
    "NVIDIA-SMI has failed because it couldn't communicate with the NVIDIA driver. Make sure that "
    "the latest NVIDIA driver is installed and running.\n"
)
_NO_SPACE = (
    "failed to register layer: write /usr/lib/libcuda.so: no space left on device"  # docker pull's
)
_NO_NAME = (
    'Error response from daemon: Get "https://registry-1.docker.io/v2/": dial tcp: lookup '
    "registry-1.docker.io on 127.0.0.53:53: server misbehaving"
)
_MEMORY_GB = {"g6.xlarge": 16, "g5g.xlarge": 8, "g5g.2xlarge": 16}
# Of this computer; the image has many more.
_CORE = (
    "sh bash env cat sleep true false uname date mkdir mv rm cp ln ls touch chmod chown mktemp "
    "head tail grep sed awk cut tr wc sort base64 gzip gunzip sha256sum printf echo tee stat df du "
    "sync id hostname basename dirname readlink timeout seq test nproc"
).split()
_OF_EC2 = (
    "systemctl journalctl shutdown apt-get sudo nvidia-smi aws fallocate mkswap swapon swapoff"
).split()
_END = "\nsys.exit({kind}({place!r}, {root!r}, {port!r}, {alias!r}).call(sys.argv))\n"
_GXX = '#!/bin/sh\necho "g++ (Ubuntu 13.3.0-6ubuntu2~24.04) 13.3.0"\n'
_CONSOLE_REST = 65_536  # characters of the console that are kept, as EC2 does


class FakeAwsHost(FakeSandbox):
    """One machine; `engine` is its container's scripted vLLM, `llama` what a build of it makes.

    `script` replaces its faults, all at once. `gpu`: "absent", another family's ("g4dn"), or a
    mapping as nvidia-smi tells it; `driver=False`; `nvidia_runtime=False`. At its birth only:
    `docker=False`, `tools=False`, `toolkit=False` (not on the image), `memory_gb`. Words of the
    program that fails: `secret`, `pull`, `run`, `daemon`, `apt`, `systemd`, `bucket`, `source`,
    `configure`, `build`. `profile=False`, `network=False`; `agent=False`, or seconds until it is
    online.
    `disk_full`, `killed` (a compiler, for memory), `oom` (the model server). `hub`, `hub_cuts`,
    `hub_spoilt` (see FakeHub). `pull_s`, `build_files`, `build_pace_s` are the pace.
    """

    def __init__(
        self,
        machine: FakeMachine,
        folder: Path,
        *,
        control_port: int,
        minute_s: float,
        orders: Mapping[str, Any],
    ) -> None:
        super().__init__(folder, CUDA_ENGINE_WORDS)
        self.machine, self.minute_s = machine, minute_s
        self.id, self.name, self.region = machine.id, machine.name, machine.region
        self.llama = write_llama_template(self.place, folder / "llama")
        self.hub = FakeHub(lambda: self.orders)
        self.journal = self.place / "programs.jsonl"
        self.served_port = 0  # the machine's own, by its document
        self.on = False
        self._text, self._began = "", 0.0
        self._scripts: threading.Thread | None = None
        self._finished = threading.Event()
        self._status = 0
        self._commands: set[subprocess.Popen[str]] = set()
        self._telling = threading.RLock()
        self._write_machine(control_port, orders)
        self.script(**orders)

    def _write_machine(self, port: int, orders: Mapping[str, Any]) -> None:
        """Its programs and what the kernel tells of it."""
        self.bin.mkdir()
        self.journal.touch()
        given = {"place": str(self.place), "root": str(self.root), "port": port, "alias": self.id}
        own: list[type] = [FakeMachineProgram, FakeUnitKeeper, FakeSystemd, FakeEc2Program]
        end = _END.format(kind="FakeEc2Program", **given)
        for name in _OF_EC2:
            write_fake_program(self.bin / name, self.journal, own, end)
        cuda = self.root / "usr/local/cuda/bin"
        cuda.mkdir(parents=True)
        if orders.get("toolkit", True):
            write_fake_program(cuda / "nvcc", self.journal, own, end)
        tools = str(self.bin / "{}" if orders.get("tools", True) else self.place / "{}.spare")
        end = _END.format(kind="FakeBuildProgram", **given)
        for name in ("cmake", "ninja", "pip3"):
            path = Path(tools.format(name))
            write_fake_program(path, self.journal, [FakeMachineProgram, FakeBuildProgram], end)
        Path(tools.format("g++")).write_text(_GXX)
        Path(tools.format("g++")).chmod(0o755)
        docker = self.bin / "docker" if orders.get("docker", True) else self.place / "docker.spare"
        write_docker_program(docker, self.place, self.root)
        write_computer_programs(self.bin, _CORE)
        for folder in ("proc", "tmp", "var/log", "etc/systemd/system"):
            (self.root / folder).mkdir(parents=True, exist_ok=True)
        total = int(orders.get("memory_gb", _MEMORY_GB.get(self.machine.type, 16))) * 1024**2
        rows = {"MemTotal": total, "MemFree": total * 8 // 10, "MemAvailable": total * 9 // 10}
        rows |= {"SwapTotal": 0, "SwapFree": 0}
        text = "".join(f"{key + ':':<16}{size} kB\n" for key, size in rows.items())
        (self.root / "proc/meminfo").write_text(text)
        (self.root / "proc/swaps").write_text("Filename\tType\tSize\tUsed\tPriority\n")
        (self.root / "proc/cpuinfo").write_text("model name\t: a fake machine's processor\n")

    def script(self, **orders: Any) -> None:
        told = {**orders, "gpu": self._gpu(orders.get("gpu")), "toolkit": _CUDA}
        told["nvidia"] = orders.get("nvidia_runtime", True)
        if orders.get("driver", True) is not True:
            told["driver"] = orders["driver"] or _NO_DRIVER
        else:
            told.pop("driver", None)
        told["offline"] = orders.get("network", True) is False
        told["disk"] = bool(orders.get("disk_full"))
        told["profile"] = not self._profile() or orders.get("profile", True) is False
        if told["offline"] or told["disk"]:
            told["pull"] = _NO_NAME if told["offline"] else _NO_SPACE
        self.obey(orders, told)

    def _profile(self) -> bool:
        """Whether it was launched with an instance profile, from which credentials come."""
        return bool(getattr(self.machine.model, "iam_instance_profile", None))

    def _gpu(self, order: Any) -> dict[str, Any] | None:
        card = _CARDS.get(self.machine.type.partition(".")[0] if order is None else str(order))
        if isinstance(order, Mapping) or card is None:
            return dict(order) if isinstance(order, Mapping) else None
        uuid = f"GPU-{self.id.removeprefix('i-'):0>12}"
        told = {"name": card[0], "compute_cap": card[1], "memory": card[2], "uuid": uuid}
        return {**told, "driver_version": _DRIVER, "cuda": _CUDA}

    def environment(self) -> dict[str, str]:
        return {
            **super().environment(),
            "GEMMA4_MINUTE_S": str(self.minute_s),
            "GEMMA4_HUB_URL": self.hub.base,
            "TMPDIR": str(self.root / "tmp"),
        }

    # -- its life

    def start(self) -> None:
        """Switches it on. cloud-init's scripts go on by themselves: see `booted`."""
        self.on, self._began = True, time.monotonic()
        self._finished.clear()
        shutil.rmtree(self.place / "units", ignore_errors=True)
        (self.place / "shutdown").unlink(missing_ok=True)
        (self.place / "on").write_text(str(os.getpid()))
        self.say("Linux version 6.14.0-1018-aws (a fake machine)\n")
        instance = self.root / "var/lib/cloud/instance"
        first = not instance.exists()
        try:
            parts = user_data_parts(self.machine.user_data)
            for part in (one for one in parts if one.kind == "cloud-boothook"):
                self._hook(instance / "boothooks" / part.name, part.text)
            for part in (one for one in parts if one.kind == "cloud-config" and first):
                write_cloud_files(part.text, self.root, self._changed)
        except ValueError as error:
            parts = []
            self.say(f"cloud-init: __init__.py[WARNING]: {error}\n")
        instance.mkdir(parents=True, exist_ok=True)
        if self.on:
            self.switch_on()
        scripts = [part for part in parts if part.kind == "x-shellscript" and first]
        self._scripts = threading.Thread(target=self._run_scripts, args=(scripts,), daemon=True)
        self._scripts.start()

    def _hook(self, path: Path, text: bytes) -> None:
        """A boothook, to its end; what it says is nobody's to see."""
        environment = {**self.environment(), "INSTANCE_ID": self.id}
        with (self.root / "var/log/cloud-init.log").open("ab") as log:
            subprocess.run(
                [str(write_startable(path, text))],
                env=environment,
                cwd=self.root,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
            )

    def _changed(self, path: str, content: str) -> str:
        """A file of the user data with this machine's own ways: to its port, source and weights."""
        try:
            document = json.loads(content)
            health = re.search(r"127\.0\.0\.1:(\d+)", document["health"])
        except (ValueError, TypeError, LookupError):
            return content
        if health is not None:
            self.served_port = int(health[1])
            text = json.dumps(document).replace(f"127.0.0.1:{health[1]}", f"127.0.0.1:{self.port}")
            document = json.loads(text)
        if "build" in document:
            document["build"]["sha256"] = write_llama_source(
                self.place, document["build"].get("root", "")
            )
        if document.get("weights", {}).get("file"):
            self.hub.name = document["weights"]["file"]
        if document.get("weights", {}).get("sha256"):
            document["weights"]["sha256"] = self.hub.sha256
        return json.dumps(document)

    def _run_scripts(self, parts: list[UserDataPart]) -> None:
        """The scripts by their names' order; what they say is on the console, as cloud-init has it.

        One that fails ends none of the others."""
        for part in sorted(parts, key=lambda one: one.name):
            place = self.root / "var/lib/cloud/instance/scripts" / part.name
            child = self.begin(write_startable(place, part.text))
            assert child.stdout is not None
            with child.stdout:
                for line in child.stdout:
                    text = line.decode("utf-8", "replace").rstrip("\r\n")
                    up = time.monotonic() - self._began
                    self.say(f"[{up:12.6f}] cloud-init[{child.pid}]: {text}\n")
            status = child.wait()
            self._status = self._status or status
            if status and self.on:
                what = "scripts_user (scripts in /var/lib/cloud/instance/scripts)"
                self.say(f"cloud-init: cc_scripts_user.py[WARNING]: Failed to run module {what}\n")
        if self.on:
            self.say(f"cloud-init[{os.getpid()}]: Cloud-init finished at {time.ctime()}.\n")
        self._finished.set()

    def booted(self, patience_s: float = 120.0) -> int:
        """Waits for the end of cloud-init's scripts; the status of the first that failed, or 0."""
        assert self._finished.wait(patience_s), "its scripts do not come to an end"
        return self._status

    def stop(self) -> None:
        """Switches it off: every process of it ends, its disk stays."""
        self.console()
        self.on = False
        self.switch_off()
        if self._scripts is not None:
            self._scripts.join(20)

    def close(self) -> None:
        self.stop()
        self.hub.end()

    # -- its console and its agent

    def say(self, text: str) -> None:
        with self._telling:
            self._text = (self._text + text.replace("\n", "\r\n"))[-_CONSOLE_REST:]

    def console(self) -> str:
        """What its serial port has shown."""
        with self._telling:
            self.say(self.fresh_console())
            return self._text

    def agent_online(self) -> bool:
        """Whether Systems Manager's agent has registered: it needs the network and a profile."""
        agent = self.orders.get("agent", True)
        able = self.on and self.orders.get("network", True) and self._profile()
        since = time.monotonic() - self._began
        return bool(able and self.orders.get("profile", True)) and (
            agent is True or (agent is not False and since >= float(agent))
        )

    def command(self, script: str) -> tuple[str, str, int]:
        """What AWS-RunShellScript gives back: standard output, standard error, exit status.

        The agent writes the commands into a file and starts `sh -c FILE`: a first line `#!` chooses
        another shell. It adds its own remark to the standard error of what fails. Nothing is cut:
        that is Systems Manager's.
        """
        folder = self.root / "var/lib/amazon/ssm" / f"{time.monotonic_ns()}"
        file = write_startable(folder / "_script.sh", script.encode())
        child = subprocess.Popen(
            [str(self.bin / "sh"), "-c", str(file)],
            env=self.environment(),
            cwd=self.root,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            errors="replace",
            start_new_session=True,
        )
        self._commands.add(child)
        stdout, stderr = child.communicate()
        self._commands.discard(child)
        status = child.returncode
        if status:
            how = f"exit status {status}" if status > 0 else f"signal: {-status}"
            stderr += f"failed to run commands: {how}"
        return stdout, stderr, status if status >= 0 else 128 - status

    def end_commands(self) -> None:
        """Commands were cancelled: whatever the agent runs is killed."""
        for child in list(self._commands):
            with suppress(ProcessLookupError):
                os.killpg(child.pid, signal.SIGKILL)
