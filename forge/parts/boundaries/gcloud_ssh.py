"""Runs one act of a fixed program on a rented machine over `gcloud … ssh`, and names its tunnel.

The program goes as the command's input, its arguments as data. Knows gcloud's and ssh's words for
what went wrong, and neither the acts nor who made the machine.
"""

from __future__ import annotations

import base64
import json
import re
import secrets
from collections.abc import Mapping
from dataclasses import dataclass

from forge.parts.boundaries.gcloud import Gcloud, GcloudCall, GcloudFlag
from forge.parts.boundaries.gcloud_refusals import (
    gcloud_line,
    gcloud_quote,
    gcloud_refusal,
    usage_refusal,
)
from forge.parts.ground.errors import ErrorClass, RigError, invalid_parameter
from forge.parts.ground.process import OUTPUT_LIMIT, Finished
from forge.parts.ground.redact import clean, printable, redact

HOST_ARGUMENTS_LIMIT = 8000  # characters of the encoded arguments; they stand in a command line
_HOST_ACT = re.compile(r"[a-z][a-z_]{0,30}")
_HOST_LINE = 300  # characters of the one line that an error quotes
# Options of ssh itself: ask nothing (there is no terminal), and do not wait for a dead address.
_SSH_FLAGS = ("--ssh-flag=-oBatchMode=yes", "--ssh-flag=-oConnectTimeout=20")
_TUNNEL_WORDS = ("-oExitOnForwardFailure=yes", "-oServerAliveInterval=15")

# What the machine's Python is given. The mark proves that it was: when a connection breaks and
# gcloud tries again (ten times for a TPU VM, 528, seen 2026-11-30), the program is used up, and an
# empty one would end with success. Errors go the way of the output, so that both keep their order
# and gcloud's own remarks stay apart.
_HOST_INPUT = """\
import os, sys
os.dup2(1, 2)
sys.stdout.reconfigure(line_buffering=True)
print({mark!r})
exec(compile({program!r}, "program", "exec"))
"""


@dataclass(frozen=True)
class _SshRule:
    """A wording of gcloud or ssh (an expression), and what it means for who wants to get in."""

    wording: str
    error_class: ErrorClass
    why: str
    next_step: str


# In this order: what is certain before what is general. The numbers are IAP's own. Wordings: gcloud
# 528 and OpenSSH 9, as they print them (2026-11-30), and for 4033 and 4047 dated reports of others.
_SSH_RULES = (
    _SshRule(
        r"\[4033\b|[Nn]ot authorized\b|iap\.tunnelInstances\.accessViaIAP",
        *("DENIED", "the account may not use IAP's tunnel"),
        "a person grants it roles/iap.tunnelResourceAccessor in the project",
    ),
    _SshRule(
        r"add SSH key to|setCommonInstanceMetadata|instances\.setMetadata|iam\.serviceAccountUser"
        r"|does not have access to service account|tpu\.nodes\.update",
        *("DENIED", "the account may not put its ssh key on the machine"),
        "a person grants it roles/compute.instanceAdmin.v1 and roles/iam.serviceAccountUser"
        " (roles/tpu.admin for Cloud TPU), or turns OS Login on",
    ),
    _SshRule(
        r"platform does not support SSH|No such file or directory: '?ssh",
        *("DENIED", "this computer has no ssh program"),
        "a person installs OpenSSH's client",
    ),
    _SshRule(
        r"\[4003\b|failed to connect to backend",
        *("UNREACHABLE", "IAP found no ssh server: the machine still starts, or the firewall"),
        "wait a minute; if it stays so, let 35.235.240.0/20 reach port 22 of the rig's network",
    ),
    _SshRule(
        r"\[4047\b|Failed to lookup instance",
        *("UNREACHABLE", "IAP does not know the machine: it is gone, or does not run"),
        "look at the machine's state",
    ),
    _SshRule(
        r"Permission denied \([\w,-]*publickey|Too many authentication failures"
        r"|key has not propagated",
        *("UNREACHABLE", "the machine does not know the ssh key yet"),
        "wait a minute; if it stays so, the account may lack roles/compute.osAdminLogin",
    ),
    _SshRule(
        r"Connection (?:refused|closed|reset|timed out)|Operation timed out|[Nn]o route to host"
        r"|Network is unreachable|kex_exchange_identification|banner exchange|Broken pipe"
        r"|Could not resolve hostname|gcloud crashed \(IndexError\)",
        *("UNREACHABLE", "the machine answers no ssh: it still starts, or is gone"),
        "wait a minute, then look at the machine's state",
    ),
)


class GcloudShell:
    """ssh through IAP's tunnel to machines of one project: no address of theirs is open.

    `command` is gcloud's: ("compute", "ssh"), or that for TPU VMs, whose released form knows no
    tunnel (gcloud 528), so that its alpha is used. `flags` are added to every call.
    """

    def __init__(
        self,
        gcloud: Gcloud,
        command: tuple[str, ...] = ("compute", "ssh"),
        flags: Mapping[str, GcloudFlag] | None = None,
    ) -> None:
        self._gcloud = gcloud
        tpu = "tpus" in command
        self._command = ("alpha", *command) if tpu and command[0] != "alpha" else command
        own: dict[str, GcloudFlag] = {"worker": 0} if tpu else {}
        self._flags = {**own, **(flags or {})}

    async def run(
        self,
        name: str,
        zone: str,
        program: bytes,
        act: str,
        arguments: Mapping[str, str | int | bool],
        timeout_s: float,
    ) -> str:
        """What `program` (Python source) printed for `act`, both streams in order, 64 kB at most.

        Raises UNREACHABLE where the machine was not reached, or the connection broke: the act may
        have been done then; DENIED where a role or a rule of the project forbids it; NOT_FOUND
        where there is no such machine; AUTH; INVALID for what cannot be sent; INTERNAL with the
        last line where the program failed; TIMEOUT after `timeout_s`. A machine that does not
        answer takes gcloud about a minute of attempts (47 to 58 s, gcloud 528, 2026-11-30).
        """
        mark = f"GEMMA4-HOST {secrets.token_hex(8)}"
        remote = f"sudo python3 - {_act_word(act)} {host_arguments(arguments)}"
        argv = [*self._argv(name, zone), f"--command={remote}"]
        given = _HOST_INPUT.format(mark=mark, program=program).encode()
        try:
            ended = await self._gcloud.finish(argv, timeout_s, given, OUTPUT_LIMIT)
        except RigError as error:
            if error.error_class != "TIMEOUT":
                raise
            why = f"the machine {name} did not answer `{act}` within {timeout_s:g} s"
            step = "look at its state; ssh to one that still starts takes a minute to give up"
            raise RigError("TIMEOUT", why, step) from None
        return self._printed(ended, mark, f"`{act}` on {name}")

    def tunnel_argv(self, name: str, zone: str, local_port: int, remote_port: int) -> list[str]:
        """The command that leads 127.0.0.1:`local_port` to the machine's `remote_port` while it
        runs; it ends where the port is taken, and 45 s after the machine fell silent.

        Raises INVALID for what cannot be a port, a name or a zone; DENIED without gcloud.
        """
        for what, port in (("local_port", local_port), ("remote_port", remote_port)):
            if not 1 <= port <= 65535:
                raise invalid_parameter(what, "is no port")
        way = ["-N", "-L", f"127.0.0.1:{local_port}:127.0.0.1:{remote_port}", *_TUNNEL_WORDS]
        return [self._gcloud.program(), *self._argv(name, zone), "--", *way]

    def _argv(self, name: str, zone: str) -> list[str]:
        if not name:
            raise invalid_parameter("name", "is needed: that of a machine")
        flags: dict[str, GcloudFlag] = {"zone": zone, "tunnel-through-iap": True}
        flags = {**flags, "strict-host-key-checking": "no", **self._flags}
        call = GcloudCall(self._command, name, flags)
        # Without the format, which makes gcloud print a `[]` behind what the machine printed.
        words = [word for word in self._gcloud.argv(call) if word != "--format=json"]
        return [*words, *_SSH_FLAGS]

    def _printed(self, ended: Finished, mark: str, what: str) -> str:
        _before, begun, text = ended.stdout.rpartition(f"{mark}\n")
        if not begun:
            raise self._not_begun(ended, what)
        if ended.returncode == 0:
            return text
        if ended.returncode == 255 or ended.returncode < 0:
            why = f"the connection broke while {what} ran; it may have been done all the same"
            raise RigError("UNREACHABLE", why, "look at the machine's state before a repeat")
        line = _host_line(text) or "it said nothing"
        raise RigError("INTERNAL", f"{what} failed (status {ended.returncode}): {line}")

    def _not_begun(self, ended: Finished, what: str) -> RigError:
        """The program did not begin: gcloud's words, ssh's, or those of what should start it."""
        said = _without_advice(ended.stderr)
        if ended.returncode == 2 and "ERROR: (gcloud" in said:
            return usage_refusal(gcloud_line(said))
        own = ended.returncode == 1 and re.search(r"ERROR: (?:\(gcloud|gcloud crashed)", said)
        if own or ended.returncode == 255:
            for rule in _SSH_RULES:
                found = re.search(rf"^.*?(?:{rule.wording}).*$", said, re.M)
                if found:
                    why = f"{rule.why}: {clean(gcloud_quote(found[0].strip()), _HOST_LINE)}"
                    return RigError(rule.error_class, why, rule.next_step)
        if own:
            return gcloud_refusal(ended.stderr, change=False, project=self._gcloud.project)
        line = _host_line(said) or "it said nothing"
        if ended.returncode in (0, 255) or ended.returncode < 0:
            why = f"the program for {what} did not reach the machine: {line}"
            return RigError("UNREACHABLE", why, "look at the machine's state, then repeat it")
        return RigError("INTERNAL", f"{what} did not start (status {ended.returncode}): {line}")


def host_arguments(arguments: Mapping[str, str | int | bool]) -> str:
    """Arguments as one word of a command line: base64url of a JSON object.

    The object begins with a space, or the word would begin as a web token does and be taken out of
    every log. Raises INVALID above 8000 characters, DENIED for what looks like a secret.
    """
    text = " " + json.dumps(dict(arguments), separators=(",", ":"))
    if redact(text) != text:
        why = "an argument for the machine looks like a secret, and command lines can be read"
        raise RigError("DENIED", why, "keep it in Secret Manager, where the machine reads it")
    word = base64.urlsafe_b64encode(text.encode()).decode()
    if len(word) > HOST_ARGUMENTS_LIMIT:
        raise invalid_parameter("arguments", f"are longer than {HOST_ARGUMENTS_LIMIT} characters")
    return word


def _act_word(act: str) -> str:
    if not _HOST_ACT.fullmatch(act):
        raise invalid_parameter("act", "must be one of the program's words")
    return act


def _host_line(text: str) -> str:
    lines = [line.strip() for line in printable(text[-20_000:]).splitlines() if line.strip()]
    return clean(lines[-1], _HOST_LINE) if lines else ""


def _without_advice(text: str) -> str:
    """Printable, and without what gcloud adds to ssh's own words: attempts, and what to try."""
    kept = printable(text[-20_000:]).partition("\nRecommendation:")[0].splitlines()
    added = re.compile(r"exited with return code \[255\]|^SSH: Attempting|^Using ssh batch size")
    return "\n".join(line for line in kept if not added.search(line))
