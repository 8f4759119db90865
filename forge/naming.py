"""The grammar of rig and tool names, as data for the forge's checks.

NAMING.md is the text for people; a test holds the two together. Rigs do not carry this module.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from forge.parts.knowledge.hardware import HARDWARE_SLOTS
from forge.parts.knowledge.models import GEMMA4

MAX_TOOL_NAME = 28  # clients prefix tool names with up to 36 characters and cut at 63 or 64

PLATFORM_SLOTS: dict[str, str] = {
    "tpu": "a rented TPU or Inferentia2",
    "gce": "a TPU machine type of Compute Engine",
    "gpu": "a machine in a cloud with a GPU",
    "cloudrun": "a Cloud Run service with a GPU",
    "local": "the computer in front of you",
}
RUNTIME_SLOTS: dict[str, str] = {
    "vllm": "vLLM",
    "jax": "the JAX engine",
    "jaxrust": "XLA programs driven from Rust over PJRT",
    "pytorch": "PyTorch",
    "llamacpp": "llama.cpp",
    "ollama": "Ollama",
}
MODEL_SLOTS: dict[str, str] = {model.slot: model.name for model in GEMMA4.values()}
ENCODING_SLOTS: dict[str, str] = {
    "w4a16": "4-bit weights, 16-bit arithmetic",
    "q4_0": "q4_0, or weights trained for it",
    "fp8": "8-bit float",
    "int8": "8-bit integer",
}


@dataclass(frozen=True, slots=True)
class RigName:
    """A rig's directory name, taken apart; encoding is empty for the reference release."""

    platform: str
    runtime: str
    hardware: str
    model: str
    encoding: str = ""

    def __str__(self) -> str:
        slots = (self.platform, self.runtime, self.hardware, self.model, self.encoding)
        return "-".join(slot for slot in slots if slot)


def parse_rig_name(name: str) -> RigName:
    """`<platform>-<runtime>-<hardware>-<model>[-<encoding>]`, taken apart.

    Raises ValueError that names the slot and its permitted values.
    """
    parts = name.split("-")
    if len(parts) not in (4, 5):
        raise ValueError(f"{name!r} has {len(parts)} slots; a rig's name has four or five")
    slots: tuple[tuple[str, Mapping[str, object]], ...] = (
        ("platform", PLATFORM_SLOTS),
        ("runtime", RUNTIME_SLOTS),
        ("hardware", HARDWARE_SLOTS),
        ("model", MODEL_SLOTS),
        ("encoding", ENCODING_SLOTS),
    )
    for part, (slot, permitted) in zip(parts, slots, strict=False):
        if part not in permitted:
            known = ", ".join(permitted)
            raise ValueError(f"{name!r}: {slot} {part!r} is not permitted; permitted: {known}")
    return RigName(*parts)


def slug(name: str) -> str:
    """The name under which a rig is published: underscores become dashes (q4_0, q4-0).

    Used for the plugin, the Gemini extension and the MCP server's key. Raises ValueError for a
    name that is no rig's.
    """
    return str(parse_rig_name(name)).replace("_", "-")


def skill_name(name: str) -> str:
    """The name of a rig's skill: `<slug>-management`."""
    return f"{slug(name)}-management"


@dataclass(frozen=True, slots=True)
class KnownRig:
    """A directory that the originals name: `kind` is serving or artifact, `weights` what it serves.

    weights is a repository id or Ollama tag; the originals give some only as a size, then it is "".
    """

    name: str
    kind: str
    weights: str = ""


_E2B = "google/gemma-4-E2B-it"
KNOWN_RIGS: tuple[KnownRig, ...] = (
    KnownRig("tpu-vllm-v5e1-2b", "serving", _E2B),
    KnownRig("tpu-vllm-v5e1-2b-q4_0", "serving", f"{_E2B}-qat-q4_0-unquantized"),
    KnownRig("tpu-vllm-v5e1-2b-w4a16", "serving", f"{_E2B}-qat-w4a16-ct"),
    KnownRig("tpu-vllm-v6e1-2b", "serving", _E2B),
    KnownRig("tpu-jax-v5e1-2b", "serving", f"{_E2B}-qat-w4a16-ct"),
    KnownRig("tpu-jax-v6e1-2b", "serving", f"{_E2B}-qat-q4_0-unquantized"),
    KnownRig("gce-jaxrust-v6e1-2b", "serving", _E2B),
    KnownRig("tpu-pytorch-v5e1-12b", "serving", "google/gemma-4-12B-it-qat-w4a16-ct"),
    KnownRig("tpu-pytorch-v5e1-2b", "serving"),
    KnownRig("tpu-pytorch-v6e1-2b", "serving"),
    KnownRig("tpu-pytorch-inf2-2b", "serving"),
    KnownRig("tpu-jax-inf2-2b", "serving", _E2B),
    KnownRig("gpu-jax-g4dn-2b", "serving", _E2B),
    KnownRig("gpu-jax-g6-2b", "serving", _E2B),
    KnownRig("gpu-vllm-g6-2b", "serving", _E2B),
    KnownRig("gpu-vllm-g4dn-2b", "serving", _E2B),
    KnownRig("gpu-vllm-t4-2b", "serving", _E2B),
    KnownRig("gpu-pytorch-g5g-2b", "serving", _E2B),
    KnownRig("gpu-pytorch-g4dn-2b", "serving", _E2B),
    KnownRig("gpu-llamacpp-g5g-2b-q4_0", "serving", f"{_E2B}-qat-q4_0-gguf"),
    KnownRig("gpu-ollama-g5g-2b-q4_0", "serving", "gemma4:e2b-it-qat"),
    KnownRig("gpu-vllm-mi300x-2b", "serving", _E2B),
    KnownRig("local-llamacpp-1650ti-2b-q4_0", "serving", f"{_E2B}-qat-q4_0-gguf"),
    KnownRig("local-ollama-1650ti-2b-q4_0", "serving", "gemma4:e2b-it-qat"),
    KnownRig("local-llamacpp-cpu-2b-q4_0", "serving", f"{_E2B}-qat-q4_0-gguf"),
    KnownRig("local-jax-cpu-2b", "serving", _E2B),
    KnownRig("local-pytorch-cpu-2b", "serving", _E2B),
    KnownRig("local-vllm-cpu-2b", "serving", _E2B),
    KnownRig("tpu-jax-v6e1-12b-w4a16", "artifact", "google/gemma-4-12B-it-qat-w4a16-ct"),
    KnownRig("tpu-jax-v6e1-26b-q4_0", "artifact", "google/gemma-4-26B-A4B-it-qat-q4_0-unquantized"),
    KnownRig("tpu-jax-v6e1-31b-w4a16", "artifact", "google/gemma-4-31B-it-qat-w4a16-ct"),
    KnownRig("gpu-vllm-l4-2b-w4a16", "artifact", f"{_E2B}-qat-w4a16-ct"),
    KnownRig("gpu-vllm-l4-4b-w4a16", "artifact", "google/gemma-4-E4B-it-qat-w4a16-ct"),
    KnownRig("gpu-vllm-l4-12b-w4a16", "artifact", "google/gemma-4-12B-it-qat-w4a16-ct"),
    KnownRig("gpu-vllm-l4-26b-w4a16", "artifact", "google/gemma-4-26B-A4B-it-qat-w4a16-ct"),
    KnownRig("gpu-vllm-l4-31b-w4a16", "artifact", "google/gemma-4-31B-it-qat-w4a16-ct"),
    KnownRig("gpu-jax-g5g-2b", "artifact", _E2B),
    KnownRig("gpu-jaxrust-g5g-2b", "artifact", _E2B),
)

# Names that say nothing of their weights' encoding although it is not the reference release.
SILENT_ENCODINGS: dict[str, str] = {
    "tpu-jax-v5e1-2b": "w4a16",
    "tpu-pytorch-v5e1-12b": "w4a16",
    "tpu-jax-v6e1-2b": "q4_0",
}

EC2_FAMILIES = ("g4dn", "g5g", "g6", "inf2")


@dataclass(frozen=True, slots=True)
class ToolName:
    """A tool of some rig. `<family>` in a name stands for each of EC2_FAMILIES.

    belongs: the plane or runtime whose rigs have it, or "every rig".
    earlier_name: how the originals call it where ours differs; empty where it is theirs or new.
    """

    name: str
    belongs: str
    earlier_name: str = ""


TOOLS: tuple[ToolName, ...] = (
    ToolName("get_help", "every rig"),
    ToolName("get_system_status", "every rig"),
    ToolName("get_endpoint", "every rig"),
    ToolName("get_model_details", "every rig"),
    ToolName("verify_model_health", "every rig"),
    ToolName("query_gemma4", "every rig"),
    ToolName("query_gemma4_with_stats", "every rig"),
    ToolName("get_job", "every rig"),
    ToolName("cancel_job", "every rig"),
    ToolName("get_metrics", "every rig"),
    ToolName("plan_deployment", "every rig"),
    ToolName("run_benchmark", "every rig but vLLM's"),
    ToolName("list_reports", "every rig"),
    ToolName("show_report", "every rig"),
    ToolName("compare_reports", "every rig"),
    ToolName("probe_capabilities", "every rig"),
    ToolName("analyze_logs", "every rig"),
    ToolName("suggest_sre_remediation", "every rig"),
    ToolName("get_boot_timeline", "every rig"),
    ToolName("serve_model", "attached"),
    ToolName("stop_model", "attached"),
    ToolName("get_server_logs", "attached"),
    ToolName("wait_for_model_ready", "attached"),
    ToolName("estimate_deployment_cost", "rented"),
    ToolName("plan_destroy", "rented"),
    ToolName("list_orphans", "rented"),
    ToolName("reap_orphans", "rented"),
    ToolName("save_hf_token", "rented"),
    ToolName("get_deployment_config", "rented"),
    ToolName("find_gpu", "EC2, DigitalOcean"),
    ToolName("find_tpu", "Cloud TPU API"),
    ToolName("create_tpu_queued_resource", "Cloud TPU API"),
    ToolName("manage_queued_resource", "Cloud TPU API"),
    ToolName("list_queued_resources", "Cloud TPU API"),
    ToolName("describe_queued_resource", "Cloud TPU API"),
    ToolName("destroy_queued_resource", "Cloud TPU API"),
    ToolName("get_tpu_serial_log", "Cloud TPU API"),
    ToolName("get_tpu_endpoint", "Cloud TPU API"),
    ToolName("check_tpu_availability", "Cloud TPU API"),
    ToolName("find_tpu_vm", "Compute Engine"),
    ToolName("create_tpu_vm_instance", "Compute Engine"),
    ToolName("list_tpu_vm_instances", "Compute Engine"),
    ToolName("describe_tpu_vm_instance", "Compute Engine"),
    ToolName("destroy_tpu_vm_instance", "Compute Engine"),
    ToolName("get_tpu_vm_endpoint", "Compute Engine"),
    ToolName("get_tpu_vm_serial_log", "Compute Engine"),
    ToolName("probe_zone_capacity", "Compute Engine"),
    ToolName("get_load_matrix", "vLLM"),
    ToolName("check_quota", "Google Cloud, EC2"),
    ToolName("get_zones_with_quota", "Google Cloud, EC2", "get_zones_with_available_quota"),
    ToolName("get_tpu_system_logs", "Google Cloud"),
    ToolName("get_cloud_logging_logs", "Google Cloud"),
    ToolName("analyze_cloud_logging", "Google Cloud"),
    ToolName("deploy_vllm", "Cloud Run"),
    ToolName("status_vllm", "Cloud Run"),
    ToolName("destroy_vllm", "Cloud Run"),
    ToolName("update_vllm_scaling", "Cloud Run"),
    ToolName("check_gpu_quotas", "Cloud Run"),
    ToolName("analyze_gpu_logs", "Cloud Run"),
    ToolName("list_vertex_models", "Cloud Run"),
    ToolName("list_bucket_models", "Cloud Run"),
    ToolName("get_vertex_copy_steps", "Cloud Run", "get_vertex_ai_model_copy_instructions"),
    ToolName("get_hf_copy_steps", "Cloud Run", "get_huggingface_model_copy_instructions"),
    ToolName("get_hf_download_path", "Cloud Run", "get_huggingfacehub_download_path"),
    ToolName("get_vllm_gpu_manifest", "Cloud Run", "get_vllm_gpu_deployment_config"),
    ToolName("create_<family>_instance", "EC2"),
    ToolName("list_<family>_instances", "EC2"),
    ToolName("start_<family>_instance", "EC2"),
    ToolName("stop_<family>_instance", "EC2"),
    ToolName("terminate_<family>_instance", "EC2"),
    ToolName("check_<family>_quotas", "EC2"),
    ToolName("create_gpu_instance", "EC2"),
    ToolName("list_gpu_instances", "EC2"),
    ToolName("describe_gpu_instance", "EC2"),
    ToolName("start_gpu_instance", "EC2"),
    ToolName("stop_gpu_instance", "EC2"),
    ToolName("destroy_gpu_instance", "EC2"),
    ToolName("get_console_log", "EC2"),
    ToolName("verify_gpu_arch", "EC2"),
    ToolName("verify_neuron_health", "EC2"),
    ToolName("wait_for_vllm_ready", "vLLM"),
    ToolName("manage_vllm_docker", "vLLM"),
    ToolName("get_vllm_docker_logs", "vLLM"),
    ToolName("get_vllm_logs", "vLLM"),
    ToolName("get_vllm_endpoint", "vLLM"),
    ToolName("get_vllm_deployment_config", "vLLM"),
    ToolName("get_vllm_tpu_manifest", "vLLM", "get_vllm_tpu_deployment_config"),
    ToolName("run_vllm_benchmark", "vLLM"),
    ToolName("query_vllm", "vLLM"),
    ToolName("wait_for_jax_ready", "JAX"),
    ToolName("verify_jax_tpu", "JAX"),
    ToolName("deploy_jax_server", "JAX"),
    ToolName("get_jax_logs", "JAX"),
    ToolName("get_jax_endpoint", "JAX"),
    ToolName("manage_jax_server", "JAX"),
    ToolName("get_jax_deployment_config", "JAX"),
    ToolName("wait_for_pytorch_ready", "PyTorch"),
    ToolName("verify_pytorch_tpu", "PyTorch"),
    ToolName("install_vllm", "vLLM"),
    ToolName("run_bench_serve", "vLLM"),
    ToolName("build_llama_server", "llama.cpp"),
    ToolName("get_slots", "llama.cpp"),
    ToolName("manage_llama_server", "llama.cpp"),
    ToolName("get_build_progress", "llama.cpp"),
    ToolName("get_model_deployment_config", "llama.cpp"),
    ToolName("get_active_models", "Ollama"),
    ToolName("get_model_show_details", "Ollama"),
)


def tool_names() -> frozenset[str]:
    """Every name that a rig's tool may have, `<family>` filled in."""
    return frozenset(
        tool.name.replace("<family>", family) for tool in TOOLS for family in EC2_FAMILIES
    )
