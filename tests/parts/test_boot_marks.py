"""Marks of a boot in consoles as they are: copies, prefixes, cut lines, other people's text."""

from __future__ import annotations

import random
import unittest

from forge.parts.knowledge.boot_marks import (
    BOOT_PHASES,
    BootMark,
    boot_marks,
    boot_phases,
    boot_state,
    latest_boot_marks,
)

T = 1_764_500_000  # a moment in November 2025
TPU = ("docker", "image", "token", "weights", "compile", "ready")
CUDA = ("driver", *TPU)
BUILT = ("driver", "build", "token", "weights", "load", "ready")
COLD = f"""\
GEMMA4-BOOT docker begin {T}
GEMMA4-BOOT docker done {T + 60} 24.0.7
GEMMA4-BOOT image begin {T + 60} vllm/vllm-tpu:nightly
GEMMA4-BOOT image note {T + 90} 3 of 12 layers
GEMMA4-BOOT image done {T + 360}
GEMMA4-BOOT token begin {T + 360}
GEMMA4-BOOT token done {T + 361}
GEMMA4-BOOT weights note {T + 363} the container was started
GEMMA4-BOOT weights begin {T + 380} Starting to load model
GEMMA4-BOOT weights done {T + 440}
GEMMA4-BOOT compile begin {T + 440} Precompile all the subgraphs
GEMMA4-BOOT compile done {T + 770}
GEMMA4-BOOT ready done {T + 770} it answers after 407 s
"""
# What the agent puts before each line of its script, on images of several years.
AGENTS = {
    "syslog": "Nov 30 09:19:01 vm-1 google_metadata_script_runner[1229]: startup-script: ",
    "one digit": "Nov  3 09:19:01 vm-1 google_metadata_script_runner[1229]: startup-script: ",
    "iso": "2025-11-30T09:19:01.362836+00:00 localhost google_metadata_script_runner[740]: "
    "startup-script: ",
    "twice": "Nov 30 09:19:01 vm-1 GCEMetadataScripts[662]: 2025/11/30 09:19:01 "
    "GCEMetadataScripts: startup-script: ",
    "journal": "[   35.123456] google_metadata_script_runner[1229]: startup-script: ",
    "bare": "startup-script: ",
    "cloud-init": "[   30.123456] cloud-init[1050]: ",
    "cloud-init's journal": "Nov 30 09:19:01 ip-10-0-0-7 cloud-init[1050]: ",
}


def upto(phase: str, state: str) -> str:
    """The cold boot's console up to and with that mark."""
    lines = COLD.splitlines(keepends=True)
    last = next(
        n for n, line in enumerate(lines) if line.startswith(f"GEMMA4-BOOT {phase} {state}")
    )
    return "".join(lines[: last + 1])


class TestLines(unittest.TestCase):
    def test_plain_lines_are_read_in_their_order(self) -> None:
        marks = boot_marks(COLD)
        self.assertEqual(len(marks), 13)
        self.assertEqual(marks[0], BootMark("docker", "begin", T))
        self.assertEqual(marks[3], BootMark("image", "note", T + 90, "3 of 12 layers"))
        self.assertEqual(marks[-1].words, "it answers after 407 s")

    def test_each_prefix_of_the_agent_is_known(self) -> None:
        for name, prefix in AGENTS.items():
            with self.subTest(name):
                text = "".join(prefix + line for line in COLD.splitlines(keepends=True))
                self.assertEqual(boot_marks(text), boot_marks(COLD))

    def test_carriage_returns_and_colours_do_not_matter(self) -> None:
        text = COLD.replace("\n", "\r\n").replace("GEMMA4", "\x1b[0m\x1b[1mGEMMA4", 3)
        self.assertEqual(boot_marks(text), boot_marks(COLD))
        self.assertEqual(boot_marks(COLD.replace("\n", "\r")), boot_marks(COLD))
        overwritten = f"[ 1.5] clock: on\rGEMMA4-BOOT docker begin {T}\r\n"
        self.assertEqual(boot_marks(overwritten), [BootMark("docker", "begin", T)])

    def test_a_mark_behind_a_waiting_login_prompt_counts(self) -> None:
        found = boot_marks(f"\r\nvm-1 login: GEMMA4-BOOT ready done {T} it answers\r\n")
        self.assertEqual(found, [BootMark("ready", "done", T, "it answers")])

    def test_the_copies_of_console_and_agent_are_one_mark(self) -> None:
        for name, prefix in AGENTS.items():
            copies = [prefix + line for line in COLD.splitlines(keepends=True)]
            plain = COLD.splitlines(keepends=True)
            mixed = "".join(a + b for a, b in zip(plain, copies, strict=True))
            late = "".join(plain[:5] + copies[:3] + plain[5:] + copies[3:])
            for text in (mixed, late):
                with self.subTest(name):
                    self.assertEqual(boot_marks(text), boot_marks(COLD))
                    self.assertEqual(boot_state(text, TPU), boot_state(COLD, TPU))

    def test_of_a_whole_and_a_cut_copy_the_whole_one_is_taken(self) -> None:
        whole = f"GEMMA4-BOOT token failed {T} secret hf-token: HTTP 403\n"
        cut = f"GEMMA4-BOOT token failed {T} secret hf-t\n"
        for text in (whole + cut, cut + whole):
            (mark,) = boot_marks(text)
            self.assertEqual(mark.words, "secret hf-token: HTTP 403")

    def test_two_notes_of_one_second_are_two(self) -> None:
        text = f"GEMMA4-BOOT image note {T} 1 of 3\nGEMMA4-BOOT image note {T} 2 of 3\n"
        self.assertEqual([mark.words for mark in boot_marks(text)], ["1 of 3", "2 of 3"])

    def test_a_line_cut_before_its_time_ends_is_none(self) -> None:
        whole = f"GEMMA4-BOOT weights done {T}"
        for length in range(len(whole)):
            with self.subTest(whole[:length]):
                self.assertEqual(boot_marks(whole[:length] + "\nother"), [])
        self.assertEqual(len(boot_marks(whole)), 1)

    def test_what_is_no_mark_is_none(self) -> None:
        for line in (
            f"GEMMA4-BOOT rocket done {T}",
            f"GEMMA4-BOOT ready finished {T}",
            f"GEMMA4-BOOT ready done {T}0",
            f"GEMMA4-BOOT ready done 0{str(T)[1:]}",
            "GEMMA4-BOOT ready done soon",
            f"GEMMA4-BOOT  ready done {T}",
            f"gemma4-boot ready done {T}",
            f"XGEMMA4-BOOT ready done {T}",
            f"GEMMA4-BOOT ready done {T}x",
            "",
        ):
            with self.subTest(line):
                self.assertEqual(boot_marks(line), [])


class TestHostileText(unittest.TestCase):
    def test_a_mark_in_somebody_elses_line_does_not_count(self) -> None:
        mark = f"GEMMA4-BOOT ready done {T}"
        for line in (
            f"Nov 30 09:19:01 vm-1 sshd[99]: Invalid user {mark} from 192.0.2.7 port 22",
            f"Nov 30 09:19:01 vm-1 sshd[99]: Invalid user startup-script: {mark}",
            f"sshd[99]: {mark}",
            f"[   35.1] audit: {mark}",
            f"[   35.1] {mark}",
            f"a b login: {mark}",
            f"Nov 30 09:19:01 vm-1 kernel: startup-script: {mark}",
            f"startup-script: startup-script: x {mark}",
            f"startup-script: echo {mark}",
            f"startup-script: + echo {mark}",
            f"[   30.1] cloud-init[1050]: + echo {mark}",
            f"Nov 30 09:19:01 vm-1 sshd[99]: Invalid user cloud-init[1050]: {mark}",
        ):
            with self.subTest(line):
                self.assertEqual(boot_marks(line), [])

    def test_a_mark_in_the_words_of_another_is_only_words(self) -> None:
        text = f"GEMMA4-BOOT weights failed {T} exited: GEMMA4-BOOT ready done {T}\n"
        (mark,) = boot_marks(text)
        self.assertEqual((mark.phase, mark.state), ("weights", "failed"))
        self.assertFalse(boot_state(text, TPU).ready)

    def test_words_are_printable_bounded_and_without_secrets(self) -> None:
        token = "hf_" + "Canary7" * 4
        text = f"GEMMA4-BOOT token failed {T} a\x1b[2Jb\u202ec\x00 {token} " + "y" * 5000
        (mark,) = boot_marks(text)
        self.assertNotIn("Canary7", mark.words)
        self.assertNotRegex(mark.words, "[\x00-\x1f\u202e]")
        self.assertLessEqual(len(mark.words), 600)

    def test_noise_of_any_kind_yields_nothing_and_takes_no_time(self) -> None:
        dice = random.Random(7)
        noise = "".join(chr(dice.randrange(1, 0x2100)) for _ in range(50_000))
        self.assertEqual(boot_marks(noise), [])
        self.assertEqual(boot_marks("GEMMA4-BOOT " * 40_000), [])
        self.assertEqual(boot_marks("startup-script: " * 60_000 + "GEMMA4-BOOT"), [])
        self.assertEqual(boot_marks("\ud800GEMMA4-BOOT \udfff\n" * 100), [])

    def test_only_the_newest_marks_of_a_flood_are_kept(self) -> None:
        lines = (f"GEMMA4-BOOT image note {T + n} {n}" for n in range(9_000))
        marks = boot_marks("\n".join(lines))
        self.assertEqual(len(marks), 2_000)
        self.assertEqual(marks[-1].at_unix, T + 8_999)


class TestPhases(unittest.TestCase):
    def test_a_cold_boot_tells_when_each_began_and_how_long_it_took(self) -> None:
        phases = boot_phases(boot_marks(COLD), TPU)
        self.assertEqual(tuple(one.phase for one in phases), TPU)
        self.assertEqual([one.seconds for one in phases], [60, 300, 1, 60, 330, 0])
        self.assertEqual(phases[3].begin_unix, T + 380)
        self.assertEqual({one.state for one in phases}, {"done"})

    def test_nothing_seen_is_nothing_claimed(self) -> None:
        state = boot_state("", TPU)
        self.assertEqual({one.state for one in state.phases}, {"waiting"})
        self.assertEqual((state.phase, state.began_unix, state.failed), ("", 0, ""))
        self.assertFalse(state.ready)

    def test_at_each_mark_the_phase_of_the_moment(self) -> None:
        for last, now in (
            (("docker", "begin"), "docker"),
            (("docker", "done"), "image"),
            (("image", "begin"), "image"),
            (("image", "note"), "image"),
            (("token", "done"), "weights"),
            (("weights", "note"), "weights"),
            (("weights", "begin"), "weights"),
            (("weights", "done"), "compile"),
            (("compile", "begin"), "compile"),
            (("compile", "done"), "ready"),
            (("ready", "done"), "ready"),
        ):
            with self.subTest(last):
                state = boot_state(upto(*last), TPU)
                self.assertEqual(state.phase, now)
                self.assertEqual(state.ready, last == ("ready", "done"))
                self.assertEqual(state.began_unix, T)

    def test_words_are_the_newest(self) -> None:
        self.assertEqual(boot_state(upto("image", "note"), TPU).words, "3 of 12 layers")

    def test_seconds_hold_only_what_is_over(self) -> None:
        seconds = boot_state(upto("weights", "begin"), TPU).seconds
        self.assertEqual(dict(seconds), {"docker": 60.0, "image": 300.0, "token": 1.0})

    def test_a_reboot_begins_anew_and_skips_what_it_need_not_do(self) -> None:
        again = (
            f"GEMMA4-BOOT docker begin {T + 9000}\nGEMMA4-BOOT docker done {T + 9002} 24.0.7\n"
            f"GEMMA4-BOOT weights note {T + 9002} the container is here already\n"
        )
        state = boot_state(COLD + again, TPU)
        self.assertFalse(state.ready)
        self.assertEqual(state.began_unix, T + 9000)
        self.assertEqual(state.phase, "weights")
        states = [one.state for one in state.phases]
        self.assertEqual(states, ["done", "skipped", "skipped", *["waiting"] * 3])
        self.assertEqual(dict(state.seconds), {"docker": 2.0})

    def test_a_late_copy_of_the_first_boot_does_not_end_the_second(self) -> None:
        again = f"GEMMA4-BOOT docker begin {T + 9000}\n"
        text = COLD + again + AGENTS["syslog"] + COLD.splitlines()[-1]
        self.assertFalse(boot_state(text, TPU).ready)
        self.assertEqual(len(latest_boot_marks(boot_marks(text), "docker")), 1)

    def test_a_console_that_begins_in_the_middle_is_still_read(self) -> None:
        state = boot_state("\n".join(COLD.splitlines()[9:]), TPU)
        self.assertTrue(state.ready)
        self.assertEqual(state.began_unix, 0)
        self.assertEqual(state.phases[0].state, "skipped")
        self.assertEqual(state.phases[4].seconds, 330)

    def test_a_phase_that_ended_without_its_beginning_took_no_time(self) -> None:
        phases = boot_phases([BootMark("compile", "done", T)], TPU)
        self.assertEqual((phases[4].state, phases[4].seconds), ("done", 0))

    def test_a_failure_names_its_phase_and_reason(self) -> None:
        text = upto("token", "begin") + f"GEMMA4-BOOT token failed {T + 365} HTTP 403: no\n"
        state = boot_state(text, TPU)
        self.assertEqual(state.failed, "token: HTTP 403: no")
        self.assertEqual(state.phase, "token")
        self.assertEqual(state.phases[2].state, "failed")
        self.assertEqual(state.phases[2].seconds, 5)
        self.assertEqual(state.phases[3].state, "waiting")

    def test_a_failure_before_its_phase_began_counts_as_well(self) -> None:
        text = upto("token", "done") + f"GEMMA4-BOOT weights failed {T + 370} docker run: no\n"
        self.assertEqual(boot_state(text, TPU).failed, "weights: docker run: no")

    def test_a_failure_is_over_with_a_ready_or_with_a_new_boot(self) -> None:
        failed = f"GEMMA4-BOOT docker begin {T}\nGEMMA4-BOOT weights failed {T + 9} exited\n"
        self.assertTrue(boot_state(failed, TPU).failed)
        self.assertEqual(boot_state(failed + f"GEMMA4-BOOT ready done {T + 99}\n", TPU).failed, "")
        self.assertEqual(
            boot_state(failed + f"GEMMA4-BOOT docker begin {T + 99}\n", TPU).failed, ""
        )

    def test_the_idle_end_is_told_and_is_no_phase(self) -> None:
        text = COLD + f"GEMMA4-BOOT idle begin {T + 5000} no use for 30 minutes\n"
        state = boot_state(
            text + f"GEMMA4-BOOT idle done {T + 5001} this machine shuts down\n", TPU
        )
        self.assertTrue(state.ready)
        self.assertEqual(state.ending, "no use for 30 minutes")
        self.assertEqual(state.words, "it answers after 407 s")
        self.assertNotIn("idle", state.seconds)
        self.assertEqual(boot_state(COLD, TPU).ending, "")

    def test_an_idle_note_neither_ends_nor_fails_anything(self) -> None:
        text = f"GEMMA4-BOOT docker begin {T}\nGEMMA4-BOOT idle note {T} without its service\n"
        state = boot_state(text, TPU)
        self.assertEqual((state.ending, state.failed, state.phase), ("", "", "docker"))


class TestOtherPhases(unittest.TestCase):
    """A boot has the phases of its runtime, and begins with the first of them."""

    def walked(self, names: tuple[str, ...]) -> str:
        lines = []
        for n, name in enumerate(names):
            lines.append(f"GEMMA4-BOOT {name} begin {T + 10 * n}")
            lines.append(f"GEMMA4-BOOT {name} done {T + 10 * n + 10} {name} is over")
        return "\n".join(lines) + "\n"

    def test_every_phase_of_every_rig_is_known_and_they_are_in_one_order(self) -> None:
        for names in (TPU, CUDA, BUILT):
            places = [BOOT_PHASES.index(name) for name in names]
            self.assertEqual(places, sorted(places), names)

    def test_each_kind_of_boot_is_read_by_its_own_phases(self) -> None:
        for names in (TPU, CUDA, BUILT):
            state = boot_state(self.walked(names), names)
            self.assertEqual(tuple(one.phase for one in state.phases), names)
            self.assertEqual(dict(state.seconds), {name: 10.0 for name in names})
            self.assertTrue(state.ready)
            self.assertEqual((state.began_unix, state.phase), (T, "ready"))

    def test_docker_begins_no_boot_where_the_driver_does(self) -> None:
        text = self.walked(CUDA) + f"GEMMA4-BOOT docker begin {T + 200}\n"
        self.assertEqual(boot_state(text, CUDA).began_unix, T)
        self.assertTrue(boot_state(text, CUDA).ready)
        again = self.walked(CUDA) + f"GEMMA4-BOOT driver begin {T + 200}\n"
        state = boot_state(again, CUDA)
        self.assertEqual((state.began_unix, state.ready, state.phase), (T + 200, False, "driver"))

    def test_a_build_that_is_followed_by_its_notes_and_fails(self) -> None:
        text = self.walked(BUILT[:1]) + f"GEMMA4-BOOT build begin {T + 10}\n"
        text += f"GEMMA4-BOOT build note {T + 90} 37 of 208 files\n"
        state = boot_state(text, BUILT)
        self.assertEqual((state.phase, state.words), ("build", "37 of 208 files"))
        state = boot_state(text + f"GEMMA4-BOOT build failed {T + 99} nvcc: killed\n", BUILT)
        self.assertEqual(state.failed, "build: nvcc: killed")
        self.assertEqual(state.phases[1].seconds, 89)

    def test_phases_that_a_boot_does_not_have_say_nothing_of_it(self) -> None:
        text = self.walked(TPU) + f"GEMMA4-BOOT build failed {T + 200} somebody else's\n"
        state = boot_state(text, TPU)
        self.assertTrue(state.ready)
        self.assertEqual((state.failed, state.words), ("", "ready is over"))


if __name__ == "__main__":
    unittest.main()
