"""The rules of claims.toml as functions of a target's result; importing this makes them known to `verdicts`."""

from mvngrad.lab.report.judges import (
    cifar_gap as cifar_gap,
    convergence as convergence,
    memory as memory,
    mnist as mnist,
    separation as separation,
    spike as spike,
    state_precision as state_precision,
    sweeps as sweeps,
    table1 as table1,
    table2 as table2,
    throughput as throughput,
    variance_gap as variance_gap,
)
