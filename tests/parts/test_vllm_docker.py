"""vLLM in a container: both argument lists, what the container may do, and the boot document.

What every kind of chip has in common is tried on a TPU's container, whose rights, caches and log
lines are here too; the lines are those that public logs of tpu-inference have.
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
from forge.machine.google import Google
from forge.machine.machine import Machine, checked
from forge.parts.boundaries.chat_client import ChatClient
from forge.parts.ground.errors import RigError
from forge.parts.planes.plane import Room
from forge.parts.runtimes.runtime import MetricUse, Runtime, ServedModel
from forge.parts.runtimes.tpu_grants import TPU_GRANTS_LEFT_OUT, tpu_grants
from forge.parts.runtimes.vllm_docker import (
    COMPILE_CACHE_FOLDER,
    TOKEN_FILE,
    USED_METRICS,
    VllmDocker,
    VllmDockerSettings,
    serve_argv,
)
from forge.parts.runtimes.vllm_tpu_docker import (
    TPU_ENVIRONMENT,
    VllmTpuDocker,
    VllmTpuDockerSettings,
    tpu_container,
)
from forge.parts.runtimes.vllm_tpu_log import BOOT_MARKS, BOOT_PHASE_WORDS
from tests.parts.docker_reading import FORBIDDEN, read_docker
from tests.parts.test_image_registry import DIGEST as NOW
from tests.parts.test_image_registry import running_registry

MODEL = "google/gemma-4-E2B-it"
PROJECT = "some-project"
TAGGED = "vllm/vllm-tpu:nightly"
DIGEST = f"sha256:{'0123456789abcdef' * 4}"
BY_DIGEST = f"vllm/vllm-tpu@{DIGEST}"
PLENTY = Room(memory_available=10**12, memory_total=10**12, disk_free=10**12)
# A start of vLLM 0.26.0 with tpu-inference on one chip, August 2026, shortened.
REAL_LOG = """\
container on machine in zone (last 500 lines at most)
INFO 08-16 20:23:18 [model.py:627] Resolved architecture: Gemma4ForConditionalGeneration
INFO 08-16 20:23:18 [model.py:1799] Using max model len 512
INFO 08-16 20:23:23 [core.py:116] Initializing a V1 LLM engine (v0.26.0) with config: \
model='google/gemma-4-E2B-it', dtype=torch.bfloat16, max_seq_len=512, load_format=auto
INFO 08-16 20:23:24 [tpu_runner.py:885] Init mesh | mesh=Mesh('data': 1, 'model': 1)
INFO 08-16 20:23:24 [compilation_manager.py:66] Enabling JAX compile cache.
INFO 08-16 20:23:24 [tpu_worker.py:471] Init worker | rank=0 | hbm=[(0.0, 15.75)]GiB
INFO 08-16 20:23:24 [model_loader.py:656] Loading model with MODEL_IMPL_TYPE=auto
INFO 08-16 20:23:24 [model_loader.py:659] Resolved MODEL_IMPL_TYPE 'auto' to 'flax_nnx'
INFO 08-16 20:23:52 [tpu_runner.py:1262] Cleared JIT caches after weight loading
INFO 08-16 20:23:52 [tpu_runner.py:1264] Init model | hbm=[(1.86, 15.75)]GiB
INFO 08-16 20:23:52 [tpu_worker.py:557] Memory statistics | total_hbm_limit_gb=15.75GiB | \
total_hbm_limit_cap_gb=14.49GiB | total_hbm_used_gb=1.86GiB | total_hbm_avail_gb=12.63GiB
INFO 08-16 20:23:52 [kv_cache_utils.py:2214] GPU KV cache size: 509,184 tokens
INFO 08-16 20:23:52 [kv_cache_utils.py:2215] Maximum concurrency for 512 tokens per request: 994.50x
INFO 08-16 20:23:52 [compilation_manager.py:949] Compiling sampling with different input shapes.
INFO 08-16 20:23:52 [compilation_manager.py:137] Precompile worker0 sample --> {'num_reqs': 8}
INFO 08-16 20:23:53 [compilation_manager.py:188] Compilation of worker0 sample --> \
{'num_reqs': 8} finished in 0.70 [secs].
"""
# A start of October 2025, with a process in front of each line.
OLDER_LOG = """\
(EngineCore_DP0 pid=2982916) INFO 10-20 00:02:29 [compilation_manager.py:34] Enabling JAX compile \
cache.
(EngineCore_DP0 pid=2982916) INFO 10-20 00:02:29 [model_loader.py:307] Loading model with \
MODEL_IMPL_TYPE=flax_nnx
(EngineCore_DP0 pid=2982916) INFO 10-20 00:02:30 [weight_utils.py:100] Downloading weights from HF \
Qwen/Qwen3-0.6B
(EngineCore_DP0 pid=2982916) INFO 10-20 00:02:33 [tpu_jax_runner.py:309] Init model | \
hbm=[(1.11, 30.75)]GiB
(EngineCore_DP0 pid=86218) INFO 02-14 02:31:11 [compilation_manager.py:75] Precompile worker0 \
sample --> {'num_reqs': 16, 'do_sampling': False}
"""


def settings(**values: Any) -> VllmTpuDockerSettings:
    """The settings of a rig, with these of its values changed."""
    return VllmTpuDockerSettings(**{"model_name": MODEL, **values})


def container_argv(chosen: VllmTpuDockerSettings, image: str) -> list[str]:
    """docker's argument list by these settings."""
    return tpu_container(chosen).docker_argv(image)


def boot_document(
    chosen: VllmTpuDockerSettings, rig: str, project: str, image: str, life_s: int, leave: str
) -> dict[str, Any]:
    """What the machine is told by these settings."""
    return tpu_container(chosen).boot_document(rig, project, image, life_s, leave)


class Case(unittest.TestCase):
    def setUp(self) -> None:
        kept = {k: v for k, v in os.environ.items() if not k.startswith(("VLLM_", "HF_", "IMAGE_"))}
        patch = mock.patch.dict(os.environ, kept, clear=True)
        patch.start()
        self.addCleanup(patch.stop)

    def invalid(self, words: str, **values: Any) -> None:
        """Both argument lists and the document refuse these values, naming `words`."""
        chosen = settings(**values)
        for make in (
            lambda: container_argv(chosen, TAGGED),
            lambda: boot_document(chosen, "rig", "project", TAGGED, 60, ""),
        ):
            with self.assertRaises(RigError) as caught:
                make()
            self.assertEqual(caught.exception.error_class, "INVALID")
            self.assertIn(words, str(caught.exception))


class ServeTest(Case):
    """vLLM's own arguments."""

    def test_the_arguments_that_the_rigs_are_for(self) -> None:
        self.assertEqual(
            serve_argv(settings()),
            ["vllm", "serve", MODEL, "--host", "0.0.0.0", "--port", "8000"]
            + "--max-model-len 65536 --gpu-memory-utilization 0.9 --max_num_batched_tokens 4096 "
            "--enable-auto-tool-choice --tool-call-parser gemma4 --reasoning-parser gemma4".split(),
        )

    def test_vision_is_one_switch_with_one_word_of_json(self) -> None:
        argv = serve_argv(settings(vision=True))
        self.assertEqual(argv[:-2], serve_argv(settings()))
        self.assertEqual(argv[-2:], ["--limit-mm-per-prompt", '{"image":4,"audio":1}'])
        self.assertEqual(json.loads(argv[-1]), {"image": 4, "audio": 1})

    def test_numbers_and_the_models_commit_come_from_the_settings(self) -> None:
        argv = serve_argv(
            settings(
                max_model_len=32768,
                gpu_memory_utilization=0.85,
                max_num_batched_tokens=512,
                model_revision="a" * 40,
            )
        )
        for option, value in (
            ("--max-model-len", "32768"),
            ("--gpu-memory-utilization", "0.85"),
            ("--max_num_batched_tokens", "512"),
            ("--revision", "a" * 40),
        ):
            self.assertEqual(argv[argv.index(option) + 1], value, option)
        self.assertNotIn("--revision", serve_argv(settings()))

    def test_nothing_that_trusts_the_models_own_code_or_tells_a_key(self) -> None:
        for argv in (serve_argv(settings()), container_argv(settings(), TAGGED)):
            self.assertFalse([word for word in argv if "trust" in word or "api-key" in word])

    def test_no_value_begins_a_new_option(self) -> None:
        known = {word for word in serve_argv(settings(vision=True)) if word.startswith("-")}
        known.add("--revision")
        argv = serve_argv(settings(vision=True, model_revision="b" * 40))
        for before, word in zip(argv, argv[1:], strict=False):
            if word.startswith("-"):
                self.assertIn(word, known)
                self.assertNotIn(before, {"serve", "--host", "--port", "--revision"}, word)

    def test_only_hub_ids_are_served(self) -> None:
        for name in (
            "",
            "embedded",
            "gemma",
            "/models/gemma",
            "--trust-remote-code",
            "-x/y",
            "google/--trust-remote-code",
            "google/gemma 4",
            "google/gemma;id",
            "google/gemma\n",
            "google/../gemma",
            "a/b/c",
            "google/$(id)",
            "https://hub.test/google/gemma",
        ):
            with self.subTest(name):
                self.invalid("model_name", model_name=name)


class ContainerTest(Case):
    """docker's arguments."""

    def test_docker_reads_it_as_meant(self) -> None:
        run = read_docker(container_argv(settings(), TAGGED))
        self.assertEqual(run.image, TAGGED)
        self.assertEqual(run.command, serve_argv(settings()))
        self.assertEqual(run.options["--name"], ["vllm"])
        self.assertEqual(run.options["--restart"], ["unless-stopped"])
        self.assertIn("--detach", run.options)

    def test_only_the_machines_own_loopback_reaches_it(self) -> None:
        run = read_docker(container_argv(settings(), TAGGED))
        self.assertEqual(run.options["--publish"], ["127.0.0.1:8000:8000"])

    def test_an_image_by_digest_stands_in_the_same_place(self) -> None:
        tagged = container_argv(settings(), TAGGED)
        pinned = container_argv(settings(image_digest=DIGEST), BY_DIGEST)
        self.assertEqual(read_docker(pinned).image, BY_DIGEST)
        self.assertEqual([w if w != BY_DIGEST else TAGGED for w in pinned], tagged)

    def test_no_other_image_than_the_settings_name(self) -> None:
        for image in (
            "",
            "vllm/vllm-tpu",
            "vllm/vllm-tpu:latest",
            "other/vllm-tpu:nightly",
            f"other/vllm-tpu@{DIGEST}",
            f"vllm/vllm-tpu:nightly@{DIGEST}",
            "vllm/vllm-tpu@",
            "vllm/vllm-tpu@sha256:1",
            f"{BY_DIGEST}@{DIGEST}",
            "--privileged",
            f"{TAGGED} --privileged",
        ):
            with self.subTest(image), self.assertRaises(RigError) as caught:
                container_argv(settings(), image)
            self.assertEqual(caught.exception.error_class, "INVALID")

    def test_an_image_that_is_none_is_refused_by_its_settings_name(self) -> None:
        for image in ("-privileged", "--net=host", "Owner/name", "owner/name:", "owner//name"):
            with self.subTest(image):
                self.invalid("vllm_image", vllm_image=image)

    def test_the_token_is_named_by_its_file_and_only_where_there_is_one(self) -> None:
        run = read_docker(container_argv(settings(), TAGGED))
        self.assertEqual(run.options["--env-file"], [TOKEN_FILE])
        names = [pair.partition("=")[0] for pair in run.options["--env"]]
        self.assertNotIn("HF_TOKEN", names)
        self.assertNotIn("--env-file", container_argv(settings(hf_secret=""), TAGGED))

    def test_weights_and_compiled_programs_outlive_the_container(self) -> None:
        run = read_docker(container_argv(settings(), TAGGED))
        volumes = dict(volume.split(":") for volume in run.options["--volume"])
        environment = dict(pair.split("=", 1) for pair in run.options["--env"])
        self.assertEqual(volumes[COMPILE_CACHE_FOLDER], environment["VLLM_XLA_CACHE_PATH"])
        self.assertIn(environment["HF_HOME"], volumes.values())
        self.assertEqual(len(volumes), 2)
        # The bucket gets the compile cache. Weights in the same folder would go along, 10 GB each.
        weights = next(k for k, v in volumes.items() if v == environment["HF_HOME"])
        self.assertFalse(f"{weights}/".startswith(f"{COMPILE_CACHE_FOLDER}/"))
        self.assertEqual(environment, dict(TPU_ENVIRONMENT))

    def test_the_log_is_bounded(self) -> None:
        run = read_docker(container_argv(settings(), TAGGED))
        self.assertEqual(run.options["--log-driver"], ["json-file"])
        self.assertEqual(run.options["--log-opt"], ["max-size=50m", "max-file=3"])

    def test_the_host_folders_are_the_rigs_own(self) -> None:
        for volume in read_docker(container_argv(settings(), TAGGED)).options["--volume"]:
            self.assertTrue(volume.startswith("/var/lib/gemma4/"), volume)
        self.assertNotIn("docker.sock", " ".join(container_argv(settings(), TAGGED)))


class GrantsTest(Case):
    """What the container may do on the machine: exactly the table, and nothing by accident."""

    def test_nothing_beyond_the_table(self) -> None:
        options = read_docker(container_argv(settings(vision=True), TAGGED)).options
        self.assertEqual(options["--cap-drop"], ["ALL"])
        self.assertEqual(options["--cap-add"], ["SYS_RESOURCE"])
        self.assertEqual(options["--security-opt"], ["no-new-privileges"])
        self.assertEqual(options["--device"], ["/dev/vfio"])
        self.assertEqual(options["--ulimit"], ["memlock=-1:-1"])
        self.assertEqual(options["--shm-size"], ["16g"])
        self.assertNotIn("--privileged", options)
        for option in FORBIDDEN:
            self.assertNotIn(option, options)

    def test_each_grant_has_a_reason_and_a_source_and_stands_in_the_arguments(self) -> None:
        for privileged in (False, True):
            chosen = settings(container_privileged=privileged)
            argv = container_argv(chosen, TAGGED)
            granted: list[str] = []
            for grant in tpu_grants(chosen.tpu_devices, privileged):
                self.assertGreater(len(grant.reason), 20, grant)
                self.assertGreater(len(grant.source), 10, grant)
                granted += grant.options
            start = argv.index(granted[0])
            self.assertEqual(argv[start : start + len(granted)], granted)
            rest = {*argv[:start], *argv[start + len(granted) :]}
            self.assertFalse(
                rest & {"--cap-add", "--device", "--privileged", "--security-opt", "--ulimit"}
            )

    def test_what_was_never_run_says_so(self) -> None:
        for grant in tpu_grants("/dev/vfio"):
            if grant.options[0] != "--shm-size":
                self.assertIn("not tried on the hardware", grant.source, grant.options)

    def test_the_whole_machine_only_when_it_was_asked_for(self) -> None:
        options = read_docker(container_argv(settings(container_privileged=True), TAGGED)).options
        self.assertIn("--privileged", options)
        for narrow in ("--device", "--cap-add", "--cap-drop", "--security-opt"):
            self.assertNotIn(narrow, options)
        for option in FORBIDDEN:
            self.assertNotIn(option, options)
        self.assertEqual(options["--ulimit"], ["memlock=-1:-1"])
        self.assertEqual(options["--publish"], ["127.0.0.1:8000:8000"])

    def test_other_device_files(self) -> None:
        chosen = settings(tpu_devices="/dev/accel0, /dev/vfio/0,/dev/vfio/vfio")
        options = read_docker(container_argv(chosen, TAGGED)).options
        self.assertEqual(options["--device"], ["/dev/accel0", "/dev/vfio/0", "/dev/vfio/vfio"])

    def test_what_is_left_out_is_left_out(self) -> None:
        argv = container_argv(settings(), TAGGED)
        self.assertEqual(
            set(TPU_GRANTS_LEFT_OUT), {"--privileged", "--net=host", "--ipc=host", "--read-only"}
        )
        for option, why in TPU_GRANTS_LEFT_OUT.items():
            self.assertNotIn(option, argv)
            self.assertTrue(why)


class SettingsTest(Case):
    def test_bounds_and_forms(self) -> None:
        for bad in (
            {"model_revision": "main"},
            {"model_revision": "A" * 40},
            {"vllm_image": "a b"},
            {"vllm_image": f"owner/name@{DIGEST}"},
            {"vllm_image": "x" * 301},
            {"image_digest": "sha256:1"},
            {"image_digest": f"{DIGEST} "},
            {"image_registry": "registry.test"},
            {"image_registry": "https://user:password@registry.test"},
            {"image_registry": "https://registry.test/path"},
            {"max_model_len": 255},
            {"max_model_len": 262_145},
            {"gpu_memory_utilization": 0.99},
            {"gpu_memory_utilization": 0.0},
            {"gpu_memory_utilization": float("nan")},
            {"max_num_batched_tokens": 8},
            {"tpu_devices": ""},
            {"tpu_devices": "/dev/vfio --privileged"},
            {"tpu_devices": "/etc"},
            {"tpu_devices": "/dev/../etc"},
            {"tpu_devices": "/dev/vfio:/x"},
            {"hf_secret": "a/b"},
            {"hf_secret": "a b"},
            {"cache_bucket": "gs://bucket"},
            {"cache_bucket": "-bucket"},
            {"idle_minutes": -1},
            {"gke_accelerator": "tpu-v9"},
            {"gke_topology": "1x1x1"},
            {"gke_topology": "0x1"},
            {"port": 80},
        ):
            with self.subTest(bad), self.assertRaises(ValidationError):
                settings(**bad)

    def test_good_values(self) -> None:
        for good in (
            {"image_registry": "https://registry.test"},
            {"image_registry": "http://127.0.0.1:5000"},
            {"vllm_image": "registry.test:5000/owner/name:1"},
            {"cache_bucket": "my-cache.bucket_1"},
            {"idle_minutes": 0},
            {"hf_secret": "HF_token-1"},
        ):
            with self.subTest(good):
                chosen = settings(**good)
                for name, value in good.items():
                    self.assertEqual(getattr(chosen, name), value)

    def test_each_has_a_description(self) -> None:
        for name, known in VllmTpuDockerSettings.model_fields.items():
            self.assertTrue(known.description, name)


class DocumentTest(Case):
    """What the machine is told."""

    def document(self, **values: Any) -> dict[str, Any]:
        leave = "https://tpu.test/v2/projects/p/locations/z/queuedResources/q?force=true"
        return boot_document(
            settings(**values), "tpu-vllm-v5e1-2b", PROJECT, BY_DIGEST, 14400, leave
        )

    def test_all_of_it(self) -> None:
        found = self.document(cache_bucket="bucket")
        self.assertEqual(found.pop("container"), container_argv(settings(), BY_DIGEST))
        self.assertEqual(
            found,
            {
                "v": 1,
                "rig": "tpu-vllm-v5e1-2b",
                "project": PROJECT,
                "image": BY_DIGEST,
                "health": "http://127.0.0.1:8000/health",
                "metrics": "http://127.0.0.1:8000/metrics",
                "marks": {phase: list(marks) for phase, marks in BOOT_MARKS.items()},
                "used": list(USED_METRICS),
                "secret": "hf-token",
                "token_file": "/run/gemma4/token.env",
                "cache": {"folder": "/var/lib/gemma4/cache", "bucket": "bucket"},
                "idle_minutes": 30,
                "life_s": 14400,
                "leave": "https://tpu.test/v2/projects/p/locations/z/queuedResources/q?force=true",
            },
        )

    def test_it_is_plain_json_of_a_size_that_metadata_takes(self) -> None:
        found = self.document(vision=True)
        text = json.dumps(found)
        self.assertEqual(json.loads(text), found)
        self.assertLess(len(text), 16_000)  # a value of instance metadata may have 256 KB

    def test_the_named_files_and_ports_are_those_of_the_arguments(self) -> None:
        found = self.document()
        run = read_docker(found["container"])
        self.assertEqual(run.options["--env-file"], [found["token_file"]])
        self.assertEqual(run.image, found["image"])
        self.assertTrue(
            any(v.startswith(f"{found['cache']['folder']}:") for v in run.options["--volume"])
        )
        published = run.options["--publish"][0].rpartition(":")[0]
        for page in ("health", "metrics"):
            self.assertEqual(found[page], f"http://{published}/{page}")

    def test_the_program_that_runs_on_the_machine_takes_it(self) -> None:
        cloud = Google()
        machine = Machine(cloud, Docker(cloud), first="docker")
        for values in ({}, {"vision": True}, {"hf_secret": ""}, {"cache_bucket": "bucket-1"}):
            with self.subTest(values):
                found = json.loads(json.dumps(self.document(**values)))
                found["leave"] = ""  # its form is the plane's
                taken = checked(json.dumps(found), machine)
                self.assertEqual(taken["container"], found["container"])

    def test_no_secret_is_fetched_where_none_is_named(self) -> None:
        found = self.document(hf_secret="")
        self.assertEqual(found["secret"], "")
        self.assertNotIn("--env-file", found["container"])

    def test_no_value_of_this_computers_environment_gets_in(self) -> None:
        canary = "hf_CANARYcanary0123456789"
        with mock.patch.dict(os.environ, {"HF_TOKEN": canary, "VLLM_API_KEY": canary}):
            self.assertNotIn(canary, json.dumps(self.document()))

    def test_what_counts_as_use_is_what_the_metrics_are_read_by(self) -> None:
        names = set(VllmTpuDocker.metric_names.values())
        self.assertEqual(set(get_args(MetricUse)), set(VllmTpuDocker.metric_names))
        self.assertTrue(set(USED_METRICS) <= names)
        # What moves without anybody asking (KV in use by a cache) would keep a machine alive.
        self.assertNotIn("vllm:kv_cache_usage_perc", USED_METRICS)


class MarksTest(Case):
    """The lines with which a phase of the start begins."""

    def first(self, phase: str, log: str) -> int:
        """The number of the first line that begins `phase`, -1 for none."""
        patterns = [re.compile(pattern) for pattern in BOOT_MARKS[phase]]
        lines = log.splitlines()
        return next((i for i, ln in enumerate(lines) if any(p.search(ln) for p in patterns)), -1)

    def test_in_two_real_starts_weights_begin_before_compiling(self) -> None:
        for log, weights, compiling in (
            (REAL_LOG, "Loading model with MODEL_IMPL_TYPE=auto", "Compiling sampling"),
            (OLDER_LOG, "Loading model with MODEL_IMPL_TYPE=flax_nnx", "Precompile worker0"),
        ):
            lines = log.splitlines()
            begun, then = self.first("weights", log), self.first("compile", log)
            self.assertIn(weights, lines[begun])
            self.assertIn(compiling, lines[then])
            self.assertLess(begun, then)

    def test_lines_that_begin_nothing(self) -> None:
        for line in (
            "",
            "INFO 08-16 20:23:24 [compilation_manager.py:66] Enabling JAX compile cache.",
            "INFO 08-16 20:23:52 [tpu_runner.py:1264] Init model | hbm=[(1.86, 15.75)]GiB",
            "INFO 08-16 20:23:53 [compilation_manager.py:188] Compilation of x finished.",
            'INFO: 127.0.0.1 - "POST /v1/chat/completions HTTP/1.1" 200 OK',
            "Precompile all the subgraphs with possible input shapes",  # no line of a logger
            "prompt: 'Compiling the model with different input shapes'",
            "Downloading weights from HF is what I want to know about",
        ):
            self.assertEqual(self.first("weights", line), -1, line)
            self.assertEqual(self.first("compile", line), -1, line)

    def test_each_mark_of_today_and_of_the_torch_backend(self) -> None:
        for phase, line in (
            ("weights", "INFO 11-01 00:00:00 [weight_utils.py:152] Found weights from local: /x"),
            ("weights", "INFO 11-01 00:00:00 [weight_utils.py:178] Loading weights from /x/y.st"),
            ("compile", "INFO 11-01 00:00:00 [c.py:266] Precompile all the subgraphs with possible "
             "input shapes."),
            ("compile", "INFO 03-31 07:47:51 [tpu_model_runner.py:769] Compiling the model with "
             "different input shapes."),
            ("compile", "INFO 11-01 00:00:00 [c.py:160] Precompile worker0 backbone --> {'n': 1}"),
        ):  # fmt: skip
            self.assertEqual(self.first(phase, line), 0, line)

    def test_a_hostile_line_costs_nothing_much(self) -> None:
        # Steps of the matcher, not seconds: a pattern that tries all pairs would not come back.
        for line in ("] Compiling " * 20_000, "] Precompile " + "a" * 300_000, "]" * 300_000):
            for marks in BOOT_MARKS.values():
                for pattern in marks:
                    self.assertIsNone(re.search(pattern, line))

    def test_every_phase_has_words_in_the_order_of_the_boot(self) -> None:
        self.assertEqual(
            list(BOOT_PHASE_WORDS), ["docker", "image", "token", "weights", "compile", "ready"]
        )
        self.assertEqual(list(VllmTpuDocker.phases), list(BOOT_PHASE_WORDS))
        self.assertTrue(set(BOOT_MARKS) <= set(BOOT_PHASE_WORDS))


class RuntimeTest(Case):
    """The verbs of a runtime."""

    def setUp(self) -> None:
        super().setUp()
        self.runtime: Runtime = VllmTpuDocker(settings)

    def test_it_speaks_the_words_that_the_toolsets_ask_for(self) -> None:
        self.assertEqual(self.runtime.vocabulary["logs"], "vllm_docker_logs")
        self.assertEqual(self.runtime.vocabulary["endpoint"], "vllm_endpoint")
        self.assertEqual(self.runtime.vocabulary["bench"], "vllm_")
        self.assertLessEqual(
            {"engine", "ready", "server", "logs", "endpoint", "bench"}, set(self.runtime.vocabulary)
        )

    def test_this_computer_needs_nothing_and_holds_no_key(self) -> None:
        self.assertEqual(list(asyncio.run(self.runtime.needs())), [])
        self.assertEqual(self.runtime.api_key(), "")

    def test_no_weights_here_and_bad_names_refused(self) -> None:
        self.assertIsNone(self.runtime.local_model(MODEL))
        with self.assertRaises(RigError) as caught:
            self.runtime.local_model("--trust-remote-code")
        self.assertEqual(caught.exception.error_class, "INVALID")

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
            self.assertEqual(caught.exception.error_class, "INVALID")
            self.assertIn("the machine itself", caught.exception.what)
            self.assertTrue(caught.exception.next_step)

    def test_what_is_common_is_of_no_chip(self) -> None:
        self.assertNotIn("tpu_devices", VllmDockerSettings.model_fields)
        self.assertTrue(VllmDockerSettings.model_fields["vllm_image"].is_required())
        self.assertEqual(list(VllmDocker.phases), [])
        with self.assertRaises(NotImplementedError):
            VllmDocker(settings).serve_argv()

    def test_settings_are_read_at_each_call_and_never_before(self) -> None:
        def broken() -> VllmTpuDockerSettings:
            raise RigError("INVALID", "tpu.env: MODEL_NAME is missing", "write it")

        runtime = VllmTpuDocker(broken)
        self.assertEqual(runtime.api_key(), "")
        self.assertIsNone(runtime.local_model(MODEL))

    def resolved(self, log: str) -> dict[str, str]:
        client = ChatClient("http://127.0.0.1:9")  # never asked
        return dict(asyncio.run(self.runtime.resolved(client, log)))

    def test_what_the_engine_settled_on(self) -> None:
        self.assertEqual(
            self.resolved(REAL_LOG),
            {
                "architecture": "Gemma4ForConditionalGeneration",
                "max_model_len": "512",
                "dtype": "bfloat16",
                "kv_cache_tokens": "509184",
                "max_concurrency": "994.50",
                "version": "0.26.0",
                "implementation": "flax_nnx",
                "weights_gib": "1.86",
                "hbm_gib": "15.75",
                "hbm_usable_gib": "14.49",
            },
        )

    def test_what_the_log_does_not_say_is_left_out_and_the_last_start_counts(self) -> None:
        self.assertEqual(self.resolved("container on machine\n"), {})
        twice = REAL_LOG + REAL_LOG.replace("(v0.26.0)", "(v0.32.0)").replace("(1.86,", "(9.55,")
        found = self.resolved(twice)
        self.assertEqual((found["version"], found["weights_gib"]), ("0.32.0", "9.55"))

    def test_how_far_loading_has_come(self) -> None:
        self.assertIn("Compilation of worker0 sample", self.runtime.loading_step(REAL_LOG))
        self.assertEqual(self.runtime.loading_fault(REAL_LOG), "")
        log = (
            "heading\nERROR 08-16 20:23:52 [core.py:1] ValueError: Following weights were not "
            "initialized from checkpoint: {'model.layers.15.self_attn.k_norm.weight'}\n"
        )
        self.assertIn("k_norm.weight", self.runtime.loading_fault(log))


class PlanTest(Case):
    """What the runtime says of a machine before there is one."""

    def image(self, **values: Any) -> tuple[str, str]:
        """The image and the word on it, of a rig with these settings."""
        return asyncio.run(VllmTpuDocker(lambda: settings(**values)).image())

    def test_the_image_by_digest_and_the_pin_that_would_keep_it(self) -> None:
        with running_registry() as registry:
            image, note = self.image(vllm_image="owner/name:nightly", image_registry=registry.url)
        self.assertEqual(image, f"owner/name@{NOW}")
        self.assertIn(f"IMAGE_DIGEST={NOW}", note)
        argv = container_argv(settings(vllm_image="owner/name:nightly"), image)
        self.assertEqual(read_docker(argv).image, image)

    def test_a_pin_asks_nobody(self) -> None:
        with running_registry() as registry:
            image, note = self.image(
                vllm_image="owner/name:nightly",
                image_registry=registry.url,
                image_digest=DIGEST,
            )
        self.assertEqual(image, f"owner/name@{DIGEST}")
        self.assertEqual(registry.requests, [])
        self.assertNotIn("IMAGE_DIGEST=", note)

    def test_without_a_registry_the_tag_stays(self) -> None:
        image, note = self.image()
        self.assertEqual(image, TAGGED)
        self.assertIn("not resolved", note)

    def test_a_registry_that_cannot_be_asked_does_not_stop_a_machine(self) -> None:
        def asked(url: str) -> tuple[str, str]:
            return self.image(vllm_image="owner/name:nightly", image_registry=url)

        with running_registry() as gone:
            pass
        # Asked before another one begins, which may get its port.
        answers = [asked(gone.url)]
        for status in (503, 429):
            with running_registry(status=status) as registry:
                answers.append(asked(registry.url))
        for image, note in answers:
            self.assertEqual(image, "owner/name:nightly")
            self.assertIn("not resolved (", note)

    def test_an_image_that_is_not_there_does(self) -> None:
        for error_class, name, faults in (
            ("NOT_FOUND", "owner/name:weekly", {}),
            ("AUTH", "owner/secret:nightly", {}),
            ("DENIED", "owner/name:nightly", {"digest": "sha256:1"}),
        ):
            with running_registry(**faults) as registry, self.assertRaises(RigError) as caught:
                self.image(vllm_image=name, image_registry=registry.url)
            self.assertEqual(caught.exception.error_class, error_class)

    def test_the_methods_are_the_functions_by_the_present_settings(self) -> None:
        values: dict[str, Any] = {}
        runtime = VllmTpuDocker(lambda: settings(**values))
        for change in ({}, {"vision": True}, {"hf_secret": "", "max_model_len": 4096}):
            values.update(change)
            chosen = settings(**values)
            self.assertEqual(runtime.serve_argv(), serve_argv(chosen))
            self.assertEqual(
                runtime.boot_document("rig", "p", TAGGED, 60),
                boot_document(chosen, "rig", "p", TAGGED, 60, ""),
            )
        leave = "https://tpu.test/v2/x"
        self.assertEqual(runtime.boot_document("rig", "p", TAGGED, 60, leave)["leave"], leave)

    def test_each_privilege_is_told_with_its_reason(self) -> None:
        for privileged in (False, True):
            chosen = settings(container_privileged=privileged)
            told = VllmTpuDocker(lambda chosen=chosen: chosen).privileges()  # type: ignore[misc]
            grants = tpu_grants(chosen.tpu_devices, privileged)
            self.assertEqual(len(told), len(grants))
            for line, grant in zip(told, grants, strict=True):
                self.assertTrue(line.startswith(f"{' '.join(grant.options)}: "), line)
                self.assertIn(grant.reason, line)
                self.assertIn(grant.source, line)

    def test_a_manifest_needs_the_clusters_word_for_the_chip(self) -> None:
        with self.assertRaises(RigError) as caught:
            VllmTpuDocker(settings).manifest(TAGGED, 1)
        self.assertIn("GKE_ACCELERATOR", str(caught.exception))
        runtime = VllmTpuDocker(lambda: settings(gke_accelerator="tpu-v6e-slice"), "some-rig")
        self.assertIn("name: some-rig\n", runtime.manifest(TAGGED, 1))


if __name__ == "__main__":
    unittest.main()
