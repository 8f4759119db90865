"""Every way in which a start can fail: its class, its reason, the next call, and nothing left.

After a crash the same server starts the model once more, and it comes up.
"""

from __future__ import annotations

import time
from unittest import mock

from mcp import Client

from forge.suites.rig_case import RigCase, spelled
from forge.suites.witness import free_port


class StartFaultSuite(RigCase):
    """A start that fails says why, in the log's own words, and leaves no process."""

    async def _fails(self, client: Client, error_class: str, *words: str) -> str:
        """serve_model fails so; afterwards nothing runs, status and wait tell the same story."""
        text = await self.refusal(client, "serve_model", error_class, wait_s=50)
        for word in words:
            self.assertIn(word, text)
        self.assertIn(" Next: ", text)
        await self.assert_all_gone()
        status = await self.answer(client, "get_system_status")
        self.assertIn(status["state"], ("stopped", "failed"))
        self.assertIsNone(status["pid"])
        return text

    async def test_a_crash_while_it_loads(self) -> None:
        self.engine.script(crash="the tensor 'lm_head' does not fit")
        async with self.in_process() as client:
            text = await self._fails(client, "INTERNAL", "RuntimeError", "does not fit")
            self.assertIn(f"{spelled('get_server_logs')}()", text)
            self.assertIn("Traceback", await self.text(client, "get_server_logs"))
            again = await self.refusal(client, "wait_for_model_ready", "INTERNAL")
            self.assertIn("does not fit", again)
            jobs = (await self.answer(client, "get_system_status"))["jobs"]
            job = await self.answer(client, "get_job", job_id=jobs[0].partition(":")[0])
            self.assertEqual((job["state"], job["phase"]), ("failed", "load"))
            self.assertTrue(job["error"].startswith("INTERNAL "), job)
            self.engine.script()
            await self.serve(client)

    async def test_it_listens_but_every_generation_fails(self) -> None:
        self.engine.script(fault="status 500", words="no kernel for this device")
        async with self.in_process() as client:
            await self._fails(client, "INTERNAL", "500", "no kernel for this device")

    async def test_the_first_answer_is_empty(self) -> None:
        self.engine.script(fault="empty")
        async with self.in_process() as client:
            await self._fails(client, "INTERNAL", "no token")

    async def test_it_listens_but_never_becomes_healthy(self) -> None:
        self.write_runner("short.py", "server._LOAD_PATIENCE_S = 1.0")
        self.engine.script(health=503)
        async with self.in_process(server_file="short.py") as client:
            await self._fails(client, "TIMEOUT", "did not load")

    async def test_it_never_listens(self) -> None:
        self.write_runner("short.py", "server._LOAD_PATIENCE_S = 1.0")
        self.engine.script(never_listens=True)
        async with self.in_process(server_file="short.py") as client:
            words = ("did not load in 1 s", f"{spelled('get_server_logs')}()")
            await self._fails(client, "TIMEOUT", *words)

    async def test_it_ignores_the_signal_to_end(self) -> None:
        self.engine.script(ignores_sigterm=True)
        async with self.in_process() as client:
            await self.serve(client)
            begun = time.monotonic()
            # Ten seconds of patience in real life; the act after them is what is tested.
            with mock.patch.object(self.module, "_STOP_PATIENCE_S", 0.4):
                await self.answer(client, "stop_model")
            self.assertGreaterEqual(time.monotonic() - begun, 0.4, "it was killed unasked")
            await self.assert_all_gone()

    async def test_a_model_whose_tensors_were_made_up_is_not_ready(self) -> None:
        row = "model.layers.3.mlp.up_proj.weight | MISSING | "
        self.engine.script(log=f"Key | Status | \n{row}\n\n- MISSING: newly initialized")
        async with self.in_process() as client:
            await self._fails(client, "INVALID", "not whole", "model.layers.3.mlp.up_proj.weight")
            await self.assert_all_gone()
            self.engine.script()
            await self.serve(client)
            await self.answer(client, "stop_model")

    async def test_a_package_is_missing_or_of_another_release(self) -> None:
        metadata = self.engine.folder / "torch-2.13.0.dist-info" / "METADATA"
        good = metadata.read_text()
        try:
            async with self.in_process() as client:
                metadata.write_text(good.replace("2.13.0", "1.0"))
                await self._fails(client, "NOT_FOUND", "torch", "1.0", "2.13.", "launch.py install")
                metadata.write_text(good.replace("2.13.0", ""))
                await self._fails(
                    client, "NOT_FOUND", "torch", "not installed", "launch.py install"
                )
        finally:
            metadata.write_text(good)

    async def test_a_setting_changes_the_port_of_the_next_start(self) -> None:
        async with self.in_process() as client:
            await self.answer(client, "get_system_status")
            other = free_port()
            self.write_settings(MODEL_NAME=self.model, PORT=str(other))
            try:
                outcome = await self.serve(client)
                self.assertEqual(outcome["endpoint"], f"http://127.0.0.1:{other}/v1")
            finally:
                self.write_settings(MODEL_NAME=self.model, PORT=str(self.port))
