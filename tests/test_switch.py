"""The way over from AdamW and back: what is exact, what is estimated and how well, and what is refused."""

import pytest
import torch
from family import OPTIMIZERS, equal, parameters, through_disk, train

import mvngrad
from mvngrad import MVNGrad, MVNGradW, from_adamw, to_adamw
from mvngrad.optim.switch import _variance_factor
from mvngrad.rule import Hyper

DTYPES = [None, torch.float32, torch.bfloat16, "int8"]


def load(optimizer, state_dict):
    optimizer.load_state_dict(through_disk(from_adamw(optimizer, state_dict)))


def pair(gradients, theirs, ours):
    """Two optimizers after the same gradients, whose first dimension is the step."""
    for g in gradients:
        for optimizer in (theirs, ours):
            optimizer.param_groups[0]["params"][0].grad = g
            optimizer.step()
    return tuple(each.state[each.param_groups[0]["params"][0]] for each in (theirs, ours))


@pytest.mark.parametrize("make", [make for make in OPTIMIZERS if make.decoupled], ids=lambda make: make.__name__)
@pytest.mark.parametrize("state_dtype", DTYPES, ids=str)
@pytest.mark.parametrize("source", [torch.optim.AdamW, mvngrad.AdamW], ids=["torch", "ours"])
def test_averages_that_both_have_are_copied(make, state_dtype, source):
    params = parameters((300,), (7, 5))
    adamw = source([{"params": params[:1], "weight_decay": 0.0}, {"params": params[1:]}], lr=3e-4, betas=(0.8, 0.97))
    train(adamw, 5)
    optimizer = make([{"params": params[:1]}, {"params": params[1:]}], state_dtype=state_dtype)
    load(optimizer, adamw.state_dict())
    assert [group["weight_decay"] for group in optimizer.param_groups] == [0.0, adamw.param_groups[1]["weight_decay"]]
    assert {(group["lr"], group["betas"]) for group in optimizer.param_groups} == {(3e-4, (0.8, 0.97))}
    exact = make([{"params": params[:1]}, {"params": params[1:]}])
    load(exact, adamw.state_dict())
    for p in params:
        theirs, ours = adamw.state[p], exact.state[p]
        names = {"m": "exp_avg", "v": "exp_avg_sq"} if "exp_avg" in theirs else {"m": "m", "v": "v"}
        assert ours["step"] == 5
        for name in make.rule.state_names:
            if name in names:
                assert torch.equal(ours[name], theirs[names[name]])
            else:
                assert ours[name].isfinite().all()
    converted = make([{"params": params[:1]}, {"params": params[1:]}], state_dtype=state_dtype)
    converted.load_state_dict(mvngrad.convert_state_dict(exact.state_dict(), state_dtype))
    for p in params:
        assert equal(list(optimizer.state[p].values()), list(converted.state[p].values()))
    train(optimizer, 2)


@pytest.mark.parametrize("make", [mvngrad.MVNGradW, mvngrad.AdaBeliefW, mvngrad.LaPropW], ids=lambda m: m.__name__)
@pytest.mark.parametrize("options", [{}, {"betas": (0.7, 0.95), "eps_s": 1e-6}], ids=["default", "other"])
def test_after_one_step_everything_is_exact(make, options):
    (x,), (y,) = parameters((64,)), parameters((64,))
    if "s" not in make.rule.state_names:
        options = {name: value for name, value in options.items() if name != "eps_s"}
    adamw = torch.optim.AdamW([x], betas=options.get("betas", (0.9, 0.999)))
    _, truth = pair(torch.randn(1, 64, generator=torch.Generator().manual_seed(0)), adamw, make([y], **options))
    optimizer = make([x], **options)
    load(optimizer, adamw.state_dict())
    for name in make.rule.state_names:
        torch.testing.assert_close(optimizer.state[x][name], truth[name], rtol=1e-5, atol=1e-12)


@pytest.mark.parametrize("steps", [2, 10, 60, 1500])
@pytest.mark.parametrize("snr", [0.0, 3.0])
def test_s_has_the_expectation_of_noise(steps, snr):
    """Over independent gradients: unbiased without a mean, else too large by 1 + snr^2 at most, and u as AdamW's."""
    (x,), (y,) = parameters((2000,), dtype=torch.float64), parameters((2000,), dtype=torch.float64)
    generator = torch.Generator().manual_seed(steps)
    gradients = snr + torch.randn(steps, 2000, generator=generator, dtype=torch.float64)
    adamw, betas = torch.optim.AdamW([x], betas=(0.9, 0.99)), (0.9, 0.99)
    _, truth = pair(gradients, adamw, MVNGradW([y], betas=betas))
    optimizer = MVNGradW([x])
    load(optimizer, adamw.state_dict())
    ratio = (optimizer.state[x]["s"].mean() / truth["s"].mean()).item()
    error = (optimizer.state[x]["u"] - truth["u"]).square().mean() / truth["u"].square().mean()
    if snr == 0:
        assert ratio == pytest.approx(1, abs=0.01)
        assert error < (0.1 if steps < 60 else 0.02)
    else:
        assert 1 < ratio < 1.01 * (1 + snr**2)
        assert (optimizer.state[x]["u"] / (1 - 0.9**steps)).mean() < 1 / 0.9


def test_rare_gradients_are_not_taken_for_a_mean_without_noise():
    """As in the rows of rare tokens: v - m^2 is small or negative just after such a gradient, and s is not."""
    (x,), (y,) = parameters((1000,)), parameters((1000,))
    generator, t = torch.Generator().manual_seed(0), 800
    gradients = torch.randn(t, 1000, generator=generator) * (torch.rand(t, 1000, generator=generator) < 0.01)
    adamw = torch.optim.AdamW([x])
    saved, truth = pair(gradients, adamw, MVNGradW([y]))
    optimizer = MVNGradW([x])
    load(optimizer, adamw.state_dict())

    def error(u):
        return ((u - truth["u"]).square().sum() / truth["u"].square().sum()).sqrt().item()

    difference = saved["exp_avg_sq"] / (1 - 0.999**t) - (saved["exp_avg"] / (1 - 0.9**t)).square()
    by_difference = saved["exp_avg"] / (0.9 * difference.clamp(min=1e-2 * saved["exp_avg_sq"])).sqrt()
    assert error(optimizer.state[x]["u"]) < 0.1
    assert error(by_difference.nan_to_num()) > 0.5


@pytest.mark.parametrize("options", [{}, {"lean": True}, {"beta_mean": 0.99}, {"z_clip": 0.5}], ids=str)
def test_there_and_back(options):
    """m and steps come back, and v in expectation; AdamW's steps are at most lr after it, for any gradients."""
    (x,) = parameters((5000,), dtype=torch.float64)
    adamw = torch.optim.AdamW([x], lr=2e-3)
    train(adamw, 30)
    before = through_disk(adamw.state_dict())
    optimizer = MVNGradW([x], **options)
    load(optimizer, before)
    adamw.load_state_dict(through_disk(to_adamw(optimizer)))
    if "z_clip" in options:
        assert optimizer.state[x]["u"].abs().max().item() == pytest.approx(0.5 * (1 - 0.9**30))
    after, saved = adamw.state[x], before["state"][0]
    torch.testing.assert_close(after["exp_avg"], saved["exp_avg"], rtol=1e-9, atol=1e-12)
    assert after["exp_avg_sq"].mean().item() == pytest.approx(saved["exp_avg_sq"].mean().item(), rel=0.01)
    assert ((after["exp_avg"] / (1 - 0.9**30)).square() <= after["exp_avg_sq"] / (1 - 0.999**30) * (1 + 1e-9)).all()
    assert (after["step"], adamw.param_groups[0]["lr"]) == (30, 2e-3)
    train(adamw, 2)


@pytest.mark.parametrize(("beta1", "beta_mean"), [(0.99, 0.5), (0.9, 0.99)])
def test_back_to_adamw_if_the_mean_has_a_decay_of_its_own(beta1, beta_mean):
    p, q = parameters((5000,), (5000,))
    ours = MVNGradW([p], lr=0.0, betas=(beta1, 0.999), beta_mean=beta_mean)
    adamw = torch.optim.AdamW([q], lr=0.0, betas=(beta1, 0.999))
    for _ in range(200):
        p.grad = q.grad = torch.randn(5000)
        ours.step()
        adamw.step()
    got, true = to_adamw(ours)["state"][0], adamw.state[q]
    assert got["exp_avg"].square().mean().item() == pytest.approx(true["exp_avg"].square().mean().item(), rel=0.05)
    assert got["exp_avg_sq"].mean().item() == pytest.approx(true["exp_avg_sq"].mean().item(), rel=0.05)


@pytest.mark.parametrize("make", OPTIMIZERS, ids=lambda make: make.__name__)
def test_back_to_torch_and_to_our_own_class(make):
    params = parameters((40,), (3, 4), dtype=torch.complex64)
    optimizer = make(params, lr=1e-2, state_dtype="int8" if make is MVNGrad else None)
    train(optimizer, 12)
    theirs = (torch.optim.AdamW if make.decoupled else torch.optim.Adam)(params)
    with torch.device("meta"):  # step counts are on the host, whatever the default device
        theirs.load_state_dict(to_adamw(optimizer))
    ours = (mvngrad.AdamW if make.decoupled else mvngrad.Adam)(params)
    ours.load_state_dict(mvngrad.convert_state_dict(to_adamw(optimizer), None))
    train(theirs, 1)
    for p in params:
        assert theirs.state[p]["exp_avg_sq"].isfinite().all()
        assert ours.state[p]["step"] == 12


def test_is_a_hook_that_leaves_other_state_dicts_alone():
    params = parameters((20,), (3,))
    adamw = torch.optim.AdamW(params)
    train(adamw, 3)
    optimizer = MVNGradW(params)
    optimizer.register_load_state_dict_pre_hook(from_adamw)
    optimizer.load_state_dict(adamw.state_dict())
    assert optimizer.state[params[0]]["step"] == 3
    train(optimizer, 1)
    own = optimizer.state_dict()
    assert from_adamw(optimizer, own) is own
    optimizer.load_state_dict(own)
    with pytest.raises(ValueError, match="not an optimizer's state_dict"):
        optimizer.load_state_dict({"model": {}})


@pytest.mark.parametrize("rounding_seed", [None, 7])
@pytest.mark.parametrize("state_dtype", ["bf16", "int8"])
def test_a_hook_on_our_adamw_resumes_its_own_state_bit_identically(state_dtype, rounding_seed):
    """An optimizer of one parameter chooses its seed by the first values, which the resumed one does not see."""
    whole, resumed = parameters((20, 30)), parameters((20, 30))
    optimizer = mvngrad.AdamW(whole, state_dtype=state_dtype, rounding_seed=rounding_seed)
    train(optimizer, 3)
    other = mvngrad.AdamW(resumed, state_dtype=state_dtype)
    other.register_load_state_dict_pre_hook(from_adamw)
    other.load_state_dict(through_disk(optimizer.state_dict()))
    resumed[0].data.copy_(whole[0].data)
    train(optimizer, 3)
    train(other, 3)
    assert equal(whole, resumed)


@pytest.mark.parametrize("make", [mvngrad.AdamW, MVNGradW])
def test_other_entries_of_state_are_kept(make):
    """Such as the slow weights of timm's Lookahead."""
    params = parameters((20,))
    adamw, optimizer, slow = mvngrad.AdamW(params), make(params), torch.full((20,), 7.0)
    train(adamw, 3)
    adamw.state[params[0]]["slow"] = slow
    load(optimizer, adamw.state_dict())
    assert torch.equal(optimizer.state[params[0]]["slow"], slow)
    train(optimizer, 1)


def test_state_before_the_first_step_and_of_frozen_parameters():
    params = parameters((20,), (3,))
    params[1].requires_grad_(False)
    adamw = mvngrad.AdamW(params)
    adamw.init_state()
    optimizer = MVNGradW(params)
    load(optimizer, adamw.state_dict())
    assert {name: value.abs().sum().item() for name, value in optimizer.state[params[0]].items()} == dict.fromkeys(
        ("step", "m", "s", "u"), 0.0
    )
    assert params[1] not in optimizer.state
    load(optimizer, torch.optim.AdamW(params, lr=0.5).state_dict())
    assert optimizer.param_groups[0]["lr"] == 0.5
    assert not optimizer.state


def test_weight_decay_keeps_its_size_where_only_one_is_decoupled_from_lr():
    params = parameters((20,), (3,))
    adamw = torch.optim.AdamW(params, lr=1e-2, weight_decay=0.1)
    train(adamw, 2)
    optimizer = MVNGradW(params, lr=0.5, decouple_lr=True)
    load(optimizer, adamw.state_dict())
    assert optimizer.param_groups[0]["weight_decay"] == pytest.approx(0.05)
    assert to_adamw(optimizer)["param_groups"][0]["weight_decay"] == pytest.approx(0.1)
    ours = mvngrad.AdamW(params, lr=0.25, decouple_lr=True, weight_decay=1e-3)
    train(ours, 2)
    load(optimizer := MVNGradW(params), ours.state_dict())
    assert optimizer.param_groups[0]["weight_decay"] == pytest.approx(4e-3)


@pytest.mark.parametrize("state_dtype", [None, "int8"])
def test_master_weights_are_kept(state_dtype):
    params = parameters((300,), dtype=torch.bfloat16)
    adamw = mvngrad.AdamW(params, lr=1e-4, master_bits=32, state_dtype=state_dtype)
    train(adamw, 3)
    optimizer = MVNGradW(params, master_bits=32, state_dtype=state_dtype)
    load(optimizer, adamw.state_dict())
    assert adamw.state[params[0]]["low"].any()
    assert torch.equal(optimizer.state[params[0]]["low"], adamw.state[params[0]]["low"])
    train(optimizer, 1)
    load(optimizer, through_disk(to_adamw(optimizer)))  # masters begin at the parameters
    assert not optimizer.state[params[0]]["low"].any()
    for bits in (24, None):
        with pytest.raises(ValueError, match=f"has master_bits={bits}: make the optimizer with master_bits=32"):
            load(MVNGradW(params, master_bits=bits), adamw.state_dict())


def test_what_does_not_fit_is_refused():
    params = parameters((20,), (3,))
    adam = torch.optim.Adam(params, weight_decay=0.1)
    train(adam, 2)
    with pytest.raises(ValueError, match=r"weight_decay=0.1 .* is part of .*: load it into mvngrad.MVNGrad$"):
        from_adamw(MVNGradW(params), adam.state_dict())
    from_adamw(MVNGrad(params), adam.state_dict())
    with pytest.raises(ValueError, match=r"hold \[2\] parameters, the optimizer.s \[1, 1\]: give both the same"):
        from_adamw(MVNGrad([{"params": [p]} for p in params]), adam.state_dict())
    with pytest.raises(ValueError, match="maximize=False, and MVNGrad has maximize=True: make the optimizer with"):
        from_adamw(MVNGrad(params, maximize=True), adam.state_dict())
    amsgrad = torch.optim.AdamW(params, amsgrad=True)
    train(amsgrad, 2)
    with pytest.raises(ValueError, match="without amsgrad"):
        from_adamw(MVNGradW(params), amsgrad.state_dict())
    with pytest.raises(ValueError, match=r"load mvngrad.from_adamw\(optimizer, state_dict\)"):
        MVNGradW(params).load_state_dict(adam.state_dict())


def test_what_is_not_a_state_dict_or_optimizer_is_named():
    weight = torch.nn.Parameter(torch.ones(3))
    theirs, ours = torch.optim.AdamW([weight]), mvngrad.MVNGradW([weight])
    with pytest.raises(TypeError, match="to_adamw: pass an optimizer of mvngrad; got AdamW"):
        mvngrad.to_adamw(theirs)
    with pytest.raises(TypeError, match="convert_state_dict: pass a state_dict, not a MVNGradW"):
        mvngrad.convert_state_dict(ours, "int8")
    with pytest.raises(ValueError, match=r"load mvngrad\.from_adamw"):
        ours.load_state_dict(theirs.state_dict())  # before its first step
    checkpoint = {"model": {}, "optim": ours.state_dict()}
    with pytest.raises(ValueError, match="it looks like a whole checkpoint: pass its 'optim'"):
        ours.load_state_dict(from_adamw(ours, checkpoint))
    sgd = torch.optim.SGD([weight], momentum=0.9)
    train(sgd, 1)
    with pytest.raises(ValueError, match="of other optimizers only Adam and AdamW can be converted"):
        ours.load_state_dict(from_adamw(ours, sgd.state_dict()))
    other = mvngrad.MVNGradW([torch.nn.Parameter(torch.ones(5))])
    other.init_state()
    with pytest.raises(ValueError, match="is it the checkpoint of another model"):
        ours.load_state_dict(other.state_dict())


@pytest.mark.parametrize("decouple_lr", [False, True])
def test_a_one_cycle_schedule_goes_on_after_a_switch(decouple_lr):
    """It keeps its max_lr in the groups, as decouple_lr keeps one of its own."""
    param = torch.nn.Parameter(torch.ones(3))

    def start(make, **options):
        optimizer = make([param], **({"decouple_lr": decouple_lr} if make is mvngrad.MVNGradW else {}))
        return optimizer, torch.optim.lr_scheduler.OneCycleLR(optimizer, max_lr=0.1, total_steps=20, **options)

    def take_step(optimizer, scheduler):
        param.grad = torch.ones(3)
        optimizer.step()
        scheduler.step()
        return optimizer.param_groups[0]["lr"]

    ours, schedule = start(mvngrad.MVNGradW)
    take_step(ours, schedule)
    adamw, its_schedule = start(torch.optim.AdamW)
    adamw.load_state_dict(mvngrad.to_adamw(ours))
    its_schedule.load_state_dict(schedule.state_dict())
    assert take_step(adamw, its_schedule) == take_step(ours, schedule)
    back, _ = start(mvngrad.MVNGradW)
    back.load_state_dict(mvngrad.from_adamw(back, adamw.state_dict()))
    schedule = torch.optim.lr_scheduler.OneCycleLR(back, max_lr=0.1, total_steps=20, last_epoch=1)
    assert take_step(back, schedule) == take_step(adamw, its_schedule)


def test_arguments_in_the_wrong_order_are_named():
    param = torch.nn.Parameter(torch.ones(2))
    ours, adamw = MVNGradW([param]), torch.optim.AdamW([param])
    for arguments in ((ours, adamw), (adamw.state_dict(), ours), (adamw, ours.state_dict())):
        with pytest.raises(TypeError, match=r"pass an optimizer of mvngrad, then the state_dict\(\) of the AdamW"):
            from_adamw(*arguments)


def test_the_variance_factor_is_continuous_where_beta2_is_beta1_squared():
    """There the general formula is 0/0, and near it mostly rounding."""
    near, at = (_variance_factor(Hyper(beta1=0.85, beta2=beta2), 2) for beta2 in (0.85**2 + 1e-4, 0.7225))
    assert at == pytest.approx(near, rel=1e-3)
