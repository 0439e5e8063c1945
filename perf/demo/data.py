"""The handwritten digits that ship with scikit-learn, split and fed in a reproducible order."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor

if TYPE_CHECKING:
    from collections.abc import Iterator

HELD_OUT = 0.2
IMAGE_SIZE = 8
NUM_CLASSES = 10
BATCH_SIZE = 64
# Pixels count the dark points of a 4 x 4 field.
MAX_PIXEL = 16.0


class Digits(NamedTuple):
    """Images `[number, 1, 8, 8]` between 0 and 1 and their labels `[number]`, split into training and held-out ones."""

    train_images: Tensor
    train_labels: Tensor
    test_images: Tensor
    test_labels: Tensor

    @property
    def num_batches(self) -> int:
        """Batches in one pass over the training images; a last incomplete batch is left out."""
        return len(self.train_labels) // BATCH_SIZE

    def to(self, device: torch.device, dtype: torch.dtype) -> Digits:
        """The same digits on `device`, images in `dtype`."""
        return Digits(*(x.to(device, dtype if x.is_floating_point() else x.dtype) for x in self))

    def batches(self, seed: int) -> Iterator[tuple[Tensor, Tensor]]:
        """Endless training batches, shuffled anew for each pass.

        The order comes from a CPU generator, so that runs on any device and in any dtype see the same batches.
        """
        generator = torch.Generator().manual_seed(seed)
        while True:
            order = torch.randperm(len(self.train_labels), generator=generator).to(self.train_labels.device)
            for indices in order[: self.num_batches * BATCH_SIZE].split(BATCH_SIZE):
                yield self.train_images[indices], self.train_labels[indices]


def load(seed: int) -> Digits:
    """All 1,797 digits, a fifth of each class held out; images in float64 on the CPU."""
    # Imported here, as what needs the sizes alone runs without scikit-learn.
    from sklearn.datasets import load_digits
    from sklearn.model_selection import train_test_split

    pixels, classes = load_digits(return_X_y=True)
    images = torch.as_tensor(pixels).view(-1, 1, IMAGE_SIZE, IMAGE_SIZE) / MAX_PIXEL
    labels = torch.as_tensor(classes)
    train, test = train_test_split(range(len(labels)), test_size=HELD_OUT, random_state=seed, stratify=classes)
    return Digits(images[train], labels[train], images[test], labels[test])
