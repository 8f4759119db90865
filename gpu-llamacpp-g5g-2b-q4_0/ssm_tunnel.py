# /// script
# requires-python = ">=3.11"
# dependencies = [
#     "platformdirs>=4.3,<5",
#     "psutil>=7,<8",
#     "boto3>=1.44,<2",
# ]
# ///
# Built from forge/programs/ssm_tunnel.py by `python3 -m forge.build`: edit it there.

"""The tunnel to a rented EC2 machine: leads a port of this computer to one of the machine's.

    python3 ssm_tunnel.py INSTANCE REGION REMOTE_PORT LOCAL_PORT [PROFILE]

Asks Systems Manager for a session and becomes AWS's session-manager-plugin, which carries it: the
process, its id and its end stay one, and SIGTERM ends it. The session's token goes through the
environment, never through an argument. It asks nothing and tries no second time. Exit status: 1 AWS
gave no session, 2 wrong usage, 3 no plugin that can be used; after that the plugin's own.
"""

# Contents, by line:
#    53 ground / errors: The one exception that a tool raises on purpose, and the closed set of …
#    99 ground / redact: Everything that leaves the rig passes here: secrets out, control …
#   213 ground / state: Where a rig keeps what must outlive it: state, cache and logs in the …
#   351 ground / process: The only place that starts a program: argument lists, no shell, stdin …
#   643 boundaries / aws_refusals: What AWS's SDK raised as refusals that say what to do.
#   852 boundaries / ssm_plugin: AWS's session-manager-plugin on this computer: where it is, and …
#   909 programs / ssm_tunnel: The tunnel to a rented EC2 machine: leads a port of this computer …

from __future__ import annotations

import argparse
import asyncio
import json
import os
import re
import secrets
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import Any, Literal

import platformdirs

# ── ground / errors ───────────────────────────────────────────────────────────────────────────────
# The one exception that a tool raises on purpose, and the closed set of its classes.
#
# Knows nothing about MCP: the guarded tool of the assembly turns it into the client's error text.

ErrorClass = Literal[
    "INVALID",
    "DENIED",
    "NOT_FOUND",
    "EXISTS",
    "QUOTA",
    "CAPACITY",
    "AUTH",
    "UNKNOWN",
    "TIMEOUT",
    "UNREACHABLE",
    "PARTIAL",
    "BUSY",
    "CANCELLED",
    "INTERNAL",
]


class RigError(Exception):
    """An anticipated failure: its class, what happened and why, and the next step.

    `str()` gives the text that a client sees: ``CLASS what. Next: step``. The class is always the
    first word, so that an agent can branch on it without reading prose.
    """

    def __init__(self, error_class: ErrorClass, what: str, next_step: str = "") -> None:
        super().__init__(error_class, what, next_step)
        self.error_class: ErrorClass = error_class
        self.what = what
        self.next_step = next_step

    def __str__(self) -> str:
        text = f"{self.error_class} {self.what.rstrip('.')}."
        return f"{text} Next: {self.next_step}" if self.next_step else text


def invalid_parameter(parameter: str, why: str) -> RigError:
    """The refusal of one argument, by its name. The value is never repeated: it may be a secret."""
    return RigError("INVALID", f"{parameter}: {why}; nothing was started")


# ── ground / redact ───────────────────────────────────────────────────────────────────────────────
# Everything that leaves the rig passes here: secrets out, control characters out, bounded.
#
# Knows the shapes of secrets and the values in this process's environment; knows no tool.

TEXT_LIMIT = 32_000  # characters of one result; a client's own limit is about 25,000 tokens

# Shapes of credentials that may stand in logs. Sources: the providers' own token formats. One
# expression each: with its fixed beginning it is searched for ten times faster than as a branch.
_SECRET_SHAPES = (
    re.compile(r"hf_(?=[a-z]*[A-Z0-9])[A-Za-z0-9]{8,}"),  # not hf_transfer or hf_overrides
    re.compile(r"ya29\.[A-Za-z0-9_.\-]{8,}"),
    re.compile(r"AKIA[A-Z0-9]{12,}"),
    re.compile(r"ASIA[A-Z0-9]{12,}"),
    re.compile(r"dop_v1_[a-f0-9]{16,}"),
    re.compile(r"sk-(?<![A-Za-z0-9]sk-)[A-Za-z0-9_\-]{16,}"),
    re.compile(r"AIza[A-Za-z0-9_\-]{30,}"),
    re.compile(r"eyJ[A-Za-z0-9_\-.]{20,}"),  # a JSON web token
    re.compile(r"bearer\s+[A-Za-z0-9._~+/\-]{8,}=*", re.I),
    re.compile(
        r"-----BEGIN [A-Z ]*PRIVATE KEY-----[\s\S]*?(?:-----END [A-Z ]*PRIVATE KEY-----|\Z)"
    ),
)
_ADDRESS_LOGIN = re.compile(r"://[^\s/@:]+:[^\s/@]+@")
_SECRET_NAMES = re.compile(r"TOKEN|SECRET|PASSWORD|PASSWD|API_?KEY|ACCESS_?KEY|CREDENTIAL", re.I)
# C0 and C1 but newline and tab, DEL, bidirectional and zero-width marks, lone surrogates, tags.
_UNPRINTABLE = re.compile(
    "[\x00-\x08\x0b-\x1f\x7f-\x9f\u061c\u200b-\u200f\u2028-\u202e\u2060-\u2069\ufeff\ufff9-\ufffb"
    "\ud800-\udfff\U000e0000-\U000e01ef]"
)
_ANSI_SEQUENCE = re.compile(r"\x1b(?:\[[0-?]*[ -/]*[@-~]|\][^\x07\x1b]*(?:\x07|\x1b\\)|[@-_])")


def secret_values(environment: Mapping[str, str] | None = None) -> tuple[str, ...]:
    """The values of environment variables whose names speak of secrets, longest first.

    Values under 8 characters are left out: they would black out ordinary words.
    """
    source = os.environ if environment is None else environment
    found = {v.strip() for k, v in source.items() if _SECRET_NAMES.search(k)}
    return tuple(sorted((v for v in found if len(v) >= 8), key=len, reverse=True))


def redact(text: str, values: Sequence[str] | None = None) -> str:
    """`text` with known secret values and credential shapes replaced by ``[redacted]``.

    `values` are those of `secret_values()`, where the caller has many texts and reads them once.
    """
    for value in secret_values() if values is None else values:
        text = text.replace(value, "[redacted]")
    for shape in _SECRET_SHAPES:
        text = shape.sub("[redacted]", text)
    return _ADDRESS_LOGIN.sub("://[redacted]@", text)


def printable(text: str) -> str:
    """`text` without terminal sequences, control and bidirectional characters and surrogates."""
    return _UNPRINTABLE.sub("", _ANSI_SEQUENCE.sub("", text.replace("\r\n", "\n")))


def clip(text: str, limit: int = TEXT_LIMIT) -> str:
    """`text` in at most about `limit` characters: a third from its head, the rest from its tail.

    What was cut is named, because the end of a log is where the error stands and its beginning is
    where the version stands.
    """
    if len(text) <= limit:
        return text
    head = limit // 3
    tail = limit - head
    return f"{text[:head]}\n[… {len(text) - limit} characters left out …]\n{text[-tail:]}"


def clean(text: str, limit: int = TEXT_LIMIT, values: Sequence[str] | None = None) -> str:
    """Redacted, printable and clipped: the form in which any text goes out."""
    # Clipped generously first, so that 30 MB of log never go through the expressions.
    return clip(redact(printable(clip(text, 8 * limit)), values), limit)


def clean_value(value: Any, limit: int = TEXT_LIMIT) -> Any:
    """`clean` over every string (keys too) of a JSON value; other scalars pass through.

    Bounded in every direction: a list or mapping keeps limit/16 items, a quarter of that with each
    level down, but 10 at least; and what is nested more than 20 deep becomes a remark.
    """
    return _clean_value(value, limit, 0, secret_values())


def _clean_value(value: Any, limit: int, depth: int, values: Sequence[str]) -> Any:
    if isinstance(value, str):
        return clean(value, limit, values)
    if not isinstance(value, Mapping | list | tuple):
        return value
    if depth > 20:
        return "[… nested too deep …]"
    room = max(10, limit >> (4 + 2 * depth))
    if isinstance(value, Mapping):
        pairs = _fewer(list(value.items()), room, lambda left: ("…", left))
        return {
            clean(str(k), 200, values): _clean_value(v, limit, depth + 1, values) for k, v in pairs
        }
    return [_clean_value(v, limit, depth + 1, values) for v in _fewer(list(value), room, str)]


def _fewer(items: list[Any], room: int, remark: Callable[[str], Any]) -> list[Any]:
    """At most `room` of `items`, a third from the head; among texts a remark tells the gap."""
    if len(items) <= room:
        return items
    head, tail = items[: room // 3], items[room // 3 - room :]
    texts = all(isinstance(i[-1] if isinstance(i, tuple) else i, str) for i in head)
    left_out = [remark(f"[… {len(items) - room} items left out …]")] if texts else []
    return [*head, *left_out, *tail]


# ── ground / state ────────────────────────────────────────────────────────────────────────────────
# Where a rig keeps what must outlive it: state, cache and logs in the user's folders, by rig.
#
# A plugin's own folder is replaced on update, so nothing of value is kept beside server.py.

APPLICATION = "gemma4-rigs"


@dataclass(frozen=True)
class RigPaths:
    """The folders of one rig. `state` is the truth of this installation, `cache` can be deleted,
    `programs` is where server.py and the programs beside it lie."""

    state: Path
    cache: Path
    programs: Path = Path()

    @property
    def jobs(self) -> Path:
        return self.state / "jobs"

    @property
    def logs(self) -> Path:
        return self.state / "logs"


def rig_paths(rig: str, programs: Path = Path()) -> RigPaths:
    """The rig's folders after the platform's rules (``XDG_STATE_HOME`` and so on), not yet made."""
    state = Path(platformdirs.user_state_dir(APPLICATION, appauthor=False))
    cache = Path(platformdirs.user_cache_dir(APPLICATION, appauthor=False))
    return RigPaths(state=state / rig, cache=cache, programs=programs)


def private_folder(path: Path) -> Path:
    """`path` as an existing folder; what of it is missing is made for this user alone (0700).

    Raises RigError DENIED where it cannot be made or written (read-only home, full disk): a rig
    that cannot write down what it starts does not start it.
    """
    try:
        # One by one: with parents=True the mode would hold for the last one only.
        for folder in (*reversed(path.parents), path):
            folder.mkdir(exist_ok=True, mode=0o700)
    except OSError as error:
        raise RigError(
            "DENIED",
            f"the folder {path} cannot be made: {error.strerror}",
            "make its parent writable, or set XDG_STATE_HOME and XDG_CACHE_HOME",
        ) from error
    return path


def write_private(path: Path, text: str) -> None:
    """Replace `path` by `text` in one step: temporary file (0600), fsync, rename.

    Raises RigError DENIED with the reason when the disk is full or read-only.
    """
    private_folder(path.parent)
    temporary = ""
    try:
        handle, temporary = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
        with os.fdopen(handle, "w", encoding="utf-8") as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)
    except OSError as error:
        if temporary:
            Path(temporary).unlink(missing_ok=True)
        raise RigError(
            "DENIED",
            f"{path} cannot be written: {error.strerror}",
            "free some disk space or make the folder writable, then call again",
        ) from error


def write_json(path: Path, value: Any) -> None:
    """`write_private` of `value` as JSON."""
    write_private(path, json.dumps(value, indent=1, sort_keys=True) + "\n")


def json_object(text: str | bytes) -> dict[str, Any] | None:
    """The JSON object that `text` is; None where it is none, broken, or nested beyond reading."""
    try:
        value = json.loads(text)
    except (ValueError, RecursionError):
        return None
    return value if isinstance(value, dict) else None


def read_json(path: Path) -> dict[str, Any] | None:
    """The JSON object in `path`; None where it is absent or damaged (damage is renamed aside).

    Raises RigError DENIED where it is there and cannot be read: that says nothing about what it
    holds, and a record must not be lost over it.
    """
    try:
        data = path.read_bytes()
    except (FileNotFoundError, NotADirectoryError):
        return None
    except OSError as error:
        raise RigError("DENIED", f"{path} cannot be read: {error.strerror}") from error
    value = json_object(data)
    if value is None:
        with suppress(OSError):
            path.replace(path.with_suffix(".damaged"))
    return value


def installation_id(paths: RigPaths) -> str:
    """This installation's random id (16 hex digits), made once: the `owner` label.

    Two servers that start at once agree: the file is linked into place, and the first one wins.
    """
    path = paths.state.parent / "installation"
    if not _known_id(path):
        candidate = path.with_name(f".installation.{secrets.token_hex(8)}")
        write_private(candidate, secrets.token_hex(8))
        try:
            os.link(candidate, path)
        except OSError:
            # Another server was first; or the file is damaged, or this disk knows no links.
            if not _known_id(path):
                candidate.replace(path)
        finally:
            candidate.unlink(missing_ok=True)
    return _known_id(path)


def _known_id(path: Path) -> str:
    """The id in `path`; empty where there is none that could be one."""
    try:
        text = path.read_text(encoding="ascii").strip()
    except (OSError, ValueError):
        return ""
    return text if re.fullmatch("[0-9a-f]{16}", text) else ""


# ── ground / process ──────────────────────────────────────────────────────────────────────────────
# The only place that starts a program: argument lists, no shell, stdin closed, own process group.
#
# Attached programs end with the call, the client or this server; detached ones (a local model
# server,
# a job's worker) outlive it on purpose and carry a label by which any later server knows them
# again.

LABEL_VARIABLE = "GEMMA4_RIG_LABEL"
OUTPUT_LIMIT = 64_000  # bytes kept of one program's output: a third of it head, the rest tail
_LABEL_PATIENCE_S = 2.0  # for the kernel to show, or to forget, a process
_EXEC_PATIENCE_S = 0.2
_KERNEL_PARENTS = (0, 2)  # of Linux's own threads, which have no environment at all
_DRAIN_PATIENCE_S = 2.0  # for the rest of the output after the program's end

_attached_groups: set[int] = set()
_detached_children: list[subprocess.Popen[bytes]] = []


@dataclass(frozen=True)
class Finished:
    """What an attached program left: exit status, decoded output, and how many bytes were dropped.

    Undecodable bytes are replaced, never raised: one bad byte must not turn a success to failure.
    """

    returncode: int
    stdout: str
    stderr: str
    dropped: int


class _HeadAndTail:
    """Keeps the first third and the last two thirds of `limit` bytes of a stream."""

    def __init__(self, limit: int) -> None:
        self._head_limit = limit // 3
        self._tail_limit = limit - self._head_limit
        self._head = bytearray()
        self._tail = bytearray()
        self.dropped = 0

    def add(self, data: bytes) -> None:
        room = self._head_limit - len(self._head)
        self._head += data[:room]
        self._tail += data[room:] if room < len(data) else b""
        excess = len(self._tail) - self._tail_limit
        if excess > 0:
            del self._tail[:excess]
            self.dropped += excess

    def text(self) -> str:
        gap = f"\n[… {self.dropped} bytes left out …]\n".encode() if self.dropped else b""
        return (bytes(self._head) + gap + bytes(self._tail)).decode("utf-8", "replace")


async def _drain_stream(stream: asyncio.StreamReader, kept: _HeadAndTail) -> None:
    while data := await stream.read(65536):
        kept.add(data)


async def _feed_stream(stream: asyncio.StreamWriter, data: bytes) -> None:
    with suppress(BrokenPipeError, ConnectionResetError):  # it may end without reading to the end
        stream.write(data)
        await stream.drain()
        stream.close()


async def _until_exit(process: asyncio.subprocess.Process) -> int:
    """The exit status. Polled: on some Pythons `wait` also waits for pipes a grandchild holds."""
    while process.returncode is None:
        await asyncio.sleep(0.01)
    return process.returncode


def _signal_group(group: int, number: int) -> None:
    with suppress(ProcessLookupError, PermissionError):
        os.killpg(group, number)


async def run_program(
    argv: Sequence[str],
    *,
    timeout_s: float,
    environment: Mapping[str, str] | None = None,
    folder: Path | None = None,
    output_limit: int = OUTPUT_LIMIT,
    given: bytes = b"",
) -> Finished:
    """Run `argv` to its end and return its status and bounded output; `given` is its input.

    The whole process group is killed on cancellation, on timeout and when this server exits, also
    what the program started itself. Raises RigError NOT_FOUND when the program is not there and
    TIMEOUT after `timeout_s` seconds (for an act that changes something, that means UNKNOWN).
    """
    try:
        process = await asyncio.create_subprocess_exec(
            *argv,
            stdin=asyncio.subprocess.PIPE if given else asyncio.subprocess.DEVNULL,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.PIPE,
            env=None if environment is None else dict(environment),
            cwd=folder,
            start_new_session=True,
        )
    except (OSError, ValueError) as error:
        raise RigError(
            "NOT_FOUND", f"the program {argv[0]} cannot be started: {error}", "install it first"
        ) from error
    _attached_groups.add(process.pid)
    out, err = _HeadAndTail(output_limit), _HeadAndTail(output_limit)
    assert process.stdout is not None and process.stderr is not None
    drains = [
        asyncio.ensure_future(_drain_stream(process.stdout, out)),
        asyncio.ensure_future(_drain_stream(process.stderr, err)),
    ]
    if process.stdin is not None:
        drains.append(asyncio.ensure_future(_feed_stream(process.stdin, given)))
    try:
        async with asyncio.timeout(timeout_s):
            returncode = await _until_exit(process)
        # A grandchild that was left behind goes now, and its hold on the pipes with it; one that
        # made itself a session of its own may keep them, and is not waited for.
        _signal_group(process.pid, signal.SIGKILL)
        await asyncio.wait(drains, timeout=_DRAIN_PATIENCE_S)
    except TimeoutError:
        raise RigError(
            "TIMEOUT", f"{Path(argv[0]).name} did not end within {timeout_s:g} s and was stopped"
        ) from None
    finally:
        _signal_group(process.pid, signal.SIGKILL)
        _attached_groups.discard(process.pid)
        for drain in drains:
            drain.cancel()
        await _until_exit(process)
    return Finished(returncode, out.text(), err.text(), out.dropped + err.dropped)


def spawn_detached(
    argv: Sequence[str], *, label: str, environment: Mapping[str, str], log: Path, folder: Path
) -> int:
    """Start `argv` so that it outlives this process; its output is appended to `log` (0600).

    Returns the pid, which is also the process group's id. `label` goes into its environment, where
    `find_labelled` sees it. Raises RigError NOT_FOUND or DENIED.
    """
    private_folder(log.parent)
    try:
        flags = os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC
        output = os.open(log, flags, 0o600)
        try:
            child = subprocess.Popen(
                list(argv),
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                env={**environment, LABEL_VARIABLE: label},
                cwd=folder,
                start_new_session=True,
            )
        finally:
            os.close(output)
    except FileNotFoundError as error:
        raise RigError("NOT_FOUND", f"{error.filename or argv[0]} is not there") from error
    except (OSError, ValueError) as error:
        raise RigError("DENIED", f"{argv[0]} cannot be started: {error}") from error
    _detached_children.append(child)
    # For an instant the kernel shows no environment of it, and it would look like nobody's.
    deadline = time.monotonic() + _LABEL_PATIENCE_S
    while child.poll() is None and process_label(child.pid) != label:
        if time.monotonic() > deadline:
            break
        time.sleep(0.002)
    return child.pid


def _reap_children() -> None:
    """Collect ended detached children, so that they do not stay in the table as zombies."""
    _detached_children[:] = [child for child in _detached_children if child.poll() is None]


def process_label(pid: int) -> str | None:
    """The label that the live process `pid` carries; None if it is gone, a zombie or not ours.

    The label, not the pid, is the identity: a pid may have been given to another process since.
    A process without any environment is looked at again for a moment: it may be on its way from one
    program to the next (exec), and still be ours.
    """
    import psutil

    _reap_children()
    deadline = time.monotonic() + _EXEC_PATIENCE_S
    try:
        process = psutil.Process(pid)
        while process.status() != psutil.STATUS_ZOMBIE:
            environment = process.environ()
            kernels = process.ppid() in _KERNEL_PARENTS
            if environment or kernels or time.monotonic() > deadline:
                return environment.get(LABEL_VARIABLE)
            time.sleep(0.002)
    except (psutil.Error, OSError, ValueError):
        pass
    return None


def labelled_family(label: str) -> list[int]:
    """The pids of all live processes with exactly this label: it is inherited. Oldest first."""
    import psutil

    processes = psutil.process_iter(["create_time"], ad_value=0.0)
    in_order = sorted(processes, key=lambda process: float(process.info["create_time"]))
    return [process.pid for process in in_order if process_label(process.pid) == label]


def _leads_group(pid: int) -> bool:
    try:
        return os.getpgid(pid) == pid
    except OSError:
        return False


def labelled_leaders(prefix: str) -> list[tuple[int, str]]:
    """(pid, label) of every live group leader whose label begins with `prefix`."""
    import psutil

    found = []
    for pid in psutil.pids():
        label = process_label(pid) if _leads_group(pid) else None
        if label is not None and label.startswith(prefix):
            found.append((pid, label))
    return found


def find_labelled(label: str) -> list[int]:
    """The pids of all live group leaders with exactly this label, oldest first."""
    return [pid for pid in labelled_family(label) if _leads_group(pid)]


async def stop_detached(pid: int, label: str, patience_s: float) -> bool:
    """End the detached group `pid` if it carries `label`: SIGTERM, after `patience_s` SIGKILL.

    Returns whether it is gone now; a process under this pid with another label is never touched.
    """
    for number, patience in ((signal.SIGTERM, patience_s), (signal.SIGKILL, 5.0)):
        deadline = time.monotonic() + patience
        if process_label(pid) == label:
            _signal_group(pid, number)
        while process_label(pid) == label and time.monotonic() < deadline:
            await asyncio.sleep(0.05)
    # What it started may have ignored the SIGTERM, or be of a group of its own.
    for relative in labelled_family(label):
        if relative != os.getpid():
            with suppress(ProcessLookupError, PermissionError):
                os.kill(relative, signal.SIGKILL)
    deadline = time.monotonic() + _LABEL_PATIENCE_S
    while process_label(pid) == label and time.monotonic() < deadline:
        await asyncio.sleep(0.02)
    return process_label(pid) != label


def kill_attached() -> None:
    """Kill every attached program's group at once: the last act before this process goes."""
    for group in list(_attached_groups):
        _signal_group(group, signal.SIGKILL)
    # One that was being started this very moment is a child already, and in no list yet.
    for pid in _children():
        if pid not in {child.pid for child in _detached_children} and not process_label(pid):
            with suppress(ProcessLookupError, PermissionError):
                os.kill(pid, signal.SIGKILL)


def _children() -> list[int]:
    import psutil

    try:
        return [child.pid for child in psutil.Process().children()]
    except (psutil.Error, OSError):
        return []


def _leave_at_once(number: int, _frame: FrameType | None) -> None:
    kill_attached()
    # sys.exit would wait for the SDK's stdin thread, which only ends with the client.
    os._exit(128 + number)


def leave_on_signals() -> None:
    """Make SIGINT, SIGTERM and SIGHUP end this process at once and take attached programs along."""
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, _leave_at_once)


# ── boundaries / aws_refusals ─────────────────────────────────────────────────────────────────────
# What AWS's SDK raised as refusals that say what to do.
#
# Pure functions over error codes; botocore's own words stay in the text, because others read them.
# Knows no rig and no resource. Codes: the API references of EC2, SSM, Secrets Manager, IAM and S3,
# and botocore 1.44.8's exceptions (2026-11-30); one that is not known becomes UNKNOWN, never a
# guess.

AWS_TEXT_QUOTED = 500  # characters of AWS's own words in an error
# Every refusal that quotes AWS ends with a step of ours: others' words may end with one of theirs.
_AWS_CORRECT = "correct what tpu.env names, then repeat"
_AWS_READS = ("describe_", "get_", "list_", "head_", "simulate_")
# EC2 appends what only `aws sts decode-authorization-message` can read, up to some kB of it.
_AWS_ENCODED = re.compile(r"\.? ?Encoded authorization failure message: ?\S+")
_AWS_PARAMETER = re.compile(
    r"^(?:Invalid [a-z ]+ for parameter (?P<wrong>[\w.\[\]]+),"
    r"|(?:Missing required|Unknown) parameter in (?P<place>[\w.\[\]]+): \"(?P<name>\w+)\")",
    re.M,
)


@dataclass(frozen=True)
class _AwsRule:
    """Codes (an expression, matched whole), a wording of the message, and what they mean."""

    codes: str
    error_class: ErrorClass
    why: str
    next_step: str
    wording: str = ""


# In this order: what is certain and specific before what is general. A throttle is called a limit
# that is exceeded, and EC2 calls both a zone and a stop of a spot machine unsupported.
_AWS_RULES = (
    _AwsRule(
        r"RequestLimitExceeded|Throttl\w+|RequestThrottled\w*|TooManyRequests\w*|SlowDown"
        r"|PriorRequestNotComplete|EC2ThrottledException",
        *("BUSY", "too many calls in a short time; nothing was done"),
        "wait a minute, then repeat",
    ),
    _AwsRule(
        r"Insufficient(?:Instance|Host|ReservedInstance)?Capacity\w*",
        *("CAPACITY", "the zone has no such machine free now", "another zone, or later"),
    ),
    _AwsRule(
        "Unsupported",
        *("CAPACITY", "the zone does not offer this machine", "a zone that lists the type"),
        wording=r"requested Availability Zone|requested configuration is currently not supported",
    ),
    _AwsRule(
        "SpotMaxPriceTooLow",
        *("CAPACITY", "spot costs more now than the request allows"),
        "SPOT_MAX_PRICE=0 in tpu.env (up to the on-demand price), or rent on demand",
    ),
    _AwsRule(
        r"(?:VcpuLimit|InstanceLimit|MaxSpotInstanceCount)Exceeded|\w*LimitExceeded\w*"
        r"|\w*QuotaExceeded\w*",
        *("QUOTA", "a limit of the account in this region is reached"),
        "another region, or a person requests more (Service Quotas)",
    ),
    _AwsRule(
        r"AuthFailure|InvalidClientTokenId|InvalidAccessKeyId|UnrecognizedClientException"
        r"|ExpiredToken\w*|RequestExpired|SignatureDoesNotMatch|InvalidSignature\w*"
        r"|IncompleteSignature\w*|MissingAuthenticationToken\w*|InvalidToken|RequestTimeTooSkewed",
        *("AUTH", "AWS does not accept the credentials"),
        "a person runs: aws sso login, or renews the keys, and checks this computer's clock; a "
        "region that the account has not enabled answers so as well",
    ),
    _AwsRule(
        "OptInRequired|PendingVerification|Blocked|AccountDisabled|AccountProblem",
        *("DENIED", "the account may not ask for this"),
        "a person settles it with AWS (the account's state, or enabling the region)",
    ),
    _AwsRule(
        r"UnauthorizedOperation|AccessDenied\w*|NotAuthorized\w*|Forbidden|403",
        *("DENIED", "the identity may not do this"),
        "a person allows what the text names in the identity's policy",
    ),
    _AwsRule(
        "OperationNotPermitted",
        *("DENIED", "a protection forbids it", "a person takes the protection off"),
    ),
    _AwsRule(
        r"InvalidInstanceId|TargetNotConnected",
        *("UNREACHABLE", "Systems Manager does not reach the machine: its agent is not online"),
        "wait a minute; if it stays so: does it run, may its instance profile use "
        "AmazonSSMManagedInstanceCore, has its subnet a way out?",
    ),
    _AwsRule(
        "IdempotentParameterMismatch",
        *("EXISTS", "an earlier request of this token asked for something else"),
        "look at what is there",
    ),
    _AwsRule(
        r"EntityAlreadyExists\w*|ResourceExists\w*|Invalid\w+\.Duplicate|BucketAlready\w+",
        *("EXISTS", "it is there already", "look at what is there"),
    ),
    _AwsRule(
        r"Incorrect(?:Instance)?State|DependencyViolation|DeleteConflict\w*|OperationAborted"
        r"|ConcurrentModification\w*|ResourceInUse\w*|InvalidGroup\.InUse",
        *("BUSY", "its state does not allow this now", "look at its state, then repeat"),
    ),
    _AwsRule(
        r"ParameterNotFound|ResourceNotFound\w*|NoSuch\w+|InvocationDoesNotExist|404",
        *("NOT_FOUND", "AWS has no such thing", ""),
    ),
)
# By the names of botocore's exceptions, most specific first; what is not sent was not done.
_AWS_LOGIN = re.compile(
    r"NoCredentialsError|PartialCredentialsError|CredentialRetrievalError|ProfileNotFound"
    r"|ConfigParseError|ConfigNotFound|NoAuthTokenError|TokenRetrievalError|SSOError|LoginError"
    r"|UnknownCredentialError|InvalidConfigError|MetadataRetrievalError"
    r"|RefreshWithMFAUnsupportedError|MissingDependencyException"
)
_AWS_UNSENT = re.compile(
    "EndpointConnectionError|ConnectTimeoutError|ProxyConnectionError|InvalidProxiesConfigError"
)
_AWS_NETWORK = re.compile("HTTPClientError|ConnectionError|IncompleteReadError|OSError")
_AWS_USAGE = re.compile(
    "ParamValidationError|ValidationError|NoRegionError|DataNotFoundError|EndpointProviderError"
    "|EndpointVariantError|InvalidEndpointConfigurationError|BaseEndpointResolverError"
)


def aws_refusal(error: Exception, operation: str) -> RigError:
    """What the SDK raised in `operation` (boto3's method name) as the RigError that it means.

    CAPACITY, QUOTA, DENIED, AUTH, INVALID, EXISTS, NOT_FOUND, BUSY as AWS said. Where a request
    did not go out, UNREACHABLE; where it did and its fate is not known, UNREACHABLE for a read and
    UNKNOWN for a change. UNKNOWN too for a code or an answer that is not known.
    """
    if isinstance(error, RigError):
        return error
    kinds = " ".join(kind.__name__ for kind in type(error).__mro__)
    if "ClientError" in kinds.split() and hasattr(error, "response"):
        return _answered_refusal(error, operation)
    if isinstance(error, ImportError):
        why = f"AWS's SDK is not whole: {error.name or 'a module'} is not installed"
        return RigError("DENIED", why, "make install in the rig's folder")
    said = _aws_words(str(error))
    if _AWS_LOGIN.search(kinds):
        step = "a person runs: aws sso login, or aws configure; AWS_PROFILE in tpu.env names which"
        return RigError("AUTH", f"there are no AWS credentials to use: {said}", step)
    if "ParamValidationError" in kinds:
        # Its words repeat the values, and a value may be a secret.
        found = _AWS_PARAMETER.finditer(str(error))
        names = dict.fromkeys(m["wrong"] or m["name"] for m in found)
        why = f"{operation} was not sent: these are not as AWS wants them: {', '.join(names)}"
        return RigError("INVALID", why)
    if _AWS_UNSENT.search(kinds):
        step = "check this computer's network, then repeat"
        return RigError("UNREACHABLE", f"AWS could not be reached: {said}", step)
    if _AWS_NETWORK.search(kinds):
        return aws_fate(f"the connection to AWS broke in {operation}: {said}", operation)
    if _AWS_USAGE.search(kinds):
        return RigError("INVALID", f"{operation} was not sent: {said}", _AWS_CORRECT)
    why = f"AWS's SDK failed on {operation} ({type(error).__name__}): {said}"
    return RigError("UNKNOWN", why, "read the state before anything is repeated")


def aws_reads(operation: str) -> bool:
    """Whether `operation` (boto3's method name) changes nothing, so that a repeat does no harm."""
    return operation.startswith(_AWS_READS)


def aws_fate(how: str, operation: str) -> RigError:
    """The RigError for a request that may have arrived, and whose answer did not."""
    if aws_reads(operation):
        return RigError("UNREACHABLE", how, "check this computer's network, then read again")
    why = f"{how}; it may have been done all the same"
    return RigError("UNKNOWN", why, "read the state before anything is repeated")


def aws_code(error: Exception) -> str:
    """The code that AWS answered with, such as InvalidVolume.NotFound; empty without an answer."""
    response = getattr(error, "response", None)
    found = response.get("Error") if isinstance(response, dict) else None
    return str(found.get("Code", "")) if isinstance(found, dict) else ""


def _answered_refusal(error: Exception, operation: str) -> RigError:
    code, said = aws_code(error), _aws_words(str(error))
    for rule in _AWS_RULES:
        if re.fullmatch(rule.codes, code) and re.search(rule.wording, said):
            return RigError(rule.error_class, f"{rule.why}: {said}", rule.next_step)
    response = getattr(error, "response", {})
    status = response.get("ResponseMetadata", {}).get("HTTPStatusCode", 0)
    if re.match("Internal|ServiceUnavailable|Unavailable", code) or status >= 500:
        return aws_fate(f"AWS failed at it: {said}", operation)
    if code.endswith((".NotFound", ".Unknown")):
        # What a request for something new names and is not there is a wrong setting, and must
        # never look like the absence of the new thing.
        if operation.startswith(("run_", "create_", "request_")):
            why = f"something that it names is not there: {said}"
            return RigError("INVALID", why, _AWS_CORRECT)
        return RigError("NOT_FOUND", f"AWS has no such thing: {said}", "look what is there")
    if re.match(r"Invalid|Missing|Validation|Malformed|Unsupported|Unknown|Max\w+Size|400", code):
        return RigError("INVALID", f"AWS refused the request itself: {said}", _AWS_CORRECT)
    why = f"AWS answered in a way that is not known here: {said}"
    return RigError("UNKNOWN", why, "read the state again")


def _aws_words(text: str) -> str:
    """The SDK's words in one line, without what only a program can read."""
    kept = _AWS_ENCODED.sub(" (with an encoded message)", text[:20_000])
    return clean(" ".join(printable(kept).split()), AWS_TEXT_QUOTED)


# ── boundaries / ssm_plugin ───────────────────────────────────────────────────────────────────────
# AWS's session-manager-plugin on this computer: where it is, and whether it can be used.
#
# It carries a port through Systems Manager and is no part of AWS's SDK. Knows no session.

SSM_PLUGIN = "session-manager-plugin"
SSM_PLUGIN_INSTALL = (
    "a person installs AWS's Session Manager plugin: on Debian and Ubuntu its "
    "session-manager-plugin.deb with sudo dpkg -i, on macOS with brew install --cask "
    "session-manager-plugin; see https://docs.aws.amazon.com/systems-manager/latest/userguide/"
    "session-manager-working-with-install-plugin.html"
)
# Up to this release the plugin takes the session, its token included, as an argument only; and AWS
# announced that it will refuse releases before the second. Both: awscli 1.46.3, sessionmanager.py.
_SSM_PLUGIN_OPEN = (1, 2, 497, 0)
_SSM_PLUGIN_ADVISED = (1, 2, 764, 0)
_SSM_PLUGIN_VERSION = re.compile(r"\d{1,5}(?:\.\d{1,5}){0,3}")
_SSM_PLUGIN_S = 20.0  # seconds for its own word on its release


@dataclass(frozen=True)
class SsmPlugin:
    """`path` is absolute; `caution` is empty, or what to know about this release."""

    path: str
    version: str
    caution: str


async def find_ssm_plugin(environment: Mapping[str, str] | None = None) -> SsmPlugin:
    """The plugin of PATH, of a release that hides the session's token from other users.

    Raises NOT_FOUND where there is none and DENIED for one that is too old or says no release,
    both with how to install it.
    """
    source = os.environ if environment is None else environment
    found = shutil.which(SSM_PLUGIN, path=source.get("PATH"))
    if found is None:
        raise RigError("NOT_FOUND", f"there is no {SSM_PLUGIN} on PATH", SSM_PLUGIN_INSTALL)
    path = os.path.abspath(found)
    ended = await run_program([path, "--version"], timeout_s=_SSM_PLUGIN_S, environment=environment)
    version = ended.stdout.strip()
    if ended.returncode != 0 or not _SSM_PLUGIN_VERSION.fullmatch(version):
        why = f"{path} does not say which release it is"
        raise RigError("DENIED", why, SSM_PLUGIN_INSTALL)
    numbers = tuple(int(part) for part in version.split("."))
    numbers += (0,) * (4 - len(numbers))
    if numbers <= _SSM_PLUGIN_OPEN:
        why = f"{path} is of release {version}, which shows a session's token to every user"
        raise RigError("DENIED", why, SSM_PLUGIN_INSTALL)
    if numbers < _SSM_PLUGIN_ADVISED:
        advised = ".".join(str(number) for number in _SSM_PLUGIN_ADVISED)
        caution = f"release {version} is older than {advised}, the oldest that AWS will support"
        return SsmPlugin(path, version, caution)
    return SsmPlugin(path, version, "")


# ── programs / ssm_tunnel ─────────────────────────────────────────────────────────────────────────

# As awscli 1.46.3 starts the plugin (its sessionmanager.py): the name of this variable stands in
# the place of the session itself.
TUNNEL_VARIABLE = "AWS_SSM_START_SESSION_RESPONSE"
TUNNEL_DOCUMENT = "AWS-StartPortForwardingSession"
_TUNNEL_CALL_S = 15.0  # seconds to connect and for the answer


def main(argv: list[str] | None = None) -> int:
    """The command line; returns the exit status only where the plugin did not take over."""
    given = _arguments(argv)
    try:
        plugin = asyncio.run(find_ssm_plugin())
    except RigError as error:
        print(error, file=sys.stderr)
        return 3
    if plugin.caution:
        print(f"{plugin.path}: {plugin.caution}", file=sys.stderr)
    try:
        become_plugin(plugin, given)
    except RigError as error:
        print(error, file=sys.stderr)
    return 1


def become_plugin(plugin: SsmPlugin, given: argparse.Namespace) -> None:
    """Start the session and replace this process. Returns never; raises RigError without a session.

    One attempt: a second session would be one that nobody uses.
    """
    request: dict[str, Any] = {
        "Target": given.instance,
        "DocumentName": TUNNEL_DOCUMENT,
        "Parameters": {
            "portNumber": [str(given.remote_port)],
            "localPortNumber": [str(given.local_port)],
        },
    }
    try:
        client = _tunnel_client(given.region, given.profile)
        session = client.start_session(**request)
    except Exception as error:
        raise aws_refusal(error, "start_session") from None
    response = {name: session[name] for name in ("SessionId", "TokenValue", "StreamUrl")}
    words = [plugin.path, TUNNEL_VARIABLE, given.region, "StartSession", given.profile]
    words += [json.dumps(request), client.meta.endpoint_url]
    signal.signal(signal.SIGPIPE, signal.SIG_DFL)  # what Python ignores is inherited
    try:
        os.execve(plugin.path, words, {**os.environ, TUNNEL_VARIABLE: json.dumps(response)})
    except OSError as error:
        with suppress(Exception):  # or it would wait on the machine until it is given up there
            client.terminate_session(SessionId=session["SessionId"])
        why = f"{plugin.path} cannot be started: {error.strerror}"
        raise RigError("DENIED", why, "install it anew") from None


def _arguments(argv: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="ssm_tunnel.py",
        description=(__doc__ or "").partition("\n")[0],
        epilog="exit status: 1 AWS gave no session, 2 wrong usage, 3 no plugin that can be used",
    )
    form = _form(r"i-[0-9a-f]{8,17}", "an instance's id")
    parser.add_argument("instance", type=form, help="the machine, such as i-0123456789abcdef0")
    form = _form(r"[a-z]{2}(-[a-z]{2,12}){1,3}-[0-9]{1,2}", "a region")
    parser.add_argument("region", type=form, help="its region, such as us-east-1")
    parser.add_argument("remote_port", type=_port, help="the machine's port")
    parser.add_argument("local_port", type=_port, help="the port of this computer's loopback")
    form = _form(r"[A-Za-z0-9_@:/. +-]{0,120}", "a profile's name")
    parser.add_argument("profile", type=form, nargs="?", default="", help="a profile of ~/.aws")
    return parser.parse_args(argv)


def _form(shape: str, what: str) -> Any:
    def checked(text: str) -> str:
        if not re.fullmatch(shape, text):
            raise argparse.ArgumentTypeError(f"is not {what}")
        return text

    return checked


def _port(text: str) -> int:
    if not re.fullmatch(r"[0-9]{1,5}", text) or not 1 <= int(text) <= 65535:
        raise argparse.ArgumentTypeError("is not a port")
    return int(text)


def _tunnel_client(region: str, profile: str) -> Any:
    import boto3  # type: ignore[import-untyped]
    from botocore.config import Config  # type: ignore[import-untyped]

    once = {"mode": "standard", "total_max_attempts": 1}
    config = Config(connect_timeout=_TUNNEL_CALL_S, read_timeout=_TUNNEL_CALL_S, retries=once)
    session = boto3.Session(profile_name=profile or None)
    return session.client("ssm", region_name=region, config=config)


if __name__ == "__main__":
    sys.exit(main())
