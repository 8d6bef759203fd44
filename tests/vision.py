"""torchvision, if it is installed."""

import sys
import warnings
from importlib import import_module

import pytest
import torch

DECLARED = []  # operators stay declared as long as these objects live


def torchvision(name="torchvision"):
    """A module of torchvision; skips the test if it is not installed."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # about parts of it that are not used here
        try:
            return import_module(name)
        except ImportError:
            pytest.skip("needs torchvision")
        except RuntimeError:  # its compiled part is for a torch with CUDA: its Python works if two operators have names
            for module in [module for module in sys.modules if module.split(".")[0] == "torchvision"]:
                del sys.modules[module]
            DECLARED.append(torch.library.Library("torchvision", "DEF"))
            for operator in ("nms", "qnms"):
                DECLARED[-1].define(f"{operator}(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
            return import_module(name)
