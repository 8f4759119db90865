"""The grammar of names, and NAMING.md against the data that the forge's checks use."""

from __future__ import annotations

import re
import unittest
from pathlib import Path

from forge.naming import (
    EC2_FAMILIES,
    ENCODING_SLOTS,
    KNOWN_RIGS,
    MAX_TOOL_NAME,
    MODEL_SLOTS,
    PLATFORM_SLOTS,
    RUNTIME_SLOTS,
    SILENT_ENCODINGS,
    TOOLS,
    RigName,
    parse_rig_name,
    skill_name,
    slug,
    tool_names,
)
from forge.parts.knowledge.hardware import HARDWARE_SLOTS
from forge.parts.knowledge.memory import WEIGHT_ENCODINGS
from forge.parts.knowledge.models import checkpoint_for_repo

ROOT = Path(__file__).resolve().parents[1]
NAMING = (ROOT / "NAMING.md").read_text(encoding="utf-8")

# The tools that the two articles show by name: the v6e one of 2026-07-25 and the Cloud Run one.
ARTICLE_TOOLS = """
find_tpu_vm create_tpu_vm_instance wait_for_vllm_ready get_vllm_docker_logs manage_vllm_docker
get_vllm_endpoint get_tpu_vm_endpoint analyze_cloud_logging run_vllm_benchmark find_tpu
deploy_vllm destroy_vllm status_vllm update_vllm_scaling get_vllm_deployment_config
get_vllm_gpu_deployment_config check_gpu_quotas list_vertex_models list_bucket_models save_hf_token
get_vertex_ai_model_copy_instructions get_huggingface_model_copy_instructions
get_huggingfacehub_download_path get_system_status get_endpoint get_model_details
verify_model_health run_benchmark query_gemma4 query_gemma4_with_stats query_vllm analyze_gpu_logs
suggest_sre_remediation get_help
""".split()

FIRST_RIG = "local-pytorch-cpu-2b"


def table(header: str) -> list[list[str]]:
    """The rows of NAMING.md's table whose first head cell is `header`, code marks stripped."""
    lines = NAMING.split("\n")
    start = next(i for i, line in enumerate(lines) if line.startswith(f"| {header} |"))
    rows = []
    for line in lines[start + 2 :]:
        if not line.startswith("|"):
            break
        rows.append([cell.strip().replace("`", "") for cell in line.strip("|").split("|")])
    return rows


def column(header: str) -> list[str]:
    return [row[0] for row in table(header)]


class TestGrammar(unittest.TestCase):
    def test_names_come_apart_and_together(self) -> None:
        for rig in KNOWN_RIGS:
            self.assertEqual(str(parse_rig_name(rig.name)), rig.name)
        self.assertEqual(
            parse_rig_name("local-llamacpp-1650ti-2b-q4_0"),
            RigName("local", "llamacpp", "1650ti", "2b", "q4_0"),
        )
        self.assertEqual(parse_rig_name("gpu-vllm-mi300x-2b").encoding, "")

    def test_each_slot_is_closed(self) -> None:
        for name, slot, value in (
            ("aws-vllm-g6-2b", "platform", "aws"),
            ("gpu-sglang-g6-2b", "runtime", "sglang"),
            ("tpu-vllm-v5litepod1-2b", "hardware", "v5litepod1"),
            ("gpu-vllm-g6-7b", "model", "7b"),
            ("gpu-vllm-g6-2b-awq", "encoding", "awq"),
            ("tpu-vllm-v5e1-2b-qat", "encoding", "qat"),
            ("GPU-vllm-g6-2b", "platform", "GPU"),
            ("gpu-vllm-g6-2b-q4-0", "has 6 slots", "four or five"),
            ("gpu-vllm-g6", "has 3 slots", "four or five"),
            ("", "has 1 slots", "four or five"),
            ("gpu-vllm-g6-2b-", "encoding", "''"),
            ("../gpu-vllm-g6-2b", "platform", "../gpu"),
        ):
            with self.subTest(name), self.assertRaises(ValueError) as caught:
                parse_rig_name(name)
            self.assertIn(slot, str(caught.exception))
            self.assertIn(value, str(caught.exception))

    def test_slugs_are_what_the_three_clients_accept(self) -> None:
        # Gemini CLI: letters, numbers, dashes. Agent Skills and claude plugin validate: kebab case,
        # and a skill's name has at most 64 characters.
        kebab = re.compile(r"[a-z0-9]+(-[a-z0-9]+)*")
        slugs = [slug(rig.name) for rig in KNOWN_RIGS]
        self.assertEqual(len(set(slugs)), len(slugs))
        for rig in KNOWN_RIGS:
            self.assertRegex(slug(rig.name), rf"^{kebab.pattern}$")
            self.assertRegex(skill_name(rig.name), rf"^{kebab.pattern}-management$")
            self.assertLessEqual(len(skill_name(rig.name)), 64)
        changed = {rig.name for rig in KNOWN_RIGS if slug(rig.name) != rig.name}
        self.assertEqual(changed, {rig.name for rig in KNOWN_RIGS if "_" in rig.name})
        with self.assertRaises(ValueError):
            slug("my-own-server")


class TestKnownRigs(unittest.TestCase):
    def test_how_many_there_are(self) -> None:
        kinds = [rig.kind for rig in KNOWN_RIGS]
        self.assertEqual((kinds.count("serving"), kinds.count("artifact")), (28, 10))
        self.assertEqual(len({rig.name for rig in KNOWN_RIGS}), 38)

    def test_weights_fit_the_model_and_encoding_slots(self) -> None:
        for rig in KNOWN_RIGS:
            if not rig.weights:
                continue
            name = parse_rig_name(rig.name)
            model, checkpoint = checkpoint_for_repo(rig.weights)
            self.assertEqual(model.slot, name.model, rig.name)
            said = SILENT_ENCODINGS.get(rig.name, name.encoding)
            self.assertEqual(checkpoint.label, said, rig.name)

    def test_the_silent_ones_are_exceptions_in_the_text(self) -> None:
        text = NAMING[NAMING.index("### Exceptions") : NAMING.index("## What a rig publishes")]
        for name, encoding in SILENT_ENCODINGS.items():
            self.assertEqual(parse_rig_name(name).encoding, "")
            self.assertIn(f"`{name}`", text)
            self.assertIn(encoding, text)

    def test_encodings_can_be_sized(self) -> None:
        self.assertLessEqual(set(ENCODING_SLOTS), set(WEIGHT_ENCODINGS))


class TestNamingText(unittest.TestCase):
    def test_slot_tables_are_the_data(self) -> None:
        self.assertEqual(column("Platform"), list(PLATFORM_SLOTS))
        self.assertEqual(column("Runtime"), list(RUNTIME_SLOTS))
        self.assertEqual(column("Encoding"), list(ENCODING_SLOTS))
        self.assertEqual(set(column("Hardware")), set(HARDWARE_SLOTS))
        for value, chip, _ in table("Hardware"):
            self.assertEqual(HARDWARE_SLOTS[value].chip, chip)
        for value, meaning in table("Model"):
            self.assertEqual(meaning.split(",")[0], MODEL_SLOTS[value])
        self.assertEqual(column("Model"), list(MODEL_SLOTS))

    def test_rig_tables_are_the_data(self) -> None:
        for header, kind in (("Serving rig", "serving"), ("Artifact rig", "artifact")):
            rows = [(name, weights) for name, weights, _ in table(header)]
            expected = [(rig.name, rig.weights or "-") for rig in KNOWN_RIGS if rig.kind == kind]
            self.assertEqual(rows, expected)

    def test_published_names_in_the_text_follow_the_rules(self) -> None:
        rows = {thing: (rule, example) for thing, rule, example in table("Thing")}
        rig = rows.pop("directory, resource labels")[1]
        self.assertIn("_", parse_rig_name(rig).encoding)
        for rule, example in rows.values():
            derived = skill_name(rig) if rule.endswith("-management") else slug(rig)
            self.assertEqual(example, derived)

    def test_the_tool_table_is_the_data(self) -> None:
        rows = [(name, belongs, earlier) for name, belongs, _, earlier in table("Tool")]
        self.assertEqual(rows, [(tool.name, tool.belongs, tool.earlier_name) for tool in TOOLS])
        for name, _, does, _ in table("Tool"):
            self.assertGreater(len(does), 15, name)

    def test_every_rig_named_in_the_text_exists(self) -> None:
        known = {rig.name for rig in KNOWN_RIGS} | {"gpu-vllm-g5g-2b"}
        pattern = rf"`((?:{'|'.join(PLATFORM_SLOTS)})-[a-z0-9]+-[a-z0-9]+-[a-z0-9]+[-_a-z0-9]*)`"
        for name in re.findall(pattern, NAMING):
            if not name.endswith(("-q4-0", "-management")):
                self.assertIn(name, known)


class TestTools(unittest.TestCase):
    def test_names_are_short_verbs_and_nouns(self) -> None:
        names = [tool.name for tool in TOOLS]
        self.assertEqual(len(set(names)), len(names))
        for name in tool_names():
            self.assertLessEqual(len(name), MAX_TOOL_NAME, name)
            self.assertRegex(name, r"^[a-z]+(_[a-z0-9]+)+$")

    def test_the_longest_key_leaves_room_for_the_longest_tool(self) -> None:
        # Claude Code in project scope: mcp__<server>__<tool>; several APIs stop at 64.
        longest = max(len(slug(rig.name)) for rig in KNOWN_RIGS)
        self.assertLessEqual(len("mcp__") + longest + len("__") + MAX_TOOL_NAME, 64)

    def test_every_tool_of_the_articles_is_kept_or_has_a_shorter_name(self) -> None:
        theirs = {tool.earlier_name: tool.name for tool in TOOLS if tool.earlier_name}
        for name in ARTICLE_TOOLS:
            self.assertTrue(name in tool_names() or name in theirs, name)

    def test_a_name_is_changed_only_where_it_is_too_long(self) -> None:
        for tool in TOOLS:
            if tool.earlier_name:
                self.assertGreater(len(tool.earlier_name), MAX_TOOL_NAME)
                self.assertNotIn(tool.earlier_name, tool_names())

    def test_families_are_hardware_slots_and_filled_in(self) -> None:
        self.assertLessEqual(set(EC2_FAMILIES), set(HARDWARE_SLOTS))
        self.assertIn("create_g5g_instance", tool_names())
        self.assertFalse([name for name in tool_names() if "<" in name])

    def test_the_first_rigs_tools(self) -> None:
        lines = [line for line in NAMING.split("\n") if FIRST_RIG in line and "exactly" in line]
        self.assertEqual(len(lines), 1)
        listed = re.findall(r"`([a-z0-9_]+)`", lines[0])
        self.assertEqual(len(listed), 23)
        belongs = {tool.name: tool.belongs for tool in TOOLS}
        for name in listed:
            self.assertIn(belongs[name], ("every rig", "every rig but vLLM's", "attached"))
        attached = {tool.name for tool in TOOLS if tool.belongs == "attached"}
        self.assertLessEqual(attached, set(listed))


if __name__ == "__main__":
    unittest.main()
