"""What holds on several devices, whatever the model: the answers of one, and no weight moved."""

from __future__ import annotations

import unittest
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from forge.engines.gemma4.config import Gemma4Config
from forge.engines.gemma4.config_reader import read_config
from forge.engines.gemma4.partition import device_part
from forge.engines.gemma4.sizes import parameter_groups
from forge.engines.gemma4.tensor_names import model_tensors
from tests.engines.many_devices import asked_on_eight

NEAR_ONE = 1e-4  # how far several devices may move a log probability


def check_devices(
    case: unittest.TestCase, folder: Path, ways: Sequence[tuple[int, int]], slots: int = 1
) -> None:
    """An engine of `folder` on each of `ways` (tensor, data parallel) beside one on one device."""
    config = read_config(folder)
    one, *others = asked_on_eight(folder, ways, slots)
    case.assertEqual(set(map(str, sum(one["collectives"].values(), []))), set())
    for (tensor, data), told in zip(ways, others, strict=True):
        with case.subTest(folder=folder.name, tensor=tensor, data=data):
            check_answers(case, told, one["alone"])
            case.assertEqual(told["masked"], [7, 9])
            case.assertEqual(told["counters"]["compiles_after_start"], 0)
            check_places(case, config, told, one, tensor, data)
            for name, collectives in told["collectives"].items():
                check_collectives(case, config, name, collectives, tensor)


def check_answers(case: unittest.TestCase, told: Any, alone: Sequence[Any]) -> None:
    """The tokens of one device, alone and in company, with nearly its log probabilities."""
    for answers in (told["alone"], told["together"]):
        for answer, wanted in zip(answers, alone, strict=False):
            for (token, top), (wanted_token, wanted_top) in zip(answer, wanted, strict=False):
                case.assertEqual(token, wanted_token)
                far = dict(map(tuple, top))
                for other, value in wanted_top[:10]:
                    case.assertLess(abs(far[other] - value), NEAR_ONE)
    case.assertEqual(len(told["alone"]), len(alone))


def check_places(
    case: unittest.TestCase, config: Gemma4Config, told: Any, one: Any, tensor: int, data: int
) -> None:
    """Every device holds its part of the weights, each copy on devices of its own."""
    part = 4 * sum(parameter_groups(device_part(config, tensor)).values())
    devices = [device for copy in told["weights"] for device in copy]
    case.assertEqual(devices, [str(n) for n in range(tensor * data)])
    for copy, caches in zip(told["weights"], told["caches"], strict=True):
        case.assertEqual(set(copy.values()), {part})
        case.assertEqual(set(caches), set(copy))
        case.assertEqual(len(set(caches.values())), 1)
        case.assertLessEqual(max(caches.values()), one["caches"][0]["0"])


def check_collectives(
    case: unittest.TestCase,
    config: Gemma4Config,
    name: str,
    collectives: Sequence[tuple[str, list[int]]],
    tensor: int,
) -> None:
    """What devices have to tell each other, and nothing else.

    In a layer two sums, and one for its experts; at the start the token's row, and the per-layer
    table's; at the end the logits are gathered.
    """
    if tensor == 1 or name == "moving a row":
        case.assertEqual(collectives, [], name)
        return
    layers = [layer for layer in config.layers if name.startswith("decode") or layer.owner]
    if name == "first token":
        layers = [layer for layer in config.layers if not layer.owner]
    sums = [shape for kind, shape in collectives if kind == "all-reduce"]
    moved = [shape for kind, shape in collectives if kind != "all-reduce"]
    tables = 2 if config.per_layer else 1
    case.assertLessEqual(len(sums), len(layers) * (3 if config.experts else 2) + tables, name)
    for shape in model_tensors(config).values():
        case.assertNotIn(list(shape), moved, name)
    if not name.startswith("prefill"):
        case.assertEqual([sorted(shape)[-1] for shape in moved], [config.vocabulary], name)
