"""What a machine will run before it runs, and what is known of loading: the documents and tables.

Both rigs of Google's are put together from their parts; that nothing is created is asked of the
fake Google's own books.
"""

from __future__ import annotations

import json
import os
import re
import unittest
from typing import Any

from forge.parts.ground.errors import RigError
from forge.parts.ground.state import write_json
from forge.parts.knowledge.load_matrix import LOAD_MATRIX, load_results, refuse_unloadable
from forge.parts.planes.capacity_plane import rental_name
from forge.parts.toolsets.deployment import BootOrder, boot_files, boot_paths
from forge.parts.toolsets.load_record import LoadRecord, LoadRow
from forge.rigs.tpu_vllm_v5e1_2b import RIG as CLOUD_TPU_RIG
from tests.rented_rig import RentedRigCase

E2B, W4A16 = "google/gemma-4-E2B-it", "google/gemma-4-E2B-it-qat-w4a16-ct"
Q4_0 = "google/gemma-4-E2B-it-qat-q4_0-unquantized"
CANARY = "hf_CANARYcanaryCANARYcanaryCANARY13"


class ConfigTest(RentedRigCase):
    zone = "us-east5-b"
    created: tuple[str, ...] = ("compute", "instances", "create")

    async def config(self, **arguments: Any) -> dict[str, Any]:
        async with self.calling() as caller:
            told = await caller.ok("get_vllm_deployment_config", **arguments)
        self.assertEqual(self.google.held(), {}, "something was created")
        self.assertEqual(self.called(), [], "the provider was asked")
        return told

    async def test_it_shows_what_would_run_and_runs_nothing(self) -> None:
        told = await self.config(zone=self.zone, hours=2)
        argv = told["create_argv"]
        self.assertEqual((argv[0], "create" in argv), ("gcloud", True))
        self.assertIn("--project=fake-proj", argv)
        self.assertIn(f"--zone={self.zone}", argv)
        self.assertIn("Nothing was created", told["summary"])
        self.assertEqual(told["life_s"], 7200)
        self.assertEqual(told["idle_minutes"], 30)
        self.assertIn(told["image"], told["container_argv"])
        self.assertEqual(told["container_argv"][-len(told["serve_argv"]) :], told["serve_argv"])
        self.assertGreater(len(told["privileges"]), 0)

    async def test_the_name_and_the_labels_are_those_of_a_real_order(self) -> None:
        argv = " ".join((await self.config(zone=self.zone))["create_argv"])
        rig = self.assembled().context
        self.assertIn(rental_name(rig.rig, rig.owner), argv)
        for label in (f"rig={rig.rig}", f"owner={rig.owner}", "managed-by=gemma4-rigs"):
            self.assertIn(label, argv)
        self.assertIn("made-at-the-call", argv)

    async def test_without_a_zone_it_is_the_first_one(self) -> None:
        self.write_settings(ZONES=f"{self.zone},us-central1-a")
        argv = (await self.config())["create_argv"]
        self.assertIn(f"--zone={self.zone}", argv)

    async def test_an_image_that_could_not_be_resolved_is_told(self) -> None:
        told = await self.config()
        self.assertEqual(told["image"], "vllm/vllm-tpu:nightly")
        self.assertTrue(told["image_note"])
        digest = "sha256:" + "0a" * 32
        self.write_settings(IMAGE_DIGEST=digest)
        told = await self.config()
        self.assertTrue(told["image"].endswith(f"@{digest}"), told["image"])

    async def test_what_is_no_zone_and_what_is_no_life(self) -> None:
        async with self.calling() as caller:
            for zone in ("--zone", "us east", "$(id)", "a" * 41):
                await caller.fails("INVALID", "get_vllm_deployment_config", zone=zone)
            for hours in (0, 200):
                await caller.fails("INVALID", "get_vllm_deployment_config", hours=hours)

    async def test_settings_at_fault_are_told(self) -> None:
        self.write_settings(PROJECT="")
        async with self.calling() as caller:
            for tool in ("get_vllm_deployment_config", "get_vllm_tpu_manifest"):
                self.assertIn("PROJECT", await caller.fails("INVALID", tool))

    async def test_the_manifest_is_the_same_serving(self) -> None:
        told = await self.config()
        async with self.calling() as caller:
            texts = []
            for replicas in (1, 3):
                arguments = {"replicas": replicas}
                result = await caller.client.call_tool("get_vllm_tpu_manifest", arguments)
                self.assertFalse(result.is_error, result.content)
                texts.append("".join(i.text for i in result.content if i.type == "text"))
            for replicas in (0, 101):
                await caller.fails("INVALID", "get_vllm_tpu_manifest", replicas=replicas)
        for text in texts:
            self.assertTrue(text.startswith("# "))
            self.assertIn(told["image"], text)
            self.assertIn(E2B, text)
        self.assertNotIn("HorizontalPodAutoscaler", texts[0])
        self.assertIn("HorizontalPodAutoscaler", texts[1])
        self.assertEqual(self.google.held(), {})

    async def test_what_was_shown_is_what_goes_out(self) -> None:
        told = await self.config(zone=self.zone)
        async with self.calling() as caller:
            name = f"create_{self.assembled().context.vocabulary['order']}"
            await caller.ok(name, zone=self.zone, hours=1)
        (sent,) = self.called(*self.created)
        pattern = re.compile(r"create-\d{8}-\d{6}-[0-9a-f]{6}|(?<=expires[=:])\d+")
        shown = [word.replace("made-at-the-call", "X") for word in told["create_argv"][1:]]
        really = [pattern.sub("X", word) for word in sent]
        self.assertEqual(shown, really)
        document = json.loads((self.rig_state / "boot" / "boot.json").read_text())
        self.assertEqual(document["container"], told["container_argv"])
        self.assertEqual(document["life_s"], 3600)


class CloudTpuConfigTest(ConfigTest):
    rig = CLOUD_TPU_RIG
    zone = "us-west4-a"
    created = ("compute", "tpus", "queued-resources", "create")

    def called(self, *words: str) -> list[list[str]]:
        """By the alpha command as well, which is the one that knows flex-start."""
        return super().called(*words) + (super().called("alpha", *words) if words else [])


class BootOrderTest(RentedRigCase):
    def order(self) -> BootOrder:
        return BootOrder(self.assembled().context)

    async def test_it_is_written_for_this_user_alone_and_noted(self) -> None:
        order = self.order()
        await order.write(5400)
        self.assertEqual(order.path.stat().st_mode & 0o077, 0)
        document = json.loads(order.path.read_text())
        self.assertEqual((document["rig"], document["project"]), (self.rig.name, "fake-proj"))
        self.assertEqual(document["life_s"], 5400)
        (entry,) = self.journal("boot planned")
        self.assertEqual(entry["image"], document["image"])

    async def test_the_next_machine_boots_the_newest(self) -> None:
        order = self.order()
        await order.write(3600)
        self.write_settings(MAX_MODEL_LEN="2048", IDLE_MINUTES="7")
        await self.order().write(7200)
        document = json.loads(order.path.read_text())
        self.assertEqual((document["life_s"], document["idle_minutes"]), (7200, 7))
        self.assertIn("2048", " ".join(document["container"]))

    async def test_no_token_is_in_it(self) -> None:
        os.environ["HF_TOKEN"] = CANARY
        order = self.order()
        await order.write(3600)
        self.assertNotIn(CANARY, order.path.read_text())
        self.assertEqual(json.loads(order.path.read_text())["secret"], "hf-token")

    async def test_it_cannot_be_written(self) -> None:
        order = self.order()
        order.path.parent.parent.mkdir(parents=True, exist_ok=True)
        order.path.parent.write_text("a file where the folder should be")
        with self.assertRaises(RigError) as caught:
            await order.write(3600)
        self.assertEqual(caught.exception.error_class, "DENIED")

    async def test_the_files_that_go_out(self) -> None:
        state, program = self.rig_state, self.rig_folder / "boot.py"
        with self.assertRaises(RigError) as caught:
            boot_files(state, program)
        self.assertEqual(caught.exception.error_class, "INTERNAL")
        await self.order().write(3600)
        files = boot_files(state, program)
        self.assertEqual(files, boot_paths(state, program))
        self.assertEqual(set(files), {"startup-script", "gemma4-boot"})
        self.assertTrue(all(path.is_file() for path in files.values()))
        write_json(files["gemma4-boot"], {"container": ["x" * 210_000]})
        with self.assertRaises(RigError) as caught:
            boot_files(state, program)
        self.assertEqual(caught.exception.error_class, "INVALID")


class LoadMatrixTest(unittest.TestCase):
    def test_every_row_has_its_source_and_its_date(self) -> None:
        for row in LOAD_MATRIX:
            with self.subTest(row.weights, how=row.how):
                self.assertRegex(row.date, r"\A20\d\d-\d\d-\d\d\Z")
                self.assertTrue(row.source and row.engine and row.chips and row.how)
                self.assertEqual(bool(row.cause), not row.loads, "a cause is of a failure")

    def test_no_trial_stands_there_twice(self) -> None:
        keys = [(r.weights, r.engine, chip, r.how) for r in LOAD_MATRIX for chip in r.chips]
        self.assertEqual(len(keys), len(set(keys)))

    def test_what_nobody_got_to_load_is_refused_with_cause_and_issue(self) -> None:
        for weights in (W4A16, Q4_0):
            for chip in ("v5e", "v6e"):
                with self.subTest(weights=weights, chip=chip):
                    with self.assertRaises(RigError) as caught:
                        refuse_unloadable(weights, "vLLM", chip, False)
                    error = caught.exception
                    self.assertEqual(error.error_class, "INVALID")
                    (first, *_) = load_results(weights, "vLLM", chip)
                    self.assertIn(first.cause, error.what)
                    self.assertIn(first.upstream or "no upstream issue is known", error.what)
                    self.assertIn("nothing was rented", error.what)
                    self.assertIn("override=true", error.next_step)

    def test_it_may_be_tried_all_the_same(self) -> None:
        for weights in (W4A16, Q4_0):
            refuse_unloadable(weights, "vLLM", "v5e", True)

    def test_what_loads_and_what_nobody_tried_passes(self) -> None:
        for weights, engine, chip in (
            (E2B, "vLLM", "v6e"),
            (E2B, "vLLM", "v5e"),  # tried by nobody
            ("google/gemma-4-12B-it", "vLLM", "v6e"),
            (W4A16, "JAX", "v6e"),  # another loader
            (W4A16, "vLLM", "v4"),
            (W4A16, "vLLM", ""),
            ("", "", ""),
        ):
            refuse_unloadable(weights, engine, chip, False)

    def test_a_name_is_taken_whole(self) -> None:
        self.assertEqual(load_results(f"{W4A16}-2", "vLLM", "v6e"), [])
        self.assertEqual(load_results(W4A16.upper(), "vLLM", "v6e"), [])


class LoadRecordTest(RentedRigCase):
    def record(self) -> LoadRecord:
        return LoadRecord(self.assembled().context)

    def test_before_the_first_there_is_none(self) -> None:
        self.assertEqual(self.record().rows(), [])
        self.assertFalse(self.record().path.exists())

    def test_a_trial_is_kept_with_where_it_was_made(self) -> None:
        self.record().add(W4A16, "vllm/vllm-tpu@sha256:00", False, "it ended")
        (row,) = self.record().rows()
        self.assertEqual((row.weights, row.loads, row.cause), (W4A16, False, "it ended"))
        self.assertEqual((row.engine, row.chip, row.kind), ("vLLM", "v6e", "measured"))
        self.assertTrue(row.source.startswith(f"{self.rig.name} "))
        self.assertRegex(row.date, r"\A20\d\d-\d\d-\d\d\Z")
        self.assertEqual(self.record().path.stat().st_mode & 0o077, 0)

    def test_a_cause_is_clean_and_bounded(self) -> None:
        self.record().add(E2B, "i", False, f"\x1b[31m{CANARY}\n" + "x" * 5000)
        text = self.record().path.read_text()
        self.assertEqual(text.count("\n"), 1, "a cause became a line of its own")
        self.assertNotIn(CANARY, text)
        self.assertLess(len(self.record().rows()[0].cause), 700)

    def test_lines_that_cannot_be_read_hide_no_other(self) -> None:
        self.record().add(E2B, "one", True, "")
        with self.record().path.open("ab") as file:
            for line in (
                b"{half",
                b"null",
                b"[]",
                b"7",
                b'{"weights": 7}',
                b"\xff\xfe",
                b"[" * 100_000,
                b"",
            ):
                file.write(line + b"\n")
        self.record().add(E2B, "two", True, "")
        self.assertEqual([row.how for row in self.record().rows()], ["one", "two"])

    def test_the_newest_are_shown(self) -> None:
        for number in range(40):
            self.record().add(E2B, str(number), True, "")
        shown = [row.how for row in self.record().rows()]
        self.assertEqual(shown, [str(number) for number in range(10, 40)])

    def test_it_cannot_be_written(self) -> None:
        self.record().path.mkdir(parents=True)
        with self.assertRaises(OSError):
            self.record().add(E2B, "i", True, "")
        self.assertEqual(self.record().rows(), [])

    async def test_the_tool_shows_both_and_tells_them_apart(self) -> None:
        self.record().add(Q4_0, "vllm/vllm-tpu@sha256:00", True, "")
        async with self.calling() as caller:
            shown = await caller.ok("get_load_matrix")
        rows = [LoadRow.model_validate(row) for row in shown["rows"]]
        self.assertEqual([row.kind for row in rows].count("imported"), len(LOAD_MATRIX))
        self.assertEqual((rows[-1].kind, rows[-1].weights), ("measured", Q4_0))
        self.assertEqual(shown["summary"], f"1 trials of this rig, {len(LOAD_MATRIX)} of others.")
        for row in rows:
            self.assertTrue(row.source and row.date)
        self.assertEqual({row.chip for row in rows}, {"v6e"}, "the rig's own chip is named")


if __name__ == "__main__":
    unittest.main()
