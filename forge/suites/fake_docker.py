"""A stand-in for docker on a fake machine: its commands, in the texts and statuses of docker 27.

Its class is copied into a program, so it uses the standard library alone. It knows `docker run` and
what a boot and its owner ask afterwards; images have no content, every container runs a fake vLLM.
"""

from __future__ import annotations

import json
import os
import sys
import time
from typing import Any

from forge.suites.fake_docker_keeper import FakeDockerFailed, FakeDockerKeeper


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
