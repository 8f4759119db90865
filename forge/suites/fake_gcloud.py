"""A fast stand-in for gcloud: the commands that rigs use, against the fake Google, in 60 ms.

It refuses what gcloud 528 refuses, sends what it sends, and prints what it prints, ssh included;
a test holds it beside the real one. Knows no rig. What it does not do: gcloud's waits between
repeats, its minute of attempts while a machine cannot be reached, OS Login.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

from forge.suites.fake_gcloud_compute import FakeGcloudCompute
from forge.suites.fake_gcloud_machine import FakeGcloudMachine
from forge.suites.fake_gcloud_tpu import FakeGcloudTpu
from forge.suites.fake_gcloud_wire import FakeGcloudWire, GcloudFailed
from forge.suites.program_source import program_source

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
