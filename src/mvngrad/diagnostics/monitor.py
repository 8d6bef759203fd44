"""The Monitor, a step hook that records measures of an optimizer's state. It changes nothing."""

from __future__ import annotations

import math
import os
from itertools import islice
from numbers import Integral, Real
from typing import Any, NamedTuple
from uuid import uuid4

import torch
from torch import Tensor
from torch.optim.optimizer import Optimizer

from mvngrad.diagnostics.measures import (
    COARSELY_RESOLVED,
    RESOLVED,
    correct_bias,
    finite_or_none,
    measure_sample,
    update_sizes,
)
from mvngrad.diagnostics.records import Record
from mvngrad.diagnostics.sinks import Sink, check_sink, close_sink, make_sink
from mvngrad.diagnostics.spikes import GRADIENT_SPIKE, RECOVERED, SpikeTracker
from mvngrad.diagnostics.state import SAMPLE, GroupView, Sample, copy_to_host, get_extent, pick_large_params, view_group
from mvngrad.optim.inputs import Sums
from mvngrad.optim.optimizer import RuleOptimizer
from mvngrad.optim.tensors import get_local, resolve_bits, view_as_real

FOLLOWED_COORDINATES, FOLLOWED_TENSORS = 512, 4
"""How many coordinates' updates are followed at every step for spikes, and from how many tensors they are drawn."""

FEWER_STEPS = 0.1
"""Share of coordinates that may have taken fewer steps than a group's `t`: those of a layer that is hardly used."""


class Monitor:
    """Record the regime that an optimizer works in, every `every` steps, through a step hook, until `close`.

    A record has for each parameter group: quantiles of ``|m|/sqrt(s)`` or ``|m|/sqrt(v)`` (`ratio`), of the
    signal-to-noise ratio that this implies (`snr`) and of the update over lr (`update`); the shares of coordinates in
    sign collapse, at the floor of epsilon, and dead; some of these for each parameter (`layers`); and the spikes of
    the gradient. It also has the mean of what was given to `log`, such as the loss. Values that an optimizer's
    state does not give are None: LaProp keeps no m. `mvngrad.diagnostics.diagnose` reads records.

    At a recorded step, a fixed random sample of `sample` coordinates of each group is copied to the host, in one copy
    from each device. At every other step, the norm of the gradient and a few hundred coordinates of the state are
    stored on the device, without waiting (our CUDA kernel writes the norm and the size of the whole update itself);
    with `follow=False` nothing is done, and spikes are not recorded. While a CUDA graph is captured or a step is
    compiled the monitor does nothing. Replays and compiled steps call no hook: call `record` between them.

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

    Raises:
        OSError: the file of `sink` cannot be written. Its folder is made if needed, and the file by the first record.

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
        every: int = 100,
        sink: str | os.PathLike[str] | Sink = "mvngrad-monitor.jsonl",
        *,
        sample: int = SAMPLE,
        seed: int = 0,
        follow: bool = True,
        spike: float = GRADIENT_SPIKE.multiple,
        recovered: float = RECOVERED,
    ) -> None:
        for name, value in (("every", every), ("sample", sample)):
            if not isinstance(value, Integral) or value < 1:
                raise ValueError(f"Monitor: {name}={value!r} is invalid; it must be an integer of at least 1")
        for name, bound in (("spike", spike), ("recovered", recovered)):
            if not isinstance(bound, Real) or not 0 < bound < math.inf:
                raise ValueError(f"Monitor: {name}={bound!r} is invalid; it must be a finite number above 0")
        if not hasattr(optimizer, "param_groups"):
            raise TypeError(f"Monitor: a {type(optimizer).__name__} is not an optimizer; pass the optimizer itself")
        for group in optimizer.param_groups:
            view_group(optimizer, group)  # raises if the optimizer's state is unknown
        self.optimizer, self.every, self.sink = optimizer, every, make_sink(sink)
        check_sink(self.sink)
        self.sample, self.seed, self.follow = sample, seed, follow
        self.spike, self.recovered = spike, recovered
        self._groups: list[_GroupMonitor] = []
        self._logged: dict[str, list[Tensor]] = {}
        self.start = self.step = 0
        """The number of steps so far, including those in a loaded state; `start` is that before its own first."""
        self._has_recorded = False
        self._count_loaded_steps(optimizer)
        self.id = uuid4().hex[:8]
        """In each record, so that records of several Monitors in one file are noticed."""
        self.closed = self._in_hook = False
        self._handle = optimizer.register_step_post_hook(self._after_step)
        self._load_handle = optimizer.register_load_state_dict_post_hook(self._count_loaded_steps)
        self._sums_source: RuleOptimizer | None = None
        """The optimizer, if its kernel can write the sums that spikes are found by."""
        if follow and isinstance(optimizer, RuleOptimizer):
            optimizer.sum_readers += 1
            self._sums_source = optimizer

    def log(self, **values: float | Tensor) -> None:
        """Add values of this step, such as `loss=loss`, to the next record, which has the mean of each name.

        Values that are not finite are counted instead. Does not wait for a device. After `close` it does nothing.
        """
        if self.closed:
            return  # no record will empty the lists
        for name, value in values.items():
            if isinstance(value, Tensor) and (value.numel() != 1 or value.is_complex()):
                what, remedy = f"{value.dtype} of shape {tuple(value.shape)}", "mean" if value.numel() != 1 else "abs()"
                raise ValueError(f"Monitor.log: {name} must be one real number, not {what}; log its {remedy}")
            if not isinstance(value, (Real, Tensor)):
                raise ValueError(f"Monitor.log: {name} must be one real number, not {value!r}")
            number = value.detach() if isinstance(value, Tensor) else torch.tensor(float(value), dtype=torch.float32)
            # A copy: a replayed CUDA graph writes each loss to the same address
            self._logged.setdefault(name, []).append(number.to(torch.float32, copy=True).reshape(()))

    def get_sums(self, group: int) -> Sums:
        """The sums that the last step of a group wrote; empty without a kernel that writes them."""
        return [] if self._sums_source is None else self._sums_source.get_sums(group)

    def close(self) -> None:
        """End: record nothing more, remove the hook from the optimizer and close the sink.

        Can be called again, and from anywhere, also by the sink or by a callback that the record is logged to. There
        the optimizer is going through its hooks, and this one stays, without effect, until the next `close`.
        """
        self.closed = True
        self._load_handle.remove()
        if not self._in_hook:
            self._handle.remove()
        if self._sums_source is not None:
            self._sums_source.sum_readers -= 1
            self._sums_source = None
        close_sink(self.sink)

    def __enter__(self) -> Monitor:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def _count_loaded_steps(self, optimizer: Optimizer) -> None:
        """Start from the step counts in the state, unless there is a record: then `record` takes them into account."""
        counts = [float(state["step"]) for state in optimizer.state.values() if "step" in state]
        count = int(max(counts, default=0))
        if count > self.step and not self._has_recorded:
            self.start = self.step = count

    def _after_step(self, optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        if self.closed or torch.compiler.is_compiling() or _is_capturing():
            return
        self._in_hook = True
        try:
            self.step += 1
            if self.follow:
                for group in self._get_groups():
                    group.note_step()
            if self.step % self.every == 0:
                self.record()
        finally:
            self._in_hook = False

    def record(self) -> Record | None:
        """Measure now and send the record to the sink; None if no parameter has been stepped.

        Raises a RuntimeError after `close`.
        """
        if self.closed:
            raise RuntimeError("this Monitor is closed; make a new one")
        with torch.no_grad():
            collected = [(group, lists) for group in self._get_groups() if (lists := group.collect())]
            rows = iter(copy_to_host([tensors for _, lists in collected for tensors in lists.values()]))
        made = [group.make_entry({name: next(rows) for name in lists}) for group, lists in collected]
        entries = [entry for entry in made if entry is not None]
        if not entries:
            return None
        self.step = max(self.step, *(entry["t"] for entry in entries))  # includes steps that called no hook
        record: Record = {
            "step": self.step,
            "start": self.start,
            "monitor": self.id,
            "optimizer": type(self.optimizer).__name__,
            "groups": entries,
        }
        record |= self._pop_logged()
        self._has_recorded = True
        self.sink(record)
        return record

    def _pop_logged(self) -> Record:
        """Make the part of a record on what was given to `log`, and forget it; empty if there was nothing."""
        joined = {k: torch.stack([v.to(values[0].device) for v in values]) for k, values in self._logged.items()}
        finite = {name: values[values.isfinite()] for name, values in joined.items()}
        means = {name: finite_or_none(values.mean().item()) for name, values in finite.items()}
        not_finite = {name: lost for name, values in joined.items() if (lost := len(values) - len(finite[name]))}
        self._logged = {}
        return {k: v for k, v in {"logged": means, "logged_not_finite": not_finite}.items() if v}

    def _get_groups(self) -> list[_GroupMonitor]:
        count = len(self.optimizer.param_groups)
        if len(self._groups) != count:
            del self._groups[count:]  # groups that were removed
            for number in range(len(self._groups), count):
                self._groups.append(_GroupMonitor(self, number, SpikeTracker(self.spike, self.recovered)))
        return self._groups


def _is_capturing() -> bool:
    """Whether a CUDA graph is being captured. Does not initialize CUDA."""
    initialized: bool = torch.cuda.is_initialized()  # type: ignore[no-untyped-call]
    return initialized and torch.cuda.is_current_stream_capturing()


def _is_frozen(param: Tensor) -> bool:
    """Whether no step changes a parameter any more; its state is that of its last step."""
    return not param.requires_grad and param.grad is None


def _find_norms(grads: list[Tensor]) -> tuple[Tensor, ...]:
    """The norm of each gradient; in float32 or wider, because it can overflow in 16 bits."""
    if all(grad.dtype.itemsize > 2 for grad in grads):
        return torch._foreach_norm(grads, 2)
    if any(grad.dtype == torch.float64 for grad in grads):  # one dtype for all would be too narrow for these
        return torch._foreach_norm([grad.float() if grad.dtype.itemsize <= 2 else grad for grad in grads], 2)
    return torch._foreach_norm(grads, 2, dtype=torch.float32)


class _NotedStep(NamedTuple):
    """What stays on the device from a step until the next record."""

    step: int
    sums: Sums
    """The sums that the step wrote, if a kernel took it; the rest is for the other steps."""
    norms: Tensor | None = None
    """The gradient norm of each parameter that had a gradient."""
    row: Tensor | None = None
    """The state that the updates of the followed coordinates are computed from; None if others are followed now."""


class _GroupMonitor:
    """What a Monitor knows of one parameter group: its samples, and the steps since the last record."""

    def __init__(self, monitor: Monitor, number: int, spikes: SpikeTracker) -> None:
        self.monitor, self.number, self.spikes = monitor, number, spikes
        self.params: list[Tensor] = []
        self.extents: list[tuple[int, torch.device]] = []
        self.sample = self.followed = Sample([], 0, 0)
        self.layer_names: list[str] = []
        """Of the sampled parameters: those of named_parameters(), if the optimizer has them, else number and shape."""
        self.noted: list[_NotedStep] = []
        self.names: dict[str, str] = {}
        """The state names in the rows of the noted steps."""
        self.devices: set[torch.device] = set()

    @property
    def group(self) -> Any:
        return self.monitor.optimizer.param_groups[self.number]

    @property
    def view(self) -> GroupView:
        return view_group(self.monitor.optimizer, self.group)

    def refresh_samples(self) -> None:
        """Draw new samples if parameters were added, removed, frozen, resized or moved, or took their first step."""
        state = self.monitor.optimizer.state
        params = [param for param in self.group["params"] if state.get(param) and not _is_frozen(param)]
        same = len(params) == len(self.params) and all(a is b for a, b in zip(params, self.params, strict=True))
        extents = list(map(get_extent, params))
        if same and extents == self.extents:
            return
        self.params, self.extents = params, extents
        self.sample = Sample(params, self.monitor.sample, self.monitor.seed)
        shapes = [f"{i}: {'x'.join(map(str, param.shape))}" for i, param in enumerate(self.group["params"])]
        given = self.group.get("param_names") or []
        given = given if len(given) == len(shapes) else shapes  # params may have been changed by hand
        names = dict(zip(self.group["params"], given, strict=True))
        self.layer_names = [names[piece.param] for piece in self.sample.pieces]
        self.followed = Sample(pick_large_params(params, FOLLOWED_TENSORS), FOLLOWED_COORDINATES, self.monitor.seed)
        self.noted = [noted._replace(row=None) for noted in self.noted]  # they are of other coordinates
        view = self.view
        letters = ["u"] if view.rule.momentum_last else list(view.names)  # what an update is computed from
        self.names = {letter: view.names[letter] for letter in letters}
        self.devices = {get_local(param).device for param in params}

    def note_step(self) -> None:
        """Store this step's sums, or its gradient norms and followed coordinates, on their device."""
        if sums := self.monitor.get_sums(self.number):
            self.noted.append(_NotedStep(self.monitor.step, sums))
        else:
            self._note_without_sums()

    @torch.no_grad()
    def _note_without_sums(self) -> None:
        optimizer = self.monitor.optimizer
        release = getattr(optimizer, "gradient_release", None)
        if release is not None and release.has_member_in(self.number):
            return  # backward has freed gradients, so the norm would be too small
        if not self.params or not self.followed.is_current(optimizer):
            self.refresh_samples()
        grads = [param.grad for param in self.group["params"] if param.grad is not None]
        if not grads:
            return
        grads = [view_as_real(resolve_bits(get_local(grad))) for grad in grads]
        norms = _find_norms(grads)
        if len(self.devices) > 1:
            device = next((device for device in self.devices if device.type != "cpu"), norms[0].device)
            norms = tuple(norm.to(device, non_blocking=True) for norm in norms)
        stacked = torch.stack(norms)
        scale = getattr(optimizer, "grad_scale", None)  # GradScaler leaves the division to a fused step
        if scale is not None:
            if not isinstance(optimizer, RuleOptimizer):  # torch's step has divided .grad itself, unless it was skipped
                scale = scale.where(getattr(optimizer, "found_inf", torch.zeros_like(scale)) != 0, 1.0)
            stacked = stacked / scale.to(stacked.device)
        rows = [row for name in self.names.values() for row in self.followed.load_rows(optimizer, name)]
        self.noted.append(_NotedStep(self.monitor.step, [], stacked, torch.cat(rows) if rows else None))

    def collect(self) -> dict[str, list[Tensor]]:
        """The tensors that a record needs on the host, by name; empty if no parameter has been stepped."""
        self.refresh_samples()
        if not self.sample.pieces:
            self.noted = []  # nothing will be recorded of them: all shards of this process are empty
            return {}
        optimizer, lr = self.monitor.optimizer, self.group["lr"]
        rows = [noted.row for noted in self.noted if noted.row is not None]
        return {
            "lr": [lr] if isinstance(lr, Tensor) else [],
            "t": self.sample.step_counts(optimizer),
            "sums": [sums.get_totals() for sums in self._get_all_sums()],
            "norms": [noted.norms for noted in self.noted if noted.norms is not None],
            "rows": rows,
            "followed_t": self.followed.step_counts(optimizer) if rows else [],
            **{letter: self.sample.load_rows(optimizer, name) for letter, name in self.view.names.items()},
        }

    def make_entry(self, host: dict[str, Tensor]) -> Record | None:
        """Make the group's part of a record from the tensors of `collect`, and forget the noted steps.

        None if no parameter has been stepped: `init_state` and checkpoints create state before the first step.
        """
        view = self.view
        rule, hyper = view.rule, view.hyper
        norms = self._add_noted_steps(host)
        self.noted = []
        finite = sorted(filter(math.isfinite, norms))
        t = self.sample.per_coordinate(host["t"])
        stepped = t[t > 0]
        if not len(stepped):
            return None
        t = t.clamp(min=1)  # averages of step 0 are 0, and count as dead
        averages = correct_bias(hyper, {letter: host[letter] for letter in view.names}, t)
        counts = [piece.size for piece in self.sample.pieces]
        return {
            "group": self.number,
            "cell": rule.name,
            "lr": finite_or_none(host["lr"].item() if host["lr"].numel() else float(hyper.lr)),
            "beta1": hyper.beta1,
            "beta2": hyper.beta2,
            "eps": hyper.eps,
            "floor": hyper.floor if rule.centered else 0.0,
            "z_clip": None if hyper.z_clip is None else finite_or_none(hyper.z_clip),
            "weight_decay": float(hyper.weight_decay),
            "decoupled_weight_decay": hyper.decoupled,
            "t": int(stepped.kthvalue(1 + int(FEWER_STEPS * len(stepped))).values),
            "mean_noise": math.sqrt((1 - hyper.mean_decay) / (1 + hyper.mean_decay)),  # |m|/sigma without signal
            "m": "kept" if "m" in rule.state_names else "rebuilt" if rule.lean else None,
            "coordinates": self.sample.population,
            **measure_sample(rule, hyper, averages, self.layer_names, counts, self._get_resolution()),
            "gradient_norm": {"median": finite[len(finite) // 2], "max": finite[-1]} if finite else None,
            "gradients_not_finite": len(norms) - len(finite),
            "spikes": self.spikes.pop_spikes(),
        }

    def _get_resolution(self) -> float:
        """The smallest variance that the state can hold beside a floor."""
        state = self.monitor.optimizer.state[self.sample.pieces[0].param]
        wide = all(state[name].dtype in (torch.float32, torch.float64) for name in self.view.names.values())
        return RESOLVED if wide else COARSELY_RESOLVED

    def _get_all_sums(self) -> list[Any]:
        """Those of the noted steps, each once."""
        return list(dict.fromkeys(sums for noted in self.noted for sums, _ in noted.sums))

    def _add_noted_steps(self, host: dict[str, Tensor]) -> list[float]:
        """Look for spikes in the noted steps and return their gradient norms."""
        totals, values = iter(host["sums"].view(-1, 2).tolist()), iter(host["norms"].tolist())
        by_sums = {sums: list(islice(totals, len(sums))) for sums in self._get_all_sums()}
        followed = iter(self._followed_sizes(host["rows"], host["followed_t"]))
        norms: list[float] = []
        sizes: list[float | None] = []
        for noted in self.noted:
            if noted.norms is not None:
                norms.append(math.hypot(*islice(values, noted.norms.numel())))
                sizes.append(None if noted.row is None else next(followed))
            else:
                gradient, change, coordinates = 0.0, 0.0, 0
                for sums, row in noted.sums:
                    squares, changes = by_sums[sums][row]
                    gradient += squares
                    change += changes
                    coordinates += sums.coordinates
                norms.append(math.sqrt(gradient))
                sizes.append(math.sqrt(change / coordinates))
        self.spikes.add_all([noted.step for noted in self.noted], norms, sizes)
        return norms

    def _followed_sizes(self, rows: Tensor, t: Tensor) -> list[float]:
        """The root mean square update of the followed coordinates at each noted step that has a row."""
        count = sum(noted.row is not None for noted in self.noted)
        if not rows.numel():
            return [0.0] * count
        view = self.view
        values = rows.view(count, len(self.names), -1)
        ago = torch.arange(count - 1, -1, -1, dtype=torch.float64, device="cpu")[:, None]
        state = {letter: values[:, i] for i, letter in enumerate(self.names)}
        averages = correct_bias(view.hyper, state, (self.followed.per_coordinate(t) - ago).clamp(min=1))
        sizes: list[float] = update_sizes(view.rule, view.hyper, averages).square_().mean(1).sqrt().tolist()
        return sizes
