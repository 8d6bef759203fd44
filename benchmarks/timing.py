"""Timers: a step on the device and on the host, the bandwidth of a copy, and the kernels that a step launches."""

from __future__ import annotations

import cProfile
import io
import pstats
import statistics
import time
from collections.abc import Callable
from typing import Any

import torch

Step = Callable[[], Any]


def synchronize(device: torch.device | str) -> None:
    """Wait until a GPU has finished its queue; nothing to do on a CPU."""
    if torch.device(device).type == "cuda":
        torch.cuda.synchronize()


def time_step(step: Step, device: str) -> tuple[float, float]:
    """Seconds until a step is done, and until its call returns, starting from an empty queue."""
    if device == "cpu":
        start = time.perf_counter()
        step()
        end = time.perf_counter()
        return end - start, end - start
    start_event, end_event = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    torch.cuda.synchronize()
    start_event.record()
    start = time.perf_counter()
    step()
    end = time.perf_counter()
    end_event.record()
    torch.cuda.synchronize()
    return start_event.elapsed_time(end_event) / 1e3, end - start


def step_seconds(step: Step, device: str) -> float:
    return time_step(step, device)[0]


def graph_seconds(step: Step, rounds: int) -> float:
    """Seconds of a step replayed from a CUDA graph: the time of the device alone."""
    graph = torch.cuda.CUDAGraph()
    torch.cuda.synchronize()
    with torch.cuda.graph(graph):
        step()
    return statistics.median(step_seconds(graph.replay, "cuda") for _ in range(rounds))


def copy_bandwidth(device: str) -> float:
    """Bytes read and written per second by a copy that fits into no cache."""
    source = torch.randn(2**29 if device == "cuda" else 2**26, device=device)
    target = torch.empty_like(source)
    target.copy_(source)
    return 2 * source.nbytes / statistics.median(step_seconds(lambda: target.copy_(source), device) for _ in range(10))


def count_launches(step: Step) -> int:
    """The kernels that a step launches, from a trace. Tracing may slow later steps, so call it after all timing."""
    torch.cuda.synchronize()
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as trace:
        step()
        torch.cuda.synchronize()
    return sum(
        event.device_type == torch.autograd.DeviceType.CUDA
        and not event.is_user_annotation
        and not event.name.startswith(("Memcpy", "Memset"))
        for event in trace.events()
    )


def profile_host(step: Step, device: str, steps: int = 200, limit: float = 10.0, lines: int = 25) -> str:
    """The functions with the largest cumulative host time in `steps` steps, or in `limit` seconds.

    The profiler slows every call, so shares are more reliable than times.
    """
    profiler, end, done = cProfile.Profile(), time.perf_counter() + limit, 0
    while done < steps and time.perf_counter() < end:
        synchronize(device)  # outside the profile: a step may wait for a full queue
        profiler.enable()
        step()
        profiler.disable()
        done += 1
    text = io.StringIO()
    pstats.Stats(profiler, stream=text).strip_dirs().sort_stats("cumulative").print_stats(lines)
    return f"{done} steps\n{text.getvalue()}"
