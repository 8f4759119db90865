"""A machine of EC2 with an NVIDIA GPU: its order, its secret and its bucket, its GPU.

The order is a file that the user data brought; the aws command has the instance profile's
credentials. Shutting down terminates the machine: it was ordered so. Knows no model server.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from typing import Any

from forge.machine.console import HOME, ROOT, Failure, Progress, run, seen_secrets, tried
from forge.machine.machine import Document, copy_by

ORDER = HOME / "order.json"
GPU_FIELDS = "name,compute_cap,memory.total,driver_version"
NO_DRIVER = (
    "{why}. Remedy: an image that has NVIDIA's driver for this GPU, such as AWS's Deep Learning "
    "Base AMI with the OSS driver (AMI_PARAMETER)"
)
REMEDIES = {  # for what the aws command says
    "AccessDenied": "let the role of the machine's instance profile read this secret "
    "(secretsmanager:GetSecretValue); set-up makes such a role",
    "ResourceNotFound": "save_hf_token makes the secret in this region",
    "Unable to locate credentials": "launch it with an instance profile (INSTANCE_PROFILE)",
    "not on this machine": "an image that has the AWS CLI, such as AWS's Deep Learning Base AMI "
    "(AMI_PARAMETER)",
}


class Ec2:
    """User data run once in a machine's life, so a service boots it after later starts."""

    forms: Mapping[str, str] = {
        "project": r"\d{12}",  # the account
        "region": r"[a-z]{2}(-[a-z]+){1,3}-\d{1,2}",
        "gpu_arch": r"\d{1,2}\.\d",  # the compute capability that the GPU has to have
    }
    acts: Sequence[str] = ("gpu",)
    boots_again = False

    def document(self) -> str:
        try:
            return ORDER.read_text()
        except OSError as error:
            raise Failure(f"the order that the user data bring is not here: {error}") from None

    def check(self, document: Document, progress: Progress) -> None:
        progress.begin("driver")
        gpu = tried(6, gpu_facts, lambda why: why.code == 0)  # the driver may still be loading
        has, wanted = gpu["compute_capability"], document["gpu_arch"]
        if has != wanted:
            raise Failure(
                f"the GPU is a {gpu['name']} of compute capability {has}, this rig is for {wanted}."
                " Remedy: INSTANCE_TYPE and CHIP have to be those of one machine"
            )
        words = f"{gpu['memory_mib']} MiB, driver {gpu['driver']}, CUDA {gpu['cuda_driver']}"
        progress.tell("done", f"{gpu['name']}, compute capability {has}, {words}")

    def token(self, document: Document) -> str:
        secret, region = document["secret"], document["region"]
        if not secret:
            return ""
        argv = ["aws", "secretsmanager", "get-secret-value", "--region", region]
        argv += ["--secret-id", secret, "--query", "SecretString", "--output", "text"]

        def passes(failure: Failure) -> bool:  # credentials come a moment after the machine
            return not re.search(r"AccessDenied|NotFound|not on this|Unrecognized", str(failure))

        try:
            token = tried(6, lambda: run(*argv), passes)
        except Failure as failure:
            remedies = [words for sign, words in REMEDIES.items() if sign in str(failure)]
            remedy = (remedies or ["see to it and start the model server"])[0]
            raise Failure(f"secret {secret} in {region}: {failure}. Remedy: {remedy}") from None
        if not re.fullmatch(r"[!-~]+", token) or token == "None":  # the secret is binary
            raise Failure(f"secret {secret} in {region} does not hold one plain word")
        seen_secrets.add(token)
        return token

    def copy_cache(self, document: Document, way: str, progress: Progress) -> None:
        program = ("aws", "s3", "sync", "--only-show-errors", "--region", document["region"])
        copy_by(document, way, progress, "s3", program)

    def act(self, word: str) -> str:
        return json.dumps(gpu_facts())

    def leave(self, document: Document) -> None:
        """Nothing: shutting down terminates the machine."""


def gpu_facts() -> dict[str, Any]:
    """The first GPU, by nvidia-smi.

    name, compute_capability ("8.9"), memory_mib, driver; count; cuda_driver, the newest CUDA that
    the driver knows; cuda_toolkit, that of nvcc. Both are "12.8" or so, empty where not to be had.
    Raises Failure with the remedy, its code 0 where another try may help.
    """
    try:
        query = (f"--query-gpu={GPU_FIELDS}", "--format=csv,noheader,nounits")
        lines = run("nvidia-smi", *query).splitlines()
        name, arch, memory, driver = lines[0].rsplit(", ", 3)
        versions = run("nvidia-smi")
    except Failure as failure:
        hopeless = re.search(r"not on this machine|took more than", str(failure))
        raise Failure(NO_DRIVER.format(why=failure), -1 if hopeless else 0) from None
    except (LookupError, ValueError):
        raise Failure(NO_DRIVER.format(why="nvidia-smi names no GPU"), 0) from None
    found = re.search(r"CUDA[\w ]* Version *: *([\d.]+)", versions)
    return {
        "name": name,
        "compute_capability": arch,
        "memory_mib": int(memory) if memory.isdigit() else 0,
        "driver": driver,
        "count": len(lines),
        "cuda_driver": found[1] if found else "",
        "cuda_toolkit": toolkit_version(),
    }


def toolkit_version() -> str:
    """The release of CUDA's compiler, from the PATH or from where NVIDIA installs it; or empty."""
    for program in ("nvcc", str(ROOT / "usr/local/cuda/bin/nvcc")):
        try:
            found = re.search(r"release ([\d.]+)", run(program, "--version"))
        except (Failure, OSError):
            continue
        return found[1] if found else ""
    return ""
