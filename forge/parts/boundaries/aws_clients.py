"""AWS's SDK for a rig: of which account the calls are, one attempt for a change, all in threads.

The credentials are the SDK's own business. Knows no service, no resource and no settings.
"""

from __future__ import annotations

import asyncio
import logging
import os
import re
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any, TypeVar

from forge.parts.boundaries.aws_refusals import aws_fate, aws_reads, aws_refusal
from forge.parts.ground.errors import RigError, invalid_parameter

# Seconds for one read with all its attempts; EC2 throttles, and then the SDK waits a second or two.
AWS_READ_S = 10.0
AWS_PAGES_S = 25.0  # for all pages of a list
_AWS_ATTEMPTS = 3  # of a read
_AWS_CONNECT_S, _AWS_ANSWER_S = 4.0, 60.0  # of a connection; a caller's own time ends sooner
_AWS_HOME = "us-east-1"  # whom to ask of which account the credentials are: every account has it
_AWS_REGION = re.compile(r"[a-z]{2}(?:-[a-z]{2,12}){1,3}-[0-9]{1,2}")
_AWS_ACCOUNT = re.compile(r"[0-9]{12}")
# Variable of the environment -> the SDK's name of the same.
_AWS_FILES = {
    "AWS_CONFIG_FILE": "config_file",
    "AWS_SHARED_CREDENTIALS_FILE": "credentials_file",
}
_AWS_LOOPBACK = re.compile(r"http://(?:127\.0\.0\.1|localhost|\[::1\]):[1-9][0-9]{0,4}/?")

AwsAnswerT = TypeVar("AwsAnswerT")


@dataclass
class _AwsLogin:
    """One set of credentials: the SDK's session, its clients by (service, region, whether for
    changes), and the accounts that the credentials were proven to be of.

    `lock` is held while a client is made: the SDK's sessions are for one thread, its clients for
    any. Credentials are looked for then, for as long as a program or a network takes.
    """

    session: Any
    endpoint: str | None
    clients: dict[tuple[str, str, bool], Any] = field(default_factory=dict)
    proven: set[str] = field(default_factory=set)
    lock: threading.Lock = field(default_factory=threading.Lock)

    def client(self, service: str, region: str, change: bool) -> Any:
        """Raises RigError INVALID for what is no region: it would become part of an address."""
        if not _AWS_REGION.fullmatch(region):
            raise invalid_parameter("region", "must be an AWS region such as us-east-1")
        from botocore.config import Config  # type: ignore[import-untyped]

        key = (service, region, change)
        with self.lock:
            if key not in self.clients:
                # `max_attempts` would mean repeats: one attempt is total_max_attempts (measured).
                attempts = 1 if change else _AWS_ATTEMPTS
                config = Config(
                    connect_timeout=_AWS_CONNECT_S,
                    read_timeout=_AWS_ANSWER_S if change else AWS_READ_S,
                    retries={"mode": "standard", "total_max_attempts": attempts},
                )
                self.clients[key] = self.session.client(
                    service, region_name=region, config=config, endpoint_url=self.endpoint
                )
            return self.clients[key]


# By profile and what AWS's variables say; shared, because a client costs 10 ms and the first 0.5 s.
_aws_logins: dict[tuple[str, ...], _AwsLogin] = {}
_aws_lock = threading.Lock()


class Aws:
    """Calls of one account. `account` has 12 digits; `profile` is one of the SDK's, empty: the
    SDK's own search.

    `environment` is for tests: it replaces the variables AWS_… of this process, and must name a
    loopback address in AWS_ENDPOINT_URL, to which every call goes. Operations are named as the
    methods of boto3's clients, parameters as AWS names them. Answers are the SDK's dicts without
    ResponseMetadata; times in them are aware datetimes.
    """

    def __init__(
        self, account: str, profile: str = "", environment: Mapping[str, str] | None = None
    ) -> None:
        self.account = account
        self.profile = profile
        self._environment = environment

    async def read(
        self,
        service: str,
        region: str,
        operation: str,
        /,
        timeout_s: float = AWS_READ_S,
        **parameters: Any,
    ) -> dict[str, Any]:
        """The answer to a call that changes nothing, tried up to three times within `timeout_s`.

        Raises what `aws_refusal` makes of a failure, and TIMEOUT.
        """
        if not aws_reads(operation):
            raise RigError("INTERNAL", f"{operation} changes something and was asked as a read")

        def prepare() -> Callable[[], dict[str, Any]]:
            client = self._login().client(service, region, False)
            return lambda: _plain_answer(getattr(client, operation)(**parameters))

        return await self._within(prepare, operation, timeout_s)

    async def read_all(
        self,
        service: str,
        region: str,
        operation: str,
        key: str,
        /,
        timeout_s: float = AWS_PAGES_S,
        **parameters: Any,
    ) -> list[dict[str, Any]]:
        """What stands under `key` on all pages of a list. Never a part of it: raises as `read`."""

        def prepare() -> Callable[[], list[dict[str, Any]]]:
            client = self._login().client(service, region, False)
            return lambda: [
                item
                for page in _aws_pages(client, operation, parameters)
                for item in page.get(key, [])
            ]

        return await self._within(prepare, operation, timeout_s)

    async def change(
        self,
        service: str,
        region: str,
        operation: str,
        timeout_s: float,
        /,
        **parameters: Any,
    ) -> dict[str, Any]:
        """The answer to a call that is sent exactly once, by credentials of this account.

        Raises what `aws_refusal` makes of a failure: UNKNOWN where it may have been done, also
        after `timeout_s` seconds; before it is sent, what `check_account` raises. A call that is
        cancelled may be done all the same.
        """
        await self.check_account(region)

        def prepare() -> Callable[[], dict[str, Any]]:
            login = self._login()
            if self.account not in login.proven:  # another login since
                raise RigError("AUTH", "the AWS credentials changed meanwhile", "repeat the call")
            client = login.client(service, region, True)
            return lambda: _plain_answer(getattr(client, operation)(**parameters))

        return await self._within(prepare, operation, timeout_s)

    async def check_account(self, region: str = _AWS_HOME) -> None:
        """Prove that the credentials are of this account, once for as long as they are used.

        Raises AUTH without usable ones, DENIED for those of another account, INVALID for what is
        no account, and what `read` raises.
        """
        if not _AWS_ACCOUNT.fullmatch(self.account):
            raise RigError("INVALID", "AWS_ACCOUNT is not 12 digits", "correct it in tpu.env")

        def prepare() -> Callable[[], str]:
            login = self._login()
            if self.account in login.proven:
                return lambda: self.account
            client = login.client("sts", region, False)

            def ask() -> str:
                found = str(client.get_caller_identity()["Account"])
                login.proven.add(found)
                return found

            return ask

        found = await self._within(prepare, "get_caller_identity", AWS_READ_S)
        if found != self.account:
            raise RigError(
                "DENIED",
                f"the AWS credentials are of the account {found}, and AWS_ACCOUNT is "
                f"{self.account}",
                "a person sets AWS_PROFILE in tpu.env to a profile of that account, or corrects "
                "AWS_ACCOUNT",
            )

    def _login(self) -> _AwsLogin:
        """The session for these credentials. Slow the first time: only in a thread."""
        with _aws_lock:
            key = self._login_key()
            if key not in _aws_logins:
                _aws_logins[key] = _new_login(self.profile, self._environment)
            return _aws_logins[key]

    def _login_key(self) -> tuple[str, ...]:
        source = os.environ if self._environment is None else self._environment
        named = (f"{name}={value}" for name, value in source.items() if name.startswith("AWS_"))
        return (self.profile, str(self._environment is None), *sorted(named))

    async def _within(
        self, prepare: Callable[[], Callable[[], AwsAnswerT]], operation: str, timeout_s: float
    ) -> AwsAnswerT:
        """What the call that `prepare` makes ready returns; its failure as a RigError.

        Both run in a thread that keeps no process from ending. What was given up while it was
        made ready is not sent any more.
        """
        loop = asyncio.get_running_loop()
        answer: asyncio.Future[AwsAnswerT] = loop.create_future()
        given_up = threading.Event()

        def tell(act: Callable[[Any], None], value: Any) -> None:
            if not answer.done():
                act(value)

        def run() -> None:
            try:
                send = prepare()
                if given_up.is_set():
                    return
                told: tuple[Callable[[Any], None], Any] = (answer.set_result, send())
            except Exception as error:
                refusal = aws_refusal(error, operation)
                if refusal.error_class == "AUTH":
                    with _aws_lock:  # so that the next call sees a new login
                        _aws_logins.pop(self._login_key(), None)
                told = (answer.set_exception, refusal)
            with suppress(RuntimeError):  # the loop may be gone meanwhile
                loop.call_soon_threadsafe(tell, *told)

        threading.Thread(target=run, name="aws", daemon=True).start()
        try:
            async with asyncio.timeout(timeout_s):
                return await answer
        except TimeoutError:
            how = f"AWS did not answer {operation} within {timeout_s:g} s"
            if aws_reads(operation):
                raise RigError("TIMEOUT", how, "check this computer's network") from None
            raise aws_fate(how, operation) from None
        finally:
            given_up.set()


def _new_login(profile: str, environment: Mapping[str, str] | None) -> _AwsLogin:
    import boto3  # type: ignore[import-untyped]
    import botocore.session  # type: ignore[import-untyped]

    for name in ("boto3", "botocore", "urllib3"):  # they log requests, payloads included
        logging.getLogger(name).setLevel(logging.WARNING)
    core = botocore.session.Session()
    if environment is None:
        session = boto3.Session(botocore_session=core, profile_name=profile or None)
        return _AwsLogin(session, None)
    endpoint = environment.get("AWS_ENDPOINT_URL", "")
    if not _AWS_LOOPBACK.fullmatch(endpoint):
        why = "an environment for tests must name http://127.0.0.1:PORT in AWS_ENDPOINT_URL"
        raise RigError("DENIED", why)
    from botocore.credentials import EnvProvider  # type: ignore[import-untyped]

    for variable, setting in _AWS_FILES.items():
        core.set_config_variable(setting, environment.get(variable, os.devnull))
    named = profile or environment.get("AWS_PROFILE")
    session = boto3.Session(botocore_session=core, profile_name=named or None)
    chain = core.get_component("credential_provider")
    for provider in ("env", "boto-config", "container-role", "iam-role"):  # this computer's own
        chain.remove(provider)
    if not named:
        chain.insert_before("assume-role", EnvProvider(environ=dict(environment)))
    return _AwsLogin(session, endpoint)


def _aws_pages(
    client: Any, operation: str, parameters: Mapping[str, Any]
) -> Iterator[dict[str, Any]]:
    """All pages of a list; one where AWS has it on one page only."""
    if client.can_paginate(operation):
        yield from client.get_paginator(operation).paginate(**parameters)
    else:
        yield getattr(client, operation)(**parameters)


def _plain_answer(answer: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in answer.items() if name != "ResponseMetadata"}
