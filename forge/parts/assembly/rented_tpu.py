"""The Cloud TPU API as the plane of a rig that serves a model on the machine it rents there.

Knows no engine: the modules beside it put one to this.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Literal, cast

from forge.parts.assembly.rented_google import RentedGooglePlane
from forge.parts.boundaries.gcloud import Gcloud
from forge.parts.ground.errors import RigError
from forge.parts.ground.journal import Journal
from forge.parts.ground.settings import RigSettings
from forge.parts.ground.state import RigPaths
from forge.parts.knowledge.sweep_refusals import region_of
from forge.parts.planes.capacity_plane import shown_order
from forge.parts.planes.cloud_tpu import CloudTpu
from forge.parts.planes.google_needs import google_needs
from forge.parts.planes.plane import PlaneNeed
from forge.parts.planes.tpu_order import (
    CloudTpuSettings,
    tpu_markets,
    tpu_order_call,
    tpu_zones,
)
from forge.parts.toolsets.deployment import boot_files


class RentedTpu(CloudTpu, RentedGooglePlane):
    """The Cloud TPU API, and a model server on the machine that is rented through it."""

    log_kind: Literal["gce_instance", "tpu_worker"] = "tpu_worker"
    vocabulary: Mapping[str, str] = {**CloudTpu.vocabulary, "serve": "find_tpu()"}

    def __init__(
        self, paths: RigPaths, label: str, journal: Journal, load: Callable[[], RigSettings]
    ) -> None:
        RentedGooglePlane.__init__(self, paths, label, journal, load)
        values = cast(Callable[[], CloudTpuSettings], load)
        CloudTpu.__init__(self, values, self.boot_files)

    def boot_files(self) -> Mapping[str, Path]:
        """The files of the next machine's metadata, by key. Raises RigError."""
        return boot_files(self._paths.state, self._program)

    def create_command(self, zone: str, market: str, hours: float) -> list[str]:
        """The command of a create, but for its intent and its end."""
        settings, wait_s = self._settings(), 1800
        ways = tpu_markets(settings)
        way = next((one for one in ways if one == market), ways[0])
        zone = zone or tpu_zones(settings)[0]
        order = shown_order(self._rig, self._owner, zone, way, hours, wait_s)
        call = tpu_order_call(settings, order, self.boot_paths())
        return ["gcloud", *Gcloud(settings.project).argv(call)]

    async def plane_needs(self) -> Sequence[PlaneNeed]:
        """gcloud, its login, the client libraries' own credentials, and ssh."""
        try:
            settings = self._settings()
        except RigError:
            return []  # the settings' own row says what is wrong with them
        found = await google_needs(settings.project, region_of(tpu_zones(settings)[0]))
        return [*found, *(PlaneNeed("caution", True, words) for words in self.cautions())]
