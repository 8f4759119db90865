"""What EC2 answers, read as a plane reads it: machines, volumes, looks at a request, ends."""

from __future__ import annotations

import unittest
from datetime import UTC, datetime, timedelta, timezone
from typing import Any

from forge.parts.ground.errors import RigError
from forge.parts.knowledge.refusal_reading import read_refusal
from forge.parts.planes.capacity_plane import MANAGED_BY, is_ours, rental_labels
from forge.parts.planes.ec2_things import (
    ec2_market,
    ec2_state,
    ec2_tags,
    instance_ended,
    instance_moments,
    instance_rental,
    instance_zone,
    marked_as,
    request_look,
    same_instance,
    same_volume,
    the_one_of,
    volume_rental,
    volume_users,
)

ACCOUNT, RIG, OWNER = "111122223333", "gpu-vllm-g6-2b", "a1b2c3"
ZONE = "us-east-1b"
MADE = datetime(2026, 11, 30, 9, 30, 1, tzinfo=UTC)
STARTED = MADE - timedelta(seconds=1)
LABELS = rental_labels(RIG, OWNER, "create-1", 1_800_000_000)


def tags(labels: dict[str, str], name: str = "vm-1") -> list[dict[str, str]]:
    return [{"Key": key, "Value": value} for key, value in {"Name": name, **labels}.items()]


def machine(state: str = "running", **more: Any) -> dict[str, Any]:
    """A machine in the form of boto3's describe_instances."""
    disk = {"AttachTime": MADE, "VolumeId": "vol-0a1b2c3d4e5f60718", "Status": "attached"}
    return {
        "InstanceId": "i-0a1b2c3d4e5f60718",
        "InstanceType": "g6.xlarge",
        "LaunchTime": STARTED,
        "Placement": {"AvailabilityZone": ZONE},
        "State": {"Code": 16, "Name": state},
        "StateReason": {"Code": "", "Message": ""},
        "StateTransitionReason": "",
        "RootDeviceName": "/dev/sda1",
        "BlockDeviceMappings": [{"DeviceName": "/dev/sda1", "Ebs": disk}],
        "Tags": tags(LABELS),
        **more,
    }


def volume(state: str = "available", **more: Any) -> dict[str, Any]:
    return {
        "VolumeId": "vol-0a1b2c3d4e5f60718",
        "AvailabilityZone": ZONE,
        "State": state,
        "CreateTime": STARTED,
        "Attachments": [],
        "Tags": tags(LABELS),
        **more,
    }


def ended(state: str, code: str, message: str = "", changed: str = "") -> dict[str, Any]:
    reason = {"Code": code, "Message": message or code}
    return machine(state, StateReason=reason, StateTransitionReason=changed)


class MachineTest(unittest.TestCase):
    def test_a_running_one_is_all_that_makes_it_that_very_thing(self) -> None:
        found = instance_rental(machine(InstanceLifecycle="spot"), ACCOUNT, 0.32)
        self.assertEqual(
            (found.kind, found.name, found.zone, found.project, found.provider_id, found.state),
            ("machine", "vm-1", ZONE, ACCOUNT, "i-0a1b2c3d4e5f60718", "running"),
        )
        self.assertEqual(found.created_at, "2026-11-30T09:30:01+00:00")
        self.assertEqual(found.created_unix, STARTED.timestamp())
        self.assertEqual((found.market, found.price_per_hour_usd), ("spot", 0.32))
        self.assertEqual(found.labels, LABELS)
        self.assertTrue(is_ours(found.labels, RIG, OWNER))

    def test_every_state_of_the_api(self) -> None:
        for state, wanted, priced in (
            ("pending", "pending", True),
            ("running", "running", True),
            ("stopping", "stopping", False),
            ("shutting-down", "stopping", False),
            ("stopped", "stopped", False),
        ):
            found = instance_rental(machine(state), ACCOUNT, 0.8)
            self.assertEqual(found.state, wanted)
            # Of a stopped one only the disk is billed, whose price nobody told.
            self.assertEqual(found.price_per_hour_usd, 0.8 if priced else None, state)
            self.assertEqual(found.market, "on-demand")

    def test_a_state_that_is_not_known_is_no_guess(self) -> None:
        for thing in (machine("hibernated"), machine(State=None), machine(State={})):
            with self.assertRaises(RigError) as raised:
                instance_rental(thing, ACCOUNT, None)
            self.assertEqual(raised.exception.error_class, "UNKNOWN")
            self.assertIn("i-0a1b2c3d4e5f60718", raised.exception.what)

    def test_its_making_stays_when_it_is_started_again_and_its_age_does_not(self) -> None:
        later = STARTED + timedelta(hours=5)
        first = instance_rental(machine(), ACCOUNT, None)
        again = instance_rental(machine(LaunchTime=later), ACCOUNT, None)
        self.assertEqual(first.created_at, again.created_at)
        self.assertEqual(again.created_unix, later.timestamp())

    def test_without_a_disk_yet_or_without_one_any_more_the_start_stands_for_it(self) -> None:
        other = {"DeviceName": "/dev/sdb", "Ebs": {"AttachTime": MADE + timedelta(hours=1)}}
        for mappings in ([], None, [{"DeviceName": "/dev/sda1"}], [other]):
            found = instance_moments(machine(BlockDeviceMappings=mappings))
            self.assertEqual(found, ("2026-11-30T09:30:00+00:00",) * 2)

    def test_a_moment_is_told_in_utc_whatever_zone_the_sdk_gives(self) -> None:
        east = timezone(timedelta(hours=9))
        disk = {"DeviceName": "/dev/sda1", "Ebs": {"AttachTime": MADE.astimezone(east)}}
        thing = machine(BlockDeviceMappings=[disk], LaunchTime=STARTED.astimezone(east))
        self.assertEqual(instance_moments(thing), instance_moments(machine()))

    def test_what_cannot_be_read_is_unknown_and_never_half_a_rental(self) -> None:
        for thing in (
            machine(InstanceId=""),
            machine(LaunchTime=None, BlockDeviceMappings=[]),
            machine(LaunchTime="2026-11-30"),
            machine(LaunchTime=datetime(2026, 11, 30)),
            machine(Placement={}),
            machine(Placement=None),
        ):
            with self.assertRaises(RigError) as raised:
                instance_rental(thing, ACCOUNT, None)
            self.assertEqual(raised.exception.error_class, "UNKNOWN")

    def test_a_machine_without_a_name_is_called_by_its_id_or_as_it_was_asked_for(self) -> None:
        bare = machine(Tags=[{"Key": "managed-by", "Value": MANAGED_BY}])
        self.assertEqual(instance_rental(bare, ACCOUNT, None).name, "i-0a1b2c3d4e5f60718")
        asked = instance_rental(machine(), ACCOUNT, None, "i-0a1b2c3d4e5f60718")
        self.assertEqual(asked.name, "i-0a1b2c3d4e5f60718")

    def test_tags_of_aws_and_the_name_are_no_labels(self) -> None:
        labels = {**LABELS, "aws:ec2spot:fleet-request-id": "sfr-1"}
        found = instance_rental(machine(Tags=tags(labels)), ACCOUNT, None)
        self.assertEqual(found.labels, LABELS)

    def test_tags_of_a_strange_form_are_none(self) -> None:
        strange: tuple[Any, ...] = ({}, {"Tags": None}, {"Tags": [3, "x"]}, {"Tags": "a"}, None, [])
        for thing in strange:
            self.assertEqual(ec2_tags(thing), {})
        self.assertEqual(ec2_tags({"Tags": [{"Key": "a"}, {"Value": "b"}]}), {"a": "", "": "b"})

    def test_states_and_zones_of_a_strange_form_are_empty(self) -> None:
        strange: tuple[Any, ...] = ({}, None, [], {"State": "x", "Placement": "y"})
        for thing in strange:
            self.assertEqual((ec2_state(thing), instance_zone(thing)), ("", ""))
        self.assertEqual(ec2_market({"InstanceLifecycle": "scheduled"}), "on-demand")


class VolumeTest(unittest.TestCase):
    def test_one_that_hangs_on_nothing_is_there_and_billed(self) -> None:
        found = volume_rental(volume(), ACCOUNT)
        self.assertEqual(
            (found.kind, found.name, found.zone, found.state, found.market),
            ("disk", "vm-1", ZONE, "stopped", ""),
        )
        self.assertEqual(found.created_at, "2026-11-30T09:30:00+00:00")
        self.assertIsNone(found.price_per_hour_usd)
        self.assertEqual(found.labels, LABELS)

    def test_the_states_of_the_api_and_any_other(self) -> None:
        for state, wanted in (
            ("creating", "pending"),
            ("available", "stopped"),
            ("in-use", "running"),
            ("deleting", "stopping"),
            ("error", "failed"),
        ):
            self.assertEqual(volume_rental(volume(state), ACCOUNT).state, wanted)
        for bad in (volume("deleted"), volume(""), volume(CreateTime=None), volume(VolumeId="")):
            with self.assertRaises(RigError):
                volume_rental(bad, ACCOUNT)

    def test_whom_it_hangs_on(self) -> None:
        on = [{"InstanceId": "i-1", "State": "attached"}, {"InstanceId": "i-2", "State": "busy"}]
        self.assertEqual(volume_users(volume(Attachments=on)), {"i-1", "i-2"})
        self.assertEqual(volume_users(volume(Attachments=[{"State": "detached"}])), set())
        self.assertEqual(volume_users(volume(Attachments=None)), set())


class NamesakeTest(unittest.TestCase):
    """Names are not unique on EC2."""

    def one(self, number: int, state: str = "running", ours: bool = True) -> dict[str, Any]:
        labels = LABELS if ours else {"team": "payroll"}
        return machine(state, InstanceId=f"i-0000000{number}", Tags=tags(labels))

    def test_none_and_one(self) -> None:
        self.assertIsNone(the_one_of([], "vm-1", ZONE))
        self.assertEqual(the_one_of([self.one(1)], "vm-1", ZONE), self.one(1))

    def test_somebody_elses_of_that_name_does_not_stand_before_ours(self) -> None:
        for state in ("running", "stopped", "shutting-down"):
            things = [self.one(2, ours=False), self.one(1, state)]
            self.assertEqual(the_one_of(things, "vm-1", ZONE)["InstanceId"], "i-00000001")
        lone = the_one_of([self.one(2, ours=False)], "vm-1", ZONE)
        self.assertEqual(lone["InstanceId"], "i-00000002")

    def test_one_that_ends_does_not_stand_before_one_that_costs(self) -> None:
        things = [self.one(1, "shutting-down"), self.one(2, "stopped")]
        self.assertEqual(the_one_of(things, "vm-1", ZONE)["InstanceId"], "i-00000002")

    def test_two_that_only_end_are_no_riddle(self) -> None:
        things = [self.one(1, "shutting-down"), self.one(2, "shutting-down")]
        self.assertEqual(ec2_state(the_one_of(things, "vm-1", ZONE)), "shutting-down")

    def test_two_of_ours_are_named_and_each_can_be_planned_for(self) -> None:
        with self.assertRaises(RigError) as raised:
            the_one_of([self.one(2), self.one(1, "stopped")], "vm-1", ZONE)
        error = raised.exception
        self.assertEqual(error.error_class, "UNKNOWN")
        self.assertIn("i-00000001, i-00000002", error.what)
        self.assertIn("plan_destroy(name='i-00000001', zone='us-east-1b')", error.next_step)

    def test_two_of_others_are_as_unclear(self) -> None:
        with self.assertRaises(RigError):
            the_one_of([self.one(1, ours=False), self.one(2, ours=False)], "vm-1", ZONE)

    def test_two_left_volumes_too(self) -> None:
        twins = [volume(), volume(VolumeId="vol-0000000000000000f")]
        with self.assertRaises(RigError) as raised:
            the_one_of(twins, "vm-1", ZONE)
        self.assertIn("vol-0000000000000000f", raised.exception.what)


class SameTest(unittest.TestCase):
    def setUp(self) -> None:
        self.rental = instance_rental(machine(), ACCOUNT, None)

    def test_the_very_machine_in_whatever_state_and_started_again(self) -> None:
        later = STARTED + timedelta(hours=5)
        for now in (machine(), machine("stopped"), machine(LaunchTime=later)):
            self.assertTrue(same_instance(now, self.rental))

    def test_read_before_its_disk_hung_on_it(self) -> None:
        early = instance_rental(machine("pending", BlockDeviceMappings=[]), ACCOUNT, None)
        self.assertNotEqual(early.created_at, self.rental.created_at)
        self.assertTrue(same_instance(machine(), early))

    def test_another_id_another_time_and_each_lost_or_changed_mark_is_another(self) -> None:
        disk = {"DeviceName": "/dev/sda1", "Ebs": {"AttachTime": MADE + timedelta(seconds=60)}}
        later = STARTED + timedelta(seconds=60)
        others = [
            machine(InstanceId="i-0a1b2c3d4e5f60719"),
            machine(BlockDeviceMappings=[disk], LaunchTime=later),
        ]
        for mark in ("managed-by", "rig", "owner"):
            others.append(machine(Tags=tags({k: v for k, v in LABELS.items() if k != mark})))
            others.append(machine(Tags=tags({**LABELS, mark: LABELS[mark] + " "})))
        for now in others:
            self.assertFalse(same_instance(now, self.rental), now)

    def test_one_that_never_bore_the_marks_is_never_the_same(self) -> None:
        bare = machine(Tags=tags({"rig": "", "owner": "", "managed-by": ""}))
        rental = instance_rental(bare, ACCOUNT, None)
        self.assertFalse(same_instance(bare, rental))
        self.assertFalse(marked_as(machine(), {}))

    def test_a_volume_by_id_time_and_marks(self) -> None:
        rental = volume_rental(volume(), ACCOUNT)
        self.assertTrue(same_volume(volume(), rental))
        for now in (
            volume(VolumeId="vol-0000000000000000f"),
            volume(CreateTime=MADE),
            volume(Tags=tags({**LABELS, "owner": "ffffff"})),
        ):
            self.assertFalse(same_volume(now, rental))


class LookTest(unittest.TestCase):
    def test_what_each_state_means_to_a_sweep(self) -> None:
        for state, wanted in (
            ("pending", "starting"),
            ("running", "granted"),
            ("stopping", "refused"),
            ("stopped", "refused"),
            ("shutting-down", "refused"),
            ("terminated", "gone"),
        ):
            look = request_look([machine(state)], [])
            self.assertEqual(look.state, wanted, state)
            if wanted != "gone":
                self.assertEqual(look.provider_id, "i-0a1b2c3d4e5f60718")
                self.assertEqual(look.created_at, "2026-11-30T09:30:01+00:00")
        self.assertEqual(request_look([machine("stopped")], []).said, "the machine is stopped")

    def test_nothing_at_all_is_gone_without_a_word(self) -> None:
        look = request_look([], [])
        self.assertEqual((look.state, look.said, look.provider_id), ("gone", "", ""))

    def test_what_ended_says_why_in_words_that_are_read_as_what_they_are(self) -> None:
        for code, said, reason in (
            ("Server.SpotInstanceTermination", "Spot instance termination", "stockout"),
            ("Server.InsufficientInstanceCapacity", "no capacity", "stockout"),
            ("Server.InternalError", "Internal error on launch", "transient"),
        ):
            for state in ("shutting-down", "terminated"):
                look = request_look([ended(state, code, f"{code}: {said}")], [])
                self.assertEqual(read_refusal(look.said).reason, reason, look.said)
                self.assertIn(said, look.said)

    def test_a_volume_that_is_left_is_something_of_the_request(self) -> None:
        for machines in ([], [machine("terminated")]):
            self.assertEqual(request_look(machines, [volume()]).state, "refused")
        self.assertEqual(request_look([], [volume()]).said, "a volume is left")
        self.assertEqual(request_look([machine()], [volume()]).state, "granted")
        self.assertEqual(request_look([], [volume("deleted")]).state, "gone")

    def test_a_disk_that_hangs_on_a_machine_nobody_sees_yet_is_no_refusal(self) -> None:
        on = [{"InstanceId": "i-0a1b2c3d4e5f60718", "State": "attached"}]
        self.assertEqual(request_look([], [volume("in-use", Attachments=on)]).state, "starting")

    def test_two_machines_of_one_request_are_told_by_their_ids(self) -> None:
        twins = [machine(), machine("pending", InstanceId="i-0000000000000000f")]
        with self.assertRaises(RigError) as raised:
            request_look(twins, [])
        self.assertEqual(raised.exception.error_class, "UNKNOWN")
        self.assertIn("i-0000000000000000f, i-0a1b2c3d4e5f60718", raised.exception.what)
        ended_twin = [machine("terminated"), machine(InstanceId="i-0000000000000000f")]
        self.assertEqual(request_look(ended_twin, []).provider_id, "i-0000000000000000f")


class EndedTest(unittest.TestCase):
    """Why a machine runs no more, told apart by EC2's own reason."""

    def test_each_reason_in_words_of_its_own(self) -> None:
        told = {
            code: instance_ended(ended("terminated", code, f"{code}: something"))
            for code in (
                "Server.SpotInstanceTermination",
                "Server.SpotInstanceShutdown",
                "Server.InsufficientInstanceCapacity",
                "Server.InternalError",
                "Server.ScheduledStop",
                "Client.InstanceInitiatedShutdown",
                "Client.InstanceTerminated",
                "Client.InternalError",
                "Client.InvalidSnapshot.NotFound",
                "Client.UserInitiatedHibernate",
                "Client.UserInitiatedShutdown",
                "Client.VolumeLimitExceeded",
                "Server.SomethingNew",
            )
        }
        self.assertEqual(len({line.partition(" (")[0] for line in told.values()}), len(told))
        for code, line in told.items():
            self.assertIn(f"({code}) something", line)
            self.assertNotIn(f"{code}: ", line, "not twice")
            self.assertNotIn("\n", line)
        self.assertIn("took the spot machine back", told["Server.SpotInstanceTermination"])
        self.assertIn("shut itself down", told["Client.InstanceInitiatedShutdown"])
        self.assertIn("through EC2's API", told["Client.UserInitiatedShutdown"])

    def test_the_moment_where_ec2_tells_it(self) -> None:
        for zone in ("GMT", "UTC"):
            when = f"User initiated (2026-11-30 10:00:00 {zone})"
            line = instance_ended(ended("terminated", "Client.UserInitiatedShutdown", "", when))
            self.assertIn("at 2026-11-30 10:00:00 UTC", line)

    def test_while_it_runs_there_is_nothing_to_tell(self) -> None:
        for state in ("pending", "running"):
            reason = {"Code": "pending", "Message": "pending"}
            self.assertEqual(instance_ended(machine(state, StateReason=reason)), "")

    def test_a_reason_that_ec2_does_not_tell(self) -> None:
        self.assertEqual(instance_ended(machine("terminated")), "")
        self.assertEqual(instance_ended(machine("terminated", StateReason=None)), "")
        bare = machine("stopped", StateTransitionReason="User initiated (yesterday)")
        self.assertEqual(instance_ended(bare), "EC2 says: User initiated (yesterday)")

    def test_words_of_others_are_data(self) -> None:
        said = "x: \x1b[31mred\x1b[0m \u202e hf_AbCdEfGh12345678 " + "long " * 500
        line = instance_ended(ended("terminated", "Server.InternalError", said))
        self.assertLess(len(line), 500)
        for bad in ("\x1b", "\u202e", "hf_AbCd"):
            self.assertNotIn(bad, line)


if __name__ == "__main__":
    unittest.main()
