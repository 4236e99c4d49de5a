"""A sequence gives the same outputs and gradients in a padded batch as alone."""

# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

import pytest
import torch
from torch import Tensor
from transformers import PreTrainedModel

import hf_models
from lln_attention import calibrate, hf

hf.register()

LENGTHS = [23, 9, 17, 1]
TOLERANCE = 1e-5  # of the largest number


def _hidden(model: PreTrainedModel, batch: dict[str, Tensor]) -> Tensor:
    return model(**batch, output_hidden_states=True).hidden_states[-1]


def _alone(batch: dict[str, Tensor], row: int) -> dict[str, Tensor]:
    counts = batch["attention_mask"][row].bool()
    return {name: x[row : row + 1, counts] for name, x in batch.items() if name != "attention_mask"}


def _gradients(model: PreTrainedModel) -> dict[str, Tensor]:
    """Of every module with parameters of its own, as one vector; they are no more after this."""
    found = {}
    for name, module in model.named_modules():
        own = [x.grad.flatten() for x in module.parameters(recurse=False) if x.grad is not None]
        if own:
            found[name] = torch.cat(own)
    model.zero_grad()
    return found


def _assert_close(found: Tensor, expected: Tensor, what: str = "rows") -> None:
    error = (found - expected).abs().max() / expected.abs().max()
    assert error <= TOLERANCE, f"{what}: {error:.2e}"


def _assert_same_gradients(found: dict[str, Tensor], expected: dict[str, Tensor]) -> None:
    """Each module by its own largest number, since those of q and k are smaller than others. A
    bias goes with its weights: that of keys is a sum of terms that nearly cancel.
    """
    assert found.keys() == expected.keys()
    for name, x in found.items():
        _assert_close(x, expected[name], name)


@pytest.mark.parametrize("implementation", ["lln", "lln_diag"])
@pytest.mark.parametrize(
    ("name", "matching", "left"),
    [
        *((name, mode, left) for name in ("bert", "roberta") for mode in ("per_head", "entropy")
          for left in (False, True)),
        # Its windows and rotations count from the first place of a row: no padding on the left.
        ("modernbert", "per_head", False),
        *((name, mode, left) for name in hf_models.CAUSAL for mode in ("none", "calibrated")
          for left in (False, True)),
    ],
)  # fmt: skip
def test_padded_batch_equals_sequences_alone(
    name: str, matching: str, left: bool, implementation: str
) -> None:
    model = hf_models.make(name)
    model.set_attn_implementation(implementation)
    if matching == "calibrated":
        calibrate(model, [hf_models.padded(LENGTHS, seed=2)], mode="per_head").apply(model)
        hf.configure(model, diag_block=8)
    else:
        hf.configure(model, matching=matching, diag_block=8)
    batch = hf_models.padded(LENGTHS, left=left)
    if name == "modernbert":
        del batch["position_ids"]
    counts = batch["attention_mask"].bool()
    weights = torch.randn(*counts.shape, 32, generator=torch.Generator().manual_seed(7))

    together = _hidden(model, batch)
    (together * weights)[counts].sum().backward()
    gradients = _gradients(model)
    for row in range(len(LENGTHS)):
        alone = _hidden(model, _alone(batch, row))[0]
        (alone * weights[row, counts[row]]).sum().backward()
        _assert_close(together[row, counts[row]], alone)
    _assert_same_gradients(gradients, _gradients(model))


@pytest.mark.parametrize("implementation", ["lln", "lln_diag"])
def test_images_do_not_depend_on_their_neighbours(implementation: str) -> None:
    model = hf_models.make("vit")
    model.set_attn_implementation(implementation)
    images = torch.randn(3, 3, 224, 224, generator=torch.Generator().manual_seed(2))
    together = model(images).last_hidden_state
    assert together.shape[1] == 197
    weights = torch.randn(together.shape, generator=torch.Generator().manual_seed(3))
    (together * weights).sum().backward()
    gradients = _gradients(model)
    for row in range(3):
        alone = model(images[row : row + 1]).last_hidden_state
        (alone * weights[row]).sum().backward()
        _assert_close(together[row : row + 1], alone)
    _assert_same_gradients(gradients, _gradients(model))


def test_images_with_a_mask_equal_shorter_ones() -> None:
    """Patches that do not count act as if they were not there."""
    model = hf_models.make("vit")
    model.set_attn_implementation("lln")
    images = torch.randn(2, 3, 224, 224, generator=torch.Generator().manual_seed(2))
    mask = torch.ones(2, 197, dtype=torch.long)
    mask[1, 150:] = 0
    first = model(images, attention_mask=mask).last_hidden_state[1, :150]
    images[1, :, 13 * 16 :] = 100.0  # the last row of patches, tokens 183 to 196
    second = model(images, attention_mask=mask).last_hidden_state[1, :150]
    assert torch.equal(first, second)
    everything = model(images).last_hidden_state[1, :150]
    assert not torch.allclose(everything, first, atol=1e-2)


@pytest.mark.parametrize("name", ["bert", "llama"])
def test_padding_is_not_taken_for_tokens(name: str) -> None:
    """The equalities above would hold for attention that looks at nothing, too."""
    model = hf_models.make(name)
    model.set_attn_implementation("lln")
    hf.configure(model, matching="none")
    batch = hf_models.padded(LENGTHS)
    masked = _hidden(model, batch)
    del batch["attention_mask"]
    unmasked = _hidden(model, {"input_ids": batch["input_ids"]})
    row = 1 if name == "bert" else 0
    difference = (masked[row, :9] - unmasked[row, :9]).abs().max()
    assert (difference > 1e-2) == (name == "bert")  # a causal row never sees padding after it
