"""GPT-2 against an independent forward pass and Hugging Face's; its loss in parts against the plain one."""

import lzma
import warnings
from importlib.util import find_spec

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from real import DATA
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from vision import torchvision

from mvngrad_lab.tasks.language.data.prepare import load_encoding
from mvngrad_lab.tasks.language.model import (
    GPT2,
    GPT2_30M,
    GPT2_124M,
    VOCABULARY,
    Shape,
    from_huggingface,
    to_huggingface,
)

TINY = Shape(layers=3, width=24, heads=3, context=16, vocabulary=67)


def tiny(dtype=torch.float64, **settings):
    """A small GPT-2 in which no weight is 0 or 1 by design."""
    model = GPT2(TINY, **settings).to(dtype)
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, mean=0.1, std=0.3)
    return model


def tokens(batch=3, length=TINY.context, vocabulary=TINY.vocabulary):
    drawn = torch.randint(vocabulary, (batch, length + 1))
    return drawn[:, :-1], drawn[:, 1:]


def plain(model, inputs, targets):
    return F.cross_entropy(model(inputs).flatten(0, 1), targets.flatten())


def gradients(model, loss):
    return torch.autograd.grad(loss, list(model.parameters()))


# The network


def numpy_logits(weights, sequence, layers, heads):
    """GPT-2 for one sequence, one head at a time, with the mask and the softmax written out."""

    def norm(x, name):
        centred = x - x.mean(-1, keepdims=True)
        scaled = centred / np.sqrt((centred**2).mean(-1, keepdims=True) + 1e-5)
        return scaled * weights[f"{name}.weight"] + weights[f"{name}.bias"]

    def linear(x, name):
        return x @ weights[f"{name}.weight"].T + weights[f"{name}.bias"]

    length = len(sequence)
    x = weights["token_embedding.weight"][sequence] + weights["position_embedding.weight"][:length]
    for layer in (f"blocks.{i}" for i in range(layers)):
        queries, keys, values = np.split(linear(norm(x, f"{layer}.attention_norm"), f"{layer}.attention_input"), 3, 1)
        size = queries.shape[1] // heads
        mixed = np.zeros_like(queries)
        for head in range(heads):
            own = slice(head * size, (head + 1) * size)
            for now in range(length):
                scores = keys[: now + 1, own] @ queries[now, own] / np.sqrt(size)
                shares = np.exp(scores - scores.max())
                mixed[now, own] = shares / shares.sum() @ values[: now + 1, own]
        x = x + linear(mixed, f"{layer}.attention_output")
        hidden = linear(norm(x, f"{layer}.mlp_norm"), f"{layer}.mlp_input")
        hidden = 0.5 * hidden * (1 + np.tanh(np.sqrt(2 / np.pi) * (hidden + 0.044715 * hidden**3)))
        x = x + linear(hidden, f"{layer}.mlp_output")
    return norm(x, "final_norm") @ weights["token_embedding.weight"].T


def test_logits_equal_a_forward_pass_in_numpy():
    model, (inputs, _) = tiny(), tokens(batch=2, length=11)
    weights = {name: value.numpy() for name, value in model.state_dict().items()}
    with torch.no_grad():
        logits = model(inputs)
    for row, sequence in zip(logits, inputs, strict=True):
        expected = numpy_logits(weights, sequence.numpy(), TINY.layers, TINY.heads)
        np.testing.assert_allclose(row.numpy(), expected, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize(
    ("shape", "padded", "unpadded"), [(GPT2_30M, 30_160_896, 30_142_848), (GPT2_124M, 124_475_904, 124_439_808)]
)
def test_sizes_are_as_published(shape, padded, unpadded):
    """124,439,808 is Hugging Face's count for gpt2, whose vocabulary is not padded."""
    with torch.device("meta"):
        model = GPT2(shape)
    count = sum(parameter.numel() for parameter in model.parameters())
    assert (count, count - (shape.vocabulary - VOCABULARY) * shape.width) == (padded, unpadded)


def test_initial_weights_have_gpt2s_deviations():
    shape = Shape(layers=8, width=128, heads=4, context=64, vocabulary=500)
    for name, parameter in GPT2(shape).named_parameters():
        if name.endswith("bias"):
            assert (parameter == 0).all()
        elif "norm" in name:
            assert (parameter == 1).all()
        else:
            expected = 0.02 / 4 if name.endswith("output.weight") else 0.02
            assert parameter.std().item() == pytest.approx(expected, rel=0.05), name


def test_a_sequence_longer_than_the_context_is_refused():
    with pytest.raises(ValueError, match=r"\(3, 17\) are longer than the context 16"):
        GPT2(TINY)(tokens(length=17)[0])


# The loss


@pytest.mark.parametrize("rows", [1, 7, 16, 48, 1000])
def test_loss_in_parts_equals_the_plain_one(rows):
    model, batch = tiny(loss_rows=rows), tokens()
    expected = plain(model, *batch)
    loss = model(*batch)
    torch.testing.assert_close(loss, expected, rtol=1e-12, atol=1e-12)
    with torch.no_grad():
        torch.testing.assert_close(model(*batch), expected, rtol=1e-12, atol=1e-12)
    # Halved, as by gradient accumulation.
    for ours, theirs in zip(gradients(model, loss / 2), gradients(model, expected / 2), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-9, atol=1e-12)


def test_loss_in_parts_equals_the_plain_one_under_autocast():
    model, batch = GPT2(TINY, loss_rows=20), tokens(batch=4)
    exact = gradients(model, plain(model, *batch))
    with torch.autocast("cpu", torch.bfloat16):
        expected, loss = plain(model, *batch), model(*batch)
    assert loss.dtype == torch.float32
    torch.testing.assert_close(loss, expected.float(), rtol=1e-2, atol=0)
    rounding = [torch.dist(a, b) for a, b in zip(gradients(model, expected), exact, strict=True)]
    for ours, theirs, bound in zip(gradients(model, loss), exact, rounding, strict=True):
        assert ours.dtype == torch.float32
        assert torch.dist(ours, theirs) <= 1.5 * bound + 1e-6


@pytest.mark.parametrize("enabled", [False, True])
def test_residual_stream_has_autocasts_dtype(enabled):
    model, seen = GPT2(TINY), []
    model.blocks[-1].register_forward_pre_hook(lambda block, given: seen.append(given[0].dtype))
    with torch.autocast("cpu", torch.bfloat16, enabled=enabled):
        model(*tokens())
    assert seen == [torch.bfloat16 if enabled else torch.float32]


@pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning")  # by the compiler itself
def test_loss_compiles_to_one_graph():
    model, batch = tiny(loss_rows=20), tokens()
    compiled = torch.compile(model, backend="aot_eager", fullgraph=True, dynamic=False)
    ours, theirs = (gradients(model, loss(*batch)) for loss in (compiled, model))
    for a, b in zip(ours, theirs, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-12, atol=1e-12)


class Largest(TorchDispatchMode):
    """The most elements any tensor had that an operation made."""

    size = 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        made = function(*args, **(kwargs or {}))
        self.size = max([self.size, *(leaf.numel() for leaf in tree_leaves(made) if isinstance(leaf, torch.Tensor))])
        return made


def test_logits_of_the_whole_batch_are_never_in_memory():
    shape = Shape(layers=1, width=8, heads=2, context=32, vocabulary=1000)
    model, batch = GPT2(shape, loss_rows=16), tokens(batch=8, length=32, vocabulary=1000)
    saved = []
    with torch.autograd.graph.saved_tensors_hooks(lambda x: saved.append(x.numel()) or x, lambda x: x):
        with Largest() as parts:
            model(*batch).backward()
        kept, saved[:] = max(saved), []
        with Largest() as whole:
            plain(model, *batch).backward()
    logits = 8 * 32 * 1000
    assert (parts.size, whole.size) == (16 * 1000, logits)
    assert kept <= 16 * 1000
    assert max(saved) == logits


# Hugging Face's


def huggingface(shape):
    """A GPT2LMHeadModel whose weights are drawn as ours are."""
    if find_spec("transformers") is None:
        pytest.skip("needs transformers")
    if find_spec("torchvision"):
        torchvision()  # transformers imports it, and that works on a CPU only after this
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        from transformers import GPT2Config, GPT2LMHeadModel

        sizes = {"n_layer": shape.layers, "n_embd": shape.width, "n_head": shape.heads, "n_positions": shape.context}
        return GPT2LMHeadModel(GPT2Config(vocab_size=VOCABULARY, **sizes)).eval()


def real_text(length):
    """The first tokens of WikiText-103's official validation text."""
    path = DATA / "wikitext103" / "wiki.valid.tokens.xz"
    if not path.exists():
        pytest.skip("needs WikiText-103's validation text and GPT-2's vocabulary")
    pytest.importorskip("tiktoken", reason="needs tiktoken")
    text = lzma.decompress(path.read_bytes())[: 20 * length].decode(errors="ignore")
    return torch.tensor([load_encoding(DATA / "gpt2_bpe").encode_ordinary(text)[:length]])


@pytest.mark.slow
def test_124m_predicts_the_same_as_hugging_faces_on_real_text():
    theirs, text = huggingface(GPT2_124M), real_text(200)
    ours = GPT2(GPT2_124M)
    ours.load_state_dict(from_huggingface(theirs.state_dict()))
    with torch.no_grad():
        logits = ours(text)
        expected = theirs(text).logits
        torch.testing.assert_close(logits[..., :VOCABULARY], expected, rtol=0, atol=2e-5)
        assert (logits[..., VOCABULARY:] == 0).all()
        for parameter in ours.parameters():
            parameter.add_(0.01 * torch.randn_like(parameter))
        theirs.load_state_dict(to_huggingface(ours.state_dict()))
        torch.testing.assert_close(ours(text)[..., :VOCABULARY], theirs(text).logits, rtol=1e-4, atol=1e-4)


def test_conversion_to_hugging_face_and_back_changes_nothing():
    state = tiny().state_dict()
    exported = to_huggingface(state, vocabulary=60)
    assert exported["transformer.h.0.attn.c_attn.weight"].shape == (24, 72)
    assert exported["lm_head.weight"] is exported["transformer.wte.weight"]
    back = from_huggingface(exported, vocabulary=67)
    assert back.keys() == state.keys()
    state["token_embedding.weight"][60:] = 0
    assert all(torch.equal(back[name], state[name]) for name in state)
    with pytest.raises(ValueError, match="vocabulary=50 is smaller than the 60 rows"):
        from_huggingface(exported, vocabulary=50)
