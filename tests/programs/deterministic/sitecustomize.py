"""On PYTHONPATH, it makes a program's cuDNN deterministic: Python imports this module at its start."""

import torch

torch.backends.cudnn.deterministic = True
