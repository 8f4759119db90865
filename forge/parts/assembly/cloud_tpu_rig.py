"""A rig that serves vLLM on the TPU machine which it rents through the Cloud TPU API."""

from __future__ import annotations

from collections.abc import Mapping

from forge.parts.assembly.rented_tpu import RentedTpu
from forge.parts.assembly.rented_vllm import RentedVllmSettings
from forge.parts.planes.tpu_order import CloudTpuSettings


class CloudTpuVllmSettings(CloudTpuSettings, RentedVllmSettings):
    """Every key that the tpu.env of such a rig may hold."""


class RentedCloudTpu(RentedTpu):
    """The Cloud TPU API, and vLLM on the machine that is rented through it."""

    vocabulary: Mapping[str, str] = {**RentedTpu.vocabulary, "docker": "vllm_docker"}
