"""The JAX engine beside other engines: `make bench-engine`. One checkpoint, one run, same prompts.

A random Gemma 4 of 300 million parameters is made, then served in turn by this engine, vLLM and
llama.cpp (where installed) over HTTP, and run by transformers in a process of its own. Beside them
the device's memory bandwidth is measured: decoding reads every weight once a step, so the share of
that bound says how good an engine is. On a machine with an accelerator the same runs there.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import platform
import re
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from forge.bench_engine_model import bench_prompts, make_bench_model
from forge.bench_engine_rounds import (
    OUTPUT_TOKENS,
    PROMPT_TOKENS,
    STREAMS,
    all_cells,
    running,
    server_round,
)
from forge.bench_engine_servers import (
    RIG,
    convert_to_gguf,
    found_llama_server,
    found_vllm_python,
    llama_server,
    printed,
    this_engine,
    transformers_row,
    usable_cores,
    vllm_server,
)
from forge.bench_local import read_bandwidth
from forge.engines.gemma4.config_reader import read_config
from forge.engines.gemma4.sizes import DTYPE_BYTES, decode_cost
from forge.engines.gemma4.tensor_names import is_linear_tensor, model_tensors
from forge.engines.gemma4.weight_forms import weight_forms
from forge.packed_checkpoint import pack_checkpoint

BEGIN, END = "<!-- bench-engine:begin -->", "<!-- bench-engine:end -->"
FORMS = ("int8", "w4a16")  # of this engine's matrices
ENGINES = ("this engine", *(f"this engine, {form}" for form in FORMS))
ENGINES += ("transformers", "vLLM", "llama.cpp")
# What a child says of the device that JAX takes by default. The copy reads and writes.
_ASK_DEVICE = """
import json, time, jax, jax.numpy as jnp
device = jax.devices()[0]
told = {"backend": jax.default_backend(), "name": device.device_kind}
if told["backend"] != "cpu":
    whole = jnp.ones(2**29, jnp.float32)
    copy = jax.jit(lambda x: x + 1)
    copy(whole).block_until_ready()
    spent = []
    for _ in range(8):
        begun = time.perf_counter()
        copy(whole).block_until_ready()
        spent.append(time.perf_counter() - begun)
    told["bandwidth"] = 2 * whole.nbytes / min(spent)
print(json.dumps(told))
"""


def with_shares(
    row: Mapping[str, Any], read: Mapping[int, float], bandwidth: float
) -> dict[str, Any]:
    """The row, each cell with its share of the bound.

    read: bytes that a step of so many streams reads, at their middle length. The share is 1 / tpot
    over bandwidth / read.
    """
    cells = {
        streams: cell | {"share": round(1000 / cell["tpot_ms"] * read[int(streams)] / bandwidth, 3)}
        for streams, cell in row["cells"].items()
    }
    return dict(row) | {"cells": cells}


def table_text(results: Mapping[str, Any]) -> str:
    """The results for people, as the README has them: a table, and what was measured how."""
    head = ["engine", *(f"tok/s, {n} at once" for n in STREAMS), f"{STREAMS[-1]} over 1"]
    head += [f"first token, {n}" for n in (STREAMS[0], STREAMS[-1])]
    head += ["of the bandwidth bound, 1"]
    lines = [f"| {' | '.join(head)} |", "|---" * len(head) + "|"]
    for row in results["rows"]:
        one, most = row["cells"]["1"], row["cells"][str(STREAMS[-1])]
        rates = [row["cells"][str(streams)]["output_tps"] for streams in STREAMS]
        cells = [
            f"{row['engine']} ({row['version']})",
            *(f"{rate:.1f}" for rate in rates),
            f"{rates[-1] / rates[0]:.1f} x",
            f"{one['ttft_ms']:.0f} ms",
            f"{most['ttft_ms']:.0f} ms",
            f"{100 * one['share']:.0f} %",
        ]
        lines.append(f"| {' | '.join(cells)} |")
    machine = results["machine"]
    lines += [
        "",
        f"{results['date']}, {machine['device']}, {machine['cores']} cores, load average "
        f"{machine['load']} before it began; {results['dtype']}; a random Gemma 4 of 300 million "
        f"parameters in E2B's proportions; {PROMPT_TOKENS} tokens in, {OUTPUT_TOKENS} out, greedy, "
        f"the median of {results['repeats']} rounds. Memory moved "
        f"{results['bandwidth_bytes_per_s'] / 1e9:.1f} GB/s, and a step of one stream reads "
        f"{results['read_bytes']['1'] / 1e9:.2f} GB. transformers runs its streams as one batch in "
        "its own process, without HTTP; the others serve over HTTP. int8 and w4a16 are the same "
        "matrices as 8-bit integers made at the start and as a checkpoint's packed 4-bit ones: "
        "other answers, and their bound is that of the fewer bytes.",
    ]
    lines += [f"Not measured: {reason}." for reason in results["missing"]]
    return "\n".join(lines)


def with_table(readme: str, table: str) -> str:
    """The README with the table between its two markers. Raises ValueError where it lacks them."""
    head, begin, rest = readme.partition(BEGIN)
    _, end, tail = rest.partition(END)
    if not begin or not end:
        raise ValueError(f"no {BEGIN} … {END} to put the table between")
    return f"{head}{BEGIN}\n{table}\n{END}{tail}"


def bytes_read(folder: Path, dtype: str, quantization: str = "none") -> dict[int, float]:
    """Bytes that this engine's step reads for so many streams at their middle length."""
    config = read_config(folder)
    shapes = model_tensors(config)
    packed = [name for name in shapes if config.packed and is_linear_tensor(name, shapes[name])]
    forms = weight_forms(config, packed, quantization)
    middle = PROMPT_TOKENS + OUTPUT_TOKENS // 2
    return {n: decode_cost(config, DTYPE_BYTES[dtype], n, middle, forms).read for n in STREAMS}


def device_facts() -> dict[str, Any]:
    """backend, name and bandwidth (bytes a second) of the device that JAX takes by default."""
    told: dict[str, Any] = json.loads(printed([sys.executable, "-c", _ASK_DEVICE]).splitlines()[-1])
    if told["backend"] == "cpu":
        told |= {"name": _processor(), "bandwidth": read_bandwidth(usable_cores())}
    return told


def _processor() -> str:
    with contextlib.suppress(OSError):
        found = re.search(r"model name\s*: (.*)", Path("/proc/cpuinfo").read_text())
        if found:
            return found[1]
    return platform.processor() or platform.machine()


def main(argv: Sequence[str] | None = None) -> int:
    """Measure, write the README's table, print it and one line of JSON; 1 where one failed."""
    parser = argparse.ArgumentParser(prog="make bench-engine", description=__doc__)
    parser.add_argument("--repeats", type=int, default=3, help="rounds that count, of each cell")
    parser.add_argument("--dtype", choices=("f32", "bf16"), help="default: f32 on a CPU, else bf16")
    parser.add_argument("--engines", nargs="*", choices=ENGINES, default=ENGINES)
    parser.add_argument("--vllm-python", type=Path, default=found_vllm_python())
    parser.add_argument("--llama-server", type=Path, default=found_llama_server())
    parser.add_argument("--model", type=Path, help="a folder made before; else one is made")
    parser.add_argument("--no-write", action="store_true", help="leave the README as it is")
    parser.add_argument("--only-transformers", action="store_true", help=argparse.SUPPRESS)
    asked = parser.parse_args(argv)
    if asked.only_transformers:
        print(json.dumps(transformers_row(asked.model, asked.dtype, asked.repeats)))
        return 0
    load = round(os.getloadavg()[0], 2)
    device = device_facts()
    dtype = asked.dtype or ("f32" if device["backend"] == "cpu" else "bf16")
    rows, missing, failed = [], [], []
    with tempfile.TemporaryDirectory(prefix="bench-engine-") as scratch:
        work = Path(scratch)
        folder = asked.model or make_bench_model(work / "model")
        read = bytes_read(folder, dtype)
        prompts = bench_prompts(max(STREAMS), PROMPT_TOKENS)
        for name in asked.engines:
            try:
                row = _measured(name, asked, folder, dtype, device["backend"], work, prompts)
            except FileNotFoundError as error:
                missing.append(f"{name}, {error}")
                continue
            except RuntimeError as error:
                failed.append(f"{name}: {error}")
                continue
            form = name.partition(", ")[2]
            if form == "w4a16":
                row["read_bytes"] = bytes_read(work / "packed", dtype)
            elif form:
                row["read_bytes"] = bytes_read(folder, dtype, form)
            rows.append(row)
            print(f"{name}: {json.dumps(row['cells'])}", flush=True)
    # The bound is the best that memory did, before or after.
    bandwidth = max(device["bandwidth"], device_facts()["bandwidth"])
    results = {
        "bench": "engine",
        "date": time.strftime("%Y-%m-%d"),
        "dtype": dtype,
        "repeats": asked.repeats,
        "workload": {"input": PROMPT_TOKENS, "output": OUTPUT_TOKENS, "streams": list(STREAMS)},
        "bandwidth_bytes_per_s": round(bandwidth),
        "read_bytes": {str(streams): round(size) for streams, size in read.items()},
        "rows": [with_shares(row, row.get("read_bytes", read), bandwidth) for row in rows],
        "missing": missing,
        "failed": failed,
        "machine": {
            "device": device["name"],
            "backend": device["backend"],
            "cores": usable_cores(),
            "load": load,
            "python": platform.python_version(),
        },
    }
    table = table_text(results)
    if not failed and not asked.no_write and tuple(asked.engines) == ENGINES:
        readme = RIG / "README.md"
        readme.write_text(with_table(readme.read_text(encoding="utf-8"), table), encoding="utf-8")
    print(table)
    for line in failed:
        print(f"FAILED {line}")
    print(json.dumps(results))
    return 1 if failed else 0


def _measured(
    name: str,
    asked: argparse.Namespace,
    folder: Path,
    dtype: str,
    backend: str,
    work: Path,
    prompts: Sequence[Sequence[int]],
) -> dict[str, Any]:
    """One engine's row. Raises FileNotFoundError where it is not installed, RuntimeError else."""
    if name == "transformers":
        argv = [sys.executable, "-m", "forge.bench_engine", "--only-transformers"]
        argv += ["--model", str(folder), "--dtype", dtype, "--repeats", str(asked.repeats)]
        row: dict[str, Any] = json.loads(printed(argv).splitlines()[-1])
        return row
    if name.startswith("this engine"):
        form = name.partition(", ")[2]
        if form == "w4a16":
            folder = pack_checkpoint(folder, work / "packed", head=False)
        server = this_engine(folder, dtype, work / "compiled", form)
    elif name == "vLLM":
        if asked.vllm_python is None:
            raise FileNotFoundError("which is not installed (--vllm-python)")
        server = vllm_server(folder, dtype, asked.vllm_python, backend)
    else:
        if asked.llama_server is None:
            raise FileNotFoundError("which is not built (--llama-server)")
        gguf = convert_to_gguf(folder, asked.llama_server, dtype, work / "bench.gguf")
        server = llama_server(gguf, asked.llama_server, backend)
    with running(server, work / "server.log"):
        cells = all_cells(lambda some: server_round(server, some), prompts, asked.repeats)
    return {"engine": server.name, "version": server.version, "cells": cells}


if __name__ == "__main__":
    sys.exit(main())
