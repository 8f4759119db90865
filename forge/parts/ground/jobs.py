"""Long work as a record on disk and a detached worker, so that it outlives the client that asked.

Every server of the rig reads the same records; what the work is, the caller of `start_job` knows.
"""

from __future__ import annotations

import asyncio
import os
import secrets
import sys
import time
from collections.abc import Awaitable, Callable, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from forge.parts.ground.errors import ErrorClass, RigError
from forge.parts.ground.journal import utc_now
from forge.parts.ground.process import (
    find_labelled,
    process_label,
    spawn_detached,
    stop_detached,
)
from forge.parts.ground.redact import clean, clean_value
from forge.parts.ground.state import private_folder, read_json, write_json

JobState = Literal["queued", "running", "done", "failed", "cancelled", "lost"]
FINAL_JOB_STATES: tuple[JobState, ...] = ("done", "failed", "cancelled", "lost")
_WORKER_START_GRACE_S = 10.0  # a worker that has not shown itself by then never will
_JOBS_KEPT = 50


class JobError(BaseModel):
    """Why a job failed: the class of the error and the text, as a direct call would have given."""

    error_class: ErrorClass
    text: str


class JobRecord(BaseModel):
    """One job as it stands on disk. Times are UTC stamps, durations seconds, `percent` 0 to 100.

    `phase_seconds` has the phases that are over; `phase_started_unix` is when `phase` began, in
    Unix seconds, and 0 where nobody knows (no worker yet, or a record of an older version).
    """

    model_config = ConfigDict(extra="ignore")

    id: str
    kind: str
    state: JobState = "queued"
    arguments: dict[str, Any] = Field(default_factory=dict)
    phases: list[str] = Field(default_factory=list)
    phase: str = ""
    phase_started_unix: float = 0.0
    phase_seconds: dict[str, float] = Field(default_factory=dict)
    percent: float = 0.0
    remaining_s: float | None = None
    message: str = ""
    created_at: str = ""
    created_unix: float = 0.0
    finished_at: str = ""
    seconds: float = 0.0
    worker_pid: int | None = None
    result: dict[str, Any] = Field(default_factory=dict)
    error: JobError | None = None

    @property
    def finished(self) -> bool:
        return self.state in FINAL_JOB_STATES


class JobStore:
    """The jobs of one rig: a folder of records. Only a job's worker writes while it lives."""

    def __init__(self, folder: Path, label_prefix: str) -> None:
        self.folder = folder
        self._label_prefix = label_prefix

    def label(self, job_id: str) -> str:
        """The exact label that the worker of `job_id` carries in its environment."""
        return f"{self._label_prefix};role=job;id={job_id}"

    def log(self, job_id: str) -> Path:
        return self.folder / f"{job_id}.log"

    def _path(self, job_id: str) -> Path:
        return self.folder / f"{job_id}.json"

    def new(self, kind: str, arguments: dict[str, Any], phases: Sequence[str]) -> JobRecord:
        """A queued record under a fresh id, on disk before anything is started."""
        stamp = datetime.now(UTC).strftime("%Y%m%d-%H%M%S")
        record = JobRecord(
            id=f"{kind}-{stamp}-{secrets.token_hex(3)}",
            kind=kind,
            arguments=arguments,
            phases=list(phases),
            phase=phases[0] if phases else "",
            message="waiting for its worker",
            created_at=utc_now(),
            created_unix=time.time(),
        )
        self.write(record)
        self._forget_old()
        return record

    def write(self, record: JobRecord) -> None:
        # The arguments stay as they were checked: a redacted path would be another path.
        plain = record.model_dump(mode="json")
        write_json(self._path(record.id), clean_value(plain) | {"arguments": record.arguments})

    def start_worker(self, record: JobRecord, server_file: Path) -> int:
        """Start the detached worker `server.py job ID` for `record`; returns its pid."""
        return spawn_detached(
            [sys.executable, str(server_file), "job", record.id],
            label=self.label(record.id),
            environment=os.environ,
            log=self.log(record.id),
            folder=private_folder(self.folder),
        )

    def read(self, job_id: str) -> JobRecord:
        """The record of `job_id`, a dead worker shown as `lost`. NOT_FOUND if there is none."""
        data = read_json(self._path(job_id))
        if data is None:
            raise RigError("NOT_FOUND", f"there is no job {job_id}", "get_system_status()")
        try:
            record = JobRecord.model_validate(data)
        except ValidationError:
            raise RigError(
                "NOT_FOUND", f"the record of job {job_id} is damaged", "get_system_status()"
            ) from None
        return record if record.finished else self._with_truth(record)

    def _with_truth(self, record: JobRecord) -> JobRecord:
        """What the process table says of an unfinished record: its worker lives, or it is lost."""
        if record.worker_pid is not None:
            alive = process_label(record.worker_pid) == self.label(record.id)
        else:
            young = abs(time.time() - record.created_unix) < _WORKER_START_GRACE_S
            alive = young or bool(find_labelled(self.label(record.id)))
        if alive:
            return record
        # Its last write may have come between our read and our look at the process table.
        fresh = JobRecord.model_validate(read_json(self._path(record.id)) or record.model_dump())
        if fresh.finished:
            return fresh
        return fresh.model_copy(
            update={
                "state": "lost",
                "message": "its worker was killed or never started; nothing is going on",
            }
        )

    def all(self) -> list[JobRecord]:
        """Every readable record, newest first."""
        records = []
        for path in self.folder.glob("*-*.json"):
            try:
                records.append(self.read(path.stem))
            except RigError:
                continue
        return sorted(records, key=lambda record: record.created_unix, reverse=True)

    def active(self, kind: str) -> JobRecord | None:
        """The job of `kind` that is queued or running now, if any."""
        return next((job for job in self.all() if job.kind == kind and not job.finished), None)

    async def cancel(self, job_id: str, patience_s: float = 15.0) -> JobRecord:
        """End the worker of `job_id` (it undoes what it began) and return the final record."""
        record, label = self.read(job_id), self.label(job_id)
        if record.state == "lost":  # its worker was killed; what that had started may go on
            for pid in find_labelled(label):
                await stop_detached(pid, label, patience_s)
        if record.finished:
            return record
        pids = [record.worker_pid] if record.worker_pid else find_labelled(label)
        for pid in pids:
            await stop_detached(pid, label, patience_s)
        record = self.read(job_id)
        if record.state == "lost" or not record.finished:
            record = record.model_copy(
                update={"state": "cancelled", "message": "cancelled", "finished_at": utc_now()}
            )
            self.write(record)
        return record

    def _forget_old(self) -> None:
        """Keep the newest records, and every job that is not finished."""
        for job in self.all()[_JOBS_KEPT:]:
            if job.finished:
                self._path(job.id).unlink(missing_ok=True)
                self.log(job.id).unlink(missing_ok=True)


class JobProgress:
    """A worker's pen: it alone writes the record while the job runs."""

    def __init__(self, store: JobStore, record: JobRecord) -> None:
        self._store = store
        self.record = record
        self._begun = self._phase_begun = time.monotonic()

    def update(self, **changes: Any) -> None:
        """Change fields of the record and write it through; the phases are timed here."""
        now = time.monotonic()
        timed = {"seconds": round(now - self._begun, 3), **self._phase_times(changes, now)}
        self.record = self.record.model_copy(update={**timed, **changes})
        self._store.write(self.record)

    def _phase_times(self, changes: dict[str, Any], now: float) -> dict[str, Any]:
        """The fields of a phase that ends or begins with `changes`.

        Durations are monotonic; the beginning is wall time, because other processes read it.
        """
        record = self.record
        phase, begun = changes.get("phase", record.phase), record.phase_started_unix > 0
        ends = changes.get("state") in FINAL_JOB_STATES
        if begun and phase == record.phase and not ends:
            return {}
        fields: dict[str, Any] = {} if ends else {"phase_started_unix": time.time()}
        if begun and record.phase:  # a phase that is entered again adds to its time
            spent = record.phase_seconds.get(record.phase, 0.0) + now - self._phase_begun
            fields["phase_seconds"] = {**record.phase_seconds, record.phase: round(spent, 3)}
        self._phase_begun = now
        return fields


JobRunner = Callable[[JobProgress], Awaitable[dict[str, Any]]]


async def work_on_job(store: JobStore, job_id: str, runner: JobRunner) -> JobRecord:
    """A worker's whole life: claim the record, run, write down how it ended.

    SIGTERM cancels the runner, which then undoes what it began. An anticipated failure keeps its
    class and text; anything else becomes INTERNAL, with the traceback in the job's log alone.
    """
    import signal
    import traceback

    record = store.read(job_id)
    if record.state != "queued":
        raise RigError("EXISTS", f"job {job_id} is {record.state} already")
    progress = JobProgress(store, record)
    progress.update(state="running", worker_pid=os.getpid())
    task = asyncio.ensure_future(runner(progress))

    def cancel_once() -> None:
        # A second SIGTERM would break off the undoing that the first one began.
        if not task.cancelling():
            task.cancel()

    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, cancel_once)
    end: dict[str, Any]
    try:
        end = {"state": "done", "percent": 100.0, "remaining_s": 0.0, "result": await task}
    except asyncio.CancelledError:
        end = {"state": "cancelled", "message": "cancelled; what had begun was undone"}
    except RigError as error:
        end = {"state": "failed", "message": error.what}
        end["error"] = JobError(error_class=error.error_class, text=clean(str(error), 4000))
    except Exception:
        print(clean(traceback.format_exc()), file=sys.stderr, flush=True)
        text = f"INTERNAL the job failed in a way nobody foresaw. Next: read {store.log(job_id)}"
        end = {"state": "failed", "message": text}
        end["error"] = JobError(error_class="INTERNAL", text=text)
    progress.update(finished_at=utc_now(), **end)
    return progress.record
