"""What a release of the JAX engine needs on a machine: a Python with its packages, a checkpoint.

uv makes the environment, huggingface_hub within it fetches the checkpoint. Both are found again
where they are there already. Knows no cloud and no service.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import shutil
import subprocess
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from forge.machine.console import (
    BOTH,
    HOME,
    MINUTE_S,
    NOTHING,
    Failure,
    Progress,
    clean,
    run,
    stored,
    tried,
)

UV = "uv==0.13.9"  # its options as used here: tried 2026-11-30
TOOLS, ENVIRONMENTS, HUB_CACHE = HOME / "tools", HOME / "environments", HOME / "hub"
CHECKPOINT, FETCH_LOG = HOME / "checkpoint.json", HOME / "fetch.log"
UV_VARIABLES = {  # all that uv keeps lies in this machine's one folder
    "UV_CACHE_DIR": str(HOME / "uv"),
    "UV_PYTHON_INSTALL_DIR": str(HOME / "python"),
    "UV_NO_PROGRESS": "1",
    "UV_NO_CONFIG": "1",
}
FETCH_MINUTES = 60
FETCH_PATTERNS = ("*.safetensors", "*.json", "*.jinja")
FETCH_PROGRAM = """
import sys
from huggingface_hub import snapshot_download
print(snapshot_download(sys.argv[1], revision=sys.argv[2] or None, allow_patterns=sys.argv[3:]))
"""
# Another try does not mend these.
FETCH_HOPELESS = re.compile(r"\b40[134]\b|Gated|NotFound|No space|not a valid", re.I)


def get_environment(release: Mapping[str, Any], progress: Progress) -> Path:
    """The Python of an environment that has exactly the release's packages. Raises Failure.

    The machine's image may have an older Python than the packages want; uv then fetches one.
    """
    wanted = [release["python"], *release["requirements"]]
    folder = environment_folder(wanted)
    python, made = folder / "bin/python", folder / "made.json"
    if stored(made, None) == wanted:
        progress.tell("done", f"{len(wanted) - 1} packages are here already")
        return python
    os.environ.update(UV_VARIABLES)
    uv = get_uv(progress)
    shutil.rmtree(folder, ignore_errors=True)
    folder.parent.mkdir(parents=True, exist_ok=True)
    listed = folder.with_suffix(".txt")
    listed.write_text("\n".join(wanted[1:]) + "\n")
    make = (uv, "venv", "--quiet", "--python", wanted[0], str(folder))
    tried(3, lambda: run(*make, minutes=10), lambda _: True)
    fill = [uv, "pip", "install", "--quiet", "--no-deps", "--only-binary", ":all:"]
    fill += ["--python", str(python), "--requirement", str(listed)]
    tried(3, lambda: run(*fill, minutes=20), lambda _: True)
    made.write_text(json.dumps(wanted))
    progress.tell("done", f"{len(wanted) - 1} packages")
    return python


def environment_folder(wanted: Sequence[str]) -> Path:
    return ENVIRONMENTS / hashlib.sha256("\n".join(wanted).encode()).hexdigest()[:12]


def forget_environments(releases: Sequence[Mapping[str, Any]]) -> None:
    """Removes the environments that none of these releases needs."""
    needed = {environment_folder([one["python"], *one["requirements"]]).name for one in releases}
    for folder in ENVIRONMENTS.glob("*/"):
        if folder.name not in needed:
            shutil.rmtree(folder, ignore_errors=True)


def get_uv(progress: Progress) -> str:
    """uv's program, fetched by pip, which is installed where the image lacks it."""

    def install() -> str:
        run("apt-get", "update", minutes=5)
        return run("apt-get", "install", "--yes", "python3-pip", minutes=10)

    program = TOOLS / UV / "bin/uv"
    if program.exists():
        return str(program)
    if shutil.which("pip3") is None:
        progress.tell("note", "installing python3-pip")
        tried(30, install, lambda _: True)  # another program may hold apt's lock for minutes
    progress.tell("note", f"fetching {UV}")
    argv = ("pip3", "install", "--quiet", "--disable-pip-version-check", "--no-deps")
    tried(3, lambda: run(*argv, "--target", str(TOOLS / UV), UV, minutes=5), lambda _: True)
    return str(program)


def get_checkpoint(python: Path, release: Mapping[str, Any], progress: Progress) -> Path:
    """The folder of the checkpoint: the one that is here, or fetched. Raises Failure.

    Without a revision it is the newest of the moment in which it was first asked for here.
    """
    wanted = [release["repository"], release["revision"]]
    known = stored(CHECKPOINT, {})
    if known.get("wanted") == wanted and Path(known["folder"]).is_dir():
        folder = Path(known["folder"])
        progress.tell("done", f"{wanted[0]} at {folder.name[:12]} is here already")
        return folder
    said = tried(
        5, lambda: fetch(python, wanted, progress), lambda why: not FETCH_HOPELESS.search(str(why))
    )
    folder = Path(said.splitlines()[-1])
    if not folder.is_dir():
        raise Failure(f"the Hub's program names no folder: {clean(said, 200)}")
    CHECKPOINT.write_text(json.dumps({"wanted": wanted, "folder": str(folder)}))
    size = sum(one.stat().st_size for one in folder.rglob("*") if one.is_file())
    progress.tell("done", f"{wanted[0]} at {folder.name[:12]}, {size / 1e9:.2f} GB")
    return folder


def fetch(python: Path, wanted: Sequence[str], progress: Progress) -> str:
    """What the Hub's own program printed, with a mark of how far it is every half minute."""
    environment = {**os.environ, "HF_HOME": str(HUB_CACHE), "HF_HUB_DISABLE_PROGRESS_BARS": "1"}
    environment |= {"DO_NOT_TRACK": "1", "HF_HUB_DISABLE_TELEMETRY": "1"}
    argv = [str(python), "-c", FETCH_PROGRAM, *wanted, *FETCH_PATTERNS]
    with FETCH_LOG.open("w") as log:
        child = subprocess.Popen(argv, stdin=NOTHING, stdout=log, stderr=BOTH, env=environment)
        try:
            for _ in range(2 * FETCH_MINUTES):
                with suppress(subprocess.TimeoutExpired):
                    child.wait(MINUTE_S / 2)
                if child.returncode is not None:
                    break
                progress.tell("note", f"{hub_bytes() / 1e9:.2f} GB are here")
        finally:
            child.kill()
            ended = child.wait()
    lines = [line for line in FETCH_LOG.read_text(errors="replace").splitlines() if line.strip()]
    if ended or not lines:
        raise Failure(f"fetching {wanted[0]}: {clean(lines[-1] if lines else str(ended), 300)}")
    return "\n".join(lines)


def hub_bytes() -> int:
    """What the Hub's cache holds, in bytes; what vanishes meanwhile does not count."""
    total = 0
    for path in HUB_CACHE.rglob("*"):
        with suppress(OSError):
            if path.is_file() and not path.is_symlink():
                total += path.stat().st_size
    return total
