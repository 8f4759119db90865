"""Whether a report's figures can be true: needed FLOP/s and bytes/s against the chip's peak.

Bounds from below only, so that no honest figure is refused; knows no files.
"""

from __future__ import annotations

import dataclasses
import re
from dataclasses import dataclass
from pathlib import PurePosixPath

from forge.parts.knowledge.cache_bytes import kv_bytes
from forge.parts.knowledge.geometry import Geometry
from forge.parts.knowledge.hardware import ACCELERATORS
from forge.parts.knowledge.memory import WEIGHT_ENCODINGS, parameter_counts, step_bytes
from forge.parts.knowledge.models import GEMMA4, checkpoint_for_repo
from forge.parts.knowledge.report_schema import (
    BenchCell,
    BenchHardware,
    BenchReport,
    CellMetrics,
    ImpliedWork,
    KvDtype,
    Subject,
    TokenWork,
)

PLAUSIBLE_SHARE = 1.05  # of the peak: two pages of one vendor differ by 5 % on one chip
CONSISTENT_SHARE = 0.10  # by how much figures of one cell may contradict each other, and for ramp
# and drain as much again as the streams' share of all requests
PROMPT_LENGTH_SHARE = 0.05  # by how much the prompts that went out may miss their target
REFUSED_SHARE = 0.10  # of impossible cells from which on a whole report is no evidence


@dataclass(frozen=True, slots=True)
class ChipPeak:
    """What the hardware can do at most: TFLOP/s and GB/s of all devices; None where unknown."""

    tflops: float | None
    gbs: float | None


def peak_of_hardware(hardware: BenchHardware, encoding: str) -> ChipPeak:
    """The peak from the house's table, else from the report's own facts (per device).

    Eight-bit weights may compute at twice the 16-bit rate where the chip has that type. The table's
    figures for "cpu" are one laptop's and effective, so a CPU has only what the report states.
    """
    facts = [hardware.compute_tflops, hardware.bandwidth_gbs]
    stated = [f.value if f and isinstance(f.value, int | float) else None for f in facts]
    tflops, gbs = stated
    chip = ACCELERATORS.get(hardware.chip)
    if chip is not None and hardware.chip != "cpu":
        tflops = chip.compute.value if chip.compute.value is not None else tflops
        gbs = chip.bandwidth.value if chip.bandwidth.value is not None else gbs
        if tflops is not None and encoding in ("fp8", "int8") and encoding in chip.native_dtypes:
            tflops *= 2
    devices = hardware.devices
    return ChipPeak(tflops and tflops * devices, gbs and gbs * devices)


@dataclass(frozen=True, slots=True)
class SubjectWork:
    """The least that one token costs. prompt_flops leaves the head out: it runs once a prompt."""

    prompt_flops: float
    token_flops: float
    geometry: Geometry | None
    encoding: str
    fixed_step_bytes: float | None

    def bytes_per_step(self, streams: int) -> float | None:
        """Bytes of weights that one decode step for `streams` reads; None: encoding unknown."""
        if self.geometry is None or self.encoding not in WEIGHT_ENCODINGS:
            return self.fixed_step_bytes
        return step_bytes(self.geometry, self.encoding, streams=streams)

    def kv_read(self, context: int, dtype_bytes: float) -> float:
        """Bytes of cache that one output token reads at least, sliding layers at their window."""
        if self.geometry is None:
            return 0.0
        return kv_bytes(self.geometry, context, 1, dtype_bytes, "ring")


def work_of_subject(subject: Subject, *, fast_prefill: bool = False) -> SubjectWork | None:
    """What a token of the subject costs; None where neither table nor report says.

    2 x active weights each token (multiply and add). fast_prefill: prompts pass only the layers
    that own keys and values, which an engine may do where the later ones share them.
    """
    if subject.size:
        geometry = GEMMA4[subject.size].geometry
        owners = dataclasses.replace(
            geometry, layer_types=geometry.layer_types[: geometry.owners], kv_shared_layers=0
        )
        active = _active_weights(geometry)
        head = parameter_counts(geometry).embed
        prompt = _active_weights(owners) if fast_prefill else active
        return SubjectWork(2 * prompt, 2 * (active + head), geometry, subject.encoding, None)
    if subject.work is None:
        return None
    work = subject.work
    return SubjectWork(work.flops, work.flops, None, subject.encoding, work.step_bytes)


def subject_of_model(
    model: str,
    encoding: str,
    geometry: Geometry | None = None,
    *,
    kv_dtype: KvDtype | None = None,
    max_model_len: int | None = None,
) -> Subject:
    """The subject of a report on `model`: a repository id, 'embedded', or a folder (its last name).

    Of a model that the table lacks the shape may be given, so that the gate can judge it too.
    """
    size, work, label = "", None, ""
    name = PurePosixPath(model).name if model.startswith("/") else model
    try:
        known, checkpoint = checkpoint_for_repo(model)
        size = next(key for key, value in GEMMA4.items() if value is known)
        label = checkpoint.label
        short = f"gemma4-{size.lower() if size in ('E2B', 'E4B') else known.slot}"
    except ValueError:
        plain = "smollm2-135m" if model == "embedded" else name.rpartition("/")[2].lower()
        words = [w[:16] for w in re.split(r"[^a-z0-9.]+", plain) if w][:3]
        short = "-".join(words) or "model"
        if geometry is not None and encoding in WEIGHT_ENCODINGS:
            flops = 2 * _active_weights(geometry)
            work = TokenWork(flops=flops, step_bytes=step_bytes(geometry, encoding))
    return Subject.model_validate(
        {
            "model": name,
            "short": f"{short}-{label}" if label else short,
            "size": size,
            "encoding": encoding,
            "kv_dtype": kv_dtype or KvDtype(),
            "max_model_len": max_model_len,
            "work": work,
        }
    )


def _active_weights(geometry: Geometry) -> float:
    """Weights that a token is multiplied by, without embedding and head."""
    counts = parameter_counts(geometry)
    touched = geometry.top_k / geometry.experts if geometry.experts else 0.0
    return counts.linear - counts.experts + touched * counts.experts + counts.other


def implied_work(report: BenchReport, cell: BenchCell) -> ImpliedWork | None:
    """What the chip must have done for this cell, and each thing that cannot be; None if not ok.

    Needed FLOP/s: requests/s x (prompt x 2 x weights without head + output x 2 x weights), and
    prompt x 2 x weights within the median ttft. Needed bytes/s: output/s / streams x weights of a
    step + output/s x least cache, and the weights of a step within the median tpot. Tokens that a
    prefix cache served cost nothing; with speculative decoding bytes are not judged.
    """
    metrics = cell.metrics
    if metrics is None:
        return None
    checks = _contradictions(cell, metrics)
    resolved = {key.lower(): value for key, value in report.engine.resolved.items()}
    work = work_of_subject(
        report.subject, fast_prefill=resolved.get("kv_sharing_fast_prefill") is True
    )
    if work is None:
        return ImpliedWork(checks=checks)
    peak = peak_of_hardware(report.hardware, report.subject.encoding)
    flops = _needed_tflops(work, cell, metrics)
    speculative = any("speculative" in key and value for key, value in resolved.items())
    gbs = {} if speculative else _needed_gbs(work, cell, metrics, report.subject)
    shares: list[float | None] = []
    for needs, most, unit in ((flops, peak.tflops, "TFLOP/s"), (gbs, peak.gbs, "GB/s")):
        if not needs or not most:
            shares.append(None)
            continue
        share = max(needs.values()) / most
        shares.append(round(share, 4))
        for what, need in needs.items():
            if need / most > PLAUSIBLE_SHARE:
                checks.append(
                    f"{what} needs {need:,.0f} {unit}, {need / most:.1f} times the peak of "
                    f"{report.hardware.devices} x {report.hardware.chip} ({most:,.0f})"
                )
    return ImpliedWork(flops_share=shares[0], bytes_share=shares[1], checks=checks)


def _prompt_length(cell: BenchCell, metrics: CellMetrics) -> float:
    """Mean prompt tokens of a request that were not served from the prefix cache."""
    known = metrics.prompt_tokens
    length = float(cell.input_tokens)
    if known is not None:
        length = known.mean if known.mean is not None else float(known.median or length)
    if metrics.cached_tokens and metrics.requests_completed:
        length -= metrics.cached_tokens / metrics.requests_completed
    return max(length, 0.0)


def _output_length(cell: BenchCell, metrics: CellMetrics) -> float | None:
    """Mean output tokens of a request; None where neither counted nor asked for nor derivable."""
    known = metrics.completion_tokens
    if known is not None:
        return known.mean if known.mean is not None else known.median
    if metrics.output_tps is not None and metrics.request_rps:
        return metrics.output_tps / metrics.request_rps
    return cell.output_tokens


def _needed_tflops(work: SubjectWork, cell: BenchCell, metrics: CellMetrics) -> dict[str, float]:
    prompt, output = _prompt_length(cell, metrics), _output_length(cell, metrics)
    rate = metrics.request_rps
    if rate is None and metrics.output_tps is not None and output:
        rate = metrics.output_tps / output
    needs = {}
    if rate is not None:
        # Of an unknown output there is at least one token.
        each = prompt * work.prompt_flops + (output or 1) * work.token_flops
        needs[f"{rate:.4g} requests/s of {prompt:,.0f} tokens"] = rate * each / 1e12
    ttft = metrics.ttft_ms.median if metrics.ttft_ms else None
    if ttft:
        needs[f"a first token after {ttft:.4g} ms of {prompt:,.0f} tokens"] = (
            prompt * work.prompt_flops / (ttft / 1e3) / 1e12
        )
    return needs


def _needed_gbs(
    work: SubjectWork, cell: BenchCell, metrics: CellMetrics, subject: Subject
) -> dict[str, float]:
    needs = {}
    tpot = metrics.tpot_ms.median if metrics.tpot_ms else None
    one = work.bytes_per_step(1)
    if tpot and one:
        needs[f"an output token every {tpot:.4g} ms"] = one / (tpot / 1e3) / 1e9
    streams = cell.concurrency or (
        metrics.achieved_concurrency and int(metrics.achieved_concurrency)
    )
    step = work.bytes_per_step(streams) if streams else None
    if metrics.output_tps is not None and streams and step:
        # Only what the allocator says counts; anything else may have been one byte an element.
        known = subject.kv_dtype.evidence == "allocator" and subject.kv_dtype.value in (
            "bf16",
            "fp16",
        )
        cache = work.kv_read(int(_prompt_length(cell, metrics)), 2 if known else 1)
        needs[f"{metrics.output_tps:,.0f} output tokens/s in {streams} streams"] = (
            metrics.output_tps * (step / streams + cache) / 1e9
        )
    return needs


def _contradictions(cell: BenchCell, metrics: CellMetrics) -> list[str]:
    """Figures of one cell that cannot all be true, whatever the chip."""
    found = []
    edge = (cell.concurrency or 0) / metrics.requests_completed if metrics.requests_completed else 0
    most = 1 + CONSISTENT_SHARE + edge
    counted = metrics.completion_tokens.mean if metrics.completion_tokens else None
    if counted and metrics.output_tps is not None and metrics.request_rps:
        product = metrics.request_rps * counted
        if not 1 / most <= metrics.output_tps / product <= most:
            found.append(
                f"{metrics.output_tps:,.0f} output tokens/s, but requests times length is"
                f" {product:,.0f}"
            )
    tpot = metrics.tpot_ms.mean or metrics.tpot_ms.median if metrics.tpot_ms else None
    if cell.concurrency and tpot and metrics.output_tps is not None:
        ceiling = cell.concurrency * 1000 / tpot
        # Each request's first token is not in tpot; of short outputs it is a large share.
        length = _output_length(cell, metrics) or 1
        if length >= 2 and metrics.output_tps > most * ceiling * length / (length - 1):
            found.append(
                f"{metrics.output_tps:,.0f} output tokens/s, but {cell.concurrency} streams with "
                f"{tpot:.4g} ms a token give at most {ceiling:,.0f}"
            )
    e2e = metrics.e2e_ms.mean if metrics.e2e_ms else None
    if cell.concurrency and e2e and metrics.request_rps:
        held = metrics.request_rps * e2e / 1e3
        if held > most * cell.concurrency:
            found.append(f"{held:.1f} requests at once of {cell.concurrency} allowed")
    prompt = metrics.prompt_tokens.mean if metrics.prompt_tokens else None
    if prompt and abs(prompt / cell.input_tokens - 1) > PROMPT_LENGTH_SHARE:
        found.append(f"prompts of {prompt:,.0f} tokens went out, {cell.input_tokens:,} were asked")
    return found


def judged_report(report: BenchReport) -> BenchReport:
    """The report with `implied` worked out anew in every cell.

    A measured cell that cannot be true becomes a failed one, with the reason; an imported one keeps
    its figures under the mark, because what others published is itself the fact.
    """
    cells = []
    for cell in report.cells:
        implied = implied_work(report, cell)
        update: dict[str, object] = {"implied": implied}
        if implied is not None and implied.checks and report.run.kind == "measured":
            reason = f"implausible: {'; '.join(implied.checks)}"[:2000]
            update |= {"status": "failed", "reason": reason, "metrics": None, "implied": None}
        cells.append(cell.model_copy(update=update))
    return report.model_copy(update={"cells": cells})


def refusal_of_report(report: BenchReport) -> str:
    """Why the whole report is no evidence, or '': more than a tenth of its cells cannot be."""
    judged = [(cell, implied_work(report, cell)) for cell in report.cells]
    done = [(cell, implied) for cell, implied in judged if implied is not None]
    bad = [(cell, implied) for cell, implied in done if implied.checks]
    if len(bad) <= REFUSED_SHARE * len(done):
        return ""
    worst, implied = max(bad, key=lambda item: item[1].flops_share or item[1].bytes_share or 0)
    return (
        f"{len(bad)} of {len(done)} cells are impossible, so the run measured something else "
        f"(a prefix cache, or contexts that are not tokens); worst {worst.id}: {implied.checks[-1]}"
    )
