"""What AWS's SDK raised as refusals that say what to do.

Pure functions over error codes; botocore's own words stay in the text, because others read them.
Knows no rig and no resource. Codes: the API references of EC2, SSM, Secrets Manager, IAM and S3,
and botocore 1.44.8's exceptions (2026-11-30); one that is not known becomes UNKNOWN, never a guess.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

from forge.parts.ground.errors import ErrorClass, RigError
from forge.parts.ground.redact import clean, printable

AWS_TEXT_QUOTED = 500  # characters of AWS's own words in an error
# Every refusal that quotes AWS ends with a step of ours: others' words may end with one of theirs.
_AWS_CORRECT = "correct what tpu.env names, then repeat"
_AWS_READS = ("describe_", "get_", "list_", "head_", "simulate_")
# EC2 appends what only `aws sts decode-authorization-message` can read, up to some kB of it.
_AWS_ENCODED = re.compile(r"\.? ?Encoded authorization failure message: ?\S+")
_AWS_PARAMETER = re.compile(
    r"^(?:Invalid [a-z ]+ for parameter (?P<wrong>[\w.\[\]]+),"
    r"|(?:Missing required|Unknown) parameter in (?P<place>[\w.\[\]]+): \"(?P<name>\w+)\")",
    re.M,
)


@dataclass(frozen=True)
class _AwsRule:
    """Codes (an expression, matched whole), a wording of the message, and what they mean."""

    codes: str
    error_class: ErrorClass
    why: str
    next_step: str
    wording: str = ""


# In this order: what is certain and specific before what is general. A throttle is called a limit
# that is exceeded, and EC2 calls both a zone and a stop of a spot machine unsupported.
_AWS_RULES = (
    _AwsRule(
        r"RequestLimitExceeded|Throttl\w+|RequestThrottled\w*|TooManyRequests\w*|SlowDown"
        r"|PriorRequestNotComplete|EC2ThrottledException",
        *("BUSY", "too many calls in a short time; nothing was done"),
        "wait a minute, then repeat",
    ),
    _AwsRule(
        r"Insufficient(?:Instance|Host|ReservedInstance)?Capacity\w*",
        *("CAPACITY", "the zone has no such machine free now", "another zone, or later"),
    ),
    _AwsRule(
        "Unsupported",
        *("CAPACITY", "the zone does not offer this machine", "a zone that lists the type"),
        wording=r"requested Availability Zone|requested configuration is currently not supported",
    ),
    _AwsRule(
        "SpotMaxPriceTooLow",
        *("CAPACITY", "spot costs more now than the request allows"),
        "SPOT_MAX_PRICE=0 in tpu.env (up to the on-demand price), or rent on demand",
    ),
    _AwsRule(
        r"(?:VcpuLimit|InstanceLimit|MaxSpotInstanceCount)Exceeded|\w*LimitExceeded\w*"
        r"|\w*QuotaExceeded\w*",
        *("QUOTA", "a limit of the account in this region is reached"),
        "another region, or a person requests more (Service Quotas)",
    ),
    _AwsRule(
        r"AuthFailure|InvalidClientTokenId|InvalidAccessKeyId|UnrecognizedClientException"
        r"|ExpiredToken\w*|RequestExpired|SignatureDoesNotMatch|InvalidSignature\w*"
        r"|IncompleteSignature\w*|MissingAuthenticationToken\w*|InvalidToken|RequestTimeTooSkewed",
        *("AUTH", "AWS does not accept the credentials"),
        "a person runs: aws sso login, or renews the keys, and checks this computer's clock; a "
        "region that the account has not enabled answers so as well",
    ),
    _AwsRule(
        "OptInRequired|PendingVerification|Blocked|AccountDisabled|AccountProblem",
        *("DENIED", "the account may not ask for this"),
        "a person settles it with AWS (the account's state, or enabling the region)",
    ),
    _AwsRule(
        r"UnauthorizedOperation|AccessDenied\w*|NotAuthorized\w*|Forbidden|403",
        *("DENIED", "the identity may not do this"),
        "a person allows what the text names in the identity's policy",
    ),
    _AwsRule(
        "OperationNotPermitted",
        *("DENIED", "a protection forbids it", "a person takes the protection off"),
    ),
    _AwsRule(
        r"InvalidInstanceId|TargetNotConnected",
        *("UNREACHABLE", "Systems Manager does not reach the machine: its agent is not online"),
        "wait a minute; if it stays so: does it run, may its instance profile use "
        "AmazonSSMManagedInstanceCore, has its subnet a way out?",
    ),
    _AwsRule(
        "IdempotentParameterMismatch",
        *("EXISTS", "an earlier request of this token asked for something else"),
        "look at what is there",
    ),
    _AwsRule(
        r"EntityAlreadyExists\w*|ResourceExists\w*|Invalid\w+\.Duplicate|BucketAlready\w+",
        *("EXISTS", "it is there already", "look at what is there"),
    ),
    _AwsRule(
        r"Incorrect(?:Instance)?State|DependencyViolation|DeleteConflict\w*|OperationAborted"
        r"|ConcurrentModification\w*|ResourceInUse\w*|InvalidGroup\.InUse",
        *("BUSY", "its state does not allow this now", "look at its state, then repeat"),
    ),
    _AwsRule(
        r"ParameterNotFound|ResourceNotFound\w*|NoSuch\w+|InvocationDoesNotExist|404",
        *("NOT_FOUND", "AWS has no such thing", ""),
    ),
)
# By the names of botocore's exceptions, most specific first; what is not sent was not done.
_AWS_LOGIN = re.compile(
    r"NoCredentialsError|PartialCredentialsError|CredentialRetrievalError|ProfileNotFound"
    r"|ConfigParseError|ConfigNotFound|NoAuthTokenError|TokenRetrievalError|SSOError|LoginError"
    r"|UnknownCredentialError|InvalidConfigError|MetadataRetrievalError"
    r"|RefreshWithMFAUnsupportedError|MissingDependencyException"
)
_AWS_UNSENT = re.compile(
    "EndpointConnectionError|ConnectTimeoutError|ProxyConnectionError|InvalidProxiesConfigError"
)
_AWS_NETWORK = re.compile("HTTPClientError|ConnectionError|IncompleteReadError|OSError")
_AWS_USAGE = re.compile(
    "ParamValidationError|ValidationError|NoRegionError|DataNotFoundError|EndpointProviderError"
    "|EndpointVariantError|InvalidEndpointConfigurationError|BaseEndpointResolverError"
)


def aws_refusal(error: Exception, operation: str) -> RigError:
    """What the SDK raised in `operation` (boto3's method name) as the RigError that it means.

    CAPACITY, QUOTA, DENIED, AUTH, INVALID, EXISTS, NOT_FOUND, BUSY as AWS said. Where a request
    did not go out, UNREACHABLE; where it did and its fate is not known, UNREACHABLE for a read and
    UNKNOWN for a change. UNKNOWN too for a code or an answer that is not known.
    """
    if isinstance(error, RigError):
        return error
    kinds = " ".join(kind.__name__ for kind in type(error).__mro__)
    if "ClientError" in kinds.split() and hasattr(error, "response"):
        return _answered_refusal(error, operation)
    if isinstance(error, ImportError):
        why = f"AWS's SDK is not whole: {error.name or 'a module'} is not installed"
        return RigError("DENIED", why, "make install in the rig's folder")
    said = _aws_words(str(error))
    if _AWS_LOGIN.search(kinds):
        step = "a person runs: aws sso login, or aws configure; AWS_PROFILE in tpu.env names which"
        return RigError("AUTH", f"there are no AWS credentials to use: {said}", step)
    if "ParamValidationError" in kinds:
        # Its words repeat the values, and a value may be a secret.
        found = _AWS_PARAMETER.finditer(str(error))
        names = dict.fromkeys(m["wrong"] or m["name"] for m in found)
        why = f"{operation} was not sent: these are not as AWS wants them: {', '.join(names)}"
        return RigError("INVALID", why)
    if _AWS_UNSENT.search(kinds):
        step = "check this computer's network, then repeat"
        return RigError("UNREACHABLE", f"AWS could not be reached: {said}", step)
    if _AWS_NETWORK.search(kinds):
        return aws_fate(f"the connection to AWS broke in {operation}: {said}", operation)
    if _AWS_USAGE.search(kinds):
        return RigError("INVALID", f"{operation} was not sent: {said}", _AWS_CORRECT)
    why = f"AWS's SDK failed on {operation} ({type(error).__name__}): {said}"
    return RigError("UNKNOWN", why, "read the state before anything is repeated")


def aws_reads(operation: str) -> bool:
    """Whether `operation` (boto3's method name) changes nothing, so that a repeat does no harm."""
    return operation.startswith(_AWS_READS)


def aws_fate(how: str, operation: str) -> RigError:
    """The RigError for a request that may have arrived, and whose answer did not."""
    if aws_reads(operation):
        return RigError("UNREACHABLE", how, "check this computer's network, then read again")
    why = f"{how}; it may have been done all the same"
    return RigError("UNKNOWN", why, "read the state before anything is repeated")


def aws_code(error: Exception) -> str:
    """The code that AWS answered with, such as InvalidVolume.NotFound; empty without an answer."""
    response = getattr(error, "response", None)
    found = response.get("Error") if isinstance(response, dict) else None
    return str(found.get("Code", "")) if isinstance(found, dict) else ""


def _answered_refusal(error: Exception, operation: str) -> RigError:
    code, said = aws_code(error), _aws_words(str(error))
    for rule in _AWS_RULES:
        if re.fullmatch(rule.codes, code) and re.search(rule.wording, said):
            return RigError(rule.error_class, f"{rule.why}: {said}", rule.next_step)
    response = getattr(error, "response", {})
    status = response.get("ResponseMetadata", {}).get("HTTPStatusCode", 0)
    if re.match("Internal|ServiceUnavailable|Unavailable", code) or status >= 500:
        return aws_fate(f"AWS failed at it: {said}", operation)
    if code.endswith((".NotFound", ".Unknown")):
        # What a request for something new names and is not there is a wrong setting, and must
        # never look like the absence of the new thing.
        if operation.startswith(("run_", "create_", "request_")):
            why = f"something that it names is not there: {said}"
            return RigError("INVALID", why, _AWS_CORRECT)
        return RigError("NOT_FOUND", f"AWS has no such thing: {said}", "look what is there")
    if re.match(r"Invalid|Missing|Validation|Malformed|Unsupported|Unknown|Max\w+Size|400", code):
        return RigError("INVALID", f"AWS refused the request itself: {said}", _AWS_CORRECT)
    why = f"AWS answered in a way that is not known here: {said}"
    return RigError("UNKNOWN", why, "read the state again")


def _aws_words(text: str) -> str:
    """The SDK's words in one line, without what only a program can read."""
    kept = _AWS_ENCODED.sub(" (with an encoded message)", text[:20_000])
    return clean(" ".join(printable(kept).split()), AWS_TEXT_QUOTED)
