"""Starts of the model by phase: read from the rig's own records, compared, as text and picture.

Knows the files that starting leaves behind (starts, jobs, journal) and no engine.
"""

from __future__ import annotations

import json
import statistics
import struct
import time
import zlib
from collections.abc import Sequence
from dataclasses import dataclass, field
from datetime import datetime

from forge.parts.ground.jobs import JobRecord
from forge.parts.toolsets.starts import SERVE_JOB
from forge.parts.toolsets.toolset import RigContext

_STARTS_SHOWN = 8
_BAR_WIDTH = 40  # characters
_BLOCKS = "█▓▒░▞▚▤▥"  # one pattern a phase, told apart without colour
# Okabe and Ito's colours: told apart with any kind of colour vision.
_PHASE_COLOURS = (
    ("blue", b"\x00\x72\xb2"),
    ("vermilion", b"\xd5\x5e\x00"),
    ("green", b"\x00\x9e\x73"),
    ("purple", b"\xcc\x79\xa7"),
    ("sky blue", b"\x56\xb4\xe9"),
    ("orange", b"\xe6\x9f\x00"),
    ("yellow", b"\xf0\xe4\x42"),
    ("black", b"\x00\x00\x00"),
)
_WHITE, _GREY = b"\xff\xff\xff", b"\xc8\xc8\xc8"
_PICTURE_WIDTH, _BAR_HEIGHT, _BAR_GAP = 640, 18, 8  # pixels


@dataclass(frozen=True)
class BootRecord:
    """One start: when, of what, how it ended, and seconds by phase (empty where nobody knows)."""

    at: str
    model: str
    outcome: str
    seconds: dict[str, float] = field(default_factory=dict)
    phase: str = ""
    total: float = 0.0


def boot_records(context: RigContext) -> list[BootRecord]:
    """The rig's starts, oldest first: by phase where they came up, else by what is known."""
    starts = [*_finished_starts(context), *_other_starts(context)]
    return sorted(starts, key=lambda start: start.at)[-_STARTS_SHOWN:]


def _finished_starts(context: RigContext) -> list[BootRecord]:
    found = []
    try:
        text = (context.paths.state / "starts.jsonl").read_text("utf-8", errors="replace")
    except OSError:
        return []
    for line in text.splitlines()[-200:]:
        try:
            entry = json.loads(line)
            seconds = {str(k): max(0.0, float(v)) for k, v in entry["seconds"].items()}
            found.append(BootRecord(str(entry["at"]), str(entry["model"]), "ready", seconds))
        except (ValueError, KeyError, TypeError, AttributeError):
            continue
    return found


def _other_starts(context: RigContext) -> list[BootRecord]:
    """Starts that failed, were cancelled or are under way, from the job records.

    The phase that a killed worker was in has no end on record and is left out.
    """
    return [
        BootRecord(
            at=job.created_at,
            model=str(job.arguments.get("model", "")),
            outcome=job.state,
            seconds=_phases_so_far(job),
            phase=job.phase,
            total=job.seconds if job.finished else max(0.0, time.time() - job.created_unix),
        )
        for job in context.jobs.all()
        if job.kind == SERVE_JOB and job.state != "done"
    ]


def _phases_so_far(job: JobRecord) -> dict[str, float]:
    """Seconds by phase, the one under way included; empty on records that have no phase times."""
    known = job.phase_seconds
    seconds = {
        phase: known[phase] for phase in dict.fromkeys([*job.phases, *known]) if phase in known
    }
    if not job.finished and job.phase_started_unix:
        here = max(0.0, time.time() - job.phase_started_unix)
        seconds[job.phase] = seconds.get(job.phase, 0.0) + here
    return seconds


def standing_still(context: RigContext) -> str:
    """A sentence where the start under way has been in its phase longer than any start before.

    Empty where there is none, nothing to compare with, or no reason to say so.
    """
    job = context.jobs.active(SERVE_JOB)
    if job is None:
        return ""
    so_far = _phases_so_far(job)
    elapsed, phases = so_far.get(job.phase, 0.0), [job.phase]
    if not so_far:
        begun, phases = _phase_begun(context, job)
        elapsed = time.time() - begun
    earlier = [
        sum(start.seconds.get(phase, 0.0) for phase in phases)
        for start in _finished_starts(context)
        if start.model == job.arguments.get("model") and phases[-1] in start.seconds
    ]
    if not earlier or elapsed <= max(earlier):
        return ""
    return (
        f"The start under way has been in '{' + '.join(phases)}' for {elapsed:.0f} s, longer than "
        f"any of {len(earlier)} earlier starts (longest {max(earlier):.0f} s)."
    )


def _phase_begun(context: RigContext, job: JobRecord) -> tuple[float, list[str]]:
    """When what is going on began (seconds since the epoch), and the phases counted since then.

    For a job without phase times: two moments of it are on record all the same, the asking, and
    the start of the model server's process.
    """
    names = list(job.phases)
    process = names.index("load") if "load" in names else len(names)
    here = names.index(job.phase) if job.phase in names else 0
    for entry in reversed(context.journal.entries()):
        if entry.get("event") == "server start intended" and entry.get("serve_id") == job.id:
            begun = datetime.fromisoformat(str(entry["at"]).replace("Z", "+00:00")).timestamp()
            return begun, names[process : here + 1] or [job.phase]
    return job.created_unix, names[: here + 1] or [job.phase]


def boot_table(starts: Sequence[BootRecord]) -> str:
    """The starts as text: a line of figures and a bar each, the last against the ones before."""
    phases = phases_of(starts)
    longest = max((sum(s.seconds.values()) or s.total for s in starts), default=0.0) or 1.0
    lines = [
        "legend: "
        + ", ".join(
            f"{_block(i)} {name} ({_PHASE_COLOURS[i % len(_PHASE_COLOURS)][0]})"
            for i, name in enumerate(phases)
        ),
        "",
    ]
    for start in starts:
        total = sum(start.seconds.values()) or start.total
        figures = ", ".join(f"{n} {start.seconds[n]:.1f}" for n in phases if n in start.seconds)
        where = f" in phase '{start.phase}'" if start.phase else ""
        bar = "".join(
            _block(i) * round(_BAR_WIDTH * start.seconds.get(name, 0.0) / longest)
            for i, name in enumerate(phases)
        )
        lines.append(f"{start.at}  {start.outcome}{where}  {start.model}  {total:.1f} s  {figures}")
        lines.append(f"    {bar or '·' * round(_BAR_WIDTH * total / longest)}")
    return "\n".join(lines)


def phases_of(starts: Sequence[BootRecord]) -> list[str]:
    """The phases of all starts, in the order in which they run."""
    return list(dict.fromkeys(name for start in starts for name in start.seconds))


def compared_starts(starts: Sequence[BootRecord]) -> list[str]:
    """For the last start that came up, each phase that took longer than in any start before."""
    finished = [start for start in starts if start.outcome == "ready"]
    if len(finished) < 2:
        return []
    last = finished[-1]
    before = [start for start in finished[:-1] if start.model == last.model]
    found = []
    for name, seconds in last.seconds.items():
        known = [start.seconds[name] for start in before if name in start.seconds]
        # Below a second a difference is noise.
        if known and seconds > max(known) + 1.0:
            usual = statistics.median(known)
            found.append(
                f"'{name}' took {seconds:.1f} s, longer than ever before (longest "
                f"{max(known):.1f} s, usually {usual:.1f} s over {len(known)} starts)"
            )
    return found


def boot_picture(starts: Sequence[BootRecord]) -> bytes:
    """PNG: a stacked bar a start in the table's order, as wide as it took; a start whose phases
    are not on record is grey. Colours are named in the table's legend; needs no plot package."""
    phases = phases_of(starts)
    longest = max((sum(s.seconds.values()) or s.total for s in starts), default=0.0) or 1.0
    rows: list[bytes] = [_WHITE * _PICTURE_WIDTH] * _BAR_GAP
    for start in starts:
        parts = [
            (_PHASE_COLOURS[i % len(_PHASE_COLOURS)][1], start.seconds.get(name, 0.0))
            for i, name in enumerate(phases)
        ]
        if not start.seconds:
            parts = [(_GREY, start.total)]
        row = b"".join(
            colour * round((_PICTURE_WIDTH - 2 * _BAR_GAP) * seconds / longest)
            for colour, seconds in parts
        )
        row = (_WHITE * _BAR_GAP + row)[: 3 * _PICTURE_WIDTH]
        rows += [row.ljust(3 * _PICTURE_WIDTH, b"\xff")] * _BAR_HEIGHT
        rows += [_WHITE * _PICTURE_WIDTH] * _BAR_GAP
    return _png_of(rows, _PICTURE_WIDTH)


def _png_of(rows: Sequence[bytes], width: int) -> bytes:
    """A PNG file of rows of RGB bytes (PNG specification: 8 bits, colour type 2)."""

    def chunk(kind: bytes, data: bytes) -> bytes:
        body = kind + data
        return struct.pack(">I", len(data)) + body + struct.pack(">I", zlib.crc32(body))

    header = struct.pack(">IIBBBBB", width, len(rows), 8, 2, 0, 0, 0)
    pixels = zlib.compress(b"".join(b"\0" + row for row in rows), 9)
    parts = (chunk(b"IHDR", header), chunk(b"IDAT", pixels), chunk(b"IEND", b""))
    return b"\x89PNG\r\n\x1a\n" + b"".join(parts)


def _block(index: int) -> str:
    return _BLOCKS[index % len(_BLOCKS)]
