"""The optimizers inside Hugging Face's Trainer, Accelerate, peft, Lightning and timm, with tiny models made here."""

import subprocess
import sys
import warnings

import pytest
import torch
from family import through_disk
from vision import torchvision

import mvngrad
from mvngrad import MVNGradW

FORMATS = [{}, {"state_dtype": "int8"}, {"lean": True}]
IDS = ["float32", "int8", "lean"]
pytestmark = pytest.mark.filterwarnings("ignore")  # warnings from the frameworks' own code


@pytest.fixture(scope="module", autouse=True)
def vision():
    """timm and transformers import torchvision, whose operators need a declaration on a torch without CUDA."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        torchvision()


def tiny_gpt2():
    from transformers import GPT2Config, GPT2LMHeadModel

    torch.manual_seed(0)
    config = GPT2Config(vocab_size=32, n_positions=16, n_embd=16, n_layer=1, n_head=2, bos_token_id=0, eos_token_id=0)
    return GPT2LMHeadModel(config)


class Tokens(torch.utils.data.Dataset):
    def __init__(self):
        self.rows = torch.randint(32, (64, 16), generator=torch.Generator().manual_seed(0))

    def __len__(self):
        return len(self.rows)

    def __getitem__(self, index):
        return {"input_ids": self.rows[index], "labels": self.rows[index]}


def assert_same_weights(one, other):
    for name, value in one.state_dict().items():
        assert torch.equal(value, other.state_dict()[name]), name


# Hugging Face Trainer


def make_trainer(folder, options, **arguments):
    from transformers import Trainer, TrainingArguments

    settings = TrainingArguments(
        output_dir=str(folder), max_steps=8, save_steps=4, per_device_train_batch_size=4,
        learning_rate=1e-2, lr_scheduler_type="cosine", weight_decay=0.1, report_to=[], disable_tqdm=True,
        use_cpu=True, seed=0, **{"logging_steps": 4, **arguments},
    )  # fmt: skip
    ours = {} if options is None else {"optimizer_cls_and_kwargs": (MVNGradW, {"lr": 1e-2, **options})}
    return Trainer(tiny_gpt2(), settings, train_dataset=Tokens(), **ours)


@pytest.mark.parametrize("options", FORMATS, ids=IDS)
def test_hugging_face_trainer_resumes_bit_identically(tmp_path, options):
    whole = make_trainer(tmp_path / "whole", options)
    whole.train()
    resumed = make_trainer(tmp_path / "resumed", options)
    resumed.train(resume_from_checkpoint=str(tmp_path / "whole" / "checkpoint-4"))
    assert_same_weights(whole.model, resumed.model)


def test_hugging_face_trainer_switches_from_its_own_adamw_checkpoint(tmp_path):
    theirs = make_trainer(tmp_path / "adamw", None)
    theirs.train()
    switched = make_trainer(tmp_path / "switched", {"state_dtype": "int8", "lr": 0.5})
    switched.create_optimizer()
    switched.optimizer.register_load_state_dict_pre_hook(mvngrad.from_adamw)
    switched.train(resume_from_checkpoint=str(tmp_path / "adamw" / "checkpoint-4"))
    optimizer = switched.optimizer.optimizer
    assert {state["step"].item() for state in optimizer.state.values()} == {8}
    assert {group["weight_decay"] for group in optimizer.param_groups} == {0.0, 0.1}
    for one, other in zip(theirs.model.parameters(), switched.model.parameters(), strict=True):
        assert not torch.equal(one, other)
        torch.testing.assert_close(one, other, rtol=0, atol=0.02)  # four steps of 0.005 and less


def test_hugging_face_trainer_decays_matrices_only(tmp_path):
    trainer = make_trainer(tmp_path, {})
    trainer.create_optimizer()
    decays = {group["weight_decay"]: group["params"] for group in trainer.optimizer.param_groups}
    assert {p.dim() for p in decays[0.1]} == {2}
    assert {p.dim() for p in decays[0.0]} == {1}


def test_monitor_callback_logs_where_the_trainer_logs(tmp_path):
    from mvngrad.diagnostics import read_records
    from mvngrad.integrations.transformers import MonitorCallback

    trainer = make_trainer(tmp_path, {})
    trainer.add_callback(MonitorCallback(trainer, every=4, sink=tmp_path / "monitor.jsonl"))
    trainer.train()
    logged = [row for row in trainer.state.log_history if "mvngrad/group0/snr/0.5" in row]
    records = read_records(tmp_path / "monitor.jsonl")
    assert [row["step"] for row in logged] == [record["step"] for record in records] == [4, 8]
    optimizer = trainer.optimizer.optimizer
    assert not optimizer._optimizer_step_post_hooks


def test_monitor_callback_records_the_loss_that_the_trainer_logs(tmp_path):
    from mvngrad.integrations.transformers import MonitorCallback

    trainer = make_trainer(tmp_path, {}, logging_steps=1)
    trainer.add_callback(MonitorCallback(trainer, every=4, sink=(records := []).append))
    trainer.train()
    losses = [row["loss"] for row in trainer.state.log_history if "loss" in row]
    assert len(losses) == 8
    means = [sum(losses[:3]) / 3, sum(losses[3:7]) / 4]  # each is logged after its step and the record of that step
    assert [record["logged"]["loss"] for record in records] == pytest.approx(means)


def test_monitor_callback_refuses_a_file_that_cannot_be_written(tmp_path):
    from mvngrad.integrations.transformers import MonitorCallback

    trainer = make_trainer(tmp_path, {})
    trainer.add_callback(MonitorCallback(trainer, every=4, sink="/proc/nope/monitor.jsonl"))
    with pytest.raises(OSError, match=r"sink='/proc/nope/.*' cannot be written: "):
        trainer.train()
    assert trainer.state.global_step == 0


def test_monitor_callback_is_closed_by_another_callback_and_after_a_failure(tmp_path):
    from transformers import TrainerCallback

    from mvngrad.integrations.transformers import MonitorCallback

    class CloseOnLog(TrainerCallback):
        def on_log(self, args, state, control, logs=None, **kwargs):
            if "mvngrad/group0/snr/0.5" in logs:
                watched.close()

    trainer = make_trainer(tmp_path, {})
    watched = MonitorCallback(trainer, every=2, sink=(records := []).append)
    trainer.add_callback(watched)
    trainer.add_callback(CloseOnLog())
    trainer.train()
    assert [record["step"] for record in records] == [2]
    assert not trainer.optimizer.optimizer._optimizer_step_post_hooks

    failing = make_trainer(tmp_path, {})
    failing.add_callback(watched := MonitorCallback(failing, every=2, sink=records.append))
    failing.training_step = lambda *_: 1 / 0
    with pytest.raises(ZeroDivisionError):
        failing.train()
    assert not watched.monitor.closed
    watched.close()
    assert watched.monitor.closed


def test_monitor_callback_does_not_log_the_record_of_a_training_that_failed(tmp_path):
    from transformers import TrainerCallback

    from mvngrad.integrations.transformers import MonitorCallback

    class FailOnce(TrainerCallback):
        def on_optimizer_step(self, args, state, control, **kwargs):
            if len(records) == 1:
                records.clear()
                raise RuntimeError

    trainer = make_trainer(tmp_path, {})
    trainer.add_callback(MonitorCallback(trainer, every=4, sink=(records := []).append))
    trainer.add_callback(failing := FailOnce())
    with pytest.raises(RuntimeError):
        trainer.train()
    trainer.remove_callback(failing)
    trainer.train()
    logged = [row["step"] for row in trainer.state.log_history if "mvngrad/group0/snr/0.5" in row]
    assert logged == [record["step"] - records[0]["start"] for record in records]


def test_hugging_face_trainer_reads_released_gradients_also_without_clipping(tmp_path):
    trainer = make_trainer(tmp_path, {}, max_grad_norm=0)
    trainer.create_optimizer()
    mvngrad.release_gradients(trainer.optimizer)
    with pytest.raises(RuntimeError, match="this gradient was used and freed"):
        trainer.train()


# peft


@pytest.mark.parametrize("options", FORMATS, ids=IDS)
def test_peft_trains_the_adapter_alone_and_resumes_bit_identically(options):
    from peft import LoraConfig, get_peft_model, get_peft_model_state_dict, set_peft_model_state_dict

    tokens = Tokens().rows[:4]

    def start():
        model = get_peft_model(tiny_gpt2(), LoraConfig(r=2, target_modules=["c_attn"], fan_in_fan_out=True))
        return model, MVNGradW((p for p in model.parameters() if p.requires_grad), lr=1e-2, **options)

    def train(model, optimizer, steps):
        model.eval()  # no dropout
        for _ in range(steps):
            optimizer.zero_grad()
            model(input_ids=tokens, labels=tokens).loss.backward()
            optimizer.step()

    model, optimizer = start()
    before = {name: value.clone() for name, value in model.state_dict().items()}
    train(model, optimizer, 2)
    saved = through_disk([get_peft_model_state_dict(model), optimizer.state_dict()])
    train(model, optimizer, 2)
    resumed, other = start()
    set_peft_model_state_dict(resumed, saved[0])
    other.load_state_dict(saved[1])
    train(resumed, other, 2)
    assert_same_weights(model, resumed)
    changed = {name for name, value in model.state_dict().items() if not torch.equal(value, before[name])}
    assert changed
    assert all("lora_" in name for name in changed)


# Accelerate

ACCELERATE = """
import sys, torch
from accelerate import Accelerator, PartialState
from accelerate.utils import DistributedType, FullyShardedDataParallelPlugin
from mvngrad import MVNGradW

def run(folder, options, sharded, resume):
    wrapped = {"auto_wrap_policy": "transformer_based_wrap", "transformer_cls_names_to_wrap": ["Linear"]}
    plugin = FullyShardedDataParallelPlugin(fsdp_version=2, state_dict_type="SHARDED_STATE_DICT", **wrapped)
    accelerator = Accelerator(cpu=True)
    if sharded:  # without an accelerator, Accelerate takes no plugin
        accelerator.state.distributed_type = PartialState().distributed_type = DistributedType.FSDP
        accelerator.state.fsdp_plugin = plugin
        assert accelerator.is_fsdp2
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(4, 5), torch.nn.Linear(5, 2))
    optimizer = MVNGradW(model.parameters(), lr=0.1, **options)
    model, optimizer = accelerator.prepare(model, optimizer)
    assert all(hasattr(p, "full_tensor") == sharded for group in optimizer.param_groups for p in group["params"])
    data = torch.randn(8, 4, 4, generator=torch.Generator().manual_seed(1 + accelerator.process_index))
    for step in range(4 if resume else 0, 8):
        if resume and step == 4:
            accelerator.load_state(folder)
        optimizer.zero_grad()
        accelerator.backward(model(data[step]).square().mean())
        accelerator.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        if step == 3:
            accelerator.save_state(folder)
    weights = [p.full_tensor() if sharded else p.detach() for p in accelerator.unwrap_model(model).parameters()]
    if not sharded:
        for weight in weights:
            assert all(torch.equal(each, weight) for each in accelerator.gather(weight[None])), "replicas differ"
    return [weight.clone() for weight in weights]

for sharded in (False, True) if PartialState(cpu=True).num_processes > 1 else (False,):
    for name, options in (("float32", {}), ("int8", {"state_dtype": "int8"}), ("lean", {"lean": True})):
        folder = f"{sys.argv[1]}/{name}{sharded}"
        whole, resumed = (run(folder, options, sharded, resume) for resume in (False, True))
        assert all(map(torch.equal, whole, resumed)), (name, sharded)
open(f"{sys.argv[1]}/equal{PartialState().process_index}", "w").close()
"""


@pytest.mark.slow
@pytest.mark.parametrize("processes", [1, 2])
def test_accelerate_resumes_bit_identically_in_every_format(tmp_path, processes):
    """In two processes both with DDP and with FSDP2."""
    script = tmp_path / "train.py"
    script.write_text(ACCELERATE)
    launch = ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={processes}"] if processes > 1 else []
    command = [sys.executable, "-W", "ignore", *launch, str(script), str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert {path.name for path in tmp_path.glob("equal*")} == {f"equal{rank}" for rank in range(processes)}, done.stderr


def test_accelerate_switches_from_its_own_adamw_checkpoint(tmp_path):
    pytest.importorskip("accelerate")
    from accelerate import Accelerator

    theirs, ours = torch.nn.Linear(4, 4), torch.nn.Linear(4, 4)
    accelerator = Accelerator(cpu=True)
    model, adamw = accelerator.prepare(theirs, torch.optim.AdamW(theirs.parameters(), lr=0.25))
    accelerator.backward(model(torch.ones(2, 4)).square().mean())
    adamw.step()
    accelerator.save_state(tmp_path)

    optimizer = MVNGradW(ours.parameters(), state_dtype="int8")
    optimizer.register_load_state_dict_pre_hook(mvngrad.from_adamw)
    accelerator = Accelerator(cpu=True)
    accelerator.prepare(ours, optimizer)
    accelerator.load_state(tmp_path)
    assert_same_weights(theirs, ours)
    assert optimizer.param_groups[0]["lr"] == 0.25
    assert {state["step"].item() for state in optimizer.state.values()} == {1}


# Lightning


def make_lightning(folder, options, callbacks=(), make=MVNGradW, hook=None, **arguments):
    from lightning.pytorch import LightningModule, Trainer
    from lightning.pytorch.loggers import CSVLogger

    class Regression(LightningModule):
        def __init__(self):
            super().__init__()
            torch.manual_seed(0)
            self.layer = torch.nn.Linear(4, 2)

        def training_step(self, batch, index):
            return self.layer(batch).square().mean()

        def configure_optimizers(self):
            optimizer = make(self.parameters(), lr=0.1, **options)
            if hook is not None:
                optimizer.register_load_state_dict_pre_hook(hook)
            schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=8)
            return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": "step"}}

        def train_dataloader(self):
            rows = torch.randn(16, 4, generator=torch.Generator().manual_seed(1))
            return torch.utils.data.DataLoader(rows, batch_size=4)

    trainer = Trainer(
        accelerator="cpu", default_root_dir=folder, enable_progress_bar=False, enable_model_summary=False,
        gradient_clip_val=1.0, logger=CSVLogger(folder), log_every_n_steps=1, callbacks=list(callbacks), **arguments,
    )  # fmt: skip
    return Regression(), trainer


@pytest.mark.parametrize("options", FORMATS, ids=IDS)
def test_lightning_resumes_bit_identically(tmp_path, options):
    whole, trainer = make_lightning(tmp_path, options, max_epochs=2)
    trainer.fit(whole)
    half, trainer = make_lightning(tmp_path, options, max_epochs=1)
    trainer.fit(half)
    trainer.save_checkpoint(tmp_path / "half.ckpt")
    resumed, trainer = make_lightning(tmp_path, options, max_epochs=2)
    trainer.fit(resumed, ckpt_path=tmp_path / "half.ckpt", weights_only=True)
    assert_same_weights(whole, resumed)


def test_lightning_switches_from_its_own_adamw_checkpoint(tmp_path):
    model, trainer = make_lightning(tmp_path, {}, make=torch.optim.AdamW, max_epochs=1)
    trainer.fit(model)
    trainer.save_checkpoint(tmp_path / "adamw.ckpt")
    switched, trainer = make_lightning(tmp_path, {"lean": True}, hook=mvngrad.from_adamw, max_epochs=2)
    trainer.fit(switched, ckpt_path=tmp_path / "adamw.ckpt", weights_only=True)
    (optimizer,) = trainer.optimizers
    assert {state["step"].item() for state in optimizer.state.values()} == {8}
    assert "exp_avg" not in optimizer.state[switched.layer.weight]


def test_lightning_averages_weights(tmp_path):
    from lightning.pytorch.callbacks import StochasticWeightAveraging

    model, trainer = make_lightning(tmp_path, {}, [StochasticWeightAveraging(swa_lrs=0.05)], max_epochs=3)
    trainer.fit(model)
    assert all(p.isfinite().all() for p in model.parameters())


def test_monitor_callback_logs_to_the_loggers_of_lightning(tmp_path):
    from mvngrad.integrations.lightning import MonitorCallback

    records = []
    model, trainer = make_lightning(tmp_path, {}, [MonitorCallback(every=2, sink=records.append)], max_epochs=2)
    trainer.fit(model)
    assert [record["step"] for record in records] == [2, 4, 6, 8]
    (path,) = tmp_path.rglob("metrics.csv")
    assert "mvngrad/group0/snr/0.5" in path.read_text()
    assert not trainer.optimizers[0]._optimizer_step_post_hooks


@pytest.mark.parametrize("accumulated", [1, 2])
def test_monitor_callback_records_the_losses_of_lightning(tmp_path, accumulated):
    from mvngrad.integrations.lightning import MonitorCallback

    callback = MonitorCallback(every=2, sink=(records := []).append)
    model, trainer = make_lightning(tmp_path, {}, [callback], max_epochs=2, accumulate_grad_batches=accumulated)
    losses, compute = [], model.training_step
    model.training_step = lambda batch, batch_idx: losses.append(compute(batch, batch_idx)) or losses[-1]
    trainer.fit(model)
    ends = range(2 * accumulated - 1, 8, 2 * accumulated)  # the batch of a recorded step ends after the record
    means = [torch.stack(losses[max(0, end - 2 * accumulated) : end]).mean().item() for end in ends]
    assert [record["logged"]["loss"] for record in records] == pytest.approx(means)


def test_monitor_callback_writes_one_file_for_each_optimizer_of_lightning(tmp_path):
    from mvngrad.diagnostics import diagnose
    from mvngrad.integrations.lightning import MonitorCallback

    callback = MonitorCallback(every=2, sink=tmp_path / "deep" / "monitor.jsonl")
    model, trainer = make_lightning(tmp_path, {}, [callback], max_epochs=2)
    model.automatic_optimization, trainer.gradient_clip_val = False, None
    model.configure_optimizers = lambda: [MVNGradW([model.layer.weight]), torch.optim.AdamW([model.layer.bias])]

    def step_both(batch, batch_idx):
        for optimizer in model.optimizers():
            optimizer.zero_grad()
            model.manual_backward(model.layer(batch).square().mean())
            optimizer.step()

    model.training_step = step_both
    trainer.fit(model)
    files = sorted((tmp_path / "deep").iterdir())
    assert [file.name for file in files] == ["monitor.optimizer0.jsonl", "monitor.optimizer1.jsonl"]
    assert [diagnose(file).groups[0].optimizer for file in files] == ["MVNGradW", "AdamW"]


def test_monitor_callback_ignores_outputs_of_lightning_that_are_no_loss(tmp_path):
    from mvngrad.integrations.lightning import MonitorCallback

    callback = MonitorCallback(every=2, sink=(records := []).append)
    model, trainer = make_lightning(tmp_path, {}, [callback], max_epochs=2)
    model.automatic_optimization, trainer.gradient_clip_val = False, None

    def step_by_hand(batch, batch_idx):
        optimizer, squares = model.optimizers(), model.layer(batch).square()
        optimizer.zero_grad()
        model.manual_backward(squares.mean())
        optimizer.step()
        return (None, squares, {"squares": squares}, squares.mean())[batch_idx]

    model.training_step = step_by_hand
    trainer.fit(model)
    assert [record["step"] for record in records if "logged" in record] == [6]


def test_monitor_callback_of_lightning_refuses_a_file_that_cannot_be_written(tmp_path):
    from mvngrad.integrations.lightning import MonitorCallback

    model, trainer = make_lightning(tmp_path, {}, [MonitorCallback(sink="/proc/nope/monitor.jsonl")], max_epochs=1)
    with pytest.raises(OSError, match=r"sink='/proc/nope/.*' cannot be written: "):
        trainer.fit(model)
    assert trainer.global_step == 0


def test_monitor_callback_closes_when_lightning_fails(tmp_path):
    from mvngrad.integrations.lightning import MonitorCallback

    callback = MonitorCallback(every=1, sink=tmp_path / "monitor.jsonl")
    model, trainer = make_lightning(tmp_path, {}, [callback], max_epochs=1)

    def fail(batch):
        raise ZeroDivisionError

    model.training_step = fail
    with pytest.raises(ZeroDivisionError):
        trainer.fit(model)
    assert not callback.monitors


@pytest.mark.parametrize("framework", ["accelerate", "fabric", "lightning"])
def test_release_gradients_refuses_the_wrappers_of_frameworks(framework):
    """Their step calls that of the inner optimizer, which would not know of the release."""
    model = torch.nn.Linear(4, 2)
    optimizer = MVNGradW(model.parameters())
    if framework == "accelerate":
        from accelerate import Accelerator

        wrapper = Accelerator(cpu=True).prepare(optimizer)
    elif framework == "fabric":
        from lightning.fabric import Fabric

        model, wrapper = Fabric(accelerator="cpu").setup(model, optimizer)
    else:
        from lightning.pytorch.core.optimizer import LightningOptimizer

        wrapper = LightningOptimizer(optimizer)
    with pytest.raises(TypeError, match=rf"not {type(wrapper).__name__}; .* pass its \.optimizer"):
        mvngrad.release_gradients(wrapper)
    mvngrad.release_gradients(wrapper.optimizer)
    model(torch.ones(4)).sum().backward()
    if framework != "lightning":  # without a Trainer its wrapper cannot step
        wrapper.step()


# timm


def test_timm_makes_the_optimizer_by_name_with_layer_decay():
    import timm
    from timm.optim import create_optimizer_v2
    from timm.scheduler import CosineLRScheduler

    from mvngrad.integrations.timm import register

    assert register() == register()
    for name in register():
        made = create_optimizer_v2(torch.nn.Linear(2, 2), opt=name, lr=1e-3)
        assert (type(made).__name__.lower(), type(made).__module__) == (name.split("-")[-1], "mvngrad.optim.cells")
    model = timm.create_model("vit_tiny_patch16_224", num_classes=2, depth=2, embed_dim=16, num_heads=2, img_size=32)
    optimizer = create_optimizer_v2(model, opt="mvngradw", lr=1e-3, weight_decay=0.1, layer_decay=0.5, betas=(0.8, 0.9))
    assert type(optimizer) is MVNGradW
    assert {group["betas"] for group in optimizer.param_groups} == {(0.8, 0.9)}
    assert len({group["lr_scale"] for group in optimizer.param_groups}) > 1
    assert {group["lr"] for group in optimizer.param_groups} == {1e-3}
    CosineLRScheduler(optimizer, t_initial=8).step(1)
    assert len({group["lr"] for group in optimizer.param_groups}) > 1
    model(torch.randn(2, 3, 32, 32)).sum().backward()
    optimizer.step()


# torchao


@pytest.mark.gpu
@pytest.mark.parametrize("options", FORMATS, ids=IDS)
def test_torchao_keeps_the_state_on_the_host_and_resumes_bit_identically(options):
    offload = pytest.importorskip("torchao.optim").CPUOffloadOptimizer

    def start():
        torch.manual_seed(0)
        model = torch.nn.Sequential(torch.nn.Linear(64, 256), torch.nn.Tanh(), torch.nn.Linear(256, 64)).cuda()
        return model, offload(model.parameters(), MVNGradW, fused=True, lr=1e-2, **options)

    def train(model, optimizer, seeds):
        for seed in seeds:
            inputs = torch.randn(8, 64, generator=torch.Generator().manual_seed(seed)).cuda()
            (model(inputs) - inputs).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()

    model, optimizer = start()
    train(model, optimizer, range(3))
    saved = through_disk([model.state_dict(), optimizer.state_dict()])
    states = [state for inner in optimizer.optim_dict.values() for state in inner.state.values()]
    assert len(states) == 2  # the matrices; biases are too small, and stay on the device
    assert all(value.is_cpu for state in states for value in state.values())
    train(model, optimizer, range(3, 6))
    resumed, other = start()
    train(resumed, other, range(7, 8))  # makes pinned copies of the weights, which loading must replace
    resumed.load_state_dict(saved[0])
    for device, host in other.param_d2h_map.items():
        host.data.copy_(device.data)
    other.load_state_dict(saved[1])
    train(resumed, other, range(3, 6))
    assert_same_weights(model, resumed)
    plain, _ = start()
    train(plain, MVNGradW(plain.parameters(), lr=1e-2, **options), range(6))
    for one, two in zip(model.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(one, two, rtol=0, atol=1e-4 if "state_dtype" not in options else 5e-2)


@pytest.mark.parametrize("name", ["transformers", "lightning", "timm"])
def test_a_missing_framework_names_its_install_line(name):
    code = f"import sys; sys.modules[{name!r}] = None; import mvngrad.integrations.{name}"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.stderr.strip().endswith(f"pip install {name}")


def test_a_framework_that_lacks_a_part_is_not_called_missing(tmp_path):
    (tmp_path / "transformers.py").write_text("raise ModuleNotFoundError('no module named torchvision')\n")
    code = f"import sys; sys.path.insert(0, {str(tmp_path)!r}); import mvngrad.integrations.transformers"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.stderr.strip().endswith("ModuleNotFoundError: no module named torchvision")
    assert "pip install transformers" not in done.stderr
