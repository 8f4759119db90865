"""The real thing: the real `transformers serve` and a real, if tiny, Gemma 4, through MCP.

The built server over stdio; weights that are made on the spot, and the embedded model out of its
package. What the rig reports is held against what transformers itself generates.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import unittest
from pathlib import Path
from typing import Any

import platformdirs
from mcp import Client

from forge.suites.rig_case import RigCase, RigUnderTest, use_rig
from tests.tiny_gemma4 import CHAT_TEMPLATE

ROOT = Path(__file__).resolve().parent.parent
RIG_FOLDER = ROOT / "local-pytorch-cpu-2b"
EMBEDDED_FOLDER = "SmolLM2-135M-Instruct"
# Where the demo or an earlier run has left it; looked up before the test's own folders hold.
EMBEDDED_READY = Path(platformdirs.user_cache_dir("gemma4-rigs")) / "models" / EMBEDDED_FOLDER
STARTS_AT_MOST = 8  # waits of 50 seconds: importing torch takes a busy machine its time

PROMPTS = ("Say hello.", "What is the capital of France?", "Zürich, 東京 and a ✓")
NEW_TOKENS = 24

# Greedy generation by transformers alone, in a process of its own: the reference.
_REFERENCE = """
import json, sys
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

folder, prompts, system, limit = json.loads(sys.argv[1])
tokenizer = AutoTokenizer.from_pretrained(folder)
model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
answers = []
for prompt in prompts:
    messages = [{"role": "system", "content": system}] if system else []
    messages.append({"role": "user", "content": prompt})
    inputs = tokenizer.apply_chat_template(
        messages, add_generation_prompt=True, return_tensors="pt", return_dict=True
    )
    length = inputs["input_ids"].shape[1]
    with torch.no_grad():
        new = model.generate(**inputs, max_new_tokens=limit, do_sample=False)[0][length:]
    answers.append([length, len(new), tokenizer.decode(new, skip_special_tokens=True)])
print(json.dumps(answers))
"""


def setUpModule() -> None:
    use_rig(RigUnderTest(RIG_FOLDER, {}))


def plain(text: str) -> str:
    """`text` without blanks at its ends, which the server's parser of answers takes away."""
    return text.strip()


WITHOUT_A_TENSOR = """
import sys
from safetensors.torch import load_file, save_file
path, part = sys.argv[1:]
kept = {name: tensor for name, tensor in load_file(path).items() if part not in name}
save_file(kept, path, metadata={"format": "pt"})
"""


class RealServingCase(RigCase):
    """A rig with the real runtime; the first lines of a start are Python's, torch's import is."""

    fake_on_path = False

    @classmethod
    def python(cls, *arguments: str) -> str:
        """Run this Python in the rig's surroundings; its output. AssertionError when it fails."""
        done = subprocess.run(
            [sys.executable, *arguments],
            env={**cls.environment, "HF_HUB_OFFLINE": "1"},
            cwd=ROOT,
            capture_output=True,
            text=True,
            timeout=600,
        )
        assert done.returncode == 0, done.stderr[-3000:]
        return done.stdout

    async def bring_up(self, client: Client, **arguments: Any) -> list[str]:
        """Serve and wait until ready, however long it takes; returns what progress was told."""
        told: list[str] = []

        async def tell(_progress: float, _total: float | None, message: str | None) -> None:
            told.append(message or "")

        outcome = await self.answer(client, "serve_model", **arguments)
        for _ in range(STARTS_AT_MOST):
            result = await client.call_tool(
                "wait_for_model_ready", {"wait_s": 50}, progress_callback=tell
            )
            self.assertFalse(result.is_error, result.content)
            outcome = dict(result.structured_content or {})
            if outcome["state"] != "starting":
                break
        self.assertEqual(outcome["state"], "ready", outcome)
        return told


class TinyGemmaTests(RealServingCase):
    """A random Gemma 4 with all of E2B's features, served and compared."""

    @classmethod
    def setUpClass(cls) -> None:
        super().setUpClass()
        cls.model = str(cls.place / "models" / "tiny-gemma4")
        cls.python("-m", "tests.tiny_gemma4", cls.model)
        cls.write_settings(
            MODEL_NAME=cls.model, PORT=str(cls.port), DTYPE="float32", MAX_MODEL_LEN="512"
        )

    def reference(self, prompts: tuple[str, ...], system: str, limit: int) -> list[list[Any]]:
        """[prompt tokens, new tokens, text] of each prompt, by transformers itself."""
        wanted = json.dumps([self.model, prompts, system, limit])
        return list(json.loads(self.python("-c", _REFERENCE, wanted).splitlines()[-1]))

    async def test_a_gemma_4_is_served_measured_and_stopped(self) -> None:
        async with self.over_stdio() as client:
            told = await self.bring_up(client)
            phases = {message.partition(":")[0] for message in told}
            self.assertTrue({"load"} <= phases, told)
            await self._details_are_those_of_the_files(client)
            await self._answers_are_those_of_transformers(client)
            await self._random_weights_are_not_healthy(client)
            self.assertIn("get_server_logs", str((await client.list_tools()).tools))
            self.assertTrue(await self.text(client, "get_server_logs"))
            await self.answer(client, "stop_model")
            await self.assert_all_gone()

    async def _details_are_those_of_the_files(self, client: Client) -> None:
        details = await self.answer(client, "get_model_details")
        self.assertEqual(details["architecture"], "Gemma4ForCausalLM")
        self.assertIn("per-layer embedding table", details["beside"])
        self.assertEqual((details["dtype"], details["planned_context"]), ("float32", 512))
        size = sum(path.stat().st_size for path in Path(self.model).glob("*.safetensors"))
        self.assertAlmostEqual(details["weights_gb"], size / 1e9, delta=0.0006)
        status = await self.answer(client, "get_system_status")
        self.assertEqual([status["pid"]], self.processes("server"))
        self.assertIn("not subtracted", status["memory"])

    async def _answers_are_those_of_transformers(self, client: Client) -> None:
        system = "You are brief."
        expected = self.reference(PROMPTS, system, NEW_TOKENS)
        self.assertGreater(len({text for *_, text in expected}), 1, "one answer to everything")
        for prompt, (prompt_tokens, new_tokens, text) in zip(PROMPTS, expected, strict=True):
            for tool in ("query_gemma4", "query_gemma4_with_stats"):
                answer = await self.answer(
                    client, tool, prompt=prompt, system=system, max_tokens=NEW_TOKENS
                )
                self.assertEqual(answer["prompt_tokens"], prompt_tokens, prompt)
                self.assertEqual(answer["completion_tokens"], new_tokens, prompt)
                self.assertEqual(plain(answer["text"]), plain(text), prompt)
                whole = "length" if new_tokens == NEW_TOKENS else "stop"
                self.assertEqual(answer["finish_reason"], whole)
            self.assertTrue(answer["complete"])
            self.assertLessEqual(answer["ttft_s"], answer["total_s"])
            rate = answer["completion_tokens"] / answer["total_s"]
            self.assertAlmostEqual(answer["tokens_per_s"], rate, delta=0.02 * rate)

    async def _random_weights_are_not_healthy(self, client: Client) -> None:
        health = await self.answer(client, "verify_model_health")
        self.assertFalse(health["healthy"])
        self.assertRegex(health["reason"], "wrong|cut off")
        self.assertIn(health["reason"], health["summary"])
        self.assertTrue(health["answer"].strip())

    async def test_as_it_is_published_within_a_multimodal_wrapper(self) -> None:
        wrapped = str(self.place / "models" / "tiny-gemma4-wrapped")
        self.python("-m", "tests.tiny_gemma4", wrapped, "--wrapped")
        async with self.over_stdio() as client:
            await self.bring_up(client, model=wrapped)
            details = await self.answer(client, "get_model_details")
            self.assertEqual(details["architecture"], "Gemma4ForConditionalGeneration")
            self.assertEqual(details["folder"], wrapped)
            self.assertIn("per-layer embedding table", details["beside"])
            # The same weights under other names: the same answer.
            ((_, count, text),) = self.reference(PROMPTS[:1], "", NEW_TOKENS)
            answer = await self.answer(
                client, "query_gemma4", prompt=PROMPTS[0], max_tokens=NEW_TOKENS
            )
            self.assertEqual((answer["completion_tokens"]), count)
            self.assertEqual(plain(answer["text"]), plain(text))
            await self.answer(client, "stop_model")
            await self.assert_all_gone()

    async def test_without_its_chat_template_it_is_refused(self) -> None:
        bare = Path(shutil.copytree(self.model, self.place / "models" / "bare"))
        (bare / "chat_template.jinja").unlink()
        async with self.over_stdio() as client:
            text = await self.refusal(client, "serve_model", "INVALID", model=str(bare))
            self.assertIn("chat template", text)
            self.assertEqual(self.processes(), [])
            (bare / "chat_template.jinja").write_text(CHAT_TEMPLATE)
            await self.answer(client, "get_system_status")

    async def _refused_start(self, client: Client, model: Path) -> tuple[str, str]:
        """Start `model`, which must fail: the job's id and the text of the refusal."""
        begun = await self.answer(client, "serve_model", model=str(model))
        for _ in range(STARTS_AT_MOST):
            result = await client.call_tool("wait_for_model_ready", {"wait_s": 50})
            if result.is_error or (result.structured_content or {})["state"] != "starting":
                break
        text = "".join(item.text for item in result.content if item.type == "text")
        self.assertTrue(result.is_error, text)
        return begun["job_id"], text

    async def test_a_checkpoint_without_some_of_its_tensors(self) -> None:
        """transformers would fill them with random numbers and serve."""
        holed = Path(shutil.copytree(self.model, self.place / "models" / "holed"))
        self.python("-c", WITHOUT_A_TENSOR, str(holed / "model.safetensors"), ".1.mlp.up_proj.")
        async with self.over_stdio() as client:
            _, text = await self._refused_start(client, holed)
            self.assertTrue(text.startswith("INVALID "), text)
            self.assertIn("model.layers.1.mlp.up_proj.weight", text)
            await self.assert_all_gone()

    async def test_a_checkpoint_that_the_real_loader_refuses(self) -> None:
        """It passes every check of ours, and fails where only the engine can know it."""
        broken = Path(shutil.copytree(self.model, self.place / "models" / "broken"))
        config = json.loads((broken / "config.json").read_text())
        config["hidden_size"] = 96  # no tensor fits any more
        (broken / "config.json").write_text(json.dumps(config))
        async with self.over_stdio() as client:
            job_id, text = await self._refused_start(client, broken)
            self.assertTrue(text.startswith("INTERNAL "), text)
            self.assertIn("get_server_logs()", text)
            job = await self.answer(client, "get_job", job_id=job_id)
            self.assertEqual(job["state"], "failed")
            self.assertIn("Traceback", await self.text(client, "get_server_logs", lines=400))
            await self.assert_all_gone()


class EmbeddedModelTests(RealServingCase):
    """The model of the demo: out of its package, converted once, and it knows Paris."""

    async def test_the_embedded_model_answers_rightly(self) -> None:
        self.write_settings(MODEL_NAME="embedded", PORT=str(self.port))
        async with self.over_stdio() as client:
            await self._converted_or_copied(client)
            await self.bring_up(client)
            health = await self.answer(client, "verify_model_health")
            self.assertTrue(health["healthy"], health)
            self.assertIn("Paris", health["answer"])
            details = await self.answer(client, "get_model_details")
            self.assertEqual(details["architecture"], "LlamaForCausalLM")
            self.assertEqual(details["beside"], "")
            answer = await self.answer(
                client, "query_gemma4", prompt="Count from 1 to 3.", max_tokens=16
            )
            self.assertTrue(answer["text"].strip())
            await self.answer(client, "stop_model")
            await self.assert_all_gone()

    async def _converted_or_copied(self, client: Client) -> None:
        """The converted folder of an earlier run if there is one; else the real way to it."""
        target = Path(self.environment["XDG_CACHE_HOME"]) / "gemma4-rigs/models" / EMBEDDED_FOLDER
        if EMBEDDED_READY.is_dir():
            target.parent.mkdir(parents=True)
            shutil.copytree(EMBEDDED_READY, target)
            return
        result = await client.call_tool("serve_model", {"wait_s": 50})
        text = str(result.content)
        while not result.is_error and (result.structured_content or {})["state"] == "starting":
            result = await client.call_tool("wait_for_model_ready", {"wait_s": 50})
            text = str(result.content)
        if result.is_error and "UNREACHABLE pip could not fetch" in text:
            raise unittest.SkipTest(f"no package index that holds the embedded model: {text[:300]}")
        self.assertFalse(result.is_error, text)
        self.assertTrue((target / "config.json").exists())
        left = {path.name for path in target.parent.iterdir() if path.suffix != ".lock"}
        kept = {EMBEDDED_FOLDER, f"{EMBEDDED_FOLDER}.Q4_1.gguf"}  # llama.cpp serves the file itself
        self.assertEqual(left, kept, "a download or half a conversion was left")
        self.assertGreater(os.stat(target / "model.safetensors").st_size, 200_000_000)
