"""The family as torch optimizers: one Optimizer, thin named cells, one file for each backend."""

from mvngrad.optim.cells import AdaBelief, AdaBeliefW, Adam, AdamW, LaProp, LaPropW, MVNGrad, MVNGradW
from mvngrad.optim.convert import convert_state_dict
from mvngrad.optim.masters import get_master_state_dict, load_master_state_dict
from mvngrad.optim.release import release_gradients
from mvngrad.optim.switch import from_adamw, to_adamw

__all__ = [
    "AdaBelief", "AdaBeliefW", "Adam", "AdamW", "LaProp", "LaPropW", "MVNGrad", "MVNGradW", "convert_state_dict",
    "from_adamw", "get_master_state_dict", "load_master_state_dict", "release_gradients", "to_adamw",
]  # fmt: skip
