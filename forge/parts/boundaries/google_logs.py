"""Cloud Logging, read only: the newest entries of one machine as lines of text.

A filter is made of constants and checked names, never of a caller's words. Knows no plane, and not
what a line means.
"""

from __future__ import annotations

import json
import re
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from forge.parts.boundaries.google_clients import call_google, google_access
from forge.parts.ground.errors import RigError, invalid_parameter
from forge.parts.ground.redact import clip, printable, redact

CLOUD_LOG_CALL_S = 25.0  # seconds for all pages together
CLOUD_LOG_ENTRIES = 500  # the newest that are read
_CLOUD_LOG_MINUTES = 10_080  # a week
_CLOUD_LINE = 4_000  # characters of one entry
_CLOUD_TEXT = 400_000  # characters of all

_CLOUD_SEVERITIES = ("DEFAULT", "DEBUG", "INFO", "NOTICE", "WARNING", "ERROR", "CRITICAL")
_CLOUD_PROJECT = re.compile(r"(?:[a-z][a-z0-9.-]{1,60}:)?[a-z][-a-z0-9]{4,28}[a-z0-9]")
_CLOUD_NAME = re.compile(r"[a-z](?:[-a-z0-9]{0,61}[a-z0-9])?")
_CLOUD_PLACE = re.compile(r"[a-z]{2,12}(?:-[a-z]{2,14}){1,2}-?[0-9]{1,2}-?[a-z]")
_CLOUD_ID = re.compile(r"(?:[0-9]{1,20})?")
_CLOUD_SECRET_KEY = re.compile(r"token|secret|password|passwd|authorization|credential|key$", re.I)
# The resource of a machine's own entries, the label that tells which machine, and the collections
# under which the provider's audit log knows it. Compute Engine's serial port comes under the first
# when the machine has the metadata serial-port-logging-enable=true (Google's documentation of
# serial port output, read 2026-11-30); a TPU node's entries come from its workers.
_CLOUD_KINDS = {
    "gce_instance": ("instance_id", r"/zones/{zone}/instances/{name}$"),
    "tpu_worker": ("node_id", r"/locations/{zone}/(nodes|queuedResources)/{name}$"),
}
_CLOUD_AUDIT = 'logName:"cloudaudit.googleapis.com"'


@dataclass(frozen=True)
class LoggedMachine:
    """Whose entries are meant. With `provider_id` (digits) those of that very machine; without it
    those of all machines that bore the name in the zone, also the ones that are gone."""

    kind: Literal["gce_instance", "tpu_worker"]
    name: str
    zone: str
    provider_id: str = ""


async def rig_log_text(
    project: str,
    machine: LoggedMachine,
    minutes: int,
    severity: str = "DEFAULT",
    resource: str = "all",
    *,
    environment: Mapping[str, str] | None = None,
    timeout_s: float = CLOUD_LOG_CALL_S,
) -> str:
    """The entries of the last `minutes` from `severity` on, oldest first, each as
    ``stamp severity text``; of more than CLOUD_LOG_ENTRIES the newest, and a line says so.

    `resource`: "machine" is what the machine itself wrote, "service" what the provider did with it
    (its audit log: created, taken back, stopped, deleted), "all" both. Empty where there is
    nothing. Raises NOT_FOUND for a machine without a name, that is, none that ever was; INVALID,
    AUTH, DENIED, UNREACHABLE, TIMEOUT.
    """
    if not machine.name:
        raise RigError("NOT_FOUND", "this rig has rented no machine whose log could be read")
    since = time.time() - 60 * minutes
    expression = rig_log_filter(project, machine, since, severity, resource)
    if not 1 <= minutes <= _CLOUD_LOG_MINUTES:
        raise invalid_parameter("minutes", f"must be 1 to {_CLOUD_LOG_MINUTES}")

    def work() -> list[str]:
        listed = _log_client(project, environment).list_entries(
            resource_names=[f"projects/{project}"],
            filter_=expression,
            order_by="timestamp desc",
            max_results=CLOUD_LOG_ENTRIES + 1,
            page_size=CLOUD_LOG_ENTRIES + 1,
        )
        return [_entry_line(entry) for entry in listed]

    lines = await call_google(work, project=project, change=False, timeout_s=timeout_s)
    return clip("\n".join(_oldest_first(lines)), _CLOUD_TEXT)


def rig_log_filter(
    project: str, machine: LoggedMachine, since_unix: float, severity: str, resource: str
) -> str:
    """The filter, in Cloud Logging's query language. Raises INVALID for a name that is none."""
    for what, value, form in (
        ("project", project, _CLOUD_PROJECT),
        ("name", machine.name, _CLOUD_NAME),
        ("zone", machine.zone, _CLOUD_PLACE),
        ("provider_id", machine.provider_id, _CLOUD_ID),
    ):
        if not form.fullmatch(value):
            raise invalid_parameter(what, "is not of the form that a log filter may hold")
    if severity not in _CLOUD_SEVERITIES:
        raise invalid_parameter("severity", f"must be one of {', '.join(_CLOUD_SEVERITIES)}")
    wrote, did = _filter_of_machine(machine), _filter_of_service(machine)
    parts = {"machine": wrote, "service": did, "all": f"({wrote} OR {did})"}
    if resource not in parts:
        raise invalid_parameter("resource", f"must be one of {', '.join(parts)}")
    stamp = time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime(since_unix))
    terms = [f'timestamp>="{stamp}"', parts[resource]]
    terms += [f"severity>={severity}"] if severity != "DEFAULT" else []
    return " AND ".join(terms)


def _filter_of_machine(machine: LoggedMachine) -> str:
    label, _ = _CLOUD_KINDS[machine.kind]
    by_id = f'resource.labels.{label}="{machine.provider_id}"'
    if machine.kind == "gce_instance":
        by_name = f'labels."compute.googleapis.com/resource_name"="{machine.name}"'
        which = by_id if machine.provider_id else by_name
    else:  # a node's entries bear its name or its number: the documents do not say which
        by_name = f'resource.labels.{label}="{machine.name}"'
        which = f"({by_name} OR {by_id})" if machine.provider_id else by_name
    place = f'resource.labels.zone="{machine.zone}"'
    return f'(resource.type="{machine.kind}" AND {place} AND {which} AND NOT {_CLOUD_AUDIT})'


def _filter_of_service(machine: LoggedMachine) -> str:
    path = _CLOUD_KINDS[machine.kind][1].format(zone=machine.zone, name=machine.name)
    return f'({_CLOUD_AUDIT} AND protoPayload.resourceName=~"{path}")'


def _log_client(project: str, environment: Mapping[str, str] | None) -> Any:
    access = google_access(environment)
    from google.api_core.client_options import ClientOptions
    from google.cloud.logging import Client

    options = ClientOptions(api_endpoint=access.endpoint) if access.endpoint else None
    # HTTP, in tests as in earnest: gRPC would not speak to a plain loopback server.
    client: Any = Client
    return client(
        project=project, credentials=access.credentials, _use_grpc=False, client_options=options
    )


def _oldest_first(newest_first: Sequence[str]) -> list[str]:
    kept = list(reversed(newest_first[:CLOUD_LOG_ENTRIES]))
    if len(newest_first) > len(kept):
        return [f"[… only the newest {len(kept)} entries …]", *kept]
    return kept


def _entry_line(entry: Any) -> str:
    """One entry as text: stamp, severity, and what it says. Its labels and its author stay out."""
    stamp = entry.timestamp.strftime("%Y-%m-%dT%H:%M:%SZ") if entry.timestamp else "-"
    text = _payload_text(entry.payload)
    return f"{stamp} {entry.severity or 'DEFAULT'} {redact(printable(clip(text, _CLOUD_LINE)))}"


def _payload_text(payload: Any) -> str:
    """A text as it is; an object by its message; an act of the provider by method and outcome."""
    if not isinstance(payload, Mapping):
        return "" if payload is None else str(payload).rstrip("\n")
    if "methodName" in payload:
        # Not the whole: request and author hold metadata, addresses and accounts.
        status = payload.get("status")
        words = [str(payload["methodName"]), str(payload.get("resourceName", ""))]
        if isinstance(status, Mapping):
            words += [str(status.get("code", "")), str(status.get("message", ""))]
        return " ".join(word for word in words if word)
    for key in ("message", "msg", "MESSAGE"):
        if isinstance(payload.get(key), str):
            return str(payload[key]).rstrip("\n")
    return json.dumps(_without_secrets(payload), default=str, sort_keys=True)


def _without_secrets(value: Any, depth: int = 0) -> Any:
    """An object without the values whose keys speak of secrets."""
    if depth > 10:
        return "…"
    if isinstance(value, Mapping):
        return {
            str(key): "[redacted]"
            if _CLOUD_SECRET_KEY.search(str(key))
            else _without_secrets(one, depth + 1)
            for key, one in value.items()
        }
    if isinstance(value, list):
        return [_without_secrets(one, depth + 1) for one in value[:100]]
    return value
