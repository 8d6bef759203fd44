"""The family as torch optimizers: one Optimizer, thin named cells, one file for each backend."""

from mvngrad.optim.cells import (
    AdaBelief as AdaBelief,
    AdaBeliefW as AdaBeliefW,
    Adam as Adam,
    AdamW as AdamW,
    LaProp as LaProp,
    LaPropW as LaPropW,
    MVNGrad as MVNGrad,
    MVNGradW as MVNGradW,
)
from mvngrad.optim.checkpoint import convert_state_dict as convert_state_dict
from mvngrad.optim.masters import (
    get_master_state_dict as get_master_state_dict,
    load_master_state_dict as load_master_state_dict,
)
from mvngrad.optim.release import release_gradients as release_gradients
from mvngrad.optim.switch import from_adamw as from_adamw, to_adamw as to_adamw
