#!/usr/bin/env python3
# Built from forge/programs/boot.py by `python3 -m forge.build`: edit it there.

"""Boots a machine that serves one model from a container, and ends it when nobody uses it.

    boot.py               at each start of the machine, by its start-up agent, as root
    boot.py idle          the watch that ends a machine without use, by systemd
    python3 - ACT DATA    over ssh, with this file as the input. ACT: boot_log logs status start
                          stop restart rm. DATA: a JSON object in URL-safe base64

What differs between machines comes as one JSON document from the metadata server; nothing is filled
into this text. Steps are marked on the console, and one that fails says why. The watch runs before
the first step, so that a broken boot costs no more than an idle machine. Python 3.10, no package,
no shell. Knows no model and composes no container. Exit status: 0, 1 a step failed, 2 wrong usage.
"""

# Contents, by line:
#    47 machine / console: What a machine's program is made of: marks on the console, its files, …
#   208 machine / machine: A machine as its program sees it: the cloud that rented it out, the …
#   322 machine / google: A machine of Google Cloud: its metadata server, its secret, its bucket, …
#   410 machine / watch: Ends a machine that nobody uses or whose time is over; the services that …
#   526 machine / acts: The command line of a machine's program: the boot, the watch, and the acts …
#   634 machine / docker: The model server as a container of docker's: its image, its run, its …
#   858 programs / boot: Boots a machine that serves one model from a container, and ends it when …

from __future__ import annotations

import base64
import fcntl
import json
import math
import os
import re
import shutil
import subprocess
import sys
import tempfile
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


# ── machine / docker ──────────────────────────────────────────────────────────────────────────────
# The model server as a container of docker's: its image, its run, its log, its state.
#
# Knows no cloud and no model, and composes no container: the document has docker's argument list.

MADE_FROM = HOME / "container.json"
HOPELESS = re.compile(r"manifest unknown|not found|denied|unauthorized|no space|invalid ref", re.I)
NO_GPU = (
    "docker {why}. Remedy: an image that has docker with NVIDIA's container toolkit, such as AWS's "
    "Deep Learning Base AMI with the OSS driver (AMI_PARAMETER)"
)


class Docker:
    """One container, which the document names in its `container`, docker's argument list."""

    kind = "container"
    forms: Mapping[str, str] = {
        "image": r"\w[\w./:@-]{0,300}",
        "name": r"[a-z][a-z0-9_-]{0,62}",
        "token_file": r"/run/gemma4/[\w-]+\.env",
    }
    acts: Sequence[str] = ("logs", "start", "stop", "restart", "rm")
    ready_minutes = 60

    def __init__(self, cloud: Cloud, gpu: bool = False) -> None:
        """`gpu`: an image of the machine has to bring docker, which gives its containers the GPU;
        otherwise docker is installed where it is missing."""
        self.cloud, self.gpu = cloud, gpu

    def rules(self, document: Document) -> Mapping[str, object]:
        argv, marks = document["container"], document["marks"]
        document["name"] = argv[argv.index("--name") + 1]
        return {
            "container": argv[:3] == ["docker", "run", "--detach"]
            and document["image"] in argv
            and all(isinstance(word, str) and "\0" not in word for word in argv),
            "marks": all(re.compile(p) for p in [*marks["weights"], *marks["compile"]]),
        }

    def get(self, document: Document, progress: Progress) -> None:
        """The container of this very document, running: the one that is there, or a new one."""
        progress.begin("docker")
        progress.tell("done", self.docker_version(progress))
        image, found = document["image"], container(document["name"])
        if found and stored(MADE_FROM, None) == document["container"]:
            progress.phase = "weights"
            progress.tell("note", "the container is here already")
            if not found["State"]["Running"]:
                run("docker", "start", document["name"])
            return
        progress.begin("image", image)
        try:
            run("docker", "image", "inspect", image)
            progress.tell("done", "it is here already")
        except Failure:
            tried(3, lambda: pull(image, progress), lambda why: not HOPELESS.search(str(why)))
            progress.tell("done")
        progress.begin("token")
        token = self.cloud.token(document)
        progress.tell("done", "" if token else "no secret is named")
        progress.phase = "weights"  # that begins with its line in the container's log
        self.cloud.copy_cache(document, "restore", progress)
        create(document, token)
        progress.tell("note", "the container was started")

    def docker_version(self, progress: Progress) -> str:
        """Docker's version, after its installation where it is missing."""

        def install() -> str:
            run("apt-get", "update", minutes=5)
            return run("apt-get", "install", "--yes", "docker.io", minutes=10)

        if shutil.which("docker") is None:
            if self.gpu:
                raise Failure(NO_GPU.format(why="is not on this machine"))
            progress.tell("note", "installing docker.io")
            tried(30, install, lambda _: True)  # another program may hold apt's lock for minutes
        question = ("docker", "version", "--format", "{{.Server.Version}}")
        version = tried(12, lambda: run(*question), lambda _: True)  # the daemon may be starting
        if self.gpu and '"nvidia"' not in run("docker", "info", "--format", "{{json .Runtimes}}"):
            raise Failure(NO_GPU.format(why=f"{version} has no runtime nvidia"))
        return version

    def follow(self, document: Document, progress: Progress) -> None:
        """Marks what the container's log and its health tell, until it is ready or has failed."""
        name, waiting, down = document["name"], ["weights", "compile"], 0
        first, began = container(name), time.monotonic()
        while time.monotonic() - began < self.ready_minutes * MINUTE_S:
            time.sleep(MINUTE_S / 30)
            found = container(name)
            if not (first and found):
                raise Failure("the container was removed")
            answers = healthy(document)  # before the log, which then tells all that led to it
            for line in log_lines(name, 1000, "--since", first["State"]["StartedAt"]):
                for phase in waiting:
                    if any(re.search(pattern, line) for pattern in document["marks"][phase]):
                        if len(waiting) == 1:
                            progress.tell("done")
                        waiting = waiting[waiting.index(phase) + 1 :]
                        progress.begin(phase, clean(line, 200))
            if answers:
                if len(waiting) < 2:
                    progress.tell("done")
                progress.phase = "ready"
                progress.tell("done", f"it answers after {int(time.monotonic() - began)} s")
                return
            state, again = found["State"], found["RestartCount"] > first["RestartCount"]
            down = 0 if state["Running"] else down + 1
            if again or down > 2:  # a restart by hand is over by then
                until = ("--until", state["StartedAt"]) if again else ()
                words = " | ".join(clean(line, 140) for line in log_lines(name, 3, *until))
                why = "docker starts it again" if again else f"status {state['ExitCode']}"
                why += ", OOMKilled" if killed_for_memory(name, first["State"], state) else ""
                raise Failure(f"the container exited ({why}): {words}")
        raise Failure(f"not ready after {self.ready_minutes} minutes")

    def act(self, word: str, document: Document, given: Mapping[str, int]) -> str:
        """The log's end, or the container started, stopped, restarted or removed; what is so
        already is left so."""
        name = document["name"]
        if word == "logs":
            return "\n".join(log_lines(name, given["lines"]))
        found = container(name)
        running = bool(found and found["State"]["Running"])
        if word == "rm":
            if found:
                run("docker", "rm", "--force", name)
            return f"{name} was removed" if found else f"{name} is not there"
        if word == "stop":
            if running:
                run("docker", "stop", name)
            return f"{name} was stopped" if running else f"{name} does not run"
        if word == "start" and running:
            return f"{name} runs already"
        if found:
            run("docker", word, name)
        note_start()
        in_background()  # a boot, which makes the container or only follows it
        return f"{name} was {word}ed" if found else f"{name} is being made: see the boot log"

    def status(self, document: Document) -> dict[str, Any] | None:
        found = container(document["name"])
        if not found:
            return None
        state, image = found["State"], run("docker", "image", "inspect", found["Image"])
        digests = json.loads(image)[0]["RepoDigests"]
        return {
            "state": state["Status"],
            "exit_code": state["ExitCode"],
            "out_of_memory": state["OOMKilled"],
            "restarts": found["RestartCount"],
            "started_at": state["StartedAt"],
            "image": (digests or [found["Image"]])[0],
        }


def container(name: str) -> dict[str, Any] | None:
    """What docker knows of the container; None where there is none."""
    try:
        text = run("docker", "inspect", "--type", "container", name)
    except Failure as failure:
        if "no such" in str(failure).lower():
            return None
        raise
    return dict(json.loads(text)[0])


def pull(image: str, progress: Progress) -> str:
    """The image from its registry, with a mark of how far it is every half minute."""
    with tempfile.TemporaryFile() as file:
        child = subprocess.Popen(["docker", "pull", image], stdin=NOTHING, stdout=file, stderr=BOTH)
        for _ in range(2 * Docker.ready_minutes):
            with suppress(subprocess.TimeoutExpired):
                child.wait(MINUTE_S / 2)
            file.seek(0)
            text = file.read().decode("utf-8", "replace").strip()
            if child.returncode is not None:
                break
            layers = text.count(": Pulling fs layer")
            progress.tell("note", f"{text.count(': Pull complete')} of {layers} layers")
        child.kill()
        if child.wait():
            raise Failure(f"docker pull: {text.splitlines()[-1] if text else 'no word of why'}")
    return image


def create(document: Document, token: str) -> None:
    """A new container in the place of any old one.

    The token lies in a file of root's for as long as docker takes to read it.
    """
    path = ROOT / document["token_file"][1:]
    path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    path.unlink(missing_ok=True)
    try:
        with open(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w") as file:
            file.write(f"HF_TOKEN={token}\n" if token else "")
        if container(document["name"]):
            run("docker", "rm", "--force", document["name"])
        run(*document["container"], minutes=5)
    finally:
        path.unlink(missing_ok=True)
    MADE_FROM.write_text(json.dumps(document["container"]))


def killed_for_memory(name: str, first: dict[str, Any], now: dict[str, Any]) -> bool:
    """Whether a run since the `first` was. docker's state forgets it when the next one begins, its
    events remember."""
    span = ("--since", first["StartedAt"], "--until", now["StartedAt"])
    events = ""
    if first["StartedAt"] != now["StartedAt"]:
        with suppress(Failure):  # what else is known of the end is told all the same
            kind = ("--filter", f"container={name}", "--filter", "event=oom")
            events = run("docker", "events", *span, *kind, "--format", "{{.Action}}")
    return bool(now["OOMKilled"] or events)


def log_lines(name: str, count: int, *span: str) -> list[str]:
    """The last lines of the container's log, both streams in their order."""
    argv = ("docker", "logs", "--tail", str(count), *span, name)
    return run(*argv, complaints=BOTH).splitlines()


# ── programs / boot ───────────────────────────────────────────────────────────────────────────────

#!/usr/bin/env python3


if __name__ == "__main__":
    cloud = Google()
    sys.exit(main(sys.argv[1:], Machine(cloud, Docker(cloud), first="docker")))
