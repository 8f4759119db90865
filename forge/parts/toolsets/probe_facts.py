"""What is known of the served model before it is probed, and what its report says beside verdicts.

Asks the server for its model list, and judge.py where nobody else knows.
"""

from __future__ import annotations

from pathlib import PurePosixPath
from typing import Any

from forge.parts.boundaries.chat_client import ChatClient
from forge.parts.boundaries.judge_program import JUDGE_PROGRAM, asked_subject
from forge.parts.boundaries.load_plan import LoadCellPlan, LoadPlan
from forge.parts.boundaries.probe_plan import PROBE_PROGRAM, ProbeFacts
from forge.parts.ground.errors import RigError
from forge.parts.ground.state import json_object
from forge.parts.knowledge.judge_answer import SubjectQuestion
from forge.parts.knowledge.probe_report import ProbeRunFacts
from forge.parts.planes.plane import Instance
from forge.parts.toolsets.benchmark_frame import benchmark_frame
from forge.parts.toolsets.reports import private_setting_values
from forge.parts.toolsets.toolset import RigContext

_LIMIT_KEYS = ("max_model_len", "context_length", "max_context_length", "context_window")
_SIGHT_KEYS = ("modalities", "input_modalities", "capabilities")
_SIGHT_WORDS = {"image", "vision", "multimodal"}
# Settings that say nothing about what is served.
_SETTINGS_BESIDE = ("rig_", "mcp_", "port", "query_timeout", "hf_token")


async def probe_frame(context: RigContext, instance: Instance, base_url: str) -> dict[str, Any]:
    """Run, subject, hardware and engine of a probe report: those of a benchmark of this server."""
    # The load is of the frame's workload alone, which a probe report has not.
    load = LoadCellPlan(concurrency=1, input_tokens=1, output_tokens=1, requests=1, seconds=1)
    plan = LoadPlan(base_url=base_url, model=instance.served_name, cells=[load])
    frame = await benchmark_frame(context, instance, plan)
    run = {k: v for k, v in frame["run"].items() if k in ProbeRunFacts.model_fields}
    return {
        "run": run,
        "subject": frame["subject"],
        "hardware": frame["hardware"],
        "engine": frame["engine"],
        # The program's version stands beside them: the server's does not cover it.
        "settings": {PROBE_PROGRAM: context.version_of(PROBE_PROGRAM), **_served_settings(context)},
    }


def _served_settings(context: RigContext) -> dict[str, str]:
    """The settings that say how the model is served; of a folder its name alone."""
    settings = context.settings
    private = set(private_setting_values(settings))
    found = {}
    for name, value in settings.model_dump(mode="json", exclude_none=True).items():
        text = str(value)
        if not name.startswith(_SETTINGS_BESIDE) and text not in private:
            found[name.upper()] = (PurePosixPath(text).name if text[:1] == "/" else text)[:120]
    return found


async def _listed_model(client: ChatClient, instance: Instance) -> dict[str, Any]:
    """What the server's model list says of the served model; empty where it says nothing."""
    try:
        listed = (await client.get_json("/v1/models")).get("data")
    except RigError:
        return {}
    entries = [item for item in listed if isinstance(item, dict)] if type(listed) is list else []
    own = [item for item in entries if item.get("id") == instance.served_name]
    return (own or (entries if len(entries) == 1 else [{}]))[0]


async def known_facts(context: RigContext, client: ChatClient, instance: Instance) -> ProbeFacts:
    """Limit and sight: the server's own word first, then the rig's settings and files."""
    listed = await _listed_model(client, instance)
    facts = ProbeFacts()
    for key in _LIMIT_KEYS:
        if type(listed.get(key)) is int and listed[key] > 0:
            facts.context_limit, facts.limit_source = listed[key], f"the server's {key}"
            break
    else:
        limit = getattr(context.settings, "max_model_len", None)
        if type(limit) is int and limit > 0:
            facts.context_limit, facts.limit_source = limit, "MAX_MODEL_LEN"
    facts.vision, facts.vision_source = await _claimed_sight(context, instance, listed)
    return facts


async def _claimed_sight(
    context: RigContext, instance: Instance, listed: dict[str, Any]
) -> tuple[bool | None, str]:
    """Whether the model claims to see, and who says so; None where nobody says anything."""
    for key in _SIGHT_KEYS:
        words = listed.get(key)
        if isinstance(words, list):
            sees = bool(_SIGHT_WORDS & {str(word).lower() for word in words})
            # A list of abilities may leave out what it does not know of; one of inputs does not.
            if sees or "modalities" in key:
                return sees, f"the server's {key}"
    try:
        local = context.runtime.local_model(instance.model)
        config = None if local is None else json_object((local.folder / "config.json").read_bytes())
    except (RigError, OSError):
        config = None
    if config is not None:
        return bool(config.get("vision_config")), "its config.json"
    question = SubjectQuestion(model=instance.model)
    known = await asked_subject(context.beside(JUDGE_PROGRAM), question)
    return (True, "every Gemma 4 release has it") if known.is_gemma4 else (None, "nobody says")
