"""A provider's text as the refusal that it is: its reason, whom it shuts out, and what it hints at.

Reads with the failure bank's signatures and those of requests; asks nobody and remembers nothing.
"""

from __future__ import annotations

import functools
import re

from forge.parts.ground.errors import ErrorClass
from forge.parts.knowledge.failure_bank import FailureBank, FailureMatch, LogLines, quoted_line
from forge.parts.knowledge.failure_signature import parse_signatures
from forge.parts.knowledge.failures_capacity import CAPACITY_SIGNATURES, QUOTA_SIGNATURES
from forge.parts.knowledge.failures_client import CLIENT_SIGNATURES
from forge.parts.knowledge.failures_permission import PERMISSION_SIGNATURES
from forge.parts.knowledge.log_answer import FailureStage
from forge.parts.knowledge.refusal_answer import (
    CLASS_READINGS,
    REFUSAL_CHARACTERS,
    Refusal,
    RefusalReason,
    RefusalScope,
    class_refusal,
)

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
line \((?:InvalidParameter(?:Value|Combination)|MissingParameter|ValidationError
  |Invalid[\w.]+Malformed|InvalidBlockDeviceMapping)\)
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

_ZONE_SHAPE = re.compile(r"[a-z]+(?:-[a-z]+)+-?\d+-?[a-z]|[a-z]+-[a-z]+\d+-[a-z0-9]+")


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
    text = text[-REFUSAL_CHARACTERS:]
    rows = [row.encode("utf-8", "replace") for row in text.splitlines()]
    matches = [m for m in _refusal_bank().diagnose(LogLines(rows)) if _tells_reason(m)]
    readings = CLASS_READINGS.get(error_class) if error_class is not None else None
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
    return class_refusal(error_class, quoted_line(text))


def _tells_reason(match: FailureMatch) -> bool:
    return match.signature.kind in _REASON_OF_KIND


def _refusal_scope(reason: RefusalReason, match: FailureMatch) -> RefusalScope:
    if reason == "price":
        return "market"
    if reason != "quota":
        return "zone"
    if match.signature.kind in _PROJECT_QUOTAS:
        return "project"
    # The Cloud TPU API has quotas by zone and names the zone; every other one is by region.
    named = match.numbers.get("region", "")
    return "zone" if _ZONE_SHAPE.fullmatch(named) else "region"


def _hinted_zones(text: str) -> tuple[str, ...]:
    words = re.split(r"[,\s]+", text.strip().lower())
    return tuple(dict.fromkeys(word for word in words if _ZONE_SHAPE.fullmatch(word)))
