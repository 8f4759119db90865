"""AWS's session-manager-plugin on this computer: where it is, and whether it can be used.

It carries a port through Systems Manager and is no part of AWS's SDK. Knows no session.
"""

from __future__ import annotations

import os
import re
import shutil
from collections.abc import Mapping
from dataclasses import dataclass

from forge.parts.ground.errors import RigError
from forge.parts.ground.process import run_program

SSM_PLUGIN = "session-manager-plugin"
SSM_PLUGIN_INSTALL = (
    "a person installs AWS's Session Manager plugin: on Debian and Ubuntu its "
    "session-manager-plugin.deb with sudo dpkg -i, on macOS with brew install --cask "
    "session-manager-plugin; see https://docs.aws.amazon.com/systems-manager/latest/userguide/"
    "session-manager-working-with-install-plugin.html"
)
# Up to this release the plugin takes the session, its token included, as an argument only; and AWS
# announced that it will refuse releases before the second. Both: awscli 1.46.3, sessionmanager.py.
_SSM_PLUGIN_OPEN = (1, 2, 497, 0)
_SSM_PLUGIN_ADVISED = (1, 2, 764, 0)
_SSM_PLUGIN_VERSION = re.compile(r"\d{1,5}(?:\.\d{1,5}){0,3}")
_SSM_PLUGIN_S = 20.0  # seconds for its own word on its release


@dataclass(frozen=True)
class SsmPlugin:
    """`path` is absolute; `caution` is empty, or what to know about this release."""

    path: str
    version: str
    caution: str


async def find_ssm_plugin(environment: Mapping[str, str] | None = None) -> SsmPlugin:
    """The plugin of PATH, of a release that hides the session's token from other users.

    Raises NOT_FOUND where there is none and DENIED for one that is too old or says no release,
    both with how to install it.
    """
    source = os.environ if environment is None else environment
    found = shutil.which(SSM_PLUGIN, path=source.get("PATH"))
    if found is None:
        raise RigError("NOT_FOUND", f"there is no {SSM_PLUGIN} on PATH", SSM_PLUGIN_INSTALL)
    path = os.path.abspath(found)
    ended = await run_program([path, "--version"], timeout_s=_SSM_PLUGIN_S, environment=environment)
    version = ended.stdout.strip()
    if ended.returncode != 0 or not _SSM_PLUGIN_VERSION.fullmatch(version):
        why = f"{path} does not say which release it is"
        raise RigError("DENIED", why, SSM_PLUGIN_INSTALL)
    numbers = tuple(int(part) for part in version.split("."))
    numbers += (0,) * (4 - len(numbers))
    if numbers <= _SSM_PLUGIN_OPEN:
        why = f"{path} is of release {version}, which shows a session's token to every user"
        raise RigError("DENIED", why, SSM_PLUGIN_INSTALL)
    if numbers < _SSM_PLUGIN_ADVISED:
        advised = ".".join(str(number) for number in _SSM_PLUGIN_ADVISED)
        caution = f"release {version} is older than {advised}, the oldest that AWS will support"
        return SsmPlugin(path, version, caution)
    return SsmPlugin(path, version, "")
