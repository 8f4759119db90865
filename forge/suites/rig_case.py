"""What every suite stands on: a copy of the built rig in a temporary folder, and clients of it.

The built server.py beside the suite is what is tested, through a real MCP client; everything that
it writes goes into the temporary folder. Knows no tool and no fault.
"""

from __future__ import annotations

import asyncio
import contextlib
import importlib.util
import io
import json
import logging
import os
import shutil
import site
import sys
import tempfile
import textwrap
import time
import unittest
from collections.abc import AsyncIterator, Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from types import ModuleType
from typing import Any, ClassVar
from unittest import mock

import psutil
from mcp import Client, StdioServerParameters
from mcp.client.stdio import stdio_client

from forge.suites.fake_engine import FakeEngine, write_tiny_folder
from forge.suites.witness import free_port, rig_processes

PATIENCE_S = 30.0  # for what takes a second or two here: a busy machine is no failure


@dataclass(frozen=True)
class RigUnderTest:
    """The rig that a bundled suite tests: its `folder`, and its tools by name with their effect.

    The effects are reads, changes and destroys. They stand in the rig's own suite, by hand,
    because they are the promise; everything else is taken from the live tool list. `make_engine`
    is the fake of its engine, `make_model` writes a small model that it would serve. `words` has
    its own name for each tool that the shared suites call by the first rig's.
    """

    folder: Path
    tools: Mapping[str, str]
    make_engine: Callable[[Path], FakeEngine] = FakeEngine
    make_model: Callable[[Path], Path] = write_tiny_folder
    words: Mapping[str, str] = field(default_factory=dict)


_RUNNER = """\
import importlib.util, sys
from pathlib import Path

path = Path(__file__).resolve().parent / "server.py"
spec = importlib.util.spec_from_file_location("server", path)
server = sys.modules["server"] = importlib.util.module_from_spec(spec)
spec.loader.exec_module(server)
{preamble}
if __name__ == "__main__":
    sys.exit(server.run_rig(server.RIG, Path(__file__)))
"""

_rig_chosen: list[RigUnderTest] = []


def use_rig(rig: RigUnderTest) -> None:
    """Choose the rig that all suites of this run test; the entry calls it from setUpModule."""
    _rig_chosen[:] = [rig]


def rig_under_test() -> RigUnderTest:
    """The rig that `use_rig` chose."""
    return _rig_chosen[0]


def spelled(tool: str) -> str:
    """The rig's own name for a tool that the shared suites call by the first rig's."""
    return rig_under_test().words.get(tool, tool)


def loaded_server(server_file: Path) -> Any:
    """The module `server_file`, loaded once a run under a name of its own."""
    name = "built_server_under_test"
    if name not in sys.modules:
        spec = importlib.util.spec_from_file_location(name, server_file)
        assert spec is not None and spec.loader is not None
        module: ModuleType = importlib.util.module_from_spec(spec)
        sys.modules[name] = module  # before exec_module, or dataclasses cannot resolve their types
        spec.loader.exec_module(module)
    return sys.modules[name]


class RigCase(unittest.IsolatedAsyncioTestCase):
    """A test case with a rig of its own: folders, environment, fake engine, clients.

    One rig a class. A test that starts something has it stopped when it ends, unless the class
    says `keeps_running`; in either case nothing is left when the class ends.
    """

    keeps_running: ClassVar[bool] = False
    server_name: ClassVar[str] = "server.py"  # what is started; a runner beside it may stand in
    fake_on_path: ClassVar[bool] = True  # False: the real runtime, if it is installed
    place: ClassVar[Path]
    rig_folder: ClassVar[Path]
    state: ClassVar[Path]
    engine: ClassVar[FakeEngine]
    model: ClassVar[str]
    port: ClassVar[int]
    environment: ClassVar[dict[str, str]]
    module: ClassVar[Any]

    @classmethod
    def setUpClass(cls) -> None:
        super().setUpClass()
        folder = tempfile.TemporaryDirectory(prefix="rig-suite-", ignore_cleanup_errors=True)
        cls.addClassCleanup(folder.cleanup)
        cls.place = Path(folder.name).resolve()
        cls.module = loaded_server(rig_under_test().folder / "server.py")
        cls.engine = rig_under_test().make_engine(cls.place / "fake")
        cls.engine.install()
        cls.model = str(rig_under_test().make_model(cls.place / "models" / "tiny"))
        cls.port = free_port()
        cls.rig_folder = cls.place / "rig"
        cls.rig_folder.mkdir()
        for name in ("server.py", *(f"{name}.py" for name in cls.module.RIG.programs)):
            shutil.copy(rig_under_test().folder / name, cls.rig_folder)
        cls.write_settings(**cls.good_settings())
        cls.state = cls.place / "state"
        cls.environment = cls._clean_environment()
        patch = mock.patch.dict(os.environ, cls.environment, clear=True)
        patch.start()
        cls.addClassCleanup(patch.stop)
        cls.addClassCleanup(cls._end_everything)
        cls.prepare()

    @classmethod
    def prepare(cls) -> None:
        """What a kind of rig needs beyond that, before a suite's own setUpClass goes on."""

    @classmethod
    def _clean_environment(cls) -> dict[str, str]:
        """This environment, without what a rig would read of it, and every folder redirected."""
        settings = {name.upper() for name in cls.module.RIG.settings.model_fields}
        kept = {
            name: value
            for name, value in os.environ.items()
            if name not in settings and not name.startswith(("HF_", "XDG_", "GEMMA4_"))
        }
        packages = [str(cls.engine.folder)] if cls.fake_on_path else []
        packages += filter(None, [kept.get("PYTHONPATH")])
        home = cls.place / "home"
        home.mkdir()
        return kept | {
            "HOME": str(home),
            "TMPDIR": str(home),
            # Packages installed for the user stay visible although HOME moves.
            "PYTHONUSERBASE": site.getuserbase(),
            "PYTHONPATH": os.pathsep.join(packages),
            "XDG_STATE_HOME": str(cls.state),
            "XDG_CACHE_HOME": str(cls.place / "cache"),
            **cls.engine.surroundings(),
        }

    @classmethod
    def _end_everything(cls) -> None:
        """The last resort of a failed test: kill what it left, by the witness's own list."""
        left = []
        for pid in rig_processes(cls.state):
            with contextlib.suppress(psutil.Error):
                left.append(psutil.Process(pid))
                left[-1].kill()
        psutil.wait_procs(left, timeout=5)  # or they would write into a folder that is going

    @classmethod
    def good_settings(cls) -> dict[str, str]:
        """What tpu.env has to say here for the rig to work: the least, by key."""
        return {"MODEL_NAME": cls.model, "PORT": str(cls.port)}

    @classmethod
    def write_settings(cls, **values: str) -> None:
        """The rig's tpu.env as it came, with these keys changed."""
        lines = (rig_under_test().folder / "tpu.env").read_text().splitlines()
        for key, value in values.items():
            known = [number for number, line in enumerate(lines) if line.startswith(f"{key}=")]
            if known:
                lines[known[0]] = f"{key}={value}"
            else:
                lines.append(f"{key}={value}")
        cls.write_settings_text("\n".join(lines) + "\n")

    @classmethod
    def write_settings_text(cls, text: str) -> None:
        """The rig's tpu.env as `text`, with a time stamp that differs from the one before."""
        path = cls.rig_folder / "tpu.env"
        before = path.stat().st_mtime_ns if path.exists() else 0
        path.write_text(text, encoding="utf-8")
        stamp = max(time.time_ns(), before + 10_000_000)
        os.utime(path, ns=(stamp, stamp))

    @classmethod
    def write_runner(cls, name: str, preamble: str) -> Path:
        """A program that is the built server.py after `preamble` (`server` is the module).

        It lies beside the server and starts its workers as itself, so that a shorter patience or a
        limit of the system holds for them too.
        """
        runner = cls.rig_folder / name
        runner.write_text(_RUNNER.format(preamble=textwrap.dedent(preamble)))
        return runner

    async def asyncSetUp(self) -> None:
        await super().asyncSetUp()
        # The case's own loop runs in debug mode, which doubles the time and warns of slow steps.
        asyncio.get_running_loop().set_debug(False)
        logging.getLogger("asyncio").setLevel(logging.ERROR)
        self.engine.script()

    async def asyncTearDown(self) -> None:
        if not self.keeps_running:
            await self.bring_to_rest()
        await super().asyncTearDown()

    async def bring_to_rest(self) -> None:
        """End what a test started, by the rig's own tool."""
        if rig_processes(self.state):
            async with self.in_process() as client:
                await self.answer(client, "stop_model")

    # Clients. Opened inside a test: one that asyncSetUp opened would live in another task.

    @property
    def server_file(self) -> Path:
        """The program that is the rig's server."""
        return self.rig_folder / self.server_name

    def assembled(self, server_file: str = "", /) -> Any:
        """The rig as its entry assembles it, in this process; its workers run `server_file`, or
        the rig's own program."""
        name = server_file or self.server_name
        return self.module.AssembledRig(self.module.RIG, self.rig_folder / name)

    @contextlib.asynccontextmanager
    async def in_process(
        self, mode: str = "auto", /, server_file: str = ""
    ) -> AsyncIterator[Client]:
        """A client of a server in this process, in protocol mode "auto" or "legacy"."""
        with contextlib.redirect_stderr(io.StringIO()):  # settings at fault are told there too
            server = self.assembled(server_file).server()
        async with Client(server, mode=mode) as client:
            failure = None
            try:
                yield client
            except AssertionError as error:
                failure = error  # raised outside, where no task group wraps it
        if failure is not None:
            raise failure

    @contextlib.asynccontextmanager
    async def over_stdio(
        self, mode: str = "auto", /, extra: Mapping[str, str] | None = None
    ) -> AsyncIterator[Client]:
        """A client of the rig's server.py as a process; its stderr goes to `stderr_file`."""
        parameters = StdioServerParameters(
            command=sys.executable,
            args=[str(self.server_file)],
            env={**self.environment, **(extra or {})},
            cwd=self.place,
        )
        with self.stderr_file.open("a") as errors:
            async with Client(stdio_client(parameters, errors), mode=mode) as client:
                failure = None
                try:
                    yield client
                except AssertionError as error:
                    failure = error
        if failure is not None:
            raise failure

    @property
    def stderr_file(self) -> Path:
        return self.place / "stderr.txt"

    # Calls. Their own parameters are positional only, because tools have a parameter of any name.

    async def answer(self, client: Client, tool: str, /, **arguments: Any) -> dict[str, Any]:
        """The structured result of a call that must succeed."""
        result = await client.call_tool(spelled(tool), arguments)
        self.assertFalse(result.is_error, f"{tool}: {result.content}")
        return dict(result.structured_content or {})

    async def text(self, client: Client, tool: str, /, **arguments: Any) -> str:
        """The text of a call that must succeed."""
        result = await client.call_tool(spelled(tool), arguments)
        self.assertFalse(result.is_error, f"{tool}: {result.content}")
        return "".join(item.text for item in result.content if item.type == "text")

    async def refusal(
        self, client: Client, tool: str, error_class: str, /, **arguments: Any
    ) -> str:
        """The text of a call that must fail with `error_class` as its first word."""
        result = await client.call_tool(spelled(tool), arguments)
        text = "".join(item.text for item in result.content if item.type == "text")
        self.assertTrue(result.is_error, f"{tool} succeeded: {text}")
        self.assertEqual(text.split(" ")[0], error_class, text)
        return text

    async def serve(self, client: Client, /, **arguments: Any) -> dict[str, Any]:
        """Serve, wait until it is ready, and return the outcome."""
        outcome = await self.answer(client, "serve_model", wait_s=50, **arguments)
        self.assertEqual(outcome["state"], "ready", outcome)
        return outcome

    @classmethod
    def serve_for_class(cls) -> None:
        """Start the model once for all tests of the class (from setUpClass, with keeps_running)."""

        async def start() -> None:
            server = cls.module.AssembledRig(cls.module.RIG, cls.rig_folder / "server.py").server()
            async with Client(server) as client:
                result = await client.call_tool("serve_model", {"wait_s": 50})
            ready = (result.structured_content or {}).get("state") == "ready"
            if result.is_error or not ready:
                raise AssertionError(f"the model did not come up: {result.content}")

        asyncio.run(start())
        deadline = time.monotonic() + PATIENCE_S
        while rig_processes(cls.state, "job") and time.monotonic() < deadline:
            time.sleep(0.02)  # the worker has written its last word and is about to end

    # Witnesses.

    def processes(self, role: str = "") -> list[int]:
        """The pids of this rig's model servers and job workers, from the process table."""
        return rig_processes(self.state, role)

    async def assert_all_gone(self) -> None:
        """No model server of this rig is left now, and its workers end within moments."""
        self.assertEqual(self.processes("server"), [], "a model server was left")
        await self.until(lambda: not self.processes(), "a job's worker was left")

    def journal(self) -> list[dict[str, Any]]:
        """The journal's entries, from the file."""
        files = list(self.state.rglob("journal.jsonl"))
        return [json.loads(line) for file in files for line in file.read_text().splitlines()]

    @property
    def rig_state(self) -> Path:
        """The folder in which the rig keeps its records."""
        return Path(self.assembled().context.paths.state)

    async def until(self, what: Callable[[], Any], why: str) -> Any:
        """Poll `what` until it is true; fail with `why` after PATIENCE_S seconds."""
        deadline = time.monotonic() + PATIENCE_S
        while not (value := what()):
            if time.monotonic() > deadline:
                self.fail(why)
            await asyncio.sleep(0.05)
        return value
