"""Copy a model with weights that are worse on purpose: noise on each matrix, as a bad conversion would leave it.

    python examples/worse_weights.py MODEL_FOLDER NEW_FOLDER [STRENGTH]

STRENGTH is the noise's standard deviation as a share of the matrix's own.
"""

import shutil
import sys
from pathlib import Path


def worsen(model: Path, copy: Path, strength: float = 0.1) -> None:
    """Write the copy, with noise of this strength on each matrix; the same noise every time."""
    import torch
    from safetensors.torch import load_file, save_file

    shutil.rmtree(copy, ignore_errors=True)
    shutil.copytree(model, copy)
    noise = torch.Generator().manual_seed(0)
    for file in copy.glob("*.safetensors"):
        weights = load_file(file)
        for weight in weights.values():
            if weight.ndim == 2:
                spread = strength * weight.float().std()
                weight += (spread * torch.randn(weight.shape, generator=noise)).to(weight.dtype)
        save_file(weights, file, metadata={"format": "pt"})


if __name__ == "__main__":
    worsen(Path(sys.argv[1]), Path(sys.argv[2]), float(sys.argv[3]) if len(sys.argv) > 3 else 0.1)
