"""Compute Engine's commands of the stand-in for gcloud, as gcloud 528 sends and prints them.

Copied into the program that `fake_gcloud` writes, as its base is. Knows no other service.
"""

from __future__ import annotations

import os
import time
from typing import Any

from forge.suites.fake_gcloud_machine import FakeGcloudMachine
from forge.suites.fake_gcloud_wire import GcloudFailed


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
