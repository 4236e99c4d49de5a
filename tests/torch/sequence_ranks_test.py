"""lln train with rows whose tokens are spread over ranks: equal to one process, alone and as a mesh
with data parallelism, and refused where it cannot be.

    sequence_ranks_test.py LLN_TORCH [unittest arguments]

SPDX-License-Identifier: Apache-2.0
"""

import pathlib
import signal
import unittest

import small_training  # first: it makes the next ones findable
from program import lln
from rank_jobs import SGD, Job, Ranks, settings

LISTOPS = small_training.CONFIG.replace('''task = "mqar"
tokens = 32
pairs = 4
vocabulary = 64
''', '''task = "listops"
longer_than = 30
shorter_than = 100
''')
MASKED = small_training.CONFIG.replace('''task = "mqar"
tokens = 32
pairs = 4
''', '''task = "random-tokens"
predict = "masked"
tokens = 40
''')


class Sequence(Ranks):
    def use(self, config):
        pathlib.Path(self.config).write_text(config, encoding="utf-8")

    def spread(self, ranks, together, run, values, **options):
        return self.train(ranks, run, values, more={
            rank: ("--sequence-ranks", str(together)) for rank in range(ranks)}, **options)

    def assert_same(self, values, *shapes):
        self.one("one", values)
        for ranks, together in shapes:
            run = f"{ranks}-{together}"
            done = self.spread(ranks, together, run, values)
            self.assertIn(f"on {ranks} ranks, {together} to a row", done.errors[0])
            self.assert_same_weights("one", run, 50, 1e-5)
            self.assert_close(self.losses(run), self.losses("one"), 1e-5)

    def test_next_tokens(self):
        # 32 tokens in blocks of 16: two pieces, and a third that is empty.
        self.assert_same(SGD, (2, 2), (3, 3), (4, 2))

    def test_masked_tokens(self):
        self.use(MASKED)
        self.assert_same((*SGD, "attention.matching=per_head", "model.positions=rotary"), (2, 2))

    def check_padded_rows(self, pooling):
        self.use(LISTOPS)
        self.assert_same((*SGD, "attention.matching=ema", f"model.pooling={pooling}",
                          "train.accumulate=2"), (2, 2))

    def test_mean_of_rows_with_padding(self):
        self.check_padded_rows("mean")

    def test_first_token_of_rows_with_padding(self):
        self.check_padded_rows("cls")

    def test_resumed_by_one(self):
        values = (*SGD, "train.steps=200", "train.log_every=1")
        self.one("one", values)
        job = self.job(2, "run", values, more={r: ("--sequence-ranks", "2") for r in range(2)})
        self.wait_for_step("run", 12)
        job.processes[1].send_signal(signal.SIGTERM)
        self.assertEqual(job.end().codes, [6, 6], job.errors)
        lln("train", "--resume", "--run", self.path("run"))
        self.assert_same_weights("one", "run", 200, 1e-4)

    def test_refusals(self):
        def refused(ranks, together, values, text, codes):
            job = self.job(ranks, "run", values, more={
                r: ("--sequence-ranks", str(together)) for r in range(ranks)}).end()
            self.assertTrue(set(job.codes) <= codes, (job.codes, job.errors))
            self.assertTrue(any(text in error for error in job.errors), job.errors)

        refused(3, 2, (), "--sequence-ranks 2: expected a divisor of the number of ranks, 3", {2})
        self.use(small_training.CONFIG.replace('name = "lln+diag"\ndiag_block = 16',
                                               'name = "softmax"'))
        refused(2, 2, (), "the attention of this model needs its sequences whole", {4, 8})
        error = lln("train", self.config, "--run", self.path("alone"), "--sequence-ranks", "2",
                    expect=2).stderr
        self.assertIn("expected a divisor of the number of ranks, 1", error)
        job = Job(2, [self.config, "--run", self.path("two"), *settings(())],
                  more={0: ("--sequence-ranks", "2")}).end()
        self.assertIn("--sequence-ranks 1 of rank 1: rank 0 has 2", job.errors[1])


class Lost(Ranks):
    def test_a_killed_rank_ends_all_and_the_run_goes_on(self):
        values = ("train.steps=300", "train.log_every=1")
        spread = {r: ("--sequence-ranks", "2") for r in range(2)}
        self.train(2, "whole", values, more=spread)
        for victim, step in ((1, 10), (0, 40)):
            job = Job(2, [self.config, "--resume", "--run", self.path("run"), *settings(values)],
                      timeout=6, more=spread)
            self.wait_for_step("run", step)
            job.processes[victim].kill()
            job.end(limit=60)
            self.assertEqual(job.codes[1 - victim], 8, job.errors)
            self.assertRegex(job.errors[1 - victim], rf"\brank {victim}\b")
        done = Job(2, ["--resume", "--run", self.path("run")], more=spread).end()
        self.assertEqual(done.codes, [0, 0], done.errors)
        self.assert_same_run("whole", "run", 300)


if __name__ == "__main__":
    unittest.main()
