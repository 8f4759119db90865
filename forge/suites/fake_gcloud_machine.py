"""The body of an insert of Compute Engine, field by field as gcloud 528 composes it from its flags.

Copied into the program that `fake_gcloud` writes, as its base is. Sends nothing.
"""

from __future__ import annotations

import re
from typing import Any

from forge.suites.fake_gcloud_wire import FakeGcloudWire


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
