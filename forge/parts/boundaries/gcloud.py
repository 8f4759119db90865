"""Runs the installed `gcloud` for one project: argument lists, deadlines, its own environment.

Reads and changes are told apart, because a change without an answer may have been made. Knows the
form of every argument and no command's meaning; what gcloud answers is read in gcloud_answers.
"""

from __future__ import annotations

import os
import re
import shutil
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from forge.parts.boundaries.gcloud_answers import GcloudAnswer, read_gcloud
from forge.parts.ground.errors import RigError, invalid_parameter
from forge.parts.ground.process import Finished, run_program
from forge.parts.ground.redact import redact

GCLOUD_READ_S = 5.0  # seconds: what a plane's read may take (CapacityPlane)
GCLOUD_CHANGE_S = 20.0  # seconds: the same of a create or a destroy
_GCLOUD_OUTPUT = 4_000_000  # bytes kept; a machine is about 4 kB of a list

GcloudFlag = str | int | bool | Path | Sequence[str] | Mapping[str, str] | Mapping[str, Path]

_GCLOUD_PROJECT = re.compile(r"(?:[a-z][a-z0-9.-]{1,60}:)?[a-z][-a-z0-9]{4,28}[a-z0-9]")
_GCLOUD_WORD = re.compile(r"[a-z](?:[a-z0-9-]{0,60}[a-z0-9])?")
# A name is never a path or an address: gcloud would let those override the project and the zone.
_GCLOUD_NAME = re.compile(r"[A-Za-z0-9](?:[A-Za-z0-9_-]{0,98}[A-Za-z0-9])?")
# No comma (it begins a second item), no ^ (^:^ changes the delimiter), no leading - or @.
_GCLOUD_VALUE = re.compile(r"[A-Za-z0-9_](?:[A-Za-z0-9_.:/=@+*-]{0,510})?")
_GCLOUD_KEY = re.compile(r"[a-z][a-z0-9_-]{0,62}")
_GCLOUD_LABEL = re.compile(r"(?:[a-z0-9][a-z0-9_-]{0,62})?")
_GCLOUD_FILE = re.compile(r"/[A-Za-z0-9 ._/+=@-]{1,4000}")
_GCLOUD_EXPRESSION = re.compile(r"[A-Za-z(][ -~]{0,2000}")
# Flags that this part sets itself, that change who acts or what is printed, or that take a value
# in which a second one could hide.
_GCLOUD_OWN_FLAGS = frozenset(
    "account access-token-file billing-project configuration filter flags-file flatten format help "
    "impersonate-service-account log-http metadata organization project quiet trace-token "
    "user-output-enabled verbosity".split()
)
# What of this process's environment gcloud needs. A token of another service is not among it.
_GCLOUD_PASSED = re.compile(
    r"PATH|HOME|USER|LOGNAME|TMPDIR|LANG|LC_\w+|XDG_\w+|SSH_AUTH_SOCK|SSL_CERT_\w+|CLOUDSDK_\w+"
    r"|REQUESTS_CA_BUNDLE|GOOGLE_APPLICATION_CREDENTIALS|(?:https?|no|all)_proxy"
    r"|(?:HTTPS?|NO|ALL)_PROXY"
)
# Settings of the surroundings that would silently aim a command elsewhere, or make it talk more.
_GCLOUD_DROPPED = re.compile(
    r"CLOUDSDK_(?:CORE_PROJECT|COMPUTE_ZONE|COMPUTE_REGION|CORE_LOG_HTTP\w*|CORE_TRACE\w*"
    r"|CORE_VERBOSITY|CORE_FORMAT|CORE_DEFAULT_FORMAT|CORE_USER_OUTPUT_ENABLED|CORE_PRINT\w*)"
)
_GCLOUD_SETTINGS = {
    "CLOUDSDK_CORE_DISABLE_PROMPTS": "1",
    "CLOUDSDK_CORE_SHOULD_PROMPT_TO_ENABLE_API": "false",
    "CLOUDSDK_CORE_DISABLE_USAGE_REPORTING": "1",
    "CLOUDSDK_CORE_DISABLE_FILE_LOGGING": "1",
    "CLOUDSDK_CORE_SHOW_STRUCTURED_LOGS": "never",
    "CLOUDSDK_COMPONENT_MANAGER_DISABLE_UPDATE_CHECK": "1",
    "CLOUDSDK_SURVEY_DISABLE_PROMPTS": "1",
    "NO_COLOR": "1",
    "TERM": "dumb",
    "LC_ALL": "C.UTF-8",
}


@dataclass(frozen=True)
class GcloudCall:
    """One command. `command` are its fixed words, `name` the one thing that it is about.

    A flag is True (bare), False (its --no- form), a number, a text, a list, labels, a file (Path),
    or files by key (--metadata-from-file). `expression` is free text for the one command that
    takes it, `logging read`; a caller composes it of constants and checked names. `given` is the
    program's input: the way of a secret, with the flag {"data-file": "-"}.
    """

    command: tuple[str, ...]
    name: str = ""
    flags: Mapping[str, GcloudFlag] = field(default_factory=dict)
    expression: str = ""
    given: bytes = b""


class Gcloud:
    """gcloud for one project, with whatever account the user is logged in with.

    `environment` replaces this process's own, for a gcloud that shall see another world. Raises
    INVALID for a project id that cannot be one.
    """

    def __init__(self, project: str, *, environment: Mapping[str, str] | None = None) -> None:
        if not _GCLOUD_PROJECT.fullmatch(project):
            raise invalid_parameter("project", "must be the id of a Google Cloud project")
        self.project = project
        self._environment = gcloud_environment(os.environ if environment is None else environment)

    def argv(self, call: GcloudCall) -> list[str]:
        """The arguments of `call`, each checked, the project and the format always among them.

        Raises INVALID by the flag's name (the value is not repeated), DENIED for a secret.
        """
        words = [_checked_word(word) for word in call.command]
        flags = [text for name, value in call.flags.items() for text in _flag_texts(name, value)]
        own = [f"--project={self.project}", "--quiet", "--format=json"]
        names = [_matched("name", call.name, _GCLOUD_NAME)] if call.name else []
        if call.expression:
            if words != ["logging", "read"] or names:
                raise invalid_parameter("expression", "only `logging read` takes one")
            names = ["--", _matched("expression", call.expression, _GCLOUD_EXPRESSION)]
        argv = [*words, *flags, *own, *names]
        if redact("\n".join(argv)) != "\n".join(argv):
            raise RigError(
                "DENIED",
                "an argument for gcloud looks like a secret, and arguments can be read by others",
                "hand secrets over as a file or through Secret Manager",
            )
        return argv

    async def read(self, call: GcloudCall, timeout_s: float = GCLOUD_READ_S) -> GcloudAnswer:
        """The answer of a command that changes nothing. Safe to repeat.

        Raises the classes of `read_gcloud`, TIMEOUT, and DENIED where there is no gcloud.
        """
        return self._answer(await self._run(call, timeout_s), change=False)

    async def change(self, call: GcloudCall, timeout_s: float = GCLOUD_CHANGE_S) -> GcloudAnswer:
        """The answer of a command that changes something. Never repeated by itself.

        Raises UNKNOWN where its fate is not known: after `timeout_s`, after the program's violent
        end, after a network or provider fault. Else as `read`. gcloud itself repeats a request
        that met a fault, so that EXISTS may speak of what this very call made. After a
        cancellation the fate is as little known.
        """
        try:
            return self._answer(await self._run(call, timeout_s), change=True)
        except RigError as error:
            if error.error_class != "TIMEOUT":
                raise
            raise RigError(
                "UNKNOWN",
                f"{error.what}; the change may have been made all the same",
                "read the state before anything is repeated",
            ) from None

    async def version(self, timeout_s: float = GCLOUD_READ_S) -> str:
        """The installed gcloud's release, such as 528.0.0. Raises as `read`."""
        found = (await self.read(GcloudCall(("version",)), timeout_s)).thing()
        return str(found.get("Google Cloud SDK") or "unknown")

    def _answer(self, ended: Finished, *, change: bool) -> GcloudAnswer:
        return read_gcloud(
            ended.returncode,
            ended.stdout,
            ended.stderr,
            change=change,
            project=self.project,
            dropped=ended.dropped,
        )

    def program(self) -> str:
        """The path of gcloud. Raises DENIED where there is none."""
        program = shutil.which("gcloud", path=self._environment.get("PATH", os.defpath))
        if program is None:
            raise _no_gcloud("gcloud is not installed, or not on PATH")
        return program

    async def _run(self, call: GcloudCall, timeout_s: float) -> Finished:
        return await self.finish(self.argv(call), timeout_s, call.given, _GCLOUD_OUTPUT)

    async def finish(
        self, argv: Sequence[str], timeout_s: float, given: bytes, output_limit: int
    ) -> Finished:
        """What gcloud left of `argv`, whose every word is checked already, `given` its input.

        At most `output_limit` bytes of each stream. Raises TIMEOUT, and DENIED without gcloud.
        """
        try:
            return await run_program(
                [self.program(), *argv],
                timeout_s=timeout_s,
                environment=self._environment,
                output_limit=output_limit,
                given=given,
            )
        except RigError as error:
            if error.error_class == "NOT_FOUND":
                raise _no_gcloud(error.what) from None
            raise


def gcloud_environment(source: Mapping[str, str]) -> dict[str, str]:
    """What gcloud gets of `source`, with this part's settings: silent, without prompts or logs.

    The user's login, configuration folder and proxy stay; an ambient project or zone, debugging,
    and everything that is not gcloud's (other services' tokens) do not.
    """
    kept = {
        key: value
        for key, value in source.items()
        if _GCLOUD_PASSED.fullmatch(key) and not _GCLOUD_DROPPED.fullmatch(key)
    }
    return {**kept, **_GCLOUD_SETTINGS}


def _no_gcloud(what: str) -> RigError:
    # Not NOT_FOUND: that is the provider's word, and to a destroy it means that the thing is gone.
    step = (
        "a person installs it (https://cloud.google.com/sdk/docs/install), then gcloud auth login"
    )
    return RigError("DENIED", what, step)


def _matched(what: str, value: str, pattern: re.Pattern[str]) -> str:
    if ".." in value or not pattern.fullmatch(value):
        raise invalid_parameter(what, "is not of the form that gcloud may be given")
    return value


def _checked_word(word: str) -> str:
    return _matched("command", word, _GCLOUD_WORD)


def _flag_texts(name: str, value: GcloudFlag) -> list[str]:
    """One flag as gcloud takes it: `--name=value` in one piece, so that no value is an option."""
    if not _GCLOUD_WORD.fullmatch(name) or name in _GCLOUD_OWN_FLAGS or name.startswith("no-"):
        raise invalid_parameter(name, "is not a flag that a rig may set")
    if isinstance(value, bool):
        return [f"--{name}" if value else f"--no-{name}"]
    if isinstance(value, Mapping):
        pairs = [_pair_text(name, key, one) for key, one in value.items()]
        return [f"--{name}={','.join(pairs)}"] if pairs else []
    if isinstance(value, str | int | Path):
        return [f"--{name}={_value_text(name, value)}"]
    return [f"--{name}={','.join(_value_text(name, one) for one in value)}"] if value else []


def _value_text(name: str, value: str | int | Path) -> str:
    if isinstance(value, Path):
        return _matched(name, str(value), _GCLOUD_FILE)
    if value == "-" and name in ("zone", "data-file"):  # all zones; the program's input
        return "-"
    return _matched(name, str(value), _GCLOUD_VALUE)


def _pair_text(name: str, key: str, value: str | Path) -> str:
    """`key=value`: labels in their closed form, or a file by its absolute path."""
    _matched(name, key, _GCLOUD_KEY)
    form = _GCLOUD_FILE if isinstance(value, Path) else _GCLOUD_LABEL
    return f"{key}={_matched(name, str(value), form)}"
