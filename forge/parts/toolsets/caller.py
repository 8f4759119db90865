"""Who calls a tool, and what a tool may hand over beside text; the guarded tool translates both.

Knows nothing of the SDK: it takes most of a second to import, and a job's worker speaks no MCP.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Protocol


class Caller(Protocol):
    """What a tool's parameter `ctx` can do: the part of the SDK's Context that toolsets use."""

    @property
    def client_capabilities(self) -> Any: ...

    @property
    def protocol_version(self) -> str | None: ...

    @property
    def input_responses(self) -> Mapping[str, Any] | None: ...

    @property
    def request_state(self) -> str | None: ...

    async def report_progress(
        self, progress: float, total: float | None = None, message: str | None = None
    ) -> None:
        """Tell how far a call has come."""

    async def elicit(self, message: str, schema: Any) -> Any:
        """Ask the person behind the client to fill in `schema`."""


@dataclass(frozen=True)
class Picture:
    """A PNG that a tool shows."""

    data: bytes


class QuestionFirst(Exception):
    """The call is to be made again with a person's answer: the question rides in the result.

    `key` names the answer, `schema` is what is to be filled in, `state` comes back with it.
    """

    def __init__(self, question: str, key: str, schema: dict[str, Any], state: str) -> None:
        super().__init__(question)
        self.question = question
        self.key = key
        self.schema = schema
        self.state = state
