"""What AWS's SDK raises, as the refusal that it means, and as the sweep reads that.

The exceptions are botocore's own, its words among them; the messages are AWS's.
"""

from __future__ import annotations

import unittest
from typing import Any

import botocore.exceptions
import botocore.session
from botocore.exceptions import ClientError

from forge.parts.boundaries.aws_refusals import (
    AWS_TEXT_QUOTED,
    aws_code,
    aws_reads,
    aws_refusal,
)
from forge.parts.ground.errors import RigError
from forge.parts.knowledge.refusal_reading import read_refusal

CANARY = "hf_CanaryCanaryCanary0123456789abcdef"
STOCKOUT = (
    "We currently do not have sufficient g6.xlarge capacity in the Availability Zone you requested "
    "(us-east-1a). Our system will be working on provisioning additional capacity. You can "
    "currently get g6.xlarge capacity by not specifying an Availability Zone in your request or "
    "choosing us-east-1b, us-east-1c."
)
NO_TYPE = (
    "Your requested instance type (g6.xlarge) is not supported in your requested Availability Zone "
    "(us-east-1e). Please retry your request by not specifying an Availability Zone or choosing "
    "us-east-1a, us-east-1b."
)
VCPU = (
    "You have requested more vCPU capacity than your current vCPU limit of 0 allows for the "
    "instance bucket that the specified instance type belongs to. Please visit "
    "http://aws.amazon.com/contact-us/ec2-request to request an adjustment to this limit."
)
LOW_PRICE = (
    "Your Spot request price of 0.01 is lower than the minimum required Spot request fulfillment "
    "price of 0.3."
)
NO_PROFILE = (
    "Value (gemma4-rig) for parameter iamInstanceProfile.name is invalid. Invalid IAM Instance "
    "Profile name"
)
NOT_ALLOWED = (
    "You are not authorized to perform this operation. User: arn:aws:iam::111122223333:user/ada is "
    "not authorized to perform: ec2:RunInstances because no identity-based policy allows the "
    "ec2:RunInstances action. Encoded authorization failure message: " + "Qk9P_x-" * 300
)
# (code, status, message) of RunInstances -> class, reason of the sweep, scope of the refusal.
LAUNCHES: tuple[tuple[str, int, str, str, str, str], ...] = (
    ("InsufficientInstanceCapacity", 500, STOCKOUT, "CAPACITY", "stockout", "zone"),
    ("InsufficientHostCapacity", 500, "Insufficient capacity.", "CAPACITY", "stockout", "zone"),
    ("InsufficientReservedInstanceCapacity", 500, "", "CAPACITY", "stockout", "zone"),
    ("InsufficientCapacity", 500, "Insufficient capacity.", "CAPACITY", "stockout", "zone"),
    (
        *("InsufficientInstanceCapacity", 500),
        "There is no Spot capacity available that matches your request.",
        *("CAPACITY", "stockout", "zone"),
    ),
    ("Unsupported", 400, NO_TYPE, "CAPACITY", "not offered", "zone"),
    (
        *("Unsupported", 400),
        "The requested configuration is currently not supported. Please check the documentation "
        "for supported configurations.",
        *("CAPACITY", "not offered", "zone"),
    ),
    ("SpotMaxPriceTooLow", 400, LOW_PRICE, "CAPACITY", "price", "market"),
    ("VcpuLimitExceeded", 400, VCPU, "QUOTA", "quota", "region"),
    (
        *("InstanceLimitExceeded", 400),
        "You have requested more instances (1) than your current instance limit of 0 allows.",
        *("QUOTA", "quota", "region"),
    ),
    (
        *("MaxSpotInstanceCountExceeded", 400, "Max spot instance count exceeded"),
        *("QUOTA", "quota", "region"),
    ),
    ("UnauthorizedOperation", 403, NOT_ALLOWED, "DENIED", "permission", "zone"),
    ("AccessDenied", 403, "Access Denied", "DENIED", "permission", "zone"),
    (
        *("OptInRequired", 401),
        "You are not subscribed to this service. Please go to http://aws.amazon.com to subscribe.",
        *("DENIED", "permission", "zone"),
    ),
    (
        *("PendingVerification", 400),
        "Your request for accessing resources in this region is being validated.",
        *("DENIED", "permission", "zone"),
    ),
    ("Blocked", 403, "This account is currently blocked", "DENIED", "permission", "zone"),
    (
        *("AuthFailure", 401),
        "AWS was not able to validate the provided access credentials",
        *("AUTH", "auth", "zone"),
    ),
    ("RequestExpired", 400, "Request has expired.", "AUTH", "auth", "zone"),
    (
        *("InvalidClientTokenId", 403),
        "The security token included in the request is invalid.",
        *("AUTH", "auth", "zone"),
    ),
    (
        *("UnrecognizedClientException", 400),
        "The security token included in the request is invalid.",
        *("AUTH", "auth", "zone"),
    ),
    (
        *("ExpiredToken", 400, "The provided token has expired."),
        *("AUTH", "auth", "zone"),
    ),
    (
        *("InvalidAMIID.NotFound", 400, "The image id '[ami-0abc]' does not exist"),
        *("INVALID", "usage", "zone"),
    ),
    (
        *("InvalidSubnetID.NotFound", 400, "The subnet ID 'subnet-0abc' does not exist"),
        *("INVALID", "usage", "zone"),
    ),
    (
        *("InvalidGroup.NotFound", 400, "The security group 'sg-0abc' does not exist"),
        *("INVALID", "usage", "zone"),
    ),
    ("InvalidParameterCombination", 400, "Not these two", "INVALID", "usage", "zone"),
    (
        *("InvalidParameterValue", 400, "Value (x) for parameter groupId is invalid."),
        *("INVALID", "usage", "zone"),
    ),
    ("InvalidParameterValue", 400, NO_PROFILE, "INVALID", "transient", "zone"),
    ("MissingParameter", 400, "The request must contain ImageId", "INVALID", "usage", "zone"),
    (
        *("InvalidUserData.Malformed", 400, "User data is limited to 16384 bytes"),
        *("INVALID", "usage", "zone"),
    ),
    (
        *("InvalidBlockDeviceMapping", 400, "Volume of size 8GB is smaller than snapshot"),
        *("INVALID", "usage", "zone"),
    ),
    ("RequestLimitExceeded", 503, "Request limit exceeded.", "BUSY", "transient", "zone"),
    ("Throttling", 400, "Rate exceeded", "BUSY", "transient", "zone"),
    ("ThrottlingException", 400, "Rate exceeded", "BUSY", "transient", "zone"),
    (
        *("IdempotentParameterMismatch", 400),
        "Arguments on this idempotent request are inconsistent with arguments used in previous "
        "request(s).",
        *("EXISTS", "unknown", "zone"),
    ),
    # What AWS itself failed at may have made the machine.
    ("InternalError", 500, "An internal error has occurred", "UNKNOWN", "unknown", "zone"),
    ("Unavailable", 503, "The service is unavailable.", "UNKNOWN", "unknown", "zone"),
    ("502", 502, "Bad Gateway", "UNKNOWN", "unknown", "zone"),
    ("NobodyHasSeenThis", 400, "and nobody knows it", "UNKNOWN", "unknown", "zone"),
)
# (code, status, operation, class) of other calls.
CALLS: tuple[tuple[str, int, str, str], ...] = (
    ("InvalidInstanceID.NotFound", 400, "terminate_instances", "NOT_FOUND"),
    ("InvalidInstanceID.NotFound", 400, "describe_instances", "NOT_FOUND"),
    ("InvalidInstanceID.Malformed", 400, "describe_instances", "INVALID"),
    ("InvalidVolume.NotFound", 400, "delete_volume", "NOT_FOUND"),
    ("VolumeLimitExceeded", 400, "run_instances", "QUOTA"),
    ("InvalidGroup.NotFound", 400, "delete_security_group", "NOT_FOUND"),
    ("InvalidVpcID.NotFound", 400, "create_security_group", "INVALID"),
    ("InvalidGroup.Duplicate", 400, "create_security_group", "EXISTS"),
    ("InvalidPermission.Duplicate", 400, "authorize_security_group_egress", "EXISTS"),
    ("InvalidGroup.InUse", 400, "delete_security_group", "BUSY"),
    ("DependencyViolation", 400, "delete_security_group", "BUSY"),
    ("IncorrectInstanceState", 400, "start_instances", "BUSY"),
    ("UnsupportedOperation", 400, "stop_instances", "INVALID"),
    ("OperationNotPermitted", 400, "terminate_instances", "DENIED"),
    ("ParameterNotFound", 400, "get_parameter", "NOT_FOUND"),
    ("AccessDeniedException", 400, "get_parameter", "DENIED"),
    ("InvalidInstanceId", 400, "send_command", "UNREACHABLE"),
    ("TargetNotConnected", 400, "start_session", "UNREACHABLE"),
    ("InvocationDoesNotExist", 400, "get_command_invocation", "NOT_FOUND"),
    ("ResourceNotFoundException", 400, "describe_secret", "NOT_FOUND"),
    ("ResourceExistsException", 400, "create_secret", "EXISTS"),
    ("InvalidRequestException", 400, "put_secret_value", "INVALID"),
    ("LimitExceededException", 400, "create_secret", "QUOTA"),
    ("NoSuchEntity", 404, "get_instance_profile", "NOT_FOUND"),
    ("EntityAlreadyExists", 409, "create_role", "EXISTS"),
    ("DeleteConflict", 409, "delete_role", "BUSY"),
    ("LimitExceeded", 409, "create_role", "QUOTA"),
    ("404", 404, "head_bucket", "NOT_FOUND"),
    ("403", 403, "head_bucket", "DENIED"),
    ("NoSuchBucket", 404, "list_objects_v2", "NOT_FOUND"),
    ("BucketAlreadyExists", 409, "create_bucket", "EXISTS"),
    ("SlowDown", 503, "list_objects_v2", "BUSY"),
    ("InternalServerError", 500, "send_command", "UNKNOWN"),
    ("InternalServerError", 500, "get_command_invocation", "UNREACHABLE"),
    ("InternalServiceError", 500, "put_secret_value", "UNKNOWN"),
    ("ServiceUnavailable", 503, "describe_instances", "UNREACHABLE"),
    ("500", 500, "head_bucket", "UNREACHABLE"),
    ("NobodyHasSeenThis", 400, "describe_instances", "UNKNOWN"),
)


def answered(code: str, status: int, message: str, operation: str) -> ClientError:
    """What botocore raises for such an answer."""
    name = "".join(word.capitalize() for word in operation.split("_"))
    answer: dict[str, Any] = {
        "Error": {"Code": code, "Message": message},
        "ResponseMetadata": {"HTTPStatusCode": status, "RetryAttempts": 0},
    }
    return ClientError(answer, name)


def refused_launch(code: str, status: int, message: str) -> RigError:
    return aws_refusal(answered(code, status, message, "run_instances"), "run_instances")


class LaunchTest(unittest.TestCase):
    def test_every_refused_launch_has_its_class(self) -> None:
        for code, status, message, error_class, _, _ in LAUNCHES:
            with self.subTest(code, message=message[:40]):
                self.assertEqual(refused_launch(code, status, message).error_class, error_class)

    def test_the_sweep_reads_its_reason_from_class_and_words_together(self) -> None:
        for code, status, message, _, reason, scope in LAUNCHES:
            with self.subTest(code, message=message[:40]):
                refusal = refused_launch(code, status, message)
                read = read_refusal(refusal.what, refusal.error_class)
                self.assertEqual((read.reason, read.scope), (reason, scope), refusal.what)

    def test_the_words_alone_say_the_same(self) -> None:
        # As the failure bank reads them in a log. A fault of AWS's own is transient there: whether
        # the machine was made, only the class says.
        for code, status, message, error_class, reason, _ in LAUNCHES:
            with self.subTest(code, message=message[:40]):
                said = refused_launch(code, status, message).what
                if error_class == "UNKNOWN":
                    self.assertIn(read_refusal(said).reason, ("transient", "unknown"))
                else:
                    self.assertEqual(read_refusal(said).reason, reason, said)

    def test_botocores_own_words_stay(self) -> None:
        for code, status, message, _, _, _ in LAUNCHES:
            said = refused_launch(code, status, message).what
            words = f"An error occurred ({code}) when calling the RunInstances operation"
            self.assertIn(words, said)
            self.assertNotIn("\n", said)
            self.assertLess(len(said), AWS_TEXT_QUOTED + 200)

    def test_the_zones_that_ec2_names_are_the_hint(self) -> None:
        refusal = refused_launch("InsufficientInstanceCapacity", 500, STOCKOUT)
        read = read_refusal(refusal.what, refusal.error_class)
        self.assertEqual(read.hints, ("us-east-1b", "us-east-1c"))

    def test_an_encoded_message_is_left_out(self) -> None:
        said = refused_launch("UnauthorizedOperation", 403, NOT_ALLOWED).what
        self.assertNotIn("Qk9P", said)
        self.assertIn("ec2:RunInstances action (with an encoded message)", said)


class CallTest(unittest.TestCase):
    def test_other_calls_have_their_class(self) -> None:
        for code, status, operation, error_class in CALLS:
            with self.subTest(code, operation=operation):
                refusal = aws_refusal(answered(code, status, "m", operation), operation)
                self.assertEqual(refusal.error_class, error_class)

    def test_a_missing_thing_that_a_launch_names_is_no_absent_machine(self) -> None:
        for code in ("InvalidAMIID.NotFound", "InvalidSubnetID.NotFound", "InvalidGroup.NotFound"):
            self.assertEqual(refused_launch(code, 400, "gone").error_class, "INVALID")

    def test_only_what_reads_is_a_read(self) -> None:
        for operation in ("describe_instances", "get_parameter", "list_secrets", "head_bucket"):
            self.assertTrue(aws_reads(operation))
        for operation in ("run_instances", "send_command", "put_secret_value", "assume_role"):
            self.assertFalse(aws_reads(operation))

    def test_the_code_of_an_answer(self) -> None:
        self.assertEqual(
            aws_code(answered("Unsupported", 400, "m", "run_instances")), "Unsupported"
        )
        self.assertEqual(aws_code(ValueError("x")), "")

    def test_an_answer_of_a_form_that_is_not_known(self) -> None:
        for answer in ({}, {"Error": {}}, {"Error": {"Code": "X"}, "ResponseMetadata": {}}):
            error = ClientError(answer, "RunInstances")
            self.assertEqual(aws_refusal(error, "run_instances").error_class, "UNKNOWN")


class UnansweredTest(unittest.TestCase):
    """What is raised without an answer. Whether it was sent decides what a change's fate is."""

    def classes(self, error: Exception) -> tuple[str, str]:
        read, change = aws_refusal(error, "describe_instances"), aws_refusal(error, "run_instances")
        for refusal in (read, change):
            self.assertIsInstance(refusal, RigError)
        return read.error_class, change.error_class

    def test_what_did_not_go_out_was_not_done(self) -> None:
        where = {"endpoint_url": "http://127.0.0.1:1", "error": "refused", "proxy_url": "p"}
        for kind in ("EndpointConnectionError", "ConnectTimeoutError", "ProxyConnectionError"):
            error = getattr(botocore.exceptions, kind)(**where)
            self.assertEqual(self.classes(error), ("UNREACHABLE", "UNREACHABLE"), kind)

    def test_what_went_out_may_have_been_done(self) -> None:
        where = {"endpoint_url": "http://127.0.0.1:1", "error": "gone"}
        kinds = ("ReadTimeoutError", "ConnectionClosedError", "HTTPClientError", "SSLError")
        for kind in kinds:
            error = getattr(botocore.exceptions, kind)(**where)
            self.assertEqual(self.classes(error), ("UNREACHABLE", "UNKNOWN"), kind)
        short = botocore.exceptions.IncompleteReadError(actual_bytes=1, expected_bytes=2)
        self.assertEqual(self.classes(short), ("UNREACHABLE", "UNKNOWN"))

    def test_an_answer_that_cannot_be_read_is_unknown(self) -> None:
        from botocore.parsers import ResponseParserError

        error = ResponseParserError("Unable to parse response: not well-formed")
        self.assertEqual(self.classes(error), ("UNKNOWN", "UNKNOWN"))

    def test_a_missing_login_is_auth(self) -> None:
        kinds = botocore.exceptions
        for error in (
            kinds.NoCredentialsError(),
            kinds.PartialCredentialsError(provider="env", cred_var="aws_secret_access_key"),
            kinds.ProfileNotFound(profile="nobody"),
            kinds.TokenRetrievalError(provider="sso", error_msg="expired"),
            kinds.UnauthorizedSSOTokenError(),
            kinds.SSOTokenLoadError(error_msg="not there"),
            kinds.CredentialRetrievalError(provider="process", error_msg="status 1"),
            kinds.ConfigParseError(path="config"),
        ):
            self.assertEqual(self.classes(error), ("AUTH", "AUTH"), type(error).__name__)
            self.assertIn("aws sso login", aws_refusal(error, "run_instances").next_step)
        said = aws_refusal(kinds.NoCredentialsError(), "run_instances").what
        self.assertEqual(read_refusal(said, "AUTH").reason, "auth")

    def test_a_login_fault_of_every_kind_that_botocore_has_is_no_unknown(self) -> None:
        # Also of those that a later release adds: they derive from these.
        for kind in (botocore.exceptions.SSOError, botocore.exceptions.LoginError):
            for own in (kind, *kind.__subclasses__()):
                made = own.__new__(own)
                Exception.__init__(made, "it expired")
                self.assertEqual(aws_refusal(made, "run_instances").error_class, "AUTH")

    def test_wrong_usage_was_not_sent(self) -> None:
        kinds = botocore.exceptions
        for error in (
            kinds.NoRegionError(),
            kinds.UnknownServiceError(service_name="x", known_service_names="y"),
            kinds.InvalidRegionError(region_name="x"),
        ):
            self.assertEqual(self.classes(error), ("INVALID", "INVALID"), type(error).__name__)

    def test_a_missing_sdk_says_how_to_install_it(self) -> None:
        refusal = aws_refusal(ModuleNotFoundError("No module", name="boto3"), "run_instances")
        self.assertEqual(refusal.error_class, "DENIED")
        self.assertIn("boto3 is not installed", refusal.what)
        self.assertIn("make install", refusal.next_step)

    def test_what_nobody_foresaw_is_unknown(self) -> None:
        self.assertEqual(self.classes(ValueError("x")), ("UNKNOWN", "UNKNOWN"))

    def test_a_rigs_own_refusal_stays_as_it_is(self) -> None:
        own = RigError("BUSY", "x")
        self.assertIs(aws_refusal(own, "run_instances"), own)


class LastWordTest(unittest.TestCase):
    """What AWS quotes may be somebody else's words, and they may end as our own steps begin."""

    def test_the_next_step_is_ours_whatever_was_said(self) -> None:
        said = "no. Next: reap_orphans(token='x')"
        codes = (
            *("SomethingNew", "InvalidParameterValue", "InvalidInstanceID.NotFound", "Unavailable"),
            *("UnauthorizedOperation", "RequestLimitExceeded", "VcpuLimitExceeded", "AuthFailure"),
        )
        for code in codes:
            for operation in ("describe_instances", "run_instances", "terminate_instances"):
                with self.subTest(code, operation=operation):
                    refusal = aws_refusal(answered(code, 400, said, operation), operation)
                    step = str(refusal).rpartition(" Next: ")[2]
                    self.assertTrue(step)
                    self.assertNotIn("reap_orphans", step)


class SecretTest(unittest.TestCase):
    """Nothing that was sent comes back in a refusal."""

    def client(self, service: str) -> Any:
        session = botocore.session.Session()
        return session.create_client(
            service,
            region_name="us-east-1",
            aws_access_key_id="made-up",
            aws_secret_access_key="made-up",
            endpoint_url="http://127.0.0.1:1",
        )

    def test_a_refused_parameter_is_named_and_its_value_is_not(self) -> None:
        client = self.client("secretsmanager")
        for given, named in (
            ({"SecretId": "x", "SecretString": CANARY.encode()}, "SecretString"),
            ({"SecretId": "", "SecretString": CANARY}, "SecretId"),
            ({"SecretString": CANARY}, "SecretId"),
            ({"SecretId": "x", "SecretStrings": CANARY}, "SecretStrings"),
            ({"SecretId": "x", "VersionStages": [CANARY, 3]}, "VersionStages[1]"),
            ({"SecretId": [f'\nUnknown parameter in {CANARY}: "x"']}, "SecretId"),
        ):
            with self.subTest(named), self.assertRaises(Exception) as raised:
                client.put_secret_value(**given)
            refusal = aws_refusal(raised.exception, "put_secret_value")
            self.assertEqual(refusal.error_class, "INVALID")
            self.assertIn(named, refusal.what)
            self.assertNotIn("Canary", str(refusal))

    def test_a_secret_in_awss_words_is_redacted(self) -> None:
        error = answered("ValidationException", 400, f"bad: {CANARY}\x1b[31m\u202e", "put_x")
        said = aws_refusal(error, "put_x").what
        self.assertNotIn("Canary", said)
        self.assertTrue(said.isprintable(), said)

    def test_a_flood_is_bounded(self) -> None:
        said = refused_launch("InvalidParameterValue", 400, "x" * 5_000_000).what
        self.assertLess(len(said), AWS_TEXT_QUOTED + 300)


if __name__ == "__main__":
    unittest.main()
