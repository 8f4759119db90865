#!/usr/bin/env python3
# Built from forge/programs/jax_boot.py by `python3 -m forge.build`: edit it there.

"""Boots a TPU machine that serves one Gemma 4 with the JAX engine, and ends it when nobody uses it.

    jax_boot.py           at each start of the machine, by its start-up agent, as root
    boot.py idle          the watch that ends a machine without use, by systemd
    python3 - ACT DATA    over ssh, with this file as the input. ACT: boot_log status logs start
                          stop restart deploy rollback verify. DATA: a JSON object in URL-safe
                          base64. `deploy` finds what it deploys in GEMMA4_DELIVERY beside this text

What differs between machines, and the engine itself, come from the metadata server; nothing is
filled into this text. Steps are marked on the console, and one that fails says why. Python 3.10, no
package, no shell. Exit status: 0, 1 a step failed, 2 wrong usage.
"""

# Contents, by line:
#    52 machine / console: What a machine's program is made of: marks on the console, its files, …
#   213 machine / jax_device: The chip as JAX sees it from an environment of its own: what it is, …
#   281 machine / jax_packages: What a release of the JAX engine needs on a machine: a Python with …
#   421 machine / jax_release: Releases of the JAX engine on a machine: the file, what it is …
#   514 machine / machine: A machine as its program sees it: the cloud that rented it out, the …
#   628 machine / google: A machine of Google Cloud: its metadata server, its secret, its bucket, …
#   716 machine / watch: Ends a machine that nobody uses or whose time is over; the services that …
#   832 machine / acts: The command line of a machine's program: the boot, the watch, and the acts …
#   940 machine / systemd: One service of systemd's on a machine: its unit file, its state, its …
#  1056 machine / jax: The JAX engine under systemd: its release is laid down, made ready, started …
#  1216 programs / jax_boot: Boots a TPU machine that serves one Gemma 4 with the JAX engine, and …

from __future__ import annotations

import base64
import fcntl
import hashlib
import json
import lzma
import math
import os
import re
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import closing, suppress
from dataclasses import dataclass
from http.client import HTTPConnection, HTTPException, HTTPSConnection
from pathlib import Path
from typing import Any, Protocol, TypeVar
from urllib.parse import urlsplit, urlunsplit

# ── machine / console ─────────────────────────────────────────────────────────────────────────────
# What a machine's program is made of: marks on the console, its files, programs, answers.
#
# What has to stay secret belongs into `seen_secrets`. ROOT is a sandbox in tests, and MINUTE_S a
# shorter minute. Knows no cloud and no model server.

ROOT = Path(os.environ.get("GEMMA4_ROOT", "/"))
MINUTE_S = float(os.environ.get("GEMMA4_MINUTE_S", "60"))
HOME = ROOT / "var/lib/gemma4"
LOG, PROGRAM = HOME / "boot.log", HOME / "boot.py"
NOTHING, PIPE, BOTH = subprocess.DEVNULL, subprocess.PIPE, subprocess.STDOUT
READY = ("ready", "done")  # the mark of a boot that has succeeded
SECRET_SHAPES = re.compile(r"\b(?:hf_[A-Za-z0-9]{8,}|ya29\.[\w.-]{8,})|Bearer\s+\S{8,}", re.I)
MARK = re.compile(r"GEMMA4-BOOT (\w+) (begin|done|failed|note) (\d+) ?(.*)")
Result = TypeVar("Result")
seen_secrets: set[str] = set()


class Failure(Exception):
    """What could not be done, in words for the console. `code` is HTTP's, 0 without an answer."""

    def __init__(self, words: str, code: int = -1) -> None:
        super().__init__(words)
        self.code = code


class Progress:
    """The phase that a boot is in, so that whatever fails is marked there."""

    def __init__(self, first: str) -> None:
        """A boot begins with the mark that its first phase begins."""
        self.phase = self._begun = ""
        self.begin(first)

    def begin(self, phase: str, words: str = "") -> None:
        """Marks that a phase begins, once."""
        self.phase = phase
        if phase != self._begun:
            mark(phase, "begin", words)
        self._begun = phase

    def tell(self, state: str, words: str = "") -> None:
        mark(self.phase, state, words)


def shown(text: str) -> str:
    """`text` without control characters and without what is, or looks like, a credential."""
    for secret in seen_secrets:
        text = text.replace(secret, "[redacted]")
    text = SECRET_SHAPES.sub("[redacted]", text)
    return "".join(c if c.isprintable() or c in "\n\t" else " " for c in text)


def clean(text: str, limit: int = 500) -> str:
    """The same in one line."""
    return " ".join(shown(text[:60_000]).split())[:limit]


def mark(phase: str, state: str, words: str = "") -> None:
    """One line in boot.log, on the console, and for whoever runs this; a full disk is no matter."""
    line = f"GEMMA4-BOOT {phase} {state} {int(time.time())} {clean(words)}".rstrip()
    line = line.encode("ascii", "replace").decode() + "\n"  # whatever the console can show
    for path, flags in ((LOG, os.O_CREAT), (ROOT / "dev/console", os.O_NOCTTY | os.O_NONBLOCK)):
        with suppress(OSError), open(os.open(path, os.O_WRONLY | os.O_APPEND | flags), "w") as file:
            file.write(line)
    with suppress(OSError):
        print(line, end="", flush=True)


def latest_boot(first: str) -> list[dict[str, Any]]:
    """The marks since the last boot began, with its phase `first`; oldest first."""
    marks: list[dict[str, Any]] = []
    lines = LOG.read_text(errors="replace").splitlines() if LOG.exists() else []
    for found in filter(None, map(MARK.fullmatch, lines)):
        phase, state, at, words = found.groups()
        marks = [] if (phase, state) == (first, "begin") else marks
        marks.append({"phase": phase, "state": state, "at": int(at), "words": words})
    return marks


def stored(path: Path, default: Any) -> Any:
    """The JSON that a file of this program holds; `default` where it is missing or damaged."""
    try:
        return json.loads(path.read_text())
    except (OSError, ValueError):
        return default


def run(*argv: str, minutes: float = 2, complaints: int = PIPE) -> str:
    """What a program printed; with `complaints` set to BOTH its two streams in their order.

    Raises Failure with the last line of what it complained of.
    """
    called = " ".join(argv[:2])
    try:
        done = subprocess.run(
            argv, stdin=NOTHING, stdout=PIPE, stderr=complaints, timeout=minutes * max(MINUTE_S, 5)
        )
    except FileNotFoundError:
        raise Failure(f"{argv[0]} is not on this machine") from None
    except subprocess.TimeoutExpired:
        raise Failure(f"{called} took more than {minutes} minutes") from None
    if done.returncode:
        text = (done.stderr or done.stdout).decode("utf-8", "replace")
        # docker's own last line only points to its help.
        lines = [line for line in text.split("\n") if line.strip() and "--help'" not in line]
        raise Failure(f"{called}: {lines[-1] if lines else done.returncode}")
    return done.stdout.decode("utf-8", "replace").strip()


def in_background(*act: str) -> None:
    """The installed program as a process of its own, which outlives whoever asked for it."""
    argv = [sys.executable, str(PROGRAM), *act]
    subprocess.Popen(argv, stdin=NOTHING, stdout=NOTHING, stderr=NOTHING, start_new_session=True)


def ask(url: str, method: str = "GET", **headers: str) -> str:
    """The body of an answer. Raises Failure with the reason that the server gives.

    Knows no proxy and no redirection: what is sent along reaches this host and no other.
    """
    parts = urlsplit(url)
    connect = HTTPSConnection if parts.scheme == "https" else HTTPConnection
    try:
        with closing(connect(parts.netloc, timeout=10)) as link:
            link.request(method, urlunsplit(("", "", *parts[2:])), headers=headers)
            answer = link.getresponse()
            text = answer.read(4_000_000).decode("utf-8", "replace")
    except (OSError, HTTPException, OverflowError) as error:
        raise Failure(f"no answer from {parts.netloc}: {error}", 0) from None
    if answer.status != 200:
        with suppress(ValueError, TypeError, LookupError):
            text = json.loads(text)["error"]["message"]
        raise Failure(f"HTTP {answer.status}: {clean(str(text))}", answer.status)
    return text


def tried(times: int, step: Callable[[], Result], passes: Callable[[Failure], bool]) -> Result:
    """What `step` returns; a failure that `passes` by itself is met by another try."""
    for left in reversed(range(times)):
        try:
            return step()
        except Failure as failure:
            if not left or not passes(failure):
                raise
        time.sleep(MINUTE_S / 6)
    raise ValueError("no try was allowed")


def transient(failure: Failure) -> bool:
    """Whether a request failed for the network or for a server in trouble."""
    return failure.code in (0, 429) or failure.code >= 500


def healthy(document: dict[str, Any]) -> bool:
    """Whether the model server says that it can answer."""
    with suppress(Failure):
        return bool(ask(document["health"]) or True)  # vLLM's answer is empty
    return False


# ── machine / jax_device ──────────────────────────────────────────────────────────────────────────
# The chip as JAX sees it from an environment of its own: what it is, and how fast it multiplies.
#
# A process that serves holds the chip, so this is done before it starts, and what was seen is kept.
# Knows no cloud and no service.

DEVICE = HOME / "device.json"  # what was seen last, and when
# A product of bf16 matrices, ten in a row, the best of five times: 2 n^3 floating-point operations
# each. The values stay 1, whatever the rounding. JAX must find a TPU: it is told to, or it would
# go on with the processor.
PROBE_PROGRAM = """
import json, os, time
from importlib.metadata import PackageNotFoundError, version
os.environ.setdefault("JAX_PLATFORMS", "tpu")
import jax
import jax.numpy as jnp
devices = jax.devices()
first = devices[0]
size = 8192 if first.platform == "tpu" else 256
left = jnp.ones((size, size), jnp.bfloat16)
right = jnp.full((size, size), 1 / size, jnp.bfloat16)
def ten(x, y):
    for _ in range(10):
        x = x @ y
    return x
multiply = jax.jit(ten)
multiply(left, right).block_until_ready()
best = float("inf")
for _ in range(5):
    begun = time.perf_counter()
    last = multiply(left, right).block_until_ready()
    best = min(best, time.perf_counter() - begun)
told = {
    "platform": first.platform, "kind": first.device_kind, "count": len(devices),
    "memory_bytes": int((first.memory_stats() or {}).get("bytes_limit", 0)),
    "matrix": size, "tflops": round(20 * size**3 / best / 1e12, 3),
    "right": bool((last == 1).all()), "jax": jax.__version__,
}
try:
    told["libtpu"] = version("libtpu")
except PackageNotFoundError:
    told["libtpu"] = ""
print(json.dumps(told))
"""


def see_device(python: Path) -> dict[str, Any]:
    """What the probe tells, kept with its time. Raises Failure where JAX finds no TPU, or one that
    reckons wrong."""
    said = run(str(python), "-c", PROBE_PROGRAM, minutes=5).splitlines()
    try:
        told = dict(json.loads(said[-1]))
    except (ValueError, IndexError, TypeError):
        raise Failure(f"the probe's answer cannot be read: {clean(' '.join(said), 200)}") from None
    if told.get("platform") != "tpu":
        raise Failure(f"JAX sees {clean(str(told.get('kind')), 60)} and no TPU")
    if told.get("right") is not True:
        raise Failure("the chip's matrix product is wrong: take another machine")
    told["at"] = int(time.time())
    DEVICE.write_text(json.dumps(told))
    return told


def device_words(told: dict[str, Any]) -> str:
    memory = told["memory_bytes"] / 2**30
    return f"{told['count']} x {told['kind']}, {memory:.2f} GiB, {told['tflops']:g} TFLOP/s in bf16"


# ── machine / jax_packages ────────────────────────────────────────────────────────────────────────
# What a release of the JAX engine needs on a machine: a Python with its packages, a checkpoint.
#
# uv makes the environment, huggingface_hub within it fetches the checkpoint. Both are found again
# where they are there already. Knows no cloud and no service.

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


# ── machine / jax_release ─────────────────────────────────────────────────────────────────────────
# Releases of the JAX engine on a machine: the file, what it is started with, and the one before.
#
# A release is the engine's file by its hash, its packages, its checkpoint and its arguments; two
# are
# kept, so that one can go back. Knows no cloud, no service and nothing of what the engine does.

ENGINE_FILE = "jax_server.py"
RELEASES = HOME / "engine"
CURRENT = RELEASES / "current.json"  # {"now": key, "before": key or ""}
ENGINE_BYTES = 4_000_000  # the most that a packed engine may unpack to
RELEASE_FORMS = {
    "sha256": r"[0-9a-f]{64}",
    "python": r"3\.1\d",
    "repository": r"[\w-][\w.-]{0,95}/[\w-][\w.-]{0,95}",
    "revision": r"([0-9a-f]{40})?",
}
REQUIREMENT = r"[a-z0-9][a-z0-9._-]{0,60}==[0-9][\w.+]{0,40}"
SERVE_WORD = r"[\w./:@=,+-]{1,300}"  # nothing that a unit file would read as more than a word
# Where it listens, what it serves and where it keeps things, this program says itself.
SERVE_REFUSED = r"--(host|port|model|api-key-file|compile-cache|explain)\b.*"


def release_rules(release: Mapping[str, Any]) -> dict[str, object]:
    """By key, whether a release of a document or a delivery is as it has to be; raises what reading
    a wrong one raises."""
    words, packages = release["serve"], release["requirements"]
    return {
        **{f"release.{k}": re.fullmatch(f, release[k], re.ASCII) for k, f in RELEASE_FORMS.items()},
        "release.serve": all(re.fullmatch(SERVE_WORD, word, re.ASCII) for word in words)
        and not any(re.fullmatch(SERVE_REFUSED, word) for word in words),
        "release.requirements": bool(packages)
        and all(re.fullmatch(REQUIREMENT, package, re.ASCII) for package in packages),
    }


def release_key(release: Mapping[str, Any]) -> str:
    """The first 12 hex digits of the hash of all that a release says."""
    return hashlib.sha256(json.dumps(release, sort_keys=True).encode()).hexdigest()[:12]


def lay_down(release: Mapping[str, Any], packed: str) -> str:
    """Unpacks the engine's file beside what is said of it; the release's key.

    Raises Failure where what was packed is not the file of that hash.
    """
    key = release_key(release)
    folder = RELEASES / key
    try:
        unpacker = lzma.LZMADecompressor()
        text = unpacker.decompress(base64.b85decode(packed), ENGINE_BYTES)
    except (ValueError, lzma.LZMAError) as error:
        raise Failure(f"the engine came damaged: {error}") from None
    if hashlib.sha256(text).hexdigest() != release["sha256"]:
        raise Failure(f"what came as {ENGINE_FILE} is not the file of that hash")
    folder.mkdir(parents=True, exist_ok=True)
    (folder / ENGINE_FILE).write_bytes(text)
    (folder / "release.json").write_text(json.dumps(release))
    return key


def make_current(key: str) -> None:
    """That release from now on; the one until now is kept for going back, older ones go."""
    told = stored(CURRENT, {"now": ""})
    if told["now"] != key:
        fresh = CURRENT.with_suffix(".new")
        fresh.write_text(json.dumps({"now": key, "before": told["now"]}))
        fresh.replace(CURRENT)
    for folder in RELEASES.iterdir():
        if folder.is_dir() and folder.name not in kept_releases():
            shutil.rmtree(folder)


def kept_releases() -> list[str]:
    """The keys of the present release and of the one before, as far as there are any."""
    told = stored(CURRENT, {})
    return [key for key in (told.get("now"), told.get("before")) if key]


def current_release() -> tuple[str, dict[str, Any]]:
    """The key of the present release and what it says; empty before the first."""
    key = (kept_releases() or [""])[0]
    return key, stored(RELEASES / key / "release.json", {}) if key else {}


def release_before() -> str:
    """The key of the release that one can go back to. Raises Failure without one."""
    keys = kept_releases()
    if len(keys) < 2 or not (RELEASES / keys[1] / "release.json").is_file():
        raise Failure("no release before the present one is kept on this machine")
    return keys[1]


# ── machine / machine ─────────────────────────────────────────────────────────────────────────────
# A machine as its program sees it: the cloud that rented it out, the server that it is there for.
#
# The two meet in these protocols and in the boot document, one JSON object that is checked here.

Document = dict[str, Any]
DOCUMENT = HOME / "document.json"  # that of the latest boot, checked
LOCAL = r"http://127\.0\.0\.1:\d+/[\w/.?=&%:-]*"
FORMS = {  # what the strings of every document may be
    "rig": r"[a-z0-9_-]{1,63}",
    "health": LOCAL,
    "metrics": LOCAL,
    "secret": r"[\w-]{0,255}",
    "folder": r"/var/lib/gemma4/[\w-]+(/[\w-]+)*",
    "bucket": r"([a-z0-9][a-z0-9._-]{1,221})?",
}


class Cloud(Protocol):
    """Who rented the machine out. Every verb may raise Failure, with the remedy where there is one.

    `forms` are those of its documents' further strings, `acts` its own words. `boots_again`: its
    agent runs this program at every start. `check` sees whether the machine is what the document is
    for, before anything is fetched. `token` is the named secret's payload, in `seen_secrets` by
    then; empty where none is named. `copy_cache` brings the document's `folder` from the bucket
    ("restore") or there ("save"), where one is named, and only notes what fails. `leave` asks the
    provider to delete the machine, where a shutdown does not.
    """

    forms: Mapping[str, str]
    acts: Sequence[str]
    boots_again: bool

    def document(self) -> str: ...
    def check(self, document: Document, progress: Progress) -> None: ...
    def token(self, document: Document) -> str: ...
    def copy_cache(self, document: Document, way: str, progress: Progress) -> None: ...
    def act(self, word: str) -> str: ...
    def leave(self, document: Document) -> None: ...


class Serving(Protocol):
    """The model server. Every verb may raise Failure.

    `kind` is its name in a status: container or server. `forms` as a cloud's; `acts` are logs,
    start, stop, restart, rm and maybe more. A boot of more than `ready_minutes` has failed. `rules`
    tells by key whether the rest of a document holds; it may add to it, and raise what reading a
    wrong one raises. `get` has the server of this document running, `follow` marks what it tells
    until it is ready, that too. `act` is given `lines` of a log and `limit` in bytes. `status` has
    state, exit_code, restarts, started_at; None where nothing is there.
    """

    kind: str
    forms: Mapping[str, str]
    acts: Sequence[str]
    ready_minutes: int

    def rules(self, document: Document) -> Mapping[str, object]: ...
    def get(self, document: Document, progress: Progress) -> None: ...
    def follow(self, document: Document, progress: Progress) -> None: ...
    def act(self, word: str, document: Document, given: Mapping[str, int]) -> str: ...
    def status(self, document: Document) -> dict[str, Any] | None: ...


@dataclass(frozen=True)
class Machine:
    """The two of them, and the phase that a boot begins with."""

    cloud: Cloud
    serving: Serving
    first: str


def checked(text: str, machine: Machine) -> Document:
    """The boot document. Raises Failure with the first field that is not as it has to be."""
    forms = {**FORMS, **machine.cloud.forms, **machine.serving.forms}
    try:
        document: Document = json.loads(text)
        for key in ("folder", "bucket"):
            document[key] = document["cache"][key]
        served = machine.serving.rules(document)
        rules = {
            "v": document["v"] == 1,
            **{k: re.fullmatch(form, document[k], re.ASCII) for k, form in forms.items()},
            **served,
            "used": all(isinstance(metric, str) for metric in document["used"]),
        }
        for key, least in (("idle_minutes", 0), ("life_s", 1)):
            rules[key] = type(document[key]) is int and least <= document[key] <= 10**6
    except (ValueError, TypeError, LookupError, AttributeError, re.error) as error:
        raise Failure(f"the boot document is not valid: {type(error).__name__}: {error}") from None
    for key, holds in rules.items():
        if not holds:
            raise Failure(f"the boot document is not valid: {key}")
    return document


def copy_by(
    document: Document, way: str, progress: Progress, scheme: str, program: Sequence[str]
) -> None:
    """Cloud.copy_cache by a program that takes the two ends as its last arguments."""
    if not document["bucket"]:
        return
    near = ROOT / document["folder"][1:]
    far = f"{scheme}://{document['bucket']}/{document['rig']}"
    ends = (far, str(near)) if way == "restore" else (str(near), far)
    try:
        near.mkdir(parents=True, exist_ok=True)
        run(*program, *ends, minutes=10)
        progress.tell("note", f"cache {way}d: {far}")
    except (Failure, OSError) as error:
        progress.tell("note", f"cache not {way}d: {far}: {error}")


# ── machine / google ──────────────────────────────────────────────────────────────────────────────
# A machine of Google Cloud: its metadata server, its secret, its bucket, its own deletion.
#
# Knows no model server.

SECRETS = os.environ.get("GEMMA4_SECRETS_URL", "https://secretmanager.googleapis.com")
METADATA_HOST = os.environ.get("GCE_METADATA_HOST", "metadata.google.internal")
REMEDIES = {  # for what Secret Manager answers
    403: "let the machine's service account read it (roles/secretmanager.secretAccessor on this "
    "secret; the machine needs the scope cloud-platform)",
    404: "save_hf_token makes the secret and its version",
}


class Google:
    """Its start-up agent runs this program at each start, with the document in the metadata."""

    forms: Mapping[str, str] = {
        "project": r"[a-z][a-z0-9:.-]{1,62}",
        # The machine's own credentials go there: to Google, or to this computer in tests.
        "leave": rf"|https://(compute|tpu|www)\.googleapis\.com/[\w/.?=&%:-]+|{LOCAL}",
    }
    acts: Sequence[str] = ()
    boots_again = True

    def document(self) -> str:
        return tried(30, lambda: metadata("attributes/gemma4-boot"), transient)

    def check(self, document: Document, progress: Progress) -> None:
        """Nothing: the container finds the chip or says that it does not."""

    def token(self, document: Document) -> str:
        secret, project = document["secret"], document["project"]
        if not secret:
            return ""
        url = f"{SECRETS}/v1/projects/{project}/secrets/{secret}/versions/latest:access"
        try:
            answer = json.loads(tried(6, lambda: as_the_machine(url), transient))
            token = base64.b64decode(answer["payload"]["data"]).decode("ascii").strip()
        except Failure as failure:
            remedy = REMEDIES.get(failure.code, "see to it and start the container")
            raise Failure(f"secret {secret} of {project}: {failure}. Remedy: {remedy}") from None
        except (ValueError, LookupError, TypeError):
            token = ""
        if not re.fullmatch(r"[!-~]+", token):
            raise Failure(f"secret {secret} of {project} does not hold one plain word")
        seen_secrets.add(token)
        return token

    def copy_cache(self, document: Document, way: str, progress: Progress) -> None:
        program = ("gcloud", "storage", "rsync", "--recursive")
        copy_by(document, way, progress, "gs", program)

    def act(self, word: str) -> str:
        raise Failure(f"no such act: {word}")

    def leave(self, document: Document) -> None:
        if not document.get("leave"):
            return
        try:
            as_the_machine(document["leave"], "DELETE")
            mark("idle", "done", "the provider deletes this machine")
            time.sleep(10 * MINUTE_S)
        except Failure as failure:
            mark("idle", "note", f"the provider does not delete this machine: {failure}")


def metadata(path: str) -> str:
    """A value that the metadata server has for this machine."""
    url = f"http://{METADATA_HOST}/computeMetadata/v1/instance/{path}"
    try:
        return ask(url, **{"Metadata-Flavor": "Google"})
    except Failure as failure:
        raise Failure(f"metadata {path}: {failure}", failure.code) from None


def as_the_machine(url: str, method: str = "GET") -> str:
    """A request to Google in the name of the machine's service account."""
    try:
        token = str(json.loads(metadata("service-accounts/default/token"))["access_token"])
    except Failure as failure:
        if failure.code != 404:
            raise
        raise Failure("this machine has no service account: create it with one") from None
    seen_secrets.add(token)
    return ask(url, method, Authorization=f"Bearer {token}")


# ── machine / watch ───────────────────────────────────────────────────────────────────────────────
# Ends a machine that nobody uses or whose time is over; the services that keep it going.
#
# Knows a cloud and a model server by their protocols only.

FIRST_BOOT, USE = HOME / "first_boot", HOME / "use.json"
UNITS = ROOT / "etc/systemd/system"
IDLE_UNIT, BOOT_UNIT = "gemma4-idle.service", "gemma4-boot.service"
UNIT_TEXT = """[Unit]
Description={what}
[Service]
ExecStart={python} {program}{act}
{more}[Install]
WantedBy=multi-user.target
"""
DEFAULTS = {"idle_minutes": 30, "life_s": 14_400}  # until a document has come
METRIC = re.compile(r"^([\w:]+)(?:\{.*\})? ([0-9.eE+-]+)$", re.M)


def start_services(machine: Machine) -> None:
    """Installs this program and its services: the watch, from now on, and the boot for later
    starts, where no agent of the cloud runs it."""
    if not FIRST_BOOT.exists():
        FIRST_BOOT.touch()  # its time is what counts
    here = Path(sys.argv[0])
    if here.resolve() != PROGRAM.resolve():
        PROGRAM.write_bytes(here.read_bytes())
    try:
        UNITS.mkdir(parents=True, exist_ok=True)
        again = "Restart=always\nRestartSec=60\n"
        write_unit(IDLE_UNIT, "Ends this machine when nobody uses it", " idle", again)
        run("systemctl", "daemon-reload")
        run("systemctl", "enable", "--now", IDLE_UNIT)
    except (Failure, OSError) as error:
        mark("idle", "note", f"the watch runs without its service: {error}")
        in_background("idle")
    if machine.cloud.boots_again:
        return
    try:
        write_unit(BOOT_UNIT, "Boots this machine's model server", "", "")
        run("systemctl", "enable", BOOT_UNIT)
    except (Failure, OSError) as error:
        mark("idle", "note", f"a later start of this machine will not boot: {error}")


def write_unit(name: str, what: str, act: str, more: str) -> None:
    words = {"what": what, "act": act, "more": more, "program": PROGRAM, "python": sys.executable}
    (UNITS / name).write_text(UNIT_TEXT.format(**words))


def watch(machine: Machine) -> int:
    """Ends the machine when nobody has used it for its idle minutes, or when its time is over."""
    while True:
        document = {**DEFAULTS, **stored(DOCUMENT, {})}
        with suppress(Exception):  # whatever is wrong with the page, the time goes on
            note_use(document)
        left = time_left(machine, document)
        if left["life_left_s"] <= 0:
            return end_machine(machine, document, f"its {document['life_s']} s are over")
        if left.get("idle_left_s", 1) <= 0:
            return end_machine(machine, document, f"no use for {document['idle_minutes']} minutes")
        time.sleep(MINUTE_S)


def time_left(machine: Machine, document: Document) -> dict[str, int]:
    """Seconds until the machine ends because its time is over, or for idleness, if it may.

    Idle is counted from the last use, from when it was ready or has failed, or, before either,
    from when it should have been ready.
    """
    now, marks = time.time(), latest_boot(machine.first)
    first = FIRST_BOOT.stat().st_mtime if FIRST_BOOT.exists() else now
    since = (marks[0]["at"] if marks else first) + machine.serving.ready_minutes * MINUTE_S
    for one in marks:
        if one["state"] == "failed" or (one["phase"], one["state"]) == READY:
            since = one["at"]
    since = max(since, stored(USE, {}).get("at", 0))
    left = {"life_left_s": math.ceil(first + document["life_s"] - now)}
    if document["idle_minutes"]:
        left["idle_left_s"] = math.ceil(since + document["idle_minutes"] * MINUTE_S - now)
    return left


def note_start() -> None:
    """That somebody starts the server counts as use."""
    USE.write_text(json.dumps({**stored(USE, {}), "at": time.time()}))


def note_use(document: Document) -> None:
    """Notes the time if requests are being served, or were since the last look."""
    use = {"at": 0, "seen": {}, **stored(USE, {})}
    totals: dict[str, float] = {}
    try:
        page = ask(document["metrics"])
    except (Failure, KeyError):
        return
    for name, value in METRIC.findall(page):
        if name in document["used"]:
            with suppress(ValueError):
                totals[name] = totals.get(name, 0) + float(value)
    busy = not totals  # the names have changed: nobody can tell, so this ends nothing
    for name, total in totals.items():
        counts = name.endswith(("_total", "_count", "_sum"))
        busy |= total != use["seen"].get(name, total) or bool(total and not counts)
    USE.write_text(json.dumps({"at": time.time() if busy else use["at"], "seen": totals}))


def end_machine(machine: Machine, document: Document, why: str) -> int:
    """Has the provider delete this machine where a shutdown does not, and shuts it down."""
    mark("idle", "begin", why)
    machine.cloud.leave(document)
    mark("idle", "done", "this machine shuts down")
    run("shutdown", "-h", "now")
    return 0


# ── machine / acts ────────────────────────────────────────────────────────────────────────────────
# The command line of a machine's program: the boot, the watch, and the acts that one asks for.
#
# An act's data are one JSON object in URL-safe base64; what it says has at most as many bytes as
# its
# `limit`. Knows a cloud and a model server by their protocols only.

MOST = 60_000  # bytes of an answer
# Where programs lie besides the PATH of agents and services, which may be none.
FOLDERS = ("usr/local/sbin", "usr/local/bin", "usr/sbin", "usr/bin", "sbin", "bin", "snap/bin")


def main(argv: list[str], machine: Machine) -> int:
    """The command line; returns the exit status."""
    os.environ.setdefault("HOME", "/root")  # a start-up agent sets none, and gcloud wants one
    os.environ["DEBIAN_FRONTEND"] = "noninteractive"
    folders = [os.environ.get("PATH", ""), *(str(ROOT / f) for f in FOLDERS)]
    os.environ["PATH"] = os.pathsep.join(filter(None, folders))
    if not argv:
        return boot(machine)
    if argv == ["idle"]:
        return watch(machine)
    words = ["boot_log", "status", *machine.serving.acts, *machine.cloud.acts]
    try:
        word, data = argv
        asked = {"lines": 200, "limit": MOST, **json.loads(base64.urlsafe_b64decode(data + "==="))}
        given = {"lines": asked["lines"], "limit": asked["limit"]}
        for key, bounds in {"lines": range(1, 5001), "limit": range(500, MOST + 1)}.items():
            if word not in words or type(given[key]) is not int or given[key] not in bounds:
                raise ValueError(key)
    except (ValueError, TypeError):
        print(f"usage: boot.py [idle | ACT DATA], ACT: {' '.join(words)}", file=sys.stderr)
        return 2
    try:
        sys.stdout.buffer.write(f"{act(machine, word, given)}\n".encode())
    except (Failure, OSError) as error:
        print(f"boot.py: {clean(str(error))}", file=sys.stderr)
        return 1
    return 0


def boot(machine: Machine) -> int:
    """From an empty machine, or one that was started again, to a model that answers."""
    HOME.mkdir(parents=True, exist_ok=True)
    lock = (HOME / "lock").open("w")  # held until this process ends
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        print("a boot is under way already")
        return 0
    progress = Progress(machine.first)
    try:
        start_services(machine)
        document = checked(machine.cloud.document(), machine)
        DOCUMENT.write_text(json.dumps(document))
        machine.cloud.check(document, progress)
        machine.serving.get(document, progress)
        machine.serving.follow(document, progress)
    except Exception as error:  # whatever it is, the console has to tell it
        kind = "" if isinstance(error, Failure) else f"{type(error).__name__}: "
        progress.tell("failed", f"{kind}{error}")
        return 1
    machine.cloud.copy_cache(document, "save", progress)
    return 0


def act(machine: Machine, word: str, given: dict[str, int]) -> str:
    """Does what the word says and returns what there is to say about it."""
    document = stored(DOCUMENT, None)
    if word == "boot_log":
        text = LOG.read_text(errors="replace") if LOG.exists() else ""
        text = "\n".join(text.splitlines()[-given["lines"] :])
    elif word == "status":
        return status(machine, document, given["limit"])
    elif word in machine.cloud.acts:
        text = machine.cloud.act(word)
    elif document is None:
        raise Failure("no boot document has come to this machine yet: see its boot log")
    else:
        text = machine.serving.act(word, document, given)
    return shown(text).encode()[-given["limit"] + 1 :].decode("utf-8", "ignore")


def status(machine: Machine, document: Document | None, limit: int) -> str:
    """The server, the boot, the machine's room, and when it will end, as JSON; bytes and seconds.

    Marks of the boot are left out, the oldest first, until it is no longer than `limit` bytes.
    """
    told: dict[str, Any] = {machine.serving.kind: None, "problem": ""}
    try:
        if document:
            told[machine.serving.kind] = machine.serving.status(document)
    except Failure as failure:
        told["problem"] = clean(str(failure))
    disk, memory = shutil.disk_usage(ROOT), ROOT / "proc/meminfo"
    room = dict(re.findall(r"(\w+):\s+(\d+)", memory.read_text() if memory.exists() else ""))
    marks = latest_boot(machine.first)
    over = any(m["state"] == "failed" or (m["phase"], m["state"]) == READY for m in marks)
    told["booting"] = bool(marks) and not over
    told["boot"] = marks[-100:]
    told["disk"] = {"total": disk.total, "free": disk.free}
    told["memory"] = {k: int(room.get(f"Mem{k}", 0)) * 1024 for k in ("Total", "Available")}
    told.update(time_left(machine, {**DEFAULTS, **(document or {})}))
    while len(json.dumps(told)) >= limit and told["boot"]:
        del told["boot"][0]
    return json.dumps(told)


# ── machine / systemd ─────────────────────────────────────────────────────────────────────────────
# One service of systemd's on a machine: its unit file, its state, its part of the journal.
#
# Knows no cloud and not what the service serves.

UNIT_KEYS = "ActiveState SubState Result NRestarts ExecMainStatus ExecMainStartTimestamp".split()
UNIT_COMPLAINT = re.compile(r" E |rror|abort|failed")  # a line that is shown before others


class Unit:
    """The service of that name, which people call `program`. Every verb may raise Failure."""

    def __init__(self, name: str, program: str) -> None:
        self.name, self.program = name, program
        self.path = UNITS / name
        self.since = 0.0  # when this program started it; what was said before is not of that start

    def install(self, text: str) -> bool:
        """The unit file as `text`; whether that is another one than before."""
        if self.path.exists() and self.path.read_text() == text:
            return False
        self.path.write_text(text)
        run("systemctl", "daemon-reload")
        return True

    def change(self, word: str) -> None:
        """start, stop or restart."""
        with suppress(Failure):  # after too many failures systemd would refuse it
            run("systemctl", "reset-failed", self.name)
        run("systemctl", word, self.name)

    def told(self) -> dict[str, str]:
        """What systemd says of it, by its own names."""
        text = run("systemctl", "show", self.name, f"--property={','.join(UNIT_KEYS)}")
        told = dict(line.split("=", 1) for line in text.splitlines() if "=" in line)
        return {key: told.get(key, "") for key in UNIT_KEYS}

    def runs(self) -> bool:
        return self.path.exists() and self.told()["ActiveState"] in ("active", "activating")

    def lines(self, count: int, since: float = 0) -> list[str]:
        """The last lines that it wrote, both streams; since that moment, in Unix seconds."""
        argv = ["--unit", self.name, "--lines", str(count), "--output", "cat", "--no-pager"]
        argv += ["--since", f"@{since:.3f}"] if since else []
        lines = run("journalctl", *argv).splitlines()
        return [line for line in lines if line != "-- No entries --"]

    def refuse_ended(self, first: Mapping[str, str]) -> None:
        """Raises Failure, with what it said, where it does not run any more or runs anew since it
        was as in `first`. What does not load once never will."""
        now = self.told()
        # systemd waits before it starts it again, and knows until then why it ended.
        again = now["SubState"] == "auto-restart" or now["NRestarts"] != first["NRestarts"]
        if again or now["ActiveState"] in ("failed", "inactive"):
            why = "systemd starts it again" if again else f"status {now['ExecMainStatus']}"
            why += ", OOMKilled" if now["Result"] == "oom-kill" else ""
            lines = [line for line in self.lines(2000, self.since) if line.strip()]
            bad = [line for line in lines if UNIT_COMPLAINT.search(line)]
            words = " | ".join(clean(line, 140) for line in bad[:3] or lines[-3:])
            raise Failure(f"{self.program} ended ({why}): {words or 'it wrote nothing'}")

    def ready(self, progress: Progress, began: float, loaded: str = "") -> None:
        """Marks that it is loaded, and that it answers since `began` (monotonic seconds)."""
        progress.tell("done", loaded)
        progress.phase = "ready"
        progress.tell("done", f"it answers after {int(time.monotonic() - began)} s")

    def answers(self, document: dict[str, Any], first: Mapping[str, str]) -> bool:
        """Whether it is healthy by now, after a look at whether it still runs. Waits a moment
        where it is not."""
        if healthy(document):
            return True
        self.refuse_ended(first)
        time.sleep(MINUTE_S / 30)
        return False

    def act(self, word: str) -> str:
        """It is started, stopped, restarted or removed; what is so already is left so."""
        there = self.path.exists()
        running = self.runs()
        if word == "rm":
            if there:
                run("systemctl", "disable", "--now", self.name)
                self.path.unlink()
                run("systemctl", "daemon-reload")
            return f"{self.program} was removed" if there else f"{self.program} is not there"
        if word == "stop":
            if running:
                run("systemctl", "stop", self.name)
            return f"{self.program} was stopped" if running else f"{self.program} does not run"
        if word == "start" and running:
            return f"{self.program} runs already"
        if there:
            self.change(word)
        note_start()
        in_background()  # a boot, which makes the service or only follows it
        done = f"{self.program} was {word}ed"
        return done if there else f"{self.program} is being made: see the boot log"

    def status(self, image: str) -> dict[str, Any] | None:
        """Serving.status; `image` is what it was made of. None where there is no unit."""
        if not self.path.exists():
            return None
        now = self.told()
        running = now["ActiveState"] == "active"
        waits = now["SubState"] == "auto-restart"
        return {
            "state": "running" if running else "restarting" if waits else "exited",
            "exit_code": int(now["ExecMainStatus"] or 0),
            "out_of_memory": now["Result"] == "oom-kill",
            "restarts": int(now["NRestarts"] or 0),
            "started_at": now["ExecMainStartTimestamp"],
            "image": image,
        }


# ── machine / jax ─────────────────────────────────────────────────────────────────────────────────
# The JAX engine under systemd: its release is laid down, made ready, started and kept going.
#
# Implements the protocol of a model server. It listens on loopback alone, offline, on the TPU
# alone.
# Knows no provider: that is handed in, with what brings the engine's packed file at the first boot.

JAX_FIRST = "environment"  # the phase that a boot begins with
JAX_UNIT = "gemma4-jax.service"
# Status 2 is a refusal (a model, an argument, memory that is not there): it would come again.
JAX_UNIT_FORM = """[Unit]
Description=jax_server.py, release {key}
StartLimitIntervalSec=600
StartLimitBurst=5
[Service]
ExecStart={command}
Environment=HOME=/root JAX_PLATFORMS=tpu HF_HUB_OFFLINE=1 DO_NOT_TRACK=1 PYTHONUNBUFFERED=1
Restart=on-failure
RestartPreventExitStatus=2
RestartSec=5
"""
JAX_STEP = re.compile(r"^jax_server: +(\d{1,3})% (.+)$")
JAX_LOAD_MINUTES = 45  # from its start to its first answer; one that takes longer has failed


class JaxServing:
    """jax_server.py of one document's `release`, or of the one that was deployed since."""

    kind = "server"
    forms: Mapping[str, str] = {}
    acts: Sequence[str] = ("logs", "start", "stop", "restart", "deploy", "rollback", "verify")
    ready_minutes = 90

    def __init__(self, cloud: Cloud, engine: Callable[[], str], delivery: str = "") -> None:
        """`engine` brings the packed file of the document's release; `delivery` is what came with
        this very call, a JSON object with a `release` and its `engine`."""
        self.cloud, self.engine, self.delivery = cloud, engine, delivery
        self.unit = Unit(JAX_UNIT, ENGINE_FILE)

    def rules(self, document: dict[str, Any]) -> Mapping[str, object]:
        return release_rules(document["release"])

    def get(self, document: dict[str, Any], progress: Progress) -> None:
        """Has it running: the release with its packages and its checkpoint, under a unit of this
        very command. Where it runs already it holds the chip, and the chip is not looked at."""
        progress.begin(JAX_FIRST)
        if not kept_releases():
            make_current(lay_down(document["release"], tried(30, self.engine, transient)))
        key, release = current_release()
        python = get_environment(release, progress)
        progress.begin("weights", release["repository"])
        folder = get_checkpoint(python, release, progress)
        progress.begin("device")
        seen = stored(DEVICE, {}) if self.unit.runs() else see_device(python)
        progress.tell("done", device_words(seen) if seen else "the server holds it")
        self.cloud.copy_cache(document, "restore", progress)
        progress.begin("load", f"release {key}")
        self.start(document, key, python, folder)
        forget_environments([stored(RELEASES / k / "release.json", {}) for k in kept_releases()])

    def start(self, document: dict[str, Any], key: str, python: Path, folder: Path) -> None:
        """The service as the release has it, running. A changed one begins anew."""
        _, release = current_release()
        port = urlsplit(document["health"]).port
        own = ["--model", folder, "--host", "127.0.0.1", "--port", port]
        own += ["--compile-cache", ROOT / document["folder"][1:] / "jax"]
        words = [python, RELEASES / key / ENGINE_FILE, *own, *release["serve"]]
        command = " ".join(map(str, words))
        changed = self.unit.install(JAX_UNIT_FORM.format(key=key, command=command))
        self.unit.since = time.time()
        self.unit.change("restart" if changed else "start")

    def follow(self, document: dict[str, Any], progress: Progress) -> None:
        """Marks each step that its log tells, until it answers. A start anew is a failure."""
        began, first, seen = time.monotonic(), self.unit.told(), set[str]()
        while time.monotonic() - began < JAX_LOAD_MINUTES * MINUTE_S:
            answers = self.unit.answers(document, first)
            for step in filter(None, map(JAX_STEP.match, self.unit.lines(500, self.unit.since))):
                share, what = step.groups()
                if what.startswith("compiling") and progress.phase == "load":
                    progress.tell("done")
                    progress.begin("compile", what)
                elif what not in seen:
                    progress.tell("note", f"{what} ({share} %)")
                seen.add(what)
            if answers:
                return self.unit.ready(progress, began)
        raise Failure(f"{ENGINE_FILE} does not answer after {JAX_LOAD_MINUTES} minutes")

    def act(self, word: str, document: dict[str, Any], given: Mapping[str, int]) -> str:
        """The log's end, the chip, another release, or the service started, stopped, restarted."""
        if word == "logs":
            return "\n".join(self.unit.lines(given["lines"]))
        if word == "verify":
            return json.dumps(self.verified())
        if word == "deploy":
            return self.deployed()
        if word == "rollback":
            return self.changed(release_before())
        return self.unit.act(word)

    def verified(self) -> dict[str, Any]:
        """What JAX sees, measured now; while the engine holds the chip, what was seen last."""
        if self.unit.runs():
            return {**stored(DEVICE, {}), "serving": True}
        _, release = current_release()
        if not release:
            raise Failure("no release of the engine is on this machine yet")
        refuse_while_booting()
        return {**see_device(get_environment(release, Silence(JAX_FIRST))), "serving": False}

    def deployed(self) -> str:
        """The release that came with this call, laid down; a boot then makes it serve."""
        try:
            told = json.loads(self.delivery)
            release, packed = dict(told["release"]), str(told["engine"])
            wrong = [key for key, holds in release_rules(release).items() if not holds]
        except (ValueError, TypeError, LookupError) as error:
            raise Failure(f"the delivery cannot be read: {type(error).__name__}") from None
        if wrong:
            raise Failure(f"the delivery is not valid: {wrong[0]}")
        if release_key(release) == (kept_releases() or [""])[0] and self.unit.runs():
            return f"release {release_key(release)} serves already"
        refuse_while_booting()
        return self.changed(lay_down(release, packed))

    def changed(self, key: str) -> str:
        """Another release from now on: the running one is stopped, and a boot starts the new."""
        refuse_while_booting()
        if self.unit.runs():
            run("systemctl", "stop", JAX_UNIT)
        make_current(key)
        mark(JAX_FIRST, "begin", f"release {key}")  # what an earlier boot has said is over
        note_start()
        in_background()
        return f"release {key} is laid down and is being started"

    def status(self, document: dict[str, Any]) -> dict[str, Any] | None:
        return self.unit.status(f"release {(kept_releases() or [''])[0]}")


class Silence(Progress):
    """Marks nothing: what is done is no boot."""

    def begin(self, phase: str, words: str = "") -> None:
        self.phase = phase

    def tell(self, state: str, words: str = "") -> None:
        pass


def refuse_while_booting() -> None:
    """Raises Failure while a boot is under way: it would go on with the release that it began."""
    with (HOME / "lock").open("w") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise Failure("a boot is under way on this machine: wait for its end") from None


# ── programs / jax_boot ───────────────────────────────────────────────────────────────────────────

#!/usr/bin/env python3


if __name__ == "__main__":
    cloud = Google()
    engine = JaxServing(
        cloud,
        lambda: metadata("attributes/gemma4-engine"),
        str(globals().get("GEMMA4_DELIVERY", "")),
    )
    sys.exit(main(sys.argv[1:], Machine(cloud, engine, first=JAX_FIRST)))
