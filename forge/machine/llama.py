"""llama-server under systemd: it is built on the machine, gets its weights, and is kept going.

Implements the protocol of a model server. It listens on loopback alone, offline, with no token in
its environment. Knows no provider: that is handed in.
"""

from __future__ import annotations

import json
import re
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from forge.machine.console import MINUTE_S, Failure, Progress, clean, run, stored
from forge.machine.llama_build import (
    BUILD_FLAG,
    BUILD_FORMS,
    BUILD_LOG,
    BUILD_STATE,
    LLAMA_NAME,
    get_llama_server,
)
from forge.machine.llama_weights import MODEL, WEIGHT_FORMS, get_weights
from forge.machine.machine import Cloud
from forge.machine.systemd import Unit

UNIT = "gemma4-llama.service"
UNIT_FORM = """[Unit]
Description=llama-server
StartLimitIntervalSec=600
StartLimitBurst=5
[Service]
ExecStart={command}
Environment=HOME=/root
Restart=on-failure
RestartSec=5
[Install]
WantedBy=multi-user.target
"""
SERVE_WORD = r"[\w./:@=,+-]{1,300}"  # nothing that a unit file would read as more than a word
# Where it listens and what it serves, this program says itself; the others open more than a model.
REFUSED = r"--(host|port|model|api-key|path|tools|rpc|slot-save-path|log-file)\b.*|-m"
# What its log says at verbosity 4 (b11434): that it found no GPU, and what of the model lies there.
NO_GPU = re.compile(r"no usable GPU found|failed to initialize CUDA")
RESIDENT = re.compile(r"(CUDA\d+ model buffer size = +[\d.]+ MiB|offloaded \d+/\d+ layers to GPU)")
LOAD_MINUTES = 20  # from its start to its first answer; one that takes longer has failed


class LlamaServing:
    """llama-server of one document: its `build`, its `weights`, its `serve`."""

    kind = "server"
    forms: Mapping[str, str] = {}
    acts: Sequence[str] = ("logs", "start", "stop", "restart", "rm", "build")
    ready_minutes = 120  # a cold boot builds first, for 90 minutes at most

    def __init__(self, cloud: Cloud) -> None:
        self.cloud, self.unit = cloud, Unit(UNIT, LLAMA_NAME)

    def rules(self, document: dict[str, Any]) -> Mapping[str, object]:
        words, build, arch = document["serve"], document["build"], document["gpu_arch"]
        parts = {"build": BUILD_FORMS, "weights": WEIGHT_FORMS}
        return {
            "serve": words[0] == LLAMA_NAME
            and all(re.fullmatch(SERVE_WORD, word, re.ASCII) for word in words)
            and not any(re.fullmatch(REFUSED, word) for word in words),
            "build.flags": all(re.fullmatch(BUILD_FLAG, flag, re.ASCII) for flag in build["flags"])
            and f"-DCMAKE_CUDA_ARCHITECTURES={arch.replace('.', '')}-real" in build["flags"],
            **{
                f"{part}.{key}": re.fullmatch(form, document[part][key], re.ASCII)
                for part, forms in parts.items()
                for key, form in forms.items()
            },
        }

    def get(self, document: dict[str, Any], progress: Progress) -> None:
        """Has it running: built or found, with its weights, under a unit of this very command."""
        progress.begin("build")
        self.cloud.copy_cache(document, "restore", progress)
        program = get_llama_server(document, progress)
        progress.begin("token")
        token = self.cloud.token(document)
        progress.tell("done", "" if token else "no secret is named")
        progress.begin("weights")
        get_weights(document["weights"], token, progress)
        progress.begin("load")
        self.start(document, program)

    def start(self, document: dict[str, Any], program: Path) -> None:
        """The service as the document has it, running. A changed one begins anew."""
        own = ("--model", MODEL, "--host", "127.0.0.1", "--port", urlsplit(document["health"]).port)
        command = " ".join(map(str, (program, *own, *document["serve"][1:])))
        changed = self.unit.install(UNIT_FORM.format(command=command))
        run("systemctl", "enable", UNIT)
        self.unit.since = time.time()
        self.unit.change("restart" if changed else "start")

    def follow(self, document: dict[str, Any], progress: Progress) -> None:
        """Until it answers. A start anew is a failure."""
        began, first = time.monotonic(), self.unit.told()
        while time.monotonic() - began < LOAD_MINUTES * MINUTE_S:
            if self.unit.answers(document, first):
                log = "\n".join(self.unit.lines(2000, self.unit.since))
                if NO_GPU.search(log):
                    raise Failure(f"{LLAMA_NAME} found no GPU and computes on the processor")
                return self.unit.ready(progress, began, ", ".join(RESIDENT.findall(log)[-2:]))
        raise Failure(f"{LLAMA_NAME} does not answer after {LOAD_MINUTES} minutes")

    def act(self, word: str, document: dict[str, Any], given: Mapping[str, int]) -> str:
        """The log's end, how far the build is, or the service started, stopped, restarted or
        removed; what is so already is left so."""
        if word == "logs":
            return "\n".join(self.unit.lines(given["lines"]))
        if word == "build":
            return build_told(given["lines"], given["limit"])
        return self.unit.act(word)

    def status(self, document: dict[str, Any]) -> dict[str, Any] | None:
        return self.unit.status(str(stored(BUILD_STATE, {}).get("version", "")))


def build_told(lines: int, limit: int) -> str:
    """The state of the build and the end of its log, as JSON of less than `limit` bytes."""
    told = {"state": "waiting", **stored(BUILD_STATE, {})}
    if told["state"] == "running":
        told["seconds"] = int(time.time()) - told["began"]
    text = BUILD_LOG.read_text(errors="replace") if BUILD_LOG.exists() else ""
    told["log"] = [clean(line, 300) for line in text.splitlines()[-lines:]]
    while len(json.dumps(told)) >= limit and told["log"]:
        del told["log"][0]
    return json.dumps(told)
