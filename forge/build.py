"""Every built file of every rig: `python3 -m forge.build [RIG…]`, or `--diff A B`.

A rig is staged in a temporary folder, its documents are written there by the server that was just
built, and only then is anything in the repository replaced, each file in one step. What the rigs
say and do is the business of the parts; this module knows files.
"""

from __future__ import annotations

import argparse
import difflib
import functools
import gc
import importlib
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from fnmatch import fnmatch
from pathlib import Path

from forge.aws_files import aws_files
from forge.bundle import Bundle, BundleError, bundle
from forge.facts_docs import render_hardware, render_models
from forge.google_files import google_files
from forge.manifests import (
    MARKETPLACE_FILE,
    VERSION_FILES,
    PublishedRig,
    plugin_version,
    render_manifests,
    render_marketplace,
)
from forge.naming import slug
from forge.parts.assembly.rig import Rig
from forge.parts.planes.capacity_plane import CapacitySettings
from forge.pins import (
    requirements_among,
    requirements_of_script,
    script_block,
    server_requirements,
    suite_requirements,
)
from forge.rollup import rollup_files

ROOT = Path(__file__).resolve().parent.parent
BUILD_COMMAND = "python3 -m forge.build"
EJECTED_MARK = "# Ejected from the forge: "
# The rig's file -> its source in forge/; @RIG@ and @SLUG@ are filled in where the source has them.
COPIED = {"launch.py": "launch.py", "Makefile": "rig.mk", "set_env.sh": "set_env.sh"}
# Left by tools, ignored by git, and no part of what a rig ships.
LITTER = ("__pycache__", "*.pyc", ".*_cache", "dist", ".venv", ".git", ".DS_Store")
_DOCS_PATIENCE_S = 120
_KEPT_VARIABLES = ("PATH", "PYTHONPATH", "LD_LIBRARY_PATH", "HOME", "LANG", "LC_ALL", "TMPDIR")


class BuildError(Exception):
    """A rig that cannot be built; the message is one line that says why and what to do."""


@dataclass(frozen=True)
class StagedRig:
    """A rig as it ought to be: `files` are the built ones, by path in the rig's folder.

    `folder` is the staged copy, hand-written files included, from which its server can be run.
    `server` is what the forge would build, also where the rig was ejected. `problems` has, for each
    file whose source is missing, a line that says so. `rents`: whether it costs money to use.
    """

    published: PublishedRig
    folder: Path
    files: dict[str, bytes]
    server: str
    ejected: bool
    problems: dict[str, str]
    rents: bool = False

    @property
    def name(self) -> str:
        return self.published.name


def rig_modules() -> list[str]:
    """The names of the modules in forge/rigs, sorted: one for each rig that has a server."""
    return sorted(p.stem for p in ROOT.glob("forge/rigs/*.py") if not p.stem.startswith("_"))


def load_rig(module: str) -> Rig:
    """The `RIG` of forge.rigs.<module>. Raises BuildError where it cannot be imported."""
    file = f"forge/rigs/{module}.py"
    try:
        rig = importlib.import_module(f"forge.rigs.{module}").RIG
    except Exception as error:
        said = f"{type(error).__name__}: {error}".splitlines()[0]
        raise BuildError(f"{file}: cannot be imported ({said}): correct it") from error
    if not isinstance(rig, Rig) or rig.name.replace("-", "_") != module:
        raise BuildError(f"{file}: RIG must be a Rig named as the file, with dashes: rename one")
    try:
        slug(rig.name)
    except ValueError as error:
        raise BuildError(f"{file}: {error}: rename the rig") from error
    return rig


def published(rig: Rig) -> PublishedRig:
    """What the manifests say of `rig`, without a version."""
    return PublishedRig(
        name=rig.name,
        about=rig.about,
        settings=[key.upper() for key in rig.settings.model_fields],
    )


def is_ejected(text: str) -> bool:
    """Whether the comment lines at the head of a file say that it is its rig's own."""
    for line in text.splitlines():
        if not line.startswith("#"):
            return False
        if line.startswith(EJECTED_MARK):
            return True
    return False


def source_line(module: str, kind: str) -> str:
    """The head line of a built file: where it comes from, and by what command."""
    return f"# Built from forge/{kind}/{module}.py by `{BUILD_COMMAND}`: edit it there."


def drift(ours: str, theirs: str) -> tuple[int, int]:
    """Lines that `theirs` has beyond `ours`, and lines that it lacks; the ejection's mark aside."""
    own = [line for line in theirs.splitlines() if not line.startswith(EJECTED_MARK)]
    forged = [line for line in ours.splitlines() if not line.startswith("# Built from forge/")]
    changes = list(difflib.unified_diff(forged, own, n=0, lineterm=""))[2:]  # two are its head
    signs = [line[0] for line in changes]
    return signs.count("+"), signs.count("-")


def shipped_files(folder: Path) -> Iterator[Path]:
    """Every file below `folder`, sorted, but what tools leave there: what a client would copy."""
    for path in sorted(folder.rglob("*")):
        parts = path.relative_to(folder).parts
        if path.is_file() and not any(fnmatch(part, junk) for part in parts for junk in LITTER):
            yield path


def rig_environment(state: Path) -> dict[str, str]:
    """The environment for a built server: no setting of the builder's shell, state in `state`."""
    kept = {name: os.environ[name] for name in _KEPT_VARIABLES if name in os.environ}
    folders = {f"XDG_{kind}_HOME": str(state / kind.lower()) for kind in ("STATE", "CACHE")}
    return kept | folders


def stage_rig(module: str, folder: Path) -> StagedRig:
    """Build one rig into `folder`/<its name>. Raises BuildError; touches nothing else."""
    try:
        source = bundle(f"forge.rigs.{module}", ROOT)
        server_requirements(source.third_party)  # what they refuse is said before it is imported
        rig = load_rig(module)
        server = _server(module, source, rig.programs)
        programs = {
            f"{name}.py": _program(name, tuple(rig.runtime_requirements)) for name in rig.programs
        }
        suite, suite_needs = _suite(module)
    except (BundleError, ValueError) as error:
        raise BuildError(f"forge/rigs/{module}.py: {error}") from error
    stage, home = folder / rig.name, ROOT / rig.name
    if home.is_dir():
        shutil.copytree(home, stage, symlinks=True, ignore=shutil.ignore_patterns(*LITTER))
    else:
        stage.mkdir(parents=True)
    files: dict[str, bytes] = {}

    def put(name: str, text: str) -> None:
        files[name] = text.encode()
        _write(stage / name, files[name])

    own = _text(stage / "server.py")
    ejected = is_ejected(own)
    if not ejected:
        own = server
        put("server.py", server)
        for name, text in programs.items():
            put(name, text)
        if suite:
            put("test_server.py", suite)
        if suite_needs:
            put("requirements-test.txt", _lines(suite_needs))
    try:
        put("requirements.txt", _lines(requirements_of_script(own)))
    except ValueError as error:
        raise BuildError(f"{rig.name}/server.py {error}: restore it") from error
    put("requirements-runtime.txt", _lines(rig.runtime_requirements))
    problems: dict[str, str] = {}
    for name, origin in COPIED.items():
        text = _text(ROOT / "forge" / origin)
        if text:
            put(name, text.replace("@RIG@", rig.name).replace("@SLUG@", slug(rig.name)))
        else:
            problems[name] = f"{name} is not built: forge/{origin} is missing"
    try:
        settings = stage / "tpu.env"
        for name, text in {**google_files(rig, settings), **aws_files(rig, settings)}.items():
            put(name, text)
    except (KeyError, IndexError, ValueError) as error:
        raise BuildError(f"{rig.name}/tpu.env: {error}: correct it") from error
    known = published(rig)
    for name, text in render_manifests(known).items():
        put(name, text)
    _write_documents(stage, folder / f"{rig.name}.state")
    for path in (stage / "GemmaTools.md", stage / "README.md", *stage.glob("skills/**/*")):
        if path.is_file():
            files[path.relative_to(stage).as_posix()] = path.read_bytes()
    # A new measurement is no new plugin: what is installed does the same as before.
    paths = [p for p in shipped_files(stage) if p.relative_to(stage).parts[0] != "benchmarks"]
    shipped = {p.relative_to(stage).as_posix(): p.read_bytes() for p in paths}
    known = replace(known, version=plugin_version(shipped))
    for name, text in render_manifests(known).items():
        if name in VERSION_FILES:
            put(name, text)
    rents = issubclass(rig.settings, CapacitySettings)
    return StagedRig(known, stage, files, server, ejected, problems, rents)


def stage_all(modules: Sequence[str], folder: Path) -> tuple[list[StagedRig], list[str]]:
    """Stage rigs side by side; those that could not be built come back as lines of text."""

    def stage(module: str) -> StagedRig | str:
        try:
            return stage_rig(module, folder)
        except BuildError as error:
            return str(error)

    with ThreadPoolExecutor(os.cpu_count()) as pool:
        results = list(pool.map(stage, modules))
    staged = [result for result in results if isinstance(result, StagedRig)]
    return staged, [result for result in results if isinstance(result, str)]


def root_files() -> dict[str, bytes]:
    """The built files of the root, by path: they speak of every rig, so every rig is loaded."""
    rigs = [published(load_rig(module)) for module in rig_modules()]
    texts = {
        MARKETPLACE_FILE: render_marketplace(rigs),
        "HARDWARE.md": render_hardware(),
        "MODELS.md": render_models(),
    }
    return {name: text.encode() for name, text in texts.items()}


def abandoned(staged: StagedRig) -> list[str]:
    """Skill files in the rig's folder, by path in it, that are not built any more."""
    home = ROOT / staged.name
    found = [
        path.relative_to(home).as_posix() for path in home.glob("skills/**/*") if path.is_file()
    ]
    return sorted(name for name in found if name not in staged.files and "__pycache__" not in name)


def build(modules: Sequence[str]) -> int:
    """Build the rigs of these modules, and the root's files. Returns the exit status."""
    with tempfile.TemporaryDirectory(prefix="forge-build-") as temporary:
        staged, faults = stage_all(modules, Path(temporary))
        if faults:
            print("\n".join([*faults, "Nothing was written."]), file=sys.stderr)
            return 1
        try:
            wanted = root_files()
        except BuildError as error:
            print(f"{error}\nNothing was written.", file=sys.stderr)
            return 1
        for rig in staged:
            wanted |= {f"{rig.name}/{name}": data for name, data in rig.files.items()}
            for name in abandoned(rig):
                (ROOT / rig.name / name).unlink()
                print(f"removed {rig.name}/{name}")
    changed = [name for name, data in wanted.items() if _bytes(ROOT / name) != data]
    for name in changed:
        _write(ROOT / name, wanted[name])
        print(f"wrote {name}")
    # It marks the figures of older builds, so a new server is a new roll-up.
    for name, text in rollup_files(ROOT).items():
        if _text(ROOT / name) != text:
            _write(ROOT / name, text.encode())
            print(f"wrote {name}")
    print(f"{len(wanted)} built files, {len(changed)} changed.")
    problems = [f"{rig.name}/{line}" for rig in staged for line in rig.problems.values()]
    print("".join(f"{line}\n" for line in problems), end="", file=sys.stderr)
    return 1 if problems else 0


def _server(module: str, source: Bundle, programs: Sequence[str]) -> str:
    """The text of server.py. Its head names what its programs need too: they share one Python."""
    imports = set(source.third_party)
    for name in programs:
        imports.update(_program_source(name).third_party)
    head = script_block(server_requirements(imports))
    return source.render(f"{head}\n{source_line(module, 'rigs')}", contents=True)


@functools.cache  # the same for every rig that carries it
def _program_source(name: str) -> Bundle:
    return bundle(f"forge.programs.{name}", ROOT)


def _program(name: str, runtime: tuple[str, ...]) -> str:
    """The text of a program beside server.py, with a PEP 723 block where it needs packages: the
    servers' own, and those that the `runtime` brings."""
    imports = _program_source(name).third_party
    brought = requirements_among(imports, runtime)
    return _rendered_program(name, tuple([*server_requirements(imports), *brought]))


@functools.cache  # most are the same in every rig
def _rendered_program(name: str, needed: tuple[str, ...]) -> str:
    source = _program_source(name)
    head = f"{script_block(needed)}\n" if needed else ""
    # A machine's start-up agent runs a program by its first line.
    text = _text(ROOT / "forge" / "programs" / f"{name}.py")
    shebang = f"{text.splitlines()[0]}\n" if text.startswith("#!") else ""
    return source.render(f"{shebang}{head}{source_line(name, 'programs')}", contents=True)


def _suite(module: str) -> tuple[str, list[str]]:
    """The text of test_server.py and what it needs beside; empty where the rig has no suite."""
    if not (ROOT / "forge" / "suites" / f"{module}.py").is_file():
        return "", []
    source = bundle(f"forge.suites.{module}", ROOT)
    text = source.render(source_line(module, "suites"), contents=True)
    return text, suite_requirements(source.third_party)


def _write_documents(stage: Path, state: Path) -> None:
    """Let the staged server write its tool list, its skill and the lists in its README."""
    try:
        done = subprocess.run(
            [sys.executable, "server.py", "docs"],
            cwd=stage,
            env=rig_environment(state),
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=_DOCS_PATIENCE_S,
        )
    except subprocess.TimeoutExpired as error:
        raise BuildError(f"{stage.name}: `server.py docs` takes {_DOCS_PATIENCE_S} s") from error
    if done.returncode:
        said = (done.stderr.strip() or done.stdout.strip() or "no output").splitlines()[-1]
        raise BuildError(f"{stage.name}: the built server cannot write its documents: {said}")


def _lines(items: Sequence[str]) -> str:
    return "".join(f"{item}\n" for item in items)


def _text(path: Path) -> str:
    """The file's text; empty where there is none."""
    return path.read_text(encoding="utf-8") if path.is_file() else ""


def _bytes(path: Path) -> bytes | None:
    return path.read_bytes() if path.is_file() else None


def _write(path: Path, data: bytes) -> None:
    """Replace a file in one step, so that no reader sees half of it."""
    path.parent.mkdir(parents=True, exist_ok=True)
    handle, temporary = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
    try:
        with os.fdopen(handle, "wb") as file:
            file.write(data)
        os.chmod(temporary, 0o644)
        os.replace(temporary, path)
    except BaseException:
        Path(temporary).unlink(missing_ok=True)
        raise


def module_of(name: str) -> str:
    """The module of the rig `name`. Raises BuildError that lists the rigs there are."""
    module, known = name.strip("/").replace("-", "_"), rig_modules()
    if module not in known:
        raise BuildError(f"no rig {name}: forge/rigs has {', '.join(known) or 'none'}")
    return module


def server_diff(a: str, b: str) -> str:
    """A unified diff of the server.py of two rigs, as they lie in their folders."""
    files = [f"{name.strip('/')}/server.py" for name in (a, b)]
    missing = [file for file in files if not (ROOT / file).is_file()]
    if missing:
        raise BuildError(f"{', '.join(missing)}: no such file; build that rig")
    one, other = (_text(ROOT / file).splitlines(keepends=True) for file in files)
    return "".join(difflib.unified_diff(one, other, files[0], files[1]))


def main(argv: Sequence[str] | None = None) -> int:
    """The command line; returns the exit status (0 good, 1 failed, 2 wrong usage)."""
    parser = argparse.ArgumentParser(prog=BUILD_COMMAND, description=(__doc__ or "").split("\n")[0])
    parser.add_argument("rigs", nargs="*", metavar="RIG", help="only these; default: every rig")
    parser.add_argument("--diff", nargs=2, metavar=("A", "B"), help="how two servers differ")
    arguments = parser.parse_args(argv)
    try:
        if arguments.diff:
            print(server_diff(*arguments.diff), end="")
            return 0
        modules = [module_of(name) for name in arguments.rigs] or rig_modules()
    except BuildError as error:
        print(error, file=sys.stderr)
        return 1
    return build(modules)


if __name__ == "__main__":
    gc.disable()  # syntax trees hold no rings, and looking for some takes half of the time
    sys.exit(main())
