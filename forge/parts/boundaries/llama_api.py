"""What llama.cpp's server tells beside its OpenAI-style API: its slots and its properties.

A client like the chat one, with its bounds; knows no other model server.
"""

from __future__ import annotations

import json
from typing import Any

from pydantic import BaseModel, ConfigDict, Field

from forge.parts.boundaries.chat_client import ChatClient
from forge.parts.ground.errors import RigError

_SLOTS_LIMIT = 256  # entries read; the server itself takes fewer


class LlamaSlot(BaseModel):
    """One slot as /slots has it, in the server's own names. null: no request has used it yet."""

    model_config = ConfigDict(extra="ignore")

    id: int
    n_ctx: int = Field(description="Tokens that one request may have, prompt and answer.")
    is_processing: bool
    id_task: int | None = None
    n_prompt_tokens: int | None = Field(
        default=None, description="Tokens that the slot holds now: prompt, then answer as well."
    )
    n_prompt_tokens_processed: int | None = None
    n_prompt_tokens_cache: int | None = Field(
        default=None, description="Prompt tokens taken over from the request before."
    )
    n_decoded: int | None = Field(default=None, description="Tokens generated so far.")
    n_remain: int | None = Field(default=None, description="Tokens it may still generate.")


class LlamaProperties(BaseModel):
    """What /props says of the server and its model: resolved values, not what was asked for."""

    model_config = ConfigDict(extra="ignore", protected_namespaces=())

    build_info: str
    model_path: str
    model_ftype: str
    total_slots: int
    n_ctx: int
    chat_template: str
    thinks: bool = Field(description="Whether the chat template can be told to think.")

    @property
    def resolved(self) -> dict[str, str]:
        """What the server settled on, by its own names, for whoever shows a model's details."""
        return {
            "build_info": self.build_info,
            "model_path": self.model_path,
            "model_ftype": self.model_ftype,
            "total_slots": str(self.total_slots),
            "n_ctx": str(self.n_ctx),
            "enable_thinking": "in the chat template"
            if self.thinks
            else "not in the chat template",
        }


def llama_properties(props: dict[str, Any]) -> LlamaProperties:
    """`props` as /props answers. Raises RigError DENIED where it is no such object."""
    try:
        template = str(props["chat_template"])
        own = {"n_ctx": props["default_generation_settings"]["n_ctx"], "chat_template": template}
        return LlamaProperties(**{**props, **own}, thinks="enable_thinking" in template)
    except (ValueError, TypeError, KeyError):
        raise RigError("DENIED", "/props did not answer as llama-server does") from None


class LlamaApi(ChatClient):
    """A client of llama-server's /slots at a chat client's address."""

    async def slots(self, timeout_s: float = 5.0) -> list[LlamaSlot]:
        """Every slot. RigError UNREACHABLE, TIMEOUT, or DENIED where no such list came back."""
        status, body = await self._get("/slots", timeout_s)
        if status != 200:
            raise RigError("UNREACHABLE", f"/slots answered {status}", "read the server's log")
        try:
            rows = json.loads(body)
            return [_llama_slot(row) for row in rows[:_SLOTS_LIMIT]]
        except (ValueError, TypeError, KeyError, AttributeError, RecursionError):
            raise RigError("DENIED", "/slots did not answer as llama-server does") from None


def _llama_slot(row: dict[str, Any]) -> LlamaSlot:
    """One entry; what is generated stands in a list of one inside it."""
    generated = row.get("next_token") or [{}]
    own = generated[0] if isinstance(generated, list) else generated
    inner = {key: own.get(key) for key in ("n_decoded", "n_remain")}
    return LlamaSlot(**{**row, **inner})
