"""What the suites of a rented rig stand on: a Google on loopback, its machines, a stand-in gcloud.

A test case with all that, in which machines really boot and a scripted vLLM is served behind a
tunnel. Knows the tools that rent and no fault.
"""

from __future__ import annotations

import asyncio
import base64
import json
import os
import shutil
import threading
import time
from collections.abc import Mapping
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any, ClassVar, cast
from unittest import mock

import psutil
from mcp import Client

from forge.suites.fake_engine import FakeEngine
from forge.suites.fake_gcloud import fake_gcloud
from forge.suites.fake_google import FakeGoogle
from forge.suites.fake_google_compute import FakeCompute
from forge.suites.fake_google_services import FakeLogging, FakeLogin, FakeSecrets
from forge.suites.fake_google_tpu import FakeTpu
from forge.suites.fake_google_world import GoogleScript
from forge.suites.fake_host import FakeHost, FakeHosts
from forge.suites.rig_case import PATIENCE_S, RigCase, RigUnderTest, rig_under_test, spelled
from forge.suites.witness import rig_processes

RENTED_PROJECT = "fake-proj"
HELD_TOKEN = "hf_OTHERotherOTHERotherOTHERother01"  # what the project's secret holds; made up
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


class ScriptedHosts(FakeHosts):
    """Machines whose model server obeys one script, also those that do not exist yet."""

    def __init__(self, cloud: FakeGoogle, folder: Path) -> None:
        super().__init__(cloud, folder)
        self.engine_orders: dict[str, Any] = {}

    def _host(self, alias: str, name: str) -> FakeHost:
        with self._making:
            fresh = alias not in self.hosts
            host = super()._host(alias, name)
            if fresh:
                host.engine.script(**self.engine_orders)
            return host


class FakeProvider(FakeEngine):
    """The provider and its machines in the place of an engine. `google` is the cloud, `hosts` its
    machines, `argv_file` the stand-in gcloud's journal."""

    def __init__(self, folder: Path) -> None:
        super().__init__(folder)
        self.google = FakeGoogle(RENTED_PROJECT)
        self.hosts = ScriptedHosts(self.google, folder / "hosts")

    def install(self) -> None:
        """Start Google, its machines' owner and the registry; write gcloud and ssh."""
        self.folder.mkdir(parents=True)
        self.google.start()
        self.hosts.__enter__()
        self.argv_file = fake_gcloud(self.hosts.bin)
        self._registry = ThreadingHTTPServer(("127.0.0.1", 0), _Registry)
        serve = self._registry.serve_forever
        threading.Thread(target=serve, args=(0.05,), daemon=True).start()
        self.renew()

    def remove(self) -> None:
        """End all of it."""
        self.hosts.__exit__()
        self.google.stop()
        self._registry.shutdown()
        self._registry.server_close()

    def surroundings(self) -> dict[str, str]:
        """Variables by which a rig finds the cloud; no login, no home and no proxy of a user's."""
        names = ("PATH", "CLOUDSDK_", "GOOGLE_")
        given = self.google.environment(self.folder, path=str(self.hosts.bin))
        registry = f"http://127.0.0.1:{self._registry.server_address[1]}"
        return {
            **{key: value for key, value in given.items() if key.startswith(names)},
            "GEMMA4_GOOGLE_ENDPOINT": self.google.base,
            "IMAGE_REGISTRY": registry,
            "NO_GCE_CHECK": "true",  # or Google's library looks for a metadata server
        }

    def renew(self) -> None:
        """An empty project, with the machines' secret in it; its old machines are switched off."""
        google = self.google
        with google.lock:
            world = google.world
            world.script, world.now = GoogleScript(), float(int(time.time()))
            google.compute, google.tpu = FakeCompute(world), FakeTpu(world)
            google.secrets, google.logging = FakeSecrets(world), FakeLogging(world)
            google.login = FakeLogin(world)
            google.secrets.payloads["hf-token"] = [base64.b64encode(HELD_TOKEN.encode()).decode()]
            google.secrets.labels["hf-token"] = {"managed-by": "gemma4-rigs"}
            google.requests.clear()
            old = list(self.hosts.hosts.items())
            for alias, _host in old:
                del self.hosts.hosts[alias]
        for _alias, host in old:
            host.close()
        self.hosts.orders = {}
        self.argv_file.write_text("")
        self.script()

    # The machines' model servers

    def script(self, **orders: Any) -> None:
        """The script of every machine's model server, those to come as well."""
        self.hosts.engine_orders = orders
        for host in list(self.hosts.hosts.values()):
            host.engine.script(**orders)

    def requests(self) -> list[dict[str, Any]]:
        return [one for host in list(self.hosts.hosts.values()) for one in host.engine.requests()]

    def starts(self) -> list[dict[str, Any]]:
        return [one for host in list(self.hosts.hosts.values()) for one in host.engine.starts()]

    def serving(self) -> list[int]:
        """The pids of the model servers that run on machines now."""
        return [one["pid"] for one in self.starts() if psutil.pid_exists(one["pid"])]

    # Witnesses

    def rented(self) -> dict[str, list[str]]:
        """What would cost money now, by kind; the secrets aside, which cost cents."""
        return {kind: names for kind, names in self.google.held().items() if kind != "secrets"}

    def called(self, *words: str) -> list[list[str]]:
        """The argument lists with which gcloud was started that begin with `words`."""
        lines = [json.loads(line)[1:] for line in self.argv_file.read_text().splitlines()]
        return [line for line in lines if line[: len(words)] == list(words)]

    def hold_environment_check(self, hold: bool) -> None:
        """Whether Google answers nothing; both calls from one thread."""
        if hold:
            self.google.lock.acquire()
        else:
            self.google.lock.release()


def rented_rig(
    server_folder: Path, tools: Mapping[str, str], weights: str, words: Mapping[str, str]
) -> RigUnderTest:
    """A rig that rents, as its suite tests it: `weights` is the Hugging Face id that it serves."""
    return RigUnderTest(
        server_folder,
        tools,
        make_engine=FakeProvider,
        make_model=lambda _folder: Path(weights),  # in the form in which a suite holds a model
        words=words,
    )


class RentedCase(RigCase):
    """A test case with a provider of its own. After each test its project is empty, no process of
    the rig is left and its state is forgotten, unless the class `keeps_running`."""

    fake_on_path: ClassVar[bool] = False  # what it needs lies on PATH, not on PYTHONPATH
    server_name: ClassVar[str] = "impatient.py"
    zone: ClassVar[str] = "europe-west4-a"

    @classmethod
    def provider(cls) -> FakeProvider:
        return cast(FakeProvider, cls.engine)

    @property
    def google(self) -> FakeGoogle:
        return self.provider().google

    @property
    def hosts(self) -> ScriptedHosts:
        return self.provider().hosts

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
        hidden = ("CLOUDSDK_", "GOOGLE_")
        with mock.patch.dict(os.environ):
            for name in list(os.environ):
                if name.startswith(hidden) or name.lower().endswith("_proxy"):
                    del os.environ[name]
            return super()._clean_environment()

    @classmethod
    def good_settings(cls) -> dict[str, str]:
        return {**super().good_settings(), "PROJECT": RENTED_PROJECT}

    async def asyncTearDown(self) -> None:
        self.assertEqual(self.google.escapes, [], "a request left this computer's Google")
        await super().asyncTearDown()

    async def bring_to_rest(self) -> None:
        self.forget_everything()

    @classmethod
    def forget_everything(cls) -> None:
        """Kill what the rig has running here, empty the project, remove the rig's state."""
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
        outcome = await self.answer(client, "wait_for_vllm_ready", wait_s=50)
        if outcome["state"] == "starting":  # also where a watch was killed, and that is told
            outcome = await self.answer(client, "wait_for_vllm_ready", wait_s=50)
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
                    ("wait_for_vllm_ready", {"wait_s": 50}),
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

    def host(self) -> FakeHost:
        """The one machine that this project has, as a computer."""
        held = self.google.held()
        (name,) = held.get("instances") or held["nodes"]
        return self.hosts.host(name)

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
