"""Clocks: a step's time on the device and on the host, a copy's bandwidth, and how many kernels a step launches."""

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


def wait(device: torch.device | str) -> None:
    """Until a GPU has done what it was given; a CPU has."""
    if torch.device(device).type == "cuda":
        torch.cuda.synchronize()


def timed(step: Step, device: str) -> tuple[float, float]:
    """Seconds until a step is done, and until it returns with nothing queued before it."""
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


def seconds(step: Step, device: str) -> float:
    return timed(step, device)[0]


def graph_seconds(step: Step, rounds: int) -> float:
    """Time of a step replayed from a CUDA graph: the device's alone."""
    graph = torch.cuda.CUDAGraph()
    torch.cuda.synchronize()
    with torch.cuda.graph(graph):
        step()
    return statistics.median(seconds(graph.replay, "cuda") for _ in range(rounds))


def copy_bandwidth(device: str) -> float:
    """Bytes read and written in a second by a copy that no cache holds."""
    source = torch.randn(2**29 if device == "cuda" else 2**26, device=device)
    target = torch.empty_like(source)
    target.copy_(source)
    return 2 * source.nbytes / statistics.median(seconds(lambda: target.copy_(source), device) for _ in range(10))


def launches(step: Step) -> int:
    """Kernels that a step runs on the GPU, from a trace; tracing may outlast it, so count after all timing."""
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


def host_profile(step: Step, device: str, steps: int = 200, limit: float = 10.0, lines: int = 25) -> str:
    """Where the host's time goes in `steps` steps, or in those of `limit` seconds: the top by cumulative time.

    The profiler makes every call slower, so that shares mean more than times.
    """
    profiler, end, done = cProfile.Profile(), time.perf_counter() + limit, 0
    while done < steps and time.perf_counter() < end:
        wait(device)  # outside: a full queue would be waited for inside of a step
        profiler.enable()
        step()
        profiler.disable()
        done += 1
    text = io.StringIO()
    pstats.Stats(profiler, stream=text).strip_dirs().sort_stats("cumulative").print_stats(lines)
    return f"{done} steps\n{text.getvalue()}"
