"""Which machine is this rig's, as written down before it was asked for, so that it outlives us.

Knows no provider: what is written here is a claim, and reading the machine back decides.
"""

from __future__ import annotations

from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path

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
        self._sweep = state / SWEEP_FOLDER / _SWEEP_RECORD

    def read(self) -> MachineRecord | None:
        """What is on record; None where nothing is. A damaged record raises RigError UNKNOWN."""
        try:
            data = read_json(self._path)
            if data is not None:
                return MachineRecord(**{key: str(value) for key, value in data.items()})
        except (TypeError, ValueError):
            self._path.replace(self._path.with_suffix(".damaged"))
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

    def write(self, record: MachineRecord) -> None:
        """Note a machine before it is asked for, and again when it was read back."""
        write_json(self._path, asdict(record))

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
