"""Every signature against logs written as its program writes them: alone, buried, nested.

And what must not be confused: hard contrasts side by side, and healthy logs with alarming words.
"""

from __future__ import annotations

import unittest

from forge.parts.boundaries.log_text import log_lines
from forge.parts.knowledge.failure_bank import FailureMatch
from forge.parts.knowledge.failures import failure_bank
from tests.failure_forms import FORMS, STAGES, all_cases, in_form, ordinary_lines, read_cases

# Pairs that differ in a word and need opposite advice: kind, log, kind, log.
CONTRASTS = (
    (
        "hf_unauthenticated",
        "401 Client Error. (Request ID: x) Cannot access gated repo for url https://hf.example/a",
        "hf_licence_not_accepted",
        "403 Client Error. (Request ID: x) Cannot access gated repo for url https://hf.example/a",
    ),
    (
        "iap_backend",
        "Error while connecting [4003: 'failed to connect to backend'].",
        "iap_not_authorized",
        "Error while connecting [4033: 'not authorized'].",
    ),
    (
        "missing_k_norm",
        "ValueError: Missing 60 parameters: model.layers.15.self_attn.k_norm.weight",
        "extra_k_norm",
        "ValueError: Received 60 parameters not in model: model.layers.15.self_attn.k_norm.weight",
    ),
    (
        "transformers_too_old",
        "The checkpoint has model type `gemma4` but Transformers does not recognize this "
        "architecture.",
        "transformers_too_new",
        "AmbiguousGlobalPerLayerAttributeError: 'head_dim' is a per-layer attribute",
    ),
    (
        "tpu_hbm_oom",
        "RESOURCE_EXHAUSTED: Ran out of memory in memory space hbm. Used 17.0G of 15.7G hbm.",
        "tpu_vmem_oom",
        "RESOURCE_EXHAUSTED: Ran out of memory in memory space vmem. Used 17.0M of 16.0M vmem.",
    ),
    (
        "kv_cache_none",
        "ValueError: No available memory for the cache blocks. Try increasing "
        "`gpu_memory_utilization` when initializing the engine.",
        "tpu_program_load",
        "RESOURCE_EXHAUSTED: Error loading program: Attempting to reserve 1.1G at the bottom of "
        "memory. That was not possible. There are 0.7G free, 0B reserved.",
    ),
    (
        "gce_regional_quota",
        "- Quota 'NVIDIA_L4_GPUS' exceeded.  Limit: 1.0 in region us-east4.",
        "gce_stockout",
        "code: ZONE_RESOURCE_POOL_EXHAUSTED The zone 'projects/p/zones/us-east4-a' does not have "
        "enough resources available to fulfill the request.",
    ),
    (
        "tpu_stockout",
        '{"code": 8, "status": "RESOURCE_EXHAUSTED", "message": "There is no more capacity in the '
        'zone \\"us-east5-a\\""}',
        "ec2_spot_count",
        "(MaxSpotInstanceCountExceeded) when calling RunInstances: Max spot instance count "
        "exceeded",
    ),
    (
        "cloud_run_startup",
        "The user-provided container failed to start and listen on the port defined provided by "
        "the PORT=8000 environment variable.",
        "cli_flag_error",
        "vllm: error: unrecognized arguments: --max-len\nThe user-provided container failed to "
        "start and listen on the port defined provided by the PORT=8000 environment variable.",
    ),
    (
        "cuda_oom",
        "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB.",
        "cuda_oom_weights",
        '  File "gemma4.py", line 12, in load_model\ntorch.OutOfMemoryError: CUDA out of memory. '
        "Tried to allocate 2.00 GiB.",
    ),
    (
        "disk_full",
        "write /layer.tar: no space left on device",
        "gloo_or_shm_small",
        "OSError: No space left on device: '/dev/shm/psm_1'",
    ),
)


def found_in(text: str) -> list[FailureMatch]:
    return failure_bank().diagnose(log_lines(text))


def told(match: FailureMatch) -> str:
    """All that an answer says about a match, in lower case."""
    changes = [str(change) for change in match.changes]
    signature = match.signature
    parts = [signature.kind, match.line, match.cause, *changes, *signature.futile]
    return "\n".join([*parts, signature.upstream]).lower()


class TestSignatures(unittest.TestCase):
    def test_each_case_in_each_form_has_kind_line_and_the_words_it_needs(self) -> None:
        for case in all_cases():
            for form in FORMS:
                with self.subTest(case.name, form=form):
                    matches = found_in(in_form(case.text, form))
                    self.assertTrue(matches, "nothing was found")
                    first = matches[0]
                    self.assertEqual(first.signature.kind, case.kind)
                    self.assertIn(case.line, first.line)
                    for word in case.must:
                        choices = [choice.lower() for choice in word.split("|")]
                        self.assertTrue(any(c in told(first) for c in choices), word)

    def test_every_signature_has_a_case(self) -> None:
        tried = {case.kind for case in all_cases()}
        self.assertEqual({s.kind for s in failure_bank().signatures} - tried, set())

    def test_every_stage_has_signatures_and_cases_of_its_own(self) -> None:
        stages = {signature.stage for signature in failure_bank().signatures}
        self.assertEqual(stages, set(STAGES))

    def test_kinds_are_unique_and_every_answer_says_what_would_not_help(self) -> None:
        signatures = failure_bank().signatures
        self.assertEqual(len({s.kind for s in signatures}), len(signatures))
        self.assertGreaterEqual(len(signatures), 120)
        self.assertEqual([s.kind for s in signatures if not s.futile], [])

    def test_no_answer_shows_an_unfilled_template(self) -> None:
        for case in all_cases():
            match = found_in(case.text)[0]
            ours = "\n".join([match.cause, *(str(change) for change in match.changes)])
            self.assertNotRegex(ours, r"[{}]|\bNone\b|<(?!user|service-account|model|secret)", case)


class TestContrasts(unittest.TestCase):
    def test_each_side_gets_its_own_kind_in_every_form(self) -> None:
        for one, text, other, contrast in CONTRASTS:
            for form in FORMS:
                for kind, log in ((one, text), (other, contrast)):
                    with self.subTest(kind, form=form):
                        matches = found_in(in_form(log, form))
                        self.assertEqual([m.signature.kind for m in matches][:1], [kind])

    def test_of_a_cascade_the_root_comes_first_and_the_rest_is_kept(self) -> None:
        root = read_cases("load")[0]
        cascade = "\n".join(
            [
                in_form(root.text, "nested"),
                "Container called exit(1).",
                "curl: (7) Failed to connect to 127.0.0.1 port 8000: Connection refused",
            ]
        )
        kinds = [match.signature.kind for match in found_in(cascade)]
        self.assertEqual(kinds[0], root.kind)
        self.assertIn("cloud_run_exit", kinds)
        self.assertIn("connection_refused", kinds)


class TestHealthyLogs(unittest.TestCase):
    def test_alarming_words_alone_are_no_failure(self) -> None:
        for case in read_cases("healthy"):
            for form in ("alone", "buried"):
                with self.subTest(case.text[:70], form=form):
                    self.assertEqual(
                        [m.signature.kind for m in found_in(in_form(case.text, form))], []
                    )

    def test_ordinary_lines_alone_are_no_failure(self) -> None:
        for seed in range(20):
            self.assertEqual(found_in("\n".join(ordinary_lines(400, seed))), [])

    def test_a_refused_connection_before_the_server_came_up_is_no_failure(self) -> None:
        wait = "curl: (7) Failed to connect to 127.0.0.1 port 8000: Connection refused"
        up = "INFO:     Application startup complete."
        self.assertEqual(found_in(f"{wait}\n{wait}\n{up}"), [])
        self.assertEqual(
            [m.signature.kind for m in found_in(f"{up}\n{wait}")], ["connection_refused"]
        )


if __name__ == "__main__":
    unittest.main()
