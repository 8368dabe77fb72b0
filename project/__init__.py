"""A PyTorch Lightning template for image classification on one device or many.

Three rooms: `model` is what is trained, `data` is on what, `run` is where and how. Importing any of them has no side effect.
"""
