"""The formulas of bench/scale against what is counted when collective operations and methods are
carried out message by message among a few ranks, and the page that shows them.

    scale_model_test.py ROOT

SPDX-License-Identifier: Apache-2.0
"""

import json
import pathlib
import re
import shutil
import sys
import tempfile
import unittest
import xml.etree.ElementTree

ROOT = pathlib.Path(sys.argv.pop(1))
sys.path.insert(0, str(ROOT / "bench/scale"))
import cluster  # noqa: E402  (the path is an argument)
import collectives  # noqa: E402
import measured  # noqa: E402
import methods  # noqa: E402
import page  # noqa: E402
from rank_network import (  # noqa: E402
    Network,
    doubling_all_gather,
    doubling_all_reduce,
    doubling_scan,
    halving_all_reduce,
    pairwise_all_to_all,
    ring_all_gather,
    ring_all_reduce,
)


class CollectivesTest(unittest.TestCase):
    def check(self, operation, way, net, numbers):
        cost = collectives.WAYS[operation][way](net.ranks, numbers)
        self.assertEqual((cost.rounds, round(cost.sent, 9)), net.cost(), (operation, way))

    def test_all_reduce(self):
        ways = {
            "ring": (ring_all_reduce, (2, 3, 4, 5, 8)),
            "recursive doubling": (doubling_all_reduce, (2, 4, 8)),
            "halving and doubling": (halving_all_reduce, (2, 4, 8)),
        }
        self.assertEqual(set(ways), set(collectives.WAYS["all_reduce"]))
        for way, (run, counts) in ways.items():
            for ranks in counts:
                net = Network(ranks)
                vectors = [[r * 100 + i for i in range(2 * ranks)] for r in range(ranks)]
                right = [sum(column) for column in zip(*vectors)]
                self.assertEqual(run(net, vectors), [right] * ranks)
                self.check("all_reduce", way, net, 2 * ranks)

    def test_all_gather(self):
        ways = {
            "ring": (ring_all_gather, (2, 3, 5, 8)),
            "recursive doubling": (doubling_all_gather, (2, 4, 8)),
        }
        self.assertEqual(set(ways), set(collectives.WAYS["all_gather"]))
        for way, (run, counts) in ways.items():
            for ranks in counts:
                net = Network(ranks)
                vectors = [[r, -r, 7] for r in range(ranks)]
                self.assertEqual(run(net, vectors), [sum(vectors, [])] * ranks)
                self.check("all_gather", way, net, 3)

    def test_all_to_all(self):
        for ranks in (2, 3, 8):
            net = Network(ranks)
            held = pairwise_all_to_all(
                net, [[(r, to) for to in range(ranks)] for r in range(ranks)]
            )
            right = [[[(r, to)] for r in range(ranks)] for to in range(ranks)]
            self.assertEqual(held, right)
            self.check("all_to_all", "pairwise", net, ranks)

    def test_exclusive_scan(self):
        """Windows never overlap: the union has every rank before once, in order."""
        for ranks in (2, 3, 4, 5, 8, 13):
            net = Network(ranks)
            own = [[(r,)] for r in range(ranks)]
            before = doubling_scan(net, own, lambda a, b: [a[0] + b[0]])
            self.assertEqual(before, [None] + [[tuple(range(r))] for r in range(1, ranks)])
            self.check("exclusive_scan", "doubling", net, 1)

    def test_one_rank_exchanges_nothing(self):
        for operation, ways in collectives.WAYS.items():
            for way in ways:
                exchange = collectives.Exchange(operation, 100)
                self.assertEqual(exchange.cost(1, way), (0, 0), (operation, way))

    def test_the_first_way_sends_least(self):
        for operation, ways in collectives.WAYS.items():
            exchange = collectives.Exchange(operation, 64)
            for ranks in (2, 4, 64):
                least = min(exchange.cost(ranks, way).sent for way in ways)
                self.assertEqual(exchange.leanest(ranks).sent, least)

    def test_seconds_of_the_fastest_way(self):
        slow_start = collectives.Link("", 1.0, 1e3)
        slow_wire = collectives.Link("", 1e-9, 1.0)
        exchange = collectives.Exchange("all_reduce", 8)
        self.assertAlmostEqual(exchange.seconds(8, slow_start), 3 * (1 + 8e-3))
        self.assertAlmostEqual(exchange.seconds(8, slow_wire), 2 * 7 / 8 * 8, places=6)


LAYER = methods.Layer(heads=8, key_heads=4, dim=3, dim_v=5, batch=2, element_bytes=2)
TOKENS = 24


def value(formula, **letters):
    """The value of a formula as the page prints it: what stands side by side is multiplied."""
    words = re.findall(r"[A-Za-z]+|\d+|[-+/()]", formula)
    code = words[0]
    for left, right in zip(words, words[1:]):
        joined = (left.isalnum() or left == ")") and (right.isalnum() or right == "(")
        code += ("*" if joined else "") + right
    return eval(code, {"__builtins__": {}}, letters)


def numbers_in(*shape):
    count = 1
    for size in shape:
        count *= size
    return count


def state_of_half():
    """Numbers in c and C of one half of the key heads."""
    shape = (LAYER.batch, LAYER.key_heads // 2, LAYER.dim)
    return numbers_in(*shape), numbers_in(*shape, LAYER.dim_v)


class MethodsTest(unittest.TestCase):
    """A method's bytes and rounds, its printed formulas, and what is counted are the same."""

    def check(self, name, ranks, which, rounds, sent, layer=LAYER):
        method = methods.METHODS[name]
        cost = method.leanest(layer, TOKENS, ranks, [which])
        letters = dict(
            B=layer.batch, H=layer.key_heads, Hq=layer.heads, D=layer.dim, Dv=layer.dim_v,
            N=TOKENS, P=ranks, R=collectives.doublings(ranks), b=layer.element_bytes,
        )  # fmt: skip
        self.assertEqual((cost.rounds, round(cost.sent, 6)), (rounds, sent), (name, ranks, which))
        self.assertEqual(value(method.rounds[which], **letters), rounds)
        self.assertAlmostEqual(value(method.sent[which], **letters), sent)

    def test_bidirectional(self):
        c, values = state_of_half()
        for ranks in (2, 4):
            for which, vectors in (("forward", [c, c + values]), ("backward", [c + values])):
                net = Network(ranks)
                for size in vectors * 2:
                    halving_all_reduce(net, [[1] * size for _ in range(ranks)])
                rounds, sent = net.cost()
                self.check("lln", ranks, which, rounds, 4 * sent)

    def test_causal(self):
        c, values = state_of_half()
        for ranks in (2, 3, 4, 7, 8):
            for which, message in (("forward", c + values), ("backward", 2 * c + values)):
                net = Network(ranks)
                for _ in range(2):
                    doubling_scan(net, [[1] * message for _ in range(ranks)], lambda a, b: a)
                rounds, sent = net.cost()
                self.check("lln_causal", ranks, which, rounds, 4 * sent)

    def test_matching(self):
        """Count, mean and squared deviations of every head of q and of k."""
        for ranks in (2, 4):
            net = Network(ranks)
            moments = [1] * 3 * LAYER.batch * (LAYER.heads + LAYER.key_heads)
            doubling_all_gather(net, [moments] * ranks)
            rounds, sent = net.cost()
            self.check("matching", ranks, "forward", rounds, 8 * sent)
            self.check("matching", ranks, "backward", 0, 0)

    def test_ring(self):
        for ranks in (2, 3, 4):
            shape = (LAYER.batch, LAYER.key_heads, TOKENS // ranks)
            piece = numbers_in(*shape, LAYER.dim) + numbers_in(*shape, LAYER.dim_v)

            def next_rank(r, ranks=ranks):
                return (r + 1) % ranks

            for which in methods.PASSES:
                keys_sent = gradients_sent = rounds = 0
                keys = list(range(ranks))  # whose keys a rank has
                gradients = [{r} for r in keys]  # rows that have added to the gradients at a rank
                seen = [{r} for r in range(ranks)]
                for _ in range(ranks - 1):
                    keys = [keys[r - 1] for r in range(ranks)]
                    gradients = [gradients[r - 1] | {r} for r in range(ranks)]
                    keys_sent, gradients_sent = keys_sent + piece, gradients_sent + piece
                    rounds += 1
                    for r in range(ranks):
                        seen[r].add(keys[r])
                self.assertEqual(seen, [set(range(ranks))] * ranks)
                if which == "backward":  # all rows are in; the gradients go home to their keys
                    self.assertEqual([next_rank(r) for r in range(ranks)], keys)
                    self.assertEqual(gradients, [set(range(ranks))] * ranks)
                    gradients_sent, rounds = gradients_sent + piece, rounds + 1
                sent = 2 * keys_sent + (4 * gradients_sent if which == "backward" else 0)
                self.check("ring", ranks, which, rounds, sent)

    def test_ulysses(self):
        """Every number of q, k, v and o that is on another rank when heads are shared out."""
        for ranks in (2, 4):
            sent = [0] * ranks
            for heads, dim in ((8, 3), (4, 3), (4, 5), (8, 5)):
                for head in range(heads):
                    for token in range(TOKENS):
                        owner, worker = token * ranks // TOKENS, head * ranks // heads
                        if owner != worker:
                            sent[owner] += LAYER.batch * dim
            self.assertEqual(len(set(sent)), 1)
            for which in methods.PASSES:
                self.check("ulysses", ranks, which, 4 * (ranks - 1), 2 * sent[0])
            self.assertTrue(methods.METHODS["ulysses"].takes(LAYER, 4))
            self.assertFalse(methods.METHODS["ulysses"].takes(LAYER, 8))

    def test_delta_rule(self):
        for ranks in (2, 4):
            net = Network(ranks)
            state, transition = numbers_in(4, 3, 5), numbers_in(4, 3, 3)
            doubling_all_gather(net, [[1] * (state + transition)] * ranks)
            rounds, sent = net.cost()
            for which in methods.PASSES:
                self.check("delta_rule", ranks, which, rounds, 4 * sent)

    def test_tokens_count_where_they_should(self):
        for name, method in methods.METHODS.items():
            one, many = (method.leanest(LAYER, n, 4).sent for n in (TOKENS, 10 * TOKENS))
            self.assertAlmostEqual(many, 10 * one if name in ("ring", "ulysses") else one)


class HalvesTest(unittest.TestCase):
    def test_exchange_hides_behind_arithmetic(self):
        """Events one by one, of a processor and a network that each do one thing at a time."""
        for before, exchange, after in ((4, 1, 4), (1, 8, 1), (2, 4, 6), (6, 4, 2), (0, 3, 0)):
            processor = network = 0
            arrived = []
            for _ in range(2):
                processor += before / 2
                network = max(network, processor) + exchange / 2
                arrived.append(network)
            for arrival in arrived:
                processor = max(processor, arrival) + after / 2
            self.assertEqual(cluster.in_halves(before, exchange, after), processor)


class FitTest(unittest.TestCase):
    def test_exact_line(self):
        a, b = measured.fit([(n, 2e-4 + 3e-9 * n) for n in (64, 4096, 10**6)])
        self.assertAlmostEqual(a, 2e-4)
        self.assertAlmostEqual(b, 3e-9)

    def test_no_negative_latency(self):
        a, b = measured.fit([(100, 1e-6), (1000, 2e-5)])
        self.assertEqual(a, 0)
        self.assertGreater(b, 0)


class PageTest(unittest.TestCase):
    def setUp(self):
        folder = tempfile.TemporaryDirectory()
        self.addCleanup(folder.cleanup)
        self.root = pathlib.Path(folder.name)
        shutil.copytree(ROOT / "bench/results", self.root / "bench/results")
        (self.root / "docs").mkdir()
        shutil.copy(ROOT / page.PAGE, self.root / page.PAGE)

    def test_every_part_is_in_the_page_once(self):
        text = (ROOT / page.PAGE).read_text(encoding="utf-8")
        self.assertEqual(sorted(m[2] for m in page.BLOCK.finditer(text)), sorted(page.PARTS))

    def test_page_shows_every_figure(self):
        text = (ROOT / page.PAGE).read_text(encoding="utf-8")
        for path, content in page.files(self.root).items():
            if path.endswith(".svg"):
                self.assertTrue(f"({path.removeprefix('docs/')})" in text, path)
                root = xml.etree.ElementTree.fromstring(content)
                self.assertEqual(root.tag, "{http://www.w3.org/2000/svg}svg")

    def test_other_results_make_other_files(self):
        """Each file of results is behind a table or a figure."""
        before = page.files(self.root)
        names = {entry[0] for entry in page.RECORDED.values()} | {measured.RESULTS.split("/", 2)[2]}
        for name in sorted(names):
            path = self.root / "bench/results" / name
            text = path.read_text(encoding="utf-8")
            report = json.loads(text)
            for key in ("results", "operations", "attention"):
                for result in report.get(key, []):
                    result["median_ms"] *= 3
            path.write_text(json.dumps(report), encoding="utf-8")
            page.recorded.cache_clear()
            self.assertTrue(page.files(self.root) != before, name)
            path.write_text(text, encoding="utf-8")
        page.recorded.cache_clear()
        self.assertTrue(page.files(self.root) == before)


if __name__ == "__main__":
    unittest.main()
