#!/usr/bin/env python3
# Built from forge/programs/ec2_llama_boot.py by `python3 -m forge.build`: edit it there.

"""Boots an EC2 machine that builds llama-server for its GPU and serves one GGUF; ends it when idle.

    ec2_llama_boot.py     at its first start by cloud-init, as root, and later by systemd
    boot.py idle          the watch that ends a machine without use, by systemd
    python3 - ACT DATA    through Systems Manager. ACT: boot_log status logs start stop restart rm
                          build gpu. DATA: a JSON object in URL-safe base64: lines, limit (bytes)

What differs between machines comes as one JSON document that the user data laid down; nothing is
filled into this text. Steps are marked on the console, and one that fails says why. Python 3.10, no
package, no shell. Exit status: 0, 1 a step failed, 2 wrong usage.
"""

# Contents, by line:
#    51 machine / console: What a machine's program is made of: marks on the console, its files, …
#   212 machine / llama_build: Makes llama-server for the machine's own GPU from the pinned …
#   451 machine / llama_weights: Fetches one GGUF file from the model hub: of one commit, resumed, …
#   585 machine / machine: A machine as its program sees it: the cloud that rented it out, the …
#   699 machine / ec2: A machine of EC2 with an NVIDIA GPU: its order, its secret and its bucket, …
#   822 machine / watch: Ends a machine that nobody uses or whose time is over; the services that …
#   938 machine / acts: The command line of a machine's program: the boot, the watch, and the acts …
#  1046 machine / systemd: One service of systemd's on a machine: its unit file, its state, its …
#  1162 machine / llama: llama-server under systemd: it is built on the machine, gets its weights, …
#  1275 programs / ec2_llama_boot: Boots an EC2 machine that builds llama-server for its GPU and …

from __future__ import annotations

import base64
import fcntl
import hashlib
import json
import math
import os
import platform
import re
import shutil
import subprocess
import sys
import tarfile
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import closing, suppress
from dataclasses import dataclass
from http.client import HTTPConnection, HTTPException, HTTPResponse, HTTPSConnection
from pathlib import Path
from typing import Any, Protocol, TypeVar
from urllib.parse import quote, urljoin, urlsplit, urlunsplit

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


# ── machine / llama_build ─────────────────────────────────────────────────────────────────────────
# Makes llama-server for the machine's own GPU from the pinned source, or finds it made already.
#
# One program for one architecture, kept under a key of all that it was made of. Knows no model, no
# provider and no way of serving.

LLAMA_NAME = "llama-server"
BUILD_LOG, BUILD_STATE = HOME / "build.log", HOME / "build.json"
BUILD_MINUTES = 90  # one that takes longer has failed
BUILD_FORMS = {  # what the document's words about the build may be
    "source": r"[a-z][a-z0-9-]{0,60}==[0-9][0-9.]{0,20}",
    "sha256": r"[0-9a-f]{64}",
    "root": r"\w[\w.-]{0,80}/(\w[\w.-]{0,80}/)?",
}
BUILD_FLAG = r"-D[A-Z][A-Z0-9_]{1,60}=[\w.-]{1,60}"
WORK, SWAP = HOME / "llama-work", HOME / "build.swap"
LEFT_OUT = ("models/", "docs/", "media/", "benches/", "tests/")  # no part of the server
TOOLS = {"cmake": "cmake", "ninja": "ninja-build", "g++": "g++", "pip3": "python3-pip"}
BUILD_DISK = 4_000_000_000  # bytes: archive, source, objects, and the program twice
# Memory for each file that compiles at a time. The most that nvcc 13.0.88 on x86-64 held for one
# for SM 7.5 was 0.68 GiB (b11434, 2026-11-30). Graviton2 and other releases of nvcc are unmeasured,
# and a compiler that the kernel kills costs the whole build, so it is three times that.
JOB_BYTES, SPARE_BYTES = 2 << 30, 1 << 30
ERROR_SIGNS = re.compile(r"error|kill|no space left|do not match", re.I)


def get_llama_server(document: dict[str, Any], progress: Progress) -> Path:
    """The program, made of this very source for this very machine; it has seen its GPU."""
    release = cuda_release()
    folder, began = kept_folder(document, release), int(time.time())
    told: dict[str, Any] = {"state": "running", "began": began, "cuda": release}
    known = kept_build(folder)
    if not known:
        note_build(told)
        try:
            known = make_llama_server(document["build"], folder, told, progress)
        except BaseException:
            note_build(told | {"state": "failed", "seconds": int(time.time()) - began})
            raise
    device = seen_device(folder / LLAMA_NAME)
    note_build({**told, **known, "state": "done", "device": device})
    progress.tell("done", f"{known['version']}, on {device}")
    return folder / LLAMA_NAME


def cuda_release() -> str:
    """The release of the CUDA toolkit that the machine's image brings, such as 13.0."""
    if shutil.which("nvcc") is None:  # an agent of start-up does not have it on its PATH
        os.environ["PATH"] += f"{os.pathsep}{ROOT / 'usr/local/cuda/bin'}"
    try:
        found = re.search(r"\brelease (\d+\.\d+)", run("nvcc", "--version"))
    except Failure as failure:
        raise Failure(f"{failure}: the machine image has no CUDA toolkit to build with") from None
    return found[1] if found else "unknown"


def kept_folder(document: dict[str, Any], release: str) -> Path:
    """Where a build of this source with these flags, toolkit and processor lies or will lie.

    A program made for one processor may stop with an illegal instruction on another, and one that
    is linked to one toolkit's libraries does not start beside another's.
    """
    build, path = document["build"], ROOT / "proc/cpuinfo"
    text = path.read_text() if path.exists() else ""
    rows = re.findall(r"^(?:model name|flags|Features|CPU part)\s*:.*$", text, re.M)
    what = [build["sha256"], *build["flags"], release, platform.machine(), *dict.fromkeys(rows)]
    key = hashlib.sha256("\n".join(what).encode()).hexdigest()[:12]
    return ROOT / str(document["folder"])[1:] / f"llama-{platform.machine()}-{key}"


def kept_build(folder: Path) -> dict[str, Any]:
    """What is written of the build in `folder`, if the program is the one that it speaks of."""
    record, program = stored(folder / "build.json", {}), folder / LLAMA_NAME
    if not program.is_file() or record.get("sha256") != file_hash(program):
        return {}
    program.chmod(0o755)  # a bucket keeps no modes
    return dict(record)


def file_hash(path: Path) -> str:
    digest = hashlib.sha256()
    with path.open("rb") as file:
        while piece := file.read(1 << 20):
            digest.update(piece)
    return digest.hexdigest()


def make_llama_server(
    build: dict[str, Any], folder: Path, told: dict[str, Any], progress: Progress
) -> dict[str, Any]:
    """From the archive to the kept program. One that was broken off goes on where it was."""
    work, began = WORK / folder.name, time.time()
    work.mkdir(parents=True, exist_ok=True)
    free = shutil.disk_usage(work).free
    if free < BUILD_DISK:
        raise Failure(f"no space: a build takes {BUILD_DISK / 1e9:g} GB, {free / 1e9:.2f} are free")
    get_tools(progress)
    source, objects = get_source(build, work, progress), work / "objects"
    configure = ["cmake", "-G", "Ninja", "-S", str(source), "-B", str(objects), *build["flags"]]
    work_on(configure, 10)
    jobs = make_swap(progress)
    try:
        argv = ["cmake", "--build", str(objects), "--target", LLAMA_NAME, "--parallel", str(jobs)]
        work_on(argv, BUILD_MINUTES, lambda: note_files(told, progress))
    finally:
        with suppress(Failure):
            run("swapoff", str(SWAP))
        SWAP.unlink(missing_ok=True)
    made = objects / "bin" / LLAMA_NAME
    version = run(str(made), "--version", complaints=BOTH).partition("\n")[0]
    folder.mkdir(parents=True, exist_ok=True)
    for path in (made, source / "LICENSE"):
        shutil.copy2(path, folder / path.name)
    record = {"version": clean(version.replace("version: ", ""), 100), **build}
    record |= {"cuda": told["cuda"], "files": told["files"], "seconds": int(time.time() - began)}
    record["sha256"], record["source_sha256"] = file_hash(folder / LLAMA_NAME), build["sha256"]
    (folder / "build.json").write_text(json.dumps(record))  # last: with it the build is whole
    shutil.rmtree(WORK, ignore_errors=True)
    return record


def get_tools(progress: Progress) -> None:
    """What building takes besides the toolkit, installed where the image lacks it."""
    missing = [package for name, package in TOOLS.items() if shutil.which(name) is None]

    def install() -> str:
        run("apt-get", "update", minutes=5)
        return run("apt-get", "install", "--yes", *missing, minutes=10)

    if missing:
        progress.tell("note", f"installing {' '.join(missing)}")
        tried(30, install, lambda _: True)  # another program may hold apt's lock for minutes


def get_source(build: dict[str, Any], work: Path, progress: Progress) -> Path:
    """The unpacked source. pip fetches it and compares its hash; so does this, before unpacking."""
    source, downloads, partial = (work / name for name in ("source", "download", "partial"))
    if source.is_dir():
        return source
    progress.tell("note", f"fetching {build['source']}")
    downloads.mkdir(exist_ok=True)
    wanted, name = downloads / "requirements.txt", build["source"].partition("==")[0]
    wanted.write_text(f"{build['source']} --hash=sha256:{build['sha256']}\n")
    argv = ["pip3", "download", "--quiet", "--disable-pip-version-check", "--no-deps"]
    argv += ["--no-binary", name, "--require-hashes", "-r", str(wanted), "--dest", str(downloads)]
    tried(3, lambda: work_on(argv, 15), lambda why: "HASH" not in str(why))
    archives = list(downloads.glob("*.tar.gz"))
    if len(archives) != 1 or file_hash(archives[0]) != build["sha256"]:
        raise Failure(f"what pip fetched as {build['source']} is not the archive it should be")
    shutil.rmtree(partial, ignore_errors=True)
    with tarfile.open(archives[0]) as packed:
        packed.extraction_filter = getattr(tarfile, "data_filter", lambda member, _: member)
        for member in packed:
            inner = member.name[len(build["root"]) :]
            if member.name.startswith(build["root"]) and not inner.startswith(LEFT_OUT):
                member.name = inner
                packed.extract(member, partial)
    shutil.rmtree(downloads)
    partial.rename(source)
    return source


def make_swap(progress: Progress) -> int:
    """How many files may compile at a time: as many as there are cores, with swap for them where
    memory is short, or as many as memory holds."""
    jobs, path = len(os.sched_getaffinity(0)), ROOT / "proc/meminfo"
    rows = dict(re.findall(r"(\w+):\s+(\d+)", path.read_text() if path.exists() else ""))
    have = 1024 * sum(int(rows.get(key, 0)) for key in ("MemAvailable", "SwapFree"))
    size = -(-(jobs * JOB_BYTES + SPARE_BYTES - have) >> 30)
    if not rows or size <= 0:
        return jobs
    try:
        SWAP.unlink(missing_ok=True)
        run("fallocate", "--length", f"{size}GiB", str(SWAP))
        SWAP.chmod(0o600)
        run("mkswap", str(SWAP))
        run("swapon", str(SWAP))
    except (Failure, OSError) as error:
        jobs = max(1, min(jobs, (have - SPARE_BYTES) // JOB_BYTES))
        progress.tell("note", f"no swap ({error}): {jobs} files at a time")
    else:
        progress.tell("note", f"{size} GiB of swap for {jobs} files at a time")
    return jobs


def work_on(argv: list[str], minutes: int, look: Callable[[], None] = lambda: None) -> str:
    """Runs a tool, its output in BUILD_LOG, with a `look` every half minute and at its end.

    Raises Failure in the words of its first error.
    """
    with BUILD_LOG.open("w") as log:
        child = subprocess.Popen(argv, stdin=NOTHING, stdout=log, stderr=BOTH)
        try:
            for _ in range(2 * minutes):
                with suppress(subprocess.TimeoutExpired):
                    child.wait(max(MINUTE_S / 2, 0.2))
                look()
                if child.returncode is not None:
                    break
        finally:
            child.kill()
            ended = child.wait()
    if ended:
        lines = list(
            filter(None, map(str.strip, BUILD_LOG.read_text(errors="replace").split("\n")))
        )
        first = next((n for n, line in enumerate(lines) if ERROR_SIGNS.search(line)), -2)
        said = " ".join(lines[first:][:2]) or f"status {ended}"
        raise Failure(f"{' '.join(argv[:2])}: {clean(said, 300)}")
    return ""


def note_files(told: dict[str, Any], progress: Progress) -> None:
    told["files"], told["of"] = built_files()
    note_build(told)
    progress.tell("note", f"{told['files']} of {told['of']} files")


def built_files() -> tuple[int, int]:
    """How many of how many files ninja has made, by its log; both 0 where it has none yet."""
    steps = re.findall(r"^\[(\d+)/(\d+)\]", BUILD_LOG.read_text(errors="replace"), re.M)
    return (int(steps[-1][0]), int(steps[-1][1])) if steps else (0, 0)


def note_build(told: dict[str, Any]) -> None:
    with suppress(OSError):
        BUILD_STATE.write_text(json.dumps(told))


def seen_device(program: Path) -> str:
    """The GPU that the program computes on, in its own words. Raises Failure where it sees none:
    it would serve all the same, on the processor."""
    said = run(str(program), "--list-devices", complaints=BOTH)
    found = re.search(r"^\s+(CUDA\d+: .+)$", said, re.M)
    if not found:
        raise Failure(f"the program that was built sees no GPU: {clean(said, 300)}")
    return clean(found[1], 120)


# ── machine / llama_weights ───────────────────────────────────────────────────────────────────────
# Fetches one GGUF file from the model hub: of one commit, resumed, its size and hash compared.
#
# Speaks the Hub's HTTP interface as huggingface_hub 2.4 does. Knows no model server and no cloud.

HUB = os.environ.get("GEMMA4_HUB_URL", "https://huggingface.co")
MODEL = HOME / "weights/model.gguf"  # under this name whatever the repository calls it
WEIGHT_FORMS = {  # what the document's words about the weights may be
    "repository": r"[\w-][\w.-]{0,95}/[\w-][\w.-]{0,95}",
    "revision": r"([0-9a-f]{40})?",
    "file": r"(\w[\w.-]{0,200}\.gguf)?",
    "sha256": r"([0-9a-f]{64})?",
}
BESIDE = re.compile(r"mmproj|mtp|draft|imatrix", re.I)  # other files than the text model's
SPARE_DISK = 500_000_000  # bytes that stay free
LICENCE = "accept the model's licence on the Hub, and save_hf_token with a token of that account"
HUB_REMEDIES = {401: LICENCE, 403: LICENCE, 404: "check MODEL_NAME and MODEL_REVISION"}


def get_weights(wanted: dict[str, str], token: str, progress: Progress) -> None:
    """The file as MODEL: the one that is there already, or fetched. Raises Failure."""
    folder, record = MODEL.parent, MODEL.with_name("weights.json")
    known = stored(record, {})
    if known.get("wanted") == wanted and MODEL.exists() and MODEL.stat().st_size == known["size"]:
        return progress.tell("done", f"{known['file']} is here already")
    found = found_file(wanted, token)
    folder.mkdir(parents=True, exist_ok=True)
    part = folder / f"{found['sha256'][:16]}.part"
    for old in folder.iterdir():
        if old != part:
            old.unlink()
    part.touch()
    size, free = found["size"], shutil.disk_usage(folder).free + part.stat().st_size
    if size + SPARE_DISK > free:
        raise Failure(f"no space: {size / 1e9:.2f} GB of weights, {free / 1e9:.2f} are free")
    url = f"{HUB}/{found['repository']}/resolve/{found['commit']}/{quote(found['file'])}"
    tried(30, lambda: receive(url, token, part, size, progress), transient)
    if part.stat().st_size != size or file_hash(part) != found["sha256"]:
        part.unlink()
        raise Failure(f"{found['file']} came, and is not the file of that size and hash")
    part.rename(MODEL)
    record.write_text(json.dumps({"wanted": wanted, **found}))
    progress.tell("done", f"{found['file']}, {size / 1e9:.2f} GB, of the right hash")


def found_file(wanted: dict[str, str], token: str) -> dict[str, Any]:
    """The one file that is meant: its name, commit, size in bytes and SHA-256, by the Hub's word.

    A hash that the document gives goes before the Hub's. Raises Failure.
    """
    repository = wanted["repository"]
    place = f"{HUB}/api/models/{repository}/revision/{wanted['revision'] or 'main'}?blobs=true"
    try:
        told = json.loads(tried(6, lambda: hub_text(place, token), transient))
        files, commit = {one["rfilename"]: one for one in told["siblings"]}, told["sha"]
    except (ValueError, LookupError, TypeError):
        raise Failure(f"what the Hub says of {repository} cannot be read") from None
    fit = [name for name in files if name.endswith(".gguf") and not BESIDE.search(name)]
    names = [wanted["file"]] if wanted["file"] in files else [] if wanted["file"] else fit
    if len(names) != 1:
        listed = ", ".join(names or files)
        raise Failure(f"{repository} has no one such file ({clean(listed)}): set MODEL_FILE")
    about = files[names[0]]
    size, digest = about.get("size"), wanted["sha256"] or (about.get("lfs") or {}).get("sha256")
    if type(size) is not int or not re.fullmatch("[0-9a-f]{64}", str(digest)):
        raise Failure(f"the Hub tells no size and hash of {names[0]}: set MODEL_SHA256")
    return {"repository": repository, "file": names[0], "commit": commit, "size": size} | {
        "sha256": digest
    }


def receive(url: str, token: str, part: Path, size: int, progress: Progress) -> str:
    """Appends to `part` what it lacks, and tells how far it is every half minute."""
    have = part.stat().st_size
    if have >= size:
        return ""
    link, answer = opened(url, token, have)
    told = time.monotonic()
    with closing(link), part.open("ab") as file:
        if answer.status == 200:  # all of it, whatever was asked for
            file.truncate(0)
            have = 0
        try:
            while have < size and (piece := answer.read(min(1 << 20, size - have))):
                have += file.write(piece)
                if time.monotonic() - told > MINUTE_S / 2:
                    told = time.monotonic()
                    progress.tell("note", f"{have / 1e9:.2f} of {size / 1e9:.2f} GB")
        except (HTTPException, TimeoutError, ConnectionError) as error:
            raise Failure(f"the transfer broke off: {error}", 0) from None
    if have < size:
        raise Failure("the transfer broke off", 0)
    return ""


def hub_text(url: str, token: str) -> str:
    link, answer = opened(url, token)
    try:
        with closing(link):
            return answer.read(8_000_000).decode("utf-8", "replace")
    except (OSError, HTTPException) as error:
        raise Failure(f"no whole answer: {error}", 0) from None


def opened(url: str, token: str, begin: int = 0) -> tuple[HTTPConnection, HTTPResponse]:
    """The connection and an answer from byte `begin` on, redirections followed; the token goes to
    the Hub and to nobody whom it points to. Raises Failure."""
    hub = urlsplit(HUB)
    for _ in range(5):
        parts = urlsplit(url)
        headers = {"Range": f"bytes={begin}-"} if begin else {}
        if token and parts[:2] == hub[:2]:
            headers["Authorization"] = f"Bearer {token}"
        connect = HTTPSConnection if parts.scheme == "https" else HTTPConnection
        if parts.scheme not in ("https", hub.scheme):
            raise Failure(f"the Hub points to {clean(parts.scheme, 20)}:, without encryption")
        link = connect(parts.netloc, timeout=60)
        try:
            link.request("GET", urlunsplit(("", "", *parts[2:])), headers=headers)
            answer = link.getresponse()
        except (OSError, HTTPException) as error:
            link.close()
            raise Failure(f"no answer from {parts.netloc}: {error}", 0) from None
        if answer.status in (200, 206):
            return link, answer
        link.close()
        target, remedy = answer.headers.get("Location"), HUB_REMEDIES.get(answer.status, "")
        if not 300 < answer.status < 400 or not target:
            words = f"{parts.netloc} answers {answer.status} {clean(answer.reason, 80)}"
            raise Failure(f"{words}. Remedy: {remedy}" if remedy else words, answer.status)
        url = urljoin(url, target)
    raise Failure("the Hub points from one address to the next without end")


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


# ── machine / ec2 ─────────────────────────────────────────────────────────────────────────────────
# A machine of EC2 with an NVIDIA GPU: its order, its secret and its bucket, its GPU.
#
# The order is a file that the user data brought; the aws command has the instance profile's
# credentials. Shutting down terminates the machine: it was ordered so. Knows no model server.

ORDER = HOME / "order.json"
GPU_FIELDS = "name,compute_cap,memory.total,driver_version"
NO_DRIVER = (
    "{why}. Remedy: an image that has NVIDIA's driver for this GPU, such as AWS's Deep Learning "
    "Base AMI with the OSS driver (AMI_PARAMETER)"
)
REMEDIES = {  # for what the aws command says
    "AccessDenied": "let the role of the machine's instance profile read this secret "
    "(secretsmanager:GetSecretValue); set-up makes such a role",
    "ResourceNotFound": "save_hf_token makes the secret in this region",
    "Unable to locate credentials": "launch it with an instance profile (INSTANCE_PROFILE)",
    "not on this machine": "an image that has the AWS CLI, such as AWS's Deep Learning Base AMI "
    "(AMI_PARAMETER)",
}


class Ec2:
    """User data run once in a machine's life, so a service boots it after later starts."""

    forms: Mapping[str, str] = {
        "project": r"\d{12}",  # the account
        "region": r"[a-z]{2}(-[a-z]+){1,3}-\d{1,2}",
        "gpu_arch": r"\d{1,2}\.\d",  # the compute capability that the GPU has to have
    }
    acts: Sequence[str] = ("gpu",)
    boots_again = False

    def document(self) -> str:
        try:
            return ORDER.read_text()
        except OSError as error:
            raise Failure(f"the order that the user data bring is not here: {error}") from None

    def check(self, document: Document, progress: Progress) -> None:
        progress.begin("driver")
        gpu = tried(6, gpu_facts, lambda why: why.code == 0)  # the driver may still be loading
        has, wanted = gpu["compute_capability"], document["gpu_arch"]
        if has != wanted:
            raise Failure(
                f"the GPU is a {gpu['name']} of compute capability {has}, this rig is for {wanted}."
                " Remedy: INSTANCE_TYPE and CHIP have to be those of one machine"
            )
        words = f"{gpu['memory_mib']} MiB, driver {gpu['driver']}, CUDA {gpu['cuda_driver']}"
        progress.tell("done", f"{gpu['name']}, compute capability {has}, {words}")

    def token(self, document: Document) -> str:
        secret, region = document["secret"], document["region"]
        if not secret:
            return ""
        argv = ["aws", "secretsmanager", "get-secret-value", "--region", region]
        argv += ["--secret-id", secret, "--query", "SecretString", "--output", "text"]

        def passes(failure: Failure) -> bool:  # credentials come a moment after the machine
            return not re.search(r"AccessDenied|NotFound|not on this|Unrecognized", str(failure))

        try:
            token = tried(6, lambda: run(*argv), passes)
        except Failure as failure:
            remedies = [words for sign, words in REMEDIES.items() if sign in str(failure)]
            remedy = (remedies or ["see to it and start the model server"])[0]
            raise Failure(f"secret {secret} in {region}: {failure}. Remedy: {remedy}") from None
        if not re.fullmatch(r"[!-~]+", token) or token == "None":  # the secret is binary
            raise Failure(f"secret {secret} in {region} does not hold one plain word")
        seen_secrets.add(token)
        return token

    def copy_cache(self, document: Document, way: str, progress: Progress) -> None:
        program = ("aws", "s3", "sync", "--only-show-errors", "--region", document["region"])
        copy_by(document, way, progress, "s3", program)

    def act(self, word: str) -> str:
        return json.dumps(gpu_facts())

    def leave(self, document: Document) -> None:
        """Nothing: shutting down terminates the machine."""


def gpu_facts() -> dict[str, Any]:
    """The first GPU, by nvidia-smi.

    name, compute_capability ("8.9"), memory_mib, driver; count; cuda_driver, the newest CUDA that
    the driver knows; cuda_toolkit, that of nvcc. Both are "12.8" or so, empty where not to be had.
    Raises Failure with the remedy, its code 0 where another try may help.
    """
    try:
        query = (f"--query-gpu={GPU_FIELDS}", "--format=csv,noheader,nounits")
        lines = run("nvidia-smi", *query).splitlines()
        name, arch, memory, driver = lines[0].rsplit(", ", 3)
        versions = run("nvidia-smi")
    except Failure as failure:
        hopeless = re.search(r"not on this machine|took more than", str(failure))
        raise Failure(NO_DRIVER.format(why=failure), -1 if hopeless else 0) from None
    except (LookupError, ValueError):
        raise Failure(NO_DRIVER.format(why="nvidia-smi names no GPU"), 0) from None
    found = re.search(r"CUDA[\w ]* Version *: *([\d.]+)", versions)
    return {
        "name": name,
        "compute_capability": arch,
        "memory_mib": int(memory) if memory.isdigit() else 0,
        "driver": driver,
        "count": len(lines),
        "cuda_driver": found[1] if found else "",
        "cuda_toolkit": toolkit_version(),
    }


def toolkit_version() -> str:
    """The release of CUDA's compiler, from the PATH or from where NVIDIA installs it; or empty."""
    for program in ("nvcc", str(ROOT / "usr/local/cuda/bin/nvcc")):
        try:
            found = re.search(r"release ([\d.]+)", run(program, "--version"))
        except (Failure, OSError):
            continue
        return found[1] if found else ""
    return ""


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


# ── machine / llama ───────────────────────────────────────────────────────────────────────────────
# llama-server under systemd: it is built on the machine, gets its weights, and is kept going.
#
# Implements the protocol of a model server. It listens on loopback alone, offline, with no token in
# its environment. Knows no provider: that is handed in.

UNIT = "gemma4-llama.service"
UNIT_FORM = """[Unit]
Description=llama-server
StartLimitIntervalSec=600
StartLimitBurst=5
[Service]
ExecStart={command}
Environment=HOME=/root
Restart=on-failure
RestartSec=5
[Install]
WantedBy=multi-user.target
"""
SERVE_WORD = r"[\w./:@=,+-]{1,300}"  # nothing that a unit file would read as more than a word
# Where it listens and what it serves, this program says itself; the others open more than a model.
REFUSED = r"--(host|port|model|api-key|path|tools|rpc|slot-save-path|log-file)\b.*|-m"
# What its log says at verbosity 4 (b11434): that it found no GPU, and what of the model lies there.
NO_GPU = re.compile(r"no usable GPU found|failed to initialize CUDA")
RESIDENT = re.compile(r"(CUDA\d+ model buffer size = +[\d.]+ MiB|offloaded \d+/\d+ layers to GPU)")
LOAD_MINUTES = 20  # from its start to its first answer; one that takes longer has failed


class LlamaServing:
    """llama-server of one document: its `build`, its `weights`, its `serve`."""

    kind = "server"
    forms: Mapping[str, str] = {}
    acts: Sequence[str] = ("logs", "start", "stop", "restart", "rm", "build")
    ready_minutes = 120  # a cold boot builds first, for 90 minutes at most

    def __init__(self, cloud: Cloud) -> None:
        self.cloud, self.unit = cloud, Unit(UNIT, LLAMA_NAME)

    def rules(self, document: dict[str, Any]) -> Mapping[str, object]:
        words, build, arch = document["serve"], document["build"], document["gpu_arch"]
        parts = {"build": BUILD_FORMS, "weights": WEIGHT_FORMS}
        return {
            "serve": words[0] == LLAMA_NAME
            and all(re.fullmatch(SERVE_WORD, word, re.ASCII) for word in words)
            and not any(re.fullmatch(REFUSED, word) for word in words),
            "build.flags": all(re.fullmatch(BUILD_FLAG, flag, re.ASCII) for flag in build["flags"])
            and f"-DCMAKE_CUDA_ARCHITECTURES={arch.replace('.', '')}-real" in build["flags"],
            **{
                f"{part}.{key}": re.fullmatch(form, document[part][key], re.ASCII)
                for part, forms in parts.items()
                for key, form in forms.items()
            },
        }

    def get(self, document: dict[str, Any], progress: Progress) -> None:
        """Has it running: built or found, with its weights, under a unit of this very command."""
        progress.begin("build")
        self.cloud.copy_cache(document, "restore", progress)
        program = get_llama_server(document, progress)
        progress.begin("token")
        token = self.cloud.token(document)
        progress.tell("done", "" if token else "no secret is named")
        progress.begin("weights")
        get_weights(document["weights"], token, progress)
        progress.begin("load")
        self.start(document, program)

    def start(self, document: dict[str, Any], program: Path) -> None:
        """The service as the document has it, running. A changed one begins anew."""
        own = ("--model", MODEL, "--host", "127.0.0.1", "--port", urlsplit(document["health"]).port)
        command = " ".join(map(str, (program, *own, *document["serve"][1:])))
        changed = self.unit.install(UNIT_FORM.format(command=command))
        run("systemctl", "enable", UNIT)
        self.unit.since = time.time()
        self.unit.change("restart" if changed else "start")

    def follow(self, document: dict[str, Any], progress: Progress) -> None:
        """Until it answers. A start anew is a failure."""
        began, first = time.monotonic(), self.unit.told()
        while time.monotonic() - began < LOAD_MINUTES * MINUTE_S:
            if self.unit.answers(document, first):
                log = "\n".join(self.unit.lines(2000, self.unit.since))
                if NO_GPU.search(log):
                    raise Failure(f"{LLAMA_NAME} found no GPU and computes on the processor")
                return self.unit.ready(progress, began, ", ".join(RESIDENT.findall(log)[-2:]))
        raise Failure(f"{LLAMA_NAME} does not answer after {LOAD_MINUTES} minutes")

    def act(self, word: str, document: dict[str, Any], given: Mapping[str, int]) -> str:
        """The log's end, how far the build is, or the service started, stopped, restarted or
        removed; what is so already is left so."""
        if word == "logs":
            return "\n".join(self.unit.lines(given["lines"]))
        if word == "build":
            return build_told(given["lines"], given["limit"])
        return self.unit.act(word)

    def status(self, document: dict[str, Any]) -> dict[str, Any] | None:
        return self.unit.status(str(stored(BUILD_STATE, {}).get("version", "")))


def build_told(lines: int, limit: int) -> str:
    """The state of the build and the end of its log, as JSON of less than `limit` bytes."""
    told = {"state": "waiting", **stored(BUILD_STATE, {})}
    if told["state"] == "running":
        told["seconds"] = int(time.time()) - told["began"]
    text = BUILD_LOG.read_text(errors="replace") if BUILD_LOG.exists() else ""
    told["log"] = [clean(line, 300) for line in text.splitlines()[-lines:]]
    while len(json.dumps(told)) >= limit and told["log"]:
        del told["log"][0]
    return json.dumps(told)


# ── programs / ec2_llama_boot ─────────────────────────────────────────────────────────────────────

#!/usr/bin/env python3


if __name__ == "__main__":
    cloud = Ec2()
    sys.exit(main(sys.argv[1:], Machine(cloud, LlamaServing(cloud), first="driver")))
