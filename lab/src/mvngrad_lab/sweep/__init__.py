"""Many runs on many processes and machines: a queue in a database, workers that come and go, and their results.

    from mvngrad_lab.sweep import Sweep, grid

`grids` and `records` import neither torch nor optuna, so a report can use them; `database`, `queue`, `stages`,
`summary`, `worker` and `local_workers` are the engine, the only part of the lab that imports optuna.
"""

from mvngrad_lab.sweep.grids import Outcome, Results, Sweep, grid

__all__ = ["Outcome", "Results", "Sweep", "grid"]
