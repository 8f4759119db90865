"""Compute Engine as the plane of a rig that serves vLLM on the machine it rents there."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import cast

from forge.parts.assembly.rented_google import RentedGooglePlane
from forge.parts.assembly.rented_vllm import RentedVllmSettings
from forge.parts.boundaries.gcloud import Gcloud
from forge.parts.ground.errors import RigError
from forge.parts.ground.journal import Journal
from forge.parts.ground.settings import RigSettings
from forge.parts.ground.state import RigPaths
from forge.parts.knowledge.sweep_refusals import region_of
from forge.parts.planes.capacity_plane import listed, shown_order
from forge.parts.planes.compute_catalogue import V6E_ZONES
from forge.parts.planes.compute_engine import ComputeEngine
from forge.parts.planes.compute_order import (
    ComputeEngineSettings,
    compute_order_call,
    wished_markets,
)
from forge.parts.planes.google_needs import google_needs
from forge.parts.planes.plane import PlaneNeed
from forge.parts.toolsets.deployment import boot_files


class ComputeEngineVllmSettings(ComputeEngineSettings, RentedVllmSettings):
    """Every key that the tpu.env of such a rig may hold."""


class RentedComputeEngine(ComputeEngine, RentedGooglePlane):
    """Compute Engine, and vLLM on the machine that is rented there."""

    vocabulary: Mapping[str, str] = {
        **ComputeEngine.vocabulary,
        "docker": "vllm_docker",
        "serve": "find_tpu_vm()",
    }

    def __init__(
        self, paths: RigPaths, label: str, journal: Journal, load: Callable[[], RigSettings]
    ) -> None:
        RentedGooglePlane.__init__(self, paths, label, journal, load)
        values = cast(Callable[[], ComputeEngineVllmSettings], load)
        ComputeEngine.__init__(self, values, lambda: boot_files(paths.state, self._program))

    def create_command(self, zone: str, market: str, hours: float) -> list[str]:
        """The command of a create, but for its intent and its end."""
        settings, wait_s = self._settings(), 1800
        zone = zone or (listed(settings.zones) or list(V6E_ZONES))[0]
        ways = wished_markets(settings)
        way = next((one for one in ways if one == market), ways[0])
        valid_s = wait_s if way in self.queued_markets else 0
        order = shown_order(self._rig, self._owner, zone, way, hours, valid_s)
        call = compute_order_call(settings, order, self.boot_paths())
        return ["gcloud", *Gcloud(settings.project).argv(call)]

    async def plane_needs(self) -> Sequence[PlaneNeed]:
        """gcloud, its login, the client libraries' own credentials, and ssh."""
        try:
            settings = self._settings()
        except RigError:
            return []  # the settings' own row says what is wrong with them
        zones = listed(settings.zones) or list(V6E_ZONES)
        found = await google_needs(settings.project, region_of(zones[0]))
        return [*found, *(PlaneNeed("caution", True, words) for words in self.cautions())]
