"""What a container on a TPU machine is given beyond an ordinary one, each with its reason.

A table, so that documents and the argument list cannot differ. Knows no image and no engine.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

_UNTRIED = "not tried on the hardware by this project"
# A public test bench that runs JAX on TPU machines in docker without --privileged.
_TPU_CI = "marin-community/marin#2478, 2026-01"


@dataclass(frozen=True)
class ContainerGrant:
    """Words of docker's argument list, why they are there, and what that rests on."""

    options: Sequence[str]
    reason: str
    source: str


_COMMON_GRANTS = (
    ContainerGrant(
        ("--shm-size", "16g"),
        "vLLM's processes hand requests and tensors over in /dev/shm, and docker gives 64 MB",
        "vLLM's installation page for TPUs, 0.6.4",
    ),
    ContainerGrant(
        ("--ulimit", "memlock=-1:-1"),
        "the driver pins the memory that the chip reads and writes directly, and pinned memory "
        "counts as locked",
        "docs.cloud.google.com/kubernetes-engine/docs/how-to/tpus, on running without privileged "
        f"mode (64 GiB there, and in {_TPU_CI}; here no limit); {_UNTRIED}",
    ),
)
_NARROW_GRANTS = (
    ContainerGrant(
        ("--cap-drop", "ALL"),
        "root in the container has none of root's rights that are not named here",
        _UNTRIED,
    ),
    ContainerGrant(
        ("--cap-add", "SYS_RESOURCE"),
        "a process may raise its own limits; with locked memory unlimited from the start it may be "
        "needless, but every published run without --privileged has it",
        f"{_TPU_CI}; {_UNTRIED}",
    ),
    ContainerGrant(
        ("--security-opt", "no-new-privileges"),
        "no program of the image can gain rights through its owner or mode",
        _UNTRIED,
    ),
)
_EVERYTHING_GRANT = ContainerGrant(
    ("--privileged",),
    "CONTAINER_PRIVILEGED=1 asked for it: every device and every right of the machine",
    "docs.cloud.google.com/tpu/docs/run-in-container; vLLM's installation page for TPUs",
)
# What the usual command has and this container has not, for the documents.
GRANTS_LEFT_OUT: Mapping[str, str] = {
    "--privileged": "device files and the memory limit stand for it; CONTAINER_PRIVILEGED=1 has it",
    "--net=host": "one port is published, on the machine's loopback; nothing else can be reached",
    "--ipc=host": "its own /dev/shm is large enough",
    "--read-only": "would be narrower; what the image writes outside /cache and /tmp is not known",
}


def container_grants(devices: str, privileged: bool = False) -> list[ContainerGrant]:
    """The grants for a container with the device files `devices` (by comma), in docker's order.

    `privileged` takes the place of the narrow grants: the way of Google's and vLLM's own pages, for
    the case that the chip is not found otherwise.
    """
    if privileged:
        return [_EVERYTHING_GRANT, *_COMMON_GRANTS]
    chips = [
        ContainerGrant(
            ("--device", path.strip()),
            "the chip: v5e and v6e show as a numbered file in /dev/vfio beside the control file; "
            "docker passes every device file of a folder",
            "marin-community/marin#4941, 2026-04 (v4 is /dev/accel*, later ones are not); "
            f"tpu_inference/tpu_info.py of 0.32.0 counts both; {_UNTRIED}",
        )
        for path in devices.split(",")
    ]
    return [*_NARROW_GRANTS, *chips, *_COMMON_GRANTS]
