"""What the planner says to a rig of llama.cpp that makes room for all its slots at its start.

Through the rig's own plan.py, asked by the tool and by what refuses a rental; the figures of E2B
are those that the planner's own tests hold against reports.
"""

from __future__ import annotations

import asyncio
import contextlib
import io
import os
import shutil
import tempfile
import unittest
from collections.abc import Callable
from pathlib import Path
from typing import Any, ClassVar, cast
from unittest import mock

from mcp import Client

from forge.parts.assembly.rig import AssembledRig, Rig
from forge.parts.ground.errors import RigError
from forge.parts.runtimes.llama_machine import LlamaMachine, LlamaMachineSettings
from forge.parts.toolsets.planning import PlanningToolset, plan_defaults
from forge.parts.toolsets.starts import refuse_planned
from tests.rig_programs import write_programs

RIG_NAME = "gpu-llamacpp-g5g-2b-q4_0"
MODEL = "google/gemma-4-E2B-it-qat-q4_0-gguf"
MIB = 2**20


class NoPlane:
    """A place that is never asked anything here."""

    vocabulary: ClassVar[dict[str, str]] = {"place": "the rented GPU machine", "cost": "Nothing"}


class LlamaPlanCase(unittest.IsolatedAsyncioTestCase):
    """The planning toolset of such a rig, in a folder of its own."""

    folder: ClassVar[Path]

    @classmethod
    def setUpClass(cls) -> None:
        cls.folder = Path(tempfile.mkdtemp(prefix="llama-plan-"))
        cls.addClassCleanup(shutil.rmtree, cls.folder, ignore_errors=True)
        state = {"XDG_STATE_HOME": str(cls.folder / "s"), "XDG_CACHE_HOME": str(cls.folder / "c")}
        keys = {name.upper() for name in LlamaMachineSettings.model_fields}
        kept = {key: value for key, value in os.environ.items() if key not in keys}
        patch = mock.patch.dict(os.environ, kept | state, clear=True)
        patch.start()
        cls.addClassCleanup(patch.stop)
        (cls.folder / "server.py").write_text("# stands for the built server\n")
        write_programs(cls.folder)

    async def asyncSetUp(self) -> None:
        asyncio.get_running_loop().set_debug(False)  # a busy machine's slow steps are no news

    def rig(self, **values: Any) -> AssembledRig:
        given = {"MODEL_NAME": MODEL, **values}
        (self.folder / "tpu.env").write_text("".join(f"{k}={v}\n" for k, v in given.items()))
        rig = Rig(
            name=RIG_NAME,
            about="Plans.",
            order="None.",
            settings=LlamaMachineSettings,
            plane_words={},
            make_plane=cast(Any, lambda *_: NoPlane()),
            make_runtime=lambda load, _: LlamaMachine(
                cast(Callable[[], LlamaMachineSettings], load)
            ),
            toolsets=(PlanningToolset,),
        )
        with contextlib.redirect_stderr(io.StringIO()):
            return AssembledRig(rig, self.folder / "server.py")

    async def plan(self, /, rig: AssembledRig, **arguments: Any) -> dict[str, Any]:
        async with Client(rig.server()) as client:
            result = await client.call_tool("plan_deployment", arguments)
        self.assertFalse(result.is_error, result.content)
        return dict(result.structured_content or {})

    async def refusal(self, override: bool = False, **values: Any) -> RigError | None:
        """What keeps a machine from being rented with these settings."""
        context = self.rig(**values).context
        try:
            await refuse_planned(context, str(values.get("MODEL_NAME", MODEL)), override)
        except RigError as error:
            return error
        return None


class TestDefaults(LlamaPlanCase):
    def test_slots_context_and_cache_are_the_settings(self) -> None:
        found = plan_defaults(self.rig(SLOTS="6", CONTEXT_PER_SLOT="16384").context)
        self.assertEqual((found.streams, found.context, found.kv_dtype), (6, 16_384, "fp16"))
        self.assertEqual((found.runtime, found.hardware), ("llamacpp", "g5g"))
        self.assertEqual(plan_defaults(self.rig(CACHE_TYPE="q8_0").context).kv_dtype, "auto")


class TestVerdicts(LlamaPlanCase):
    async def test_the_usual_settings_fit_and_leave_most_of_the_card(self) -> None:
        self.assertIsNone(await self.refusal())
        told = await self.plan(self.rig(), concurrency=4)
        self.assertTrue(told["fits"])
        weights = told["memory_bytes"]["weights, all"]
        # A report of the same file on another Turing card: 1341.78 MiB of weights on the GPU.
        self.assertAlmostEqual(weights / (1341.78 * MIB), 1.0, delta=0.02)
        self.assertLess(weights, 0.1 * told["memory_bytes"]["visible"])
        # 6 KiB for each token over three full layers, and the windows of twelve.
        self.assertEqual(told["memory_bytes"]["cache, one more token"], 6 * 1024)

    async def test_what_is_claimed_is_room_and_not_speed(self) -> None:
        told = await self.plan(self.rig())
        words = " ".join(told["assumptions"])
        self.assertIn("nothing of llama.cpp was measured on that card", words)
        self.assertIn("is the gain, not speed", words)
        self.assertIn("per-layer embeddings stay in the host's memory", words)

    async def test_every_slot_has_room_from_the_start_so_all_are_counted(self) -> None:
        self.assertIsNone(await self.refusal(SLOTS="16", CONTEXT_PER_SLOT="131072"))
        error = await self.refusal(SLOTS="32", CONTEXT_PER_SLOT="131072")
        assert error is not None
        self.assertEqual(error.error_class, "CAPACITY")
        self.assertIn("the cache of 32 x 131072 tokens", error.what)
        self.assertIn("25.97", error.what)

    async def test_what_would_fit_is_said_by_the_rigs_own_keys(self) -> None:
        error = await self.refusal(SLOTS="32", CONTEXT_PER_SLOT="131072")
        assert error is not None and error.next_step is not None
        self.assertRegex(error.next_step, r"set CONTEXT_PER_SLOT=\d+")
        self.assertRegex(error.next_step, r"set SLOTS=\d+")
        self.assertNotIn("MAX_MODEL_LEN", error.next_step)
        self.assertNotIn("override", error.next_step)

    async def test_the_settings_that_it_names_do_fit(self) -> None:
        error = await self.refusal(SLOTS="32", CONTEXT_PER_SLOT="131072")
        assert error is not None and error.next_step is not None
        found = dict(
            word.split("=")
            for word in error.next_step.replace(";", " ").split()
            if word.startswith(("SLOTS=", "CONTEXT_PER_SLOT="))
        )
        self.assertEqual(set(found), {"SLOTS", "CONTEXT_PER_SLOT"})
        self.assertEqual(int(found["CONTEXT_PER_SLOT"]) % 256, 0)
        asked = {"SLOTS": "32", "CONTEXT_PER_SLOT": "131072"}
        for key, value in found.items():
            self.assertIsNone(await self.refusal(**{**asked, key: value}), (key, value))

    async def test_more_than_the_card_is_refused_whatever_anybody_wants(self) -> None:
        values = {"SLOTS": "32", "CONTEXT_PER_SLOT": "131072"}
        self.assertIsNotNone(await self.refusal(override=True, **values))

    async def test_larger_models_of_the_same_container(self) -> None:
        larger = {"SLOTS": "2", "CONTEXT_PER_SLOT": "8192"}
        for size, fits in (("E4B", True), ("12B", True), ("31B", False)):
            name = f"google/gemma-4-{size}-it-qat-q4_0-gguf"
            error = await self.refusal(MODEL_NAME=name, **larger)
            self.assertEqual(error is None, fits, (name, error))


if __name__ == "__main__":
    unittest.main()
