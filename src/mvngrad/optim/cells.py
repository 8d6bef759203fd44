"""The four cells, each with coupled and, under a name ending in W, decoupled weight decay."""

from __future__ import annotations

from mvngrad.optim.optimizer import RuleOptimizer
from mvngrad.rule import ADABELIEF, ADAM, LAPROP, MVNGRAD


class MVNGrad(RuleOptimizer):
    r"""Momentum on variance-normalized gradients: normalize by the standard deviation, then apply momentum.

    .. math::
        m_t &= \beta_1 m_{t-1} + (1-\beta_1) g_t \\
        s_t &= \beta_2 s_{t-1} + (1-\beta_2) (g_t - m_t)^2 + \varepsilon_s \\
        z_t &= g_t \,/\, (\sqrt{s_t / (1-\beta_2^t)} + \varepsilon) \\
        u_t &= \beta_1 u_{t-1} + (1-\beta_1) z_t \\
        x_t &= x_{t-1} - \eta\, u_t / (1-\beta_1^t)

    >>> import torch
    >>> weight = torch.nn.Parameter(torch.tensor([3.0, -2.0]))
    >>> optimizer = MVNGrad([weight], lr=0.1)
    >>> for _ in range(100):
    ...     optimizer.zero_grad()
    ...     loss = weight.square().sum()
    ...     loss.backward()
    ...     optimizer.step()
    >>> bool(loss < 0.1)
    True

    Reference: Patitucci and Mokhtari, *Adaptive Optimization via Momentum on Variance-Normalized Gradients*.
    """

    rule = MVNGRAD


class MVNGradW(MVNGrad):
    r"""`MVNGrad` with decoupled weight decay: before the step, :math:`x \leftarrow (1 - \eta\lambda) x`.

    >>> import torch
    >>> model = torch.nn.Linear(4, 1)
    >>> optimizer = MVNGradW(model.parameters(), lr=1e-3, weight_decay=0.1)
    >>> model(torch.ones(2, 4)).sum().backward()
    >>> optimizer.step()
    """

    decoupled = True


class LaProp(RuleOptimizer):
    r"""Normalize by the root mean square, then apply momentum.

    .. math::
        v_t &= \beta_2 v_{t-1} + (1-\beta_2) g_t^2 \\
        z_t &= g_t \,/\, (\sqrt{v_t / (1-\beta_2^t)} + \varepsilon) \\
        u_t &= \beta_1 u_{t-1} + (1-\beta_1) z_t \\
        x_t &= x_{t-1} - \eta\, u_t / (1-\beta_1^t)

    The learning rate is outside the average, as in the MVN-Grad paper. LaProp's authors put it inside, which
    differs under a schedule.

    >>> import torch
    >>> optimizer = LaProp([torch.nn.Parameter(torch.ones(3))], lr=1e-3)

    Reference: Ziyin, Wang and Ueda, *LaProp: Separating Momentum and Adaptivity in Adam*.
    """

    rule = LAPROP


class LaPropW(LaProp):
    r"""`LaProp` with decoupled weight decay: before the step, :math:`x \leftarrow (1 - \eta\lambda) x`."""

    decoupled = True


class AdaBelief(RuleOptimizer):
    r"""Momentum, normalized by the standard deviation.

    .. math::
        m_t &= \beta_1 m_{t-1} + (1-\beta_1) g_t \\
        s_t &= \beta_2 s_{t-1} + (1-\beta_2) (g_t - m_t)^2 + \varepsilon_s \\
        x_t &= x_{t-1} - \frac{\eta}{1-\beta_1^t}\, m_t \,/\, (\sqrt{s_t / (1-\beta_2^t)} + \varepsilon)

    Without the rectification that adabelief-pytorch turns on by default.

    >>> import torch
    >>> optimizer = AdaBelief([torch.nn.Parameter(torch.ones(3))], lr=1e-3)

    Reference: Zhuang et al., *AdaBelief Optimizer: Adapting Stepsizes by the Belief in Observed Gradients*.
    """

    rule = ADABELIEF


class AdaBeliefW(AdaBelief):
    r"""`AdaBelief` with decoupled weight decay: before the step, :math:`x \leftarrow (1 - \eta\lambda) x`."""

    decoupled = True


class Adam(RuleOptimizer):
    r"""Momentum, normalized by the root mean square; for comparison.

    .. math::
        m_t &= \beta_1 m_{t-1} + (1-\beta_1) g_t \\
        v_t &= \beta_2 v_{t-1} + (1-\beta_2) g_t^2 \\
        x_t &= x_{t-1} - \frac{\eta}{1-\beta_1^t}\, m_t \,/\, (\sqrt{v_t / (1-\beta_2^t)} + \varepsilon)

    It equals torch.optim.Adam: for real parameters and an lr that is a number, bit for bit on the eager and foreach
    paths.

    >>> import torch
    >>> optimizer = Adam([torch.nn.Parameter(torch.ones(3))], lr=1e-3)

    Reference: Kingma and Ba, *Adam: A Method for Stochastic Optimization*.
    """

    rule = ADAM


class AdamW(Adam):
    r"""`Adam` with decoupled weight decay: before the step, :math:`x \leftarrow (1 - \eta\lambda) x`.

    Reference: Loshchilov and Hutter, *Decoupled Weight Decay Regularization*.
    """

    decoupled = True
