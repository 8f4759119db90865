"""gcloud's error texts and the errors of Google's operations as refusals that say what to do.

Pure functions. Knows gcloud's and the Google APIs' wordings, no command and no resource of a rig.
The wordings were read from gcloud 528's own output against a fake Google (2026-11-30) and from
dated reports of others; a text that is not known becomes UNKNOWN, never a guess.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from forge.parts.ground.errors import ErrorClass, RigError
from forge.parts.ground.redact import clean, printable

GCLOUD_TEXT_QUOTED = 500  # characters of the provider's own words in an error
GCLOUD_TEXT_READ = 200_000  # characters of error text that are looked at
# Collections whose thing's absence means that the thing is gone. The absence of any other (a zone,
# a network, an image) is a wrong setting, and must never make a delete look like a success.
_GCLOUD_THINGS = (
    *("instances", "disks", "addresses", "operations", "nodes", "queuedResources"),
    *("secrets", "versions", "services", "snapshots"),
)
_GCLOUD_STOCKOUT = re.compile(
    r"\b(?:ZONE_|REGION_)?RESOURCE_POOL_EXHAUSTED\w*|\bGPU_STOCKOUT\b|\bUNSUPPORTED_OPERATION\b"
    r"|insufficientCapacity|not have enough resources available|no more capacity in the zone"
    r"|is currently unavailable in the [\w-]+ zone"
)
_GCLOUD_HINT = re.compile(
    r"zonesAvailable: ['\"]?([a-z0-9, -]+)|request in the ([a-z0-9, -]+) zone"
)
_GCLOUD_ZONE = re.compile(r"[a-z]{2,12}(?:-[a-z]{2,14}){1,2}-?[0-9]{1,2}-?[a-z]")
_GCLOUD_QUOTA = re.compile(
    r"Quota '(?P<metric>[\w-]+)' (?:exceeded|exhausted)|Quota limit '(?P<limit_id>[\w-]+)' has been"
    r"|Quota exceeded for quota metric '(?P<rate>[^']+)'|\bQUOTA_EXCEEDED\b|\bquotaExceeded\b"
    r"|[Qq]uota violated"
)
_GCLOUD_LIMIT = re.compile(r"[Ll]imit(?::| =)? ?(?P<limit>[\d.]*\d)")
_GCLOUD_PLACE = re.compile(r"[Ll]imit:? [\d.]*\d in (?P<place>(?:region|zone) [a-z0-9-]*[a-z0-9])")
_GCLOUD_RATE = re.compile(
    r"rateLimitExceeded|RATE_LIMIT_EXCEEDED|per minute|per 100 seconds|Too Many Requests"
)
_GCLOUD_NETWORK = re.compile(
    r"Max retries exceeded|Failed to establish a new connection|Unable to find the server"
    r"|Connection (?:refused|reset|aborted)|Name or service not known|RemoteDisconnected"
    r"|Temporary failure in name resolution|ConnectionError|SSLError|CERTIFICATE_VERIFY_FAILED"
    r"|Cannot connect to proxy|ProxyError|network (?:issues|connectivity)"
)
_GCLOUD_FAULT = re.compile(
    r"HTTPError 5\d\d|\b50[0234]\b[: ]|backendError|BACKEND_ERROR|timed? ?out\b"
    r"|INTERNAL_ERROR|\bINTERNAL:|Internal error|\bUNAVAILABLE\b|DEADLINE_EXCEEDED|gcloud crashed"
    r"|[\"']?code[\"']?: 1[34]\b",
    re.I,
)
_GCLOUD_API_OFF = re.compile(
    r"apis/api/(?P<page>[a-z]+\.googleapis\.com)|API \[(?P<asked>[\w.]+)\] not enabled"
    r"|service: (?P<told>[a-z]+\.googleapis\.com)"
)
_GCLOUD_ABSENT = re.compile(r"esource '?\[?(?P<path>projects/[^'\]\s]+)'?\]? was not found")
_GCLOUD_MISSING = re.compile(
    r"\bNOT_FOUND\b|was not found|Secret (?:Version )?\[[^\]]+\] not found"
    r"|(?:Service|service) \[[^\]]*\] could not be found|Cannot find (?:service|revision) \["
)
_GCLOUD_PERMISSION = re.compile(
    r"Required '(?P<required>[\w.]+)' permission"
    r"|[Pp]ermission '?(?P<denied>[a-z]+\.[\w.]+\w)'? denied"
    r"|does not have (?P<lacking>[a-z]+\.[a-zA-Z]+\.[a-zA-Z]+) access"
)
_GCLOUD_CHECK_PROJECT = (
    "check the project's id in tpu.env, and which account is in use: gcloud auth list"
)


@dataclass(frozen=True)
class _PlainRule:
    """A wording (an expression) that means one thing, for a read and for a change."""

    wording: str
    error_class: ErrorClass
    why: str
    next_step: str

    def __call__(self, said: str, change: bool, project: str) -> RigError | None:
        if not re.search(self.wording, said):
            return None
        why = self.why.format(project=project)
        return RigError(self.error_class, f"{why}: {gcloud_quote(said)}", self.next_step)


def gcloud_refusal(text: str, *, change: bool, project: str) -> RigError:
    """gcloud's error text (status 1) as the RigError that says what to do about it.

    CAPACITY, QUOTA, DENIED, AUTH, INVALID, EXISTS and NOT_FOUND as the provider said; for what may
    or may not have reached it (network, its own fault) UNREACHABLE for a read and UNKNOWN for a
    change; UNKNOWN for words that are not known.
    """
    said = gcloud_line(_error_part(text))
    for rule in _GCLOUD_RULES:
        refusal = rule(said, change, project)
        if refusal is not None:
            return refusal
    return RigError(
        "UNKNOWN",
        f"gcloud failed in a way that is not known here: {gcloud_quote(said) or 'it said nothing'}",
        "read the state again" if change else "run the same command by hand, it may say more",
    )


def operation_refusal(error: Any, *, project: str) -> RigError | None:
    """What became of an accepted request: the `error` of an operation, or of a queued resource's
    failedData, as the API has it (Compute: {errors: [...]}, TPU: {code, message}). None without.

    The classes of `gcloud_refusal` for a change that was refused; never UNREACHABLE.
    """
    if not error:
        return None
    found = error.get("errors") if isinstance(error, dict) and "errors" in error else [error]
    texts = [json.dumps(one) for one in found or [] if one]
    return gcloud_refusal(" ".join(texts).replace('"', "'"), change=True, project=project)


def gcloud_line(text: str) -> str:
    """Printable, bounded and on one line: gcloud folds long messages as YAML does."""
    half = GCLOUD_TEXT_READ // 2
    kept = text if len(text) <= GCLOUD_TEXT_READ else f"{text[:half]} {text[-half:]}"
    return " ".join(printable(kept).split())


def _error_part(text: str) -> str:
    """From the first `ERROR:` on: warnings and notes may stand before it."""
    found = re.search(r"^(?:\x1b\[[0-9;]*m)*ERROR:", text, re.M)
    return text[found.start() :] if found else text


def gcloud_quote(said: str) -> str:
    """The provider's words without what gcloud puts around them, the user's account among it."""
    plain = re.sub(r"^ERROR: \(gcloud\.[\w.-]+\) (?:--- )?", "", said)
    plain = re.sub(r" ?This command is authenticated .{1,300}? property\.?", "", plain)
    return clean(plain, GCLOUD_TEXT_QUOTED)


def gcloud_fate(how: str, change: bool) -> RigError:
    if change:
        why = f"{how}; the change may have been made all the same"
        return RigError("UNKNOWN", why, "read the state before anything is repeated")
    return RigError("UNREACHABLE", how, "check this computer's network, then read again")


def usage_refusal(said: str) -> RigError:
    """Status 2: the command line itself. Nothing was sent, and a repeat is refused again."""
    if "unrecognized arguments" in said or "Invalid choice: 'FLEX_START'" in said:
        why = f"this gcloud is too old for the command: {gcloud_quote(said)}"
        return RigError("INVALID", why, "gcloud components update (or the system's package)")
    if "Invalid choice" in said:
        why = f"this gcloud does not know the command or the value: {gcloud_quote(said)}"
        return RigError(
            "INVALID", why, "correct the value; if it is right, gcloud components update"
        )
    return RigError("INVALID", f"gcloud refused the command line: {gcloud_quote(said)}")


def _api_rule(said: str, change: bool, project: str) -> RigError | None:
    off = "has not been used in project" in said or "SERVICE_DISABLED" in said
    if not off and not re.search(r"API \[[\w.]+\] not enabled", said):
        return None
    found = _GCLOUD_API_OFF.search(said)
    api = next((name for name in found.groups() if name), "") if found else ""
    if not api:
        return RigError("DENIED", f"an API is not enabled in {project}: {gcloud_quote(said)}")
    step = f"a person runs: gcloud services enable {api} --project={project}, then waits minutes"
    return RigError("DENIED", f"the API {api} is not enabled in the project {project}", step)


def _stockout_rule(said: str, change: bool, project: str) -> RigError | None:
    if not _GCLOUD_STOCKOUT.search(said):
        return None
    hint = hinted_zones(said)
    step = f"the provider names {', '.join(hint)}" if hint else "another zone, or later"
    return RigError(
        "CAPACITY", f"the zone has no such machine free now: {gcloud_quote(said)}", step
    )


def hinted_zones(said: str) -> tuple[str, ...]:
    """The zones that a stockout's text names as having capacity, in its order; empty without."""
    found = _GCLOUD_HINT.search(" ".join(said.replace("'", "").split()))
    listed = (found[1] or found[2] or "") if found else ""
    return tuple(dict.fromkeys(_GCLOUD_ZONE.findall(listed)))


def _quota_rule(said: str, change: bool, project: str) -> RigError | None:
    found = _GCLOUD_QUOTA.search(said)
    if _GCLOUD_RATE.search(said):
        why = f"too many requests in a short time: {gcloud_quote(said)}"
        return RigError("DENIED" if change else "UNREACHABLE", why, "wait a minute, then repeat")
    if not found:
        return None
    metric = next((name for name in found.groups() if name), "a quota that the text names")
    limit, place = _GCLOUD_LIMIT.search(said), _GCLOUD_PLACE.search(said)
    where = f" in {place['place']}" if place else ""
    amount = f"limit {limit['limit']}" if limit else "its limit is reached"
    step = "another region, or a person requests more (IAM & Admin, Quotas)"
    return RigError("QUOTA", f"{metric} is used up ({amount}{where}): {gcloud_quote(said)}", step)


def _denied_rule(said: str, change: bool, project: str) -> RigError | None:
    found = _GCLOUD_PERMISSION.search(said)
    loose = (
        r"PERMISSION_DENIED|does not have permission|nsufficient authentication scopes|forbidden"
    )
    if not found and not re.search(loose + r"|SCOPE_INSUFFICIENT|\b403\b", said):
        return None
    name = next((one for one in found.groups() if one), "") if found else ""
    why = f"the account lacks {name or 'a permission'} in {project}: {gcloud_quote(said)}"
    return RigError("DENIED", why, "grant a role that has it; gcloud auth list shows the account")


def _missing_rule(said: str, change: bool, project: str) -> RigError | None:
    if not _GCLOUD_MISSING.search(said):
        return None
    named = _GCLOUD_ABSENT.search(said)
    path = named["path"].split("/") if named else []
    if len(path) >= 2 and path[-2] not in _GCLOUD_THINGS:
        return RigError("INVALID", f"something that it names is not there: {gcloud_quote(said)}")
    return RigError("NOT_FOUND", f"the provider has no such thing: {gcloud_quote(said)}")


def _network_rule(said: str, change: bool, project: str) -> RigError | None:
    page = re.search(r"<!doctype html|<html", said, re.I)
    if page:  # a proxy's or a load balancer's word, whatever status it speaks of
        plain = " ".join(re.sub(r"<[^>]{0,200}>", " ", said[page.start() :]).split())
        return gcloud_fate(f"a web page came instead of an answer: {gcloud_quote(plain)}", change)
    if _GCLOUD_NETWORK.search(said):
        return gcloud_fate(f"Google could not be reached: {gcloud_quote(said)}", change)
    return None


def _fault_rule(said: str, change: bool, project: str) -> RigError | None:
    if not _GCLOUD_FAULT.search(said):
        return None
    return gcloud_fate(
        f"the provider, or something before it, failed: {gcloud_quote(said)}", change
    )


# In this order: what is certain and specific before what is general. A stockout's text may speak of
# a resource that is exhausted, a permission's of one that may not exist.
_GCLOUD_RULES: tuple[Callable[[str, bool, str], RigError | None], ...] = (
    _network_rule,
    _PlainRule(
        r"application-default login|default credentials were not found|DefaultCredentialsError",
        *("AUTH", "Google's client libraries have no application-default credentials"),
        "a person runs: gcloud auth application-default login",
    ),
    _api_rule,
    _PlainRule(
        r"ermission denied on resource project|CONSUMER_INVALID",
        *("DENIED", "the project {project} is not there, or the account may not use it"),
        _GCLOUD_CHECK_PROJECT,
    ),
    _PlainRule(
        r"property \[project\] is not|Unknown project|not found or deleted|Failed to find project"
        r"|not a valid project|resource '?projects/[^/'\s]+'? was not found|Invalid project",
        *("INVALID", "there is no project {project}", _GCLOUD_CHECK_PROJECT),
    ),
    _PlainRule(
        r"BILLING_DISABLED|requires billing|billing to be enabled|billing account",
        *("DENIED", "billing is not enabled for the project {project}"),
        "a person enables billing for the project",
    ),
    _stockout_rule,
    _PlainRule(
        r"[Mm]achine type with name '?[\w-]+'? does not exist in zone"
        r"|(?:machineTypes|acceleratorTypes)/[\w-]+'? was not found",
        *("CAPACITY", "the zone does not offer this machine type"),
        "a zone that has it on its list",
    ),
    _quota_rule,
    _PlainRule(
        r"user agent is not allowed to use the machine type",
        *("DENIED", "Compute Engine does not hand out this machine type here"),
        "v5e comes through the Cloud TPU API only; no quota helps",
    ),
    _PlainRule(
        r"onstraints?/[\w.]+|violates .{0,40}polic",
        *("DENIED", "a policy of the organisation forbids it", ""),
    ),
    _denied_rule,
    _PlainRule(
        r"already exists|ALREADY_EXISTS|alreadyExists",
        *("EXISTS", "it is there already", "look at what is there"),
    ),
    _missing_rule,
    _PlainRule(
        r"not currently have an active account|Reauthentication|reauthenticating|invalid_grant"
        r"|problem refreshing|UNAUTHENTICATED|invalid authentication credentials|Login Required"
        r"|gcloud auth login|Unauthorized",
        *("AUTH", "gcloud has no valid login", "a person runs: gcloud auth login"),
    ),
    _PlainRule(
        r"Invalid value|INVALID_ARGUMENT|FAILED_PRECONDITION|invalidParameter|badRequest"
        r"|OUT_OF_RANGE|HTTPError 400|\[--[a-z-]+\]",
        *("INVALID", "the provider refused it", ""),
    ),
    _fault_rule,
)
