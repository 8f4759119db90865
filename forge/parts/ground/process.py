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
from dataclasses import dataclass
from pathlib import Path
from types import FrameType

from forge.parts.ground.errors import RigError
from forge.parts.ground.state import private_folder

LABEL_VARIABLE = "GEMMA4_RIG_LABEL"
OUTPUT_LIMIT = 64_000  # bytes kept of one program's output: a third of it head, the rest tail

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


def _signal_group(group: int, number: int) -> None:
    try:
        os.killpg(group, number)
    except (ProcessLookupError, PermissionError):
        pass


async def run_program(
    argv: Sequence[str],
    *,
    timeout_s: float,
    environment: Mapping[str, str] | None = None,
    folder: Path | None = None,
    output_limit: int = OUTPUT_LIMIT,
) -> Finished:
    """Run `argv` to its end and return its status and bounded output.

    The whole process group is killed on cancellation, on timeout and when this server exits, also
    what the program started itself. Raises RigError NOT_FOUND when the program is not there and
    TIMEOUT after `timeout_s` seconds (for an act that changes something, that means UNKNOWN).
    """
    try:
        process = await asyncio.create_subprocess_exec(
            *argv,
            stdin=asyncio.subprocess.DEVNULL,
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
    try:
        async with asyncio.timeout(timeout_s):
            await asyncio.gather(
                _drain_stream(process.stdout, out), _drain_stream(process.stderr, err)
            )
            returncode = await process.wait()
    except TimeoutError:
        raise RigError(
            "TIMEOUT", f"{Path(argv[0]).name} did not end within {timeout_s:g} s and was stopped"
        ) from None
    finally:
        # Also after a normal end: a grandchild that was left behind goes with its group.
        _signal_group(process.pid, signal.SIGKILL)
        _attached_groups.discard(process.pid)
        if process.returncode is None:
            await asyncio.shield(process.wait())
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
        raise RigError("NOT_FOUND", f"the program {argv[0]} is not there") from error
    except OSError as error:
        raise RigError("DENIED", f"{argv[0]} cannot be started: {error.strerror}") from error
    _detached_children.append(child)
    return child.pid


def _reap_children() -> None:
    """Collect ended detached children, so that they do not stay in the table as zombies."""
    _detached_children[:] = [child for child in _detached_children if child.poll() is None]


def process_label(pid: int) -> str | None:
    """The label that the live process `pid` carries; None if it is gone, a zombie or not ours.

    The label, not the pid, is the identity: a pid may have been given to another process since.
    """
    import psutil

    _reap_children()
    try:
        process = psutil.Process(pid)
        if process.status() == psutil.STATUS_ZOMBIE:
            return None
        return process.environ().get(LABEL_VARIABLE)
    except (psutil.Error, OSError, ValueError):
        return None


def find_labelled(label: str) -> list[int]:
    """The pids of all live group leaders with exactly this label, oldest first."""
    import psutil

    _reap_children()
    found: list[tuple[float, int]] = []
    for process in psutil.process_iter():
        try:
            if process.environ().get(LABEL_VARIABLE) != label:
                continue
            if process.status() != psutil.STATUS_ZOMBIE and os.getpgid(process.pid) == process.pid:
                found.append((process.create_time(), process.pid))
        except (psutil.Error, OSError, ValueError):
            continue
    return [pid for _, pid in sorted(found)]


async def stop_detached(pid: int, label: str, patience_s: float) -> bool:
    """End the detached group `pid` if it carries `label`: SIGTERM, after `patience_s` SIGKILL.

    Returns whether it is gone now; a process under this pid with another label is never touched.
    """
    deadline = time.monotonic() + patience_s
    number = signal.SIGTERM
    while process_label(pid) == label:
        _signal_group(pid, number)
        while process_label(pid) == label and time.monotonic() < deadline:
            await asyncio.sleep(0.05)
        if number == signal.SIGKILL:
            break
        number, deadline = signal.SIGKILL, time.monotonic() + 5.0
    return process_label(pid) != label


def kill_attached() -> None:
    """Kill every attached program's group at once: the last act before this process goes."""
    for group in list(_attached_groups):
        _signal_group(group, signal.SIGKILL)


def _leave_at_once(number: int, _frame: FrameType | None) -> None:
    kill_attached()
    # sys.exit would wait for the SDK's stdin thread, which only ends with the client.
    os._exit(128 + number)


def leave_on_signals() -> None:
    """Make SIGINT, SIGTERM and SIGHUP end this process at once and take attached programs along."""
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, _leave_at_once)
