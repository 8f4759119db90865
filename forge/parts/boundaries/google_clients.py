"""Google's client libraries for a rig: whose credentials, which address, what a failure means.

The credentials are the application-default ones, another login than gcloud's own. Knows no service
and no resource.
"""

from __future__ import annotations

import asyncio
import json
import logging
import os
import re
import threading
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from forge.parts.boundaries.gcloud_refusals import gcloud_fate, gcloud_line, gcloud_refusal
from forge.parts.ground.errors import RigError

# Only for tests: all services at one loopback address, without credentials.
GOOGLE_ENDPOINT_VARIABLE = "GEMMA4_GOOGLE_ENDPOINT"
_GOOGLE_LOOPBACK = re.compile(r"http://(?:127\.0\.0\.1|localhost|\[::1\]):[1-9][0-9]{0,4}")
_GOOGLE_SCOPE = "https://www.googleapis.com/auth/cloud-platform"
_GOOGLE_LOGIN = "a person runs: gcloud auth application-default login"
_GOOGLE_GRANT = (
    "grant its account a role that has it; application-default credentials may be another "
    "account's than gcloud's"
)
# The libraries' names for HTTP statuses, in the words that the refusals are read by.
_GOOGLE_STATUS = {
    400: "INVALID_ARGUMENT",
    403: "PERMISSION_DENIED",
    404: "NOT_FOUND",
    409: "ALREADY_EXISTS",
    429: "RATE_LIMIT_EXCEEDED",
    500: "INTERNAL_ERROR",
    502: "BACKEND_ERROR",
    503: "UNAVAILABLE",
    504: "DEADLINE_EXCEEDED",
}
_GOOGLE_REQUEST = re.compile(r"^(?:GET|POST|PUT|PATCH|DELETE) \S+ ")

AnswerT = TypeVar("AnswerT")


@dataclass(frozen=True)
class GoogleAccess:
    """Credentials for a client, and the address that it shall ask; empty: the service's own."""

    credentials: Any
    endpoint: str = ""


def google_access(environment: Mapping[str, str] | None = None) -> GoogleAccess:
    """What a client is made with. Blocks, for seconds where a metadata server is looked for.

    `environment` replaces this process's own for the test address alone. Raises RigError AUTH
    without application-default credentials, DENIED for a test address that is not loopback.
    """
    endpoint = (os.environ if environment is None else environment).get(GOOGLE_ENDPOINT_VARIABLE)
    # With this variable the libraries print every request to standard error, payloads included.
    os.environ.pop("GOOGLE_SDK_PYTHON_LOGGING_SCOPE", None)
    for name in ("google.auth", "google.cloud", "google.oauth2"):
        logging.getLogger(name).setLevel(logging.WARNING)
    if not endpoint:
        return GoogleAccess(_default_credentials())
    if not _GOOGLE_LOOPBACK.fullmatch(endpoint):
        why = f"{GOOGLE_ENDPOINT_VARIABLE} is for tests and must be http://127.0.0.1:PORT"
        raise RigError("DENIED", why, f"unset {GOOGLE_ENDPOINT_VARIABLE}")
    from google.auth.credentials import AnonymousCredentials

    return GoogleAccess(AnonymousCredentials(), endpoint)  # type: ignore[no-untyped-call]


async def call_google(
    work: Callable[[], AnswerT], *, project: str, change: bool, timeout_s: float
) -> AnswerT:
    """What `work` (blocking client calls) returns; its failure as the RigError that it means.

    After `timeout_s` seconds a read is TIMEOUT and a change UNKNOWN; so is a change that met a
    network or provider fault. The thread of a call that was given up ends with its own timeouts and
    keeps no process from ending; a cancelled change may still be made.
    """
    loop = asyncio.get_running_loop()
    answer: asyncio.Future[AnswerT] = loop.create_future()

    def tell(act: Callable[[Any], None], value: Any) -> None:
        if not answer.done():
            act(value)

    def run() -> None:
        try:
            told: tuple[Callable[[Any], None], Any] = (answer.set_result, work())
        except Exception as error:
            told = (answer.set_exception, google_refusal(error, project=project, change=change))
        with suppress(RuntimeError):  # the loop may be gone meanwhile
            loop.call_soon_threadsafe(tell, *told)

    threading.Thread(target=run, name="google", daemon=True).start()
    try:
        async with asyncio.timeout(timeout_s):
            return await answer
    except TimeoutError:
        how = f"Google did not answer within {timeout_s:g} s"
        raise gcloud_fate(how, True) if change else RigError("TIMEOUT", how) from None


def google_refusal(error: Exception, *, project: str, change: bool) -> RigError:
    """What a client library raised as the RigError that says what to do about it.

    The classes of `gcloud_refusal`; AUTH where the application-default credentials are missing or
    no longer valid. Nothing of the request is repeated.
    """
    if isinstance(error, RigError):
        return error
    if isinstance(error, ImportError):
        why = f"Google's client libraries are not whole: {error.name or error} is not installed"
        return RigError("DENIED", why, "make install in the rig's folder")
    from google.api_core.exceptions import GoogleAPICallError
    from google.auth.exceptions import GoogleAuthError, TransportError

    if isinstance(error, TransportError):  # before the request itself: nothing was sent
        return gcloud_fate(f"Google's login service was not reached: {_said_by(error)}", False)
    if isinstance(error, GoogleAuthError):
        why = "the application-default credentials are missing or no longer valid"
        return RigError("AUTH", f"{why}: {_said_by(error)}", _GOOGLE_LOGIN)
    if isinstance(error, OSError):  # also what the libraries' HTTP client raises
        return gcloud_fate(f"Google could not be reached: {_said_by(error)}", change)
    if not isinstance(error, GoogleAPICallError):
        why = f"Google's client library failed on the answer ({type(error).__name__})"
        return RigError("UNKNOWN", why, "read the state again")
    status = int(error.code or 0)
    if status == 401:
        why = "Google does not accept the application-default credentials"
        return RigError("AUTH", f"{why}: {_said_by(error)}", _GOOGLE_LOGIN)
    details = json.dumps(error.details, default=str) if error.details else ""
    text = f"{_GOOGLE_STATUS.get(status, status)}: {_said_by(error)} {details}"
    found = gcloud_refusal(text, change=change, project=project)
    if found.error_class == "DENIED" and "gcloud auth list" in found.next_step:
        return RigError("DENIED", found.what, _GOOGLE_GRANT)
    return found


def _said_by(error: Exception) -> str:
    """The error's own words in one line, without the request that they answer."""
    said = getattr(error, "message", None) or (error.args[0] if error.args else "")
    return gcloud_line(_GOOGLE_REQUEST.sub("", str(said)))[:500]


def _default_credentials() -> Any:
    """The application-default credentials. A user's login is read here and not by the library,
    which would start gcloud only to learn a project that every call names anyway."""
    import google.auth
    from google.oauth2.credentials import Credentials

    try:
        login = json.loads(_credentials_file().read_text(encoding="utf-8"))
    except (OSError, ValueError):
        login = None  # whatever is wrong with it, the library says
    scopes = [_GOOGLE_SCOPE]
    try:
        if isinstance(login, dict) and login.get("type") == "authorized_user":
            return Credentials.from_authorized_user_info(login, scopes)  # type: ignore[no-untyped-call]
        return google.auth.default(scopes=scopes)[0]
    except Exception as error:  # a damaged file of whatever form among them
        why = "Google's client libraries have no application-default credentials that they can use"
        raise RigError("AUTH", f"{why}: {_said_by(error)}", _GOOGLE_LOGIN) from None


def _credentials_file() -> Path:
    """Where application-default credentials lie, as Google's libraries document it."""
    named = os.environ.get("GOOGLE_APPLICATION_CREDENTIALS", "")
    folder = os.environ.get("CLOUDSDK_CONFIG") or str(Path.home() / ".config" / "gcloud")
    return Path(named or Path(folder) / "application_default_credentials.json")
