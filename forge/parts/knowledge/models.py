"""The Gemma 4 family: shapes, towers, and which checkpoints exist under which names.

Knows no chips and does no arithmetic; shapes are stated, checkpoints cited.
"""

from __future__ import annotations

from dataclasses import dataclass

from forge.parts.knowledge.figures import Figure, unmeasured_figure
from forge.parts.knowledge.geometry import FULL_LAYER, SLIDING_LAYER, Geometry


@dataclass(frozen=True, slots=True)
class PublishedCheckpoint:
    """One repository of weights.

    repo: its id on the Hugging Face hub (or Ollama's tag).
    label: the encoding slot of a rig that serves it; empty for the reference release.
    stored: how its weights lie on disk, a key of WEIGHT_ENCODINGS; -unquantized is plain bf16.
    exists: whether it does; source and date say who saw it, or that it is missing.
    file: size of the weights file or files, towers included.
    """

    repo: str
    label: str
    stored: str
    exists: bool
    source: str
    date: str
    file: Figure
    note: str = ""


@dataclass(frozen=True, slots=True)
class Model:
    """One size of Gemma 4.

    slot: how a rig's name spells it. vision_tower, audio_tower: bytes in bf16, beside the text;
    vLLM on a TPU loads text and vision, vLLM on a GPU all, the JAX engine and llama.cpp's
    language file neither.
    """

    name: str
    slot: str
    geometry: Geometry
    geometry_source: str
    geometry_date: str
    vision_tower: Figure
    audio_tower: Figure
    checkpoints: tuple[PublishedCheckpoint, ...]


def _sliding_then_full(layers: int, every: int) -> tuple[str, ...]:
    return tuple(SLIDING_LAYER if (i + 1) % every else FULL_LAYER for i in range(layers))


_HUB_QUOTED = "Hugging Face hub, as quoted in several public repositories"
_DEV_MODELS = "xbill9/gemma4-dev, MODELS"
_RUN_ARTICLE = "dev.to, 12B Gemma 4 on Cloud Run"
_DEV_README = "xbill9/gemma4-dev, README"
_SEEN = "2026-11-29"  # the day a quotation without a date was read
_GEMMA_WHEEL = "gemma 4.0.1 (PyPI), its model configurations"
_NO_FILE = unmeasured_figure("bytes")


def _reference(repo: str, source: str, date: str, file: Figure = _NO_FILE) -> PublishedCheckpoint:
    return PublishedCheckpoint(repo, "", "bf16", True, source, date, file)


def _w4a16(repo: str, source: str, date: str, file: Figure = _NO_FILE) -> PublishedCheckpoint:
    note = (
        "embeddings stay bf16 (PLE table too), and a second bf16 copy of the tied head is on disk"
    )
    return PublishedCheckpoint(repo, "w4a16", "w4a16", True, source, date, file, note)


def _unquantized(repo: str, source: str, date: str, more: str = "") -> PublishedCheckpoint:
    note = "trained for q4_0, stored as bf16" + more
    return PublishedCheckpoint(repo, "q4_0", "bf16", True, source, date, _NO_FILE, note)


def _gguf(repo: str, source: str, date: str, file: Figure = _NO_FILE) -> PublishedCheckpoint:
    return PublishedCheckpoint(repo, "q4_0", "q4_0", True, source, date, file)


def _fp8(
    repo: str, note: str, file: Figure = _NO_FILE, *, exists: bool = True
) -> PublishedCheckpoint:
    return PublishedCheckpoint(repo, "fp8", "fp8", exists, _RUN_ARTICLE, "2026", file, note)


# The class defaults of transformers' Gemma4TextConfig (hidden 2304, 30 layers) are no real size.
GEMMA4: dict[str, Model] = {
    "E2B": Model(
        name="Gemma 4 E2B",
        slot="2b",
        geometry=Geometry(
            layer_types=_sliding_then_full(35, 5),
            hidden=1536,
            intermediate=6144,
            heads=8,
            kv_heads=1,
            global_kv_heads=1,
            head_dim=256,
            global_head_dim=512,
            vocab=262144,
            window=512,
            kv_shared_layers=20,
            ple_dim=256,
            ple_vocab=262144,
            double_wide_mlp=True,
        ),
        geometry_source=_GEMMA_WHEEL,
        geometry_date=_SEEN,
        vision_tower=Figure(
            334729216,
            "bytes",
            "transformers 5.24, Gemma4VisionConfig's defaults built on the meta device",
            _SEEN,
            kind="derived",
            note="agrees with the memory that vLLM reports for E2B on a TPU",
        ),
        audio_tower=Figure(
            609649216,
            "bytes",
            "transformers 5.24, Gemma4AudioConfig's defaults built on the meta device",
            _SEEN,
            kind="derived",
        ),
        checkpoints=(
            _reference(
                "google/gemma-4-E2B-it",
                _DEV_README,
                "2026-08-20",
                Figure(10.25e9, "bytes", _DEV_README, "2026-08-20", note="rounded there"),
            ),
            _w4a16(
                "google/gemma-4-E2B-it-qat-w4a16-ct",
                _DEV_README,
                "2026-08-20",
                Figure(8.32e9, "bytes", _DEV_README, "2026-09-04", note="rounded there"),
            ),
            _unquantized(
                "google/gemma-4-E2B-it-qat-q4_0-unquantized",
                _DEV_README,
                "2026-08-20",
                "; has no k_norm in the sharing layers, on which some loaders fail",
            ),
            _gguf(
                "google/gemma-4-E2B-it-qat-q4_0-gguf",
                _DEV_README,
                "2026-09-02",
                Figure(3349516256, "bytes", _DEV_README, "2026-09-02"),
            ),
            PublishedCheckpoint(
                "gemma4:e2b-it-qat",
                "q4_0",
                "q4_0",
                True,
                _DEV_README,
                "2026-09-02",
                Figure(3349514112, "bytes", _DEV_README, "2026-09-02"),
                "Ollama's own container of the same weights, with another digest",
            ),
        ),
    ),
    "E4B": Model(
        name="Gemma 4 E4B",
        slot="4b",
        geometry=Geometry(
            layer_types=_sliding_then_full(42, 6),
            hidden=2560,
            intermediate=10240,
            heads=8,
            kv_heads=2,
            global_kv_heads=2,
            head_dim=256,
            global_head_dim=512,
            vocab=262144,
            window=512,
            kv_shared_layers=18,
            ple_dim=256,
            ple_vocab=262144,
        ),
        geometry_source=_GEMMA_WHEEL,
        geometry_date=_SEEN,
        vision_tower=unmeasured_figure("bytes", "of the order of E2B's"),
        audio_tower=unmeasured_figure("bytes", "of the order of E2B's"),
        checkpoints=(
            _reference("google/gemma-4-E4B-it", _DEV_MODELS, "2026-08-20"),
            _w4a16("google/gemma-4-E4B-it-qat-w4a16-ct", _DEV_README, "2026-08-20"),
            _unquantized("google/gemma-4-E4B-it-qat-q4_0-unquantized", _DEV_MODELS, "2026-08-20"),
            _gguf(
                "google/gemma-4-E4B-it-qat-q4_0-gguf",
                _HUB_QUOTED,
                _SEEN,
                Figure(5154939136, "bytes", _HUB_QUOTED, _SEEN, note="revision bb3b92e6"),
            ),
        ),
    ),
    "12B": Model(
        name="Gemma 4 12B",
        slot="12b",
        geometry=Geometry(
            layer_types=_sliding_then_full(48, 6),
            hidden=3840,
            intermediate=15360,
            heads=16,
            kv_heads=8,
            global_kv_heads=1,
            head_dim=256,
            global_head_dim=512,
            vocab=262144,
            window=1024,
            k_eq_v=True,
        ),
        geometry_source="gemma4-pt-claude 0.2.0 (PyPI, third party)",
        geometry_date=_SEEN,
        vision_tower=Figure(
            0.1e9,
            "bytes",
            "23.9 GB in all (xbill9/gemma4-dev) less the text weights",
            "2026-08-20",
            kind="derived",
            note="vision and audio together: the model has no encoders, only projections",
        ),
        audio_tower=unmeasured_figure("bytes", "counted with vision"),
        checkpoints=(
            _reference(
                "google/gemma-4-12B-it",
                _RUN_ARTICLE,
                "2026",
                Figure(23.9e9, "bytes", _DEV_MODELS, "2026-08-20", note="rounded there"),
            ),
            _w4a16(
                "google/gemma-4-12B-it-qat-w4a16-ct",
                _DEV_README,
                "2026-08-20",
                Figure(10.26e9, "bytes", _DEV_MODELS, "2026-08-20", note="rounded there"),
            ),
            _unquantized("google/gemma-4-12B-it-qat-q4_0-unquantized", _HUB_QUOTED, _SEEN),
            _gguf(
                "google/gemma-4-12B-it-qat-q4_0-gguf",
                _HUB_QUOTED,
                "2026-10-06",
                Figure(6975879296, "bytes", _HUB_QUOTED, "2026-10-06", note="revision 29d09777"),
            ),
            _fp8(
                "google/gemma-4-12b-it-sfp8",
                "Google publishes no fp8 build; the next two are third parties'",
                exists=False,
            ),
            _fp8(
                "vrfai/gemma-4-12B-it-fp8",
                "made with ModelOpt",
                Figure(13.4e9, "bytes", _RUN_ARTICLE, "2026", note="rounded there"),
            ),
            _fp8("bahadirakdemir/gemma-4-12B-it-text-fp8", "text only; the article served it"),
        ),
    ),
    "26B-A4B": Model(
        name="Gemma 4 26B-A4B",
        slot="26b",
        geometry=Geometry(
            layer_types=_sliding_then_full(30, 6),
            hidden=2816,
            intermediate=2112,
            heads=16,
            kv_heads=8,
            global_kv_heads=2,
            head_dim=256,
            global_head_dim=512,
            vocab=262144,
            window=1024,
            k_eq_v=True,
            experts=128,
            top_k=8,
            expert_width=704,
        ),
        geometry_source=_GEMMA_WHEEL,
        geometry_date=_SEEN,
        vision_tower=Figure(
            1.14e9,
            "bytes",
            "51.61 GB on disk (xbill9/gemma4-dev) less the text weights",
            "2026-08-20",
            kind="derived",
        ),
        audio_tower=unmeasured_figure("bytes"),
        checkpoints=(
            _reference(
                "google/gemma-4-26B-A4B-it",
                "transformers 5.24, a comment in Gemma4TextConfig",
                _SEEN,
                Figure(51.61e9, "bytes", _DEV_MODELS, "2026-08-20", note="rounded there"),
            ),
            PublishedCheckpoint(
                "google/gemma-4-26B-A4B-it-qat-w4a16-ct",
                "w4a16",
                "w4a16",
                False,
                _DEV_README,
                "2026-08-20",
                _NO_FILE,
                "the only size without one; reports that name it measured a private mount",
            ),
            _unquantized(
                "google/gemma-4-26B-A4B-it-qat-q4_0-unquantized", _DEV_README, "2026-08-20"
            ),
            _gguf("google/gemma-4-26B-A4B-it-qat-q4_0-gguf", _HUB_QUOTED, _SEEN),
        ),
    ),
    "31B": Model(
        name="Gemma 4 31B",
        slot="31b",
        geometry=Geometry(
            layer_types=_sliding_then_full(60, 6),
            hidden=5376,
            intermediate=21504,
            heads=32,
            kv_heads=16,
            global_kv_heads=4,
            head_dim=256,
            global_head_dim=512,
            vocab=262144,
            window=1024,
            k_eq_v=True,
        ),
        geometry_source=_GEMMA_WHEEL,
        geometry_date=_SEEN,
        vision_tower=Figure(
            1.15e9,
            "bytes",
            "the -w4a16-ct file of 23.3 GB less its text tensors",
            _SEEN,
            kind="derived",
            note="the rounded size allows 1.14 to 1.24; the 26B-A4B's is 1.14",
        ),
        audio_tower=unmeasured_figure("bytes"),
        checkpoints=(
            _reference("google/gemma-4-31B-it", _HUB_QUOTED, _SEEN),
            _w4a16(
                "google/gemma-4-31B-it-qat-w4a16-ct",
                _DEV_README,
                "2026-08-20",
                Figure(23.3e9, "bytes", _HUB_QUOTED, _SEEN, note="rounded there"),
            ),
            _unquantized("google/gemma-4-31B-it-qat-q4_0-unquantized", _HUB_QUOTED, _SEEN),
            _gguf(
                "google/gemma-4-31B-it-qat-q4_0-gguf",
                _HUB_QUOTED,
                _SEEN,
                Figure(17651001568, "bytes", _HUB_QUOTED, _SEEN),
            ),
        ),
    ),
}


def model_for_slot(slot: str) -> Model:
    """The size that a rig's model slot names ("2b"); ValueError that lists them otherwise."""
    for model in GEMMA4.values():
        if model.slot == slot:
            return model
    known = ", ".join(model.slot for model in GEMMA4.values())
    raise ValueError(f"model slot {slot!r} is not known; known: {known}")


def checkpoint_for_repo(repo: str) -> tuple[Model, PublishedCheckpoint]:
    """The size and the entry of a repository id; ValueError when it is not in the table.

    An entry whose `exists` is False is returned as well: the caller can say why it cannot load.
    """
    for model in GEMMA4.values():
        for checkpoint in model.checkpoints:
            if checkpoint.repo == repo:
                return model, checkpoint
    raise ValueError(f"no Gemma 4 checkpoint named {repo!r} is known")
