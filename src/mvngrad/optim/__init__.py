"""The rule as torch optimizers. The files, in the order in which to read them:

    cells.py                 the classes: an equation and one line of code each
    optimizer.py, inputs.py  a step: collect the tensors of a group, and hand them to a backend
    backends/                four functions step(inputs, hyper): eager, foreach, cpu, cuda
    formats.py               state as floats or 8-bit codes, rounding at random, master weights
    options.py               which options are valid, alone and together
    checkpoint.py            state_dict: check it as a whole, then copy it
    convert.py, switch.py    a state_dict in another format, or from and to AdamW
    masters.py, release.py   float32 weights of bfloat16 models; gradients that are freed in backward
    tensors.py, private.py   attributes of tensors, and private names of torch, each in one place

CONTRIBUTING.md follows one step through them.
"""

from mvngrad.optim.cells import AdaBelief, AdaBeliefW, Adam, AdamW, LaProp, LaPropW, MVNGrad, MVNGradW
from mvngrad.optim.convert import convert_state_dict
from mvngrad.optim.masters import get_master_state_dict, load_master_state_dict
from mvngrad.optim.release import release_gradients
from mvngrad.optim.switch import from_adamw, to_adamw

__all__ = [
    "AdaBelief", "AdaBeliefW", "Adam", "AdamW", "LaProp", "LaPropW", "MVNGrad", "MVNGradW", "convert_state_dict",
    "from_adamw", "get_master_state_dict", "load_master_state_dict", "release_gradients", "to_adamw",
]  # fmt: skip
