"""A monitor beside an optimizer: it looks at the state after a step, changes nothing, and seldom waits for a device."""

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

from mvngrad.diagnostics import reading
from mvngrad.diagnostics.measures import Corrections, finite, mean_noise, measured, update_sizes
from mvngrad.diagnostics.sample import SAMPLE, Sample, spread_out, with_state
from mvngrad.diagnostics.sinks import Record, Sink, sink_of
from mvngrad.diagnostics.spikes import GRADIENT_SPIKE, RECOVERED, SpikeTracker
from mvngrad.diagnostics.transfer import Transfer
from mvngrad.optim.gather import local
from mvngrad.optim.state import real

FOLLOWED, TENSORS = 512, 4
"""Coordinates, and the tensors they are drawn from, whose updates are followed at every step for spikes."""


class Monitor:
    """Records, every `every` steps, what regime an optimizer works in. Attached by step hooks, until `detach`.

    For each parameter group a record has quantiles of ``|m|/sqrt(s)`` or ``|m|/sqrt(v)`` (`ratio`), of the signal to
    noise they stand for (`snr`) and of the update over lr (`update`); the shares of coordinates in sign collapse, at
    the floor of epsilon, and dead; and the spikes of the gradient. What a cell's state does not tell is None: LaProp
    keeps no m. `mvngrad.diagnostics.diagnose` reads records.

    At a sampled step, a fixed random sample of `sample` coordinates of each group goes to the host, in one copy from
    each device. At every other step, the norm of the gradient and a few hundred coordinates of the state are noted on
    the device, and nothing is waited for; with `follow=False` not even that, and spikes are not recorded. Nothing
    happens while a CUDA graph is captured or a step compiled, and neither a replay nor a compiled step calls a hook:
    call `record` between them.

    Works with the optimizers of mvngrad, torch.optim.Adam and AdamW. Of sharded parameters the local part is seen.

    Args:
        optimizer: to be watched; neither its steps, nor its state_dict, nor its copies change.
        every: steps between records.
        sink: a path, for a file of JSON lines that is appended to, or a callable that takes a record (a dict).
        sample: how many coordinates of a group.
        seed: of their choice.
        follow: look for spikes at every step.
        spike: how many times the running median of its norm makes a gradient a spike.
        recovered: back under how many times its median an update must be for a spike to be over.

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
            reading.read(optimizer, group)  # raises for an optimizer that cannot be read
        self.optimizer, self.every, self.sink = optimizer, every, sink_of(sink)
        self.sample, self.seed, self.follow = sample, seed, follow
        self.spike, self.recovered = spike, recovered
        self._groups: list[_Group] = []
        counts = [float(state["step"]) for state in optimizer.state.values() if "step" in state]
        self.step = int(max(counts, default=0))
        """The calls of `step` so far; counted on from the state of an optimizer that has been loaded."""
        self._handle = optimizer.register_step_post_hook(self._after_step)

    def detach(self) -> None:
        """Leave the optimizer as it was found, and close the sink."""
        self._handle.remove()
        close: Callable[[], None] | None = getattr(self.sink, "close", None)
        if close is not None:
            close()

    def __enter__(self) -> Monitor:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.detach()

    def _after_step(self, optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        if torch.compiler.is_compiling() or capturing():
            return
        self.step += 1
        if self.follow:
            with torch.no_grad():
                for group in self._watched():
                    group.note()
        if self.step % self.every == 0:
            self.record()

    def record(self) -> Record | None:
        """Measure now and send the record to the sink; None if no parameter has been stepped."""
        transfer = Transfer()
        with torch.no_grad():
            pending = [group.put(transfer) for group in self._watched()]
        transfer.go()
        entries = [finish() for finish in pending if finish is not None]
        if not entries:
            return None
        self.step = max(self.step, *(entry["t"] for entry in entries))  # steps without hooks count too
        record = {"step": self.step, "optimizer": type(self.optimizer).__name__, "groups": entries}
        self.sink(record)
        return record

    def _watched(self) -> list[_Group]:
        del self._groups[len(self.optimizer.param_groups) :]  # of groups that are gone
        for number in range(len(self._groups), len(self.optimizer.param_groups)):
            self._groups.append(_Group(self, number, SpikeTracker(self.spike, self.recovered)))
        return self._groups


def capturing() -> bool:
    """Whether a CUDA graph is being captured; a process that has not used CUDA does not begin to here."""
    used: bool = torch.cuda.is_initialized()  # type: ignore[no-untyped-call]
    return used and torch.cuda.is_current_stream_capturing()


class _Group:
    """One parameter group: its sample, and what was noted since the last record."""

    def __init__(self, monitor: Monitor, number: int, spikes: SpikeTracker) -> None:
        self.monitor, self.number, self.spikes = monitor, number, spikes
        self.members: list[Tensor] = []
        self.sample = self.followed = Sample([], 0, 0)
        self.norms: list[Tensor] = []
        """For each step, the norms of the gradients of all parameters that had one."""
        self.steps: list[int] = []
        self.rows: list[Tensor | None] = []
        """For each step, the followed coordinates of what the update is computed from."""
        self.names: dict[str, str] = {}
        self.norm_dtype: torch.dtype | None = None
        self.devices: set[torch.device] = set()

    @property
    def group(self) -> dict[str, Any]:
        group: dict[str, Any] = self.monitor.optimizer.param_groups[self.number]
        return group

    def renew(self) -> None:
        """Draw the samples anew if parameters came, went, or took their first step."""
        members = with_state(self.monitor.optimizer, self.group)
        if len(members) != len(self.members) or any(a is not b for a, b in zip(members, self.members, strict=True)):
            self.members = members
            self.sample = Sample(members, self.monitor.sample, self.monitor.seed)
            self.followed = Sample(spread_out(members, TENSORS), FOLLOWED, self.monitor.seed)
            self.rows = [None] * len(self.rows)  # other coordinates than those that follow
            how = reading.read(self.monitor.optimizer, self.group)
            self.names = {slot: name for slot, name in how.names.items() if slot == "u" or not how.rule.momentum_last}
            self.devices = {local(param).device for param in members}
            dtypes = {param.dtype for param in members}
            short = dtypes & {torch.float16, torch.bfloat16}  # in which a norm may overflow
            self.norm_dtype = torch.float32 if short and dtypes <= short | {torch.float32} else None

    def note(self) -> None:
        """Keep the norm of this step's gradient, and the followed coordinates, where they are."""
        optimizer = self.monitor.optimizer
        if not self.members or not all(optimizer.state.get(param) for param, *_ in self.followed.pieces):
            self.renew()
        grads = [real(local(param.grad)) for param in self.group["params"] if param.grad is not None]
        if not grads:
            return
        self.steps.append(self.monitor.step)
        norms = torch._foreach_norm(grads, 2, dtype=self.norm_dtype)
        if len(self.devices) > 1:
            home = next((device for device in self.devices if device.type != "cpu"), norms[0].device)
            norms = tuple(norm.to(home, non_blocking=True) for norm in norms)
        norm = torch.stack(norms)
        scale = getattr(optimizer, "grad_scale", None)  # GradScaler leaves its division to a fused step
        self.norms.append(norm if scale is None else norm / scale.to(norm.device))
        rows = [row for name in self.names.values() for row in self.followed.take(optimizer, name)]
        self.rows.append(torch.cat(rows) if rows else None)

    def put(self, transfer: Transfer) -> Callable[[], Record] | None:
        """Send what a record needs on its way; what is returned makes the record once it has arrived."""
        self.renew()
        if not self.sample.pieces:
            return None
        optimizer, group = self.monitor.optimizer, self.group
        how = reading.read(optimizer, group)
        lr = transfer.put([group["lr"]]) if isinstance(group["lr"], Tensor) else None
        steps = transfer.put(self.sample.steps(optimizer))
        values = {slot: transfer.put(self.sample.take(optimizer, name)) for slot, name in how.names.items()}
        noted = [row for row in self.rows if row is not None]
        norms = transfer.put(self.norms)
        rows, ages = transfer.put(noted), transfer.put(self.followed.steps(optimizer))
        there = [row is not None for row in self.rows]
        when, counts = self.steps, [norm.numel() for norm in self.norms]
        self.norms, self.rows, self.steps = [], [], []

        def finish() -> Record:
            t, state = steps(), {slot: value() for slot, value in values.items()}
            corrections = Corrections.at(how.hyper, t, self.sample.spread)
            sizes = iter(self._followed_sizes(rows(), sum(there), ages()))
            each_norm = iter(norms().tolist())
            seen = [math.hypot(*islice(each_norm, count)) for count in counts]
            for step, norm, known in zip(when, seen, there, strict=True):
                self.spikes.add(step, norm, next(sizes) if known else None)
            hyper, rule = how.hyper, how.rule
            finite_norms = sorted(norm for norm in seen if finite(norm) is not None)
            middle = finite_norms[len(finite_norms) // 2] if finite_norms else None
            return {
                "group": self.number,
                "cell": rule.name,
                "lr": finite(lr().item() if lr else float(hyper.lr)),
                "beta1": hyper.beta1,
                "beta2": hyper.beta2,
                "eps": hyper.eps,
                "floor": hyper.floor if rule.centered else 0.0,
                "t": int(t.min()),
                "mean_noise": mean_noise(hyper.mean_decay),
                "m": "kept" if "m" in rule.state_names else "rebuilt" if rule.lean else None,
                "coordinates": self.sample.population,
                **measured(rule, hyper, corrections, state),
                "gradient_norm": {"median": middle, "max": finite_norms[-1]} if finite_norms else None,
                "gradients_not_finite": len(seen) - len(finite_norms),
                "spikes": self.spikes.pop_spikes(),
            }

        return finish

    def _followed_sizes(self, row: Tensor, count: int, ages: Tensor) -> list[float]:
        """The root mean square of the followed coordinates' updates, for each of the last `count` steps."""
        if not count or not row.numel():
            return [0.0] * count
        how, names = reading.read(self.monitor.optimizer, self.group), list(self.names)
        values = row.view(count, len(names), -1)
        back = torch.arange(count - 1, -1, -1, dtype=torch.float64, device="cpu")[:, None]
        corrections = Corrections.at(how.hyper, (ages[None] - back).clamp(min=1), self.followed.spread)
        state = {name: values[:, i] for i, name in enumerate(names)}
        sizes: list[float] = update_sizes(how.rule, how.hyper, corrections, state).square().mean(1).sqrt().tolist()
        return sizes
