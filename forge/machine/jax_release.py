"""Releases of the JAX engine on a machine: the file, what it is started with, and the one before.

A release is the engine's file by its hash, its packages, its checkpoint and its arguments; two are
kept, so that one can go back. Knows no cloud, no service and nothing of what the engine does.
"""

from __future__ import annotations

import base64
import hashlib
import json
import lzma
import re
import shutil
from collections.abc import Mapping
from typing import Any

from forge.machine.console import HOME, Failure, stored

ENGINE_FILE = "jax_server.py"
RELEASES = HOME / "engine"
CURRENT = RELEASES / "current.json"  # {"now": key, "before": key or ""}
ENGINE_BYTES = 4_000_000  # the most that a packed engine may unpack to
RELEASE_FORMS = {
    "sha256": r"[0-9a-f]{64}",
    "python": r"3\.1\d",
    "repository": r"[\w-][\w.-]{0,95}/[\w-][\w.-]{0,95}",
    "revision": r"([0-9a-f]{40})?",
}
REQUIREMENT = r"[a-z0-9][a-z0-9._-]{0,60}==[0-9][\w.+]{0,40}"
SERVE_WORD = r"[\w./:@=,+-]{1,300}"  # nothing that a unit file would read as more than a word
# Where it listens, what it serves and where it keeps things, this program says itself.
SERVE_REFUSED = r"--(host|port|model|api-key-file|compile-cache|explain)\b.*"


def release_rules(release: Mapping[str, Any]) -> dict[str, object]:
    """By key, whether a release of a document or a delivery is as it has to be; raises what reading
    a wrong one raises."""
    words, packages = release["serve"], release["requirements"]
    return {
        **{f"release.{k}": re.fullmatch(f, release[k], re.ASCII) for k, f in RELEASE_FORMS.items()},
        "release.serve": all(re.fullmatch(SERVE_WORD, word, re.ASCII) for word in words)
        and not any(re.fullmatch(SERVE_REFUSED, word) for word in words),
        "release.requirements": bool(packages)
        and all(re.fullmatch(REQUIREMENT, package, re.ASCII) for package in packages),
    }


def release_key(release: Mapping[str, Any]) -> str:
    """The first 12 hex digits of the hash of all that a release says."""
    return hashlib.sha256(json.dumps(release, sort_keys=True).encode()).hexdigest()[:12]


def lay_down(release: Mapping[str, Any], packed: str) -> str:
    """Unpacks the engine's file beside what is said of it; the release's key.

    Raises Failure where what was packed is not the file of that hash.
    """
    key = release_key(release)
    folder = RELEASES / key
    try:
        unpacker = lzma.LZMADecompressor()
        text = unpacker.decompress(base64.b85decode(packed), ENGINE_BYTES)
    except (ValueError, lzma.LZMAError) as error:
        raise Failure(f"the engine came damaged: {error}") from None
    if hashlib.sha256(text).hexdigest() != release["sha256"]:
        raise Failure(f"what came as {ENGINE_FILE} is not the file of that hash")
    folder.mkdir(parents=True, exist_ok=True)
    (folder / ENGINE_FILE).write_bytes(text)
    (folder / "release.json").write_text(json.dumps(release))
    return key


def make_current(key: str) -> None:
    """That release from now on; the one until now is kept for going back, older ones go."""
    told = stored(CURRENT, {"now": ""})
    if told["now"] != key:
        fresh = CURRENT.with_suffix(".new")
        fresh.write_text(json.dumps({"now": key, "before": told["now"]}))
        fresh.replace(CURRENT)
    for folder in RELEASES.iterdir():
        if folder.is_dir() and folder.name not in kept_releases():
            shutil.rmtree(folder)


def kept_releases() -> list[str]:
    """The keys of the present release and of the one before, as far as there are any."""
    told = stored(CURRENT, {})
    return [key for key in (told.get("now"), told.get("before")) if key]


def current_release() -> tuple[str, dict[str, Any]]:
    """The key of the present release and what it says; empty before the first."""
    key = (kept_releases() or [""])[0]
    return key, stored(RELEASES / key / "release.json", {}) if key else {}


def release_before() -> str:
    """The key of the release that one can go back to. Raises Failure without one."""
    keys = kept_releases()
    if len(keys) < 2 or not (RELEASES / keys[1] / "release.json").is_file():
        raise Failure("no release before the present one is kept on this machine")
    return keys[1]
