"""A rig's values: environment over tpu.env over default, typed, every fault named with its key.

Only server.py reads tpu.env; a shell gets the same values through `server.py env`.
"""

from __future__ import annotations

import json
import os
import re
import shlex
from pathlib import Path
from typing import Literal, TypeVar

from pydantic import Field, ValidationError
from pydantic_settings import BaseSettings, SettingsConfigDict, SettingsError

from forge.parts.ground.errors import RigError

SETTINGS_FILE = "tpu.env"
# Only what has one reading: quoted without backslashes, or bare words; a comment after a blank.
_ASSIGNMENT = re.compile(
    r"""([A-Z][A-Z0-9_]*)="""
    r"""(?:("[^"\\]*"|'[^'\\]*'|[^\s"'#]\S*(?:[ \t]+[^\s#]\S*)*)(?:[ \t]+#.*)?)?"""
)

SettingsT = TypeVar("SettingsT", bound="RigSettings")
Origin = Literal["environment", "tpu.env", "default"]


class RigSettings(BaseSettings):
    """What every rig has. A rig's own class adds the keys of its plane and of its runtime."""

    model_config = SettingsConfigDict(
        env_file_encoding="utf-8",
        env_ignore_empty=True,
        extra="forbid",
        case_sensitive=False,
        hide_input_in_errors=True,
    )

    rig_read_only: bool = Field(
        default=False, description="1 refuses every tool that changes something, at the call."
    )
    rig_toolsets: str = Field(
        default="default", description="Toolsets to load, by comma; 'all' loads every one."
    )
    mcp_server_name: str = Field(
        default="", description="Another name for the MCP server than the rig's."
    )


def _check_settings_lines(path: Path) -> None:
    """Refuse what the dotenv reader would swallow: bare and double keys, garbage, interpolation."""
    seen: dict[str, int] = {}
    for number, line in enumerate(path.read_text(encoding="utf-8").split("\n"), start=1):
        text = line.strip()
        if not text or text.startswith("#"):
            continue
        match = _ASSIGNMENT.fullmatch(text)
        if match is None:
            raise RigError("INVALID", f"{path.name} line {number} is not KEY=value", "correct it")
        key, value = match.groups()
        if value and "$" in value:
            raise RigError(
                "INVALID",
                f"{path.name} line {number}: {key} holds a '$', and values are taken as they stand",
                "write the value out",
            )
        if key in seen:
            raise RigError(
                "INVALID",
                f"{path.name} line {number}: {key} stands in line {seen[key]} already",
                "keep one of the two",
            )
        seen[key] = number


def load_settings(kind: type[SettingsT], folder: Path) -> SettingsT:
    """The values of the rig in `folder`: environment, then its tpu.env, then defaults.

    Raises RigError INVALID with file, key and remedy: missing file, missing or unknown key, a value
    of the wrong form, a line that is no assignment.
    """
    path = folder / SETTINGS_FILE
    try:
        _check_settings_lines(path)
    except OSError as error:
        raise RigError(
            "INVALID",
            f"{path} cannot be read: {error.strerror}",
            "restore the file that came with the rig",
        ) from error
    except UnicodeDecodeError:
        raise RigError("INVALID", f"{path.name} is not UTF-8", "write it as UTF-8") from None
    try:
        return kind(_env_file=path)  # type: ignore[call-arg]  # a BaseSettings argument
    except ValidationError as error:
        raise RigError("INVALID", _describe_settings_fault(error, kind)) from None
    except SettingsError as error:
        raise RigError("INVALID", f"{SETTINGS_FILE}: {error}", "correct the value") from None


def asks_for_read_only(folder: Path) -> bool:
    """Whether the environment, or else any line of a tpu.env that is at fault, wants read-only.

    For while the settings cannot be read: a typing error in another line opens no gate.
    """
    wishes = [os.environ.get("RIG_READ_ONLY", "")]
    if not wishes[0]:
        try:
            text = (folder / SETTINGS_FILE).read_text(encoding="utf-8", errors="replace")
        except OSError:
            text = ""
        wishes = re.findall(r"""(?mi)^\s*RIG_READ_ONLY\s*=\s*["']?(\w+)""", text)
    return any(wish.lower() not in ("", "0", "false", "f", "no", "n", "off") for wish in wishes)


def _describe_settings_fault(error: ValidationError, kind: type[RigSettings]) -> str:
    faults = []
    for item in error.errors(include_input=False, include_url=False):
        key = str(item["loc"][0]).upper() if item["loc"] else "?"
        if item["type"] == "missing":
            faults.append(f"{key} is missing: write {key}=… or set it in the environment")
        elif item["type"] == "extra_forbidden":
            known = ", ".join(sorted(name.upper() for name in kind.model_fields))
            faults.append(f"{key} is not a key of this rig (known: {known})")
        else:
            where = "the environment" if key in _ambient_keys() else SETTINGS_FILE
            faults.append(f"{key} (from {where}): {item['msg']}")
    return f"{SETTINGS_FILE}: " + "; ".join(faults)


def _ambient_keys() -> set[str]:
    """The names of non-empty environment variables in capitals: their case does not count."""
    return {key.upper() for key, value in os.environ.items() if value}


def origin_of_settings(settings: RigSettings) -> dict[str, Origin]:
    """For each key, where its value came from: an ambient variable wins silently otherwise."""
    environment = _ambient_keys()
    origins: dict[str, Origin] = {}
    for name in type(settings).model_fields:
        if name.upper() in environment:
            origins[name] = "environment"
        else:
            origins[name] = "tpu.env" if name in settings.model_fields_set else "default"
    return origins


def settings_as_shell(settings: RigSettings) -> str:
    """`export KEY=value` lines for a shell to eval, quoted so that JSON and blanks survive."""
    lines = []
    for name, value in settings.model_dump(mode="json", exclude_none=True).items():
        text = str(int(value)) if isinstance(value, bool) else value
        text = text if isinstance(text, str) else json.dumps(text)
        lines.append(f"export {name.upper()}={shlex.quote(text)}")
    return "\n".join(lines)
