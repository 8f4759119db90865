"""moto's models and answers for one account of the fake AWS, called in process, without Flask.

A request that came in is turned into one to amazonaws.com and handed to moto's own dispatch; EC2's
operations are called one at a time, so that the fake can act before and after. Knows no script and
no fault. moto is imported with the first request, and its state is the process's: two fakes in one
process need two account numbers.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from forge.suites.fake_aws_world import AwsRefusal

_MOTO_SERVICES = (
    "ec2",
    "iam",
    "secretsmanager",
    "s3",
)  # whose state moto keeps
_WORD_BREAK = re.compile(r"(?<=[a-z0-9])(?=[A-Z])|(?<=[A-Z])(?=[A-Z][a-z])")
_SSM_POLICY = "AmazonSSMManagedInstanceCore"
# What that policy of AWS grants, shortened; no test reads more of it than its name.
_SSM_STATEMENT = (
    '{"Version": "2012-10-17", "Statement": [{"Effect": "Allow", "Action": '
    '["ssm:UpdateInstanceInformation", "ssmmessages:*", "ec2messages:*"], "Resource": "*"}]}'
)
AwsAnswer = tuple[int, dict[str, str], bytes]


def moto_method(name: str) -> str:
    """DescribeInstances as moto's methods have it: describe_instances."""
    return _WORD_BREAK.sub("_", name).lower()


class MotoAccount:
    """One account's resources in moto."""

    def __init__(self, account: str) -> None:
        self.account = account
        self._response_class: Any = None
        self._stubber: Any = None

    def load(self) -> None:
        """Imports moto and sets it to refuse what the real service refuses."""
        if self._stubber is not None:
            return
        from moto import settings
        from moto.backends import get_backend
        from moto.core.botocore_stubber import BotocoreStubber
        from moto.ec2.responses import EC2Response
        from moto.ec2.utils import filter_dict_attribute_mapping

        # As its variables MOTO_... would, of which some are read at its import only. Without the
        # images that moto brings, the first look at a region takes 2 ms instead of 100.
        settings.ec2_load_default_amis = lambda: False
        settings.ENABLE_AMI_VALIDATION = True
        settings.EC2_ENABLE_INSTANCE_TYPE_VALIDATION = True
        for service in _MOTO_SERVICES:
            get_backend(service)  # type: ignore[call-overload]
        for name in ("client-token", "instance-lifecycle", "spot-instance-request-id"):
            attribute = name.replace("-", "_").removeprefix("instance_")
            filter_dict_attribute_mapping[name] = attribute  # filters that moto lacks
        forced = "RunInstances.Reservation.Instances.Instance.State"  # a launch may be an old one
        known = EC2Response.RESPONSE_KEY_PATH_TO_TRANSFORMER
        transformers = {key: value for key, value in known.items() if key != forced}

        class OwnResponse(EC2Response):
            RESPONSE_KEY_PATH_TO_TRANSFORMER = transformers

        self._response_class = OwnResponse
        self._stubber = BotocoreStubber()

    def empty(self) -> None:
        """Forgets everything that the account has."""
        self.load()
        from moto.backends import get_backend

        for service in _MOTO_SERVICES:
            kept = get_backend(service)  # type: ignore[call-overload]
            held = kept.get(self.account) if self.account in list(kept) else None
            if held is not None and service == "s3":
                for backend in list(held.values()):
                    backend.reset()  # its objects lie in files
            if self.account in list(kept):
                dict.pop(kept, self.account)

    def ec2(self, region: str) -> Any:
        """moto's model of EC2 in a region."""
        return self._backend("ec2", region)

    def secrets(self, region: str) -> Any:
        return self._backend("secretsmanager", region)

    def buckets(self) -> Any:
        return self._backend("s3", "aws")

    def iam(self) -> Any:
        """moto's model of IAM, with the one managed policy that a machine of ours needs."""
        backend = self._backend("iam", "aws")
        arn = f"arn:aws:iam::aws:policy/{_SSM_POLICY}"
        if arn not in backend.managed_policies:
            from moto.iam.models import AWSManagedPolicy

            data = {
                "DefaultVersionId": "v1",
                "Path": "/",
                "CreateDate": "2019-03-15T17:22:12+00:00",
                "UpdateDate": "2019-05-23T16:54:21+00:00",
            }
            policy = AWSManagedPolicy.from_data(_SSM_POLICY, self.account, "us-east-1", data)
            policy.versions[0].document = _SSM_STATEMENT
            backend.managed_policies[arn] = policy
        return backend

    def _backend(self, service: str, region: str) -> Any:
        self.load()
        from moto.backends import get_backend

        return get_backend(service)[self.account][region]  # type: ignore[call-overload]

    # -- requests

    def operation(self, region: str, body: bytes, headers: Mapping[str, str]) -> Ec2Operation:
        """A request to EC2, parsed and ready to be done."""
        self.load()
        from moto.core.request import Request

        url = f"https://ec2.{region}.amazonaws.com/"
        own = {"Content-Type": "application/x-www-form-urlencoded; charset=utf-8"}
        own["x-moto-account-id"] = self.account
        own["Authorization"] = headers.get("Authorization", "")
        response = self._response_class()
        request = Request.from_primitives("POST", url, own, body)
        response.setup_class(request, url, request.headers)
        return Ec2Operation(response)

    def forward(
        self,
        service: str,
        region: str,
        method: str,
        target: str,
        headers: Mapping[str, str],
        body: bytes,
    ) -> AwsAnswer:
        """Any other service's request, answered by moto as it stands."""
        self.load()
        from moto.core.request import Request

        if service == "iam":
            self.iam()
        host = f"{service}.{region}.amazonaws.com"
        kept = {key: value for key, value in headers.items() if key.lower() != "host"}
        kept.update({"Host": host, "x-moto-account-id": self.account})
        request = Request.from_primitives(method, f"https://{host}{target}", kept, body)
        try:
            answer = self._stubber.process_request(request)
        except NotImplementedError as missing:
            raise AwsRefusal("InvalidAction", f"the fake cannot do this: {missing}") from missing
        if answer is None:
            raise AwsRefusal("InvalidAction", f"the fake knows no service {service}")
        status, given, text = answer
        data = text.encode() if isinstance(text, str) else bytes(text or b"")
        return int(status), {str(key): str(value) for key, value in dict(given).items()}, data


class Ec2Operation:
    """One request to EC2: `action`, its `parameters` as the API documents them, and moto's way of
    doing it."""

    def __init__(self, response: Any) -> None:
        self._response = response
        self.action = str(response._get_action())
        self.parameters: dict[str, Any] = _plain(response.params)

    def take(self, name: str) -> Any:
        """A parameter, which moto does not see any more; none where it was not given."""
        self._response.params.pop(name, None)
        return self.parameters.pop(name, None)

    def do(self) -> Any:
        """Does it in moto; what the answer is made of (moto's objects or a mapping)."""
        from moto.core.exceptions import ServiceException

        method = getattr(self._response, moto_method(self.action), None)
        if method is None:
            words = f"The action {self.action} is not valid for this web service."
            raise AwsRefusal("InvalidAction", words)
        try:
            return method().result
        except ServiceException as refusal:
            raise AwsRefusal(str(refusal.code), str(refusal.message)) from refusal
        except NotImplementedError as missing:
            raise AwsRefusal("InvalidAction", f"the fake cannot do this: {missing}") from missing

    def answer(self, result: Any) -> AwsAnswer:
        """`result` in EC2's XML."""
        from moto.core.responses import ActionResult

        status, headers, body = self._response.serialized(ActionResult(result))
        data = body.encode() if isinstance(body, str) else bytes(body)
        return int(status), {str(key): str(value) for key, value in headers.items()}, data


def _plain(value: Any) -> Any:
    """A copy in plain dictionaries and lists."""
    if isinstance(value, Mapping):
        return {str(key): _plain(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_plain(item) for item in value]
    return value if isinstance(value, (str, int, float, bool)) or value is None else str(value)
