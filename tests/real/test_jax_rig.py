"""The rig with the real JAX engine, through MCP: served, asked, measured, killed, refused, stopped.

The built local-jax-cpu-2b over stdio, with the random Gemma 4 that it makes for itself and with a
tiny one in the wrapper that releases have. What it answers is held against transformers.
"""

from __future__ import annotations

import asyncio
import json
import os
import signal
import socket
import time
import unittest
import urllib.error
import urllib.request
from pathlib import Path
from typing import Any

from mcp import Client

from forge.suites.jax_rig import JAX_WORDS
from forge.suites.rig_case import PATIENCE_S, RigUnderTest, use_rig
from tests import test_real_serving

RIG_FOLDER = test_real_serving.ROOT / "local-jax-cpu-2b"
WAITS_AT_MOST = 12  # of 50 seconds: a first start compiles every shape
NEW_TOKENS = 32
TIE = 0.002  # of logits: the order of sums can turn a closer choice round
PROMPTS = ("Say hello.", "What is the capital of France?", "Zürich, 東京 and a ✓", "word " * 180)

# Greedy generation by transformers alone, in a process of its own: the reference. Of each prompt
# its tokens, and the text up to the first choice that is nearly a tie.
_REFERENCE = """
import json, sys
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

folder, prompts, limit, tie = json.loads(sys.argv[1])
tokenizer = AutoTokenizer.from_pretrained(folder)
model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
answers = []
for prompt in prompts:
    inputs = tokenizer.apply_chat_template(
        [{"role": "user", "content": prompt}], add_generation_prompt=True, return_tensors="pt",
        return_dict=True,
    )
    length = inputs["input_ids"].shape[1]
    with torch.no_grad():
        out = model.generate(
            **inputs, max_new_tokens=limit, do_sample=False, output_logits=True,
            return_dict_in_generate=True,
        )
    new = out.sequences[0][length:].tolist()
    for step, logits in enumerate(out.logits):
        first, second = logits[0].topk(2).values.tolist()
        if first - second < tie:
            new = new[:step]
            break
    answers.append([length, len(new), tokenizer.decode(new, skip_special_tokens=True)])
print(json.dumps(answers))
"""


def can_be_bound(port: int) -> bool:
    """Whether nobody holds the port any more."""
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(("127.0.0.1", port))
        except OSError:
            return False
    return True


def setUpModule() -> None:
    use_rig(RigUnderTest(RIG_FOLDER, {}, words=JAX_WORDS))


class RealJaxCase(test_real_serving.RealServingCase):
    """A rig of its own with the engine that it carries, and the packages of this Python."""

    async def waited(self, client: Client) -> Any:
        """The result of waiting for a start to end, well or not."""
        for _ in range(WAITS_AT_MOST):
            result = await client.call_tool("wait_for_jax_ready", {"wait_s": 50})
            if result.is_error or (result.structured_content or {})["state"] != "starting":
                break
        return result

    async def brought_up(self, client: Client, model: str) -> None:
        """Serve `model` and wait until it is ready."""
        await self.answer(client, "serve_model", model=model)
        result = await self.waited(client)
        self.assertFalse(result.is_error, result.content)
        self.assertEqual((result.structured_content or {})["state"], "ready", result.content)

    def compiled(self) -> set[str]:
        """The files of the compile cache that hold programs."""
        folder = Path(self.environment["XDG_CACHE_HOME"]) / "gemma4-rigs" / "jax"
        return {path.name for path in folder.rglob("*") if path.name.endswith("-cache")}


class EmbeddedGemmaTests(RealJaxCase):
    """The random Gemma 4, from nothing to its end, and once more."""

    async def test_it_is_served_asked_measured_killed_and_served_again(self) -> None:
        async with self.over_stdio() as client:
            await self.brought_up(client, "embedded")
            details = await self.answer(client, "get_model_details")
            self.assertIn("its answers mean nothing", details["beside"])
            self.assertEqual(details["resolved"]["max_model_len"], "4096")
            await self._answers_are_those_of_transformers(client, details["folder"])
            await self._it_is_not_called_healthy(client)
            self._a_key_is_asked_for()
            await self._it_counts(client)
            await self._it_is_measured(client)
            found = await self.answer(client, "analyze_logs")
            self.assertEqual(found["summary"], "no failure found")
            await self._killed(client)
            before = self.compiled()
            self.assertGreaterEqual(len(before), 5)
            await self.brought_up(client, "embedded")
            self.assertEqual(self.compiled(), before, "a second start compiled anew")
            await self.answer(client, "stop_model")
            await self.assert_all_gone()

    async def _answers_are_those_of_transformers(self, client: Client, folder: str) -> None:
        asked = json.dumps([folder, PROMPTS, NEW_TOKENS, TIE])
        expected = json.loads(self.python("-c", _REFERENCE, asked).splitlines()[-1])
        compared = 0
        for prompt, (prompt_tokens, new_tokens, text) in zip(PROMPTS, expected, strict=True):
            for tool in ("query_gemma4", "query_gemma4_with_stats"):
                answer = await self.answer(client, tool, prompt=prompt, max_tokens=NEW_TOKENS)
                self.assertEqual(answer["prompt_tokens"], prompt_tokens, prompt)
                self.assertEqual(answer["completion_tokens"], NEW_TOKENS, prompt)
                self.assertEqual(answer["finish_reason"], "length")
                self.assertEqual(answer["text"][: len(text)], text, prompt)
            compared += new_tokens
        self.assertGreater(compared, len(PROMPTS) * NEW_TOKENS / 2, "too many ties to compare")

    async def _it_is_not_called_healthy(self, client: Client) -> None:
        health = await self.answer(client, "verify_model_health")
        self.assertFalse(health["healthy"])
        self.assertEqual(health["model"], "random-gemma-4")

    def _a_key_is_asked_for(self) -> None:
        for path, status in (("/v1/models", 401), ("/metrics", 401), ("/health", 200)):
            try:
                with urllib.request.urlopen(f"http://127.0.0.1:{self.port}{path}") as reply:
                    self.assertEqual(reply.status, status, path)
            except urllib.error.HTTPError as error:
                self.assertEqual(error.code, status, path)

    async def _it_counts(self, client: Client) -> None:
        before = (await self.answer(client, "get_metrics"))["load"]
        await self.answer(client, "query_gemma4", prompt="Say hello.", max_tokens=5)
        after = await self.answer(client, "get_metrics", match="compiles_after_start")
        figures = after["load"]
        made = figures["generation_tokens_total"] - before["generation_tokens_total"]
        self.assertEqual(made, 5)
        self.assertGreater(figures["prompt_tokens_total"], before["prompt_tokens_total"])
        self.assertEqual((figures["running"], figures["waiting"]), (0, 0))
        self.assertEqual(list(after["series"].values()), [0.0], "it compiled while it served")

    async def _it_is_measured(self, client: Client) -> None:
        job = await self.answer(
            client,
            "run_benchmark",
            concurrency=[1, 4],
            context_tokens=[64],
            output_tokens=16,
            requests_per_cell=4,
            seconds_per_cell=20,
            save_result=False,
        )
        while job["state"] in ("queued", "running"):
            job = await self.answer(client, "get_job", job_id=job["job_id"], wait_s=50)
        self.assertEqual(job["state"], "done", job)
        cells = job["result"]["cells"]
        self.assertEqual(len(cells), 2)
        self.assertFalse([cell for cell in cells if "failed" in cell], cells)

    async def _killed(self, client: Client) -> None:
        (pid,) = self.processes("server")
        os.kill(pid, signal.SIGKILL)
        deadline = time.monotonic() + PATIENCE_S
        # Its threads end one after the other; until the last has, its number and port are taken.
        gone = f"(pid {pid}) has ended by itself"
        status: dict[str, Any] = {}
        while gone not in " ".join(status.get("notes", [])) or not can_be_bound(self.port):
            self.assertLess(time.monotonic(), deadline, status)
            await asyncio.sleep(0.2)
            status = await self.answer(client, "get_system_status")
        self.assertEqual(status["state"], "stopped")


class WrappedGemmaTests(RealJaxCase):
    """A tiny Gemma 4 as releases publish it, and what only the engine finds wrong with one."""

    async def test_within_a_multimodal_wrapper(self) -> None:
        wrapped = str(self.place / "models" / "wrapped")
        self.python("-m", "tests.tiny_gemma4", wrapped, "--wrapped")
        self.write_settings(PORT=str(self.port), MAX_MODEL_LEN="256", SLOTS="1", DTYPE="bfloat16")
        async with self.over_stdio() as client:
            await self.brought_up(client, wrapped)
            details = await self.answer(client, "get_model_details")
            self.assertEqual(details["architecture"], "Gemma4ForConditionalGeneration")
            self.assertEqual((details["dtype"], details["planned_context"]), ("bfloat16", 256))
            answer = await self.answer(client, "query_gemma4", prompt="Say hello.", max_tokens=8)
            self.assertGreater(answer["completion_tokens"], 0)
            await self.answer(client, "stop_model")
            await self.assert_all_gone()

    async def test_a_checkpoint_that_only_the_engine_finds_wanting(self) -> None:
        tiny = self.place / "models" / "holed"
        self.python("-m", "tests.tiny_gemma4", str(tiny))
        script = test_real_serving.WITHOUT_A_TENSOR
        self.python("-c", script, str(tiny / "model.safetensors"), ".1.mlp.up_proj.")
        self.write_settings(PORT=str(self.port), MAX_MODEL_LEN="256")
        async with self.over_stdio() as client:
            await self.answer(client, "serve_model", model=str(tiny))
            result = await self.waited(client)
            text = "".join(item.text for item in result.content if item.type == "text")
            self.assertTrue(result.is_error, text)
            self.assertTrue(text.startswith("INTERNAL "), text)
            self.assertIn("layers.1.mlp.up_proj.weight", text)
            self.assertIn("layers.1.mlp.up_proj", await self.text(client, "get_server_logs"))
            await self.assert_all_gone()


if __name__ == "__main__":
    unittest.main()
