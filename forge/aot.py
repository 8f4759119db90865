"""The JAX engine's programs compiled for chips that are not here: `make aot`.

libtpu compiles without a TPU, and JAX's CUDA plugin without a card. Every program that an engine
would compile at its start is compiled at a model's real size, from shapes alone; what the compiler
says of memory stands beside what the planner says. Nothing runs: no speed follows, and not that it
works.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import json
import os
import platform
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from forge.aot_chips import CHIPS, compiler_environment
from forge.aot_compile import (
    DTYPE,
    FORMS,
    KV_FORMS,
    STEPS,
    AotCase,
    AotProgram,
    compile_case,
    planned_bytes,
)
from forge.engines.gemma4.refusal import ModelRefused
from forge.parts.knowledge.hardware import ACCELERATORS
from forge.parts.knowledge.models import GEMMA4

ROOT = Path(__file__).resolve().parent.parent
README = "local-jax-cpu-2b/README.md"
BEGIN, END = "<!-- aot:begin -->", "<!-- aot:end -->"
WHOLE_MODEL = "E2B"  # of which every program is compiled; of the others the largest of each kind
MODELS = (WHOLE_MODEL, "12B", "26B-A4B", "31B")
# Integers as weights, or as keys and values, on the chip that bf16 fills most; the largest program
# of each kind. The model, its matrices, its keys and values.
QUANTISED = (
    *(("E2B", "w4a16", DTYPE), ("E2B", "int8", DTYPE)),
    *(("E2B", "w4a16", "int8"), ("12B", "w4a16", DTYPE)),
)
QUANTISED_CHIP = "v5e"
_GIB = 1 << 30


@dataclass(frozen=True)
class AotOutcome:
    """A case with its programs. planned: bytes of weights, caches and marks by the planner.

    limit: bytes of the chip's memory. failure: why there is no outcome, apart from a refusal.
    """

    case: AotCase
    planned: int
    limit: int
    programs: tuple[AotProgram, ...]
    failure: str = ""


def measure_case(
    case: AotCase, environment: Mapping[str, str], tell: Callable[[AotProgram], None]
) -> AotOutcome:
    """Compile the case in a process of its own, which ends with all that the compiler holds."""
    planned, programs = planned_bytes(case), []
    command = [sys.executable, "-m", "forge.aot", "--compile", json.dumps(asdict(case))]
    with tempfile.TemporaryFile("w+") as errors:
        with subprocess.Popen(
            command,
            cwd=ROOT,
            env=dict(environment),
            stdout=subprocess.PIPE,
            stderr=errors,
            text=True,
        ) as child:
            assert child.stdout is not None
            for line in child.stdout:
                if line.startswith('{"name"'):
                    programs.append(AotProgram(**json.loads(line)))
                    tell(programs[-1])
            status = child.wait()
        errors.seek(0)
        said = errors.read().strip().splitlines()
    limit = ACCELERATORS[case.chip].visible_memory.value
    assert limit is not None
    failure = f"status {status}: {said[-1][:300] if said else ''}" if status else ""
    return AotOutcome(case, planned, round(limit * _GIB), tuple(programs), failure)


def table_lines(outcomes: Sequence[AotOutcome]) -> list[str]:
    """The outcomes as a Markdown table; GB are 10^9 bytes."""
    lines = [
        "| model | chip | program | compiled in | arguments | planner | temporary | peak"
        " | of the chip's memory |",
        "|---|---|---|---|---|---|---|---|---|",
    ]
    for outcome in outcomes:
        case = outcome.case
        for program in outcome.programs:
            cells = [case.title, case.chip, program.name, f"{program.seconds:.1f} s"]
            if program.refusal:
                planner = f"{outcome.planned / 1e9:.3f} GB"
                cells += ["-", planner, "-", "-", f"does not fit: {program.refusal}"]
            else:
                # Only a decode reads everything that is kept.
                whole = program.name.startswith("decode")
                cells += [
                    f"{program.arguments / 1e9:.3f} GB",
                    f"{outcome.planned / 1e9:.3f} GB" if whole else "-",
                    f"{program.temporaries / 1e6:.0f} MB",
                    f"{program.peak / 1e9:.3f} GB",
                    f"{100 * program.peak / outcome.limit:.0f} %",
                ]
            lines.append(f"| {' | '.join(cells)} |")
    return lines


def readme_lines(results: Mapping[str, Any], outcomes: Sequence[AotOutcome]) -> list[str]:
    """What stands in the README: how it was made, the table, and what it does not say."""
    case = outcomes[0].case
    return [
        f"Compiled on {results['date']} with jax {results['jax']},"
        f" {' and '.join(results['compilers'])} on {results['machine']}, without any of these"
        f" chips: {DTYPE} where no other form is named, {case.slots} slots of"
        f" {case.context:,} tokens, prompts in pieces of {case.chunk}, {STEPS} tokens a dispatch."
        f" Of {WHOLE_MODEL} every program that the engine compiles at its start, of the others the"
        " largest of each kind.",
        "",
        *table_lines(outcomes),
        "",
        "Arguments are what a program is given and reads: weights, caches, and what sampling"
        " remembers. The planner's figure is for all of that, so it stands beside programs that"
        " read all. A prompt's piece does not touch the layers that share keys; their weights lie"
        " on the chip all the same. A share of the chip's memory is that of the peak. GB and MB are"
        " powers of ten; where a compiler refuses, its G is 2^30 bytes, of all that it needs.",
        "",
        "What this does not say: how fast anything is, that it runs, or that its answers are right"
        " there. Seconds are this machine's, with whatever else it did. A card's compiler tries no"
        " kernels here, so a real card will choose others; the numbers of the L4 and the T4 that it"
        " was told are the sources' own, not read from a card.",
    ]


def write_between(path: Path, lines: Sequence[str]) -> bool:
    """Put `lines` between the markers of the file; False where it or its markers are missing."""
    text = path.read_text(encoding="utf-8") if path.exists() else ""
    if text.count(BEGIN) != 1 or text.count(END) != 1 or text.index(BEGIN) > text.index(END):
        return False
    head, rest = text.split(BEGIN)
    tail = rest.split(END)[1]
    body = "\n".join(lines)
    path.write_text(f"{head}{BEGIN}\n{body}\n{END}{tail}", encoding="utf-8")
    return True


def compile_here(text: str) -> int:
    """The child's half of `measure_case`: one line of JSON per program."""
    for program in compile_case(AotCase(**json.loads(text))):
        print(json.dumps(asdict(program)), flush=True)
    return 0


def wanted_cases(given: argparse.Namespace, chips: Sequence[str]) -> list[AotCase]:
    """Every model on every chip, but only WHOLE_MODEL on cards: no other one fits these.

    And QUANTISED on its chip. Models or forms that are named are compiled on every chip.
    """

    def case(model: str, chip: str, form: str, kv: str = DTYPE) -> AotCase:
        whole = form == DTYPE and (model == WHOLE_MODEL or model not in GEMMA4)
        every = given.every or whole
        sizes = {"slots": given.slots, "context": given.context, "chunk": given.chunk}
        return AotCase(model, chip, every=every, form=form, kv=kv, **sizes)

    if given.models or given.form or given.kv != DTYPE:
        models, forms = given.models or (WHOLE_MODEL,), given.form or (DTYPE,)
        return [
            case(model, chip, form, given.kv)
            for model in models
            for form in forms
            for chip in chips
        ]
    plain = [
        case(model, chip, DTYPE)
        for model in MODELS
        for chip in chips
        if model == WHOLE_MODEL or CHIPS[chip].platform == "tpu"
    ]
    if QUANTISED_CHIP not in chips:
        return plain
    return plain + [case(model, QUANTISED_CHIP, form, kv) for model, form, kv in QUANTISED]


def main(argv: Sequence[str] | None = None) -> int:
    """Compile, print the table and one line of JSON, write the README; 1 where a case failed.

    A model that does not fit is an outcome, no failure.
    """
    parser = argparse.ArgumentParser(prog="make aot", description=__doc__)
    parser.add_argument("--compile", help=argparse.SUPPRESS)
    parser.add_argument("--chip", action="append", choices=tuple(CHIPS), help="default: all")
    parser.add_argument("--form", action="append", choices=FORMS, help="of the matrices")
    parser.add_argument(
        "--kv", choices=tuple(KV_FORMS), default=DTYPE, help="of keys and values (%(default)s)"
    )
    parser.add_argument("--every", action="store_true", help="every program of every model")
    for name, default in (("slots", 4), ("context", 4096), ("chunk", 256)):
        parser.add_argument(f"--{name}", type=int, default=default, help="(default %(default)s)")
    parser.add_argument(
        "models", nargs="*", help=f"or folders with a config.json; default: {', '.join(MODELS)}"
    )
    given = parser.parse_args(argv)
    if given.compile:
        return compile_here(given.compile)
    chips = given.chip or list(CHIPS)
    cases = wanted_cases(given, chips)
    try:
        for case in cases:
            planned_bytes(case)
    except (OSError, ValueError, ModelRefused) as error:
        parser.error(f"{case.model}: {error}")
    platforms = sorted({CHIPS[chip].platform for chip in chips})
    compilers = {platform: compiler_environment(platform) for platform in platforms}
    outcomes = []
    for case in cases:

        def tell(program: AotProgram, case: AotCase = case) -> None:
            told = program.refusal or f"{program.peak / 1e9:.3f} GB at its peak"
            print(f"{case.title} on {case.chip}, {program.name}: {told}", flush=True)

        outcomes.append(measure_case(case, compilers[CHIPS[case.chip].platform][1], tell))
    results = {
        "bench": "aot",
        "date": time.strftime("%Y-%m-%d"),
        "jax": importlib.metadata.version("jax"),
        "compilers": [version for version, _ in compilers.values()],
        "machine": f"{os.cpu_count()} cores, {platform.system()} {platform.machine()}",
        "outcomes": [asdict(outcome) for outcome in outcomes],
    }
    failed = [outcome for outcome in outcomes if outcome.failure]
    if not failed and not (given.models or given.chip or given.form or given.kv != DTYPE):
        written = write_between(ROOT / README, readme_lines(results, outcomes))
        print(f"wrote {README}" if written else f"{README} has no {BEGIN} … {END}")
    print("\n".join(table_lines(outcomes)))
    for outcome in failed:
        print(f"FAILED {outcome.case.title} on {outcome.case.chip}: {outcome.failure}")
    print(json.dumps(results))
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
