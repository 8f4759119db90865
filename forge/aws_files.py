"""What a rig on EC2 ships besides: first_hour.md, filled in with its words.

Knows the plane, the two runtimes and the values of a rig's tpu.env.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from dotenv import dotenv_values

from forge.naming import parse_rig_name
from forge.parts.assembly.rig import Rig
from forge.parts.knowledge.hardware import ACCELERATORS
from forge.parts.knowledge.sweep_refusals import region_of
from forge.parts.planes.capacity_plane import listed
from forge.parts.planes.ec2 import Ec2
from forge.parts.planes.ec2_catalogue import on_demand_price
from forge.parts.planes.ec2_settings import EC2_MARKETS, Ec2Settings
from forge.parts.runtimes.llama_machine import LlamaMachine
from forge.parts.runtimes.vllm_cuda_docker import VllmCudaDocker

_FORGE = Path(__file__).resolve().parent
_LIMIT_USD = 2
_HOURS = {"vllm": 1.5, "llamacpp": 2.5}  # a build on the machine takes up to an hour of it


def aws_files(rig: Rig, settings_file: Path) -> dict[str, str]:
    """The files by name; none for a rig on another plane. `settings_file` is its tpu.env."""
    if not issubclass(rig.settings, Ec2Settings):
        return {}
    values = {key: value or "" for key, value in dotenv_values(settings_file).items()}
    text = (_FORGE / "first_hour_aws.md").read_text(encoding="utf-8")
    return {"first_hour.md": text.format_map(ec2_hour_words(rig, values))}


def ec2_hour_words(rig: Rig, values: Mapping[str, str]) -> dict[str, str]:
    """What differs between the rigs in the script of the first hour. `values`: their tpu.env's.

    Raises ValueError for an hour that costs more than it may, by the price on demand: spot's is
    not known before the day.
    """
    name = parse_rig_name(rig.name)
    zones, hours = listed(values["ZONES"]), _HOURS[name.runtime]
    strange = [word for word in listed(values["MARKETS"]) if word not in EC2_MARKETS]
    if strange:
        raise ValueError(f"{', '.join(strange)} is no way of renting on EC2")
    price, source = on_demand_price(values["CHIP"], values["INSTANCE_TYPE"], zones[0])
    if price is None or price * hours > _LIMIT_USD:
        raise ValueError(f"{rig.name}: {hours} h in {zones[0]} are not within {_LIMIT_USD} USD")
    runtime = VllmCudaDocker if name.runtime == "vllm" else LlamaMachine
    plane, words = Ec2.vocabulary, runtime.vocabulary
    return {
        "rig": rig.name,
        "machine": f"an {ACCELERATORS[values['CHIP']].name} of EC2 ({values['INSTANCE_TYPE']})",
        "instance_type": values["INSTANCE_TYPE"],
        "engine": name.runtime,
        "hardware": name.hardware,
        "zone": zones[0],
        "region": region_of(zones[0]),
        "regions": " ".join(dict.fromkeys(map(region_of, zones))),
        "price": f"{price:.2f}",
        "price_source": source,
        "hours": f"{hours:g}",
        "minutes": f"{hours * 60:.0f}",
        "limit_usd": str(_LIMIT_USD),
        "find": f"find_{plane['hardware']}",
        "list": f"list_{plane['rental']}s",
        "config": f"get_{words['ready']}_deployment_config",
        "wait": f"wait_for_{words['ready']}_ready",
        "logs": f"get_{words['logs']}",
        "bench": f"run_{words['bench']}benchmark",
        "phases": ", ".join(runtime.phases),
        **(_VLLM_WORDS if name.runtime == "vllm" else _LLAMA_WORDS),
    }


_VLLM_WORDS = {
    "manage": "manage_vllm_docker",
    "boot_call": '$CALL plan_deployment | tee "$RUN/03-plan.txt"',
    "boot_proof": "The pull of the image and the compile are the long ones; note both.",
    "boot_row": "the lines of vLLM's log that begin weights and compile",
    "host_look": "sudo docker inspect vllm --format '{{json .HostConfig}}'; nvidia-smi; df -h /",
    "host_words": "`Privileged` false and the runtime nvidia, what else the container was given, "
    "the memory that vLLM holds, and the disk's room beside the image",
    "host_proof": "that vLLM's published image runs on this driver with the narrow rights that "
    "the configuration shows, and which of them are needless.",
    "host_row": "vLLM's image on this driver, with narrow rights",
    "claim": "This rig is the control for the JAX rig on the same silicon: same machine, same "
    "weights, another runtime.",
    "warm_proof": "the compile cache is found again.",
}
_LLAMA_WORDS = {
    "manage": "manage_llama_server",
    "boot_call": '$CALL get_build_progress | tee -a "$RUN/03-build.txt"      # while it builds',
    "boot_proof": "The build is the long one: note how long, whether a swap file was laid down, "
    "and the most memory that it took.",
    "boot_row": "the build on aarch64: it ends, in how long, with how much memory",
    "host_look": "free -g; swapon --show; nvcc --version; nvidia-smi; df -h /; "
    "systemctl status 'gemma4*' --no-pager",
    "host_words": "the CUDA of toolkit and driver, the swap, how much of the card the server "
    "holds while it serves",
    "host_proof": "that CUDA for this card is on the image, and the claim of residency: how many "
    "bytes of the file lie on the card.",
    "host_row": "the weights that lie on the card, in MiB",
    "claim": "Residency, not speed, is what this rig claims until then.",
    "warm_proof": "the built program is found again and not built anew.",
}
