"""vLLM in a container on a machine with an NVIDIA GPU: its arguments, rights, document and log.

The lines of the log are written as the source of 0.32.0 writes them, in the order in which a start
on a GPU of September 2026 (0.29, compute capability 7.5) had them; the figures are made up.
"""

from __future__ import annotations

import asyncio
import json
import os
import re
import unittest
from typing import Any, get_args
from unittest import mock

from pydantic import ValidationError

from forge.machine.docker import Docker
from forge.machine.ec2 import Ec2
from forge.machine.machine import Machine, checked
from forge.parts.boundaries.chat_client import ChatClient
from forge.parts.ground.errors import RigError
from forge.parts.planes.plane import Room
from forge.parts.runtimes.cuda_grants import CUDA_GRANTS_LEFT_OUT, cuda_grants
from forge.parts.runtimes.runtime import MetricUse, Runtime, ServedModel
from forge.parts.runtimes.tpu_grants import tpu_grants
from forge.parts.runtimes.vllm_cuda_docker import (
    CUDA_ENVIRONMENT,
    VllmCudaDocker,
    VllmCudaDockerSettings,
    cuda_container,
)
from forge.parts.runtimes.vllm_cuda_log import (
    CUDA_BOOT_MARKS,
    CUDA_PHASE_WORDS,
    resolved_cuda_values,
)
from forge.parts.runtimes.vllm_docker import (
    COMPILE_CACHE_FOLDER,
    QUIET_ENVIRONMENT,
    TOKEN_FILE,
    USED_METRICS,
    serve_argv,
)
from forge.parts.runtimes.vllm_tpu_docker import VllmTpuDockerSettings
from tests.parts.docker_reading import FORBIDDEN, DockerRun, read_docker

MODEL = "google/gemma-4-E2B-it"
ACCOUNT = "123456789012"
TAGGED = "vllm/vllm-openai:v0.32.0"
DIGEST = f"sha256:{'0123456789abcdef' * 4}"
BY_DIGEST = f"vllm/vllm-openai@{DIGEST}"
PLENTY = Room(memory_available=10**12, memory_total=10**12, disk_free=10**12)

_E = "(EngineCore pid=91) INFO 11-30 09:0"
# Compiled, by the second runner of the model, which is the usual one.
COMPILED_LOG = f"""\
container on machine in zone (last 500 lines at most)
(APIServer pid=1) INFO 11-30 09:00:12 [model.py:627] Resolved architecture: \
Gemma4ForConditionalGeneration
(APIServer pid=1) INFO 11-30 09:00:12 [model.py:1799] Using max model len 65536
{_E}0:31 [core.py:133] Initializing a V1 LLM engine (v0.32.0) with config: \
model='{MODEL}', dtype=torch.bfloat16, max_seq_len=65536, load_format=auto
{_E}0:33 [gpu_worker.py:513] Using V2 Model Runner
{_E}0:33 [model_runner.py:392] Loading model from scratch...
{_E}0:33 [cuda.py:446] Using AttentionBackendEnum.TRITON_ATTN backend.
{_E}2:02 [weight_utils.py:532] Time spent downloading weights for {MODEL}: 88.120000 seconds
(EngineCore pid=91) Loading safetensors checkpoint shards: 100% Completed | 1/1 [00:21<00:00]
{_E}2:24 [default_loader.py:501] Loading weights took 21.70 seconds
{_E}2:25 [model_runner.py:424] Model loading took 9.61 GiB memory and 111.900000 seconds
{_E}2:27 [monitor.py:40] Starting torch.compile
{_E}2:36 [backends.py:1104] Using cache directory: \
/cache/vllm/torch_compile_cache/a0/rank_0_0/backbone for vLLM's torch.compile
{_E}2:36 [backends.py:1166] Dynamo bytecode transform time: 8.60 s
{_E}3:10 [monitor.py:62] torch.compile took 42.10 s in total
{_E}3:12 [gpu_worker.py:759] Available KV cache memory: 8.93 GiB
{_E}3:12 [kv_cache_utils.py:2327] GPU KV cache size: 1,299,200 tokens, Maximum concurrency for \
65,536 tokens per request: 19.82x
{_E}3:13 [kernel_warmup.py:176] JIT kernel warmup starting.
{_E}3:21 [model_runner.py:1127] Graph capturing finished in 6 secs, took 0.41 GiB
{_E}3:21 [gpu_worker.py:1034] Free memory on device (21.71/22.03 GiB) on startup. Desired GPU \
memory utilization is (0.9, 19.83 GiB). Actual usage is 9.88 GiB for consumed memory (weights + \
non-torch), 0.61 GiB for peak activation, and 0.41 GiB for CUDAGraph memory. Replace nothing.
{_E}3:22 [core.py:395] init engine (profile, create kv cache, warmup model) took 56.20 s \
(compilation: 42.10 s)
(APIServer pid=1) INFO:     Application startup complete.
"""
# With --enforce-eager nothing is compiled; the first runner, which names the model.
EAGER_LOG = f"""\
container on machine in zone (last 500 lines at most)
{_E}0:31 [core.py:133] Initializing a V1 LLM engine (v0.32.0) with config: model='{MODEL}'
{_E}0:33 [gpu_model_runner.py:5039] Starting to load model {MODEL}...
{_E}0:34 [base_loader.py:151] Quantizing 245 layers of types: Fp8PerTensorOnlineLinearMethod: 245
{_E}0:54 [gpu_model_runner.py:5149] Model loading took 7.81 GiB memory and 21.000000 seconds
{_E}0:57 [gpu_worker.py:759] Available KV cache memory: 10.61 GiB
{_E}1:00 [kernel_warmup.py:176] JIT kernel warmup starting.
"""


def settings(**values: Any) -> VllmCudaDockerSettings:
    """The settings of a rig, with these of its values changed."""
    return VllmCudaDockerSettings(**{"model_name": MODEL, **values})


def container(image: str = TAGGED, **values: Any) -> DockerRun:
    """The container by these settings, as docker reads its arguments."""
    return read_docker(cuda_container(settings(**values)).docker_argv(image))


def option_of(argv: list[str], option: str) -> str:
    """The word after `option`."""
    return argv[argv.index(option) + 1]


class Case(unittest.TestCase):
    def setUp(self) -> None:
        kept = {k: v for k, v in os.environ.items() if not k.startswith(("VLLM_", "HF_", "IMAGE_"))}
        patch = mock.patch.dict(os.environ, kept, clear=True)
        patch.start()
        self.addCleanup(patch.stop)


class ServeTest(Case):
    """vLLM's own arguments; tests.real.test_vllm_flags holds them against vLLM's own parser."""

    def test_what_the_rig_is_for(self) -> None:
        self.assertEqual(
            cuda_container(settings()).argv,
            ["vllm", "serve", MODEL, "--host", "0.0.0.0", "--port", "8000"]
            + "--max-model-len 65536 --gpu-memory-utilization 0.9 --max_num_batched_tokens 2048 "
            "--enable-auto-tool-choice --tool-call-parser gemma4 --reasoning-parser gemma4 "
            "--max-num-seqs 32".split(),
        )

    def test_the_common_ones_come_first_and_whole(self) -> None:
        for values in ({}, {"vision": True}, {"model_revision": "a" * 40}, {"max_model_len": 512}):
            chosen = settings(**values, quantization="fp8", enforce_eager=True)
            common = serve_argv(chosen)
            self.assertEqual(cuda_container(chosen).argv[: len(common)], common)

    def test_an_eight_bit_cache_and_eight_bit_weights_are_two_things(self) -> None:
        argv = list(cuda_container(settings(kv_cache_dtype="fp8")).argv)
        self.assertEqual(option_of(argv, "--kv-cache-dtype"), "fp8")
        self.assertNotIn("--quantization", argv)
        argv = list(cuda_container(settings(quantization="fp8")).argv)
        # 0.32.0 calls plain fp8 deprecated for weights that are not stored so.
        self.assertEqual(option_of(argv, "--quantization"), "fp8_per_tensor")
        self.assertNotIn("--kv-cache-dtype", argv)

    def test_switches_and_numbers(self) -> None:
        self.assertNotIn("--enforce-eager", cuda_container(settings()).argv)
        argv = list(cuda_container(settings(enforce_eager=True, max_num_seqs=8)).argv)
        self.assertIn("--enforce-eager", argv)
        self.assertEqual(option_of(argv, "--max-num-seqs"), "8")

    def test_only_hub_ids_are_served(self) -> None:
        for name in ("", "embedded", "/models/gemma", "--trust-remote-code", "google/$(id)"):
            with self.subTest(name), self.assertRaises(RigError) as caught:
                cuda_container(settings(model_name=name))
            self.assertEqual(caught.exception.error_class, "INVALID")

    def test_nothing_that_trusts_the_models_own_code_or_tells_a_key(self) -> None:
        words = cuda_container(settings()).docker_argv(TAGGED)
        self.assertFalse([word for word in words if "trust" in word or "api-key" in word])


class ContainerTest(Case):
    """docker's arguments."""

    def test_the_images_own_entry_point_is_replaced_and_not_repeated(self) -> None:
        run = container()
        self.assertEqual(run.image, TAGGED)
        self.assertEqual(run.options["--entrypoint"], ["vllm"])
        self.assertEqual([*run.options["--entrypoint"], *run.command], serve(settings()))
        self.assertEqual(run.command[0], "serve")

    def test_it_stays_up_and_only_the_machines_own_loopback_reaches_it(self) -> None:
        options = container().options
        self.assertEqual(options["--name"], ["vllm"])
        self.assertEqual(options["--restart"], ["unless-stopped"])
        self.assertEqual(options["--publish"], ["127.0.0.1:8000:8000"])
        self.assertIn("--detach", options)

    def test_the_image_is_pinned_by_its_tag_and_by_a_digest(self) -> None:
        self.assertRegex(settings().vllm_image, r":v\d+\.\d+\.\d+$")
        self.assertEqual(container(BY_DIGEST, image_digest=DIGEST).image, BY_DIGEST)
        for image in ("", "vllm/vllm-openai:latest", f"other/vllm@{DIGEST}", f"{TAGGED} --gpus"):
            with self.subTest(image), self.assertRaises(RigError) as caught:
                cuda_container(settings()).docker_argv(image)
            self.assertEqual(caught.exception.error_class, "INVALID")

    def test_weights_and_all_that_is_compiled_outlive_the_container(self) -> None:
        options = container().options
        volumes = dict(volume.split(":") for volume in options["--volume"])
        environment = dict(pair.split("=", 1) for pair in options["--env"])
        self.assertEqual(volumes[COMPILE_CACHE_FOLDER], environment["VLLM_CACHE_ROOT"])
        # What Triton compiles lies in the same volume, and the weights do not: 10 GB each.
        inside = environment["VLLM_CACHE_ROOT"] + "/"
        self.assertTrue(environment["TRITON_CACHE_DIR"].startswith(inside))
        self.assertFalse((environment["HF_HOME"] + "/").startswith(inside))
        self.assertIn(environment["HF_HOME"], volumes.values())
        self.assertEqual(len(volumes), 2)
        self.assertEqual(environment, dict(CUDA_ENVIRONMENT))
        self.assertLess(set(QUIET_ENVIRONMENT), set(environment))

    def test_the_images_driver_libraries_only_when_they_are_asked_for(self) -> None:
        pair = "VLLM_ENABLE_CUDA_COMPATIBILITY=1"
        self.assertNotIn(pair, container().options["--env"])
        self.assertIn(pair, container(cuda_compatibility=True).options["--env"])

    def test_the_token_is_named_by_its_file_and_only_where_there_is_one(self) -> None:
        self.assertEqual(container().options["--env-file"], [TOKEN_FILE])
        self.assertNotIn("--env-file", container(hf_secret="").options)


class GrantsTest(Case):
    """What the container may do on the machine: exactly the table, and nothing by accident."""

    def test_nothing_beyond_the_table(self) -> None:
        options = container(vision=True).options
        self.assertEqual(options["--gpus"], ["device=0"])
        self.assertEqual(options["--cap-drop"], ["ALL"])
        self.assertEqual(options["--security-opt"], ["no-new-privileges"])
        self.assertEqual(options["--shm-size"], ["4g"])
        for option in (*FORBIDDEN, "--privileged", "--device", "--cap-add", "--ulimit"):
            self.assertNotIn(option, options)

    def test_the_usual_rights_are_dockers_own_and_no_more(self) -> None:
        options = container(container_usual_rights=True).options
        for option in ("--cap-drop", "--security-opt", "--cap-add", "--privileged", *FORBIDDEN):
            self.assertNotIn(option, options)
        self.assertEqual(options["--gpus"], ["device=0"])

    def test_each_grant_has_a_reason_and_a_source_and_stands_in_the_arguments(self) -> None:
        for usual in (False, True):
            argv = cuda_container(settings(container_usual_rights=usual)).docker_argv(TAGGED)
            granted: list[str] = []
            for grant in cuda_grants(usual):
                self.assertGreater(len(grant.reason), 20, grant)
                self.assertIn("not tried on the hardware", grant.source)
                granted += grant.options
            start = argv.index(granted[0])
            self.assertEqual(argv[start : start + len(granted)], granted)
            rest = {*argv[:start], *argv[start + len(granted) :]}
            self.assertFalse(rest & {"--gpus", "--cap-drop", "--security-opt", "--shm-size"})

    def test_what_is_left_out_is_left_out_with_its_reason(self) -> None:
        argv = cuda_container(settings()).docker_argv(TAGGED)
        self.assertIn("--ipc=host", CUDA_GRANTS_LEFT_OUT)
        for option, why in CUDA_GRANTS_LEFT_OUT.items():
            self.assertNotIn(option, argv)
            self.assertTrue(why)

    def test_the_two_chips_share_what_takes_rights_away(self) -> None:
        ours, theirs = cuda_grants(), tpu_grants("/dev/vfio")
        shared = [grant.options for grant in ours if grant in theirs]
        self.assertEqual(shared, [("--cap-drop", "ALL"), ("--security-opt", "no-new-privileges")])
        self.assertFalse([grant for grant in theirs if "--gpus" in grant.options])


class SettingsTest(Case):
    def test_bounds_and_forms(self) -> None:
        for bad in (
            {"quantization": "int8"},
            {"quantization": "fp8_per_tensor"},
            {"kv_cache_dtype": "nvfp4"},
            {"max_num_seqs": 0},
            {"max_num_batched_tokens": 8},
            {"gpu_arch": "89"},
            {"gpu_arch": "8.9 "},
            {"gpu_arch": "sm_89"},
            {"vllm_image": "a b"},
            {"vllm_image": f"owner/name@{DIGEST}"},
        ):
            with self.subTest(bad), self.assertRaises(ValidationError):
                settings(**bad)

    def test_each_has_a_description_and_none_is_a_tpus(self) -> None:
        for name, known in VllmCudaDockerSettings.model_fields.items():
            self.assertTrue(known.description, name)
        theirs = set(VllmTpuDockerSettings.model_fields)
        self.assertEqual(
            theirs - set(VllmCudaDockerSettings.model_fields),
            {"tpu_devices", "container_privileged", "gke_accelerator", "gke_topology"},
        )


class DocumentTest(Case):
    """What the machine is told."""

    def document(self, **values: Any) -> dict[str, Any]:
        runtime = VllmCudaDocker(lambda: settings(**values))
        return runtime.boot_document("gpu-vllm-g6-2b", ACCOUNT, BY_DIGEST, 14_400)

    def test_all_of_it(self) -> None:
        found = self.document(cache_bucket="bucket")
        self.assertEqual(found.pop("container"), cuda_container(settings()).docker_argv(BY_DIGEST))
        self.assertEqual(
            found,
            {
                "v": 1,
                "rig": "gpu-vllm-g6-2b",
                "project": ACCOUNT,
                "image": BY_DIGEST,
                "health": "http://127.0.0.1:8000/health",
                "metrics": "http://127.0.0.1:8000/metrics",
                "marks": {phase: list(marks) for phase, marks in CUDA_BOOT_MARKS.items()},
                "used": list(USED_METRICS),
                "secret": "hf-token",
                "token_file": "/run/gemma4/token.env",
                "cache": {"folder": "/var/lib/gemma4/cache", "bucket": "bucket"},
                "idle_minutes": 30,
                "life_s": 14_400,
                "leave": "",
                "gpu_arch": "8.9",
            },
        )

    def test_the_program_that_runs_on_the_machine_takes_it(self) -> None:
        cloud = Ec2()
        machine = Machine(cloud, Docker(cloud, gpu=True), first="driver")
        for values in (
            {},
            {"vision": True, "quantization": "fp8", "kv_cache_dtype": "fp8"},
            {"hf_secret": "", "gpu_arch": "12.0"},
            {"cache_bucket": "bucket-1", "container_usual_rights": True},
        ):
            with self.subTest(values):
                # Where the machine is, the plane knows.
                found = {**self.document(**values), "region": "us-east-1"}
                taken = checked(json.dumps(found), machine)
                self.assertEqual(taken["container"], found["container"])
                self.assertEqual(taken["gpu_arch"], settings(**values).gpu_arch)

    def test_it_leaves_room_in_user_data(self) -> None:
        # 16,384 bytes of EC2's user data hold the program beside it, compressed.
        self.assertLess(len(json.dumps(self.document(vision=True))), 4_000)

    def test_no_value_of_this_computers_environment_gets_in(self) -> None:
        canary = "hf_CANARYcanary0123456789"
        with mock.patch.dict(os.environ, {"HF_TOKEN": canary, "VLLM_API_KEY": canary}):
            self.assertNotIn(canary, json.dumps(self.document()))


class MarksTest(Case):
    """The lines with which a phase of the start begins."""

    def first(self, phase: str, log: str) -> str:
        """The first line that begins `phase`, empty for none."""
        patterns = [re.compile(pattern) for pattern in CUDA_BOOT_MARKS[phase]]
        lines = log.splitlines()
        return next((line for line in lines if any(p.search(line) for p in patterns)), "")

    def test_weights_begin_before_compiling_under_both_runners(self) -> None:
        for log, weights, compiling in (
            (COMPILED_LOG, "Loading model from scratch", "Starting torch.compile"),
            (EAGER_LOG, f"Starting to load model {MODEL}", "Available KV cache memory"),
        ):
            begun, then = self.first("weights", log), self.first("compile", log)
            self.assertIn(weights, begun)
            self.assertIn(compiling, then)
            self.assertLess(log.index(begun), log.index(then))

    def test_each_mark_in_the_words_of_the_source(self) -> None:
        for phase, words in (
            ("weights", "[model_runner.py:392] Loading model from scratch..."),
            ("weights", f"[gpu_model_runner.py:5039] Starting to load model {MODEL}..."),
            ("compile", "[monitor.py:40] Starting torch.compile"),
            ("compile", "[monitor.py:40] [language_model] Starting torch.compile"),
            ("compile", "[decorators.py:319] Directly load AOT compilation from path /cache/v/x"),
            ("compile", "[backends.py:1104] [encoder] Using cache directory: /cache/v/t for "
             "vLLM's torch.compile"),
            ("compile", "[gpu_worker.py:759] Available KV cache memory: 8.93 GiB"),
            ("compile", "[kernel_warmup.py:176] JIT kernel warmup starting."),
        ):  # fmt: skip
            line = f"(EngineCore pid=9) INFO 11-30 09:00:00 {words}"
            self.assertEqual(self.first(phase, line), line)

    def test_lines_that_begin_nothing(self) -> None:
        for line in (
            "",
            f"{_E}0:33 [gpu_worker.py:513] Using V2 Model Runner",
            f"{_E}2:24 [default_loader.py:501] Loading weights took 21.70 seconds",
            f"{_E}3:21 [model_runner.py:1127] Graph capturing finished in 6 secs, took 0.41 GiB",
            'INFO: 127.0.0.1 - "POST /v1/chat/completions HTTP/1.1" 200 OK',
            "Loading model from scratch...",  # no line of a logger
            "prompt: 'Starting torch.compile'",
            "Available KV cache memory: is what I want to know about",
        ):
            self.assertEqual(self.first("weights", line), "", line)
            self.assertEqual(self.first("compile", line), "", line)

    def test_a_hostile_line_costs_nothing_much(self) -> None:
        # Steps of the matcher, not seconds: a pattern that tries all pairs would not come back.
        for line in ("] Using cache directory: " * 20_000, "] [" + "a" * 300_000, "]" * 300_000):
            for marks in CUDA_BOOT_MARKS.values():
                for pattern in marks:
                    self.assertIsNone(re.search(pattern, line))
            self.assertEqual(resolved_cuda_values(line), {})

    def test_every_phase_has_words_in_the_order_of_the_boot(self) -> None:
        self.assertEqual(
            list(CUDA_PHASE_WORDS),
            ["driver", "docker", "image", "token", "weights", "compile", "ready"],
        )
        self.assertEqual(list(VllmCudaDocker.phases), list(CUDA_PHASE_WORDS))
        self.assertTrue(set(CUDA_BOOT_MARKS) <= set(CUDA_PHASE_WORDS))


class RuntimeTest(Case):
    """The verbs of a runtime."""

    def setUp(self) -> None:
        super().setUp()
        self.runtime: Runtime = VllmCudaDocker(settings)

    def resolved(self, log: str) -> dict[str, str]:
        client = ChatClient("http://127.0.0.1:9")  # never asked
        return dict(asyncio.run(self.runtime.resolved(client, log)))

    def test_what_the_engine_settled_on(self) -> None:
        self.assertEqual(
            self.resolved(COMPILED_LOG),
            {
                "architecture": "Gemma4ForConditionalGeneration",
                "max_model_len": "65536",
                "dtype": "bfloat16",
                "kv_cache_tokens": "1299200",
                "max_concurrency": "19.82",
                "engine_start_s": "56.20",
                "version": "0.32.0",
                "attention": "TRITON_ATTN",
                "weights_gib": "9.61",
                "kv_cache_gib": "8.93",
                "graphs_gib": "0.41",
                "memory_gib": "22.03",
                "activation_gib": "0.61",
            },
        )

    def test_weights_that_were_made_eight_bit_are_told(self) -> None:
        found = self.resolved(EAGER_LOG)
        self.assertEqual(found["quantized"], "Fp8PerTensorOnlineLinearMethod: 245")
        self.assertEqual(found["weights_gib"], "7.81")
        self.assertNotIn("graphs_gib", found)

    def test_what_the_log_does_not_say_is_left_out_and_the_last_start_counts(self) -> None:
        self.assertEqual(self.resolved("container on machine\n"), {})
        twice = COMPILED_LOG + COMPILED_LOG.replace("took 9.61 GiB", "took 7.52 GiB")
        self.assertEqual(self.resolved(twice)["weights_gib"], "7.52")

    def test_how_far_loading_has_come(self) -> None:
        self.assertIn("JIT kernel warmup starting", self.runtime.loading_step(EAGER_LOG))
        self.assertEqual(self.runtime.loading_fault(COMPILED_LOG), "")

    def test_it_speaks_the_words_that_the_toolsets_ask_for(self) -> None:
        words = {"ready": "vllm", "logs": "vllm_docker_logs", "endpoint": "vllm_endpoint"}
        self.assertLessEqual((words | {"bench": "vllm_"}).items(), self.runtime.vocabulary.items())
        self.assertEqual(set(get_args(MetricUse)), set(self.runtime.metric_names))
        self.assertEqual(self.runtime.api_key(), "")
        self.assertEqual(list(asyncio.run(self.runtime.needs())), [])

    def test_fetching_and_starting_are_the_machines_own(self) -> None:
        def report(fraction: float, words: str) -> None:
            raise AssertionError("nothing is fetched")

        model = ServedModel(MODEL, mock.sentinel.folder, "Gemma4", 0, {})
        for refuse in (
            lambda: asyncio.run(self.runtime.fetch_model(MODEL, PLENTY, report)),
            lambda: self.runtime.launch(model),
        ):
            with self.assertRaises(RigError) as caught:
                refuse()
            self.assertIn("the machine itself", caught.exception.what)

    def test_the_methods_follow_the_present_settings(self) -> None:
        values: dict[str, Any] = {}
        runtime = VllmCudaDocker(lambda: settings(**values))
        for change in ({}, {"quantization": "fp8"}, {"container_usual_rights": True}):
            values.update(change)
            self.assertEqual(runtime.serve_argv(), serve(settings(**values)))
            told = runtime.privileges()
            grants = cuda_grants(settings(**values).container_usual_rights)
            self.assertEqual(len(told), len(grants))
            for line, grant in zip(told, grants, strict=True):
                self.assertTrue(line.startswith(f"{' '.join(grant.options)}: "), line)
                self.assertIn(grant.source, line)

    def test_it_has_no_form_for_a_cluster(self) -> None:
        # So the tool that gives one is not among such a rig's.
        self.assertFalse(hasattr(self.runtime, "manifest"))


def serve(chosen: VllmCudaDockerSettings) -> list[str]:
    """vLLM's whole argument list by these settings."""
    return list(cuda_container(chosen).argv)


if __name__ == "__main__":
    unittest.main()
