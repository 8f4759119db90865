"""What all services of the fake AWS share: the script, the clock, refusals, the record of requests.

Knows no service, no HTTP server and no moto: what a thing is and how it lives, each service knows.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

FAKE_AWS_ACCOUNT = "111122223333"  # an account of AWS's own documents

# The refusals of a launch: HTTP status and AWS's words, from the EC2 API's list of error codes and
# from reports of users; the status matters, because botocore itself retries every 5xx.
_LAUNCH_REFUSALS: dict[str, tuple[int, str]] = {
    "InsufficientInstanceCapacity": (
        500,
        "We currently do not have sufficient {type} capacity in the Availability Zone you "
        "requested ({zone}). Our system will be working on provisioning additional capacity. You "
        "can currently get {type} capacity by not specifying an Availability Zone in your request "
        "or choosing {others}.",
    ),
    "InsufficientHostCapacity": (500, "Insufficient capacity."),
    "VcpuLimitExceeded": (
        400,
        "You have requested more vCPU capacity than your current vCPU limit of {limit} allows for "
        "the instance bucket that the specified instance type belongs to. Please visit "
        "http://aws.amazon.com/contact-us/ec2-request to request an adjustment to this limit.",
    ),
    "MaxSpotInstanceCountExceeded": (400, "Max spot instance count exceeded"),
    "InstanceLimitExceeded": (
        400,
        "You have requested more instances (1) than your current instance limit of 0 allows for "
        "the specified instance type. Please visit http://aws.amazon.com/contact-us/ec2-request "
        "to request an adjustment to this limit.",
    ),
    "SpotMaxPriceTooLow": (
        400,
        "Your Spot request price of {price} is lower than the minimum required Spot request "
        "fulfillment price of {least}.",
    ),
    "UnauthorizedOperation": (
        403,
        "You are not authorized to perform this operation. User: {arn} is not authorized to "
        "perform: ec2:{action} because no identity-based policy allows the ec2:{action} action.",
    ),
    "AccessDeniedException": (
        400,
        "User: {arn} is not authorized to perform: {service}:{action} because no identity-based "
        "policy allows the {service}:{action} action",
    ),
    "AccessDenied": (
        403,
        "User: {arn} is not authorized to perform: {service}:{action} because no identity-based "
        "policy allows the {service}:{action} action",
    ),
    "Unsupported": (
        400,
        "Your requested instance type ({type}) is not supported in your requested Availability "
        "Zone ({zone}). Please retry your request by not specifying an Availability Zone or "
        "choosing {others}.",
    ),
    "OptInRequired": (
        401,
        "You are not subscribed to this service. Please go to http://aws.amazon.com to subscribe.",
    ),
    "PendingVerification": (
        400,
        "Your request for accessing resources in this region is being validated, and you will not "
        "be able to launch additional resources in this region until the validation is complete.",
    ),
    "AuthFailure": (401, "AWS was not able to validate the provided access credentials"),
    "RequestLimitExceeded": (503, "Request limit exceeded."),
    "ThrottlingException": (400, "Rate exceeded"),
    "InternalError": (500, "An internal error has occurred"),
    "Unavailable": (503, "The service is unavailable. Please try again shortly."),
    "InvalidParameterValue": (
        400,
        "Value ({profile}) for parameter iamInstanceProfile.name is invalid. Invalid IAM Instance "
        "Profile name",
    ),
}


class AwsRefusal(Exception):
    """An error answer: AWS's code, its message, the HTTP status. The service forms the body."""

    def __init__(self, code: str, message: str, status: int = 400) -> None:
        super().__init__(message)
        self.code, self.message, self.status = code, message, status


def known_refusal(code: str, message: str = "", **words: str) -> AwsRefusal:
    """A refusal by its code, in AWS's words unless `message` gives others.

    `words` fill the message's gaps: type, zone, others, limit, price, least, arn, action, service,
    profile. A code that is not in the table has status 400 and says only its own name.
    """
    status, known = _LAUNCH_REFUSALS.get(code, (400, code))
    gaps = ("type", "zone", "others", "limit", "price", "least", "arn", "action", "service")
    filled = {**dict.fromkeys((*gaps, "profile"), "?"), **words}
    return AwsRefusal(code, message or known.format(**filled), status)


@dataclass
class CallFault:
    """One thing that goes wrong with an operation, where it matches.

    `action` is the API's name (RunInstances), "*" any; `code` AWS's error code, "html" for a page
    of a load balancer, "" for no refusal (useful with `lost`). `zone`, `market` ("spot" or
    "on-demand") and `type` matter for launches; `region` for any. `times` is how often it happens,
    none for always. `after`: the act is done first and then refused. `lost`: the answer never
    arrives, cut off at once ("cut") or held until the caller goes ("hold"); with `after` the act is
    done, otherwise not.
    """

    action: str = "RunInstances"
    code: str = "InsufficientInstanceCapacity"
    message: str = ""
    region: str = "*"
    zone: str = "*"
    market: str = "*"
    type: str = "*"
    times: int | None = None
    after: bool = False
    lost: str = ""

    def meets(self, action: str, **where: str) -> bool:
        """Whether it is for this call; what `where` lacks is no reason against it."""
        if self.times is not None and self.times <= 0:
            return False
        if self.action not in ("*", action):
            return False
        return all(getattr(self, key) in ("*", value) for key, value in where.items())


@dataclass
class AwsScript:
    """How the account is, and what goes wrong in it.

    `faults` are looked through in order, the first that meets a call counts. Seconds are of the
    fake's clock (`FakeAws.advance`), but `delays` (by action) are real ones.
    """

    faults: list[CallFault] = field(default_factory=list)
    delays: dict[str, float] = field(default_factory=dict)
    throttled: dict[str, int] = field(default_factory=dict)  # by action: the next so many calls
    credentials: str = ""  # "expired", "invalid": of no use
    account: str = ""  # another account than the fake's, as GetCallerIdentity tells it
    regions: tuple[str, ...] = (
        *("us-east-1", "us-east-2", "us-west-2"),
        *("eu-central-1", "eu-west-1", "ap-northeast-1"),
    )  # that the account has enabled
    quotas: dict[str, float] = field(  # vCPUs by quota code, in each region
        default_factory=lambda: {
            "L-DB2E81BA": 8.0,  # on demand, G and VT
            "L-3819A6DF": 8.0,  # spot, G and VT
            "L-1945791B": 8.0,  # on demand, Inf
            "L-B5D1601B": 8.0,  # spot, Inf
        }
    )
    region_quotas: dict[tuple[str, str], float] = field(default_factory=dict)  # (region, code)
    spot_prices: dict[str, float] = field(  # USD an hour by type; a zone adds a little
        default_factory=lambda: {
            "g6.xlarge": 0.3,
            "g6.2xlarge": 0.4,
            "g5g.xlarge": 0.2,
            "g5g.2xlarge": 0.25,
            "g4dn.xlarge": 0.2,
            "inf2.xlarge": 0.15,
        }
    )
    zone_prices: dict[tuple[str, str], float] = field(default_factory=dict)  # (zone, type)
    unpriced: set[str] = field(default_factory=set)  # zones without a spot price history
    unlisted: set[tuple[str, str]] = field(default_factory=set)  # (zone, type) not offered
    no_parameters: set[str] = field(default_factory=set)  # public parameters that are gone
    no_subnet: set[str] = field(default_factory=set)  # zones whose default subnet was deleted
    image_gb: int = 35  # the size of the images' own volume
    profile_hidden: int = 0  # the next so many launches do not see an instance profile yet
    unseen: int = 0  # so many reads do not see an instance that was just launched
    stubborn: set[str] = field(default_factory=set)  # ids that stay in shutting-down
    pending_s: float = 0.0  # from the launch until an instance runs
    ending_s: float = 0.0  # in shutting-down, and in stopping
    gone_s: float = 3600.0  # how long what was terminated stays on the list
    invocation_hidden: int = 1  # the first reads of a command's result do not find it
    page: int = 1000  # the most things of one page of a list


@dataclass(frozen=True)
class AwsRequest:
    """One request as it came in, without credentials and without secrets' payloads."""

    service: str  # as the signature names it: ec2, ssm, sts, iam, secretsmanager, s3 ...
    region: str
    action: str  # RunInstances; for S3 "PUT /bucket/key"
    parameters: dict[str, Any]


@dataclass
class AwsWorld:
    """The account, the clock (Unix seconds) and the script of the moment."""

    account: str = FAKE_AWS_ACCOUNT
    script: AwsScript = field(default_factory=AwsScript)
    ahead_s: float = 0.0
    _serial: int = 0

    @property
    def now(self) -> float:
        """This computer's clock and what was let pass besides."""
        return time.time() + self.ahead_s

    @property
    def arn(self) -> str:
        return f"arn:aws:iam::{self.account}:user/made-up"

    def serial(self) -> int:
        self._serial += 1
        return self._serial

    def fault(self, action: str, **where: str) -> CallFault | None:
        """The first fault of the script that meets this call; it is used up by that."""
        for one in self.script.faults:
            if one.meets(action, **where):
                if one.times is not None:
                    one.times -= 1
                return one
        return None

    def quota(self, region: str, code: str) -> float:
        over = self.script.region_quotas
        return over.get((region, code), self.script.quotas.get(code, 0.0))

    def spot_price(self, zone: str, instance_type: str) -> float | None:
        """USD an hour in a zone; none where the type has no spot price."""
        if (zone, instance_type) in self.script.zone_prices:
            return self.script.zone_prices[zone, instance_type]
        base = self.script.spot_prices.get(instance_type)
        if base is None or zone in self.script.unpriced:
            return None
        return round(base + 0.01 * (ord(zone[-1]) - ord("a")) + 0.005 * zone_spread(zone), 4)


def zone_spread(zone: str) -> int:
    """A small number of a zone's region, so that prices differ between regions."""
    return sum(map(ord, zone_home(zone))) % 7


def zone_home(zone: str) -> str:
    """us-east-1a lies in us-east-1."""
    return zone[:-1]


def aws_tags(items: Any) -> dict[str, str]:
    """Tags as a mapping, from the API's list of Key and Value."""
    found: dict[str, str] = {}
    for one in items or []:
        if isinstance(one, Mapping):
            found[str(one.get("Key", one.get("key")))] = str(one.get("Value", one.get("value", "")))
    return found
