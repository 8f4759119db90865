"""Which weights are known to load on which engine and chip, and which are not, with the reason.

What was tried by others is imported with its source; what this rig tried itself is another part's.
Knows no memory: weights that fit may still not load.
"""

from __future__ import annotations

from dataclasses import dataclass

from forge.parts.ground.errors import RigError

_LOAD_ARTICLE = "dev.to, Self-Hosted Gemma 4 on TPU v6e, section 2"
_E2B_TRIED = "google/gemma-4-E2B-it"


@dataclass(frozen=True)
class LoadResult:
    """One trial. `how` is the engine's way of holding the model; `upstream` where it is tracked,
    empty where no issue is known. `chips` are those that it was tried on or holds for."""

    weights: str
    engine: str
    chips: tuple[str, ...]
    how: str
    loads: bool
    cause: str
    upstream: str
    source: str
    date: str


# The loader and not the chip decides: the article tried v6e, the same software serves v5e.
LOAD_MATRIX: tuple[LoadResult, ...] = (
    LoadResult(
        f"{_E2B_TRIED}-qat-w4a16-ct",
        "vLLM",
        ("v5e", "v6e"),
        "JAX",
        False,
        "the int4 scheme of compressed-tensors is not implemented for E2B's "
        "per_layer_model_projection",
        "",
        _LOAD_ARTICLE,
        "2026-07-25",
    ),
    LoadResult(
        f"{_E2B_TRIED}-qat-q4_0-unquantized",
        "vLLM",
        ("v5e", "v6e"),
        "JAX",
        False,
        "k_norm.weight is missing for layers 15 to 34: they share the KV cache of earlier layers "
        "and the export rightly leaves it out, the loader wants it all the same",
        "vllm-project/tpu-inference#3225",
        _LOAD_ARTICLE,
        "2026-07-25",
    ),
    LoadResult(
        f"{_E2B_TRIED}-qat-q4_0-unquantized",
        "vLLM",
        ("v5e", "v6e"),
        "torchax (MODEL_IMPL_TYPE=vllm)",
        False,
        "the same missing k_norm.weight",
        "vllm-project/tpu-inference#3225",
        _LOAD_ARTICLE,
        "2026-07-25",
    ),
    LoadResult(_E2B_TRIED, "vLLM", ("v6e",), "JAX", True, "", "", _LOAD_ARTICLE, "2026-07-25"),
)


def load_results(weights: str, engine: str, chip: str) -> list[LoadResult]:
    """What is known of these weights on that engine and chip; empty where nobody tried."""
    return [
        result
        for result in LOAD_MATRIX
        if (result.weights, result.engine) == (weights, engine) and chip in result.chips
    ]


def refuse_unloadable(weights: str, engine: str, chip: str, override: bool) -> None:
    """Raise RigError INVALID where every known trial failed, with the cause and the issue.

    `override` tries it all the same, in the expectation that it fails.
    """
    known = load_results(weights, engine, chip)
    if override or not known or any(result.loads for result in known):
        return
    first = known[0]
    where = f", tracked as {first.upstream}" if first.upstream else "; no upstream issue is known"
    raise RigError(
        "INVALID",
        f"{weights} does not load on {engine} and a {chip}: {first.cause}{where} ({first.source}, "
        f"{first.date}); nothing was rented",
        f"serve {_E2B_TRIED}; or override=true tries it, and get_load_matrix() keeps the result",
    )
