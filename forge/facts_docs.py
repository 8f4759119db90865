"""HARDWARE.md and MODELS.md, written from the data of forge/parts/knowledge alone.

`python -m forge.facts_docs` writes both into the working folder. Knows nothing that the data does
not say: a figure without a value is written out as unmeasured.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path

from forge.parts.knowledge.cache_bytes import kv_bytes_per_token, kv_ring_bytes
from forge.parts.knowledge.figures import Figure
from forge.parts.knowledge.geometry import Geometry
from forge.parts.knowledge.hardware import ACCELERATORS, HARDWARE_SLOTS
from forge.parts.knowledge.memory import parameter_counts, ple_bytes, step_bytes, weight_bytes
from forge.parts.knowledge.models import GEMMA4, PublishedCheckpoint
from forge.parts.knowledge.prices import PRICES

SHOWN_ENCODINGS = ("bf16", "fp8", "w4a16", "q4_0")
_GENERATED = "<!-- Written by forge/facts_docs.py from forge/parts/knowledge. Edit the data. -->"
_KINDS = (
    "Every figure bears its source and date. *imported* means that others published or reported"
    " it, *derived* that it was worked out from such a figure, *measured* that this project"
    " measured it, *unmeasured* that no source for it is known."
)


class _Footnotes:
    """Numbers sources in the order in which they are first cited."""

    def __init__(self) -> None:
        self._seen: dict[str, int] = {}

    def mark(self, text: str) -> str:
        number = self._seen.setdefault(text, len(self._seen) + 1)
        return f"[^{number}]"

    def lines(self) -> list[str]:
        return [f"[^{number}]: {text}" for text, number in self._seen.items()]


def render_hardware() -> str:
    """HARDWARE.md: chips, what is known about them, slots, prices."""
    notes = _Footnotes()
    chips = [
        (
            f"`{chip.chip}`",
            chip.name,
            _figure_cell(chip.visible_memory, notes),
            _figure_cell(chip.bandwidth, notes),
            _figure_cell(chip.compute, notes),
            ", ".join(chip.native_dtypes)
            + notes.mark(f"{chip.dtypes_source}, {chip.dtypes_date}; imported"),
        )
        for chip in ACCELERATORS.values()
    ]
    facts = [
        f"- `{chip.chip}`: {fact.text}. ({fact.source}, {fact.date})"
        for chip in ACCELERATORS.values()
        for fact in chip.facts
    ]
    slots = [
        (f"`{slot.slot}`", f"`{slot.chip}`", str(slot.devices), slot.meaning)
        for slot in HARDWARE_SLOTS.values()
    ]
    prices = [
        (
            f"`{price.chip}`",
            price.provider,
            price.machine,
            price.region,
            price.provisioning,
            _figure_cell(price.rate, notes),
        )
        for price in PRICES
    ]
    priced = {price.chip for price in PRICES}
    unpriced = ", ".join(f"`{chip}`" for chip in ACCELERATORS if chip not in priced)
    return _document(
        "Hardware",
        notes,
        _KINDS,
        "## Chips",
        "One row is one device as a program sees it. Memory is what a program can allocate;"
        " bandwidth and compute are peaks unless a note says otherwise, compute dense in bf16 or"
        " fp16. A type that is not native is storage: weights in it are converted before use.",
        _table(
            ("Chip", "Device", "Memory, GiB", "GB/s", "TFLOP/s", "Native types"),
            chips,
        ),
        "## What to know before using one",
        "\n".join(facts),
        "## Slots of rig names",
        _table(("Slot", "Chip", "Devices", "Means"), slots),
        "## Prices",
        "USD per hour, as of the date in the note. They move; an estimate names the date that it"
        f" used. No price is kept for: {unpriced}.",
        _table(("Chip", "Provider", "Unit", "Region", "Rented as", "USD/h"), prices),
    )


def render_models() -> str:
    """MODELS.md: shapes, weights, cache, step and checkpoints of each size."""
    notes = _Footnotes()
    models = list(GEMMA4.values())
    geometries = [model.geometry for model in models]
    names = tuple(model.name.removeprefix("Gemma 4 ") for model in models)
    shapes = [
        ("slot in rig names", *(f"`{model.slot}`" for model in models)),
        ("layers, sliding + full", *map(_layers_cell, geometries)),
        ("layers that own keys and values", *(str(g.owners) for g in geometries)),
        ("hidden", *(str(g.hidden) for g in geometries)),
        ("MLP width", *map(_mlp_cell, geometries)),
        ("experts, used, width", *map(_experts_cell, geometries)),
        ("query heads", *(str(g.heads) for g in geometries)),
        ("kv heads, sliding / full", *(f"{g.kv_heads} / {g.global_kv_heads}" for g in geometries)),
        (
            "head width, sliding / full",
            *(f"{g.head_dim} / {g.global_head_dim}" for g in geometries),
        ),
        ("window, tokens", *(str(g.window) for g in geometries)),
        ("values come from keys (full layers)", *("yes" if g.k_eq_v else "no" for g in geometries)),
        ("PLE width", *(str(g.ple_dim or "none") for g in geometries)),
        ("vocabulary", *(str(g.vocab) for g in geometries)),
        (
            "shape from",
            *(
                notes.mark(f"{model.geometry_source}, {model.geometry_date}; imported")
                for model in models
            ),
        ),
        ("vision tower, bytes bf16", *(_figure_cell(m.vision_tower, notes) for m in models)),
        ("audio tower, bytes bf16", *(_figure_cell(m.audio_tower, notes) for m in models)),
    ]
    return _document(
        "Models",
        notes,
        _KINDS,
        "## Shapes",
        _table(("", *names), shapes),
        "## Memory",
        "Derived from the shapes by `memory.py` and `cache_bytes.py` in `forge/parts/knowledge`,"
        " whose docstrings give each formula and its source; text model only, towers and an"
        " engine's own needs come on top. GB is 1e9 bytes, KiB 1024. `w4a16` keeps embeddings and"
        " the PLE table in bf16; `q4_0` holds both in Q6_K.",
        _table(("", *names), _memory_rows(geometries)),
        "The cache has two layouts. *Uniform*: every owning layer keeps the whole context (vLLM on"
        " TPU). *Ring*: sliding layers keep their window only (the JAX engine, llama.cpp), so a"
        " sequence costs a fixed part once its window is full and grows by the full layers alone."
        " An 8-bit cache halves both.",
        "## Checkpoints",
        "Repositories of the Hugging Face hub, Ollama's tag apart. *Stored* is how the weights lie"
        " on disk, which the encoding in a name does not always say.",
        _table(
            ("Size", "Repository", "Exists", "Encoding slot", "Stored", "File, bytes", "Seen by"),
            [
                _checkpoint_row(name, checkpoint, notes)
                for name, model in zip(names, models, strict=True)
                for checkpoint in model.checkpoints
            ],
        ),
    )


def _memory_rows(geometries: Sequence[Geometry]) -> list[tuple[str, ...]]:
    rows: list[tuple[str, ...]] = [
        ("parameters", *(f"{parameter_counts(g).total / 1e9:.3f} B" for g in geometries)),
        ("of these the PLE table", *(_ple_cell(g) for g in geometries)),
    ]
    for encoding in SHOWN_ENCODINGS:
        cells = (f"{weight_bytes(g, encoding) / 1e9:.2f} GB" for g in geometries)
        rows.append((f"weights, {encoding}", *cells))
    for encoding in SHOWN_ENCODINGS:
        cells = (f"{step_bytes(g, encoding) / 1e9:.2f} GB" for g in geometries)
        rows.append((f"read per decode step of one stream, {encoding}", *cells))
    rows.append(
        (
            "PLE table, bf16 (may stay on the host)",
            *(f"{ple_bytes(g, 'bf16') / 1e9:.2f} GB" if g.ple_dim else "none" for g in geometries),
        )
    )
    uniform = (kv_bytes_per_token(g, 2, "uniform") / 1024 for g in geometries)
    ring = (kv_bytes_per_token(g, 2, "ring") / 1024 for g in geometries)
    fixed = (kv_ring_bytes(g, 2) / 1e6 for g in geometries)
    rows.append(("cache per token, uniform, 16 bit", *(f"{kib:.0f} KiB" for kib in uniform)))
    rows.append(("cache per token, ring, 16 bit", *(f"{kib:.0f} KiB" for kib in ring)))
    rows.append(("fixed part per sequence, ring, 16 bit", *(f"{mb:.1f} MB" for mb in fixed)))
    return rows


def _layers_cell(geometry: Geometry) -> str:
    full = sum(geometry.is_full(layer) for layer in range(geometry.layers))
    return f"{geometry.layers}, {geometry.layers - full} + {full}"


def _mlp_cell(geometry: Geometry) -> str:
    wide = f" ({2 * geometry.intermediate} in sharing layers)" if geometry.double_wide_mlp else ""
    return f"{geometry.intermediate}{wide}"


def _experts_cell(geometry: Geometry) -> str:
    if not geometry.experts:
        return "none"
    return f"{geometry.experts}, {geometry.top_k}, {geometry.expert_width}"


def _ple_cell(geometry: Geometry) -> str:
    return f"{parameter_counts(geometry).ple_table / 1e9:.3f} B" if geometry.ple_dim else "none"


def _checkpoint_row(
    name: str, checkpoint: PublishedCheckpoint, notes: _Footnotes
) -> tuple[str, ...]:
    remark = f"; {checkpoint.note}" if checkpoint.note else ""
    return (
        name,
        f"`{checkpoint.repo}`",
        "yes" if checkpoint.exists else "**no**",
        f"`{checkpoint.label}`" if checkpoint.label else "none",
        checkpoint.stored if checkpoint.exists else "-",
        _figure_cell(checkpoint.file, notes) if checkpoint.exists else "-",
        f"{checkpoint.source}, {checkpoint.date}{remark}",
    )


def _figure_cell(figure: Figure, notes: _Footnotes) -> str:
    """The value with a footnote that has source, date, kind and note."""
    if figure.value is None:
        return "unmeasured" + (notes.mark(figure.note) if figure.note else "")
    origin = f"{figure.source}, {figure.date}; {figure.kind}"
    return _number(figure.value) + notes.mark(origin + (f"; {figure.note}" if figure.note else ""))


def _number(value: int | float) -> str:
    """Digits as they were stated, thousands of whole numbers apart."""
    return f"{int(value):,}" if value == int(value) else repr(value)


def _table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join("| " + " | ".join(cells) + " |" for cells in lines)


def _document(title: str, notes: _Footnotes, *blocks: str) -> str:
    parts = [f"# {title}", _GENERATED, *blocks]
    if notes.lines():
        parts += ["## Sources", "\n".join(notes.lines())]
    return "\n\n".join(parts) + "\n"


def main() -> None:
    """Writes HARDWARE.md and MODELS.md into the working folder."""
    Path("HARDWARE.md").write_text(render_hardware(), encoding="utf-8")
    Path("MODELS.md").write_text(render_models(), encoding="utf-8")


if __name__ == "__main__":
    main()
