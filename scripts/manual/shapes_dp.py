"""P5, what DataParallel (DP) does to a batch: a linear layer on random vectors prints its shapes in every replica.

    python scripts/manual/shapes_dp.py

Two GPUs: 30 = 15 + 15, in replicas of one process; only the outputs come together, on GPU 0. Without a GPU nothing splits.
The template prints the same of its own network with `python scripts/train.py --strategy dp --explain`.
"""

import torch
from command_line import make_parser
from torch import nn
from torch.utils.data import DataLoader

INPUT_SIZE, OUTPUT_SIZE, BATCH_SIZE, DATA_SIZE = 5, 2, 30, 90


class Model(nn.Module):
    """Print what one replica sees."""

    def __init__(self):
        super().__init__()
        self.fc = nn.Linear(INPUT_SIZE, OUTPUT_SIZE)

    def forward(self, vectors):
        """Map vectors (B, 5) to (B, 2)."""
        output = self.fc(vectors)
        shapes = f"input {list(vectors.shape)} output {list(output.shape)}"
        print(f"In model: {shapes} on {vectors.device}\n", end="", flush=True)  # one write: lines of two replicas do not mix
        return output


def main():
    make_parser(__doc__).parse_args()
    torch.manual_seed(0)
    vectors = torch.randn(DATA_SIZE, INPUT_SIZE)  # on the CPU; each batch goes to the GPU
    loader = DataLoader(vectors, BATCH_SIZE, shuffle=True)
    # step 3: check the accelerator; this program runs on the CPU too
    gpus = list(range(torch.cuda.device_count())) if torch.cuda.is_available() else []
    device = torch.device("cuda", 0) if gpus else torch.device("cpu")
    print(f"{len(gpus)} GPUs: " + ("the batch splits" if len(gpus) > 1 else "nothing splits"))

    model = Model()
    model.to(device)  # step 9: to the first GPU, before it is wrapped
    model = nn.DataParallel(model, device_ids=gpus)  # step 10: wrap
    for batch in loader:
        batch = batch.to(device)  # step 11: the batch to the device
        output = model(batch)  # step 8: DataParallel splits the batch here
        print(f"Outside: input {list(batch.shape)} output {list(output.shape)}", flush=True)


if __name__ == "__main__":
    main()
