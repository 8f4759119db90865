"""What a toolset is: a class whose marked methods are the MCP tools of one concern.

Names and descriptions are templates over the plane's and the runtime's vocabulary, so that one
toolset serves every rig without lying about any.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, TypeVar

from forge.parts.boundaries.chat_client import ChatClient
from forge.parts.ground.jobs import JobRunner, JobStore
from forge.parts.ground.journal import Journal
from forge.parts.ground.settings import RigSettings
from forge.parts.ground.state import RigPaths
from forge.parts.planes.plane import ServingPlane
from forge.parts.runtimes.runtime import Runtime

ToolEffect = Literal["reads", "changes", "destroys"]
_TOOL_MARK = "__rig_tool__"
MethodT = TypeVar("MethodT", bound=Callable[..., Any])


@dataclass(frozen=True)
class ToolMark:
    """What the decorator leaves on a method. `name` and the docstring may hold ``{words}``."""

    name: str
    title: str
    effect: ToolEffect
    structured: bool


@dataclass(frozen=True)
class ToolMethod:
    """A marked method, bound, with its words filled in: ready to be registered."""

    function: Callable[..., Any]
    name: str
    title: str
    description: str
    effect: ToolEffect
    structured: bool


@dataclass
class RigContext:
    """All that a toolset can see of its rig."""

    rig: str
    version: str
    load: Callable[[], RigSettings]
    paths: RigPaths
    server_file: Path
    journal: Journal
    jobs: JobStore
    plane: ServingPlane
    runtime: Runtime
    vocabulary: Mapping[str, str]
    owner: str = ""  # this installation's id, a label of all that it rents; empty owns nothing
    extras: dict[str, Any] = field(default_factory=dict)

    @property
    def settings(self) -> RigSettings:
        """The rig's values now. Raises RigError INVALID while tpu.env is at fault."""
        return self.load()

    def beside(self, name: str) -> Path:
        """A program of the rig that lies beside server.py, such as triage.py."""
        return self.server_file.with_name(name)

    def version_of(self, name: str) -> str:
        """The version of a program beside server.py: the rig's, and 12 digits of its SHA-256."""
        digest = hashlib.sha256(self.beside(name).read_bytes()).hexdigest()
        return f"{self.version.partition('+')[0]}+{digest[:12]}"

    def chat_client(self, address: str) -> ChatClient:
        """A client of this rig's model server at `address`, with its key where it takes one."""
        return ChatClient(address, self.runtime.api_key())


def rig_tool(
    *, title: str, effect: ToolEffect, name: str = "", structured: bool = True
) -> Callable[[MethodT], MethodT]:
    """Mark a toolset's method as a tool. `effect` becomes the client's read-only/destructive hint.

    structured=False is for logs and markdown: one client escapes them otherwise.
    """

    def mark(method: MethodT) -> MethodT:
        setattr(method, _TOOL_MARK, ToolMark(name or method.__name__, title, effect, structured))
        return method

    return mark


class Toolset:
    """Base of all toolsets. A subclass that overrides a marked method must mark it again."""

    toolset_name = "toolset"
    on_by_default = True

    def __init__(self, context: RigContext) -> None:
        self.context = context

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        served: dict[str, Any] = {}
        for base in cls.__mro__:
            for name, member in vars(base).items():
                first = served.setdefault(name, member)
                if hasattr(member, _TOOL_MARK) and not hasattr(first, _TOOL_MARK):
                    raise TypeError(f"{cls.__name__}.{name} hides a tool: mark it again")

    def tool_methods(self) -> list[ToolMethod]:
        """The tools of this toolset, in the order of their definition."""
        found: dict[str, ToolMark] = {}
        for base in reversed(type(self).__mro__):
            for name, member in vars(base).items():
                mark = getattr(member, _TOOL_MARK, None)
                if isinstance(mark, ToolMark):
                    found[name] = mark
        words = self.context.vocabulary
        return [
            ToolMethod(
                function=getattr(self, attribute),
                name=mark.name.format_map(words),
                title=mark.title.format_map(words),
                description=_unwrapped((getattr(self, attribute).__doc__ or "").format_map(words)),
                effect=mark.effect,
                structured=mark.structured,
            )
            for attribute, mark in found.items()
        ]

    def job_runners(self) -> dict[str, JobRunner]:
        """The kinds of job that this toolset starts, and what a worker runs for each."""
        return {}


def _unwrapped(docstring: str) -> str:
    """A docstring as one paragraph a blank line: source line breaks mean nothing to a model."""
    paragraphs = docstring.strip().split("\n\n")
    return "\n\n".join(" ".join(paragraph.split()) for paragraph in paragraphs)
