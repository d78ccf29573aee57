"""Which parameters of a model Muon steps, and which it leaves to AdamW."""

import re
from collections.abc import Iterable
from typing import Any

from torch import Tensor, nn

from trainfast.report import Report, Table

HIDDEN = "matrix of a hidden layer"
NOT_2D = "not 2-D"
BIAS = "bias"
EMBEDDING = "embedding"
TIED = "embedding, tied to a head"
HEAD = "output head"
NORM = "norm"

# Words of a parameter's name, and the last words of its module's name.
_EMBEDDINGS = re.compile(r"(^|[._])(w[tp]e|emb|embs|\w*embed(ding)?s?)([._]|$)", re.I)
_HEADS = re.compile(r"(^|[._])(head|classifier|score|unembed)$", re.I)
_MOST_NAMES = 3  # in a row of the table


class MuonAssignment(Report):
    """What steps each parameter, and why.

    Attributes:
        reasons: the reason by parameter's name; HIDDEN means Muon, all others AdamW.
    """

    def __init__(self, named: list[tuple[str, Tensor]], reasons: dict[str, str]):
        self.reasons = reasons
        self._sizes = {name: tensor.numel() for name, tensor in named}

    def tables(self) -> list[Table]:
        rows: list[tuple[Any, ...]] = []
        for reason in sorted(set(self.reasons.values()), key=lambda r: r != HIDDEN):
            names = [name for name, why in self.reasons.items() if why == reason]
            shown = ", ".join(names[:_MOST_NAMES])
            if len(names) > _MOST_NAMES:
                shown += ", ..."
            stepped_by = "Muon" if reason == HIDDEN else "AdamW"
            elements = sum(self._sizes[name] for name in names)
            rows.append((stepped_by, reason, len(names), elements, shown))
        columns = ("optimizer", "reason", "tensors", "elements", "names")
        return [Table("parameters of Muon", columns, rows)]

    def to_dict(self) -> dict[str, Any]:
        return {"reasons": self.reasons}


def assign(params: Any) -> tuple[list[tuple[str, Tensor]], MuonAssignment] | None:
    """The named parameters and their assignment; None where the caller has chosen.

    The caller has chosen with a list of tensors or of param groups.
    """
    if isinstance(params, nn.Module):
        named: list[tuple[str, Tensor]] = list(params.named_parameters())
        reasons = _by_module(params)
    elif isinstance(params, list) and params and all(map(_is_named, params)):
        named = params
        reasons = {name: _by_name(name, tensor) for name, tensor in named}
    else:
        return None
    return named, MuonAssignment(named, reasons)


def _is_named(entry: Any) -> bool:
    return isinstance(entry, tuple) and len(entry) == 2 and isinstance(entry[0], str)


def _by_name(name: str, tensor: Tensor) -> str:
    module, _, own = name.rpartition(".")
    if tensor.ndim != 2:
        return NOT_2D
    if _EMBEDDINGS.search(name):
        return EMBEDDING
    if _HEADS.search(module):
        return HEAD
    return BIAS if own.endswith("bias") else HIDDEN


def _by_module(model: nn.Module) -> dict[str, str]:
    """The reason by name, from the modules that hold a parameter and from its name."""
    names = {id(tensor): name for name, tensor in model.named_parameters()}
    reasons = {
        name: _by_name(name, tensor) for name, tensor in model.named_parameters()
    }
    heads = {id(module) for module in _heads(model)}
    for module in model.modules():
        for tensor in module.parameters(recurse=False):
            name = names[id(tensor)]
            if tensor.ndim != 2:
                continue
            known = reasons[name]
            if isinstance(module, nn.Embedding | nn.EmbeddingBag):
                reasons[name] = TIED if known in (HEAD, TIED) else EMBEDDING
            elif known == EMBEDDING and isinstance(module, nn.Linear):
                reasons[name] = TIED if _holds_embedding(model, tensor) else EMBEDDING
            elif "Norm" in type(module).__name__:
                reasons[name] = NORM
            elif id(module) in heads and known == HIDDEN:
                reasons[name] = HEAD
    return reasons


def _holds_embedding(model: nn.Module, tensor: Tensor) -> bool:
    return any(
        isinstance(module, nn.Embedding) and module.weight is tensor
        for module in model.modules()
    )


def _heads(model: nn.Module) -> Iterable[nn.Module]:
    """The output heads: what the model says, else the last Linear of all.

    A model whose heads are known by name, or are tied to an embedding, has no other;
    nor has one that ends in a list of blocks.
    """
    told = getattr(model, "get_output_embeddings", None)
    head = told() if callable(told) else None
    if head is not None:
        return [head]
    linears = [(n, m) for n, m in model.named_modules() if isinstance(m, nn.Linear)]
    if not linears or any(
        _HEADS.search(name) or _holds_embedding(model, module.weight)
        for name, module in linears
    ):
        return []
    name, last = linears[-1]
    parts = name.split(".")
    above = (".".join(parts[:depth]) for depth in range(1, len(parts)))
    if any(isinstance(model.get_submodule(path), nn.ModuleList) for path in above):
        return []
    return [last]
