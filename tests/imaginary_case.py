"""The imaginary rig in a folder of its own for a test, and ways to talk to it as clients do.

Everything is driven through the bundled file. A client is opened inside each test: one that is
opened in a set-up is closed by another task, which the SDK refuses.
"""

from __future__ import annotations

import asyncio
import functools
import importlib.util
import os
import socket
import sys
import tempfile
import unittest
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from types import ModuleType
from typing import Any
from unittest import mock

from mcp import Client, StdioServerParameters
from mcp.types import CallToolResult, ElicitRequestParams, ElicitResult

from forge.bundle import SECTIONS, bundle
from tests.imaginary.world import ImaginaryWorld, new_world

ROOT = Path(__file__).resolve().parents[1]
ZONE, OTHER_ZONE, UNPRICED_ZONE = "us-east5-b", "us-east5-c", "europe-west4-a"
MODES = ("legacy", "auto")

Answer = Callable[[str], ElicitResult]


@functools.cache
def bundled() -> tuple[str, tuple[str, ...]]:
    """The text of the rig's server.py and the third-party packages that it needs."""
    result = bundle("tests.imaginary.rig", ROOT, sections=(*SECTIONS, "tests.imaginary"))
    return result.render("# The imaginary rig of the tests.\n"), result.third_party


@functools.cache
def bundled_module() -> ModuleType:
    """The bundled file as a module, loaded once a process."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "server.py"
        path.write_text(bundled()[0])
        spec = importlib.util.spec_from_file_location("imaginary_server", path)
        assert spec is not None and spec.loader is not None
        module = importlib.util.module_from_spec(spec)
        sys.modules[spec.name] = module
        spec.loader.exec_module(module)
    return module


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def text_of(result: CallToolResult) -> str:
    return "\n".join(item.text for item in result.content if item.type == "text")


class Caller:
    """A client whose answers are told apart: `ok` wants success, `fails` wants an error class."""

    def __init__(self, client: Client, test: unittest.TestCase) -> None:
        self.client = client
        self._test = test

    async def ok(self, tool: str, /, **arguments: Any) -> dict[str, Any]:
        """The structured result of a call that succeeds."""
        result = await self.client.call_tool(tool, arguments)
        self._test.assertFalse(result.is_error, text_of(result))
        assert result.structured_content is not None
        return dict(result.structured_content)

    async def fails(self, error_class: str, tool: str, /, **arguments: Any) -> str:
        """The text of a call that fails with `error_class` as its first word."""
        result = await self.client.call_tool(tool, arguments)
        self._test.assertTrue(result.is_error, f"it succeeded: {text_of(result)}")
        self._test.assertEqual(text_of(result).split()[0], error_class, text_of(result))
        return text_of(result)


class ImaginaryCase(unittest.IsolatedAsyncioTestCase):
    """A fresh folder with server.py, tpu.env and a world, and a fresh state, for every test."""

    settings = {"BUDGET_USD": "5", "MAX_HOURS": "8"}

    def setUp(self) -> None:
        scratch = tempfile.TemporaryDirectory()
        self.addCleanup(scratch.cleanup)
        self.folder = Path(scratch.name)
        self.rig_folder = self.new_rig_folder("rig")
        homes = {f"XDG_{kind}_HOME": str(self.folder / kind) for kind in ("STATE", "CACHE")}
        environment = mock.patch.dict(os.environ, homes)
        environment.start()
        self.addCleanup(environment.stop)
        self.world: ImaginaryWorld = new_world(self.folder / "world.json")

    async def asyncSetUp(self) -> None:
        # unittest runs the loop in debug mode, which reports every slow step on standard error.
        asyncio.get_running_loop().slow_callback_duration = 60

    def new_rig_folder(self, name: str, **settings: str) -> Path:
        """A folder that holds what a rig's own folder holds."""
        folder = self.folder / name
        folder.mkdir()
        (folder / "server.py").write_text(bundled()[0])
        values = {
            "MODEL_NAME": "google/gemma-4-E2B-it",
            "ENGINE_PROGRAM": str(ROOT / "tests" / "imaginary" / "engine.py"),
            "IMAGINARY_WORLD": str(self.folder / "world.json"),
            "PORT": str(free_port()),
            **self.settings,
            **settings,
        }
        (folder / "tpu.env").write_text("".join(f"{k}={v}\n" for k, v in values.items()))
        return folder

    def assembled(self, folder: Path | None = None) -> Any:
        """The rig, assembled from the bundled module, in `folder`."""
        module = bundled_module()
        return module.AssembledRig(module.RIG, (folder or self.rig_folder) / "server.py")

    @property
    def journal(self) -> list[dict[str, Any]]:
        return list(self.assembled().context.journal.entries())

    @asynccontextmanager
    async def calling(
        self, mode: str = "auto", answer: Answer | None = None, rig: Any = None
    ) -> AsyncIterator[Caller]:
        """A client in this process. `answer` makes it one that can ask its user."""
        server = (rig or self.assembled()).server()
        async with Client(server, mode=mode, elicitation_callback=_callback(answer)) as client:
            yield Caller(client, self)

    @asynccontextmanager
    async def calling_over_stdio(
        self, mode: str = "auto", answer: Answer | None = None, **environment: str
    ) -> AsyncIterator[Caller]:
        """A client of a server process of its own."""
        program = StdioServerParameters(
            command=sys.executable,
            args=[str(self.rig_folder / "server.py")],
            env={**os.environ, **environment},
        )
        async with Client(program, mode=mode, elicitation_callback=_callback(answer)) as client:
            yield Caller(client, self)

    async def created(self, caller: Caller) -> dict[str, Any]:
        """A machine of this rig, made through the tool: its row."""
        machine = (await caller.ok("create_tpu", zone=ZONE))["machine"]
        return dict(machine)

    async def planned(self, caller: Caller) -> dict[str, str]:
        """A created machine and the arguments that destroying it takes."""
        machine = await self.created(caller)
        place = {"name": machine["name"], "zone": machine["zone"]}
        plan = await caller.ok("plan_destroy", **place)
        return {**place, "token": plan["token"]}


def _callback(answer: Answer | None) -> Any:
    if answer is None:
        return None

    async def callback(_context: Any, asked: ElicitRequestParams) -> ElicitResult:
        return await asyncio.to_thread(answer, asked.message)

    return callback


def says(action: str, **content: Any) -> Answer:
    """A user who always answers the same."""
    return lambda _question: ElicitResult.model_validate(
        {"action": action, "content": content or None}
    )
