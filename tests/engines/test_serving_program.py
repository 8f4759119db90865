"""The server's command line: what it refuses, what it says, and how it ends when it is asked to."""

from __future__ import annotations

import asyncio
import contextlib
import io
import json
import os
import signal
import socket
import tempfile
import threading
import unittest
from pathlib import Path
from typing import Any

import httpx2

from forge.engines.serving.chat_text import read_model_text
from forge.engines.serving.http_front import FrontSettings, HttpFront
from forge.engines.serving.http_server import HttpServer, listening_socket, on_end_signals
from forge.engines.serving.scheduler import Scheduler
from forge.engines.serving.slot_engine import EngineFault
from forge.programs.jax_server import main, serve_until_asked
from tests.engines.counting_engine import CountingEngine
from tests.engines.gemma4_files import model_folder, text_config
from tests.engines.serving_folder import make_serving_folder, small_tokenizer
from tests.engines.serving_host import MODEL, wait_until

SIZE = small_tokenizer().get_vocab_size()


class Refusals(unittest.TestCase):
    def setUp(self) -> None:
        held = tempfile.TemporaryDirectory()
        self.addCleanup(held.cleanup)
        self.folder = Path(held.name)

    def said(self, *arguments: str) -> tuple[int, str]:
        """The exit status of the command line and all that it wrote to standard error."""
        err = io.StringIO()
        with contextlib.redirect_stderr(err), contextlib.redirect_stdout(io.StringIO()):
            try:
                status = main(list(arguments))
            except SystemExit as error:
                status = int(error.code or 0)
        return status, err.getvalue()

    def test_arguments_that_cannot_be(self) -> None:
        model = ("--model", str(self.folder))
        for arguments in (
            (),
            (*model, "--slots", "0"),
            (*model, "--slots", "x"),
            (*model, "--port", "70000"),
            (*model, "--dtype", "int4"),
            (*model, "--max-model-len", "1"),
            (*model, "--steps", "0"),
            (*model, "--chunk", "0"),
            (*model, "--max-queue", "-1"),
            (*model, "--tensor-parallel", "0"),
            (*model, "--data-parallel", "x"),
            (*model, "--prefix-cache-gb", "-1"),
            (*model, "--prefix-cache-gb", "nan"),
            (*model, "--prefix-cache-gb", "much"),
            (*model, "--quantization", "int4"),
            (*model, "--unpack", "never"),
            (*model, "--memory-gb", "0"),
            (*model, "--memory-gb", "nan"),
            (*model, "--anything"),
        ):
            status, words = self.said(*arguments)
            self.assertEqual(status, 2, arguments)
            self.assertIn("error:", words)

    def test_a_model_that_is_none_is_one_line_and_2(self) -> None:
        (self.folder / "file").write_text("")
        empty = self.folder / "empty"
        empty.mkdir()
        strange = self.folder / "strange"
        strange.mkdir()
        (strange / "config.json").write_text(json.dumps({"model_type": "llama"}))
        for folder in (self.folder / "none", self.folder / "file", empty, strange):
            for more in ((), ("--explain",)):
                status, words = self.said("--model", str(folder), *more)
                self.assertEqual(status, 2)
                self.assertTrue(words.startswith("jax_server: "), words)
                self.assertEqual(words.count("\n"), 1)

    def test_devices_that_are_not_here_and_heads_that_do_not_divide(self) -> None:
        """Before a weight is read: the folder has none."""
        folder = str(make_serving_folder(self.folder / "model", config=text_config()))
        for more, words in (
            (("--tensor-parallel", "2", "--data-parallel", "99"), "takes 198 devices; here are "),
            (("--tensor-parallel", "3"), "do not divide among 3 devices"),
        ):
            status, said = self.said("--model", folder, *more)
            self.assertEqual(status, 2)
            self.assertIn(words, said)
            self.assertEqual(said.count("\n"), 1)

    def test_a_start_beyond_the_memory_is_one_line_and_2_before_weights_are_read(self) -> None:
        model = make_serving_folder(self.folder / "model")
        stated = text_config(vocab_size=SIZE, vocab_size_per_layer_input=SIZE)
        model_folder(model, stated)
        with (model / "model.safetensors").open("r+b") as file:
            length = int.from_bytes(file.read(8), "little")
            file.seek(8 + length)
            file.write(b"\xff" * 4096)  # values that are no numbers, and nobody looks at them
        status, words = self.said("--model", str(model), "--memory-gb", "0.0001")
        self.assertEqual(status, 2)
        self.assertRegex(words, r"^jax_server: this needs 0\.\d{3} GB of memory, .*\n$")
        self.assertEqual(words.count("\n"), 1)

    def test_help_says_how_it_ends(self) -> None:
        out = io.StringIO()
        with contextlib.redirect_stdout(out), self.assertRaises(SystemExit) as caught:
            main(["--help"])
        self.assertEqual(caught.exception.code, 0)
        self.assertIn("Exit status", out.getvalue())


class Ends(unittest.TestCase):
    """`serve_until_asked` with the counting engine, in the main thread, as signals want it."""

    def setUp(self) -> None:
        held = tempfile.TemporaryDirectory()
        self.addCleanup(held.cleanup)
        self.folder = make_serving_folder(Path(held.name) / "model")

    def serve(self, engine: CountingEngine, client: Any, drain_s: float = 20) -> str:
        """Serve while `client(base address, scheduler)` runs in a thread; what serving returned."""
        scheduler = Scheduler(engine, 10)
        front = HttpFront(scheduler, read_model_text(self.folder), FrontSettings(MODEL))
        listener = listening_socket("127.0.0.1", 0)
        self.address = listener.getsockname()
        server = HttpServer(front.app, listener, drain_s + 20)
        failed: list[BaseException] = []

        def run() -> None:
            try:
                client(f"http://127.0.0.1:{self.address[1]}", scheduler)
            except BaseException as error:
                failed.append(error)
                os.kill(os.getpid(), signal.SIGTERM)

        thread = threading.Thread(target=run)
        thread.start()
        words = asyncio.run(serve_until_asked(scheduler, server, drain_s))
        thread.join()
        engine.gate.set()
        engine.loading.set()
        self.closed = scheduler.close(10)
        if failed:
            raise failed[0]
        return words

    def asked_in_a_thread(self, base: str, answers: list[Any], **fields: Any) -> threading.Thread:
        body = {"model": MODEL, "prompt": [9], "ignore_eos": True, **fields}

        def ask() -> None:
            try:
                answers.append(httpx2.post(f"{base}/v1/completions", json=body, trust_env=False))
            except httpx2.HTTPError as error:
                answers.append(error)

        thread = threading.Thread(target=ask)
        thread.start()
        return thread

    def test_what_is_under_way_is_answered_and_nothing_new_is_taken(self) -> None:
        for number in (signal.SIGTERM, signal.SIGINT):
            engine = CountingEngine(slots=1, vocabulary=SIZE)
            answers: list[Any] = []

            def client(
                base: str,
                scheduler: Scheduler,
                number: int = number,
                engine: CountingEngine = engine,
                answers: list[Any] = answers,
            ) -> None:
                wait_until(lambda: scheduler.view().phase == "serving")
                kept = httpx2.Client(base_url=base, trust_env=False)
                self.assertEqual(kept.get("/health").status_code, 200)
                engine.gate.clear()
                asked = [self.asked_in_a_thread(base, answers, max_tokens=9) for _ in "12"]
                wait_until(lambda: scheduler.view().running + scheduler.view().waiting == 2)
                os.kill(os.getpid(), number)
                wait_until(lambda: scheduler.view().phase == "draining")
                with self.assertRaises(httpx2.HTTPError):
                    for _ in range(1000):  # until the listener is closed
                        httpx2.get(f"{base}/health", trust_env=False, timeout=5)
                kept.close()
                engine.gate.set()
                for thread in asked:
                    thread.join()

            self.assertEqual(self.serve(engine, client), "")
            self.assertTrue(self.closed)
            told = [answer.json()["usage"]["completion_tokens"] for answer in answers]
            self.assertEqual(told, [9, 9])

    def test_what_takes_too_long_is_broken_off(self) -> None:
        engine = CountingEngine(slots=1, vocabulary=SIZE, context=10**9, steps=1)
        answers: list[Any] = []

        def client(base: str, scheduler: Scheduler) -> None:
            wait_until(lambda: scheduler.view().phase == "serving")
            asked = self.asked_in_a_thread(base, answers, max_tokens=9 * 10**8)
            wait_until(lambda: scheduler.view().running == 1)
            os.kill(os.getpid(), signal.SIGTERM)
            asked.join()

        self.assertEqual(self.serve(engine, client, drain_s=1), "")
        self.assertTrue(self.closed)
        (answer,) = answers
        self.assertEqual(answer.status_code, 500)
        self.assertIn("the server is stopping", answer.json()["error"]["message"])
        self.assertEqual(engine.talks, {})

    def test_a_second_signal_ends_at_once(self) -> None:
        engine = CountingEngine(slots=1, vocabulary=SIZE, context=10**9, steps=1)
        answers: list[Any] = []

        def client(base: str, scheduler: Scheduler) -> None:
            wait_until(lambda: scheduler.view().phase == "serving")
            asked = self.asked_in_a_thread(base, answers, max_tokens=9 * 10**8)
            wait_until(lambda: scheduler.view().running == 1)
            os.kill(os.getpid(), signal.SIGTERM)
            wait_until(lambda: scheduler.view().phase == "draining")
            os.kill(os.getpid(), signal.SIGTERM)
            asked.join()

        self.assertEqual(self.serve(engine, client, drain_s=600), "")
        self.assertEqual([answer.status_code for answer in answers], [500])

    def test_a_signal_is_not_lost_among_many_tokens(self) -> None:
        """Each token told wakes the loop through one socket, which may be full of that."""
        came: list[int] = []

        async def told() -> None:
            loop = asyncio.get_running_loop()
            for number in (signal.SIGTERM, signal.SIGINT):
                with on_end_signals(loop, lambda: came.append(1)):
                    for _ in range(5000):
                        loop.call_soon_threadsafe(int)
                    os.kill(os.getpid(), number)
                    for _ in range(1000):
                        await asyncio.sleep(0)

        before = [signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT)]
        asyncio.run(told())
        self.assertEqual(came, [1, 1])
        after = [signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT)]
        self.assertEqual(after, before)

    def test_the_end_during_loading(self) -> None:
        engine = CountingEngine(vocabulary=SIZE)
        engine.loading.clear()

        def client(base: str, scheduler: Scheduler) -> None:
            wait_until(lambda: scheduler.view().progress == 0.25)
            self.assertEqual(httpx2.get(f"{base}/health", trust_env=False).status_code, 503)
            os.kill(os.getpid(), signal.SIGTERM)

        self.assertEqual(self.serve(engine, client), "")
        self.assertTrue(self.closed)

    def test_loading_that_fails_ends_it_with_why(self) -> None:
        engine = CountingEngine(vocabulary=SIZE)
        engine.fault = EngineFault("no such weights")
        words = self.serve(engine, lambda base, scheduler: None)
        self.assertIn("no such weights", words)
        self.assertTrue(self.closed)

    def test_a_port_that_is_taken(self) -> None:
        with listening_socket("127.0.0.1", 0) as first:
            with self.assertRaises(OSError):
                listening_socket("127.0.0.1", first.getsockname()[1])
        with listening_socket("localhost", 0) as named:
            self.assertIn(named.family, (socket.AF_INET, socket.AF_INET6))


if __name__ == "__main__":
    unittest.main()
