"""Rows and settings of experiments/trained, for the program and for the page.

SPDX-License-Identifier: Apache-2.0
"""

from dataclasses import dataclass, replace

BLOCK, MIX = 16, 0.5
TEMPERATURES = (0.5, 0.71, 1.41, 2)
SCALES = (0.5, 1.5, 2, 2.5, 3, 4)  # alpha = beta; 1 is mode none
MODES = ("none", "paper", "per_head", "exact", "entropy")
MAPS = {
    "elu": "ELU",
    "relu": "ReLU",
    "softplus": "softplus",
    "power2": "power 2",
    "quadratic": "quadratic",
}
BLOCKS = (8, 32, 64)  # beside BLOCK
SEEDS = (0, 1, 2)
STAGES = ("outputs", "swapped", "recovered")
SETTINGS = {
    "tokens": 128,  # of each paragraph
    "calibration": 64,  # paragraphs
    "held_out": 128,
    "training": 2048,
    "analyzed": 16,  # of those that are held out, by the instruments
    "steps": 150,  # of the recovery
    "batch": 8,  # paragraphs of a step
    "learning_rate": 1e-4,
}


@dataclass(frozen=True)
class Idea:
    """What brings LLN + Diag nearer to softmax + Diag at linear cost, as the zoo has it.

    Attributes:
        label: On the page.
        rates: Learning rate of each parameter that it adds.
        untrained: Whether it changes the attention before its parameters have learned anything.
    """

    label: str
    rates: dict
    untrained: bool = False


# Of what an idea adds, which has the steps of the recovery to get anywhere: by them one number of a
# head can move by about 1.3, a number of a map by 0.06. Chosen beforehand.
NUMBERS, MATRIX = 0.02, 0.001
FEATURES = {"wide": 128, "rotations": 128, "narrow": 32}  # of a head, in place of its channels
IDEAS = {
    "gate": Idea("gated", {"gate": MATRIX}),
    "two-sided": Idea("two-sided features", {}, True),
    "contrast": Idea("contrast of the chain", {"chain": NUMBERS}, True),
    "centred": Idea("centred keys", {}, True),
    "mix": Idea("learned mix", {"mix": NUMBERS}),
    "scales": Idea("learned alpha, beta", {"log_alpha": NUMBERS, "log_beta": NUMBERS}),
    "wide": Idea("128 features", {"wide": MATRIX}, True),
    "rotations": Idea("128 features, frozen", {}, True),
    "narrow": Idea("32 features", {"wide": MATRIX}, True),
}


@dataclass(frozen=True)
class Row:
    """An attention in place of softmax.

    Attributes:
        name: Of its records.
        label: On the page.
        long: What reads all keys; nothing in Diag alone.
        diag: Whether it is mixed with Diag, half and half.
        mode: How alpha and beta of LLN are calibrated; nothing where they are given.
        factor: alpha = beta of LLN, the temperature of softmax.
        block: Tokens of a block of Diag.
        ideas: Of IDEAS, what is added to it.
    """

    name: str
    label: str
    long: str
    diag: bool = False
    mode: str = ""
    factor: float = 1.0
    block: int = BLOCK
    ideas: tuple = ()


def with_diag(row, block=BLOCK):
    """The same beside Diag."""
    begin, _, end = row.name.partition("-")
    name, label = f"{begin}+diag" + (f"-{end}" if end else ""), f"{row.label} + Diag"
    if block != BLOCK:
        name, label = f"{name}-block={block}", f"{label}, block {block}"
    return Row(name, label, row.long, True, row.mode, row.factor, block)


def lln(mode):
    label = "LLN (alpha = beta = 1)" if mode == "none" else f"LLN ({mode})"
    return Row(f"lln-{mode}", label, "lln", mode=mode)


def rows():
    """Name -> row, in the order of the page."""
    softmax = Row("softmax", "softmax", "softmax")
    uniform = Row("uniform", "uniform: the mean of all values", "uniform")
    scaled = [Row(f"lln-alpha={x:g}", f"LLN (alpha = beta = {x:g})", "lln", factor=x)
              for x in SCALES]  # fmt: skip
    maps = [Row(name, label, name) for name, label in MAPS.items()]
    long = [*map(lln, MODES), *scaled, *maps]
    found = [
        softmax,
        *(Row(f"softmax-t={t:g}", f"softmax, temperature {t:g}", "softmax", factor=t)
          for t in TEMPERATURES),
        *long,
        uniform,
        with_diag(softmax),
        *map(with_diag, long),
        with_diag(uniform),
        Row("diag", "Diag alone", "", True),
        *(Row(f"diag-block={b}", f"Diag alone, block {b}", "", True, block=b) for b in BLOCKS),
        *(with_diag(lln("entropy"), b) for b in BLOCKS),
    ]  # fmt: skip
    return {row.name: row for row in found}


# What is trained afterwards, the most important first.
RECOVERED = (
    "diag",
    "lln+diag-entropy",
    "lln+diag-none",
    "softmax+diag",
    "elu+diag",
    "lln+diag-per_head",
    "lln-entropy",
    "lln-none",
    "relu+diag",
    "quadratic+diag",
    "elu",
    "softplus+diag",
    "power2+diag",
    "relu",
    "uniform+diag",
)


def with_ideas(name, *ideas):
    """A row with what is added to it."""
    row = rows()[name]
    label = ", ".join([row.label, *(IDEAS[idea].label for idea in ideas)])
    return replace(row, name="-".join([name, *ideas]), label=label, ideas=ideas)


def idea_rows():
    """Name -> row, in the order in which they are trained: one idea each, then those of the row
    lln+diag-all of experiments/beyond, and the same without the one that does harm alone."""
    found = [
        with_ideas("lln+diag-entropy", "gate"),
        with_ideas("softmax+diag", "gate"),
        *(with_ideas("lln+diag-entropy", idea) for idea in IDEAS if idea != "gate"),
        with_ideas("lln+diag-entropy", "gate", "contrast", "centred", "wide"),
        with_ideas("lln+diag-entropy", "gate", "centred", "wide"),
    ]
    return {row.name: row for row in found}


def untrained(row):
    """Whether the row without any training is another one than that without its ideas."""
    return not row.ideas or any(IDEAS[idea].untrained for idea in row.ideas)


def rates(row):
    """Learning rate of each parameter that the row's ideas add."""
    return {name: rate for idea in row.ideas for name, rate in IDEAS[idea].rates.items()}


def jobs(names=None, stages=STAGES, seeds=SEEDS):
    """[(stage, row, seed)] in the order in which they are run; only a recovery is random."""
    all_rows = rows() | idea_rows()
    swapped = [row for row in all_rows.values() if untrained(row)]
    found = [(stage, row, 0) for stage in STAGES[:2] for row in swapped]
    trained = (*RECOVERED, *idea_rows())
    found += [("recovered", all_rows[name], seed) for seed in SEEDS for name in trained]
    return [
        (stage, row, seed)
        for stage, row, seed in found
        if stage in stages
        and (names is None or row.name in names)
        and (stage != "recovered" or seed in seeds)
    ]


def settings_of(stage, row, settings=SETTINGS):
    """What a record must have to be of this plan."""
    own = {"long": row.long, "diag": row.diag, "mode": row.mode, "factor": row.factor}
    if row.diag:
        own |= {"block": row.block, "mix": MIX}
    if row.ideas:
        own |= {"ideas": list(row.ideas)}
        if stage == "recovered":
            own |= {"rates": rates(row)}
    recovery = ("training", "steps", "batch", "learning_rate")
    shared = {k: v for k, v in settings.items() if stage == "recovered" or k not in recovery}
    return own | shared
