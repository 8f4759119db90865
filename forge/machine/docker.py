"""The model server as a container of docker's: its image, its run, its log, its state.

Knows no cloud and no model, and composes no container: the document has docker's argument list.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import tempfile
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from typing import Any

from forge.machine.console import (
    BOTH,
    HOME,
    MINUTE_S,
    NOTHING,
    ROOT,
    Failure,
    Progress,
    clean,
    healthy,
    in_background,
    run,
    stored,
    tried,
)
from forge.machine.machine import Cloud, Document
from forge.machine.watch import note_start

MADE_FROM = HOME / "container.json"
HOPELESS = re.compile(r"manifest unknown|not found|denied|unauthorized|no space|invalid ref", re.I)
NO_GPU = (
    "docker {why}. Remedy: an image that has docker with NVIDIA's container toolkit, such as AWS's "
    "Deep Learning Base AMI with the OSS driver (AMI_PARAMETER)"
)


class Docker:
    """One container, which the document names in its `container`, docker's argument list."""

    kind = "container"
    forms: Mapping[str, str] = {
        "image": r"\w[\w./:@-]{0,300}",
        "name": r"[a-z][a-z0-9_-]{0,62}",
        "token_file": r"/run/gemma4/[\w-]+\.env",
    }
    acts: Sequence[str] = ("logs", "start", "stop", "restart", "rm")
    ready_minutes = 60

    def __init__(self, cloud: Cloud, gpu: bool = False) -> None:
        """`gpu`: an image of the machine has to bring docker, which gives its containers the GPU;
        otherwise docker is installed where it is missing."""
        self.cloud, self.gpu = cloud, gpu

    def rules(self, document: Document) -> Mapping[str, object]:
        argv, marks = document["container"], document["marks"]
        document["name"] = argv[argv.index("--name") + 1]
        return {
            "container": argv[:3] == ["docker", "run", "--detach"]
            and document["image"] in argv
            and all(isinstance(word, str) and "\0" not in word for word in argv),
            "marks": all(re.compile(p) for p in [*marks["weights"], *marks["compile"]]),
        }

    def get(self, document: Document, progress: Progress) -> None:
        """The container of this very document, running: the one that is there, or a new one."""
        progress.begin("docker")
        progress.tell("done", self.docker_version(progress))
        image, found = document["image"], container(document["name"])
        if found and stored(MADE_FROM, None) == document["container"]:
            progress.phase = "weights"
            progress.tell("note", "the container is here already")
            if not found["State"]["Running"]:
                run("docker", "start", document["name"])
            return
        progress.begin("image", image)
        try:
            run("docker", "image", "inspect", image)
            progress.tell("done", "it is here already")
        except Failure:
            tried(3, lambda: pull(image, progress), lambda why: not HOPELESS.search(str(why)))
            progress.tell("done")
        progress.begin("token")
        token = self.cloud.token(document)
        progress.tell("done", "" if token else "no secret is named")
        progress.phase = "weights"  # that begins with its line in the container's log
        self.cloud.copy_cache(document, "restore", progress)
        create(document, token)
        progress.tell("note", "the container was started")

    def docker_version(self, progress: Progress) -> str:
        """Docker's version, after its installation where it is missing."""

        def install() -> str:
            run("apt-get", "update", minutes=5)
            return run("apt-get", "install", "--yes", "docker.io", minutes=10)

        if shutil.which("docker") is None:
            if self.gpu:
                raise Failure(NO_GPU.format(why="is not on this machine"))
            progress.tell("note", "installing docker.io")
            tried(30, install, lambda _: True)  # another program may hold apt's lock for minutes
        question = ("docker", "version", "--format", "{{.Server.Version}}")
        version = tried(12, lambda: run(*question), lambda _: True)  # the daemon may be starting
        if self.gpu and '"nvidia"' not in run("docker", "info", "--format", "{{json .Runtimes}}"):
            raise Failure(NO_GPU.format(why=f"{version} has no runtime nvidia"))
        return version

    def follow(self, document: Document, progress: Progress) -> None:
        """Marks what the container's log and its health tell, until it is ready or has failed."""
        name, waiting, down = document["name"], ["weights", "compile"], 0
        first, began = container(name), time.monotonic()
        while time.monotonic() - began < self.ready_minutes * MINUTE_S:
            time.sleep(MINUTE_S / 30)
            found = container(name)
            if not (first and found):
                raise Failure("the container was removed")
            answers = healthy(document)  # before the log, which then tells all that led to it
            for line in log_lines(name, 1000, "--since", first["State"]["StartedAt"]):
                for phase in waiting:
                    if any(re.search(pattern, line) for pattern in document["marks"][phase]):
                        if len(waiting) == 1:
                            progress.tell("done")
                        waiting = waiting[waiting.index(phase) + 1 :]
                        progress.begin(phase, clean(line, 200))
            if answers:
                if len(waiting) < 2:
                    progress.tell("done")
                progress.phase = "ready"
                progress.tell("done", f"it answers after {int(time.monotonic() - began)} s")
                return
            state, again = found["State"], found["RestartCount"] > first["RestartCount"]
            down = 0 if state["Running"] else down + 1
            if again or down > 2:  # a restart by hand is over by then
                until = ("--until", state["StartedAt"]) if again else ()
                words = " | ".join(clean(line, 140) for line in log_lines(name, 3, *until))
                why = "docker starts it again" if again else f"status {state['ExitCode']}"
                why += ", OOMKilled" if killed_for_memory(name, first["State"], state) else ""
                raise Failure(f"the container exited ({why}): {words}")
        raise Failure(f"not ready after {self.ready_minutes} minutes")

    def act(self, word: str, document: Document, given: Mapping[str, int]) -> str:
        """The log's end, or the container started, stopped, restarted or removed; what is so
        already is left so."""
        name = document["name"]
        if word == "logs":
            return "\n".join(log_lines(name, given["lines"]))
        found = container(name)
        running = bool(found and found["State"]["Running"])
        if word == "rm":
            if found:
                run("docker", "rm", "--force", name)
            return f"{name} was removed" if found else f"{name} is not there"
        if word == "stop":
            if running:
                run("docker", "stop", name)
            return f"{name} was stopped" if running else f"{name} does not run"
        if word == "start" and running:
            return f"{name} runs already"
        if found:
            run("docker", word, name)
        note_start()
        in_background()  # a boot, which makes the container or only follows it
        return f"{name} was {word}ed" if found else f"{name} is being made: see the boot log"

    def status(self, document: Document) -> dict[str, Any] | None:
        found = container(document["name"])
        if not found:
            return None
        state, image = found["State"], run("docker", "image", "inspect", found["Image"])
        digests = json.loads(image)[0]["RepoDigests"]
        return {
            "state": state["Status"],
            "exit_code": state["ExitCode"],
            "out_of_memory": state["OOMKilled"],
            "restarts": found["RestartCount"],
            "started_at": state["StartedAt"],
            "image": (digests or [found["Image"]])[0],
        }


def container(name: str) -> dict[str, Any] | None:
    """What docker knows of the container; None where there is none."""
    try:
        text = run("docker", "inspect", "--type", "container", name)
    except Failure as failure:
        if "no such" in str(failure).lower():
            return None
        raise
    return dict(json.loads(text)[0])


def pull(image: str, progress: Progress) -> str:
    """The image from its registry, with a mark of how far it is every half minute."""
    with tempfile.TemporaryFile() as file:
        child = subprocess.Popen(["docker", "pull", image], stdin=NOTHING, stdout=file, stderr=BOTH)
        for _ in range(2 * Docker.ready_minutes):
            with suppress(subprocess.TimeoutExpired):
                child.wait(MINUTE_S / 2)
            file.seek(0)
            text = file.read().decode("utf-8", "replace").strip()
            if child.returncode is not None:
                break
            layers = text.count(": Pulling fs layer")
            progress.tell("note", f"{text.count(': Pull complete')} of {layers} layers")
        child.kill()
        if child.wait():
            raise Failure(f"docker pull: {text.splitlines()[-1] if text else 'no word of why'}")
    return image


def create(document: Document, token: str) -> None:
    """A new container in the place of any old one.

    The token lies in a file of root's for as long as docker takes to read it.
    """
    path = ROOT / document["token_file"][1:]
    path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    path.unlink(missing_ok=True)
    try:
        with open(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w") as file:
            file.write(f"HF_TOKEN={token}\n" if token else "")
        if container(document["name"]):
            run("docker", "rm", "--force", document["name"])
        run(*document["container"], minutes=5)
    finally:
        path.unlink(missing_ok=True)
    MADE_FROM.write_text(json.dumps(document["container"]))


def killed_for_memory(name: str, first: dict[str, Any], now: dict[str, Any]) -> bool:
    """Whether a run since the `first` was. docker's state forgets it when the next one begins, its
    events remember."""
    span = ("--since", first["StartedAt"], "--until", now["StartedAt"])
    events = ""
    if first["StartedAt"] != now["StartedAt"]:
        with suppress(Failure):  # what else is known of the end is told all the same
            kind = ("--filter", f"container={name}", "--filter", "event=oom")
            events = run("docker", "events", *span, *kind, "--format", "{{.Action}}")
    return bool(now["OOMKilled"] or events)


def log_lines(name: str, count: int, *span: str) -> list[str]:
    """The last lines of the container's log, both streams in their order."""
    argv = ("docker", "logs", "--tail", str(count), *span, name)
    return run(*argv, complaints=BOTH).splitlines()
