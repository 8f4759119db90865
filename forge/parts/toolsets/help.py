"""The help toolset: one page on this rig, written from the live tool list and the live settings."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from forge.parts.ground.errors import RigError
from forge.parts.ground.settings import origin_of_settings
from forge.parts.toolsets.toolset import RigContext, ToolMethod, Toolset, rig_tool


class HelpToolset(Toolset):
    """Help."""

    toolset_name = "help"

    def __init__(
        self, context: RigContext, listing: Callable[[], Sequence[tuple[str, list[ToolMethod]]]]
    ) -> None:
        super().__init__(context)
        self._listing = listing

    @rig_tool(title="Help", effect="reads", structured=False)
    async def get_help(self) -> str:
        """What this rig is, its tools by concern, its settings with where each value came from, and
        the usual order of calls. Changes nothing."""
        context = self.context
        lines = [f"# {context.rig} {context.version}", "", context.extras.get("about", ""), ""]
        lines += ["## Usual order", "", str(context.extras.get("order", "")), "", "## Tools", ""]
        for concern, methods in self._listing():
            lines += [f"{concern}:", ""]
            lines += [f"- `{m.name}` ({m.effect}): {m.description}" for m in methods] + [""]
        lines += ["## Settings", ""]
        try:
            lines += self._settings()
        except RigError as error:
            lines.append(f"They cannot be read: {error}")
        lines += ["", f"State: `{context.paths.state}`", f"Server: `{context.server_file}`"]
        return "\n".join(lines)

    def _settings(self) -> list[str]:
        settings = self.context.settings
        origins = origin_of_settings(settings)
        lines = []
        for name, value in settings.model_dump(mode="json").items():
            meaning = type(settings).model_fields[name].description or ""
            lines.append(f"- `{name.upper()}={value}` ({origins[name]}): {meaning}")
        return lines
