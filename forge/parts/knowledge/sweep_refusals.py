"""Why a request for a machine was refused, what follows from it, and for how long it is remembered.

Knows no cloud's tool and no order of zones: it reads the provider's words and keeps the memory.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Literal

from forge.parts.ground.errors import ErrorClass
from forge.parts.ground.state import read_json, write_json
from forge.parts.knowledge.failure_bank import FailureBank, FailureMatch, LogLines, quoted_line
from forge.parts.knowledge.failure_signature import parse_signatures
from forge.parts.knowledge.failures_capacity import CAPACITY_SIGNATURES, QUOTA_SIGNATURES
from forge.parts.knowledge.failures_client import CLIENT_SIGNATURES
from forge.parts.knowledge.failures_permission import PERMISSION_SIGNATURES
from forge.parts.knowledge.log_answer import FailureStage

RefusalReason = Literal[
    "stockout",
    "expired",
    "not offered",
    "price",
    "quota",
    "transient",
    "permission",
    "auth",
    "usage",
    "unknown",
]
RefusalScope = Literal["zone", "region", "market", "project"]

STOPPING_REASONS: tuple[RefusalReason, ...] = ("permission", "auth", "usage")

# How long a refusal keeps its place from being asked again, in seconds. No provider publishes how
# long a stockout lasts; unless a source is named, each length is a choice, with its reason.
STOCKOUT_REMEMBERED_S = 180.0  # capacity is handed back by the minute; one more call costs nothing
EXPIRED_REMEMBERED_S = 600.0  # the provider itself found nothing during a whole wait
TRANSIENT_REMEMBERED_S = 120.0  # about the time that a provider's own retries take to give up
QUOTA_REMEMBERED_S = 3600.0  # an increase is granted by request, within hours at the earliest
PRICE_REMEMBERED_S = 900.0  # spot prices move in steps of minutes to hours
NOT_OFFERED_REMEMBERED_S = 86400.0  # a catalogue changes by announcement, not by the hour
REMEMBERED_S: dict[RefusalReason, float] = {
    "stockout": STOCKOUT_REMEMBERED_S,
    "expired": EXPIRED_REMEMBERED_S,
    "transient": TRANSIENT_REMEMBERED_S,
    "quota": QUOTA_REMEMBERED_S,
    "price": PRICE_REMEMBERED_S,
    "not offered": NOT_OFFERED_REMEMBERED_S,
}

# What a provider says to a request and no log of a machine holds; the rest is the failure bank's.
_REQUEST_SIGNATURES = r"""
== request_no_capacity | root | certain
line code: *UNSUPPORTED_OPERATION\b|^\W*UNSUPPORTED_OPERATION\b
cause The zone cannot make this machine now.
change act another zone
futile the same zone at once

== request_fault | fault | certain
line \b(?:INTERNAL_ERROR|BACKEND_ERROR|InternalError|InternalFailure)\b
line Internal error\. Please try again
line \b50[0234] (?:Internal Server Error|Bad Gateway|Service Unavailable|Gateway Time-?out)
line \((?:Throttling|Unavailable|ServiceUnavailable)\)|^\W*Throttling\W*$
cause The provider failed at it; nothing is wrong with the request.
change act ask again once, then elsewhere
futile changing the request

== request_usage | root | certain
line \(gcloud\.[\w.-]+\) .{0,200}(?:Invalid choice|unrecognized arguments|Must be specified)
line \((?:InvalidParameter(?:Value|Combination)|MissingParameter|ValidationError|Invalid\w+Malformed
  )\)
unless iamInstanceProfile
cause The request itself is wrong, or the provider's tool is too old for it.
change act correct the request, or update the tool
futile any other zone

== request_account | root | certain
line \((?:Blocked|AccountDisabled)\)|account is currently blocked
line Required 'Alpha Access' permission
cause The account may not ask for this.
change act a person settles it with the provider
futile any other zone
"""

_REASON_OF_KIND: dict[str, RefusalReason] = {
    "gce_stockout": "stockout",
    "tpu_stockout": "stockout",
    "ec2_stockout": "stockout",
    "do_region": "stockout",
    "spot_preempted": "stockout",
    "request_no_capacity": "stockout",
    "flex_start_expired": "expired",
    "qr_failed_or_suspended": "expired",
    "ec2_type_not_in_zone": "not offered",
    "machine_type_not_here": "not offered",
    "tpu_reserved_capacity": "not offered",
    "spot_price_too_low": "price",
    "gce_regional_quota": "quota",
    "tpu_quota_held": "quota",
    "gpu_quota_global": "quota",
    "ec2_spot_count": "quota",
    "ec2_vcpu_quota": "quota",
    "do_droplet_limit": "quota",
    "api_rate_limit": "transient",
    "invalid_iam_profile": "transient",
    "request_fault": "transient",
    "host_maintenance": "transient",
    "gcp_permission_denied": "permission",
    "service_account_user": "permission",
    "insufficient_scopes": "permission",
    "api_not_enabled": "permission",
    "org_policy": "permission",
    "tpu_machine_not_allowed": "permission",
    "aws_unauthorized": "permission",
    "billing_disabled": "permission",
    "request_account": "permission",
    "gcloud_no_account": "auth",
    "aws_no_credentials": "auth",
    "do_unauthorized": "auth",
    "resource_not_found": "usage",
    "aws_no_region": "usage",
    "do_image": "usage",
    "request_usage": "usage",
    "resource_exists": "unknown",
}
# These limits are of the whole project: no other place helps.
_PROJECT_QUOTAS = ("gpu_quota_global", "do_droplet_limit")

# What a class allows its text to refine it to, its own meaning first. A class that is not here
# says nothing about the reason, and the text decides.
_CLASS_READINGS: dict[ErrorClass, tuple[RefusalReason, ...]] = {
    "CAPACITY": ("stockout", "expired", "not offered", "price"),
    "QUOTA": ("quota",),
    "DENIED": ("permission", "usage", "auth"),
    "AUTH": ("auth", "permission"),
    "INVALID": ("usage", "not offered", "transient"),
    "UNKNOWN": ("unknown",),
    "TIMEOUT": ("unknown",),
    "UNREACHABLE": ("unknown",),
    "PARTIAL": ("unknown",),
    "CANCELLED": ("unknown",),
    "EXISTS": ("unknown",),
    "BUSY": ("transient",),
}
_ZONE_SHAPE = re.compile(r"[a-z]+(?:-[a-z]+)+-?\d+-?[a-z]|[a-z]+-[a-z]+\d+-[a-z0-9]+")
_READ_CHARACTERS = 20_000  # of a refusal's text; the providers' own are below 2,000


@dataclass(frozen=True)
class Refusal:
    """A provider's refusal, read. `hints` are the zones that it named as having capacity.

    `said` is the deciding line, redacted; `kind` the signature that matched, empty where only the
    error's class was understood.
    """

    reason: RefusalReason
    scope: RefusalScope
    said: str
    kind: str = ""
    hints: tuple[str, ...] = ()

    @property
    def stops(self) -> bool:
        """Whether the sweep ends with it: no other place would answer differently."""
        return self.reason in STOPPING_REASONS or self.scope == "project"


@functools.cache
def _refusal_bank() -> FailureBank:
    """The bank's signatures of requests. The stages of a running machine are left out."""
    texts: tuple[tuple[FailureStage, str], ...] = (
        ("capacity", CAPACITY_SIGNATURES + _REQUEST_SIGNATURES),
        ("quota", QUOTA_SIGNATURES),
        ("permission", PERMISSION_SIGNATURES),
        ("client", CLIENT_SIGNATURES),
    )
    return FailureBank([s for stage, text in texts for s in parse_signatures(stage, text)])


def read_refusal(text: str, error_class: ErrorClass | None = None) -> Refusal:
    """What a provider's refusal means; `error_class` is what the plane made of it, if anything.

    A class decides over the text and the text refines it. What neither explains is "unknown": then
    nothing may be taken for absent before it was read.
    """
    text = text[-_READ_CHARACTERS:]
    rows = [row.encode("utf-8", "replace") for row in text.splitlines()]
    matches = [m for m in _refusal_bank().diagnose(LogLines(rows)) if _tells_reason(m)]
    readings = _CLASS_READINGS.get(error_class) if error_class is not None else None
    for match in matches:
        reason = _REASON_OF_KIND[match.signature.kind]
        if readings is None or reason in readings:
            return Refusal(
                reason,
                _refusal_scope(reason, match),
                match.line,
                match.signature.kind,
                _hinted_zones(match.numbers.get("zones", "")) if reason == "stockout" else (),
            )
    reason = readings[0] if readings else "transient" if error_class == "INTERNAL" else "unknown"
    return Refusal(reason, _refusal_scope(reason, None), quoted_line(text))


def _tells_reason(match: FailureMatch) -> bool:
    return match.signature.kind in _REASON_OF_KIND


def _refusal_scope(reason: RefusalReason, match: FailureMatch | None) -> RefusalScope:
    if reason == "price":
        return "market"
    if reason != "quota":
        return "zone"
    if match is not None and match.signature.kind in _PROJECT_QUOTAS:
        return "project"
    # The Cloud TPU API has quotas by zone and names the zone; every other one is by region.
    named = match.numbers.get("region", "") if match is not None else ""
    return "zone" if _ZONE_SHAPE.fullmatch(named) else "region"


def _hinted_zones(text: str) -> tuple[str, ...]:
    words = re.split(r"[,\s]+", text.strip().lower())
    return tuple(dict.fromkeys(word for word in words if _ZONE_SHAPE.fullmatch(word)))


def region_of(zone: str) -> str:
    """The region of a zone: `us-east5-a` is in `us-east5`, `us-east-1a` in `us-east-1`."""
    if found := re.fullmatch(r"([a-z]+-[a-z]+\d+)-[a-z0-9]+", zone):
        return found[1]
    found = re.fullmatch(r"([a-z]+(?:-[a-z]+)+-\d+)[a-z]", zone)
    return found[1] if found else zone


@dataclass(frozen=True)
class RememberedRefusal:
    """One refusal that still holds. Times are Unix seconds; `place` is what `scope` says."""

    project: str
    machine: str
    market: str
    scope: RefusalScope
    place: str
    reason: RefusalReason
    at: float
    until: float

    def holds_for(self, project: str, machine: str, zone: str, market: str) -> bool:
        """Whether it speaks of that request; the project and the kind of machine must be its."""
        if (self.project, self.machine, self.market) != (project, machine, market):
            return False
        place = {"zone": zone, "region": region_of(zone)}.get(self.scope, "")
        return self.place == place

    def told(self, now: float) -> str:
        """In words, such as "stockout 3 min ago"."""
        minutes = max(0.0, now - self.at) / 60
        return f"{self.reason} {minutes:.0f} min ago" if minutes >= 1 else f"{self.reason} just now"


@dataclass
class RefusalMemory:
    """The refusals that still hold, in a file of the state folder, so that a restart keeps them."""

    path: Path
    kept: list[RememberedRefusal] = field(default_factory=list)

    def load(self, now: float) -> None:
        """Read the file; what is over, from the future, or not readable as a refusal is left out.

        Raises RigError DENIED where the file is there and cannot be read.
        """
        entries = (read_json(self.path) or {}).get("refusals", [])
        found = (
            [_remembered_refusal(entry) for entry in entries] if isinstance(entries, list) else []
        )
        self.kept = [r for r in found if r is not None and r.at <= now < r.until]

    def remember(
        self, project: str, machine: str, zone: str, market: str, refusal: Refusal, now: float
    ) -> None:
        """Keep a refusal for as long as its reason is kept, and write it down."""
        length = REMEMBERED_S.get(refusal.reason)
        if length is None:
            return
        places = {"zone": zone, "region": region_of(zone)}
        new = RememberedRefusal(
            project=project,
            machine=machine,
            market=market,
            scope=refusal.scope,
            place=places.get(refusal.scope, ""),
            reason=refusal.reason,
            at=now,
            until=now + length,
        )
        same = (new.project, new.machine, new.market, new.scope, new.place)
        self.kept = [
            r
            for r in self.kept
            if r.until > now and (r.project, r.machine, r.market, r.scope, r.place) != same
        ]
        self.kept.append(new)
        write_json(self.path, {"v": 1, "refusals": [asdict(r) for r in self.kept]})

    def holding(
        self, project: str, machine: str, zone: str, market: str, now: float
    ) -> Sequence[RememberedRefusal]:
        """What still speaks against that request, the longest lasting first."""
        found = [
            r for r in self.kept if r.until > now and r.holds_for(project, machine, zone, market)
        ]
        return sorted(found, key=lambda r: -r.until)


def _remembered_refusal(entry: Any) -> RememberedRefusal | None:
    """An entry of the file as a refusal; None for anything else, since a file may be damaged."""
    try:
        refusal = RememberedRefusal(**entry)
        lasts = REMEMBERED_S[refusal.reason]
        # A longer life than its reason has is damage too, and would shut a place for ever.
        good = refusal.until - refusal.at <= lasts
    except (TypeError, KeyError):
        return None
    return refusal if good else None
