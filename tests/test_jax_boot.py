"""jax_boot.py as the process that it is on a TPU machine: from metadata to an engine that answers,
through pip, uv and the Hub, what it keeps of earlier releases, and what it says where a step fails.

What runs is the text that goes out with the metadata, on a machine of the fake Google whose tools,
chip, Hub and engine are stand-ins. A TPU is never there: what only one shows is not tried here.
"""

from __future__ import annotations

import ast
import base64
import fcntl
import json
import lzma
import subprocess
import sys
import tempfile
import unittest
from pathlib import Path
from typing import Any
from unittest import mock

from forge.bundle import bundle
from forge.machine import jax_release
from forge.machine.console import Failure
from forge.machine.google import Google
from forge.machine.jax import JAX_FIRST, JaxServing
from forge.machine.jax_device import PROBE_PROGRAM
from forge.machine.jax_packages import FETCH_HOPELESS, FETCH_PROGRAM
from forge.machine.machine import Machine, checked
from forge.parts.boundaries.gcloud_ssh import HOST_ARGUMENTS_LIMIT
from forge.parts.ground.state import RigPaths
from forge.parts.knowledge.boot_marks import BootState, boot_state
from forge.parts.runtimes.jax_machine import JaxMachine, JaxMachineSettings, packed_engine
from forge.suites.fake_gcloud import fake_gcloud
from forge.suites.fake_google import FakeGoogle
from forge.suites.fake_host import FakeHosts
from forge.suites.fake_jax_host import FAKE_COMMIT, FakeJaxHost
from tests.boot_sandbox import program_text

ROOT = Path(__file__).resolve().parents[1]
PROJECT, ZONE, NAME = "fake-proj", "us-west4-a", "rig-1"
MODEL = "google/gemma-4-E2B-it-qat-w4a16-ct"
ENGINE = "# an engine of a test, in whose place the scripted one runs\n"


def runtime(folder: Path, **values: Any) -> JaxMachine:
    """The runtime of a rig in `folder`, which has that engine, with these settings."""
    (folder / "jax_server.py").write_text(ENGINE)
    settings = JaxMachineSettings(**{"model_name": MODEL, **values})
    return JaxMachine(lambda: settings, RigPaths(folder, folder, folder))


def document(folder: Path, **values: Any) -> dict[str, Any]:
    return runtime(folder, **values).boot_document("tpu-jax-v5e1-2b", PROJECT, "", 14_400)


class JaxHosts(FakeHosts):
    kind = FakeJaxHost


class JaxBootCase(unittest.TestCase):
    """One machine, which has been created and not yet booted."""

    values: dict[str, Any] = {}

    def setUp(self) -> None:
        self.folder = Path(self.enterContext(tempfile.TemporaryDirectory())).resolve()
        self.cloud = self.enterContext(FakeGoogle(PROJECT))
        hosts = JaxHosts(self.cloud, self.folder / "hosts", minute_s=2, automatic=False)
        self.hosts = self.enterContext(hosts)
        fake_gcloud(self.hosts.bin)
        files = {
            "startup-script": program_text("jax_boot"),
            "gemma4-boot": json.dumps(document(self.folder, idle_minutes=0, **self.values)),
            "gemma4-engine": packed_engine(self.folder / "jax_server.py"),
        }
        for key, text in files.items():
            (self.folder / key).write_text(text)
        listed = ",".join(f"{key}={self.folder / key}" for key in files)
        made = subprocess.run(
            [
                *(str(self.hosts.bin / "gcloud"), "compute", "tpus", "queued-resources", "create"),
                *(NAME, f"--zone={ZONE}", f"--node-id={NAME}", "--accelerator-type=v5litepod-1"),
                *("--runtime-version=v2-alpha-tpuv5-lite", f"--metadata-from-file={listed}"),
                *("--spot", "--async", f"--project={PROJECT}", "--quiet", "--format=json"),
            ],
            env=self.cloud.environment(self.folder, str(self.hosts.bin)),
            capture_output=True,
            text=True,
        )
        self.assertEqual(made.returncode, 0, made.stderr)
        host = self.hosts.host(NAME)
        assert isinstance(host, FakeJaxHost)
        self.host = host

    @property
    def home(self) -> Path:
        return self.host.root / "var/lib/gemma4"

    def state(self) -> BootState:
        return boot_state((self.home / "boot.log").read_text(), JaxMachine.phases)

    def act(self, word: str, delivery: str = "", **given: Any) -> tuple[int, str]:
        """An act as ssh brings it: its status and what it said."""
        data = base64.urlsafe_b64encode(json.dumps(given).encode()).decode()
        source = program_text("jax_boot")
        text = f"GEMMA4_DELIVERY = {delivery!r}\nexec(compile({source!r}, 'p', 'exec'))\n"
        ended = subprocess.run(
            [str(self.host.bin / "python3"), "-", word, data],
            input=text,
            env={**self.host.environment(), "HOME": str(self.host.root / "root")},
            capture_output=True,
            text=True,
        )
        return ended.returncode, (ended.stdout + ended.stderr).strip()

    def starts(self) -> list[dict[str, str]]:
        """The options of each start of the engine, oldest first."""
        lists = [one["argv"] for one in self.host.jax.starts()]
        return [dict(zip(argv[::2], argv[1::2], strict=True)) for argv in lists]

    def calls(self, name: str, *begin: str) -> list[list[str]]:
        """The argument lists of a program of the machine's."""
        listed = [words for words in self.host.programs() if words[0] == name]
        return [words[1:] for words in listed if tuple(words[1:][: len(begin)]) == begin]


class TestBoot(JaxBootCase):
    values = {"cache_bucket": "kept-caches"}

    def test_from_metadata_to_an_engine_that_answers_and_once_more(self) -> None:
        bucket = self.host.place / "buckets/kept-caches/tpu-jax-v5e1-2b/jax"
        bucket.mkdir(parents=True)
        (bucket / "program-of-another-machine").write_text("compiled")
        self.assertEqual(self.host.boot(), 0, self.host.console())
        state = self.state()
        self.assertTrue(state.ready, state)
        self.assertEqual([one.state for one in state.phases], ["done"] * len(JaxMachine.phases))
        self._the_packages()
        self._the_engine()
        cache = self.home / "cache/jax"
        self.assertTrue((cache / "program-of-another-machine").is_file(), "it was not restored")
        self._again()

    def _the_packages(self) -> None:
        """uv makes one environment of exactly the listed releases, without looking for others."""
        (make,), (fill,) = self.calls("uv", "venv"), self.calls("uv", "pip", "install")
        self.assertEqual(make[make.index("--python") + 1], "3.12")
        for word in ("--no-deps", "--only-binary"):
            self.assertIn(word, fill)
        listed = Path(fill[fill.index("--requirement") + 1]).read_text().split()
        wanted = document(self.folder)["release"]["requirements"]
        self.assertEqual(listed, wanted)
        self.assertTrue(all("==" in one for one in listed))

    def _the_engine(self) -> None:
        (options,) = self.starts()
        self.assertTrue(options["--model"].endswith(f"/snapshots/{FAKE_COMMIT}"))
        self.assertEqual((options["--host"], options["--port"]), ("127.0.0.1", str(self.host.port)))
        unit = (self.host.root / "etc/systemd/system/gemma4-jax.service").read_text()
        for line in ("Restart=on-failure", "RestartPreventExitStatus=2", "StartLimitBurst=5"):
            self.assertIn(line, unit)
        self.assertNotIn("[Install]", unit, "it would start without its boot")
        self.assertIn("JAX_PLATFORMS=tpu", unit)

    def _again(self) -> None:
        """A machine that was off finds everything, and looks at its chip before the engine does."""
        kept = {"before": 1}
        self.assertEqual(self.host.reboot(), 0)
        self.assertTrue(self.state().ready)
        self.assertEqual(len(self.calls("uv")), 2)
        self.assertEqual(len(self.calls("python", "-c", FETCH_PROGRAM)), kept["before"])
        self.assertEqual(len(self.calls("python", "-c", PROBE_PROGRAM)), 2)
        self.assertEqual(len(self.starts()), 2)
        self.assertEqual(self.starts()[0], self.starts()[1])

    def test_what_fails_is_said_in_its_phase_and_the_next_boot_goes_on(self) -> None:
        cases: tuple[tuple[dict[str, Any], str, str], ...] = (
            ({"pip": "ERROR: no network"}, "environment", "no network"),
            ({"packages": "error: hash"}, "environment", "error: hash"),
            ({"hub": "404 Client Error"}, "weights", "404"),
            ({"chip": {"platform": "cpu", "kind": "cpu"}}, "device", "no TPU"),
            ({"chip": {"right": False}}, "device", "wrong"),
        )
        for orders, phase, words in cases:
            self.host.script(**orders)
            self.assertEqual(self.host.boot(), 1)
            self.assertRegex(self.state().failed, rf"^{phase}: .*{words}")
            self.host.stop()
            self.assertEqual(self.starts(), [])
        self.host.script()
        self.assertEqual(self.host.boot(), 0)
        self.assertTrue(self.state().ready)

    def test_an_engine_that_refuses_is_not_asked_again(self) -> None:
        self.host.jax.script(refuses="needs 17.1 GB of memory, and 15.7 may be used")
        self.assertEqual(self.host.boot(), 1)
        self.assertRegex(self.state().failed, r"^load: .*needs 17\.1 GB")


class TestActs(JaxBootCase):
    def setUp(self) -> None:
        super().setUp()
        self.assertEqual(self.host.boot(), 0, self.host.console())

    def delivery(self, **changes: Any) -> str:
        """A release with these of its words changed, as deploy_jax_server sends it."""
        made = runtime(self.folder, slots=3)
        packed = packed_engine(self.folder / "jax_server.py")
        return json.dumps({"release": {**made.release(), **changes}, "engine": packed})

    def test_the_log_the_state_and_the_chip_are_told(self) -> None:
        status, text = self.act("logs", lines=100)
        self.assertEqual(status, 0, text)
        self.assertIn("jax_server: 100% ready", text)
        server = json.loads(self.act("status")[1])["server"]
        self.assertEqual((server["state"], server["restarts"]), ("running", 0))
        self.assertRegex(server["image"], r"^release [0-9a-f]{12}$")
        seen = json.loads(self.act("verify")[1])
        self.assertEqual((seen["kind"], seen["serving"]), ("TPU v5 lite", True))
        self.assertEqual(len(self.calls("python", "-c", PROBE_PROGRAM)), 1, "it was disturbed")

    def test_what_is_no_delivery_changes_nothing(self) -> None:
        for text, words in (
            ("", "cannot be read"),
            ("[]", "cannot be read"),
            (self.delivery(sha256="0" * 64), "not the file of that hash"),
            (self.delivery(serve=["--slots", "3", "--port", "22"]), "release.serve"),
            (self.delivery(serve=["--slots", "3; reboot"]), "release.serve"),
            (self.delivery(serve=["--explain"]), "release.serve"),
            (self.delivery(requirements=["jax"]), "release.requirements"),
            (self.delivery(requirements=["--index-url=http://x"]), "release.requirements"),
            (self.delivery(requirements=[]), "release.requirements"),
            (self.delivery(repository="../x"), "release.repository"),
            (self.delivery(revision="main"), "release.revision"),
            (self.delivery(python="3.12;"), "release.python"),
        ):
            status, said = self.act("deploy", text)
            self.assertEqual(status, 1, said)
            self.assertIn(words, said)
        self.assertEqual(len(self.starts()), 1)
        self.assertEqual(json.loads(self.act("status")[1])["server"]["state"], "running")

    def test_a_release_waits_for_the_end_of_a_boot(self) -> None:
        with (self.home / "lock").open("w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            for word in ("deploy", "rollback"):
                status, said = self.act(word, self.delivery())
                self.assertEqual(status, 1)
                self.assertRegex(said, "boot is under way|no release before")
        self.assertEqual(len(self.starts()), 1)

    def test_another_word_is_refused(self) -> None:
        for word in ("rm", "sh", "build", "deploy_all"):
            self.assertEqual(self.act(word)[0], 2, word)


class TestDocument(unittest.TestCase):
    def setUp(self) -> None:
        self.folder = Path(self.enterContext(tempfile.TemporaryDirectory()))
        self.machine = Machine(Google(), JaxServing(Google(), str), JAX_FIRST)

    def refused(self, told: dict[str, Any]) -> str:
        with self.assertRaises(Failure) as caught:
            checked(json.dumps(told), self.machine)
        return str(caught.exception)

    def test_what_the_runtime_writes_is_what_the_machine_takes(self) -> None:
        for values in ({}, {"kv_cache_dtype": "int8", "unpack": "load", "quantization": "int8"}):
            told = document(self.folder, **values)
            self.assertEqual(checked(json.dumps(told), self.machine)["release"], told["release"])

    def test_what_is_not_as_it_has_to_be_is_named(self) -> None:
        good = document(self.folder)
        for key, value in (
            ("sha256", "abc"),
            ("serve", ["--model", "/etc"]),
            ("serve", ["--compile-cache=/etc"]),
            ("serve", ["a b"]),
            ("requirements", ["jax==0.10.2", "evil"]),
            ("python", "2.7"),
            ("repository", "gemma"),
        ):
            release = {**good["release"], key: value}
            self.assertIn(f"release.{key}", self.refused({**good, "release": release}))
        without = {key: value for key, value in good.items() if key != "release"}
        self.assertIn("release", self.refused(without))
        self.assertIn("health", self.refused({**good, "health": "http://example.com/"}))


class TestReleases(unittest.TestCase):
    def setUp(self) -> None:
        self.folder = Path(self.enterContext(tempfile.TemporaryDirectory()))
        for name, path in (("RELEASES", "engine"), ("CURRENT", "engine/current.json")):
            self.enterContext(mock.patch.object(jax_release, name, self.folder / path))

    def test_two_are_kept_and_one_can_go_back(self) -> None:
        self.assertEqual(jax_release.current_release(), ("", {}))
        keys = []
        for slots in (1, 2, 3):
            made = runtime(self.folder, slots=slots)
            packed = packed_engine(self.folder / "jax_server.py")
            keys.append(jax_release.lay_down(made.release(), packed))
            jax_release.make_current(keys[-1])
        self.assertEqual(len(set(keys)), 3)
        self.assertEqual(jax_release.kept_releases(), [keys[2], keys[1]])
        there = {path.name for path in (self.folder / "engine").glob("*/")}
        self.assertEqual(there, set(keys[1:]))
        self.assertEqual(jax_release.release_before(), keys[1])
        jax_release.make_current(keys[1])
        self.assertEqual(jax_release.current_release()[0], keys[1])
        self.assertEqual(jax_release.release_before(), keys[2], "one can go forth again")
        jax_release.make_current(keys[1])
        self.assertEqual(jax_release.kept_releases(), [keys[1], keys[2]], "the same is no change")

    def test_without_one_before_there_is_no_way_back(self) -> None:
        with self.assertRaisesRegex(Failure, "no release before"):
            jax_release.release_before()

    def test_a_damaged_and_a_swollen_engine_are_refused(self) -> None:
        release = runtime(self.folder).release()
        swollen = base64.b85encode(lzma.compress(bytes(50_000_000))).decode()
        for packed in ("", "AAAA", "not base 85 \\", swollen):
            with self.assertRaisesRegex(Failure, "damaged|not the file of that hash"):
                jax_release.lay_down(release, packed)
        self.assertEqual(jax_release.kept_releases(), [])


class TestProgram(unittest.TestCase):
    def test_it_needs_no_package_and_only_python_3_10(self) -> None:
        source = bundle("forge.programs.jax_boot", ROOT)
        self.assertEqual(source.third_party, ())
        ast.parse(program_text("jax_boot"), feature_version=(3, 10))

    def test_what_goes_out_fits_into_metadata(self) -> None:
        """Compute Engine's limits: 256 kB a value, 512 kB in all."""
        sizes = [len(program_text("jax_boot")), len(packed_engine(_built_engine()))]
        self.assertLess(max(sizes), 256_000)
        self.assertLess(sum(sizes), 480_000)

    def test_no_engine_goes_through_the_command_line(self) -> None:
        self.assertGreater(len(packed_engine(_built_engine())), HOST_ARGUMENTS_LIMIT)

    def test_which_refusals_of_the_hub_are_final(self) -> None:
        for words in ("401 Client Error", "GatedRepoError", "RepositoryNotFoundError", "No space"):
            self.assertTrue(FETCH_HOPELESS.search(words), words)
        for words in ("500 Server Error", "Connection reset", "timed out", "size 4010 of 40400"):
            self.assertFalse(FETCH_HOPELESS.search(words), words)

    def test_the_hubs_program_speaks_python(self) -> None:
        ast.parse(FETCH_PROGRAM, feature_version=(3, 10))

    def test_the_probe_reckons_right_with_the_real_jax(self) -> None:
        """On this computer's processor, as it must never on a machine: there, a cpu is refused."""
        ended = subprocess.run(
            [sys.executable, "-c", PROBE_PROGRAM],
            env={"JAX_PLATFORMS": "cpu", "PYTHONPATH": ":".join(filter(None, sys.path))},
            capture_output=True,
            text=True,
        )
        self.assertEqual(ended.returncode, 0, ended.stderr[-500:])
        told = json.loads(ended.stdout.splitlines()[-1])
        self.assertEqual((told["platform"], told["right"], told["matrix"]), ("cpu", True, 256))
        self.assertGreater(told["tflops"], 0)


def _built_engine() -> Path:
    return ROOT / "local-jax-cpu-2b" / "jax_server.py"


if __name__ == "__main__":
    unittest.main()
