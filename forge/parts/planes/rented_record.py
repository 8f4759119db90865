"""Which machine is this rig's, as written down before it was asked for, so that it outlives us.

Knows no provider: what is written here is a claim, and reading the machine back decides.
"""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from forge.parts.ground.errors import RigError
from forge.parts.ground.state import read_json, write_json
from forge.parts.knowledge.sweep_plan import SweepBook

MACHINE_FILE = "machine.json"
SWEEP_FOLDER = "sweep"  # below the state folder
_SWEEP_RECORD = "sweep.json"


@dataclass(frozen=True)
class MachineRecord:
    """Where this rig's machine is, or was asked for. `provider_id` and `created_at` are empty until
    it was read back."""

    name: str
    zone: str
    intent: str
    market: str = ""
    provider_id: str = ""
    created_at: str = ""


class MachineBook:
    """The record in its file, or the one that a sweep left."""

    def __init__(self, state: Path) -> None:
        self._path = state / MACHINE_FILE
        self._aside = self._path.with_suffix(".damaged")
        self._sweep = state / SWEEP_FOLDER / _SWEEP_RECORD

    def read(self) -> MachineRecord | None:
        """What is on record; None where nothing is. A damaged record raises RigError UNKNOWN, again
        and again until another is written: a machine that it named would be called none."""
        data = read_json(self._path)
        try:
            if data is not None:
                return _machine_record(data)
        except (TypeError, ValueError):
            self._path.replace(self._aside)
        if self._aside.exists():
            raise RigError(
                "UNKNOWN",
                f"the record of this rig's machine is damaged ({self._aside}), so where it is, and "
                "whether there is one, is not known",
                "look for machines of this rig; when there is none, remove that file",
            )
        book = SweepBook(self._sweep)
        book.load()
        found, live = book.record.found, book.record.live
        if found is not None:
            one = found.request
            return MachineRecord(
                one.name, one.zone, one.intent, one.market, found.provider_id, found.created_at
            )
        if live is not None:
            return MachineRecord(live.name, live.zone, live.intent, live.market)
        return None

    def live(self) -> MachineRecord | None:
        """The request of a search that may exist and that no machine came of. RigError UNKNOWN."""
        book = SweepBook(self._sweep)
        book.load()
        live = book.record.live
        return None if live is None else MachineRecord(live.name, live.zone, live.intent)

    def write(self, record: MachineRecord) -> None:
        """Note a machine before it is asked for, and again when it was read back."""
        write_json(self._path, asdict(record))
        self._aside.unlink(missing_ok=True)
        self._forget_found(but=record.name)

    def forget_gone(self) -> None:
        """No machine of this rig exists anywhere, as was just read: what is on record, damaged or
        not, is of one that is gone, and must not stand before the one that comes next."""
        self._path.unlink(missing_ok=True)
        self._aside.unlink(missing_ok=True)
        self._forget_found()

    def _forget_found(self, but: str = "") -> None:
        """What an earlier search found is not this rig's machine any more, unless it is named."""
        with suppress(RigError):  # whoever reads a damaged record of a search tells of it
            book = SweepBook(self._sweep)
            book.load()
            found = book.record.found
            if found is not None and found.request.name != but:
                book.save(found=None)

    def forget(self, name: str) -> None:
        """The machine of that name is gone, or was never made. A damaged record stays as it is:
        what is gone is gone all the same, and whoever reads the record tells of it."""
        with suppress(RigError):
            record = self.read()
            if record is None or record.name != name:
                return
            self._path.unlink(missing_ok=True)
            book = SweepBook(self._sweep)
            book.load()
            found, live = book.record.found, book.record.live
            if found is not None and found.request.name == name:
                book.save(found=None)
            if live is not None and live.name == name:  # that of a search that was killed
                book.save(live=None)


def _machine_record(data: Mapping[str, Any]) -> MachineRecord:
    """The record in what `write` wrote. Raises TypeError or ValueError for anything else."""
    record = MachineRecord(**data)
    if not all(isinstance(value, str) for value in data.values()) or not record.name:
        raise ValueError("no record of a machine")
    return record
