"""The model server of a rig on this computer as it stands on record, and the proof of who listens.

Starts, stops and searches nothing: a record that names a live process with the exact label counts.
"""

from __future__ import annotations

from pydantic import ValidationError

from forge.parts.ground.errors import RigError
from forge.parts.ground.ports import listener_name, listener_pids, listening_ports
from forge.parts.ground.process import process_label
from forge.parts.ground.state import RigPaths, read_json, write_json
from forge.parts.planes.plane import Instance


class ServerBook:
    """The record of the one model server of a rig, this one or another of the same user."""

    def __init__(self, paths: RigPaths, label_prefix: str) -> None:
        self.label_prefix = label_prefix
        self._path = paths.state / "server.json"

    def label(self, serve_id: str) -> str:
        """The exact label of the model server `serve_id`."""
        return f"{self.label_prefix};role=server;id={serve_id}"

    def read(self) -> Instance | None:
        """What is on record, alive or not; a damaged record is put aside."""
        data = read_json(self._path)
        try:
            return None if data is None else Instance.model_validate(data)
        except ValidationError:
            self._path.replace(self._path.with_suffix(".damaged"))
            return None

    def write(self, instance: Instance) -> None:
        """Put `instance` on record in the place of what was there."""
        write_json(self._path, instance.model_dump())

    def forget(self, serve_id: str) -> None:
        """Drop the record if it is that of `serve_id`."""
        record = self.read()
        if record is not None and record.serve_id == serve_id:
            self._path.unlink(missing_ok=True)

    def live(self) -> Instance | None:
        """The recorded server, if the process on record carries its exact label."""
        record = self.read()
        return record if record is not None and self.carries_label(record) else None

    def carries_label(self, instance: Instance) -> bool:
        """Whether the pid of `instance` is alive and is that very server."""
        return instance.pid is not None and process_label(instance.pid) == self.label(
            instance.serve_id
        )

    def address(self, instance: Instance) -> str:
        """The address of `instance`, after a proof that its own process listens there.

        Raises RigError UNREACHABLE while it does not listen yet, DENIED when another program does,
        NOT_FOUND when it is gone: no byte of a prompt goes to a stranger.
        """
        if instance.pid is None or not self.carries_label(instance):
            raise RigError("NOT_FOUND", "the model server is gone", "get_system_status()")
        if instance.port in listening_ports(instance.pid):
            return f"http://127.0.0.1:{instance.port}"
        owners = listener_pids(instance.port)
        if instance.port in listening_ports(instance.pid):  # it began between the two looks
            return f"http://127.0.0.1:{instance.port}"
        if owners:
            raise RigError(
                "DENIED",
                f"port {instance.port} is served by {listener_name(instance.port)}, "
                "not by this rig's model server",
                "get_system_status()",
            )
        raise RigError(
            "UNREACHABLE",
            f"the model server does not listen on port {instance.port} yet",
            "read the model server's log",
        )
