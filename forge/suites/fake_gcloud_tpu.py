"""Cloud TPU's commands of the stand-in for gcloud, as gcloud 528 sends and prints them.

Copied into the program that `fake_gcloud` writes, as its bases are. Knows queued resources, nodes
and the catalogue; a node is not created here by itself.
"""

from __future__ import annotations

import json
import time
from typing import Any

from forge.suites.fake_gcloud_compute import FakeGcloudCompute
from forge.suites.fake_gcloud_wire import GcloudFailed


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
