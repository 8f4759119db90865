"""The calibration's rows of speed and money; those of memory, and the type, stand in their twin."""

from __future__ import annotations

from forge.calibration_rows import (
    RUN_ARTICLE,
    V6E_ARTICLE,
    V6E_GRID,
    CalibrationRow,
    ReportOrigin,
    from_dev,
    shape_of,
)
from forge.parts.knowledge.engine_profiles import engine_profile
from forge.parts.knowledge.hardware import ACCELERATORS
from forge.parts.knowledge.memory import step_bytes
from forge.parts.knowledge.planner_money import (
    ApiPrice,
    break_even_tokens_per_s,
    million_tokens,
    usd_for,
    usd_per_million,
    with_cold_start,
)
from forge.parts.knowledge.planner_speed import SpeedModel

_V5E_RUN = ReportOrigin("xbill9/gemma4-dev, v5e runs of vLLM", "2026-08-09")
_V5E_UNIT_SLIP = 859.0  # GB/s, if the page's 800 GiB/s were meant
_T4G_READ = 277.0  # GB/s read on a T4G, against a peak of 320
_API = ApiPrice(input=0.10, output=0.40)  # Gemini 2.5 Flash-Lite, USD per million tokens


def speed_of(
    size: str, encoding: str, runtime: str | None, chip: str, bandwidth: float | None = None
) -> SpeedModel:
    """The planner's speed model of a size on one chip; runtime None is the bare roofline."""
    accelerator = ACCELERATORS[chip]
    return SpeedModel(
        shape_of(size),
        encoding,
        bandwidth or accelerator.bandwidth.known(chip),
        accelerator.compute.value,
        None if runtime is None else engine_profile(runtime, chip),
    )


def _v6e_ms(size: str, streams: int, context: int) -> float:
    return speed_of(size, "bf16", "vllm", "v6e").step_ms(streams, context)


def _v5e_ms(streams: int, context: int, bandwidth: float | None = _V5E_UNIT_SLIP) -> float:
    return speed_of("E2B", "bf16", "vllm", "v5e", bandwidth).step_ms(streams, context)


def _v6e_rate(streams: int) -> float:
    return speed_of("E2B", "bf16", "vllm", "v6e").tokens_per_s(streams, 1024, 128)


SINGLE_ROWS: tuple[CalibrationRow, ...] = (
    CalibrationRow(
        "F",
        "v6e vLLM E2B, ms a token at 128",
        4.7,
        V6E_GRID,
        lambda: _v6e_ms("E2B", 1, 128),
        "2 parameters over 3 points",
    ),
    CalibrationRow(
        "F",
        "v6e vLLM E4B, ms a token at 128",
        8.9,
        V6E_GRID,
        lambda: _v6e_ms("E4B", 1, 128),
        "2 parameters over 3 points",
    ),
    CalibrationRow(
        "F",
        "v6e vLLM 12B, ms a token at 128",
        22.0,
        V6E_GRID,
        lambda: _v6e_ms("12B", 1, 128),
        "2 parameters over 3 points",
    ),
    CalibrationRow(
        "P", "v6e vLLM E2B, ms a token at 65,376", 5.2, V6E_GRID, lambda: _v6e_ms("E2B", 1, 65_376)
    ),
    CalibrationRow(
        "P", "v6e vLLM E4B, ms a token at 65,376", 10.6, V6E_GRID, lambda: _v6e_ms("E4B", 1, 65_376)
    ),
    CalibrationRow(
        "P", "v6e vLLM 12B, ms a token at 4096", 22.6, V6E_GRID, lambda: _v6e_ms("12B", 1, 4096)
    ),
    CalibrationRow(
        "P", "v6e vLLM E2B, ms a token at 8192", 4.9, V6E_GRID, lambda: _v6e_ms("E2B", 1, 8192)
    ),
    CalibrationRow(
        "P", "v6e vLLM E4B, ms a token at 8192", 9.6, V6E_GRID, lambda: _v6e_ms("E4B", 1, 8192)
    ),
    CalibrationRow(
        "P",
        "v5e vLLM E2B, ms a token at 128, v6e's constants, 859 GB/s",
        8.02,
        _V5E_RUN,
        lambda: _v5e_ms(1, 128),
    ),
    CalibrationRow(
        "P",
        "v5e vLLM E2B, ms a token at 1024, v6e's constants, 859 GB/s",
        8.05,
        _V5E_RUN,
        lambda: _v5e_ms(1, 1024),
    ),
    CalibrationRow(
        "P",
        "v5e vLLM E2B, ms a token at 8192, v6e's constants, 859 GB/s",
        8.42,
        _V5E_RUN,
        lambda: _v5e_ms(1, 8192),
    ),
    CalibrationRow(
        "P",
        "v5e vLLM E2B, ms a token at 128, v6e's constants, 819 GB/s",
        8.02,
        _V5E_RUN,
        lambda: _v5e_ms(1, 128, None),
        "speaks for 859 against 819, weakly",
    ),
    CalibrationRow(
        "P",
        "v6e vLLM E2B, one stream, tok/s",
        213,
        V6E_ARTICLE,
        lambda: speed_of("E2B", "bf16", "vllm", "v6e").single_tokens_per_s(1024),
    ),
    CalibrationRow(
        "P",
        "E2B 16-bit, read a step, GB",
        4.514,
        from_dev("2026-08"),
        lambda: step_bytes(shape_of("E2B"), "bf16") / 1e9,
        "the per-layer table is a gather",
    ),
    CalibrationRow(
        "F",
        "E2B q4_0, read a step, GB",
        1.407,
        from_dev("2026-09-02"),
        lambda: step_bytes(shape_of("E2B"), "q4_0") / 1e9,
    ),
    CalibrationRow(
        "F",
        "T4G vLLM E2B, tok/s",
        43.1,
        from_dev("2026-08"),
        lambda: speed_of("E2B", "fp16", "vllm", "t4g").single_tokens_per_s(128),
        "the efficiency of .65 was fitted here",
    ),
    CalibrationRow(
        "F",
        "L4 JAX E2B, tok/s",
        48.4,
        from_dev("2026-08-28"),
        lambda: speed_of("E2B", "bf16", "jax", "l4").single_tokens_per_s(128),
        "the efficiency of .75 was fitted here; all of the bandwidth would give 66",
    ),
    CalibrationRow(
        "X",
        "T4G or T4 JAX E2B with the L4's constants, tok/s",
        13.1,
        from_dev("2026-08-28"),
        lambda: speed_of("E2B", "fp16", "jax", "t4g", _T4G_READ).single_tokens_per_s(128),
        "fails by 3.4: f32 products and type conversion take 86.9 % of the time, not bandwidth",
    ),
    CalibrationRow(
        "F",
        "GTX 1650 Ti llama.cpp E2B q4_0, tok/s",
        73.75,
        from_dev("2026-09-03"),
        lambda: speed_of("E2B", "q4_0", "llamacpp", "1650ti").single_tokens_per_s(128),
        "the efficiency of .60 was fitted here",
    ),
    CalibrationRow(
        "X",
        "CPU transformers E2B bf16, GB/s implied by 4.853 tok/s",
        22.1,
        from_dev("2026-09-04"),
        lambda: speed_of("E2B", "bf16", "pytorch", "cpu").read_bytes(1, 0) * 4.853 / 1e9,
        "nothing to predict: this is where the processor's effective bandwidth comes from",
    ),
    CalibrationRow(
        "F",
        "inf2, one core, E2B dense, tok/s",
        45,
        from_dev("2026-08"),
        lambda: speed_of("E2B", "bf16", "jax", "inf2").single_tokens_per_s(0),
        "the efficiency of .5 was fitted here",
    ),
    CalibrationRow(
        "X",
        "v6e JAX 12B w4a16 as if its kernel were fused, tok/s",
        33.9,
        from_dev("2026-08"),
        lambda: speed_of("12B", "w4a16", "vllm", "v6e").single_tokens_per_s(128),
        "fails by 4: dequantise, then multiply writes and reads bf16 (see the next row)",
    ),
    CalibrationRow(
        "P",
        "v6e JAX 12B w4a16, reference path, tok/s",
        33.9,
        from_dev("2026-08"),
        lambda: speed_of("12B", "w4a16", "jax", "v6e").single_tokens_per_s(512),
        "packed read and one bf16 pass",
    ),
    CalibrationRow(
        "P",
        "v6e JAX 31B w4a16, reference path, tok/s",
        12.7,
        from_dev("2026-08"),
        lambda: speed_of("31B", "w4a16", "jax", "v6e").single_tokens_per_s(512),
        "packed read and one bf16 pass",
    ),
    CalibrationRow(
        "P",
        "v6e JAX E2B w4a16, reference path, ms a step, 2 to 8 streams",
        4.88,
        from_dev("2026-08"),
        lambda: speed_of("E2B", "w4a16", "jax", "v6e").step_ms(1, 512),
        "one stream took 6.80, for a reason that the reporter does not give",
    ),
    CalibrationRow(
        "X",
        "L4 on Cloud Run, 12B fp8, tok/s",
        12.09,
        RUN_ARTICLE,
        lambda: speed_of("12B", "fp8", "vllm", "l4").single_tokens_per_s(128),
        "fails: tokens were estimated from text, eager mode, remote client",
    ),
)

CONCURRENCY_ROWS: tuple[CalibrationRow, ...] = (
    CalibrationRow(
        "F",
        "v6e vLLM E2B, ms a token, 8 streams at 128",
        6.2,
        V6E_GRID,
        lambda: _v6e_ms("E2B", 8, 128),
        "fitted: the host curve",
    ),
    CalibrationRow(
        "F",
        "v6e vLLM E2B, ms a token, 16 streams at 128",
        8.2,
        V6E_GRID,
        lambda: _v6e_ms("E2B", 16, 128),
        "fitted: the host curve",
    ),
    CalibrationRow(
        "F",
        "v6e vLLM E2B, ms a token, 32 streams at 128",
        17.4,
        V6E_GRID,
        lambda: _v6e_ms("E2B", 32, 128),
        "fitted: the host curve",
    ),
    CalibrationRow(
        "F",
        "v6e vLLM E2B, ms a token, 64 streams at 128",
        25.1,
        V6E_GRID,
        lambda: _v6e_ms("E2B", 64, 128),
        "fitted: the host curve",
    ),
    CalibrationRow(
        "P",
        "v6e vLLM E4B, ms a token, 8 streams at 128",
        9.7,
        V6E_GRID,
        lambda: _v6e_ms("E4B", 8, 128),
        "E2B's host curve",
    ),
    CalibrationRow(
        "P",
        "v6e vLLM E4B, ms a token, 16 streams at 128",
        11.8,
        V6E_GRID,
        lambda: _v6e_ms("E4B", 16, 128),
        "E2B's host curve",
    ),
    CalibrationRow(
        "P",
        "v6e vLLM E4B, ms a token, 32 streams at 128",
        22.0,
        V6E_GRID,
        lambda: _v6e_ms("E4B", 32, 128),
        "E2B's host curve",
    ),
    CalibrationRow(
        "P",
        "v6e vLLM E4B, ms a token, 64 streams at 128",
        29.8,
        V6E_GRID,
        lambda: _v6e_ms("E4B", 64, 128),
        "E2B's host curve",
    ),
    CalibrationRow(
        "P",
        "v6e vLLM 12B, ms a token, 8 streams at 128",
        22.5,
        V6E_GRID,
        lambda: _v6e_ms("12B", 8, 128),
        "E2B's host curve",
    ),
    CalibrationRow(
        "P",
        "v6e vLLM 12B, ms a token, 16 streams at 128",
        23.2,
        V6E_GRID,
        lambda: _v6e_ms("12B", 16, 128),
        "E2B's host curve",
    ),
    CalibrationRow(
        "P",
        "v6e vLLM 12B, ms a token, 32 streams at 128",
        32.7,
        V6E_GRID,
        lambda: _v6e_ms("12B", 32, 128),
        "E2B's host curve",
    ),
    CalibrationRow(
        "P",
        "v5e vLLM E2B, ms a token, 4 streams at 128, v6e's constants",
        8.96,
        _V5E_RUN,
        lambda: _v5e_ms(4, 128),
    ),
    CalibrationRow(
        "P",
        "v5e vLLM E2B, ms a token, 16 streams at 128, v6e's constants",
        13.18,
        _V5E_RUN,
        lambda: _v5e_ms(16, 128),
    ),
    CalibrationRow(
        "P",
        "v5e vLLM E2B, ms a token, 64 streams at 128, v6e's constants",
        40.72,
        _V5E_RUN,
        lambda: _v5e_ms(64, 128),
        "the host curve differs by engine version and host",
    ),
    CalibrationRow(
        "P",
        "v6e vLLM E2B, 1024 in, 128 out, 8 streams, tok/s",
        1_209,
        V6E_ARTICLE,
        lambda: _v6e_rate(8),
    ),
    CalibrationRow(
        "P",
        "v6e vLLM E2B, 1024 in, 128 out, 32 streams, tok/s",
        1_636,
        V6E_ARTICLE,
        lambda: _v6e_rate(32),
    ),
    CalibrationRow(
        "P",
        "v6e vLLM E2B, 1024 in, 128 out, 64 streams, tok/s",
        2_140,
        V6E_ARTICLE,
        lambda: _v6e_rate(64),
    ),
    CalibrationRow(
        "P",
        "v6e vLLM E2B, 1024 in, 128 out, 100 streams, tok/s",
        2_215,
        V6E_ARTICLE,
        lambda: _v6e_rate(100),
    ),
    CalibrationRow(
        "X",
        "v6e E2B, 1024 in, 128 out, 64 streams, bare roofline, tok/s",
        2_140,
        V6E_ARTICLE,
        lambda: speed_of("E2B", "bf16", None, "v6e").tokens_per_s(64, 1024, 128),
        "fails by 4.6: host and scheduler are the limit, not the chip",
    ),
    CalibrationRow(
        "X",
        "v6e E2B, 128 in, 128 out, 64 streams, bare roofline, tok/s",
        2_452,
        V6E_GRID,
        lambda: speed_of("E2B", "bf16", None, "v6e").tokens_per_s(64, 128, 128),
        "fails by 7.7: host and scheduler are the limit, not the chip",
    ),
    CalibrationRow(
        "P",
        "v6e JAX E2B w4a16, batched kernel without scheduler, 32 streams, tok/s",
        5_743,
        from_dev("2026-07-29"),
        lambda: 32_000 / speed_of("E2B", "w4a16", "jax", "v6e").step_ms(32, 512),
        "the model holds where no host scheduler is in the loop",
    ),
)

MONEY_ROWS: tuple[CalibrationRow, ...] = (
    CalibrationRow(
        "I",
        "v6e saturated, USD a million out",
        0.17,
        V6E_ARTICLE,
        lambda: usd_per_million(1.35, 2215),
    ),
    CalibrationRow(
        "I",
        "v6e 64 streams, USD a million out",
        0.18,
        V6E_ARTICLE,
        lambda: usd_per_million(1.35, 2140),
    ),
    CalibrationRow(
        "I",
        "v6e 8 streams, USD a million out",
        0.31,
        V6E_ARTICLE,
        lambda: usd_per_million(1.35, 1209),
    ),
    CalibrationRow(
        "I",
        "v6e one stream, USD a million out",
        1.79,
        V6E_ARTICLE,
        lambda: usd_per_million(1.35, 209),
    ),
    CalibrationRow(
        "I",
        "v5e spot saturated, USD a million out",
        0.12,
        from_dev("2026-08-06"),
        lambda: usd_per_million(0.5779, 1382),
    ),
    CalibrationRow(
        "I",
        "v5e spot one stream, USD a million out",
        1.34,
        from_dev("2026-08-06"),
        lambda: usd_per_million(0.5779, 120),
    ),
    CalibrationRow(
        "I",
        "v5e flex-start at 1877.7 tok/s, USD a million out",
        0.089,
        from_dev("2026-08"),
        lambda: usd_per_million(0.60, 1877.7),
    ),
    CalibrationRow(
        "I",
        "T4G spot, USD a million out",
        8.54,
        from_dev("2026-08"),
        lambda: usd_per_million(0.369, 12.00),
    ),
    CalibrationRow(
        "I",
        "v6e static PyTorch loop, one stream, USD a million out",
        1.65,
        from_dev("2026-08"),
        lambda: usd_per_million(1.35, 227.3),
    ),
    CalibrationRow(
        "I",
        "v6e E2B sweep's peak, USD a million out",
        0.15,
        V6E_GRID,
        lambda: usd_per_million(1.35, 2501),
    ),
    CalibrationRow(
        "I",
        "v6e 12B sweep's peak, USD a million out",
        0.38,
        V6E_GRID,
        lambda: usd_per_million(1.35, 990),
    ),
    CalibrationRow(
        "I",
        "break-even against 0.40 USD a million out alone, tok/s",
        940,
        V6E_ARTICLE,
        lambda: break_even_tokens_per_s(1.35, ApiPrice(0, _API.output), 1024, 128),
    ),
    CalibrationRow(
        "S",
        "break-even with the API's input price, 1024 in for 128 out, tok/s",
        940,
        V6E_ARTICLE,
        lambda: break_even_tokens_per_s(1.35, _API, 1024, 128),
        "the article leaves out 0.10 USD a million in: the API costs 1.20 there, not 0.40",
    ),
    CalibrationRow(
        "I", "four hours of flex-start, USD", 5.40, V6E_ARTICLE, lambda: usd_for(1.35, 4 * 3600)
    ),
    CalibrationRow(
        "I",
        "four hours saturated, million tokens",
        30,
        V6E_ARTICLE,
        lambda: million_tokens(2215, 4),
        "rounded there",
    ),
    CalibrationRow(
        "I", "cold start of 8.5 min, USD", 0.19, V6E_ARTICLE, lambda: usd_for(1.35, 510)
    ),
    CalibrationRow(
        "I", "cold start of 10.5 min, USD", 0.24, V6E_ARTICLE, lambda: usd_for(1.35, 630)
    ),
    CalibrationRow(
        "I",
        "v6e saturated for 4 h with a cold start of 510 s, USD a million out",
        0.17,
        V6E_ARTICLE,
        lambda: with_cold_start(usd_per_million(1.35, 2215), 4 * 3600, 510),
        "the article leaves the start out",
    ),
)
