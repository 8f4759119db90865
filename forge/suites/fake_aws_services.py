"""How each service of the fake AWS is spoken to and words a refusal; and the two smallest of them.

Those are STS and Service Quotas. Knows no machine and no HTTP server.
"""

from __future__ import annotations

import json
import re
import uuid
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from typing import Any
from urllib.parse import parse_qs, urlsplit
from xml.sax.saxutils import escape

from forge.suites.fake_aws_moto import AwsAnswer
from forge.suites.fake_aws_world import AwsRefusal, AwsRequest, AwsWorld

_VCPU_QUOTA_NAMES = {
    "L-DB2E81BA": "Running On-Demand G and VT instances",
    "L-3819A6DF": "All G and VT Spot Instance Requests",
    "L-1945791B": "Running On-Demand Inf instances",
    "L-B5D1601B": "All Inf Spot Instance Requests",
}
_JSON_SPEAKERS = ("ssm", "secretsmanager", "servicequotas")
# What each kind of service says of credentials that are of no use: code and HTTP status.
_NO_CREDENTIALS = {
    "expired": {
        "ec2": ("RequestExpired", 400),
        "json": ("ExpiredTokenException", 400),
        "query": ("ExpiredToken", 403),
    },
    "invalid": {
        "ec2": ("AuthFailure", 401),
        "json": ("UnrecognizedClientException", 400),
        "query": ("InvalidClientTokenId", 403),
    },
}
_NO_CREDENTIALS_WORDS = {
    "RequestExpired": "Request has expired.",
    "AuthFailure": "AWS was not able to validate the provided access credentials",
    "ExpiredTokenException": "The security token included in the request is expired",
    "ExpiredToken": "The security token included in the request is expired",
    "UnrecognizedClientException": "The security token included in the request is invalid.",
    "InvalidClientTokenId": "The security token included in the request is invalid.",
}


_AWS_SCOPE = re.compile(r"Credential=([^/,\s]+)/\d+/([^/]+)/([^/]+)/aws4_request")
_UNRECORDED = "[payload not recorded]"
_SECRET_FIELDS = ("SecretString", "SecretBinary")


@dataclass(frozen=True)
class AwsCall:
    """One HTTP request to AWS, and what it means: who (the key), which service and region (both
    from the signature), which action with what."""

    method: str
    target: str
    headers: Mapping[str, str]
    body: bytes
    key: str
    service: str
    region: str
    action: str
    given: dict[str, Any]

    @classmethod
    def read(cls, method: str, target: str, headers: Mapping[str, str], body: bytes) -> AwsCall:
        scope = _AWS_SCOPE.search(headers.get("Authorization", ""))
        key, region, service = scope.groups() if scope else ("", "us-east-1", "s3")
        named = headers.get("X-Amz-Target", "")
        given: dict[str, Any] = {}
        if named:
            action = named.rsplit(".", 1)[-1]
            with suppress(ValueError):
                given = dict(json.loads(body or b"{}"))
        elif service == "s3":
            parts = urlsplit(target)
            action = f"{method} {parts.path}"
            given = {name: values[-1] for name, values in parse_qs(parts.query, True).items()}
        else:
            form = parse_qs(body.decode("utf-8", "replace"))
            given = {name: values[-1] for name, values in form.items()}
            action = str(given.pop("Action", ""))
        return cls(method, target, headers, body, key, service, region, action, given)

    def record(self) -> AwsRequest:
        """What is kept of it: no credentials, no secret's payload."""
        copy: dict[str, Any] = json.loads(json.dumps(self.given))
        for name in _SECRET_FIELDS:
            if name in copy:
                copy[name] = _UNRECORDED
        return AwsRequest(self.service, self.region, self.action, copy)


def useless_credentials(service: str, kind: str) -> AwsRefusal:
    """The refusal of credentials that are "expired" or "invalid"."""
    form = "ec2" if service == "ec2" else "json" if service in _JSON_SPEAKERS else "query"
    code, status = _NO_CREDENTIALS[kind][form]
    return AwsRefusal(code, _NO_CREDENTIALS_WORDS[code], status)


def aws_throttled(service: str) -> AwsRefusal:
    """Too many requests, as the service says it."""
    if service == "ec2":
        return AwsRefusal("RequestLimitExceeded", "Request limit exceeded.", 503)
    code = "ThrottlingException" if service in _JSON_SPEAKERS else "Throttling"
    return AwsRefusal(code, "Rate exceeded", 400)


def aws_refused(service: str, refusal: AwsRefusal) -> AwsAnswer:
    """A refusal in the form of the service's own errors."""
    identity = str(uuid.uuid4())
    headers = {"x-amzn-RequestId": identity, "Content-Type": "text/xml;charset=UTF-8"}
    code, words = refusal.code, refusal.message
    if service in _JSON_SPEAKERS:
        headers["Content-Type"] = "application/x-amz-json-1.1"
        return refusal.status, headers, json.dumps({"__type": code, "message": words}).encode()
    error = f"<Code>{escape(code)}</Code><Message>{escape(words)}</Message>"
    if service == "ec2":
        text = (
            f"<Response><Errors><Error>{error}</Error></Errors>"
            f"<RequestID>{identity}</RequestID></Response>"
        )
    elif service == "s3":
        text = f"<Error>{error}<RequestId>{identity}</RequestId></Error>"
    else:
        kind = "Sender" if refusal.status < 500 else "Receiver"
        text = (
            f"<ErrorResponse><Error><Type>{kind}</Type>{error}</Error>"
            f"<RequestId>{identity}</RequestId></ErrorResponse>"
        )
    return refusal.status, headers, ('<?xml version="1.0" encoding="UTF-8"?>\n' + text).encode()


def aws_json(result: Any) -> AwsAnswer:
    headers = {
        "Content-Type": "application/x-amz-json-1.1",
        "x-amzn-RequestId": str(uuid.uuid4()),
    }
    return 200, headers, json.dumps(result).encode()


def identity_answer(world: AwsWorld, action: str) -> AwsAnswer:
    """STS: who the credentials are."""
    if action != "GetCallerIdentity":
        raise AwsRefusal("InvalidAction", f"the fake's STS has no {action}")
    account = world.script.account or world.account
    text = (
        '<GetCallerIdentityResponse xmlns="https://sts.amazonaws.com/doc/2011-06-15/">'
        f"<GetCallerIdentityResult><Arn>arn:aws:iam::{account}:user/made-up</Arn>"
        f"<UserId>AIDAMADEUP</UserId><Account>{account}</Account></GetCallerIdentityResult>"
        f"<ResponseMetadata><RequestId>{uuid.uuid4()}</RequestId></ResponseMetadata>"
        "</GetCallerIdentityResponse>"
    )
    return 200, {"Content-Type": "text/xml"}, text.encode()


def quota_answer(world: AwsWorld, region: str, action: str, given: dict[str, Any]) -> AwsAnswer:
    """Service Quotas for EC2: limits in vCPUs."""
    code = str(given.get("QuotaCode", ""))
    known = given.get("ServiceCode") == "ec2"
    if action in ("GetServiceQuota", "GetAWSDefaultServiceQuota"):
        if not known or code not in world.script.quotas:
            words = "The request failed because the specified service does not exist."
            raise AwsRefusal("NoSuchResourceException", words)
        return aws_json({"Quota": _vcpu_quota(world, region, code)})
    if action == "ListServiceQuotas":
        codes = list(world.script.quotas) if known else []
        return aws_json({"Quotas": [_vcpu_quota(world, region, one) for one in codes]})
    raise AwsRefusal("InvalidAction", f"the fake's Service Quotas has no {action}")


def _vcpu_quota(world: AwsWorld, region: str, code: str) -> dict[str, Any]:
    return {
        "ServiceCode": "ec2",
        "ServiceName": "Amazon Elastic Compute Cloud (Amazon EC2)",
        "QuotaArn": f"arn:aws:servicequotas:{region}:{world.account}:ec2/{code}",
        "QuotaCode": code,
        "QuotaName": _VCPU_QUOTA_NAMES.get(code, code),
        "Value": world.quota(region, code),
        "Unit": "None",
        "Adjustable": True,
        "GlobalQuota": False,
    }
