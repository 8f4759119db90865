"""server.py's one entry with few commands: the stdio server, and what the make targets call.

Every acting command goes through the same validated tool path as a client's call.
"""

from __future__ import annotations

import argparse
import asyncio
import base64
import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from forge.parts.assembly.documents import pack_skill, write_documents
from forge.parts.assembly.rig import AssembledRig, Rig
from forge.parts.ground.errors import RigError
from forge.parts.ground.jobs import work_on_job
from forge.parts.ground.journal import utc_now
from forge.parts.ground.names import checked_name
from forge.parts.ground.process import kill_attached, leave_on_signals
from forge.parts.ground.redact import clean
from forge.parts.ground.settings import settings_as_shell
from forge.parts.ground.state import private_folder
from forge.parts.planes.plane import NeedyPlane, Room
from forge.parts.toolsets.starts import memory_verdict

_PICTURES_KEPT = 20
_JSON_KINDS = ("integer", "number", "boolean", "array", "object")


def _parser(rig: Rig) -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="server.py",
        description=f"{rig.name}: {rig.about} Without a command: the MCP server over stdio.",
    )
    commands = parser.add_subparsers(dest="command", metavar="COMMAND")
    call = commands.add_parser("call", help="call one tool: call TOOL key=value …")
    call.add_argument("tool", help="a tool's name; 'list' shows them")
    call.add_argument("arguments", nargs="*", metavar="key=value")
    call.add_argument("--json", action="store_true", help="print the structured result")
    commands.add_parser("docs", help="write the tool list, the skill and the README's lists")
    commands.add_parser("skill-zip", help="pack the skill into dist/")
    commands.add_parser("env", help="print the settings as shell exports")
    commands.add_parser("preflight", help="say what is missing here and how to get it")
    job = commands.add_parser("job", help="be the worker of a job (started by the server itself)")
    job.add_argument("job_id")
    for name, own in rig.commands.items():
        extra = commands.add_parser(name, help=own.help)
        extra.add_argument("--yes", action="store_true", help="do not ask")
        if own.undo is not None:
            extra.add_argument("--undo", action="store_true", help="take back what it made")
    http = commands.add_parser("http", help="serve MCP over HTTP on loopback")
    http.add_argument("--port", type=int, default=8765)
    return parser


def run_rig(rig: Rig, server_file: Path, argv: Sequence[str] | None = None) -> int:
    """Run one command of `rig`; returns the exit status (0 good, 1 failed, 2 wrong usage)."""
    arguments = _parser(rig).parse_args(argv)
    try:
        return _run_command(AssembledRig(rig, server_file.resolve()), arguments)
    except RigError as error:
        print(clean(str(error)), file=sys.stderr)
        return 1


def _run_command(rig: AssembledRig, arguments: argparse.Namespace) -> int:
    match arguments.command:
        case None | "http":
            leave_on_signals()
            try:
                if arguments.command is None:
                    rig.server().run()
                else:
                    rig.server().run("streamable-http", host="127.0.0.1", port=arguments.port)
            finally:
                kill_attached()
        case "call":
            leave_on_signals()
            return asyncio.run(_call_tool(rig, arguments))
        case "docs":
            for name in write_documents(rig):
                print(f"wrote {name}")
        case "skill-zip":
            print(f"wrote {pack_skill(rig)}")
        case "env":
            print(settings_as_shell(rig.context.settings))
        case "preflight":
            return asyncio.run(_preflight(rig))
        case "job":
            return asyncio.run(_work(rig, arguments.job_id))
        case name:
            own = rig.rig.commands[name]
            undone = own.undo if own.undo is not None and arguments.undo else own.run
            return asyncio.run(undone(rig, arguments.yes))
    return 0


async def _work(rig: AssembledRig, job_id: str) -> int:
    checked_name("job", "job_id", job_id)
    store = rig.context.jobs
    runner = rig.job_runners().get(store.read(job_id).kind)
    if runner is None:
        raise RigError("INVALID", f"job {job_id} is of a kind that this rig does not know")
    record = await work_on_job(store, job_id, runner)
    return 0 if record.state == "done" else 1


def _typed_arguments(schema: dict[str, Any], words: Sequence[str]) -> dict[str, Any]:
    """`key=value` words as arguments: numbers, switches and lists by the schema, else text."""
    typed: dict[str, Any] = {}
    for word in words:
        key, equals, value = word.partition("=")
        if not equals:
            raise RigError("INVALID", f"'{clean(word, 80)}' is not key=value", "add the '='")
        kind = schema.get("properties", {}).get(key, {}).get("type")
        try:
            typed[key] = json.loads(value) if kind in _JSON_KINDS else value
        except ValueError:
            typed[key] = value  # the tool's own check names the parameter
    return typed


async def _call_tool(rig: AssembledRig, arguments: argparse.Namespace) -> int:
    """Call one tool as a client does, in process; progress goes to standard error."""
    from mcp import Client

    tools = {tool.name: tool for tool in rig.tools()}
    if arguments.tool == "list":
        for tool in tools.values():
            print(f"{tool.name:28} {tool.title} ({tool.effect})")
        return 0
    if arguments.tool not in tools:
        rig.every_toolset = True
        tools = {tool.name: tool for tool in rig.tools()}
    if arguments.tool not in tools:
        near = ", ".join(sorted(tools))
        raise RigError("NOT_FOUND", f"no tool {clean(arguments.tool, 80)}; there are: {near}")
    typed = _typed_arguments(tools[arguments.tool].parameters, arguments.arguments)

    async def tell(progress: float, total: float | None, message: str | None) -> None:
        del progress, total
        print(f"… {message}", file=sys.stderr, flush=True)

    async with Client(rig.server()) as client:
        result = await client.call_tool(arguments.tool, typed, progress_callback=tell)
    if arguments.json and result.structured_content is not None:
        print(json.dumps(result.structured_content, indent=1, ensure_ascii=False))
    else:
        texts = [item.text for item in result.content if item.type == "text"]
        pictures = [item.data for item in result.content if item.type == "image"]
        texts += [f"picture: {path}" for path in _saved_pictures(rig, arguments.tool, pictures)]
        print("\n".join(texts), file=sys.stderr if result.is_error else sys.stdout)
    return 1 if result.is_error else 0


def _saved_pictures(rig: AssembledRig, tool: str, pictures: Sequence[str]) -> list[Path]:
    """Write base64 PNGs, which a terminal cannot show, into the state folder; their paths."""
    folder = rig.context.paths.state / "pictures"
    paths = []
    for number, data in enumerate(pictures, 1):
        path = private_folder(folder) / f"{tool}-{utc_now()[:19].replace(':', '')}-{number}.png"
        path.write_bytes(base64.b64decode(data))
        paths.append(path)
    for old in sorted(folder.glob("*.png"), key=lambda path: path.stat().st_mtime)[
        :-_PICTURES_KEPT
    ]:
        old.unlink(missing_ok=True)
    return paths


async def _preflight(rig: AssembledRig) -> int:
    """Print what this rig needs, what is there, and for each gap how to get it."""
    context, missing = rig.context, 0
    print(f"{rig.rig.name} {context.version} on Python {sys.version.split()[0]}")
    rows: list[tuple[bool, str, str, str]] = []
    try:
        name = str(getattr(context.settings, "model_name", ""))
        rows.append((True, "settings", f"tpu.env is good, MODEL_NAME={name}", ""))
    except RigError as error:
        rows.append((False, "settings", error.what, error.next_step or "correct that value"))
        name = ""
    for need in await context.runtime.needs():
        detail = (
            f"{need.detail} (needed only for {need.only_for})" if need.only_for else need.detail
        )
        rows.append((need.present or bool(need.only_for), need.name, detail, need.remedy))
    room: Room | None = None
    if isinstance(context.plane, NeedyPlane):
        try:
            needed = await context.plane.plane_needs()
            rows += [(need.present, need.name, need.detail, need.remedy) for need in needed]
        except RigError as error:
            rows.append((False, "the provider", error.what, error.next_step))
    else:
        room = await context.plane.room(context.paths.cache)
        rows.append((True, "disk", f"{room.disk_free / 1e9:.1f} GB free", ""))
    if name and room is not None:
        try:
            model = context.runtime.local_model(name)
            fits, text = (True, "its weights are got on the first start")
            if model is not None:
                fits, text = memory_verdict(model, room)
            rows.append((fits, f"memory for {name}", text, "serve a smaller model"))
        except RigError as error:
            rows.append((False, f"model {name}", error.what, error.next_step))
    try:
        if room is None or (await context.plane.find()).instance is None:
            await context.plane.check_port(int(getattr(context.settings, "port", 0)))
        rows.append((True, "port", "free, or held by this rig's own server", ""))
    except RigError as error:
        if error.what != rows[0][2]:  # settings at fault are told once
            rows.append((False, "port", error.what, error.next_step))
    for present, what, detail, remedy in rows:
        missing += not present
        mark = "ok     " if present else "MISSING"
        print(
            clean(f"{mark} {what}: {detail}" + ("" if present else f"\n        get it: {remedy}"))
        )
    print("Everything is there." if not missing else f"{missing} missing.")
    return 1 if missing else 0
