"""The first rig with the diagnosis toolset alone, and a model server that answers as it is told.

The model server is a process of its own under the rig's exact label, recorded as a real start would
record it: the real plane finds it, proves it and hands out its address. Knows no test.
"""

from __future__ import annotations

import contextlib
import json
import os
import sys
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from forge.parts.assembly.command_line import run_rig
from forge.parts.assembly.rig import AssembledRig, Rig
from forge.parts.ground.process import spawn_detached
from forge.parts.ground.state import private_folder, rig_paths, write_json
from forge.parts.planes.plane import Instance
from forge.parts.toolsets.diagnosis import DiagnosisToolset
from forge.parts.toolsets.second_opinion import DiagnosisSettings
from forge.rigs.local_pytorch_cpu_2b import RIG, LocalPytorchSettings
from tests.rig_programs import write_programs

SERVER = """\
import sys
from pathlib import Path
from tests.diagnosed_rig import run_diagnosed_rig
sys.exit(run_diagnosed_rig(Path(__file__), sys.argv[1:]))
"""

# Answers from control.json beside it; notes every request. Standard library only.
FAKE_MODEL = r"""
import http.server, json, pathlib, re, sys, time

HERE = pathlib.Path(sys.argv[1])


class Handler(http.server.BaseHTTPRequestHandler):
    def log_message(self, *_arguments):
        pass

    def do_POST(self):
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        with (HERE / "requests.jsonl").open("a") as file:
            file.write(json.dumps(body) + "\n")
        script = json.loads((HERE / "control.json").read_text())
        time.sleep(script.get("wait_s", 0))
        text = script.get("answer", "")
        if script.get("obeys"):  # a model that does what the last order in its data says
            orders = re.findall(r"SYSTEM: (.*)", body["messages"][-1]["content"])
            text = orders[-1] if orders else text
        self.send_response(200)
        self.send_header("Content-Type", "text/event-stream")
        self.end_headers()
        chunks = [{"choices": [{"delta": {"content": text}}]}] if text else []
        chunks.append({"choices": [{"delta": {}, "finish_reason": "stop"}]})
        for chunk in chunks:
            event = json.dumps({"model": "fake-model", **chunk})
            self.wfile.write(b"data: " + event.encode() + b"\n\n")
        self.wfile.write(b"data: [DONE]\n\n")


server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
(HERE / "port.partial").write_text(str(server.server_address[1]))
(HERE / "port.partial").rename(HERE / "port")
server.serve_forever()
"""


class DiagnosedSettings(LocalPytorchSettings, DiagnosisSettings):
    """The first rig's keys and the toolset's own."""


def diagnosed_rig() -> Rig:
    return replace(RIG, settings=DiagnosedSettings, toolsets=(DiagnosisToolset,))


def run_diagnosed_rig(server_file: Path, argv: Sequence[str]) -> int:
    """What the folder's server.py does."""
    return run_rig(diagnosed_rig(), server_file, argv)


class FakeModel:
    """The model server of the rig `name`, labelled for `owner`, until `stop`."""

    def __init__(self, place: Path, name: str, owner: str, *, label: str = "") -> None:
        self.place = private_folder(place)
        self.says("")
        script = place / "fake_model.py"
        script.write_text(FAKE_MODEL)
        serve_id = "serve-20260101-000000-abcdef"
        self.pid = spawn_detached(
            [sys.executable, str(script), str(place)],
            label=label or f"rig={name};owner={owner};role=server;id={serve_id}",
            environment=os.environ,
            log=place / "log.txt",
            folder=place,
        )
        deadline = time.monotonic() + 30
        while not (place / "port").exists():
            if time.monotonic() > deadline:
                raise RuntimeError("the fake model did not come up")
            time.sleep(0.02)
        instance = Instance(
            serve_id=serve_id,
            job_id="",
            state="ready",
            model="embedded",
            served_name="fake-model",
            port=int((place / "port").read_text()),
            pid=self.pid,
        )
        write_json(rig_paths(name).state / "server.json", instance.model_dump())

    def says(self, answer: str, **more: Any) -> None:
        """What it answers from now on; `wait_s` seconds later, or `obeys` what it reads."""
        (self.place / "control.json").write_text(json.dumps({"answer": answer, **more}))

    @property
    def requests(self) -> list[dict[str, Any]]:
        path = self.place / "requests.jsonl"
        return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []

    def stop(self) -> None:
        """Kill it; nothing happens where it has ended."""
        with contextlib.suppress(ProcessLookupError):
            os.kill(self.pid, 9)


def assembled(folder: Path, **settings: str) -> AssembledRig:
    """The rig in `folder`, with a server.py that a client can start over stdio."""
    values = {"MODEL_NAME": "embedded", "PORT": "8017", "MAX_MODEL_LEN": "4096"} | settings
    (folder / "tpu.env").write_text("".join(f"{k}={v}\n" for k, v in values.items()))
    (folder / "server.py").write_text(SERVER)
    write_programs(folder)
    return AssembledRig(diagnosed_rig(), folder / "server.py")
