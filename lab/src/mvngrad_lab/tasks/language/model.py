"""GPT-2, the network of the paper's language-model experiments, and its weights as Hugging Face names them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from mvngrad_lab.tasks.language.kernels.cross_entropy import cross_entropy
from mvngrad_lab.tasks.language.kernels.gelu import gelu

VOCABULARY = 50257
"""Tokens of GPT-2's byte pair encoding."""
PADDED_VOCABULARY = 50304
"""The next multiple of 128, for faster matrix products on a GPU. The 47 additional rows are classes that are never a
target: their logits enter the loss, and training makes them small."""


@dataclass(frozen=True)
class Shape:
    """How large a GPT-2 is."""

    layers: int
    width: int
    heads: int
    context: int
    vocabulary: int = PADDED_VOCABULARY


GPT2_TINY = Shape(layers=2, width=64, heads=4, context=64)
"""For tests: a CPU trains it in a minute."""
GPT2_30M = Shape(layers=6, width=384, heads=6, context=512)
GPT2_124M = Shape(layers=12, width=768, heads=12, context=1024)


class Block(nn.Module):
    """Attention and a two-layer perceptron, each with a layer norm before it and a residual connection."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        width = shape.width
        self.heads = shape.heads
        self.attention_norm = nn.LayerNorm(width)
        self.attention_input = nn.Linear(width, 3 * width)
        self.attention_output = nn.Linear(width, width)
        self.mlp_norm = nn.LayerNorm(width)
        self.mlp_input = nn.Linear(width, 4 * width)
        self.mlp_output = nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self._attention(self.attention_norm(x))
        hidden = gelu(self.mlp_input, self.mlp_norm(x))
        output: Tensor = self.mlp_output(hidden)
        return x + output

    def _attention(self, x: Tensor) -> Tensor:
        heads = self.attention_input(x).unflatten(2, (3, self.heads, -1)).transpose(1, 3)  # [batch, head, 3, time, ..]
        query, key, value = heads.unbind(2)
        mixed = F.scaled_dot_product_attention(query, key, value, is_causal=True)
        projected: Tensor = self.attention_output(mixed.transpose(1, 2).flatten(2))
        return projected


def _cast_residual(x: Tensor) -> Tensor:
    """Cast to autocast's dtype, so that the residual stream has it.

    Autocast alone leaves the residual stream in float32. FSDP with bfloat16 parameters has it in bfloat16, as most
    training of language models does; so it is in all modes here, and half the bytes are moved.
    """
    device = x.device.type
    return x.to(torch.get_autocast_dtype(device)) if torch.is_autocast_enabled(device) else x


class GPT2(nn.Module):
    """Radford et al., 2019: learned positions, layer norm first, tied input and output embeddings.

    Weights are normal with standard deviation 0.02, those that write to the residual stream with 0.02/sqrt(2 layers);
    biases are 0. `loss_rows` are the tokens whose logits the loss holds at a time.

    >>> sum(p.numel() for p in GPT2(GPT2_30M).parameters())
    30160896
    """

    def __init__(self, shape: Shape, loss_rows: int = 8192) -> None:
        super().__init__()
        self.shape, self.loss_rows = shape, loss_rows
        self.token_embedding = nn.Embedding(shape.vocabulary, shape.width)
        self.position_embedding = nn.Embedding(shape.context, shape.width)
        self.blocks = nn.ModuleList([Block(shape) for _ in range(shape.layers)])
        self.final_norm = nn.LayerNorm(shape.width)
        for name, parameter in self.named_parameters():
            if name.endswith("bias"):
                nn.init.zeros_(parameter)
            elif parameter.dim() > 1:
                residual = name.endswith("_output.weight")
                nn.init.normal_(parameter, std=0.02 / (2 * shape.layers) ** 0.5 if residual else 0.02)

    def forward(self, tokens: Tensor, targets: Tensor | None = None) -> Tensor:
        """Logits [batch, time, vocabulary], or the mean loss if there are `targets` [batch, time].

        The loss never holds the logits of the whole batch. It is computed in forward because DDP and FSDP wrap that.
        """
        length = tokens.shape[1]
        if length > self.shape.context:
            raise ValueError(f"tokens of shape {tuple(tokens.shape)} are longer than the context {self.shape.context}")
        x = _cast_residual(self.token_embedding(tokens) + self.position_embedding.weight[:length])
        for block in self.blocks:
            x = block(x)
        x = self.final_norm(x)
        if targets is None:
            return F.linear(x, self.token_embedding.weight)
        return cross_entropy(x.flatten(0, 1), self.token_embedding.weight, targets.flatten(), self.loss_rows)


def from_huggingface(state: Mapping[str, Tensor], vocabulary: int = PADDED_VOCABULARY) -> dict[str, Tensor]:
    """Convert the state_dict of a GPT2LMHeadModel to one of `GPT2`: matrices are transposed, and the vocabulary is
    padded with zero rows, whose logits are 0.
    """
    layers = 1 + max(int(name.split(".")[2]) for name in state if name.startswith("transformer.h."))
    converted = {ours: _convert(state[theirs], ours) for ours, theirs in _names(layers).items()}
    rows = len(embedding := converted["token_embedding.weight"])
    if rows > vocabulary:
        raise ValueError(f"vocabulary={vocabulary} is smaller than the {rows} rows of {_TOKENS}")
    converted["token_embedding.weight"] = F.pad(embedding, (0, 0, 0, vocabulary - rows))
    return converted


def to_huggingface(state: Mapping[str, Tensor], vocabulary: int = VOCABULARY) -> dict[str, Tensor]:
    """Convert the state_dict of a `GPT2` to one of a GPT2LMHeadModel, without the rows that pad the vocabulary."""
    layers = 1 + max(int(name.split(".")[1]) for name in state if name.startswith("blocks."))
    converted = {theirs: _convert(state[ours], ours) for ours, theirs in _names(layers).items()}
    converted[_TOKENS] = converted[_TOKENS][:vocabulary].contiguous()
    return {**converted, "lm_head.weight": converted[_TOKENS]}


_TOKENS = "transformer.wte.weight"
_PARTS = {
    "attention_norm": "ln_1",
    "attention_input": "attn.c_attn",
    "attention_output": "attn.c_proj",
    "mlp_norm": "ln_2",
    "mlp_input": "mlp.c_fc",
    "mlp_output": "mlp.c_proj",
}


def _names(layers: int) -> dict[str, str]:
    """Hugging Face's name of each of our weights."""
    modules = {"final_norm": "transformer.ln_f"} | {
        f"blocks.{layer}.{ours}": f"transformer.h.{layer}.{theirs}"
        for layer in range(layers)
        for ours, theirs in _PARTS.items()
    }
    names = {f"{a}.{kind}": f"{b}.{kind}" for a, b in modules.items() for kind in ("weight", "bias")}
    return {"token_embedding.weight": _TOKENS, "position_embedding.weight": "transformer.wpe.weight", **names}


def _convert(value: Tensor, name: str) -> Tensor:
    """A copy of a weight by our name, transposed if it is a matrix: Hugging Face stores these as [inputs, outputs]."""
    return value.T.contiguous() if name.endswith(("_input.weight", "_output.weight")) else value.clone()
