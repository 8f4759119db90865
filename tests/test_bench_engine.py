"""`make bench-engine`: its arithmetic, its client against a server that streams, and its table."""

from __future__ import annotations

import contextlib
import json
import re
import sys
import tempfile
import threading
import time
import unittest
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

from forge.bench_engine import (
    BEGIN,
    END,
    ENGINES,
    table_text,
    with_shares,
    with_table,
)
from forge.bench_engine_model import (
    BENCH_LAYERS,
    BENCH_SHARED,
    BENCH_VOCABULARY,
    bench_prompts,
    bench_tokenizer_files,
)
from forge.bench_engine_rounds import (
    OUTPUT_TOKENS,
    STREAMS,
    Answer,
    BenchServer,
    all_cells,
    cell_of,
    middle_cell,
    running,
    server_round,
    streamed_answer,
)
from forge.bench_engine_servers import RIG, convert_to_gguf, llama_server, printed, this_engine
from forge.demo import free_port
from tests.engines.gemma4_files import text_config

# A server that is healthy after its third question, and never ends when it is asked kindly.
_SLOW_SERVER = """
import http.server, signal, sys
asked = 0
class Handler(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        global asked
        asked += 1
        self.send_response(200 if asked > 2 else 503)
        self.end_headers()
    def log_message(self, *words):
        pass
print("came up", flush=True)
http.server.HTTPServer(("127.0.0.1", int(sys.argv[1])), Handler).serve_forever()
"""


class Handler(BaseHTTPRequestHandler):
    """Streams as OpenAI's interface does; the server's attributes say how badly."""

    server: Served

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        served = self.server
        served.asked.append(body)
        if served.status != 200:
            self.send_response(served.status)
            self.end_headers()
            self.wfile.write(b'{"error": "no room"}')
            return
        self.send_response(200)
        self.send_header("Content-Type", "text/event-stream")
        self.end_headers()
        self.wfile.write(b": a comment\n\n")
        for _ in range(served.tokens):
            self._event({"choices": [{"text": "x"}]})
        if served.usage is not None:
            self._event({"choices": [], "usage": {"completion_tokens": served.usage}})
        self.wfile.write(b"data: [DONE]\n\n")

    def _event(self, event: dict[str, Any]) -> None:
        self.wfile.write(f"data: {json.dumps(event)}\n\n".encode())
        self.wfile.flush()

    def log_message(self, format: str, *args: Any) -> None:
        """Tests are quiet."""


class Served(ThreadingHTTPServer):
    """What the tests ask."""

    request_queue_size = 64  # of connections that come in the same moment; else 5

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.asked: list[dict[str, Any]] = []
        self.status, self.tokens = 200, OUTPUT_TOKENS
        self.usage: int | None = OUTPUT_TOKENS

    def as_bench(self) -> BenchServer:
        return BenchServer("it", "1", [], self.server_address[1], "bench")


@contextlib.contextmanager
def served() -> Iterator[Served]:
    server = Served()
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    try:
        yield server
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


def results() -> dict[str, Any]:
    cells = {
        "1": {"output_tps": 20.0, "ttft_ms": 101.4, "tpot_ms": 48.0, "spread": 0.01, "share": 0.7},
        "4": {"output_tps": 60.0, "ttft_ms": 300.0, "tpot_ms": 60.0, "spread": 0.01, "share": 0.6},
        "16": {"output_tps": 110.0, "ttft_ms": 901.0, "tpot_ms": 99.0, "spread": 0.0, "share": 0.4},
    }
    return {
        "date": "2026-11-30",
        "dtype": "f32",
        "repeats": 3,
        "bandwidth_bytes_per_s": 25_000_000_000,
        "read_bytes": {"1": 900_000_000, "4": 1, "16": 1},
        "rows": [{"engine": "this engine", "version": "JAX 0.10.2", "cells": cells}],
        "missing": ["vLLM, which is not installed (--vllm-python)"],
        "machine": {"device": "AMD EPYC", "backend": "cpu", "cores": 2, "load": 0.1},
    }


class ArithmeticTests(unittest.TestCase):
    def test_a_cell_counts_all_tokens_until_the_last_one(self) -> None:
        cell = cell_of([Answer(0.5, 2.0, 4), Answer(1.0, 4.0, 4)])
        self.assertAlmostEqual(cell["output_tps"], 2.0)
        self.assertAlmostEqual(cell["ttft_ms"], 750)
        self.assertAlmostEqual(cell["tpot_ms"], 750)

    def test_the_middle_round_and_how_far_the_others_lie_from_it(self) -> None:
        rounds = [{"output_tps": rate, "ttft_ms": rate * 2} for rate in (30.0, 10.0, 20.0)]
        cell = middle_cell(rounds)
        self.assertEqual((20.0, 40.0, 0.5), (cell["output_tps"], cell["ttft_ms"], cell["spread"]))
        self.assertEqual(middle_cell(rounds[:1])["spread"], 0.0)

    def test_of_two_rounds_the_slower_one(self) -> None:
        rounds = [{"output_tps": 30.0}, {"output_tps": 10.0}]
        self.assertEqual(middle_cell(rounds)["output_tps"], 10.0)

    def test_every_count_of_streams_is_warmed_up_once(self) -> None:
        sizes = []

        def one_round(prompts: Any) -> dict[str, float]:
            sizes.append(len(prompts))
            return {"output_tps": float(len(sizes))}

        cells = all_cells(one_round, [[1]] * max(STREAMS), repeats=2)
        self.assertEqual([size for streams in STREAMS for size in [streams] * 3], sizes)
        # The first of each three is no figure: of the others the slower one, which came first.
        self.assertEqual([2.0, 5.0, 8.0], [cells[str(n)]["output_tps"] for n in STREAMS])

    def test_the_share_of_the_bound(self) -> None:
        cells = {"1": {"tpot_ms": 50.0}, "16": {"tpot_ms": 100.0}}
        made = with_shares({"engine": "x", "cells": cells}, {1: 900e6, 16: 1.2e9}, 25e9)
        self.assertEqual(made["cells"]["1"]["share"], 0.72)  # 36 ms at best
        self.assertEqual(made["cells"]["16"]["share"], 0.48)
        self.assertNotIn("share", cells["1"])


class ClientTests(unittest.TestCase):
    def test_it_asks_for_exactly_so_many_tokens_and_counts_them(self) -> None:
        with served() as server:
            answer = streamed_answer(server.as_bench(), [5, 6], time.perf_counter())
        self.assertEqual(OUTPUT_TOKENS, answer.tokens)
        asked = server.asked[0]
        self.assertEqual(
            ([5, 6], OUTPUT_TOKENS, 0), (asked["prompt"], asked["max_tokens"], asked["temperature"])
        )
        self.assertTrue(asked["ignore_eos"] and asked["stream"])

    def test_first_and_last_are_of_the_stream(self) -> None:
        with served() as server:
            server.tokens = 5
            answer = streamed_answer(server.as_bench(), [5], time.perf_counter())
            self.assertLess(0, answer.first)
            self.assertLess(answer.first, answer.last)
            server.tokens = 1
            answer = streamed_answer(server.as_bench(), [5], time.perf_counter())
            self.assertEqual(answer.first, answer.last)

    def test_an_answer_of_another_length_is_no_figure(self) -> None:
        for usage in (None, OUTPUT_TOKENS - 1, 0):
            with served() as server, self.subTest(usage=usage):
                server.usage = usage
                with self.assertRaisesRegex(RuntimeError, f"instead of {OUTPUT_TOKENS}"):
                    streamed_answer(server.as_bench(), [5], time.perf_counter())

    def test_a_refusal_is_told_in_the_servers_words(self) -> None:
        with served() as server:
            server.status = 429
            with self.assertRaisesRegex(RuntimeError, "it: HTTP 429: .*no room"):
                streamed_answer(server.as_bench(), [5], time.perf_counter())

    def test_a_round_asks_every_prompt_at_once(self) -> None:
        prompts = bench_prompts(16, 8)
        with served() as server:
            cell = server_round(server.as_bench(), prompts)
        self.assertEqual(sorted(prompts), sorted(asked["prompt"] for asked in server.asked))
        self.assertGreater(cell["output_tps"], 0)

    def test_one_failed_stream_fails_the_round(self) -> None:
        with served() as server:
            server.usage = 1
            with self.assertRaisesRegex(RuntimeError, "1 tokens"):
                server_round(server.as_bench(), [[1], [2]])
        closed = BenchServer("gone", "1", [], free_port(), "bench")
        with self.assertRaises(RuntimeError):
            server_round(closed, [[1]])


class RunningTests(unittest.TestCase):
    def server(self, script: str) -> BenchServer:
        port = free_port()
        return BenchServer("it", "1", [sys.executable, "-c", script, str(port)], port, "bench")

    def test_from_health_to_the_end(self) -> None:
        server = self.server(_SLOW_SERVER)
        with tempfile.TemporaryDirectory() as folder:
            log = Path(folder) / "log"
            with running(server, log), self.assertRaises(RuntimeError):
                server_round(server, [[1]])  # it is up, and answers 501 to that
            self.assertIn("came up", log.read_text())
        with self.assertRaises(RuntimeError):
            server_round(server, [[1]])

    def test_one_that_ends_is_told_with_its_last_words(self) -> None:
        server = self.server("import sys; print('first'); sys.exit('no such model')")
        with tempfile.TemporaryDirectory() as folder:
            with self.assertRaisesRegex(RuntimeError, "it ended with 1: no such model"):
                with running(server, Path(folder) / "log"):
                    self.fail("it cannot be up")


class ModelTests(unittest.TestCase):
    def test_the_tokenizer_has_a_piece_for_every_id(self) -> None:
        from tokenizers import Tokenizer

        files = bench_tokenizer_files()
        tokenizer = Tokenizer.from_str(files["tokenizer.json"])
        self.assertEqual(BENCH_VOCABULARY, tokenizer.get_vocab_size())
        self.assertTrue(tokenizer.decode([BENCH_VOCABULARY - 1]).strip())
        ids = tokenizer.encode("what is the capital").ids
        self.assertEqual("what is the capital", tokenizer.decode(ids))

    def test_prompts_are_the_same_in_every_run_and_all_different(self) -> None:
        prompts = bench_prompts(16, 128)
        self.assertEqual(prompts, bench_prompts(16, 128))
        self.assertEqual(prompts[:4], bench_prompts(4, 128))
        self.assertEqual(16, len({tuple(prompt) for prompt in prompts}))
        self.assertEqual({128}, {len(prompt) for prompt in prompts})
        self.assertTrue(all(0 < token < BENCH_VOCABULARY for one in prompts for token in one))

    def test_some_layers_of_each_kind_own_keys_and_some_share(self) -> None:
        kinds = ["full" if layer % 5 == 4 else "sliding" for layer in range(BENCH_LAYERS)]
        owners = BENCH_LAYERS - BENCH_SHARED
        self.assertEqual({"full", "sliding"}, set(kinds[:owners]))
        self.assertEqual({"full", "sliding"}, set(kinds[owners:]))
        self.assertEqual("full", kinds[-1])


class EnginesTests(unittest.TestCase):
    def test_this_engine_is_the_file_that_users_run(self) -> None:
        server = this_engine(Path("model"), "f32", Path("cache"))
        self.assertEqual(str(RIG / "jax_server.py"), server.argv[1])
        self.assertTrue(Path(server.argv[1]).is_file())
        self.assertEqual(str(max(STREAMS)), server.argv[server.argv.index("--slots") + 1])
        int8 = this_engine(Path("model"), "f32", Path("cache"), "int8")
        self.assertEqual(["--quantization", "int8"], int8.argv[-2:])
        packed = this_engine(Path("packed"), "f32", Path("cache"), "w4a16")
        self.assertNotIn("--quantization", packed.argv)
        names = [one.name for one in (server, int8, packed)]
        self.assertEqual(list(ENGINES[:3]), names)
        help_text = printed([sys.executable, server.argv[1], "--help"])
        for option in re.findall(r"--[a-z-]+", " ".join((*server.argv, *int8.argv))):
            self.assertIn(option, help_text)

    def test_llama_cpp_on_a_cpu_and_on_an_accelerator(self) -> None:
        with tempfile.TemporaryDirectory() as folder:
            program = Path(folder) / "llama-server"
            program.write_text("#!/bin/sh\necho 'version: 0.6.0-dev (abc)' >&2\n")
            program.chmod(0o755)
            for backend, layers in (("cpu", "0"), ("gpu", "99")):
                server = llama_server(Path("m.gguf"), program, backend)
                self.assertEqual("0.6.0-dev (abc)", server.version)
                self.assertEqual(layers, server.argv[server.argv.index("-ngl") + 1])

    def test_without_a_converter_it_says_where_it_looked(self) -> None:
        with tempfile.TemporaryDirectory() as folder:
            program = Path(folder) / "b1" / "llama-server"
            with self.assertRaisesRegex(RuntimeError, "convert_hf_to_gguf.py"):
                convert_to_gguf(Path(folder), program, "f32", Path(folder) / "x.gguf")

    def test_a_program_that_fails_is_told_with_its_last_words(self) -> None:
        with self.assertRaisesRegex(RuntimeError, "the end"):
            printed([sys.executable, "-c", "import sys; sys.exit('a start\\nthe end')"])

    def test_a_programs_environment_is_this_ones_and_more(self) -> None:
        asked = "import os; print(os.environ['BENCH_TOLD'], len(os.environ['PATH']) > 0)"
        told = printed([sys.executable, "-c", asked], {"BENCH_TOLD": "yes"})
        self.assertEqual("yes True", told.strip())


class TableTests(unittest.TestCase):
    def test_a_row_an_engine(self) -> None:
        table = table_text(results())
        self.assertIn(
            "| this engine (JAX 0.10.2) | 20.0 | 60.0 | 110.0 | 5.5 x | 101 ms | 901 ms | 70 % |",
            table,
        )
        rows = [line for line in table.splitlines() if line.startswith("|")]
        self.assertEqual({rows[0].count("|")}, {row.count("|") for row in rows})

    def test_the_machine_and_what_was_not_measured(self) -> None:
        table = table_text(results())
        for fact in ("AMD EPYC, 2 cores", "25.0 GB/s", "0.90 GB", "f32", "2026-11-30"):
            self.assertIn(fact, table)
        self.assertIn("Not measured: vLLM, which is not installed (--vllm-python).", table)

    def test_it_replaces_what_stood_between_the_markers_and_nothing_else(self) -> None:
        readme = f"head\n{BEGIN}\nold\n{END}\ntail\n"
        made = with_table(readme, "new")
        self.assertEqual(f"head\n{BEGIN}\nnew\n{END}\ntail\n", made)
        self.assertEqual(made, with_table(made, "new"))

    def test_a_readme_without_markers_is_left_alone(self) -> None:
        for readme in ("nothing", f"only {BEGIN}", f"{END} before {BEGIN}"):
            with self.subTest(readme=readme), self.assertRaises(ValueError):
                with_table(readme, "new")

    def test_the_rigs_readme_has_them(self) -> None:
        readme = (RIG / "README.md").read_text(encoding="utf-8")
        self.assertIn("new", with_table(readme, "new"))
        self.assertEqual((1, 1), (readme.count(BEGIN), readme.count(END)))

    def test_engines_that_are_not_installed_are_named_and_no_fault(self) -> None:
        with tempfile.TemporaryDirectory() as folder:
            (Path(folder) / "config.json").write_text(json.dumps(text_config()))
            argv = [sys.executable, "-m", "forge.bench_engine", "--model", folder, "--no-write"]
            argv += ["--engines", "vLLM", "llama.cpp"]
            empty = {"XDG_CACHE_HOME": folder, "XDG_DATA_HOME": folder, "HOME": folder}
            told = json.loads(printed(argv, empty | {"JAX_PLATFORMS": "cpu"}).splitlines()[-1])
        self.assertEqual(2, len(told["missing"]))
        for name, reason in zip(("vLLM", "llama.cpp"), told["missing"], strict=True):
            self.assertTrue(reason.startswith(f"{name}, which is not"), reason)
        self.assertEqual(([], []), (told["rows"], told["failed"]))
        self.assertGreater(told["bandwidth_bytes_per_s"], 1e8)
        self.assertEqual(("f32", "cpu"), (told["dtype"], told["machine"]["backend"]))

    def test_every_engine_has_a_name_of_its_own(self) -> None:
        self.assertEqual(len(ENGINES), len(set(ENGINES)))


if __name__ == "__main__":
    unittest.main()
