"""What a rented machine will run, before it runs: the boot order, the command, a manifest.

Knows no provider: the runtime composes the container's command and the document of the boot, the
plane says how a machine would be created.
"""

from __future__ import annotations

import json
import shlex
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, Protocol, cast

from pydantic import Field

from forge.parts.ground.errors import RigError
from forge.parts.ground.names import checked_name
from forge.parts.ground.results import Outcome
from forge.parts.ground.state import private_folder, read_json, write_json
from forge.parts.toolsets.capacity import BOOT_ORDER
from forge.parts.toolsets.toolset import RigContext, Toolset, rig_tool

BOOT_FOLDER = "boot"  # below the state folder
BOOT_DOCUMENT = "boot.json"


class BootingRuntime(Protocol):
    """The verbs of a runtime whose server a machine starts at boot. What runs without a container
    has no image: then `image` gives an empty one, and a word on what the machine builds."""

    async def image(self) -> tuple[str, str]: ...
    def serve_argv(self) -> list[str]: ...
    def boot_document(self, rig: str, project: str, image: str, life_s: int) -> dict[str, Any]: ...
    def privileges(self) -> list[str]: ...


class ClusterRuntime(BootingRuntime, Protocol):
    """A runtime whose server can be run in a cluster as well."""

    def manifest(self, image: str, replicas: int) -> str: ...


class OrderingPlane(Protocol):
    """The verbs of a plane that can say what a create call would be, and what its machines have to
    know of it beside the runtime's own document. Both may be lacking."""

    def create_command(self, zone: str, market: str, hours: float) -> list[str]: ...
    def boot_words(self) -> Mapping[str, str]: ...


class LaunchOutcome(Outcome):
    """What create would run. Nothing was created."""

    image: str = Field(description="Empty where the machine builds the server itself.")
    image_note: str = Field(description="How the image was resolved, or what is built.")
    serve_argv: list[str] = Field(description="The model server's own arguments.")
    container_argv: list[str] = Field(description="What the machine runs at boot.")
    create_argv: list[str] = Field(description="The provider's command, for one zone.")
    privileges: list[str] = Field(description="What the server may do beyond the ordinary.")
    idle_minutes: int
    life_s: int


class BootOrder:
    """Writes down what the next machine boots: the document that goes out as its metadata."""

    def __init__(self, context: RigContext) -> None:
        self._context = context
        self._runtime = cast(BootingRuntime, context.runtime)

    @property
    def path(self) -> Path:
        return self._context.paths.state / BOOT_FOLDER / BOOT_DOCUMENT

    async def write(self, life_s: int) -> None:
        """Resolve the image and write the document, readable by this user alone. Raises RigError
        INVALID for a machine that could not read the secret it is to read."""
        settings = self._context.settings
        if getattr(settings, "hf_secret", "") and not getattr(settings, "service_account", "-"):
            raise RigError(
                "INVALID",
                "SERVICE_ACCOUNT is empty, so the machine could not read HF_SECRET and its boot "
                "would fail; nothing was asked for",
                "set SERVICE_ACCOUNT (init.sh makes one), or empty HF_SECRET",
            )
        document, note = await self.document(life_s)
        private_folder(self.path.parent)
        write_json(self.path, document)
        self._context.journal.append("boot planned", image=document.get("image", ""), note=note)

    async def document(self, life_s: int) -> tuple[dict[str, Any], str]:
        """The document, and a word on its image."""
        image, note = await self._runtime.image()
        project = str(getattr(self._context.settings, "project", ""))
        document = self._runtime.boot_document(self._context.rig, project, image, life_s)
        words = getattr(self._context.plane, "boot_words", None)
        return {**document, **(words() if words is not None else {})}, note

    def last(self) -> Mapping[str, Any]:
        """The document that was written last; empty before the first."""
        return read_json(self.path) or {}


class DeploymentToolset(Toolset):
    """The command."""

    toolset_name = "deployment"

    def __init__(self, context: RigContext) -> None:
        super().__init__(context)
        self.boot_order = BootOrder(context)
        context.extras[BOOT_ORDER] = self.boot_order.write

    @rig_tool(name="get_{ready}_deployment_config", title="What would run", effect="reads")
    async def get_deployment_config(
        self,
        zone: Annotated[
            str, Field(max_length=40, description="For the create command; empty: the first one.")
        ] = "",
        hours: Annotated[float, Field(ge=0.25, le=168, description="Life in hours.")] = 1.0,
    ) -> LaunchOutcome:
        """What a {rented} of this rig would run: the image by digest, {engine}'s command line, what
        the machine starts, the provider's create command, and each privilege with its reason.
        Creates nothing and costs nothing; asks an image's registry once."""
        if zone:
            checked_name("zone", "zone", zone)
        document, note = await self.boot_order.document(round(hours * 3600))
        return self._deployment(document, note, zone, hours)

    def _deployment(
        self, document: Mapping[str, Any], note: str, zone: str, hours: float
    ) -> LaunchOutcome:
        runtime = cast(BootingRuntime, self.context.runtime)
        create: list[str] = []
        maker = getattr(self.context.plane, "create_command", None)
        if maker is not None:
            create = list(maker(zone, "", hours))
        started = document.get("container", document.get("serve", runtime.serve_argv()))
        argv = [str(word) for word in started]
        return LaunchOutcome(
            summary=f"Would run: {shlex.join(argv)[:2000]}. Nothing was created.",
            next_step=f"find_{self.context.vocabulary['hardware']}()",
            image=str(document.get("image", "")),
            image_note=note,
            serve_argv=runtime.serve_argv(),
            container_argv=argv,
            create_argv=create,
            privileges=runtime.privileges(),
            idle_minutes=int(document["idle_minutes"]),
            life_s=int(document["life_s"]),
        )


class ClusterDeploymentToolset(DeploymentToolset):
    """And the manifest of the same serving in a cluster."""

    @rig_tool(
        name="get_{ready}_tpu_manifest",
        title="The same for Kubernetes",
        effect="reads",
        structured=False,
    )
    async def get_manifest(
        self,
        replicas: Annotated[int, Field(ge=1, le=100, description="Servers side by side.")] = 1,
    ) -> str:
        """The same serving as a Kubernetes manifest for a GKE TPU node: command, port, probes, node
        selector, resources, the token's secret; with more than one replica a Service and an
        autoscaler on {engine}'s queue. Applied to no cluster, and never run on one by this rig."""
        image, note = await cast(ClusterRuntime, self.context.runtime).image()
        text = cast(ClusterRuntime, self.context.runtime).manifest(image, replicas)
        return f"# {note}\n{text}"


def boot_document_file(state: Path) -> Path:
    """The document that the next machine boots. RigError INTERNAL where it was not written."""
    document = state / BOOT_FOLDER / BOOT_DOCUMENT
    if not document.is_file():
        raise RigError("INTERNAL", "no boot was planned before a machine was asked for")
    return document


def boot_files(state: Path, program: Path) -> dict[str, Path]:
    """The files that go out with a create call of Google's, by metadata key. Raises RigError."""
    document = boot_document_file(state)
    if len(json.dumps(read_json(document))) > 200_000:  # metadata values end at 256 KB
        raise RigError("INVALID", "the document of the boot is too large for a machine's metadata")
    return boot_paths(state, program)


def boot_paths(state: Path, program: Path) -> dict[str, Path]:
    """Where those files lie, or will."""
    return {"startup-script": program, "gemma4-boot": state / BOOT_FOLDER / BOOT_DOCUMENT}
