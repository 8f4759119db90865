"""The real vLLM on this computer's CPU, through MCP: installed, served, asked, killed, stopped.

The environment and the embedded model are kept in RIG_REAL_CACHE, outside HOME; the first run gets
them, which takes minutes and 5 GB. One server for many checks, because a start takes half a minute.
What vLLM generates is held against what transformers itself generates.
"""

from __future__ import annotations

import asyncio
import contextlib
import io
import json
import os
import re
import signal
import subprocess
import sys
import tempfile
import time
import unittest
import urllib.error
import urllib.request
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any
from unittest import mock

import psutil
from mcp import Client

from forge.parts.assembly.rig import AssembledRig
from forge.parts.ground.process import LABEL_VARIABLE
from forge.parts.runtimes.vllm_cpu import VllmCpu
from forge.parts.runtimes.vllm_install import default_vllm_folder
from forge.parts.runtimes.vllm_log import resolved_engine_values
from forge.parts.toolsets.probe_tool_calls import TOOL_SCENARIOS
from forge.rigs.local_vllm_cpu_2b import RIG
from forge.suites.witness import free_port, rig_processes
from tests.real.taught_gemma4 import kept_taught_gemma4, lessons
from tests.rig_programs import write_programs

ROOT = Path(__file__).resolve().parents[2]
CACHE = Path(os.environ.get("RIG_REAL_CACHE") or "/var/cache/gemma4-rigs-real")
WAITS_AT_MOST = 24  # of 50 seconds each: a fresh install downloads a gigabyte
# Every name under which vLLM 0.32.0 counts: what drifts in a later release is seen here.
METRICS = ROOT / "tests" / "real" / "vllm_metrics_0.32.0.txt"
PROMPTS = ("Say hello.", "What is the capital of France?", "Zürich, 東京 and a ✓")
NEW_TOKENS = 24
REPEATS = 5  # of each of two load generators

SERVER = """\
import sys
sys.path.insert(0, {root!r})
from pathlib import Path
{preamble}
from forge.parts.assembly.command_line import run_rig
from forge.rigs.local_vllm_cpu_2b import RIG
sys.exit(run_rig(RIG, Path(__file__), sys.argv[1:]))
"""
# Address space for a whole start is some 9 GB; with this the worker cannot have its memory.
_TOO_LITTLE = """\
import resource
resource.setrlimit(resource.RLIMIT_AS, (3_300_000_000, 3_300_000_000))
"""

# Greedy generation by transformers alone, in a process of its own: the reference.
_REFERENCE = """
import json, sys
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

folder, prompts, limit = json.loads(sys.argv[1])
tokenizer = AutoTokenizer.from_pretrained(folder)
model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
model.generation_config.suppress_tokens = None  # vLLM knows no such thing
answers = []
for prompt in prompts:
    messages = [{"role": "user", "content": prompt}]
    inputs = tokenizer.apply_chat_template(
        messages, add_generation_prompt=True, return_tensors="pt", return_dict=True
    )
    length = inputs["input_ids"].shape[1]
    with torch.no_grad():
        new = model.generate(**inputs, max_new_tokens=limit, do_sample=False)[0][length:]
    answers.append([length, new.tolist()])
print(json.dumps(answers))
"""


class RealVllmCase(unittest.IsolatedAsyncioTestCase):
    """A rig with the real vLLM: its own state, the shared cache, everything ended at the end."""

    def setUp(self) -> None:
        folder = tempfile.TemporaryDirectory(prefix="vllm-real-", ignore_cleanup_errors=True)
        self.addCleanup(folder.cleanup)
        self.place = Path(folder.name).resolve()
        self.port = free_port()
        self.state = self.place / "state"
        self.rig_folder = self.place / "rig"
        self.rig_folder.mkdir()
        self.write_server("")
        write_programs(self.rig_folder)
        keys = {name.upper() for name in RIG.settings.model_fields}
        kept = {
            name: value
            for name, value in os.environ.items()
            if name not in keys and not name.startswith(("XDG_", "HF_", "VLLM_", "GEMMA4_"))
        }
        surroundings = {
            "XDG_STATE_HOME": str(self.state),
            "XDG_CACHE_HOME": str(CACHE),
            "VLLM_ENV": str(CACHE / default_vllm_folder().name),
            "PYTHONPATH": os.pathsep.join([str(ROOT), *filter(None, sys.path)]),
        }
        patch = mock.patch.dict(os.environ, kept | surroundings, clear=True)
        patch.start()
        self.addCleanup(patch.stop)
        self.addCleanup(self.end_everything)

    async def asyncSetUp(self) -> None:
        asyncio.get_running_loop().set_debug(False)

    def write_server(self, preamble: str) -> None:
        text = SERVER.format(root=str(ROOT), preamble=preamble)
        (self.rig_folder / "server.py").write_text(text)

    def write_settings(self, model: str, **values: str) -> None:
        # Eager: a start of half a minute instead of two, with the same words.
        lines = {"MODEL_NAME": model, "PORT": str(self.port), "ENFORCE_EAGER": "1", **values}
        text = "".join(f"{key}={value}\n" for key, value in lines.items())
        (self.rig_folder / "tpu.env").write_text(text)

    def family(self) -> list[psutil.Process]:
        """Every process that carries the label of this rig's model server, children too."""
        found = []
        for process in psutil.process_iter():
            with contextlib.suppress(psutil.Error):
                environment = process.environ()
                label = environment.get(LABEL_VARIABLE, "")
                mine = environment.get("VLLM_API_KEY", "?") == self.key()
                if mine and "role=server" in label:
                    found.append(process)
        return found

    def key(self) -> str:
        known = list(self.state.rglob("vllm-api-key"))
        return known[0].read_text().strip() if known else ""

    def end_everything(self) -> None:
        for process in [*map(psutil.Process, rig_processes(self.state)), *self.family()]:
            with contextlib.suppress(psutil.Error):
                process.kill()
                process.wait(10)

    def assembled(self) -> AssembledRig:
        with contextlib.redirect_stderr(io.StringIO()):
            return AssembledRig(RIG, self.rig_folder / "server.py")

    @contextlib.asynccontextmanager
    async def client(self) -> AsyncIterator[Client]:
        async with Client(self.assembled().server()) as client:
            failure = None
            try:
                yield client
            except AssertionError as error:
                failure = error
        if failure is not None:
            raise failure

    async def answer(self, client: Client, tool: str, /, **arguments: Any) -> dict[str, Any]:
        result = await client.call_tool(tool, arguments)
        self.assertFalse(result.is_error, f"{tool}: {result.content}")
        return dict(result.structured_content or {})

    async def text(self, client: Client, tool: str, /, **arguments: Any) -> str:
        result = await client.call_tool(tool, arguments)
        return "".join(item.text for item in result.content if item.type == "text")

    async def until(self, what: Callable[[], Any], why: str, patience_s: float = 60.0) -> Any:
        deadline = time.monotonic() + patience_s
        while not (value := what()):
            if time.monotonic() > deadline:
                self.fail(why)
            await asyncio.sleep(0.2)
        return value

    async def installed(self, client: Client) -> None:
        """vLLM in the cache: an earlier run's, or installed now by the rig's own tool."""
        for _ in range(WAITS_AT_MOST):
            outcome = await self.answer(client, "install_vllm", wait_s=50)
            if outcome["state"] != "installing":
                break
        self.assertEqual(outcome["state"], "installed", outcome)

    async def brought_up(self, client: Client) -> dict[str, Any]:
        outcome = await self.answer(client, "serve_model", wait_s=50)
        for _ in range(WAITS_AT_MOST):
            if outcome["state"] != "starting":
                break
            outcome = await self.answer(client, "wait_for_vllm_ready", wait_s=50)
        self.assertEqual(outcome["state"], "ready", outcome)
        return outcome

    def ask(self, path: str, body: dict[str, Any] | None = None, *, key: str = "") -> Any:
        """The status of a refusal, else the body: an object, or text where it is none."""
        headers = {"Content-Type": "application/json"}
        headers |= {"Authorization": f"Bearer {key}"} if key else {}
        data = None if body is None else json.dumps(body).encode()
        request = urllib.request.Request(f"http://127.0.0.1:{self.port}{path}", data, headers)
        try:
            with urllib.request.urlopen(request, timeout=120) as reply:
                text = reply.read().decode()
        except urllib.error.HTTPError as error:
            return error.code
        try:
            return json.loads(text)
        except ValueError:
            return text

    async def finished(self, client: Client, tool: str, **arguments: Any) -> dict[str, Any]:
        """A job from the tool that starts it to its end, which must be a good one."""
        begun = await self.answer(client, tool, **arguments)
        for _ in range(WAITS_AT_MOST):
            job = await self.answer(client, "get_job", job_id=begun["job_id"], wait_s=50)
            if job["state"] not in ("queued", "running"):
                break
        self.assertEqual(job["state"], "done", job)
        return job

    def python(self, *arguments: str) -> str:
        done = subprocess.run(
            [sys.executable, *arguments],
            env={**os.environ, "HF_HUB_OFFLINE": "1"},
            cwd=ROOT,
            capture_output=True,
            text=True,
            timeout=600,
        )
        self.assertEqual(done.returncode, 0, done.stderr[-3000:])
        return done.stdout

    def same_tokens(self, model: str, prompt: str, length: int, ids: list[int]) -> None:
        body = {
            "model": model,
            "messages": [{"role": "user", "content": prompt}],
            "max_tokens": NEW_TOKENS,
            "temperature": 0,
            "return_token_ids": True,
        }
        answer = self.ask("/v1/chat/completions", body, key=self.key())
        self.assertEqual(answer["usage"]["prompt_tokens"], length, prompt)
        self.assertEqual(answer["choices"][0]["token_ids"], ids, prompt)


class EmbeddedModelTests(RealVllmCase):
    """The small model of the demo: it knows Paris, and vLLM counts what it says."""

    async def test_installed_served_asked_and_stopped(self) -> None:
        self.write_settings("embedded", MAX_MODEL_LEN="1024", MAX_NUM_SEQS="4")
        async with self.client() as client:
            await self.installed(client)
            await self.brought_up(client)
            await self._it_answers(client)
            await self._a_key_is_asked_for(client)
            await self._everything_is_counted(client)
            await self._what_it_settled_on(client)
            await self._its_own_bench(client)
            await self._two_generators_agree(client)
            await self._what_the_probes_see(client)
            self._its_processes_are_known_and_on_loopback()
            family = self.family()
            await self.answer(client, "stop_model")
            _, alive = psutil.wait_procs(family, timeout=20)
            self.assertEqual(alive, [], "something of vLLM was left")
        self._the_key_is_in_its_file_alone()

    async def _it_answers(self, client: Client) -> None:
        health = await self.answer(client, "verify_model_health")
        self.assertTrue(health["healthy"], health)
        self.assertEqual(health["model"], "SmolLM2-135M-Instruct")
        measured = await self.answer(
            client, "query_gemma4_with_stats", prompt="Count from 1 to 40.", max_tokens=32
        )
        self.assertTrue(measured["complete"], measured)
        self.assertEqual((measured["completion_tokens"], measured["finish_reason"]), (32, "length"))
        self.assertGreater(measured["prompt_tokens"], 8)
        self.assertLess(measured["ttft_s"], measured["total_s"])
        answer = await self.answer(
            client, "query_vllm", prompt="The capital of France is", max_tokens=8
        )
        self.assertIn("Paris", answer["text"])
        self.assertEqual(answer["completion_tokens"], 8)

    async def _a_key_is_asked_for(self, client: Client) -> None:
        body = {"model": "SmolLM2-135M-Instruct", "prompt": "Hello", "max_tokens": 2}
        self.assertEqual(self.ask("/v1/models"), 401)
        self.assertEqual(self.ask("/v1/completions", body), 401)
        self.assertEqual(self.ask("/v1/completions", body, key="sk-" + "0" * 48), 401)
        listed = self.ask("/v1/models", key=self.key())
        self.assertEqual([m["id"] for m in listed["data"]], ["SmolLM2-135M-Instruct"])
        self.assertEqual(listed["data"][0]["max_model_len"], 1024)
        self.assertEqual(self.ask("/openapi.json"), 404)
        endpoint = await self.answer(client, "get_vllm_endpoint")
        self.assertEqual(endpoint["base_url"], f"http://127.0.0.1:{self.port}/v1")

    async def _everything_is_counted(self, client: Client) -> None:
        page = str(self.ask("/metrics"))
        names = set(re.findall(r"^(vllm:[a-z0-9_]+)[ {]", page, re.M))
        self.assertEqual(names, set(METRICS.read_text().split()), "vLLM counts by other names")
        runtime = self.assembled().context.runtime
        self.assertLessEqual(set(runtime.metric_names.values()), names)
        load = (await self.answer(client, "get_metrics"))["load"]
        self.assertEqual(load["missing"], [])
        self.assertGreaterEqual(load["generation_tokens_total"], 32 + 8)
        self.assertEqual((load["running"], load["waiting"]), (0, 0))

    async def _what_it_settled_on(self, client: Client) -> None:
        (log,) = self.state.rglob("logs/*.log")
        values = resolved_engine_values(log.read_text(errors="replace"))
        self.assertEqual(
            {name: values[name] for name in ("max_model_len", "dtype", "architecture")},
            {"max_model_len": "1024", "dtype": "bfloat16", "architecture": "LlamaForCausalLM"},
        )
        self.assertEqual(float(values["kv_cache_gib"]), 1.0)
        self.assertGreater(int(values["kv_cache_tokens"]), 4 * 1024)
        self.assertIn("max_concurrency", values)
        self.assertEqual(len(values["cores"].split(",")), len(os.sched_getaffinity(0)))
        self.assertIn("vLLM", (await self.answer(client, "get_model_details"))["engine"])

    async def _its_own_bench(self, client: Client) -> None:
        load = {"streams": 2, "requests": 6, "input_tokens": 32, "output_tokens": 8}
        result = (await self.finished(client, "run_bench_serve", **load))["result"]
        self.assertEqual((result["completed"], result["failed"]), (6, 0))
        for name in ("output_tokens_per_s", "median_ttft_ms", "median_tpot_ms"):
            self.assertGreater(result[name], 0, name)
        (file,) = self.state.rglob(f"benchmarks/reports/{result['report']}.json")
        report = json.loads(file.read_text())
        self.assertEqual(report["run"]["kind"], "imported")
        self.assertEqual(report["subject"]["short"], "smollm2-135m")
        (cell,) = report["cells"]
        self.assertEqual((cell["id"], cell["status"]), ("c2-i32-o8", "ok"))
        metrics = cell["metrics"]
        # By the server's usage, so exactly what was asked for.
        self.assertEqual(metrics["completion_tokens"]["mean"], 8)
        self.assertEqual(round(metrics["output_tps"], 3), result["output_tokens_per_s"])
        self.assertEqual(round(metrics["tpot_ms"]["median"], 3), result["median_tpot_ms"])
        (raw,) = report["raw"]
        (kept,) = self.state.rglob(f"benchmarks/{raw['path']}")
        self.assertEqual(json.loads(kept.read_text())["completed"], 6)
        self.assertNotIn("generated_texts", kept.read_text())

    async def _two_generators_agree(self, client: Client) -> None:
        """Our generator and vLLM's, in turns, so that a machine that slows down slows both.

        They differ by definition. Ours asks for a chat (the template is part of its prompt tokens,
        and the first token is the first content), theirs for a plain completion of random tokens
        (the first token is the first chunk). Ours warms up with three requests of other prompts,
        theirs with one for each stream, all with the first prompt, which a prefix cache then knows.
        Our rate is over the span in which both streams ran, theirs over the whole run. So the time
        to the first token is told, and not held against each other.
        """
        found: dict[str, list[tuple[float, float, float]]] = {"ours": [], "theirs": []}
        for _ in range(REPEATS):
            found["ours"].append(await self._our_figures(client))
            found["theirs"].append(await self._their_figures(client))
        told, apart = [], []
        for place, figure in enumerate(("output tokens/s", "ttft in ms", "tpot in ms")):
            spreads = {}
            for who, runs in found.items():
                values = sorted(run[place] for run in runs)
                low, high = spreads[who] = (values[0], values[-1])
                told.append(f"{figure}, {who}: {values[len(values) // 2]} ({low} to {high})")
            (low, high), (other_low, other_high) = spreads.values()
            # Ranges that meet: the medians lie no farther apart than the two spreads reach.
            if not (low <= other_high and other_low <= high):
                apart.append(figure)
        print(f"\n{REPEATS} runs each, in turns: {'; '.join(told)}", file=sys.stderr)
        self.assertLessEqual(set(apart), {"ttft in ms"}, told)

    async def _our_figures(self, client: Client) -> tuple[float, float, float]:
        """Output tokens/s, median ttft and tpot in ms of one run of our generator."""
        load: dict[str, Any] = {"concurrency": [2], "context_tokens": [64], "output_tokens": 16}
        load |= {"requests_per_cell": 8, "save_result": False}
        job = await self.finished(client, "run_vllm_benchmark", **load)
        (line,) = job["result"]["cells"]
        read = re.match(
            r"c2-i64-o16: (\S+) output tokens/s, median ttft (\S+) ms, tpot (\S+) ms, 8/8 done",
            line,
        )
        self.assertIsNotNone(read, line)
        assert read is not None
        rate, ttft, tpot = map(float, read.groups())
        return rate, ttft, tpot

    async def _their_figures(self, client: Client) -> tuple[float, float, float]:
        """The same of one run of vLLM's own tool, with the same shape."""
        load: dict[str, Any] = {"streams": 2, "input_tokens": 64, "output_tokens": 16}
        load |= {"requests": 8, "save_result": False}
        result = (await self.finished(client, "run_bench_serve", **load))["result"]
        self.assertEqual((result["completed"], result["failed"], result["report"]), (8, 0, ""))
        names = ("output_tokens_per_s", "median_ttft_ms", "median_tpot_ms")
        rate, ttft, tpot = (float(result[name]) for name in names)
        return rate, ttft, tpot

    async def _what_the_probes_see(self, client: Client) -> None:
        """A schema is enforced, and a model that is served without a tool-call parser calls none.

        That its template has no switch for thinking is no refusal by vLLM, which takes the switch
        all the same: the probe must not call this a pass.
        """
        job = await self.finished(client, "probe_capabilities", cases=["tools", "schema"])
        table, verdicts = "\n".join(job["result"]["table"]), job["result"]["verdicts"]
        schema = {"schema_thinking_off": "pass", "schema_thinking_on": "untested"}
        tools = {scenario.case: "unsupported" for scenario in TOOL_SCENARIOS}
        self.assertEqual(verdicts, {**tools, **schema}, table)
        self.assertEqual(table.count("--tool-call-parser"), len(tools), table)

    def _its_processes_are_known_and_on_loopback(self) -> None:
        """vLLM renames its processes, which must not wipe out the label; nor may they be heard."""
        family = self.family()
        names = {process.name() for process in family}
        self.assertTrue({"VLLM::EngineCore", "VLLM::Worker"} <= names, names)
        heard = {
            connection.laddr.ip
            for process in family
            for connection in process.net_connections(kind="inet")
            if connection.status == psutil.CONN_LISTEN
        }
        self.assertEqual(heard, {"127.0.0.1"})

    def _the_key_is_in_its_file_alone(self) -> None:
        files = [path for path in self.state.rglob("*") if path.is_file()]
        holders = [path.name for path in files if self.key() in path.read_text(errors="replace")]
        self.assertEqual(holders, ["vllm-api-key"])


class TinyGemmaTests(RealVllmCase):
    """A random Gemma 4 within a multimodal wrapper, as the releases are, with E2B's features."""

    def reference(self, folder: str) -> list[list[Any]]:
        """[prompt tokens, new ids] of each prompt, by transformers itself."""
        wanted = json.dumps([folder, PROMPTS, NEW_TOKENS])
        return list(json.loads(self.python("-c", _REFERENCE, wanted).splitlines()[-1]))

    async def test_its_greedy_tokens_are_those_of_transformers_until_it_is_killed(self) -> None:
        plain, wrapped = (str(self.place / name) for name in ("plain", "wrapped"))
        self.python("-m", "tests.tiny_gemma4", plain)
        self.python("-m", "tests.tiny_gemma4", wrapped, "--wrapped")
        self.write_settings(wrapped, DTYPE="float32", MAX_MODEL_LEN="512")
        async with self.client() as client:
            await self.installed(client)
            await self.brought_up(client)
            details = await self.answer(client, "get_model_details")
            self.assertEqual(details["architecture"], "Gemma4ForConditionalGeneration")
            for prompt, (length, ids) in zip(PROMPTS, self.reference(plain), strict=True):
                self.same_tokens(wrapped, prompt, length, ids)
            await self._parsers_are_on(client, wrapped)
            await self._killed(client)

    async def _parsers_are_on(self, client: Client, model: str) -> None:
        """Tools may be named in a request, and an answer may be bound to a form."""
        schema = {"type": "object", "properties": {"n": {"type": "integer"}}, "required": ["n"]}
        tool = {"type": "function", "function": {"name": "count", "parameters": schema}}
        body = {
            "model": model,
            "messages": [{"role": "user", "content": "Count."}],
            "max_tokens": 16,
            "temperature": 0,
        }
        for more in ({"tools": [tool], "tool_choice": "auto"}, {"include_reasoning": True}):
            answer = self.ask("/v1/chat/completions", {**body, **more}, key=self.key())
            self.assertIsInstance(answer, dict, f"{more} was refused: {answer}")
        log = await self.text(client, "get_vllm_logs", lines=2000)
        self.assertIn('"auto" tool choice has been enabled', log)

    async def _killed(self, client: Client) -> None:
        """The worker dies, as when memory runs out: vLLM ends by itself, and the rig says so."""
        family = self.family()
        (worker,) = [process for process in family if process.name() == "VLLM::Worker"]
        worker.send_signal(signal.SIGKILL)
        psutil.wait_procs(family, timeout=60)
        await self.until(lambda: not self.family(), "something of vLLM lives on")
        status = await self.answer(client, "get_system_status")
        self.assertEqual(status["state"], "stopped", status)
        self.assertIn("ended by itself", " ".join(status["notes"]))
        # What lives on says what died: the reason stands in vLLM's own log.
        found = await self.answer(client, "analyze_logs")
        self.assertEqual((found["kind"], found["stage"]), ("runner_killed", "memory"), found)
        # None: vLLM may look before the system has told it how the worker ended.
        self.assertRegex(found["line"], r"died unexpectedly \(exit code: (-9|None)\)")
        await self.answer(client, "stop_model")


class TaughtGemmaTests(RealVllmCase):
    """A Gemma 4 that makes calls and thinks: what vLLM's parsers for Gemma 4 make of both."""

    async def test_calls_and_thoughts_come_out_parsed(self) -> None:
        model = str(kept_taught_gemma4())
        self.write_settings(model, DTYPE="float32", MAX_MODEL_LEN="1024")
        async with self.client() as client:
            await self.installed(client)
            await self.brought_up(client)
            job = await self.finished(client, "probe_capabilities", cases=["tools", "schema"])
            table, verdicts = "\n".join(job["result"]["table"]), job["result"]["verdicts"]
            cases = [scenario.case for scenario in TOOL_SCENARIOS]
            cases += ["schema_thinking_off", "schema_thinking_on"]
            self.assertEqual(verdicts, dict.fromkeys(cases, "pass"), table)
            self._streamed(model)
            await self.answer(client, "stop_model")

    def _streamed(self, model: str) -> None:
        """The same in pieces: a call's name first, then its arguments; thoughts before words."""
        for given, said in lessons():
            with self.subTest(said):
                asked = dict(given)
                body = {
                    "model": model,
                    "messages": [{"role": "user", "content": asked.pop("question")}],
                    "max_tokens": 256,
                    "temperature": 0,
                    "stream": True,
                }
                if "tools" in asked:
                    body |= {"tools": asked["tools"], "tool_choice": "auto"}
                body["chat_template_kwargs"] = {"enable_thinking": "enable_thinking" in asked}
                self.assertEqual(self._gathered(body), self._expected(said))

    def _expected(self, said: str) -> dict[str, Any]:
        """What `said` is to come out as: its reasoning, its calls, its words."""
        thought = re.match(r"<\|channel>thought\n(.*)<channel\|>", said)
        calls = re.findall(r'call:(\w+)\{city:<\|"\|>(\w+)<', said)
        return {
            "reasoning": thought[1] if thought else "",
            "calls": [(name, {"city": city}) for name, city in calls],
            "content": "" if calls else said[thought.end() if thought else 0 :],
        }

    def _gathered(self, body: dict[str, Any]) -> dict[str, Any]:
        """A stream's deltas put together."""
        text = self.ask("/v1/chat/completions", body, key=self.key())
        self.assertIsInstance(text, str, text)
        reasoning, content, calls = "", "", dict[int, list[str]]()
        for line in text.splitlines():
            if not line.startswith("data: {"):
                continue
            for choice in json.loads(line[6:])["choices"]:
                delta = choice["delta"]
                reasoning += delta.get("reasoning") or delta.get("reasoning_content") or ""
                content += delta.get("content") or ""
                for piece in delta.get("tool_calls") or []:
                    known = calls.setdefault(piece["index"], ["", ""])
                    known[0] += piece["function"].get("name") or ""
                    known[1] += piece["function"].get("arguments") or ""
        made = [(name, json.loads(arguments)) for _, (name, arguments) in sorted(calls.items())]
        return {"reasoning": reasoning, "calls": made, "content": content}


class OtherKindsTests(RealVllmCase):
    """Gemma 4 12B's rule (values from keys) and 26B's (experts), tiny and random."""

    async def test_their_greedy_tokens_are_those_of_transformers(self) -> None:
        told = self.python(
            *("-m", "tests.real.tiny_variants", str(self.place / "models")),
            *(json.dumps(PROMPTS), str(NEW_TOKENS)),
        )
        expected: dict[str, list[list[Any]]] = json.loads(told.splitlines()[-1])
        for variant in ("12b", "moe"):
            with self.subTest(variant):
                model = str(self.place / "models" / variant)
                self.write_settings(model, DTYPE="float32", MAX_MODEL_LEN="512")
                async with self.client() as client:
                    await self.installed(client)
                    await self.brought_up(client)
                    for prompt, (given, ids, _) in zip(PROMPTS, expected[variant], strict=True):
                        self.same_tokens(model, prompt, len(given), ids)
                    await self.answer(client, "stop_model")


class FailingStartTests(RealVllmCase):
    """A start that the real vLLM refuses: its reason comes back, and nothing is left."""

    async def test_too_little_memory(self) -> None:
        self.write_settings("embedded", MAX_MODEL_LEN="1024")
        async with self.client() as client:
            await self.installed(client)
            self.write_server(_TOO_LITTLE)
            result = await client.call_tool("serve_model", {"wait_s": 50})
            for _ in range(WAITS_AT_MOST):
                if result.is_error or (result.structured_content or {})["state"] != "starting":
                    break
                result = await client.call_tool("wait_for_vllm_ready", {"wait_s": 50})
            said = "".join(item.text for item in result.content if item.type == "text")
            self.assertTrue(result.is_error, said)
            self.assertTrue(said.startswith("INTERNAL "), said)
            log = await self.text(client, "get_vllm_logs", lines=2000)
            self.assertRegex(log, r"(?i)cannot allocate memory|can't allocate memory|MemoryError")
            await self.until(lambda: not self.family(), "something of vLLM lives on")
            self.assertEqual((await self.answer(client, "get_system_status"))["pid"], None)
            found = await self.answer(client, "analyze_logs")
            self.assertTrue(found["found"], found)
            self.assertEqual(found["stage"], "memory", found)
            self.assertRegex(found["line"], r"(?i)memory")

    async def test_a_runtime_that_is_the_real_one(self) -> None:
        self.write_settings("embedded")
        runtime = self.assembled().context.runtime
        assert isinstance(runtime, VllmCpu)
        async with self.client() as client:
            await self.installed(client)
        needs = {need.name: need for need in await runtime.needs()}
        self.assertIn("0.32.0+cpu", needs["vLLM in an environment of its own"].detail)
        record = json.loads(runtime.environment().marker.read_text())
        self.assertEqual(record["state"], "complete")
        self.assertGreater(record["bytes"], 2_000_000_000)


if __name__ == "__main__":
    unittest.main()
