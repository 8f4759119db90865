"""The manifests that a rig is published with, one function a client, and the check of them.

Every published name is the slug: an underscore breaks three of the clients. The version stands in
two files only, plugin.json and gemini-extension.json, and both are left out of its own hash.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Any

from forge.naming import skill_name, slug
from forge.parts.assembly.rig import RIG_VERSION

COLLECTION = "gemma4-rigs"
AUTHORS = {"name": f"The {COLLECTION} authors"}
MARKETPLACE_FILE = ".claude-plugin/marketplace.json"
PLUGIN_FILE = ".claude-plugin/plugin.json"
GEMINI_FILE = "gemini-extension.json"
MCP_FILE = ".mcp.json"
VERSION_FILES = frozenset({PLUGIN_FILE, GEMINI_FILE})
DESCRIPTION_LIMIT = 1024  # of a skill, by the Agent Skills specification

# Gemini CLI keeps variables of such names from a server unless they are declared. `:-` is the
# empty default: an undefined variable would arrive as the text `${HF_TOKEN}` otherwise.
_DECLARED = ("HF_TOKEN", "RIG_READ_ONLY", "RIG_TOOLSETS")
# Logins that a user may have in the environment alone, by the key that says who pays. An empty one
# counts as none for AWS's SDK.
_LOGIN_KEYS = {
    "AWS_ACCOUNT": ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY", "AWS_SESSION_TOKEN"),
}
# And where the providers' programs and libraries look for the others. Codex passes these on too.
_LOGIN_FILES = {
    "AWS_ACCOUNT": ("AWS_CONFIG_FILE", "AWS_SHARED_CREDENTIALS_FILE", "AWS_CA_BUNDLE"),
    "PROJECT": ("CLOUDSDK_CONFIG", "CLOUDSDK_ACTIVE_CONFIG_NAME", "GOOGLE_APPLICATION_CREDENTIALS"),
}
# Codex passes on nothing else: where packages, weights and state lie, beside the rig's settings.
_CODEX_FOLDERS = tuple(
    "HF_HOME HF_HUB_CACHE HF_TOKEN RIG_PACKAGES XDG_CACHE_HOME XDG_STATE_HOME".split()
)
# The first start may look through a cache of packages; no tool takes longer than 50 s.
_STARTUP_S, _TOOL_S = 60, 60


@dataclass(frozen=True)
class PublishedRig:
    """What the manifests say of a rig. `settings` are the keys of its tpu.env, in upper case."""

    name: str
    about: str
    settings: Sequence[str]
    version: str = ""

    @property
    def slug(self) -> str:
        return slug(self.name)


def plugin_version(shipped: Mapping[str, bytes]) -> str:
    """`0.1.0-h<12 hex>` over the shipped files (path in the rig -> content) without VERSION_FILES.

    A client updates a plugin when its version differs, so the version is the content's.
    """
    digest = hashlib.sha256()
    for path in sorted(shipped.keys() - VERSION_FILES):
        content = hashlib.sha256(shipped[path]).hexdigest()
        digest.update(f"{path}\0{content}\n".encode())
    return f"{RIG_VERSION}-h{digest.hexdigest()[:12]}"


def render_manifests(rig: PublishedRig) -> dict[str, str]:
    """Every manifest of one rig, by path in the rig's folder."""
    return {name: render(rig) for name, render in _RENDERED.items()}


def render_marketplace(rigs: Sequence[PublishedRig]) -> str:
    """The root's marketplace.json. Versions stand in each plugin.json alone: that one wins."""
    plugins = [
        {"name": rig.slug, "source": f"./{rig.name}", "description": rig.about}
        for rig in sorted(rigs, key=lambda rig: rig.name)
    ]
    description = (
        "MCP servers that serve Gemma 4, one for each hardware and runtime: start a model, wait "
        "for it, question it, measure it, diagnose it, take it down."
    )
    return _json(
        {
            "name": COLLECTION,
            "owner": AUTHORS,
            "metadata": {"description": description},
            "plugins": plugins,
        }
    )


def _plugin(rig: PublishedRig) -> str:
    # No mcpServers: .mcp.json lies where Claude Code looks for it.
    return _json(
        {
            "name": rig.slug,
            "version": rig.version,
            "description": rig.about,
            "author": AUTHORS,
            "license": "Apache-2.0",
        }
    )


def _declared(rig: PublishedRig) -> dict[str, str]:
    """The variables that a client is to pass on, each with its own value or none."""
    return {name: f"${{{name}:-}}" for name in (*_DECLARED, *_named(rig, _LOGIN_KEYS))}


def _named(rig: PublishedRig, by_payer: Mapping[str, Sequence[str]]) -> list[str]:
    return [name for key, names in by_payer.items() if key in rig.settings for name in names]


def _mcp(rig: PublishedRig) -> str:
    """One file for a plugin (started anywhere, the variable is set) and for a project (it is not).

    `${CLAUDE_PLUGIN_ROOT:-.}` would do for the project alone: in a plugin, Claude Code 2.1.197
    fills in the variable's bare form only, and makes `.` of this one.
    """
    start = (
        "import os, sys; root = os.environ.get('CLAUDE_PLUGIN_ROOT', '.'); "
        "os.execv(sys.executable, [sys.executable, root + '/launch.py'])"
    )
    server = {"command": "python3", "args": ["-c", start], "env": _declared(rig)}
    return _json({"mcpServers": {rig.slug: server}})


def _gemini(rig: PublishedRig) -> str:
    server = {
        "command": "python3",
        "args": ["${extensionPath}${/}launch.py"],
        "env": _declared(rig),
        "timeout": _TOOL_S * 1000,
    }
    return _json(
        {
            "name": rig.slug,
            "version": rig.version,
            "description": rig.about,
            "contextFileName": "AGENTS.md",
            "mcpServers": {rig.slug: server},
        }
    )


def _antigravity(rig: PublishedRig) -> str:
    # No env: whether its variables are expanded is not known, and text in their place would harm.
    return _json({"mcpServers": {rig.slug: {"command": "python3", "args": ["launch.py"]}}})


def _codex(rig: PublishedRig) -> str:
    """Read by Codex in a trusted project whose folder is the rig's."""
    files = _named(rig, _LOGIN_FILES)
    passed = json.dumps(sorted({*rig.settings, *_CODEX_FOLDERS, *_declared(rig), *files}))
    return (
        f"[mcp_servers.{rig.slug}]\n"
        'command = "python3"\n'
        'args = ["launch.py"]\n'
        f"env_vars = {passed}\n"
        f"startup_timeout_sec = {_STARTUP_S}\n"
        f"tool_timeout_sec = {_TOOL_S}\n"
    )


_RENDERED: dict[str, Callable[[PublishedRig], str]] = {
    PLUGIN_FILE: _plugin,
    MCP_FILE: _mcp,
    GEMINI_FILE: _gemini,
    ".agents/mcp_config.json": _antigravity,
    ".codex/config.toml": _codex,
    ".claude/CLAUDE.md": lambda rig: "@../AGENTS.md\n",
}


def _json(value: object) -> str:
    return json.dumps(value, indent=2, ensure_ascii=False) + "\n"


# What the clients' own validators let pass


def marketplace_faults(root: Path) -> Iterator[str]:
    """Faults of the root's marketplace.json against the folders that it names."""
    market = _read_object(root / MARKETPLACE_FILE)
    if market is None:
        yield f"{MARKETPLACE_FILE} is missing or no JSON object: run make build"
        return
    entries = market.get("plugins")
    for entry in entries if isinstance(entries, list) else []:
        name, source = (str(entry.get(key, "")) for key in ("name", "source"))
        where = f"{MARKETPLACE_FILE}, plugin {name or '?'}"
        folder = PurePosixPath(source)
        if not source.startswith("./") or ".." in folder.parts or not (root / folder).is_dir():
            yield f"{where}: source {source!r} is no folder of this repository: write ./<rig>"
            continue
        plugin = _read_object(root / folder / PLUGIN_FILE) or {}
        if not name == plugin.get("name") == _slug_or_none(folder.name):
            yield f"{where}: its name, plugin.json's and the folder's slug differ: run make build"


def manifest_faults(folder: Path) -> Iterator[str]:
    """Faults of a rig's manifests and skill, as text that begins with the file's path in it."""
    wanted = _slug_or_none(folder.name)
    for file in _RENDERED:
        if file.endswith(".json") and _read_object(folder / file) is None:
            yield f"{file} is missing or no JSON object: run make build"
    for file in (PLUGIN_FILE, GEMINI_FILE):
        manifest = _read_object(folder / file) or {}
        if manifest.get("name") != wanted:
            yield f"{file}: name {manifest.get('name')!r} is not the folder's slug: run make build"
        if not str(manifest.get("version", "")).startswith(f"{RIG_VERSION}-h"):
            yield f"{file}: has no version of the form {RIG_VERSION}-h…: run make build"
    plugin = _read_object(folder / PLUGIN_FILE) or {}
    if not isinstance(plugin.get("author"), dict):
        yield f"{PLUGIN_FILE}: author must be an object: run make build"
    for key in ("mcpServers", "skills", "commands", "agents", "hooks"):
        path = plugin.get(key)
        if isinstance(path, str) and not (folder / path).exists():
            yield f"{PLUGIN_FILE}: {key} names {path}, which does not exist: correct the path"
    context = (_read_object(folder / GEMINI_FILE) or {}).get("contextFileName")
    if not isinstance(context, str) or not (folder / context).is_file():
        yield f"{GEMINI_FILE}: contextFileName {context!r} does not exist: write that file"
    for file in (MCP_FILE, GEMINI_FILE, ".agents/mcp_config.json"):
        servers = (_read_object(folder / file) or {}).get("mcpServers")
        if not isinstance(servers, dict) or list(servers) != [wanted]:
            yield f"{file}: mcpServers must have the one key {wanted}: run make build"
            continue
        started = " ".join(servers[wanted].get("args") or [])
        if "launch.py" not in started or not (folder / "launch.py").is_file():
            yield f"{file}: must start launch.py, which must be in the folder: run make build"
    yield from _skill_faults(folder)


def _skill_faults(folder: Path) -> Iterator[str]:
    """The rules of the Agent Skills specification that bite: name, folder, description."""
    skills = sorted(folder.glob("skills/*/SKILL.md"))
    if [skill.parent.name for skill in skills] != [_skill_or_none(folder.name)]:
        yield f"skills/: must hold the one skill {_skill_or_none(folder.name)}: run make build"
    for skill in skills:
        file = skill.relative_to(folder).as_posix()
        head = skill.read_text(encoding="utf-8").split("---\n")
        fields = dict(
            line.split(": ", 1)
            for line in (head[1] if len(head) > 2 else "").splitlines()
            if ": " in line
        )
        if fields.get("name") != skill.parent.name:
            yield f"{file}: name {fields.get('name')!r} is not its folder's: run make build"
        description = fields.get("description", "")
        try:
            text = json.loads(description)  # written as a JSON string: a bare colon breaks YAML
        except ValueError:
            text = ""
        if not isinstance(text, str) or not 0 < len(text) <= DESCRIPTION_LIMIT:
            yield (
                f"{file}: description must be quoted, 1 to {DESCRIPTION_LIMIT} characters: "
                "shorten the rig's `about`"
            )


def _read_object(path: Path) -> dict[str, Any] | None:
    """The JSON object in `path`; None where it is absent or something else."""
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None
    return value if isinstance(value, dict) else None


def _slug_or_none(name: str) -> str | None:
    try:
        return slug(name)
    except ValueError:
        return None


def _skill_or_none(name: str) -> str | None:
    try:
        return skill_name(name)
    except ValueError:
        return None
