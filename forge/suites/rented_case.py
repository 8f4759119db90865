"""What the suites of every rented rig stand on, whoever rents out its machines.

A provider on loopback whose machines really boot and serve a scripted model behind a tunnel, and a
test case with the acts of renting. Knows no provider: the modules beside it bring one.
"""

from __future__ import annotations

import asyncio
import os
import shutil
import threading
import time
from collections.abc import Callable, Mapping
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any, ClassVar, cast
from unittest import mock

import psutil
from mcp import Client

from forge.suites.fake_engine import FakeEngine
from forge.suites.rig_case import PATIENCE_S, RigCase, RigUnderTest, rig_under_test, spelled
from forge.suites.witness import rig_processes

HELD_TOKEN = "hf_OTHERotherOTHERotherOTHERother01"  # what the secret of the account holds; made up
IMAGE_DIGEST_NOW = "sha256:" + "c0ffee00" * 8
# The built server, looking more often: a fake machine boots in seconds. Its workers are the same.
IMPATIENT = """
server.HostedServing.watch_every_s = 0.2
server.RIG.make_plane.look_every_s = 0.2
server.RIG.make_plane.settle_s = 2.0
server.MACHINE_FRESH_S = 0.3
"""


class _Registry(BaseHTTPRequestHandler):
    """An image registry: whatever tag is asked for stands for the same digest."""

    def log_message(self, format: str, *_arguments: Any) -> None:
        pass

    def do_HEAD(self) -> None:
        self.send_response(200)
        self.send_header("Content-Type", "application/vnd.oci.image.index.v1+json")
        self.send_header("Docker-Content-Digest", IMAGE_DIGEST_NOW)
        self.send_header("Content-Length", "0")
        self.end_headers()

    do_GET = do_HEAD


class RentedProvider(FakeEngine):
    """A provider and its machines in the place of an engine; a subclass is one provider.

    `values` are what a rig's tpu.env must say here, who pays first; `programs` those of the user's
    that reach the provider or a machine, in `bin`; `hidden` begins the variables of a user's own.
    """

    values: ClassVar[Mapping[str, str]] = {}
    more_values: ClassVar[Mapping[str, str]] = {}  # that a create asks for beside
    bin: Path
    programs: ClassVar[tuple[str, ...]] = ()
    hidden: ClassVar[tuple[str, ...]] = ()

    def __init__(self, folder: Path) -> None:
        super().__init__(folder)
        self.engine_orders: dict[str, Any] = {}

    # What a provider brings

    def start(self) -> None:
        """Start the provider and the owner of its machines."""
        raise NotImplementedError

    def stop(self) -> None:
        """End both."""
        raise NotImplementedError

    def renew(self) -> None:
        """An empty account, with the machines' secret in it; its old machines are switched off."""
        raise NotImplementedError

    def rented(self) -> dict[str, list[str]]:
        """The names of what would cost money now, by kind ("instances", ...)."""
        raise NotImplementedError

    def changes(self) -> int:
        """How many requests that change something it was sent."""
        raise NotImplementedError

    def heard(self) -> str:
        """Everything that it, or its program here, was told."""
        raise NotImplementedError

    def escapes(self) -> list[str]:
        """Requests for any other host than this computer."""
        raise NotImplementedError

    def machines(self) -> list[Any]:
        """Its machines as computers, each with an `engine`, live or not."""
        raise NotImplementedError

    def machine(self, name: str) -> Any:
        """The newest machine of that name, as soon as it runs."""
        raise NotImplementedError

    def own_surroundings(self) -> dict[str, str]:
        """Variables by which a rig finds this provider and no other, PATH among them."""
        raise NotImplementedError

    # The rest is the same for all

    def install(self) -> None:
        self.folder.mkdir(parents=True)
        self.start()
        self._registry = ThreadingHTTPServer(("127.0.0.1", 0), _Registry)
        serve = self._registry.serve_forever
        threading.Thread(target=serve, args=(0.05,), daemon=True).start()
        self.renew()

    def remove(self) -> None:
        """End all of it."""
        self.stop()
        self._registry.shutdown()
        self._registry.server_close()

    def surroundings(self) -> dict[str, str]:
        registry = f"http://127.0.0.1:{self._registry.server_address[1]}"
        return {**self.own_surroundings(), "IMAGE_REGISTRY": registry}

    def script(self, **orders: Any) -> None:
        """The script of every machine's model server, those to come as well."""
        self.engine_orders = orders
        for machine in self.machines():
            machine.engine.script(**orders)

    def requests(self) -> list[dict[str, Any]]:
        return [one for machine in self.machines() for one in machine.engine.requests()]

    def starts(self) -> list[dict[str, Any]]:
        return [one for machine in self.machines() for one in machine.engine.starts()]

    def serving(self) -> list[int]:
        """The pids of the model servers that run on machines now."""
        return [one["pid"] for one in self.starts() if _runs(one["pid"], one["argv"])]


def _runs(pid: int, argv: list[str]) -> bool:
    """Whether the process that was started with these arguments is still at work: the dead that
    nobody has fetched yet do not count, nor does whoever was given the number since."""
    try:
        process = psutil.Process(pid)
        begun_so = process.cmdline()[-len(argv) :] == argv
        return begun_so and process.status() != psutil.STATUS_ZOMBIE
    except psutil.Error:
        return False


def rented_rig(
    server_folder: Path,
    tools: Mapping[str, str],
    weights: str,
    words: Mapping[str, str],
    provider: Callable[[Path], RentedProvider],
) -> RigUnderTest:
    """A rig that rents, as its suite tests it: `weights` is the Hugging Face id that it serves."""
    return RigUnderTest(
        server_folder,
        tools,
        make_engine=provider,
        make_model=lambda _folder: Path(weights),  # in the form in which a suite holds a model
        words=words,
    )


class RentedCase(RigCase):
    """A test case with a provider of its own. After each test its account is empty, no process of
    the rig is left and its state is forgotten, unless the class `keeps_running`."""

    fake_on_path: ClassVar[bool] = False  # what it needs lies on PATH, not on PYTHONPATH
    server_name: ClassVar[str] = "impatient.py"
    zone: ClassVar[str] = "europe-west4-a"

    @classmethod
    def provider(cls) -> RentedProvider:
        return cast(RentedProvider, cls.engine)

    @classmethod
    def prepare(cls) -> None:
        super().prepare()
        cls.zone = rig_under_test().words.get("zone", cls.zone)
        cls.addClassCleanup(cls.provider().remove)
        cls.write_runner("impatient.py", IMPATIENT)
        for where, name, value in (
            (cls.module.HostedServing, "watch_every_s", 0.2),
            (cls.module.RIG.make_plane, "settle_s", 2.0),
            (cls.module, "MACHINE_FRESH_S", 0.3),
        ):
            patch = mock.patch.object(where, name, value)
            patch.start()
            cls.addClassCleanup(patch.stop)

    @classmethod
    def _clean_environment(cls) -> dict[str, str]:
        hidden = cls.provider().hidden
        with mock.patch.dict(os.environ):
            for name in list(os.environ):
                if name.startswith(hidden) or name.lower().endswith("_proxy"):
                    del os.environ[name]
            return super()._clean_environment()

    @classmethod
    def good_settings(cls) -> dict[str, str]:
        # A fake machine's minute is seconds: it must not end while a busy computer thinks.
        return {**super().good_settings(), "IDLE_MINUTES": "10080", **cls.provider().values}

    async def asyncTearDown(self) -> None:
        self.assertEqual(self.provider().escapes(), [], "a request left this computer")
        await super().asyncTearDown()

    async def bring_to_rest(self) -> None:
        self.forget_everything()

    @classmethod
    def forget_everything(cls) -> None:
        """Kill what the rig has running here, empty the account, remove the rig's state."""
        cls._end_everything()
        cls.provider().renew()
        shutil.rmtree(cls.state, ignore_errors=True)

    # Renting and serving

    async def created(self, client: Client, /, **arguments: Any) -> dict[str, Any]:
        """A machine in `zone`, created; its row."""
        given = {"zone": self.zone, **arguments}
        outcome = await self.answer(client, "create_tpu_vm_instance", **given)
        return dict(outcome["machine"])

    async def ready(self, client: Client, /) -> dict[str, Any]:
        """Wait until the machine serves; the outcome."""
        outcome = await self.answer(client, "wait_for_model_ready", wait_s=50)
        if outcome["state"] == "starting":  # also where a watch was killed, and that is told
            outcome = await self.answer(client, "wait_for_model_ready", wait_s=50)
        self.assertEqual(outcome["state"], "ready", outcome)
        return outcome

    async def serve(self, client: Client, /, **arguments: Any) -> dict[str, Any]:
        """Create a machine and wait until it serves; the outcome of the wait."""
        await self.created(client, **arguments)
        return await self.ready(client)

    @classmethod
    def serve_for_class(cls) -> None:
        """Rent a machine once for all tests of the class (from setUpClass, with keeps_running)."""

        async def start() -> None:
            server_file = cls.rig_folder / cls.server_name
            async with Client(cls.module.AssembledRig(cls.module.RIG, server_file).server()) as one:
                for tool, arguments in (
                    ("create_tpu_vm_instance", {"zone": cls.zone}),
                    ("wait_for_model_ready", {"wait_s": 50}),
                ):
                    result = await one.call_tool(spelled(tool), arguments)
                    if result.is_error:
                        raise AssertionError(f"{tool}: {result.content}")
            if (result.structured_content or {}).get("state") != "ready":
                raise AssertionError(f"the model did not come up: {result.content}")

        asyncio.run(start())
        deadline = time.monotonic() + PATIENCE_S
        while rig_processes(cls.state, "job") and time.monotonic() < deadline:
            time.sleep(0.02)

    async def finished(self, client: Client, job_id: str, /) -> dict[str, Any]:
        """The job when it has ended."""
        job = await self.answer(client, "get_job", job_id=job_id, wait_s=50)
        while job["state"] in ("queued", "running"):
            job = await self.answer(client, "get_job", job_id=job_id, wait_s=50)
        return job

    async def destroyed(self, client: Client, machine: Mapping[str, Any], /) -> dict[str, Any]:
        """Destroy by plan and token, with no user to ask; the outcome."""
        where = {"name": machine["name"], "zone": machine["zone"]}
        plan = await self.answer(client, "plan_destroy", **where)
        return await self.answer(client, "destroy_tpu_vm_instance", **where, token=plan["token"])

    def host(self) -> Any:
        """The one machine that is rented, as a computer."""
        held = self.rented()
        (name,) = held.get("instances") or held["nodes"]
        return self.provider().machine(name)

    # Witnesses

    def rented(self) -> dict[str, list[str]]:
        """What would cost money now, by kind."""
        return self.provider().rented()

    def processes(self, role: str = "") -> list[int]:
        """The rig's own processes here; with "server", the model servers on its machines, which
        count among them."""
        if role:
            return self.provider().serving() if role == "server" else super().processes(role)
        return super().processes() + self.provider().serving()

    async def assert_all_gone(self) -> None:
        """Nothing is rented, and the rig's workers end within moments."""
        self.assertEqual(self.rented(), {}, "something is still rented")
        await self.until(lambda: not self.processes("server"), "a machine was not switched off")
        await super().assert_all_gone()
