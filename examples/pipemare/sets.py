"""The data: handwritten digits and source text, both shipped inside Python packages."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import torch
from sklearn.datasets import load_digits
from torch import Tensor

LETTERS = "\n" + "".join(chr(code) for code in range(32, 127))
LENGTH = 32  # letters in a row
Rows = tuple[Tensor, Tensor]


def digits() -> dict[str, Rows]:
    """1,797 images of 8x8 pixels: 997 to train on, 300 to choose settings by, 500 for the reported figures."""
    images, labels = load_digits(return_X_y=True)
    order = torch.randperm(len(images), generator=torch.Generator().manual_seed(2024))
    x = (torch.tensor(images, dtype=torch.float32).view(-1, 1, 8, 8)[order] - 4.9) / 6.0
    y = torch.tensor(labels)[order]
    return {"train": (x[:997], y[:997]), "choose": (x[997:1297], y[997:1297]), "test": (x[1297:], y[1297:])}


def text(length: int = LENGTH) -> dict[str, Rows]:
    """Modules of the standard library, as rows of ``length`` letters and the letters that follow them."""
    folder = Path(os.__file__).parent
    names = {"train": ["argparse.py", "dataclasses.py", "inspect.py", "pathlib.py", "typing.py", "ast.py"],
             "choose": ["statistics.py"], "test": ["tarfile.py"]}
    sets = {}
    for use, files in names.items():
        source = "".join((folder / name).read_text("utf-8") for name in files if (folder / name).is_file())
        letters = torch.tensor([LETTERS.index(letter) for letter in source if letter in LETTERS])
        rows = letters[: (len(letters) - 1) // length * length + 1]
        sets[use] = rows[:-1].view(-1, length), rows[1:].view(-1, length)
    return sets


def batches(rows: Rows, size: int, draw: torch.Generator) -> Iterator[Rows]:
    """Full minibatches of shuffled rows, without end; what is left at the end of an epoch is dropped."""
    while True:
        for own in torch.randperm(len(rows[0]), generator=draw).split(size):
            if len(own) == size:
                yield rows[0][own], rows[1][own]
