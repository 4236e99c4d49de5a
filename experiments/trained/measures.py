"""What experiments/trained measures: a model with another attention against itself with softmax.

SPDX-License-Identifier: Apache-2.0
"""

import copy
import functools
import hashlib
import pathlib
import sys

import attentions
import ideas
import torch
from harness import trained_plan
from harness.record import rounded, thinned

import lln_attention
from lln_attention.recovery import Checkpoint, State, compare, recover
from lln_attention.text_batches import TextBatches

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[2] / "examples/python"))

import minilm

PART = "dev"  # of STS-B
CALIBRATED = ("paper", "per_head", "exact", "entropy")
NUMBERS = {"entropy": "entropy_nats", "gap": "spectral_gap", "log_variance": "log_var"}


class Teacher:
    """The model with softmax, which computes the hidden states of a paragraph once."""

    def __init__(self, model):
        self.model, self.known = model, {}

    @torch.no_grad()
    def __call__(self, *, input_ids, attention_mask, output_hidden_states):
        keys = [ids.numpy().tobytes() for ids in input_ids]
        if new := [i for i, key in enumerate(keys) if key not in self.known]:
            states = self.model(
                input_ids=input_ids[new],
                attention_mask=attention_mask[new],
                output_hidden_states=output_hidden_states,
            ).hidden_states
            for at, i in enumerate(new):
                self.known[keys[i]] = [layer[at].clone() for layer in states]
        found = zip(*(self.known[key] for key in keys), strict=True)
        return States(tuple(torch.stack(layer) for layer in found))


class States:
    def __init__(self, hidden_states):
        self.hidden_states = hidden_states


def scales_of(calibration, layer):
    if calibration is None:
        return None
    found = calibration.layer(layer)
    return torch.tensor(found.alpha), torch.tensor(found.beta)


class Bench:
    """The model, its texts and all measures.

    Args:
        text: File with one paragraph a line.
        sts: Folder with the files of STS-B.
        settings: As SETTINGS of harness.trained_plan.
    """

    def __init__(self, text, sts, settings):
        self.settings = settings
        self.model, self.tokenizer = minilm.load()
        self.model.requires_grad_(False)
        self.teacher = Teacher(self.model)
        parts = [settings[name] for name in ("calibration", "held_out", "training")]
        texts = minilm.paragraphs(text, self.tokenizer, sum(parts), settings["tokens"])
        self.digest = hashlib.sha256("\n".join(texts).encode()).hexdigest()[:12]
        self.training = texts[sum(parts[:2]) :]
        fixed = self.batches(texts, 0)
        self.calibration = fixed.of_texts(texts[: parts[0]])
        held_out = texts[parts[0] : sum(parts[:2])]
        self.held_out = fixed.of_texts(held_out)
        self.analyzed = fixed.of_texts(held_out[: settings["analyzed"]])
        self.score = minilm.sts_b_score(sts, PART, self.tokenizer)
        self.calibrated = functools.cache(self._calibrated)
        self.seen = functools.cache(self._seen)
        self.instruments = functools.cache(self._instruments)

    def batches(self, texts, seed):
        """Of paragraphs of equal length, in the order of the seed; none is held out of them."""
        settings = self.settings
        return TextBatches(
            self.tokenizer, texts, settings["tokens"], settings["batch"], 0, seed, "cpu"
        )

    def _calibrated(self, mode):
        return lln_attention.calibrate(self.model, self.calibration, mode=mode)

    def _seen(self):
        return attentions.inputs(self.model, self.analyzed)

    def added(self, row, seed):
        """What the row's ideas add to each layer, by name, and alpha and beta beside it."""
        own = {}
        for index, (name, q, *_) in enumerate(self.seen()):
            drawn = seed * len(self.seen()) + index
            own[name] = ideas.Added(row.ideas, q.shape[1], q.shape[3], drawn)
        if row.mode in CALIBRATED and set(row.ideas) & set(ideas.MAPPING):
            layers = attentions.inputs(self.model, self.calibration)
            return own, ideas.calibrate(layers, own, row.mode, self.settings["batch"])
        return own, self.calibration_of(row)

    def calibration_of(self, row):
        return self.calibrated(row.mode) if row.mode in CALIBRATED else None

    def student(self, row, seed=0):
        """A copy of the model with the row's attention; the seed is of what its ideas draw."""
        model = copy.deepcopy(self.model)
        added, calibration = self.added(row, seed) if row.ideas else ({}, self.calibration_of(row))
        attentions.swap(model, row, calibration, added)
        return model

    def quality(self, model):
        """Against softmax on the paragraphs that are held out, and on STS-B."""
        found = compare("", model, self.teacher, self.held_out, {"sts": self.score(model)})
        return {
            "hidden_errors": found.hidden_errors,
            "mean_cosine": found.mean_cosine,
            "min_cosine": found.min_cosine,
            **found.scores,
        }

    @torch.no_grad()
    def gates(self, model):
        """Shares that gates give what reads all keys, of every head of every layer: mean over the
        tokens that are held out, and their deviation; nothing where there are none."""
        gates = [x.gate for x in model.modules() if hasattr(x, "gate")]
        shares = {gate: [] for gate in gates}
        hooks = [
            gate.register_forward_hook(lambda own, _, o: shares[own].append(o.sigmoid()))
            for gate in gates
        ]
        for batch in self.held_out if gates else ():
            model(**batch)
        for hook in hooks:
            hook.remove()
        own = [torch.cat(shares[gate]).flatten(0, 1) for gate in gates]
        if not own:
            return {}
        return {
            "gate_mean": [x for some in own for x in some.mean(0).tolist()],
            "gate_deviation": [x for some in own for x in some.std(0).tolist()],
        }

    def scales(self, mode, layer):
        """alpha and beta of the heads of a layer, where the mode is one of a calibration."""
        return scales_of(self.calibrated(mode) if mode in CALIBRATED else None, layer)

    def _instruments(self, long, mode, factor):
        """Of what reads all keys, by the names of a row: a number for every head of every layer."""
        found = {name: [] for name in NUMBERS}
        for index, (name, q, k, _) in enumerate(self.seen()):
            given = {}
            if long == "lln":
                heads = torch.full((q.shape[1],), float(factor))
                alpha, beta = self.scales(mode, name) or (heads, heads)
                given = {"alpha": alpha, "beta": beta}
            if long == "softmax":
                q = q / factor
            for head in lln_attention.analyze(q, k, kinds=(long,), layer=index, **given):
                for own, theirs in NUMBERS.items():
                    found[own].append(head[theirs])
        return found

    @torch.no_grad()
    def outputs(self, row):
        """How far what a head gives is from what it gives with softmax, from the same q, k and v:
        |difference| / |output| for every head of every layer."""
        softmax, found = trained_plan.rows()["softmax"], []
        added, calibration = self.added(row, 0) if row.ideas else ({}, self.calibration_of(row))
        for name, q, k, v in self.seen():
            scales = scales_of(calibration, name)
            x = q.new_zeros(len(q), q.shape[2], q.shape[1] * q.shape[3])  # a new gate reads nothing
            o = attentions.read(row, q, k, v, None, scales, added.get(name), x)
            target = attentions.read(softmax, q, k, v)
            errors = [(x.square().sum((0, 2, 3))) for x in (o - target, target)]
            found += (errors[0] / errors[1]).sqrt().tolist()
        return rounded({"output_errors": found}, 5)

    def swapped(self, row):
        """Without any training."""
        found = self.quality(self.student(row))
        if row.long not in ("", "uniform") and not row.ideas:
            found["instruments"] = rounded(self.instruments(row.long, row.mode, row.factor), 5)
        return rounded(found, 7)

    def recovered(self, row, seed, progress=None):
        """After a training towards the hidden states with softmax."""
        model = self.student(row, seed).requires_grad_(True)
        options = {name: self.settings[name] for name in ("learning_rate", "steps")}
        rates = trained_plan.rates(row).items()
        options["learning_rates"] = {f"trained_idea.{name}": rate for name, rate in rates}
        state = State(0, [], 0.0, [], {}, {})
        batches = self.batches(self.training, seed)
        recover(
            model, self.teacher, batches, state, Checkpoint(None, {}), options["steps"], options,
            progress,
        )  # fmt: skip
        losses = [hidden for hidden, _ in state.losses]
        points = thinned([[i + 1, loss] for i, loss in enumerate(losses)], 15)
        found = self.quality(model) | {"losses": points, "training_seconds": state.seconds}
        if row.ideas:
            found |= ideas.learned(model) | self.gates(model)
        return rounded(found, 7)
