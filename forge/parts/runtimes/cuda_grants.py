"""What vLLM's container gets of a machine with an NVIDIA GPU.

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

_CUDA_COMMON_GRANTS = (
    ContainerGrant(
        ("--gpus", "device=0"),
        "the GPU: NVIDIA's part of docker adds the device files of the first one and its driver's "
        "libraries, and nothing else gives them",
        f"docs.docker.com/engine/containers/gpu; {UNTRIED_GRANT}",
    ),
    ContainerGrant(
        ("--shm-size", "4g"),
        "vLLM's processes hand requests and tensors over in /dev/shm, and docker gives 64 MB; this "
        "is a bound, not taken at once: the smallest machine has 16 GiB in all",
        f"docs.vllm.ai, Using Docker: this or --ipc=host; the size is {UNTRIED_GRANT}",
    ),
)
# What the usual command has and this container has not, for the documents.
CUDA_GRANTS_LEFT_OUT: Mapping[str, str] = {
    "--privileged": "NVIDIA's part of docker hands the GPU over without it",
    "--ipc=host": "its own /dev/shm is large enough",
    "--net=host": "one port is published, on the machine's loopback; nothing else can be reached",
    "--runtime": "--gpus asks for NVIDIA's runtime by itself",
    "--ulimit": "one GPU's driver pins memory itself; several that talk to each other may need it",
    "--read-only": "would be narrower; what the image writes outside /cache and /tmp is not known",
}


def cuda_grants(usual_rights: bool = False) -> list[ContainerGrant]:
    """The grants for a container with the machine's first GPU, in docker's order.

    `usual_rights` leaves out what takes rights away, for the case that the image needs them.
    """
    narrow = () if usual_rights else (NO_CAPABILITIES_GRANT, NO_NEW_RIGHTS_GRANT)
    return [*narrow, *_CUDA_COMMON_GRANTS]
