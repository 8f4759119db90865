"""What fits on one NVIDIA L4 under vLLM: the planner's answers for the rig on EC2 g6.

By its arithmetic, by plan.py as the program that it is, and through the toolset of a rig of that
name with that runtime's settings, which is what a create tool asks before it rents.
"""

from __future__ import annotations

import asyncio
import json
import os
import shutil
import subprocess
import sys
import tempfile
import unittest
from dataclasses import replace
from pathlib import Path
from typing import Any, ClassVar, cast
from unittest import mock

from mcp import Client

from forge.parts.assembly.rig import AssembledRig
from forge.parts.ground.errors import RigError
from forge.parts.knowledge.memory import weight_bytes
from forge.parts.knowledge.models import GEMMA4
from forge.parts.knowledge.plan_answer import PlannedDeployment, PlanQuestion, PlanRefusal
from forge.parts.knowledge.planner_answers import plan_answer
from forge.parts.knowledge.planner_memory import hybrid_pages
from forge.parts.runtimes.vllm_cuda_docker import VllmCudaDocker, VllmCudaDockerSettings
from forge.parts.toolsets.planning import PlanningToolset
from forge.rigs.local_pytorch_cpu_2b import RIG
from tests.rig_programs import write_programs

GIB = 2**30
VISIBLE = 22.03 * GIB  # bytes of an L4 that CUDA counts
E2B = "google/gemma-4-E2B-it"
E2B_W4 = "google/gemma-4-E2B-it-qat-w4a16-ct"
E4B = "google/gemma-4-E4B-it"
B12 = "google/gemma-4-12B-it"
B12_FP8 = "vrfai/gemma-4-12B-it-fp8"
B12_W4 = "google/gemma-4-12B-it-qat-w4a16-ct"
B31_W4 = "google/gemma-4-31B-it-qat-w4a16-ct"
KEYS = tuple(key.upper() for key in VllmCudaDockerSettings.model_fields)


def question(model: str, context: int = 65_536, **more: Any) -> PlanQuestion:
    """What the rig asks with its own settings, and with these."""
    own: dict[str, Any] = {"utilization": 0.9, "batched_tokens": 2048, "settings": KEYS}
    return PlanQuestion(model, "g6", "vllm", context=context, **(own | more))


def planned(model: str, context: int = 65_536, **more: Any) -> PlannedDeployment:
    answer = plan_answer(question(model, context, **more))
    assert answer.plan is not None, answer.fault
    return answer.plan


def refused(model: str, context: int = 65_536, **more: Any) -> PlanRefusal:
    answer = plan_answer(question(model, context, **more))
    assert answer.refusal is not None, answer.plan
    return answer.refusal


class ArithmeticTest(unittest.TestCase):
    """Bytes, summed up here in another way where that can be."""

    def test_e2b_fits_as_it_is_published(self) -> None:
        plan = planned(E2B)
        self.assertTrue(plan.fits)
        memory = plan.memory_bytes
        self.assertEqual(memory["visible"], round(VISIBLE))
        model = GEMMA4["E2B"]
        towers = model.vision_tower.known("vision") + model.audio_tower.known("audio")
        whole = weight_bytes(model.geometry, "bf16", dead_kv=True) + towers
        self.assertAlmostEqual(memory["weights, all"], whole, delta=10)
        self.assertAlmostEqual(memory["weights, all"] / 1e9, 10.24, delta=0.01)
        # weights, overhead and pool are all of what the engine may take
        spent = memory["weights, all"] + memory["engine's overhead"] + memory["cache pool"]
        self.assertAlmostEqual(spent, 0.9 * VISIBLE, delta=10)
        self.assertGreater(plan.streams_at_context, 22)

    def test_e2b_keeps_its_whole_context_and_more_streams_with_an_eight_bit_cache(self) -> None:
        one = planned(E2B, 131_072)
        two = planned(E2B, 131_072, kv_dtype="fp8")
        self.assertTrue(one.fits and two.fits)
        self.assertAlmostEqual(two.streams_at_context / one.streams_at_context, 2, delta=0.01)

    def test_12b_as_it_is_published_is_more_than_the_card_has(self) -> None:
        for context in (256, 16_384):
            refusal = refused(B12, context)
            self.assertTrue(refusal.hard)  # bytes do not yield
            self.assertIn("23.81 GB of 23.65 GB", refusal.what)
        self.assertGreater(weight_bytes(GEMMA4["12B"].geometry, "bf16"), VISIBLE)

    def test_12b_made_eight_bit_while_loading_is_refused_with_its_story(self) -> None:
        refusal = refused(B12, 16_384, encoding="fp8")
        for words in (
            "made while loading",
            "bf16 model built first",
            "21.61 GiB",
            "dev.to, 12B Gemma 4 on Cloud Run",
            "vLLM 0.32.0",
            "bf16 weights before quantisation while loading 10.90",
        ):
            self.assertIn(words, refusal.what)
        # One trial is no arithmetic, and the present release does otherwise by its source.
        self.assertFalse(refusal.hard)
        self.assertIn("override=true", refusal.next_step)
        # It names the two checkpoints that are stored so already, and what to unset for them.
        for repo in (B12_FP8, B12_W4):
            words = f"serve model='{repo}' and leave QUANTIZATION empty"
            self.assertIn(words, refusal.next_step)

    def test_a_checkpoint_in_eight_or_four_bits_fits_and_with_which_context(self) -> None:
        # weights in GB; streams of 16,384 tokens and of all positions, in a 16-bit and 8-bit cache
        for model, weights, short, whole in (
            (B12_FP8, 13.01, (3, 7), (1, 3)),
            (B12_W4, 8.25, (6, 12), (3, 6)),
        ):
            for cache, index in (("auto", 0), ("fp8", 1)):
                for context, streams in ((16_384, short[index]), (131_072, whole[index])):
                    plan = planned(model, context, kv_dtype=cache)
                    self.assertTrue(plan.fits, (model, cache, context))
                    self.assertEqual(int(plan.streams_at_context), streams, (model, cache, context))
                    size = plan.memory_bytes["weights, all"] / 1e9
                    self.assertAlmostEqual(size, weights, delta=0.01)
        # It is the positions that end a context there, not the memory.
        longer = refused(B12_FP8, 131_073)
        self.assertFalse(longer.hard)
        self.assertIn("131072 positions", longer.what)
        self.assertNotIn("for a cache of which", longer.what)
        self.assertIn("set MAX_MODEL_LEN=131072", longer.next_step)

    def test_the_two_published_boots_had_these_blocks(self) -> None:
        for cache, element, blocks in (("fp8", 1, 13_278), ("auto", 2, 6_695)):
            plan = planned(B12_FP8, 16_384, kv_dtype=cache, batched_tokens=4096)
            block = hybrid_pages(GEMMA4["12B"].geometry, element).block_bytes
            self.assertAlmostEqual(plan.memory_bytes["cache pool"] / block / blocks, 1, delta=0.006)

    def test_what_the_export_carries_twice_is_only_there_while_loading(self) -> None:
        memory = planned(B12_W4, 16_384).memory_bytes
        more = memory["weights at the loading peak"] - memory["weights, all"]
        self.assertEqual(more, 2 * 262_144 * 3840)

    def test_31b_in_four_bits_leaves_no_room_for_a_cache(self) -> None:
        refusal = refused(B31_W4, 1024)
        self.assertFalse(refusal.hard)
        self.assertIn("for a cache", refusal.what)

    def test_eight_bit_weights_of_e2b_may_be_made_while_loading(self) -> None:
        plan = planned(E2B, encoding="fp8")
        self.assertTrue(plan.fits)
        self.assertLess(plan.memory_bytes["weights at the loading peak"], VISIBLE)
        said = " ".join(plan.assumptions)
        self.assertIn("fp8 is made from a bf16 checkpoint while loading", said)
        self.assertIn("nobody is known to have tried", said)

    def test_of_four_bit_weights_none_are_made(self) -> None:
        refusal = refused(E2B_W4, encoding="fp8")
        self.assertIn("made of 16-bit weights alone", refusal.what)
        words = f"serve model='{E2B_W4}' and leave QUANTIZATION empty"
        self.assertIn(words, refusal.next_step)

    def test_the_setting_is_named_where_it_would_help(self) -> None:
        # Three conversations of all positions are more than E4B in bf16 leaves room for.
        refusal = refused(E4B, 131_072, streams=3)
        self.assertIn("set QUANTIZATION=fp8", refusal.next_step)
        self.assertIn("set KV_CACHE_DTYPE=fp8", refusal.next_step)
        self.assertTrue(planned(E4B, 131_072, streams=3, encoding="fp8").fits)
        # A rig without that setting is not told to set it.
        keys = tuple(key for key in KEYS if key != "QUANTIZATION")
        self.assertNotIn("QUANTIZATION", refused(E4B, 131_072, streams=3, settings=keys).next_step)

    def test_what_is_known_to_be_wrong_there_is_said(self) -> None:
        self.assertIn("vllm-project/vllm#50159", " ".join(planned(E2B).assumptions))
        elsewhere = plan_answer(replace(question(E2B), hardware="v6e1")).plan
        assert elsewhere is not None
        self.assertNotIn("#50159", " ".join(elsewhere.assumptions))


class ProgramTest(unittest.TestCase):
    """plan.py, as a person runs it before there is any rig."""

    folder: ClassVar[Path]

    @classmethod
    def setUpClass(cls) -> None:
        cls.folder = Path(tempfile.mkdtemp(prefix="plan-l4-"))
        cls.addClassCleanup(shutil.rmtree, cls.folder, ignore_errors=True)
        write_programs(cls.folder)

    def run_plan(self, model: str, *more: str) -> tuple[int, str]:
        words = ["--model", model, "--hardware", "g6", "--engine", "vllm", "--context", "16384"]
        words += ["--utilization", "0.9", "--batched-tokens", "2048"]
        done = subprocess.run(
            [sys.executable, str(self.folder / "plan.py"), *words, *more],
            capture_output=True,
            text=True,
            timeout=60,
        )
        self.assertEqual(done.stderr, "")
        return done.returncode, done.stdout

    def test_its_verdicts_and_its_exit_status(self) -> None:
        for model, more, status, words in (
            (E2B, (), 0, "fits"),
            (B12, (), 1, "23.81 GB of 23.65 GB"),
            (B12, ("--encoding", "fp8"), 1, "made while loading"),
            (B12_FP8, (), 0, "fits"),
            (B12_W4, ("--kv-dtype", "fp8"), 0, "fits"),
        ):
            with self.subTest(model, more=more):
                found, text = self.run_plan(model, *more)
                self.assertEqual(found, status, text)
                self.assertIn(words, text)

    def test_the_change_that_it_names_can_be_run_and_fits(self) -> None:
        _, text = self.run_plan(B12)
        self.assertIn(f"--model {B12_FP8} --encoding fp8", text)
        status, text = self.run_plan(B12_FP8, "--encoding", "fp8", "--json")
        self.assertEqual(status, 0)
        self.assertTrue(json.loads(text)["plan"]["fits"])


class RigTest(unittest.IsolatedAsyncioTestCase):
    """The planning toolset of a rig of that name, with the runtime's own settings."""

    async def asyncSetUp(self) -> None:
        asyncio.get_running_loop().set_debug(False)

    def setUp(self) -> None:
        folder = tempfile.TemporaryDirectory(prefix="plan-g6-", ignore_cleanup_errors=True)
        self.addCleanup(folder.cleanup)
        self.folder = Path(folder.name)
        kept = {k: v for k, v in os.environ.items() if k not in KEYS}
        state = {"XDG_STATE_HOME": folder.name + "/s", "XDG_CACHE_HOME": folder.name + "/c"}
        patch = mock.patch.dict(os.environ, kept | state, clear=True)
        patch.start()
        self.addCleanup(patch.stop)
        (self.folder / "server.py").write_text("# stands for the built server\n")
        write_programs(self.folder)

    def assembled(self, **values: str) -> AssembledRig:
        """The rig with these lines in its tpu.env."""
        lines = {"MODEL_NAME": E2B} | values
        (self.folder / "tpu.env").write_text("".join(f"{k}={v}\n" for k, v in lines.items()))
        rig = replace(
            RIG,
            name="gpu-vllm-g6-2b",
            settings=VllmCudaDockerSettings,
            make_runtime=lambda load, paths: VllmCudaDocker(cast(Any, load)),
            toolsets=(PlanningToolset,),
        )
        return AssembledRig(rig, self.folder / "server.py")

    async def test_the_rig_as_it_ships_is_planned_by_its_own_values(self) -> None:
        async with Client(self.assembled().server()) as client:
            result = await client.call_tool("plan_deployment", {})
        assert result.structured_content is not None, result.content
        plan = result.structured_content
        self.assertTrue(plan["fits"])
        self.assertEqual(plan["memory_bytes"]["visible"], round(VISIBLE))
        self.assertIn("65536 tokens a stream", plan["assumptions"])
        self.assertIn("4096 tokens in flight", plan["kv_layout"])  # twice 2048, the rig's own

    async def test_what_a_create_tool_asks_passes_or_is_refused(self) -> None:
        toolset = PlanningToolset(self.assembled().context)
        await toolset.refuse_unfit(E2B)
        await toolset.refuse_unfit(B12_FP8)
        await toolset.refuse_unfit(B12_W4)
        for override in (False, True):
            with self.assertRaises(RigError) as caught:
                await toolset.refuse_unfit(B12, override=override)
            self.assertEqual(caught.exception.error_class, "CAPACITY")
            self.assertIn("23.81 GB of 23.65 GB", caught.exception.what)
            self.assertIn(f"serve model='{B12_W4}'", caught.exception.next_step)

    async def test_an_eight_bit_cache_is_the_rigs_own_setting(self) -> None:
        plain = await PlanningToolset(self.assembled().context).own_plan()
        small = await PlanningToolset(self.assembled(KV_CACHE_DTYPE="fp8").context).own_plan()
        assert plain.plan is not None and small.plan is not None
        self.assertAlmostEqual(
            small.plan.streams_at_context / plain.plan.streams_at_context, 2, delta=0.01
        )

    async def test_made_while_loading_is_planned_when_a_client_asks_for_it(self) -> None:
        async with Client(self.assembled(MODEL_NAME=B12).server()) as client:
            arguments = {"encoding": "fp8", "context": 16_384}
            result = await client.call_tool("plan_deployment", arguments)
        assert result.structured_content is not None, result.content
        plan = result.structured_content
        self.assertEqual((plan["fits"], plan["verdict"]), (False, "refused by an estimate"))
        self.assertIn("made while loading", plan["reasons"][0])
        self.assertIn(f"plan_deployment(model='{B12_FP8}', encoding='fp8'", plan["next_step"])


if __name__ == "__main__":
    unittest.main()
