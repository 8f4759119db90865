"""User data as cloud-init takes it: unpacked, its parts told apart, its files written.

Knows no cloud and no machine beyond a folder; which script runs when, the machine decides.
"""

from __future__ import annotations

import gzip
import json
import zlib
from collections.abc import Callable
from dataclasses import dataclass
from email import message_from_bytes
from pathlib import Path
from typing import Any

# What cloud-init runs or reads; it warns of everything else (cloud-init 25, user data formats).
_STARTS = {
    "#!": "x-shellscript",
    "#cloud-config": "cloud-config",
    "#cloud-boothook": "cloud-boothook",
}


@dataclass(frozen=True)
class UserDataPart:
    """One part: its kind (x-shellscript, cloud-config, cloud-boothook), file name and text."""

    kind: str
    name: str
    text: bytes


def user_data_parts(raw: bytes) -> list[UserDataPart]:
    """The parts of user data in their order: gzip is unpacked, a lone part is known by its start.

    Raises ValueError in cloud-init's words for what it would warn of and leave out.
    """
    if raw.startswith(b"\x1f\x8b"):
        try:
            raw = gzip.decompress(raw)
        except (OSError, EOFError, zlib.error) as error:
            raise ValueError(f"Failed to decompress user data: {error}") from None
    message = message_from_bytes(raw)
    if not message.is_multipart():
        return [_lone_part(raw)] if raw.strip() else []
    found = []
    for number, part in enumerate(message.walk()):
        if part.is_multipart():
            continue
        kind = part.get_content_type().removeprefix("text/")
        payload = part.get_payload(decode=True)
        text = payload if isinstance(payload, bytes) else b""
        if kind not in _STARTS.values():
            raise ValueError(f"Unhandled non-multipart ({part.get_content_type()}) userdata")
        if kind == "x-shellscript" and not text.startswith(b"#!"):
            raise ValueError(f"{part.get_filename()} has no interpreter: Exec format error")
        found.append(UserDataPart(kind, part.get_filename() or f"part-{number:03d}", text))
    return found


def _lone_part(text: bytes) -> UserDataPart:
    for start, kind in _STARTS.items():
        if text.startswith(start.encode()):
            return UserDataPart(kind, "part-001", text)
    shown = text[:20].decode("latin-1")
    raise ValueError(f"Unhandled non-multipart (text/x-not-multipart) userdata: '{shown!r}...'")


def write_cloud_files(text: bytes, root: Path, changed: Callable[[str, str], str]) -> None:
    """Does what a cloud-config asks for, below `root`: write_files, and nothing else.

    `changed` gives what is written in the place of a file's content, by its path. Raises ValueError
    for what it does not know, so that nothing is passed over in silence.
    """
    config = _yaml(text.decode())
    strange = set(config) - {"write_files"}
    if strange:
        raise ValueError(f"these machines know no {', '.join(sorted(strange))} in a cloud-config")
    for file in config.get("write_files", []):
        unknown = set(file) - {"path", "content", "permissions", "owner"}
        if unknown or file.get("owner", "root:root") != "root:root":
            raise ValueError(f"these machines cannot write {file['path']}: {sorted(unknown)}")
        path = root / str(file["path"]).lstrip("/")
        path.parent.mkdir(parents=True, exist_ok=True)
        path.unlink(missing_ok=True)
        path.touch(mode=0o600)
        path.write_text(changed(str(file["path"]), str(file["content"])))
        path.chmod(int(str(file.get("permissions", "0644")), 8))


def _yaml(text: str) -> dict[str, Any]:
    """A cloud-config; JSON is YAML as well, and whoever writes that spares a package here."""
    body = text.removeprefix("#cloud-config")
    try:
        found = json.loads(body)
    except ValueError:
        import yaml  # type: ignore[import-untyped]

        found = yaml.safe_load(body) or {}
    if not isinstance(found, dict):
        raise ValueError("a cloud-config is a mapping")
    return found
