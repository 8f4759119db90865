"""The tunnel to a rented EC2 machine: leads a port of this computer to one of the machine's.

    python3 ssm_tunnel.py INSTANCE REGION REMOTE_PORT LOCAL_PORT [PROFILE]

Asks Systems Manager for a session and becomes AWS's session-manager-plugin, which carries it: the
process, its id and its end stay one, and SIGTERM ends it. The session's token goes through the
environment, never through an argument. It asks nothing and tries no second time. Exit status: 1 AWS
gave no session, 2 wrong usage, 3 no plugin that can be used; after that the plugin's own.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import re
import signal
import sys
from contextlib import suppress
from typing import Any

from forge.parts.boundaries.aws_refusals import aws_refusal
from forge.parts.boundaries.ssm_plugin import SsmPlugin, find_ssm_plugin
from forge.parts.ground.errors import RigError

# As awscli 1.46.3 starts the plugin (its sessionmanager.py): the name of this variable stands in
# the place of the session itself.
TUNNEL_VARIABLE = "AWS_SSM_START_SESSION_RESPONSE"
TUNNEL_DOCUMENT = "AWS-StartPortForwardingSession"
_TUNNEL_CALL_S = 15.0  # seconds to connect and for the answer


def main(argv: list[str] | None = None) -> int:
    """The command line; returns the exit status only where the plugin did not take over."""
    given = _arguments(argv)
    try:
        plugin = asyncio.run(find_ssm_plugin())
    except RigError as error:
        print(error, file=sys.stderr)
        return 3
    if plugin.caution:
        print(f"{plugin.path}: {plugin.caution}", file=sys.stderr)
    try:
        become_plugin(plugin, given)
    except RigError as error:
        print(error, file=sys.stderr)
    return 1


def become_plugin(plugin: SsmPlugin, given: argparse.Namespace) -> None:
    """Start the session and replace this process. Returns never; raises RigError without a session.

    One attempt: a second session would be one that nobody uses.
    """
    request: dict[str, Any] = {
        "Target": given.instance,
        "DocumentName": TUNNEL_DOCUMENT,
        "Parameters": {
            "portNumber": [str(given.remote_port)],
            "localPortNumber": [str(given.local_port)],
        },
    }
    try:
        client = _tunnel_client(given.region, given.profile)
        session = client.start_session(**request)
    except Exception as error:
        raise aws_refusal(error, "start_session") from None
    response = {name: session[name] for name in ("SessionId", "TokenValue", "StreamUrl")}
    words = [plugin.path, TUNNEL_VARIABLE, given.region, "StartSession", given.profile]
    words += [json.dumps(request), client.meta.endpoint_url]
    signal.signal(signal.SIGPIPE, signal.SIG_DFL)  # what Python ignores is inherited
    try:
        os.execve(plugin.path, words, {**os.environ, TUNNEL_VARIABLE: json.dumps(response)})
    except OSError as error:
        with suppress(Exception):  # or it would wait on the machine until it is given up there
            client.terminate_session(SessionId=session["SessionId"])
        why = f"{plugin.path} cannot be started: {error.strerror}"
        raise RigError("DENIED", why, "install it anew") from None


def _arguments(argv: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="ssm_tunnel.py",
        description=(__doc__ or "").partition("\n")[0],
        epilog="exit status: 1 AWS gave no session, 2 wrong usage, 3 no plugin that can be used",
    )
    form = _form(r"i-[0-9a-f]{8,17}", "an instance's id")
    parser.add_argument("instance", type=form, help="the machine, such as i-0123456789abcdef0")
    form = _form(r"[a-z]{2}(-[a-z]{2,12}){1,3}-[0-9]{1,2}", "a region")
    parser.add_argument("region", type=form, help="its region, such as us-east-1")
    parser.add_argument("remote_port", type=_port, help="the machine's port")
    parser.add_argument("local_port", type=_port, help="the port of this computer's loopback")
    form = _form(r"[A-Za-z0-9_@:/. +-]{0,120}", "a profile's name")
    parser.add_argument("profile", type=form, nargs="?", default="", help="a profile of ~/.aws")
    return parser.parse_args(argv)


def _form(shape: str, what: str) -> Any:
    def checked(text: str) -> str:
        if not re.fullmatch(shape, text):
            raise argparse.ArgumentTypeError(f"is not {what}")
        return text

    return checked


def _port(text: str) -> int:
    if not re.fullmatch(r"[0-9]{1,5}", text) or not 1 <= int(text) <= 65535:
        raise argparse.ArgumentTypeError("is not a port")
    return int(text)


def _tunnel_client(region: str, profile: str) -> Any:
    import boto3  # type: ignore[import-untyped]
    from botocore.config import Config  # type: ignore[import-untyped]

    once = {"mode": "standard", "total_max_attempts": 1}
    config = Config(connect_timeout=_TUNNEL_CALL_S, read_timeout=_TUNNEL_CALL_S, retries=once)
    session = boto3.Session(profile_name=profile or None)
    return session.client("ssm", region_name=region, config=config)


if __name__ == "__main__":
    sys.exit(main())
