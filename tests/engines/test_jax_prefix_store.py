"""What is kept of prompts: found by all that came before, forgotten in order, within its room."""

from __future__ import annotations

import random
import unittest

from forge.engines.jax.prefix_store import PrefixStore, prefix_names


class NamesTest(unittest.TestCase):
    def test_one_for_each_whole_chunk(self) -> None:
        for length, count in ((1, 0), (3, 0), (4, 1), (7, 1), (8, 2), (9, 2)):
            self.assertEqual(len(prefix_names(range(length), 4, "")), count)

    def test_equal_beginnings_have_equal_names_and_no_others(self) -> None:
        plain = prefix_names(range(12), 4, "")
        self.assertEqual(prefix_names([*range(8), 99, 98, 97, 96, 95], 4, "")[:2], plain[:2])
        others = [
            prefix_names([99, *range(1, 12)], 4, ""),  # another beginning, the same afterwards
            prefix_names([1, 0, *range(2, 12)], 4, ""),
            prefix_names([*range(4, 12), *range(4)], 4, ""),
            prefix_names(range(12), 4, "salt"),
            prefix_names(range(12), 3, ""),
            prefix_names([0] * 12, 4, ""),
        ]
        every = [name for names in (plain, *others) for name in names]
        self.assertEqual(len(set(every)), len(every))

    def test_a_salt_is_not_a_token(self) -> None:
        self.assertEqual(prefix_names([1, 2], 2, "é"), prefix_names([1, 2], 2, "é"))
        self.assertNotEqual(prefix_names([1, 2], 2, "\ud800"), prefix_names([1, 2], 2, "?"))


class PrefixStoreTest(unittest.TestCase):
    def put(self, store: PrefixStore, path: str) -> None:
        """Read a prompt whose chunks are letters: those that are not there are kept."""
        names = self.names(path)
        store.found(names)
        for end in range(1, len(path) + 1):
            if names[end - 1] not in store:
                store.keep(names[:end], path[:end])

    def names(self, path: str) -> list[bytes]:
        return [path[: end + 1].encode() for end in range(len(path))]

    def test_the_longest_known_beginning_is_found(self) -> None:
        store = PrefixStore(10)
        self.put(store, "abcd")
        self.put(store, "abx")
        self.assertEqual(store.found(self.names("abcz")), ["a", "ab", "abc"])
        self.assertEqual(store.found(self.names("abxd")), ["a", "ab", "abx"])
        self.assertEqual(store.found(self.names("bcd")), [])
        self.assertEqual(store.found([]), [])

    def test_the_least_recently_used_ending_goes_first(self) -> None:
        store = PrefixStore(5)
        self.put(store, "abc")
        self.put(store, "xy")
        store.found(self.names("ab"))  # not its last chunk
        self.put(store, "m")
        self.assertEqual(store.found(self.names("abc")), ["a", "ab"])
        self.put(store, "n")
        self.assertEqual(len(store.found(self.names("xy"))), 1)
        self.assertEqual(store.found(self.names("ab")), ["a", "ab"])

    def test_of_a_prompt_beyond_the_room_the_beginning_is_kept(self) -> None:
        store = PrefixStore(3)
        self.put(store, "abcdef")
        self.assertEqual(store.found(self.names("abcdef")), ["a", "ab", "abc"])

    def test_nothing_is_kept_behind_what_was_forgotten(self) -> None:
        store = PrefixStore(2)
        self.put(store, "a")
        self.put(store, "xy")
        store.keep(self.names("ab"), "ab")
        self.assertEqual(store.found(self.names("ab")), [])
        self.assertEqual(store.found(self.names("xy")), ["x", "xy"])

    def test_any_history_keeps_whole_beginnings_within_the_room(self) -> None:
        """What is found is all that stands there, and nothing stands without what came before."""
        draw = random.Random(5)
        for room in (1, 2, 5, 12):
            store = PrefixStore(room)
            kept: set[str] = set()
            for _ in range(600):
                path = "".join(draw.choice("ab") for _ in range(draw.randint(1, 6)))
                told = store.found(self.names(path))
                ends = [path[: end + 1] for end in range(len(path))]
                known = ends[: next((n for n, end in enumerate(ends) if end not in kept), 9)]
                self.assertEqual(told, known)
                self.put(store, path)
                kept = {name.decode() for name in list(store._kept)}
                self.assertLessEqual(len(store), room)
                for chunk in kept:  # none without those before it
                    self.assertTrue(len(chunk) == 1 or chunk[:-1] in kept)
                self.assertEqual(kept & set(ends), set(ends[: min(room, len(ends))]))


if __name__ == "__main__":
    unittest.main()
