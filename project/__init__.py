"""A PyTorch Lightning template for image classification on one device or many.

Three rooms: `model` is what is trained, `data` is on what, `run` is where and how. Importing it has one effect: Lightning
knows the strategy "dp" from then on.
"""

from project.run import strategies as strategies
