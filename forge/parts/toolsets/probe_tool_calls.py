"""The five tool-calling scenarios as data, and how an answer to one is judged.

An answer without a call says nothing unless the tools are known to have reached the model: a server
that drops them answers the scenarios that need no call quite well.
"""

from __future__ import annotations

import json
import re
from dataclasses import dataclass
from typing import Any

from forge.parts.boundaries.probe_client import ProbeAnswer
from forge.parts.toolsets.probe_asking import (
    Judgement,
    ProbeAsker,
    barred_judgement,
    cut_off_judgement,
    prompt_growth,
    quoted_answer,
)
from forge.parts.toolsets.probe_cases import PROBE_BY_NAME

_TOOL_TOKENS = 256
_ASKS_BACK = re.compile(
    r"\?|\b(?:which|what|where|please|provide|specify|tell me|let me know|need to know)\b", re.I
)
# How calls look that a parser should have taken out of the text, in several models' spelling.
_CALL_MARKUP = re.compile(r"<\|?tool_call|\[TOOL_CALLS\]|<function=|```tool_code")


def _city_tool(name: str, description: str) -> dict[str, Any]:
    parameters = {
        "type": "object",
        "properties": {"city": {"type": "string", "description": "Name of the city."}},
        "required": ["city"],
        "additionalProperties": False,
    }
    function = {"name": name, "description": description, "parameters": parameters}
    return {"type": "function", "function": function}


_WEATHER_TOOL = _city_tool("get_weather", "The weather in a city at this moment.")
_TIME_TOOL = _city_tool("get_local_time", "The time of day in a city at this moment.")


@dataclass(frozen=True)
class ToolScenario:
    """A question, the tools offered, and the calls that are right as (tool, city in it).

    No right call: the model must answer by itself, or, where `asks_back`, ask for what is missing.
    """

    case: str
    question: str
    tools: tuple[dict[str, Any], ...]
    calls: tuple[tuple[str, str], ...] = ()
    asks_back: bool = False

    @property
    def title(self) -> str:
        return PROBE_BY_NAME[self.case].title


TOOL_SCENARIOS = (
    ToolScenario(
        "tool_one_call",
        "What is the weather in Oslo right now?",
        (_WEATHER_TOOL,),
        (("get_weather", "oslo"),),
    ),
    ToolScenario(
        "tool_right_of_two",
        "What time is it in Tokyo right now?",
        (_WEATHER_TOOL, _TIME_TOOL),
        (("get_local_time", "tokyo"),),
    ),
    ToolScenario(
        "tool_none_needed",
        "How much is 6 times 7? Answer with the number.",
        (_WEATHER_TOOL, _TIME_TOOL),
    ),
    ToolScenario(
        "tool_two_parallel",
        "What is the weather in Oslo and in Lima right now? Look both up at once.",
        (_WEATHER_TOOL, _TIME_TOOL),
        (("get_weather", "lima"), ("get_weather", "oslo")),
    ),
    ToolScenario(
        "tool_missing_argument",
        "What is the weather like right now?",
        (_WEATHER_TOOL,),
        asks_back=True,
    ),
)


async def probe_tool_scenario(asker: ProbeAsker, scenario: ToolScenario) -> Judgement:
    """Ask one scenario; where no call comes back, ask again without tools to see what they did."""
    tools = list(scenario.tools)
    answer = await asker.ask(
        scenario.title, scenario.question, _TOOL_TOKENS, tools=tools, tool_choice="auto"
    )
    added = None
    if not answer.tool_calls and not (barred_judgement(answer) or cut_off_judgement(answer)):
        without = await asker.ask("the same without tools, for its length", scenario.question, 1)
        added = prompt_growth(answer, without)
    return judged_tool_answer(scenario, answer, added)


def judged_tool_answer(
    scenario: ToolScenario, answer: ProbeAnswer, tool_tokens: int | None
) -> Judgement:
    """The verdict on an answer. tool_tokens: prompt tokens that the tools added; None: unknown."""
    early = barred_judgement(answer) or cut_off_judgement(answer)
    if early is not None:
        return early
    if answer.tool_calls:
        return _judged_calls(scenario, answer)
    if _call_in_text(scenario, answer.content):
        return Judgement(
            "silent", f"the call stands in the text, unparsed: {quoted_answer(answer.content)}"
        )
    if tool_tokens is not None and tool_tokens <= 0:
        return Judgement(
            "silent",
            "the prompt has as many tokens without the tools: they never reached the model, which "
            f"answered {quoted_answer(answer.content)!r}",
        )
    if scenario.calls:
        return Judgement("fail", f"no call; it answered {quoted_answer(answer.content)!r}")
    if tool_tokens is None:
        return Judgement(
            "untested",
            "the server counts no prompt tokens, so a model that needs no tool looks like a server "
            "that drops them",
        )
    if not answer.content.strip():
        return Judgement("fail", f"neither a call nor a word ({answer.finish_reason})")
    if scenario.asks_back and not _ASKS_BACK.search(answer.content):
        return Judgement("fail", f"it did not ask for the city: {quoted_answer(answer.content)!r}")
    how = "asked back" if scenario.asks_back else "answered by itself"
    return Judgement("pass", f"no call, it {how}: {quoted_answer(answer.content)!r}")


def _judged_calls(scenario: ToolScenario, answer: ProbeAnswer) -> Judgement:
    """The verdict on an answer that holds calls."""
    offered = {tool["function"]["name"] for tool in scenario.tools}
    made: list[tuple[str, str]] = []
    for call in answer.tool_calls:
        name, city, fault = _read_call(call, offered)
        if fault:
            return Judgement(
                "fail", f"a malformed call, {fault}: {quoted_answer(json.dumps(call))}"
            )
        made.append((name, city))
    shown = ", ".join(f"{name}(city={city!r})" for name, city in made)
    if not scenario.calls:
        why = "invented what it should have asked for" if scenario.asks_back else "needed no tool"
        return Judgement("fail", f"it {why}, and called {shown}")
    left = list(made)
    for name, wanted in scenario.calls:
        fitting = [c for c in left if c[0] == name and wanted in c[1].casefold()]
        if not fitting:
            return Judgement("fail", f"{name} for {wanted.title()} is missing; it called {shown}")
        left.remove(fitting[0])
    if left:
        return Judgement("fail", f"{len(left)} calls too many: {shown}")
    beside = "" if answer.finish_reason == "tool_calls" else f" ({answer.finish_reason!r} at end)"
    return Judgement("pass", f"it called {shown}{beside}")


def _read_call(call: Any, offered: set[str]) -> tuple[str, str, str]:
    """(tool, city, what is wrong with the call); a client needs every one of these fields."""
    function = call.get("function") if isinstance(call, dict) else None
    if not isinstance(function, dict):
        return "", "", "no function in it"
    name, arguments = function.get("name"), function.get("arguments")
    if not isinstance(name, str) or name not in offered:
        return "", "", "of a tool that was not offered"
    if not isinstance(call.get("id"), str) or not call["id"]:
        return "", "", "without an id"
    if not isinstance(arguments, str):
        return "", "", "whose arguments are no JSON text"
    try:
        values = json.loads(arguments)
    except (ValueError, RecursionError):
        return "", "", "whose arguments are no JSON"
    if not isinstance(values, dict) or set(values) != {"city"}:
        return "", "", "whose arguments do not fit its schema"
    if not isinstance(values["city"], str):
        return "", "", "whose city is no text"
    return name, values["city"], ""


def _call_in_text(scenario: ToolScenario, content: str) -> bool:
    """Whether the text holds a call that nobody parsed."""
    if _CALL_MARKUP.search(content):
        return True
    names = "|".join(re.escape(tool["function"]["name"]) for tool in scenario.tools)
    return bool(re.search(rf'(?:{names})\s*\(|"name"\s*:\s*"(?:{names})"', content))
