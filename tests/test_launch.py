"""Tests of the launcher: which packages it takes, what it says without any, and how it installs.

launch.py itself runs, as a client runs it, with a server beside it that writes down what it sees.
The packages are two tiny ones, made here; pip is real and finds them in a folder.
"""

from __future__ import annotations

import json
import os
import pwd
import shlex
import shutil
import signal
import socketserver
import subprocess
import sys
import tempfile
import threading
import time
import unittest
import unittest.mock
import zipfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from forge import launch

LAUNCHER = Path(launch.__file__)
PATIENCE_S = 60
# Writes what it sees to the file SEEN, and exits with the status 7, which must come through.
SERVER = """\
import json, os, subprocess, sys

RIG = "the rig"


def run_rig(rig, server_file, argv):
    try:
        import alpha
    except ImportError:
        alpha = None
    program = "import alpha; print(alpha.__file__)"
    child = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    seen = {
        "rig": rig,
        "server_file": str(server_file),
        "argv": argv,
        "alpha": alpha and alpha.__file__,
        "alpha_in_child": child.stdout.strip(),
        "name": __name__,
    }
    with open(os.environ["SEEN"], "w") as file:
        json.dump(seen, file)
    return 7
"""


def write_package(folder: Path, name: str, version: str) -> Path:
    """The package `name`, as pip would have installed it into `folder`."""
    (folder / name).mkdir(parents=True)
    (folder / name / "__init__.py").write_text("")
    metadata = folder / f"{name}-{version}.dist-info" / "METADATA"
    metadata.parent.mkdir()
    metadata.write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n")
    return folder


def write_wheel(folder: Path, name: str, version: str) -> None:
    """A wheel of the package `name` in `folder`."""
    folder.mkdir(exist_ok=True)
    information = f"{name}-{version}.dist-info"
    files = {
        f"{name}/__init__.py": "",
        f"{information}/METADATA": f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n",
        f"{information}/WHEEL": "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n",
    }
    record = "".join(f"{path},,\n" for path in [*files, f"{information}/RECORD"])
    with zipfile.ZipFile(folder / f"{name}-{version}-py3-none-any.whl", "w") as wheel:
        for path, text in {**files, f"{information}/RECORD": record}.items():
            wheel.writestr(path, text)


class LaunchCase(unittest.TestCase):
    """A folder with a blank in its name that holds a launcher, a server and its requirements."""

    def setUp(self) -> None:
        folder = tempfile.TemporaryDirectory(prefix="launch-")
        self.addCleanup(folder.cleanup)
        self.place = Path(folder.name).resolve()
        self.rig = self.place / "a rig"
        self.rig.mkdir()
        shutil.copy(LAUNCHER, self.rig / "launch.py")
        (self.rig / "server.py").write_text(SERVER)
        (self.rig / "requirements.txt").write_text("# The server's.\nalpha>=1,<2\n")
        (self.rig / "requirements-runtime.txt").write_text("beta==1.0\n")
        self.wheels = self.place / "wheels"
        write_wheel(self.wheels, "alpha", "1.5")
        write_wheel(self.wheels, "beta", "1.0")
        self.seen = self.place / "seen.json"
        self.cache = self.place / "cache"
        (self.place / "bin").mkdir()
        self.environment = {
            "PATH": f"{self.place / 'bin'}:/usr/bin:/bin",
            "HOME": str(self.place / "home"),
            "XDG_CACHE_HOME": str(self.cache),
            "SEEN": str(self.seen),
            "PIP_NO_INDEX": "1",
            "PIP_FIND_LINKS": str(self.wheels),
            "PIP_CONFIG_FILE": os.devnull,
        }

    def launch(self, *arguments: str, **changes: str) -> subprocess.CompletedProcess[str]:
        """Run the launcher from another folder; nothing that it does may reach standard output."""
        done = subprocess.run(
            [sys.executable, str(self.rig / "launch.py"), *arguments],
            cwd=self.place,
            env={**self.environment, **changes},
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=PATIENCE_S,
        )
        self.assertEqual(done.stdout, "")
        return done

    def served(self, *arguments: str, **changes: str) -> dict[str, object]:
        """What the server saw after a launch that must reach it."""
        done = self.launch(*arguments, **changes)
        self.assertEqual((done.returncode, done.stderr), (7, ""))
        found: dict[str, object] = json.loads(self.seen.read_text())
        return found

    def refused(self, *arguments: str, **changes: str) -> str:
        """The one line of a launch that must not reach the server."""
        done = self.launch(*arguments, **changes)
        self.assertEqual(done.returncode, 1, done.stderr)
        self.assertFalse(self.seen.exists(), "the server was started")
        self.assertEqual(len(done.stderr.splitlines()), 1, done.stderr)
        return done.stderr.strip()

    def installed(self) -> list[str]:
        """The names in the user's packages folder: installed folders and whatever is left over."""
        folder = self.cache / "gemma4-rigs/packages"
        return sorted(path.name for path in folder.iterdir()) if folder.exists() else []

    def folder_of(self, seen: object) -> Path:
        """The packages folder from which a package was imported."""
        return Path(str(seen)).parent.parent


class ChoiceTest(LaunchCase):
    """Which packages a launch takes."""

    def test_this_python_as_it_is(self) -> None:
        mine = write_package(self.place / "mine", "alpha", "1.9")
        seen = self.served(PYTHONPATH=str(mine))
        self.assertEqual(self.folder_of(seen["alpha"]), mine)
        self.assertEqual(seen["alpha_in_child"], seen["alpha"])

    def test_the_named_folder_wins_over_all_others(self) -> None:
        self.assertEqual(self.launch("install").returncode, 0)
        mine = write_package(self.place / "mine", "alpha", "1.9")
        named = write_package(self.place / "named", "alpha", "1.1")
        seen = self.served(PYTHONPATH=str(mine), RIG_PACKAGES=str(named))
        self.assertEqual(self.folder_of(seen["alpha"]), named)
        self.assertEqual(seen["alpha_in_child"], seen["alpha"])

    def test_a_named_folder_that_lacks_something_is_refused(self) -> None:
        mine = write_package(self.place / "mine", "alpha", "1.9")
        empty = self.place / "empty"
        empty.mkdir()
        line = self.refused(PYTHONPATH=str(mine), RIG_PACKAGES=str(empty))
        self.assertIn("alpha>=1,<2", line)
        self.assertIn(str(empty), line)

    def test_the_installed_folder_wins_over_this_python(self) -> None:
        # Else a Python that has the server's packages would hide the engine that was installed.
        self.assertEqual(self.launch("install").returncode, 0)
        mine = write_package(self.place / "mine", "alpha", "1.9")
        seen = self.served(PYTHONPATH=str(mine))
        folder = self.folder_of(seen["alpha"])
        self.assertEqual([folder.name], self.installed())
        self.assertTrue((folder / "beta").is_dir())
        self.assertEqual(seen["alpha_in_child"], seen["alpha"])

    def test_this_python_wins_over_a_folder_without_the_engine(self) -> None:
        self.assertEqual(self.launch("install", "--server-only").returncode, 0)
        mine = write_package(self.place / "mine", "alpha", "1.9")
        seen = self.served(PYTHONPATH=str(mine))
        self.assertEqual(self.folder_of(seen["alpha"]), mine)

    def test_a_folder_that_is_not_stamped_does_not_count(self) -> None:
        self.assertEqual(self.launch("install").returncode, 0)
        (folder,) = self.installed()
        (self.cache / "gemma4-rigs/packages" / folder / launch.STAMP).unlink()
        self.refused()

    def test_a_version_out_of_range_does_not_count(self) -> None:
        for version in ("0.9", "2.0", "2.0.1", "11"):
            with self.subTest(version=version):
                other = write_package(self.place / version, "alpha", version)
                self.assertIn("alpha>=1,<2", self.refused(PYTHONPATH=str(other)))
        for version in ("1", "1.0+cpu", "1.99.3", "1.5rc1"):
            with self.subTest(version=version):
                other = write_package(self.place / version, "alpha", version)
                self.served(PYTHONPATH=str(other))

    def test_uv_is_the_last_resort(self) -> None:
        uv = self.place / "bin/uv"
        uv.write_text('#!/bin/sh\nfor word; do printf "%s\\n" "$word"; done > "$SEEN"\nexit 3\n')
        uv.chmod(0o755)
        done = self.launch("call", "a tool", "key=a value")
        self.assertEqual(done.returncode, 3, done.stderr)
        words = ["run", "--script", str(self.rig / "server.py"), "call", "a tool", "key=a value"]
        self.assertEqual(self.seen.read_text().splitlines(), words)
        mine = write_package(self.place / "mine", "alpha", "1.9")
        self.served(PYTHONPATH=str(mine))

    def test_without_anything_the_line_says_what_to_run_and_that_works(self) -> None:
        line = self.refused()
        command = line.partition("Run once: ")[2]
        self.assertEqual(shlex.split(command)[1:], [str(self.rig / "launch.py"), "install"])
        done = subprocess.run(
            ["sh", "-c", command], env=self.environment, cwd="/", capture_output=True, text=True
        )
        self.assertEqual(done.returncode, 0, done.stderr)
        self.served()


class ServerTest(LaunchCase):
    """What the server gets."""

    def setUp(self) -> None:
        super().setUp()
        self.environment["PYTHONPATH"] = str(write_package(self.place / "mine", "alpha", "1.5"))

    def test_arguments_and_status_pass_unchanged(self) -> None:
        words = ["call", "query", 'prompt=a "b" $(c) `d`\nÄ', "--json", ""]
        seen = self.served(*words)
        self.assertEqual(seen["argv"], words)
        self.assertEqual(seen["server_file"], str(self.rig / "server.py"))
        self.assertEqual(seen["rig"], "the rig")

    def test_the_server_is_a_module_whose_bytecode_is_kept(self) -> None:
        self.assertEqual(self.served()["name"], "server")
        (kept,) = (self.rig / "__pycache__").glob("server.*.pyc")
        stamp = kept.stat().st_mtime_ns
        self.served()
        self.assertEqual(kept.stat().st_mtime_ns, stamp)

    def test_home_may_be_unset(self) -> None:
        del self.environment["HOME"], self.environment["XDG_CACHE_HOME"]
        self.served()

    def test_a_link_leads_to_the_rig(self) -> None:
        link = self.place / "elsewhere.py"
        link.symlink_to(self.rig / "launch.py")
        done = subprocess.run([sys.executable, str(link)], env=self.environment)
        self.assertEqual(done.returncode, 7)
        self.assertEqual(
            json.loads(self.seen.read_text())["server_file"], str(self.rig / "server.py")
        )

    def test_python_runs_with_the_packages(self) -> None:
        program = "import alpha, sys; print(alpha.__file__, sys.argv[1:]); sys.exit(5)"
        done = subprocess.run(
            [sys.executable, str(self.rig / "launch.py"), "python", "-c", program, "a b"],
            env=self.environment,
            capture_output=True,
            text=True,
        )
        self.assertEqual(done.returncode, 5, done.stderr)
        self.assertEqual(done.stdout.strip(), f"{self.place / 'mine/alpha/__init__.py'} ['a b']")

    def test_a_missing_requirements_file_is_named(self) -> None:
        (self.rig / "requirements.txt").unlink()
        self.assertIn("requirements.txt", self.refused())

    def test_an_old_python_is_told_so(self) -> None:
        old = [
            path
            for minor in (8, 9, 10)
            for folder in map(Path, os.get_exec_path())
            for path in (
                folder / f"python3.{minor}",
                *(folder.parent / "versions").glob(f"*/bin/python3.{minor}"),
            )
            if _runs(path)
        ]
        if not old:
            self.skipTest("this machine has no Python older than 3.11")
        done = subprocess.run(
            [str(old[0]), str(self.rig / "launch.py")],
            env=self.environment,
            capture_output=True,
            text=True,
        )
        self.assertEqual((done.returncode, done.stdout), (1, ""))
        self.assertIn("needs 3.11 or newer", done.stderr)
        self.assertEqual(len(done.stderr.splitlines()), 1, done.stderr)


def _runs(python: Path) -> bool:
    try:
        return not subprocess.run([python, "-c", ""], capture_output=True).returncode
    except OSError:
        return False


class InstallTest(LaunchCase):
    """`launch.py install`."""

    def test_it_says_what_where_and_how_large_first(self) -> None:
        done = self.launch("install")
        self.assertEqual(done.returncode, 0, done.stderr)
        first = done.stderr.splitlines()[0]
        (folder,) = self.installed()
        for part in ("requirements.txt", "requirements-runtime.txt", folder, "GB"):
            self.assertIn(part, first)
        self.assertIn("Successfully installed alpha-1.5 beta-1.0", done.stderr)

    def test_a_second_one_has_nothing_to_do(self) -> None:
        self.assertEqual(self.launch("install").returncode, 0)
        shutil.rmtree(self.wheels)
        self.assertEqual(self.launch("install").returncode, 0)

    def test_the_server_alone_and_then_everything(self) -> None:
        self.assertEqual(self.launch("install", "--server-only").returncode, 0)
        folder = self.folder_of(self.served()["alpha"])
        self.assertFalse((folder / "beta").exists())
        self.assertEqual(self.launch("install").returncode, 0)
        folder = self.folder_of(self.served()["alpha"])
        self.assertTrue((folder / "beta").is_dir())

    def test_other_requirements_get_another_folder(self) -> None:
        self.assertEqual(self.launch("install").returncode, 0)
        (self.rig / "requirements.txt").write_text("alpha>=1.5,<2\n")
        self.refused()
        self.assertEqual(self.launch("install").returncode, 0)
        self.assertEqual(len(self.installed()), 2)

    def test_a_copy_of_the_rig_shares_the_folder(self) -> None:
        self.assertEqual(self.launch("install").returncode, 0)
        shutil.copytree(self.rig, self.place / "plugin")
        self.rig = self.place / "plugin"
        self.assertEqual([self.folder_of(self.served()["alpha"]).name], self.installed())

    def test_a_failure_leaves_nothing(self) -> None:
        (self.wheels / "beta-1.0-py3-none-any.whl").unlink()
        done = self.launch("install")
        self.assertEqual(done.returncode, 1)
        self.assertIn("nothing was installed", done.stderr.splitlines()[-1])
        self.assertEqual(self.installed(), [])
        self.refused()

    def test_settings_of_the_user_that_forbid_it_elsewhere_do_not_matter_here(self) -> None:
        done = self.launch("install", PIP_REQUIRE_VIRTUALENV="1", PIP_USER="1")
        self.assertEqual(done.returncode, 0, done.stderr)

    def test_conflicts_elsewhere_frighten_nobody(self) -> None:
        # A package of this Python that wants another alpha; pip would call it an ERROR.
        other = write_package(self.place / "other", "gamma", "1.0")
        with (other / "gamma-1.0.dist-info/METADATA").open("a") as metadata:
            metadata.write("Requires-Dist: alpha<1\n")
        done = self.launch("install", PYTHONPATH=str(other))
        self.assertEqual(done.returncode, 0, done.stderr)
        self.assertNotIn("gamma", done.stderr)

    def test_what_the_tests_need_is_for_the_tests_alone(self) -> None:
        (self.rig / "requirements-test.txt").write_text("gamma==2.0\n")
        write_wheel(self.wheels, "gamma", "2.0")
        self.assertEqual(self.launch("install").returncode, 0)
        program = (
            "import importlib.util, json, os; found = importlib.util.find_spec('gamma'); "
            "open(os.environ['SEEN'], 'w').write(json.dumps(found is not None))"
        )
        self.assertEqual(self.launch("python", "-c", program).returncode, 0)
        self.assertFalse(json.loads(self.seen.read_text()), "a plain install has it too")
        self.assertEqual(self.launch("install", "--for-tests").returncode, 0)
        self.assertEqual(len(self.installed()), 2)
        self.assertEqual(self.launch("python", "-c", program).returncode, 0)
        self.assertTrue(json.loads(self.seen.read_text()))
        folder = self.folder_of(self.served()["alpha"])
        self.assertFalse((folder / "gamma").exists(), "the server starts with it")

    def test_for_tests_without_needs_of_their_own_is_the_plain_install(self) -> None:
        self.assertEqual(self.launch("install").returncode, 0)
        self.assertEqual(self.launch("install", "--for-tests").returncode, 0)
        self.assertEqual(len(self.installed()), 1)

    def test_wrong_words_are_refused(self) -> None:
        done = self.launch("install", "--everything")
        self.assertEqual(done.returncode, 2)
        self.assertIn("--server-only", done.stderr)
        self.assertEqual(self.installed(), [])

    def test_two_at_once_do_not_harm_each_other(self) -> None:
        argv = [sys.executable, str(self.rig / "launch.py"), "install"]
        both = [
            subprocess.Popen(argv, env=self.environment, stderr=subprocess.DEVNULL)
            for _ in range(2)
        ]
        self.assertEqual([each.wait(PATIENCE_S) for each in both], [0, 0])
        self.assertEqual(len(self.installed()), 1)
        self.served()

    def test_an_interrupted_one_leaves_nothing_and_the_next_one_works(self) -> None:
        for number in (signal.SIGTERM, signal.SIGINT):
            with self.subTest(signal=number.name), self.hanging_install() as (install, pip):
                os.kill(install.pid, number)
                self.assertNotEqual(install.wait(PATIENCE_S), 0)
                self.assertEqual(self.installed(), [])
                self.assertFalse(_alive(pip), "pip goes on")
        self.refused()
        self.assertEqual(self.launch("install").returncode, 0)
        self.served()

    def test_a_killed_one_counts_for_nothing_and_is_swept_after_a_day(self) -> None:
        with self.hanging_install() as (install, pip):
            install.kill()
            install.wait(PATIENCE_S)
            os.kill(pip, signal.SIGKILL)
        (partial,) = self.installed()
        self.refused()
        self.assertEqual(self.launch("install", "--server-only").returncode, 0)
        self.assertIn(partial, self.installed())  # it might be another one that still runs
        old = time.time() - 100_000
        os.utime(self.cache / "gemma4-rigs/packages" / partial, (old, old))
        self.assertEqual(self.launch("install").returncode, 0)
        self.assertNotIn(partial, self.installed())

    @contextmanager
    def hanging_install(self) -> Iterator[tuple[subprocess.Popen[bytes], int]]:
        """An install whose pip waits for an index that never answers, and the pid of that pip."""
        asked = threading.Event()
        free = threading.Event()

        class Silent(socketserver.BaseRequestHandler):
            def handle(self) -> None:
                asked.set()
                free.wait(PATIENCE_S)

        index = socketserver.ThreadingTCPServer(("127.0.0.1", 0), Silent)
        threading.Thread(target=index.serve_forever, daemon=True).start()
        environment = {
            name: value for name, value in self.environment.items() if name != "PIP_NO_INDEX"
        }
        address = f"http://127.0.0.1:{index.server_address[1]}/simple"
        install = subprocess.Popen(
            [sys.executable, str(self.rig / "launch.py"), "install"],
            env={**environment, "PIP_INDEX_URL": address},
            stderr=subprocess.DEVNULL,
        )
        try:
            self.assertTrue(asked.wait(PATIENCE_S), "pip did not ask the index")
            yield install, _only_child(install.pid)
        finally:
            install.kill()
            install.wait()
            free.set()
            index.shutdown()
            index.server_close()


def _only_child(pid: int) -> int:
    import psutil

    (child,) = psutil.Process(pid).children()
    return child.pid


def _alive(pid: int) -> bool:
    import psutil

    try:
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


class CacheTest(unittest.TestCase):
    """Where the packages lie."""

    def cache_with(self, **environment: str) -> Path:
        program = "from forge.launch import user_cache; print(user_cache())"
        done = subprocess.run(
            [sys.executable, "-c", program],
            env={"PYTHONPATH": str(LAUNCHER.parent.parent), **environment},
            capture_output=True,
            text=True,
            check=True,
        )
        return Path(done.stdout.strip())

    def test_it_follows_the_rules_that_the_server_follows(self) -> None:
        home = Path(pwd.getpwuid(os.getuid()).pw_dir)
        default = "Library/Caches" if sys.platform == "darwin" else ".cache"
        self.assertEqual(self.cache_with(), home / default)
        self.assertEqual(self.cache_with(HOME="/h"), Path("/h") / default)
        self.assertEqual(self.cache_with(HOME="/h", XDG_CACHE_HOME="/x y"), Path("/x y"))
        # A relative one is to be ignored, says the specification.
        self.assertEqual(self.cache_with(HOME="/h", XDG_CACHE_HOME="x"), Path("/h") / default)
        self.assertEqual(self.cache_with(HOME="/h", XDG_CACHE_HOME=""), Path("/h") / default)

    def test_the_server_agrees(self) -> None:
        import platformdirs

        for value in ("/x", "x", ""):
            with self.subTest(value), unittest.mock.patch.dict(os.environ, XDG_CACHE_HOME=value):
                theirs = Path(platformdirs.user_cache_dir("gemma4-rigs", appauthor=False))
                self.assertEqual(launch.user_cache() / "gemma4-rigs", theirs)


if __name__ == "__main__":
    unittest.main()
