"""What all services of the fake Google share: a clock that a test moves, the script, refusals.

Knows no service and no HTTP server: what a thing is and how it lives, each service knows.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

API_NAMES = {
    "compute": ("compute.googleapis.com", "Compute Engine API"),
    "tpu": ("tpu.googleapis.com", "Cloud TPU API"),
    "secrets": ("secretmanager.googleapis.com", "Secret Manager API"),
    "logging": ("logging.googleapis.com", "Cloud Logging API"),
    "quotas": ("cloudquotas.googleapis.com", "Cloud Quotas API"),
    "oslogin": ("oslogin.googleapis.com", "Cloud OS Login API"),
}
FAKE_PROJECT_NUMBER = "100000000001"


class GoogleRefusal(Exception):
    """An error answer in the form of Google's APIs: HTTP status, canonical code, message."""

    def __init__(
        self,
        status: int,
        code: str,
        message: str,
        reason: str = "",
        details: Sequence[Mapping[str, Any]] = (),
    ) -> None:
        super().__init__(message)
        self.status = status
        one = {"message": message, "domain": "global", "reason": reason or code}
        error: dict[str, Any] = {
            "code": status,
            "message": message,
            "status": code,
            "errors": [one],
        }
        if details:
            error["details"] = list(details)
        self.body = {"error": error}


@dataclass
class GoogleScript:
    """What goes wrong, and where. A set holds zones, unless it says otherwise.

    `hint` are the zones that a stockout names as having capacity; none leaves the hint out.
    `lost` is how many of the next changes are made without their answer ever arriving: held until
    the caller goes (`lost_by` "hold") or cut off at once ("cut"). `stubborn` are names that outlive
    their delete. `half_made` leaves a refused instance's disk behind. `queue_s` and `operation_s`
    are seconds of the fake's clock, `lag_s` too: for so long what was made is not seen by reads.
    `html` is how many of the next requests a proxy answers.
    """

    stockout: set[str] = field(default_factory=set)
    hint: tuple[str, ...] = ()
    quota: set[str] = field(default_factory=set)
    denied: set[str] = field(default_factory=set)
    unreachable: set[str] = field(default_factory=set)
    disabled: set[str] = field(default_factory=set)  # services, by their key in API_NAMES
    unlisted: set[str] = field(default_factory=set)  # where no machine type is on the list
    never: set[str] = field(default_factory=set)  # where what is queued stays queued
    stubborn: set[str] = field(default_factory=set)
    lost: int = 0
    lost_by: str = "hold"
    half_made: bool = False
    html: int = 0
    queue_s: float = 0.0
    operation_s: float = 0.0
    lag_s: float = 0.0
    page: int = 500  # the most things of one page of a list
    zones: tuple[str, ...] = (
        *("us-east5-a", "us-east5-b", "us-central1-a", "us-central1-b", "us-west4-a"),
        *("europe-west4-a", "asia-northeast1-b"),
    )
    quotas: dict[str, int] = field(  # of the Cloud Quotas API, by id: chips in each place
        default_factory=lambda: {
            "PREEMPTIBLE-TPU-V6E-per-project-region": 8,
            "TPUS-PER-TPU-FAMILY-per-project-region": 8,
        }
    )
    limits: dict[str, float] = field(
        default_factory=lambda: {"CPUS": 200.0, "PREEMPTIBLE_CPUS": 200.0, "SSD_TOTAL_GB": 4096.0}
    )


@dataclass
class GoogleWorld:
    """The one project that exists here, its clock (Unix seconds) and the script of the moment."""

    project: str = "fake-proj"
    script: GoogleScript = field(default_factory=GoogleScript)
    now: float = field(default_factory=lambda: float(int(time.time())))
    base: str = ""  # the address of the server, without a slash at its end
    _serial: int = 0

    def serial(self) -> str:
        """The next id, of the length that Google's have."""
        self._serial += 1
        return str(7_000_000_000_000_000_000 + self._serial)

    def stamp(self, at: float | None = None) -> str:
        """A moment as Google writes it, RFC 3339 in UTC."""
        moment = time.gmtime(self.now if at is None else at)
        return time.strftime("%Y-%m-%dT%H:%M:%S.000Z", moment)

    def seen(self, thing: Mapping[str, Any]) -> bool:
        """Whether reads show `thing` already. What the fake notes of it begins with `_`."""
        return self.now >= float(thing.get("_born", 0)) + self.script.lag_s

    def check(self, service: str, project: str) -> None:
        """Refuses a foreign project and a service that is not enabled, as Google does."""
        if project not in (self.project, FAKE_PROJECT_NUMBER):
            raise GoogleRefusal(
                403,
                "PERMISSION_DENIED",
                f"Permission denied on resource project {project}.",
                "forbidden",
                [_error_info("CONSUMER_INVALID", {"consumer": f"projects/{project}"})],
            )
        if service in self.script.disabled:
            host, title = API_NAMES[service]
            raise GoogleRefusal(
                403,
                "PERMISSION_DENIED",
                f"{title} has not been used in project {project} before or it is disabled. Enable "
                f"it by visiting https://console.developers.google.com/apis/api/{host}/overview"
                f"?project={project} then retry. If you enabled this API recently, wait a few "
                "minutes for the action to propagate to our systems and retry.",
                "accessNotConfigured",
                [_error_info("SERVICE_DISABLED", {"service": host})],
            )

    def paged(
        self, things: Sequence[dict[str, Any]], query: Mapping[str, str]
    ) -> tuple[list[dict[str, Any]], dict[str, str]]:
        """One page of `things`, and the field that names the next one, if there is one."""
        start = int(query.get("pageToken") or 0)
        asked = int(query.get("maxResults") or query.get("pageSize") or self.script.page)
        end = start + max(1, min(asked, self.script.page))
        more = {"nextPageToken": str(end)} if end < len(things) else {}
        return list(things[start:end]), more


def _error_info(reason: str, metadata: Mapping[str, str]) -> dict[str, Any]:
    kind = "type.googleapis.com/google.rpc.ErrorInfo"
    return {
        "@type": kind,
        "reason": reason,
        "domain": "googleapis.com",
        "metadata": dict(metadata),
    }


def seconds_of(duration: Any) -> float:
    """A duration as the APIs have it: "14400s", or {"seconds": "14400"}; 0 where there is none."""
    if isinstance(duration, Mapping):
        return float(duration.get("seconds") or 0)
    return float(str(duration).rstrip("s")) if duration else 0.0


def zone_region(zone: str) -> str:
    """us-east5-b lies in us-east5."""
    return zone.rsplit("-", 1)[0]
