"""The C++ kernel as a library: compilation, cache, compilers, processes and threads."""

import os
import re
import shlex
import subprocess
import sys
import threading

import pytest
import torch
from family import PLAIN, equal, everything, parameters, train

import mvngrad
from mvngrad.optim.backends.cpu import library

pytestmark = pytest.mark.usefixtures("cpp_compiler")
SHAPES = (33, 7), (5,), (40000,)


@pytest.fixture
def new_process(monkeypatch, tmp_path):
    """Forget the loaded kernel, and use an empty cache and a compiler that logs its runs, at the path returned."""
    log, compiler, real = tmp_path / "log", tmp_path / "logging-compiler", shlex.join(library.find_compiler())
    compiler.write_text(f'#!/bin/sh\ncase "$*" in *" -o "*) echo "$@" >> {log};; esac\nexec {real} "$@"\n')
    compiler.chmod(0o755)
    monkeypatch.setenv("CXX", str(compiler))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    library._load.cache_clear()
    yield log
    library._load.cache_clear()


def get_result(cell=mvngrad.MVNGrad, **options):
    optimizer = cell(parameters(*SHAPES), lr=1e-2, fused=True, **options)
    train(optimizer, 3)
    return everything(optimizer)


def count_lines(path):
    return len(path.read_text().splitlines()) if path.exists() else 0


def test_threads_in_their_first_step_compile_once_and_later_processes_not_at_all(new_process, monkeypatch, tmp_path):
    barrier, results, errors = threading.Barrier(4), {}, []

    def run(i):
        barrier.wait()
        try:
            results[i] = get_result(PLAIN[i])
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=run, args=(i,)) for i in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not errors
    assert count_lines(new_process) == 1
    for i, result in results.items():
        assert equal(result, get_result(PLAIN[i]))
    library._load.cache_clear()
    get_result()
    assert count_lines(new_process) == 1
    (cached,) = (tmp_path / "cache" / "mvngrad").iterdir()
    (tmp_path / "other" / "mvngrad").mkdir(parents=True, mode=0o700)
    (tmp_path / "other" / "mvngrad" / cached.name).write_bytes(cached.read_bytes()[:1000])
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "other"))
    library._load.cache_clear()
    get_result()
    assert count_lines(new_process) == 2, "a file that was cut must be compiled again"


RUNS = ({}, {"state_dtype": "int8"}, {"state_dtype": "bf16"}, {"state_dtype": "bf16", "lean": True})


@pytest.fixture(scope="module")
def expected():
    """The results of the kernel as this machine's compiler makes it."""
    return [get_result(**options) for options in RUNS]


@pytest.mark.parametrize("refused", ["-fopenmp", "-march=native"])
def test_a_compiler_without_openmp_or_native_code_gives_the_same_bits(
    refused, expected, new_process, monkeypatch, tmp_path
):
    compiler = tmp_path / "limited"
    compiler.write_text(f'#!/bin/sh\ncase "$*" in *{refused}*) exit 1;; esac\nexec {os.environ["CXX"]} "$@"\n')
    compiler.chmod(0o755)
    monkeypatch.setenv("CXX", str(compiler))
    for options, result in zip(RUNS, expected, strict=True):
        assert equal(get_result(**options), result)
    (compiled,) = new_process.read_text().splitlines()
    assert refused not in compiled


@pytest.mark.parametrize("cell", PLAIN)
def test_a_nan_gradient_with_all_bits_set_leaves_nan_in_bfloat16_state(cell):
    """Noise that is added to its bits would carry into the sign."""
    (param,) = parameters((300,))
    param.grad = torch.full((300,), 0x7FFFFFFF, dtype=torch.int32).view(torch.float32)
    param.grad[1::2] = 1.0
    optimizer = cell([param], lr=1e-2, fused=True, state_dtype="bf16")
    optimizer.step()
    names = optimizer.rule.state_names
    assert names
    for name in names:
        assert torch.equal(optimizer.state[param][name].isnan(), param.grad.isnan()), name


def test_without_a_cache_of_its_own_a_process_compiles_for_itself(new_process, monkeypatch, tmp_path):
    folder = tmp_path / "cache" / "mvngrad"
    folder.mkdir(parents=True)
    folder.chmod(0o777)
    assert library.find_cache() is None, "others could put a library there"
    folder.chmod(0o700)
    assert library.find_cache() == folder
    monkeypatch.setenv("XDG_CACHE_HOME", "/dev/null")  # nothing can be created there, not even by root
    get_result()
    assert count_lines(new_process) == 1


def test_libraries_of_other_sources_compilers_and_cpus_have_other_names(monkeypatch):
    compiler = library.find_compiler()
    keys = [library.make_key("source", compiler), library.make_key("other", compiler)]
    keys.append(library.make_key("source", [*compiler, "-O0"]))
    monkeypatch.setattr(library, "describe_cpu", lambda: "another CPU")
    keys.append(library.make_key("source", compiler))
    assert len(set(keys)) == 4
    monkeypatch.undo()
    assert keys[0] == library.make_key("source", compiler)
    assert library.describe_cpu() == library.describe_cpu()


@pytest.mark.parametrize(
    ("script", "message"),
    [
        (
            None,
            "fused=True on the CPU needs a C++ compiler: install g++ or clang++ (or name one in CXX), or use fused=",
        ),
        ("echo 'error: no space left' >&2; exit 1", "cannot compile the kernel: error: no space left: install g++"),
    ],
    ids=["no compiler", "broken compiler"],
)
@pytest.mark.usefixtures("new_process")
def test_without_a_compiler_the_error_names_the_remedy_and_the_default_works(script, message, monkeypatch, tmp_path):
    compiler = tmp_path / "compiler"
    if script:
        compiler.write_text(f"#!/bin/sh\n{script}\n")
        compiler.chmod(0o755)
    monkeypatch.setenv("CXX", str(compiler))
    demanded, default = (mvngrad.MVNGrad(parameters((3,)), fused=fused) for fused in (True, None))
    with pytest.raises(RuntimeError, match=re.escape(message)):
        train(demanded, 1)
    assert not demanded.state
    train(default, 1)
    assert all(default.state.values())


PROCESS = """
import hashlib, os, signal, sys, torch, mvngrad

def count_threads():
    return len(os.listdir("/proc/self/task"))

def step():
    # Tensors of less than 32768 elements: torch's own operations on larger ones hang in a process forked like this.
    torch.manual_seed(0)
    params = [torch.nn.Parameter(torch.randn(20_000)) for _ in range(12)]
    optimizer = mvngrad.MVNGrad(params, fused=True, state_dtype="int8")
    for _ in range(3):
        for x in params:
            x.grad = torch.randn(20_000)
        optimizer.step()
    digest = hashlib.sha256()
    for x in params:
        for value in (x.detach(), *optimizer.state[x].values()):
            digest.update(value.numpy().tobytes())
    return digest.hexdigest()

torch.set_num_threads(1)
before = count_threads()
first = step()
assert count_threads() == before, "one thread was asked for"
torch.set_num_threads(3)
assert step() == first, "the number of threads changed the result"
assert count_threads() == before + 2, "three threads were asked for"
child = os.fork()
if child == 0:
    signal.alarm(120)  # ends a child that waits for the threads of its parent
    os._exit(0 if step() == first else 1)
assert os.waitpid(child, 0)[1] == 0, "a forked process hangs, or differs"
print(first)
"""


@pytest.mark.skipif(sys.platform != "linux", reason="counts threads in /proc")
def test_processes_share_a_cache_and_steps_use_the_threads_that_torch_is_set_to(tmp_path):
    """Two processes compile at the same time; each then forks after its threads have started."""
    environment = {**os.environ, "XDG_CACHE_HOME": str(tmp_path)}
    command = [sys.executable, "-c", PROCESS]
    both = [subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, text=True) for _ in range(2)]
    outputs = [process.communicate()[0] for process in both]
    assert [process.returncode for process in both] == [0, 0]
    assert outputs[0] == outputs[1]
    assert [path.suffix for path in (tmp_path / "mvngrad").iterdir()] == [".so"]


@pytest.mark.filterwarnings("ignore:ComplexHalf support is experimental")
def test_complex_parameters_of_16_bit_parts_are_stepped():
    """Their state has parts of 32 bits; the kernel once took parts of 16 bits for 8-bit codes, and crashed."""
    ends, value = [], torch.view_as_complex(torch.linspace(-1, 1, 600).reshape(300, 2)).to(torch.complex32)
    for fused in (True, False):
        param = torch.nn.Parameter(value.clone())
        optimizer = mvngrad.MVNGrad([param], lr=1e-2, fused=fused)
        for _ in range(2):
            param.grad = value.clone()
            optimizer.step()
        assert optimizer.state[param]["m"].dtype == torch.complex64
        ends.append(torch.view_as_real(param.detach()).float())
    torch.testing.assert_close(*ends, rtol=2e-3, atol=1e-3)
