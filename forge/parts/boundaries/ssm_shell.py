"""Runs one act of a fixed program on a rented machine through Systems Manager's Run Command.

The program travels with its hash, its arguments as data; no port is open. Knows what SSM says of a
command's fate, and neither the acts nor who made the machine.
"""

from __future__ import annotations

import asyncio
import base64
import gzip
import hashlib
import json
import math
import re
import time
from collections.abc import Mapping
from contextlib import suppress
from typing import Any

from forge.parts.boundaries.aws_clients import Aws
from forge.parts.ground.errors import RigError, invalid_parameter
from forge.parts.ground.redact import clean, printable, redact

SSM_OUTPUT_CHARACTERS = 24_000  # that GetCommandInvocation passes on, the first ones (its model)
SSM_OUTPUT_LIMIT = 20_000  # bytes that a program is asked to keep to: the rest is SSM's own remarks
SSM_SCRIPT_LIMIT = 60_000  # bytes; SendCommand takes a document and its parameters up to 64 KB
SSM_ARGUMENTS_LIMIT = 8000  # characters of the encoded arguments; they stand in a command line
_SSM_ACT = re.compile(r"[a-z][a-z_]{0,30}")
_SSM_INSTANCE = re.compile(r"i-[0-9a-f]{8,17}")
_SSM_LINE = 300  # characters of the one line that an error quotes
_SSM_SEND_S, _SSM_LOOK_S, _SSM_CANCEL_S = 15.0, 8.0, 5.0
_SSM_LAST_LOOK_S = 3.0  # the least for a look: at the deadline too there is a last one
_SSM_FIRST_LOOK_S, _SSM_PAUSE_S = 0.3, 2.0  # until the first look, and at most between two
_SSM_DELIVERY_S = 30  # the least that SSM takes as the time until a machine must have the command
# What the agent puts in the place of what it cut off (amazon-ssm-agent; older ones: three dashes).
_SSM_CUT_MARK = re.compile(r"-{2,3}[Oo]utput truncated-{2,3}\s*\Z")
_SSM_FOREIGN = "GEMMA4-SSM what arrived is not what was sent"

# The same for every act. What fills it has no character that a shell or SSM itself (double braces)
# would read: base64, hexadecimal digits, a word. Both streams go the same way, to keep their order.
_SSM_SCRIPT = """\
set -eu
umask 077
home=$(mktemp -d)
trap 'rm -rf "$home"' EXIT
printf %s {packed} | base64 -d | gzip -dc >"$home/program.py" || :
if ! printf '%s  %s\\n' {hash} "$home/program.py" | sha256sum -c - >/dev/null 2>&1; then
  echo '{foreign}' >&2
  exit 1
fi
python3 -u "$home/program.py" {act} {word} 2>&1
"""


class SsmShell:
    """Run Command on the machines of one region, as root, through AWS-RunShellScript."""

    def __init__(self, aws: Aws, region: str) -> None:
        self._aws = aws
        self._region = region

    async def run(
        self,
        instance_id: str,
        program: bytes,
        act: str,
        arguments: Mapping[str, str | int | bool],
        timeout_s: float,
    ) -> str:
        """What `program` (Python source) printed for `act`, both streams in order.

        The arguments get `limit`, the bytes that the program may print: SSM passes on the first
        24,000 characters, and where more came the text ends with a remark. Raises UNREACHABLE where
        the machine's agent is not online or did not take the command; INVALID for what cannot be
        sent; INTERNAL with the last line where the program failed; UNKNOWN with the command's id
        where it did not end within `timeout_s` seconds (it is told to end, and is never sent
        twice); AUTH and DENIED. A call that is cancelled tells the command to end as well.
        """
        if not _SSM_INSTANCE.fullmatch(instance_id):
            raise invalid_parameter("instance_id", "must be an EC2 instance's id")
        script = ssm_script(program, act, arguments)
        asked: dict[str, Any] = {
            "InstanceIds": [instance_id],
            "DocumentName": "AWS-RunShellScript",
            "Comment": f"gemma4-rigs {act}",
            # The machine ends it by itself where nobody is left to say so.
            "Parameters": {
                "commands": [script],
                "executionTimeout": [str(max(1, math.ceil(timeout_s)))],
            },
            "TimeoutSeconds": _SSM_DELIVERY_S,
        }
        deadline = time.monotonic() + timeout_s
        sent = await self._aws.change("ssm", self._region, "send_command", _SSM_SEND_S, **asked)
        command = str(sent["Command"]["CommandId"])
        what = f"`{act}` on {instance_id}"
        try:
            found = await self._ended(instance_id, command, deadline)
        except RigError as error:
            await self._cancel(instance_id, command)
            why = f"what became of {what} cannot be read (SSM's command {command}): {error.what}"
            raise RigError(error.error_class, why, error.next_step) from None
        except asyncio.CancelledError:
            await self._cancel(instance_id, command)
            raise
        if found is None:
            await self._cancel(instance_id, command)
            raise _ssm_unknown(what, command, f"did not end within {timeout_s:g} s and was told to")
        return _ssm_printed(found, what, command)

    async def online(self, instance_id: str) -> bool:
        """Whether the machine's agent takes commands now. Raises what `Aws.read` raises."""
        wanted = {"Key": "InstanceIds", "Values": [instance_id]}
        found = await self._aws.read(
            "ssm", self._region, "describe_instance_information", Filters=[wanted]
        )
        listed = found.get("InstanceInformationList", [])
        return any(
            one.get("InstanceId") == instance_id and one.get("PingStatus") == "Online"
            for one in listed
        )

    async def _ended(
        self, instance_id: str, command: str, deadline: float
    ) -> dict[str, Any] | None:
        """The command as SSM has it once it has ended; None where it had not by the deadline."""
        pause = _SSM_FIRST_LOOK_S
        while True:
            await asyncio.sleep(max(0.0, min(pause, deadline - time.monotonic())))
            pause = min(_SSM_PAUSE_S, pause * 1.6)
            left = deadline - time.monotonic()
            try:
                found = await self._aws.read(
                    *("ssm", self._region, "get_command_invocation"),
                    timeout_s=min(_SSM_LOOK_S, max(_SSM_LAST_LOOK_S, left)),
                    CommandId=command,
                    InstanceId=instance_id,
                )
            except RigError as error:
                # Not there yet at first (InvocationDoesNotExist); a network may come back.
                if error.error_class not in ("NOT_FOUND", "UNREACHABLE", "TIMEOUT", "BUSY"):
                    raise
            else:
                if found.get("Status") not in ("Pending", "InProgress", "Delayed", "Cancelling"):
                    return found
            if left <= 0:
                return None

    async def _cancel(self, instance_id: str, command: str) -> None:
        """Tell SSM to end the command. Whether it did, nobody is told: the fate is unknown."""
        with suppress(RigError):
            await self._aws.change(
                *("ssm", self._region, "cancel_command", _SSM_CANCEL_S),
                CommandId=command,
                InstanceIds=[instance_id],
            )


def ssm_script(program: bytes, act: str, arguments: Mapping[str, str | int | bool]) -> str:
    """The script that checks `program` on the machine and runs it there for `act`.

    Raises INVALID for what is no act and for what is too long, DENIED for what looks like a secret.
    """
    if not _SSM_ACT.fullmatch(act):
        raise invalid_parameter("act", "must be one of the program's words")
    packed = base64.b64encode(gzip.compress(program, 9, mtime=0)).decode()
    script = _SSM_SCRIPT.format(
        packed=packed,
        hash=hashlib.sha256(program).hexdigest(),
        foreign=_SSM_FOREIGN,
        act=act,
        word=_ssm_arguments(arguments),
    )
    if len(script) > SSM_SCRIPT_LIMIT:
        raise invalid_parameter("program", f"makes a script above {SSM_SCRIPT_LIMIT} bytes")
    return script


def _ssm_arguments(arguments: Mapping[str, str | int | bool]) -> str:
    """The arguments as one word: base64url of a JSON object, `limit` among them.

    The object begins with a space, or the word would begin as a web token does and be taken out of
    every log.
    """
    limit = arguments.get("limit", SSM_OUTPUT_LIMIT)
    given = {**arguments, "limit": min(int(limit), SSM_OUTPUT_LIMIT)}
    text = " " + json.dumps(given, separators=(",", ":"))
    if redact(text) != text:
        why = "an argument for the machine looks like a secret, and SSM keeps its commands"
        raise RigError("DENIED", why, "keep it in Secrets Manager, where the machine reads it")
    word = base64.urlsafe_b64encode(text.encode()).decode()
    if len(word) > SSM_ARGUMENTS_LIMIT:
        raise invalid_parameter("arguments", f"are longer than {SSM_ARGUMENTS_LIMIT} characters")
    return word


def _ssm_printed(found: Mapping[str, Any], what: str, command: str) -> str:
    """What the program printed, where it ended well; raises what its end means."""
    status = str(found.get("Status", ""))
    # "Delivery Timed Out" in the API's reference, in one word in what it answers.
    details = clean(str(found.get("StatusDetails") or status), 60).replace(" ", "")
    text, own = (str(found.get(f"Standard{one}Content") or "") for one in ("Output", "Error"))
    code = found.get("ResponseCode", -1)
    if status == "Success":
        return _ssm_text(text)
    if status == "Failed" and code not in (-1, None):
        if _SSM_FOREIGN in own:
            why = f"{what} was not run: the program did not arrive as it was sent"
            raise RigError("UNREACHABLE", why, "repeat it once; then look at the machine's disk")
        line = _ssm_last_line(text) or _ssm_last_line(own) or "it said nothing"
        cut = " (SSM left out what came after it)" if _ssm_cut(text) else ""
        why = f"{what} failed (status {code}): {line}{cut}"
        raise RigError("INTERNAL", why, "look at the machine's boot and at its state")
    if details in ("DeliveryTimedOut", "Undeliverable", "Terminated") or (
        status == "Failed" and code in (-1, None)
    ):
        why = f"{what} did not reach the machine ({details})"
        raise RigError("UNREACHABLE", why, "look at the machine's state, then repeat it")
    raise _ssm_unknown(what, command, f"was ended by SSM ({details})")


def _ssm_unknown(what: str, command: str, how: str) -> RigError:
    why = f"{what} {how} (SSM's command {command}); it may have been done all the same"
    return RigError("UNKNOWN", why, "look at the machine's state before a repeat")


def _ssm_cut(text: str) -> bool:
    return len(text) >= SSM_OUTPUT_CHARACTERS or bool(_SSM_CUT_MARK.search(text))


def _ssm_text(text: str) -> str:
    if not _ssm_cut(text):
        return text
    kept = f"{SSM_OUTPUT_CHARACTERS:,} characters"
    return f"{text}\n[… SSM passes on the first {kept}: the end is missing here …]\n"


def _ssm_last_line(text: str) -> str:
    kept = printable(_SSM_CUT_MARK.sub("", text)[-20_000:])
    lines = [line.strip() for line in kept.splitlines() if line.strip()]
    return clean(lines[-1], _SSM_LINE) if lines else ""
