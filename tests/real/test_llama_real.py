"""The real llama-server on this computer's CPU, through MCP: built, served, asked, killed, stopped.

The program, its source and the embedded model are kept in RIG_REAL_CACHE, outside HOME; the first
run builds, which takes minutes. What llama.cpp generates is held against what transformers itself
generates, and what the rig plans against what the system says of the process.
"""

from __future__ import annotations

import asyncio
import contextlib
import io
import json
import os
import signal
import socket
import subprocess
import sys
import tempfile
import unittest
import urllib.request
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any
from unittest import mock

import psutil
from mcp import Client

from forge.parts.assembly.rig import AssembledRig
from forge.parts.boundaries.gguf_config import gguf_geometry
from forge.parts.boundaries.gguf_file import read_gguf
from forge.parts.knowledge.geometry_config import geometry_from_config
from forge.parts.runtimes.llama_build import build_llama_server, llama_build_folder
from forge.parts.runtimes.llama_program import LlamaProgram, ask_llama_program, llama_program_fault
from forge.parts.runtimes.llama_server import LlamaServer
from forge.parts.runtimes.llama_source import fetch_llama_source
from forge.rigs.local_llamacpp_cpu_2b_q4_0 import RIG
from forge.suites.fake_llama_server import TINY_GGUF_KEYS, TINY_GGUF_TENSORS, gguf_header
from forge.suites.witness import free_port, rig_processes
from tests.real.tiny_variants import VARIANTS
from tests.rig_programs import write_programs

ROOT = Path(__file__).resolve().parents[2]
CACHE = Path(os.environ.get("RIG_REAL_CACHE") or "/var/cache/gemma4-rigs-real")
WAITS_AT_MOST = 12  # of 50 seconds each
# Every name under which b11434 counts: what drifts in a later release is seen here.
METRICS = ROOT / "tests" / "recorded" / "llama-server-b11434-metrics.txt"
PROMPTS = ["Say hello.", "What is the capital of France?", "Zürich, 東京 and a ✓"]
NEW_TOKENS = 24
# Logits nearer than this are a tie, which rounding decides: ggml looks gelu up in a table of 16-bit
# numbers. The logits of these checkpoints spread over about 0.7 (standard deviation).
TIE = 0.05
SERVER = """\
import sys
sys.path.insert(0, {root!r})
from pathlib import Path
{preamble}
from forge.parts.assembly.command_line import run_rig
from forge.rigs.local_llamacpp_cpu_2b_q4_0 import RIG
sys.exit(run_rig(RIG, Path(__file__), sys.argv[1:]))
"""
_TOO_LITTLE = """\
import resource
resource.setrlimit(resource.RLIMIT_AS, (2_000_000_000, 2_000_000_000))
"""


def setUpModule() -> None:
    """The program and the source tree, once: an earlier run's, or got and built now."""
    asyncio.run(_build_all())


async def _build_all() -> None:
    said = [""]

    def tell(phase: str, fraction: float, words: str) -> None:
        if phase != said[0]:
            said[0] = phase
            print(f"… {phase}: {words}", file=sys.stderr, flush=True)

    built = await build_llama_server(CACHE, tell)
    RealLlamaCase.program = built.program
    RealLlamaCase.source = await fetch_llama_source(
        llama_build_folder(CACHE).with_name("source-11434"), lambda fraction, words: None
    )


class RealLlamaCase(unittest.IsolatedAsyncioTestCase):
    """A rig with the real llama-server: its own state, the shared cache, everything ended."""

    program: Path
    source: Path

    def setUp(self) -> None:
        folder = tempfile.TemporaryDirectory(prefix="llama-real-", ignore_cleanup_errors=True)
        self.addCleanup(folder.cleanup)
        self.place = Path(folder.name).resolve()
        self.port = free_port()
        self.state = self.place / "state"
        self.rig_folder = self.place / "rig"
        self.rig_folder.mkdir()
        self.write_server("")
        write_programs(self.rig_folder)
        keys = {name.upper() for name in RIG.settings.model_fields}
        gone = ("XDG_", "HF_", "LLAMA_", "GEMMA4_", "OMP_", "GOMP_")
        kept = {k: v for k, v in os.environ.items() if k not in keys and not k.startswith(gone)}
        surroundings = {
            "XDG_STATE_HOME": str(self.state),
            "XDG_CACHE_HOME": str(CACHE),
            "LLAMA_SERVER": str(self.program),
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
        lines = {"MODEL_NAME": model, "PORT": str(self.port), **values}
        text = "".join(f"{key}={value}\n" for key, value in lines.items())
        (self.rig_folder / "tpu.env").write_text(text)

    def end_everything(self) -> None:
        for pid in rig_processes(self.state):
            with contextlib.suppress(psutil.Error):
                psutil.Process(pid).kill()
                psutil.Process(pid).wait(10)

    @contextlib.asynccontextmanager
    async def client(self) -> AsyncIterator[Client]:
        with contextlib.redirect_stderr(io.StringIO()):
            server = AssembledRig(RIG, self.rig_folder / "server.py").server()
        async with Client(server) as client:
            failure = None
            try:
                yield client
            except AssertionError as error:
                failure = error  # raised outside, where no task group wraps it
        if failure is not None:
            raise failure

    async def answer(self, client: Client, tool: str, /, **arguments: Any) -> dict[str, Any]:
        result = await client.call_tool(tool, arguments)
        self.assertFalse(result.is_error, f"{tool}: {result.content}")
        return dict(result.structured_content or {})

    async def refusal(
        self, client: Client, tool: str, error_class: str, /, **arguments: Any
    ) -> str:
        result = await client.call_tool(tool, arguments)
        text = "".join(item.text for item in result.content if item.type == "text")
        self.assertTrue(result.is_error, f"{tool} succeeded: {text}")
        self.assertEqual(text.split(" ")[0], error_class, text)
        return text

    async def brought_up(self, client: Client, **arguments: Any) -> dict[str, Any]:
        outcome = await self.answer(client, "serve_model", wait_s=50, **arguments)
        for _ in range(WAITS_AT_MOST):
            if outcome["state"] != "starting":
                break
            outcome = await self.answer(client, "wait_for_model_ready", wait_s=50)
        self.assertEqual(outcome["state"], "ready", outcome)
        return outcome

    def ask(self, path: str, body: dict[str, Any] | None = None, origin: str = "") -> Any:
        """The answer's headers and its body: an object, or text where it is none."""
        headers = {"Content-Type": "application/json"} | ({"Origin": origin} if origin else {})
        data = None if body is None else json.dumps(body).encode()
        request = urllib.request.Request(f"http://127.0.0.1:{self.port}{path}", data, headers)
        with urllib.request.urlopen(request, timeout=120) as reply:
            text = reply.read().decode()
            headers = dict(reply.headers)
        try:
            return headers, json.loads(text)
        except ValueError:
            return headers, text

    def model_server(self) -> psutil.Process:
        (pid,) = rig_processes(self.state, "server")
        return psutil.Process(pid)

    def python(self, *arguments: str, path: str = "") -> str:
        """Run this Python beside the rig; its output. AssertionError when it fails."""
        environment = {**os.environ, "HF_HUB_OFFLINE": "1"}
        searched = [path, environment["PYTHONPATH"]]
        environment["PYTHONPATH"] = os.pathsep.join(filter(None, searched))
        done = subprocess.run(
            [sys.executable, *arguments],
            env=environment,
            cwd=ROOT,
            capture_output=True,
            text=True,
            timeout=600,
        )
        self.assertEqual(done.returncode, 0, done.stderr[-3000:])
        return done.stdout


class EmbeddedModelTests(RealLlamaCase):
    """The small model of the demo: it knows Paris, and everything about it can be looked at."""

    async def test_served_asked_counted_and_stopped(self) -> None:
        self.write_settings("embedded", SLOTS="2", CONTEXT_PER_SLOT="1024")
        async with self.client() as client:
            await self.brought_up(client)
            await self._it_answers(client)
            await self._its_slots(client)
            await self._its_properties(client)
            await self._everything_is_counted(client)
            self._requests_have_their_way()
            self._a_page_in_a_browser_is_not_let_in()
            await self._memory_is_what_was_planned(client)
            server = self.model_server()
            listening = [c.laddr for c in server.net_connections("tcp") if c.status == "LISTEN"]
            self.assertEqual([tuple(place) for place in listening], [("127.0.0.1", self.port)])
            await self.answer(client, "stop_model")
            _, alive = psutil.wait_procs([server], timeout=10)
            self.assertEqual(alive, [])

    async def _it_answers(self, client: Client) -> None:
        health = await self.answer(client, "verify_model_health")
        self.assertTrue(health["healthy"], health)
        self.assertEqual(health["model"], "embedded")
        measured = await self.answer(
            client, "query_gemma4_with_stats", prompt="Count from 1 to 40.", max_tokens=32
        )
        self.assertTrue(measured["complete"], measured)
        self.assertEqual((measured["completion_tokens"], measured["finish_reason"]), (32, "length"))
        self.assertGreater(measured["prompt_tokens"], 8)
        self.assertLess(measured["ttft_s"], measured["total_s"])

    async def _its_slots(self, client: Client) -> None:
        outcome = await self.answer(client, "get_slots")
        self.assertEqual([slot["n_ctx"] for slot in outcome["slots"]], [1024, 1024])
        self.assertEqual(outcome["busy"], 0)
        self.assertTrue([slot for slot in outcome["slots"] if slot["n_prompt_tokens"]])
        # 30 layers of 3 heads, 64 wide, keys and values, two bytes: 23,040 bytes a token.
        self.assertEqual(outcome["kv_mb_per_slot"], round(1024 * 23_040 / 1e6, 3))
        self.assertEqual(outcome["checkpoints_mb_per_slot"], 0)

    async def _its_properties(self, client: Client) -> None:
        details = await self.answer(client, "get_model_details")
        self.assertEqual(details["architecture"], "llama")
        resolved = details["resolved"]
        self.assertEqual(details["folder"], resolved["model_path"])
        self.assertEqual((resolved["total_slots"], resolved["n_ctx"]), ("2", "1024"))
        self.assertEqual(
            (resolved["build_info"], resolved["model_ftype"]), ("b11434-sdist", "Q4_1")
        )
        self.assertEqual(resolved["enable_thinking"], "not in the chat template")

    async def _everything_is_counted(self, client: Client) -> None:
        _, page = self.ask("/metrics")
        names, known = [
            {line.split()[0] for line in text.splitlines() if line[:1] not in ("#", "")}
            for text in (page, METRICS.read_text())
        ]
        self.assertEqual(names, known)
        self.assertLessEqual(set(LlamaServer.metric_names.values()), names)
        status = await self.answer(client, "get_system_status")
        load = status["load"]
        self.assertEqual((load["running"], load["waiting"]), (0, 0))
        self.assertGreater(load["generation_tokens_total"], 32)
        self.assertGreater(load["prompt_tokens_total"], 32)
        self.assertIsNone(load["kv_used_share"], "b11434 does not tell it")

    def _requests_have_their_way(self) -> None:
        """Schema, grammar and ignore_eos go through as they are."""
        message = [{"role": "user", "content": "Name a city in France."}]
        common = {"model": "embedded", "messages": message, "temperature": 0, "max_tokens": 40}
        schema = {
            "type": "object",
            "properties": {"city": {"type": "string", "maxLength": 12}},
            "required": ["city"],
            "additionalProperties": False,
        }
        wanted = {"type": "json_schema", "json_schema": {"name": "city", "schema": schema}}
        _, reply = self.ask("/v1/chat/completions", {**common, "response_format": wanted})
        self.assertEqual(list(json.loads(reply["choices"][0]["message"]["content"])), ["city"])
        grammar = 'root ::= "Lyon" | "Metz"'
        _, reply = self.ask("/v1/chat/completions", {**common, "grammar": grammar})
        self.assertIn(reply["choices"][0]["message"]["content"], ("Lyon", "Metz"))
        _, reply = self.ask("/v1/chat/completions", {**common, "ignore_eos": True})
        self.assertEqual(reply["usage"]["completion_tokens"], 40)
        self.assertEqual(reply["choices"][0]["finish_reason"], "length")

    def _a_page_in_a_browser_is_not_let_in(self) -> None:
        headers, _ = self.ask("/v1/models", origin="https://evil.example")
        told = {name.lower(): value for name, value in headers.items()}
        allowed = told.get("access-control-allow-origin", "")
        self.assertNotIn(allowed, ("*", "https://evil.example"))

    async def _memory_is_what_was_planned(self, client: Client) -> None:
        """Peak resident memory within the plan, and the plan within half as much again."""
        prompt = "word " * 700
        await self.answer(client, "query_gemma4", prompt=prompt, max_tokens=4)
        details = await self.answer(client, "get_model_details")
        planned = 1e9 * sum(details["memory_needed_gb"].values())
        status = Path(f"/proc/{self.model_server().pid}/status").read_text()
        peak = next(int(row.split()[1]) * 1024 for row in status.splitlines() if "VmHWM" in row)
        self.assertLess(peak, planned)
        self.assertLess(planned, 1.6 * peak)


class TinyGemmaTests(RealLlamaCase):
    """Random Gemma 4 of three kinds: the same greedy tokens as transformers."""

    def convert(self, folder: Path) -> Path:
        """The GGUF file that llama.cpp's own converter makes of `folder`."""
        path = folder.with_suffix(".gguf")
        words = [str(self.source / "convert_hf_to_gguf.py"), str(folder), "--outtype", "f32"]
        self.python(*words, "--outfile", str(path), path=str(self.source / "gguf-py"))
        return path

    async def test_greedy_tokens_are_those_of_transformers_and_a_killed_server_is_told(
        self,
    ) -> None:
        told = self.python(
            *("-m", "tests.real.tiny_variants", str(self.place / "models")),
            *(json.dumps(PROMPTS), str(NEW_TOKENS)),
        )
        expected: dict[str, list[list[Any]]] = json.loads(told.splitlines()[-1])
        self.assertEqual(tuple(expected), VARIANTS)
        async with self.client() as client:
            for variant, answers in expected.items():
                with self.subTest(variant):
                    path = self.convert(self.place / "models" / variant)
                    self.write_settings(str(path), CONTEXT_PER_SLOT="512", CACHE_TYPE="f32")
                    await self.brought_up(client)
                    for prompt, (given, new, gaps) in zip(PROMPTS, answers, strict=True):
                        self._same_tokens(given, new, gaps)
                        self._same_template(prompt, given)
                    await self._details(client, path, variant)
                    config = json.loads((path.with_suffix("") / "config.json").read_text())
                    self.assertEqual(gguf_geometry(read_gguf(path)), geometry_from_config(config))
                    await self._killed(client)

    def _same_tokens(self, given: list[int], new: list[int], gaps: list[float]) -> None:
        """Each token after what transformers had before it, and all until the first tie."""
        clear = [place for place, gap in enumerate(gaps) if gap > TIE]
        self.assertGreater(len(clear), len(new) / 2, "too little to compare")
        for place in clear:
            self.assertEqual(self._completed(given + new[:place], 1), [new[place]], place)
        first_tie = next((place for place, gap in enumerate(gaps) if gap <= TIE), len(new))
        self.assertEqual(self._completed(given, NEW_TOKENS)[:first_tie], new[:first_tie])

    def _completed(self, prompt: list[int], limit: int) -> list[int]:
        body = {"prompt": prompt, "n_predict": limit, "temperature": 0, "cache_prompt": False}
        _, reply = self.ask("/completion", {**body, "return_tokens": True})
        self.assertEqual(reply["tokens_evaluated"], len(prompt))
        return list(reply["tokens"])

    def _same_template(self, prompt: str, given: list[int]) -> None:
        """The same template and tokenizer, by the number of the prompt's tokens."""
        message = [{"role": "user", "content": prompt}]
        chat = {"model": "x", "messages": message, "max_tokens": 1, "temperature": 0}
        _, reply = self.ask("/v1/chat/completions", chat)
        self.assertEqual(reply["usage"]["prompt_tokens"], len(given))

    async def _details(self, client: Client, path: Path, variant: str) -> None:
        details = await self.answer(client, "get_model_details")
        self.assertEqual((details["architecture"], details["folder"]), ("gemma4", str(path)))
        self.assertEqual("embedding table" in details["beside"], variant == "e2b")
        outcome = await self.answer(client, "get_slots")
        log = str((await client.call_tool("get_server_logs", {"lines": 2000})).content)
        self.assertIn("model loaded", log)
        self.assertEqual(outcome["slots"][0]["n_ctx"], 512)

    async def _killed(self, client: Client) -> None:
        """As the system does it when memory runs out: told, and no obstacle to the next start."""
        server = self.model_server()
        server.send_signal(signal.SIGKILL)
        psutil.wait_procs([server], timeout=10)
        status = await self.answer(client, "get_system_status")
        self.assertEqual((status["state"], status["pid"]), ("stopped", None))
        self.assertIn("ended by itself", " ".join(status["notes"]))
        await self.refusal(client, "get_slots", "NOT_FOUND")
        # It wrote nothing: the log ends in the middle of its work.
        found = await self.answer(client, "analyze_logs")
        self.assertEqual((found["kind"], found["stage"]), ("ended_silently", "memory"), found)
        self.assertIn("SIGKILL", found["cause"])


class ProgramTests(RealLlamaCase):
    """What the rig reads out of the program against what the program itself does."""

    async def test_the_built_program_may_be_used(self) -> None:
        program = LlamaProgram(self.program, "LLAMA_SERVER")
        facts = await ask_llama_program(program)
        self.assertEqual(facts.version, "0.6.0-dev (build 11434, commit sdist)")
        self.assertEqual(list(facts.devices), [])
        self.assertEqual(llama_program_fault(program, facts), "")
        self.assertEqual(program.accelerator(), "")

    def test_the_names_it_holds_are_the_architectures_that_it_loads(self) -> None:
        program = LlamaProgram(self.program, "LLAMA_SERVER")
        for name, known in (
            ("gemma4", True),
            ("gemma3", True),
            ("llama", True),
            ("qwen3", True),
            ("gemma9", False),
            ("nosuchmodel", False),
        ):
            with self.subTest(name):
                self.assertEqual(program.knows_architecture(name), known)
                self.assertEqual("unknown model architecture" in self.loaders_word(name), not known)

    def loaders_word(self, architecture: str) -> str:
        """What the loader says to a file that names `architecture` and holds no more."""
        import gguf

        path = self.place / f"{architecture}.gguf"
        writer = gguf.GGUFWriter(str(path), architecture)
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_ti_data_to_file()
        writer.close()
        return self.last_words(path)

    def last_words(self, path: Path) -> str:
        """What the program says before it ends, which it must do by itself."""
        argv = [str(self.program), "-m", str(path), "--port", str(self.port), "--offline"]
        done = subprocess.run(argv, capture_output=True, text=True, timeout=60)
        self.assertNotEqual(done.returncode, 0)
        return done.stdout + done.stderr

    async def test_the_failure_bank_knows_the_programs_own_words(self) -> None:
        self.write_settings("embedded")
        cut = self.place / "cut.gguf"
        header, _ = gguf_header(TINY_GGUF_KEYS, TINY_GGUF_TENSORS)
        cut.write_bytes(header)
        logs = {
            "gguf_arch_unknown": self.loaders_word("gemma9"),
            "gguf_damaged": self.last_words(cut),
        }
        with socket.create_server(("127.0.0.1", self.port)):
            logs["port_in_use"] = self.last_words(cut)
        async with self.client() as client:
            for kind, log in logs.items():
                with self.subTest(kind):
                    found = await self.answer(client, "analyze_logs", text=log)
                    self.assertEqual(found["kind"], kind, log[-1500:])


class FailingStartTests(RealLlamaCase):
    """Each fault of a start: refused before anything runs, or told from the real log."""

    def write_model(self, name: str, architecture: str = "llama", *, whole: bool = True) -> Path:
        """The embedded model's file under another name, its architecture or a tensor spoilt."""
        source = CACHE / "gemma4-rigs" / "models" / "SmolLM2-135M-Instruct.Q4_1.gguf"
        data = bytearray(source.read_bytes())
        if architecture != "llama":
            place = data.index(b"llama", data.index(b"general.architecture"))
            data[place : place + 5] = architecture.encode()
        if not whole:
            place = data.index(b"blk.3.ffn_up.weight")
            data[place : place + 19] = b"blk.3.ffn_xx.weight"
        path = self.place / name
        path.write_bytes(data)
        return path

    async def test_what_is_refused_before_anything_starts(self) -> None:
        self.write_settings("embedded")
        async with self.client() as client:
            await self.brought_up(client)  # so that the embedded model's file is there
            await self.answer(client, "stop_model")
            corrupt = self.write_model("corrupt.gguf")
            with corrupt.open("r+b") as file:
                file.truncate(file.seek(0, io.SEEK_END) - 1000)
            text = await self.refusal(client, "serve_model", "INVALID", model=str(corrupt))
            self.assertIn("lacks its last 1000 bytes", text)
            unknown = self.write_model("unknown.gguf", "gemm9")
            text = await self.refusal(client, "serve_model", "INVALID", model=str(unknown))
            self.assertIn("gemm9", text)
            with socket.create_server(("127.0.0.1", self.port)):
                text = await self.refusal(client, "serve_model", "EXISTS")
                self.assertIn(str(self.port), text)
        self.assertEqual(rig_processes(self.state, "server"), [])

    async def test_a_file_without_one_of_its_tensors(self) -> None:
        """Whole by every check of a header; only the loader knows which tensors there must be."""
        self.write_settings("embedded")
        async with self.client() as client:
            await self.brought_up(client)
            await self.answer(client, "stop_model")
            holed = self.write_model("holed.gguf", whole=False)
            text = await self.refusal(
                client, "serve_model", "INTERNAL", model=str(holed), wait_s=50
            )
            self.assertIn("gguf_damaged", text)
            self.assertIn("blk.3.ffn_up.weight", text)
            log = str((await client.call_tool("get_server_logs", {})).content)
            self.assertIn("blk.3.ffn_up.weight", log)
        self.assertEqual(rig_processes(self.state, "server"), [])

    async def test_it_cannot_have_its_memory(self) -> None:
        """A limit on address space stands for a computer that is full: the cache does not fit."""
        self.write_settings("embedded", SLOTS="16", CONTEXT_PER_SLOT="8192")
        self.write_server(_TOO_LITTLE)
        async with self.client() as client:
            text = await self.refusal(client, "serve_model", "INTERNAL", wait_s=50)
            log = str((await client.call_tool("get_server_logs", {})).content)
            self.assertRegex(log, "failed to allocate|alloc")
            self.assertTrue(text.strip())
            found = await self.answer(client, "analyze_logs")
            self.assertTrue(found["found"], found)
        self.assertEqual(rig_processes(self.state, "server"), [])


if __name__ == "__main__":
    unittest.main()
