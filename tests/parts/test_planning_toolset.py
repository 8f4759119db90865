"""plan_deployment through a real client: the rig's own values, verdicts, refusals, bad input."""

from __future__ import annotations

import ast
import json
import os
import shutil
import subprocess
import sys
import tempfile
import unittest
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any, ClassVar, Literal
from unittest import mock

from mcp import Client, StdioServerParameters
from mcp.client.stdio import stdio_client

from forge.bundle import bundle
from forge.parts.assembly.rig import AssembledRig
from forge.parts.toolsets.planning import PlanningToolset
from forge.rigs.local_pytorch_cpu_2b import RIG
from forge.suites.fake_engine import write_tiny_folder
from tests.rig_programs import write_programs

ROOT = Path(__file__).resolve().parents[2]
PLANNED_RIG = replace(RIG, toolsets=(PlanningToolset,))
MODES: tuple[Literal["legacy", "auto"], ...] = ("legacy", "auto")
ALWAYS = ("summary", "fits", "verdict", "memory_bytes", "tokens_per_s", "assumptions")


class PlanningCase(unittest.IsolatedAsyncioTestCase):
    """A rig with the planning toolset in a folder of its own; nothing outside is written."""

    folder: ClassVar[Path]

    @classmethod
    def setUpClass(cls) -> None:
        cls.folder = Path(tempfile.mkdtemp(prefix="planning-"))
        cls.addClassCleanup(shutil.rmtree, cls.folder, ignore_errors=True)
        state = {"XDG_STATE_HOME": str(cls.folder / "s"), "XDG_CACHE_HOME": str(cls.folder / "c")}
        patch = mock.patch.dict(os.environ, state)
        patch.start()
        cls.addClassCleanup(patch.stop)
        write_tiny_folder(cls.folder / "tiny")
        cls.write_settings()
        (cls.folder / "server.py").write_text("# stands for the built server\n")
        write_programs(cls.folder)

    @classmethod
    def write_settings(cls, **more: str) -> None:
        values = {"MODEL_NAME": "google/gemma-4-E2B-it", "PORT": "8017"} | more
        (cls.folder / "tpu.env").write_text("".join(f"{k}={v}\n" for k, v in values.items()))

    def assembled(self, name: str = RIG.name) -> AssembledRig:
        return AssembledRig(replace(PLANNED_RIG, name=name), self.folder / "server.py")

    @asynccontextmanager
    async def client(
        self, mode: Literal["legacy", "auto"] = "auto", name: str = RIG.name
    ) -> AsyncIterator[Client]:
        async with Client(self.assembled(name).server(), mode=mode) as client:
            yield client

    async def plan(self, /, **arguments: Any) -> dict[str, Any]:
        async with self.client() as client:
            result = await client.call_tool("plan_deployment", arguments)
        self.assertFalse(result.is_error, result.content)
        assert result.structured_content is not None
        return dict(result.structured_content)

    async def refusal(self, /, **arguments: Any) -> str:
        async with self.client() as client:
            result = await client.call_tool("plan_deployment", arguments)
        self.assertTrue(result.is_error, result.structured_content)
        return str(getattr(result.content[0], "text", ""))


class TestPlans(PlanningCase):
    async def test_both_protocol_modes_list_and_answer_alike(self) -> None:
        answers = []
        for mode in MODES:
            async with self.client(mode) as client:
                tools = {tool.name: tool for tool in (await client.list_tools()).tools}
                tool = tools["plan_deployment"]
                assert tool.annotations is not None
                self.assertTrue(tool.annotations.read_only_hint)
                asked = {"hardware": "v6e1", "engine": "vllm", "concurrency": 8}
                result = await client.call_tool("plan_deployment", asked)
                self.assertFalse(result.is_error)
                assert result.structured_content is not None
                answers.append(result.structured_content)
                self.assertEqual(set(ALWAYS) - set(result.structured_content), set())
        self.assertEqual(answers[0], answers[1])

    async def test_every_parameter_is_described_or_says_all_by_its_values(self) -> None:
        async with self.client() as client:
            tools = {tool.name: tool for tool in (await client.list_tools()).tools}
        schema = tools["plan_deployment"].input_schema
        self.assertFalse(schema["additionalProperties"])
        for name, field in schema["properties"].items():
            self.assertTrue(field.get("description") or field.get("enum"), name)
            kinds = [field, *field.get("anyOf", [])]
            bounded = any({"maximum", "maxLength", "enum"} & set(kind) for kind in kinds)
            self.assertTrue(bounded, name)

    async def test_the_rig_s_own_values_are_the_defaults(self) -> None:
        self.write_settings(MAX_MODEL_LEN="2048", DTYPE="float32")
        try:
            own = await self.plan(memory_gib=32)
            said = await self.plan(
                model="google/gemma-4-E2B-it",
                encoding="f32",
                context=2048,
                kv_dtype="f32",
                hardware="cpu",
                engine="pytorch",
                memory_gib=32,
            )
        finally:
            self.write_settings()
        self.assertEqual(own, said)
        self.assertEqual(own["memory_bytes"]["cache, one more token"], 2 * 18 * 1024)
        self.assertNotEqual(own, await self.plan(memory_gib=32))

    async def test_this_computer_s_free_memory_is_what_a_local_plan_has(self) -> None:
        import psutil

        visible = (await self.plan())["memory_bytes"]["visible"]
        memory = psutil.virtual_memory()
        self.assertLessEqual(visible, memory.total)
        self.assertGreater(visible, 0)
        self.assertEqual((await self.plan(memory_gib=7))["memory_bytes"]["visible"], 7 * 2**30)

    async def test_a_folder_on_this_computer_can_be_planned(self) -> None:
        folder = str(self.folder / "tiny")
        plan = await self.plan(model=folder)
        self.assertTrue(plan["fits"])
        self.assertIn(folder, plan["summary"])
        self.assertLess(plan["memory_bytes"]["weights, all"], 10e6)

    async def test_summands_add_up_to_the_sums(self) -> None:
        plan = await self.plan(model="12B", encoding="w4a16", hardware="l4", engine="vllm")
        memory = dict(plan["memory_bytes"])
        parts = [size for name, size in memory.items() if name.endswith(("weights", "tower"))]
        self.assertEqual(sum(parts), memory["weights, all"])
        loading = sum(size for name, size in memory.items() if name.startswith("while loading"))
        self.assertEqual(memory["weights at the loading peak"], memory["weights, all"] + loading)
        pool = memory["usable by the engine"] - memory["weights, all"] - memory["engine's overhead"]
        self.assertAlmostEqual(memory["cache pool"], pool, delta=3)

    async def test_an_unfit_plan_names_its_ground_and_a_call_that_fits(self) -> None:
        hard = await self.plan(model="31B", hardware="v6e1", engine="vllm")
        self.assertEqual((hard["fits"], hard["verdict"]), (False, "refused by arithmetic"))
        soft = await self.plan(
            model="E4B", hardware="v6e1", engine="vllm", context=16_384, concurrency=64
        )
        self.assertEqual((soft["fits"], soft["verdict"]), (False, "refused by an estimate"))
        self.assertTrue(all(reason.startswith("estimate: ") for reason in soft["reasons"]))
        for plan in (hard, soft):
            # the call is written as Python writes one, so it is read as Python reads one
            call = ast.parse(plan["next_step"], mode="eval").body
            assert isinstance(call, ast.Call) and isinstance(call.func, ast.Name)
            self.assertEqual(call.func.id, "plan_deployment")
            arguments = {str(k.arg): ast.literal_eval(k.value) for k in call.keywords}
            self.assertTrue((await self.plan(**arguments))["fits"], plan["next_step"])

    async def test_money_and_the_api_to_compare_with(self) -> None:
        asked = {"hardware": "v6e1", "engine": "vllm", "context": 1152, "concurrency": 64}
        table = await self.plan(**asked, provisioning="flex-start")
        self.assertEqual(table["usd"]["per hour"], 1.35)
        self.assertEqual(table["break_even_tokens_per_s"], 312.5)
        given = await self.plan(**asked, price_per_hour=2.70, api_input_price=0)
        self.assertEqual(given["usd"]["per hour"], 2.70)
        self.assertEqual(given["break_even_tokens_per_s"], 1875.0)
        self.assertEqual(table["cold_start_s"], 510)
        free = await self.plan(memory_gib=32)
        self.assertEqual((free["usd"]["per hour"], free["break_even_tokens_per_s"]), (0.0, None))
        unpriced = await self.plan(hardware="h100", engine="vllm")
        self.assertEqual(unpriced["usd"], {})

    async def test_vllm_s_batch_changes_the_streams_and_not_the_pool_s_worth(self) -> None:
        asked = {"hardware": "mi300x", "engine": "vllm", "context": 32_768}
        wide, narrow = [await self.plan(**asked, batched_tokens=n) for n in (16_384, 8192)]
        self.assertGreater(narrow["streams_at_context"], 1.4 * wide["streams_at_context"])
        self.assertTrue(any("no size of a pool" in line for line in wide["assumptions"]))

    async def test_own_starts_are_the_cold_start(self) -> None:
        assembled = self.assembled()
        self.assertIsNone((await self.plan(memory_gib=32))["cold_start_s"])
        starts = assembled.context.paths.state / "starts.jsonl"
        starts.parent.mkdir(parents=True, exist_ok=True)
        seconds = {"weights": 1.5, "load": 6.0}
        starts.write_text(json.dumps({"model": "google/gemma-4-E2B-it", "seconds": seconds}))
        try:
            self.assertEqual((await self.plan(memory_gib=32))["cold_start_s"], 7.5)
            elsewhere = await self.plan(hardware="v6e1", engine="vllm")
            self.assertEqual(elsewhere["cold_start_s"], 510)
        finally:
            starts.unlink()

    async def test_other_tools_ask_for_the_rig_s_own_plan_and_refuse(self) -> None:
        toolset = PlanningToolset(self.assembled().context)
        answer = await toolset.own_plan()
        assert answer.plan is not None
        self.assertIn("google/gemma-4-E2B-it in bf16 on cpu (PyTorch", answer.plan.summary)
        self.write_settings(MODEL_NAME="google/gemma-4-31B-it", DTYPE="float32")
        try:
            huge = await toolset.own_plan()
        finally:
            self.write_settings()
        assert huge.plan is not None
        self.assertIn("31B-it in f32", huge.plan.summary)
        # 122.8 GB in f32; where a computer has that much, it fits and there is nothing to refuse
        self.assertEqual(huge.refusal is None, huge.plan.fits)


class TestBadInput(PlanningCase):
    async def test_each_is_refused_by_the_name_of_the_parameter(self) -> None:
        for parameter, value in (
            ("concurrency", 0),
            ("concurrency", 10_000),
            ("context", -1),
            ("context", 10_000_000),
            ("output", 0),
            ("encoding", "nf4"),
            ("kv_dtype", "fp4"),
            ("hardware", "moon"),
            ("hardware", "../../etc"),
            ("engine", "tgi"),
            ("provisioning", "gratis"),
            ("model", "nobody/nothing"),
            ("model", "-x"),
            ("model", "x" * 5000),
            ("price_per_hour", -1),
            ("memory_gib", -1),
            ("batched_tokens", -1),
            ("api_output_price", "much"),
        ):
            text = await self.refusal(**{parameter: value})
            self.assertTrue(text.startswith("INVALID "), text)
            self.assertIn(parameter, text)
            if isinstance(value, str):
                self.assertNotIn(value, text)

    async def test_an_unknown_argument_is_refused(self) -> None:
        text = await self.refusal(kv_cache_size=9_026_017)
        self.assertTrue(text.startswith("INVALID kv_cache_size"), text)

    async def test_an_engine_that_does_not_run_there_is_named(self) -> None:
        text = await self.refusal(hardware="v6e1", engine="llamacpp")
        self.assertTrue(text.startswith("INVALID "), text)
        self.assertIn("vllm", text)

    async def test_weights_that_are_not_here_are_not_guessed(self) -> None:
        text = await self.refusal(model="embedded")
        self.assertTrue(text.startswith("NOT_FOUND "), text)

    async def test_a_rig_whose_name_says_nothing_asks_for_both(self) -> None:
        async with self.client(name="somewhere-odd") as client:
            result = await client.call_tool("plan_deployment", {"engine": "vllm"})
            self.assertTrue(result.is_error)
            self.assertIn("hardware", str(getattr(result.content[0], "text", "")))
            asked = {"hardware": "v6e1", "engine": "vllm"}
            self.assertFalse((await client.call_tool("plan_deployment", asked)).is_error)

    async def test_a_faulty_tpu_env_is_said_and_the_server_goes_on(self) -> None:
        self.write_settings(NO_SUCH_KEY="1")
        try:
            text = await self.refusal(hardware="v6e1", engine="vllm")
        finally:
            self.write_settings()
        self.assertTrue(text.startswith("INVALID tpu.env"), text)
        self.assertTrue((await self.plan(hardware="v6e1", engine="vllm"))["fits"])


class TestBundled(PlanningCase):
    """The toolset added to the first rig's list, bundled, and asked over stdio and by make."""

    @classmethod
    def setUpClass(cls) -> None:
        super().setUpClass()
        source = cls.folder / "source"
        shutil.copytree(
            ROOT / "forge", source / "forge", ignore=shutil.ignore_patterns("__pycache__", ".*")
        )
        entry = source / "forge" / "rigs" / "local_pytorch_cpu_2b.py"
        text = entry.read_text(encoding="utf-8")
        if "PlanningToolset" not in text:
            line = "from forge.parts.toolsets.serving import ServingToolset\n"
            planning = "from forge.parts.toolsets.planning import PlanningToolset\n"
            text = text.replace(line, planning + line)
            text = text.replace("toolsets=(", "toolsets=(PlanningToolset, ")
            entry.write_text(text, encoding="utf-8")
        cls.rig_folder = cls.folder / RIG.name
        cls.rig_folder.mkdir()
        for name, module in (
            ("server.py", "forge.rigs.local_pytorch_cpu_2b"),
            ("plan.py", "forge.programs.plan"),
        ):
            built = bundle(module, source).render("# built for a test\n")
            (cls.rig_folder / name).write_text(built, encoding="utf-8")
        shutil.copy(cls.folder / "tpu.env", cls.rig_folder)
        shutil.rmtree(source)  # nothing of it may be needed any more
        paths = [path for path in sys.path if path and any(Path(path).glob("*.dist-info"))]
        cls.environment = {
            "PATH": os.environ.get("PATH", os.defpath),
            "PYTHONPATH": os.pathsep.join(paths),
            "XDG_STATE_HOME": str(cls.folder / "s"),
            "XDG_CACHE_HOME": str(cls.folder / "c"),
            "HOME": str(cls.folder),
        }

    rig_folder: ClassVar[Path]
    environment: ClassVar[dict[str, str]]

    async def test_over_stdio(self) -> None:
        parameters = StdioServerParameters(
            command=sys.executable,
            args=[str(self.rig_folder / "server.py")],
            env=self.environment,
        )
        async with Client(stdio_client(parameters)) as client:
            asked = {"hardware": "v6e1", "engine": "vllm", "context": 65_536}
            result = await client.call_tool("plan_deployment", asked)
        self.assertFalse(result.is_error, result.content)
        assert result.structured_content is not None
        self.assertEqual(int(result.structured_content["streams_at_context"]), 17)

    def test_from_the_command_line(self) -> None:
        words = ["model=31B", "hardware=v6e1", "engine=vllm", "price_per_hour=1.35", "--json"]
        done = subprocess.run(
            [sys.executable, "server.py", "call", "plan_deployment", *words],
            cwd=self.rig_folder,
            env=self.environment,
            capture_output=True,
            text=True,
            check=False,
            timeout=120,
        )
        self.assertEqual(done.returncode, 0, done.stderr)
        plan = json.loads(done.stdout)
        self.assertEqual(plan["verdict"], "refused by arithmetic")
        self.assertEqual(plan["usd"]["per hour"], 1.35)


if __name__ == "__main__":
    unittest.main()
