"""The story of a rig whose TPU machine serves with the JAX engine: found, served, changed, gone.

Against the fake Google and machines that boot; the shared suites have the rest.
"""

from __future__ import annotations

import hashlib
import json
from unittest import mock

from mcp import Client

from forge.suites.fake_host import FakeHost
from forge.suites.jax_tpu_case import JaxTpuCase, jax_of
from forge.suites.rented_tpu import CENTRAL, WEST

_WEIGHTS = "google/gemma-4-E2B-it-qat-w4a16-ct"


class JaxTpuStorySuite(JaxTpuCase):
    """One machine's life with the tools that load by default."""

    async def test_find_serve_measure_and_take_down(self) -> None:
        self.google.script.quota = {WEST}
        async with self.in_process() as client:
            job = await self.found(client, zones=[WEST, CENTRAL], hours=1)
            self.assertEqual((job["state"], job["result"]["zone"]), ("done", CENTRAL), job)
            self.assert_everything_is_marked()
            await self.ready(client)
            said = await self.answer(client, "query_gemma4", prompt="The capital of France?")
            self.assertEqual(said["text"], "Paris.")
            details = await self.answer(client, "get_model_details")
            self.assertEqual(
                (details["model"], details["resolved"]["max_model_len"]), (_WEIGHTS, "8192")
            )
            await self._measured(client)
            log = await self.text(client, "get_jax_logs", lines=50)
            self.assertIn("jax_server: 100% ready", log)
            healthy = await self.answer(client, "analyze_logs")
            self.assertEqual(healthy["summary"], "no failure found")
        async with self.over_stdio() as another:  # a new server knows the zone and the model
            status = await self.answer(another, "get_system_status")
            self.assertEqual((status["state"], status["cost"]["billed"]), ("ready", True), status)
            (machine,) = (await self.answer(another, "list_queued_resources"))["rentals"]
            gone = await self.destroyed(another, machine)
            self.assertTrue(gone["gone"], gone)
            await self.assert_all_gone()
            orphans = await self.answer(another, "list_orphans")
            self.assertEqual((orphans["orphans"], orphans["unread"]), ([], []))

    async def _measured(self, client: Client) -> None:
        small = {"context_tokens": [32], "output_tokens": 4, "requests_per_cell": 2}
        begun = await self.answer(
            client, "run_benchmark", concurrency=[1, 8], seconds_per_cell=5, **small
        )
        job = await self.finished(client, begun["job_id"])
        self.assertEqual(job["state"], "done", job)
        (path,) = self.state.rglob(f"{job['result']['report']}.json")
        report = json.loads(path.read_text())
        self.assertEqual(report["run"]["rig"], self.module.RIG.name)

    async def test_what_the_machine_was_told_to_run(self) -> None:
        """This very file by its hash, offline, on loopback and the TPU; each phase was marked."""
        async with self.in_process() as client:
            await self.serve(client)
            seen = await self.answer(client, "verify_jax_tpu")
        host = self.host()
        self.assertEqual(self._laid_down(host), [self._engine_hash()])
        (start,) = jax_of(host).starts()
        options = dict(zip(start["argv"][::2], start["argv"][1::2], strict=True))
        self.assertEqual(options["--host"], "127.0.0.1")
        self.assertEqual((options["--slots"], options["--max-model-len"]), ("8", "8192"))
        self.assertEqual((options["--dtype"], options["--served-model-name"]), ("bf16", _WEIGHTS))
        self.assertTrue(options["--compile-cache"].endswith("/var/lib/gemma4/cache/jax"))
        given = start["environment"]
        self.assertEqual((given["JAX_PLATFORMS"], given["HF_HUB_OFFLINE"]), ("tpu", "1"))
        self.assertNotIn("HF_TOKEN", given)
        marks = self.marks(host)
        done = dict.fromkeys(phase for phase, state, _ in marks if state == "done")
        self.assertEqual(list(done), list(self.assembled().context.runtime.phases), marks)
        told = {phase: words for phase, state, words in marks if state == "done"}
        self.assertIn("151.3 TFLOP/s", told["device"])
        self.assertIn(("compile", "begin", "compiling decode of 1 slot"), marks)
        self.assertEqual((seen["kind"], seen["serving"]), ("TPU v5 lite", True))
        self.assertAlmostEqual(seen["share_of_peak"], 0.768)
        self.assertIn("before the engine took the chip", seen["summary"])

    async def test_what_the_chip_cannot_hold_is_refused_with_the_sum(self) -> None:
        """16 conversations of 131,072 tokens: with an int8 cache they fit. 9: if the weights stay
        packed."""
        longest = {"MAX_MODEL_LEN": "131072", "RIG_TOOLSETS": "all"}
        for values, fits in (
            ({"SLOTS": "16"}, False),
            ({"SLOTS": "16", "KV_CACHE_DTYPE": "int8"}, True),
            ({"SLOTS": "9"}, True),
            ({"SLOTS": "9", "UNPACK": "load"}, False),
        ):
            with mock.patch.dict("os.environ", {**longest, **values}):
                async with self.in_process() as client:
                    asked = {"concurrency": int(values["SLOTS"])}
                    plan = await self.answer(client, "plan_deployment", **asked)
                    self.assertEqual(plan["fits"], fits, (values, plan["reasons"]))
                    if not fits:
                        given = {"zone": self.zone}
                        tool = "create_tpu_queued_resource"
                        text = await self.refusal(client, tool, "CAPACITY", **given)
                        self.assertIn("GB", text)
        self.assertEqual((self.rented(), self.orders()), ({}, []))

    async def test_what_would_run_is_shown_before_it_does(self) -> None:
        with mock.patch.dict("os.environ", RIG_TOOLSETS="all"):
            async with self.in_process() as client:
                told = await self.answer(client, "get_jax_deployment_config", zone=WEST, hours=1)
        self.assertEqual(told["image"], "")
        self.assertIn(self._engine_hash()[:12], told["image_note"])
        self.assertEqual(told["container_argv"][0], "jax_server.py")
        metadata = [word for word in told["create_argv"] if "gemma4-engine=" in word]
        self.assertEqual(len(metadata), 1, told["create_argv"])
        self.assertEqual(self.orders(), [])

    async def test_the_server_is_stopped_and_comes_back(self) -> None:
        """Meanwhile the chip is free, and it is measured anew."""
        async with self.in_process() as client:
            await self.serve(client)
            await self.answer(client, "manage_jax_server", action="stop")
            await self.refusal(client, "query_gemma4", "BUSY", prompt="hello")
            text = await self.refusal(client, "wait_for_jax_ready", "NOT_FOUND", wait_s=50)
            self.assertIn("manage_jax_server(action='start')", text)
            self.host().script(chip={"tflops": 99.0})
            seen = await self.answer(client, "verify_jax_tpu")
            self.assertEqual((seen["tflops"], seen["serving"]), (99.0, False))
            await self.answer(client, "manage_jax_server", action="start")
            await self.ready(client)
            await self.answer(client, "query_gemma4", prompt="hello")

    async def test_a_release_is_deployed_and_gone_back_from(self) -> None:
        async with self.in_process() as client:
            await self.serve(client)
            same = await self.answer(client, "deploy_jax_server")
            self.assertIn("serves already", same["summary"])
            self.assertEqual(same["sha256"], self._engine_hash())
            await self.ready(client)
            host, first = self.host(), self.host_starts(1)[0]
            await self.refusal(client, "deploy_jax_server", "INTERNAL", rollback=True)
            with mock.patch.dict("os.environ", SLOTS="2"):
                async with self.in_process() as changed:
                    await self.answer(changed, "deploy_jax_server")
                    await self.ready(changed)
                    self.assertEqual(self.host_starts(2)[-1]["--slots"], "2")
            self.assertEqual(len(self._laid_down(host)), 2)
            back = await self.answer(client, "deploy_jax_server", rollback=True)
            self.assertTrue(back["rollback"])
            await self.ready(client)
            self.assertEqual(self.host_starts(3)[-1], first)
        programs = [words[0] for words in host.programs()]
        self.assertEqual(programs.count("uv"), 2, "packages that were there came again")
        host.reboot()
        self.assertEqual(self.host_starts(4)[-1], first, "the metadata's release came back")

    def host_starts(self, count: int) -> list[dict[str, str]]:
        """The options of each start of the engine, of which there are so many."""
        starts = [one["argv"] for one in jax_of(self.host()).starts()]
        self.assertEqual(len(starts), count)
        return [dict(zip(argv[::2], argv[1::2], strict=True)) for argv in starts]

    async def test_a_release_that_fails_is_explained_and_gone_back_from(self) -> None:
        async with self.in_process() as client:
            await self.serve(client)
            self.engine.script(refuses="needs 17.1 GB of memory, and 15.7 may be used")
            with mock.patch.dict("os.environ", SLOTS="4"):
                async with self.in_process() as changed:
                    await self.answer(changed, "deploy_jax_server")
                    text = await self.refusal(changed, "wait_for_jax_ready", "INTERNAL", wait_s=50)
            self.assertIn("needs 17.1 GB", text)
            self.engine.script()
            await self.answer(client, "deploy_jax_server", rollback=True)
            await self.ready(client)

    async def test_a_boot_that_fails_says_where(self) -> None:
        """And nothing of it is done twice when it goes on."""
        for fault, phase, words in (
            ({"packages": "error: Failed to fetch jax"}, "environment", "Failed to fetch"),
            ({"hub": "401 Client Error. Unauthorized"}, "weights", "401"),
            ({"chip": {"platform": "cpu", "kind": "cpu"}}, "device", "no TPU"),
        ):
            with self.subTest(phase=phase):
                self.hosts.orders = dict(fault)
                async with self.in_process() as client:
                    await self.created(client)
                    text = await self.refusal(client, "wait_for_jax_ready", "INTERNAL", wait_s=50)
                    self.assertIn(words, text)
                    host = self.host()
                    failed = [one for one in self.marks(host) if one[1] == "failed"]
                    self.assertEqual([one[0] for one in failed], [phase])
                    self.assertEqual(jax_of(host).starts(), [])
                    host.script()
                    await self.answer(client, "manage_jax_server", action="start")
                    await self.ready(client)
                self.forget_everything()

    def _laid_down(self, host: FakeHost) -> list[str]:
        """The hashes of the engines' files on a machine."""
        found = (host.root / "var/lib/gemma4/engine").glob("*/jax_server.py")
        return [hashlib.sha256(path.read_bytes()).hexdigest() for path in found]

    def _engine_hash(self) -> str:
        return hashlib.sha256((self.rig_folder / "jax_server.py").read_bytes()).hexdigest()
