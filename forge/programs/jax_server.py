"""Serves a Gemma 4 checkpoint over HTTP, in JAX: OpenAI's endpoints, many conversations at once.

    python3 jax_server.py --model FOLDER
    python3 jax_server.py --model FOLDER --explain     what it would take, without loading weights

FOLDER is as Hugging Face publishes it. While the model is loaded, lines `jax_server: NN% what` say
how far it has come, and /health answers 503.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import ipaddress
import os
import sys
from collections.abc import Callable
from pathlib import Path

from forge.engines.gemma4.config_reader import read_config
from forge.engines.gemma4.explain import explain_text
from forge.engines.gemma4.memory_need import memory_need, refuse_beyond
from forge.engines.gemma4.model_folder import has_model_file, model_file
from forge.engines.gemma4.refusal import ModelRefused
from forge.engines.gemma4.weight_forms import QUANTIZATIONS, UNPACKINGS
from forge.engines.jax.device_memory import device_memory_bytes
from forge.engines.jax.engine import ENGINE_DTYPES, KV_DTYPES
from forge.engines.jax.parallel import engine_on_devices
from forge.engines.serving.chat_text import ModelTextError, read_model_text
from forge.engines.serving.http_front import FrontSettings, HttpFront
from forge.engines.serving.http_server import HttpServer, listening_socket, on_end_signals
from forge.engines.serving.scheduler import Scheduler
from forge.engines.serving.slot_engine import EngineFault

_USUAL_CONTEXT = 4096  # where the model has as many positions
# Beginnings of prompts: of E2B, 27,000 tokens in f32 and twice as many in bf16. It fills with use.
_USUAL_PREFIX_GB = 1.0
_DRAIN_S = 30.0  # for answers that are under way when the end is asked for
_ABORT_S = 1.0  # for telling those that are broken off after that
_KEY_BYTES = 4096
_LOOK_EVERY_S = 0.1


def main(argv: list[str] | None = None) -> int:
    """The command line; returns the exit status (0 ended when asked, 1 a fault, 2 wrong usage or a
    model that is refused)."""
    arguments = _server_parser().parse_args(argv)
    folder: Path = arguments.model
    try:
        if not folder.is_dir():
            raise ModelRefused(f"{folder} is no folder")
        context = arguments.max_model_len or min(_USUAL_CONTEXT, read_config(folder).positions)
        if arguments.explain:
            print(
                explain_text(
                    folder,
                    dtype=arguments.dtype,
                    slots=arguments.slots,
                    context=context,
                    chunk=arguments.chunk,
                    kv_dtype=arguments.kv_dtype,
                    prefix_cache_gb=arguments.prefix_cache_gb,
                    quantization=arguments.quantization,
                    unpack=arguments.unpack,
                    bandwidth_gb_s=arguments.bandwidth_gb_s,
                )
            )
            return 0
        key = _api_key(arguments.api_key_file) if arguments.api_key_file else ""
        text = read_model_text(folder, _folder_file)
        engine = engine_on_devices(
            folder,
            arguments.tensor_parallel,
            arguments.data_parallel,
            slots=arguments.slots,
            context=context,
            dtype=arguments.dtype,
            chunk=arguments.chunk,
            steps=arguments.steps,
            kv_dtype=arguments.kv_dtype,
            quantization=arguments.quantization,
            unpack=arguments.unpack,
            compile_cache=arguments.compile_cache,
            prefix_cache_gb=arguments.prefix_cache_gb,
        )
        _check_memory(arguments, context)
    except (ModelRefused, ModelTextError, EngineFault, _WrongUsage) as error:
        return _ended(2, str(error))
    scheduler = Scheduler(engine, arguments.max_queue, _LoadingLines().tell)
    settings = FrontSettings(
        name=arguments.served_model_name or folder.resolve().name,
        api_key=key,
        loopback_only=_is_loopback(arguments.host),
    )
    if not settings.loopback_only and not key:
        _say(f"whoever reaches {arguments.host} can use this server: no API key is set")
    front = HttpFront(scheduler, text, settings)
    try:
        listener = listening_socket(arguments.host, arguments.port)
    except OSError as error:
        return _ended(1, f"cannot listen on {arguments.host}:{arguments.port}: {error.strerror}")
    _say(f"listening on {arguments.host}:{listener.getsockname()[1]}, serving {settings.name}")
    server = HttpServer(front.app, listener, _DRAIN_S + _ABORT_S)
    failed = asyncio.run(serve_until_asked(scheduler, server, _DRAIN_S))
    if not scheduler.close(_ABORT_S) and not failed:
        # Compiling or a dispatch cannot be broken off, and Python would wait for its thread's end.
        _say("ended during a dispatch")
        sys.stderr.flush()
        os._exit(0)
    return _ended(1, failed) if failed else 0


def _check_memory(arguments: argparse.Namespace, context: int) -> None:
    """Refuse a start that needs more memory than it may use, before any weight is read."""
    stated: float | None = arguments.memory_gb
    limit = device_memory_bytes() if stated is None else round(stated * 1e9)
    if limit is None:
        return
    need = memory_need(
        arguments.model,
        dtype=arguments.dtype,
        slots=arguments.slots,
        context=context,
        chunk=arguments.chunk,
        kv_dtype=arguments.kv_dtype,
        quantization=arguments.quantization,
        unpack=arguments.unpack,
        ways=arguments.tensor_parallel,
    )
    refuse_beyond(need, limit)


async def serve_until_asked(scheduler: Scheduler, server: HttpServer, drain_s: float) -> str:
    """Load and serve until SIGTERM or SIGINT; why loading failed, empty where it did not.

    What is under way then has `drain_s` to be answered. A second signal breaks it off at once.
    """
    loop = asyncio.get_running_loop()

    def end() -> None:
        if scheduler.view().phase == "draining":
            scheduler.abort()
        scheduler.drain()
        server.stop()
        loop.call_later(drain_s, scheduler.abort)

    with on_end_signals(loop, end):
        serving = asyncio.create_task(server.serve())
        scheduler.start()
        while scheduler.view().phase == "loading":
            await asyncio.sleep(_LOOK_EVERY_S)
        now = scheduler.view()
        if now.phase == "failed":
            server.stop()
        await serving
    return now.doing if now.phase == "failed" else ""


class _WrongUsage(Exception):
    """Something on the command line that cannot be; the message says what."""


def _say(words: str) -> None:
    print(f"jax_server: {words}", file=sys.stderr, flush=True)


def _ended(status: int, words: str) -> int:
    _say(words)
    return status


class _LoadingLines:
    """Says how far loading has come, each percentage of each step once."""

    def __init__(self) -> None:
        self._last = ""

    def tell(self, share: float, doing: str) -> None:
        line = f"{share:4.0%} {doing}"
        if line != self._last:
            self._last = line
            _say(line)


def _folder_file(folder: Path, name: str) -> Path | None:
    """The file `name` of a model's folder, None where there is none; links may not lead out."""
    return model_file(folder, name) if has_model_file(folder, name) else None


def _api_key(path: Path) -> str:
    """The key in a file, which is one line."""
    try:
        with path.open("rb") as file:
            key = file.read(_KEY_BYTES + 1).decode("ascii").strip()
    except OSError as error:
        raise _WrongUsage(f"--api-key-file {path}: {error.strerror}") from None
    except UnicodeDecodeError:
        raise _WrongUsage(f"--api-key-file {path}: a key is of ASCII characters") from None
    if not key or len(key) > _KEY_BYTES or any(not 32 < ord(c) < 127 for c in key):
        raise _WrongUsage(f"--api-key-file {path}: a key is one line without blanks, not empty")
    return key


def _is_loopback(host: str) -> bool:
    with contextlib.suppress(ValueError):
        return ipaddress.ip_address(host).is_loopback
    return host == "localhost"


def _server_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="jax_server.py",
        description=(__doc__ or "").partition("\n")[0],
        epilog="Exit status: 0 ended when asked, 1 a fault, 2 wrong usage or a model that is "
        "refused.",
    )
    parser.add_argument("--model", type=Path, required=True, help="a Hugging Face folder")
    parser.add_argument("--served-model-name", default="", help="as requests name it")
    reach = parser.add_argument_group("who may ask")
    reach.add_argument("--host", default="127.0.0.1", help="(default %(default)s)")
    reach.add_argument(
        "--port", type=_bounded(0, 65535), default=8000, help="0: any (default %(default)s)"
    )
    reach.add_argument("--api-key-file", type=Path, help="a key that all but /health asks for")
    room = parser.add_argument_group("how much at once")
    room.add_argument(
        "--slots",
        type=_bounded(1, 1024),
        default=4,
        help="conversations at once, of each copy of the model (default %(default)s)",
    )
    room.add_argument(
        "--max-model-len",
        type=_bounded(2, 2**24),
        help=f"tokens of one, prompt and answer (default {_USUAL_CONTEXT}, or the model's own)",
    )
    room.add_argument(
        "--max-queue",
        type=_bounded(0, 100_000),
        default=64,
        help="requests that may wait for a slot (default %(default)s)",
    )
    room.add_argument(
        "--memory-gb",
        type=_positive,
        help="of each device; a start that needs more is refused (default what the device says)",
    )
    how = parser.add_argument_group("how it is computed")
    how.add_argument(
        "--dtype",
        choices=tuple(ENGINE_DTYPES),
        default="f32",
        help="of weights and caches (default %(default)s)",
    )
    how.add_argument(
        "--kv-dtype",
        choices=tuple(KV_DTYPES),
        default="auto",
        help="of keys and values: auto is --dtype, int8 has a scale for each of them "
        "(default %(default)s)",
    )
    how.add_argument(
        "--quantization",
        choices=QUANTIZATIONS,
        default="none",
        help="make 8-bit integers of a plain checkpoint's matrices (default %(default)s)",
    )
    how.add_argument(
        "--unpack",
        choices=UNPACKINGS,
        default="step",
        help="packed weights: in each step, small, or once at load (default %(default)s)",
    )
    how.add_argument(
        "--chunk",
        type=_bounded(1, 2**16),
        default=256,
        help="most prompt tokens of one dispatch (default %(default)s)",
    )
    how.add_argument(
        "--steps",
        type=_bounded(1, 256),
        default=4,
        help="most tokens of each answer in one dispatch (default %(default)s)",
    )
    how.add_argument(
        "--tensor-parallel",
        type=_bounded(1, 4096),
        default=1,
        metavar="N",
        help="devices that share one copy of the model, a part of it on each (default %(default)s)",
    )
    how.add_argument(
        "--data-parallel",
        type=_bounded(1, 4096),
        default=1,
        metavar="N",
        help="copies of the model, each on devices of its own (default %(default)s)",
    )
    how.add_argument("--compile-cache", type=Path, help="keeps compiled programs for next time")
    room.add_argument(
        "--prefix-cache-gb",
        type=_gigabytes,
        default=_USUAL_PREFIX_GB,
        help="most memory of this computer for the beginnings of prompts, so that a conversation's "
        "next turn is not read from its start; 0: off. How fast an answer begins can tell one "
        "client what another has asked: requests with a cache_salt of their own share nothing "
        "(default %(default)s)",
    )
    only = parser.add_argument_group("only explain")
    only.add_argument("--explain", action="store_true", help="sizes and bounds; loads no weights")
    only.add_argument("--bandwidth-gb-s", type=float, help="of the memory; else it is measured")
    return parser


def _bounded(least: int, most: int) -> Callable[[str], int]:
    """What argparse makes a whole number with, from `least` to `most`."""

    def whole_number(text: str) -> int:
        value = int(text)
        if not least <= value <= most:
            raise argparse.ArgumentTypeError(f"must be {least} to {most}")
        return value

    return whole_number


def _gigabytes(text: str) -> float:
    """What argparse makes an amount of memory with."""
    value = float(text)
    if not 0 <= value < 1e6:
        raise argparse.ArgumentTypeError("must be 0 or more")
    return value


def _positive(text: str) -> float:
    """A finite number above zero, for argparse."""
    value = float(text)
    if not 0 < value < float("inf"):
        raise argparse.ArgumentTypeError("must be a number above 0")
    return value


if __name__ == "__main__":
    sys.exit(main())
