"""What the tools about the JAX engine make of a machine's answers: of its chip, of a release.

The machine's side is tried in tests/test_jax_boot.py, both together in the rig's own suite.
"""

from __future__ import annotations

import asyncio
import json
import tempfile
import unittest
from collections.abc import Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

from forge.parts.ground.errors import RigError
from forge.parts.ground.journal import Journal
from forge.parts.toolsets.jax_engine import JaxEngineToolset, device_facts
from forge.parts.toolsets.starts import PLAN_CHECK
from forge.parts.toolsets.toolset import RigContext
from forge.suites.fake_jax_host import FAKE_CHIP

SEEN = {**FAKE_CHIP, "at": 1_795_000_000, "serving": False}


class Machine:
    """The plane's verbs, which say `said` and note what they were asked."""

    def __init__(self, said: str) -> None:
        self.said = said
        self.asked: list[Any] = []

    async def deliver(self, release: Mapping[str, Any], timeout_s: float) -> str:
        self.asked.append(("deliver", release["sha256"]))
        return self.said

    async def act_on_host(self, act: str, timeout_s: float, **arguments: str | int | bool) -> str:
        self.asked.append(act)
        return self.said

    def mark_unready(self, note: str = "") -> None:
        self.asked.append("unready")


class Case(unittest.TestCase):
    def tools(self, said: str, **extras: Any) -> tuple[JaxEngineToolset, Machine]:
        machine = Machine(said)
        folder = Path(self.enterContext(tempfile.TemporaryDirectory()))
        context = SimpleNamespace(
            plane=machine,
            runtime=SimpleNamespace(release=lambda: {"sha256": "ab" * 32}),
            vocabulary={"ready": "jax", "docker": "jax_server"},
            settings=SimpleNamespace(model_name="google/gemma-4-E2B-it-qat-w4a16-ct"),
            journal=Journal(folder / "journal.jsonl"),
            extras=extras,
        )
        self.journal = folder / "journal.jsonl"
        return JaxEngineToolset(cast(RigContext, context)), machine


class TestDeploy(Case):
    def test_what_serves_has_to_prove_itself_anew(self) -> None:
        tools, machine = self.tools("noise\nrelease ab12 is laid down and is being started\n")
        told = asyncio.run(tools.deploy_jax_server())
        self.assertEqual(machine.asked, ["unready", ("deliver", "ab" * 32)])
        self.assertEqual((told.sha256, told.rollback), ("ab" * 32, False))
        self.assertEqual(told.next_step, "wait_for_jax_ready(wait_s=50)")
        self.assertIn("engine deployed", self.journal.read_text())

    def test_a_rollback_sends_nothing(self) -> None:
        tools, machine = self.tools("release cd34 is laid down and is being started")
        told = asyncio.run(tools.deploy_jax_server(rollback=True))
        self.assertEqual(machine.asked, ["unready", "rollback"])
        self.assertEqual((told.sha256, told.rollback), ("", True))
        self.assertTrue(told.summary.startswith("Release cd34"))

    def test_what_does_not_fit_goes_nowhere(self) -> None:
        async def refuse(model: str, override: bool) -> None:
            self.assertFalse(override)
            raise RigError("CAPACITY", f"{model} needs more than there is")

        tools, machine = self.tools("", **{PLAN_CHECK: refuse})
        with self.assertRaisesRegex(RigError, "needs more"):
            asyncio.run(tools.deploy_jax_server())
        self.assertEqual(machine.asked, [])


class TestVerify(Case):
    def told(self, **changes: Any) -> Any:
        tools, _ = self.tools(json.dumps({**SEEN, **changes}))
        return asyncio.run(tools.verify_jax_tpu())

    def test_the_rate_stands_beside_the_chips_own(self) -> None:
        told = self.told()
        self.assertTrue(told.fits)
        self.assertEqual((told.memory_gib, told.tflops), (15.75, 151.3))
        self.assertAlmostEqual(told.share_of_peak, 151.3 / 197, 3)
        self.assertIn("77% of the chip's 197", told.summary)
        self.assertEqual(told.next_step, "manage_jax_server(action='start')")
        self.assertTrue(told.measured_at.startswith("2026-11-"))

    def test_of_a_chip_that_is_in_no_table_no_share_is_told(self) -> None:
        told = self.told(kind="TPU v9")
        self.assertIsNone(told.share_of_peak)
        self.assertNotIn("chip's", told.summary)

    def test_while_the_engine_serves_it_is_from_before(self) -> None:
        told = self.told(serving=True)
        self.assertTrue(told.serving)
        self.assertIn("before the engine took the chip", told.summary)
        self.assertEqual(told.next_step, "wait_for_jax_ready(wait_s=50)")

    def test_another_device_does_not_fit(self) -> None:
        self.assertFalse(self.told(platform="cpu", kind="cpu").fits)
        self.assertFalse(self.told(right=False).fits)

    def test_nothing_measured_and_the_chip_taken(self) -> None:
        with self.assertRaises(RigError) as caught:
            device_facts('{"serving": true}')
        self.assertEqual(caught.exception.error_class, "BUSY")
        self.assertIn("stop", caught.exception.next_step)

    def test_what_cannot_be_read_is_said(self) -> None:
        broken = [json.dumps({k: v for k, v in SEEN.items() if k != gone}) for gone in SEEN]
        for text in ("", "[]", "words", '{"count": "many"}', *broken):
            with self.assertRaises(RigError, msg=text) as caught:
                device_facts(text)
            self.assertEqual(caught.exception.error_class, "UNKNOWN", text)


if __name__ == "__main__":
    unittest.main()
