"""All signatures of the failure bank, read once: what the stages' modules hold, put together."""

from __future__ import annotations

import functools

from forge.parts.knowledge.failure_bank import FailureBank
from forge.parts.knowledge.failure_signature import parse_signatures
from forge.parts.knowledge.failures_boot import BOOT_SIGNATURES
from forge.parts.knowledge.failures_capacity import CAPACITY_SIGNATURES, QUOTA_SIGNATURES
from forge.parts.knowledge.failures_client import CLIENT_SIGNATURES
from forge.parts.knowledge.failures_compile import COMPILE_SIGNATURES
from forge.parts.knowledge.failures_image import DOWNLOAD_SIGNATURES, IMAGE_SIGNATURES
from forge.parts.knowledge.failures_load import LOAD_SIGNATURES
from forge.parts.knowledge.failures_machine import MACHINE_SIGNATURES
from forge.parts.knowledge.failures_memory import MEMORY_SIGNATURES
from forge.parts.knowledge.failures_permission import PERMISSION_SIGNATURES
from forge.parts.knowledge.failures_serve import SERVE_SIGNATURES
from forge.parts.knowledge.log_answer import FailureStage

_TEXT_BY_STAGE: dict[FailureStage, str] = {
    "capacity": CAPACITY_SIGNATURES,
    "quota": QUOTA_SIGNATURES,
    "permission": PERMISSION_SIGNATURES,
    "boot": BOOT_SIGNATURES + MACHINE_SIGNATURES,
    "image": IMAGE_SIGNATURES,
    "download": DOWNLOAD_SIGNATURES,
    "load": LOAD_SIGNATURES,
    "compile": COMPILE_SIGNATURES,
    "memory": MEMORY_SIGNATURES,
    "serve": SERVE_SIGNATURES,
    "client": CLIENT_SIGNATURES,
}


@functools.cache
def failure_bank() -> FailureBank:
    """The bank of every stage. Takes some milliseconds, once a process."""
    found = [s for stage, text in _TEXT_BY_STAGE.items() for s in parse_signatures(stage, text)]
    return FailureBank(found)
