"""`docker run` read as docker reads it, from a table of its options.

A value in the wrong place, an option that docker does not have or an image that is none fails.
"""

from __future__ import annotations

from dataclasses import dataclass, field

# docker run's options that take a value, of those that a rig may ever use (docker 20.10 to 28).
DOCKER_VALUED = frozenset(
    "--name --restart --publish --log-driver --log-opt --cap-drop --cap-add --security-opt --device"
    " --gpus --shm-size --ulimit --volume --env --env-file --entrypoint".split()
)
DOCKER_SWITCHES = frozenset({"--detach", "--privileged"})
FORBIDDEN = (
    "--net",
    "--network",
    "--ipc",
    "--pid",
    "--uts",
    "--userns",
    "--mount",
    "--publish-all",
    "--device-cgroup-rule",
    "--group-add",
    "--user",
    "--runtime",
)


@dataclass
class DockerRun:
    """Options to the first word that is none, then the image, then the command."""

    options: dict[str, list[str]] = field(default_factory=dict)
    image: str = ""
    command: list[str] = field(default_factory=list)


def read_docker(argv: list[str]) -> DockerRun:
    """`argv` in parts; a word that docker would not know where it stands raises AssertionError."""
    assert argv[:2] == ["docker", "run"], argv[:2]
    run, rest = DockerRun(), argv[2:]
    while rest and rest[0].startswith("-"):
        option = rest.pop(0)
        if option in DOCKER_VALUED:
            value = rest.pop(0)
            assert value and not value.startswith("-"), (option, value)
            run.options.setdefault(option, []).append(value)
        else:
            assert option in DOCKER_SWITCHES, option
            run.options.setdefault(option, []).append("")
    run.image, *run.command = rest
    return run
