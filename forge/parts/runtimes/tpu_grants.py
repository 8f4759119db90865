"""What vLLM's container gets of a TPU machine.

Knows no image and no engine's arguments.
"""

from __future__ import annotations

from collections.abc import Mapping

from forge.parts.runtimes.container_grants import (
    NO_CAPABILITIES_GRANT,
    NO_NEW_RIGHTS_GRANT,
    UNTRIED_GRANT,
    ContainerGrant,
)

# A public test bench that runs JAX on TPU machines in docker without --privileged.
_TPU_CI = "marin-community/marin#2478, 2026-01"
_TPU_COMMON_GRANTS = (
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
        f"mode (64 GiB there, and in {_TPU_CI}; here no limit); {UNTRIED_GRANT}",
    ),
)
_TPU_NARROW_GRANTS = (
    NO_CAPABILITIES_GRANT,
    ContainerGrant(
        ("--cap-add", "SYS_RESOURCE"),
        "a process may raise its own limits; with locked memory unlimited from the start it may be "
        "needless, but every published run without --privileged has it",
        f"{_TPU_CI}; {UNTRIED_GRANT}",
    ),
    NO_NEW_RIGHTS_GRANT,
)
_EVERYTHING_GRANT = ContainerGrant(
    ("--privileged",),
    "CONTAINER_PRIVILEGED=1 asked for it: every device and every right of the machine",
    "docs.cloud.google.com/tpu/docs/run-in-container; vLLM's installation page for TPUs",
)
# What the usual command has and this container has not, for the documents.
TPU_GRANTS_LEFT_OUT: Mapping[str, str] = {
    "--privileged": "device files and the memory limit stand for it; CONTAINER_PRIVILEGED=1 has it",
    "--net=host": "one port is published, on the machine's loopback; nothing else can be reached",
    "--ipc=host": "its own /dev/shm is large enough",
    "--read-only": "would be narrower; what the image writes outside /cache and /tmp is not known",
}


def tpu_grants(devices: str, privileged: bool = False) -> list[ContainerGrant]:
    """The grants for a container with the device files `devices` (by comma), in docker's order.

    `privileged` takes the place of the narrow grants: the way of Google's and vLLM's own pages, for
    the case that the chip is not found otherwise.
    """
    if privileged:
        return [_EVERYTHING_GRANT, *_TPU_COMMON_GRANTS]
    chips = [
        ContainerGrant(
            ("--device", path.strip()),
            "the chip: v5e and v6e show as a numbered file in /dev/vfio beside the control file; "
            "docker passes every device file of a folder",
            "marin-community/marin#4941, 2026-04 (v4 is /dev/accel*, later ones are not); "
            f"tpu_inference/tpu_info.py of 0.32.0 counts both; {UNTRIED_GRANT}",
        )
        for path in devices.split(",")
    ]
    return [*_TPU_NARROW_GRANTS, *chips, *_TPU_COMMON_GRANTS]
