"""The programs around a fake machine, written into folders for PATH: the machine's and its user's.

The machine has sudo, systemctl, shutdown, apt-get, gcloud (for a bucket), docker, and the server
that its containers run; its user has ssh, scp and ssh-keygen. Knows no cloud: what a program cannot
do in its own folder, it asks of the machines' owner over loopback.
"""

from __future__ import annotations

import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from forge.suites.fake_docker import FakeDockerProgram
from forge.suites.fake_docker_keeper import FakeDockerFailed, FakeDockerKeeper
from forge.suites.fake_ssh import FakeSshProgram, FakeSshRefused
from forge.suites.fake_vllm import FakeVllm
from forge.suites.program_source import program_source

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
