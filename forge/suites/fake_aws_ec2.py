"""EC2 as the fake AWS answers it: moto's models, and around them what moto does not do.

Ending, stopping and starting as the real service has them, prices, offers, consoles, and reads that
do not see yet what was just launched. Knows no HTTP and no host.
"""

from __future__ import annotations

import base64
import contextlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

from forge.suites.fake_aws_launch import FakeLaunches
from forge.suites.fake_aws_machine import MACHINE_CODES, FakeMachine
from forge.suites.fake_aws_moto import AwsAnswer, Ec2Operation
from forge.suites.fake_aws_places import offered_zones
from forge.suites.fake_aws_world import AwsRefusal, CallFault, known_refusal

_PAGED = {  # what comes in pages, and how the list is called
    "DescribeInstances": "Reservations",
    "DescribeVolumes": "Volumes",
    "DescribeSubnets": "Subnets",
    "DescribeSecurityGroups": "SecurityGroups",
    "DescribeSpotPriceHistory": "SpotPriceHistory",
    "DescribeInstanceTypeOfferings": "InstanceTypeOfferings",
}
_CONSOLE_LIMIT = 65_536  # characters: the real one keeps the last 64 KB


@dataclass
class FakeEc2(FakeLaunches):
    """EC2 in all regions of the account."""

    console: Callable[[str], str] = lambda _machine: ""

    def answer(self, region: str, operation: Ec2Operation) -> AwsAnswer:
        """Does it, and the answer."""
        self.model(region)
        self.settle()
        own = getattr(self, f"do_{operation.action}", None)
        token, asked = operation.take("NextToken"), operation.take("MaxResults")
        with self._unseen(region, operation):
            result = own(region, operation) if own else operation.do()
            listed = _PAGED.get(operation.action)
            if listed:
                start, most = int(token or 0), self.world.script.page
                end = start + min(int(asked or most), most)
                rows = list(result[listed])
                more = {"NextToken": str(end)} if end < len(rows) else {}
                result = {listed: rows[start:end], **more}
            return operation.answer(result)

    def refusal(self, region: str, operation: Ec2Operation, fault: CallFault) -> AwsRefusal:
        """The script's refusal of this call, in AWS's words."""
        words = {"action": operation.action, "service": "ec2", "arn": self.world.arn}
        if operation.action == "RunInstances":
            place = self.launch_place(region, operation.parameters)
            zones = offered_zones(region, place["type"], self.world.script.unlisted)
            words["others"] = ", ".join(zone for zone in zones if zone != place["zone"])
            words.update(type=place["type"], zone=place["zone"])
            profile = operation.parameters.get("IamInstanceProfile", {})
            words["profile"] = str(profile.get("Name", "?"))
        return known_refusal(fault.code, fault.message, limit="0", **words)

    # -- operations that moto lacks or does otherwise

    def do_TerminateInstances(self, region: str, operation: Ec2Operation) -> Any:
        rows = []
        for machine in self._asked(region, operation):
            before = machine.state
            if machine.model.disable_api_termination:
                words = f"The instance '{machine.id}' may not be terminated. Modify its "
                words += "'disableApiTermination' instance attribute and try again."
                raise AwsRefusal("OperationNotPermitted", words)
            self.terminate_by_user(machine)
            after = "terminated" if before == "terminated" else "shutting-down"
            rows.append(_change(machine.id, before, after))
        return {"TerminatingInstances": rows}

    def do_StopInstances(self, region: str, operation: Ec2Operation) -> Any:
        rows = []
        for machine in self._asked(region, operation):
            before = machine.state
            if machine.spot_request:
                raise AwsRefusal(
                    "UnsupportedOperation",
                    f"You can't stop the Spot Instance '{machine.id}' because it is associated "
                    "with a one-time Spot Instance request. You can only stop Spot Instances "
                    "associated with persistent Spot Instance requests.",
                )
            if before not in ("running", "stopping", "stopped"):
                raise _wrong_state(machine.id, "stopped")
            if before == "running":
                machine.model.stop()
                self.leave(machine, "stopping", "stopped")
                self.by_user(machine)
            rows.append(_change(machine.id, before, machine.state))
        return {"StoppingInstances": rows}

    def do_StartInstances(self, region: str, operation: Ec2Operation) -> Any:
        rows = []
        for machine in self._asked(region, operation):
            before = machine.state
            if before not in ("stopped", "running", "pending"):
                raise _wrong_state(machine.id, "started")
            if before == "stopped":
                place = {"zone": machine.zone, "market": machine.market, "type": machine.type}
                self.check_quota(region, place, 1)
                machine.model.start()
                machine.model.launch_time = self.moment()  # the root volume's time stays
                self.leave(machine, "pending", "running", self.world.script.pending_s)
            rows.append(_change(machine.id, before, machine.state))
        return {"StartingInstances": rows}

    def _asked(self, region: str, operation: Ec2Operation) -> list[FakeMachine]:
        """The machines of a request that changes them; all exist, or none is touched."""
        asked = [str(one) for one in operation.parameters.get("InstanceIds") or []]
        here = {one.id: one for one in self.machines.values() if one.region == region}
        absent = [one for one in asked if one not in here]
        if absent:
            words = f"The instance ID '{absent[0]}' does not exist"
            if len(absent) > 1:
                words = f"The instance IDs '{', '.join(absent)}' do not exist"
            raise AwsRefusal("InvalidInstanceID.NotFound", words)
        return [here[one] for one in asked]

    def do_DeleteSecurityGroup(self, region: str, operation: Ec2Operation) -> Any:
        group = str(operation.parameters.get("GroupId", ""))
        for nic in self.model(region).enis.values():
            if group in {one.id for one in nic.group_set}:
                words = f"resource {group} has a dependent object"
                raise AwsRefusal("DependencyViolation", words)
        return operation.do()

    def do_GetConsoleOutput(self, region: str, operation: Ec2Operation) -> Any:
        one = str(operation.parameters.get("InstanceId", ""))
        if one not in self.machines or self.machines[one].region != region:
            raise AwsRefusal(
                "InvalidInstanceID.NotFound", f"The instance ID '{one}' does not exist"
            )
        text = self.console(one)[-_CONSOLE_LIMIT:]
        coded = base64.b64encode(text.encode()).decode()
        shown = {"Output": coded} if text else {}  # nothing yet is no output at all
        return {"InstanceId": one, "Timestamp": self.moment(), **shown}

    def do_DescribeRegions(self, region: str, operation: Ec2Operation) -> Any:
        rows = [
            {
                "RegionName": name,
                "Endpoint": f"ec2.{name}.amazonaws.com",
                "OptInStatus": "opt-in-not-required",
            }
            for name in self.world.script.regions
        ]
        asked = operation.parameters.get("RegionNames")
        if operation.parameters.get("AllRegions"):
            rows.append(
                {
                    "RegionName": "af-south-1",
                    "Endpoint": "ec2.af-south-1.amazonaws.com",
                    "OptInStatus": "not-opted-in",
                }
            )
        return {"Regions": [row for row in rows if not asked or row["RegionName"] in asked]}

    def do_DescribeInstanceTypeOfferings(self, region: str, operation: Ec2Operation) -> Any:
        result = operation.do()
        gone = self.world.script.unlisted
        kept = [
            one
            for one in result["InstanceTypeOfferings"]
            if (one["Location"], one["InstanceType"]) not in gone
        ]
        return {"InstanceTypeOfferings": kept}

    def do_DescribeSpotPriceHistory(self, region: str, operation: Ec2Operation) -> Any:
        given = operation.parameters
        filters = {one["Name"]: one.get("Values", []) for one in given.get("Filters") or []}
        kinds = given.get("InstanceTypes") or filters.get("instance-type")
        zones = filters.get("availability-zone") or []
        zones = [given["AvailabilityZone"]] if given.get("AvailabilityZone") else zones
        systems = given.get("ProductDescriptions") or filters.get("product-description")
        rows = []
        for kind in kinds or self.world.script.spot_prices:
            for zone in offered_zones(region, kind, self.world.script.unlisted):
                price = self.world.spot_price(zone, kind)
                if price is None or (zones and zone not in zones):
                    continue
                for hours, factor in ((2, 1.0), (20, 1.1)):  # newest first, as AWS has them
                    for system in ("Linux/UNIX", "Windows"):
                        if systems and system not in systems:
                            continue
                        dear = 2.0 if system == "Windows" else 1.0
                        rows.append(
                            {
                                "AvailabilityZone": zone,
                                "InstanceType": kind,
                                "ProductDescription": system,
                                "SpotPrice": f"{price * factor * dear:.6f}",
                                "Timestamp": self.moment(-3600.0 * hours),
                            }
                        )
        return {"SpotPriceHistory": rows}

    def do_DescribeSpotInstanceRequests(self, region: str, operation: Ec2Operation) -> Any:
        asked = operation.parameters.get("SpotInstanceRequestIds")
        rows = []
        for machine in self.machines.values():
            if machine.region != region or not machine.spot_request:
                continue
            if asked and machine.spot_request not in asked:
                continue
            live = machine.state not in ("shutting-down", "terminated")
            rows.append(
                {
                    "SpotInstanceRequestId": machine.spot_request,
                    "InstanceId": machine.id,
                    "State": "active" if live else "closed",
                    "Type": "one-time",
                    "InstanceInterruptionBehavior": "terminate",
                    "LaunchedAvailabilityZone": machine.zone,
                    "Tags": [{"Key": k, "Value": v} for k, v in machine.model.spot_tags.items()],
                }
            )
        return {"SpotInstanceRequests": rows}

    def do_CancelSpotInstanceRequests(self, region: str, operation: Ec2Operation) -> Any:
        asked = operation.parameters.get("SpotInstanceRequestIds") or []
        rows = [{"SpotInstanceRequestId": one, "State": "cancelled"} for one in asked]
        return {"CancelledSpotInstanceRequests": rows}  # which ends no machine

    @contextlib.contextmanager
    def _unseen(self, region: str, operation: Ec2Operation) -> Iterator[None]:
        """Hides from a read what was launched a moment ago, as often as the script says."""
        hidden: list[FakeMachine] = []
        if operation.action == "DescribeInstances":
            hidden = [
                one for one in self.machines.values() if one.region == region and one.unseen > 0
            ]
        backend = self.moto.ec2(region)
        whole = dict(backend.reservations)
        for machine in hidden:
            machine.unseen -= 1
            for key, reservation in whole.items():
                if machine.model in reservation.instances:
                    backend.reservations.pop(key, None)
        try:
            yield
        finally:
            if hidden:
                backend.reservations.clear()
                backend.reservations.update(whole)


def _change(one: str, before: str, after: str) -> dict[str, Any]:
    return {
        "InstanceId": one,
        "PreviousState": {"Name": before, "Code": MACHINE_CODES[before]},
        "CurrentState": {"Name": after, "Code": MACHINE_CODES[after]},
    }


def _wrong_state(one: str, wanted: str) -> AwsRefusal:
    words = f"The instance '{one}' is not in a state from which it can be {wanted}."
    return AwsRefusal("IncorrectInstanceState", words)
