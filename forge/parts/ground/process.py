"""The only place that starts a program: argument lists, no shell, stdin closed, own process group.

Attached programs end with the call, the client or this server; detached ones (a local model server,
a job's worker) outlive it on purpose and carry a label by which any later server knows them again.
"""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from types import FrameType

from forge.parts.ground.errors import RigError
from forge.parts.ground.state import private_folder

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
