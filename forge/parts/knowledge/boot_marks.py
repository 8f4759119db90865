"""Reads the marks that a rented machine writes while it boots, and what they say of the boot.

They stand in a console's text among everything else that writes there, and that text is data. Knows
no machine, no provider and no runtime.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Literal, get_args

from forge.parts.ground.redact import clean, printable

BootMarkState = Literal["begin", "done", "failed", "note"]
BootPhaseState = Literal["waiting", "skipped", "running", "done", "failed"]

# All that any rig's boot may have, in their order; a boot has those of its runtime.
BOOT_PHASES = (
    *("driver", "docker", "image", "build", "environment", "token"),
    *("weights", "device", "compile", "load", "ready"),
)
_IDLE = "idle"  # not a phase of the boot: the machine ends itself
_BOOT_MARKS_LIMIT = 2_000  # the newest ones; a boot has about twenty
_BOOT_LINE_LIMIT = 2_000  # characters
_BOOT_WORDS_LIMIT = 600  # characters

# What may stand before a mark on one line: nothing, a login prompt that was waiting for its answer,
# or the start-up agent's own name with stamps and a host, as the consoles and journals of Google's
# images have it under its names since 2020, and those of other clouds under cloud-init's. Anything
# else is somebody else's line: sshd's, say, which quotes the user name that a stranger sent.
_BOOT_STAMP = (
    r"(?:\[ *\d+\.\d+\]|[A-Z][a-z]{2} +\d+ [\d:]{5,8}"
    r"|\d{4}[-/]\d\d[-/]\d\d(?:[T ][\d:.]+(?:Z|[+-]\d\d:?\d\d)?)?)"
)
_BOOT_AGENTS = "google_metadata_script_runner|GCEMetadataScripts|startup-script|cloud-init"
_BOOT_AGENT = rf"(?:{_BOOT_AGENTS})(?:\[\d+\])?:"
_BOOT_PREFIX = (
    rf"(?:[\w.-]+ login: |(?:{_BOOT_STAMP} )?(?:[\w.-]+ )?(?:{_BOOT_AGENT} (?:{_BOOT_STAMP} )?)+)?"
)
_BOOT_LINE = re.compile(
    rf"{_BOOT_PREFIX}GEMMA4-BOOT ({'|'.join((*BOOT_PHASES, _IDLE))})"
    rf" ({'|'.join(get_args(BootMarkState))}) ([1-9]\d{{9}})(?: (.*))?"
)


@dataclass(frozen=True)
class BootMark:
    """One mark: `phase` is one of BOOT_PHASES or idle, `at_unix` seconds, `words` redacted."""

    phase: str
    state: BootMarkState
    at_unix: int
    words: str = ""


@dataclass(frozen=True)
class BootPhase:
    """One phase of the latest boot.

    It is "skipped" when a later one was spoken of without it. `seconds` is how long it took, None
    before its end. `words` are those of its last mark.
    """

    phase: str
    state: BootPhaseState = "waiting"
    begin_unix: int | None = None
    seconds: int | None = None
    words: str = ""


@dataclass(frozen=True)
class BootState:
    """The latest boot.

    `phase` is the one that it is in, waits for, failed in or ended with; empty where no mark has
    been seen. `words` are the newest of the boot. `seconds` has the phases that are over,
    `began_unix` is 0 where no beginning was seen. `failed` is the phase and the reason, `ending`
    why the machine ends itself; both are empty otherwise.
    """

    phases: tuple[BootPhase, ...]
    phase: str = ""
    words: str = ""
    seconds: Mapping[str, float] = field(default_factory=dict)
    began_unix: int = 0
    ready: bool = False
    failed: str = ""
    ending: str = ""


def boot_marks(text: str) -> list[BootMark]:
    """The marks in `text`, oldest first; lines that are cut before their time are left out.

    A mark stands there twice where both the console and the start-up agent wrote it: one of them
    is taken, the longer one if the other was cut.
    """
    marks: list[BootMark] = []
    places: dict[tuple[str, str, int], list[int]] = {}
    lines = [line for line in re.split(r"[\r\n]+", text) if "GEMMA4-BOOT" in line]
    for line in lines[-2 * _BOOT_MARKS_LIMIT :]:
        found = _BOOT_LINE.fullmatch(printable(line[:_BOOT_LINE_LIMIT]).strip())
        if not found:
            continue
        phase, state, at, words = found.groups(default="")
        words = " ".join(clean(words).split())[:_BOOT_WORDS_LIMIT]
        mark = BootMark(phase, _mark_state(state), int(at), words)
        same = places.setdefault((phase, state, int(at)), [])
        for place in same:
            known = marks[place].words
            if known.startswith(mark.words) or mark.words.startswith(known):
                marks[place] = max(marks[place], mark, key=lambda one: len(one.words))
                break
        else:
            same.append(len(marks))
            marks.append(mark)
    return marks[-_BOOT_MARKS_LIMIT:]


def latest_boot_marks(marks: Sequence[BootMark], first: str) -> list[BootMark]:
    """Those since the last boot began with its phase `first`, by their times; all where none did.

    The order of lines is not relied on: the agent's copy of a mark may come after the next mark.
    """
    ordered = sorted(marks, key=lambda mark: mark.at_unix)
    begun = [n for n, m in enumerate(ordered) if (m.phase, m.state) == (first, "begin")]
    return ordered[begun[-1] :] if begun else ordered


def boot_phases(marks: Sequence[BootMark], names: Sequence[str]) -> tuple[BootPhase, ...]:
    """The phases `names`, a runtime's in their order, as the latest boot went through them."""
    latest = latest_boot_marks(marks, names[0])
    phases: list[BootPhase] = []
    for name in names:
        own = [mark for mark in latest if mark.phase == name]
        begins = [mark.at_unix for mark in own if mark.state == "begin"]
        ends = [mark for mark in own if mark.state in ("done", "failed")]
        phase = BootPhase(name, words=own[-1].words if own else "")
        if ends:
            state: BootPhaseState = "failed" if ends[-1].state == "failed" else "done"
            begin = min([*begins, ends[-1].at_unix])
            took = ends[-1].at_unix - begin
            phase = replace(phase, state=state, begin_unix=begin, seconds=took)
        elif begins:
            phase = replace(phase, state="running", begin_unix=begins[0])
        phases.append(phase)
    known = {mark.phase for mark in latest}
    reached = max((n for n, name in enumerate(names) if name in known), default=0)
    return tuple(
        replace(phase, state="skipped") if n < reached and phase.state == "waiting" else phase
        for n, phase in enumerate(phases)
    )


def boot_state(text: str, names: Sequence[str]) -> BootState:
    """What the console's `text` says of the latest boot.

    `names` are its phases: the first one begins it, the last one ends it. A failure counts until
    that end is marked.
    """
    latest = latest_boot_marks(boot_marks(text), names[0])
    phases = boot_phases(latest, names)
    own = [mark for mark in latest if mark.phase in names]
    ends = [mark for mark in latest if mark.phase == _IDLE and mark.state == "begin"]
    bad = [mark for mark in own if mark.state == "failed"]
    ready = phases[-1].state == "done"
    ahead = [one.phase for one in phases if one.state in ("running", "waiting")]
    began = own and (own[0].phase, own[0].state) == (names[0], "begin")
    state = BootState(
        phases=phases,
        phase=(ahead or [names[-1]])[0] if own else "",
        words=own[-1].words if own else "",
        seconds={one.phase: float(one.seconds) for one in phases if one.seconds is not None},
        began_unix=own[0].at_unix if began else 0,
        ready=ready,
        ending=ends[-1].words if ends else "",
    )
    if bad and not ready:
        return replace(state, phase=bad[-1].phase, failed=f"{bad[-1].phase}: {bad[-1].words}")
    return state


def _mark_state(word: str) -> BootMarkState:
    """`word` as the type knows it."""
    return next(state for state in get_args(BootMarkState) if state == word)
