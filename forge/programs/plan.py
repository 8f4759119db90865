"""Works out before anything is paid for whether a Gemma 4 fits, how fast it is and what it costs.

    python3 plan.py --model E2B --hardware v6e1 --engine vllm --context 65536 --streams 8

Arithmetic over the house's tables, each figure with its source: offline, and nothing but the
standard library. It needs no server and no installed package. Exit status: 0 it fits, 1 it does
not, 2 wrong usage.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import sys
from collections.abc import Callable
from typing import get_args

from forge.parts.knowledge.memory import WEIGHT_ENCODINGS
from forge.parts.knowledge.models import GEMMA4
from forge.parts.knowledge.plan_answer import (
    MAX_PLANNED_CONTEXT,
    PlanAnswer,
    PlannedChange,
    PlannedDeployment,
    PlanQuestion,
    PlanRenting,
    question_of,
)
from forge.parts.knowledge.planner_answers import (
    PLANNED_ENGINES,
    PLANNED_HARDWARE,
    plan_answer,
)
from forge.parts.knowledge.planner_memory import KV_ELEMENT_BYTES

_PLANNED_STREAMS = 4096  # at once, at most
_QUESTION_CHARACTERS = 200_000
_USUAL = PlanQuestion("", "", "")
_RATE_KINDS = ("ceiling", "estimate")
_SUMS = ("weights, all", "weights at the loading peak", "usable by the engine", "visible")


def main(argv: list[str] | None = None) -> int:
    """The command line; returns the exit status."""
    parser = _plan_parser()
    arguments = parser.parse_args(argv)
    if arguments.question:
        try:
            question = question_of(json.loads(sys.stdin.read(_QUESTION_CHARACTERS)))
        except (ValueError, TypeError, KeyError, AttributeError, RecursionError) as error:
            print(f"plan.py: that is no question: {error}", file=sys.stderr)
            return 2
    else:
        missing = [name for name in ("model", "hardware", "engine") if not getattr(arguments, name)]
        if missing:
            parser.error(f"missing: {', '.join(f'--{name}' for name in missing)}")
        names = {field.name for field in dataclasses.fields(PlanQuestion)}
        question = PlanQuestion(**{k: v for k, v in vars(arguments).items() if k in names})
    answer = plan_answer(question)
    if arguments.json or arguments.question:
        print(json.dumps(dataclasses.asdict(answer), ensure_ascii=False))
    elif answer.plan is not None:
        print(plan_text(answer.plan))
    elif answer.fault is not None:
        print(f"plan.py: {answer.fault.what}", file=sys.stderr)
    return _plan_status(answer)


def _plan_status(answer: PlanAnswer) -> int:
    if answer.plan is None:
        return 2
    return 0 if answer.plan.fits else 1


def plan_text(plan: PlannedDeployment) -> str:
    """`plan` for people: the verdict, every summand, rates, money, and what would make it fit."""
    lines = [plan.summary, f"verdict: {plan.verdict}"]
    lines += [f"  {reason}" for reason in plan.reasons]
    if not plan.fits:
        lines += ["", "what would make it fit, each by itself:"]
        lines += [f"  {change.words}" for change in plan.changes] or ["  no single change"]
        lines += [f"  as in: {_plan_command(change)}" for change in plan.changes[:1]]
    which = f"each of {plan.devices} devices" if plan.devices > 1 else "the device"
    lines += ["", f"memory of {which} (GB of 1e9 bytes)"]
    for name, size in plan.memory_bytes.items():
        mark = "=" if name in _SUMS else " "
        small = name == "cache, one more token"
        shown = f"{size:,} bytes" if small else f"{size / 1e9:.2f}"
        lines.append(f" {mark} {name:<44} {shown:>14}")
    lines += [
        f"   {plan.kv_layout}",
        f"   {plan.resident_kv_tokens:,} tokens resident, {plan.streams_at_context:g} streams",
        "",
        f"output tokens a second {'ceiling':>32} {'estimate':>11}",
    ]
    points = dict.fromkeys(name.rpartition(", ")[0] for name in plan.tokens_per_s)
    for point in points:
        ceiling, estimate = (plan.tokens_per_s[f"{point}, {kind}"] for kind in _RATE_KINDS)
        lines.append(f"   {point:<44} {ceiling:>7,.1f} {estimate:>11,.1f}")
    start = "unmeasured" if plan.cold_start_s is None else f"{plan.cold_start_s:g} s"
    lines += ["", f"start, from the create call to the first answer: {start}"]
    if plan.usd:
        lines += ["USD"]
        lines += [f"   {name:<50} {usd:>12,.4f}" for name, usd in plan.usd.items()]
    if plan.break_even_tokens_per_s is not None:
        even = f"{plan.break_even_tokens_per_s:g} output tokens a second, held all the time"
        lines += [f"   cheaper than the API above {even}"]
    lines += ["", "what this rests on"]
    lines += [f"  - {sentence}" for sentence in plan.assumptions]
    return "\n".join(lines)


def _plan_command(change: PlannedChange) -> str:
    """The command that asks the same with that change."""
    return (
        f"python3 plan.py --model {change.model} --encoding {change.encoding}"
        f" --hardware {change.hardware} --engine {change.engine} --context {change.context}"
        f" --streams {change.streams} --kv-dtype {change.kv_dtype}"
    )


def _plan_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="plan.py",
        description=(__doc__ or "").partition("\n")[0],
        epilog="Exit status: 0 it fits, 1 it does not, 2 wrong usage.",
    )
    of = parser.add_argument_group("what is to be served, and where")
    of.add_argument(
        "--model", default="", help=f"{', '.join(GEMMA4)}, a rig's slot (2b), or a checkpoint"
    )
    of.add_argument("--hardware", default="", help=", ".join(PLANNED_HARDWARE))
    of.add_argument("--engine", default="", help=", ".join(PLANNED_ENGINES))
    of.add_argument(
        "--encoding",
        default=_USUAL.encoding,
        choices=tuple(WEIGHT_ENCODINGS),
        help="how weights lie in memory; else as the checkpoint stores them",
    )
    of.add_argument(
        "--context",
        type=_whole(1, MAX_PLANNED_CONTEXT),
        default=_USUAL.context,
        help=f"tokens of one stream, prompt and answer (default {_USUAL.context})",
    )
    of.add_argument(
        "--streams", type=_whole(1, _PLANNED_STREAMS), default=_USUAL.streams, help="at once"
    )
    of.add_argument(
        "--output",
        type=_whole(1, 65_536),
        default=_USUAL.output,
        help=f"tokens of an answer (default {_USUAL.output})",
    )
    of.add_argument(
        "--kv-dtype",
        default=_USUAL.kv_dtype,
        choices=("auto", *KV_ELEMENT_BYTES),
        help="type of the cache",
    )
    engine = parser.add_argument_group("instead of the engine's or the hardware's own")
    engine.add_argument(
        "--batched-tokens",
        type=_whole(0, 1_048_576),
        default=_USUAL.batched_tokens,
        help="vLLM's max_num_batched_tokens",
    )
    engine.add_argument(
        "--utilization",
        type=_number(1),
        default=_USUAL.utilization,
        help="share of the memory that the engine takes, such as 0.9",
    )
    engine.add_argument(
        "--memory-gib",
        type=_number(4096),
        default=_USUAL.memory_gib,
        help="memory of one device, or of this computer, that is free",
    )
    money = parser.add_argument_group("money")
    money.add_argument(
        "--price-per-hour",
        dest="usd_per_hour",
        type=_number(10_000),
        help="USD of all devices; else the table's cheapest",
    )
    money.add_argument(
        "--provisioning",
        default=_USUAL.provisioning,
        choices=get_args(PlanRenting),
        help="whose price is taken from the table",
    )
    for name in ("input", "output"):
        money.add_argument(
            f"--api-{name}-price",
            dest=f"api_{name}",
            type=_number(10_000),
            default=getattr(_USUAL, f"api_{name}"),
            help=f"USD per million {name} tokens of the API to compare with (default %(default)s)",
        )
    form = parser.add_argument_group("form")
    form.add_argument("--json", action="store_true", help="the whole answer as one JSON object")
    form.add_argument(
        "--question",
        action="store_true",
        help="read the question as one JSON object from standard input, and answer in JSON",
    )
    return parser


def _whole(least: int, most: int) -> Callable[[str], int]:
    """What argparse makes a whole number with, from `least` to `most`."""

    def whole_number(text: str) -> int:
        value = int(text)
        if not least <= value <= most:
            raise argparse.ArgumentTypeError(f"must be {least} to {most}")
        return value

    return whole_number


def _number(most: float) -> Callable[[str], float]:
    """What argparse makes a number with, from 0 to `most`."""

    def number(text: str) -> float:
        value = float(text)
        if not 0 <= value <= most:  # which is also no for what is not a number
            raise argparse.ArgumentTypeError(f"must be 0 to {most:g}")
        return value

    return number


if __name__ == "__main__":
    sys.exit(main())
