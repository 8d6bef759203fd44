"""A monitor that reads an optimizer's state after its steps: it changes nothing and rarely waits for a device."""

from __future__ import annotations

import math
import os
from collections.abc import Callable
from itertools import islice
from types import TracebackType
from typing import Any

import torch
from torch import Tensor
from torch.optim.optimizer import Optimizer

from mvngrad.diagnostics.measures import Corrections, finite_or_none, mean_noise, measure_sample, update_sizes
from mvngrad.diagnostics.sinks import Record, Sink, make_sink
from mvngrad.diagnostics.spikes import GRADIENT_SPIKE, RECOVERED, SpikeTracker
from mvngrad.diagnostics.state import SAMPLE, Sample, Transfer, get_stepped_params, pick_large_params, view_group
from mvngrad.optim.tensors import get_local, view_as_real

FOLLOWED, TENSORS = 512, 4
"""Coordinates whose updates are followed at every step for spikes, and the number of tensors they are drawn from."""


class Monitor:
    """Records every `every` steps what regime an optimizer works in, through a step hook, until `detach`.

    A record has for each parameter group: quantiles of ``|m|/sqrt(s)`` or ``|m|/sqrt(v)`` (`ratio`), of the
    signal-to-noise ratio that this implies (`snr`) and of the update over lr (`update`); the shares of coordinates in
    sign collapse, at the floor of epsilon, and dead; and the spikes of the gradient. Values that a cell's state does
    not give are None: LaProp keeps no m. `mvngrad.diagnostics.diagnose` reads records.

    At a recorded step, a fixed random sample of `sample` coordinates of each group is copied to the host, in one copy
    from each device. At every other step, the norm of the gradient and a few hundred coordinates of the state are kept
    on the device, without waiting; with `follow=False` nothing is done, and spikes are not recorded. While a CUDA graph
    is captured or a step is compiled the monitor does nothing. Replays and compiled steps call no hook: call `record`
    between them.

    Works with the optimizers of mvngrad, torch.optim.Adam and AdamW. For sharded parameters it reads the local part.

    Args:
        optimizer: the optimizer; its steps, state_dict and copies are not changed.
        every: steps between records.
        sink: a path of a file to which JSON lines are appended, or a callable that takes a record (a dict).
        sample: the number of coordinates sampled from a group.
        seed: the seed of the sample.
        follow: look for spikes at every step.
        spike: a gradient norm above this multiple of its running median is a spike.
        recovered: a spike is over when the update is below this multiple of its median.

    >>> from mvngrad import MVNGrad
    >>> weight = torch.nn.Parameter(torch.zeros(1000))
    >>> optimizer, records = MVNGrad([weight], betas=(0.9, 0.99)), []
    >>> noise = torch.Generator().manual_seed(0)
    >>> with Monitor(optimizer, every=200, sink=records.append):
    ...     for _ in range(400):
    ...         weight.grad = 2 + torch.randn(1000, generator=noise)  # a signal of twice the noise
    ...         optimizer.step()
    >>> [record["step"] for record in records]
    [200, 400]
    >>> round(records[-1]["groups"][0]["snr"]["0.5"], 1)
    2.0
    """

    def __init__(
        self,
        optimizer: Optimizer,
        every: int = 50,
        sink: str | os.PathLike[str] | Sink = "mvngrad-monitor.jsonl",
        *,
        sample: int = SAMPLE,
        seed: int = 0,
        follow: bool = True,
        spike: float = GRADIENT_SPIKE.multiple,
        recovered: float = RECOVERED,
    ) -> None:
        for name, value, least in (("every", every, 1), ("sample", sample, 1)):
            if value < least:
                raise ValueError(f"Monitor: {name}={value!r} is invalid; it must be at least {least}")
        for group in optimizer.param_groups:
            view_group(optimizer, group)  # raises if the optimizer's state is unknown
        self.optimizer, self.every, self.sink = optimizer, every, make_sink(sink)
        self.sample, self.seed, self.follow = sample, seed, follow
        self.spike, self.recovered = spike, recovered
        self._groups: list[_Group] = []
        counts = [float(state["step"]) for state in optimizer.state.values() if "step" in state]
        self.step = int(max(counts, default=0))
        """The number of steps so far, including those in a loaded state."""
        self._handle = optimizer.register_step_post_hook(self._after_step)

    def detach(self) -> None:
        """Remove the hook from the optimizer and close the sink."""
        self._handle.remove()
        close: Callable[[], None] | None = getattr(self.sink, "close", None)
        if close is not None:
            close()

    def __enter__(self) -> Monitor:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.detach()

    def _after_step(self, optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        if torch.compiler.is_compiling() or _is_capturing():
            return
        self.step += 1
        if self.follow:
            with torch.no_grad():
                for group in self._get_groups():
                    group.note_step()
        if self.step % self.every == 0:
            self.record()

    def record(self) -> Record | None:
        """Measure now and send the record to the sink; None if no parameter has been stepped."""
        transfer = Transfer()
        with torch.no_grad():
            pending = [group.start_entry(transfer) for group in self._get_groups()]
        transfer.copy_to_host()
        entries = [finish() for finish in pending if finish is not None]
        if not entries:
            return None
        self.step = max(self.step, *(entry["t"] for entry in entries))  # includes steps that called no hook
        record = {"step": self.step, "optimizer": type(self.optimizer).__name__, "groups": entries}
        self.sink(record)
        return record

    def _get_groups(self) -> list[_Group]:
        del self._groups[len(self.optimizer.param_groups) :]  # groups that were removed
        for number in range(len(self._groups), len(self.optimizer.param_groups)):
            self._groups.append(_Group(self, number, SpikeTracker(self.spike, self.recovered)))
        return self._groups


def _is_capturing() -> bool:
    """Whether a CUDA graph is being captured. Does not initialize CUDA."""
    initialized: bool = torch.cuda.is_initialized()  # type: ignore[no-untyped-call]
    return initialized and torch.cuda.is_current_stream_capturing()


class _Group:
    """One parameter group: its samples, and what was noted since the last record."""

    def __init__(self, monitor: Monitor, number: int, spikes: SpikeTracker) -> None:
        self.monitor, self.number, self.spikes = monitor, number, spikes
        self.params: list[Tensor] = []
        self.sample = self.followed = Sample([], 0, 0)
        self.steps: list[int] = []
        """The noted steps."""
        self.norms: list[Tensor] = []
        """For each noted step, the gradient norms of all parameters that had one."""
        self.rows: list[Tensor | None] = []
        """For each noted step, the state from which the update of the followed coordinates is computed."""
        self.names: dict[str, str] = {}
        """The state names of these rows."""
        self.norm_dtype: torch.dtype | None = None
        self.devices: set[torch.device] = set()

    @property
    def group(self) -> dict[str, Any]:
        group: dict[str, Any] = self.monitor.optimizer.param_groups[self.number]
        return group

    def refresh_samples(self) -> None:
        """Draw new samples if parameters were added or removed, or took their first step."""
        params = get_stepped_params(self.monitor.optimizer, self.group)
        if len(params) == len(self.params) and all(a is b for a, b in zip(params, self.params, strict=True)):
            return
        self.params = params
        self.sample = Sample(params, self.monitor.sample, self.monitor.seed)
        self.followed = Sample(pick_large_params(params, TENSORS), FOLLOWED, self.monitor.seed)
        self.rows = [None] * len(self.rows)  # the noted rows are of other coordinates
        view = view_group(self.monitor.optimizer, self.group)
        self.names = {k: name for k, name in view.names.items() if k == "u" or not view.rule.momentum_last}
        self.devices = {get_local(param).device for param in params}
        dtypes = {param.dtype for param in params}
        half = dtypes & {torch.float16, torch.bfloat16}  # a norm can overflow in these
        self.norm_dtype = torch.float32 if half and dtypes <= half | {torch.float32} else None

    def note_step(self) -> None:
        """Keep this step's gradient norm and the followed coordinates on their device."""
        optimizer = self.monitor.optimizer
        if not self.params or not all(optimizer.state.get(param) for param, *_ in self.followed.pieces):
            self.refresh_samples()
        grads = [view_as_real(get_local(param.grad)) for param in self.group["params"] if param.grad is not None]
        if not grads:
            return
        self.steps.append(self.monitor.step)
        norms = torch._foreach_norm(grads, 2, dtype=self.norm_dtype)
        if len(self.devices) > 1:
            device = next((device for device in self.devices if device.type != "cpu"), norms[0].device)
            norms = tuple(norm.to(device, non_blocking=True) for norm in norms)
        norm = torch.stack(norms)
        scale = getattr(optimizer, "grad_scale", None)  # GradScaler leaves the division to a fused step
        self.norms.append(norm if scale is None else norm / scale.to(norm.device))
        rows = [row for name in self.names.values() for row in self.followed.load_rows(optimizer, name)]
        self.rows.append(torch.cat(rows) if rows else None)

    def start_entry(self, transfer: Transfer) -> Callable[[], Record] | None:
        """Add what a record needs to the transfer; the returned function makes the entry after it."""
        self.refresh_samples()
        if not self.sample.pieces:
            return None
        optimizer, group = self.monitor.optimizer, self.group
        view = view_group(optimizer, group)
        get_lr = transfer.add([group["lr"]]) if isinstance(group["lr"], Tensor) else None
        get_t = transfer.add(self.sample.step_counts(optimizer))
        get_state = {k: transfer.add(self.sample.load_rows(optimizer, name)) for k, name in view.names.items()}
        get_norms = transfer.add(self.norms)
        get_rows = transfer.add([row for row in self.rows if row is not None])
        get_followed_t = transfer.add(self.followed.step_counts(optimizer))
        has_row = [row is not None for row in self.rows]
        steps, counts = self.steps, [norm.numel() for norm in self.norms]
        self.norms, self.rows, self.steps = [], [], []

        def make_entry() -> Record:
            t, state = get_t(), {letter: values() for letter, values in get_state.items()}
            corrections = Corrections.at(view.hyper, t, self.sample.per_coordinate)
            sizes = iter(self._followed_sizes(get_rows(), sum(has_row), get_followed_t()))
            parameter_norms = iter(get_norms().tolist())
            norms = [math.hypot(*islice(parameter_norms, count)) for count in counts]
            for step, norm, known in zip(steps, norms, has_row, strict=True):
                self.spikes.add(step, norm, next(sizes) if known else None)
            hyper, rule = view.hyper, view.rule
            finite = sorted(norm for norm in norms if math.isfinite(norm))
            return {
                "group": self.number,
                "cell": rule.name,
                "lr": finite_or_none(get_lr().item() if get_lr else float(hyper.lr)),
                "beta1": hyper.beta1,
                "beta2": hyper.beta2,
                "eps": hyper.eps,
                "floor": hyper.floor if rule.centered else 0.0,
                "t": int(t.min()),
                "mean_noise": mean_noise(hyper.mean_decay),
                "m": "kept" if "m" in rule.state_names else "rebuilt" if rule.lean else None,
                "coordinates": self.sample.population,
                **measure_sample(rule, hyper, corrections, state),
                "gradient_norm": {"median": finite[len(finite) // 2], "max": finite[-1]} if finite else None,
                "gradients_not_finite": len(norms) - len(finite),
                "spikes": self.spikes.pop_spikes(),
            }

        return make_entry

    def _followed_sizes(self, row: Tensor, count: int, t: Tensor) -> list[float]:
        """The root mean square update of the followed coordinates at each of the last `count` steps."""
        if not count or not row.numel():
            return [0.0] * count
        view = view_group(self.monitor.optimizer, self.group)
        values = row.view(count, len(self.names), -1)
        ago = torch.arange(count - 1, -1, -1, dtype=torch.float64, device="cpu")[:, None]
        corrections = Corrections.at(view.hyper, (t[None] - ago).clamp(min=1), self.followed.per_coordinate)
        state = {letter: values[:, i] for i, letter in enumerate(self.names)}
        sizes: list[float] = update_sizes(view.rule, view.hyper, corrections, state).square().mean(1).sqrt().tolist()
        return sizes
